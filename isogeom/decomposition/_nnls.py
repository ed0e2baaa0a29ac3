"""Nonnegative least squares for many rows that share one Gram matrix: the coding step of Semi-NMF."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from isogeom import _kernels, _xp
from isogeom._results import Result
from isogeom._validation import check_real, check_rows, check_same_library
from isogeom._xp import Array, Namespace
from isogeom.decomposition._nnls_pivots import solve_pivots

# Sweeps before the first exact step on the support; the number doubles between two such steps.
_FIRST_BURST = 4
# Curvature of unit atoms, in machine epsilons: a Gram matrix with less is left to pivots, and what they take for none.
# Between the two a step to the minimum matters: at a gradient of `tol`, less curvature would not stop it at a bound.
_SINGULAR, _FLAT = 1e5, 1e3
# Gradients of a row, relative to the largest, between which a singular Gram matrix's pivots do not choose by size.
_TIE = 1e-8
# Rows coded together, and the largest stack of (k, k) systems, in elements, solved at once (16 MiB in float64).
_BLOCK_ROWS = 4096
_STACK_ELEMENTS = 2**21


@dataclass(frozen=True)
class NNLSResult(Result):
    """Codes of :func:`batched_nnls`, and how exact they are.

    Attributes
    ----------
    codes : array of shape (n_samples, k)
        Nonnegative minimisers, one row per row of P, in the dtype of P.
    kkt_residual : float
        Largest relative residual of the optimality conditions over the rows, computed in float64: 1e-11 or less for an
        exact solution.
    n_sweeps : int
        Largest number of sweeps of coordinate descent that a row took; 0 where G is singular.
    """

    codes: Array
    kkt_residual: float
    n_sweeps: int


def batched_nnls(G: Any, P: Any, *, alpha: float = 0.0, warm_start: Any = None) -> NNLSResult:
    """Solve nonnegative least squares for many rows that share one matrix, exactly.

    Minimises ``z @ G @ z / 2 - p @ z + alpha * sum(z)`` over ``z >= 0`` for every row p of `P`. For rows X and atoms D,
    ``G = D @ D.T`` and ``P = X @ D.T`` give the codes of X: ``min |x - z @ D|²`` over ``z >= 0``.

    Parameters
    ----------
    G : array of shape (k, k)
        Symmetric, positive semidefinite, of any rank.
    P : array of shape (n_samples, k)
        One right-hand side per row, in the library and on the device of `G`.
    alpha : float, default=0.0
        Weight of the l1 term, nonnegative, in the units of `P`.
    warm_start : array of shape (n_samples, k), default=None
        Nonnegative codes near the solution; they save time and do not change the result beyond rounding. Not used
        where `G` is singular, as they would choose between equally good codes.

    Returns
    -------
    NNLSResult
        With `codes`, `kkt_residual` and `n_sweeps`.

    Raises
    ------
    ValueError
        If shapes do not fit, a value is not finite, `G` is not symmetric, or `alpha` or `warm_start` is negative.

    See Also
    --------
    isogeom.decomposition.SemiNMF : Learns the atoms too.
    scipy.optimize.nnls : One row at a time.

    Notes
    -----
    Each row alternates sweeps of coordinate descent, which find the support, with a step to the exact minimiser over
    it, cut at the bounds; rows that this does not settle go on with the pivots of Lawson and Hanson, which lower the
    objective each time and so end after finitely many. Arithmetic is float64 where the device has it. numpy arrays go
    through a compiled loop over rows if there are many; other libraries through batched linear algebra. A row's code
    does not depend on the other rows. Where `G` is singular the codes may not be unique, but ``codes @ D`` is; the
    pivots then start from zero and use independent atoms only, so that no code has more positive entries than `G` has
    rank.

    References
    ----------
    Lawson, Hanson, "Solving least squares problems", SIAM, 1995, chapter 23. https://doi.org/10.1137/1.9781611971217

    Kim, Park, "Fast nonnegative matrix factorization: an active-set-like method and comparisons", SIAM Journal on
    Scientific Computing 33(6), 2011. https://doi.org/10.1137/110821172

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.decomposition import batched_nnls
    >>> D = np.array([[1.0, 0.0], [1.0, 1.0]])
    >>> X = np.array([[2.0, 1.0], [-1.0, 1.0]])
    >>> solution = batched_nnls(D @ D.T, X @ D.T)
    >>> np.round(solution.codes, 3)
    array([[1., 1.],
           [0., 0.]])
    >>> solution.kkt_residual < 1e-12
    True
    """
    G = check_rows(G, name="G", owner="batched_nnls")
    P = check_rows(P, name="P", owner="batched_nnls")
    alpha = check_real(alpha, "alpha", low=0)
    check_same_library(P, G, owner="batched_nnls", method="P")
    xp = _xp.array_namespace(G, P)
    k = int(G.shape[0])
    if G.shape[1] != k or P.shape[1] != k:
        raise ValueError(
            f"G has shape {tuple(G.shape)} and P has shape {tuple(P.shape)}: pass G of shape (k, k) and P of shape "
            "(n_samples, k); for rows X and atoms D they are D @ D.T and X @ D.T."
        )
    gap, size = float(xp.max(xp.abs(G - xp.matrix_transpose(G)))), float(xp.max(xp.abs(G)))
    if gap > 100 * float(xp.finfo(G.dtype).eps) * size:
        raise ValueError(f"G is not symmetric: entries differ by {gap:.2g} across the diagonal. Pass (G + G.T) / 2.")
    smallest = float(xp.min(xp.linalg.eigvalsh(xp.astype(G, _xp.accumulator_dtype(xp, _xp.device(G))))))
    if smallest < -1000 * k * float(xp.finfo(G.dtype).eps) * size:
        raise ValueError(
            f"G has the eigenvalue {smallest:.3g}: it is not positive semidefinite, so there is no minimum. Pass D @ "
            f"D.T."
        )
    if warm_start is not None:
        check_same_library(warm_start, G, owner="batched_nnls", method="warm_start")
        warm_start = check_rows(warm_start, name="warm_start", owner="batched_nnls")
        if warm_start.shape != P.shape or float(xp.min(warm_start)) < 0:
            raise ValueError(
                f"warm_start must hold nonnegative codes of the shape of P, {tuple(P.shape)}; got shape "
                f"{tuple(warm_start.shape)}, smallest value {float(xp.min(warm_start)):.3g}."
            )
    Z, residual, n_sweeps = nnls_shared_gram(G, P, alpha=alpha, start=warm_start)
    return NNLSResult(xp.astype(Z, P.dtype), residual, n_sweeps)


def nnls_shared_gram(
    gram: Array,
    P: Array,
    *,
    alpha: float = 0.0,
    start: Array | None = None,
    tol: float = 1e-12,
    max_sweeps: int = 60,
    algorithm: str = "auto",
    n_rows: int | None = None,
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
    start : array of shape (n_samples, k), default=None
        Codes to start from, nonnegative; not used if `gram` is singular, where it would choose between equal codes.
    tol : float, default=1e-12
        A row stops once its residual (see Returns) is below `tol`, or below the rounding error of its own gradient. Not
        taken below 100 times the machine epsilon of the accumulator.
    max_sweeps : int, default=60
        Largest number of sweeps of coordinate descent per row; rows that need more go on with exact pivots.
    algorithm : {"auto", "array", "numba"}, default="auto"
        Array code, compiled kernel (numpy only), or the kernel where it pays.
    n_rows : int, default=None
        Number of rows of the whole task, where `P` is a part of it; it decides what pays.

    Returns
    -------
    Z : array of shape (n_samples, k)
        Codes, in float64 where the device has it. Unique if `gram` is nonsingular.
    residual : float
        Largest residual of the optimality conditions over rows, ``max_j |min(z_j s_j, g_j / s_j)|`` divided by
        ``max_j |p_j / s_j|``, with g the gradient and ``s_j = sqrt(gram_jj)``: no scaling of atoms or rows changes it.
    n_sweeps : int
        Largest number of sweeps any row took; 0 if `gram` is singular.

    Notes
    -----
    Each row alternates sweeps of cyclic coordinate descent, which find the support, with one step to the exact
    minimiser over the coordinates that are positive, cut at the bounds. A row that this does not settle (nearly
    dependent atoms) goes on as in Lawson and Hanson's method: whenever its support is optimal, the coordinate with the
    most negative gradient enters. Every move lowers the objective and there are finitely many supports, so the solution
    is exact. A singular Gram matrix is left to pivots on independent atoms (`_nnls_pivots`). Rows never look at each
    other: the same p gives the same code in any batch.

    References
    ----------
    Lawson, Hanson, "Solving least squares problems", SIAM, 1995, chapter 23. https://doi.org/10.1137/1.9781611971217
    """
    xp = _xp.array_namespace(gram, P)
    acc = _xp.accumulator_dtype(xp, _xp.device(P))
    scale, unit = _normalise(xp, xp.astype(gram, acc))
    eps = float(xp.finfo(acc).eps)
    tol, l1 = max(tol, 100 * eps), alpha / scale
    singular = float(xp.min(xp.linalg.eigvalsh(unit))) <= _SINGULAR * eps * gram.shape[0]
    name, kernel = "nnls_pivots" if singular else "nnls_solve", None
    if algorithm != "array":
        # A pivot costs a few k**2 and a row needs about k of them; sweeps and steps cost less.
        k, effort = int(P.shape[1]), 2.0 * P.shape[1] if singular else 40.0
        size = math.inf if algorithm == "numba" else effort * (n_rows or P.shape[0]) * k**2
        kernel = _kernels.available(name, xp, acc, size)
    codes, worst, most = [], 0.0, 0
    for first, block in enumerate(_xp.row_blocks(P, _BLOCK_ROWS)):
        rows = xp.astype(block, acc) / scale
        if singular:
            arguments = (unit, rows, l1, tol, _FLAT * eps, _TIE, _max_pivots(unit))
            Z, residuals, _ = solve_pivots(xp, *arguments) if kernel is None else kernel(*arguments)
            sweeps = 0
        else:
            guess = xp.zeros_like(rows)
            if start is not None:
                guess = xp.astype(start[first * _BLOCK_ROWS : first * _BLOCK_ROWS + rows.shape[0], :], acc) * scale
            if kernel is not None:
                Z, residuals, sweeps = kernel(unit, rows, guess, l1, tol, max_sweeps, _FIRST_BURST, _max_pivots(unit))
            else:
                Z, residuals, sweeps = _solve_block(xp, unit, rows, guess, l1, tol, max_sweeps)
        codes.append(Z / scale)
        worst, most = max(worst, float(xp.max(residuals))), max(most, int(sweeps))
    return codes[0] if len(codes) == 1 else xp.concat(codes, axis=0), worst, most


def coordinate_sweeps(
    gram: Array, P: Array, Z: Array, *, alpha: float, n_sweeps: int, n_rows: int | None = None
) -> Array:
    """Return `Z` after `n_sweeps` sweeps of coordinate descent on the problem of :func:`nnls_shared_gram`.

    All three arrays are in the accumulator's dtype. The objective never rises; there is no stopping rule, so every
    library makes the same steps.
    """
    xp = _xp.array_namespace(gram, P, Z)
    # Called once per iteration: the time to load the kernel is shared by some hundred calls.
    size = 100.0 * n_sweeps * (n_rows or P.shape[0]) * P.shape[1] ** 2
    kernel = _kernels.available("nnls_sweep", xp, gram.dtype, size)
    if kernel is not None:
        return kernel(gram, P, Z, xp.zeros_like(gram[0, :]) + alpha, n_sweeps)
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
    xp: Namespace, G: Array, P: Array, start: Array, l1: Array, tol: float, max_sweeps: int
) -> tuple[Array, Array, int]:
    """Solve the rows of one block from the codes `start`; converged rows leave the block."""
    n = P.shape[0]
    p, z = xp.asarray(xp.matrix_transpose(P), copy=True), xp.asarray(xp.matrix_transpose(start), copy=True)
    top = xp.max(xp.abs(p), axis=0)
    live = xp.expand_dims(xp.linalg.diagonal(G) > 0, axis=1) & xp.expand_dims(top > 0, axis=0)
    z = xp.where(live, z, xp.zeros_like(z))
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
            # Crumbs of rounding are not worth a place on the support.
            z = xp.where(z > 0.1 * tol * top, z, xp.zeros_like(z))
            sweeps, burst = sweeps + burst, 2 * burst
        z, free = _face_step(xp, G, p, z, l1, free & pivoting)
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
    zero = xp.zeros_like(z[0, :])
    for _ in range(n_sweeps):
        for j in range(int(z.shape[0])):
            gradient = xp.matmul(G[j : j + 1, :], z)[0, :] - p[j, :] + l1[j]
            z[j, :] = xp.maximum(z[j, :] - gradient * inverse[j], zero)


def _gradient(xp: Namespace, G: Array, p: Array, z: Array, l1: Array) -> Array:
    return xp.matmul(G, z) - p + xp.expand_dims(l1, axis=1)


def _residual(xp: Namespace, G: Array, p: Array, z: Array, l1: Array) -> tuple[Array, Array]:
    """Return, per column, the residual of the optimality conditions and the rounding error of the gradient."""
    live = xp.expand_dims(xp.linalg.diagonal(G) > 0, axis=1)
    natural = xp.abs(xp.minimum(z, _gradient(xp, G, p, z, l1)))
    residual = xp.max(xp.where(live, natural, xp.zeros_like(natural)), axis=0)
    return residual, 10 * float(xp.finfo(z.dtype).eps) * xp.max(xp.matmul(xp.abs(G), z), axis=0)


def _face_step(xp: Namespace, G: Array, p: Array, z: Array, l1: Array, enter: Array) -> tuple[Array, Array]:
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
