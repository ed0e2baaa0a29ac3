"""A whole fit of Semi-NMF: survey of the rows, minimisation, order of the atoms, exact codes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._validation import Steps, check_beside, check_choice, check_integer, check_real, check_rows
from isogeom._xp import Array
from isogeom.decomposition._alternation import State
from isogeom.decomposition._certificates import Survey, survey
from isogeom.decomposition._directions import moderate
from isogeom.decomposition._rows import Rows
from isogeom.decomposition._semi_codes import Coding, atom_energies, encode, measure
from isogeom.decomposition._semi_solve import Task, solve
from isogeom.decomposition._starts import unit_rows

# Iterations that the tolerance looks back on.
_WINDOW = 10
_INITS = ("auto", "kmeans", "svd", "random")


@dataclass(frozen=True)
class Settings:
    """Validated parameters of the estimator."""

    alpha: float
    ridge: float
    n_init: int
    max_iter: int
    tol: float
    sort_by: str
    center: bool
    chunk: int | None

    @classmethod
    def of(cls, model: Any) -> Settings:
        """Validate the parameters that do not depend on the rows."""
        chunk = model.chunk_size
        return cls(
            alpha=check_real(model.alpha, "alpha", low=0),
            ridge=check_real(model.ridge, "ridge", low=0),
            n_init=check_integer(model.n_init, "n_init", low=1),
            max_iter=check_integer(model.max_iter, "max_iter", low=1),
            tol=check_real(model.tol, "tol", low=0),
            sort_by=check_choice(model.sort_by, "sort_by", ("energy", "codes")),
            center=check_choice(model.center, "center", (False, True)),
            chunk=None if chunk is None else check_integer(chunk, "chunk_size", low=1),
        )


@dataclass(frozen=True)
class Outcome:
    """What a fit ends with; `components` in the dtype of the rows."""

    components: Array
    coding: Coding
    energies: Array
    facts: Survey
    mean: Array | None
    penalty: float
    path: list[float]
    decrease: float
    reason: str


def check_start(model: Any, rows: Rows, like: Array) -> tuple[int, Any]:
    """Return the number of atoms, and the start: its name, or unit atoms in the library and on the device of `like`."""
    given = None if isinstance(model.init, str) else _check_atoms(model.init, like)
    if given is None:
        check_choice(model.init, "init", _INITS)
    k = min(rows.shape) if given is None else int(given.shape[0])
    if model.n_components is not None:
        k = check_integer(model.n_components, "n_components", low=1)
    if given is None:
        return k, model.init
    if k != given.shape[0]:
        raise ValueError(
            f"init has {given.shape[0]} rows but n_components={k}: pass one atom per component, or n_components=None."
        )
    return k, unit_rows(rows.xp.astype(given, rows.dtype))[0]


def _check_atoms(init: Any, like: Array) -> Array:
    """Validate an array of starting atoms; a host array is brought to the library and device of the rows."""
    if not _is_matrix(init):
        what = f"an array of shape {tuple(init.shape)}" if hasattr(init, "shape") else repr(init)[:60]
        raise ValueError(
            f"init={what} must be one of {', '.join(map(repr, _INITS))}, or real numbers of shape (n_components, "
            "n_features): one atom per row."
        )
    given = check_rows(init, name="init", owner="SemiNMF")
    if given.shape[1] != like.shape[1]:
        raise ValueError(f"init has {given.shape[1]} features, but X has {like.shape[1]} features.")
    if not _xp.is_foreign(given):
        return _xp.asarray_like(given, like)
    check_beside(given, like, name="init", other_name="X")
    return given


def _is_matrix(init: Any) -> bool:
    if _xp.is_foreign(init):
        return init.ndim == 2
    try:
        values = np.asarray(init)
    except ValueError:
        # Rows of different lengths.
        return False
    return values.ndim == 2 and values.dtype.kind in "fiubO"


def fit_rows(
    rows: Rows,
    settings: Settings,
    *,
    k: int,
    init: Any,
    rng: np.random.Generator,
    like: Array,
    keep: bool,
    step: Steps,
) -> Outcome:
    """Fit `k` atoms to the rows.

    `keep` tells whether the codes are wanted, `like` is an array in the dtype to use, and `step` reports the
    iterations to the callbacks.
    """
    rows, unit = moderate(rows)
    rows, facts = survey(rows, k, center=settings.center)
    penalty = settings.alpha * facts.mean_norm
    task = Task(k, penalty, settings.ridge, settings.max_iter, settings.tol, min(_WINDOW, settings.max_iter), step)
    state, reason = solve(rows, facts, task, init=init, n_init=settings.n_init, rng=rng)
    path, decrease = state.path, state.decrease
    components, coding, energies = _order(rows, state, facts, task, settings.sort_by, like.dtype, keep)
    del state
    facts = replace(facts, scores=None)
    # No fit of this rank is below the bound: where rounding says so, the bound is what rounding has raised.
    facts = replace(facts, tail=min(facts.tail, coding.error**2))
    mean = rows.mean
    if unit != 1:
        # Squares in those units may be infinite or zero; what is linear in the rows is not.
        with np.errstate(over="ignore", under="ignore"):
            coding, energies = coding.times(unit), energies * unit * unit
        facts, mean = replace(facts, unit=unit, mean_norm=facts.mean_norm * unit), None if mean is None else mean * unit
        path, penalty = [value * unit * unit for value in path], penalty * unit
    return Outcome(components, coding, energies, facts, mean, penalty, path, decrease, reason)


def _order(
    rows: Rows, state: State, facts: Survey, task: Task, sort_by: str, dtype: Any, keep: bool
) -> tuple[Array, Coding, Array]:
    """Return the atoms by falling energy of their exact codes, those codes and the energies."""
    xp, D = rows.xp, state.D
    components = xp.astype(D, dtype)
    span = None if facts.scores is None else (facts.axes, facts.scores)
    rounded = xp.astype(components, D.dtype)
    coding = measure(rows, rounded, task.penalty, task.ridge, guess=state.Z, span=span, bound=facts.tail)
    energies = atom_energies(coding.statistics.A, xp.astype(components, D.dtype), sort_by)
    order = xp.argsort(energies, descending=True, stable=True)
    components, energies = xp.take(components, order, axis=0), xp.take(energies, order)
    coding.statistics = coding.statistics.take(order)
    if keep:
        # As transform will: codes for atoms in another order, or from other products, differ by rounding.
        coding.Z, coding.residual = encode(rows, xp.astype(components, D.dtype), task.penalty, task.ridge, dtype)
    return components, coding, energies
