"""Maximum likelihood for the ratio of the distances to the first and to the (k + 1)-th neighbour."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from scipy import integrate

from isogeom import _xp
from isogeom._xp import Array

# Newton's method from below on a convex decreasing function: no step overshoots, and these are far more than it takes.
_STEPS = 60


def first_to_last(distances: Array) -> Array:
    """Return ``ln(r_last / r_1)`` of every row; NaN if a distance is 0 or the two are equal."""
    xp = _xp.array_namespace(distances)
    low, high = distances[:, 0], distances[:, -1]
    good = (low > 0) & (high > low)
    ones = xp.ones_like(low)
    logs = xp.log(xp.where(good, high, ones) / xp.where(good, low, ones))
    return xp.where(good, logs, xp.full_like(logs, xp.nan))


def likeliest(logs: Array, k: int) -> Array:
    """Return the dimension of largest likelihood for each row of log ratios.

    Parameters
    ----------
    logs : array of shape (m, n)
        ``x = ln(r_{k+1} / r_1)`` of n neighbourhoods, positive; NaN marks those that are missing.
    k : int
        Number of neighbours nearer than the far one.

    Returns
    -------
    array of shape (m,)
        Root of the score; NaN for a row without log ratios.

    Notes
    -----
    The log-likelihood is ``n ln(k d) - (d - 1) sum x + (k - 1) sum ln(1 - e^{-d x})``, strictly concave in d. Its
    root lies between ``n / sum x`` and k times that.
    """
    xp = _xp.array_namespace(logs)
    known = xp.isfinite(logs)
    one = xp.ones_like(logs)
    x = xp.where(known, logs, one)
    weight = xp.astype(known, logs.dtype)
    count, total = xp.sum(weight, axis=1), xp.sum(weight * x, axis=1)
    empty = xp.full_like(total, xp.nan)
    low = xp.where(count > 0, count / xp.where(count > 0, total, xp.ones_like(total)), empty)
    d = low
    for _ in range(_STEPS):
        _, first, second = _derivatives(x, xp.expand_dims(d, axis=1), weight, k)
        step = first / second
        moved = xp.maximum(d - step, low)
        if not bool(xp.any(xp.abs(moved - d) > 1e-14 * xp.abs(d))):
            return moved
        d = moved
    return d


def log_likelihood(logs: Array, dimension: float, k: int) -> Array:
    """Return the logarithm of the density of each ratio ``r_1 / r_{k+1}`` at `dimension`, in the shape of `logs`."""
    xp = _xp.array_namespace(logs)
    return float(np.log(k * dimension)) - (dimension - 1) * logs + (k - 1) * xp.log(-xp.expm1(-dimension * logs))


def scores_and_information(logs: np.ndarray, dimension: float, k: int) -> tuple[np.ndarray, float]:
    """Return the derivative of the log-likelihood of each ratio at `dimension`, and minus the second one in total."""
    weight = np.ones((1, len(logs)))
    each, _, second = _derivatives(logs[np.newaxis, :], np.asarray([[dimension]]), weight, k)
    return each[0], -float(second[0])


def _derivatives(x: Array, d: Array, weight: Array, k: int) -> tuple[Array, Array, Array]:
    """Return the first derivative of the log-likelihood, each and in sum, and the second in sum."""
    xp = _xp.array_namespace(x)
    y = d * x
    # e^{-y} / (1 - e^{-y}) = 1 / (e^y - 1), which does not overflow.
    gone = -xp.expm1(-y)
    odds = xp.exp(-y) / gone
    each = 1 / d - x + (k - 1) * x * odds
    curvature = 1 / (d * d) + (k - 1) * x * x * odds / gone
    return each, xp.sum(weight * each, axis=1), -xp.sum(weight * curvature, axis=1)


@cache
def relative_bias(k: int) -> float:
    """Return b such that the likeliest dimension of n ratios is too large by b / n of itself, to first order.

    Cox and Snell's formula ``(E[l' l''] + E[l'''] / 2) / E[l'']^2`` at dimension 1, which is enough for a family of
    scales; exactly 1 at k = 1.
    """
    if k == 1:
        return 1.0

    def derivatives(y: float) -> tuple[float, float, float]:
        gone = -np.expm1(-y)
        odds = np.exp(-y) / gone
        first = 1 - y + (k - 1) * y * odds
        second = -1 - (k - 1) * y**2 * odds / gone
        third = 2 + (k - 1) * y**3 * odds * (1 + 2 * odds) / gone
        return first, second, third

    def information(y: float) -> float:
        return -derivatives(y)[1]

    def product(y: float) -> float:
        first, second, third = derivatives(y)
        return first * second + third / 2

    return _expectation(product, k) / _expectation(information, k) ** 2


def _expectation(function: Callable[[float], float], k: int) -> float:
    """Return the mean of a function of y = ln(r_{k+1} / r_1) in dimension 1, whose law is close to a Gumbel's."""

    def weighted(y: float) -> float:
        return function(y) * k * float(np.exp(-y)) * float(-np.expm1(-y)) ** (k - 1)

    middle = np.log(k)
    head = integrate.quad(weighted, 0, middle, epsabs=1e-12, epsrel=1e-10)[0]
    return float(head + integrate.quad(weighted, middle, np.inf, epsabs=1e-12, epsrel=1e-10)[0])
