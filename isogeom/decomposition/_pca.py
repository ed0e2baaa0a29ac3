"""Principal component analysis from streamed, mergeable moments."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from isogeom import _xp
from isogeom._linalg import eigh_descending
from isogeom._moments import Moments
from isogeom._validation import check_integer
from isogeom._xp import Array
from isogeom.decomposition._base import Decomposition, expand, project


class PCA(Decomposition):
    """Principal component analysis, exact in float32, streamed and mergeable.

    The covariance is accumulated block by block with each block's own mean taken off first (see
    :class:`isogeom.Moments`), then diagonalised. That keeps the eigenvalues right in float32 on data with large means,
    as the activations of transformers have, makes :meth:`partial_fit` exact instead of approximate, and runs unchanged
    on numpy arrays and on torch tensors on any device.

    Parameters
    ----------
    n_components : int, float or None, default=None
        Number of components: an int in [1, min(n_samples, n_features)]; a float in (0, 1) for the smallest number whose
        variance reaches that share; None for min(n_samples, n_features).
    whiten : bool, default=False
        Divide the codes by their standard deviation, so that they have unit variance.

    Attributes
    ----------
    components_ : array of shape (n_components, n_features)
        Orthonormal principal directions as rows, by falling variance. The entry of largest absolute value of each row
        is positive (scikit-learn's sign convention). Same library, device and dtype as `X`.
    dictionary_ : array of shape (n_components, n_features)
        The atoms, such that ``X ≈ codes @ dictionary_ + mean_``: ``components_``, or with `whiten` the components times
        their standard deviations.
    mean_ : array of shape (n_features,)
        Mean of the rows.
    explained_variance_ : array of shape (n_components,)
        Variance of each component (divisor ``n_samples - 1``), in squared units of `X`.
    explained_variance_ratio_ : array of shape (n_components,)
        Share of the total variance, 0 to 1. All zero if the data has no variance.
    singular_values_ : array of shape (n_components,)
        Singular values of the centred data.
    noise_variance_ : float
        Mean variance of the directions left out, 0 if none are.
    moments_ : Moments
        Count, mean and scatter of everything seen, in float64.
    n_components_ : int
        Number of components kept.
    n_samples_ : int
        Number of rows seen.
    n_features_in_ : int
        Number of features seen during fit.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, where `X` has string column names.

    See Also
    --------
    isogeom.tangent.TangentProxy : Low-rank tangent space from a decomposition.

    Notes
    -----
    Memory is one (n_features, n_features) float64 matrix, whatever the number of rows. Eigenvalues below about 1e-16
    times the largest are rounding.

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.decomposition import PCA
    >>> X = np.array([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]]) + 1000
    >>> pca = PCA(n_components=1).fit(X)
    >>> pca.components_
    array([[1., 0.]])
    >>> pca.explained_variance_ratio_
    array([0.8])
    >>> streamed = PCA(n_components=1).partial_fit(X[:2]).partial_fit(X[2:])
    >>> bool(np.allclose(streamed.explained_variance_, pca.explained_variance_))
    True
    """

    def __init__(self, n_components: int | float | None = None, *, whiten: bool = False) -> None:
        self.n_components = n_components
        self.whiten = whiten

    @property
    def dictionary_(self) -> Array:
        """The atoms as rows: ``components_``, times the standard deviations if `whiten`."""
        if not self.whiten:
            return self.components_
        xp = _xp.array_namespace(self.components_)
        return self.components_ * xp.expand_dims(self._code_scale(self.components_), axis=1)

    def fit(self, X: Any, y: Any = None) -> PCA:  # noqa: ARG002
        """Fit the model.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features), or Moments
            At least 2 rows; or moments accumulated elsewhere, from which the fit is the same.
        y : None
            Ignored.

        Returns
        -------
        PCA
            This estimator.

        Raises
        ------
        ValueError
            If there are fewer than 2 rows, a value is not finite, or `n_components` is out of range.
        """
        if isinstance(X, Moments):
            return self._fit_moments(X)
        X = self._check_X(X, reset=True, min_samples=2)
        self.moments_ = Moments().update(X)
        return self._decompose(X.dtype, strict=True)

    def _fit_moments(self, moments: Moments) -> PCA:
        if moments.count < 2:
            raise ValueError(
                f"PCA needs moments of at least 2 rows, got count={moments.count}: add rows with update()."
            )
        self.moments_ = moments.copy()
        self.n_features_in_ = int(moments.n_features or 0)
        return self._decompose(moments.scatter.dtype, strict=True)

    def partial_fit(self, X: Any, y: Any = None) -> PCA:  # noqa: ARG002
        """Add rows to what was seen; the result equals one `fit` on all of them.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Any number of rows. While fewer rows than `n_components` were seen, only that many components are kept;
            after a single row nothing is decomposed yet.
        y : None
            Ignored.

        Returns
        -------
        PCA
            This estimator.
        """
        first = not hasattr(self, "moments_")
        if not first:
            self._check_stream(X)
        X = self._check_X(X, reset=first)
        self.moments_ = (Moments() if first else self.moments_.copy()).update(X)
        if self.moments_.count < 2:
            return self
        return self._decompose(X.dtype, strict=False)

    def _check_stream(self, X: Any) -> None:
        """A stream stays in one library and on one device."""
        self.mean_ = self.moments_.mean
        self._check_fitted_library(X, "mean_", "partial_fit")

    def _decompose(self, dtype: Any, *, strict: bool) -> PCA:
        moments = self.moments_
        covariance = moments.covariance()
        xp = _xp.array_namespace(covariance)
        variances, rows = eigh_descending(covariance)
        # A covariance has no negative eigenvalue: what is below zero is rounding.
        variances = xp.clip(variances, 0, None)
        total = float(xp.sum(variances))
        k = self._resolve_n_components(variances, total, strict=strict)

        self.n_samples_ = moments.count
        self.n_components_ = k
        self.mean_ = xp.astype(moments.mean, dtype)
        self.components_ = xp.astype(rows[:k, :], dtype)
        self.explained_variance_ = xp.astype(variances[:k], dtype)
        ratios = variances[:k] / total if total > 0 else xp.zeros_like(variances[:k])
        self.explained_variance_ratio_ = xp.astype(ratios, dtype)
        self.singular_values_ = xp.astype(xp.sqrt(variances[:k] * (moments.count - 1)), dtype)
        rest = variances[k:]
        self.noise_variance_ = float(xp.mean(rest)) if rest.shape[0] else 0.0
        return self

    def _resolve_n_components(self, variances: Array, total: float, *, strict: bool) -> int:
        """Turn the parameter into a number of components."""
        d = int(variances.shape[0])
        largest = min(self.moments_.count, d)
        k = self.n_components
        if k is None:
            return largest
        if isinstance(k, (float, np.floating)) and not isinstance(k, numbers.Integral):
            if not 0 < k < 1:
                raise ValueError(
                    f"n_components={k!r} must lie strictly between 0 and 1 when it is a float (share of variance to "
                    "reach); pass an int for a number of components."
                )
            if total == 0:
                return 1
            shares = np.cumsum(_xp.to_numpy(variances[:largest])) / total
            # The last share may miss 1 by rounding: then every component is needed.
            return min(int(np.searchsorted(shares, k, side="left")) + 1, largest)
        k = check_integer(k, "n_components", low=1)
        if not strict:
            return min(k, largest)
        if k > largest:
            raise ValueError(
                f"n_components={k} must be at most min(n_samples, n_features)={largest} "
                f"(n_samples={self.moments_.count}, n_features={d})."
            )
        return k

    def transform(self, X: Any) -> Array:
        """Return the codes of the rows.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows in the library and on the device of the fit.

        Returns
        -------
        array of shape (n_samples, n_components)
            ``(X - mean_) @ components_.T``, divided by the standard deviations if `whiten`; dtype of `X`.
        """
        check_is_fitted(self, "components_")
        self._check_fitted_library(X, "components_", "transform")
        X = self._check_X(X, reset=False)
        Z = project(X, self.components_, self.mean_)
        return Z / self._code_scale(Z) if self.whiten else Z

    def inverse_transform(self, X: Any) -> Array:
        """Return the rows that have the given codes.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_components)
            Codes, as :meth:`transform` returns them.

        Returns
        -------
        array of shape (n_samples, n_features)
            ``X @ components_ + mean_``.
        """
        check_is_fitted(self, "components_")
        Z = self._check_codes(X)
        return expand(Z * self._code_scale(Z) if self.whiten else Z, self.components_, self.mean_)

    def _code_scale(self, Z: Array) -> Array:
        """Standard deviations of the codes in the dtype of `Z`; 1 where there is no variance (the codes are 0)."""
        xp = _xp.array_namespace(Z)
        scale = xp.astype(xp.sqrt(self.explained_variance_), Z.dtype)
        floor = xp.finfo(scale.dtype).eps * xp.max(scale)
        return xp.where(scale > floor, scale, xp.ones_like(scale))
