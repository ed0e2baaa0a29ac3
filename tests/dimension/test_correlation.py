import numpy as np
import pytest
from conftest import make_array
from oracles import dimension_correlation as oracle
from scipy.spatial.distance import cdist
from sklearn.neighbors import kneighbors_graph

from isogeom import _xp
from isogeom.datasets import hyper_ball, hyper_sphere, make_manifold
from isogeom.dimension import CorrelationDimension, NeighborTable
from isogeom.dimension import _correlation as module
from isogeom.dimension import _pairs as pairs_module
from isogeom.dimension._pairs import PairSums, collected, pairs_within

# By other packages, from the same definition.
FIXTURES = [
    (lambda: np.hstack((hyper_ball(300, 5), np.zeros((300, 5)))), 4.35505695941),
    (lambda: hyper_sphere(300, 4, random_state=1), 3.74690091777),
    (lambda: hyper_ball(1000, 5), 4.465577490),
]
# Benchmark manifolds, 2000 rows, two decimals.
MANIFOLDS = {
    "M1": 8.78,
    "M2": 2.83,
    "M3": 3.51,
    "M5a": 1.01,
    "M5b": 2.68,
    "M6": 5.88,
    "M7": 1.95,
    "M9": 13.49,
    "M10a": 8.57,
    "M10b": 12.41,
    "M10c": 16.10,
    "M10d": 31.70,
    "M11": 1.99,
    "M12": 12.54,
    "Mbeta": 3.47,
    "Mp1": 2.04,
    "Mp2": 2.52,
    "Mp3": 2.97,
}


@pytest.mark.parametrize(("rows", "expected"), FIXTURES)
def test_fixtures(rows, expected):
    assert CorrelationDimension(10, 20).fit(rows()).dimension_ == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("name", MANIFOLDS)
def test_benchmark_manifolds(name):
    found = CorrelationDimension().fit(make_manifold(name).X).dimension_
    assert found == pytest.approx(MANIFOLDS[name], abs=0.005 + 1e-9)


class TestOracle:
    X = np.random.default_rng(0).standard_normal((150, 4)) * [1, 2, 0.5, 1]
    D = oracle.distances(X)

    def test_radii(self):
        model = CorrelationDimension(5, 12).fit(self.X)
        np.testing.assert_allclose(model.radii_, oracle.radii(self.D, 5, 12))
        expected = [oracle.correlation_sum(self.D, r) for r in model.radii_]
        np.testing.assert_allclose(model.correlation_sums_, expected)
        assert model.dimension_ == pytest.approx(oracle.two_radii(self.D, 5, 12), rel=1e-12)

    def test_regression(self):
        model = CorrelationDimension(5, 40, "regression").fit(self.X)
        assert model.dimension_ == pytest.approx(oracle.regression(self.D, 5, 40), rel=1e-10)

    def test_takens(self):
        model = CorrelationDimension(5, 40, "takens").fit(self.X)
        assert model.dimension_ == pytest.approx(oracle.takens(self.D, 40), rel=1e-12)

    @pytest.mark.parametrize("method", ["radii", "regression", "takens"])
    def test_every_input_gives_the_same(self, method):
        model = CorrelationDimension(5, 12, method).fit(self.X)
        table = NeighborTable.from_rows(self.X, 30)
        others = [
            CorrelationDimension(5, 12, method).fit(table),
            CorrelationDimension(5, 12, method, metric="precomputed").fit(self.D),
            CorrelationDimension(5, 12, method, metric="precomputed").fit(
                kneighbors_graph(self.X, 120, mode="distance")
            ),
            CorrelationDimension(5, 12, method, anchors=np.arange(150)).fit(self.X),
        ]
        for other in others[:3]:
            assert other.dimension_ == pytest.approx(model.dimension_, rel=1e-10)
            assert other.dimension_std_ == pytest.approx(model.dimension_std_, rel=1e-8)
        assert others[3].dimension_ == pytest.approx(model.dimension_, rel=1e-10)

    def test_other_metric(self):
        model = CorrelationDimension(5, 12, metric="cityblock").fit(self.X)
        assert model.dimension_ == pytest.approx(oracle.two_radii(oracle.distances(self.X, "cityblock"), 5, 12))

    def test_anchors(self):
        anchors = np.arange(0, 150, 3)
        model = CorrelationDimension(5, 12, anchors=anchors).fit(self.X)
        ranked = np.sort(self.D[anchors], axis=1)
        near, far = np.median(ranked[:, 5]), np.median(ranked[:, 12])
        counts = [np.sum(self.D[anchors] < r) - len(anchors) for r in (near, far)]
        assert model.dimension_ == pytest.approx(np.log(counts[1] / counts[0]) / np.log(far / near))
        table = NeighborTable.from_rows(self.X, 30, anchors=anchors)
        assert CorrelationDimension(5, 12).fit(table).dimension_ == pytest.approx(model.dimension_)


class TestPairs:
    def test_equal_those_of_all_distances(self, as_array):
        X = np.random.default_rng(1).standard_normal((700, 12)).astype(np.float32) + 50
        found = collected(pairs_within(as_array(X), 3.0), 10**6)
        D = cdist(X.astype(np.float64), X.astype(np.float64))
        i, j = np.nonzero(np.triu(D <= 3.0, 1))
        order = np.lexsort((found.others, found.centers))
        np.testing.assert_array_equal(found.centers[order], i)
        np.testing.assert_array_equal(found.others[order], j)
        np.testing.assert_allclose(found.distances[order], D[i, j], rtol=1e-12)

    @pytest.mark.parametrize("kept", [0, 2**20])
    @pytest.mark.parametrize("side", [96, 300])
    def test_do_not_depend_on_blocks(self, monkeypatch, side, kept):
        rng = np.random.default_rng(2)
        X = rng.standard_normal((700, 12)) + 50
        D = cdist(X, X)
        monkeypatch.setattr(pairs_module, "_BLOCK", side)
        monkeypatch.setattr(pairs_module, "_CACHED", (64, 100))
        monkeypatch.setattr(pairs_module, "_KEPT_BYTES", kept)
        for centers in (None, np.sort(rng.permutation(700)[:250])):
            found = collected(pairs_within(X, 3.0, centers=centers), 10**6)
            rows = D if centers is None else D[centers]
            near = np.triu(rows <= 3.0, 1) if centers is None else (rows <= 3.0) & (rows > 0)
            order = np.lexsort((found.others, found.centers))
            np.testing.assert_array_equal(np.stack((found.centers, found.others))[:, order], np.nonzero(near))
            np.testing.assert_allclose(found.distances[order], rows[near], rtol=1e-12)

    def test_far_from_the_origin(self):
        # The expansion into products gives NaN or 0 here.
        rng = np.random.default_rng(0)
        X = (rng.standard_normal((400, 5)) @ rng.standard_normal((5, 64)) + 300).astype(np.float32)
        expected = oracle.two_radii(oracle.distances(X.astype(np.float64)), 10, 20)
        assert CorrelationDimension().fit(X).dimension_ == pytest.approx(expected, rel=1e-12)

    def test_few_pairs_are_kept(self, monkeypatch):
        X = hyper_ball(300, 3)
        expected = CorrelationDimension().fit(X)
        monkeypatch.setattr(module, "_most_pairs", lambda m, high: 10)
        found = CorrelationDimension().fit(X)
        assert found.dimension_ == pytest.approx(expected.dimension_, rel=1e-12)
        assert found.dimension_std_ == pytest.approx(expected.dimension_std_, rel=1e-12)

    def test_sums_do_not_depend_on_parts(self):
        X = hyper_ball(200, 3)
        pairs = collected(pairs_within(X, 0.5), 10**6)
        radii = np.array([0.1, 0.2, 0.4])
        whole = PairSums(radii, 200, True)
        whole.add(pairs, positive=True)
        split = PairSums(radii, 200, True)
        for start in range(0, len(pairs.centers), 77):
            part = slice(start, start + 77)
            split.add(type(pairs)(pairs.centers[part], pairs.others[part], pairs.distances[part]), positive=True)
        np.testing.assert_array_equal(whole.shells, split.shells)
        np.testing.assert_allclose(whole.logs, split.logs)
        D = cdist(X, X)[np.tril_indices(200, -1)]
        np.testing.assert_array_equal(whole.below, [(D < r).sum() for r in radii])


class TestErrors:
    @pytest.mark.parametrize("method", ["radii", "regression", "takens"])
    def test_standard_error(self, method):
        found = [CorrelationDimension(method=method).fit(hyper_sphere(300, 3, random_state=s)) for s in range(60)]
        actual = np.std([m.dimension_ for m in found], ddof=1)
        claimed = np.mean([m.dimension_std_ for m in found])
        assert 0.8 < claimed / actual < 1.5
        for m in found[:3]:
            low, high = m.dimension_interval_
            assert low < m.dimension_ < high

    def test_bad_parameters(self):
        X = hyper_ball(50, 2)
        with pytest.raises(ValueError, match=r"n_neighbors_max=10 must be at least 11. It must be larger"):
            CorrelationDimension(10, 10).fit(X)
        with pytest.raises(ValueError, match="method='x' must be one of"):
            CorrelationDimension(method="x").fit(X)
        with pytest.raises(ValueError, match="duplicates='x'"):
            CorrelationDimension(duplicates="x").fit(X)

    def test_clipped(self):
        with pytest.warns(UserWarning, match="n_neighbors_max=20 of CorrelationDimension is clipped to 11"):
            model = CorrelationDimension().fit(hyper_ball(12, 2))
        assert np.isfinite(model.dimension_)

    def test_graph_that_is_too_small(self):
        graph = kneighbors_graph(hyper_ball(100, 2), 25, mode="distance")
        with pytest.raises(ValueError, match="neighbours within the radius"):
            CorrelationDimension(metric="precomputed").fit(graph)

    def test_rows_on_a_lattice(self):
        grid = np.stack(np.meshgrid(np.arange(12.0), np.arange(12.0)), axis=-1).reshape(-1, 2)
        with pytest.raises(ValueError, match="must be positive and differ"):
            CorrelationDimension(1, 2).fit(grid)


def test_a_distance_matrix_is_no_table_of_features():
    # A peer measured distances between the rows of the matrix.
    X = hyper_ball(200, 3)
    D = cdist(X, X)
    before = D.copy()
    model = CorrelationDimension(metric="precomputed").fit(D)
    assert model.dimension_ == pytest.approx(CorrelationDimension().fit(X).dimension_, rel=1e-10)
    np.testing.assert_array_equal(D, before)
    np.testing.assert_allclose(model.transform(D[:9]), CorrelationDimension().fit(X).transform(X[:9]), rtol=1e-9)


def test_duplicates():
    X = hyper_ball(300, 4)
    expected = CorrelationDimension().fit(X).dimension_
    twice = np.concatenate((X, X[:1]))
    model = CorrelationDimension().fit(twice)
    assert model.dimension_ == pytest.approx(expected, rel=1e-12)
    assert model.n_duplicates_ == 1
    for method in ("radii", "regression", "takens"):
        kept = CorrelationDimension(method=method, duplicates="keep").fit(twice)
        assert kept.dimension_ == pytest.approx(CorrelationDimension(method=method).fit(X).dimension_, rel=0.02)
    with pytest.raises(ValueError, match="1 of 301 rows repeat"):
        CorrelationDimension(duplicates="raise").fit(twice)


@pytest.mark.parametrize("scale", [1e-150, 1e150])
def test_scale(scale):
    X = hyper_ball(200, 3)
    for method in ("radii", "regression", "takens"):
        expected = CorrelationDimension(method=method).fit(X)
        model = CorrelationDimension(method=method).fit(X * scale)
        assert model.dimension_ == pytest.approx(expected.dimension_, rel=1e-9)
        np.testing.assert_allclose(model.transform(X[:5] * scale), expected.transform(X[:5]), rtol=1e-8)


@pytest.mark.parametrize("method", ["radii", "regression", "takens"])
def test_local_dimensions(method):
    X = hyper_sphere(3000, 3, random_state=0)
    model = CorrelationDimension(method=method)
    local = model.fit_transform(X)
    assert local.shape == (3000, 1)
    assert np.isfinite(local).all()
    assert local.mean() == pytest.approx(3, abs=0.2)
    # The noise that the docstring states.
    stated = {"radii": 0.14, "regression": 0.15, "takens": 0.1}[method]
    assert local.std() / local.mean() == pytest.approx(stated, rel=0.2)
    np.testing.assert_array_equal(model.transform(X[:7]), local[:7])


def test_libraries_agree(as_array, library):
    X = hyper_ball(250, 4)
    expected = CorrelationDimension(method="regression").fit(X)
    model = CorrelationDimension(method="regression").fit(as_array(X))
    assert model.dimension_ == pytest.approx(expected.dimension_, rel=1e-10)
    local = model.transform(make_array(library, X[:20]))
    np.testing.assert_allclose(_xp.to_numpy(local), expected.transform(X[:20]), rtol=1e-8)
