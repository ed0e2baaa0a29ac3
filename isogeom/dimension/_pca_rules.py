"""Rules that turn the eigenvalues of a covariance into a dimension, for one spectrum or many at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import integrate, optimize

from isogeom import _xp
from isogeom._xp import Array

# Cumulative shares this close to a threshold have reached it.
_ROUNDING = 1e-12
# Fan's rule: share that ends the signal, ratio that is a gap, share that is enough.
_FAN_TAIL, _FAN_GAP, _FAN_ENOUGH = 0.95, 10.0, 0.8

# Rule -> default threshold, None for rules without one.
RULES: dict[str, float | None] = {
    "share": 0.95,
    "participation": None,
    "kaiser": None,
    "broken_stick": None,
    "fukunaga_olsen": 0.05,
    "max_gap": None,
    "fan": None,
    "gavish_donoho": None,
    "marchenko_pastur": None,
    "parallel": 0.95,
}


@dataclass(frozen=True)
class Spectra:
    """Eigenvalues of covariances of the same shape.

    Attributes
    ----------
    values : array of shape (..., m)
        The min(n_features, rank) eigenvalues that can differ from 0, descending, at least 0.
    n_features : int
        Number of eigenvalues, zeros included.
    freedom : float
        Number of independent rows: one less than that of rows if they are centred.
    """

    values: Array
    n_features: int
    freedom: float

    @property
    def total(self) -> Array:
        """Return the sums, with the last axis kept."""
        return _xp.array_namespace(self.values).sum(self.values, axis=-1, keepdims=True)


def apply_rule(rule: str, found: Spectra, threshold: float | None, noise_variance: float | None = None) -> Array:
    """Return the dimension of each spectrum, NaN where all eigenvalues are 0.

    Parameters
    ----------
    rule : str
        Name of a rule, 'parallel' excepted: it needs null eigenvalues, see :func:`leading`.
    found : Spectra
        The eigenvalues.
    threshold : float or None
        Of the rules that have one.
    noise_variance : float or None
        Known variance of the noise in the unit of the eigenvalues, for the random-matrix rules.
    """
    xp = _xp.array_namespace(found.values)
    if rule in ("gavish_donoho", "marchenko_pastur"):
        result = _above_noise(rule, found, noise_variance)
    else:
        result = _FORMULAS[rule](xp, found, threshold)
    total = found.total[..., 0]
    return xp.where(total > 0, xp.astype(result, found.values.dtype), xp.full_like(total, xp.nan))


def leading(xp: Any, passed: Array) -> Array:
    """Return how many entries are True before the first False."""
    return xp.sum(xp.cumulative_prod(xp.astype(passed, xp.int64), axis=-1), axis=-1)


def _count(xp: Any, passed: Array) -> Array:
    return xp.sum(xp.astype(passed, xp.int64), axis=-1)


def _share(xp: Any, found: Spectra, threshold: Any) -> Array:
    below = xp.cumulative_sum(found.values, axis=-1) < (threshold - _ROUNDING) * found.total
    return 1 + _count(xp, below[..., :-1])


def _participation(xp: Any, found: Spectra, threshold: Any) -> Array:  # noqa: ARG001
    top = found.values[..., :1]
    scaled = found.values / xp.where(top > 0, top, xp.ones_like(top))
    squares = xp.sum(scaled * scaled, axis=-1)
    return xp.sum(scaled, axis=-1) ** 2 / xp.where(squares > 0, squares, xp.ones_like(squares))


def _kaiser(xp: Any, found: Spectra, threshold: Any) -> Array:  # noqa: ARG001
    return _count(xp, found.values > found.total / found.n_features * (1 + _ROUNDING))


def _broken_stick(xp: Any, found: Spectra, threshold: Any) -> Array:  # noqa: ARG001
    p, m = found.n_features, int(found.values.shape[-1])
    expected = np.cumsum(1 / np.arange(p, 0, -1.0))[::-1][:m] / p
    return leading(xp, found.values > _xp.asarray_like(expected, found.values) * found.total)


def _fukunaga_olsen(xp: Any, found: Spectra, threshold: Any) -> Array:
    return _count(xp, found.values > threshold * found.values[..., :1])


def _padded(xp: Any, found: Spectra) -> Array:
    """Return the eigenvalues that differ from 0, and one 0 behind them if there are more; zeros lifted to rounding."""
    values = found.values
    if values.shape[-1] < found.n_features:
        values = xp.concat((values, xp.zeros_like(values[..., :1])), axis=-1)
    # A power of the rounding: every gap to a zero eigenvalue is wider than any between others.
    floor = values[..., :1] * float(np.finfo(np.float64).eps) ** 2
    return xp.where(values > floor, values, floor)


def _ratios(xp: Any, values: Array) -> Array:
    following = values[..., 1:]
    return values[..., :-1] / xp.where(following > 0, following, xp.ones_like(following))


def _max_gap(xp: Any, found: Spectra, threshold: Any) -> Array:  # noqa: ARG001
    values = _padded(xp, found)
    if values.shape[-1] < 2:
        return xp.ones(values.shape[:-1], dtype=xp.int64, device=_xp.device(values))
    return 1 + xp.argmax(_ratios(xp, values), axis=-1)


def _fan(xp: Any, found: Spectra, threshold: Any) -> Array:  # noqa: ARG001
    values, total, m = found.values, found.total, int(found.values.shape[-1])
    reached = _share(xp, found, _FAN_TAIL)
    place = xp.arange(m, device=_xp.device(values))
    # The tail starts at the eigenvalue that reaches the share.
    tail = place >= xp.expand_dims(reached - 1, axis=-1)
    in_tail = xp.astype(found.n_features - reached + 1, values.dtype)
    noise = xp.sum(xp.where(tail, values, xp.zeros_like(values)), axis=-1) / in_tail
    signal = values - xp.expand_dims(noise, axis=-1)
    rest = total[..., 0] - found.n_features * noise
    enough = xp.cumulative_sum(signal, axis=-1) > _FAN_ENOUGH * xp.expand_dims(rest, axis=-1)
    wide = signal[..., :-1] > _FAN_GAP * signal[..., 1:]
    # Behind the signal, differences have either sign: a ratio of them is no gap.
    wide = wide & (signal[..., 1:] > 0)
    stop = enough | xp.concat((wide, xp.ones_like(enough[..., :1])), axis=-1)
    return 1 + xp.argmax(xp.astype(stop, xp.int64), axis=-1)


_FORMULAS: dict[str, Callable[[Any, Spectra, Any], Array]] = {
    "share": _share,
    "participation": _participation,
    "kaiser": _kaiser,
    "broken_stick": _broken_stick,
    "fukunaga_olsen": _fukunaga_olsen,
    "max_gap": _max_gap,
    "fan": _fan,
}


def _above_noise(rule: str, found: Spectra, noise_variance: float | None) -> Array:
    """Count the eigenvalues beyond what noise alone, or noise after optimal shrinkage, explains."""
    xp = _xp.array_namespace(found.values)
    p, n = found.n_features, found.freedom
    large, aspect = max(p, n), min(p, n) / max(p, n)
    # In this unit the eigenvalues of pure noise of variance 1 follow the Marchenko-Pastur law of ratio `aspect`.
    values = found.values * (n / large)
    values = values[..., : max(1, int(min(p, n)))]
    if noise_variance is None:
        m = int(values.shape[-1])
        middle = (values[..., (m - 1) // 2] + values[..., m // 2]) / 2
        noise = xp.expand_dims(middle, axis=-1) / marchenko_pastur_median(aspect)
    else:
        noise = xp.full_like(values[..., :1], float(noise_variance))
    if rule == "marchenko_pastur":
        edge = (1 + np.sqrt(aspect)) ** 2
    else:
        edge = 2 * (aspect + 1) + 8 * aspect / (aspect + 1 + np.sqrt(aspect**2 + 14 * aspect + 1))
    return _count(xp, values > noise * float(edge))


@lru_cache(maxsize=64)
def marchenko_pastur_median(aspect: float) -> float:
    """Return the median of the Marchenko-Pastur law of variance 1 and ratio `aspect`, 0 < aspect <= 1."""
    low, high = (1 - np.sqrt(aspect)) ** 2, (1 + np.sqrt(aspect)) ** 2
    centre, radius = (low + high) / 2, (high - low) / 2

    # x = centre - radius cos(t) takes the square roots out of the ends.
    def density(t: float) -> float:
        x = centre - radius * np.cos(t)
        return float((radius * np.sin(t)) ** 2 / (2 * np.pi * aspect * x)) if x > 0 else radius / (np.pi * aspect)

    def excess(t: float) -> float:
        return float(integrate.quad(density, 0, t)[0]) - 0.5

    return float(centre - radius * np.cos(optimize.brentq(excess, 0, np.pi, xtol=1e-12)))


def null_quantile(
    variances: np.ndarray, freedom: int, quantile: float, n_resamples: int, rng: np.random.Generator
) -> np.ndarray:
    """Return a quantile of each eigenvalue of the covariance of independent normal features, descending.

    Scatters are drawn by Bartlett's decomposition if there are fewer features than rows, else from rows.
    """
    p, m = len(variances), min(len(variances), freedom)
    scale = np.sqrt(variances)
    draws = np.empty((n_resamples, m))
    for r in range(n_resamples):
        if p <= freedom:
            root = np.tril(rng.standard_normal((p, p)), -1)
            root[np.diag_indices(p)] = np.sqrt(rng.chisquare(freedom - np.arange(p)))
            root *= scale[:, np.newaxis]
            scatter = root @ root.T
        else:
            rows = rng.standard_normal((freedom, p)) * scale
            scatter = rows @ rows.T
        draws[r] = np.linalg.eigvalsh(scatter)[::-1] / freedom
    return np.quantile(draws, quantile, axis=0)
