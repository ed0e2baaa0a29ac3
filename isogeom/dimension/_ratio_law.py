"""Laws of log ratios of two neighbour distances of one row, where the density is constant."""

from __future__ import annotations

import numpy as np
from scipy import integrate, special


def mean_log_ratio(near: int, far: int) -> float:
    """Return the mean of ``ln(r_far / r_near)`` in dimension 1: the sum of 1 / j over near <= j < far.

    ``(r_near / r_far)^d`` follows the law Beta(near, far - near), so ``d ln(r_far / r_near)`` is a sum of independent
    exponential variables of rates near..far - 1, whatever the dimension d.
    """
    return float(special.digamma(far) - special.digamma(near))


def inverse_mean(near: int, far: int) -> float:
    """Return c such that the mean of ``c / ln(r_far / r_near)`` is the dimension; needs far - near >= 2.

    With Y the sum of exponential variables above, ``E[1 / Y]`` is the integral of its Laplace transform.
    """
    scale = special.gammaln(far) - special.gammaln(near)

    def laplace(t: float) -> float:
        return float(np.exp(scale - special.gammaln(far + t) + special.gammaln(near + t)))

    # The transform falls from 1 within a few 1 / E[Y]: a break there keeps narrow peaks in sight.
    middle = 1 / mean_log_ratio(near, far)
    head = integrate.quad(laplace, 0, middle, epsabs=0, epsrel=1e-11)[0]
    tail = integrate.quad(laplace, middle, np.inf, epsabs=0, epsrel=1e-11)[0]
    return 1 / (head + tail)


def local_constant(near: int, far: int, unbiased: bool, published: float) -> float:
    """Return the numerator of a dimension from one log ratio; a ratio of next neighbours has no inverse mean."""
    if not unbiased:
        return published
    return inverse_mean(near, far) if far - near >= 2 else mean_log_ratio(near, far)
