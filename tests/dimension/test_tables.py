"""Tables, matrices and graphs in place of rows: their metric, length and duplicates, and anchors among them."""

import warnings

import numpy as np
import pytest
from conftest import make_array
from oracles import dimension as oracle
from sklearn.neighbors import kneighbors_graph

from isogeom import _xp
from isogeom.dimension import ABIDE, MLE, BinomialDimension, Gride, MiND, NeighborTable, TwoNN

pd = pytest.importorskip("pandas")

X = oracle.hyper_ball(200, 4, 3)
RNG = np.random.default_rng(0)
WIDE = RNG.random((300, 3)) @ RNG.standard_normal((3, 12))
TWICE = np.concatenate((X, X[:50]))


@pytest.mark.parametrize("model", [MLE(8), TwoNN()], ids=["MLE", "TwoNN"])
def test_transform_searches_by_the_metric_of_the_table(model):
    table = NeighborTable.from_rows(WIDE, 120, metric="manhattan")
    model.fit(table)
    np.testing.assert_allclose(model.transform(WIDE), model.transform(table), rtol=1e-12)
    direct = type(model)(**{**model.get_params(), "metric": "manhattan"}).fit(WIDE)
    np.testing.assert_allclose(model.transform(WIDE), direct.transform(WIDE), rtol=1e-12)
    assert np.abs(model.transform(WIDE) - model.fit(WIDE).transform(WIDE)).max() > 1e-3


def test_names_of_features_are_those_of_the_last_fit():
    frame = pd.DataFrame(WIDE, columns=[f"c{i}" for i in range(12)])
    model = MLE(n_neighbors_local=20).fit(frame)
    assert list(model.feature_names_in_) == list(frame.columns)
    model.fit(NeighborTable.from_rows(WIDE[:, :5]))
    assert model.n_features_in_ == 5
    assert not hasattr(model, "feature_names_in_")
    model.fit(frame)
    distances, indices = oracle.torus_neighbors(100, 3, 0, 30)
    model.fit(NeighborTable.from_arrays(distances, indices))
    assert not hasattr(model, "n_features_in_")
    assert not hasattr(model, "feature_names_in_")


class TestLength:
    def test_only_neighbours_that_are_needed_are_warned_about(self):
        rows = np.concatenate((X[:150], X[:100]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert MiND(100).fit(rows).table_.n_neighbors == 101
            assert Gride().fit(np.concatenate((X[:4], X[:4]))).table_.n_neighbors == 3

    @pytest.mark.parametrize(
        ("model", "name"), [(Gride, "max_neighbors"), (ABIDE, "max_neighbors"), (MLE, "n_neighbors_local")]
    )
    @pytest.mark.parametrize("kind", ["rows", "table", "short"])
    def test_only_chosen_sizes_that_are_clipped_are_warned_about(self, model, name, kind):
        rows = X[:60]
        data = {
            "rows": rows,
            "table": NeighborTable.from_rows(rows, 59),
            "short": NeighborTable.from_rows(X, 59),
        }[kind]
        limit = "the number of neighbours in the table" if kind == "short" else "the number of other distinct rows"
        chosen = model(**{name: 5000})
        act = chosen.fit if name == "max_neighbors" else chosen.fit(data).transform
        with pytest.warns(UserWarning, match=f"^{name}=5000 of {model.__name__} is clipped to 59, {limit}") as record:
            result = act(data)
        assert len(record) == 1
        assert record[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            expected = model(**{name: 59}).fit(data)
            # A default says: at most so many.
            if name == "max_neighbors":
                model().fit(data)
                assert result.dimension_ == expected.dimension_
            else:
                np.testing.assert_array_equal(result, expected.transform(data))
                if kind != "short":
                    model().fit(data).transform(data)

    @pytest.mark.parametrize("kind", ["rows", "duplicates", "table", "matrix", "graph"])
    def test_too_few_rows_clip_with_a_warning(self, kind):
        rows, metric = X[:10], "euclidean"
        data = {
            "rows": rows,
            "duplicates": np.concatenate((rows, rows, rows)),
            "table": NeighborTable.from_rows(rows, 9),
            "matrix": oracle.all_distances(rows),
            "graph": kneighbors_graph(rows, 9, mode="distance"),
        }[kind]
        if kind in ("matrix", "graph"):
            metric = "precomputed"
        message = "n_neighbors=20 of MLE is clipped to 9, the number of other distinct rows"
        with pytest.warns(UserWarning, match=message) as record:
            model = MLE(metric=metric).fit(data)
        assert [warning.filename for warning in record] == [__file__]
        expected = MLE(9).fit(rows).dimension_
        assert model.dimension_ == pytest.approx(expected, rel=1e-9)

    def test_a_short_graph_says_that_it_is_short(self):
        graph = kneighbors_graph(X, 12, mode="distance")
        with pytest.warns(UserWarning, match="n_neighbors=20 of MLE is clipped to 12, the number of neighbours in"):
            model = MLE(metric="precomputed").fit(graph)
        assert model.dimension_ == pytest.approx(MLE(12).fit(X).dimension_, rel=0.05)
        with pytest.warns(UserWarning, match="n_neighbors_local=100 of MLE is clipped to 12, the number of neighbours"):
            model.transform(graph)

    def test_one_more_than_the_parameter_is_said(self):
        with pytest.warns(UserWarning, match="n_neighbors=20 of MiND is clipped to 8, 1 less than the number of other"):
            model = MiND(20).fit(X[:10])
        assert model.dimension_ == pytest.approx(MiND(8).fit(X[:10]).dimension_)

    def test_short_tables_are_refused_in_terms_of_the_caller(self):
        table = NeighborTable.from_rows(X, 5)
        with pytest.raises(ValueError, match="n_neighbors=20 of BinomialDimension needs a table of 20 neighbours"):
            BinomialDimension().fit(table)
        with pytest.raises(ValueError, match=r"n2=8 is above the 5 neighbours .* make the table with n_neighbors=8"):
            Gride(4).fit(table)
        with pytest.raises(ValueError, match="TwoNN needs a table of 2 neighbours, but this one has 1"):
            TwoNN().fit(table.first(1))
        graph = kneighbors_graph(X, 1, mode="distance")
        with pytest.raises(ValueError, match="Every row has 1 neighbour, the number of neighbours in the graph: TwoNN"):
            TwoNN(metric="precomputed").fit(graph)

    def test_transform_of_a_short_table_warns(self):
        table = NeighborTable.from_rows(X, 40)
        model = MLE().fit(table)
        message = "n_neighbors_local=100 of MLE is clipped to 40, the number of neighbours in the table"
        with pytest.warns(UserWarning, match=message) as record:
            local = model.transform(table)
        assert [warning.filename for warning in record] == [__file__]
        np.testing.assert_allclose(local, MLE(n_neighbors_local=40).fit(X).transform(X), rtol=1e-12)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # All rows there are: nothing that the caller could make longer.
            MLE(8).fit(X[:60]).transform(NeighborTable.from_rows(X[:60], 59))


class TestDuplicates:
    def test_a_table_gives_the_rows_that_it_lists(self):
        table = NeighborTable.from_rows(TWICE, 120)
        assert TwoNN().fit_transform(table).shape == (200, 1)
        np.testing.assert_allclose(TwoNN().fit_transform(table), TwoNN().fit_transform(TWICE)[:200], rtol=1e-12)

    def test_duplicates_of_a_table_can_be_refused(self):
        with pytest.raises(ValueError, match="50 of 250 rows repeat an earlier row"):
            MLE(duplicates="raise").fit(NeighborTable.from_rows(TWICE, 50))
        assert MLE(duplicates="raise").fit(NeighborTable.from_rows(X, 50)).n_duplicates_ == 0

    def test_duplicates_of_foreign_tables_can_be_refused(self):
        distances, indices = oracle.torus_neighbors(100, 3, 0, 30)
        table = NeighborTable.from_arrays(distances, indices)
        assert MLE(duplicates="raise").fit(table).n_duplicates_ == 0
        kept = NeighborTable.from_rows(TWICE, 60, duplicates="keep")
        table = NeighborTable.from_arrays(kept.distances, kept.indices, X=TWICE)
        with pytest.raises(ValueError, match="50 of 250 rows repeat an earlier row"):
            MLE(duplicates="raise").fit(table)
        # A table brings its policy: what it lists stays.
        for duplicates in ("drop", "keep"):
            model, expected = MLE(duplicates=duplicates).fit(table), MLE(duplicates=duplicates).fit(kept)
            assert model.n_duplicates_ == expected.n_duplicates_ == 50
            assert model.dimension_ == expected.dimension_
            assert model.n_samples_dropped_ == expected.n_samples_dropped_ == 100

    @pytest.mark.parametrize("model", [MLE(8, n_neighbors_local=20), TwoNN(n_neighbors_local=20)])
    def test_graphs_with_dropped_rows_come_back(self, model):
        expected = model.fit(TWICE).dimension_
        local = model.transform(TWICE)
        graph = NeighborTable.from_rows(TWICE, 60).to_graph()
        model.set_params(metric="precomputed")
        try:
            assert model.fit(graph).dimension_ == pytest.approx(expected, rel=1e-12)
            assert model.n_duplicates_ == 50
            np.testing.assert_allclose(model.transform(graph[:200]), local[:200], rtol=1e-12)
        finally:
            model.set_params(metric="euclidean")


class TestAnchors:
    @pytest.mark.parametrize("anchors", [60, np.arange(0, 250, 3)], ids=["number", "positions"])
    @pytest.mark.parametrize("kind", ["table", "matrix", "graph"])
    @pytest.mark.parametrize("model", [MLE(8, n_neighbors_local=20), TwoNN(n_neighbors_local=20)])
    def test_are_those_of_rows(self, model, kind, anchors):
        rows = TWICE
        model.set_params(anchors=anchors, metric="euclidean")
        expected = model.fit(rows)
        expected = expected.dimension_, expected.dimension_std_, expected.table_.queries, model.transform(rows)
        table = NeighborTable.from_rows(rows, 60)
        if kind != "table":
            model.set_params(metric="precomputed")
        data = {"table": table, "matrix": oracle.all_distances(rows), "graph": table.to_graph()}[kind]
        try:
            model.fit(data)
            assert model.dimension_ == pytest.approx(expected[0], rel=1e-9)
            assert model.dimension_std_ == pytest.approx(expected[1], rel=1e-9)
            np.testing.assert_array_equal(model.table_.queries, expected[2])
            if kind != "graph":
                # A graph may hold too few of the anchors near a row.
                np.testing.assert_allclose(model.transform(rows if kind == "table" else data), expected[3], rtol=1e-9)
        finally:
            model.set_params(metric="euclidean", anchors=None)

    def test_must_be_rows_of_the_table(self):
        table = NeighborTable.from_rows(X, 30, anchors=[0, 1, 2, 3])
        with pytest.raises(ValueError, match="anchors holds none of the 4 rows that the table lists"):
            MLE(anchors=[7, 8]).fit(table)


@pytest.mark.parametrize("jobs", [0, "a", 1.5])
@pytest.mark.parametrize("columns", [5, 12])
def test_n_jobs_is_checked(jobs, columns):
    with pytest.raises((ValueError, TypeError), match=f"n_jobs={jobs!r} .*None for one, -1 for all cores"):
        TwoNN(n_jobs=jobs).fit(WIDE[:, :columns])
    assert TwoNN(n_jobs=-1).fit(WIDE).dimension_ == TwoNN(n_jobs=2).fit(WIDE).dimension_


@pytest.mark.parametrize("library", ["numpy", "torch", "strict"])
@pytest.mark.parametrize("model", [MLE(8, n_neighbors_local=20), MiND(8, n_neighbors_local=20)], ids=["MLE", "MiND"])
@pytest.mark.parametrize("columns", [4, 12])
def test_rows_of_another_precision_know_themselves(model, library, columns):
    rows = WIDE[:, :columns]
    expected = model.fit(rows).transform(rows)
    narrow = rows.astype(np.float32)
    model.fit(make_array(library, rows))
    np.testing.assert_allclose(_xp.to_numpy(model.transform(make_array(library, narrow))), expected, rtol=1e-4)
    model.fit(make_array(library, narrow))
    np.testing.assert_allclose(_xp.to_numpy(model.transform(make_array(library, rows))), expected, rtol=1e-4)


@pytest.mark.parametrize("columns", [3, 12])
@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e200])
def test_denormal_and_huge_rows(columns, scale):
    rows = WIDE[:, :columns]
    assert TwoNN().fit(rows * scale).dimension_ == pytest.approx(TwoNN().fit(rows).dimension_, rel=1e-6)


def test_an_outlier_gives_no_warning():
    rows = WIDE.copy()
    rows[7] = 1e100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        local = MLE(8, n_neighbors_local=20).fit_transform(rows)
    assert np.isfinite(local).all()


def test_asymmetric_matrices_are_refused():
    D = oracle.all_distances(X)
    D[3, 150] *= 1.001
    with pytest.raises(ValueError, match=r"X\[3, 150\]=.* X\[150, 3\]=.* Pass \(X \+ X.T\) / 2"):
        MLE(metric="precomputed").fit(D)


@pytest.mark.parametrize("library", ["numpy", "strict", "torch"])
@pytest.mark.parametrize("model", [MLE(8, n_neighbors_local=20), TwoNN(n_neighbors_local=20)], ids=["MLE", "TwoNN"])
def test_rounding_errors_on_the_diagonal_make_no_row_its_own_neighbour(model, library):
    D = oracle.all_distances(X)
    model.set_params(metric="precomputed")
    try:
        expected = model.fit(D).transform(D)
        np.fill_diagonal(D, np.random.default_rng(1).random(len(D)) * 1e-8)
        D = make_array(library, D)
        before = _xp.to_numpy(D).copy()
        np.testing.assert_allclose(_xp.to_numpy(model.fit(D).transform(D)), expected, rtol=1e-12)
        np.testing.assert_array_equal(_xp.to_numpy(D), before)
        # Distances of other rows have no diagonal: a small one is a distance.
        other = before[::-1].copy()
        other[0, 0] = 1e-20
        queries, _ = model._check_queries(make_array(library, other))
        assert _xp.to_numpy(model._neighborhoods(queries, 20)[0])[0, 0] == 1e-20
    finally:
        model.set_params(metric="euclidean")


def test_distances_to_other_rows_are_refused():
    D = oracle.all_distances(X)
    model = MLE(8, n_neighbors_local=20, metric="precomputed").fit(NeighborTable.from_precomputed(D))
    with pytest.raises(ValueError, match="X has 60 columns, but distances to the 200 rows of fit are expected"):
        model.transform(D[:, :60])
