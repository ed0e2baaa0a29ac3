"""Warnings about ties and impossible dimensions, and errors that ties must not turn into 0."""

import warnings

import numpy as np
import pytest

from isogeom import Moments
from isogeom.dimension import ESS, MADA, MLE, MOM, TLE, FisherS, LocalPCADimension, NeighborTable, PCADimension, TwoNN
from isogeom.dimension._base import Estimate
from isogeom.dimension._doubts import report_doubts, row_squares, tied_share
from isogeom.dimension._pca_products import Products

INTEGERS = np.random.default_rng(0).integers(0, 3, (400, 6)).astype(float)
CLOUD = np.random.default_rng(0).random((300, 3))


def found(dimension, std=None, dropped=0):
    return Estimate(dimension, std, None, 10, dropped)


def test_share_of_tied_rows():
    # 0 - 1 - 2: the middle row has two neighbours at 1; 10 and 13 have none that tie; 20 is kept twice.
    X = np.array([[0.0], [1.0], [2.0], [10.0], [13.0], [20.0], [20.0]])
    table = NeighborTable.from_rows(X, 2, duplicates="keep")
    by_hand = [a == 0 or a == b for a, b in table.distances]
    assert by_hand == [False, True, False, False, False, True, True]
    assert tied_share(table) == pytest.approx(3 / 7)
    # The corners of a simplex are equally far from each other.
    assert tied_share(NeighborTable.from_rows(np.eye(10), 5)) == 1.0
    assert tied_share(NeighborTable.from_rows(CLOUD, 5)) == 0.0
    assert tied_share(NeighborTable.from_rows(CLOUD, 5).first(1)) == 0.0


def test_ties_are_reported_once_with_what_they_mean():
    with pytest.warns(UserWarning, match="by TwoNN is doubtful: on 93% of the rows .*285 rows were left out") as caught:
        report_doubts("TwoNN", found(2.1, 0.5, 285), NeighborTable.from_rows(INTEGERS, 4))
    assert len(caught) == 1
    assert "add noise below the resolution, or use larger scales" in str(caught[0].message)


def test_more_dimensions_than_features_are_reported():
    table = NeighborTable.from_rows(CLOUD, 4)
    with pytest.warns(UserWarning, match="exceeds the number of features, 3"):
        report_doubts("MST", found(4.0, 0.2), table)
    with pytest.warns(UserWarning, match="exceeds the number of features, 3"):
        report_doubts("MST", found(3.4), table)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report_doubts("MST", found(4.0, 0.3), table)
        report_doubts("MST", found(3.2), table)
        # Distances alone do not tell the number of features.
        report_doubts("MST", found(50.0), NeighborTable.from_arrays(table.distances, table.indices))


@pytest.mark.filterwarnings("ignore:.* is doubtful:UserWarning")
def test_two_equal_neighbours_everywhere_do_not_make_twonn_certain():
    model = TwoNN().fit(INTEGERS)
    assert (model.n_samples_used_, model.n_samples_dropped_) == (21, 285)
    assert model.dimension_std_nominal_ == pytest.approx(model.dimension_ / np.sqrt(21))
    assert model.dimension_std_ >= model.dimension_std_nominal_
    low, high = model.dimension_interval_
    assert low < 0.8 * model.dimension_ < 1.2 * model.dimension_ < high


@pytest.mark.filterwarnings("ignore:n_neighbors:UserWarning", "ignore:.* is doubtful:UserWarning")
@pytest.mark.filterwarnings("ignore:.* more than half:UserWarning")
def test_equal_patches_give_no_standard_error():
    for model in (ESS().fit(np.eye(60)), LocalPCADimension().fit(CLOUD[:3])):
        assert model.dimension_std_ is None
        assert model.dimension_interval_ is None


@pytest.mark.filterwarnings("ignore:n_neighbors:UserWarning")
def test_three_rows_make_no_simplex():
    with pytest.raises(ValueError, match="4 distinct rows"):
        ESS().fit(CLOUD[:3])


def test_neighbourhoods_that_are_too_small_are_reported():
    X = np.random.default_rng(0).standard_normal((300, 200))
    with pytest.warns(UserWarning, match="more than half of 29, the largest that neighbourhoods of 30 rows"):
        LocalPCADimension(n_neighbors_local=30).fit(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LocalPCADimension(n_neighbors_local=30).fit(CLOUD)


def test_scores_of_mle_compare_numbers_of_neighbours():
    # A flat torus has no edges: the law of every ratio is that of the dimension, whatever k is.
    from scipy.spatial import cKDTree

    X = np.random.default_rng(1).random((3000, 2))
    distances, indices = cKDTree(X, boxsize=1).query(X, 41)
    table = NeighborTable.from_arrays(distances[:, 1:], indices[:, 1:])
    scores = []
    for k in (5, 10, 20, 40):
        model = MLE(k).fit(table)
        model._query_values = lambda X, k, value: np.asarray(value(distances[:, 1 : k + 1]))
        scores.append(model.score(X))
    # ln(r_j / r_k) is minus an exponential variable of rate d: the mean is ln d - (d - 1) / d.
    np.testing.assert_allclose(scores, np.log(2) - 1 / 2, atol=0.02)


def test_score_of_mle_is_the_mean_over_rows_and_ratios():
    rng = np.random.default_rng(0)
    X, new = rng.standard_normal((300, 3)), rng.standard_normal((50, 3))
    model = MLE(6).fit(X)
    d, total = model.dimension_, []
    for row in new:
        r = np.sort(np.linalg.norm(X - row, axis=1))[:6]
        total += [np.log(d) + (d - 1) * np.log(r[j] / r[5]) for j in range(5)]
    assert model.score(new) == pytest.approx(np.mean(total), rel=1e-9)


RULES_ABOVE_NOISE = ("broken_stick", "gavish_donoho", "marchenko_pastur", "parallel")
CUBE = np.random.default_rng(0).random((1000, 5))
WIDE_NOISE = np.random.default_rng(0).standard_normal((1000, 50))


# The largest eigenvalue of noise lies near the edge of the Marchenko-Pastur law, on either side: no test of it there.
@pytest.mark.parametrize(
    ("rule", "rows"),
    [(rule, CUBE) for rule in RULES_ABOVE_NOISE]
    + [(rule, WIDE_NOISE) for rule in RULES_ABOVE_NOISE if rule != "marchenko_pastur"],
)
def test_no_direction_above_noise_is_reported(rule, rows):
    with pytest.warns(UserWarning, match=f"dimension 0 by PCADimension .* rule='{rule}' no direction stands") as caught:
        assert PCADimension(rule, n_resamples=20).fit(rows).dimension_ == 0
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_no_direction_above_noise_is_reported_for_moments():
    moments = Moments()
    moments.update(CUBE)
    with pytest.warns(UserWarning, match="rule='marchenko_pastur' no direction stands out of noise"):
        PCADimension("marchenko_pastur").fit(moments)


def test_a_direction_above_noise_is_not_reported():
    rows = WIDE_NOISE.copy()
    rows[:, 0] *= 4
    # Without correlations of the features 'parallel' would see nothing.
    rows = rows @ np.linalg.qr(np.random.default_rng(1).standard_normal((50, 50)))[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rule in RULES_ABOVE_NOISE:
            assert PCADimension(rule, n_resamples=20).fit(rows).dimension_ >= 1
        # Other rules count directions of any cloud.
        for rule in ("share", "participation", "kaiser", "fukunaga_olsen"):
            assert PCADimension(rule).fit(CUBE).dimension_ > 0


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("width", [3, 500])
@pytest.mark.parametrize("model", [PCADimension(), FisherS()])
def test_a_row_that_outweighs_all_others_is_reported(model, width, dtype):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((300, 3)) @ np.linalg.qr(rng.standard_normal((width, 3)))[0].T
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = model.fit(rows.astype(dtype)).dimension_
    rows[17] *= 1e4 / np.linalg.norm(rows[17])
    with pytest.warns(UserWarning, match=f"by {type(model).__name__} is doubtful: row 17 alone carries") as caught:
        assert model.fit(rows.astype(dtype)).dimension_ < 0.5 * expected
    assert len(caught) == 1
    # Rows are counted as they were passed, those that repeat an earlier one too.
    doubled = np.concatenate((rows[:5], rows))
    model = type(model)(duplicates="drop")
    with pytest.warns(UserWarning, match="row 22 alone carries"):
        model.fit(doubled.astype(dtype))


def test_share_of_the_heaviest_row():
    # Centred, 20 rows at 0 and pairs that balance each other: the share of one is its square over the sum.
    rows = np.zeros((24, 2))
    rows[:4, 0] = (3.0, -3.0, 1.0, -1.0)
    for X in (rows, np.pad(rows, ((0, 0), (0, 40)))):
        products = Products.of(X, True)
        np.testing.assert_allclose(row_squares(products) / products.scale**2, (X**2).sum(axis=1), atol=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PCADimension().fit(rows)
        # Of three rows one always has most of it.
        PCADimension().fit(np.array([[0.0, 0.0], [0.0, 0.1], [5.0, 0.0]]))
    rows[:4, 0] = (3.1, -1.55, -1.55, 0.0)
    # 3.1^2 of 3.1^2 + 2 * 1.55^2: two thirds.
    with pytest.warns(UserWarning, match=r"row 0 alone carries 0.667 of the total"):
        PCADimension().fit(rows)


@pytest.mark.filterwarnings("ignore:.* is doubtful:UserWarning")
@pytest.mark.parametrize("model", [MADA(20), MOM(20), TLE(20)])
def test_equal_values_of_all_rows_give_no_standard_error(model):
    # Two copies of each corner of a simplex, apart from each other: all rows see the same distances, of three lengths.
    rows = np.kron(np.eye(12), np.ones((2, 1)))
    rows = np.concatenate((rows, np.tile([[0.3], [0.0]], (12, 1))), axis=1)
    model.fit(rows)
    assert (model.dimension_std_, model.dimension_interval_, model.dimension_std_nominal_) == (None, None, None)


@pytest.mark.parametrize("rule", ["broken_stick", "gavish_donoho", "marchenko_pastur"])
def test_local_rules_that_find_nothing_say_so(rule):
    X = np.random.default_rng(0).random((400, 5))
    with pytest.warns(UserWarning, match=f"LocalPCADimension is doubtful: by rule='{rule}' no direction stands out"):
        model = LocalPCADimension(rule).fit(X)
    assert model.dimension_ < 1
