"""Exact neighbours against all distances by direct differences."""

import numpy as np
import pytest
from conftest import make_array
from oracles.neighbors import brute_neighbors

from isogeom import _xp
from isogeom._neighbors._cloud import Cloud
from isogeom._neighbors._exact import exact_neighbors
from isogeom._neighbors._rows import nearest

K = 5


def manifold(n, d, dim=10, seed=0):
    """Rows of a curved surface of dimension `dim` in R^d."""
    rng = np.random.default_rng(seed)
    flat = rng.uniform(size=(n, dim))
    features = np.concatenate((np.sin(3 * flat), np.cos(3 * flat)), axis=1)
    return features @ rng.standard_normal((2 * dim, d))


def search(X, k=K, **keywords):
    own = keywords.pop("own", np.arange(int(X.shape[0])))
    xp = _xp.array_namespace(X)
    rows = xp.take(X, _xp.asarray_like(own, X, dtype=xp.int64), axis=0)
    distances, indices = exact_neighbors(Cloud.of(X), rows, k, own=own, **keywords)
    return _xp.to_numpy(distances), _xp.to_numpy(indices)


def check(X, k=K, rtol=1e-13, **keywords):
    """Compare with the oracle: distances to `rtol`, positions exactly."""
    found = search(X, k, **keywords)
    own = keywords.get("own", np.arange(len(X)))
    expected = brute_neighbors(X, k, own=own, within=keywords.get("within"))
    np.testing.assert_allclose(found[0], expected[0], rtol=rtol, atol=0)
    np.testing.assert_array_equal(found[1], expected[1])
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(300, 3), (500, 40), (1300, 20), (300, 768)])
def test_equals_all_distances(shape, dtype):
    check(np.random.default_rng(0).standard_normal(shape).astype(dtype))


def test_a_large_mean_gives_no_false_zero():
    # Distances of 0.69 beside norms of 831: the expanded formula in float32 is noise here.
    X = manifold(700, 768)
    X *= 0.69 / np.median(brute_neighbors(X, 1, own=np.arange(700))[0])
    mean = np.random.default_rng(1).standard_normal(768)
    X = (X + mean * (831 / np.linalg.norm(mean))).astype(np.float32)
    assert abs(np.linalg.norm(X.mean(axis=0, dtype=float)) - 831) < 20
    distances, _ = check(X)
    assert distances.min() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_far_apart_clusters(dtype):
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((4, 30)) * 1e4
    X = (centres[np.arange(600) % 4] + rng.standard_normal((600, 30))).astype(dtype)
    check(X)


@pytest.mark.parametrize("factor", [1e3, 1e8, 1e30])
def test_massive_rows(factor):
    X = np.random.default_rng(0).standard_normal((700, 40)).astype(np.float32)
    X[::70] *= np.float32(factor)
    check(X)


@pytest.mark.parametrize("k", [1, 5, 60])
@pytest.mark.parametrize("width", [12, 50])
def test_ties_of_binary_rows_are_settled_by_position(width, k):
    X = np.random.default_rng(0).integers(0, 2, (900, width)).astype(np.float64)
    check(X, k)


def test_all_distances_equal():
    check(np.eye(200))


@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1e30, 1e150])
def test_extreme_scales(scale):
    X = np.random.default_rng(0).standard_normal((400, 20))
    distances, indices = check(X * scale)
    expected = search(X)
    np.testing.assert_array_equal(indices, expected[1])
    np.testing.assert_allclose(distances / scale, expected[0], rtol=1e-12)


@pytest.mark.parametrize("scale", [2.0**-120, 2.0**100])
def test_extreme_scales_of_float32(scale):
    X = np.random.default_rng(0).standard_normal((400, 20)).astype(np.float32)
    check((X * np.float32(scale)).astype(np.float32))


def test_rows_in_another_order():
    X = manifold(700, 30).astype(np.float32)
    order = np.random.default_rng(1).permutation(700)
    distances, indices = search(X)
    moved, places = search(X[order])
    np.testing.assert_allclose(moved, distances[order], rtol=1e-14)
    np.testing.assert_array_equal(order[places], indices[order])


def test_float32_rows_are_measured_in_float64():
    X = manifold(600, 50)
    narrow = X.astype(np.float32)
    distances, indices = search(narrow)
    wide, places = search(narrow.astype(np.float64))
    np.testing.assert_array_equal(indices, places)
    np.testing.assert_allclose(distances, wide, rtol=1e-14)
    # The rows before rounding are within the rounding of each end.
    close = search(X)[0]
    slack = 2 * np.finfo(np.float32).eps * np.linalg.norm(X, axis=1).max()
    assert np.abs(distances - close).max() < slack


@pytest.mark.parametrize("kind", ["manifold", "clusters", "binary"])
def test_every_library(as_array, kind):
    rng = np.random.default_rng(0)
    X = {
        "manifold": manifold(260, 40) + 100.0,
        "clusters": rng.standard_normal((260, 40)) + 1e5 * rng.integers(0, 2, (260, 1)),
        "binary": rng.integers(0, 2, (260, 15)).astype(float),
    }[kind].astype(np.float32)
    distances, indices = search(as_array(X))
    expected = brute_neighbors(X, K, own=np.arange(len(X)))
    np.testing.assert_allclose(distances, expected[0], rtol=1e-13)
    np.testing.assert_array_equal(indices, expected[1])


def test_tf32_products_are_not_trusted():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    X = manifold(260, 40).astype(np.float32)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        distances, indices = search(torch.asarray(X))
    finally:
        torch.set_float32_matmul_precision(before)
    expected = brute_neighbors(X, K, own=np.arange(len(X)))
    np.testing.assert_array_equal(indices, expected[1])
    np.testing.assert_allclose(distances, expected[0], rtol=1e-13)


def test_some_rows_take_part():
    X = np.random.default_rng(0).standard_normal((500, 20))
    within = np.flatnonzero(np.arange(500) % 3)
    check(X, within=within, own=within[::7])


@pytest.mark.parametrize("library_name", ["numpy", "torch"])
def test_queries_from_elsewhere_and_their_batches(library_name):
    rng = np.random.default_rng(0)
    rows, queries = rng.standard_normal((700, 30)), rng.standard_normal((90, 30))
    queries[3] = rows[5]
    expected = brute_neighbors(rows, K, queries=queries)
    X, Q = make_array(library_name, rows), make_array(library_name, queries)
    whole = nearest(X, Q, K)
    np.testing.assert_allclose(_xp.to_numpy(whole[0]), expected[0], rtol=1e-13, atol=0)
    np.testing.assert_array_equal(_xp.to_numpy(whole[1]), expected[1])
    for start in range(0, 90, 13):
        part = nearest(X, Q[start : start + 13, :], K)
        np.testing.assert_array_equal(_xp.to_numpy(part[0]), _xp.to_numpy(whole[0])[start : start + 13])


def test_every_other_row():
    X = np.random.default_rng(0).standard_normal((40, 15))
    check(X, k=39)


def test_doubtful_rows_cost_products_not_loops():
    # 5000 x 50 rows of zeros and ones: every row has ties at its k-th distance.
    import time

    X = np.random.default_rng(0).integers(0, 2, (5000, 50)).astype(np.float32)
    start = time.process_time()
    distances, indices = search(X, 10)
    seconds = time.process_time() - start
    sample = np.arange(0, 5000, 50)
    expected = brute_neighbors(X, 10, own=sample)
    np.testing.assert_array_equal(indices[sample], expected[1])
    np.testing.assert_array_equal(distances[sample], expected[0])
    # Row by row this took 40 s.
    assert seconds < 15
