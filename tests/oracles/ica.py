"""Slow, obvious references for independent component analysis."""

import numpy as np

# G, g and g' of each contrast.
FUNCTIONS = {
    "logcosh": (lambda u: np.log(np.cosh(u)), lambda u: np.tanh(u), lambda u: 1 / np.cosh(u) ** 2),
    "exp": (
        lambda u: -np.exp(-(u**2) / 2),
        lambda u: u * np.exp(-(u**2) / 2),
        lambda u: (1 - u**2) * np.exp(-(u**2) / 2),
    ),
    "cube": (lambda u: u**4 / 4, lambda u: u**3, lambda u: 3 * u**2),
}
CONTRASTS = {name: functions[1:] for name, functions in FUNCTIONS.items()}


def laplace_mixture(n, d, k, seed, noise=0.0):
    """Unit-variance Laplace sources on Gaussian atoms; returns X, atoms (k, d)."""
    rng = np.random.default_rng([77, seed])
    atoms = rng.standard_normal((k, d))
    return rng.laplace(scale=0.5**0.5, size=(n, k)) @ atoms + noise * rng.standard_normal((n, d)), atoms


def elliptical_mixture(n, d, k, seed):
    """Half Laplace sources, half an elliptical subspace: any rotation within the latter is as good in the limit."""
    rng = np.random.default_rng([78, seed])
    elliptical = rng.standard_normal((n, k // 2)) * np.abs(rng.standard_normal((n, 1)))
    return np.hstack([elliptical, rng.laplace(size=(n, k - k // 2))]) @ rng.standard_normal((k, d))


def amari_distance(unmixing, mixing):
    """Amari et al.'s distance of ``unmixing @ mixing`` to a scaled permutation, 0 to 1."""
    P = np.abs(unmixing @ mixing)
    k = len(P)
    rows = np.sum(P.sum(axis=1) / P.max(axis=1) - 1)
    columns = np.sum(P.sum(axis=0) / P.max(axis=0) - 1)
    return (rows + columns) / (2 * k * (k - 1))


def whiten(X, k):
    """Return centred rows of unit covariance, from a singular value decomposition of the rows."""
    U, _, _ = np.linalg.svd(X - X.mean(axis=0), full_matrices=False)
    return U[:, :k] * np.sqrt(len(X))


def signs(S, fun):
    """1 for sources whose mean contrast has a minimum at independence, -1 for the others."""
    g, slope = CONTRASTS[fun]
    return np.array([np.sign(np.mean(slope(s)) - np.mean(s * g(s))) for s in S.T])


def stationarity(S, fun, sign=None):
    """Signed skew part of E[g(s_i) s_j], pair by pair, from the sources alone."""
    g = CONTRASTS[fun][0]
    k = S.shape[1]
    sign = signs(S, fun) if sign is None else sign
    worst = 0.0
    for i in range(k):
        for j in range(i):
            one = sign[i] * np.mean(g(S[:, i]) * S[:, j])
            other = sign[j] * np.mean(g(S[:, j]) * S[:, i])
            worst = max(worst, abs(one - other) / 2)
    return worst


def objective(S, fun, sign):
    """Signed sum of the mean contrasts."""
    return sum(s * np.mean(FUNCTIONS[fun][0](column)) for s, column in zip(sign, S.T, strict=True))
