"""Maximum likelihood with noisy distances: Haro, Randall and Sapiro (2008), by Gauss-Legendre quadrature."""

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(400)


def noisy_dimension(distances, k, sigma):
    """The harmonic mean over rows, each log ratio replaced by its mean over a Gaussian around the nearer distance.

    ``ln(R_k / R_j)`` becomes ``int q(x) ln(R_k / x) dx / int q(x) dx`` over x > 0, q Gaussian of deviation `sigma`
    around R_j. With ``x = c t^2`` the logarithm at 0 is no trouble to the quadrature.
    """
    t = (_NODES + 1) / 2
    total = 0.0
    for row in distances[:, :k]:
        for near in row[:-1]:
            low = max(near - 12 * sigma, 0.0)
            x = low + (near + 12 * sigma - low) * t**2
            q = np.exp(-((x - near) ** 2) / (2 * sigma**2)) * _WEIGHTS * t
            total += (q @ np.log(row[-1] / x)) / q.sum()
    return len(distances) * (k - 1) / total
