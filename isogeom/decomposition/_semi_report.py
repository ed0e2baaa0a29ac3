"""Fitted attributes and warnings of Semi-NMF, and their update by more rows."""

from __future__ import annotations

import math
from typing import Any

from sklearn.exceptions import ConvergenceWarning

from isogeom import _xp
from isogeom._linalg import row_norms
from isogeom._validation import warn_user
from isogeom._xp import Array
from isogeom.decomposition._alternation import Problem, Statistics, atom_step, move_dead_atoms
from isogeom.decomposition._certificates import coherence
from isogeom.decomposition._rows import Rows
from isogeom.decomposition._semi_codes import atom_energies, measure
from isogeom.decomposition._semi_fit import Outcome, Settings

# Residual of the optimality conditions above which codes are reported as not exact; codes that cancel.
_KKT_LIMIT = 1e-6
_CANCELLATION_LIMIT = 10.0
# What a fit knows and an update with part of the rows does not.
_CERTIFICATES = ("svd_bound_", "svd_bound_prev_", "attains_svd_bound_", "objective_path_", "code_cancellation_")


def report(model: Any, outcome: Outcome, settings: Settings, like: Array) -> Array:
    """Store the outcome of a fit as the attributes of the estimator, warn where it is weak, and return the codes."""
    facts, coding, xp = outcome.facts, outcome.coding, _xp.array_namespace(like)
    model.components_ = outcome.components
    model.n_components_ = int(outcome.components.shape[0])
    model.mean_ = None if outcome.mean is None else xp.astype(outcome.mean, like.dtype)
    model.penalty_ = outcome.penalty
    model.objective_path_ = _xp.asarray_like(outcome.path, like, dtype=coding.statistics.A.dtype)
    model.n_iter_ = len(outcome.path) - 1
    model.converged_ = outcome.reason not in ("max_iter", "callback")
    model.reconstruction_err_ = coding.error
    model.svd_bound_, model.svd_bound_prev_ = facts.bound, facts.bound_previous
    slack = 2e-6 * facts.tail + 1e-12 * facts.squares
    model.attains_svd_bound_ = (coding.error / facts.unit) ** 2 <= facts.tail + slack
    model.stop_reason_ = outcome.reason
    model.code_cancellation_ = coding.cancellation
    model._row_norms = facts.mean_norm * facts.n_samples
    model._row_squares = facts.squares * facts.unit * facts.unit
    model.n_samples_seen_ = facts.n_samples
    describe(model, outcome.components, coding.statistics, outcome.energies)
    model.code_density_ = coding.density
    model.kkt_residual_ = coding.residual
    _warn(model, outcome.decrease, settings)
    return coding.Z


def describe(model: Any, components: Array, statistics: Any, energies: Array) -> None:
    """Store what atoms and the sums of their codes say."""
    xp = _xp.array_namespace(components)
    # In float64: the energies of float32 rows beyond 1e19 or below 1e-19 are no numbers of float32.
    model.energies_ = energies
    model.atom_coherence_, model.n_duplicate_atoms_ = coherence(xp.astype(components, statistics.A.dtype))
    model.n_dead_atoms_ = int(xp.count_nonzero(statistics.sums <= 0))
    # For partial_fit: the sums of the codes of every row so far.
    model._code_gram, model._code_rows, model._code_sums = statistics.A, statistics.B, statistics.sums


def forget(model: Any) -> None:
    """Remove certificates that more rows make void."""
    for name in (*_CERTIFICATES, "converged_", "stop_reason_"):
        model.__dict__.pop(name, None)


def _warn(model: Any, decrease: float, settings: Settings) -> None:
    # Who asked for the stop needs no warning about it.
    if not model.converged_ and model.stop_reason_ != "callback":
        warn_user(
            f"SemiNMF did not converge in {model.n_iter_} iterations: the objective still fell by {decrease:.2g} of "
            f"itself in the last ten of them, above tol={settings.tol:.2g} (residual of the codes "
            f"{model.kkt_residual_:.2g}). Raise max_iter or tol.",
            ConvergenceWarning,
        )
    if model.n_dead_atoms_ == model.n_components_ and model._row_squares > 0:
        warn_user(
            f"Every code is zero: alpha={settings.alpha} is too large for these rows. Lower it (0.05, say).",
            UserWarning,
        )
    if model.code_cancellation_ > _CANCELLATION_LIMIT:
        warn_user(
            f"The codes of a row are {model.code_cancellation_:.3g} times as long as the row: they cancel each other, "
            "and mean little. Raise alpha (0.05, say) or ridge, or lower n_components.",
            UserWarning,
        )
    warn_inexact(model.kkt_residual_)


def warn_inexact(residual: float) -> None:
    """Warn of codes that do not meet their optimality conditions."""
    if residual > _KKT_LIMIT:
        warn_user(
            f"Some codes are not exact (relative residual {residual:.2g}): atoms are nearly dependent. Lower "
            "n_components or raise alpha or ridge.",
            ConvergenceWarning,
        )


def check_stream(model: Any) -> None:
    """Raise ValueError if the parameters ask for another model than the one that more rows would go into."""
    if model.mean_ is not None:
        raise ValueError("This SemiNMF was fitted with center=True, and a stream cannot be centred: refit it first.")
    if model.n_components is not None and model.n_components != model.n_components_:
        raise ValueError(
            f"n_components={model.n_components!r}, but this SemiNMF has {model.n_components_} atoms, which partial_fit "
            "keeps: refit it, or set n_components back."
        )


def update(model: Any, rows: Rows, settings: Settings) -> None:
    """Add the rows of one batch to the sums of a fitted model, and take one atom step."""
    xp, dtype = rows.xp, model.components_.dtype
    D = xp.astype(model.components_, rows.dtype)
    batch = measure(rows, D, model.penalty_, settings.ridge, keep=True)
    total = Statistics(model._code_gram, model._code_rows, model._code_sums)
    total.merge(batch.statistics)
    dead = xp.linalg.diagonal(total.A) <= 0
    if bool(xp.any(dead)):
        D, _ = move_dead_atoms(rows, batch.Z, D, dead, model.penalty_)
    seen = model.n_samples_seen_ + rows.shape[0]
    model._row_norms += sum(float(xp.sum(row_norms(block))) for _, block in rows)
    model._row_squares += batch.squares
    model.penalty_ = settings.alpha * model._row_norms / seen
    problem = Problem(model._row_squares, model.penalty_, settings.ridge)
    D, lengths = atom_step(total, D, bounded=problem.bounded)
    total.scale(lengths)
    density = model.code_density_ * model.n_samples_seen_ + batch.density * rows.shape[0]
    model.components_ = xp.astype(D, dtype)
    model.n_samples_seen_, model.code_density_ = seen, density / seen
    model.n_iter_ += 1
    model.kkt_residual_ = batch.residual
    model.reconstruction_err_ = math.sqrt(2 * Problem(model._row_squares).objective(total, D))
    describe(model, model.components_, total, atom_energies(total.A, D, settings.sort_by))
