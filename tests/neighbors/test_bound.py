"""The search by leading axes: a true lower bound, exact results, and a pilot that knows when to leave it."""

import numpy as np
import pytest
from oracles.neighbors import all_distances, brute_neighbors

from isogeom._neighbors import _bound
from isogeom._neighbors._bound import Axes, Projected, leading_axes
from isogeom._neighbors._cloud import Cloud
from isogeom._neighbors._rows import nearest


@pytest.fixture(autouse=True)
def small_cases(monkeypatch):
    """Let few rows and short ones take the path."""
    monkeypatch.setattr(_bound, "_MIN_ROWS", 400)
    monkeypatch.setattr(_bound, "_MIN_QUERIES", 200)


def leading_axes_of(X, k, own, within=None):
    def kth_distances(places):
        mine = own[places]
        return brute_neighbors(X, k, own=mine, within=within)[0][:, -1]

    return leading_axes(Cloud.of(X), X[own], k, own=own, within=within, kth_distances=kth_distances)


def low_rank(n=700, d=200, noise=0.0, offset=0.0):
    rng = np.random.default_rng(0)
    inner = rng.standard_normal((n, 12)) @ rng.standard_normal((12, d))
    return (inner + noise * rng.standard_normal((n, d)) + offset).astype(np.float32)


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_it_bounds_every_distance(offset):
    X = low_rank(300, 200, noise=0.3, offset=offset)
    cloud = Cloud.of(X)
    vectors, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((200, 12)))
    for axes in (vectors, np.linalg.svd(X - X.mean(axis=0), full_matrices=False)[2][:12].T.astype(np.float64)):
        frame, _ = np.linalg.qr(axes)
        short, squares = Axes(frame).coordinates(cloud, X, None)
        projected = Projected(short, squares, 200)
        tile = projected.tile(slice(0, 300))
        bounds = projected.norms[:, np.newaxis] + projected.norms - 2 * (tile @ tile.T)
        true = (all_distances(X, X) * cloud.scale) ** 2
        assert (bounds <= true).all()
    # Of the strong axes, a bound worth having.
    assert np.median(bounds / np.where(true > 0, true, np.inf)) > 0.9


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("k", [2, 20])
def test_exact_on_rows_with_few_strong_axes(k, noise):
    X = low_rank(noise=noise)
    own = np.arange(len(X))
    assert leading_axes_of(X, k, own) is not None
    distances, indices = nearest(X, X, k, own=own)
    expected = brute_neighbors(X, k, own=own)
    np.testing.assert_array_equal(indices, expected[1])
    np.testing.assert_allclose(distances, expected[0], rtol=1e-13)


def test_rows_that_are_not_certified_are_searched_in_full(monkeypatch):
    X = low_rank(noise=0.05)
    # Some rows leave the axes: their bounds are far below their distances.
    X[::9] += np.random.default_rng(2).standard_normal((len(X[::9]), 200)).astype(np.float32)
    monkeypatch.setattr(_bound, "_WORTH", 100.0)
    own = np.arange(len(X))
    distances, indices = nearest(X, X, 3, own=own)
    expected = brute_neighbors(X, 3, own=own)
    np.testing.assert_array_equal(indices, expected[1])
    np.testing.assert_allclose(distances, expected[0], rtol=1e-13)


def test_anchors_some_rows_and_threads():
    X = low_rank(800)
    within = np.flatnonzero(np.arange(800) % 7)
    own = within[::2]
    assert leading_axes_of(X, 4, own, within) is not None
    found = nearest(X, X, 4, own=own, within=within)
    expected = brute_neighbors(X, 4, own=own, within=within)
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-13)
    again = nearest(X, X, 4, own=own, within=within, n_jobs=2)
    np.testing.assert_array_equal(found[0], again[0])


@pytest.mark.parametrize("kind", ["isotropic", "power law", "few features", "constant axis"])
def test_the_pilot_leaves_it_where_it_does_not_pay(kind):
    X = np.random.default_rng(0).standard_normal((1200, 400))
    if kind == "power law":
        X *= np.arange(1, 401) ** -0.5
    elif kind == "few features":
        X = X[:, :100]
    elif kind == "constant axis":
        X[:, 0] = 1e6
    X = X.astype(np.float32)
    assert leading_axes_of(X, 5, np.arange(1200)) is None
