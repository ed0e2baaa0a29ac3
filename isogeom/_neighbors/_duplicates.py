"""Rows that repeat an earlier row, found without comparing all pairs."""

from __future__ import annotations

import numpy as np

from isogeom import _xp
from isogeom._neighbors._cloud import unit_scale
from isogeom._xp import Array

# Equal rows differ in a random projection by rounding only; rows closer than this share of its range are compared.
_CLOSE = 1e-11


def first_occurrences(X: Array) -> np.ndarray:
    """Return the positions of the distinct rows of `X`, the first of each group of equal rows, in increasing order.

    Parameters
    ----------
    X : array of shape (n_samples, n_features)
        Finite rows of any array library.

    Returns
    -------
    ndarray of shape (n_distinct,)
        int64 positions, on the host.

    Notes
    -----
    Rows are projected on one fixed random direction and sorted. Equal rows end side by side; only rows whose
    projection is that of a neighbour in this order, up to rounding, are compared entry by entry.
    """
    n = int(X.shape[0])
    projection = _project(X)
    order = np.argsort(projection, kind="stable")
    ordered = projection[order]
    close = np.diff(ordered) <= _CLOSE * max(abs(ordered[0]), abs(ordered[-1]))
    suspects = np.zeros(n, dtype=bool)
    suspects[order[:-1][close]] = True
    suspects[order[1:][close]] = True
    if not suspects.any():
        return np.arange(n)
    positions = np.flatnonzero(suspects)
    xp = _xp.array_namespace(X)
    rows = _xp.to_numpy(xp.take(X, _xp.asarray_like(positions, X, dtype=xp.int64), axis=0))
    # Adding zero turns -0.0 into 0.0, which is the same number.
    _, first = np.unique(rows + 0.0, axis=0, return_index=True)
    kept = np.ones(n, dtype=bool)
    kept[positions] = False
    kept[positions[first]] = True
    return np.flatnonzero(kept)


def _project(X: Array) -> np.ndarray:
    xp = _xp.array_namespace(X)
    dtype = _xp.accumulator_dtype(xp, _xp.device(X))
    # An exact power of two keeps the products finite whatever the unit of the rows.
    scale = unit_scale(X)
    direction = np.random.default_rng(0).standard_normal(int(X.shape[1]))
    column = _xp.asarray_like(direction, X, dtype=dtype)
    parts = [_xp.to_numpy(xp.matmul(xp.astype(block, dtype) * scale, column)) for block in _xp.row_blocks(X)]
    return np.concatenate(parts).astype(np.float64)
