"""Semi-nonnegative matrix factorisation: nonnegative codes, a dictionary of free sign."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from isogeom import _random
from isogeom._callbacks import IterativeMixin
from isogeom._xp import Array
from isogeom.decomposition._base import Decomposition, expand, floating_dtype
from isogeom.decomposition._interpret import RefinementResult, refine
from isogeom.decomposition._rows import Rows, open_rows
from isogeom.decomposition._semi_codes import encode
from isogeom.decomposition._semi_fit import Settings, check_start, fit_rows
from isogeom.decomposition._semi_report import check_stream, forget, report, update, warn_inexact


def _can_stream(model: Any) -> bool:
    if model.center:
        raise AttributeError("center=True cannot be streamed: subtract the mean first, or use fit_batches.")
    return True


class SemiNMF(IterativeMixin, Decomposition):
    r"""Semi-NMF with unit atoms, a scale-free l1 penalty on the codes and certificates of the fit.

    Rows are written as ``X ≈ Z @ components_`` with nonnegative codes Z and atoms of free sign. By default the penalty
    makes the atoms identifiable; ``alpha=0`` is the plain model of Ding, Li and Jordan, whose atoms are generally not
    unique.

    Parameters
    ----------
    n_components : int or None, default=None
        Number of atoms, at least 1; it may exceed the number of features or of samples. None for
        ``min(n_samples, n_features)``, or the number of rows of an `init` array.
    alpha : float, default=0.05
        Weight of the l1 penalty relative to the mean norm of the rows, nonnegative; it means the same whatever the
        units of X and the numbers of rows and features. 0.05 to 0.1 recovers sparse codes; 0 asks for the lowest
        error, whatever the codes.
    ridge : float, default=0.0
        Weight of half the sum of squared codes, nonnegative; free of units, as atoms have norm 1. It makes the codes
        unique, and smooth in X, even where atoms are dependent.
    init : {"auto", "kmeans", "svd", "random"} or array of shape (n_components, n_features), default="auto"
        Start: directions of k-means centres; the construction whose error is that of the SVD of rank
        ``n_components - 1`` (the final error is then at most that if `alpha` and `ridge` are 0); Gaussian directions;
        or given atoms. "auto" lets the three kinds of start compete for the lowest objective: from time to time, those
        that lag by more than they are likely to gain are left. Where rows abound (4096 or more, and 40
        times `n_components`), penalised starts compete on a sample of them. If `alpha` and `ridge` are 0, it first
        tries the closed-form optimum (see Notes), and ends with a k-means start that comes within a tenth of the SVD's
        objective.
    n_init : int, default=1
        Number of k-means and random starts; the lowest objective wins.
    max_iter : int, default=300
        Largest number of iterations.
    tol : float, default=1e-5
        Iterations stop once the objective falls by at most this share of itself in the last ten of them.
    sort_by : {"energy", "codes"}, default="energy"
        Order of the atoms: falling unique energy (see `energies_`), or falling sum of squared codes.
    center : bool, default=False
        Whether to subtract the mean of the rows first. That turns a cone of rows into a ball, which nonnegative codes
        follow badly: the error of the SVD is then never reached.
    chunk_size : int or None, default=None
        Rows held in float64 at a time; None for 2048, or fewer if rows are long. It
        changes results by rounding only.
    random_state : int, Generator, RandomState or None, default=None
        Seed of the starts. Draws are made on the host: the same seed starts every library alike.

    Attributes
    ----------
    components_ : array of shape (n_components, n_features)
        Atoms of unit norm as rows, ordered by `sort_by`. Same library and device as `X`; dtype of `X` if that is
        float32 or float64, float32 for half precision, float64 for integers and booleans.
    dictionary_ : array of shape (n_components, n_features)
        The same atoms, under the name shared by all decompositions.
    energies_ : array of shape (n_components,)
        Energy of every atom. Unique energy is the rise of the squared error if the atom were dropped and the others
        refitted to the same codes (exact where the atoms are the least-squares ones for the codes, as for `alpha` 0).
    code_density_ : float
        Share of nonzero codes of the training rows, 0 to 1.
    atom_coherence_ : float
        Largest absolute cosine between two atoms, 0 to 1.
    n_dead_atoms_, n_duplicate_atoms_ : int
        Number of atoms that no training row uses, and of atoms (not pairs) at cosine above 0.99 to an earlier one:
        signs that `n_components` is too large.
    mean_ : array of shape (n_features,) or None
        Mean of the training rows if `center`.
    penalty_ : float
        Absolute weight of the l1 penalty: `alpha` times the mean norm of the training rows.
    reconstruction_err_ : float
        Frobenius norm of ``X - Z @ components_`` on the training rows.
    svd_bound_, svd_bound_prev_ : float
        Frobenius errors of the truncated SVD of rank ``n_components`` and ``n_components - 1``: no fit is below the
        first; a plain fit need not be above the second.
    attains_svd_bound_ : bool
        Whether ``reconstruction_err_ ** 2`` exceeds ``svd_bound_ ** 2`` by at most 2e-6 of it plus 1e-12 of the squared
        norm of the rows: no better fit exists, to that accuracy.
    code_cancellation_ : float
        Mean over the rows of ``sum(z) / |x|``: 1 for a row on an atom; large if big codes cancel each other.
    kkt_residual_ : float
        Largest relative residual of the optimality conditions of the training codes, 0 if exact.
    objective_path_ : array of shape (n_iter_ + 1,)
        Objective at the start and after every iteration, never rising, in float64 where the device has it.
    n_components_ : int
        Number of atoms.
    n_iter_ : int
        Number of iterations from the chosen start.
    converged_ : bool
        Whether the stopping rule was met.
    stop_reason_ : {"tol", "exact", "bound", "callback", "max_iter"}
        Which one: small decreases, a fit exact to rounding, an objective within a share ``100 * tol`` of the SVD's
        (plain fits only: nothing more can be gained), a callback that asked to stop, or too many iterations.
    n_samples_seen_ : int
        Number of rows behind the fit.
    n_features_in_ : int
        Number of features seen during fit.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, where `X` has string column names.

    Warns
    -----
    ConvergenceWarning
        If `max_iter` was reached first; the message gives the last relative decrease. Also if codes are not exact.
    UserWarning
        If `code_cancellation_` exceeds 10: a lower error was bought with codes that mean little.

    See Also
    --------
    batched_nnls : The exact code step on its own.
    isogeom.decomposition.ICA : Independent codes of either sign.
    sklearn.decomposition.NMF : Nonnegative codes and atoms, for nonnegative data.

    Notes
    -----
    The objective is

    .. math:: \tfrac12 \|X - Z D\|_F^2 + \lambda \sum_{ij} Z_{ij} + \tfrac{\rho}{2} \sum_{ij} Z_{ij}^2,
        \qquad Z \ge 0, \quad \|d_j\| \le 1, \quad \lambda = \alpha \cdot \operatorname{mean}_i \|x_i\|,

    with :math:`\rho` the `ridge`. Codes move by coordinate descent, atoms by least squares (no penalty) or one at a
    time with their norm bounded (otherwise). The last codes, like those of :meth:`transform`, are the exact minimiser
    for the stored atoms, computed in float64 row by row: a row's code depends neither on its batch nor on a random
    number. It is unique unless atoms are linearly dependent.

    *Subspace.* Where `n_components` is less than a quarter of the features, iterations run on the scores of the rows on
    the leading ``n_components`` singular directions. For atoms in their span the objective differs by a constant, the
    squared error of the SVD, so that the path of the objective is that of the full rows. Up to three iterations on the
    full rows then let the atoms leave the span.

    *Closed form.* If the rows of the left singular vectors lie in an open half-space (as for positive data, or rows
    inside a cone narrower than that), plain Semi-NMF attains the error of the SVD, by a construction that "auto" uses
    if `alpha` and `ridge` are 0. Those codes are dense; centred rows never have that property.

    *Dead atoms.* An atom that no row uses is moved to the worst-fitted row, which leaves the objective unchanged, a few
    times at most; if no row has use for it (X has fewer distinct directions, or the penalty is high) it keeps its zero
    codes.

    *Fixed choices.* Atoms always have norm 1, without which `alpha` and the scale of atoms could be traded for each
    other, and codes are always exact: there are no parameters ``normalize`` and ``solver``.

    *Streams.* Atoms depend on the rows through ``Z.T @ Z`` and ``Z.T @ X`` only. :meth:`fit_batches` fits rows that do
    not fit in memory, with the same result as :meth:`fit` up to rounding; it holds codes, not rows. :meth:`partial_fit`
    adds the sums of each batch, computed for the atoms of that moment, so that every row ever seen counts alike.

    References
    ----------
    Ang, Gillis, "Accelerating nonnegative matrix factorization algorithms using extrapolation", Neural Computation
    31(2), 2019. https://arxiv.org/abs/1805.06604

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
    >>> model = SemiNMF(n_components=2, alpha=0.01, random_state=0)
    >>> np.round(model.fit_transform(X), 1) + 0.0
    array([[2.8, 0. ],
           [0. , 1. ],
           [1.4, 0. ],
           [0. , 2. ]])
    >>> np.round(model.components_, 2) + 0.0
    array([[ 0.71, -0.71,  0.  ],
           [ 0.  ,  0.  ,  1.  ]])
    >>> model.converged_
    True
    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        alpha: float = 0.05,
        ridge: float = 0.0,
        init: Any = "auto",
        n_init: int = 1,
        max_iter: int = 300,
        tol: float = 1e-5,
        sort_by: str = "energy",
        center: bool = False,
        chunk_size: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.alpha = alpha
        self.ridge = ridge
        self.init = init
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.sort_by = sort_by
        self.center = center
        self.chunk_size = chunk_size
        self.random_state = random_state

    @property
    def dictionary_(self) -> Array:
        """The atoms as rows: ``components_``."""
        return self.components_

    def fit(self, X: Any, y: Any = None) -> SemiNMF:  # noqa: ARG002
        """Fit the model.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features), or iterable of such arrays
            Rows, of any sign; a memory map, also of half precision or integers, is read block by block. Batches of rows
            (a list of arrays, a ``DataLoader``) are read as :meth:`fit_batches` reads them. An iterator or a generator,
            which can be read only once, is first copied batch by batch to a temporary file, deleted when `fit` ends.
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
        self._fit(X, keep=False)
        return self

    def fit_transform(self, X: Any, y: Any = None) -> Array:  # noqa: ARG002
        """Fit the model and return the codes of the training rows.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features), or iterable of such arrays
            Rows, of any sign, as for :meth:`fit`.
        y : None
            Ignored.

        Returns
        -------
        array of shape (n_samples, n_components)
            Nonnegative codes of all rows, the same as ``fit(X).transform(X)``; dtype of `components_`.
        """
        return self._fit(X, keep=True)

    def fit_batches(self, batches: Iterable[Any]) -> SemiNMF:
        """Fit the model to rows that come in batches, without holding them together.

        Parameters
        ----------
        batches : iterable of array-like of shape (any, n_features)
            Batches of rows in one library and on one device, alone or in a list or tuple of one, as a ``DataLoader`` of
            a ``TensorDataset`` gives them. Empty ones are passed over. They are read several times, in the same order;
            those of an iterator or a generator once, into a temporary file. Their sizes do not matter. Or one stored
            matrix that is read by slices: the rows of a harvest on disk, a dataset of HDF5 or Zarr.

        Returns
        -------
        SemiNMF
            This estimator, as after :meth:`fit` on all rows, up to rounding.

        Raises
        ------
        TypeError
            If `batches` is no iterable, or one array of rows, or a batch holds more than rows.
        ValueError
            If there is no row, a parameter is out of range, a value is not finite, or the batches change from one
            reading to the next.
        """
        self._fit(batches, keep=False, batches=True)
        return self

    @available_if(_can_stream)
    def partial_fit(self, X: Any, y: Any = None) -> SemiNMF:  # noqa: ARG002
        """Update the model with more rows: one exact code step, one atom step.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            More rows. The first call, if not after a `fit`, is a `fit`; later ones keep the order of the atoms.
        y : None
            Ignored.

        Returns
        -------
        SemiNMF
            This estimator. `reconstruction_err_` and `energies_` are then those of the codes that each row got when it
            was seen; certificates that need all rows (`svd_bound_` and the like) are removed.

        Raises
        ------
        AttributeError
            If `center` is set: the mean of a stream is known at its end only.
        ValueError
            If `n_components` or `center` have been changed since the fit: a stream keeps its atoms and its origin.
        """
        settings = Settings.of(self)
        if not hasattr(self, "components_"):
            self._fit(X, keep=False)
            return self
        check_stream(self)
        self._check_fitted_library(X, "components_", "partial_fit")
        X = self._check_X(X, reset=False, convert=False)
        forget(self)
        update(self, Rows.of_array(X, chunk=settings.chunk), settings)
        return self

    def _fit(self, X: Any, *, keep: bool, batches: bool = False) -> Array:
        """Fit to the rows of an array or of batches, and return their codes if `keep`."""
        settings = Settings.of(self)
        with open_rows(self, X, settings.chunk, batches=batches) as (rows, like):
            rng = _random.check_rng(self.random_state, "random_state")
            k, init = check_start(self, rows, like)
            with self._iterations(None) as step:
                outcome = fit_rows(rows, settings, k=k, init=init, rng=rng, like=like, keep=keep, step=step)
            return report(self, outcome, settings, like)

    def transform(self, X: Any) -> Array:
        """Return the exact codes of the rows.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows in the library and on the device of the fit.

        Returns
        -------
        array of shape (n_samples, n_components)
            The minimiser of ``||x - z @ components_||² / 2 + penalty_ * sum(z) + ridge * ||z||² / 2`` over z >= 0 for
            each row, less `mean_`; dtype of `X` if that is float32 or float64, else as for `components_`.
        """
        check_is_fitted(self, "components_")
        self._check_fitted_library(X, "components_", "transform")
        X = self._check_X(X, reset=False, convert=False)
        settings = Settings.of(self)
        rows = Rows.of_array(X, chunk=settings.chunk)
        if self.mean_ is not None:
            rows = rows.centred(rows.xp.astype(self.mean_, rows.dtype))
        D = rows.xp.astype(self.components_, rows.dtype)
        Z, residual = encode(rows, D, self.penalty_, settings.ridge, floating_dtype(X))
        warn_inexact(residual)
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
            ``X @ components_``, plus `mean_` if the rows were centred.
        """
        check_is_fitted(self, "components_")
        return expand(self._check_codes(X), self.components_, self.mean_)

    def refine(
        self,
        X: Any,
        component: int,
        *,
        X_earlier: Any = None,
        threshold: float = 0.5,
        n_components: int | None = None,
    ) -> RefinementResult:
        """Split a component into finer ones: factorise again the rows in which it is active.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to code with this model.
        component : int
            Index of the component; negative ones count from the end.
        X_earlier : array-like of shape (n_samples, n_features_earlier), default=None
            Activations of the same samples in an earlier layer, which the new model factorises. None for `X`.
        threshold : float, default=0.5
            Share of the active rows that is left out, weakest codes first, 0 to below 1.
        n_components : int or None, default=None
            Number of finer components. None for this model's parameter.

        Returns
        -------
        RefinementResult
            The new fitted model, and which rows it saw; see :func:`isogeom.decomposition.refine`.
        """
        return refine(self, X, component, X_earlier=X_earlier, threshold=threshold, n_components=n_components)
