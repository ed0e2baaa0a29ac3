"""Warnings about ties and impossible dimensions, and errors that ties must not turn into 0."""

import warnings

import numpy as np
import pytest

from isogeom.dimension import ESS, MLE, LocalPCADimension, NeighborTable, TwoNN
from isogeom.dimension._base import Estimate
from isogeom.dimension._doubts import report_doubts, tied_share

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
