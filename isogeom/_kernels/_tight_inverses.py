"""Compiled sums of logarithms over the pairs of neighbours of a patch; the array code is `dimension/_tle.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

# Factors, each from 1e-6 to about 1, whose product stays in range: one logarithm for all of them.
_FACTORS = 32


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile without the GIL. Only fused multiply-add is allowed beyond IEEE: NaN tests keep their meaning."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}}
    if os.environ.get("ISOGEOM_NUMBA_CACHE", "1") != "0":
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:
            # No writable place for the cache (a read-only installation without a home folder).
            pass
    return numba.njit(**options)(function)


@_jit
def _tight(apart, own, other):
    """Return the tight distance at radius 1 from squared distances."""
    a, room = own + apart - other, 1.0 - own
    root = np.sqrt(a * a + 4.0 * apart * room)
    if a >= 0.0:
        return 2.0 * apart / (root + a) if root > 0.0 else 0.0
    return (root - a) / (2.0 * room)


@_jit
def tight_inverses(products, u, coincidence):
    """Return the inverse dimension of patches of radius 1; NaN if a distance is 0 or all are equal.

    Parameters
    ----------
    products : ndarray of shape (b, k, k)
        Inner products of the neighbours, relative to the centre.
    u : ndarray of shape (b, k)
        Distances to the centre, increasing.
    coincidence : float
        Tight distances not above this are left out.
    """
    b, k = u.shape
    result = np.empty(b)
    for at in range(b):
        if not (u[at, 0] > 0.0 and u[at, k - 1] > u[at, 0]):
            result[at] = np.nan
            continue
        total, factor, waiting, count = 0.0, 1.0, 0, 2 * k
        for i in range(k):
            total += 2.0 * np.log(u[at, i])
            own = u[at, i] * u[at, i]
            for j in range(k):
                if j == i:
                    continue
                other, twice = u[at, j] * u[at, j], 2.0 * products[at, i, j]
                for apart in (own + other - twice, own + other + twice):
                    s = _tight(max(apart, 0.0), own, other)
                    if s > coincidence:
                        factor *= s
                        waiting += 1
                        count += 1
                if waiting >= _FACTORS:
                    total += np.log(factor)
                    factor, waiting = 1.0, 0
        result[at] = -(total + np.log(factor)) / count
    return result
