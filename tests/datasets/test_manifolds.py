import numpy as np
import pytest
from scipy import stats

from isogeom.datasets import hyper_ball, hyper_sphere, make_manifold
from isogeom.datasets._manifolds import MANIFOLDS

# Sum of all entries for 2000 rows and seed 0, as the reference implementation of the recipes gives it.
CHECKSUMS = {
    "M1": -21.384235,
    "M2": 30456.555209,
    "M3": -908.202898,
    "M5a": 171.400043,
    "M5b": 15028.502844,
    "M6": 211.833051,
    "M7": 26108.004724,
    "M9": -468.589854,
    "M10a": 10916.896551,
    "M11": 83.498689,
    "M12": -151.144773,
    "Mbeta": 65434.822293,
    "Mp1": 14310.911539,
}
SHAPES = {
    "M1": (10, 11),
    "M2": (3, 5),
    "M3": (4, 6),
    "M4": (4, 8),
    "M5a": (1, 3),
    "M5b": (2, 3),
    "M6": (6, 36),
    "M7": (2, 3),
    "M8": (12, 72),
    "M9": (20, 20),
    "M10a": (10, 11),
    "M10b": (17, 18),
    "M10c": (24, 25),
    "M10d": (70, 71),
    "M11": (2, 3),
    "M12": (20, 20),
    "M13a": (2, 3),
    "M13b": (1, 13),
    "Mbeta": (10, 40),
    "Mn1": (18, 72),
    "Mn2": (24, 96),
    "Mp1": (3, 12),
    "Mp2": (6, 21),
    "Mp3": (9, 30),
}


@pytest.mark.parametrize("name", CHECKSUMS)
def test_checksums(name):
    assert make_manifold(name).X.sum() == pytest.approx(CHECKSUMS[name], abs=1e-6)


def test_every_manifold():
    assert set(SHAPES) == set(MANIFOLDS)
    for name, (dimension, features) in SHAPES.items():
        data = make_manifold(name, 61, random_state=3)
        assert data.X.shape == (61, features)
        assert data.X.dtype == np.float64
        assert (data.dimension, data.name) == (dimension, name)
        np.testing.assert_array_equal(data.X, make_manifold(name, 61, random_state=np.random.RandomState(3)).X)


class TestEquations:
    """Rows satisfy the equations of their manifold."""

    def test_affine_space_has_rank_three(self):
        X = make_manifold("M2", 200).X
        assert np.linalg.matrix_rank(X - X.mean(axis=0)) == 3

    def test_roll(self):
        X = make_manifold("M7", 200).X
        t = np.hypot(X[:, 0], X[:, 2])
        np.testing.assert_allclose(X[:, 0], t * np.cos(t), atol=1e-10)
        assert 0 <= X[:, 1].min()
        assert X[:, 1].max() <= 21

    def test_cube_faces(self):
        X = make_manifold("M10a", 400).X
        assert np.all(np.any((X == 0) | (X == 1), axis=1))

    def test_copies(self):
        X = make_manifold("M6", 50).X
        np.testing.assert_array_equal(X[:, :12], X[:, 12:24])
        phases = X[:, 0:12:2] ** 2 + X[:, 1:12:2] ** 2
        assert phases.max() <= 1

    def test_s_curve(self):
        X = make_manifold("M13a", 200).X
        np.testing.assert_allclose(X[:, 0] ** 2 + (np.abs(X[:, 2]) - 1) ** 2, 1, atol=1e-12)

    def test_spiral(self):
        X = make_manifold("M13b", 100).X
        np.testing.assert_allclose(X[:, 0], 100 * np.cos(X[:, 2]), atol=1e-10)
        assert not X[:, 3:].any()


def test_ball_is_uniform():
    radii = np.linalg.norm(hyper_ball(2000, 3, random_state=1), axis=1)
    assert stats.kstest(radii**3, "uniform").pvalue > 0.01


def test_sphere():
    X = hyper_sphere(500, 4, random_state=1)
    np.testing.assert_allclose(np.linalg.norm(X, axis=1), 1)
    np.testing.assert_allclose(X, np.asarray(X))
    state = np.random.RandomState(1).randn(500, 5)
    np.testing.assert_allclose(X, state / np.linalg.norm(state, axis=1)[:, np.newaxis])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: make_manifold("M99"), "name='M99' must be one of 'M1', "),
        (lambda: make_manifold("M1", 0), "n_samples=0 must be at least 1"),
        (lambda: hyper_ball(10, 0), "dimension=0 must be at least 1"),
        (lambda: hyper_sphere(0, 2), "n_samples=0"),
    ],
)
def test_bad_parameters(call, match):
    with pytest.raises(ValueError, match=match):
        call()
