"""Compiled loops over rows that share neighbours; the array code is `dimension/_dependence.py` and `_overlap.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile without the GIL. Sums may be reordered, which makes them vectors."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "reassoc"}}
    if os.environ.get("ISOGEOM_NUMBA_CACHE", "1") != "0":
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:
            # No writable place for the cache (a read-only installation without a home folder).
            pass
    return numba.njit(**options)(function)


@_jit
def _place_of(value, line):
    """Return the place of a value in a line, -1 if it is not there. Without an early end it becomes vectors."""
    place = -1
    for t in range(line.shape[0]):
        if line[t] == value:
            place = t
    return place


@_jit
def mutual_pairs(columns, rows, place_of, pairs):
    """Find the pairs of rows of which each is a neighbour of the other; return their number.

    Parameters
    ----------
    columns : ndarray of shape (m, k), int32
        Positions of the neighbours.
    rows : ndarray of shape (m,), int64
        Positions of the rows, increasing.
    place_of : ndarray of shape (n,), int64
        Place of each position in `rows`, or -1.
    pairs : ndarray of shape (m * k // 2, 4), int32
        Written to: a row, the rank at which it has the other one, the other row, the rank at which that has it.
    """
    count = 0
    for i in range(columns.shape[0]):
        for j in range(columns.shape[1]):
            other = place_of[columns[i, j]]
            # Each pair once, from its later row.
            if 0 <= other < i:
                place = _place_of(rows[i], columns[other])
                if place >= 0:
                    pairs[count, 0], pairs[count, 1], pairs[count, 2], pairs[count, 3] = i, j, other, place
                    count += 1
    return count


@_jit
def overlap_counts(neighbors, starts, members, chosen, others, counts):
    """Count how many rows neighbourhoods have in common.

    Parameters
    ----------
    neighbors : ndarray of shape (m, k), int64
        Positions of the rows of every neighbourhood.
    starts, members : ndarray of int
        The neighbourhoods that hold row i are ``members[starts[i]:starts[i + 1]]``.
    chosen : ndarray of int64
        The neighbourhoods to count from.
    others : ndarray of shape (m, near), int64
        Near neighbourhoods of each, -1 for none.
    counts : ndarray of shape (2, k + 1), int64
        Changed in place: pairs of a chosen one and any, or a near one, by the number of rows in common.
    """
    m, k = neighbors.shape
    shared = np.zeros(m, dtype=np.int32)
    for i in chosen:
        shared[:] = 0
        for j in range(k):
            for other in members[starts[neighbors[i, j]] : starts[neighbors[i, j] + 1]]:
                shared[other] += 1
        for other in shared:
            counts[0, other] += 1
        for other in others[i]:
            if other >= 0:
                counts[1, shared[other]] += 1
