"""Compiled sum over rows that are neighbours of each other; the array code is `dimension/_dependence.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numba


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
def mutual_sum(parts, columns, rows, place_of):
    """Return the sum over ordered pairs of rows of the part of each in the other, multiplied.

    Parameters
    ----------
    parts : ndarray of shape (m, k), float64
        Part of each neighbour in the value of a row.
    columns : ndarray of shape (m, k), int32
        Positions of the neighbours.
    rows : ndarray of shape (m,), int64
        Positions of the rows, increasing.
    place_of : ndarray of shape (n,), int64
        Place of each position in `rows`, or -1.
    """
    total = 0.0
    for i in range(columns.shape[0]):
        for j in range(columns.shape[1]):
            other = place_of[columns[i, j]]
            # Each pair once, from its later row.
            if 0 <= other < i:
                place = _place_of(rows[i], columns[other])
                if place >= 0:
                    total += parts[i, j] * parts[other, place]
    return 2.0 * total
