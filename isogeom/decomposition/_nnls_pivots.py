"""Nonnegative least squares with a singular Gram matrix, row by row in batches: pivots on independent atoms.

Started from zero codes, as in Lawson and Hanson's method: the coordinate with the most negative gradient is driven up
from zero while those on the support follow, so that their gradients stay zero. It stops where its own gradient
vanishes, and joins the support, or where a coordinate of the support reaches zero, which leaves; then the drive goes
on. A coordinate that depends on the support has no curvature and so never arrives before another one leaves: the atoms
of the support stay independent, the inverse of their Gram matrix exists, and each pivot is a rank-one update of it.

Among equally good codes the path decides. It depends on the row alone, and near ties go to the first coordinate, so
that rounding errors, the batch, the library and the compiled kernel (`_kernels/_nnls_pivots.py`) do not show.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from isogeom import _xp
from isogeom._xp import Array, Namespace

# Largest stack of (k, k) inverses, in elements, that moves in step: 8 MiB in float64.
_STACK_ELEMENTS = 2**20


@dataclass
class _Rows:
    """State of the rows that move in step; every array has one row (or entry) per row of the problem."""

    index: Array
    p: Array
    top: Array
    z: Array
    inverse: Array
    face: Array
    barred: Array
    driving: Array
    refined: Array
    pivots: Array
    noise: Array

    def take(self, xp: Namespace, keep: Array) -> _Rows:
        return _Rows(*(xp.take(getattr(self, field.name), keep, axis=0) for field in fields(self)))


def solve_pivots(
    xp: Namespace, G: Array, P: Array, l1: Array, tol: float, cut: float, tie: float, max_pivots: int
) -> tuple[Array, Array, Array]:
    """Minimise ``z @ G @ z / 2 - p @ z + l1 @ z`` over ``z >= 0`` for every row p of `P`; `G` may be singular.

    Parameters
    ----------
    xp : namespace
        Namespace of the arrays, which are all in the accumulator's dtype.
    G : array of shape (k, k)
        Gram matrix of unit atoms; zero rows and columns for zero atoms, whose codes are zero.
    P : array of shape (n, k)
        Right-hand sides.
    l1 : array of shape (k,)
        Weights of the l1 term.
    tol, cut, tie : float
        Residual and gradients that count as zero, and gradients that count as equal, in units of the largest ``|p|``
        of the row; curvature that counts as none.
    max_pivots : int
        Largest number of pivots per row.

    Returns
    -------
    Z : array of shape (n, k)
        Codes.
    residuals : array of shape (n,)
        Residual of the optimality conditions, as in `nnls_shared_gram`.
    pivots : array of shape (n,)
        Number of pivots of each row.
    """
    height = max(1, _STACK_ELEMENTS // int(G.shape[0]) ** 2)
    pieces = [_solve_stack(xp, G, block, l1, tol, cut, tie, max_pivots) for block in _xp.row_blocks(P, height)]
    if len(pieces) == 1:
        return pieces[0]
    Z, residuals, pivots = (xp.concat([piece[part] for piece in pieces], axis=0) for part in range(3))
    return Z, residuals, pivots


def _solve_stack(
    xp: Namespace, G: Array, P: Array, l1: Array, tol: float, cut: float, tie: float, max_pivots: int
) -> tuple[Array, Array, Array]:
    """Solve the rows of one stack; rows that are done leave it in groups, as each leave copies the inverses."""
    rows, done = _start(xp, P), []
    while True:
        gradient, residual, moving = _choose(xp, G, l1, tol, tie, max_pivots, rows)
        n_rows, n_moving = int(rows.z.shape[0]), int(xp.sum(xp.astype(moving, xp.int64)))
        if 4 * n_moving <= 3 * n_rows:
            left = xp.nonzero(~moving)[0]
            done.append([xp.take(a, left, axis=0) for a in (rows.index, rows.z, residual, rows.pivots)])
            if not n_moving:
                break
            keep = xp.nonzero(moving)[0]
            rows = rows.take(xp, keep)
            gradient, moving = xp.take(gradient, keep, axis=0), xp.take(moving, keep, axis=0)
        rows.pivots = rows.pivots + xp.astype(moving, rows.pivots.dtype)
        _pivot(xp, G, gradient, moving, cut, rows)
    index, Z, residuals, pivots = (xp.concat([group[part] for group in done], axis=0) for part in range(4))
    order = xp.argsort(index)
    top = xp.max(xp.abs(P), axis=1)
    residuals = xp.take(residuals, order, axis=0) / xp.where(top > 0, top, xp.ones_like(top))
    return xp.take(Z, order, axis=0), residuals, xp.take(pivots, order, axis=0)


def _start(xp: Namespace, P: Array) -> _Rows:
    n, k = int(P.shape[0]), int(P.shape[1])
    device = _xp.device(P)
    count = xp.zeros(n, dtype=xp.int64, device=device)
    off, nothing = xp.zeros_like(P) > 0, xp.zeros_like(P[:, 0])
    return _Rows(
        index=xp.arange(n, device=device),
        p=P,
        top=xp.max(xp.abs(P), axis=1),
        z=xp.zeros_like(P),
        inverse=xp.zeros((n, k, k), dtype=P.dtype, device=device),
        face=off,
        barred=off,
        driving=count - 1,
        refined=count,
        pivots=count,
        noise=nothing,
    )


def _column(xp: Namespace, a: Array) -> Array:
    return xp.expand_dims(a, axis=1)


def _largest(xp: Namespace, values: Array, where: Array) -> Array:
    return xp.max(xp.where(where, values, xp.zeros_like(values)), axis=1)


def _choose(
    xp: Namespace, G: Array, l1: Array, tol: float, tie: float, max_pivots: int, rows: _Rows
) -> tuple[Array, Array, Array]:
    """Give every row without one a coordinate to drive; return the gradient, its residual and which rows move.

    A row whose support has drifted from its minimiser by rounding errors corrects that first, with nothing to drive.
    """
    live = xp.expand_dims(xp.linalg.diagonal(G) > 0, axis=0)
    gradient = xp.matmul(rows.z, G) - rows.p + xp.expand_dims(l1, axis=0)
    idle = rows.driving < 0
    floor = 10 * float(xp.finfo(G.dtype).eps) * xp.max(xp.matmul(rows.z, xp.abs(G)), axis=1)
    rows.noise = xp.where(idle, tol * rows.top + floor, rows.noise)
    residual = _largest(xp, xp.abs(xp.minimum(rows.z, gradient)), live)
    eager = live & ~rows.face & ~rows.barred & (gradient < -_column(xp, rows.noise))
    # Rows of zeros need no code, whatever their rounding.
    eager = eager & _column(xp, rows.top > 0)
    any_eager = xp.any(eager, axis=1)
    lowest = xp.min(xp.where(eager, gradient, xp.zeros_like(gradient)), axis=1)
    lowest = lowest + xp.minimum(tie * rows.top, -0.5 * lowest)
    entering = xp.argmax(xp.astype(eager & (gradient <= _column(xp, lowest)), xp.int64), axis=1)
    refine = idle & (_largest(xp, xp.abs(gradient), rows.face) > rows.noise) & (rows.refined < 4)
    enter = idle & ~refine & any_eager
    moving = (~idle | enter | refine) & (rows.pivots < max_pivots)
    rows.refined = xp.where(refine, rows.refined + 1, xp.where(enter, xp.zeros_like(rows.refined), rows.refined))
    rows.driving = xp.where(enter, xp.astype(entering, xp.int64), rows.driving)
    stale = xp.nonzero(refine & moving & (rows.refined == 2))[0]
    if stale.shape[0]:
        _invert(xp, G, stale, rows)
    return gradient, residual, moving


def _invert(xp: Namespace, G: Array, stale: Array, rows: _Rows) -> None:
    """Compute the inverses of some rows afresh: updates of a nearly singular one lose digits."""
    n, k = int(rows.z.shape[0]), int(rows.z.shape[1])
    face = xp.astype(xp.take(rows.face, stale, axis=0), G.dtype)
    face = xp.expand_dims(face, axis=2) * xp.expand_dims(face, axis=1)
    eye = xp.eye(k, dtype=G.dtype, device=_xp.device(G))
    outside = eye * (1 - face)
    inverse = xp.linalg.inv(face * G + outside) - outside
    inverse = 0.5 * (inverse + xp.matrix_transpose(inverse))
    # Each row takes its own: rows that are not stale keep theirs.
    hits = xp.expand_dims(xp.arange(n, device=_xp.device(G)), axis=1) == xp.expand_dims(stale, axis=0)
    place = xp.argmax(xp.astype(hits, xp.int64), axis=1)
    fresh = xp.expand_dims(xp.expand_dims(xp.any(hits, axis=1), axis=1), axis=2)
    rows.inverse = xp.where(fresh, xp.take(inverse, place, axis=0), rows.inverse)


def _pivot(xp: Namespace, G: Array, gradient: Array, moving: Array, cut: float, rows: _Rows) -> None:
    """Move every row along its direction, to the minimum or to the first bound, and update the inverses."""
    n, k = int(rows.z.shape[0]), int(rows.z.shape[1])
    device, zeros = _xp.device(rows.z), xp.zeros_like(rows.z)
    coordinates = xp.expand_dims(xp.arange(k, dtype=xp.int64, device=device), axis=0)
    is_driven, driven = rows.driving >= 0, coordinates == _column(xp, rows.driving)
    mark = xp.astype(driven, rows.z.dtype)
    rhs = xp.where(
        rows.face & _column(xp, moving), -xp.where(_column(xp, is_driven), xp.matmul(mark, G), gradient), zeros
    )
    step = xp.matmul(rows.inverse, xp.expand_dims(rhs, axis=2))[:, :, 0]
    step = xp.where(rows.face, step, zeros) + mark
    curvature = xp.sum(step * xp.matmul(step, G), axis=1)
    slope, fresh = xp.sum(mark * gradient, axis=1), xp.sum(mark * rows.z, axis=1) == 0
    curved = is_driven & (curvature > cut)
    newton = xp.clip(-slope / xp.where(curved, curvature, xp.ones_like(curvature)), 0, None)
    limit = xp.where(is_driven, xp.where(curved, newton, xp.full_like(newton, xp.inf)), xp.ones_like(newton))
    quiet = is_driven & ~curved & fresh & (slope > -10 * rows.noise)
    down = rows.face & (step < 0)
    reach = xp.where(down, rows.z / xp.where(down, -step, xp.ones_like(step)), xp.full_like(step, xp.inf))
    nearest, q = xp.min(reach, axis=1), xp.argmin(reach, axis=1)
    length = xp.minimum(nearest, limit)
    # Rounding errors, or an objective without a minimum: leave the coordinate where it is.
    barred = quiet | xp.isinf(length)
    stay = barred | ~moving
    length = xp.where(stay, xp.zeros_like(length), length)
    blocked, arrived = ~stay & (nearest < limit), ~stay & is_driven & ~(nearest < limit)
    leaving = (coordinates == _column(xp, q)) & _column(xp, blocked)
    z = xp.clip(rows.z + _column(xp, length) * step, 0, None)
    rows.z = xp.where(leaving, zeros, z)
    lines = xp.take(xp.reshape(rows.inverse, (n * k, k)), xp.arange(n, device=device) * k + q, axis=0)
    lines = xp.where(rows.face, lines, zeros)
    pivot = xp.sum(xp.where(leaving, lines, zeros), axis=1)
    rank_one = xp.where(_column(xp, blocked), lines, xp.where(_column(xp, arrived), step, zeros))
    weight = xp.where(blocked, -pivot, xp.where(arrived, curvature, xp.ones_like(pivot)))
    rows.inverse += xp.expand_dims(rank_one / _column(xp, weight), axis=2) * xp.expand_dims(rank_one, axis=1)
    rows.face = (rows.face & ~leaving) | (driven & _column(xp, arrived))
    rows.barred = (rows.barred & ~_column(xp, blocked)) | (driven & _column(xp, barred))
    rows.driving = xp.where(arrived | barred, -xp.ones_like(rows.driving), rows.driving)
