"""MOM: published values, the exact law of its moments, and its bias with and without the last neighbour."""

import numpy as np
import pytest
from oracles import dimension as oracle
from oracles.dimension_mom import mom_values
from scipy import stats

from isogeom.dimension import MOM, NeighborTable
from isogeom.dimension._mom import mean_ratios

A = oracle.fixture_a()


def poisson_table(n, k, d, seed):
    distances = oracle.poisson_distances(n, k, d, np.random.default_rng(seed))
    indices = (np.arange(n)[:, np.newaxis] + 1 + np.arange(k)) % n
    return NeighborTable.from_arrays(distances, indices)


def test_published_values_of_single_rows():
    moments = mean_ratios(NeighborTable.from_rows(A, 20).distances[:3], unbiased=False)
    np.testing.assert_allclose(moments / (1 - moments), [5.46026, 5.50848, 4.08149], atol=5e-6)


def test_published_value_of_a_ball():
    model = MOM(unbiased=False, average="mean").fit(oracle.hyper_ball(1000, 5, 0))
    assert model.dimension_ == pytest.approx(4.267308125, abs=1e-9)


@pytest.mark.parametrize(
    ("unbiased", "average"), [(True, "pooled"), (True, "mean"), (False, "pooled"), (False, "mean")]
)
def test_equals_the_rows_one_by_one(unbiased, average):
    table = NeighborTable.from_rows(A, 15)
    values = np.array(mom_values(table.distances, 15, last_included=not unbiased))
    shares = values / (values + 1)
    expected = values.mean() if average == "mean" else shares.mean() / (1 - shares.mean())
    model = MOM(15, unbiased=unbiased, average=average, n_neighbors_local=15).fit(A)
    assert model.dimension_ == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(model.transform(A)[:, 0], values, rtol=1e-10)


@pytest.mark.parametrize("d", [1, 2, 7])
def test_ratios_follow_their_law_and_the_pooled_estimate_has_no_bias(d):
    table = poisson_table(4000, 8, d, seed=d)
    ratios = table.distances[:, :7] / table.distances[:, 7:]
    picked = ratios[np.arange(4000), np.random.default_rng(0).integers(7, size=4000)]
    assert stats.kstest(picked, stats.beta(d, 1).cdf).pvalue > 1e-3
    error = np.sqrt(d * (d + 1) ** 2 / (d + 2) / (4000 * 7))
    assert abs(MOM(8).fit(table).dimension_ - d) < 4 * error
    # Counting the last neighbour as its own is too large by (d + 1) / (k - 1), whatever the number of rows.
    biased = MOM(8, unbiased=False).fit(table).dimension_
    assert abs(biased - d - (d + 1) / 7) < 4 * error * 8 / 7


def test_nominal_error_is_the_spread_over_independent_tables():
    fits = [MOM(8).fit(poisson_table(100, 8, 3, seed)) for seed in range(200)]
    spread = np.std([fit.dimension_ for fit in fits], ddof=1)
    assert np.mean([fit.dimension_std_nominal_ for fit in fits]) == pytest.approx(spread, rel=0.15)
