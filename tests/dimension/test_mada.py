"""MADA: published values, the exact law of its log ratio, and inputs that must stay as they are."""

import math

import numpy as np
import pytest
from oracles import dimension as oracle
from oracles.dimension_mada import mada_values
from scipy import stats

from isogeom.dimension import MADA, NeighborTable
from isogeom.dimension._mada import half_logs
from isogeom.dimension._ratio_law import inverse_mean, local_constant, mean_log_ratio

A = oracle.fixture_a()


def poisson_table(n, k, d, seed):
    distances = oracle.poisson_distances(n, k, d, np.random.default_rng(seed))
    indices = (np.arange(n)[:, np.newaxis] + 1 + np.arange(k)) % n
    return NeighborTable.from_arrays(distances, indices)


def test_published_values_of_single_rows():
    logs = half_logs(NeighborTable.from_rows(A, 20).distances[:3])
    np.testing.assert_allclose(math.log(2) / logs, [7.78273, 5.54380, 3.78567], atol=5e-6)


def test_published_value_of_a_ball():
    model = MADA(unbiased=False, average="mean").fit(oracle.hyper_ball(1000, 5, 0))
    assert model.dimension_ == pytest.approx(4.802366090, abs=1e-9)


@pytest.mark.parametrize("k", [4, 15])
def test_equals_the_rows_one_by_one(k):
    values = np.array(mada_values(NeighborTable.from_rows(A, k).distances, k))
    model = MADA(k, unbiased=False, n_neighbors_local=k).fit(A)
    assert model.dimension_ == pytest.approx(1 / np.mean(1 / values), rel=1e-12)
    assert MADA(k, unbiased=False, average="mean").fit(A).dimension_ == pytest.approx(values.mean(), rel=1e-12)
    np.testing.assert_allclose(model.transform(A)[:, 0], values, rtol=1e-9)


@pytest.mark.parametrize(("near", "far"), [(1, 3), (2, 5), (10, 20)])
def test_constants_of_the_law_of_a_log_ratio(near, far):
    logs = -np.log(stats.beta(near, far - near).rvs(200_000, random_state=0))
    assert mean_log_ratio(near, far) == pytest.approx(sum(1 / j for j in range(near, far)), rel=1e-12)
    assert mean_log_ratio(near, far) == pytest.approx(logs.mean(), rel=0.01)
    assert inverse_mean(near, far) == pytest.approx(1 / np.mean(1 / logs), rel=0.02)
    assert local_constant(near, far, True, 0.5) == inverse_mean(near, far)


def test_a_ratio_of_next_neighbours_falls_back_to_the_mean_of_its_law():
    assert local_constant(1, 2, True, 0.5) == pytest.approx(1.0)
    assert local_constant(1, 2, False, 0.5) == 0.5


@pytest.mark.parametrize("average", ["inverse", "mean"])
@pytest.mark.parametrize("k", [7, 20])
def test_no_bias_under_the_exact_law_where_the_published_formula_has_one(k, average):
    table = poisson_table(5_000, k, 5, seed=k)
    model = MADA(k, average=average).fit(table)
    assert abs(model.dimension_ - 5) < 4 * model.dimension_std_nominal_
    published = MADA(k, unbiased=False, average=average).fit(table)
    assert abs(published.dimension_ - 5) > 4 * model.dimension_std_nominal_


def test_a_matrix_of_distances_is_not_overwritten():
    D = oracle.all_distances(A)
    np.fill_diagonal(D, 0)
    before = D.copy()
    model = MADA(metric="precomputed").fit(D)
    np.testing.assert_array_equal(D, before)
    assert model.dimension_ == pytest.approx(MADA().fit(A).dimension_, rel=1e-10)


def test_the_unbiased_mean_needs_three_neighbours():
    with pytest.raises(ValueError, match="n_neighbors"):
        MADA(2, average="mean").fit(A)
    assert MADA(2).fit(A).dimension_ > 0
