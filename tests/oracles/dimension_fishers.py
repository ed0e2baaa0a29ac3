"""Slow reference of the separability dimension."""

import numpy as np
from scipy.special import lambertw


def fishers(X, condition_number=10):
    """Dimension at the reported margin, all products at once."""
    Y = X - X.mean(axis=0)
    U, s, _ = np.linalg.svd(Y, full_matrices=False)
    scores = U[:, s**2 > s[0] ** 2 / condition_number]
    scores = scores / np.linalg.norm(scores, axis=1, keepdims=True)
    cosines = scores @ scores.T
    np.fill_diagonal(cosines, -1)
    n = len(X)
    margins = np.arange(60, 100, 2) / 100
    if not (cosines > 0.6).any():
        margins = np.arange(2, 60, 2) / 100
    shares = np.array([(cosines > a).sum() / (n * (n - 1)) for a in margins])
    largest = margins[shares > 0].max()
    at = np.argmin(np.abs(margins - 0.9 * largest))
    a, p = margins[at], shares[at]
    w = -np.log(1 - a * a)
    return float(lambertw(w / (2 * np.pi * p * p * a * a * (1 - a * a))).real / w)
