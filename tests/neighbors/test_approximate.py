"""Approximate neighbours: exact distances, and a recall that is the true one."""

import os
import sys
import types

import numpy as np
import pytest

from isogeom._neighbors import NeighborTable


def cloud():
    rng = np.random.default_rng(0)
    X = np.sin(3 * rng.uniform(size=(1500, 8)) @ rng.standard_normal((8, 30))) + 50.0
    X[5] = X[9]
    return X


@pytest.fixture
def stand_in(monkeypatch):
    """A search that finds the true neighbours, except for those of some rows, and that leaves holes."""

    class NNDescent:
        def __init__(self, rows, n_neighbors, random_state, n_jobs):
            assert rows.dtype == np.float32
            squares = ((rows[:, np.newaxis].astype(float) - rows) ** 2).sum(axis=2)
            found = np.argsort(squares, axis=1, kind="stable")[:, :n_neighbors]
            # A tenth of the rows: every second neighbour is missed, the row itself comes twice.
            found[::10, 2::2] = found[::10, :1]
            # Some rows have too few.
            found[5::50, 4:] = -1
            self.neighbor_graph = found, None

    monkeypatch.setitem(sys.modules, "pynndescent", types.SimpleNamespace(NNDescent=NNDescent))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("duplicates", ["drop", "keep"])
def test_holes_are_filled_and_misses_counted(duplicates):
    X = cloud()[:600]
    table = NeighborTable.approximate(X, 10, duplicates=duplicates, random_state=1)
    exact = NeighborTable.from_rows(X, 10, duplicates=duplicates)
    np.testing.assert_array_equal(table.queries, exact.queries)
    right = np.ones(len(exact.queries), dtype=bool)
    right[::10] = False
    np.testing.assert_array_equal(table.indices[right], exact.indices[right])
    # Measured by array code or by a kernel, whichever is loaded: equal up to rounding.
    np.testing.assert_allclose(table.distances[right], exact.distances[right], rtol=1e-14)
    direct = np.linalg.norm(X[table.queries][:, np.newaxis] - X[table.indices], axis=2)
    np.testing.assert_allclose(table.distances, direct, rtol=1e-12, atol=1e-12)
    assert (table.distances[~right, -1] > exact.distances[~right, -1]).all()
    recall = np.mean(table.distances <= exact.distances[:, -1:] * (1 + 1e-12))
    assert recall < 0.97
    # 100 of the 600 rows, a tenth of them at a recall of about a half.
    assert abs(table.recall - recall) < 0.05


@pytest.mark.skipif(os.environ.get("ISOGEOM_SLOW") != "1", reason="compiles for a minute: set ISOGEOM_SLOW=1")
def test_the_library_itself():
    pytest.importorskip("pynndescent", reason="pynndescent is not installed")
    X = cloud()
    table, exact = NeighborTable.approximate(X, 10), NeighborTable.from_rows(X, 10)
    assert (table.n_duplicates, table.n_reference, table.n_samples) == (1, 1499, 1500)
    np.testing.assert_array_equal(table.queries, exact.queries)
    direct = np.linalg.norm(X[table.queries][:, np.newaxis] - X[table.indices], axis=2)
    np.testing.assert_allclose(table.distances, direct, rtol=1e-12)
    assert not (table.indices == table.queries[:, np.newaxis]).any()
    assert all(len(set(row)) == 10 for row in table.indices.tolist())
    recall = np.mean([np.isin(a, b).mean() for a, b in zip(exact.indices, table.indices)])
    assert 0.5 < recall <= 1
    # A sample of 100 rows: three standard errors of a share between 0.9 and 1 of 1000 neighbours.
    assert abs(table.recall - recall) < 0.05
    again = NeighborTable.approximate(X, 10)
    np.testing.assert_array_equal(again.indices, table.indices)


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynndescent", None)
    with pytest.raises(ImportError, match="pip install pynndescent"):
        NeighborTable.approximate(cloud(), 10)


def test_other_libraries_are_refused():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(ValueError, match="numpy rows"):
        NeighborTable.approximate(torch.asarray(cloud()), 10)
