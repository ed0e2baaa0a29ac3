"""Nonnegative least squares for many rows that share one Gram matrix: the coding step of Semi-NMF."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isogeom import _kernels, _xp
from isogeom._results import Result
from isogeom._validation import check_beside, check_real, check_rows
from isogeom._xp import Array, Namespace
from isogeom.decomposition._nnls_descent import burst_length, solve_descent, sweep
from isogeom.decomposition._nnls_pivots import solve_pivots

# Sweeps of the kernel before its first exact step on the support; the number doubles between two such steps.
_FIRST_BURST = 4
# Curvature of unit atoms, in machine epsilons: a Gram matrix with less is left to pivots, and what they take for none.
# Between the two a step to the minimum matters: at a gradient of `tol`, less curvature would not stop it at a bound.
_SINGULAR, _FLAT = 1e5, 1e3
# Smallest eigenvalue of the Gram matrix of unit atoms from which on its inverse is exact enough to be worked with.
_SOUND = 1e-5
# Powers of two of rows from which on sums over them might overflow.
_MAX_EXPONENT = 960
# Gradients of a row, relative to the largest, between which a singular Gram matrix's pivots do not choose by size.
_TIE = 1e-8
# Rows that array code handles together, and elements of those a kernel does (256 KiB in float64: they stay in cache).
_BLOCK_ROWS, _BLOCK_ELEMENTS = 4096, 2**15

# Takes rows, codes to start from (or None) and the weights of the l1 term to codes, residuals and sweeps.
_Solve = Callable[[Array, "Array | None", Array], tuple[Array, Array, int]]


@dataclass(frozen=True)
class NNLSResult(Result):
    """Codes of :func:`batched_nnls`, and how exact they are.

    Attributes
    ----------
    codes : array of shape (n_samples, k)
        Nonnegative minimisers, one row per row of P, in the dtype of P.
    kkt_residual : float
        Largest relative residual of the optimality conditions over the rows, computed in float64: 1e-11 or less for an
        exact solution. Above that where there is no minimum: a zero row of G whose products exceed `alpha`, say.
    n_sweeps : int
        Largest number of passes of descent that a row took before its exact steps settled it: sweeps over the
        coordinates in compiled code, iterations of accelerated gradient descent in array code (torch, small numpy
        problems); 0 where no row needed any.
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
        Symmetric, positive semidefinite, of any rank. Where a row and column are zero, so are the codes: if the
        products there exceed `alpha`, the objective has no minimum, and `kkt_residual` shows by how much.
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
        If shapes do not fit, a value is not finite, `G` is not symmetric or not positive semidefinite, `alpha` or
        `warm_start` is negative, or the codes overflow the dtype of `P`.

    See Also
    --------
    isogeom.decomposition.SemiNMF : Learns the atoms too.
    scipy.optimize.nnls : One row at a time.

    Notes
    -----
    Each row alternates a descent, which finds the support, with a step to the exact minimiser over it, cut at the
    bounds; rows that this does not settle go on with the pivots of Lawson and Hanson, which lower the objective each
    time and so end after finitely many. The descent of array code is accelerated projected gradient descent (Beck and
    Teboulle), one matrix product per iteration for all rows, with momentum that each row restarts by its own gradient
    (O'Donoghue and Candes). Large numpy problems go through compiled loops over rows with sweeps of coordinate descent;
    there, with a well-conditioned `G`, block principal pivoting (Kim and Park) from the signs of the unconstrained
    solution, or of the warm start, takes the place of the sweeps. Arithmetic is float64 where the device has it. A
    row's code does not depend on the other rows. Where `G` is singular the codes may not be unique, but ``codes @ D``
    is; the pivots then start from zero and use independent atoms only, so that no code has more positive entries than
    `G` has rank.

    References
    ----------
    Beck, Teboulle, "A fast iterative shrinkage-thresholding algorithm for linear inverse problems", SIAM Journal on
    Imaging Sciences 2(1), 2009. https://doi.org/10.1137/080716542

    O'Donoghue, Candes, "Adaptive restart for accelerated gradient schemes", Foundations of Computational Mathematics
    15(3), 2015. https://doi.org/10.1007/s10208-013-9150-3

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
    check_beside(P, G, name="P", other_name="G")
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
        check_beside(warm_start, G, name="warm_start", other_name="G")
        warm_start = check_rows(warm_start, name="warm_start", owner="batched_nnls")
        if warm_start.shape != P.shape or float(xp.min(warm_start)) < 0:
            raise ValueError(
                f"warm_start must hold nonnegative codes of the shape of P, {tuple(P.shape)}; got shape "
                f"{tuple(warm_start.shape)}, smallest value {float(xp.min(warm_start)):.3g}."
            )
    Z, residual, n_sweeps = nnls_shared_gram(G, P, alpha=alpha, start=warm_start)
    if float(xp.max(Z)) > float(xp.finfo(P.dtype).max):
        raise ValueError(
            f"Codes of up to {float(xp.max(Z)):.3g} overflow {P.dtype}, the dtype of P: pass G and P in float64, or "
            "rescale them."
        )
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
        Largest number of sweeps of coordinate descent per row, for compiled code; array code makes up to as many times
        more iterations of accelerated gradient descent as it makes in place of the first sweeps (`burst_length`). Rows
        that need more go on with exact pivots.
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
        A zero atom counts with ``s_j = 1``; a product above `alpha` with it shows here, as there is no minimum.
    n_sweeps : int
        Largest number of sweeps, or of iterations of array code, that any row took; 0 if `gram` is singular, or so
        well-conditioned that compiled code needs none.

    Raises
    ------
    ValueError
        If the codes overflow.

    Notes
    -----
    Each row alternates a descent that finds the support (accelerated projected gradients in array code, sweeps of
    cyclic coordinate descent in the kernel) with one step to the exact minimiser over the coordinates that are
    positive, cut at the bounds. A row that this does not settle (nearly
    dependent atoms) goes on as in Lawson and Hanson's method: whenever its support is optimal, the coordinate with the
    most negative gradient enters. Every move lowers the objective and there are finitely many supports, so the solution
    is exact. The kernel for well-conditioned Gram matrices exchanges blocks of coordinates instead, and leaves rows
    that end with a residual above `tol` to the sweeps. A singular Gram matrix is left to pivots on independent atoms
    (`_nnls_pivots`). Rows never look at each other: the same p gives the same code in any batch, up to rounding.

    References
    ----------
    Lawson, Hanson, "Solving least squares problems", SIAM, 1995, chapter 23. https://doi.org/10.1137/1.9781611971217
    """
    return gram_solver(
        gram, alpha=alpha, tol=tol, max_sweeps=max_sweeps, algorithm=algorithm, n_rows=n_rows or int(P.shape[0])
    )(P, start)


def gram_solver(
    gram: Array,
    *,
    alpha: float = 0.0,
    tol: float = 1e-12,
    max_sweeps: int = 60,
    algorithm: str = "auto",
    n_rows: int,
) -> Callable[..., tuple[Array, float, int]]:
    """Prepare :func:`nnls_shared_gram` for rows that come in blocks: what depends on `gram` alone is done once.

    Returns
    -------
    callable
        Takes `P` and, optionally, `start`; gives `Z`, `residual` and `n_sweeps`.
    """
    xp = _xp.array_namespace(gram)
    acc = _xp.accumulator_dtype(xp, _xp.device(gram))
    scale, unit = _normalise(xp, xp.astype(gram, acc))
    if _xp.is_numpy(xp):
        # A kernel is compiled for one memory layout.
        unit = xp.ascontiguousarray(unit)
    tol = max(tol, 100 * float(xp.finfo(acc).eps))
    solve, compiled = _method(xp, unit, tol, max_sweeps, algorithm, n_rows)
    height = max(1, min(_BLOCK_ROWS, _BLOCK_ELEMENTS // int(gram.shape[0]))) if compiled else _BLOCK_ROWS
    shortest = float(xp.min(scale))
    dead = xp.linalg.diagonal(unit) <= 0
    some_dead = bool(xp.any(dead))

    def solve_blocks(P: Array, start: Array | None = None) -> tuple[Array, float, int]:
        codes, worst, most = [], 0.0, 0
        down = _down(max(float(xp.max(P)), -float(xp.min(P))), shortest)
        l1 = alpha * down / scale
        for first, block in enumerate(_xp.row_blocks(P, height)):
            rows, guess = xp.astype(block, acc), None
            rows = (rows if down == 1 else rows * down) / scale
            if start is not None:
                guess = start[first * height : first * height + rows.shape[0], :]
                guess = xp.astype(guess, acc) * scale * down
            if compiled:
                rows, guess = xp.ascontiguousarray(rows), None if guess is None else xp.ascontiguousarray(guess)
            Z, residuals, sweeps = solve(rows, guess, l1)
            worst = max(worst, float(xp.max(residuals)), _unbounded(xp, dead, rows, l1) if some_dead else 0.0)
            most = max(most, int(sweeps))
            _check_range(xp, Z, scale, shortest, down)
            Z = Z / scale
            codes.append(Z if down == 1 else Z / down)
        return codes[0] if len(codes) == 1 else xp.concat(codes, axis=0), worst, most

    return solve_blocks


def _down(largest: float, shortest: float) -> float:
    """Return the power of two, 1 if possible, that keeps rows over the norm of the shortest atom far from overflow."""
    excess = math.frexp(largest)[1] - math.frexp(shortest)[1] - _MAX_EXPONENT
    return math.ldexp(1.0, -excess) if excess > 0 else 1.0


def _check_range(xp: Namespace, Z: Array, scale: Array, shortest: float, down: float) -> None:
    """Raise where codes `Z` of unit atoms and scaled rows overflow in the units of the caller."""
    limit, largest = float(xp.finfo(Z.dtype).max) * down, float(xp.max(Z))
    if largest > limit * min(shortest, 1.0) and bool(xp.any(Z > limit * xp.minimum(scale, xp.ones_like(scale)))):
        raise ValueError(
            f"Codes overflow {Z.dtype}: they reach {largest / down:.3g} for atoms of norm 1, and the shortest atom has "
            f"norm {shortest:.3g}. Rescale the rows or the atoms (P or G)."
        )


def _method(
    xp: Namespace, unit: Array, tol: float, max_sweeps: int, algorithm: str, n_rows: int
) -> tuple[_Solve, bool]:
    """Choose the method by the conditioning of `unit`, and the kernel if it pays; tell whether it does."""
    eps, k = float(xp.finfo(unit.dtype).eps), int(unit.shape[0])
    spectrum, most = xp.linalg.eigvalsh(unit), _max_pivots(unit)
    smallest, largest = float(spectrum[0]), float(spectrum[-1])
    singular = smallest <= _SINGULAR * eps * k
    # A pivot costs a few k**2 and a row needs about k of them; sweeps and steps cost less.
    size = math.inf if algorithm == "numba" else (2.0 * k if singular else 40.0) * n_rows * k**2
    names = ("nnls_pivots",) if singular else ("nnls_solve",) if smallest < _SOUND else ("nnls_solve", "nnls_exchange")
    kernels = [_kernels.available(name, xp, unit.dtype, size) if algorithm != "array" else None for name in names]
    if singular:

        def pivot(rows: Array, _: Array | None, l1: Array) -> tuple[Array, Array, int]:
            arguments = (unit, rows, l1, tol, _FLAT * eps, _TIE, most)
            Z, residuals, _ = solve_pivots(xp, *arguments) if kernels[0] is None else kernels[0](*arguments)
            return Z, residuals, 0

        return pivot, kernels[0] is not None

    def descend(rows: Array, guess: Array | None, l1: Array) -> tuple[Array, Array, int]:
        arguments = (unit, rows, xp.zeros_like(rows) if guess is None else guess, l1, tol)
        if kernels[0] is not None:
            return kernels[0](*arguments, max_sweeps, _FIRST_BURST, most)
        burst = burst_length(k, smallest, largest)
        return solve_descent(xp, *arguments, max_sweeps * burst // _FIRST_BURST, burst, most, largest)

    if len(kernels) < 2 or kernels[1] is None:
        return descend, kernels[0] is not None
    kernel, inverse = kernels[1], xp.linalg.inv(unit)
    inverse = 0.5 * (inverse + xp.matrix_transpose(inverse))

    def exchange(rows: Array, guess: Array | None, l1: Array) -> tuple[Array, Array, int]:
        free = xp.matmul(rows - l1, inverse)
        Z, residuals = kernel(unit, inverse, rows, free, free if guess is None else guess, l1, tol, most)
        rest, sweeps = xp.nonzero(residuals > tol)[0], 0
        if rest.shape[0]:
            Z[rest, :], residuals[rest], sweeps = descend(rows[rest, :], Z[rest, :], l1)
        return Z, residuals, sweeps

    return exchange, True


def _unbounded(xp: Namespace, dead: Array, rows: Array, l1: Array) -> float:
    """Return the largest residual of zero atoms: codes of theirs that would pay have no limit, and stay 0."""
    top = xp.max(xp.abs(rows), axis=1)
    gain = xp.max(xp.where(dead, rows - l1, xp.zeros_like(rows)), axis=1)
    return max(0.0, float(xp.max(gain / xp.where(top > 0, top, xp.ones_like(top)))))


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
    sweep(xp, gram, xp.matrix_transpose(P), columns, xp.zeros_like(gram[0, :]) + alpha, n_sweeps)
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
