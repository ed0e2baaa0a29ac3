"""Ways to the principal directions of rows: their covariance, a thin SVD, or a randomized range finder."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
import sys
from typing import Any

import numpy as np

from isogeom import _random, _xp
from isogeom._linalg import eigh_descending, eigh_top, fix_signs
from isogeom._moments import Moments, largest_gap, scale_error
from isogeom._products import SMALL_SQUARE
from isogeom._validation import check_integer
from isogeom._xp import Array

SOLVERS = ("auto", "covariance", "full", "randomized")
# Widest rows whose covariance is formed without being asked for: 128 MiB in float64.
MAX_COVARIANCE_FEATURES = 4096
# Below this width the covariance costs little whatever the number of rows, and it keeps the fit mergeable.
MIN_FULL_FEATURES = 1024


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """Variances of principal directions, in the accumulator's dtype.

    Attributes
    ----------
    mean : array of shape (n_features,)
        Mean of the rows.
    variances : array of shape (n_known,)
        Variances in descending order, none negative.
    rows : array of shape (n_rows, n_features)
        The first directions, at most n_known of them.
    total : float
        Variance of the rows, over all directions.
    count : float
        Number of rows, or sum of their weights.
    complete : bool
        Whether the variances that are not known are zero.
    """

    mean: Array
    variances: Array
    rows: Array
    total: float
    count: float
    complete: bool

    def tail_energies(self) -> Array:
        """Frobenius errors of the best rank-k approximations of the centred rows, for k = 0, 1, ..."""
        xp = _xp.array_namespace(self.variances)
        dev, dtype = _xp.device(self.variances), self.variances.dtype
        if not self.complete:
            caught = xp.cumulative_sum(self.variances, include_initial=True)
            return xp.sqrt(xp.clip(self.total - caught, 0, None)) * math.sqrt(self.count - 1)
        # Summed from the small end: a small tail would vanish in a difference of large sums.
        tails = xp.flip(xp.cumulative_sum(xp.flip(self.variances, axis=0), include_initial=True), axis=0)
        missing = int(self.mean.shape[0]) - int(self.variances.shape[0])
        tails = xp.concat([tails, xp.zeros(missing, dtype=dtype, device=dev)])
        # One root each: the product may leave the range of the dtype where its root does not.
        return xp.sqrt(tails) * math.sqrt(self.count - 1)

    def rank(self, dtype: Any) -> int:
        """Number of variances that stand above the rounding of products of rows in `dtype`."""
        xp = _xp.array_namespace(self.variances)
        rounding = max(float(xp.finfo(dtype).eps), int(self.mean.shape[0]) * float(xp.finfo(self.variances.dtype).eps))
        return int(xp.count_nonzero(self.variances > rounding * self.variances[0]))

    def rest(self, k: int) -> float:
        """Mean variance of the directions after the first `k`."""
        d = int(self.mean.shape[0])
        xp = _xp.array_namespace(self.variances)
        if k >= d:
            return 0.0
        if self.complete:
            return float(xp.sum(self.variances[k:])) / (d - k)
        return max(self.total - float(xp.sum(self.variances[:k])), 0.0) / (d - k)


def choose_solver(svd_solver: str, n_components: Any, n_samples: int, n_features: int) -> str:
    """Turn "auto" into the name of a solver."""
    if svd_solver != "auto":
        return svd_solver
    few = 4 * n_samples <= n_features and n_features >= MIN_FULL_FEATURES
    if few and n_samples <= MAX_COVARIANCE_FEATURES:
        return "full"
    if n_features <= MAX_COVARIANCE_FEATURES:
        return "covariance"
    number = isinstance(n_components, numbers.Integral)
    # A random sketch of half of the directions saves nothing, and a share of variance needs all of them.
    return "randomized" if number and 4 * n_components <= min(n_samples, n_features) else "covariance"


def covariance_spectrum(moments: Moments, n_components: Any) -> Spectrum:
    """Diagonalise the covariance; only a number of components says how many directions are needed."""
    covariance = moments.covariance()
    xp = _xp.array_namespace(covariance)
    if isinstance(n_components, numbers.Integral):
        variances, rows = eigh_top(covariance, min(int(n_components), int(covariance.shape[0])))
    else:
        variances, rows = eigh_descending(covariance)
    # A covariance has no negative eigenvalue: what is below zero is rounding.
    variances = xp.clip(variances, 0, None)
    return Spectrum(moments.mean, variances, rows, float(xp.sum(variances)), moments.count, complete=True)


def full_spectrum(X: Array, weights: Array | None) -> Spectrum:
    """Thin SVD of the centred rows, in the accumulator's dtype."""
    xp = _xp.array_namespace(X)
    mean, count = _mean(X, weights)
    Y = xp.astype(X, mean.dtype) - mean
    if weights is not None:
        Y = Y * xp.expand_dims(xp.sqrt(weights), axis=1)
    _, singular, rows = xp.linalg.svd(Y, full_matrices=False)
    with np.errstate(over="ignore", under="ignore"):
        variances = (singular / math.sqrt(count - 1)) ** 2
        total = float(xp.sum(variances))
    _check_scale(X, total, mean)
    return Spectrum(mean, variances, fix_signs(rows), total, count, complete=True)


def randomized_spectrum(
    X: Array, weights: Array | None, k: int, *, n_oversamples: int, n_iter: int, rng: np.random.Generator, step: Any
) -> Spectrum:
    """Subspace iteration on the covariance operator, which is applied block by block and never formed.

    `step` gets the share of the variance outside the basis after every pass over the rows, and tells whether to stop.
    """
    xp = _xp.array_namespace(X)
    n, d = X.shape
    mean, count = _mean(X, weights)
    width = min(k + n_oversamples, n, d)
    basis = xp.linalg.qr(_random.standard_normal(rng, (d, width), mean), mode="reduced")[0]
    dtype = _xp.as_real_floating(X[:1, :], "X").dtype
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        image, energy = _apply_covariance(X, weights, mean, basis, dtype)
        if dtype != mean.dtype and not SMALL_SQUARE * n * d <= energy < float("inf"):
            # Squares of float32 have left its range.
            dtype = mean.dtype
            image, energy = _apply_covariance(X, weights, mean, basis, dtype)
    _check_scale(X, energy / (count - 1), mean)
    n_left = n_iter
    while not step({"objective": _share_outside(basis, image, energy)}) and n_left > 0:
        basis = xp.linalg.qr(image, mode="reduced")[0]
        image, energy = _apply_covariance(X, weights, mean, basis, dtype)
        n_left -= 1
    # Rayleigh-Ritz: the best directions inside the span of the basis.
    inner = xp.matmul(xp.matrix_transpose(basis), image)
    energies, turn = eigh_descending((inner + xp.matrix_transpose(inner)) / 2)
    variances = xp.clip(energies[:k], 0, None) / (count - 1)
    rows = fix_signs(xp.matmul(turn[:k, :], xp.matrix_transpose(basis)))
    return Spectrum(mean, variances, rows, energy / (count - 1), count, complete=False)


def _share_outside(basis: Array, image: Array, energy: float) -> float:
    """Return the share of the variance that is not in the span of the orthonormal columns of `basis`."""
    caught = float(_xp.array_namespace(basis, image).sum(basis * image))
    return max(1 - caught / energy, 0.0) if energy > 0 else 0.0


def _check_scale(X: Array, variance: float, mean: Array) -> None:
    """Raise if the variance of all features together is no number with all its digits although rows differ."""
    if float(_xp.array_namespace(mean).finfo(mean.dtype).smallest_normal) <= variance < math.inf:
        return
    with np.errstate(over="ignore"):
        gap = largest_gap(X)
    if gap > 0:
        raise scale_error(min(gap, sys.float_info.max))


def power_iterations(iterated_power: Any, k: int, shape: tuple[int, int]) -> int:
    """Turn the parameter into a number of power iterations (scikit-learn's rule for "auto")."""
    if isinstance(iterated_power, str) and iterated_power == "auto":
        return 7 if k < 0.1 * min(shape) else 4
    return check_integer(iterated_power, "iterated_power", low=0, hint='Or pass "auto".')


def check_count(count: float) -> None:
    """Raise unless weighted rows amount to two."""
    if count == 0:
        raise ValueError("sample_weight is zero for every row: at least two rows must count.")
    if count < 2:
        raise ValueError(
            f"sample_weight adds up to {count:g}, but weights are frequencies and must add up to at least 2: scale "
            "them, for example so that they add up to the number of rows."
        )


def _mean(X: Array, weights: Array | None) -> tuple[Array, float]:
    """Mean in the accumulator's dtype and number of rows, or their weighted forms."""
    xp = _xp.array_namespace(X)
    acc = _xp.accumulator_dtype(xp, _xp.device(X))
    total: Any = 0.0
    count = float(X.shape[0] if weights is None else xp.sum(weights))
    with np.errstate(over="ignore"):
        if weights is None:
            for block in _xp.row_blocks(X):
                total = total + xp.sum(_xp.as_real_floating(block, "X"), axis=0, dtype=acc)
        else:
            for block, w in zip(_xp.row_blocks(X), _xp.row_blocks(weights)):
                total = total + xp.matmul(w, xp.astype(block, acc))
    mean = total / count
    if not bool(xp.all(xp.isfinite(mean))):
        # A sum that overflows: large rows that are equal, or rows that differ by too much to be squared.
        _check_scale(X, math.inf, mean)
        mean = xp.astype(X[0, :], acc)
    return mean, int(count) if count.is_integer() else count


def _apply_covariance(X: Array, weights: Array | None, mean: Array, basis: Array, dtype: Any) -> tuple[Array, float]:
    """Return the scatter matrix times `basis`, and the trace of the scatter matrix, in one pass over the rows.

    Products run in `dtype`. The mean is taken off before them: no digits are lost to it.
    """
    xp = _xp.array_namespace(X)
    shift, columns = xp.astype(mean, dtype), xp.astype(basis, dtype)
    image: Any = 0.0
    energy = 0.0
    parts = itertools.repeat(None) if weights is None else _xp.row_blocks(weights)
    for block, w in zip(_xp.row_blocks(X), parts):
        Y = xp.astype(block, dtype) - shift
        if w is not None:
            Y = Y * xp.expand_dims(xp.astype(xp.sqrt(w), dtype), axis=1)
        energy += float(xp.sum(xp.sum(Y * Y, axis=0), dtype=mean.dtype))
        image = image + xp.astype(xp.matmul(xp.matrix_transpose(Y), xp.matmul(Y, columns)), mean.dtype)
    return image, energy


def resolve_n_components(n_components: Any, spectrum: Spectrum, dtype: Any) -> int:
    """Turn the parameter, which has been checked, into a number of components for rows of that dtype."""
    largest = min(int(spectrum.count), int(spectrum.mean.shape[0]))
    if n_components is None:
        return max(spectrum.rank(dtype), 1)
    if not isinstance(n_components, numbers.Integral):
        if spectrum.total == 0:
            return 1
        shares = np.cumsum(_xp.to_numpy(spectrum.variances[:largest])) / spectrum.total
        # The last share may miss 1 by rounding: then every component is needed.
        return min(int(np.searchsorted(shares, n_components, side="left")) + 1, largest)
    return min(int(n_components), largest)


def check_n_components(n_components: Any, n_samples: int, n_features: int, *, strict: bool) -> None:
    """Raise unless the parameter is None, a share of variance, or a number that so many rows allow."""
    if n_components is None:
        return
    if isinstance(n_components, (float, np.floating)):
        if not 0 < n_components < 1:
            raise ValueError(
                f"n_components={n_components!r} must lie strictly between 0 and 1 when it is a float (share of "
                "variance to reach); pass an int for a number of components."
            )
        return
    k, largest = check_integer(n_components, "n_components", low=1), min(n_samples, n_features)
    if strict and k > largest:
        raise ValueError(
            f"n_components={k} must be at most min(n_samples, n_features)={largest} "
            f"(n_samples={n_samples}, n_features={n_features})."
        )
