"""Starts that compete: the automatic one ends where the best of the named ones does."""

import numpy as np
import pytest
from oracles.semi_nmf import objective, planted

from isogeom.decomposition import SemiNMF, _semi_solve

pytestmark = pytest.mark.filterwarnings("ignore:SemiNMF did not converge:sklearn.exceptions.ConvergenceWarning")
NAMED = ("kmeans", "random", "svd")


def data(name, seed, n=400):
    rng = np.random.default_rng(seed)
    if name == "planted":
        return planted(n, 30, 12, 0.3, seed)[0]
    if name == "clusters":
        centres = 3 * rng.standard_normal((8, 30))
        return centres[rng.integers(0, 8, n)] + 0.5 * rng.standard_normal((n, 30))
    return rng.standard_t(3, (n, 30)) if name == "heavy tails" else rng.standard_normal((n, 30)) + 0.5


def final(X, init, **params):
    model = SemiNMF(random_state=params.pop("seed"), init=init, **params).fit(X)
    Z = model.transform(X)
    return objective(X, Z, model.components_, model.penalty_) + model.ridge / 2 * np.sum(Z**2)


@pytest.mark.parametrize("name", ["planted", "clusters", "heavy tails", "shifted"])
@pytest.mark.parametrize("params", [{"alpha": 0.05}, {"alpha": 0.2}, {"alpha": 0.05, "ridge": 0.1}])
def test_auto_ends_with_the_best_of_the_named_starts(name, params):
    worse, excess = 0, []
    for seed in range(2):
        for k in (5, 12):
            X, options = data(name, seed), {"n_components": k, "seed": seed, **params}
            ratio = final(X, "auto", **options) / min(final(X, init, **options) for init in NAMED)
            worse, excess = worse + (ratio > 1 + 1e-4), [*excess, ratio - 1]
    # A start that is left while it still falls may turn out the better one, by little and seldom.
    assert worse <= 1
    assert max(excess) < 2e-3


def test_a_start_that_lags_at_first_can_win():
    """The SVD's start is the slowest; with a large penalty on clusters it ends 1.6 % below the others."""
    wins = 0
    for seed in range(4):
        values = {init: final(data("clusters", seed), init, n_components=5, alpha=0.2, seed=seed) for init in NAMED}
        wins += min(values, key=values.get) == "svd"
        best = min(values.values())
        assert final(data("clusters", seed), "auto", n_components=5, alpha=0.2, seed=seed) <= best * (1 + 1e-3)
    assert wins >= 1


@pytest.mark.parametrize("init", ["kmeans", "random"])
@pytest.mark.parametrize("n", [300, 4500])
def test_a_start_alone_is_what_it_is_among_others(monkeypatch, init, n):
    X, seen = data("shifted", 0, n), []
    launch = _semi_solve.launch

    def launched(space, name, task, rng):
        state = launch(space, name, task, rng)
        seen.append((name, np.array(state.D)))
        return state

    monkeypatch.setattr(_semi_solve, "launch", launched)
    SemiNMF(4, init=init, random_state=3).fit(X)
    SemiNMF(4, random_state=3).fit(X)
    alone, *among = seen
    assert [name for name, _ in among] == list(NAMED)
    assert alone[0] == init
    np.testing.assert_array_equal(dict(among)[init], alone[1])


def test_starts_on_a_sample_leave_no_other_codes_behind(monkeypatch):
    """Where rows abound, only one set of codes has their number."""
    X, sizes = data("planted", 0, 5000), []
    launch = _semi_solve.launch

    def launched(*args):
        state = launch(*args)
        sizes.append(state.Z.shape[0])
        return state

    monkeypatch.setattr(_semi_solve, "launch", launched)
    assert SemiNMF(12, random_state=0).fit(X).converged_
    assert sizes == [2048, 2048, 2048]
