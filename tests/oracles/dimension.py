"""Slow, obvious definitions of the dimension estimators, and clouds with known answers."""

import numpy as np
from scipy import optimize, special
from scipy.spatial import cKDTree


def hyper_ball(n, d, seed):
    """Uniform points of the d-ball, drawn as the fixtures of other packages are."""
    rows = np.random.RandomState(seed).normal(size=(n, d))
    norms = np.linalg.norm(rows, axis=1)
    return rows * (special.gammainc(d / 2, norms**2 / 2) ** (1 / d) / norms)[:, np.newaxis]


def hyper_sphere(n, d, seed):
    """Uniform points of the d-sphere in d + 1 features."""
    rows = np.random.RandomState(seed).randn(n, d + 1)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def fixture_a():
    """300 points of a 5-ball in 10 features."""
    return np.pad(hyper_ball(300, 5, 0), ((0, 0), (0, 5)))


def fixture_b():
    """300 points of a 4-sphere in 5 features."""
    return hyper_sphere(300, 4, 1)


def torus_neighbors(n, d, seed, k):
    """Distances and neighbours of uniform points on the flat torus: no boundary, no curvature."""
    X = np.random.default_rng(seed).random((n, d))
    distances, indices = cKDTree(X, boxsize=1.0).query(X, k + 1)
    return distances[:, 1:], indices[:, 1:]


def poisson_distances(n, k, d, rng):
    """Rows of independent neighbour distances of a homogeneous Poisson process."""
    return np.cumsum(rng.exponential(size=(n, k)), axis=1) ** (1 / d)


def all_distances(X):
    """Every distance, by differences in float64."""
    X = np.asarray(X, dtype=np.float64)
    return np.array([np.sqrt(((X - row) ** 2).sum(axis=1)) for row in X])


def two_nn(distances, unbiased=True):
    """Maximum likelihood from the first two neighbours."""
    x = np.log(distances[:, 1] / distances[:, 0])
    return (len(x) - int(unbiased)) / x.sum()


def gride(distances, n1, n2):
    """Root of the score equation by bracketing."""
    x = np.log(distances[:, n2 - 1] / distances[:, n1 - 1])

    def score(d):
        return (len(x) - 1) / d + (n2 - n1 - 1) * np.sum(x / -np.expm1(-d * x)) - (n2 - 1) * x.sum()

    return optimize.brentq(score, 1e-3, 1e3, xtol=1e-13)


def levina_bickel(distances, k):
    """The dimension at every row from its first k distances."""
    r = distances[:, :k]
    return 1 / np.array([np.mean([np.log(row[-1] / row[j]) for j in range(k - 1)]) for row in r])


def adaptive_sizes(distances, indices, d, quantile):
    """Neighbourhood of every row by the likelihood-ratio test, one rank after the other."""
    n, k_max = distances.shape
    sizes = []
    for i in range(n):
        size = 3
        for k in range(4, k_max):
            j = indices[i, k]
            vi, vj = distances[i, k - 1] ** d, distances[j, k - 1] ** d
            if -2 * k * (np.log(vi) + np.log(vj) - 2 * np.log(vi + vj) + np.log(4)) >= quantile:
                break
            size = k
        sizes.append(size)
    return np.array(sizes)
