"""KNNGraphDimension and MSTDimension, which share their sub-samples."""

import numpy as np
import pytest
from conftest import make_array
from oracles import dimension_graphs as oracle
from scipy.spatial.distance import cdist
from sklearn.neighbors import kneighbors_graph

from isogeom import _xp
from isogeom.datasets import hyper_ball, hyper_sphere, make_manifold
from isogeom.dimension import KNNGraphDimension, MSTDimension, NeighborTable
from isogeom.dimension import _pairs as pairs_module
from isogeom.dimension._graph_lengths import Growth, sample_sizes, slope_weights
from isogeom.dimension._knn_graph import _Graph, entropy, integer_dimension
from isogeom.dimension._mst import spanning_trees
from isogeom.dimension._pairs import distance_matrix

BOTH = [KNNGraphDimension, MSTDimension]


class TestExactLaws:
    @pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
    def test_tree_of_a_line(self, alpha):
        n, h = 40, 0.3
        X = (h * np.arange(n) + 5)[:, np.newaxis]
        lengths, _ = spanning_trees(cdist(X, X)[np.newaxis])
        assert np.sum(lengths[0, 1:] ** alpha) == pytest.approx((n - 1) * h**alpha, rel=1e-12)

    @pytest.mark.parametrize("gamma", [0.5, 1.0])
    def test_graph_of_a_line(self, gamma):
        n, h = 40, 0.3
        X = (h * np.arange(n))[:, np.newaxis]
        graph = _Graph(NeighborTable.from_rows(X, 10), 2, gamma, None)
        parts = graph.parts(np.arange(n)) * graph.unit**gamma
        np.testing.assert_allclose(parts[1:-1], 2 * h**gamma, rtol=1e-10)
        np.testing.assert_allclose(parts[[0, -1]], h**gamma + (2 * h) ** gamma, rtol=1e-10)

    def test_power_laws_are_recovered(self):
        sizes = np.array([100, 200, 400, 800])
        for d, gamma in ((3, 1.0), (7, 2.0)):
            lengths = 5 * sizes[:, np.newaxis] ** ((d - gamma) / d) * np.ones((1, 3))
            slope = slope_weights(sizes) @ np.log(lengths[:, 0])
            assert gamma / (1 - slope) == pytest.approx(d, rel=1e-10)
            assert integer_dimension(sizes, lengths, gamma, 30) == d
        noisy = lengths * np.random.default_rng(0).uniform(0.9, 1.1, (4, 3))
        assert integer_dimension(sizes, noisy, 2.0, 30) == oracle.integer_dimension(sizes, noisy, 2.0, 30)

    def test_entropy_of_a_flat_torus(self):
        # Uniform on the unit torus: every Renyi entropy is 0, and there is no boundary.
        from scipy.spatial import cKDTree

        X = np.random.default_rng(0).random((4000, 2))
        distances, indices = cKDTree(X, boxsize=1).query(X, 100)
        table = NeighborTable.from_arrays(distances[:, 1:], indices[:, 1:])
        model = KNNGraphDimension().fit(table)
        assert model.dimension_ == pytest.approx(2, abs=0.06)
        assert entropy(np.asarray(model.sizes_), np.asarray(model.lengths_), 2.0, 1.0, 5) + 2 * np.log(
            np.median(distances[:, 1:6])
        ) == pytest.approx(0, abs=0.02)
        assert model.renyi_entropy_ == pytest.approx(0, abs=0.4)
        assert model.renyi_order_ == pytest.approx(0.5, abs=0.02)


class TestOracle:
    def test_trees(self):
        rng = np.random.default_rng(0)
        for X in (rng.standard_normal((30, 3)), rng.integers(0, 3, (25, 2)).astype(float)):
            D = cdist(X, X)
            lengths, ends = spanning_trees(D[np.newaxis])
            np.testing.assert_allclose(np.sort(lengths[0, 1:]), oracle.spanning_edges(D), atol=1e-12)
            np.testing.assert_allclose(D[ends[0, 0, 1:], ends[1, 0, 1:]], lengths[0, 1:])
        stack = np.stack([cdist(x, x) for x in rng.standard_normal((4, 12, 2))])
        lengths, _ = spanning_trees(stack)
        for one, D in zip(lengths, stack):
            np.testing.assert_allclose(np.sort(one[1:]), oracle.spanning_edges(D), atol=1e-12)

    @pytest.mark.parametrize("k_table", [5, 40])
    def test_graphs_of_subsamples_are_exact(self, k_table):
        X = np.random.default_rng(0).standard_normal((200, 12))
        graph = _Graph(NeighborTable.from_rows(X, k_table), 5, 1.0, None)
        for size in (40, 110, 200):
            rows = np.sort(np.random.default_rng(size).permutation(200)[:size])
            np.testing.assert_allclose(
                graph.parts(rows) * graph.unit, oracle.knn_parts(X[rows], 5, 1.0), rtol=1e-10, err_msg=str(size)
            )

    def test_distances(self, monkeypatch):
        rng = np.random.default_rng(0)
        # Two groups far apart: products lose the distances inside.
        X = rng.standard_normal((60, 8))
        X[30:] += 1e7
        D = cdist(X, X)
        np.testing.assert_allclose(distance_matrix(X, "euclidean"), D / D.max(), rtol=1e-7)
        monkeypatch.setattr(pairs_module, "_DOUBTFUL", 0.0)
        assert np.abs(distance_matrix(X, "euclidean") / (D / D.max() + np.eye(60)) - 1).max() > 0.5


class TestPeers:
    """What other packages get wrong."""

    def test_alpha_other_than_one(self):
        # A peer returns 1 / (1 - m) whatever alpha: 9.3 for a 5-cube at alpha = 0.5.
        X = np.random.default_rng(0).random((500, 5))
        half, one = MSTDimension(0.5).fit(X), MSTDimension(1.0).fit(X)
        assert one.dimension_ == pytest.approx(4.6, abs=0.4)
        assert half.dimension_ == pytest.approx(one.dimension_, rel=0.06)
        slope = slope_weights(np.asarray(half.sizes_)) @ np.log(np.asarray(half.lengths_)).mean(axis=1)
        assert half.dimension_ == pytest.approx(0.5 / (1 - slope), rel=1e-10)

    def test_without_replacement(self):
        # Drawn with replacement, copies have edges of length 0: a peer gives 4 and 6 for these balls.
        ten, twenty = (KNNGraphDimension().fit(hyper_ball(1000, d)) for d in (10, 20))
        assert 8 <= ten.dimension_ <= 10
        assert 8 <= ten.dimension_integer_ <= 10
        assert 13.5 <= twenty.dimension_ <= 17
        assert 13 <= twenty.dimension_integer_ <= 17

    def test_defaults_are_stable(self):
        # A peer's defaults use 18 rows: 2 to 10 for this cloud.
        X = np.hstack((hyper_ball(500, 5), np.zeros((500, 5))))
        found = [KNNGraphDimension(random_state=s).fit(X).dimension_ for s in range(6)]
        assert min(found) > 4
        assert max(found) < 5
        assert np.ptp(found) < 0.3

    @pytest.mark.parametrize("estimator", BOTH)
    def test_global_random_state_is_left_alone(self, estimator):
        np.random.seed(3)  # noqa: NPY002
        before = np.random.get_state()[1].copy()  # noqa: NPY002
        X = hyper_ball(100, 2)
        first = estimator(random_state=5).fit(X).dimension_
        np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002
        assert estimator(random_state=5).fit(X).dimension_ == first
        assert estimator(random_state=6).fit(X).dimension_ != first

    def test_a_distance_matrix_is_no_table_of_features(self):
        X = hyper_ball(150, 3)
        D = cdist(X, X)
        before = D.copy()
        for estimator in BOTH:
            model = estimator(metric="precomputed").fit(D)
            expected = estimator().fit(X)
            assert model.dimension_ == pytest.approx(expected.dimension_, rel=1e-9)
            assert model.dimension_std_ == pytest.approx(expected.dimension_std_, rel=1e-6)
            np.testing.assert_allclose(model.transform(D[:6]), expected.transform(X[:6]), rtol=1e-8)
        np.testing.assert_array_equal(D, before)


@pytest.mark.parametrize("estimator", BOTH)
@pytest.mark.parametrize(
    ("rows", "d"),
    [(lambda s: hyper_sphere(180, 2, random_state=s), 2), (lambda s: hyper_ball(180, 5, random_state=s), 5)],
)
def test_standard_error(estimator, rows, d):
    found = [estimator(n_repeats=4).fit(rows(s)) for s in range(25)]
    actual = np.std([m.dimension_ for m in found], ddof=1)
    # Somewhat too wide rather than too narrow.
    assert 0.8 < np.mean([m.dimension_std_ for m in found]) / actual < 2
    low, high = found[0].dimension_interval_
    assert low < found[0].dimension_ < high


@pytest.mark.parametrize(("name", "d", "room"), [("M2", 3, 0.25), ("M7", 2, 0.1), ("M11", 2, 0.1), ("M1", 10, 1.5)])
def test_manifolds(name, d, room):
    X = make_manifold(name, 800).X
    assert KNNGraphDimension().fit(X).dimension_ == pytest.approx(d, abs=room)
    assert MSTDimension(n_repeats=4).fit(X).dimension_ == pytest.approx(d, abs=room)


@pytest.mark.parametrize("estimator", BOTH)
def test_duplicates(estimator):
    X = hyper_ball(200, 3)
    twice = np.concatenate((X, X[:1]))
    expected = estimator().fit(X).dimension_
    model = estimator().fit(twice)
    assert model.dimension_ == pytest.approx(expected, rel=1e-9)
    assert model.n_duplicates_ == 1
    assert estimator(duplicates="keep").fit(twice).dimension_ == pytest.approx(expected, rel=0.1)
    with pytest.raises(ValueError, match="1 of 201 rows repeat"):
        estimator(duplicates="raise").fit(twice)


@pytest.mark.parametrize("estimator", BOTH)
@pytest.mark.parametrize("scale", [1e-150, 1e150])
def test_invariance(estimator, scale):
    X = hyper_ball(150, 3)
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((7, 7)))[0]
    moved = (np.hstack((X, np.zeros((150, 4)))) @ rotation + 0.5) * scale
    expected, found = estimator().fit(X), estimator().fit(moved)
    assert found.dimension_ == pytest.approx(expected.dimension_, rel=1e-9)
    np.testing.assert_allclose(found.transform(moved[:4]), expected.transform(X[:4]), rtol=1e-7)


@pytest.mark.parametrize(("estimator", "noise"), [(KNNGraphDimension, 0.06), (MSTDimension, 0.1)])
def test_local_dimensions(estimator, noise):
    X = hyper_sphere(300, 3)
    model = estimator(n_repeats=2)
    local = model.fit_transform(X)
    assert local.shape == (300, 1)
    assert np.isfinite(local).all()
    assert 2.3 < local.mean() < 3.3
    assert local.std() / local.mean() < 2 * noise
    np.testing.assert_allclose(model.transform(X[:7]), local[:7], rtol=1e-9)


def test_tree_of_many_rows():
    X = hyper_ball(1000, 3)
    model = MSTDimension(max_samples=200, n_repeats=5).fit(X)
    assert model.n_samples_used_ == 1000
    assert model.dimension_ == pytest.approx(MSTDimension().fit(X).dimension_, rel=0.15)
    two = MSTDimension(max_samples=200, n_repeats=2).fit(X)
    assert (two.n_samples_used_, two.n_samples_dropped_) == (400, 600)
    assert two.dimension_std_ > model.dimension_std_
    # Three repeats without common rows, then a new permutation.
    assert MSTDimension(max_samples=300, n_repeats=3).fit(X).n_samples_used_ == 900
    assert MSTDimension(max_samples=300, n_repeats=4).fit(X).n_samples_used_ > 900


def test_method_and_parameters():
    X = hyper_ball(200, 3)
    model = KNNGraphDimension(method="integer").fit(X)
    assert model.dimension_ == model.dimension_integer_
    assert model.dimension_slope_ == pytest.approx(KNNGraphDimension().fit(X).dimension_)
    cases = [
        (KNNGraphDimension(method="x"), "method='x'"),
        (KNNGraphDimension(gamma=0), "gamma=0 must be positive"),
        (KNNGraphDimension(min_share=1.0), "min_share=1.0 must lie between 0 and 1"),
        (KNNGraphDimension(n_neighbors=0), "n_neighbors=0"),
        (MSTDimension(alpha=0), "alpha=0 must be positive"),
        (MSTDimension(min_share=0.0), "min_share=0.0"),
        (MSTDimension(max_samples=5), "max_samples=5 must be at least 10"),
        (MSTDimension(n_sizes=1), "n_sizes=1 must be at least 2"),
    ]
    for estimator, match in cases:
        with pytest.raises(ValueError, match=match):
            estimator.fit(X)


def test_tables_that_do_not_suffice():
    X = hyper_ball(120, 3)
    with pytest.raises(ValueError, match="make it without anchors"):
        KNNGraphDimension().fit(NeighborTable.from_rows(X, 20, anchors=30))
    graph = kneighbors_graph(X, 8, mode="distance")
    with pytest.raises(ValueError, match="raise min_share"):
        KNNGraphDimension(metric="precomputed").fit(graph)
    with pytest.raises(ValueError, match="pass rows, or a full matrix of distances"):
        MSTDimension(metric="precomputed").fit(graph)
    wide = kneighbors_graph(X, 80, mode="distance")
    assert KNNGraphDimension(metric="precomputed").fit(wide).dimension_ == pytest.approx(
        KNNGraphDimension().fit(X).dimension_, rel=1e-9
    )


def test_sizes():
    np.testing.assert_array_equal(sample_sizes(100, 3, 0.25, 5), [25, 50, 100])
    assert sample_sizes(12, 8, 0.1, 6)[0] == 6
    with pytest.raises(ValueError, match="5 rows are too few"):
        sample_sizes(5, 4, 0.5, 6)


@pytest.mark.parametrize("estimator", BOTH)
def test_libraries_agree(estimator, as_array, library):
    X = hyper_ball(150, 3)
    expected = estimator().fit(X)
    model = estimator().fit(as_array(X))
    assert model.dimension_ == pytest.approx(expected.dimension_, rel=1e-9)
    local = _xp.to_numpy(model.transform(make_array(library, X[:20])))
    np.testing.assert_allclose(local, expected.transform(X[:20]), rtol=1e-8)


@pytest.mark.parametrize("estimator", BOTH)
def test_order_of_the_rows(estimator):
    X = hyper_ball(200, 3)
    order = np.random.default_rng(1).permutation(200)
    expected, found = estimator().fit(X), estimator().fit(X[order])
    assert found.dimension_ == pytest.approx(expected.dimension_, rel=1e-9)
    assert found.dimension_std_ == pytest.approx(expected.dimension_std_, rel=1e-6)


def test_order_of_the_rows_of_many_trees():
    X = hyper_ball(400, 3)
    model = MSTDimension(max_samples=100, n_repeats=3)
    expected = model.fit(X).dimension_
    assert model.fit(X[::-1]).dimension_ == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("estimator", BOTH)
def test_an_outlier_is_named(estimator):
    X = np.vstack((hyper_ball(200, 3), np.full((1, 3), 1e5)))
    with pytest.raises(ValueError, match=r"100% of it belongs to a few rows far .*. Drop these outliers, or"):
        estimator().fit(X)


def test_concentration_is_the_share_of_few_rows():
    growth = Growth.empty(np.array([20, 40]), 1, 40)
    growth.add(0, 0, np.arange(20), np.ones(20))
    assert growth.concentration == pytest.approx(1 / 20)
    growth.add(1, 0, np.arange(40), np.concatenate((np.ones(38), [30.0, 32.0])))
    assert growth.concentration == pytest.approx(62 / 100)


def test_few_rows():
    with pytest.raises(ValueError, match=r"at least 10 distinct rows .* got 4"):
        MSTDimension().fit(hyper_ball(4, 3))
    model = MSTDimension().fit(hyper_ball(19, 2))
    assert (model.dimension_std_, model.dimension_interval_) == (None, None)
    low, high = MSTDimension().fit(hyper_ball(20, 2)).dimension_interval_
    assert 0 < low < high


def test_a_tree_of_a_table_with_anchors_is_that_of_its_rows():
    X = hyper_ball(100, 3)
    expected = MSTDimension().fit(X)
    table = NeighborTable.from_rows(np.vstack((X, X[:10])), 20, anchors=30)
    model = MSTDimension().fit(table)
    assert model.dimension_ == pytest.approx(expected.dimension_, rel=1e-12)
    assert (model.n_samples_used_, model.n_samples_dropped_, model.n_duplicates_) == (100, 0, 10)
    # Four of the 30 repeat a row.
    bare = NeighborTable.from_arrays(table.distances, table.indices, n_samples=110, queries=table.queries)
    with pytest.raises(ValueError, match="those of 26 anchors"):
        MSTDimension().fit(bare)


@pytest.mark.parametrize(
    ("model", "name"), [(KNNGraphDimension(gamma=5.0), "gamma"), (MSTDimension(alpha=5.0), "alpha")]
)
def test_a_power_above_the_dimension_is_named(model, name):
    """Lengths of such powers are those of the longest edges: in dimension 2 they gave 3 and 4 without a word."""
    X = hyper_ball(300, 2)
    with pytest.warns(UserWarning, match=rf"{name}=5 is above the dimension found, .* Lower {name}."):
        model.fit(X)


@pytest.mark.parametrize("model", [KNNGraphDimension(), MSTDimension()])
def test_the_usual_power_is_fine_on_a_curve(model, recwarn):
    model.fit(np.random.default_rng(0).random((300, 1)))
    assert not [warning for warning in recwarn if "above the dimension" in str(warning.message)]
