"""Sums over rows that share neighbours: compiled loops against sparse products, and both against plain loops."""

import pickle

import numpy as np
import pytest

from isogeom import _kernels
from isogeom.dimension import Gride, NeighborTable, _dependence, _gride, id_profile
from isogeom.dimension._base import log_ratios
from isogeom.dimension._dependence import _mutual, inflation
from isogeom.dimension._parts import log_parts, order_parts
from isogeom.dimension._profile import _parts

X = np.random.default_rng(0).standard_normal((300, 4))


@pytest.fixture(params=["array", "kernel"])
def path(request, monkeypatch):
    """Run by sparse products, or by the kernels whatever the size."""
    if request.param == "kernel":
        monkeypatch.setitem(_kernels._KERNELS, "mutual_pairs", ("isogeom._kernels._overlaps", 0))
    else:
        monkeypatch.setattr(_kernels, "available", lambda *_args: None)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("some", [slice(None), slice(20, 280, 3)], ids=["all rows", "some rows"])
@pytest.mark.parametrize("anchors", [None, np.arange(0, 300, 2)], ids=["table of all rows", "table of anchors"])
@pytest.mark.parametrize("k", [12, 5])
def test_mutual_parts_are_the_sum_over_pairs(anchors, some, k):
    table = NeighborTable.from_rows(X, 15, anchors=anchors)
    used = np.arange(table.n_queries)[some]
    parts = log_parts(table.distances[used, :k])
    rows, columns = table.queries[used], table.indices[used, : k - 1]
    members = {int(i): {int(p): g for p, g in zip(line, own)} for i, line, own in zip(rows, columns, parts)}
    expected = sum(g * members.get(p, {}).get(i, 0.0) for i, line in members.items() for p, g in line.items())
    assert _mutual(parts, used, table) == pytest.approx(expected, rel=1e-12)


def test_pairs_are_found_once_for_all_widths(monkeypatch):
    monkeypatch.setitem(_kernels._KERNELS, "mutual_pairs", ("isogeom._kernels._overlaps", 0))
    calls, found = [], _dependence._mutual_pairs
    monkeypatch.setattr(_dependence, "_mutual_pairs", lambda *args: calls.append(args) or found(*args))
    table = NeighborTable.from_rows(X, 15)
    used = np.arange(300)
    first = [_mutual(log_parts(table.distances[:, :k]), used, table) for k in (15, 6, 10)]
    assert len(calls) == 1
    again = pickle.loads(pickle.dumps(table))
    assert [_mutual(log_parts(again.distances[:, :k]), used, again) for k in (15, 6, 10)] == first
    # A pickle holds no more than the table, and another table has pairs of its own.
    assert len(calls) == 2
    other = NeighborTable.from_rows(X[::-1].copy(), 15)
    assert _mutual(log_parts(other.distances), used, other) == pytest.approx(first[0], rel=1e-12)
    assert len(calls) == 3


def test_kernels_change_no_result(monkeypatch):
    table = NeighborTable.from_rows(X, 20)
    parts = log_parts(table.distances)
    values = parts.sum(axis=1)

    def run():
        return inflation(values, np.arange(300), table, 20, parts=parts)

    monkeypatch.setattr(_kernels, "available", lambda *_args: None)
    expected = run()
    monkeypatch.undo()
    monkeypatch.setitem(_kernels._KERNELS, "mutual_pairs", ("isogeom._kernels._overlaps", 0))
    assert run().ratio == pytest.approx(expected.ratio, rel=1e-12)


@pytest.mark.parametrize(("near", "far"), [(2, 4), (8, 16)])
def test_parts_of_ratios_are_linear_between_points_of_an_incomplete_beta(near, far):
    from scipy import special

    distances = NeighborTable.from_rows(X, far).distances
    u = (distances[:, : far - 1] / distances[:, far - 1 :]) ** 3.5
    exact = ((far - near) / (far - 1) - special.betainc(near - 1, far - near, u)) / (near - 1)
    np.testing.assert_allclose(order_parts(distances, near, far, 3.5), exact, atol=1e-6)


@pytest.mark.parametrize("k", [2, 5, 60])
@pytest.mark.parametrize("anchors", [None, 120])
def test_parts_of_the_rows_have_the_neighbours_that_a_search_within_them_finds(k, anchors):
    table = NeighborTable.from_rows(X, k, anchors=anchors, random_state=0)
    places = np.random.default_rng(1).permutation(table.n_queries)
    parts = [np.sort(part) for part in np.array_split(places, 4)]
    for part, (d, radius, n) in zip(parts, _parts(table, parts, None)):
        own = NeighborTable.from_rows(X[table.queries[part]], 2)
        logs, used = log_ratios(own.distances, 1, 2)
        assert n == len(used)
        assert d == pytest.approx((len(logs) - 1) / logs.sum(), rel=1e-9)
        assert radius == pytest.approx(own.distances[:, 1].mean(), rel=1e-12)


def test_the_profile_does_not_depend_on_how_many_neighbours_the_table_has():
    few, many = (id_profile(NeighborTable.from_rows(X, k), max_neighbors=8) for k in (8, 80))
    a, b = few.select("twonn"), many.select("twonn")
    shared = len(a["dimension"])
    np.testing.assert_allclose(a["dimension"], b["dimension"][:shared], rtol=1e-9)


def test_scales_are_computed_once_and_are_nobodys_to_change(monkeypatch):
    calls, found = [], _gride._scales
    monkeypatch.setattr(_gride, "_scales", lambda *args: calls.append(args) or found(*args))
    table = NeighborTable.from_rows(X, 32)
    model = Gride(max_neighbors=32).fit(table)
    expected = model.scales_["dimension"].copy()
    model.scales_["dimension"][:] = 0
    profile = id_profile(table, max_neighbors=32, estimators=("gride",))
    assert len(calls) == 1
    np.testing.assert_array_equal(profile.dimension, expected)
    assert len(id_profile(table, max_neighbors=16, estimators=("gride",)).dimension) == len(expected) - 1
    Gride(max_neighbors=32, confidence_level=0.5).fit(table)
    assert len(calls) == 3
