"""Nonnegative least squares for many rows that share one Gram matrix: the coding step of Semi-NMF."""

from __future__ import annotations

import math

from isogeom import _kernels, _xp
from isogeom._xp import Array, Namespace

# Sweeps before the first exact step on the support; the number doubles between two such steps.
_FIRST_BURST = 4
# Curvature, in machine epsilons, that counts as none along a direction of unit atoms.
_FLAT = 1e5
# Rows coded together, and the largest stack of (k, k) systems, in elements, solved at once (16 MiB in float64).
_BLOCK_ROWS = 4096
_STACK_ELEMENTS = 2**21


def nnls_shared_gram(
    gram: Array, P: Array, *, alpha: float = 0.0, tol: float = 1e-12, max_sweeps: int = 60, algorithm: str = "auto"
) -> tuple[Array, float, int]:
    """Minimise ``z @ gram @ z / 2 - p @ z + alpha * sum(z)`` over ``z >= 0`` for every row p of `P`.

    Parameters
    ----------
    gram : array of shape (k, k)
        Positive semidefinite, of any rank; a zero row and column (a zero atom) gives a zero code.
    P : array of shape (n_samples, k)
        Right-hand sides, same library and device.
    alpha : float, default=0.0
        Weight of the l1 term, nonnegative, in the units of `P`.
    tol : float, default=1e-12
        A row stops once its residual (see Returns) is below `tol`, or below the rounding error of its own gradient. Not
        taken below 100 times the machine epsilon of the accumulator.
    max_sweeps : int, default=60
        Largest number of sweeps of coordinate descent per row; rows that need more go on with exact pivots.
    algorithm : {"auto", "array", "numba"}, default="auto"
        Array code, compiled kernel (numpy only), or the kernel where it pays.

    Returns
    -------
    Z : array of shape (n_samples, k)
        Codes, in float64 where the device has it. Unique if `gram` is nonsingular.
    residual : float
        Largest residual of the optimality conditions over rows, ``max_j |min(z_j s_j, g_j / s_j)|`` divided by
        ``max_j |p_j / s_j|``, with g the gradient and ``s_j = sqrt(gram_jj)``: no scaling of atoms or rows changes it.
    n_sweeps : int
        Largest number of sweeps any row took.

    Notes
    -----
    Each row alternates sweeps of cyclic coordinate descent, which find the support, with one step to the exact
    minimiser over the coordinates that are positive, cut at the bounds. A row that this does not settle (nearly
    dependent atoms) goes on as in Lawson and Hanson's method: whenever its support is optimal, the coordinate with the
    most negative gradient enters. Every move lowers the objective and there are finitely many supports, so the solution
    is exact. Rows never look at each other: the same p gives the same code in any batch.

    References
    ----------
    Lawson, Hanson, "Solving least squares problems", SIAM, 1995, chapter 23. https://doi.org/10.1137/1.9781611971217
    """
    xp = _xp.array_namespace(gram, P)
    acc = _xp.accumulator_dtype(xp, _xp.device(P))
    scale, unit = _normalise(xp, xp.astype(gram, acc))
    eps = float(xp.finfo(acc).eps)
    tol, cut, l1 = max(tol, 100 * eps), _FLAT * eps, alpha / scale
    singular = float(xp.min(xp.linalg.eigvalsh(unit))) <= cut * gram.shape[0]
    kernel = None
    if algorithm != "array":
        # Dependent atoms leave a choice between equal codes: the number of rows must not decide who makes it.
        size = math.inf if singular or algorithm == "numba" else 20.0 * P.shape[0] * P.shape[1] ** 2
        kernel = _kernels.available("nnls_solve", xp, acc, size)
    codes, worst, most = [], 0.0, 0
    for block in _xp.row_blocks(P, _BLOCK_ROWS):
        rows = xp.astype(block, acc) / scale
        if kernel is not None:
            pivots = _max_pivots(unit)
            Z, residuals, sweeps = kernel(unit, rows, l1, tol, cut, singular, max_sweeps, _FIRST_BURST, pivots)
        else:
            Z, residuals, sweeps = _solve_block(xp, unit, rows, l1, tol, cut, max_sweeps, singular)
        codes.append(Z / scale)
        worst, most = max(worst, float(xp.max(residuals))), max(most, int(sweeps))
    return codes[0] if len(codes) == 1 else xp.concat(codes, axis=0), worst, most


def coordinate_sweeps(gram: Array, P: Array, Z: Array, *, alpha: float, n_sweeps: int) -> Array:
    """Return `Z` after `n_sweeps` sweeps of coordinate descent on the problem of :func:`nnls_shared_gram`.

    All three arrays are in the accumulator's dtype. The objective never rises; there is no stopping rule, so every
    library makes the same steps.
    """
    xp = _xp.array_namespace(gram, P, Z)
    columns = xp.asarray(xp.matrix_transpose(Z), copy=True)
    _sweep(xp, gram, xp.matrix_transpose(P), columns, xp.zeros_like(gram[0, :]) + alpha, n_sweeps)
    return xp.matrix_transpose(columns)


def _max_pivots(G: Array) -> int:
    return 50 + 10 * int(G.shape[0])


def _normalise(xp: Namespace, gram: Array) -> tuple[Array, Array]:
    """Return the norms of the atoms (1 for zero atoms) and the Gram matrix of unit atoms."""
    diagonal = xp.linalg.diagonal(gram)
    eps = float(xp.finfo(gram.dtype).eps)
    live = diagonal > eps * eps * xp.max(diagonal)
    scale = xp.sqrt(xp.where(live, diagonal, xp.ones_like(diagonal)))
    unit = gram / xp.expand_dims(scale, axis=1) / xp.expand_dims(scale, axis=0)
    mask = xp.astype(live, gram.dtype)
    return scale, unit * xp.expand_dims(mask, axis=1) * xp.expand_dims(mask, axis=0)


def _solve_block(
    xp: Namespace, G: Array, P: Array, l1: Array, tol: float, cut: float, max_sweeps: int, singular: bool
) -> tuple[Array, Array, int]:
    """Solve the rows of one block from z = 0; converged rows leave the block."""
    n, k = P.shape
    p, z = xp.asarray(xp.matrix_transpose(P), copy=True), xp.zeros((k, n), dtype=P.dtype, device=_xp.device(P))
    top = xp.max(xp.abs(p), axis=0)
    rows = xp.arange(n, device=_xp.device(P))
    done_rows, done_codes, done_residuals = [], [], []
    free = xp.ones_like(top) > 0
    sweeps, burst, pivots = 0, _FIRST_BURST, 0
    while rows.shape[0]:
        pivoting = sweeps >= max_sweeps
        if pivoting:
            pivots += 1
        else:
            burst = min(burst, max_sweeps - sweeps)
            _sweep(xp, G, p, z, l1, burst)
            # Crumbs of rounding would put copies of an atom on the support, and share its code between them.
            z = xp.where(z > 0.1 * tol * top, z, xp.zeros_like(z))
            sweeps, burst = sweeps + burst, 2 * burst
        z, free = _face_step(xp, G, p, z, l1, cut, tol * top, singular, free & pivoting)
        residual, floor = _residual(xp, G, p, z, l1)
        done = residual <= tol * top + floor
        if pivots >= _max_pivots(G):
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
    return xp.matrix_transpose(codes), xp.concat(done_residuals, axis=0), sweeps


def _sweep(xp: Namespace, G: Array, p: Array, z: Array, l1: Array, n_sweeps: int) -> None:
    """Coordinate descent on all columns of `z`, in place; rows of `p` and `z` are coordinates."""
    diagonal = xp.linalg.diagonal(G)
    live = diagonal > 0
    inverse = xp.where(live, 1 / xp.where(live, diagonal, xp.ones_like(diagonal)), xp.zeros_like(diagonal))
    for _ in range(n_sweeps):
        for j in range(int(z.shape[0])):
            gradient = xp.matmul(G[j : j + 1, :], z)[0, :] - p[j, :] + l1[j]
            z[j, :] = xp.clip(z[j, :] - gradient * inverse[j], 0, None)


def _gradient(xp: Namespace, G: Array, p: Array, z: Array, l1: Array) -> Array:
    return xp.matmul(G, z) - p + xp.expand_dims(l1, axis=1)


def _residual(xp: Namespace, G: Array, p: Array, z: Array, l1: Array) -> tuple[Array, Array]:
    """Return, per column, the residual of the optimality conditions and the rounding error of the gradient."""
    live = xp.expand_dims(xp.linalg.diagonal(G) > 0, axis=1)
    natural = xp.abs(xp.minimum(z, _gradient(xp, G, p, z, l1)))
    residual = xp.max(xp.where(live, natural, xp.zeros_like(natural)), axis=0)
    return residual, 10 * float(xp.finfo(z.dtype).eps) * xp.max(xp.matmul(xp.abs(G), z), axis=0)


def _face_step(
    xp: Namespace, G: Array, p: Array, z: Array, l1: Array, cut: float, noise: Array, singular: bool, enter: Array
) -> tuple[Array, Array]:
    """Move every column to the minimiser over its positive coordinates, or as far as the bounds allow.

    Where `enter`, the coordinate with the most negative gradient joins them. Also returns which columns arrived.
    """
    live = xp.expand_dims(xp.linalg.diagonal(G) > 0, axis=1)
    gradient = _gradient(xp, G, p, z, l1)
    face = (z > 0) & live
    steepest = xp.expand_dims(xp.argmin(xp.where(live, gradient, xp.full_like(gradient, xp.inf)), axis=0), axis=0)
    coordinates = xp.expand_dims(xp.arange(z.shape[0], device=_xp.device(z)), axis=1)
    face = face | ((coordinates == steepest) & (gradient < 0) & live & xp.expand_dims(enter, axis=0))
    weights = xp.astype(face, z.dtype)
    step = _newton(xp, G, gradient * weights, weights, cut, noise, singular)
    down = step < 0
    reach = xp.where(down, z / xp.where(down, -step, xp.ones_like(step)), xp.full_like(step, xp.inf))
    nearest = xp.min(reach, axis=0, keepdims=True)
    length = xp.clip(nearest, None, 1)
    blocked = (reach <= length) & (nearest < 1)
    moved = xp.where(blocked, xp.zeros_like(z), xp.clip(z + length * step, 0, None))
    return moved, nearest[0, :] >= 1


def _newton(xp: Namespace, G: Array, gradient: Array, face: Array, cut: float, noise: Array, singular: bool) -> Array:
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
        step = _pseudo_solve(xp, system, rhs, cut, noise[start:stop]) if singular else xp.linalg.solve(system, rhs)
        pieces.append(step[:, :, 0] * f)
    return xp.matrix_transpose(pieces[0] if len(pieces) == 1 else xp.concat(pieces, axis=0))


def _pseudo_solve(xp: Namespace, system: Array, rhs: Array, cut: float, noise: Array) -> Array:
    """Solve singular systems: directions without curvature move only if the gradient asks for it, and then far."""
    values, vectors = xp.linalg.eigh(system)
    parts = xp.matmul(xp.matrix_transpose(vectors), rhs)
    flat = xp.expand_dims(values, axis=-1) <= cut
    quiet = xp.abs(parts) <= xp.expand_dims(xp.expand_dims(noise, axis=-1), axis=-1)
    parts = xp.where(flat & quiet, xp.zeros_like(parts), parts)
    return xp.matmul(vectors, parts / xp.expand_dims(xp.clip(values, cut, None), axis=-1))
