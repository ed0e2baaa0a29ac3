"""What all dimension estimators share: inputs, local dimensions, invariances."""

import numpy as np
import pytest
from conftest import LIBRARIES, make_array
from oracles import dimension as oracle
from sklearn.ensemble import RandomForestRegressor
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import kneighbors_graph
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import StandardScaler

from isogeom import _xp
from isogeom.dimension import ABIDE, MLE, BinomialDimension, Gride, NeighborTable, TwoNN

MODELS = [
    TwoNN(n_neighbors_local=30),
    TwoNN("censored", n_neighbors_local=30),
    MLE(8, n_neighbors_local=12),
    Gride(2, max_neighbors=8, n_neighbors_local=30),
    BinomialDimension(8, n_neighbors_local=20),
    ABIDE(20, n_neighbors_local=20),
]
X = oracle.hyper_ball(200, 4, 3)
IDS = [type(model).__name__ for model in MODELS]


@pytest.mark.parametrize("model", MODELS, ids=IDS)
class TestEveryEstimator:
    def test_rows_table_matrix_and_graph_agree(self, model):
        expected = model.fit(X).dimension_
        local = model.transform(X)
        table = NeighborTable.from_rows(X, 60)
        assert model.fit(table).dimension_ == pytest.approx(expected, rel=1e-9)
        np.testing.assert_allclose(model.transform(X), local, rtol=1e-9)
        np.testing.assert_allclose(model.transform(table), local, rtol=1e-9)
        D = oracle.all_distances(X)
        model.set_params(metric="precomputed")
        try:
            before = D.copy()
            assert model.fit(D).dimension_ == pytest.approx(expected, rel=1e-9)
            np.testing.assert_allclose(model.transform(D), local, rtol=1e-9)
            np.testing.assert_array_equal(D, before)
            graph = kneighbors_graph(X, 60, mode="distance")
            assert model.fit(graph).dimension_ == pytest.approx(expected, rel=1e-9)
            np.testing.assert_allclose(model.transform(graph), local, rtol=1e-9)
        finally:
            model.set_params(metric="euclidean")

    def test_fit_transform_is_fit_then_transform(self, model):
        np.testing.assert_allclose(model.fit_transform(X), model.fit(X).transform(X), rtol=1e-12)

    def test_a_row_is_known_by_its_coordinates(self, model):
        model.fit(X)
        np.testing.assert_allclose(model.transform(X[5:6].copy()), model.transform(X)[5:6], rtol=1e-10)

    @pytest.mark.parametrize("scale", [1e-140, 1.0, 1e140])
    def test_invariances(self, model, scale):
        rng = np.random.default_rng(0)
        expected, local = model.fit(X).dimension_, model.transform(X)
        rotation = np.linalg.qr(rng.standard_normal((9, 9)))[0]
        order = rng.permutation(len(X))
        moved = (np.pad(X, ((0, 0), (0, 5))) @ rotation + 3.0)[order] * scale
        assert model.fit(moved).dimension_ == pytest.approx(expected, rel=1e-6)
        np.testing.assert_allclose(model.transform(moved), local[order], rtol=1e-5)

    @pytest.mark.parametrize("library", LIBRARIES)
    def test_libraries_agree(self, model, library):
        expected, local = model.fit(X).dimension_, model.transform(X)
        rows = make_array(library, X)
        assert model.fit(rows).dimension_ == pytest.approx(expected, rel=1e-9)
        got = model.transform(rows)
        assert _xp.is_foreign(got) == _xp.is_foreign(rows)
        np.testing.assert_allclose(_xp.to_numpy(got), local, rtol=1e-9)

    def test_float32_rows_far_from_the_origin(self, model):
        rng = np.random.default_rng(1)
        rows = (X @ rng.standard_normal((4, 300)) + 50.0).astype(np.float32)
        exact = model.fit(rows.astype(np.float64)).dimension_
        assert model.fit(rows).dimension_ == pytest.approx(exact, rel=1e-9)
        assert model.transform(rows).dtype == np.float32

    def test_many_duplicates_are_dropped_and_counted(self, model):
        expected = model.fit(X).dimension_
        model.fit(np.concatenate((X, X[:50], X[:20])))
        assert model.dimension_ == pytest.approx(expected, rel=1e-9)
        assert model.n_duplicates_ == 70
        local = model.transform(np.concatenate((X, X[:50])))
        assert np.isfinite(local).all()
        np.testing.assert_allclose(local[:50], local[200:], rtol=1e-9)

    def test_duplicates_can_be_refused(self, model):
        model.set_params(duplicates="raise")
        try:
            with pytest.raises(ValueError, match="1 of 201 rows repeat"):
                model.fit(np.concatenate((X, X[:1])))
        finally:
            model.set_params(duplicates="drop")

    def test_too_few_distinct_rows(self, model):
        with pytest.raises(ValueError, match="2 distinct row"):
            model.fit(np.array([[0.0], [1.0], [0.0], [1.0]]))
        with pytest.raises(ValueError, match="minimum of 3 is required"):
            model.fit(np.eye(2))

    def test_far_queries_are_finite(self, model):
        model.fit(X)
        assert np.isfinite(model.transform(X[:3] + 1e6)).all()

    def test_interval_holds_the_estimate_and_grows_with_the_level(self, model):
        low, high = model.fit(X).dimension_interval_
        assert low < model.dimension_ < high
        assert model.dimension_std_ >= model.dimension_std_nominal_ > 0
        model.set_params(confidence_level=0.5)
        try:
            inner = model.fit(X).dimension_interval_
        finally:
            model.set_params(confidence_level=0.95)
        assert low < inner[0] < inner[1] < high


def test_anchors_use_the_scale_of_all_rows():
    rng = np.random.default_rng(2)
    rows = rng.random((3000, 4)) @ rng.standard_normal((4, 12))
    every = MLE(10).fit(rows)
    some = MLE(10, anchors=600).fit(rows)
    assert some.n_samples_used_ == 600
    assert some.dimension_ == pytest.approx(every.dimension_, abs=4 * some.dimension_std_)
    chosen = MLE(10, anchors=np.arange(0, 3000, 5)).fit(rows)
    np.testing.assert_array_equal(chosen.table_.queries, np.arange(0, 3000, 5))
    np.testing.assert_allclose(chosen.table_.distances, every.table_.distances[::5])
    with pytest.raises(ValueError, match="anchors=4000 must be at least 1 and at most 3000"):
        MLE(anchors=4000).fit(rows)


def test_pipelines_and_grid_search():
    rng = np.random.default_rng(0)
    flat = np.pad(rng.standard_normal((60, 2)), ((0, 0), (0, 4)))
    rows = np.concatenate((flat, 5 + rng.standard_normal((60, 6))))
    y = np.repeat([2.0, 6.0], 60)
    features = FeatureUnion([("local", MLE(5, n_neighbors_local=15)), ("scale", StandardScaler())])
    features.set_output(transform="pandas")
    frame = features.fit_transform(rows)
    assert frame.columns[0] == "local__mle0"
    assert frame.iloc[:60, 0].mean() + 1 < frame.iloc[60:, 0].mean()
    pipe = Pipeline([("local", MLE(5)), ("model", RandomForestRegressor(20, random_state=0))])
    search = GridSearchCV(pipe, {"local__n_neighbors_local": [5, 20]}, cv=3).fit(rows[::2], y[::2])
    assert search.best_score_ > -1
    chosen = GridSearchCV(MLE(), {"n_neighbors": [5, 10]}, cv=3).fit(rows)
    assert np.isfinite(chosen.cv_results_["mean_test_score"]).all()


def test_k_is_clipped_with_a_warning():
    with pytest.warns(UserWarning, match="n_neighbors=20 of MLE is clipped to 9, the number of other") as record:
        model = MLE().fit(X[:10])
    # The user's line is named, not one of the library.
    assert [warning.filename for warning in record] == [__file__]
    assert np.isfinite(model.dimension_)


def test_a_short_table_is_refused():
    with pytest.raises(ValueError, match="n_neighbors=20 of MLE needs a table of 20 neighbours, but this one has 5"):
        MLE().fit(NeighborTable.from_rows(X, 5))


def test_a_table_without_rows_transforms_tables_only():
    distances, indices = oracle.torus_neighbors(100, 3, 0, 30)
    table = NeighborTable.from_arrays(distances, indices)
    model = MLE(n_neighbors_local=30).fit(table)
    assert model.transform(table).shape == (100, 1)
    with pytest.raises(ValueError, match="fitted on a table without rows"):
        model.transform(np.ones((4, 3)))


def test_a_table_of_other_rows_is_refused():
    model = TwoNN().fit(X)
    with pytest.raises(ValueError, match="X is a table of 100 other rows than the 200 of fit"):
        model.transform(NeighborTable.from_rows(X[:100], 20))


def test_abide_needs_all_rows():
    with pytest.raises(ValueError, match="needs the table of all rows"):
        ABIDE().fit(NeighborTable.from_rows(X, 30, anchors=50))
