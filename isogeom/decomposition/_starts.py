"""Starting dictionaries for Semi-NMF: unit atoms as rows, in the accumulator's dtype."""

from __future__ import annotations

import numpy as np

from isogeom import _random, _xp
from isogeom._linalg import eigh_descending, row_norms
from isogeom._xp import Array, Namespace

# k-means runs on at most this many rows, or this many per atom if that is more: it only has to find a start.
_KMEANS_ROWS = 4096
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


def kmeans_start(X: Array, k: int, rng: np.random.Generator) -> Array:
    """Return the directions of `k` k-means centres: k-means++ seeds, then Lloyd steps, on a sample of the rows.

    All draws are made on the host, so that every library gets the same centres up to rounding.
    """
    xp = _xp.array_namespace(X)
    n = X.shape[0]
    m = min(n, max(_KMEANS_ROWS, _KMEANS_ROWS_PER_ATOM * k))
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


def svd_start(X: Array, k: int, rng: np.random.Generator) -> tuple[Array, list[Array]]:
    """Return a dictionary and codes (one array per row block) whose error is that of the SVD of rank ``k - 1``.

    With the truncated SVD written as C B and ``s_i = max(0, -min_j C_ij)``, the codes ``[C + s, s]`` are nonnegative
    and the atoms ``[B; -sum of the rows of B]`` give the same product (Gillis and Kumar 2015, section 3). For k = 1 the
    start is the leading direction, with the sign that explains more energy. Atoms beyond the rank are random directions
    with zero codes.
    """
    xp = _xp.array_namespace(X)
    acc = _xp.accumulator_dtype(xp, _xp.device(X))
    rank = max(1, min(k - 1, *X.shape))
    axes = _leading_directions(X, rank)
    blocks = [xp.matmul(xp.astype(block, acc), xp.matrix_transpose(axes)) for block in _xp.row_blocks(X)]
    # Signs that put more energy on the positive side keep the common offset s small.
    tilt = xp.sum(xp.stack([xp.sum(c * xp.abs(c), axis=0) for c in blocks], axis=0), axis=0)
    sign = xp.where(tilt < 0, -xp.ones_like(tilt), xp.ones_like(tilt))
    axes = axes * xp.expand_dims(sign, axis=1)
    blocks = [c * sign for c in blocks]
    if k == 1:
        return axes, [xp.clip(c, 0, None) for c in blocks]
    last, norm = unit_rows(-xp.sum(axes, axis=0, keepdims=True))
    D = xp.concat([axes, last], axis=0)
    codes = []
    for c in blocks:
        offset = xp.clip(-xp.min(c, axis=1, keepdims=True), 0, None)
        spare = xp.zeros((c.shape[0], k - rank - 1), dtype=acc, device=_xp.device(X))
        codes.append(xp.concat([c + offset, offset * norm, spare], axis=1))
    if k > rank + 1:
        D = xp.concat([D, random_start(X, k - rank - 1, rng)], axis=0)
    return D, codes


def _leading_directions(X: Array, rank: int) -> Array:
    """Return the first right singular vectors as rows, from the smaller of the two Gram matrices, in float64."""
    xp = _xp.array_namespace(X)
    acc = _xp.accumulator_dtype(xp, _xp.device(X))
    n, d = X.shape
    if d <= n:
        gram = xp.zeros((d, d), dtype=acc, device=_xp.device(X))
        for block in _xp.row_blocks(X):
            rows = xp.astype(block, acc)
            gram = gram + xp.matmul(xp.matrix_transpose(rows), rows)
        return eigh_descending(gram)[1][:rank, :]
    rows = xp.astype(X, acc)
    left = eigh_descending(xp.matmul(rows, xp.matrix_transpose(rows)))[1][:rank, :]
    # Orthonormal also where a singular value is zero.
    q, _ = xp.linalg.qr(xp.matrix_transpose(xp.matmul(left, rows)))
    return xp.matrix_transpose(q)
