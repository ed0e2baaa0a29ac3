"""Slow, obvious references for independent component analysis."""

import numpy as np

CONTRASTS = {
    "logcosh": (lambda u: np.tanh(u), lambda u: 1 / np.cosh(u) ** 2),
    "exp": (lambda u: u * np.exp(-(u**2) / 2), lambda u: (1 - u**2) * np.exp(-(u**2) / 2)),
    "cube": (lambda u: u**3, lambda u: 3 * u**2),
}


def laplace_mixture(n, d, k, seed, noise=0.0):
    """Unit-variance Laplace sources on Gaussian atoms; returns X, atoms (k, d)."""
    rng = np.random.default_rng([77, seed])
    atoms = rng.standard_normal((k, d))
    return rng.laplace(scale=0.5**0.5, size=(n, k)) @ atoms + noise * rng.standard_normal((n, d)), atoms


def amari_distance(unmixing, mixing):
    """Amari et al.'s distance of ``unmixing @ mixing`` to a scaled permutation, 0 to 1."""
    P = np.abs(unmixing @ mixing)
    k = len(P)
    rows = np.sum(P.sum(axis=1) / P.max(axis=1) - 1)
    columns = np.sum(P.sum(axis=0) / P.max(axis=0) - 1)
    return (rows + columns) / (2 * k * (k - 1))


def stationarity(S, fun):
    """Signed skew part of E[g(s_i) s_j], pair by pair, from the sources alone."""
    g, slope = CONTRASTS[fun]
    k = S.shape[1]
    sign = [np.sign(np.mean(slope(S[:, i])) - np.mean(S[:, i] * g(S[:, i]))) for i in range(k)]
    worst = 0.0
    for i in range(k):
        for j in range(i):
            one = sign[i] * np.mean(g(S[:, i]) * S[:, j])
            other = sign[j] * np.mean(g(S[:, j]) * S[:, i])
            worst = max(worst, abs(one - other) / 2)
    return worst
