"""Slow, obvious references for the tangent tests, straight from the definitions."""

import itertools

import numpy as np


def isoscore_star_by_eigenvalues(covariance, shrinkage, dimension=None):
    """IsoScore* through the published chain on the eigenvalues, scaled-identity target."""
    d = covariance.shape[0] if dimension is None else dimension
    values = np.sort(np.linalg.eigvalsh(covariance))[::-1][:d]
    values = (1 - shrinkage) * values + shrinkage * values.sum() / d
    normed = np.sqrt(d) * values / np.linalg.norm(values)
    defect = np.linalg.norm(normed - 1) / np.sqrt(2 * (d - np.sqrt(d)))
    phi = (d - defect**2 * (d - np.sqrt(d))) ** 2 / d**2
    return (d * phi - 1) / (d - 1)


def delta_isotropy(G, Q, shrinkage):
    """Percent change of IsoScore* when the rows of Q are projected out of the gradients themselves."""
    before = isoscore_star_by_eigenvalues(np.cov(G.T), shrinkage)
    after = isoscore_star_by_eigenvalues(np.cov((G - G @ Q.T @ Q).T), shrinkage)
    return 100 * (after - before) / before


def energy_share(G, Q):
    """Energy share row by row."""
    inside = sum(float(np.sum((Q @ g) ** 2)) for g in G)
    return inside / sum(float(np.sum(g**2)) for g in G)


def random_normal_share(G, Q_T, rng):
    """Share of one Haar-random subspace of the normal space, by projecting Gaussian vectors and QR."""
    r, d = Q_T.shape
    frame = rng.standard_normal((d, r))
    frame = frame - Q_T.T @ (Q_T @ frame)
    q, _ = np.linalg.qr(frame)
    return energy_share(G, q.T)


def all_pairings(G, X, Q):
    """Mean over all n! pairings of ||G^T P X Q^T||^2 and of ||G^T P X||^2."""
    inside, everything, count = 0.0, 0.0, 0
    for order in itertools.permutations(range(len(X))):
        weight = G.T @ X[list(order)]
        inside += np.sum((weight @ Q.T) ** 2)
        everything += np.sum(weight**2)
        count += 1
    return inside / count, everything / count
