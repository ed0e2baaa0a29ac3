"""Batches of reference rows give what all rows together give."""

import itertools

import numpy as np
import pytest
from conftest import make_array
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.neighbors import brute_neighbors

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._neighbors._stream import NeighborStream, row_marks


def cloud(n=300, d=20, repeats=True):
    X = np.random.default_rng(0).standard_normal((n, d)).astype(np.float32)
    if repeats:
        X[100] = X[200] = X[7]
        X[250] = X[150]
    return X


def cut(X, size):
    return [X[start : start + size] for start in range(0, len(X), size)]


def same(table, expected):
    for name in ("indices", "queries"):
        np.testing.assert_array_equal(_xp.to_numpy(getattr(table, name)), _xp.to_numpy(getattr(expected, name)))
    # Libraries add up squares in different orders.
    np.testing.assert_allclose(_xp.to_numpy(table.distances), expected.distances, rtol=1e-14)
    for name in ("n_samples", "n_reference", "dtype", "metric"):
        assert getattr(table, name) == getattr(expected, name)


@pytest.mark.parametrize("library", ["numpy", "torch", "strict"])
@pytest.mark.parametrize("duplicates", ["drop", "keep"])
@pytest.mark.parametrize("size", [1, 37, 300])
def test_equals_all_rows_together(library, duplicates, size):
    X = cloud(120 if size == 1 else 300, repeats=size > 1)
    anchors = np.arange(0, len(X), 7)
    rows = [make_array(library, batch) for batch in cut(X, size)]
    table = NeighborTable.from_batches(make_array(library, X[anchors]), rows, 9, duplicates=duplicates)
    expected = NeighborTable.from_rows(X, 9, anchors=anchors, duplicates=duplicates)
    same(table, expected)
    # Where repeated rows are kept, no memory is spent on counting them.
    assert table.n_duplicates == (expected.n_duplicates if duplicates == "drop" else 0)
    assert type(table.distances) is type(make_array(library, X))


@given(cuts=st.lists(st.integers(0, 300), max_size=6), split=st.integers(0, 7), k=st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_merged_shards_equal_one_stream(cuts, split, k):
    X, anchors = cloud(), np.arange(3, 300, 31)
    edges = [0, *sorted(cuts), 300]
    batches = [X[a:b] for a, b in itertools.pairwise(edges) if b > a]
    first, second = (NeighborStream(X[anchors], k) for _ in range(2))
    for i, batch in enumerate(batches):
        (first if i < split else second).update(batch)
    fields = first.merge(second).fields()
    expected = NeighborTable.from_rows(X, k, anchors=anchors)
    np.testing.assert_allclose(fields["distances"], expected.distances, rtol=1e-14)
    for name in ("indices", "queries", "n_samples", "n_reference", "n_duplicates"):
        np.testing.assert_array_equal(fields[name], getattr(expected, name))


def test_anchors_that_do_not_come_by():
    X = cloud(repeats=False)
    table = NeighborTable.from_batches(X[::10], cut(X[1:], 50), 5)
    assert table.n_samples == 300
    # Row 0 is no row of the batches: its position is after all 299.
    assert table.queries[0] == 299
    np.testing.assert_array_equal(table.queries[1:], np.arange(9, 299, 10))
    expected = brute_neighbors(X[1:], 5, queries=X[:1])
    np.testing.assert_allclose(table.distances[:1], expected[0], rtol=1e-13)
    np.testing.assert_array_equal(table.indices[:1], expected[1])


def test_memory_is_that_of_the_table():
    stream = NeighborStream(cloud(repeats=False)[:20], 5, duplicates="keep")
    rng = np.random.default_rng(1)
    sizes = []
    for _ in range(4):
        stream.update(rng.standard_normal((500, 20)).astype(np.float32))
        sizes.append(sum(v.nbytes for v in vars(stream).values() if isinstance(v, np.ndarray)))
    assert len(set(sizes)) == 1


def test_marks_tell_rows_apart():
    X = np.random.default_rng(0).integers(0, 2, (20_000, 16)).astype(float)
    assert len(np.unique(row_marks(X))) == len(np.unique(X, axis=0))
    assert row_marks(np.array([[0.0, 1.0]]))[0] == row_marks(np.array([[-0.0, 1.0]]))[0]
    swapped = row_marks(np.array([[1.0, 2.0], [2.0, 1.0]]))
    assert swapped[0] != swapped[1]


def test_errors_say_what_to_do():
    X = cloud()
    with pytest.raises(ValueError, match="anchors holds a row twice"):
        NeighborStream(X[[7, 100]])
    with pytest.raises(ValueError, match="rows repeat an earlier row"):
        NeighborTable.from_batches(X[:5], cut(X, 60), 5, duplicates="raise")
    with pytest.raises(ValueError, match="batch has 19 features, the anchors 20"):
        NeighborStream(X[:5]).update(X[:, 1:])
    with pytest.raises(ValueError, match="batch has dtype float64, the anchors float32"):
        NeighborStream(X[:5]).update(X.astype(float))
    with pytest.raises(ValueError, match="at least 3 are needed"):
        NeighborTable.from_batches(X[:2], [X[:2]], 1)
    with pytest.raises(ValueError, match="other has other anchors"):
        NeighborStream(X[:5], 3).merge(NeighborStream(X[:6], 3))
    with pytest.warns(UserWarning, match="n_neighbors=100 is clipped to 5"):
        assert NeighborTable.from_batches(X[:2], [X[:6]], 100).n_neighbors == 5
