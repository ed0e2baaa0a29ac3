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
    with pytest.raises(ValueError, match="build it with NeighborTable"):
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
