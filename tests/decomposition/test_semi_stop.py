"""When the iterations of Semi-NMF stop, and which starts get a hearing."""

import numpy as np
import pytest
from oracles.semi_nmf import matched_cosines, planted
from sklearn.exceptions import ConvergenceWarning

from isogeom.decomposition import SemiNMF, _semi_solve

pytestmark = pytest.mark.filterwarnings("ignore:SemiNMF did not converge:sklearn.exceptions.ConvergenceWarning")


@pytest.fixture
def heard(monkeypatch):
    """Names of the starts, as they are launched."""
    names, launch = [], _semi_solve.launch

    def noted(space, name, *rest):
        names.append(name)
        return launch(space, name, *rest)

    monkeypatch.setattr(_semi_solve, "launch", noted)
    return names


def uniform_codes(n, d, k, density, seed, noise=0.02):
    """Codes far from zero or zero: two atoms that share a cluster part slowly."""
    rng = np.random.default_rng(1000 + seed)
    D = rng.standard_normal((k, d))
    D /= np.linalg.norm(D, axis=1, keepdims=True)
    Z = rng.uniform(0.2, 1.5, size=(n, k)) * (rng.random((n, k)) < density)
    return Z @ D + noise * rng.standard_normal((n, d)), D


def test_a_plateau_is_not_the_end():
    X, D = uniform_codes(2000, 30, 40, 0.3, seed=1)
    plateaus = 0
    for seed in range(10):
        model = SemiNMF(40, random_state=seed).fit(X)
        path = model.objective_path_
        first = int(np.argmax(-np.diff(path) <= model.tol * path[1:])) + 1
        # One small decrease came long before the end, and much was gained after it.
        plateaus += first + 20 < model.n_iter_ and path[-1] < path[first] * (1 - 1e-3)
        assert matched_cosines(model.components_, D).min() > 0.97
    assert plateaus >= 1


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_the_tolerance_holds_over_ten_iterations_together(alpha):
    X, _ = planted(500, 20, 8, 0.2, seed=0)
    model = SemiNMF(8, alpha=alpha, random_state=0).fit(X)
    path = model.objective_path_
    falls = (path[:-10] - path[10:]) / path[10:]
    single = -np.diff(path) / path[1:]
    assert model.stop_reason_ == "tol"
    # Neither was so before the last iteration: ten decreases within the tolerance, or three next to nothing.
    rests = [bool(np.all(single[i - 3 : i] <= 1e-3 * model.tol)) for i in range(3, len(single) + 1)]
    assert falls[-1] <= model.tol or rests[-1]
    assert np.all(falls[:-1] > model.tol)
    assert not any(rests[:-1])


def test_fewer_iterations_than_the_window_warn():
    X = np.random.default_rng(0).random((60, 5)) + 0.1
    with pytest.warns(ConvergenceWarning, match="in 2 iterations: the objective still fell by"):
        assert not SemiNMF(3, max_iter=2, tol=1e-9, random_state=0).fit(X).converged_


def test_a_close_fit_from_clusters_ends_the_search(heard):
    X, D = planted(2000, 60, 8, 0.2, seed=0)
    model = SemiNMF(8, alpha=0, n_init=2, tol=1e-9, random_state=0).fit(X)
    assert heard == ["closed", "kmeans", "kmeans"]
    assert matched_cosines(model.components_, D).min() > 0.9
    assert model.reconstruction_err_ < model.svd_bound_prev_


def test_a_fit_that_is_not_close_hears_every_start(heard, monkeypatch):
    monkeypatch.setattr(_semi_solve, "_CLOSE", -1.0)
    X, _ = planted(2000, 60, 8, 0.2, seed=0)
    model = SemiNMF(8, alpha=0, tol=1e-9, max_iter=40, random_state=0).fit(X)
    assert heard == ["closed", "kmeans", "random", "svd"]
    assert model.reconstruction_err_ < model.svd_bound_prev_


def test_the_closed_form_needs_no_other_start(heard):
    model = SemiNMF(5, alpha=0, tol=0, random_state=0).fit(np.random.default_rng(0).random((200, 12)) + 0.1)
    assert heard == ["closed"]
    np.testing.assert_allclose(model.reconstruction_err_, model.svd_bound_, rtol=1e-10)
