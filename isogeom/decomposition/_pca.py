"""Principal component analysis from streamed, mergeable moments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.utils.validation import check_is_fitted

from isogeom import _xp
from isogeom._callbacks import IterativeMixin
from isogeom._moments import Moments
from isogeom._validation import check_choice, check_same_library, warn_user
from isogeom._xp import Array
from isogeom.decomposition._base import Decomposition, expand, floating_dtype, project
from isogeom.decomposition._pca_fit import add_rows, check_moments, count_steps, fit_array
from isogeom.decomposition._pca_solvers import (
    SOLVERS,
    Spectrum,
    check_n_components,
    choose_solver,
    covariance_spectrum,
    resolve_n_components,
)

# What a decomposition of the moments gives: left out of a stream until it is asked for.
_RESULTS = (
    "components_",
    "explained_variance_",
    "explained_variance_ratio_",
    "singular_values_",
    "noise_variance_",
    "tail_energies_",
    "n_components_",
)


class PCA(IterativeMixin, Decomposition):
    """Principal component analysis, exact in float32, streamed and mergeable.

    The covariance is accumulated block by block with each block's own mean taken off first (see
    :class:`isogeom.Moments`), then diagonalised. That keeps the eigenvalues right in float32 on data with large means,
    as the activations of transformers have, makes :meth:`partial_fit` exact instead of approximate, and runs unchanged
    on numpy arrays and on torch tensors on any device.

    Parameters
    ----------
    n_components : int, float or None, default=None
        Number of components: an int in [1, min(n_samples, n_features)]; a float in (0, 1) for the smallest number whose
        variance reaches that share; None for every direction that has variance beyond rounding (at least one).
    whiten : bool, default=False
        Divide the codes by their standard deviation, so that they have unit variance.
    svd_solver : {"auto", "covariance", "full", "randomized"}, default="auto"
        "covariance": exact, one pass; the only one that is streamed and merged. "full": exact, thin SVD of the
        centred rows in float64, for few rows of many features. "randomized": subspace iteration (Halko et al.) over
        row blocks, for rows too wide for a covariance matrix; `n_components` must be an int. "auto": "full" if there
        are at least 1024 features and at most a quarter as many rows (and at most 4096), else "covariance" up to 4096
        features, beyond that "randomized" where `n_components` is an int of at most a quarter of min(n_samples,
        n_features), else "covariance".
    n_oversamples : int, default=10
        Directions that "randomized" follows beyond `n_components`.
    iterated_power : int or "auto", default="auto"
        Power iterations of "randomized", each one pass over the rows: 7 for fewer components than a tenth of
        min(n_samples, n_features), else 4.
    random_state : int, Generator, RandomState or None, default=None
        Start of "randomized"; the same on every library and device.

    Attributes
    ----------
    components_ : array of shape (n_components, n_features)
        Orthonormal principal directions as rows, by falling variance. The entry of largest absolute value of each row
        is positive (scikit-learn's sign convention). Same library and device as `X`; dtype of `X` if that is float32
        or float64, float32 for half precision, float64 for integers and booleans.
    dictionary_ : array of shape (n_components, n_features)
        The atoms, such that ``X ≈ codes @ dictionary_ + mean_``: ``components_``, or with `whiten` the components times
        their standard deviations.
    mean_ : array of shape (n_features,)
        Mean of the rows.
    explained_variance_ : array of shape (n_components,)
        Variance of each component (divisor ``n_samples - 1``), in squared units of `X`; in float64 where the device
        has it, like the two that follow.
    explained_variance_ratio_ : array of shape (n_components,)
        Share of the total variance, 0 to 1. All zero if the data has no variance.
    singular_values_ : array of shape (n_components,)
        Singular values of the centred data.
    noise_variance_ : float
        Mean variance of the ``n_features - n_components_`` directions left out, 0 if none are.
    tail_energies_ : array of shape (n_features + 1,)
        Frobenius error of the best rank-k approximation of the centred rows, for k = 0, ..., n_features, in float64:
        the square root of the sum of the squared singular values after the k-th. No factorisation with k components of
        the centred rows does better. With "randomized", of shape (n_components + 1,): the errors of the approximations
        it found, a little above the best.
    moments_ : Moments
        Count, mean and scatter of everything seen, in float64. Absent after a fit with "full" or "randomized".
    n_components_ : int
        Number of components kept.
    n_samples_ : int or float
        Number of rows seen; with weights their sum, a float if it is not whole.
    n_features_in_ : int
        Number of features seen during fit.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, where `X` has string column names.

    See Also
    --------
    isogeom.tangent.TangentProxy : Low-rank tangent space from a decomposition.

    Notes
    -----
    Memory is one (n_features, n_features) float64 matrix, whatever the number of rows; "full" takes a float64 copy of
    the rows instead, and "randomized" a few (n_features, n_components) matrices. Eigenvalues below about 1e-16 times
    the largest are rounding, below 1e-7 where the rows are float32 ("full" excepted). Memory maps and arrays of
    integers or half precision are converted block by block, except by "full".

    Results scale with the rows, as long as variances are normal numbers of float64: rows that spread over less than
    about 1e-153 or more than 1e153 raise an error that names a factor.

    Callbacks (``set_callbacks``) get a step for every 256 blocks of rows of "covariance", with the number of rows so
    far, ``{"n_samples": ...}``, and for every pass of "randomized", with the share of the variance that is still
    outside the basis, ``{"objective": ...}``. One that asks to stop gets the PCA of the rows, or from the passes, so
    far.

    Weights are frequencies: whole ones give what repeated rows give, and variances are divided by their sum minus one.
    For weights that only say how reliable a row is, scale them so that they add up to the number of rows.

    References
    ----------
    Halko, Martinsson, Tropp, "Finding structure with randomness", SIAM Review 53(2), 2011.
    https://doi.org/10.1137/090771806

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

    def __init__(
        self,
        n_components: int | float | None = None,
        *,
        whiten: bool = False,
        svd_solver: str = "auto",
        n_oversamples: int = 10,
        iterated_power: int | str = "auto",
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.whiten = whiten
        self.svd_solver = svd_solver
        self.n_oversamples = n_oversamples
        self.iterated_power = iterated_power
        self.random_state = random_state

    @property
    def dictionary_(self) -> Array:
        """The atoms as rows: ``components_``, times the standard deviations if `whiten`."""
        try:
            whitens = self._whitens()
        except ValueError as error:
            raise AttributeError(str(error)) from error
        if not whitens:
            return self.components_
        xp = _xp.array_namespace(self.components_)
        return self.components_ * xp.expand_dims(self._code_scale(self.components_), axis=1)

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> PCA:  # noqa: ARG002
        """Fit the model.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features), or Moments
            At least 2 rows; or moments accumulated elsewhere, from which the fit is the same. Moments are always solved
            through their covariance.
        y : None
            Ignored.
        sample_weight : array-like of shape (n_samples,), default=None
            How often each row counts, at least 0; see Notes.

        Returns
        -------
        PCA
            This estimator.

        Raises
        ------
        ValueError
            If there are fewer than 2 rows, a value is not finite, a weight is negative, a parameter is out of range, or
            the variance of the rows is no number of float64.
        """
        solver = check_choice(self.svd_solver, "svd_solver", SOLVERS)
        self._whitens()
        self._forget()
        if isinstance(X, Moments):
            moments: Moments | None = check_moments(X, self.n_components, sample_weight)
            dtype = X.scatter.dtype
            self.n_features_in_ = int(X.mean.shape[0])
            with self._iterations(1):
                spectrum = covariance_spectrum(X, self.n_components)
        else:
            if hasattr(X, "shape") and len(X.shape) == 2:
                solver = choose_solver(solver, self.n_components, *X.shape)
            # The moments find values that are not finite on their way.
            finite = solver not in ("auto", "covariance")
            X = self._check_X(X, reset=True, min_samples=2, finite=finite, convert=False)
            dtype, solver = floating_dtype(X), choose_solver(solver, self.n_components, *X.shape)
            with self._iterations(count_steps(self, X, solver), X) as step:
                spectrum, moments = fit_array(self, X, sample_weight, solver, step)
        if moments is not None:
            self.moments_ = moments
        return self._keep(spectrum, dtype)

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> PCA:  # noqa: ARG002
        """Add rows to what was seen; the result equals one `fit` on all of them.

        Whatever `svd_solver`, a stream accumulates the covariance. It is diagonalised when a fitted attribute is first
        asked for, not after every batch.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Any number of rows. While fewer rows than `n_components` were seen, only that many components are kept;
            after a single row nothing is decomposed yet.
        y : None
            Ignored.
        sample_weight : array-like of shape (n_samples,), default=None
            How often each row counts, at least 0.

        Returns
        -------
        PCA
            This estimator.

        Raises
        ------
        ValueError
            If the parameters or the rows are not valid.

        Warns
        -----
        RuntimeWarning
            If an earlier `fit` kept no moments: its rows are then forgotten.
        """
        check_choice(self.svd_solver, "svd_solver", SOLVERS)
        self._whitens()
        first = "moments_" not in vars(self)
        if not first:
            self._check_fitted_library(X, "mean_", "partial_fit")
        elif "components_" in vars(self):
            warn_user(f"{self._no_moments('partial_fit')} This stream starts anew.", RuntimeWarning)
        X = self._check_X(X, reset=first, finite=False, convert=False)
        moments = add_rows(Moments() if first else self.moments_, X, sample_weight, "PCA")
        check_n_components(self.n_components, int(moments.count), X.shape[1], strict=False)
        if moments.count > 0:
            dtype = floating_dtype(X)
            self._set_stream(moments, dtype if first else _xp.array_namespace(X).result_type(dtype, self.mean_.dtype))
        return self

    def _set_stream(self, moments: Moments, dtype: Any) -> None:
        """Keep moments; what follows from them is left to `__getattr__`."""
        self._forget()
        xp = _xp.array_namespace(moments.mean)
        self.moments_ = moments
        self.n_samples_ = moments.count
        self.mean_ = xp.astype(moments.mean, dtype)

    def _settle(self) -> None:
        """Decompose what a stream has gathered, if nobody has asked for it yet."""
        moments = self.__dict__.get("moments_")
        if moments is None or moments.count < 2 or "components_" in self.__dict__:
            return
        # `set_params` may have changed it since the rows were seen.
        check_n_components(self.n_components, int(moments.count), moments.n_features, strict=False)
        self._keep(covariance_spectrum(moments, self.n_components), self.mean_.dtype)

    def __getattr__(self, name: str) -> Any:
        # Reached only for what is not stored: results of a stream that nobody has asked for yet.
        if name in (*_RESULTS, "dictionary_"):
            try:
                self._settle()
                self._whitens()
            except (TypeError, ValueError) as error:
                # Displays and `hasattr` go through every attribute, and expect this error of one that cannot be had.
                raise AttributeError(f"{name} cannot be computed: {error}") from error
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _no_moments(self, method: str) -> str:
        return (
            f"{method} needs the moments of the rows, which svd_solver={self.svd_solver!r} did not keep for rows of "
            f'{self.n_features_in_} features: refit with svd_solver="covariance".'
        )

    def merge(self, other: PCA) -> PCA:
        """Return the PCA of the rows of both; neither estimator is changed.

        Parameters
        ----------
        other : PCA
            Fitted on other rows with the same features, in the same library and on the same device.

        Returns
        -------
        PCA
            A new estimator with the parameters of this one, equal to one `fit` on all rows.

        Raises
        ------
        TypeError
            If `other` is not a PCA.
        ValueError
            If the features differ, or a fit kept no moments (`svd_solver` "full" or "randomized").
        """
        if not isinstance(other, PCA):
            raise TypeError(f"other must be a fitted PCA, got {type(other).__name__}.")
        for pca in (self, other):
            check_is_fitted(pca, "mean_")
            if "moments_" not in vars(pca):
                raise ValueError(pca._no_moments("merge"))
        check_same_library(other.mean_, self.mean_, owner="PCA", method="merge")
        if not np.array_equal(getattr(self, "feature_names_in_", ()), getattr(other, "feature_names_in_", ())):
            raise ValueError("The estimators were fitted on different feature_names_in_: merge fits of equal columns.")
        xp = _xp.array_namespace(self.mean_)
        merged = clone(self)
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(self, name):
                setattr(merged, name, getattr(self, name))
        merged._set_stream(self.moments_.merge(other.moments_), xp.result_type(self.mean_, other.mean_))
        return merged

    def _forget(self) -> None:
        """Drop the results of an earlier fit."""
        for name in (*_RESULTS, "moments_", "mean_", "n_samples_"):
            self.__dict__.pop(name, None)

    def _keep(self, spectrum: Spectrum, dtype: Any) -> PCA:
        """Store what a solver found."""
        xp = _xp.array_namespace(spectrum.mean)
        k = resolve_n_components(self.n_components, spectrum, dtype)
        variances = spectrum.variances[:k]
        self.n_samples_ = spectrum.count
        self.n_components_ = k
        self.mean_ = xp.astype(spectrum.mean, dtype)
        self.components_ = xp.astype(spectrum.rows[:k, :], dtype)
        # Variances stay in float64: those of float32 rows beyond 1e19 or below 1e-19 are no numbers of float32.
        self.explained_variance_ = variances
        self.explained_variance_ratio_ = variances / spectrum.total if spectrum.total > 0 else xp.zeros_like(variances)
        self.singular_values_ = xp.sqrt(variances) * math.sqrt(spectrum.count - 1)
        self.noise_variance_ = spectrum.rest(k)
        self.tail_energies_ = spectrum.tail_energies()
        return self

    def transform(self, X: Any) -> Array:
        """Return the codes of the rows.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows in the library and on the device of the fit.

        Returns
        -------
        array of shape (n_samples, n_components)
            ``(X - mean_) @ components_.T``, divided by the standard deviations if `whiten`; dtype of `X` if that is
            float32 or float64, float32 for half precision, float64 for integers and booleans.
        """
        self._settle()
        check_is_fitted(self, "components_")
        self._check_fitted_library(X, "components_", "transform")
        X = self._check_X(X, reset=False, convert=False)
        Z = project(X, self.components_, self.mean_)
        return Z / self._code_scale(Z) if self._whitens() else Z

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
        self._settle()
        check_is_fitted(self, "components_")
        Z = self._check_codes(X)
        return expand(Z * self._code_scale(Z) if self._whitens() else Z, self.components_, self.mean_)

    def _whitens(self) -> bool:
        return check_choice(self.whiten, "whiten", (False, True))

    def _code_scale(self, Z: Array) -> Array:
        """Standard deviations of the codes in the dtype of `Z`; 1 where there is no variance (the codes are 0)."""
        xp = _xp.array_namespace(Z)
        scale = xp.sqrt(self.explained_variance_)
        # The rounding of the fit, not of these rows: which directions count is a property of the model.
        floor = xp.finfo(self.components_.dtype).eps * xp.max(scale)
        return xp.astype(xp.where(scale > floor, scale, xp.ones_like(scale)), Z.dtype)
