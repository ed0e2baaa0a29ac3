"""The statistics and divergences of DANCo by arc cosines, root finding and quadrature."""

import math

import numpy as np
from scipy import integrate, optimize, special


def angles(center, neighbors):
    """Angles at `center` between all pairs of neighbours."""
    found = []
    for i in range(len(neighbors)):
        for j in range(i):
            a, b = neighbors[i] - center, neighbors[j] - center
            cosine = a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
            found.append(math.acos(min(1.0, max(-1.0, cosine))))
    return np.array(found)


def von_mises_fit(theta):
    """Maximum-likelihood direction and concentration of a von Mises law."""
    mean = np.mean(np.exp(1j * theta))

    def gap(t):
        return special.ive(1, t) / special.ive(0, t) - abs(mean)

    return float(np.angle(mean)), optimize.brentq(gap, 1e-12, 1e6, xtol=1e-12)


def von_mises_divergence(direction, concentration, other_direction, other_concentration):
    """Divergence of one von Mises law from another, by quadrature."""

    def log_density(x, m, t):
        return t * (math.cos(x - m) - 1) - math.log(2 * math.pi * special.ive(0, t))

    def term(x):
        p = log_density(x, direction, concentration)
        return math.exp(p) * (p - log_density(x, other_direction, other_concentration))

    return integrate.quad(term, direction - math.pi, direction + math.pi, points=[direction], limit=200)[0]


def ratio_divergence(d, other, k):
    """Divergence of the law of r_1 / r_{k+1} in dimension d from that in another, by quadrature."""

    def log_density(r, n):
        return math.log(k * n) + (n - 1) * math.log(r) + (k - 1) * math.log1p(-(r**n))

    def term(r):
        p = log_density(r, d)
        return math.exp(p) * (p - log_density(r, other))

    return integrate.quad(term, 0, 1, limit=400)[0]
