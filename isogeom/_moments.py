"""Streaming first and second moments: exact, mergeable, safe in float32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._products import ProductSum
from isogeom._weights import check_weights, drop_unweighted
from isogeom._xp import Array

# Blocks per pass of `update`: each leaves its mean behind until the pass ends.
_BLOCKS_PER_PASS = 256
# Size of a shifted block on numpy that stays in the cache of one core, and the fewest rows worth a product.
_CACHE_BYTES = 1 << 20
_FEW_ROWS = 128
# Squared distance from a shift to the mean of a block, in variances, beyond which the block gets a shift of its own.
_FAR = 0.25


class Moments:
    r"""Count, mean and centred scatter of rows, updated and merged exactly.

    Everything in isogeom that depends on the data through its covariance (PCA, whitening, isotropy scores, energy
    shares, alignment tests) runs from this object, so it can be fed row block by row block, from several processes or
    from a file, and the result does not depend on how the rows were split.

    Parameters
    ----------
    count : int or float, default=0
        Number of rows seen; with weights their sum, a float if it is not whole.
    mean : array of shape (n_features,), default=None
        Mean of the rows, in the accumulator's dtype (float64 where the device has it).
    scatter : array of shape (n_features, n_features), default=None
        Sum over rows of the outer product of (row - mean), same dtype.

    Notes
    -----
    A block of rows is shifted to about zero mean before the product :math:`Y^T Y`, which runs in the dtype of the rows
    (float32 GEMMs stay fast); products are then added up in float64 and blocks are joined by the pairwise formula of
    Chan, Golub and LeVeque,

    .. math:: S = S_a + S_b + \frac{n_a n_b}{n_a + n_b} (m_b - m_a)(m_b - m_a)^T .

    Because of the shift, a feature with mean 1000 and standard deviation 1 costs no digits in float32.

    Weights are frequencies: whole ones give what repeated rows give, and divisors such as ``count - 1`` follow. For
    weights that only say how reliable a row is, scale them so that they add up to the number of rows.

    Squares must be numbers of the accumulator's dtype: in float64, rows may spread over 1e-153 to 1e153 about (less the
    square root of their number at the upper end). Beyond that :meth:`update` or :meth:`covariance` raise.

    References
    ----------
    Chan, Golub, LeVeque, "Algorithms for computing the sample variance", The American Statistician 37(3), 1983.
    https://doi.org/10.1080/00031305.1983.10483115

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom import Moments
    >>> X = np.arange(12.0).reshape(6, 2) ** 2
    >>> m = Moments().update(X[:2]).merge(Moments().update(X[2:]))
    >>> m.count
    6
    >>> bool(np.allclose(m.covariance(), np.cov(X.T)))
    True
    """

    __slots__ = ("_lost", "count", "mean", "scatter")

    def __init__(self, count: float = 0, mean: Array | None = None, scatter: Array | None = None) -> None:
        self.count = count
        self.mean: Array = mean
        self.scatter: Array = scatter
        # Largest spread that was seen and whose squares were too small to be summed, 0 if there was none.
        self._lost = 0.0

    def __repr__(self) -> str:
        return f"Moments(count={self.count}, n_features={self.n_features})"

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "scatter": self.scatter, "_lost": self._lost}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._lost = 0.0
        for name, value in state.items():
            setattr(self, name, value)

    @property
    def n_features(self) -> int | None:
        """Number of features, None before the first update."""
        return None if self.mean is None else int(self.mean.shape[0])

    def __sklearn_array_api_convert__(self, converter: Any) -> Moments:
        """Return these moments with every array passed through `converter`: how scikit-learn moves fitted state."""
        if self.mean is None:
            return self.copy()
        converted = Moments(self.count, converter(self.mean), converter(self.scatter))
        converted._lost = self._lost
        return converted

    def copy(self) -> Moments:
        """Return a copy that later updates of this object do not touch (arrays are never changed in place)."""
        result = Moments()
        result._take(self)
        return result

    def _take(self, other: Moments) -> None:
        self.count, self.mean, self.scatter, self._lost = other.count, other.mean, other.scatter, other._lost

    def update(self, X: Array, sample_weight: Any = None, *, block_rows: int = _xp.BLOCK_ROWS) -> Moments:
        """Add the rows of `X` and return this object.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
            Finite rows, numpy or any array-API library; the library and device of the first update are kept. Half
            precision is computed in float32, integers and booleans in float64.
        sample_weight : array-like of shape (n_samples,), default=None
            How often each row counts, at least 0: weight 2 equals the row given twice, weight 0 equals a row left out.
            It need not be whole. None counts each row once.
        block_rows : int, default=2048
            Most rows per product; it changes the result by rounding only.

        Returns
        -------
        Moments
            This object.

        Raises
        ------
        ValueError
            If `X` is not two-dimensional, its number of features differs from what was seen before, a value is NaN or
            infinite, the squares of the spread overflow, or a weight is negative or not finite. This object is then
            unchanged.
        """
        X = X if _xp.is_foreign(X) else np.asarray(X)
        if X.ndim != 2:
            raise ValueError(f"Moments.update needs rows of shape (n_samples, n_features), got shape {tuple(X.shape)}.")
        if block_rows < 1:
            raise ValueError(f"block_rows={block_rows!r} must be at least 1.")
        weights = None if sample_weight is None else check_weights(sample_weight, X)
        part = self.copy()
        block_rows = _rows_of_block(X, block_rows)
        for rows in passes(X, block_rows):
            part = _add_rows(part, X[rows, :], None if weights is None else weights[rows], block_rows)
        self._take(part)
        return self

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the rows of both; neither object is changed.

        Parameters
        ----------
        other : Moments
            Moments of other rows with as many features, in the same library and on the same device.

        Returns
        -------
        Moments
            A new object.

        Raises
        ------
        ValueError
            If the numbers of features differ.
        """
        if not isinstance(other, Moments):
            raise TypeError(f"other must be Moments, got {type(other).__name__}: add rows with update() instead.")
        merged = self.copy()
        merged._absorb(other)
        return merged

    def _absorb(self, other: Moments) -> None:
        if other.count == 0:
            return
        if self.count == 0:
            self._take(other)
            return
        _same_features(self.n_features, other.n_features)
        xp = _xp.array_namespace(self.mean, other.mean)
        total = self.count + other.count
        delta = other.mean - self.mean
        outer = xp.expand_dims(delta, axis=1) * xp.expand_dims(delta, axis=0)
        gap = float(xp.max(xp.abs(delta)))
        self._lost = max(self._lost, other._lost, gap if 0 < gap and gap * gap < _smallest(xp, delta) else 0.0)
        self.scatter = self.scatter + other.scatter + outer * (self.count * other.count / total)
        self.mean = self.mean + delta * (other.count / total)
        self.count = total

    def covariance(self, *, ddof: int = 1) -> Array:
        """Return the covariance matrix, of shape (n_features, n_features).

        Parameters
        ----------
        ddof : int, default=1
            Divisor is ``count - ddof``.

        Raises
        ------
        ValueError
            If ``count <= ddof``, or the rows differ by so little that their variance underflows.
        """
        if self.count <= ddof:
            raise ValueError(f"The covariance needs more than {ddof} rows, got {self.count}: add rows with update().")
        xp = _xp.array_namespace(self.scatter)
        if self._lost > 0 and float(xp.linalg.trace(self.scatter)) < self.count * _smallest(xp, self.scatter):
            raise scale_error(self._lost)
        return self.scatter / (self.count - ddof)

    def gram(self) -> Array:
        """Return the uncentred second-moment sum ``X.T @ X``, of shape (n_features, n_features)."""
        if self.count == 0:
            raise ValueError("No rows were seen: call update() first.")
        xp = _xp.array_namespace(self.mean)
        return self.scatter + xp.expand_dims(self.mean, axis=1) * xp.expand_dims(self.mean, axis=0) * self.count


def _rows_of_block(X: Array, block_rows: int) -> int:
    """Return the number of rows of one product."""
    if _xp.is_foreign(X):
        return block_rows
    # The passes over a shifted block cost half where it stays in the cache.
    return min(block_rows, max(_CACHE_BYTES // (max(X.itemsize, 4) * max(X.shape[1], 1)), _FEW_ROWS))


def passes(X: Array, block_rows: int = _xp.BLOCK_ROWS) -> Iterator[slice]:
    """Yield the slices of rows that `Moments.update` adds one after the other.

    One call per slice gives exactly what one call with all rows gives. Bounding the blocks per pass bounds the means
    that are kept until its end.
    """
    step = _rows_of_block(X, block_rows) * _BLOCKS_PER_PASS
    for begin in range(0, X.shape[0], step):
        yield slice(begin, min(begin + step, X.shape[0]))


def _smallest(xp: Any, like: Array) -> float:
    """Return the smallest number of the dtype that has all its digits."""
    return float(xp.finfo(like.dtype).smallest_normal)


def scale_error(size: float) -> ValueError:
    """Return the error for rows whose spread, of about `size`, has squares that are no numbers of float64."""
    exponent = -round(math.log2(size))
    what = "overflow" if size > 1 else "underflow"
    return ValueError(
        f"X spreads over about {size:.1g}, whose squares {what}: rescale X first. X * 2.0**{exponent} changes no digit."
    )


def largest_gap(X: Array, weights: Array | None = None, origin: Array | None = None) -> float:
    """Return the largest absolute difference of the rows that count to `origin`, by default the first of them."""
    xp, gaps = _xp.array_namespace(X), [0.0]
    for begin in range(0, X.shape[0], _xp.BLOCK_ROWS):
        rows = slice(begin, min(begin + _xp.BLOCK_ROWS, X.shape[0]))
        block = _xp.as_real_floating(X[rows, :], "X")
        if weights is not None:
            block, _ = drop_unweighted(xp, block, weights[rows])
        if block.shape[0] == 0:
            continue
        origin = block[0, :] if origin is None else origin
        gaps.append(float(xp.max(xp.abs(block - xp.astype(origin, block.dtype)))))
    # NumPy's maximum hands NaN on.
    return float(np.max(gaps))


def _same_features(known: int | None, new: int | None) -> None:
    if known != new:
        raise ValueError(f"Cannot join moments of {known} features with rows of {new} features.")


def _add_rows(start: Moments, X: Array, weights: Array | None, block_rows: int) -> Moments:
    """Return the moments of what `start` saw and of the rows of `X`."""
    if start.count:
        _xp.array_namespace(start.mean, X)
        _same_features(start.n_features, int(X.shape[1]))
    total = _Pass(start, X, block_rows)
    # Overflow is repaired or reported below: numpy's warnings about it would only be a second, vaguer report.
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for begin in range(0, X.shape[0], block_rows):
            rows = slice(begin, min(begin + block_rows, X.shape[0]))
            block = _xp.as_real_floating(X[rows, :], "X")
            block_weights = None if weights is None else weights[rows]
            if block_weights is not None:
                block, block_weights = drop_unweighted(total.xp, block, block_weights)
            if block.shape[0]:
                total.add(block, block_weights)
        result = total.finish()
        if result.count == 0:
            return result
        result._lost = start._lost
        trace = float(total.xp.linalg.trace(result.scatter))
        if not np.isfinite(trace):
            gap = largest_gap(X, weights, start.mean)
            if np.isfinite(gap):
                raise scale_error(gap)
            raise ValueError(
                "X contains NaN, infinity or values whose squares overflow: drop those rows, or rescale X, first."
            )
        if trace < result.count * _smallest(total.xp, result.mean):
            # Equal rows, or rows whose differences have squares that are too small.
            result._lost = max(result._lost, largest_gap(X, weights, start.mean))
    return result


class _Pass:
    """Sums over the blocks of one update: products of the shifted rows, and what corrects them for the shifts."""

    def __init__(self, start: Moments, X: Array, block_rows: int) -> None:
        self.xp = _xp.array_namespace(X)
        self.acc = _xp.accumulator_dtype(self.xp, _xp.device(X))
        self.products = ProductSum(start.scatter, X, self.acc)
        self.counts: list[float] = [start.count] if start.count else []
        self.means: list[Array] = [start.mean] if start.count else []
        self.rests: list[Array] = []
        self.rest_counts: list[float] = []
        self.total: float = start.count
        self.shift: Array | None = None
        self.buffer: np.ndarray | None = None
        self.shape = (min(block_rows, X.shape[0]), X.shape[1])

    def add(self, block: Array, weights: Array | None) -> None:
        """Add one block; in float64 if its squares leave the range of float32."""
        xp = self.xp
        count = block.shape[0] if weights is None else float(xp.sum(weights))
        out = self._room(block)
        scaled = None if weights is None else xp.astype(weights, block.dtype)
        Y, shift, offset = self._centre(block, scaled, count, out)
        rest = xp.astype(offset, self.acc)
        if scaled is not None:
            Y = _scale_rows(xp, Y, xp.sqrt(scaled), out)
        if not self.products.add(Y):
            self.add(xp.astype(block, self.acc), weights)
            return
        self.shift = shift + offset
        self.total += count
        self.counts.append(count)
        self.means.append(xp.astype(xp.reshape(shift, (-1,)), self.acc) + rest)
        self.rest_counts.append(count)
        self.rests.append(rest)

    def _centre(
        self, block: Array, weights: Array | None, count: float, out: np.ndarray | None
    ) -> tuple[Array, Array, Array]:
        """Return the block less a shift near its mean, the shift, and the mean of what is left.

        The mean of the block before is near enough, and saves a pass, unless the means drift: what is left is corrected
        exactly, and costs digits only where it exceeds the spread of the feature.
        """
        xp = self.xp
        if self.shift is not None and self.shift.dtype == block.dtype:
            Y = _subtract(block, self.shift, out)
            rest = _average(xp, Y, weights, count)
            spread = self.products.squares() / self.total
            if not bool(xp.any(xp.astype(rest, self.acc) ** 2 > _FAR * spread)):
                return Y, self.shift, rest
        # Sums of differences to one row keep constant columns exact.
        first = block[:1, :]
        shift = first + _average(xp, _subtract(block, first, out), weights, count)
        Y = _subtract(block, shift, out)
        return Y, shift, _average(xp, Y, weights, count)

    def _room(self, block: Array) -> np.ndarray | None:
        """Preallocated rows for the shifted block; None for libraries other than numpy."""
        if not isinstance(block, np.ndarray):
            return None
        if self.buffer is None or self.buffer.dtype != block.dtype:
            self.buffer = np.empty(self.shape, dtype=block.dtype)
        return self.buffer[: block.shape[0]]

    def finish(self) -> Moments:
        """Join the blocks: pairwise formulas of Chan, Golub and LeVeque, all at once."""
        xp = self.xp
        if not self.counts:
            return Moments()
        means = xp.stack(self.means, axis=0)
        column = self._column(self.counts, means)
        total = sum(self.counts)
        mean = means[0, :] + xp.sum(column * (means - means[:1, :]), axis=0) / total
        self.products.add_exact(xp.sqrt(column) * (means - mean), 1)
        if self.rests:
            rests = xp.stack(self.rests, axis=0)
            self.products.add_exact(xp.sqrt(self._column(self.rest_counts, rests)) * rests, -1)
        scatter = self.products.total()
        return Moments(int(total) if float(total).is_integer() else total, mean, scatter)

    def _column(self, counts: list[float], like: Array) -> Array:
        return self.xp.asarray([[float(c)] for c in counts], dtype=self.acc, device=_xp.device(like))


def _subtract(block: Array, shift: Array, out: np.ndarray | None) -> Array:
    return block - shift if out is None else np.subtract(block, shift, out=out)


def _scale_rows(xp: Any, Y: Array, factors: Array, out: np.ndarray | None) -> Array:
    factors = xp.expand_dims(factors, axis=1)
    return Y * factors if out is None else np.multiply(Y, factors, out=out)


def _average(xp: Any, Y: Array, weights: Array | None, count: float) -> Array:
    total = xp.sum(Y, axis=0) if weights is None else xp.matmul(weights, Y)
    return total / count


def merge_all(parts: Iterable[Moments]) -> Moments:
    """Merge any number of moments, in order."""
    total = Moments()
    for part in parts:
        total._absorb(part)
    return total
