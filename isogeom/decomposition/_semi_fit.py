"""A whole fit of Semi-NMF: survey of the rows, minimisation, order of the atoms, exact codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._validation import Steps, check_choice, check_integer, check_real, check_rows
from isogeom._xp import Array
from isogeom.decomposition._certificates import Survey, survey
from isogeom.decomposition._semi_codes import Coding, atom_energies, measure
from isogeom.decomposition._semi_rows import Rows
from isogeom.decomposition._semi_solve import Task, solve
from isogeom.decomposition._starts import unit_rows

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
    given = check_rows(init, name="init", owner="SemiNMF")
    if given.shape[1] != like.shape[1]:
        raise ValueError(f"init has {given.shape[1]} features, but X has {like.shape[1]} features.")
    if not _xp.is_foreign(given):
        return _xp.asarray_like(given, like)
    if _xp.array_namespace(given) is not _xp.array_namespace(like):
        raise ValueError("init must be an array of the library of X, or a numpy array.")
    return given


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
    rows, facts = survey(rows, k, center=settings.center)
    penalty = settings.alpha * facts.mean_norm
    task = Task(k, penalty, settings.ridge, settings.max_iter, settings.tol, step)
    state, reason = solve(rows, facts, task, init=init, n_init=settings.n_init, rng=rng)
    D, gram, path, decrease = state.D, state.statistics.A, state.path, state.decrease
    del state
    components, coding, energies = _order(rows, D, gram, task, settings.sort_by, like.dtype, keep)
    return Outcome(components, coding, energies, facts, rows.mean, penalty, path, decrease, reason)


def _order(
    rows: Rows, D: Array, gram: Array, task: Task, sort_by: str, dtype: Any, keep: bool
) -> tuple[Array, Coding, Array]:
    """Return the atoms by falling energy of their exact codes, those codes and the energies."""
    xp = rows.xp
    order = xp.argsort(atom_energies(gram, D, sort_by), descending=True, stable=True)
    # Codes computed for atoms in another order differ by rounding: recompute them, as transform will.
    for _ in range(3):
        D = xp.take(D, order, axis=0)
        components = xp.astype(D, dtype)
        exact = xp.astype(components, D.dtype)
        coding = measure(rows, exact, task.penalty, task.ridge, dtype, keep=keep)
        energies = atom_energies(coding.statistics.A, exact, sort_by)
        order = xp.argsort(energies, descending=True, stable=True)
        if bool(xp.all(energies[1:] <= energies[:-1])):
            break
    return components, coding, energies
