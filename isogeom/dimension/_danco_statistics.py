"""What DANCo compares: angles between neighbours as von Mises laws, and the divergences of two data sets."""

from __future__ import annotations

import numpy as np
from scipy import special

from isogeom import _xp
from isogeom._xp import Array
from isogeom.dimension._patches import offset_patches

# Angles that all agree have an infinite concentration, which no mean survives.
_LONGEST = 1 - 1e-4
# Newton steps from a start that is right within a few percent.
_STEPS = 8


def angle_moments(X: Array, queries: Array | np.ndarray, distances: Array, indices: Array) -> Array:
    """Return the mean cosine and the mean sine of the angles at each row between pairs of its neighbours.

    Returns
    -------
    array of shape (m, 2)
        NaN where a neighbour is at distance 0.
    """
    parts = [_moments(offsets, shares) for offsets, shares in offset_patches(X, queries, distances, indices)]
    return _xp.array_namespace(X).concat(parts, axis=0)


def _moments(offsets: Array, shares: Array) -> Array:
    xp = _xp.array_namespace(offsets)
    k = int(shares.shape[1])
    lengths = xp.sqrt(xp.sum(offsets * offsets, axis=2, keepdims=True))
    units = offsets / xp.where(lengths > 0, lengths, xp.ones_like(lengths))
    cosines = xp.matmul(units, xp.matrix_transpose(units))
    others = 1 - xp.eye(k, dtype=cosines.dtype, device=_xp.device(cosines))
    squares = 1 - cosines * cosines
    sines = xp.sqrt(xp.where(squares > 0, squares, xp.zeros_like(squares)))
    sums = xp.stack([xp.sum(cosines * others, axis=(1, 2)), xp.sum(sines * others, axis=(1, 2))], axis=1)
    return xp.where(shares[:, :1] > 0, sums / (k * (k - 1)), xp.full_like(sums, xp.nan))


def row_angles(moments: np.ndarray, formula: str) -> np.ndarray:
    """Return, for each row, the direction of its angles and what :func:`concentration` makes a mean of.

    Parameters
    ----------
    moments : ndarray of shape (m, 2)
        Mean cosine and mean sine.
    formula : {'exact', 'published'}
        'published' takes the direction from the arc tangent of the quotient, which loses its half plane, and keeps the
        concentration of each row, from an approximation in three pieces that is wrong by up to a few percent. 'exact'
        keeps the length of the mean vector: the concentration of a few angles can be infinite, and a mean of lengths
        cannot.

    Returns
    -------
    ndarray of shape (m, 2)
    """
    cosine, sine = moments[:, 0], moments[:, 1]
    length = np.hypot(cosine, sine)
    if formula == "published":
        quotient = sine / np.where(cosine == 0, np.finfo(float).tiny, cosine)
        return np.column_stack([np.arctan(quotient), _three_pieces(np.minimum(length, _LONGEST))])
    return np.column_stack([np.arctan2(sine, cosine), length])


def concentration(mean: np.ndarray, formula: str) -> np.ndarray:
    """Return the concentration of the von Mises law of angles, from the mean of the second column of their rows."""
    if formula == "published":
        return mean
    length = np.minimum(mean, _LONGEST)
    return _bessel_root(length, _three_pieces(length))


def _three_pieces(length: np.ndarray) -> np.ndarray:
    low = 2 * length + length**3 + 5 * length**5 / 6
    middle = -0.4 + 1.39 * length + 0.43 / (1 - length)
    high = 1 / np.maximum(length**3 - 4 * length**2 + 3 * length, 1e-300)
    return np.where(length < 0.53, low, np.where(length < 0.85, middle, high))


def _bessel_root(length: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return the root t of ``I1(t) / I0(t) = length``."""
    t = start
    for _ in range(_STEPS):
        quotient = special.i1e(t) / special.i0e(t)
        slope = 1 - quotient**2 - np.where(t > 0, quotient / np.where(t > 0, t, 1), 0.5)
        t = np.maximum(t - (quotient - length) / slope, 0.0)
    return t


def angle_divergence(
    direction: np.ndarray, first: np.ndarray, other_direction: np.ndarray, second: np.ndarray
) -> np.ndarray:
    """Return the Kullback-Leibler divergence of one von Mises law from another, in nats.

    `first` and `second` are their concentrations. Bessel functions are scaled by their exponential growth, so that
    none overflows.
    """
    log_quotient = np.log(special.i0e(second) / special.i0e(first)) + second - first
    quotient = special.i1e(first) / special.i0e(first)
    return log_quotient + quotient * (first - second * np.cos(direction - other_direction))


def ratio_divergence(quotient: np.ndarray, k: int) -> np.ndarray:
    """Return the divergence of the law of ``r_1 / r_{k+1}`` in dimension d from that in dimension ``quotient * d``.

    In nats, 0 at quotient 1. With U of the law Beta(1, k) and q the quotient it is
    ``(q - 1) H_k - ln q - (k - 1) (1 / k + E[ln(1 - U^q)])``; the mean is integrated, since its closed form is an
    alternating sum whose terms are as large as 2^k.
    """
    q = np.asarray(quotient, dtype=np.float64)
    # Double exponential quadrature over w = (1 - U)^k, uniform on (0, 1): the logarithms at its ends do no harm.
    t = np.linspace(-3.3, 3.3, 133)
    grown = np.pi * np.sinh(t)
    log_w = -np.logaddexp(0, -grown)
    weights = (t[1] - t[0]) * np.pi * np.cosh(t) * np.exp(2 * log_w - grown)
    gap = np.exp(log_w / k)
    log_u = np.where(gap < 0.5, np.log1p(-np.minimum(gap, 0.5)), np.log(-np.expm1(log_w / k)))
    mean = np.log(-np.expm1(q[..., np.newaxis] * log_u)) @ weights
    harmonic = special.digamma(k + 1) + np.euler_gamma
    return (q - 1) * harmonic - np.log(q) - (k - 1) * (1 / k + mean)
