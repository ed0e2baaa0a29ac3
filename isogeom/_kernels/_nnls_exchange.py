"""Compiled block principal pivoting for nonnegative least squares with a well-conditioned Gram matrix.

Every helper lives in this file: numba's cache does not notice a change in a helper of another module.

With ``H = inv(G)``, the conditions ``z >= 0``, ``g = G z - p + alpha >= 0`` and ``z g = 0`` read the same from both
sides: ``g = G z + (alpha - p)`` and ``z = H g + H (p - alpha)``. So a guess of the support is tried by solving for the
codes on it or for the gradient off it, whichever system is smaller; neither is ever larger than half the atoms.
"""

from __future__ import annotations

import numpy as np

from isogeom._kernels._nnls import _jit


@_jit
def _combine(A, q, face, m, x, image):
    """Write ``q + A[:, face] @ x`` to `image`; A is symmetric, so its rows do, four at a time."""
    for i in range(image.shape[0]):
        image[i] = q[i]
    paired = m - m % 4
    for a in range(0, paired, 4):
        x0, x1, x2, x3 = x[a], x[a + 1], x[a + 2], x[a + 3]
        r0, r1, r2, r3 = A[face[a]], A[face[a + 1]], A[face[a + 2]], A[face[a + 3]]
        for i in range(image.shape[0]):
            image[i] += (x0 * r0[i] + x1 * r1[i]) + (x2 * r2[i] + x3 * r3[i])
    for a in range(paired, m):
        row, factor = A[face[a]], x[a]
        for i in range(image.shape[0]):
            image[i] += factor * row[i]


@_jit
def _eliminate(M, inverse, m):
    """Bring the upper triangle of the symmetric `M`, with a right-hand side in column m, to echelon form.

    Row by row, each from those above it, four at a time. What this leaves below the diagonal and beyond column m is
    never read: it makes the length of the loops a multiple of 8.
    """
    width = m // 8 * 8 + 8
    for b in range(m):
        first = b // 8 * 8
        row, paired = M[b, first:width], b - b % 4
        for a in range(0, paired, 4):
            r0, r1, r2, r3 = M[a, first:width], M[a + 1, first:width], M[a + 2, first:width], M[a + 3, first:width]
            f0, f1 = M[a, b] * inverse[a], M[a + 1, b] * inverse[a + 1]
            f2, f3 = M[a + 2, b] * inverse[a + 2], M[a + 3, b] * inverse[a + 3]
            for c in range(row.shape[0]):
                row[c] -= (f0 * r0[c] + f1 * r1[c]) + (f2 * r2[c] + f3 * r3[c])
        for a in range(paired, b):
            above, factor = M[a, first:width], M[a, b] * inverse[a]
            for c in range(row.shape[0]):
                row[c] -= factor * above[c]
        inverse[b] = 1.0 / M[b, b]


@_jit
def _solve(A, q, face, m, M, inverse, x):
    """Solve ``A[face, face] @ x = -q[face]``; `A` is positive definite and not nearly singular."""
    for a in range(m):
        row, out = A[face[a]], M[a]
        for b in range(a, m):
            out[b] = row[face[b]]
        out[m] = -q[face[a]]
    _eliminate(M, inverse, m)
    for a in range(m):
        x[a] = M[a, m]
    # Down the columns: along a row, each product would wait for the sum of those before.
    for b in range(m - 1, -1, -1):
        x[b] *= inverse[b]
        last = x[b]
        for a in range(b):
            x[a] -= M[a, b] * last


@_jit
def _list(inside, side, face):
    """Write the coordinates that are inside the support (side 1), or outside (0), to `face`; return how many."""
    m = 0
    for j in range(inside.shape[0]):
        # Written before it is known to stay: a branch would be guessed wrong every other time.
        face[m] = j
        m += inside[j] == side
    return m


@_jit
def _wrong(inside, values, small, moving):
    """Write the coordinates whose code or gradient is negative to `moving`; return how many."""
    wrong = 0
    for j in range(inside.shape[0]):
        moving[wrong] = j
        wrong += values[j] < (0.0 if inside[j] else -small)
    return wrong


@_jit
def _try(G, H, q, u, inside, face, M, inverse, x, values):
    """Write to `values` the codes on the support and the gradient off it that make all others zero."""
    m, A, rhs = _list(inside, 1, face), G, q
    if 2 * m > inside.shape[0]:
        m, A, rhs = _list(inside, 0, face), H, u
    _solve(A, rhs, face, m, M, inverse, x)
    _combine(A, rhs, face, m, x, values)
    for a in range(m):
        values[face[a]] = x[a]


@_jit
def _solve_row(G, H, q, u, small, most, inside, face, M, inverse, x, values):
    """Exchange until all signs are right; tell whether that took at most `most` exchanges.

    All coordinates of the wrong sign change sides at once. If their number fails to fall for the fourth time, only the
    last one does until it has fallen (Murty's rule, which ends at the solution).
    """
    fewest, patience = inside.shape[0] + 1, 3
    for _ in range(most):
        _try(G, H, q, u, inside, face, M, inverse, x, values)
        wrong = _wrong(inside, values, small, face)
        if wrong == 0:
            return True
        first = 0
        if wrong < fewest:
            fewest, patience = wrong, 3
        elif patience > 0:
            patience -= 1
        else:
            first = wrong - 1
        for a in range(first, wrong):
            inside[face[a]] = 1 - inside[face[a]]
    return False


@_jit
def _check(G, q, inside, z, limit, face, x, g, residual):
    """Compute the gradient, and the residuals of the optimality conditions; tell whether one is above `limit`."""
    m, above = _list(inside, 1, face), 0
    for a in range(m):
        x[a] = z[face[a]]
    _combine(G, q, face, m, x, g)
    for j in range(z.shape[0]):
        residual[j] = abs(min(z[j], g[j]))
        above += residual[j] > limit
    return above > 0


@_jit
def _refine(H, inside, everywhere, face, M, inverse, x, g, shift, step, z):
    """Correct `z` for the gradient `g` that rounding errors left on its support."""
    k = z.shape[0]
    for j in range(k):
        shift[j] = -g[j] if inside[j] else 0.0
        step[j] = 0.0
    _combine(H, step, everywhere, k, shift, step)
    m = _list(inside, 0, face)
    _solve(H, step, face, m, M, inverse, x)
    _combine(H, step, face, m, x, shift)
    for j in range(k):
        z[j] = max(z[j] + shift[j], 0.0) if inside[j] else 0.0


@_jit
def nnls_exchange(G, H, P, U, guess, alpha, tol, most):
    """Solve every row of `P`, at first with the support where `guess` is positive.

    `G` has unit diagonal, `H` is its inverse and ``U = (P - alpha) @ H`` are the codes without bounds. Returns codes
    and relative residuals; rows that took more than `most` exchanges have zero codes and an infinite residual.
    """
    n, k = P.shape
    Z, residuals = np.zeros((n, k)), np.zeros(n)
    q, values, g, step, residual = np.empty(k), np.empty(k), np.empty(k), np.empty(k), np.empty(k)
    x, inverse, M = np.empty(k), np.empty(k), np.zeros((k, k + 8))
    # Unsigned: an index that may be negative is compared with zero every time.
    everywhere, face, inside = (
        np.arange(k).astype(np.uint64),
        np.empty(k + 1, dtype=np.uint64),
        np.empty(k, dtype=np.int64),
    )
    for i in range(n):
        p, u, z = P[i], U[i], Z[i]
        top = 0.0
        for j in range(k):
            top = max(top, abs(p[j]))
            q[j] = alpha[j] - p[j]
            inside[j] = guess[i, j] > 0.0
        if top == 0.0:
            continue
        if not _solve_row(G, H, q, u, tol * top, most, inside, face, M, inverse, x, values):
            residuals[i] = np.inf
            continue
        for j in range(k):
            # Plus zero: a code of minus zero is not shown as one.
            z[j] = values[j] + 0.0 if inside[j] else 0.0
        refined = 0
        while _check(G, q, inside, z, 0.1 * tol * top, face, x, g, residual) and refined < 2:
            _refine(H, inside, everywhere, face, M, inverse, x, g, values, step, z)
            refined += 1
        residuals[i] = np.max(residual) / top
    return Z, residuals
