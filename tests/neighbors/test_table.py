"""The table: policies for repeated rows, the same on every path, anchors, and errors."""

import numpy as np
import pytest
import scipy.sparse as sp
from conftest import make_array
from oracles.neighbors import all_distances, brute_neighbors, first_rows

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._neighbors._duplicates import first_occurrences

PATHS = ["rows", "matrix", "graph", "torch", "strict", "tree", "batches"]


def cloud(d=14):
    X = np.random.default_rng(0).standard_normal((60, d))
    X[20] = X[40] = X[3]
    X[50] = X[10]
    X[7, 0] = 0.0
    X[30] = X[7]
    X[30, 0] = -0.0
    return X


def table_by(path, duplicates, k=6):
    X = cloud(3 if path == "tree" else 14)
    if path in ("matrix", "graph"):
        D = all_distances(X, X)
        if path == "graph":
            rows, columns = np.nonzero(~np.eye(60, dtype=bool))
            D = sp.csr_array((D[rows, columns], (rows, columns)), shape=(60, 60))
        return X, NeighborTable.from_precomputed(D, k, duplicates=duplicates)
    if path == "batches":
        return X, NeighborTable.from_batches(X[first_rows(X)], [X[:25], X[25:]], k, duplicates=duplicates)
    return X, NeighborTable.from_rows(
        make_array(path if path in ("torch", "strict") else "numpy", X), k, duplicates=duplicates
    )


@pytest.mark.parametrize("path", PATHS)
def test_drop_searches_distinct_rows(path):
    X, table = table_by(path, "drop")
    kept = first_rows(X)
    expected = brute_neighbors(X, 6, own=kept, within=kept)
    np.testing.assert_array_equal(_xp.to_numpy(table.indices), expected[1])
    np.testing.assert_allclose(_xp.to_numpy(table.distances), expected[0], rtol=1e-13)
    np.testing.assert_array_equal(table.queries, kept)
    assert (table.n_samples, table.n_reference, table.n_duplicates) == (60, 56, 4)
    assert float(_xp.to_numpy(table.distances).min()) > 0


@pytest.mark.parametrize("path", PATHS[:-1])
def test_keep_makes_them_neighbours_at_zero(path):
    X, table = table_by(path, "keep")
    expected = brute_neighbors(X, 6, own=np.arange(60))
    np.testing.assert_allclose(_xp.to_numpy(table.distances), expected[0], rtol=1e-13)
    np.testing.assert_array_equal(_xp.to_numpy(table.indices), expected[1])
    assert (table.n_samples, table.n_reference, table.n_duplicates) == (60, 60, 4)
    assert int((_xp.to_numpy(table.distances) == 0).sum()) == 10


@pytest.mark.parametrize("path", PATHS)
def test_raise_says_how_many(path):
    with pytest.raises(ValueError, match="rows repeat an earlier row"):
        table_by(path, "raise")


@pytest.mark.parametrize("library", ["numpy", "torch", "strict"])
@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150])
def test_first_occurrences(library, scale):
    X = cloud() * scale
    # Near rows that differ in the last bit are different rows.
    X[55] = X[12]
    X[55, 4] = np.nextafter(X[55, 4], np.inf)
    np.testing.assert_array_equal(first_occurrences(make_array(library, X)), first_rows(X))


@pytest.mark.parametrize("d", [5, 30])
def test_anchors_are_a_part_of_the_full_table(d):
    X = np.random.default_rng(0).standard_normal((200, d)).astype(np.float32)
    full = NeighborTable.from_rows(X, 8)
    for anchors in (40, [3, 150, 77]):
        part = NeighborTable.from_rows(X, 8, anchors=anchors)
        assert part.n_queries == (40 if anchors == 40 else 3)
        np.testing.assert_array_equal(part.indices, full.indices[part.queries])
        np.testing.assert_array_equal(part.distances, full.distances[part.queries])
        assert part.n_reference == 200
        np.testing.assert_array_equal(np.flatnonzero(part.positions() >= 0), part.queries)


def test_trees_and_products_agree():
    X = np.random.default_rng(0).standard_normal((300, 10))
    tree = NeighborTable.from_rows(X, 12)
    products = NeighborTable.from_rows(np.concatenate((X, np.zeros((300, 5))), axis=1), 12)
    np.testing.assert_array_equal(tree.indices, products.indices)
    np.testing.assert_allclose(tree.distances, products.distances, rtol=1e-13)


@pytest.mark.parametrize("k", [1, 4, 30])
def test_ties_on_a_grid_are_settled_by_position(k):
    X = np.stack(np.meshgrid(*[np.arange(7.0)] * 3), axis=-1).reshape(-1, 3)
    table = NeighborTable.from_rows(X, k)
    expected = brute_neighbors(X, k, own=np.arange(343))
    np.testing.assert_array_equal(table.indices, expected[1])
    np.testing.assert_array_equal(table.distances, expected[0])


def test_to_graph_and_back():
    X = np.random.default_rng(0).standard_normal((50, 12))
    table = NeighborTable.from_rows(X, 5)
    again = NeighborTable.from_precomputed(table.to_graph(), 5)
    np.testing.assert_array_equal(again.indices, table.indices)
    np.testing.assert_array_equal(again.distances, table.distances)
    wrapped = NeighborTable.from_arrays(table.distances, table.indices, X=X)
    assert (wrapped.n_samples, wrapped.n_neighbors, wrapped.dtype) == (50, 5, "float64")


def test_errors_say_what_to_do():
    X = np.random.default_rng(0).standard_normal((20, 12))
    table = NeighborTable.from_rows(X, 4)
    with pytest.raises(ValueError, match="k=5 neighbours are needed, but the table has 4: make it with at least 5"):
        table.first(5)
    with pytest.raises(ValueError, match="at least 3 are needed"):
        NeighborTable.from_rows(np.ones((20, 12)), 4)
    with pytest.raises(ValueError, match="duplicates"):
        NeighborTable.from_rows(X, 4, duplicates="merge")
    with pytest.raises(ValueError, match="anchors must hold row positions from 0 to 19"):
        NeighborTable.from_rows(X, 4, anchors=[20])
    with pytest.raises(ValueError, match="own position"):
        NeighborTable.from_arrays(table.distances, np.zeros((20, 4), dtype=int))
    with pytest.raises(ValueError, match="increase along every row"):
        NeighborTable.from_arrays(table.distances[:, ::-1], table.indices)
    with pytest.raises(ValueError, match="must be square"):
        NeighborTable.from_precomputed(X)
    with pytest.raises(ValueError, match="at least 0"):
        NeighborTable.from_precomputed(-np.abs(X[:, :3][:3] + X[:3, :3]))
    with pytest.warns(UserWarning, match="n_neighbors=50 is clipped to 19"):
        assert NeighborTable.from_rows(X, 50).n_neighbors == 19
    with pytest.raises(ValueError, match="k=-1 must be at least 1"):
        table.first(-1)
    with pytest.raises(TypeError, match=r"k=1.5 must be an integer"):
        table.first(1.5)
    for jobs in (0, "a"):
        with pytest.raises((ValueError, TypeError), match=f"n_jobs={jobs!r} .*None for one"):
            NeighborTable.from_rows(X, 4, n_jobs=jobs)
        with pytest.raises((ValueError, TypeError), match=f"n_jobs={jobs!r} .*None for one"):
            NeighborTable.from_batches(X[:3], [X], 4, n_jobs=jobs)
        with pytest.raises((ValueError, TypeError), match=f"n_jobs={jobs!r} .*None for one"):
            NeighborTable.approximate(X, 4, n_jobs=jobs)


@pytest.mark.parametrize("library", ["numpy", "torch", "strict"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": lambda t: t.indices + 0.7}, "indices must hold integer positions, got float64"),
        ({"queries": lambda t: np.arange(20) + 0.5}, "queries must hold integer positions, got float64"),
        (
            {"queries": lambda t: np.array([0, *range(19)]), "indices": lambda t: t.indices * 0 + [20, 21, 22, 23]},
            "0 tw",
        ),
        ({"indices": lambda t: t.indices[:, [0, 0, 1, 2]]}, "A row of indices holds position .* twice"),
        ({"recall": lambda t: 2.0}, "recall=2.0 must be at least 0 and at most 1"),
        ({"recall": lambda t: -0.1}, "recall=-0.1 must be at least 0"),
        ({"indices": lambda t: t.indices[:, :3]}, "indices has shape .20, 3., distances .20, 4."),
    ],
)
def test_arrays_of_another_search_are_checked(library, changes, message):
    table = NeighborTable.from_rows(np.random.default_rng(0).standard_normal((20, 12)), 4)
    given = {"distances": table.distances, "indices": table.indices, "n_samples": 30}
    given.update({name: change(table) for name, change in changes.items()})
    for name in ("distances", "indices"):
        given[name] = make_array(library, given[name])
    with pytest.raises(ValueError, match=message):
        NeighborTable.from_arrays(**given)


def test_graphs_leave_out_rows_without_entries():
    X, table = table_by("rows", "drop")
    graph = table.to_graph()
    for duplicates in ("drop", "keep"):
        again = NeighborTable.from_precomputed(graph, duplicates=duplicates)
        for name in ("indices", "distances", "queries"):
            np.testing.assert_array_equal(getattr(again, name), getattr(table, name))
        assert (again.n_samples, again.n_reference, again.n_duplicates) == (60, 56, 4)
        np.testing.assert_array_equal(again.to_graph().toarray(), graph.toarray())
    with pytest.raises(ValueError, match="X has 4 of 60 rows without any entry"):
        NeighborTable.from_precomputed(graph, duplicates="raise")
    anchored = NeighborTable.from_rows(X, 6, anchors=20)
    with pytest.raises(ValueError, match=r"leaves \d+ row\(s\) without any neighbour.*anchors.*pass the table itself"):
        NeighborTable.from_precomputed(anchored.to_graph())


@pytest.mark.parametrize("library", ["numpy", "torch", "strict"])
@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150])
def test_matrices_must_be_symmetric(library, scale):
    X = np.random.default_rng(0).standard_normal((300, 12))
    D = all_distances(X, X) * scale
    D[5, 270] *= 1 + 1e-9
    expected = NeighborTable.from_precomputed(make_array(library, D), 5)
    np.testing.assert_array_equal(_xp.to_numpy(expected.indices), brute_neighbors(X, 5, own=np.arange(300))[1])
    D[280, 290] *= 1.00001
    message = r"X is not symmetric: X\[280, 290\]=.*, but X\[290, 280\]=.*Pass \(X \+ X.T\) / 2"
    with pytest.raises(ValueError, match=message):
        NeighborTable.from_precomputed(make_array(library, D), 5)


def test_rounding_of_expanded_distances_is_no_asymmetry():
    X = np.random.default_rng(0).standard_normal((300, 12)).astype(np.float32)
    X[1] = X[0] + np.float32(1e-3)
    squares = (X**2).sum(axis=1)
    # Products of rows in another order round differently above and below the diagonal.
    reverse = (X[:, ::-1].copy() @ X[:, ::-1].T.copy()).T
    products = np.where(np.tri(300, dtype=bool), X @ X.T, reverse)
    D = np.sqrt(np.maximum(squares[:, np.newaxis] + squares - 2 * products, 0))
    np.fill_diagonal(D, 0)
    gap = np.abs(D - D.T) / np.maximum(np.maximum(D, D.T), 1e-30)
    assert gap.max() > 1e-6
    assert NeighborTable.from_precomputed(D, 5).n_neighbors == 5


def test_a_short_graph_is_clipped_with_a_warning():
    X = np.random.default_rng(0).standard_normal((50, 12))
    graph = NeighborTable.from_rows(X, 5).to_graph()
    message = "n_neighbors=9 is clipped to 5, the number of neighbours in the graph"
    with pytest.warns(UserWarning, match=message) as record:
        assert NeighborTable.from_precomputed(graph, 9).n_neighbors == 5
    assert [warning.filename for warning in record] == [__file__]


@pytest.mark.parametrize("library", ["numpy", "torch", "strict"])
@pytest.mark.parametrize("d", [3, 14])
def test_denormal_rows(library, d):
    X = np.random.default_rng(0).standard_normal((60, d))
    expected = NeighborTable.from_rows(X, 6)
    table = NeighborTable.from_rows(make_array(library, X * 1e-300 * 1e-9), 6)
    np.testing.assert_array_equal(_xp.to_numpy(table.indices), expected.indices)
    np.testing.assert_allclose(_xp.to_numpy(table.distances) * 1e300, expected.distances * 1e-9, rtol=1e-10)


class TestDuplicatesOfArrays:
    @pytest.mark.parametrize("k", [1, 3, 8])
    @pytest.mark.parametrize("copies", [1, 2, 5])
    def test_are_counted_where_the_lists_show_them(self, k, copies):
        X = np.random.default_rng(0).standard_normal((20, 3))
        rows = np.concatenate((X, *[X[:4]] * copies))
        kept = NeighborTable.from_rows(rows, k, duplicates="keep")
        table = NeighborTable.from_arrays(kept.distances, kept.indices)
        assert kept.n_duplicates == 4 * copies
        assert 2 <= table.n_duplicates <= kept.n_duplicates
        if k >= copies:
            assert table.n_duplicates == kept.n_duplicates
        assert table.n_samples == table.n_reference == len(rows)

    def test_of_some_rows_are_a_lower_bound(self):
        X = np.random.default_rng(0).standard_normal((20, 3))
        rows = np.concatenate((X, X[:4]))
        kept = NeighborTable.from_rows(rows, 3, duplicates="keep", anchors=[0, 1, 9, 20])
        table = NeighborTable.from_arrays(kept.distances, kept.indices, queries=kept.queries, n_samples=24)
        assert table.n_duplicates == 2
        assert kept.n_duplicates == 4
