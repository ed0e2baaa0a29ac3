"""DANCo: published statistics and answers, divergences by quadrature, calibration, large dimensions, never NaN."""

import itertools

import numpy as np
import pytest
from oracles import dimension as oracle
from oracles.dimension_danco import angles, ratio_divergence, von_mises_divergence, von_mises_fit
from scipy import special

from isogeom.datasets import make_manifold
from isogeom.dimension import DANCo, NeighborTable
from isogeom.dimension import _danco_calibration as calibration
from isogeom.dimension import _danco_statistics as statistics
from isogeom.dimension._mind_law import first_to_last, likeliest

A, B = oracle.fixture_a(), oracle.fixture_b()


@pytest.mark.parametrize(
    ("X", "mind", "direction", "concentration"),
    [
        (A, 4.39734943749, 0.906748787377, 5.62297002109),
        (B, 3.73484351708, 1.05086564189, 4.41813614831),
    ],
)
def test_published_statistics_and_answers(X, mind, direction, concentration):
    model = DANCo(angle_formula="published").fit(X)
    assert model.mind_dimension_ == pytest.approx(mind, abs=1e-6)
    assert model.angle_direction_ == pytest.approx(direction, abs=1e-9)
    assert model.angle_concentration_ == pytest.approx(concentration, abs=1e-9)
    assert model.dimension_ == 5.0


def test_the_exact_angle_formula_finds_the_sphere():
    """The published direction, which confuses obtuse angles with acute ones, gives 5 for this sphere."""
    assert DANCo().fit(A).dimension_ == 5.0
    assert DANCo().fit(B).dimension_ == 4.0


def test_angle_statistics_equal_those_of_the_angles():
    table = NeighborTable.from_rows(A, 7)
    moments = statistics.angle_moments(A, table.queries, table.distances, table.indices)
    directions, lengths = statistics.row_angles(moments, "exact").T
    expected = np.array([von_mises_fit(angles(A[i], A[table.indices[i]])) for i in range(30)])
    np.testing.assert_allclose(directions[:30], expected[:, 0], rtol=1e-9)
    np.testing.assert_allclose(statistics.concentration(lengths[:30], "exact"), expected[:, 1], rtol=1e-7)


def test_opposite_neighbours_have_an_angle():
    """A cosine of -1 - 1e-16 is clipped as one of 1 + 1e-16 is."""
    X = np.array([[0.0, 0.0, 0.0], [0.1, 0.2, 0.3], [-0.1, -0.2, -0.3], [0.3, 0.6, 0.9], [-0.3, -0.6, -0.9]])
    distances = np.linalg.norm(X[1:], axis=1)[np.newaxis, :]
    moments = statistics.angle_moments(X, np.array([0]), distances, np.array([[1, 2, 3, 4]]))
    np.testing.assert_allclose(moments, [[-1 / 3, 0.0]], atol=1e-7)
    assert statistics.row_angles(moments, "exact")[0, 0] == pytest.approx(np.pi, abs=1e-6)


@pytest.mark.parametrize("length", [0.0, 1e-6, 0.2, 0.53, 0.85, 0.99, 0.9999])
def test_concentration_is_the_inverse_of_the_bessel_quotient(length):
    found = statistics.concentration(np.array([length]), "exact")[0]
    assert special.i1e(found) / special.i0e(found) == pytest.approx(length, rel=1e-10, abs=1e-12)
    rough = statistics.row_angles(np.array([[length, 0.0]]), "published")[0, 1]
    assert rough == pytest.approx(found, rel=0.07, abs=1e-9)


@pytest.mark.parametrize("formula", ["exact", "published"])
def test_angles_that_all_agree_stay_finite(formula):
    rows = statistics.row_angles(np.array([[1.0, 0.0], [0.0, 0.0]]), formula)
    assert np.isfinite(rows).all()
    assert np.isfinite(statistics.concentration(rows[:, 1], formula)).all()


@pytest.mark.parametrize("k", [1, 2, 10, 60])
@pytest.mark.parametrize("other", [1.5, 4.0, 4.2, 9.0])
def test_divergence_of_ratios(k, other):
    found = statistics.ratio_divergence(np.array([other / 4.0]), k)[0]
    assert found == pytest.approx(ratio_divergence(4.0, other, k), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("first", "second"), [((1.4, 5.0), (1.2, 4.0)), ((1.5, 90.0), (1.55, 300.0))])
def test_divergence_of_angles(first, second):
    found = statistics.angle_divergence(*(np.array([value]) for value in (*first, *second)))[0]
    assert found == pytest.approx(von_mises_divergence(*first, *second), rel=1e-7)


def test_divergence_of_angles_does_not_overflow():
    found = statistics.angle_divergence(np.array([1.5]), np.array([5e3]), np.array([1.5]), np.array([4e3]))
    assert np.isfinite(found).all()
    assert found[0] > 0


@pytest.mark.parametrize("n", [80, 600])
def test_statistics_of_balls_are_those_of_data(n):
    """Small balls are searched by matrices of distances, large ones by the search that data use."""
    found = calibration.ball_statistics(n, 10, 4, "exact", 0)
    rng, rows = np.random.default_rng(1), []
    for _ in range(4000 // n):
        X = rng.standard_normal((n, 4))
        X *= rng.random((n, 1)) ** 0.25 / np.linalg.norm(X, axis=1, keepdims=True)
        table = NeighborTable.from_rows(X, 11)
        moments = statistics.angle_moments(X, table.queries, table.distances[:, :10], table.indices[:, :10])
        rows.append(np.column_stack([first_to_last(table.distances), statistics.row_angles(moments, "exact")]))
    rows = np.concatenate(rows)
    tightness = statistics.concentration(rows[:, 2].mean(), "exact")
    expected = likeliest(rows[np.newaxis, :, 0], 10)[0], rows[:, 1].mean(), tightness
    np.testing.assert_allclose(found, expected, rtol=0.05)


def test_distances_of_balls_go_beyond_dimension_ten():
    """Elsewhere shifted arguments cap the distances' part of the calibration at 10."""
    found = [calibration.ball_statistics(1000, 10, d, "exact", 0)[0] for d in (10, 20, 40, 70)]
    assert all(low * 1.2 < high for low, high in itertools.pairwise(found))
    assert found[1] > 12


def test_interpolated_dimensions_lie_on_the_curve():
    curve = calibration.Balls(500, 10, "exact", 0, 30).table(1e9, 1e9)
    at = (np.array([5, 10, 12, 30]) - 1) * calibration.STEPS
    expected = [calibration.ball_statistics(500, 10, d, "exact", 0) for d in (5, 10, 12, 30)]
    np.testing.assert_allclose(curve[at], expected, rtol=1e-12)
    between = calibration.ball_statistics(500, 10, 13, "exact", 0)
    np.testing.assert_allclose(curve[12 * calibration.STEPS], between, rtol=0.05)


@pytest.mark.parametrize(("d", "slack"), [(1, 0), (2, 0), (3, 0), (6, 0), (10, 1), (20, 1), (30, 2)])
def test_known_dimensions(d, slack):
    X = np.pad(oracle.hyper_ball(1000, d, 1), ((0, 0), (0, 12)))
    model = DANCo().fit(X)
    assert abs(model.dimension_ - d) <= slack
    assert abs(model.dimension_real_ - d) <= max(3 * model.dimension_std_, 0.5)
    low, high = model.dimension_interval_
    assert low <= model.dimension_ <= high
    assert np.median(model.transform(X[:100])) == pytest.approx(d, rel=0.15, abs=0.5)


def test_seventy_dimensions_are_finite():
    """Ten-dimensional caps, and Bessel functions that overflow, end here in 10 or NaN elsewhere."""
    X = make_manifold("M10d", 800).X
    model = DANCo(max_dimension=71).fit(X)
    assert abs(model.dimension_ - 70) <= 3
    assert np.isfinite(model.divergences_).all()
    assert np.isfinite(model.transform(X[:50])).all()


def test_a_low_cap_is_reported():
    X = oracle.hyper_ball(300, 6, 0)
    with pytest.warns(UserWarning, match="max_dimension=3"):
        model = DANCo(max_dimension=3).fit(X)
    assert model.dimension_ == 3.0
    assert len(model.divergences_) == 3


def test_one_feature():
    X = np.random.default_rng(0).random((100, 1))
    model = DANCo().fit(X)
    assert model.dimension_ == 1.0
    np.testing.assert_array_equal(model.transform(X), np.ones((100, 1)))


def test_integers_or_reals():
    whole, real = DANCo().fit(A), DANCo(rounded=False).fit(A)
    assert whole.dimension_real_ == real.dimension_ == real.dimension_real_
    assert abs(real.dimension_ - whole.dimension_) < 1
    local = whole.transform(A)
    np.testing.assert_array_equal(local, np.round(local))
    assert np.abs(real.transform(A) - local).max() <= 1
    assert np.unique(real.transform(A)).size > 10


def test_the_seed_decides_and_balls_are_kept():
    calibration.ball_statistics.cache_clear()
    first = DANCo(random_state=3).fit(A)
    made = calibration.ball_statistics.cache_info().misses
    assert DANCo(random_state=3).fit(A).dimension_real_ == first.dimension_real_
    assert calibration.ball_statistics.cache_info().misses == made > 0
    assert DANCo(random_state=4).fit(A).dimension_real_ != first.dimension_real_
    generators = [DANCo(random_state=np.random.default_rng(5)).fit(A).dimension_real_ for _ in range(2)]
    assert generators[0] == generators[1]


def test_local_values_pool_the_statistics_of_the_neighbourhood():
    model = DANCo(n_neighbors_local=40, rounded=False).fit(A)
    table = NeighborTable.from_rows(A, 40)
    own = NeighborTable.from_rows(A, 11)
    moments = statistics.angle_moments(A, own.queries, own.distances[:, :10], own.indices[:, :10])
    directions, lengths = statistics.row_angles(moments, "exact").T
    for i in (0, 17, 200):
        near = table.indices[i]
        logs = first_to_last(own.distances)[near]
        tightness = statistics.concentration(lengths[near].mean(), "exact")
        total = [
            ratio_divergence(likeliest(logs[np.newaxis, :], 10)[0], row[0], 10)
            + von_mises_divergence(directions[near].mean(), tightness, row[1], row[2])
            for row in model._calibration.table(50.0, 1e9)[:: calibration.STEPS]
        ]
        assert abs(model.transform(A[i : i + 1])[0, 0] - (1 + np.argmin(total))) <= 1
