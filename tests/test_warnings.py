"""Warnings name the line of user code that called the package, whatever method was called and however it got there."""

import inspect

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.pipeline import make_pipeline

from isogeom.datasets import make_tangent_data
from isogeom.decomposition import ICA, PCA, SemiNMF
from isogeom.isotropy import isoscore
from isogeom.tangent import TangentProxy, tangent_alignment_test

X = np.random.default_rng(0).laplace(size=(200, 6))
# Atoms so close to each other that codes cancel, and one iteration: three kinds of warnings.
HARD = {"n_components": 4, "alpha": 0, "max_iter": 1, "init": "random", "tol": 0, "random_state": 0}


def assert_here(record, line):
    assert {(w.filename, w.lineno) for w in record} == {(__file__, line)}


def stopped(**options):
    return SemiNMF(**{**HARD, **options})


CALLS = {
    "fit": lambda: stopped().fit(X),
    "fit_transform": lambda: stopped().fit_transform(X),
    "fit_transform, table": lambda: stopped().set_output(transform="pandas").fit_transform(X),
    "partial_fit": lambda: stopped().partial_fit(X),
    "fit_batches": lambda: stopped().fit_batches([X[:100], X[100:]]),
    "pipeline": lambda: make_pipeline(PCA(5), stopped()).fit(X),
    "ICA.fit": lambda: ICA(3, max_iter=1, tol=1e-12, random_state=0).fit(X),
    "ICA.fit_transform": lambda: ICA(3, max_iter=1, tol=1e-12, random_state=0).fit_transform(X),
    "TangentProxy": lambda: TangentProxy(stopped(), n_directions=2).fit(X),
}


@pytest.mark.parametrize("name", CALLS)
def test_convergence_warnings(name):
    if "table" in name:
        pytest.importorskip("pandas", reason="pandas is not installed")
    with pytest.warns(ConvergenceWarning, match="did not converge") as record:
        CALLS[name]()
    assert_here(record, CALLS[name].__code__.co_firstlineno)


def test_all_codes_zero():
    with pytest.warns(UserWarning, match="Every code is zero") as record:
        SemiNMF(2, alpha=100.0, random_state=0).fit(X)
    assert_here(record, inspect.currentframe().f_lineno - 1)


def test_codes_that_cancel_and_codes_that_are_not_exact(monkeypatch):
    from isogeom.decomposition import _semi_report

    model = SemiNMF(3, random_state=0)
    monkeypatch.setattr(_semi_report, "_CANCELLATION_LIMIT", -1.0)
    monkeypatch.setattr(_semi_report, "_KKT_LIMIT", -1.0)
    with pytest.warns((UserWarning, ConvergenceWarning)) as record:
        model.fit(X)
    assert_here(record, inspect.currentframe().f_lineno - 1)
    assert len(record) == 2
    with pytest.warns(ConvergenceWarning, match="codes are not exact") as record:
        model.transform(X)
    assert_here(record, inspect.currentframe().f_lineno - 1)


def test_a_stream_that_starts_anew():
    pca = PCA(2, svd_solver="full").fit(X)
    with pytest.warns(RuntimeWarning, match="starts anew") as record:
        pca.partial_fit(X)
    assert_here(record, inspect.currentframe().f_lineno - 1)


def test_two_rows_say_nothing_of_isotropy():
    with pytest.warns(UserWarning, match="carries no information") as record:
        isoscore(X[:2])
    assert_here(record, inspect.currentframe().f_lineno - 1)


def test_groups_without_variance():
    data = make_tangent_data(100, 8, n_tangent=2, rng=0)
    G, groups = data.G.copy(), np.repeat(np.arange(5), 20)
    G[:20] = G[0]
    proxy = TangentProxy(n_directions=2).fit(data.X)
    with pytest.warns(UserWarning, match="left out of the sign test") as record:
        tangent_alignment_test(G, proxy, groups=groups, n_resamples=9, rng=0)
    assert_here(record, inspect.currentframe().f_lineno - 1)
