"""MiND: published values, the exact law, no upper limit, and one repeated row."""

import numpy as np
import pytest
from oracles import dimension as oracle
from oracles.dimension_mind import mind_integer, mind_real

from isogeom.dimension import MiND, NeighborTable, TwoNN
from isogeom.dimension._mind_law import likeliest, relative_bias

A, B = oracle.fixture_a(), oracle.fixture_b()


@pytest.mark.parametrize(("X", "real"), [(A, 4.41445943432), (B, 3.75123294209)])
def test_published_values(X, real):
    assert MiND(unbiased=False).fit(X).dimension_ == pytest.approx(real, abs=1e-6)
    assert MiND(method="mli").fit(X).dimension_ == 4.0


@pytest.mark.parametrize("k", [1, 2, 9])
def test_equals_the_largest_log_likelihood(k):
    distances = NeighborTable.from_rows(A, k + 1).distances
    assert MiND(k, unbiased=False).fit(A).dimension_ == pytest.approx(mind_real(distances, k), rel=1e-7)
    assert MiND(k, "mli").fit(A).dimension_ == mind_integer(distances, k)


def test_one_neighbour_is_the_two_nearest_neighbours_estimator():
    assert MiND(1).fit(A).dimension_ == pytest.approx(TwoNN("mle").fit(A).dimension_, rel=1e-12)


@pytest.mark.parametrize("d", [15, 20, 30, 70])
def test_dimensions_have_no_upper_limit(d):
    """Other packages search up to 10, and give 10 for each of these."""
    X = oracle.hyper_ball(1000, d, 0)
    distances = NeighborTable.from_rows(X, 21).distances
    assert MiND(unbiased=False).fit(X).dimension_ == pytest.approx(mind_real(distances, 20), rel=1e-6)
    assert MiND(method="mli").fit(X).dimension_ == mind_integer(distances, 20) > 10


@pytest.mark.parametrize(("k", "d"), [(1, 2.0), (5, 0.5), (20, 30.0)])
def test_bias_of_maximum_likelihood_on_exact_ratios(k, d):
    n, repeats = 15, 40_000
    logs = -np.log(np.random.default_rng(k).beta(1, k, size=(repeats, n))) / d
    found = likeliest(logs, k)
    error = found.std() / np.sqrt(repeats)
    assert abs(found.mean() - d) > 4 * error
    # What is left is of the second order.
    assert abs(np.mean(found * (1 - relative_bias(k) / n)) - d) < 4 * error + 0.3 * d / n**2


def test_missing_ratios_do_not_count():
    logs = np.random.default_rng(0).exponential(size=(3, 50))
    holed = np.concatenate([logs, np.full((3, 7), np.nan)], axis=1)
    np.testing.assert_allclose(likeliest(holed, 4), likeliest(logs, 4), rtol=1e-13)
    assert np.isnan(likeliest(np.full((1, 4), np.nan), 4)).all()


@pytest.mark.parametrize("duplicates", ["drop", "keep"])
@pytest.mark.parametrize("method", ["mlk", "mli"])
def test_one_repeated_row_changes_little(duplicates, method):
    """Other packages answer 1."""
    X = np.concatenate([A, A[:1]])
    model = MiND(method=method, duplicates=duplicates).fit(X)
    assert model.dimension_ == pytest.approx(MiND(method=method).fit(A).dimension_, rel=0.02)
    assert model.n_duplicates_ == 1
    assert model.n_samples_dropped_ == (2 if duplicates == "keep" else 0)


def test_score_is_the_mean_log_density_and_largest_at_the_estimate():
    rng = np.random.default_rng(0)
    X, new = rng.standard_normal((400, 3)), rng.standard_normal((200, 3))
    model = MiND(8).fit(X)
    distances = np.sort(np.linalg.norm(new[:, np.newaxis] - X, axis=2), axis=1)
    rho = distances[:, 0] / distances[:, 8]

    def mean(d):
        return np.mean(np.log(8 * d) + (d - 1) * np.log(rho) + 7 * np.log(1 - rho**d))

    assert model.score(new) == pytest.approx(mean(model.dimension_), rel=1e-9)


def test_local_values():
    distances = NeighborTable.from_rows(A, 30).distances
    model = MiND(unbiased=False, n_neighbors_local=30).fit(A)
    expected = [mind_real(row[np.newaxis, :], 29) for row in distances[:20]]
    np.testing.assert_allclose(model.transform(A[:20])[:, 0], expected, rtol=1e-6)
    integers = MiND(method="mli", n_neighbors_local=30).fit(A).transform(A[:20])[:, 0]
    np.testing.assert_array_equal(integers, [mind_integer(row[np.newaxis, :], 29) for row in distances[:20]])


def test_unbiased_local_values_average_to_the_dimension():
    distances = oracle.poisson_distances(5_000, 12, 4, np.random.default_rng(0))
    indices = (np.arange(5_000)[:, np.newaxis] + 1 + np.arange(12)) % 5_000
    table = NeighborTable.from_arrays(distances, indices)
    values = MiND(5, n_neighbors_local=12).fit(table).transform(table)[:, 0]
    assert abs(values.mean() - 4) < 4 * values.std() / np.sqrt(5_000)


def test_the_standard_error_is_the_spread_and_needs_no_more_neighbours():
    tables = [NeighborTable.from_rows(np.random.default_rng(seed).random((600, 3)), 21) for seed in range(60)]
    fits = [(model.dimension_, model.dimension_std_) for model in (MiND(20).fit(table) for table in tables)]
    values, errors = np.array(fits).T
    # 60 samples tell the spread to a tenth.
    assert errors.mean() == pytest.approx(values.std(ddof=1), rel=0.25)
    longer = NeighborTable.from_rows(np.random.default_rng(0).random((600, 3)), 42)
    assert MiND(20).fit(longer).dimension_std_ == pytest.approx(errors[0], rel=1e-12)
