"""Binomial and adaptive estimators."""

import numpy as np
import pytest
from oracles import dimension as oracle
from scipy import special, stats

from isogeom.dimension import ABIDE, BinomialDimension, NeighborTable
from isogeom.dimension import _abide as module
from isogeom.dimension._binomial import BEST_SHARE, posterior_mean


def poisson_table(n, k, d, seed):
    distances = oracle.poisson_distances(n, k, d, np.random.default_rng(seed))
    return NeighborTable.from_arrays(distances, (np.arange(n)[:, np.newaxis] + 1 + np.arange(k)) % n)


def test_counts_follow_the_binomial_law():
    distances = oracle.poisson_distances(4000, 11, 3.0, np.random.default_rng(0))
    inside = (distances[:, :10] <= 0.8 * distances[:, 10:11]).sum(axis=1)
    observed = np.bincount(inside, minlength=11)
    expected = 4000 * stats.binom.pmf(np.arange(11), 10, 0.8**3.0)
    keep = expected > 5
    assert stats.chisquare(observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()).pvalue > 1e-3


@pytest.mark.parametrize("d", [2.0, 8.0])
def test_estimate_and_its_error_on_independent_rows(d):
    models = [BinomialDimension(10).fit(poisson_table(500, 10, d, seed)) for seed in range(200)]
    values = np.array([model.dimension_ for model in models])
    nominal = np.mean([model.dimension_std_nominal_ for model in models])
    assert abs(values.mean() - d) < 4 * nominal / np.sqrt(200) + 0.002 * d
    assert values.std() == pytest.approx(nominal, rel=0.2)
    assert models[0].radius_ratio_ == pytest.approx(BEST_SHARE ** (1 / models[0].dimension_), rel=0.01)


def test_posterior_mean_is_the_integral():
    ratio, inside, trials = 0.7, np.array([0.0, 3.0, 10.0]), np.full(3, 10.0)
    a, b = 1 + inside, 1 + trials - inside
    expected = (special.digamma(a) - special.digamma(a + b)) / np.log(ratio)
    np.testing.assert_allclose(posterior_mean(inside, trials, ratio), expected, rtol=1e-12)


def test_none_or_all_inside_stays_finite():
    distances = np.tile(np.array([1.0, 1.0, 1.0, 2.0]), (10, 1))
    table = NeighborTable.from_arrays(distances, (np.arange(10)[:, np.newaxis] + 1 + np.arange(4)) % 10)
    assert 0 < BinomialDimension(4, radius_ratio=0.9).fit(table).dimension_ < 1
    assert np.isfinite(BinomialDimension(4, radius_ratio=0.1).fit(table).dimension_)


def test_adaptive_neighbourhoods_are_those_of_the_test():
    X = np.concatenate((oracle.hyper_ball(150, 2, 0), 3 + 0.2 * oracle.hyper_ball(50, 2, 1)))
    table = NeighborTable.from_rows(X, 60)
    quantile = stats.chi2.isf(1e-3, 1)
    expected = oracle.adaptive_sizes(table.distances, table.indices, 2.0, quantile)
    np.testing.assert_array_equal(module.neighborhood_sizes(module.radius_gaps(table), 2.0, 1e-3, 60), expected)
    assert len(set(expected)) > 10


# By the authors' program; 2.01, 1.95 and 1.95 in print.
PUBLISHED = np.array([2.01117, 1.95157, 1.95158])


def published_example(monkeypatch):
    """Run the published example, 3 rounds from 5 dimensions, with as many neighbours as there are."""
    np.random.seed(0)  # noqa: NPY002 - the published example draws from the global generator.
    X = np.random.normal(size=(1000, 2))  # noqa: NPY002
    monkeypatch.setattr(module, "_start", lambda table: 5.0)
    return ABIDE(999, n_iter=3).fit(X)


def test_published_path_of_the_adaptive_estimator(monkeypatch):
    """The authors' program: the same rounds with neighbourhoods of one row more.

    It counts the row itself among the neighbours that pass, so its outer radius is the distance to the first neighbour
    that does not pass; and it tests from 3 neighbours on.
    """
    sizes = module.neighborhood_sizes
    monkeypatch.setattr(module, "neighborhood_sizes", lambda *arguments: sizes(*arguments) + 1)
    monkeypatch.setattr(module, "_FEWEST", 3)
    np.testing.assert_allclose(published_example(monkeypatch).dimension_path_[1:], PUBLISHED, atol=6e-6)


def test_path_with_neighbours_that_all_pass(monkeypatch):
    # The definition as written ends at the last neighbour that passes: another estimate, within the noise of this one.
    model = published_example(monkeypatch)
    assert (np.abs(np.array(model.dimension_path_[1:]) - PUBLISHED) < model.dimension_std_).all()
    assert (np.abs(np.array(model.dimension_path_[2:]) - PUBLISHED[1:]) < 0.005).all()


def test_the_binomial_test_tells_good_from_bad_neighbourhoods():
    flat = ABIDE(50).fit(np.random.default_rng(0).random((1500, 2)))
    assert flat.ks_pvalue_ > 1e-3
    assert flat.dimension_ == pytest.approx(2.0, abs=0.1)
    mixed = np.random.default_rng(1).random((1500, 6))
    mixed[:750, 2:] *= 1e-3
    assert ABIDE(50).fit(mixed).ks_pvalue_ < 1e-6


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (BinomialDimension(radius_ratio=1.0), "radius_ratio=1.0 must lie between"),
        (BinomialDimension(1), "n_neighbors=1 must be at least 2"),
        (ABIDE(5), "max_neighbors=5 must be at least 6"),
        (ABIDE(significance=0.0), "significance=0.0 must lie between"),
        (ABIDE(n_iter=0), "n_iter=0 must be at least 1"),
    ],
)
def test_wrong_parameters_are_named(model, message):
    with pytest.raises(ValueError, match=message):
        model.fit(oracle.hyper_ball(50, 2, 0))
