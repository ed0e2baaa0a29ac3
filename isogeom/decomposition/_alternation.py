"""The alternation of Semi-NMF as pure functions: code steps and atom steps that never raise the objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from isogeom import _xp
from isogeom._linalg import row_norms
from isogeom._xp import Array, Namespace
from isogeom.decomposition._nnls import coordinate_sweeps
from isogeom.decomposition._rows import Rows
from isogeom.decomposition._starts import unit_rows

# Sweeps of coordinate descent on the codes, and passes over the atoms, in one iteration.
_SWEEPS = 2
_ATOM_PASSES = 3
# A stop needs this many decreases in a row below a thousandth of the tolerance, where there is no window to look at.
_QUIET, _QUIET_SHARE = 3, 1e-3
# How often dead atoms are moved before they are left alone.
_MOVES = 5
# Extrapolation of the atoms: first and largest step, growth after a success, of its limit, and cut after a failure.
_STEP, _LIMIT, _GROW, _GROW_LIMIT, _CUT = 0.5, 3.0, 1.2, 1.05, 0.5


@dataclass
class Statistics:
    """Sums over rows that hold all an atom step needs: ``Z.T @ Z``, ``Z.T @ X`` and the column sums of Z."""

    A: Array
    B: Array
    sums: Array

    @classmethod
    def zeros(cls, D: Array) -> Statistics:
        """Return the statistics of no rows, for atoms like `D`."""
        xp = _xp.array_namespace(D)
        k = D.shape[0]
        return cls(xp.zeros((k, k), dtype=D.dtype, device=_xp.device(D)), xp.zeros_like(D), xp.zeros_like(D[:, 0]))

    def add(self, Z: Array, rows: Array) -> None:
        """Add the codes `Z` of `rows`; their products are made in the dtype of the rows."""
        xp = _xp.array_namespace(Z, rows)
        transposed = xp.matrix_transpose(Z)
        self.A = self.A + xp.matmul(transposed, Z)
        products = xp.matmul(xp.astype(transposed, rows.dtype, copy=False), rows)
        self.B = self.B + xp.astype(products, self.B.dtype, copy=False)
        self.sums = self.sums + xp.sum(Z, axis=0)

    def take(self, order: Array) -> Statistics:
        """Return the same sums for atoms in another order."""
        xp = _xp.array_namespace(self.A)
        A = xp.take(xp.take(self.A, order, axis=0), order, axis=1)
        return Statistics(A, xp.take(self.B, order, axis=0), xp.take(self.sums, order))

    def merge(self, other: Statistics) -> None:
        """Add the sums of other rows."""
        self.A, self.B, self.sums = self.A + other.A, self.B + other.B, self.sums + other.sums

    def scale(self, factors: Array) -> None:
        """Account for codes multiplied, column by column, by `factors`."""
        xp = _xp.array_namespace(factors)
        column = xp.expand_dims(factors, axis=1)
        self.A, self.B, self.sums = self.A * column * factors, self.B * column, self.sums * factors


@dataclass(frozen=True)
class Problem:
    """What an alternation minimises: absolute weights of the penalties, the squared Frobenius norm of the rows.

    At an objective of `target` or less there is nothing left to gain.
    """

    squares: float
    penalty: float = 0.0
    ridge: float = 0.0
    target: float = -1.0

    @property
    def bounded(self) -> bool:
        """Whether the norms of the atoms must be bounded: longer atoms would make the penalties void."""
        return self.penalty > 0 or self.ridge > 0

    def objective(self, statistics: Statistics, D: Array) -> float:
        """Return the objective from the sums of the codes and the atoms: no pass over the rows."""
        return self.objective_of(float(_xp.array_namespace(D).sum(statistics.B * D)), statistics, D)

    def objective_of(self, inner: float, statistics: Statistics, D: Array) -> float:
        """Return the same from the inner product of ``X`` and ``Z @ D``, whatever rows the sums hold in B."""
        xp, A = _xp.array_namespace(D), statistics.A
        fit = self.squares - 2 * inner + float(xp.sum(xp.matmul(A, D) * D))
        total = max(fit, 0.0) / 2 + self.penalty * float(xp.sum(statistics.sums))
        return total + self.ridge / 2 * float(xp.linalg.trace(A)) if self.ridge else total


@dataclass
class State:
    """A fit in progress: atoms, codes, their sums, and the objective so far."""

    D: Array
    Z: Array
    statistics: Any = None
    path: list[float] = field(default_factory=list)
    decrease: float = math.inf
    # Iterations since dead atoms moved, decreases next to nothing in a row, and whether the tolerance is met.
    calm: int = 0
    quiet: int = 0
    settled: bool = False
    moves: int = _MOVES
    previous: Any = None
    step: float = _STEP
    limit: float = 1.0


def advance(
    rows: Rows,
    state: State,
    problem: Problem,
    *,
    max_iter: int,
    tol: float,
    step: Callable[[dict[str, float]], bool] = lambda _: False,
    window: int = 1,
) -> State:
    """Alternate atom and code steps, in place; no iteration raises the objective.

    Atoms are extrapolated along their last change, with a step that grows as long as the objective falls; where it
    would rise, the iteration is repeated without extrapolation, and the step is cut (Ang and Gillis 2019).

    Parameters
    ----------
    rows : Rows
        Rows, read once per iteration (twice after an extrapolation too far).
    state : State
        Unit atoms of shape (k, n_features) and codes of shape (n_samples, k), in the accumulator's dtype.
    problem : Problem
        What to minimise.
    max_iter : int
        Largest number of iterations in this call.
    tol : float
        Relative decrease of the objective, in the last `window` iterations together, at which to stop.
    step : callable
        Gets the objective after every iteration, and tells whether to stop there.
    window : int, default=1
        Iterations that `tol` looks back on, at least 1. On a plateau, as when two atoms share a direction before one
        of them leaves, single decreases become small long before the end. A fit that is exact to rounding, or rests
        for three iterations, stops before.

    Returns
    -------
    State
        `state`, with `path` (objective after a first code step, and after every iteration) grown; `decrease`, the
        relative decrease over the window: 0 if the fit is exact to rounding, infinite if dead atoms were moved; and
        `settled`, whether the tolerance ended the iterations.
    """
    xp = rows.xp
    # Half a squared norm that cannot be told from zero in sums of this size.
    floor = 10 * float(xp.finfo(state.D.dtype).eps) * problem.squares
    if state.statistics is None:
        state.Z, state.statistics = code_step(rows, state.D, state.Z, problem)
        state.path.append(problem.objective(state.statistics, state.D))
    for _ in range(max_iter):
        if state.path[-1] <= problem.target:
            break
        D, lengths = atom_step(state.statistics, state.D, bounded=problem.bounded)
        dead = xp.linalg.diagonal(state.statistics.A) * lengths <= 0
        moved = False
        if state.moves and bool(xp.any(dead)):
            state.Z = state.Z * lengths
            D, moved = move_dead_atoms(rows, state.Z, D, dead, max(problem.penalty, math.sqrt(floor)))
            lengths, state.previous, state.moves = xp.ones_like(lengths), None, state.moves - 1
        _iterate(rows, state, problem, D, lengths)
        state.calm = 0 if moved else state.calm + 1
        _judge(state, floor, tol, window)
        if step({"objective": state.path[-1]}) or state.settled:
            break
    return state


def _judge(state: State, floor: float, tol: float, window: int) -> None:
    """Tell whether the last decreases of the objective meet the tolerance."""
    now, back = state.path[-1], min(window, len(state.path) - 1)
    if now <= floor:
        state.decrease, state.settled = 0.0, True
        return
    state.decrease = max(state.path[-1 - back] - now, 0.0) / now if state.calm >= back else math.inf
    last = max(state.path[-2] - now, 0.0) / now
    state.quiet = state.quiet + 1 if state.calm and last <= tol * _QUIET_SHARE else 0
    state.settled = (state.calm >= window and state.decrease <= tol) or state.quiet >= min(_QUIET, window)


def _iterate(rows: Rows, state: State, problem: Problem, D: Array, lengths: Array) -> None:
    """Take the code step for the atoms `D`, extrapolated if that lowers the objective."""
    ahead = D if state.previous is None else unit_rows(D + state.step * (D - state.previous))[0]
    Z, statistics = code_step(rows, ahead, state.Z, problem, lengths)
    value = problem.objective(statistics, ahead)
    if state.previous is not None and value > state.path[-1]:
        ahead = D
        Z, statistics = code_step(rows, D, state.Z, problem, lengths)
        value = problem.objective(statistics, D)
        state.limit, state.step = state.step, state.step * _CUT
    elif state.previous is not None:
        state.limit = min(state.limit * _GROW_LIMIT, _LIMIT)
        state.step = min(state.step * _GROW, state.limit)
    state.D, state.Z, state.statistics, state.previous = ahead, Z, statistics, D
    state.path.append(value)


def code_step(
    rows: Rows,
    D: Array,
    Z: Array,
    problem: Problem,
    lengths: Array | None = None,
    *,
    inner: list[float] | None = None,
) -> tuple[Array, Statistics]:
    """Return better codes than `Z` (times `lengths`, by columns) for the atoms `D`, and their sums.

    `inner`, if given, gets the inner products of every block and its part of ``Z @ D``, for the former codes.
    """
    xp = rows.xp
    columns = xp.matrix_transpose(D)
    gram = xp.matmul(D, columns)
    if problem.ridge:
        gram = gram + problem.ridge * xp.eye(D.shape[0], dtype=D.dtype, device=rows.device)
    statistics, new = Statistics.zeros(D), xp.empty_like(Z)
    for place, block in rows:
        old = Z[place, :] if lengths is None else Z[place, :] * lengths
        P = xp.matmul(block, columns)
        if inner is not None:
            inner.append(float(xp.sum(xp.vecdot(old, P))))
        codes = coordinate_sweeps(gram, P, old, alpha=problem.penalty, n_sweeps=_SWEEPS, n_rows=rows.shape[0])
        statistics.add(codes, block)
        new[place, :] = codes
    return new, statistics


def atom_step(statistics: Statistics, D: Array, *, bounded: bool) -> tuple[Array, Array]:
    """Return better atoms, scaled to unit norm, and the lengths to scale the codes by in return."""
    xp = _xp.array_namespace(D)
    step = _bounded_atoms if bounded else _least_squares_atoms
    return unit_rows(step(xp, statistics.A, statistics.B, D))


def _least_squares_atoms(xp: Namespace, A: Array, B: Array, D: Array) -> Array:
    """Return the least-squares atoms, as the smallest change of `D`; directions the codes do not resolve stay."""
    diagonal = xp.linalg.diagonal(A)
    live = diagonal > 0
    scale = xp.where(live, 1 / xp.sqrt(xp.where(live, diagonal, xp.ones_like(diagonal))), xp.zeros_like(diagonal))
    rows = xp.expand_dims(scale, axis=1)
    # Codes scaled to unit columns: the eigenvalues then measure dependence only, not units.
    values, vectors = xp.linalg.eigh(rows * A * xp.expand_dims(scale, axis=0))
    keep = values > 1e6 * float(xp.finfo(A.dtype).eps)
    inverse = xp.where(keep, 1 / xp.where(keep, values, xp.ones_like(values)), xp.zeros_like(values))
    gap = rows * (B - xp.matmul(A, D))
    parts = xp.expand_dims(inverse, axis=1) * xp.matmul(xp.matrix_transpose(vectors), gap)
    return D + rows * xp.matmul(vectors, parts)


def _bounded_atoms(xp: Namespace, A: Array, B: Array, D: Array) -> Array:
    """Return atoms after passes of exact minimisation, one atom at a time, over the ball of norm 1."""
    D = xp.asarray(D, copy=True)
    diagonal = xp.linalg.diagonal(A)
    live = diagonal > 0
    inverse = xp.where(live, 1 / xp.where(live, diagonal, xp.ones_like(diagonal)), xp.zeros_like(diagonal))
    # With the rows of A and B divided by the diagonal beforehand, a step is one product, one sum and one norm.
    A, B = A * xp.expand_dims(inverse, axis=1), B * xp.expand_dims(inverse, axis=1)
    for _ in range(_ATOM_PASSES):
        for j in range(int(D.shape[0])):
            atom = D[j, :] + (B[j, :] - A[j, :] @ D)
            norm = (atom @ atom) ** 0.5
            D[j, :] = atom / xp.where(norm > 1, norm, xp.ones_like(norm))
    return D


def residuals(rows: Rows, Z: Array, D: Array) -> Iterator[tuple[slice, Array]]:
    """Yield the place of every block and its residual ``X - Z @ D``."""
    xp = rows.xp
    for place, block in rows:
        yield place, block - xp.matmul(xp.astype(Z[place, :], D.dtype), D)


def worst_rows(rows: Rows, Z: Array, D: Array, count: int) -> tuple[Array, Array]:
    """Return the longest residuals and their norms, longest first, without keeping all of them."""
    xp = rows.xp
    best, lengths = D[:0, :], D[:0, 0]
    for _, residual in residuals(rows, Z, D):
        best = xp.concat([best, residual], axis=0)
        lengths = xp.concat([lengths, row_norms(residual)], axis=0)
        order = xp.argsort(lengths, descending=True, stable=True)[:count]
        best, lengths = xp.take(best, order, axis=0), xp.take(lengths, order, axis=0)
    return best, lengths


def move_dead_atoms(rows: Rows, Z: Array, D: Array, dead: Array, threshold: float) -> tuple[Array, bool]:
    """Return the atoms with those without codes pointed at the longest residuals, and whether there were any.

    Nothing changes in the product ``Z @ D``. Only rows whose residual is longer than `threshold` can use an atom.
    """
    xp = rows.xp
    targets = [j for j in range(int(D.shape[0])) if bool(dead[j])]
    found, lengths = worst_rows(rows, Z, D, len(targets))
    usable = [i for i in range(int(lengths.shape[0])) if float(lengths[i]) > threshold]
    D = xp.asarray(D, copy=True)
    for i, j in zip(usable, targets):
        D[j, :] = unit_rows(found[i : i + 1, :])[0][0, :]
    return D, bool(usable)
