"""Ways to the principal directions of rows: their covariance, a thin SVD, or a randomized range finder."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from isogeom import _random, _xp
from isogeom._linalg import eigh_descending, eigh_top, fix_signs
from isogeom._moments import Moments, largest_gap, scale_error
from isogeom._products import SMALL_SQUARE
from isogeom._validation import check_integer
from isogeom._xp import Array
from isogeom.decomposition._directions import ritz

SOLVERS = ("auto", "covariance", "full", "randomized")
# Widest rows whose covariance is formed without being asked for: 128 MiB in float64.
MAX_COVARIANCE_FEATURES = 4096
# Below this width the covariance costs little whatever the number of rows, and it keeps the fit mergeable.
MIN_FULL_FEATURES = 1024
# Share of the variance below which that of the directions not found is measured on the rows: a difference of sums would
# lose it. The same for sums of float32 products, and the share below which the rest drowns in their rounding.
_SMALL_TAIL, _SMALL_TAIL_SINGLE, _LOST_TAIL_SINGLE = 1e-6, 1e-1, 1e-4


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
    beyond : float
        Variance over the directions whose variances are not known.
    """

    mean: Array
    variances: Array
    rows: Array
    total: float
    count: float
    complete: bool
    beyond: float = 0.0

    def tail_energies(self) -> Array:
        """Frobenius errors of the best rank-k approximations of the centred rows, for k = 0, 1, ..."""
        xp = _xp.array_namespace(self.variances)
        dev, dtype = _xp.device(self.variances), self.variances.dtype
        # Summed from the small end: a small tail would vanish in a difference of large sums.
        tails = self.beyond + xp.flip(xp.cumulative_sum(xp.flip(self.variances, axis=0), include_initial=True), axis=0)
        missing = int(self.mean.shape[0]) - int(self.variances.shape[0]) if self.complete else 0
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
        return (float(xp.sum(self.variances[k:])) + self.beyond) / (d - k)


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
    rows = _Centred(X, weights, mean, _xp.as_real_floating(X[:1, :], "X").dtype)
    width = min(k + n_oversamples, n, d)
    basis = xp.linalg.qr(_random.standard_normal(rng, (d, width), mean), mode="reduced")[0]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        image, gram, energy = rows.apply(basis)
        if rows.dtype != mean.dtype and not SMALL_SQUARE * n * d <= energy < float("inf"):
            # Squares of float32 have left its range.
            rows.dtype = mean.dtype
            image, gram, energy = rows.apply(basis)
    _check_scale(X, energy / (count - 1), mean)
    n_left = n_iter
    while not step({"objective": _share_outside(gram, energy)}) and n_left > 0:
        if n_left <= 2 and _share_outside(gram, energy) < _LOST_TAIL_SINGLE:
            # The rounding of what the basis holds turns its weak directions: the last basis comes from an exact image.
            rows.dtype = mean.dtype
        basis = xp.linalg.qr(image, mode="reduced")[0]
        image, gram, energy = rows.apply(basis)
        n_left -= 1
    # Rayleigh-Ritz: the best directions inside the span of the basis, as it was rounded for the products.
    used = xp.astype(xp.astype(basis, rows.dtype), mean.dtype)
    energies, turn = ritz(xp, gram, used)
    energies = xp.clip(energies[:k], 0, None)
    axes = fix_signs(xp.matmul(turn[:k, :], xp.matrix_transpose(used)))
    caught = float(xp.sum(energies))
    beyond = max(energy - caught, 0.0)
    if beyond < (_SMALL_TAIL if rows.dtype == mean.dtype else _SMALL_TAIL_SINGLE) * energy:
        if beyond < _LOST_TAIL_SINGLE * energy:
            rows.dtype = mean.dtype
        beyond = rows.left_over(axes)
    scale = count - 1
    return Spectrum(
        mean, energies / scale, axes, (caught + beyond) / scale, count, complete=False, beyond=beyond / scale
    )


def _share_outside(gram: Array, energy: float) -> float:
    """Return the share of the variance outside an orthonormal basis, from the Gram matrix of the scores on it."""
    caught = float(_xp.array_namespace(gram).linalg.trace(gram))
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


class _Centred:
    """Rows less their mean, times the roots of their weights, block by block; products run in `dtype`.

    The mean is taken off before the products: no digits are lost to it.
    """

    def __init__(self, X: Array, weights: Array | None, mean: Array, dtype: Any) -> None:
        self.xp = _xp.array_namespace(X)
        self.X, self.weights, self.mean, self.dtype = X, weights, mean, dtype

    def __iter__(self) -> Iterator[Array]:
        xp = self.xp
        shift = xp.astype(self.mean, self.dtype)
        parts = itertools.repeat(None) if self.weights is None else _xp.row_blocks(self.weights)
        for block, w in zip(_xp.row_blocks(self.X), parts):
            Y = xp.astype(block, self.dtype) - shift
            yield Y if w is None else Y * xp.expand_dims(xp.astype(xp.sqrt(w), self.dtype), axis=1)

    def _energy(self, Y: Array) -> float:
        """Return the squared norm of a block: sums of one row in `dtype`, all others in the accumulator's."""
        return float(self.xp.sum(self.xp.vecdot(Y, Y), dtype=self.mean.dtype))

    def apply(self, basis: Array) -> tuple[Array, Array, float]:
        """Return the scatter matrix times `basis`, the Gram matrix of the scores on it, and the squared norm."""
        xp, acc = self.xp, self.mean.dtype
        columns = xp.astype(basis, self.dtype)
        image: Any = 0.0
        gram: Any = 0.0
        energy = 0.0
        for Y in self:
            energy += self._energy(Y)
            scores = xp.matmul(Y, columns)
            image = image + xp.astype(xp.matmul(xp.matrix_transpose(Y), scores), acc)
            # Sums of squares of one sign lose a digit in float32.
            scores = xp.astype(scores, acc)
            gram = gram + xp.matmul(xp.matrix_transpose(scores), scores)
        return image, gram, energy

    def left_over(self, axes: Array) -> float:
        """Return the squared norm of what orthonormal axes leave of the rows."""
        xp = self.xp
        axes = xp.astype(axes, self.dtype)
        columns, energy = xp.matrix_transpose(axes), 0.0
        for Y in self:
            energy += self._energy(Y - xp.matmul(xp.matmul(Y, columns), axes))
        return energy


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
