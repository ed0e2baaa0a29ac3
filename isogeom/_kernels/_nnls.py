"""Compiled loops of nonnegative least squares with a shared Gram matrix; the array code is `decomposition/_nnls.py`.

Every helper lives in this file: numba's cache does not notice a change in a helper of another module. Set
``ISOGEOM_NUMBA_CACHE=0`` to compile afresh in each process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

# Systems from this size on go to LAPACK.
LAPACK_SIDE = 24
# Rows that sweep together, and elements of them: they stay in the first cache, and their products on one thread.
SWEEP_ROWS, SWEEP_ELEMENTS = 256, 2**13


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
def _descend(G, z, g, sweeps):
    """Cyclic coordinate descent on one row; `g`, the gradient, is kept up to date."""
    k = z.shape[0]
    for _ in range(sweeps):
        moved = False
        for j in range(k):
            curvature = G[j, j]
            if curvature <= 0.0:
                continue
            new = z[j] - g[j] / curvature
            if new < 0.0:
                new = 0.0
            delta = new - z[j]
            if delta != 0.0:
                moved = True
                z[j] = new
                for i in range(k):
                    g[i] += delta * G[j, i]
        if not moved:
            break


@_jit
def _clear(G, z, g, limit):
    """Set coordinates up to `limit` to zero, with their share of the gradient."""
    for j in range(z.shape[0]):
        if 0.0 < z[j] <= limit:
            for i in range(z.shape[0]):
                g[i] -= z[j] * G[j, i]
            z[j] = 0.0


@_jit
def _gradient(G, p, alpha, z, g, size):
    """Compute the gradient ``G z - p + alpha`` afresh, and ``|G| z``, the scale of its rounding."""
    k = z.shape[0]
    for i in range(k):
        g[i] = 0.0
        size[i] = 0.0
    for j in range(k):
        if z[j] != 0.0:
            for i in range(k):
                g[i] += z[j] * G[j, i]
                size[i] += z[j] * abs(G[j, i])
    for i in range(k):
        g[i] += alpha[i] - p[i]


@_jit
def _eliminate(M, step):
    """Solve ``M x = step`` in place; `M` is positive definite."""
    n = step.shape[0]
    for a in range(n):
        for b in range(a + 1, n):
            factor = M[a, b] / M[a, a]
            if factor != 0.0:
                step[b] -= factor * step[a]
                for c in range(b, n):
                    M[b, c] -= factor * M[a, c]
    for a in range(n - 1, -1, -1):
        total = step[a]
        for b in range(a + 1, n):
            total -= M[a, b] * step[b]
        step[a] = total / M[a, a]


@_jit
def _cholesky_solve(M, step):
    """Solve ``M x = step`` in place with LAPACK's factorisation, which is faster than :func:`_eliminate` if large."""
    n = step.shape[0]
    L = np.linalg.cholesky(M)
    for a in range(n):
        total = step[a]
        for b in range(a):
            total -= L[a, b] * step[b]
        step[a] = total / L[a, a]
    for a in range(n - 1, -1, -1):
        step[a] /= L[a, a]
        for b in range(a):
            step[b] -= L[a, b] * step[a]


@_jit
def _face_step(G, g, z, enter, face):
    """Move to the minimiser over the positive coordinates, or as far as the bounds allow; tell whether it arrived.

    If `enter`, the coordinate with the most negative gradient joins them.
    """
    k = z.shape[0]
    entering, steepest = -1, 0.0
    if enter:
        for j in range(k):
            if G[j, j] > 0.0 and g[j] < steepest:
                entering, steepest = j, g[j]
    n_face = 0
    for j in range(k):
        if (z[j] > 0.0 and G[j, j] > 0.0) or j == entering:
            face[n_face] = j
            n_face += 1
    if n_face == 0:
        return True
    M, step = np.empty((n_face, n_face)), np.empty(n_face)
    for a in range(n_face):
        step[a] = -g[face[a]]
        for b in range(n_face):
            M[a, b] = G[face[a], face[b]]
    if n_face < LAPACK_SIDE:
        _eliminate(M, step)
    else:
        _cholesky_solve(M, step)
    length = 1.0
    for a in range(n_face):
        if step[a] < 0.0:
            length = min(length, -z[face[a]] / step[a])
    for a in range(n_face):
        old = z[face[a]]
        blocked = length < 1.0 and step[a] < 0.0 and -old / step[a] <= length
        z[face[a]] = 0.0 if blocked else max(old + length * step[a], 0.0)
    return length >= 1.0


@_jit
def nnls_sweep(G, P, Z, alpha, sweeps):
    """Return `Z` after sweeps of coordinate descent on every row.

    Many rows move along one coordinate together: one after the other, each would wait for its own last step.
    """
    n, k = P.shape
    lanes = max(1, min(n, SWEEP_ROWS, SWEEP_ELEMENTS // k))
    out = np.empty((n, k))
    q, z, g = np.zeros((k, lanes)), np.zeros((k, lanes)), np.empty(lanes)
    for first in range(0, n, lanes):
        # Lanes beyond the last row go on with former rows, and are not read.
        m = min(lanes, n - first)
        for a in range(m):
            for j in range(k):
                q[j, a] = alpha[j] - P[first + a, j]
                z[j, a] = Z[first + a, j]
        for _ in range(sweeps):
            for j in range(k):
                if G[j, j] <= 0.0:
                    continue
                step = 1.0 / G[j, j]
                np.dot(G[j], z, out=g)
                row, linear = z[j], q[j]
                for a in range(lanes):
                    row[a] = max(row[a] - (g[a] + linear[a]) * step, 0.0)
        for a in range(m):
            for j in range(k):
                out[first + a, j] = z[j, a]
    return out


@_jit
def nnls_solve(G, P, start, alpha, tol, max_sweeps, first_burst, max_pivots):
    """Solve every row of `P`; see `isogeom.decomposition._nnls`. `G` has unit diagonal (zero for dead atoms)."""
    n, k = P.shape
    Z = start.copy()
    residuals = np.zeros(n)
    most = 0
    g, size, face = np.empty(k), np.empty(k), np.empty(k, dtype=np.int64)
    rounding = 10 * 2.0**-52
    for i in range(n):
        z, p = Z[i], P[i]
        top = 0.0
        for j in range(k):
            top = max(top, abs(p[j]))
            if G[j, j] <= 0.0:
                z[j] = 0.0
        if top == 0.0:
            z[:] = 0.0
            continue
        _gradient(G, p, alpha, z, g, size)
        sweeps, burst, pivots, free = 0, first_burst, 0, True
        while True:
            pivoting = sweeps >= max_sweeps
            if pivoting:
                pivots += 1
            else:
                burst = min(burst, max_sweeps - sweeps)
                _descend(G, z, g, burst)
                _clear(G, z, g, 0.1 * tol * top)
                sweeps, burst = sweeps + burst, 2 * burst
            free = _face_step(G, g, z, free and pivoting, face)
            _gradient(G, p, alpha, z, g, size)
            worst, floor = 0.0, 0.0
            for j in range(k):
                if G[j, j] > 0.0:
                    worst = max(worst, abs(min(z[j], g[j])))
                    floor = max(floor, size[j])
            if worst <= tol * top + rounding * floor or pivots >= max_pivots:
                break
        residuals[i] = worst / top
        most = max(most, sweeps)
    return Z, residuals, most
