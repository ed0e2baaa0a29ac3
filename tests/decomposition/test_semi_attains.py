"""Whether a fit of float32 rows attains the SVD bound: what it says is what float64 says."""

import numpy as np
import pytest

from isogeom.decomposition import SemiNMF

pytestmark = [
    pytest.mark.filterwarnings("ignore:SemiNMF did not converge:sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:The codes of a row are:UserWarning"),
]


def large_mean():
    rows = np.random.default_rng(0).standard_normal((20_000, 256)) * np.linspace(1, 0.2, 256)
    return (rows + np.r_[300, 50, np.zeros(254)]).astype(np.float32), 8


def low_rank():
    rng = np.random.default_rng(0)
    rows = rng.exponential(size=(5000, 12)) @ rng.random((12, 300)) + 0.01 * rng.random((5000, 300))
    return rows.astype(np.float32), 10


def small_mean():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((6000, 200)) * np.linspace(1, 0.1, 200) + rng.standard_normal(200)
    return rows.astype(np.float32), 4


@pytest.mark.parametrize("make", [large_mean, low_rank, small_mean])
def test_what_a_fit_of_float32_rows_attains(make):
    X, k = make()
    exact = X.astype(float)
    squared = np.linalg.svd(exact, compute_uv=False) ** 2
    best = squared[k:].sum()
    said = []
    # From far above the bound to rounding: also fits that are barely above it.
    for init, max_iter in (("auto", 1), ("kmeans", 3), ("kmeans", 10), ("kmeans", 30), ("kmeans", 200)):
        model = SemiNMF(k, alpha=0, init=init, max_iter=max_iter, tol=0, random_state=0).fit(X)
        residual = exact - model.transform(exact) @ model.components_.astype(float)
        error = np.sum(residual**2)
        np.testing.assert_allclose(model.svd_bound_**2, best, rtol=1e-7)
        np.testing.assert_allclose(model.reconstruction_err_**2, error, rtol=1e-4)
        attains = error <= best * (1 + 2e-6) + 1e-12 * squared.sum()
        assert model.attains_svd_bound_ == attains
        if attains:
            np.testing.assert_allclose(model.reconstruction_err_**2, error, rtol=1e-9)
        said.append(model.attains_svd_bound_)
    assert said[0]
    assert not said[1]
