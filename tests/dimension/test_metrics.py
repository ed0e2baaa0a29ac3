"""Metrics other than the Euclidean one: rows know themselves, neighbourhoods are measured by it, clear errors."""

import numpy as np
import pytest
from conftest import make_array
from oracles import dimension as oracle
from sklearn.metrics import pairwise_distances

from isogeom import _xp
from isogeom._neighbors._metrics import offered_metrics
from isogeom._neighbors._own import same_row
from isogeom.dimension import ABIDE, MLE, Gride, KNNGraphDimension, MiND, MSTDimension, NeighborTable, TwoNN

RNG = np.random.default_rng(0)
X = RNG.random((400, 12))
CURVED = RNG.random((120, 3)) @ RNG.standard_normal((3, 6))
BINARY = ("dice", "hamming", "jaccard", "rogerstanimoto", "russellrao", "sokalsneath", "yule")


def rows_of(metric):
    if metric in BINARY:
        return (np.random.default_rng(0).random((200, 40)) > 0.5).astype(float)
    return X[:, :2] if metric == "haversine" else X


@pytest.mark.filterwarnings("ignore:Data was converted to boolean", "ignore:The dimension .* is doubtful")
@pytest.mark.parametrize("offset", [0.0, 40.0])
@pytest.mark.parametrize("metric", offered_metrics())
def test_no_row_is_its_own_neighbour(metric, offset):
    rows = rows_of(metric)
    if metric not in (*BINARY, "haversine"):
        rows = rows + offset
    table = NeighborTable.from_rows(rows, 100, metric=metric)
    model = MLE(metric=metric).fit(rows)
    distances, indices = model._neighborhoods(rows, 100)
    assert not (indices == np.arange(len(rows))[:, np.newaxis]).any()
    np.testing.assert_allclose(distances, table.distances, rtol=1e-9, atol=1e-14)
    if metric not in BINARY:
        np.testing.assert_allclose(model.transform(rows), model.transform(table), rtol=1e-9)


@pytest.mark.parametrize("metric", ["cosine", "correlation", "sqeuclidean", "nan_euclidean"])
def test_local_dimensions_and_scores_are_those_of_the_other_rows(metric):
    rows = np.random.default_rng(0).standard_normal((300, 64))
    D = pairwise_distances(rows, metric=metric)
    np.fill_diagonal(D, np.inf)
    r = np.sort(D, axis=1)[:, :20]
    sums = np.sum(np.log(r[:, -1:] / r), axis=1)
    model = MLE(metric=metric, n_neighbors_local=20).fit(rows)
    np.testing.assert_allclose(model.transform(rows)[:, 0], 18 / sums, rtol=1e-6)
    d = model.dimension_
    assert model.score(rows) == pytest.approx(np.log(d) - (d - 1) * sums.mean() / 19, rel=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_other_precisions_know_themselves_in_a_metric_with_rounding_errors(dtype):
    model = MLE(metric="cosine", n_neighbors_local=20).fit(X.astype(np.float32))
    expected = model.transform(NeighborTable.from_rows(X.astype(np.float32), 20, metric="cosine"))
    other = X.astype(np.float32).astype(np.float64) if dtype is np.float64 else X.astype(np.float32)
    np.testing.assert_allclose(model.transform(other), expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The dimension .* is doubtful")
def test_a_multiple_of_a_row_is_another_row_by_angle():
    rows = np.concatenate((X[:50], 2 * X[:50]))
    model = MLE(metric="cosine", n_neighbors_local=10).fit(rows)
    _, indices = model._neighborhoods(rows, 10)
    assert not (indices == np.arange(100)[:, np.newaxis]).any()
    np.testing.assert_array_equal(indices[:50, 0], np.arange(50, 100))


@pytest.mark.filterwarnings("ignore:The dimension .* is doubtful")
def test_kept_duplicates_leave_out_one_of_the_copies():
    rows = np.concatenate((X[:60], X[:10]))
    model = MLE(metric="manhattan", n_neighbors_local=10, duplicates="keep").fit(rows)
    distances, _ = model._neighborhoods(rows, 10)
    expected = NeighborTable.from_rows(rows, 10, metric="manhattan", duplicates="keep").distances
    np.testing.assert_allclose(distances, expected, rtol=1e-12)
    assert np.count_nonzero(distances == 0) == 20


@pytest.mark.parametrize("library", ["numpy", "strict", "torch", "torch-cuda"])
def test_same_row_finds_the_first_of_any_column(library):
    # The first features agree everywhere: they exclude nothing.
    rows = np.concatenate((np.ones((30, 300)), RNG.standard_normal((30, 40)), np.ones((30, 300))), axis=1)
    rows[9] = rows[4]
    indices = np.array([[3, 4, 9, 5], [9, 4, 1, 2], [0, 1, 2, 3], [8, 7, 6, 5]])
    found = same_row(make_array(library, rows), make_array(library, rows[[4, 4, 29, 5]]), make_array(library, indices))
    np.testing.assert_array_equal(_xp.to_numpy(found)[:, 0], [1, 0, 4, 3])
    narrow = make_array(library, rows[[4, 4, 29, 5]].astype(np.float32))
    found = same_row(make_array(library, rows), narrow, make_array(library, indices))
    np.testing.assert_array_equal(_xp.to_numpy(found)[:, 0], [1, 0, 4, 3])


@pytest.mark.parametrize("cls", [Gride, TwoNN, MiND, ABIDE])
@pytest.mark.parametrize("metric", ["manhattan", "chebyshev", "cosine"])
def test_estimates_are_those_of_the_distances(cls, metric):
    rows = CURVED + 3
    model = cls(metric=metric).fit(rows)
    D = pairwise_distances(rows, metric=metric)
    expected = cls(metric="precomputed").fit((D + D.T) / 2)
    assert model.dimension_ == pytest.approx(expected.dimension_, rel=1e-8)
    assert model.dimension_std_ == pytest.approx(expected.dimension_std_, rel=1e-6)
    np.testing.assert_allclose(model.transform(rows), expected.transform((D + D.T) / 2), rtol=1e-6)


def test_gride_of_a_sphere_by_angle():
    # On a sphere, 1 - cos is half the square of the chord: all log ratios double, all dimensions halve.
    rows = oracle.hyper_sphere(1500, 5, 0)
    euclidean, cosine = Gride(2).fit(rows), Gride(2, metric="cosine").fit(rows)
    assert cosine.dimension_ == pytest.approx(euclidean.dimension_ / 2, rel=1e-6)
    assert cosine.dimension_std_ == pytest.approx(euclidean.dimension_std_ / 2, rel=1e-6)
    for name in ("dimension", "lower", "upper"):
        np.testing.assert_allclose(cosine.scales_[name], euclidean.scales_[name] / 2, rtol=1e-6)
    assert euclidean.dimension_ == pytest.approx(5, abs=4 * euclidean.dimension_std_)


@pytest.mark.parametrize("cls", [KNNGraphDimension, MSTDimension])
@pytest.mark.parametrize("metric", ["manhattan", "cosine", "chebyshev"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_graphs_of_neighbourhoods_are_in_the_metric(cls, metric, dtype):
    rows = (CURVED + 1).astype(dtype)
    D = pairwise_distances(rows.astype(float), metric=metric)
    expected = cls(metric="precomputed", n_neighbors_local=30).fit(D).transform(D)
    model = cls(metric=metric, n_neighbors_local=30).fit(rows)
    np.testing.assert_allclose(model.transform(rows), expected, rtol=1e-6)
    table = NeighborTable.from_rows(rows, len(rows) - 1, metric=metric)
    np.testing.assert_allclose(cls(n_neighbors_local=30).fit(table).transform(rows), expected, rtol=1e-6)


@pytest.mark.parametrize("cls", [KNNGraphDimension, MSTDimension])
def test_a_metric_that_nobody_knows_is_not_taken_for_the_euclidean_one(cls):
    known = NeighborTable.from_rows(CURVED, 119)
    table = NeighborTable.from_arrays(known.distances, known.indices, metric="periodic", X=CURVED)
    with pytest.raises(ValueError, match=r"metric='periodic'.*'cosine'"):
        cls().fit(table).transform(table)


@pytest.mark.parametrize("library", ["torch", "strict"])
@pytest.mark.parametrize("cls", [KNNGraphDimension, MSTDimension, MLE])
def test_other_libraries_have_the_euclidean_metric_only(cls, library):
    rows = make_array(library, CURVED)
    with pytest.raises(ValueError, match="metric='cosine'") as of_rows:
        cls(metric="cosine").fit(rows)
    known = NeighborTable.from_rows(rows, 119)
    table = NeighborTable.from_arrays(known.distances, known.indices, metric="cosine", X=rows)
    with pytest.raises(ValueError, match="metric='cosine'") as of_table:
        cls().fit(table).transform(rows if cls is MLE else table)
    assert str(of_table.value) == str(of_rows.value)


@pytest.mark.parametrize("model", [MLE, MSTDimension, Gride], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("seuclidean", r"metric='seuclidean' needs the variances .* metric='euclidean'"),
        ("mahalanobis", r"metric='mahalanobis' needs a covariance, .* whiten the rows"),
        ("wminkowski", r"metric='wminkowski' needs weights, .* square roots"),
        ("haversine", r"metric='haversine' compares 2 features, .* but X has 12"),
        ("nonsense", "'nonsense'.*'cosine'"),
    ],
)
def test_metrics_that_cannot_be_had_say_what_to_do(model, metric, message):
    with pytest.raises(ValueError, match=message):
        model(metric=metric).fit(X)


def test_matrices_are_not_rows():
    with pytest.raises(ValueError, match=r"metric='precomputed' takes distances.*from_precomputed"):
        NeighborTable.from_rows(CURVED, 5, metric="precomputed")


@pytest.mark.parametrize("metric", ["cosine", "correlation", "sqeuclidean", "nan_euclidean", "l2", "minkowski"])
def test_squares_that_overflow_are_refused(metric):
    with pytest.raises(ValueError, match=f"entries above .* overflow in metric='{metric}'"):
        MLE(metric=metric).fit(X * 1e200)
    model = MLE(metric=metric).fit(X)
    with pytest.raises(ValueError, match=f"entries above .* overflow in metric='{metric}'"):
        model.transform(X[:3] * 1e200)


def test_rows_without_distances_are_refused():
    rows = X.copy()
    rows[5] = 0.25
    with pytest.raises(ValueError, match=r"metric='correlation' gives no finite distance for 1 row"):
        MLE(metric="correlation").fit(rows)


@pytest.mark.filterwarnings("ignore:The dimension .* is doubtful", "ignore:Data was converted to boolean")
@pytest.mark.parametrize("metric", ["braycurtis", "canberra", "cosine", "dice", "jaccard", "sokalsneath"])
@pytest.mark.parametrize("k", [10, 48, 49])
def test_a_row_of_zeros_that_has_no_distance_to_itself(metric, k):
    rows = (np.random.default_rng(0).random((50, 40)) > 0.5).astype(float)
    rows[5] = 0
    table = NeighborTable.from_rows(rows, k, metric=metric)
    assert np.isfinite(table.distances).all()
    model = MLE(k, metric=metric, n_neighbors_local=k).fit(rows)
    np.testing.assert_allclose(model._neighborhoods(rows, k)[0], table.distances, rtol=1e-12, atol=1e-15)


def test_the_power_of_minkowski_is_two():
    table, expected = (NeighborTable.from_rows(X, 10, metric=metric) for metric in ("minkowski", "euclidean"))
    np.testing.assert_allclose(table.distances, expected.distances, rtol=1e-12)


def test_haversine_takes_two_features():
    rows = X[:, :2]
    table = NeighborTable.from_rows(rows, 100, metric="haversine")
    expected = np.sort(pairwise_distances(rows, metric="haversine"), axis=1)[:, 1:101]
    np.testing.assert_allclose(table.distances, expected, rtol=1e-7)
