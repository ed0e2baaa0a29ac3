"""Contrasts of independent component analysis: values, two derivatives, and what a Gaussian source would give."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from isogeom import _xp
from isogeom._xp import Array, Namespace

# Largest mean of |H(w)| over the unit sphere, per root of the dimension, for a random symmetric form of degree four
# with unit variance at each w: the ground state of the spherical 4-spin model (Auffinger, Ben Arous, Cerny 2013).
_SPHERE_CONSTANT = 1.794
# Chance that a Gaussian source is called non-Gaussian after the search over directions.
_LEVEL = 0.01


@dataclass(frozen=True)
class Contrast:
    """An even function G of a source, and its derivatives g and g'."""

    name: str
    value: Callable[[Namespace, Array], Array]
    derivatives: Callable[[Namespace, Array], tuple[Array, Array]]
    # Sum of G over the rows, from the projections, their g, and a vector of ones.
    total: Callable[[Namespace, Array, Array, Array], Array]


def _logcosh_value(xp: Namespace, u: Array) -> Array:
    size = xp.abs(u)
    # cosh overflows at |u| = 89 in float32. log, not log1p: it is vectorised on more processors, and equally exact
    # in absolute terms, which is what counts in a mean.
    return size + (xp.log(1 + xp.exp(-2 * size)) - math.log(2))


def _logcosh(xp: Namespace, u: Array) -> tuple[Array, Array]:
    g = xp.tanh(u)
    return g, 1 - g * g


def _logcosh_total(xp: Namespace, u: Array, g: Array, ones: Array) -> Array:
    # With t = tanh |u|, 1 + t = 2 / (1 + exp(-2 |u|)), so that log cosh u = |u| - log(1 + t): no exponential, and no
    # cancellation. The logarithm of a product of eight such factors, at most 256, stands for eight logarithms.
    factors = 1 + xp.abs(g)
    for _ in range(3):
        rows = factors.shape[0]
        if rows % 2 == 0:
            factors = factors[: rows // 2, :] * factors[rows // 2 :, :]
    return ones @ xp.abs(u) - ones[: factors.shape[0]] @ xp.log(factors)


def _exp_value(xp: Namespace, u: Array) -> Array:
    return -xp.exp(-u * u / 2)


def _exp(xp: Namespace, u: Array) -> tuple[Array, Array]:
    square = u * u
    bell = xp.exp(square / -2)
    return u * bell, (1 - square) * bell


def _exp_total(xp: Namespace, u: Array, g: Array, ones: Array) -> Array:  # noqa: ARG001
    return ones @ _exp_value(xp, u)


def _cube_value(xp: Namespace, u: Array) -> Array:  # noqa: ARG001
    square = u * u
    return square * square / 4


def _cube(xp: Namespace, u: Array) -> tuple[Array, Array]:  # noqa: ARG001
    square = u * u
    return u * square, 3 * square


def _cube_total(xp: Namespace, u: Array, g: Array, ones: Array) -> Array:  # noqa: ARG001
    return ones @ (u * g) / 4


CONTRASTS = {
    "logcosh": Contrast("logcosh", _logcosh_value, _logcosh, _logcosh_total),
    "exp": Contrast("exp", _exp_value, _exp, _exp_total),
    "cube": Contrast("cube", _cube_value, _cube, _cube_total),
}


@functools.cache
def gaussian_reference(name: str) -> tuple[float, float]:
    """Return E[G(v)] of a standard normal v, and the standard deviation of one row's influence on a source's mean.

    A source has unit variance in the sample: of G(v), the part that the sample's own scale explains is taken off. Its
    coefficient is E[v g(v)] / 2, so that the variance left is Var G(v) - E[v g(v)]^2 / 2.
    """
    contrast, xp = CONTRASTS[name], _xp.array_namespace()
    nodes, weights = np.polynomial.hermite_e.hermegauss(150)
    weights = weights / weights.sum()
    values = contrast.value(xp, nodes)
    mean = float(weights @ values)
    scale = float(weights @ (nodes * contrast.derivatives(xp, nodes)[0]))
    return mean, math.sqrt(float(weights @ (values - mean) ** 2) - scale**2 / 2)


def gaussian_threshold(name: str, n: int, k: int) -> float:
    """Return the deviation of a mean contrast that the search over k directions of Gaussian rows rarely exceeds."""
    spread = _SPHERE_CONSTANT * math.sqrt(k - 1) + math.sqrt(2 * math.log(2 / _LEVEL))
    return gaussian_reference(name)[1] * spread / math.sqrt(n)
