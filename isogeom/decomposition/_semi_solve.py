"""The minimisation behind Semi-NMF: starts, iterations in a singular subspace, and polishing on the full rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isogeom._validation import Steps
from isogeom._xp import Array
from isogeom.decomposition._alternation import Problem, State, advance, code_step
from isogeom.decomposition._certificates import Survey
from isogeom.decomposition._rows import Rows
from isogeom.decomposition._semi_starts import closed_start, scores, svd_start
from isogeom.decomposition._starts import kmeans_rows, kmeans_size, kmeans_start, random_start, unit_rows

# Iterations that every start gets before those that lag behind are left, and of a lap after that.
_SCOUT_ITER = 30
# With this many times more rows than k-means looks at, starts first run on that sample, in shorter laps.
_SAMPLE_GAIN = 2
_SCOUT_ITER_SAMPLED = 5
# A start is left once it lacks more than this many times what it gained in its last lap, on all rows or a sample.
_CREDIT, _CREDIT_SAMPLED = 3, 1
# Alternations on the full rows at the end.
_POLISH_ITER = 3
# A plain fit whose objective exceeds the lower bound by at most this share of it leaves other starts little to gain.
_CLOSE = 0.1
_ROUNDING = 1e-6
# A plain fit is done once its objective exceeds the lower bound by this many times the tolerance.
_BOUND_TOL = 100
# The subspace pays where it is this many times smaller than the space of the rows, and these have many entries; there
# the atoms end near, not at, a stationary point of the full rows.
_SUBSPACE_GAIN, _SUBSPACE_SIZE = 4, 2**20
# A start for the plain model: the penalised one, which has the sparse atoms that many equal fits of the plain one mix.
_WARM_ALPHA, _WARM_TOL = 0.05, 1e-3


_NO_CALLBACKS = Steps()


@dataclass(frozen=True)
class Task:
    """What to minimise and how long: penalties are absolute weights."""

    k: int
    penalty: float
    ridge: float
    max_iter: int
    tol: float
    # Iterations whose decreases, together, are held against the tolerance.
    window: int = 1
    # Reports every iteration to the callbacks of the estimator, those of starts that are tried included.
    step: Any = _NO_CALLBACKS

    @property
    def plain(self) -> bool:
        """Whether nothing but the squared error counts."""
        return self.penalty == 0 and self.ridge == 0


@dataclass(frozen=True)
class Space:
    """Rows in the coordinates of the iterations: scores on singular directions, or the rows themselves."""

    rows: Rows
    axes: Array
    embed: Array | None
    facts: Survey
    # Squared norm to go with the rows: with what the axes leave over, for scores.
    squares: float

    def scores(self) -> Array:
        """Return the scores of the rows on the leading directions."""
        if self.facts.scores is not None:
            return self.facts.scores
        return scores(self.rows, self.axes, self.facts.n_samples)

    def floor(self) -> float:
        """Return half a squared norm that cannot be told from zero in sums over the rows."""
        return 10 * float(self.rows.xp.finfo(self.rows.dtype).eps) * self.facts.squares

    def target(self, task: Task) -> float:
        """Return the objective at which nothing is left to gain: that of the SVD, for a plain fit."""
        if not task.plain or task.tol == 0:
            return -1.0
        return self.facts.tail / 2 * (1 + _BOUND_TOL * task.tol)

    def reached(self, state: State, task: Task) -> bool:
        """Tell whether the objective is that of the SVD, to the tolerance."""
        return task.plain and state.path[-1] <= self.target(task)

    def attained(self, state: State) -> bool:
        """Tell whether the objective is that of the SVD to rounding."""
        return state.path[-1] <= self.facts.tail / 2 * (1 + _ROUNDING) + self.floor()

    def close(self, state: State, task: Task) -> bool:
        """Tell whether a plain fit is so near the SVD of its rank, and below that of one rank less, as to be chosen."""
        most = min(self.facts.tail * (1 + _CLOSE), self.facts.tail + self.facts.last) / 2
        return task.plain and state.path[-1] <= most

    def back(self, D: Array) -> Array:
        """Return atoms in the coordinates of the full rows."""
        return D if self.embed is None else self.rows.xp.matmul(D, self.embed)

    def into(self, D: Array) -> Array:
        """Return unit atoms, given in the coordinates of the full rows, in those of the iterations."""
        xp = self.rows.xp
        return D if self.embed is None else unit_rows(xp.matmul(D, xp.matrix_transpose(self.embed)))[0]


def choose_space(rows: Rows, facts: Survey) -> Space:
    """Return the space of the iterations.

    Scores on the leading directions hold all of the objective but a constant, the squared error of the SVD, for atoms
    in their span: iterations there cost ``n k²`` and not ``n k d``.
    """
    xp, p = rows.xp, int(facts.axes.shape[0])
    small = facts.n_samples * facts.n_features < _SUBSPACE_SIZE
    if small or _SUBSPACE_GAIN * p > facts.n_features:
        return Space(rows, facts.axes, None, facts, facts.squares)
    own = xp.eye(p, dtype=rows.dtype, device=rows.device)
    found = scores(rows, facts.axes, facts.n_samples) if facts.scores is None else facts.scores
    # Not the squared norm of the rows: scores from float32 products miss it by more than what may be left over.
    squares = facts.tail + float(xp.sum(xp.vecdot(found, found)))
    return Space(Rows.of_array(found), own, facts.axes, facts, squares)


def start(space: Space, name: str, task: Task, rng: np.random.Generator) -> tuple[Array, Array] | None:
    """Return atoms and codes of the start `name`, or None where it does not exist (the closed form)."""
    xp, rows, facts = space.rows.xp, space.rows, space.facts
    reference = xp.zeros((1, facts.n_features), dtype=rows.dtype, device=rows.device)
    if name == "closed":
        return closed_start(space.scores(), space.axes, task.k)
    if name == "kmeans":
        D = kmeans_start(kmeans_rows(rows, facts.n_samples, task.k, rng), task.k, rng)
    else:
        D = space.into(random_start(reference, task.k, rng))
    if name == "svd":
        return svd_start(space.scores(), space.axes, task.k, D)
    return D, xp.zeros((facts.n_samples, task.k), dtype=rows.dtype, device=rows.device)


def run(space: Space, state: State, task: Task) -> State:
    """Iterate, in place, until the tolerance or until `task.max_iter` iterations are made in all."""
    done = max(len(state.path) - 1, 0)
    problem = Problem(space.squares, task.penalty, task.ridge, space.target(task))
    left = task.max_iter - done
    return advance(space.rows, state, problem, max_iter=left, tol=task.tol, step=task.step, window=task.window)


def launch(space: Space, name: str, task: Task, rng: np.random.Generator) -> State | None:
    """Return the state of one start; those from directions alone go through the penalised model if it is plain.

    Where rows abound, they do so on a sample of them.
    """
    begun = start(space, name, task, rng)
    if begun is None:
        return None
    state = State(*begun)
    if name not in ("kmeans", "random") or space.facts.mean_norm == 0 or not task.plain:
        return state
    penalty = _WARM_ALPHA * space.facts.mean_norm
    warm = replace(task, penalty=penalty, max_iter=_SCOUT_ITER, tol=max(_WARM_TOL, task.tol), window=1)
    if is_sampled(space, task):
        return State(_atoms_of_sample(space, state.D, warm, rng), state.Z)
    run(space, state, warm)
    return State(state.D, state.Z)


def _atoms_of_sample(space: Space, D: Array, task: Task, rng: np.random.Generator) -> Array:
    """Return the atoms after iterations from `D` on a sample of the rows."""
    xp, sample = space.rows.xp, kmeans_rows(space.rows, space.facts.n_samples, task.k, rng)
    empty = xp.zeros((sample.shape[0], task.k), dtype=sample.dtype, device=space.rows.device)
    problem = Problem(float(xp.sum(sample * sample)), task.penalty, task.ridge)
    state = State(D, empty)
    return advance(Rows.of_array(sample), state, problem, max_iter=task.max_iter, tol=task.tol).D


def is_sampled(space: Space, task: Task) -> bool:
    """Tell whether starts are compared on a sample of the rows."""
    return space.facts.n_samples >= _SAMPLE_GAIN * kmeans_size(task.k)


def solve(
    rows: Rows, facts: Survey, task: Task, *, init: Any, n_init: int, rng: np.random.Generator
) -> tuple[State, str]:
    """Return the final state, in the coordinates of the full rows, and why the iterations stopped.

    The path is that of the best start. With the squared norm of the full rows, the objective in the subspace is that of
    the embedded atoms on the full rows: the path goes on without a jump when these are polished.
    """
    space = choose_space(rows, facts)
    if not isinstance(init, str):
        empty = rows.xp.zeros((facts.n_samples, task.k), dtype=rows.dtype, device=rows.device)
        best = run(space, State(space.into(init), empty), task)
    elif init == "auto":
        best = _best(space, _candidates(task, n_init), task, rng)
    else:
        best = _best(space, [init] * (1 if init == "svd" else n_init), task, rng)
    reason = "max_iter"
    if space.reached(best, task) or (task.plain and space.attained(best) and facts.tail > space.floor()):
        reason = "bound"
    elif best.settled:
        reason = "exact" if best.decrease == 0 and best.path[-1] <= space.floor() else "tol"
    elif task.step.stop_requested:
        reason = "callback"
    start_full = State(space.back(best.D), best.Z, best.statistics, best.path, best.decrease, moves=0)
    floor, embedded = space.floor(), space.embed is not None
    # The scores are not needed any more.
    del space, best
    if not embedded or reason in ("bound", "callback") or facts.tail <= floor:
        return start_full, reason
    return _polish(rows, start_full, facts, task), reason


def _candidates(task: Task, n_init: int) -> list[str]:
    free = ["kmeans"] * n_init + ["random"] * n_init + ["svd"]
    return ["closed", *free] if task.plain else free


def _best(space: Space, names: list[str], task: Task, rng: np.random.Generator, *, sample: bool = False) -> State:
    """Iterate from every start for a while, and to the end from those that may be the best.

    Where rows abound, penalised starts run on a sample of them (`sample`), and only the best goes on to all rows.
    """
    if is_sampled(space, task) and not task.plain and names != ["svd"]:
        return run(space, _best_of_sample(space, names, task, rng), task)
    lap = _SCOUT_ITER_SAMPLED if sample or is_sampled(space, task) else _SCOUT_ITER
    scout = replace(task, max_iter=min(lap, task.max_iter)) if len(names) > 1 else task
    # Starts of one kind draw from a generator of their own: among others they are what they are alone.
    draws = {name: np.random.default_rng(int(rng.integers(2**63))) for name in ("kmeans", "random", "svd")}
    states: list[State] = []
    for i, name in enumerate(names):
        state = launch(space, name, task, draws.get(name, rng))
        if state is None:
            continue
        states.append(run(space, state, scout))
        best = min(states, key=_objective)
        if space.reached(best, task) or task.step.stop_requested:
            # No other start can do better, or a callback wants no other.
            return best
        if name == "closed" and space.attained(best):
            return best
        if "kmeans" not in names[i + 1 :] and space.close(best, task):
            # Directions of clusters come first: they are as good as any, and mean more than those of a construction.
            return run(space, best, task)
    return _race(space, states, task, lap, _CREDIT_SAMPLED if sample else _CREDIT)


def _objective(state: State) -> float:
    return state.path[-1]


def _race(space: Space, states: list[State], task: Task, lap: int, credit: int) -> State:
    """Return the best state after iterations from all of them, a lap at a time, that end for those that lag behind.

    A state is left once it lacks more than `credit` times what it gained in its last lap.
    """

    def may_win(state: State, best: State) -> bool:
        gained = state.path[-1 - min(lap, len(state.path) - 1)] - state.path[-1]
        going = not state.settled and len(state.path) <= task.max_iter
        return going and credit * gained > state.path[-1] - best.path[-1]

    while True:
        best = min(states, key=_objective)
        rivals = [state for state in states if state is not best and may_win(state, best)]
        if not rivals:
            return best if best.settled else run(space, best, task)
        states = [best, *rivals]
        for state in states:
            if not state.settled:
                run(space, state, replace(task, max_iter=min(len(state.path) - 1 + lap, task.max_iter)))
            if task.step.stop_requested or space.reached(state, task):
                return min(states, key=_objective)


def _best_of_sample(space: Space, names: list[str], task: Task, rng: np.random.Generator) -> State:
    """Return the atoms, without codes, of the start that is best on a sample of the rows after a few iterations."""
    xp, facts = space.rows.xp, space.facts
    sample = kmeans_rows(space.rows, facts.n_samples, task.k, rng)
    share = int(sample.shape[0]) / facts.n_samples
    tail, last = facts.tail * share, facts.last * share
    squares = float(xp.sum(xp.vecdot(sample, sample))) + (0.0 if space.embed is None else tail)
    part = replace(facts, n_samples=int(sample.shape[0]), squares=squares, tail=tail, last=last, scores=None)
    small = Space(Rows.of_array(sample), space.axes, space.embed, part, squares)
    short = min(_SCOUT_ITER, task.max_iter)
    warm = replace(task, max_iter=short, tol=max(_WARM_TOL, task.tol), window=1, step=_NO_CALLBACKS)
    D = _best(small, names, warm, rng, sample=True).D
    return State(D, xp.zeros((facts.n_samples, task.k), dtype=space.rows.dtype, device=space.rows.device))


def _polish(rows: Rows, state: State, facts: Survey, task: Task) -> State:
    """Let the atoms leave the subspace, in a few iterations on the full rows."""
    left = min(_POLISH_ITER, task.max_iter + 1 - len(state.path))
    if left > 0:
        problem = Problem(facts.squares, task.penalty, task.ridge)
        before = state.statistics
        inner: list[float] = []
        state.Z, state.statistics = code_step(rows, state.D, state.Z, problem, inner=inner)
        # The codes of the subspace on the full rows: what is more or less than on the scores is the rounding of these.
        shift = problem.objective_of(sum(inner), before, state.D) - state.path[-1]
        state.path = [value + shift for value in state.path]
        # The first entry of the full rows replaces the last of the subspace, whose codes it improves.
        state.path[-1] = problem.objective(state.statistics, state.D)
        advance(rows, state, problem, max_iter=left, tol=task.tol)
    return state
