"""Manifolds of known dimension that the literature on intrinsic dimension measures itself on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import gammainc
from sklearn.utils import Bunch, check_random_state

from isogeom._validation import check_choice, check_integer

_State = np.random.RandomState


def hyper_ball(n_samples: int, dimension: int, *, random_state: Any = 0) -> np.ndarray:
    """Draw rows uniformly from the unit ball.

    Parameters
    ----------
    n_samples : int
        Number of rows.
    dimension : int
        Dimension d of the ball, which is also the number of features.
    random_state : int, RandomState instance or None, default=0
        Seed.

    Returns
    -------
    ndarray of shape (n_samples, dimension)
        float64.

    Notes
    -----
    Standard normal rows x, multiplied by ``P(d/2, |x|^2 / 2)^(1/d) / |x|`` with P the regularised lower incomplete
    gamma function: the direction is uniform, and the radius has the law of the d-th root of a uniform variable.

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.datasets import hyper_ball
    >>> X = hyper_ball(1000, 5)
    >>> print(f"{np.linalg.norm(X, axis=1).mean():.2f}")  # d / (d + 1)
    0.83
    """
    n, d = check_integer(n_samples, "n_samples", low=1), check_integer(dimension, "dimension", low=1)
    rows = check_random_state(random_state).normal(size=(n, d))
    squares = np.sum(rows**2, axis=1)
    return rows * (gammainc(d / 2, squares / 2) ** (1 / d) / np.sqrt(squares))[:, np.newaxis]


def hyper_sphere(n_samples: int, dimension: int, *, random_state: Any = 0) -> np.ndarray:
    """Draw rows uniformly from the unit sphere.

    Parameters
    ----------
    n_samples : int
        Number of rows.
    dimension : int
        Dimension of the sphere; there is one feature more.
    random_state : int, RandomState instance or None, default=0
        Seed.

    Returns
    -------
    ndarray of shape (n_samples, dimension + 1)
        float64, rows of norm 1.

    Examples
    --------
    >>> from isogeom.datasets import hyper_sphere
    >>> hyper_sphere(100, 4).shape
    (100, 5)
    """
    n, d = check_integer(n_samples, "n_samples", low=1), check_integer(dimension, "dimension", low=1)
    rows = check_random_state(random_state).randn(n, d + 1)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def make_manifold(name: str, n_samples: int = 2000, *, random_state: Any = 0) -> Bunch:
    r"""Draw rows from a benchmark manifold of known dimension.

    Parameters
    ----------
    name : str
        One of the names in Notes.
    n_samples : int, default=2000
        Number of rows.
    random_state : int, RandomState instance or None, default=0
        Seed. The same integer gives the same rows on every platform, up to rounding.

    Returns
    -------
    :class:`sklearn.utils.Bunch`
        X : ndarray of shape (n_samples, n_features)
            Rows, float64.
        dimension : int
            Dimension of the manifold.
        name : str
            Its name.

    Raises
    ------
    ValueError
        If the name is unknown or `n_samples` is below 1.

    Notes
    -----
    ======== ================================================ ========= ========
    name     what                                             dimension features
    ======== ================================================ ========= ========
    M1       sphere                                           10        11
    M2       affine space                                     3         5
    M3       folded, of varying density                       4         6
    M4       products of coordinates and phases               4         8
    M5a      closed helix around a circle                     1         3
    M5b      helicoid                                         2         3
    M6       like M4                                          6         36
    M7       Swiss roll                                       2         3
    M8       like M4                                          12        72
    M9       cube                                             20        20
    M10a..d  surface of a cube                                10,17,    one more
                                                              24,70
    M11      Moebius band, 2.5 twists                         2         3
    M12      isotropic Gaussian                               20        20
    M13a     S-curve                                          2         3
    M13b     spiral                                           1         13
    Mbeta    image of a beta-distributed cube                 10        40
    Mn1, Mn2 image of a uniform cube                          18, 24    72, 96
    Mp1..Mp3 image of a paraboloid with heavy-tailed density  3, 6, 9   12,21,30
    ======== ================================================ ========= ========

    The recipes are those in common use, drawn in their order from :class:`numpy.random.RandomState`.

    References
    ----------
    M. Hein and J.-Y. Audibert, "Intrinsic dimensionality estimation of submanifolds in R^d", ICML 2005.
    :doi:`10.1145/1102351.1102388`

    P. Campadelli, E. Casiraghi, C. Ceruti and A. Rozza, "Intrinsic dimension estimation: relevant techniques and a
    benchmark framework", Mathematical Problems in Engineering, 2015. :doi:`10.1155/2015/759567`

    Examples
    --------
    >>> from isogeom.datasets import make_manifold
    >>> data = make_manifold("M7", 500)
    >>> data.X.shape, data.dimension
    ((500, 3), 2)
    """
    check_choice(name, "name", tuple(MANIFOLDS))
    n = check_integer(n_samples, "n_samples", low=1)
    dimension, draw = MANIFOLDS[name]
    X = np.ascontiguousarray(draw(n, check_random_state(random_state)), dtype=np.float64)
    return Bunch(X=X, dimension=dimension, name=name)


def _affine(n: int, state: _State) -> np.ndarray:
    A = np.array([[1.2, -0.5, 0], [0.5, 0.9, 0], [-0.5, -0.2, 1], [0.4, -0.9, -0.1], [1.1, -0.3, 0]])
    return (A @ (4 * state.rand(3, n))).T + np.array([3.0, -1, 0, 0, 8])


def _folded(n: int, state: _State) -> np.ndarray:
    p = state.rand(4, n)
    phase = 2 * np.pi * p[0]
    columns = (
        p[1] ** 2 * np.cos(phase),
        p[2] ** 2 * np.sin(phase),
        p[1] + p[2] + (p[1] - p[3]) ** 2,
        p[1] - 2 * p[2] + (p[0] - p[3]) ** 2,
        -p[1] - 2 * p[2] + (p[2] - p[3]) ** 2,
        p[0] ** 2 - p[1] ** 2 + p[2] ** 2 - p[3] ** 2,
    )
    return np.stack(columns, axis=1)


def _phases(dimension: int, copies: int) -> Callable[[int, _State], np.ndarray]:
    def draw(n: int, state: _State) -> np.ndarray:
        p = state.rand(dimension, n)
        following = np.roll(p, -1, axis=0)
        pairs = np.stack((following * np.cos(2 * np.pi * p), following * np.sin(2 * np.pi * p)), axis=1)
        return np.tile(pairs.reshape(2 * dimension, n), (copies, 1)).T

    return draw


def _helix(n: int, state: _State) -> np.ndarray:
    t = 2 * np.pi / n + 2 * np.pi * state.rand(n)
    radius = 2 + np.cos(8 * t)
    return np.stack((radius * np.cos(t), radius * np.sin(t), np.sin(8 * t)), axis=1)


def _helicoid(n: int, state: _State) -> np.ndarray:
    r, q = 10 * np.pi * state.rand(n), 10 * np.pi * state.rand(n)
    return np.stack((r * np.cos(q), r * np.sin(q), q / 2), axis=1)


def _roll(n: int, state: _State) -> np.ndarray:
    t, height = 1.5 * np.pi * (1 + 2 * state.rand(n)), 21 * state.rand(n)
    return np.stack((t * np.cos(t), height, t * np.sin(t)), axis=1)


def _cube_surface(dimension: int) -> Callable[[int, _State], np.ndarray]:
    def draw(n: int, state: _State) -> np.ndarray:
        features = dimension + 1
        each = int(n / (2 * features) + 1)
        faces = []
        for axis in range(features):
            for side in (0.0, 1.0):
                face = state.rand(features, each)
                face[axis] = side
                faces.append(face.T)
        return np.concatenate(faces)[:n]

    return draw


def _moebius(n: int, state: _State) -> np.ndarray:
    phi = 2 * np.pi * state.rand(n)
    s = 2 * state.rand(n) - 1
    radius = 1 + 0.5 * s * np.cos(5 * phi)
    return np.stack((radius * np.cos(phi), radius * np.sin(phi), 0.5 * s * np.sin(5 * phi)), axis=1)


def _s_curve(n: int, state: _State) -> np.ndarray:
    t, height = 3 * np.pi * (state.rand(n) - 0.5), 2 * state.rand(n)
    return np.stack((np.sin(t), height, np.sign(t) * (np.cos(t) - 1)), axis=1)


def _spiral(n: int, state: _State) -> np.ndarray:
    t = 10 * np.pi * state.rand(n)
    X = np.zeros((n, 13))
    X[:, 0], X[:, 1], X[:, 2] = 100 * np.cos(t), 100 * np.sin(t), t
    return X


def _beta_image(n: int, state: _State) -> np.ndarray:
    x = state.beta(10, 0.5, size=(n, 10))
    half = np.hstack((x * np.sin(np.cos(2 * np.pi * x)), x * np.cos(np.sin(2 * np.pi * x))))
    return np.hstack((half, half))


def _cube_image(dimension: int) -> Callable[[int, _State], np.ndarray]:
    def draw(n: int, state: _State) -> np.ndarray:
        x = state.random_sample((n, dimension))
        mirrored = x[:, ::-1]
        half = np.hstack((np.tan(x * np.cos(mirrored)), np.arctan(mirrored * np.sin(x))))
        return np.hstack((half, half))

    return draw


def _paraboloid(dimension: int) -> Callable[[int, _State], np.ndarray]:
    def draw(n: int, state: _State) -> np.ndarray:
        E = state.exponential(1, (dimension + 1, n))
        x = 1 / (1 + E[1:] / E[0])
        z = np.vstack((x, np.sum(x**2, axis=0))).T
        return np.hstack((z, np.sin(z), z**2))

    return draw


# Name -> (dimension, generator).
MANIFOLDS: dict[str, tuple[int, Callable[[int, _State], np.ndarray]]] = {
    "M1": (10, lambda n, state: hyper_sphere(n, 10, random_state=state)),
    "M2": (3, _affine),
    "M3": (4, _folded),
    "M4": (4, _phases(4, 1)),
    "M5a": (1, _helix),
    "M5b": (2, _helicoid),
    "M6": (6, _phases(6, 3)),
    "M7": (2, _roll),
    "M8": (12, _phases(12, 3)),
    "M9": (20, lambda n, state: (5 * state.rand(20, n) - 2.5).T),
    "M10a": (10, _cube_surface(10)),
    "M10b": (17, _cube_surface(17)),
    "M10c": (24, _cube_surface(24)),
    "M10d": (70, _cube_surface(70)),
    "M11": (2, _moebius),
    "M12": (20, lambda n, state: state.multivariate_normal(np.zeros(20), np.identity(20), n)),
    "M13a": (2, _s_curve),
    "M13b": (1, _spiral),
    "Mbeta": (10, _beta_image),
    "Mn1": (18, _cube_image(18)),
    "Mn2": (24, _cube_image(24)),
    "Mp1": (3, _paraboloid(3)),
    "Mp2": (6, _paraboloid(6)),
    "Mp3": (9, _paraboloid(9)),
}
