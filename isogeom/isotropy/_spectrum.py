"""What isotropy scores read from their input: a covariance, or its eigenvalues, scaled so that squares are safe."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._moments import Moments
from isogeom._validation import check_rows, warn_user
from isogeom._xp import Array

# Entries per block of a wide matrix: with BLOCK_ROWS it bounds the temporaries of a block to tens of MiB.
_BLOCK_ENTRIES = 2**21

# Rows whose largest value is outside this range are divided by it before they are squared, so that neither it nor a
# spread of one unit in its last place leaves the range of float32 (False) or float64 (True) products.
_SAFE_RANGE = {False: (1e-9, 1e15), True: (1e-100, 1e100)}

# Largest entry of a float32 Gram matrix below which underflow may have cost digits.
_SMALL_PRODUCT = 1e-28

# A feature is constant up to rounding if its standard deviation is below this many units in the last place of its mean.
_ROUNDING_ULPS = 32

_NAMES = ("X", "spectrum", "covariance", "moments")


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """A covariance known up to a factor, by a matrix with its non-zero spectrum or by its eigenvalues.

    Attributes
    ----------
    n_features : int
        Number of eigenvalues, zeros included.
    unit : float
        The covariance is `unit` times what `matrix` or `values` stand for.
    matrix : array of shape (k, k) or None
        Symmetric; k is `n_features`, or the number of rows if those are fewer.
    values : array of shape (n_features,) or None
        Nonnegative eigenvalues, given instead of `matrix`.
    count : float or None
        Number of rows behind a centred `matrix`, where it is known.
    """

    n_features: int
    unit: float
    matrix: Array = None
    values: Array = None
    count: float | None = None

    def trace(self) -> float:
        """Return the sum of the scaled eigenvalues."""
        if self.values is not None:
            return float(_xp.array_namespace(self.values).sum(self.values))
        return float(_xp.array_namespace(self.matrix).linalg.trace(self.matrix))

    def square(self) -> float:
        """Return the sum of the squared scaled eigenvalues, which is the squared Frobenius norm."""
        entries = self.matrix if self.values is None else self.values
        return float(_xp.array_namespace(entries).sum(entries * entries))

    def eigenvalues(self) -> Array:
        """Return the scaled eigenvalues that rounding can tell from zero, in descending order."""
        if self.values is not None:
            xp = _xp.array_namespace(self.values)
            return xp.flip(xp.sort(self.values), axis=0)
        xp = _xp.array_namespace(self.matrix)
        values = xp.flip(xp.linalg.eigvalsh(self.matrix), axis=0)
        floor = values[0] * (values.shape[0] * float(xp.finfo(values.dtype).eps))
        # A matrix made of float32 products is positive semidefinite up to their rounding only.
        if float(values[-1]) < -1e-4 * float(values[0]):
            raise ValueError(
                f"The matrix has the eigenvalue {float(values[-1] / values[0]):.3g} relative to its largest: it is not "
                "positive semidefinite; pass a covariance."
            )
        return xp.where(values > floor, values, xp.zeros_like(values))


def resolve(
    X: Any,
    spectrum: Any,
    covariance: Any,
    moments: Any,
    *,
    owner: str,
    center: bool = True,
    exact: bool = False,
    full: bool = False,
    min_features: int = 1,
) -> Spectrum:
    """Turn whichever of the four inputs was given into a :class:`Spectrum`.

    Parameters
    ----------
    X, spectrum, covariance, moments
        Exactly one is not None.
    owner : str
        Name of the public function, for messages.
    center : bool
        Whether rows and moments are centred.
    exact : bool
        Whether products of rows run in the accumulator's dtype even if the rows are float32.
    full : bool
        Whether a matrix of shape (n_features, n_features) is needed even for few rows.
    min_features : int
        Smallest number of features accepted.
    """
    given = [name for name, value in zip(_NAMES, (X, spectrum, covariance, moments)) if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"{owner} needs exactly one of {', '.join(_NAMES)}; got {' and '.join(given) if given else 'none of them'}."
        )
    if isinstance(X, Moments):
        X, moments = None, X
    if spectrum is not None:
        found = _from_values(spectrum, owner)
    elif covariance is not None:
        found = _scaled(check_symmetric(covariance, "covariance", owner), 1.0, owner)
    elif moments is not None:
        found = _from_moments(moments, owner, center)
    else:
        found = _from_rows(X, owner, center=center, exact=exact, full=full)
    if found.n_features < min_features:
        raise ValueError(f"{owner} needs >= {min_features} features, got {found.n_features}: with one it is 0/0.")
    if found.count == 2:
        warn_user(
            f"{owner} of 2 rows carries no information: their covariance has rank one, so the participation ratio is 1 "
            "whatever the data. Pass more rows.",
            UserWarning,
        )
    return found


def no_variance(owner: str) -> ValueError:
    """Return the error for an input whose spectrum is zero."""
    return ValueError(
        f"{owner} is 0/0 for an input with zero variance (all rows equal up to rounding, or all zero): check "
        "what was fed in."
    )


def _from_values(spectrum: Any, owner: str) -> Spectrum:
    values = spectrum if _xp.is_foreign(spectrum) else np.asarray(spectrum)
    if values.ndim != 1 or values.shape[0] == 0:
        raise ValueError(f"spectrum must be a non-empty vector of eigenvalues, got shape {tuple(values.shape)}.")
    values = _xp.as_real_floating(values, "spectrum")
    xp = _xp.array_namespace(values)
    rounding = values.shape[0] * float(xp.finfo(values.dtype).eps)
    values = xp.astype(values, _xp.accumulator_dtype(xp, _xp.device(values)))
    if not bool(xp.all(xp.isfinite(values))):
        raise ValueError("spectrum contains NaN or infinity.")
    largest, smallest = float(xp.max(values)), float(xp.min(values))
    if smallest < -rounding * max(largest, 0.0):
        raise ValueError(
            f"spectrum holds the negative value {smallest:.6g}; pass eigenvalues of a covariance (squared "
            "singular values)."
        )
    if largest <= 0:
        raise no_variance(owner)
    values = xp.where(values > 0, values, xp.zeros_like(values))
    return Spectrum(n_features=int(values.shape[0]), unit=largest, values=values / largest)


def check_symmetric(matrix: Any, name: str, owner: str) -> Array:
    """Validate a symmetric matrix that may be positive semidefinite, and return it in the accumulator's dtype."""
    matrix = check_rows(matrix, name=name, owner=owner)
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{name} must be square, got shape {tuple(matrix.shape)}; for rows of data pass X.")
    xp = _xp.array_namespace(matrix)
    rounding = 256 * float(xp.finfo(matrix.dtype).eps)
    largest = float(xp.max(xp.abs(matrix)))
    gap = float(xp.max(xp.abs(matrix / 2 - xp.matrix_transpose(matrix) / 2)))
    if gap > rounding * largest:
        raise ValueError(
            f"{name} is not symmetric: entries differ from their transposed by up to {2 * gap:.6g}. If that is "
            f"rounding, pass ({name} + {name}.T) / 2."
        )
    smallest = float(xp.min(xp.linalg.diagonal(matrix)))
    if smallest < -rounding * largest:
        raise ValueError(f"{name} has the negative diagonal entry {smallest:.6g}: it is not positive semidefinite.")
    return xp.astype(matrix, _xp.accumulator_dtype(xp, _xp.device(matrix)))


def _scaled(matrix: Array, unit: float, owner: str, count: float | None = None) -> Spectrum:
    """Divide a (d, d) matrix by its largest entry; `unit` is the factor that it already lacks."""
    xp = _xp.array_namespace(matrix)
    largest = float(xp.max(xp.abs(matrix)))
    if largest == 0:
        raise no_variance(owner)
    found = Spectrum(int(matrix.shape[0]), _finite(largest * unit), matrix=matrix / largest, count=count)
    trace = found.trace()
    # Necessary for eigenvalues >= 0: their sum of squares is at most the square of their sum.
    if trace <= 0 or found.square() > trace * trace * (1 + 1e-6):
        raise ValueError(
            f"The matrix passed to {owner} is not positive semidefinite (its Frobenius norm exceeds its trace); pass a "
            "covariance."
        )
    return found


def _finite(value: float) -> float:
    """Clip an overflowed factor: it only weighs data against a fixed target, which is then negligible anyway."""
    return min(value, float(np.finfo(np.float64).max))


def _from_moments(moments: Any, owner: str, center: bool, factor: float = 1.0) -> Spectrum:
    if not isinstance(moments, Moments):
        raise TypeError(f"moments must be an isogeom.Moments, got {type(moments).__name__}; for rows of data pass X.")
    least = 2 if center else 1
    if moments.count < least:
        raise ValueError(
            f"{owner} needs moments of at least {least} rows, got {moments.count}: add rows with update()."
        )
    if not center:
        return _scaled(moments.gram(), factor * factor / moments.count, owner)
    xp = _xp.array_namespace(moments.scatter)
    if _is_constant(xp.linalg.diagonal(moments.scatter) / moments.count, moments.mean):
        raise no_variance(owner)
    return _scaled(moments.scatter, factor * factor / (moments.count - 1), owner, moments.count)


def _rounding(array: Array) -> float:
    return _ROUNDING_ULPS * float(_xp.array_namespace(array).finfo(array.dtype).eps)


def _is_constant(variance: Array, mean: Array) -> bool:
    xp = _xp.array_namespace(variance)
    spread = xp.sqrt(xp.where(variance > 0, variance, xp.zeros_like(variance)))
    return bool(xp.all(spread <= _rounding(spread) * xp.abs(mean)))


def _from_rows(X: Any, owner: str, *, center: bool, exact: bool, full: bool) -> Spectrum:
    X = check_rows(X, name="X", min_samples=2 if center else 1, owner=owner)
    xp = _xp.array_namespace(X)
    acc = _xp.accumulator_dtype(xp, _xp.device(X))
    exact = exact or X.dtype == acc
    largest = max(float(xp.max(X)), -float(xp.min(X)))
    if largest == 0:
        raise no_variance(owner)
    if X.shape[0] < X.shape[1] and not full:
        return _from_wide(X, owner, center=center, exact=exact, factor=_factor(largest, _SAFE_RANGE[exact]))
    factor = _factor(largest, _SAFE_RANGE[True])
    moments = Moments()
    for block in _xp.row_blocks(X):
        if exact:
            block = xp.astype(block, acc, copy=False)
        moments.update(block if factor == 1.0 else block / factor)
    return _from_moments(moments, owner, center, factor)


def _factor(largest: float, safe: tuple[float, float]) -> float:
    """Return what to divide the rows by, so that squares of their values and of their spread keep all digits."""
    return 1.0 if safe[0] < largest < safe[1] else largest


def _from_wide(X: Array, owner: str, *, center: bool, exact: bool, factor: float) -> Spectrum:
    """Use the Gram matrix of fewer rows than features, which has the non-zero spectrum of their scatter."""
    xp = _xp.array_namespace(X)
    acc = _xp.accumulator_dtype(xp, _xp.device(X))
    n = int(X.shape[0])
    gram: Array = None
    mean_square = 0.0
    for block in _column_blocks(X, factor):
        if center:
            block, mean = _centred(block)
            mean_square += float(xp.sum(mean * mean))
        # Centred in the accumulator's dtype, so that rounding to float32 is relative to the spread and not to the mean.
        rows = xp.astype(block, acc if exact else X.dtype, copy=False)
        product = xp.astype(xp.matmul(rows, xp.matrix_transpose(rows)), acc, copy=False)
        gram = product if gram is None else gram + product
    scale = float(xp.max(xp.abs(gram)))
    if scale < _SMALL_PRODUCT and not exact:
        return _from_wide(X, owner, center=center, exact=True, factor=factor)
    # Only if the total is this small can every single feature be constant: the second pass is rare.
    doubtful = center and float(xp.linalg.trace(gram)) / n <= _rounding(gram) ** 2 * mean_square
    if doubtful and all(_is_constant(*_spread(block)) for block in _column_blocks(X, factor)):
        raise no_variance(owner)
    unit = _finite(factor * (factor * (scale / (n - 1 if center else n))))
    return Spectrum(int(X.shape[1]), unit, matrix=gram / scale, count=n if center else None)


def _column_blocks(X: Array, factor: float) -> Iterator[Array]:
    """Yield blocks of columns of ``X / factor``; they may share memory with `X`."""
    xp = _xp.array_namespace(X)
    size = max(1, _BLOCK_ENTRIES // X.shape[0])
    for start in range(0, X.shape[1], size):
        block = X[:, start : min(start + size, X.shape[1])]
        yield block if factor == 1.0 else xp.astype(block, _xp.accumulator_dtype(xp, _xp.device(X))) / factor


def _centred(block: Array) -> tuple[Array, Array]:
    """Return a block of whole columns less their mean, and the mean, both in the accumulator's dtype."""
    xp = _xp.array_namespace(block)
    acc = _xp.accumulator_dtype(xp, _xp.device(block))
    mean = xp.sum(block, axis=0, dtype=acc) / block.shape[0]
    centred = block - mean
    if block.dtype == acc:
        # The sum behind `mean` is rounded in proportion to the mean; this one in proportion to the spread.
        centred -= xp.sum(centred, axis=0) / block.shape[0]
    return centred, mean


def _spread(block: Array) -> tuple[Array, Array]:
    """Return the variance and the mean of whole columns."""
    centred, mean = _centred(block)
    return _xp.array_namespace(centred).sum(centred * centred, axis=0) / block.shape[0], mean
