"""TLE: published values, the formula by loops, the unit of the rows, coincidences, and blocks of patches."""

import numpy as np
import pytest
from oracles import dimension as oracle
from oracles.dimension_tle import tle_value

from isogeom import _kernels
from isogeom.dimension import TLE, NeighborTable, _patches, _tle
from isogeom.dimension._tle import tight_inverses

A = oracle.fixture_a()


def row_values(X, k):
    table = NeighborTable.from_rows(X, k)
    return 1 / tight_inverses(table.X, table.queries, table.distances, table.indices)


def test_published_values():
    np.testing.assert_allclose(row_values(A, 20)[:3], [5.67426, 5.41442, 4.17523], atol=5e-6)
    model = TLE(average="mean").fit(oracle.hyper_ball(1000, 5, 0))
    assert model.dimension_ == pytest.approx(5.003839137, abs=1e-9)


@pytest.mark.parametrize("k", [2, 3, 12])
def test_equals_the_loops_over_pairs(k):
    table = NeighborTable.from_rows(A, k)
    expected = [tle_value(A[i], A[table.indices[i]]) for i in range(40)]
    np.testing.assert_allclose(row_values(A, k)[:40], expected, rtol=1e-9)
    model = TLE(k, n_neighbors_local=k).fit(A)
    np.testing.assert_allclose(model.transform(A[:40])[:, 0], expected, rtol=1e-9)
    values = row_values(A, k)
    assert model.dimension_ == pytest.approx(1 / np.mean(1 / values), rel=1e-12)
    assert TLE(k, average="mean").fit(A).dimension_ == pytest.approx(values.mean(), rel=1e-12)


@pytest.mark.parametrize("unit", [1e-5, 1e-4, 1e4, 1e-150, 1e150])
def test_the_unit_of_the_rows_does_not_matter(unit):
    """An absolute threshold elsewhere gives 5.2, 13.0 and 0.0 for one cloud in units of 1, 1e-4 and 1e-5."""
    X = oracle.hyper_ball(300, 5, 0)
    assert TLE().fit(X * unit).dimension_ == pytest.approx(TLE().fit(X).dimension_, rel=1e-9)


def test_neighbours_that_coincide_are_left_out():
    """Two neighbours of many rows are 1e-9 apart, although neither repeats a row."""
    X = np.concatenate([A, A[:1] + 1e-9])
    values, plain = row_values(X, 20), row_values(A, 20)
    assert np.isfinite(values).all()
    # The two rows see each other at 1e-9 of their radius: that is a distance, not a coincidence.
    assert abs(np.median(values / np.append(plain, plain[0])) - 1) < 0.01
    assert TLE().fit(X).dimension_ == pytest.approx(TLE().fit(A).dimension_, rel=0.02)


def test_equal_distances_give_no_value():
    X = np.concatenate([np.zeros((1, 4)), np.eye(4), -np.eye(4)])
    found = 1 / tight_inverses(X, np.array([0]), np.ones((1, 8)), np.arange(1, 9)[np.newaxis, :])
    assert np.isnan(found).all()


@pytest.mark.parametrize("k", [2, 20, 100])
def test_kernel_equals_the_array_code(monkeypatch, k):
    X = np.concatenate([A, A[:2] + 1e-9])
    expected = row_values(X, k)
    monkeypatch.setitem(_kernels._KERNELS, "tight_inverses", ("isogeom._kernels._tight_inverses", 0))
    monkeypatch.setattr(_tle, "_inverses", None)
    np.testing.assert_allclose(row_values(X, k), expected, rtol=1e-11)
    ties = np.concatenate([np.zeros((1, 4)), np.eye(4), -np.eye(4)])
    found = tight_inverses(ties, np.array([0]), np.ones((1, 8)), np.arange(1, 9)[np.newaxis, :])
    assert np.isnan(found).all()


@pytest.mark.parametrize("elements", [1, 5000])
def test_size_of_the_blocks_does_not_matter(monkeypatch, elements):
    expected = row_values(A, 20)
    monkeypatch.setattr(_patches, "_CACHED_ELEMENTS", elements)
    np.testing.assert_allclose(row_values(A, 20), expected, rtol=1e-12)


def test_patches_are_relative_to_their_centre_in_units_of_their_radius():
    table = NeighborTable.from_rows(A, 5)
    (offsets, shares), *rest = _patches.offset_patches(A, table.queries, table.distances, table.indices)
    assert rest == []
    np.testing.assert_allclose(np.linalg.norm(offsets, axis=2), shares, rtol=1e-12)
    np.testing.assert_array_equal(shares[:, -1], 1)
    np.testing.assert_allclose(offsets[7, 2] * table.distances[7, 4] + A[7], A[table.indices[7, 2]], atol=1e-14)


def test_needs_euclidean_rows():
    table = NeighborTable.from_rows(A, 20, metric="manhattan")
    with pytest.raises(ValueError, match="metric='manhattan'"):
        TLE().fit(table)
    bare = NeighborTable.from_arrays(table.distances, table.indices)
    with pytest.raises(ValueError, match="needs the rows"):
        TLE().fit(bare)
    with pytest.raises(ValueError, match="needs the rows"):
        TLE().fit(A).transform(bare)


def test_far_queries_get_no_value_of_rounding():
    model = TLE().fit(A)
    for scale in (1e3, 1e8, 1e15, 1e16, 1e100):
        found = model.transform(scale * A)
        assert np.isfinite(found).all()
        assert (found > 0).all()
