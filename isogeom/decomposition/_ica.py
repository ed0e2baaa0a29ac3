"""Independent component analysis: streamed whitening and the symmetric FastICA fixed point, with a certificate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from isogeom import _random, _xp
from isogeom._linalg import eigh_descending, fix_signs, row_norms
from isogeom._moments import Moments
from isogeom._validation import check_choice, check_integer, check_real
from isogeom._xp import Array, Namespace
from isogeom.decomposition._base import Decomposition, expand, project


class ICA(Decomposition):
    r"""Independent component analysis by symmetric FastICA, on numpy arrays and torch tensors alike.

    Rows are written as ``X ≈ Z @ dictionary_ + mean_``, with sources Z of unit variance that are as far from Gaussian
    as possible. The atoms are the *mixing columns*; ``components_`` holds the unmixing rows, as in scikit-learn, and is
    not a dictionary.

    Parameters
    ----------
    n_components : int or None, default=None
        Number of sources, at least 1 and at most the numerical rank of the centred data; None for that rank (with a
        warning if it is below ``min(n_samples - 1, n_features)``).
    fun : {"logcosh", "exp", "cube"}, default="logcosh"
        Contrast: derivative g(u) = tanh(u), u exp(-u²/2) or u³. The last is the kurtosis, sensitive to outliers.
    max_iter : int, default=500
        Largest number of iterations, one pass over the whitened rows each.
    tol : float, default=1e-6
        Iterations stop once no unmixing row turned by more than this: largest ``1 - |cos|`` between a whitened unmixing
        row and its predecessor, 0 to 1.
    random_state : int, Generator, RandomState or None, default=None
        Seed of the starting rotation. The draw is made on the host: the same seed starts every library alike.

    Attributes
    ----------
    components_ : array of shape (n_components, n_features)
        Unmixing rows: ``(X - mean_) @ components_.T`` are the sources. Same library, device and dtype as `X`.
    mixing_ : array of shape (n_features, n_components)
        Pseudo-inverse of ``components_``. Columns by falling norm, which is the energy a source explains; the entry of
        largest absolute value of each column is positive.
    dictionary_ : array of shape (n_components, n_features)
        The atoms as rows: ``mixing_.T``.
    mean_ : array of shape (n_features,)
        Mean of the rows.
    whitening_ : array of shape (n_components, n_features)
        Map from centred rows to uncorrelated coordinates of unit variance, before the rotation.
    gradient_norm_ : float
        Certificate of the solution, 0 at a stationary point; see Notes.
    n_components_ : int
        Number of sources.
    n_iter_ : int
        Number of iterations made.
    converged_ : bool
        Whether the stopping rule was met.
    n_features_in_ : int
        Number of features seen during fit.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, where `X` has string column names.

    Warns
    -----
    ConvergenceWarning
        If `max_iter` was reached first; the message gives the last change and the gradient norm. Gaussian data has no
        independent directions to find, and ends here.

    See Also
    --------
    isogeom.decomposition.PCA : Uncorrelated rather than independent codes.
    isogeom.decomposition.SemiNMF : Nonnegative codes.

    Notes
    -----
    With whitened rows Y and an orthogonal W, one iteration is

    .. math:: W \leftarrow (T T^T)^{-1/2} T, \qquad T = E[g(W y) y^T] - \operatorname{diag}(E[g'(W y)]) W .

    Whitening comes from moments accumulated in float64 with the mean taken off first, and its rank threshold is
    relative to the largest variance: float32 rows with a mean of 1000 and data in tiny units are safe. Variances have
    divisor ``n_samples``.

    ``gradient_norm_`` is the largest entry of :math:`|\sigma_i \Psi_{ij} - \sigma_j \Psi_{ji}| / 2` with
    :math:`\Psi = E[g(s) s^T]` over the fitted sources s and :math:`\sigma_i = \operatorname{sign}(E[g'(s_i)] - E[s_i
    g(s_i)])`: the gradient of the signed contrast along rotations, which vanishes exactly at the fixed points.

    References
    ----------
    Hyvärinen, "Fast and robust fixed-point algorithms for independent component analysis", IEEE Transactions on Neural
    Networks 10(3), 1999. https://doi.org/10.1109/72.761722

    Ablin, Cardoso, Gramfort, "Faster ICA under orthogonal constraint", ICASSP 2018. https://arxiv.org/abs/1711.10873

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.decomposition import ICA
    >>> rng = np.random.default_rng(0)
    >>> atoms = np.array([[3.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    >>> X = rng.laplace(size=(5000, 2)) @ atoms
    >>> ica = ICA(n_components=2, random_state=0).fit(X)
    >>> cosines = ica.dictionary_ @ atoms.T / np.linalg.norm(atoms, axis=1)
    >>> cosines /= np.linalg.norm(ica.dictionary_, axis=1)[:, None]
    >>> bool(np.all(np.abs(np.diag(cosines)) > 0.99))
    True
    >>> bool(ica.gradient_norm_ < 1e-3)
    True
    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        fun: str = "logcosh",
        max_iter: int = 500,
        tol: float = 1e-6,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.fun = fun
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    @property
    def dictionary_(self) -> Array:
        """The atoms as rows: the columns of ``mixing_``."""
        return _xp.array_namespace(self.mixing_).matrix_transpose(self.mixing_)

    def fit(self, X: Any, y: Any = None) -> ICA:  # noqa: ARG002
        """Fit the model.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            At least 2 rows, not all equal.
        y : None
            Ignored.

        Returns
        -------
        ICA
            This estimator.

        Raises
        ------
        ValueError
            If a parameter is out of range, a value is not finite, all rows are equal, or `n_components` exceeds the
            numerical rank of the centred rows.
        """
        contrast = _CONTRASTS[check_choice(self.fun, "fun", tuple(_CONTRASTS))]
        max_iter = check_integer(self.max_iter, "max_iter", low=1)
        tol = check_real(self.tol, "tol", low=0)
        rng = _random.check_rng(self.random_state, "random_state")
        X = self._check_X(X, reset=True, min_samples=2)
        xp = _xp.array_namespace(X)

        moments = _moments(X)
        variances, directions = eigh_descending(moments.covariance(ddof=0))
        k = self._resolve_n_components(_numerical_rank(xp, variances, moments, X.dtype), *X.shape)
        deviations = xp.expand_dims(xp.sqrt(variances[:k]), axis=1)
        whitening, dewhitening = directions[:k, :] / deviations, directions[:k, :] * deviations

        Y = _whiten(X, moments.mean, whitening)
        start = _polar(xp, _random.standard_normal(rng, (k, k), whitening))
        W, self.n_iter_, change = fixed_point(Y, start, contrast, max_iter=max_iter, tol=tol)
        self.gradient_norm_ = gradient_norm(Y, W, contrast)
        self.converged_ = change <= tol
        if not self.converged_:
            self._warn_not_converged(change, tol)

        atoms = xp.matmul(W, dewhitening)
        order = xp.argsort(row_norms(atoms), descending=True)
        W, atoms = xp.take(W, order, axis=0), xp.take(atoms, order, axis=0)
        signed = fix_signs(atoms)
        W = W * xp.expand_dims(xp.sign(xp.sum(signed * atoms, axis=1)), axis=1)

        self.n_components_ = k
        self.mean_ = xp.astype(moments.mean, X.dtype)
        self.whitening_ = xp.astype(whitening, X.dtype)
        self.components_ = xp.astype(xp.matmul(W, whitening), X.dtype)
        self.mixing_ = xp.astype(xp.matrix_transpose(signed), X.dtype)
        return self

    def _resolve_n_components(self, rank: int, n: int, d: int) -> int:
        """Turn the parameter into a number of sources."""
        if rank == 0:
            raise ValueError(
                f"ICA needs rows that differ, got n_samples={n} equal rows (n_features={d}): the centred data has "
                "numerical rank 0."
            )
        if self.n_components is not None:
            k = check_integer(self.n_components, "n_components", low=1)
            if k > rank:
                raise ValueError(
                    f"n_components={k} must be at most the numerical rank of the centred data, {rank} (n_samples={n}, "
                    f"n_features={d}): lower it, or pass None for the rank."
                )
            return k
        if rank < min(n - 1, d):
            warnings.warn(
                f"The centred data has numerical rank {rank}, below min(n_samples - 1, n_features)={min(n - 1, d)}: "
                f"n_components=None is taken as {rank}.",
                UserWarning,
                stacklevel=3,
            )
        return rank

    def _warn_not_converged(self, change: float, tol: float) -> None:
        warnings.warn(
            f"ICA did not converge in {self.n_iter_} iterations: the last change was {change:.2g}, above tol={tol:.2g} "
            f"(gradient norm {self.gradient_norm_:.2g}). Raise max_iter, lower n_components, or expect unstable "
            "sources: Gaussian directions cannot be separated.",
            ConvergenceWarning,
            stacklevel=3,
        )

    def transform(self, X: Any) -> Array:
        """Return the sources of the rows.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows in the library and on the device of the fit.

        Returns
        -------
        array of shape (n_samples, n_components)
            ``(X - mean_) @ components_.T``, in the dtype of `X`.
        """
        check_is_fitted(self, "components_")
        self._check_fitted_library(X, "components_", "transform")
        return project(self._check_X(X, reset=False), self.components_, self.mean_)

    def inverse_transform(self, X: Any) -> Array:
        """Return the rows that have the given sources.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_components)
            Sources, as :meth:`transform` returns them.

        Returns
        -------
        array of shape (n_samples, n_features)
            ``X @ mixing_.T + mean_``: the projection of the rows on the span of the atoms.
        """
        check_is_fitted(self, "components_")
        return expand(self._check_codes(X), self.dictionary_, self.mean_)


# A contrast maps projections u to g(u) and g'(u).
Contrast = Callable[[Namespace, Array], tuple[Array, Array]]


def _logcosh(xp: Namespace, u: Array) -> tuple[Array, Array]:
    g = xp.tanh(u)
    return g, 1 - g * g


def _exp(xp: Namespace, u: Array) -> tuple[Array, Array]:
    bell = xp.exp(-u * u / 2)
    return u * bell, (1 - u * u) * bell


def _cube(xp: Namespace, u: Array) -> tuple[Array, Array]:  # noqa: ARG001
    return u * u * u, 3 * u * u


_CONTRASTS: dict[str, Contrast] = {"logcosh": _logcosh, "exp": _exp, "cube": _cube}


def _moments(X: Array) -> Moments:
    """Return the moments of the rows, with products in float64: whitening divides by the small variances."""
    xp = _xp.array_namespace(X)
    acc = _xp.accumulator_dtype(xp, _xp.device(X))
    moments = Moments()
    for block in _xp.row_blocks(X):
        moments.update(xp.astype(block, acc))
    return moments


def _numerical_rank(xp: Namespace, variances: Array, moments: Moments, dtype: Any) -> int:
    """Count the variances that stand above the rounding of the products and of the stored values themselves."""
    d = int(variances.shape[0])
    products = float(variances[0]) * max(d, _xp.BLOCK_ROWS) * float(xp.finfo(variances.dtype).eps)
    # A value x is stored with an error of up to eps |x| / 2, which looks like noise of that size in every feature.
    second = xp.linalg.diagonal(moments.scatter) / moments.count + moments.mean * moments.mean
    storage = float(xp.max(second)) * float(xp.finfo(dtype).eps) ** 2
    return int(xp.count_nonzero(variances > products + storage))


def _whiten(X: Array, mean: Array, whitening: Array) -> Array:
    """Return the whitened rows in the dtype of `X`; the product runs in float64, block by block."""
    xp = _xp.array_namespace(X)
    columns = xp.matrix_transpose(whitening)
    blocks = [
        xp.astype(xp.matmul(xp.astype(block, mean.dtype) - mean, columns), X.dtype) for block in _xp.row_blocks(X)
    ]
    return blocks[0] if len(blocks) == 1 else xp.concat(blocks, axis=0)


def _polar(xp: Namespace, T: Array) -> Array:
    """Return the orthogonal matrix nearest to `T`: symmetric decorrelation."""
    u, _, vt = xp.linalg.svd(T, full_matrices=False)
    return xp.matmul(u, vt)


def fixed_point(Y: Array, W: Array, contrast: Contrast, *, max_iter: int, tol: float) -> tuple[Array, int, float]:
    """Iterate FastICA's symmetric fixed point on whitened rows.

    Parameters
    ----------
    Y : array of shape (n_samples, k)
        Whitened rows.
    W : array of shape (k, k)
        Orthogonal start, in the accumulator's dtype.
    contrast : callable
        Gives g and its derivative.
    max_iter : int
        Largest number of iterations.
    tol : float
        Largest ``1 - |cos|`` between successive rows at which to stop.

    Returns
    -------
    W : array of shape (k, k)
        Orthogonal.
    n_iter : int
        Iterations made.
    change : float
        Last change of W.
    """
    xp = _xp.array_namespace(Y, W)
    n_iter, change = 0, math.inf
    while n_iter < max_iter and change > tol:
        n_iter += 1
        product, slopes = _averages(Y, W, contrast)
        new = _polar(xp, product - xp.expand_dims(slopes, axis=1) * W)
        # 1 - |cos| from the difference of the rows: 1 - (a number near 1) would stop at the rounding error.
        sign = xp.expand_dims(xp.sign(xp.sum(new * W, axis=1)), axis=1)
        change = float(xp.max(xp.sum((new * sign - W) ** 2, axis=1))) / 2
        W = new
    return W, n_iter, change


def gradient_norm(Y: Array, W: Array, contrast: Contrast) -> float:
    """Return the largest entry of the signed skew part of E[g(s) s^T] at ``s = W y`` (see :class:`ICA`, Notes)."""
    xp = _xp.array_namespace(Y, W)
    product, slopes = _averages(Y, W, contrast)
    psi = xp.matmul(product, xp.matrix_transpose(W))
    signed = xp.expand_dims(xp.sign(slopes - xp.linalg.diagonal(psi)), axis=1) * psi
    return float(xp.max(xp.abs(signed - xp.matrix_transpose(signed)))) / 2


def _averages(Y: Array, W: Array, contrast: Contrast) -> tuple[Array, Array]:
    """Return E[g(W y) y^T] and E[g'(W y)]: one pass, products in the dtype of Y, sums in the dtype of W."""
    xp = _xp.array_namespace(Y, W)
    columns = xp.astype(xp.matrix_transpose(W), Y.dtype)
    product, slopes = xp.zeros_like(W), xp.zeros_like(W[:, 0])
    for block in _xp.row_blocks(Y):
        g, slope = contrast(xp, xp.matmul(block, columns))
        product = product + xp.astype(xp.matmul(xp.matrix_transpose(g), block), W.dtype)
        slopes = slopes + xp.sum(slope, axis=0, dtype=W.dtype)
    n = Y.shape[0]
    return product / n, slopes / n
