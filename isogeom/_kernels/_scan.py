"""Compiled loops of the neighbour search: scan of a tile of products, and squared distances of pairs.

The array code is `_neighbors/_exact.py`. Every helper lives in this file: numba's cache does not notice a change in a
helper of another module. Set ``ISOGEOM_NUMBA_CACHE=0`` to compile afresh in each process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

# Columns that are skipped together.
_SKIP = 32


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile without the GIL. Sums may be reordered, which makes them vectors; NaN and infinity keep their meaning."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "reassoc"}}
    if os.environ.get("ISOGEOM_NUMBA_CACHE", "1") != "0":
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:
            # No writable place for the cache (a read-only installation without a home folder).
            pass
    return numba.njit(**options)(function)


@_jit
def _select(keys, places, count, c):
    """Move the `c` smallest of the first `count` keys to the front, in any order; return the largest of them."""
    low, high = 0, count - 1
    while low < high:
        a, b, pivot = keys[low], keys[high], keys[(low + high) // 2]
        if a > b:
            a, b = b, a
        if pivot < a:
            pivot = a
        elif pivot > b:
            pivot = b
        i, j = low, high
        while i <= j:
            while keys[i] < pivot:
                i += 1
            while keys[j] > pivot:
                j -= 1
            if i <= j:
                keys[i], keys[j] = keys[j], keys[i]
                places[i], places[j] = places[j], places[i]
                i += 1
                j -= 1
        if c - 1 <= j:
            high = j
        elif c - 1 >= i:
            low = i
        else:
            break
    largest = keys[0]
    for t in range(1, c):
        if keys[t] > largest:
            largest = keys[t]
    return largest


@_jit
def _insert(keys, places, counts, limits, row, key, place, c):
    """Put a candidate into the buffer of a row; a full buffer keeps its `c` best, whose last becomes the limit."""
    count = counts[row]
    keys[row, count] = key
    places[row, count] = place
    count += 1
    if count == keys.shape[1]:
        limits[row] = _select(keys[row], places[row], count, c)
        count = c
    counts[row] = count


@_jit
def _below(norm, limit, products, norms, limits):
    """Return a bit for each pair below the limit of its row or of its column. Slices and int32: it becomes vectors."""
    bits = np.uint32(0)
    for j in range(_SKIP):
        key = norm + (norms[j] - np.float32(2.0) * products[j])
        bits |= np.uint32(key < max(limit, limits[j])) << np.uint32(j)
    return bits


@_jit
def knn_scan(products, rows, columns, row_norms, column_norms, own, both, c, keys, places, counts, limits):
    """Offer the pairs of a tile to the buffers of its rows and, if `both`, of its columns.

    Parameters
    ----------
    products : ndarray of shape (n_rows, n_columns), float32
        Inner products.
    rows, columns : int
        Row of the buffers of the first row of the tile, and position of the first column; with `both`, the position is
        the row of the buffers too.
    row_norms, column_norms : ndarray of float32
        Squared norms as they enter the lower bound ``row_norm + column_norm - 2 product``.
    own : ndarray of shape (n_rows,), int64
        Position of each row itself, which is no candidate; -1 for none.
    both : bool
        Whether the pairs count for the columns too.
    c : int
        Number of candidates that a full buffer keeps.
    keys, places : ndarray of shape (n_buffers, width), float32 and int32
        Buffers, changed in place.
    counts, limits : ndarray of shape (n_buffers,), int32 and float32
        Entries in use, and the key that a candidate must be below.
    """
    m, n = products.shape
    other = np.full(n, -np.inf, dtype=np.float32)
    if both:
        for j in range(n):
            other[j] = limits[columns + j]
    two, all_bits = np.float32(2.0), np.uint32(0xFFFFFFFF)
    for i in range(m):
        row, norm, mine = rows + i, row_norms[i], own[i]
        limit = limits[row]
        line = products[i]
        for start in range(0, n, _SKIP):
            stop = min(start + _SKIP, n)
            bits = all_bits
            if stop - start == _SKIP:
                bits = _below(norm, limit, line[start:stop], column_norms[start:stop], other[start:stop])
                if bits == 0:
                    continue
            for first in range(start, stop, 8):
                byte = (bits >> np.uint32(first - start)) & np.uint32(255)
                if byte == 0:
                    continue
                for j in range(first, min(first + 8, stop)):
                    if byte & (np.uint32(1) << np.uint32(j - first)) == 0:
                        continue
                    key = norm + (column_norms[j] - two * line[j])
                    if key < limit and columns + j != mine:
                        _insert(keys, places, counts, limits, row, key, columns + j, c)
                        limit = limits[row]
                    if key < other[j]:
                        _insert(keys, places, counts, limits, columns + j, key, row, c)
                        other[j] = limits[columns + j]


@_jit
def knn_finish(c, keys, places, counts, limits):
    """Reduce every buffer to its `c` best; the limit becomes a bound that all others reach.

    Rows with fewer than `c` candidates keep them, and their limit.
    """
    for row in range(keys.shape[0]):
        if counts[row] > c:
            limits[row] = _select(keys[row], places[row], counts[row], c)
            counts[row] = c


@_jit
def pair_squares(X, queries, rows, columns, scale, out):
    """Write the squared distances, times the squared scale, of pairs of a query and a row, by direct differences.

    Parameters
    ----------
    X : ndarray of shape (n, d), float32 or float64
    queries : ndarray of shape (m, d), float32 or float64
    rows, columns : ndarray of shape (n_pairs,), int64
        Query and row of each pair.
    scale : float
        Factor of the entries.
    out : ndarray of shape (n_pairs,), float64
        Changed in place.
    """
    d = X.shape[1]
    wide, current = np.empty(d), -1
    # Far from the ends of float64 the sum can be scaled instead of the entries, with the same result.
    plain = 1e-100 < scale < 1e100
    before, after = (1.0, scale * scale) if plain else (scale, 1.0)
    for t in range(rows.shape[0]):
        if rows[t] != current:
            current = rows[t]
            for j in range(d):
                wide[j] = np.float64(queries[current, j]) * before
        x = X[columns[t]]
        total = 0.0
        if plain:
            for j in range(d):
                difference = np.float64(x[j]) - wide[j]
                total += difference * difference
        else:
            for j in range(d):
                difference = np.float64(x[j]) * scale - wide[j]
                total += difference * difference
        out[t] = total * after
