"""Compiled steps around the inner products of a patch of neighbours; the array code is `dimension/_simplex.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile without the GIL. Sums may be reordered, which lets them run several terms at a time."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz"}}
    if os.environ.get("ISOGEOM_NUMBA_CACHE", "1") != "0":
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:
            # No writable place for the cache (a read-only installation without a home folder).
            pass
    return numba.njit(**options)(function)


@_jit
def centred_patches(X, indices, radii, patches, squares):
    """Write the patches, relative to their mean and in units of their radius, and the squared lengths of their rows.

    Parameters
    ----------
    X : ndarray of shape (n, p)
        float32 or float64; differences are taken in float64.
    indices : ndarray of shape (m, k)
        Positions in `X`.
    radii : ndarray of shape (m,)
        Unit of each patch, so that squares neither overflow nor vanish.
    patches, squares : ndarrays of shape (m, k, p) and (m, k)
        Written to, in their dtype.
    """
    (m, k), p = indices.shape, X.shape[1]
    means = np.empty(p, dtype=patches.dtype)
    for at in range(m):
        inverse = 1.0 / radii[at] if radii[at] > 0.0 else 1.0
        origin, patch = X[indices[at, 0]], patches[at]
        means[:] = 0.0
        for j in range(k):
            row, offset = X[indices[at, j]], patch[j]
            for c in range(p):
                # From the first neighbour: the mean of far rows would round away what tells them apart.
                offset[c] = (np.float64(row[c]) - np.float64(origin[c])) * inverse
                means[c] += offset[c]
        for c in range(p):
            means[c] /= k
        for j in range(k):
            offset, square = patch[j], means[0] - means[0]
            for c in range(p):
                offset[c] -= means[c]
                square += offset[c] * offset[c]
            squares[at, j] = square


@_jit
def simplex_skewness(products, squares, sines, result):
    """Write the skewness of patches from the inner products of their rows.

    Parameters
    ----------
    products, squares : ndarrays of shape (m, k, k) and (m, k)
        Inner products of the rows of each patch, relative to its mean, and their squared lengths.
    sines : bool
        Version 'a' (sines) or 'b' (absolute cosines).
    result : ndarray of shape (m,), float64
        NaN where all neighbours coincide.
    """
    m, k = squares.shape
    for at in range(m):
        square = squares[at]
        lengths, own, total = 0.0, 0.0, 0.0
        for i in range(k):
            lengths += np.sqrt(square[i])
            own += square[i]
        for i in range(1, k):
            row, mine = products[at, i], square[i]
            # In the dtype of the products: one row has few terms, and twice as many fit in a vector.
            zero = mine - mine
            size = zero
            if sines:
                for j in range(i):
                    size += np.sqrt(max(mine * square[j] - row[j] * row[j], zero))
            else:
                for j in range(i):
                    size += abs(row[j])
            total += size
        pairs = lengths * lengths - own
        result[at] = 2.0 * total / pairs if pairs > 0.0 else np.nan
