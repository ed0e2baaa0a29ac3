"""Semi-nonnegative matrix factorisation: nonnegative codes, a dictionary of free sign."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from isogeom import _random, _xp
from isogeom._validation import check_choice, check_integer, check_real, check_rows
from isogeom._xp import Array
from isogeom.decomposition._alternation import alternate, encode, norms, residuals
from isogeom.decomposition._base import Decomposition, expand
from isogeom.decomposition._starts import kmeans_start, random_start, svd_start, unit_rows

# Residual of the optimality conditions above which codes are reported as not exact.
_KKT_LIMIT = 1e-6


class SemiNMF(Decomposition):
    r"""Semi-NMF with unit atoms and an optional, scale-free l1 penalty on the codes.

    Rows are written as ``X ≈ Z @ components_`` with nonnegative codes Z and atoms of free sign. X is not centred: that
    would turn a cone of rows into a ball, which nonnegative codes cannot follow.

    Parameters
    ----------
    n_components : int or None, default=None
        Number of atoms, at least 1; it may exceed the number of features or of samples. None for
        ``min(n_samples, n_features)``, or the number of rows of an `init` array.
    alpha : float, default=0.0
        Weight of the l1 penalty relative to the mean norm of the rows, nonnegative; it means the same whatever the
        units of X and the numbers of rows and features. 0 is plain Semi-NMF, whose atoms are generally not unique:
        interpret atoms from ``alpha`` around 0.05 to 0.1.
    init : {"kmeans", "svd", "random"} or array of shape (n_components, n_features), default="kmeans"
        Start: directions of k-means centres; the construction whose error is that of the SVD of rank
        ``n_components - 1`` (the final error is at most that if `alpha` is 0, but atoms hardly move from there);
        Gaussian directions; or given atoms.
    max_iter : int, default=300
        Largest number of iterations, one pass over the rows each.
    tol : float, default=1e-5
        Iterations stop once the objective falls by at most this share of itself in one of them.
    random_state : int, Generator, RandomState or None, default=None
        Seed of the start. Draws are made on the host: the same seed starts every library alike.

    Attributes
    ----------
    components_ : array of shape (n_components, n_features)
        Atoms of unit norm as rows, by falling energy (sum of squared codes over the training rows). Same library,
        device and dtype as `X`.
    dictionary_ : array of shape (n_components, n_features)
        The same atoms, under the name shared by all decompositions.
    penalty_ : float
        Absolute weight of the l1 penalty: `alpha` times the mean norm of the training rows.
    reconstruction_err_ : float
        Frobenius norm of ``X - Z @ components_`` on the training rows, from an explicit pass.
    objective_path_ : array of shape (n_iter_ + 1,)
        Objective at the start and after every iteration, never rising, in float64 where the device has it.
    kkt_residual_ : float
        Largest relative residual of the optimality conditions of the training codes, 0 if exact.
    n_components_ : int
        Number of atoms.
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
        If `max_iter` was reached first; the message gives the last relative decrease.

    See Also
    --------
    isogeom.decomposition.ICA : Independent codes of either sign.
    sklearn.decomposition.NMF : Nonnegative codes and atoms, for nonnegative data.

    Notes
    -----
    The objective is

    .. math:: \tfrac12 \|X - Z D\|_F^2 + \lambda \sum_{ij} Z_{ij}, \qquad Z \ge 0, \quad \|d_j\| \le 1, \quad
        \lambda = \alpha \cdot \operatorname{mean}_i \|x_i\| .

    Codes move by coordinate descent, atoms by least squares (`alpha` = 0) or one at a time with their norm bounded
    (otherwise). The last codes, like those of :meth:`transform`, are the exact minimiser for the stored atoms, computed
    in float64 row by row: a row's code depends neither on its batch nor on a random number. It is unique unless atoms
    are linearly dependent.

    An atom that no row uses is moved to the worst-fitted row, which leaves the objective unchanged, a few times at
    most; if no row has use for it (X has fewer distinct directions, or the penalty is high) it keeps its zero codes.

    References
    ----------
    Ding, Li, Jordan, "Convex and semi-nonnegative matrix factorizations", IEEE TPAMI 32(1), 2010.
    https://doi.org/10.1109/TPAMI.2008.277

    Mairal, Bach, Ponce, Sapiro, "Online learning for matrix factorization and sparse coding", JMLR 11, 2010.
    https://arxiv.org/abs/0908.0050

    Gillis, Kumar, "Exact and heuristic algorithms for semi-nonnegative matrix factorization", SIAM Journal on Matrix
    Analysis and Applications 36(4), 2015. https://doi.org/10.1137/140993272

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.decomposition import SemiNMF
    >>> X = np.array([[2.0, -2.0, 0.0], [0.0, 0.0, 1.0], [1.0, -1.0, 0.0], [0.0, 0.0, 2.0]])
    >>> model = SemiNMF(n_components=2, random_state=0)
    >>> np.round(model.fit_transform(X), 2) + 0.0
    array([[2.83, 0.  ],
           [0.  , 1.  ],
           [1.41, 0.  ],
           [0.  , 2.  ]])
    >>> np.round(model.components_, 2) + 0.0
    array([[ 0.71, -0.71,  0.  ],
           [ 0.  ,  0.  ,  1.  ]])
    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        alpha: float = 0.0,
        init: Any = "kmeans",
        max_iter: int = 300,
        tol: float = 1e-5,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.alpha = alpha
        self.init = init
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    @property
    def dictionary_(self) -> Array:
        """The atoms as rows: ``components_``."""
        return self.components_

    def fit(self, X: Any, y: Any = None) -> SemiNMF:  # noqa: ARG002
        """Fit the model.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows, of any sign.
        y : None
            Ignored.

        Returns
        -------
        SemiNMF
            This estimator.

        Raises
        ------
        ValueError
            If a parameter is out of range or a value is not finite.
        """
        self._fit_codes(X)
        return self

    def fit_transform(self, X: Any, y: Any = None) -> Array:  # noqa: ARG002
        """Fit the model and return the codes of the training rows.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows, of any sign.
        y : None
            Ignored.

        Returns
        -------
        array of shape (n_samples, n_components)
            Nonnegative codes, the same as ``fit(X).transform(X)``; dtype of `X`.
        """
        return self._fit_codes(X)

    def _fit_codes(self, X: Any) -> Array:
        """Fit, and return the codes of the rows."""
        alpha = check_real(self.alpha, "alpha", low=0)
        max_iter = check_integer(self.max_iter, "max_iter", low=1)
        tol = check_real(self.tol, "tol", low=0)
        rng = _random.check_rng(self.random_state, "random_state")
        X = self._check_X(X, reset=True)
        xp = _xp.array_namespace(X)

        mean_norm, squares = norms(X)
        self.penalty_ = alpha * mean_norm
        D, codes = self._start(X, rng)
        D, path, decrease = alternate(X, D, codes, squares, penalty=self.penalty_, max_iter=max_iter, tol=tol)
        self.n_iter_ = len(path) - 1
        self.converged_ = decrease <= tol
        if not self.converged_:
            warnings.warn(
                f"SemiNMF did not converge in {self.n_iter_} iterations: the objective still fell by {decrease:.2g} of "
                f"itself in the last one, above tol={tol:.2g}. Raise max_iter or tol.",
                ConvergenceWarning,
                stacklevel=3,
            )
        self.objective_path_ = _xp.asarray_like(path, X, dtype=D.dtype)
        self.n_components_ = int(D.shape[0])

        Z = self._set_components(X, D)
        blocks = residuals(X, _xp.row_blocks(Z), self.components_)
        self.reconstruction_err_ = math.sqrt(sum(float(xp.sum(block * block)) for block in blocks))
        return Z

    def _set_components(self, X: Array, D: Array) -> Array:
        """Store the atoms by falling energy of their exact codes, and return the codes."""
        xp = _xp.array_namespace(D)
        order = xp.arange(D.shape[0], device=_xp.device(D))
        # Codes computed for atoms in another order differ by rounding: recompute them, as transform will.
        for _ in range(3):
            D = xp.take(D, order, axis=0)
            self.components_ = xp.astype(D, X.dtype)
            Z, self.kkt_residual_ = encode(X, self.components_, self.penalty_)
            energy = xp.sum(xp.astype(Z, D.dtype) ** 2, axis=0)
            order = xp.argsort(energy, descending=True, stable=True)
            if bool(xp.all(energy[1:] <= energy[:-1])):
                break
        self._warn_inexact(self.kkt_residual_)
        return Z

    def _start(self, X: Array, rng: np.random.Generator) -> tuple[Array, list[Array]]:
        """Return the starting atoms, and codes per row block."""
        xp = _xp.array_namespace(X)
        acc = _xp.accumulator_dtype(xp, _xp.device(X))
        given = None if isinstance(self.init, str) else self._check_init(X)
        if given is None:
            check_choice(self.init, "init", ("kmeans", "svd", "random"))
        k = min(X.shape) if given is None else int(given.shape[0])
        if self.n_components is not None:
            k = check_integer(self.n_components, "n_components", low=1)
        if given is not None and k != given.shape[0]:
            raise ValueError(
                f"init has {given.shape[0]} rows but n_components={k}: pass one atom per component, or "
                "n_components=None."
            )
        if given is None and self.init == "svd":
            return svd_start(X, k, rng)
        if given is not None:
            D = unit_rows(xp.astype(given, acc))[0]
        else:
            D = (kmeans_start if self.init == "kmeans" else random_start)(X, k, rng)
        codes = [xp.zeros((b.shape[0], k), dtype=acc, device=_xp.device(X)) for b in _xp.row_blocks(X)]
        return D, codes

    def _check_init(self, X: Array) -> Array:
        """Validate an array of starting atoms; a host array is brought to the library and device of X."""
        given = check_rows(self.init, name="init", owner="SemiNMF")
        if given.shape[1] != X.shape[1]:
            raise ValueError(f"init has {given.shape[1]} features, but X has {X.shape[1]} features.")
        if not _xp.is_foreign(given):
            return _xp.asarray_like(given, X)
        if _xp.array_namespace(given) is not _xp.array_namespace(X):
            raise ValueError("init must be an array of the library of X, or a numpy array.")
        return given

    def transform(self, X: Any) -> Array:
        """Return the exact codes of the rows.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows in the library and on the device of the fit.

        Returns
        -------
        array of shape (n_samples, n_components)
            The minimiser of ``||x - z @ components_||² / 2 + penalty_ * sum(z)`` over z >= 0 for each row; dtype of
            `X`.
        """
        check_is_fitted(self, "components_")
        self._check_fitted_library(X, "components_", "transform")
        Z, residual = encode(self._check_X(X, reset=False), self.components_, self.penalty_)
        self._warn_inexact(residual)
        return Z

    def inverse_transform(self, X: Any) -> Array:
        """Return the rows that have the given codes.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_components)
            Codes, as :meth:`transform` returns them.

        Returns
        -------
        array of shape (n_samples, n_features)
            ``X @ components_``.
        """
        check_is_fitted(self, "components_")
        return expand(self._check_codes(X), self.components_)

    def _warn_inexact(self, residual: float) -> None:
        if residual > _KKT_LIMIT:
            warnings.warn(
                f"Some codes are not exact (relative residual {residual:.2g}): atoms are nearly dependent. Lower "
                "n_components or raise alpha.",
                ConvergenceWarning,
                stacklevel=3,
            )
