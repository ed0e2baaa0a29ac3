"""The compiled search against the array code: same candidates' certificate, same numbers, whatever the threads."""

import tracemalloc

import numpy as np
import pytest
from oracles.neighbors import brute_neighbors

from isogeom._kernels._scan import knn_scan, knn_settle, knn_start, pair_squares
from isogeom._neighbors import _pairs, _tiles
from isogeom._neighbors._cloud import Cloud
from isogeom._neighbors._exact import array_neighbors
from isogeom._neighbors._pairs import Buffers, Plan
from isogeom._neighbors._refine import refine
from isogeom._neighbors._tiles import tiled_neighbors


def rows(n=700, d=24, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(dtype)


def tiled(X, k, *, queries=None, own=None, within=None, n_jobs=None):
    cloud = Cloud.of(X)
    queries = X[own] if queries is None else queries
    distances, indices, sure = tiled_neighbors(cloud, queries, k, own=own, within=within, n_jobs=n_jobs)
    return refine(cloud, queries, distances, indices, np.flatnonzero(~sure), own=own, within=within), sure


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 128 rows, so that few rows make many of them, the last one incomplete."""
    monkeypatch.setattr(_pairs, "_STRIP_ENTRIES", 1)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("k", [1, 7, 15, 16, 17, 100, 699])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_all_rows(k, dtype):
    X = rows(dtype=dtype)
    (distances, indices), _ = tiled(X, k, own=np.arange(700))
    expected = brute_neighbors(X, k, own=np.arange(700))
    np.testing.assert_array_equal(indices, expected[1])
    np.testing.assert_allclose(distances, expected[0], rtol=1e-14)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("own", [np.arange(700), np.arange(0, 700, 3), None], ids=["all", "some", "others"])
def test_buffers_stay_small_by_searching_in_parts(own, monkeypatch):
    X = rows()
    queries = rows(500, seed=1) if own is None else None
    expected, _ = tiled(X, 5, own=own, queries=queries)
    sizes, over = [], Buffers.over

    def watched(distances, indices, margin):
        buffers = over(distances, indices, margin)
        sizes.append(buffers.keys.nbytes + buffers.places.nbytes)
        return buffers

    monkeypatch.setattr(Buffers, "over", watched)
    monkeypatch.setattr(_pairs, "_BUFFER_BYTES", 10_000)
    monkeypatch.setattr(_tiles, "_LARGEST_BUFFERS", 20_000)
    found, _ = tiled(X, 5, own=own, queries=queries)
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-14)
    assert max(sizes) <= 20_000
    assert len(sizes) >= 3


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kept", [True, False])
def test_same_as_the_array_code(kept, monkeypatch):
    if not kept:
        monkeypatch.setattr(_tiles, "_KEPT_BYTES", 0)
    X, own = rows() + np.float32(3), np.arange(700)
    (distances, indices), sure = tiled(X, 9, own=own)
    expected = array_neighbors(Cloud.of(X), X, 9, own=own, within=None)
    assert sure.all()
    assert expected[2].all()
    np.testing.assert_array_equal(indices, expected[1])
    np.testing.assert_allclose(distances, expected[0], rtol=1e-14)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", ["all", "anchors", "queries", "ties", "clusters"])
def test_threads_change_nothing(kind):
    X, within, own, queries = rows(), None, np.arange(700), None
    if kind == "anchors":
        within = np.flatnonzero(np.arange(700) % 5)
        own = within[::3]
    elif kind == "queries":
        own, queries = None, rows(50, seed=1)
    elif kind == "ties":
        X = (X > 0)[:, :14].astype(np.float32)
    elif kind == "clusters":
        X = X + np.float32(1e5) * np.random.default_rng(1).integers(0, 2, (700, 1)).astype(np.float32)
    one, _ = tiled(X, 6, own=own, within=within, queries=queries, n_jobs=1)
    for n_jobs in (2, 3, -1):
        many, _ = tiled(X, 6, own=own, within=within, queries=queries, n_jobs=n_jobs)
        np.testing.assert_array_equal(many[0], one[0])
        np.testing.assert_array_equal(many[1], one[1])
    expected = brute_neighbors(X, 6, own=own, within=within, queries=queries)
    np.testing.assert_array_equal(one[1], expected[1])
    np.testing.assert_allclose(one[0], expected[0], rtol=1e-14)


def test_half_of_the_products(monkeypatch):
    sizes = []
    matmul = np.matmul

    def counting(a, b, **keywords):
        sizes.append(a.shape[0] * b.shape[1])
        return matmul(a, b, **keywords)

    monkeypatch.setattr(_pairs.np, "matmul", counting)
    monkeypatch.setattr(_pairs, "_STRIP_ENTRIES", 1)
    tiled(rows(1280), 5, own=np.arange(1280))
    assert sum(sizes) == 1280**2 / 2 + 1280 * 128 / 2


@pytest.mark.parametrize("k", [2, 100])
def test_memory_does_not_grow_with_the_pairs(k):
    X = rows(6000, 64)
    tiled(X[:1000], k, own=np.arange(1000))
    tracemalloc.start()
    try:
        tiled(X, k, own=np.arange(6000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    result = 6000 * k * 16
    # One tile of products, rows of two tiles, buffers; all pairs would be 137 MiB in float32.
    assert peak - result < 20 * 2**20


def empty_buffers(m, width):
    keys, places = np.empty((m, width), np.float32), np.empty((m, width), np.int32)
    return keys, places, np.zeros(m, np.int32), np.full(m, np.inf, np.float32)


def candidates(buffers):
    """Keys and places of every buffer, in order of key."""
    found = []
    for keys, places, count, _ in zip(*buffers):
        order = np.argsort(keys[:count])
        found.append((keys[:count][order], places[:count][order]))
    return found


def test_scan_keeps_the_smallest_bounds():
    rng = np.random.default_rng(0)
    m, n, c, width = 40, 75, 6, 12
    products = rng.standard_normal((m, n)).astype(np.float32)
    left, right = (rng.uniform(3, 4, size).astype(np.float32) for size in (m, n))
    own, order = rng.integers(0, n, m), rng.permutation(n)
    bounds = left[:, np.newaxis] + (right - 2 * products)
    buffers = empty_buffers(m, width)
    for start in range(0, n, 33):
        at = order[start : start + 33]
        tile = np.ascontiguousarray(products[:, at])
        knn_scan(tile, np.arange(m), at, own, left, right[at], False, c, *buffers)
    bounds[np.arange(m), own] = np.inf
    for row, (keys, places) in enumerate(candidates(buffers)):
        assert len(keys) >= c
        np.testing.assert_array_equal(places[:c], np.argsort(bounds[row])[:c])
        np.testing.assert_array_equal(keys, bounds[row, places])
        # All that are left out reach the limit.
        assert np.delete(bounds[row], places).min() >= buffers[3][row]


def test_scan_offers_pairs_to_both_sides():
    rng = np.random.default_rng(0)
    m, c, width = 70, 4, 8
    products = rng.standard_normal((m, m)).astype(np.float32)
    norms = rng.uniform(3, 4, 2 * m).astype(np.float32)
    # Buffers in an order of their own.
    order = rng.permutation(2 * m)
    rows, columns = order[:m], order[m:]
    buffers = empty_buffers(2 * m, width)
    knn_scan(products, rows, columns, rows, norms[:m], norms[m:], True, c, *buffers)
    bounds = norms[:m, np.newaxis] + (norms[m:] - 2 * products)
    found = candidates(buffers)
    for i in range(m):
        np.testing.assert_array_equal(found[rows[i]][1][:c], columns[np.argsort(bounds[i])[:c]])
        np.testing.assert_array_equal(found[columns[i]][1][:c], rows[np.argsort(bounds[:, i])[:c]])


@pytest.mark.parametrize("n", [64, 500, 512])
def test_limits_to_begin_with(n):
    rng = np.random.default_rng(0)
    products = rng.standard_normal((30, n)).astype(np.float32)
    left, right = (rng.uniform(3, 4, size).astype(np.float32) for size in (30, n))
    limits = np.full(60, np.inf, np.float32)
    limits[2] = -5.0
    knn_start(products, np.arange(0, 60, 2), left, right, 9, 64, limits)
    bounds = np.sort(left[:, np.newaxis] + (right - 2 * products), axis=1)
    assert limits[2] == -5.0
    assert np.isinf(limits[1::2]).all()
    others = np.delete(np.arange(30), 1)
    # At least 8 are below, and not many more.
    assert (limits[2 * others] >= bounds[others, 8]).all()
    assert (limits[2 * others] <= bounds[others, min(3 * 9, n - 1)]).all()


@pytest.mark.parametrize("k", [2, 30, 100])
@pytest.mark.parametrize("n", [1000, 5000, 100_000])
def test_plan_puts_a_sample_first(n, k):
    plan = Plan.of(n, 1024, k, k + 8, True)
    np.testing.assert_array_equal(np.sort(plan.order), np.arange(n))
    if plan.rank:
        assert plan.rank <= plan.n_groups <= plan.size <= n // 8
        assert np.ptp(np.diff(plan.order[: plan.size])) <= 1
    assert Plan.of(n, 1024, k, k + 8, False).rank == 0


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("k", [2, 10, 20])
def test_rows_whose_sample_misleads(k, monkeypatch):
    # All rows of the sample are copies of one cluster; every other row is far from it and from most others.
    rng = np.random.default_rng(0)
    X = rng.standard_normal((1200, 24)).astype(np.float32)
    sample = Plan.of(1200, 128, k, k + 8, True)
    assert sample.rank
    X[sample.order[: sample.size]] *= np.float32(1e-3)
    own = np.arange(1200)
    expected = brute_neighbors(X, k, own=own)
    (distances, indices), _ = tiled(X, k, own=own)
    np.testing.assert_array_equal(indices, expected[1])
    np.testing.assert_allclose(distances, expected[0], rtol=1e-13)
    # Limits that leave nothing at all: every row is searched once more, without them.
    starts = []

    def too_low(products, rows, *rest):
        starts.append(len(rows))
        rest[-1][rows] = -1.0

    monkeypatch.setattr(_pairs, "knn_start", too_low)
    (distances, indices), _ = tiled(X, k, own=own)
    assert sum(starts) == 1200
    np.testing.assert_array_equal(indices, expected[1])
    np.testing.assert_allclose(distances, expected[0], rtol=1e-13)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("k", [2, 20])
@pytest.mark.parametrize("chosen", [False, True])
def test_a_cluster_that_products_cannot_tell_apart(k, chosen):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((1500, 40)).astype(np.float32)
    cluster = np.arange(0, 1500, 8)
    X[cluster] = 3 + np.float32(1e-5) * rng.standard_normal((len(cluster), 40)).astype(np.float32)
    within = np.flatnonzero(np.arange(1500) % 5) if chosen else None
    own = np.arange(1500) if within is None else within
    (distances, indices), sure = tiled(X, k, own=own, within=within)
    # Not by the slow way: the second search has them all.
    assert sure.all()
    expected = brute_neighbors(X, k, own=own, within=within)
    np.testing.assert_array_equal(indices, expected[1])
    np.testing.assert_allclose(distances, expected[0], rtol=1e-13)
    many, _ = tiled(X, k, own=own, within=within, n_jobs=2)
    np.testing.assert_array_equal(many[0], distances)


def test_buffers_stay_small_for_many_rows():
    for m in (1000, 100_000):
        buffers = Buffers.over(np.empty((m, 2)), np.empty((m, 2), np.int64), 8)
        assert buffers.keys.shape[1] >= 20
        assert buffers.keys.nbytes + buffers.places.nbytes <= max(24 * 2**20, m * 20 * 8)
    shared = np.empty((1000, 30))
    assert np.shares_memory(Buffers.over(shared, np.empty((1000, 30), np.int64), 8).keys, shared)


@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**-500, 2.0**500])
@pytest.mark.parametrize("n_pairs", [1, 2, 3, 4, 210])
def test_pair_squares(scale, n_pairs):
    X, Q = rows(30, 19, "float64") / scale, rows(7, 19, "float64", seed=1) / scale
    at, to = np.repeat(np.arange(7), 30)[:n_pairs], np.tile(np.arange(30), 7)[:n_pairs]
    out = np.empty(n_pairs)
    pair_squares(X, Q, at, to, scale, out)
    expected = ((Q[at] * scale - X[to] * scale) ** 2).sum(axis=1)
    np.testing.assert_allclose(out, expected, rtol=1e-14)


@pytest.mark.parametrize("d", [1, 7, 19, 64, 333])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_pair_gives_one_number_wherever_it_comes(d, dtype):
    X = rows(40, d, dtype)
    out = np.empty(40)
    pair_squares(X, X, np.arange(40), np.roll(np.arange(40), 1), 0.25, out)
    for size in (1, 2, 3, 5):
        for start in range(0, 40 - size, 3):
            one = np.empty(size)
            at = np.arange(start, start + size)
            # The other way round, too.
            pair_squares(X, X, (at - 1) % 40, at, 0.25, one)
            np.testing.assert_array_equal(one, out[at])


@pytest.mark.parametrize("k", [3, 400])
@pytest.mark.parametrize("chosen", [False, True])
def test_settle_measures_sorts_and_certifies(k, chosen):
    rng = np.random.default_rng(0)
    # Few distinct distances: ties are settled by position.
    X, Q = (rng.integers(0, 3, (size, 6)).astype(np.float32) for size in (1500, 5))
    within = np.flatnonzero(np.arange(1500) % 3 == 0) if chosen else np.zeros(0, np.int64)
    true = ((Q[:, np.newaxis] - (X[within] if chosen else X)) ** 2).sum(axis=2, dtype=np.float64)
    width = 450
    buffers = empty_buffers(5, width)
    keys, places, counts, limits = buffers
    for row in range(5):
        count = width if row else k - 1
        places[row, :count] = rng.permutation(np.argsort(true[row], kind="stable")[:count])
        keys[row, :count] = true[row, places[row, :count]] - rng.uniform(0, 1, count)
        counts[row] = count
    limits[:] = 4e3
    # The last row's others may be as near as its neighbours.
    limits[4] = 0.0
    distances, indices, sure = np.empty((5, k)), np.empty((5, k), np.int64), np.empty(5, bool)
    knn_settle(X, Q, within, 1.0, 1 + 1e-12, *buffers, distances, indices, sure)
    assert np.isinf(distances[0]).all()
    assert sure.tolist() == [False, True, True, True, False]
    for row in range(1, 5):
        order = np.argsort(true[row], kind="stable")[:k]
        np.testing.assert_array_equal(indices[row], within[order] if chosen else order)
        np.testing.assert_array_equal(distances[row], np.sqrt(true[row, order]))
