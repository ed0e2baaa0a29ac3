"""Queries that are among the rows searched: which of the neighbours found is the query itself, and leaving it out."""

from __future__ import annotations

import numpy as np

from isogeom import _xp
from isogeom._xp import Array

# Features compared first, of all neighbours.
_FEATURES = 4


def same_row(X: Array, queries: Array, indices: Array) -> Array:
    """Return, for every query, the first column of `indices` whose row equals it, or the number of columns.

    Parameters
    ----------
    X : array of shape (n, d)
        The rows searched.
    queries : array of shape (m, d)
        Of another dtype, they are compared in float32: the precision that one of them has lost would make a row its
        own neighbour.
    indices : array of shape (m, k)
        Positions in `X`.

    Returns
    -------
    array of shape (m, 1)
        int64.
    """
    xp = _xp.array_namespace(queries)
    rounded = queries.dtype != X.dtype

    def comparable(x: Array) -> Array:
        return _narrow(x) if rounded else x

    wanted = comparable(queries)
    m, width = int(indices.shape[0]), int(indices.shape[1])
    found = xp.full((m, 1), width, dtype=xp.int64, device=_xp.device(indices))
    # Most rows differ in any feature: few columns are left to compare in full.
    possible = xp.ones((m, width), dtype=xp.bool, device=_xp.device(indices))
    for feature in np.unique(np.linspace(0, int(X.shape[1]) - 1, _FEATURES).astype(np.int64)).tolist():
        values = xp.reshape(xp.take(X[:, feature], xp.reshape(indices, (-1,)), axis=0), (m, width))
        possible = possible & (comparable(values) == wanted[:, feature][:, None])
    # A column at a time: never the rows of all neighbours at once. Rows are nearly always in the first one.
    for column in np.flatnonzero(_xp.to_numpy(xp.any(possible, axis=0))).tolist():
        rows = comparable(xp.take(X, indices[:, column], axis=0))
        same = xp.all(rows == wanted, axis=1, keepdims=True)
        found = xp.where(same & (found == width), xp.full_like(found, column), found)
        if not bool(xp.any(found == width)):
            break
    return found


def _narrow(x: Array) -> Array:
    """Return rows in float32, those beyond its range at its ends."""
    xp = _xp.array_namespace(x)
    largest = float(xp.finfo(xp.float32).max)
    return xp.astype(xp.clip(x, -largest, largest), xp.float32)


def leave_out(distances: Array, indices: Array, own: Array, k: int) -> tuple[Array, Array]:
    """Return the neighbours without the column `own` of each row, (m, 1), where that is one: `k` at most."""
    xp = _xp.array_namespace(distances)
    width = int(distances.shape[1])
    if not bool(xp.any(own < width)):
        # A graph may have no neighbour to spare.
        return distances[:, :k], indices[:, :k]
    columns = xp.expand_dims(xp.arange(width - 1, dtype=xp.int64, device=_xp.device(own)), axis=0)
    later = columns >= own
    return (
        xp.where(later, distances[:, 1:], distances[:, : width - 1]),
        xp.where(later, indices[:, 1:], indices[:, : width - 1]),
    )
