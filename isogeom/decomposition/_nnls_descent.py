"""Nonnegative least squares with a nonsingular Gram matrix, row by row in batches: accelerated gradients, exact steps.

Columns are rows of the problem here: a coordinate of all of them is one contiguous vector.
"""

from __future__ import annotations

import math

from isogeom import _xp
from isogeom._xp import Array, Namespace

# Largest stack of (k, k) systems, in elements, solved at once: 16 MiB in float64.
_STACK_ELEMENTS = 2**21
# Iterations before the first exact step: so many per atom cost about as much as that step, and so many per square root
# of the condition number shrink the error by a constant factor, up to limits from which on exact steps are cheaper
# (few atoms need few of them).
_PER_ATOM, _PER_ROOT, _MOST_FOR_ROOT, _MOST_FOR_ATOM = 0.25, 2.0, 64.0, 3.0


def burst_length(n_atoms: int, smallest: float, largest: float) -> int:
    """Return the number of iterations before the first exact step, for a Gram matrix with these extreme eigenvalues."""
    of_conditioning = min(_PER_ROOT * math.sqrt(largest / smallest), _MOST_FOR_ROOT, _MOST_FOR_ATOM * n_atoms)
    return math.ceil(_PER_ATOM * n_atoms + of_conditioning)


def solve_descent(
    xp: Namespace,
    G: Array,
    P: Array,
    start: Array,
    l1: Array,
    tol: float,
    max_iter: int,
    first_burst: int,
    max_pivots: int,
    largest: float,
) -> tuple[Array, Array, int]:
    """Minimise ``z @ G @ z / 2 - p @ z + l1 @ z`` over ``z >= 0`` for every row p of `P`; converged rows leave early.

    Parameters
    ----------
    xp : namespace
        Namespace of the arrays, which are all in the accumulator's dtype.
    G : array of shape (k, k)
        Nonsingular Gram matrix of unit atoms.
    P, start : arrays of shape (n, k)
        Right-hand sides, and nonnegative codes to start from.
    l1 : array of shape (k,)
        Weights of the l1 term.
    tol : float
        Residual that counts as zero, in units of the largest ``|p|`` of the row.
    max_iter, first_burst, max_pivots : int
        Largest number of iterations of accelerated gradient descent; iterations before the first exact step, doubled
        between two such steps; largest number of pivots afterwards.
    largest : float
        Largest eigenvalue of `G`.

    Returns
    -------
    Z : array of shape (n, k)
        Codes.
    residuals : array of shape (n,)
        Residual of the optimality conditions, as in `nnls_shared_gram`.
    n_iter : int
        Largest number of iterations any row took.
    """
    n = P.shape[0]
    p, z = xp.asarray(xp.matrix_transpose(P), copy=True), xp.asarray(xp.matrix_transpose(start), copy=True)
    top = xp.max(xp.abs(p), axis=0)
    z = xp.where(top > 0, z, xp.zeros_like(z))
    descent = xp.eye(int(G.shape[0]), dtype=G.dtype, device=_xp.device(G)) - G / largest
    rows = xp.arange(n, device=_xp.device(P))
    done_rows, done_codes, done_residuals = [], [], []
    free = xp.ones_like(top) > 0
    n_iter, burst, pivots = 0, first_burst, 0
    while rows.shape[0]:
        pivoting = n_iter >= max_iter
        if pivoting:
            pivots += 1
        else:
            burst = min(burst, max_iter - n_iter)
            # In units of the row: its gradients are multiplied with each other, which must not overflow.
            unit = xp.maximum(top, xp.max(l1))
            unit = xp.where(unit > 0, unit, xp.ones_like(unit))
            linear = (p - xp.expand_dims(l1, axis=1)) / unit / largest
            z = unit * _accelerate(xp, descent, linear, z / unit, burst)
            # Crumbs of rounding are not worth a place on the support.
            z = xp.where(z > 0.1 * tol * top, z, xp.zeros_like(z))
            n_iter, burst = n_iter + burst, 2 * burst
        z, free = _face_step(xp, G, p, z, l1, free & pivoting)
        residual, floor = _residual(xp, G, p, z, l1)
        done = residual <= tol * top + floor
        if pivots >= max_pivots:
            done = xp.ones_like(done)
        finished, rest = xp.nonzero(done)[0], xp.nonzero(~done)[0]
        done_rows.append(xp.take(rows, finished, axis=0))
        done_codes.append(xp.take(z, finished, axis=1))
        worst = residual / xp.where(top > 0, top, xp.ones_like(top))
        done_residuals.append(xp.take(worst, finished, axis=0))
        rows, top, free = (xp.take(a, rest, axis=0) for a in (rows, top, free))
        p, z = xp.take(p, rest, axis=1), xp.take(z, rest, axis=1)
    order = xp.argsort(xp.concat(done_rows, axis=0))
    codes = xp.take(xp.concat(done_codes, axis=1), order, axis=1)
    return xp.matrix_transpose(codes), xp.take(xp.concat(done_residuals, axis=0), order, axis=0), n_iter


def _accelerate(xp: Namespace, descent: Array, linear: Array, z: Array, n_iter: int) -> Array:
    """Accelerated projected gradient descent on all columns of `z`, with momentum that restarts column by column.

    A step of length 1 / L takes y to ``descent @ y + linear``. Momentum starts afresh in a column once it leads uphill.
    """
    y, t = z, xp.ones_like(z[0, :])
    for _ in range(n_iter):
        new = xp.clip(xp.matmul(descent, y) + linear, 0, None)
        move = new - z
        downhill = xp.sum((y - new) * move, axis=0) <= 0
        following = xp.where(downhill, 0.5 + xp.sqrt(0.25 + t * t), xp.ones_like(t))
        momentum = xp.where(downhill, (t - 1) / following, xp.zeros_like(t))
        y, z, t = new + momentum * move, new, following
    return z


def sweep(xp: Namespace, G: Array, p: Array, z: Array, l1: Array, n_sweeps: int) -> None:
    """Coordinate descent on all columns of `z`, in place; rows of `p` and `z` are coordinates."""
    diagonal = xp.linalg.diagonal(G)
    live = diagonal > 0
    inverse = xp.where(live, 1 / xp.where(live, diagonal, xp.ones_like(diagonal)), xp.zeros_like(diagonal))
    zero = xp.zeros_like(z[0, :])
    for _ in range(n_sweeps):
        for j in range(int(z.shape[0])):
            gradient = xp.matmul(G[j : j + 1, :], z)[0, :] - p[j, :] + l1[j]
            z[j, :] = xp.maximum(z[j, :] - gradient * inverse[j], zero)


def _gradient(xp: Namespace, G: Array, p: Array, z: Array, l1: Array) -> Array:
    return xp.matmul(G, z) - p + xp.expand_dims(l1, axis=1)


def _residual(xp: Namespace, G: Array, p: Array, z: Array, l1: Array) -> tuple[Array, Array]:
    """Return, per column, the residual of the optimality conditions and the rounding error of the gradient."""
    residual = xp.max(xp.abs(xp.minimum(z, _gradient(xp, G, p, z, l1))), axis=0)
    return residual, 10 * float(xp.finfo(z.dtype).eps) * xp.max(xp.matmul(xp.abs(G), z), axis=0)


def _face_step(xp: Namespace, G: Array, p: Array, z: Array, l1: Array, enter: Array) -> tuple[Array, Array]:
    """Move every column to the minimiser over its positive coordinates, or as far as the bounds allow.

    Where `enter`, the coordinate with the most negative gradient joins them. Also returns which columns arrived.
    """
    gradient = _gradient(xp, G, p, z, l1)
    steepest = xp.expand_dims(xp.argmin(gradient, axis=0), axis=0)
    coordinates = xp.expand_dims(xp.arange(z.shape[0], device=_xp.device(z)), axis=1)
    face = (z > 0) | ((coordinates == steepest) & (gradient < 0) & xp.expand_dims(enter, axis=0))
    weights = xp.astype(face, z.dtype)
    step = _newton(xp, G, gradient * weights, weights)
    down = step < 0
    reach = xp.where(down, z / xp.where(down, -step, xp.ones_like(step)), xp.full_like(step, xp.inf))
    nearest = xp.min(reach, axis=0, keepdims=True)
    length = xp.clip(nearest, None, 1)
    blocked = (reach <= length) & (nearest < 1)
    moved = xp.where(blocked, xp.zeros_like(z), xp.clip(z + length * step, 0, None))
    return moved, nearest[0, :] >= 1


def _newton(xp: Namespace, G: Array, gradient: Array, face: Array) -> Array:
    """Solve ``G_FF step = -gradient_F`` for every column, in stacks of bounded size."""
    k = int(G.shape[0])
    size = max(1, _STACK_ELEMENTS // (k * k))
    eye = xp.eye(k, dtype=G.dtype, device=_xp.device(G))
    pieces = []
    for start in range(0, int(face.shape[1]), size):
        stop = min(start + size, int(face.shape[1]))
        f = xp.matrix_transpose(face[:, start:stop])
        rhs = xp.expand_dims(-xp.matrix_transpose(gradient[:, start:stop]), axis=-1)
        rows = xp.expand_dims(f, axis=-1)
        # Outside the face the system is the identity with right-hand side 0: all systems have one shape.
        system = rows * xp.matrix_transpose(rows) * G + (1 - rows) * eye
        pieces.append(xp.linalg.solve(system, rhs)[:, :, 0] * f)
    return xp.matrix_transpose(pieces[0] if len(pieces) == 1 else xp.concat(pieces, axis=0))
