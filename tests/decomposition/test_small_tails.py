"""Bounds and paths of rows that a few directions dominate: what these leave over is small, and must keep its digits."""

import numpy as np
import pytest
from oracles.semi_nmf import svd_error

from isogeom import _xp
from isogeom.decomposition import SemiNMF
from isogeom.decomposition._certificates import survey
from isogeom.decomposition._directions import left_over, thin_directions
from isogeom.decomposition._rows import Rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:SemiNMF did not converge:sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:The codes of a row are:UserWarning"),
]


def dominated(size, n=2000, d=60, *, turned=False, seed=0):
    """Rows whose first feature is plus or minus `size`, along a coordinate axis or turned."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d)) * np.linspace(1, 0.2, d)
    X[:, 0] = size * rng.choice([-1, 1], n)
    return X @ np.linalg.qr(rng.standard_normal((d, d)))[0] if turned else X


def sparse_codes(n, d, k, noise, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.exponential(size=(n, k)) * (rng.random((n, k)) < 0.4)
    return codes @ rng.standard_normal((k, d)) / np.sqrt(d) + noise / np.sqrt(d) * rng.standard_normal((n, d))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("size", [3, 10, 30, 100, 300, 600])
def test_bounds_beside_one_dominant_direction(as_array, size, turned, dtype):
    X = dominated(size, turned=turned).astype(dtype)
    facts = survey(Rows.of_array(as_array(X)), 8, center=False)[1]
    # The square of the bound decides whether a fit attains it: to 2e-6.
    np.testing.assert_allclose(facts.bound, svd_error(X.astype(float), 8), rtol=5e-7)
    np.testing.assert_allclose(facts.bound_previous, svd_error(X.astype(float), 7), rtol=5e-7)


@pytest.mark.parametrize("mean", [1, 30, 1000])
def test_bounds_beside_a_large_mean(mean):
    X = (dominated(2) + mean * np.linspace(1, -1, 60)).astype(np.float32)
    facts = survey(Rows.of_array(X), 8, center=False)[1]
    np.testing.assert_allclose(facts.bound, svd_error(X.astype(float), 8), rtol=5e-7)
    np.testing.assert_allclose(facts.bound_previous, svd_error(X.astype(float), 7), rtol=5e-7)


def test_no_fit_is_below_the_bound_of_a_fit():
    X = dominated(600).astype(np.float32)
    model = SemiNMF(8, alpha=0, init="svd", max_iter=3, random_state=0).fit(X)
    np.testing.assert_allclose(model.svd_bound_, svd_error(X.astype(float), 8), rtol=5e-7)
    np.testing.assert_allclose(model.svd_bound_prev_, svd_error(X.astype(float), 7), rtol=5e-7)


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.1, 0.2, 0.5])
@pytest.mark.parametrize("kind", ["plain", "axis", "turned", "mean"])
def test_bounds_from_thin_products(as_array, kind, noise):
    rng = np.random.default_rng(1)
    X = sparse_codes(3000, 400, 6 if kind == "plain" else 5, noise)
    basis = np.linalg.qr(rng.standard_normal((400, 400)))[0]
    if kind == "mean":
        X += 1.7 * basis[0]
    elif kind != "plain":
        X[:, 0] = 1.7 * rng.choice([-1, 1], 3000)
        X = X @ basis if kind == "turned" else X
    X = X.astype(np.float32)
    rows = Rows.of_array(as_array(X))
    found = thin_directions(rows, 6)
    assert found is not None
    np.testing.assert_allclose(np.sqrt(found.tail), svd_error(X.astype(float), 6), rtol=5e-7)
    facts = survey(rows, 6, center=False)[1]
    np.testing.assert_allclose(facts.bound_previous, svd_error(X.astype(float), 5), rtol=5e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_axes_leave_over_is_measured_row_by_row(as_array, dtype):
    X = dominated(100, 500, 20).astype(dtype)
    axes = np.linalg.svd(X.astype(float), full_matrices=False)[2][:4]
    exact = X.astype(float)
    rows = Rows.of_array(as_array(X), chunk=60)
    expected = np.sum(exact**2), np.sum((exact - exact @ axes.T @ axes) ** 2), np.sum((exact @ axes[3]) ** 2)
    like = as_array(axes)
    np.testing.assert_allclose(left_over(rows, like), expected, rtol=1e-12)
    scores = as_array(exact @ axes.T)
    np.testing.assert_allclose(left_over(rows, like, scores), expected, rtol=1e-12 if dtype == np.float64 else 1e-6)


@pytest.mark.parametrize("shape", [(100, 30), (30, 100)])
@pytest.mark.parametrize(("dtype", "rounding"), [(np.float32, 1e-7), (np.float64, 1e-14)])
def test_both_bounds_beyond_the_rank_are_rounding(shape, dtype, rounding):
    rng = np.random.default_rng(0)
    X = (rng.standard_normal((shape[0], 4)) @ rng.standard_normal((4, shape[1]))).astype(dtype)
    model = SemiNMF(6, alpha=0, random_state=0).fit(X)
    assert model.svd_bound_ <= model.svd_bound_prev_ <= rounding * np.linalg.norm(X.astype(float))


# ---------------------------------------------------------------- the path of the objective


@pytest.mark.parametrize("alpha", [0.0, 0.05])
@pytest.mark.parametrize("init", ["auto", "svd"])
@pytest.mark.parametrize("kind", ["gaussian", "sparse codes", "dominated"])
@pytest.mark.parametrize(("n", "d", "k"), [(6000, 200, 1), (3000, 400, 2), (6000, 200, 5)])
def test_objective_of_float32_rows_never_rises_where_the_subspace_ends(n, d, k, kind, init, alpha):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        X = {
            "gaussian": lambda rng=rng: rng.standard_normal((n, d)) * np.linspace(1, 0.2, d) + 0.1,
            "sparse codes": lambda seed=seed: sparse_codes(n, d, k + 1, 0.3, seed),
            "dominated": lambda seed=seed: dominated(100, n, d, seed=seed),
        }[kind]().astype(np.float32)
        model = SemiNMF(k, alpha=alpha, init=init, random_state=seed).fit(X)
        path = _xp.to_numpy(model.objective_path_)
        assert path.shape == (model.n_iter_ + 1,)
        assert np.all(np.diff(path) <= 1e-12 * np.sum(X.astype(float) ** 2))
