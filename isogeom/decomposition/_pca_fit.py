"""From rows to the spectrum of a PCA: which solver runs, in how many steps, and what it checks first."""

from __future__ import annotations

from typing import Any

from sklearn.utils import assert_all_finite

from isogeom import _xp
from isogeom._callbacks import Steps
from isogeom._moments import Moments, passes
from isogeom._random import check_rng
from isogeom._validation import check_integer
from isogeom._weights import check_weights, drop_unweighted
from isogeom._xp import Array
from isogeom.decomposition._pca_solvers import (
    Spectrum,
    check_count,
    check_n_components,
    covariance_spectrum,
    full_spectrum,
    power_iterations,
    randomized_spectrum,
)


def check_moments(moments: Moments, n_components: Any, sample_weight: Any) -> Moments:
    """Return a copy of the moments that `fit` was given, if they can be decomposed."""
    if sample_weight is not None:
        raise ValueError("sample_weight cannot be combined with Moments: pass it to Moments.update instead.")
    if moments.count < 2:
        raise ValueError(f"PCA needs moments of at least 2 rows, got count={moments.count}: add rows with update().")
    check_n_components(n_components, int(moments.count), int(moments.mean.shape[0]), strict=True)
    return moments.copy()


def count_steps(model: Any, X: Array, solver: str) -> int:
    """Return the number of steps that `fit_array` reports: passes of the moments, or passes over the rows."""
    if solver == "covariance":
        return len(list(passes(X)))
    if solver == "full":
        return 1
    k = check_integer(
        model.n_components,
        "n_components",
        low=1,
        hint='svd_solver="randomized" needs a number; svd_solver="covariance" takes a share or None.',
    )
    return 1 + power_iterations(model.iterated_power, k, X.shape)


def fit_array(model: Any, X: Array, sample_weight: Any, solver: str, step: Steps) -> tuple[Spectrum, Moments | None]:
    """Return the spectrum of the rows, and their moments if they were formed."""
    if solver == "covariance":
        moments = add_rows(Moments(), X, sample_weight, type(model).__name__, step)
        check_count(moments.count)
        check_n_components(model.n_components, int(moments.count), X.shape[1], strict=True)
        return covariance_spectrum(moments, model.n_components), moments
    weights = None if sample_weight is None else check_weights(sample_weight, X)
    if weights is not None:
        X, weights = drop_unweighted(_xp.array_namespace(X), X, weights)
        check_count(float(_xp.array_namespace(X).sum(weights)))
    check_n_components(model.n_components, *X.shape, strict=True)
    if solver == "full":
        return full_spectrum(X, weights), None
    k = int(model.n_components)
    n_oversamples = check_integer(model.n_oversamples, "n_oversamples", low=0)
    n_iter = power_iterations(model.iterated_power, k, X.shape)
    rng = check_rng(model.random_state, "random_state")
    return randomized_spectrum(X, weights, k, n_oversamples=n_oversamples, n_iter=n_iter, rng=rng, step=step), None


def add_rows(moments: Moments, X: Array, sample_weight: Any, owner: str, step: Steps | None = None) -> Moments:
    """Update a copy of `moments`; values that are not finite are reported as scikit-learn does."""
    moments = moments.copy()
    weights = None if sample_weight is None else check_weights(sample_weight, X)
    try:
        for rows in passes(X):
            moments.update(X[rows, :], None if weights is None else weights[rows])
            if step is not None and step({"n_samples": moments.count}):
                break
    except ValueError:
        if not _xp.is_foreign(X):
            assert_all_finite(X, input_name="X", estimator_name=owner)
        raise
    return moments
