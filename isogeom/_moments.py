"""Streaming first and second moments: exact, mergeable, safe in float32."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._xp import Array

# Mean square per entry below which float32 products lose digits to underflow.
_SMALL_SQUARE = 1e-28


class Moments:
    r"""Count, mean and centred scatter of rows, updated and merged exactly.

    Everything in isogeom that depends on the data through its covariance (PCA, whitening, isotropy scores, energy
    shares, alignment tests) runs from this object, so it can be fed row block by row block, from several processes or
    from a file, and the result does not depend on how the rows were split.

    Parameters
    ----------
    count : int, default=0
        Number of rows seen.
    mean : array of shape (n_features,), default=None
        Mean of the rows, in the accumulator's dtype (float64 where the device has it).
    scatter : array of shape (n_features, n_features), default=None
        Sum over rows of the outer product of (row - mean), same dtype.

    Notes
    -----
    A block of rows is shifted by its own mean before the product :math:`Y^T Y`, which runs in the dtype of the rows
    (float32 GEMMs stay fast); products are then added up in float64 and blocks are joined by the pairwise formula of
    Chan, Golub and LeVeque,

    .. math:: S = S_a + S_b + \frac{n_a n_b}{n_a + n_b} (m_b - m_a)(m_b - m_a)^T .

    Because of the shift, a feature with mean 1000 and standard deviation 1 costs no digits in float32.

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

    __slots__ = ("count", "mean", "scatter")

    def __init__(self, count: int = 0, mean: Array | None = None, scatter: Array | None = None) -> None:
        self.count = count
        self.mean: Array = mean
        self.scatter: Array = scatter

    def __repr__(self) -> str:
        return f"Moments(count={self.count}, n_features={self.n_features})"

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "scatter": self.scatter}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    @property
    def n_features(self) -> int | None:
        """Number of features, None before the first update."""
        return None if self.mean is None else int(self.mean.shape[0])

    def copy(self) -> Moments:
        """Return a copy that later updates of this object do not touch (arrays are never changed in place)."""
        return Moments(self.count, self.mean, self.scatter)

    def update(self, X: Array, *, block_rows: int = _xp.BLOCK_ROWS) -> Moments:
        """Add the rows of `X` and return this object.

        Parameters
        ----------
        X : array of shape (n_samples, n_features)
            Finite rows, numpy or any array-API library; the library and device of the first update are kept. Half
            precision is computed in float32, integers and booleans in float64.
        block_rows : int, default=2048
            Rows per product; it changes the result by rounding only.

        Returns
        -------
        Moments
            This object.

        Raises
        ------
        ValueError
            If `X` is not two-dimensional, its number of features differs from what was seen before, or a value is NaN,
            infinite or too large to be squared. This object is then unchanged.
        """
        X = X if _xp.is_foreign(X) else np.asarray(X)
        if X.ndim != 2:
            raise ValueError(f"Moments.update needs rows of shape (n_samples, n_features), got shape {tuple(X.shape)}.")
        if block_rows < 1:
            raise ValueError(f"block_rows={block_rows!r} must be at least 1.")
        part = Moments()
        for block in _xp.row_blocks(X, block_rows):
            part._absorb(_block_moments(_xp.as_real_floating(block, "X")))
        self._absorb(part)
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
        merged = self.copy()
        merged._absorb(other)
        return merged

    def _absorb(self, other: Moments) -> None:
        if other.count == 0:
            return
        if self.count == 0:
            self.count, self.mean, self.scatter = other.count, other.mean, other.scatter
            return
        if self.n_features != other.n_features:
            raise ValueError(
                f"Cannot join moments of {self.n_features} features with rows of {other.n_features} features."
            )
        xp = _xp.array_namespace(self.mean, other.mean)
        total = self.count + other.count
        delta = other.mean - self.mean
        outer = xp.expand_dims(delta, axis=1) * xp.expand_dims(delta, axis=0)
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
            If ``count <= ddof``.
        """
        if self.count <= ddof:
            raise ValueError(f"The covariance needs more than {ddof} rows, got {self.count}: add rows with update().")
        return self.scatter / (self.count - ddof)

    def gram(self) -> Array:
        """Return the uncentred second-moment sum ``X.T @ X``, of shape (n_features, n_features)."""
        if self.count == 0:
            raise ValueError("No rows were seen: call update() first.")
        xp = _xp.array_namespace(self.mean)
        return self.scatter + xp.expand_dims(self.mean, axis=1) * xp.expand_dims(self.mean, axis=0) * self.count


def _block_moments(X: Array) -> Moments:
    """Return the moments of one block: product in the dtype of the rows, sums in the accumulator's."""
    xp = _xp.array_namespace(X)
    acc = _xp.accumulator_dtype(xp, _xp.device(X))
    n = X.shape[0]
    # Overflow is repaired or reported below: numpy's warnings about it would only be a second, vaguer report.
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        shift = xp.astype(xp.sum(X, axis=0, dtype=acc) / n, X.dtype)
        Y = X - shift
        # `shift` is the mean rounded to the dtype of X: what is left of it goes through the exact correction below.
        rest = xp.sum(Y, axis=0, dtype=acc) / n
        product = xp.astype(xp.matmul(xp.matrix_transpose(Y), Y), acc)
        scatter = product - n * xp.expand_dims(rest, axis=1) * xp.expand_dims(rest, axis=0)
        trace = float(xp.linalg.trace(product))
    if not _SMALL_SQUARE * n * X.shape[1] <= trace < float("inf"):
        if X.dtype != acc:
            # Squares of float32 leave its range beyond 1e19 and below 1e-19; those of its values in float64 do not.
            return _block_moments(xp.astype(X, acc))
        if not np.isfinite(trace):
            raise ValueError(
                "X contains NaN, infinity or values whose squares overflow: drop those rows, or rescale X, first."
            )
    return Moments(n, xp.astype(shift, acc) + rest, scatter)


def merge_all(parts: Iterable[Moments]) -> Moments:
    """Merge any number of moments, in order."""
    total = Moments()
    for part in parts:
        total._absorb(part)
    return total
