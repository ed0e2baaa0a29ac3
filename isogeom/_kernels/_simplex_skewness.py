"""Compiled sums over the pairs of neighbours of a patch; the array code is `dimension/_simplex.py`."""

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
def _gather(X, places, inverse, columns, squares):
    """Write the patch to `columns`, (p, k) padded by 0: relative to its mean, times `inverse`; and squared lengths."""
    p, k = X.shape[1], places.shape[0]
    origin = X[places[0]]
    columns[:, :] = 0.0
    for j in range(k):
        row = X[places[j]]
        for c in range(p):
            # From the first neighbour: the mean of far rows would round away what tells them apart.
            columns[c, j] = (np.float64(row[c]) - np.float64(origin[c])) * inverse
    squares[:] = 0.0
    for c in range(p):
        column = columns[c]
        mean = 0.0
        for j in range(k):
            mean += column[j]
        mean /= k
        for j in range(k):
            column[j] -= mean
            squares[j] += column[j] * column[j]


@_jit
def _multiply(columns, i, products):
    """Write the inner products of rows i..i + 3 with all rows from about i on to `products`, (4, k padded)."""
    first = i // 8 * 8
    r0, r1, r2, r3 = products[0, first:], products[1, first:], products[2, first:], products[3, first:]
    products[:, first:] = 0.0
    for c in range(0, columns.shape[0], 4):
        # Four terms for each load and store of a sum.
        t, u, v, w = columns[c, first:], columns[c + 1, first:], columns[c + 2, first:], columns[c + 3, first:]
        a0, a1, a2, a3 = columns[c, i], columns[c + 1, i], columns[c + 2, i], columns[c + 3, i]
        b0, b1, b2, b3 = columns[c, i + 1], columns[c + 1, i + 1], columns[c + 2, i + 1], columns[c + 3, i + 1]
        d0, d1, d2, d3 = columns[c, i + 2], columns[c + 1, i + 2], columns[c + 2, i + 2], columns[c + 3, i + 2]
        e0, e1, e2, e3 = columns[c, i + 3], columns[c + 1, i + 3], columns[c + 2, i + 3], columns[c + 3, i + 3]
        for j in range(r0.shape[0]):
            r0[j] += (a0 * t[j] + a1 * u[j]) + (a2 * v[j] + a3 * w[j])
            r1[j] += (b0 * t[j] + b1 * u[j]) + (b2 * v[j] + b3 * w[j])
            r2[j] += (d0 * t[j] + d1 * u[j]) + (d2 * v[j] + d3 * w[j])
            r3[j] += (e0 * t[j] + e1 * u[j]) + (e2 * v[j] + e3 * w[j])


@_jit
def _sizes(row, squares, i, k, sines):
    """Return the sum over j > i of |v_i| |v_j| times the sine, or the absolute cosine, of the angle between them."""
    square, total = squares[i], 0.0
    if sines:
        for j in range(i + 1, k):
            area = square * squares[j] - row[j] * row[j]
            total += np.sqrt(max(area, 0.0))
    else:
        for j in range(i + 1, k):
            total += abs(row[j])
    return total


@_jit
def simplex_skewness(X, indices, radii, sines):
    """Return the skewness of the patches that rows of `indices`, (m, k), take from `X`, (n, p).

    Parameters
    ----------
    X : ndarray of shape (n, p)
        float32 or float64; differences are taken in float64.
    indices : ndarray of shape (m, k)
        Positions in `X`.
    radii : ndarray of shape (m,)
        Unit of each patch, so that squares neither overflow nor vanish.
    sines : bool
        Version 'a' (sines) or 'b' (absolute cosines).

    Returns
    -------
    ndarray of shape (m,)
        NaN where all neighbours coincide.
    """
    m, k = indices.shape
    # Padding makes whole groups, of eight neighbours and of four features, whose products need no remainder.
    width, height = (k + 7) // 8 * 8, (X.shape[1] + 3) // 4 * 4
    result = np.empty(m)
    columns, squares, products = np.empty((height, width)), np.empty(width), np.empty((4, width))
    for at in range(m):
        _gather(X, indices[at], 1.0 / radii[at] if radii[at] > 0.0 else 1.0, columns, squares)
        lengths, own, total = 0.0, 0.0, 0.0
        for i in range(k):
            lengths += np.sqrt(squares[i])
            own += squares[i]
        for i in range(0, k, 4):
            _multiply(columns, i, products)
            for row in range(min(4, k - i)):
                total += _sizes(products[row], squares, i + row, k, sines)
        pairs = lengths * lengths - own
        result[at] = 2.0 * total / pairs if pairs > 0.0 else np.nan
    return result
