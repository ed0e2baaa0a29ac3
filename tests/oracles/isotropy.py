"""Slow, obvious references for the isotropy scores, straight from the published definitions."""

import numpy as np


def isoscore_chain(eigenvalues):
    """IsoScore by its published steps: normalise, defect, share of dimensions used, rescale."""
    values = np.asarray(eigenvalues, dtype=np.float64)
    d = values.size
    normed = np.sqrt(d) * values / np.linalg.norm(values)
    defect = np.linalg.norm(normed - 1) / np.sqrt(2 * (d - np.sqrt(d)))
    used = (d - defect**2 * (d - np.sqrt(d))) ** 2 / d**2
    return (d * used - 1) / (d - 1)


def isoscore_by_eigenvalues(X):
    """IsoScore of rows through an explicit covariance and its eigenvalues."""
    return isoscore_chain(np.linalg.eigvalsh(np.cov(np.asarray(X, dtype=np.float64).T)))


def isoscore_by_gram(X):
    """IsoScore of few rows of many features: the same eigenvalues, and zeros."""
    Y = X - X.mean(axis=0)
    values = np.linalg.svd(Y, compute_uv=False) ** 2
    return isoscore_chain(np.concatenate([values, np.zeros(X.shape[1] - values.size)]))


def isoscore_star_by_eigenvalues(covariance, shrinkage, target):
    """IsoScore* of an explicit covariance and an explicit target matrix."""
    return isoscore_chain(np.linalg.eigvalsh((1 - shrinkage) * covariance + shrinkage * target))


def effective_rank_by_svd(X, *, on, center):
    """Exponential of the Shannon entropy of normalised singular values, or of their squares."""
    X = np.asarray(X, dtype=np.float64)
    values = np.linalg.svd(X - X.mean(axis=0) if center else X, compute_uv=False)
    values = values**2 if on == "eigenvalues" else values
    shares = [v / values.sum() for v in values if v > 0]
    return float(np.exp(-sum(p * np.log(p) for p in shares)))


CLOUD = np.array([[1, 2, 0], [2, 1, 1], [3, 3, 0], [0, 1, 2], [4, 2, 1]], dtype=float)
CLOUD_COVARIANCE = np.array([[2.5, 0.75, -0.5], [0.75, 0.7, -0.55], [-0.5, -0.55, 0.7]])


def anisotropic(n, d, seed=0, offset=0.0):
    """Gaussian rows with eigenvalues over two orders of magnitude and more."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)) @ (rng.standard_normal((d, d)) * np.geomspace(1, 0.05, d)) + offset
