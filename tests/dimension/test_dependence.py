"""Standard errors corrected for dependence: exact cases, and coverage on the flat torus."""

import numpy as np
import pytest
from oracles import dimension as oracle
from scipy import stats

from isogeom.dimension import ESS, MLE, Gride, LocalPCADimension, NeighborTable, TwoNN
from isogeom.dimension._dependence import Inflation, gamma_interval, inflation, normal_interval
from isogeom.dimension._parts import log_parts, order_parts


def ring_table(n, k):
    return NeighborTable.from_arrays(
        np.tile(np.arange(1.0, k + 1), (n, 1)), (np.arange(n)[:, np.newaxis] + 1 + np.arange(k)) % n
    )


def test_independent_rows_are_not_inflated():
    ratios = [
        inflation(np.random.default_rng(seed).exponential(size=2000), np.arange(2000), ring_table(2000, 4), 2).ratio
        for seed in range(50)
    ]
    # Never below one, so the mean of the noise shows on one side only.
    assert np.mean(ratios) < 1.05


def test_pairs_of_equal_rows_double_the_variance():
    n = 4000
    values = np.repeat(np.random.default_rng(0).standard_normal(n // 2), 2)
    other = np.arange(n) ^ 1
    far = (np.arange(n) + n // 2) % n
    table = NeighborTable.from_arrays(np.tile([1.0, 2.0], (n, 1)), np.stack((other, far), axis=1))
    assert inflation(values, np.arange(n), table, 1).ratio == pytest.approx(2.0, abs=0.1)


def test_rows_left_out_are_not_linked():
    values = np.random.default_rng(0).standard_normal(50)
    used = np.arange(0, 100, 2)
    found = inflation(values, used, ring_table(100, 1), 1)
    assert found == Inflation(1.0, 50.0)


def test_intervals_of_independent_rows_are_the_exact_ones():
    many = Inflation(1.0, 1e9)
    low, high = gamma_interval(10.0, 50.0, many, 0.9)
    assert low == pytest.approx(stats.gamma.ppf(0.05, 50) / 10, rel=1e-6)
    assert high == pytest.approx(stats.gamma.ppf(0.95, 50) / 10, rel=1e-6)
    low, high = normal_interval(4.0, 0.4, many, 0.9)
    assert np.log(high / 4) == pytest.approx(stats.norm.ppf(0.95) * 0.1, rel=1e-6)
    assert low * high == pytest.approx(16.0)


@pytest.mark.parametrize("model", [TwoNN("mle"), MLE(10), Gride(4, max_neighbors=2)], ids=["TwoNN", "MLE", "Gride"])
@pytest.mark.parametrize("d", [2, 5])
def test_intervals_cover_on_the_flat_torus(model, d):
    """The documented study takes 2000 seeds; these tell a nominal error, a fifth too small, from a right one."""
    hits, values, stds = 0, [], []
    for seed in range(80):
        model.fit(NeighborTable.from_arrays(*oracle.torus_neighbors(1000, d, seed, 20)))
        low, high = model.dimension_interval_
        hits += low <= d <= high
        values.append(model.dimension_)
        stds.append(model.dimension_std_)
    assert hits >= 70
    assert np.mean(stds) == pytest.approx(np.std(values), rel=0.25)


def test_parts_that_add_up_to_ratios_of_two_ranks():
    """The first-order part of a ratio has the mean 0, and moves with it: by simulation of uniform shares."""
    rng = np.random.default_rng(0)
    for near, far, d in [(1, 4, 2.0), (2, 3, 5.0), (4, 8, 3.0), (16, 32, 5.0)]:
        distances = oracle.poisson_distances(40_000, far, d, rng)
        logs = np.log(distances[:, far - 1] / distances[:, near - 1]) * d
        parts = order_parts(distances, near, far, d)
        sums = parts.sum(axis=1)
        # Means of 40000: six standard errors. The projection has the covariance of its own variance.
        assert abs(sums.mean()) < 6 * sums.std() / 200
        deviations = logs - logs.mean()
        assert np.mean(sums * deviations) == pytest.approx(np.mean(sums**2), rel=0.06)
        assert np.mean(sums**2) <= 1.03 * np.mean(deviations**2)


def test_the_ratio_of_the_first_two_is_its_own_part():
    distances = oracle.poisson_distances(100, 2, 3.0, np.random.default_rng(0))
    logs = 3 * np.log(distances[:, 1] / distances[:, 0])
    np.testing.assert_allclose(order_parts(distances, 1, 2, 3.0)[:, 0], logs - 1, rtol=1e-10)
    np.testing.assert_allclose(log_parts(distances)[:, 0], (logs - logs.mean()) / 3, rtol=1e-10, atol=1e-14)


def test_the_variance_from_parts_is_that_of_pairs_and_points():
    """Against sums over all points and pairs, written out."""
    rng = np.random.default_rng(1)
    n, k = 60, 5
    distances, indices = oracle.torus_neighbors(n, 2, 1, k)
    parts = rng.standard_normal((n, k - 1))
    values = parts.sum(axis=1)
    parts -= values.mean() / (k - 1)
    g = np.zeros((n, n))
    for i in range(n):
        g[i, indices[i, : k - 1]] = parts[i]
    points = sum((g[p].sum() + g[:, p].sum()) ** 2 for p in range(n))
    pairs = sum((g[p, q] + g[q, p]) ** 2 for p in range(n) for q in range(p))
    # Parts of one row are no longer independent here, so rows enter by their own squares.
    squares = sum(g[p].sum() ** 2 for p in range(n))
    mutual = pairs - np.sum(g**2)
    excess = points - squares - np.sum(g**2) - 2 * mutual
    expected = squares + mutual + (excess if excess > 0 else excess * 2 / 3)
    table = NeighborTable.from_arrays(distances, indices)
    found = inflation(values, np.arange(n), table, k, parts=parts)
    assert found.ratio == pytest.approx(max(1.0, expected / squares), rel=1e-9)


def test_uneven_dimension_is_not_taken_for_dependence():
    """Rows near edges have other means: products of their deviations counted that as dependence, several times."""
    fits = [MLE(20).fit(np.random.default_rng(seed).random((600, 3))) for seed in range(60)]
    spread = np.std([fit.dimension_ for fit in fits], ddof=1)
    # The spread of 60 fits is known to a tenth; products of deviations give 1.2 to 1.5 times it.
    assert np.mean([fit.dimension_std_ for fit in fits]) == pytest.approx(spread, rel=0.25)


@pytest.mark.parametrize("model", [ESS(30), LocalPCADimension("participation", n_neighbors_local=30)])
def test_patches_on_a_sphere(model):
    fits = [
        model.fit(oracle.hyper_sphere(800, 3, seed)) and (model.dimension_, model.dimension_std_) for seed in range(50)
    ]
    values, errors = np.array(fits).T
    # 50 samples tell the spread to a tenth.
    assert errors.mean() == pytest.approx(values.std(ddof=1), rel=0.3)
