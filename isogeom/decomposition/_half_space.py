"""An open half-space that holds all rows of a matrix: found, or shown not to exist, from a few rows at a time."""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from isogeom import _xp
from isogeom._xp import Array

# Norm of a row, relative to the longest, that counts as zero.
NO_ROW = 1e-9
# Smallest cosine between a row and the normal of a half-space, and the share of the largest one possible to settle for.
_MARGIN, _SHARE = 1e-6, 0.5
# A cosine that is good enough in any case.
_EASY = 0.05
# Rows per column that the search starts from, of two kinds, and that a round adds; rounds before it gives up.
_FIRST, _ADDED, _ROUNDS = 4, 4, 100


def half_space(C: Array) -> Array | None:
    """Return a unit vector y with ``C @ y > 0`` for every nonzero row of `C`, or None if there is none.

    The larger the smallest cosine between y and a row, the less do the codes of the closed form cancel. Where neither
    the mean direction nor the first axis has one above 0.05, y points to the point of the convex hull of the row
    directions that is nearest to the origin: its smallest cosine is the largest possible, and the norm of that point (0
    where there is no half-space). No more than k rows span the point. It is found for some of the rows, on the host;
    those of all rows that stand worst to it join its own; and so on, until y is within a factor of two of the best, or
    the rows looked at show that there is no half-space.

    Parameters
    ----------
    C : array of shape (n_samples, k)
        Rows in the accumulator's dtype. A norm below 1e-9 of the largest counts as zero.

    Returns
    -------
    array of shape (k,) or None
        Its cosines with the rows exceed 1e-6; None if no vector has such cosines, or none was found in 100 rounds.
    """
    xp = _xp.array_namespace(C)
    norms = xp.sqrt(xp.vecdot(C, C))
    live = norms > NO_ROW * xp.max(norms)
    if not bool(xp.any(live)):
        return None
    norms = xp.where(live, norms, xp.ones_like(norms))

    def cosines(y: Array) -> np.ndarray:
        """Return the cosines of the rows with a unit vector; a zero row stands in nobody's way."""
        return _xp.to_numpy(xp.where(live, xp.matmul(C, y) / norms, xp.ones_like(norms)))

    def directions(places: np.ndarray) -> np.ndarray:
        """Return some of the rows, scaled to unit norm, on the host."""
        chosen = xp.asarray(places, dtype=xp.int64, device=_xp.device(C))
        taken = xp.take(C, chosen, axis=0) / xp.expand_dims(xp.take(norms, chosen), axis=1)
        return np.asarray(_xp.to_numpy(taken), dtype=np.float64)

    axis = xp.zeros_like(C[0, :])
    axis[0] = 1.0 if float(xp.sum(C[:, 0] / norms)) >= 0 else -1.0
    mean = xp.sum(C, axis=0)
    size = float(xp.linalg.vector_norm(mean))
    starts = (axis,) if size == 0 else (axis, mean / size)
    best, chosen, found = -1.0, axis, np.ones(1)
    for y in starts:
        found = cosines(y)
        if float(found.min()) > best:
            best, chosen = float(found.min()), y
    if best > _EASY:
        return chosen

    # The worst rows bound a half-space; rows from everywhere show soonest that there is none.
    spread = np.flatnonzero(_xp.to_numpy(live))
    spread = spread[:: max(1, len(spread) // (_FIRST * C.shape[1]))]
    W = directions(np.union1d(spread, _smallest(found, _FIRST * C.shape[1])))
    distance = 1.0
    for _ in range(_ROUNDS):
        nearest = _nearest(W, distance)
        if nearest is None:
            break
        weights, point, distance = nearest
        # No vector has a smallest cosine with these rows above that.
        if distance <= _MARGIN:
            return None
        y = _xp.asarray_like(point / distance, C)
        found = cosines(y)
        if float(found.min()) > best:
            best, chosen = float(found.min()), y
        if best > max(_MARGIN, _SHARE * distance):
            break
        added = _smallest(found, _ADDED * C.shape[1])
        W = np.concatenate([W[weights > 0], directions(added[found[added] < distance])])
    return chosen if best > _MARGIN else None


def _smallest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the places of so many of the smallest values."""
    return np.argpartition(values, count)[:count] if count < len(values) else np.arange(len(values))


def _nearest(W: np.ndarray, distance: float) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Return the convex weights of the point nearest to the origin in the convex hull of unit rows, it and its norm.

    Least squares over ``w >= 0`` for ``c W.T w = 0`` and ``sum(w) = 1`` has a multiple of the weights as its solution,
    for every c (Lawson and Hanson 1974, chapter 23); with c near the inverse of the norm, the equations weigh alike.
    None if the solver gives up.
    """
    scale = 1 / max(distance, _MARGIN)
    equations = np.concatenate([scale * W.T, np.ones((1, len(W)))])
    try:
        weights = nnls(equations, np.append(np.zeros(W.shape[1]), 1.0), maxiter=30 * len(W))[0]
    except RuntimeError:
        return None
    weights = weights / weights.sum()
    point = weights @ W
    return weights, point, float(np.linalg.norm(point))
