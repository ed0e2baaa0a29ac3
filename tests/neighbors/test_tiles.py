"""The compiled search against the array code: same candidates' certificate, same numbers, whatever the threads."""

import tracemalloc

import numpy as np
import pytest
from oracles.neighbors import brute_neighbors

from isogeom._kernels._scan import knn_finish, knn_scan, pair_squares
from isogeom._neighbors import _tiles
from isogeom._neighbors._cloud import Cloud
from isogeom._neighbors._exact import array_neighbors
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
    monkeypatch.setattr(_tiles, "_TILE_ENTRIES", 1)


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

    monkeypatch.setattr(_tiles.np, "matmul", counting)
    monkeypatch.setattr(_tiles, "_TILE_ENTRIES", 1)
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


def test_scan_keeps_the_smallest_bounds():
    rng = np.random.default_rng(0)
    m, n, c, width = 40, 75, 6, 12
    products = rng.standard_normal((m, n)).astype(np.float32)
    left, right = (rng.uniform(3, 4, size).astype(np.float32) for size in (m, n))
    own = rng.integers(0, n, m)
    bounds = left[:, np.newaxis] + (right - 2 * products)
    keys, places = np.empty((m, width), np.float32), np.empty((m, width), np.int32)
    counts, limits = np.zeros(m, np.int32), np.full(m, np.inf, np.float32)
    for start in range(0, n, 33):
        stop = min(start + 33, n)
        tile = np.ascontiguousarray(products[:, start:stop])
        knn_scan(tile, 0, start, left, right[start:stop], own, False, c, keys, places, counts, limits)
    knn_finish(c, keys, places, counts, limits)
    bounds[np.arange(m), own] = np.inf
    assert (counts == c).all()
    np.testing.assert_array_equal(np.sort(places[:, :c], axis=1), np.sort(np.argsort(bounds, axis=1)[:, :c], axis=1))
    np.testing.assert_array_equal(limits, np.sort(bounds, axis=1)[:, c - 1])


def test_scan_offers_pairs_to_both_sides():
    rng = np.random.default_rng(0)
    m, c, width = 70, 4, 8
    products = rng.standard_normal((m, m)).astype(np.float32)
    norms = rng.uniform(3, 4, 2 * m).astype(np.float32)
    keys, places = np.empty((2 * m, width), np.float32), np.empty((2 * m, width), np.int32)
    counts, limits = np.zeros(2 * m, np.int32), np.full(2 * m, np.inf, np.float32)
    own = np.arange(m)
    knn_scan(products, 0, m, norms[:m], norms[m:], own, True, c, keys, places, counts, limits)
    knn_finish(c, keys, places, counts, limits)
    bounds = norms[:m, np.newaxis] + (norms[m:] - 2 * products)
    expected = np.concatenate((m + np.argsort(bounds, axis=1)[:, :c], np.argsort(bounds.T, axis=1)[:, :c]))
    np.testing.assert_array_equal(np.sort(places[:, :c], axis=1), np.sort(expected, axis=1))


@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**-500, 2.0**500])
def test_pair_squares(scale):
    X, Q = rows(30, 19, "float64") / scale, rows(7, 19, "float64", seed=1) / scale
    at, to = np.repeat(np.arange(7), 30), np.tile(np.arange(30), 7)
    out = np.empty(210)
    pair_squares(X, Q, at, to, scale, out)
    expected = ((Q[at] * scale - X[to] * scale) ** 2).sum(axis=1)
    np.testing.assert_allclose(out, expected, rtol=1e-14)
