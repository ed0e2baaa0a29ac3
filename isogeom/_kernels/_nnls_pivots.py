"""Compiled pivots of nonnegative least squares with a singular Gram matrix.

The array code, and what the pivots do, is `decomposition/_nnls_pivots.py`. Every helper lives in this file: numba's
cache does not notice a change in a helper of another module.
"""

from __future__ import annotations

import numpy as np

from isogeom._kernels._nnls import _jit


@_jit
def _gradient(G, p, alpha, z, g, size):
    """Compute the gradient ``G z - p + alpha`` afresh, and return the largest ``|G| z``, the scale of its rounding."""
    k = z.shape[0]
    for i in range(k):
        g[i] = 0.0
        size[i] = 0.0
    for j in range(k):
        if z[j] != 0.0:
            for i in range(k):
                g[i] += z[j] * G[j, i]
                size[i] += z[j] * abs(G[j, i])
    largest = 0.0
    for i in range(k):
        g[i] += alpha[i] - p[i]
        largest = max(largest, size[i])
    return largest


@_jit
def _entering(g, state, noise, tie):
    """Return the first coordinate whose gradient is, up to `tie`, the most negative; -1 if none is negative."""
    lowest = -noise
    for j in range(g.shape[0]):
        if g[j] < lowest and state[j] == 0:
            lowest = g[j]
    if lowest == -noise:
        return -1
    limit = lowest + min(tie, -0.5 * lowest)
    for j in range(g.shape[0]):
        if g[j] < -noise and g[j] <= limit and state[j] == 0:
            return j
    return -1


@_jit
def _multiply(B, rhs, m, step):
    """Write ``B @ rhs`` to `step`; B is symmetric, so its rows do for columns and the loop vectorises."""
    for a in range(m):
        step[a] = 0.0
    paired = m - m % 4
    for b in range(0, paired, 4):
        r0, r1, r2, r3 = rhs[b], rhs[b + 1], rhs[b + 2], rhs[b + 3]
        for a in range(m):
            step[a] += (r0 * B[b, a] + r1 * B[b + 1, a]) + (r2 * B[b + 2, a] + r3 * B[b + 3, a])
    for b in range(paired, m):
        for a in range(m):
            step[a] += rhs[b] * B[b, a]


@_jit
def _image(G, face, m, step, driving, image):
    """Write ``G u`` to `image`, for u the step on the support and 1 at the coordinate that is driven."""
    k = image.shape[0]
    for i in range(k):
        image[i] = G[driving, i]
    paired = m - m % 4
    for a in range(0, paired, 4):
        # Four rows at a time: the sum is read and written a quarter as often.
        s0, s1, s2, s3 = step[a], step[a + 1], step[a + 2], step[a + 3]
        row0, row1, row2, row3 = G[face[a]], G[face[a + 1]], G[face[a + 2]], G[face[a + 3]]
        for i in range(k):
            image[i] += (s0 * row0[i] + s1 * row1[i]) + (s2 * row2[i] + s3 * row3[i])
    for a in range(paired, m):
        for i in range(k):
            image[i] += step[a] * G[face[a], i]


@_jit
def _direct(G, B, g, face, m, driving, rhs, step, image):
    """Compute the direction: with the driven coordinate, or to the support's minimiser. Return the curvature."""
    for a in range(m):
        rhs[a] = -g[face[a]] if driving < 0 else -G[driving, face[a]]
    _multiply(B, rhs, m, step)
    if driving < 0:
        return 0.0
    _image(G, face, m, step, driving, image)
    # As a quadratic form: errors of the step count only in the second order.
    curvature = image[driving]
    for a in range(m):
        curvature += step[a] * image[face[a]]
    return curvature


@_jit
def _append(B, m, step, curvature):
    """Border the inverse of the support's Gram matrix by the coordinate that arrived."""
    for a in range(m):
        factor = step[a] / curvature
        for b in range(m):
            B[a, b] += factor * step[b]
        B[a, m] = factor
        B[m, a] = factor
    B[m, m] = 1.0 / curvature


@_jit
def _invert(G, B, face, m):
    """Compute the inverse of the support's Gram matrix afresh: updates of a nearly singular one lose digits."""
    M = np.empty((m, m))
    for a in range(m):
        for b in range(m):
            M[a, b] = G[face[a], face[b]]
    inverse = np.linalg.inv(M)
    for a in range(m):
        for b in range(m):
            B[a, b] = 0.5 * (inverse[a, b] + inverse[b, a])


@_jit
def _drop(B, face, m, q):
    """Remove slot `q` from the inverse; the last slot takes its place."""
    last = m - 1
    if q != last:
        for a in range(m):
            B[q, a], B[last, a] = B[last, a], B[q, a]
        for a in range(m):
            B[a, q], B[a, last] = B[a, last], B[a, q]
        face[q] = face[last]
    for a in range(last):
        factor = B[last, a] / B[last, last]
        for b in range(last):
            B[a, b] -= factor * B[last, b]


@_jit
def _nearest(z, face, m, step):
    """Return how far the step may go before a coordinate reaches zero, and the slot of that coordinate."""
    nearest, q = np.inf, -1
    for a in range(m):
        if step[a] < 0.0:
            reach = z[face[a]] / -step[a]
            if reach < nearest or (reach == nearest and face[a] < face[q]):
                nearest, q = reach, a
    return nearest, q


@_jit
def _limit(curvature, slope, cut, noise, fresh):
    """Return how far a driven coordinate should go: to the minimum, or, without curvature, as far as it can."""
    if curvature > cut:
        return max(-slope / curvature, 0.0)
    if fresh and slope > -10.0 * noise:
        return -1.0
    return np.inf


@_jit
def _move(z, face, m, step, length):
    for a in range(m):
        z[face[a]] = max(z[face[a]] + length * step[a], 0.0)


@_jit
def _residual(G, g, z):
    """Return the largest residual of the optimality conditions."""
    worst = 0.0
    for j in range(z.shape[0]):
        if G[j, j] > 0.0:
            worst = max(worst, abs(min(z[j], g[j])))
    return worst


@_jit
def _drift(g, face, m):
    """Return the largest gradient on the support, zero but for rounding errors."""
    largest = 0.0
    for a in range(m):
        largest = max(largest, abs(g[face[a]]))
    return largest


@_jit
def _unbar(state):
    for j in range(state.shape[0]):
        if state[j] == 2:
            state[j] = 0


@_jit
def _solve_row(G, p, alpha, tol, cut, tie, max_pivots, z, B, work, face, state):
    """Solve one row from zero codes; return its residual and the number of pivots."""
    g, size, rhs, step, image = work[0], work[1], work[2], work[3], work[4]
    z[:] = 0.0
    for j in range(z.shape[0]):
        # Out of the support (1: in it, 2: barred), or a zero atom.
        state[j] = 0 if G[j, j] > 0.0 else 3
    top = np.max(np.abs(p))
    if top == 0.0:
        return 0.0, 0
    m, driving, refined, pivots, noise = 0, -1, 0, 0, 0.0
    while True:
        if driving < 0:
            entering = -1 if pivots == 0 else _entering(g, state, noise, tie * top)
            if entering < 0 or g[entering] > -1e-6 * top:
                # Near the solution the gradient is computed afresh; before, the errors of its updates do not matter.
                noise = tol * top + 10 * 2.0**-52 * _gradient(G, p, alpha, z, g, size)
                entering = _entering(g, state, noise, tie * top)
            drift = _drift(g, face, m)
            refine = drift > noise and refined < 4
            if pivots >= max_pivots or (entering < 0 and not refine):
                _gradient(G, p, alpha, z, g, size)
                return _residual(G, g, z) / top, pivots
            driving = -1 if refine else entering
            refined = refined + 1 if refine else 0
            if refined == 2:
                _invert(G, B, face, m)
        pivots += 1
        limit, curvature = 1.0, _direct(G, B, g, face, m, driving, rhs, step, image)
        if driving >= 0:
            limit = _limit(curvature, g[driving], cut, noise, z[driving] == 0.0)
        nearest, q = _nearest(z, face, m, step)
        length = min(nearest, limit)
        if limit < 0.0 or length == np.inf or pivots > max_pivots:
            # Rounding errors, or an objective without a minimum: leave the coordinate where it is.
            state[driving], driving = 2, -1
            continue
        _move(z, face, m, step, length)
        if driving < 0:
            noise = tol * top + 10 * 2.0**-52 * _gradient(G, p, alpha, z, g, size)
        else:
            z[driving] += length
            for i in range(g.shape[0]):
                g[i] += length * image[i]
        if nearest < limit:
            z[face[q]] = 0.0
            _unbar(state)
            state[face[q]] = 0
            _drop(B, face, m, q)
            m -= 1
        elif driving >= 0:
            _append(B, m, step, curvature)
            face[m], state[driving], driving = driving, 1, -1
            m += 1


@_jit
def nnls_pivots(G, P, alpha, tol, cut, tie, max_pivots):
    """Solve every row of `P`; `G` has unit diagonal (zero for dead atoms). Returns codes, residuals and pivots."""
    n, k = P.shape
    # Rows of G are read in place of its columns, one after the other.
    G = np.ascontiguousarray(G)
    Z, residuals, pivots = np.empty((n, k)), np.empty(n), np.empty(n, dtype=np.int64)
    B, work = np.empty((k, k)), np.empty((5, k))
    face, state = np.empty(k, dtype=np.int64), np.empty(k, dtype=np.int64)
    for i in range(n):
        residuals[i], pivots[i] = _solve_row(G, P[i], alpha, tol, cut, tie, max_pivots, Z[i], B, work, face, state)
    return Z, residuals, pivots
