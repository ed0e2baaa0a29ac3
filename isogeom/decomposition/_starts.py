"""Starting dictionaries for Semi-NMF: unit atoms as rows, in the accumulator's dtype."""

from __future__ import annotations

import numpy as np

from isogeom import _random, _xp
from isogeom._linalg import row_norms
from isogeom._xp import Array, Namespace
from isogeom.decomposition._rows import Rows

# k-means runs on at most this many rows, or this many per atom if that is more: it only has to find a start.
_KMEANS_ROWS = 2048
_KMEANS_ROWS_PER_ATOM = 20
_LLOYD_STEPS = 10


def unit_rows(D: Array) -> tuple[Array, Array]:
    """Return `D` with rows of unit norm, and their former norms; a zero row becomes a coordinate axis (norm 0)."""
    xp = _xp.array_namespace(D)
    # The largest entry is divided out first, so that the squares neither overflow nor vanish.
    largest = xp.max(xp.abs(D), axis=1, keepdims=True)
    scaled = D / xp.where(largest > 0, largest, xp.ones_like(largest))
    norms = row_norms(scaled)
    k, d = D.shape
    axes = xp.astype(
        xp.expand_dims(xp.arange(k, device=_xp.device(D)) % d, axis=1)
        == xp.expand_dims(xp.arange(d, device=_xp.device(D)), axis=0),
        D.dtype,
    )
    zero = xp.expand_dims(norms, axis=1) == 0
    unit = xp.where(zero, axes, scaled / xp.where(zero, xp.ones_like(largest), xp.expand_dims(norms, axis=1)))
    return unit, norms * largest[:, 0]


def random_start(X: Array, k: int, rng: np.random.Generator) -> Array:
    """Return `k` Gaussian directions."""
    xp = _xp.array_namespace(X)
    reference = xp.zeros((1,), dtype=_xp.accumulator_dtype(xp, _xp.device(X)), device=_xp.device(X))
    return unit_rows(_random.standard_normal(rng, (k, X.shape[1]), reference))[0]


def kmeans_size(k: int) -> int:
    """Return the largest number of rows that k-means looks at."""
    return max(_KMEANS_ROWS, _KMEANS_ROWS_PER_ATOM * k)


def kmeans_rows(rows: Rows, n_samples: int, k: int, rng: np.random.Generator) -> Array:
    """Return the rows that k-means looks at: all of them, or a sample without replacement."""
    xp = rows.xp
    m = min(n_samples, kmeans_size(k))
    chosen = np.sort(rng.choice(n_samples, size=m, replace=False)) if m < n_samples else np.arange(n_samples)
    parts = []
    for place, block in rows:
        inside = chosen[(chosen >= place.start) & (chosen < place.stop)] - place.start
        if inside.size:
            parts.append(xp.take(block, xp.asarray(inside, dtype=xp.int64, device=rows.device), axis=0))
    return parts[0] if len(parts) == 1 else xp.concat(parts, axis=0)


def kmeans_start(X: Array, k: int, rng: np.random.Generator) -> Array:
    """Return the directions of `k` k-means centres: k-means++ seeds, then Lloyd steps, on a sample of the rows.

    All draws are made on the host, so that every library gets the same centres up to rounding.
    """
    xp = _xp.array_namespace(X)
    n = X.shape[0]
    m = min(n, kmeans_size(k))
    if m < n:
        chosen = np.sort(rng.choice(n, size=m, replace=False))
        X = xp.take(X, _xp.asarray_like(chosen, X, dtype=xp.int64), axis=0)
    X = xp.astype(X, _xp.accumulator_dtype(xp, _xp.device(X)))
    centres = _seeds(xp, X, rng.random(k))
    squares = xp.sum(X * X, axis=1, keepdims=True)
    labels = xp.arange(k, device=_xp.device(X))
    for _ in range(_LLOYD_STEPS):
        nearest = xp.argmin(_squared_distances(xp, X, squares, centres), axis=1)
        members = xp.astype(xp.expand_dims(nearest, axis=1) == xp.expand_dims(labels, axis=0), X.dtype)
        counts = xp.expand_dims(xp.sum(members, axis=0), axis=1)
        means = xp.matmul(xp.matrix_transpose(members), X) / xp.clip(counts, 1, None)
        centres = xp.where(counts > 0, means, centres)
    return unit_rows(centres)[0]


def _seeds(xp: Namespace, X: Array, draws: np.ndarray) -> Array:
    """Return k-means++ seeds: each next row with probability proportional to its squared distance to the seeds."""
    m = X.shape[0]
    squares = xp.sum(X * X, axis=1, keepdims=True)
    first = min(int(draws[0] * m), m - 1)
    seeds = [X[first : first + 1, :]]
    nearest = _squared_distances(xp, X, squares, seeds[0])[:, 0]
    for draw in draws[1:]:
        total = float(xp.sum(nearest))
        if total > 0:
            below = xp.cumulative_sum(nearest) <= float(draw) * total
            index = min(int(xp.count_nonzero(below)), m - 1)
        else:
            # Every row already is a seed (fewer distinct rows than atoms): repeat one.
            index = min(int(draw * m), m - 1)
        seeds.append(X[index : index + 1, :])
        nearest = xp.minimum(nearest, _squared_distances(xp, X, squares, seeds[-1])[:, 0])
    return xp.concat(seeds, axis=0)


def _squared_distances(xp: Namespace, X: Array, squares: Array, centres: Array) -> Array:
    cross = xp.matmul(X, xp.matrix_transpose(centres))
    return xp.clip(squares - 2 * cross + xp.expand_dims(xp.sum(centres * centres, axis=1), axis=0), 0, None)
