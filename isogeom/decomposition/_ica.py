"""Independent component analysis: streamed whitening, FastICA steps, Picard-O to a gradient tolerance."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from isogeom import _random, _xp
from isogeom._linalg import fix_signs, row_norms
from isogeom._validation import IterativeMixin, check_choice, check_integer, check_real, warn_user
from isogeom._xp import Array
from isogeom.decomposition._base import Decomposition, expand, project
from isogeom.decomposition._ica_contrasts import CONTRASTS, Contrast, gaussian_reference, gaussian_threshold
from isogeom.decomposition._ica_whitening import Spectrum, principal_spectrum, whiten
from isogeom.decomposition._picard import Solution, minimise, polar, warm_start

# FastICA steps before Picard-O takes over, and the largest turn of a row (1 - |cos|) at which they end early.
_WARM_STEPS, _WARM_TURN = 20, 1e-2


class ICA(IterativeMixin, Decomposition):
    r"""Independent component analysis, solved to a gradient tolerance, on numpy arrays and torch tensors alike.

    Rows are written as ``X ≈ Z @ dictionary_ + mean_``, with sources Z of unit variance that are as far from Gaussian
    as possible. The atoms are the *mixing columns*; ``components_`` holds the unmixing rows, as in scikit-learn, and is
    not a dictionary. A few FastICA steps give a start, Picard-O (L-BFGS over rotations) finishes: unlike the fixed
    point, it also ends at a stationary point where the independence model does not hold.

    Parameters
    ----------
    n_components : int or None, default=None
        Number of sources, at least 1 and at most the numerical rank of the centred data; None for that rank (with a
        warning if it is below ``min(n_samples - 1, n_features)``).
    fun : {"logcosh", "exp", "cube"}, default="logcosh"
        Contrast G: log cosh u, -exp(-u²/2) or u⁴/4. The last is the kurtosis, sensitive to outliers.
    max_iter : int, default=500
        Largest number of iterations of a start, at most one pass over the whitened rows each (a few more where a step
        is shortened).
    tol : float, default=1e-6
        Iterations stop once ``gradient_norm_`` is at most this. FastICA with scikit-learn's default tolerance stops
        between 1e-3 and 1e-5. float32 rows allow about 3e-7, float64 rows about 1e-13.
    n_init : int, default=1
        Number of random starts. The one with the largest sum of deviations from the Gaussian contrast is kept.
    random_state : int, Generator, RandomState or None, default=None
        Seed of the starting rotations. The draw is made on the host: the same seed starts every library alike.

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
    contrast_signs_ : array of shape (n_components,)
        1 for sources whose mean contrast was minimised, -1 where it was maximised: with "logcosh" and "exp", 1 stands
        for heavier and -1 for lighter tails than a Gaussian's; with "cube" the other way round.
    non_gaussianity_ : array of shape (n_components,)
        Deviation of the mean contrast from a Gaussian's, in units of what a search in Gaussian rows would reach by
        chance; see Notes.
    n_gaussian_ : int
        Number of sources with ``non_gaussianity_`` of at most 1. Two or more of them cannot be told apart: any
        rotation within their span fits as well. One is what the others leave, and identifiable if there are others.
    stability_ : array of shape (n_components,) or None
        Reproducibility of each source over the other starts, 0 to 1: mean of the absolute correlation with its match
        there, under the one-to-one matching of largest sum. None if ``n_init=1``.
    gradient_norm_ : float
        Certificate of the solution, 0 at a stationary point; see Notes.
    objective_path_ : tuple of float
        Objective relative to Gaussian sources, where Picard-O computes it: at the start, after every tenth iteration
        or more often, and at the end; see Notes. It falls, except where a source changes its sign.
    n_components_ : int
        Number of sources.
    n_iter_ : int
        Number of iterations of the start that was kept: FastICA steps and Picard-O iterations.
    converged_ : bool
        Whether the stopping rule was met.
    n_features_in_ : int
        Number of features seen during fit.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, where `X` has string column names.

    Warns
    -----
    ConvergenceWarning
        If the gradient is above `tol` at the end; the message gives it, and the iterations made.
    UserWarning
        If ``n_gaussian_`` is at least 2 or the only source is Gaussian, or if ``n_components=None`` meets data of lower
        rank.

    See Also
    --------
    isogeom.decomposition.PCA : Uncorrelated rather than independent codes.
    isogeom.decomposition.SemiNMF : Nonnegative codes.

    Notes
    -----
    Over orthogonal W, with whitened rows y, sources ``s = W y`` and signs :math:`\sigma_i = \operatorname{sign}(E[
    g'(s_i)] - E[s_i g(s_i)])`, ICA minimises

    .. math:: L(W) = \sum_i \sigma_i \left( E[G(s_i)] - E[G(\nu)] \right), \qquad \nu \sim N(0, 1).

    Along :math:`W \mapsto \exp(E) W` with E skew, the gradient is the skew part of :math:`\sigma_i E[g(s_i) s_j]`,
    whose largest entry is ``gradient_norm_``. L-BFGS is preconditioned by the second derivative in the plane of each
    pair (i, j), the size of :math:`(h_{ij} + h_{ji}) / 2`, :math:`h_{ij} = \sigma_i (E[g'(s_i) s_j^2] - E[s_i
    g(s_i)])`. Steps are accepted by the slope at their end, the approximate Wolfe condition of Hager and Zhang; where
    the objective, computed at every tenth point, shows that one has led uphill, the objective accepts all those that
    follow. The signs follow the sources, so that heavy- and light-tailed ones are found together; a source that
    changed its sign three times keeps it.

    The FastICA steps use evenly spaced rows, 300 per source and at least 8192; Picard-O uses all rows. While the
    largest entry of the gradient lies between sources that are hard to tell apart (a curvature :math:`(h_{ij} +
    h_{ji}) / 2` below 0.03), only these are turned, at the cost of so many sources; ``gradient_norm_`` is that of all
    pairs.

    Callbacks (``set_callbacks``) get a step for every FastICA step, with the largest turn of a source in it (1 - |cos|)
    as ``change``, and one for every iteration of Picard-O, with ``objective``, the last one known, and
    ``gradient_norm``.

    Whitening comes from moments with the mean taken off first. float32 rows are multiplied in float32 where the last
    variance kept is at least 0.001 of the largest, and their whitened coordinates are then whitened once more;
    otherwise products run in float64. Where all variance left out, together, is below the last variance kept, passes
    with a few directions replace the product over all features; their angle to the leading directions is proved to be
    at most 1e-4. Rows with a mean of 1000 and data in tiny units are safe. Variances have divisor
    ``n_samples``.

    A source is called Gaussian if :math:`|E[G(s_i)] - E[G(\nu)]| \le \tau (1.794 \sqrt{k - 1} + \sqrt{2 \ln 200}) /
    \sqrt{n}`, where :math:`\tau^2 = \operatorname{Var} G(\nu) - E[\nu g(\nu)]^2 / 2` is the variance of one
    standardised Gaussian row. The first term is the largest value that a random quartic form, the leading part of the
    deviation, takes on the sphere of directions; the second bounds the fluctuation of that maximum at a chance of
    0.01. Rows are taken as independent. It judges by `fun`, an even function: a source that is only skewed looks
    Gaussian.

    References
    ----------
    Ablin, Cardoso, Gramfort, "Faster ICA under orthogonal constraint", ICASSP 2018. https://arxiv.org/abs/1711.10873

    Ablin, Cardoso, Gramfort, "Faster independent component analysis by preconditioning with Hessian approximations",
    IEEE Transactions on Signal Processing 66(15), 2018. https://arxiv.org/abs/1706.08171

    Hyvärinen, "Fast and robust fixed-point algorithms for independent component analysis", IEEE Transactions on Neural
    Networks 10(3), 1999. https://doi.org/10.1109/72.761722

    Hager, Zhang, "A new conjugate gradient method with guaranteed descent and an efficient line search", SIAM Journal
    on Optimization 16(1), 2005. https://doi.org/10.1137/030601880

    Himberg, Hyvärinen, Esposito, "Validating the independent components of neuroimaging time series via clustering
    and visualization", NeuroImage 22(3), 2004. https://doi.org/10.1016/j.neuroimage.2004.03.027

    Auffinger, Ben Arous, Černý, "Random matrices and complexity of spin glasses", Communications on Pure and Applied
    Mathematics 66(2), 2013. https://doi.org/10.1002/cpa.21422

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
    >>> ica.converged_, bool(ica.gradient_norm_ <= 1e-6), ica.n_gaussian_
    (True, True, 0)
    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        fun: str = "logcosh",
        max_iter: int = 500,
        tol: float = 1e-6,
        n_init: int = 1,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.fun = fun
        self.max_iter = max_iter
        self.tol = tol
        self.n_init = n_init
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
        contrast = CONTRASTS[check_choice(self.fun, "fun", tuple(CONTRASTS))]
        max_iter = check_integer(self.max_iter, "max_iter", low=1)
        tol = check_real(self.tol, "tol", low=0)
        n_init = check_integer(self.n_init, "n_init", low=1)
        rng = _random.check_rng(self.random_state, "random_state")
        wanted = None if self.n_components is None else check_integer(self.n_components, "n_components", low=1)
        X = self._check_X(X, reset=True, min_samples=2)
        xp = _xp.array_namespace(X)

        spectrum = principal_spectrum(X, wanted)
        k = self._resolve_n_components(wanted, spectrum, *X.shape)
        Y, whitening, dewhitening = whiten(X, spectrum, k)
        runs = []
        # How many iterations a fit takes is not known before.
        with self._iterations(None, X) as report:
            for _ in range(n_init):
                W, steps = polar(_random.standard_normal(rng, (k, k), whitening)), 0
                if k > 1:
                    most = min(_WARM_STEPS, max_iter)
                    W, steps = warm_start(Y, W, contrast, max_steps=most, tol=_WARM_TURN, step=report)
                left = 0 if report.stop_requested else max_iter - steps
                runs.append((steps, minimise(Y, W, contrast, max_iter=left, tol=tol, step=report)))
                if report.stop_requested:
                    break
        deviations = [_non_gaussianity(run, contrast, X.shape[0]) for _, run in runs]
        best = max(range(len(runs)), key=lambda i: float(xp.sum(deviations[i])))
        steps, solution = runs.pop(best)
        stability = _stability(solution.point.W, [run.point.W for _, run in runs])
        self._store(X, spectrum.mean, solution, (whitening, dewhitening), (deviations[best], stability))

        self.n_iter_ = max(1, steps + solution.n_iter)
        self.gradient_norm_ = solution.gradient_norm
        self.objective_path_ = solution.path
        self.converged_ = solution.gradient_norm <= tol
        self._warn(tol, exhausted=self.n_iter_ >= max_iter, stopped=report.stop_requested)
        return self

    def _store(
        self,
        X: Array,
        mean: Array,
        solution: Solution,
        maps: tuple[Array, Array],
        reports: tuple[Array, Array | None],
    ) -> None:
        """Order the sources by energy, fix their signs, and set the arrays in the dtype of `X`."""
        xp = _xp.array_namespace(X)
        (whitening, dewhitening), (deviations, stability) = maps, reports
        atoms = xp.matmul(solution.point.W, dewhitening)
        order = xp.argsort(row_norms(atoms), descending=True)
        W, atoms = xp.take(solution.point.W, order, axis=0), xp.take(atoms, order, axis=0)
        signed = fix_signs(atoms)
        W = W * xp.expand_dims(xp.sign(xp.sum(signed * atoms, axis=1)), axis=1)

        self.n_components_ = int(W.shape[0])
        self.mean_ = xp.astype(mean, X.dtype)
        self.whitening_ = xp.astype(whitening, X.dtype)
        self.components_ = xp.astype(xp.matmul(W, whitening), X.dtype)
        self.mixing_ = xp.astype(xp.matrix_transpose(signed), X.dtype)
        self.contrast_signs_ = xp.astype(xp.take(solution.signs, order), X.dtype)
        self.stability_ = None if stability is None else xp.astype(xp.take(stability, order), X.dtype)
        self.n_gaussian_ = int(xp.count_nonzero(deviations <= 1))
        self.non_gaussianity_ = xp.astype(xp.take(deviations, order), X.dtype)

    def _resolve_n_components(self, wanted: int | None, spectrum: Spectrum, n: int, d: int) -> int:
        """Turn the parameter into a number of sources."""
        rank = spectrum.rank
        if rank == 0:
            raise ValueError(
                f"ICA needs rows that differ, got n_samples={n} equal rows (n_features={d}): the centred data has "
                "numerical rank 0."
            )
        if wanted is not None:
            if wanted > rank:
                raise ValueError(
                    f"n_components={wanted} must be at most the numerical rank of the centred data, {rank} "
                    f"(n_samples={n}, n_features={d}): lower it, or pass None for the rank."
                )
            return wanted
        if rank < min(n - 1, d):
            warn_user(
                f"The centred data has numerical rank {rank}, below min(n_samples - 1, n_features)={min(n - 1, d)}: "
                f"n_components=None is taken as {rank}.",
                UserWarning,
            )
        return rank

    def _warn(self, tol: float, *, exhausted: bool, stopped: bool) -> None:
        """Report Gaussian sources, and a gradient above the tolerance."""
        if self.n_gaussian_ == self.n_components_ == 1:
            warn_user(
                f"n_gaussian_=1: the only source cannot be told from a Gaussian one (fun={self.fun!r}), and its "
                "direction, that of the largest variance, is not identifiable as a source. Raise n_components, or pass "
                "more rows.",
                UserWarning,
            )
        elif self.n_gaussian_ >= 2:
            warn_user(
                f"n_gaussian_={self.n_gaussian_} of {self.n_components_} sources cannot be told from Gaussian ones "
                f"(fun={self.fun!r}): the rotation within their span is not identifiable. Lower n_components, pass "
                "more rows, or use only the sources with non_gaussianity_ > 1.",
                UserWarning,
            )
        if not self.converged_ and not stopped:
            advice = "Raise max_iter" if exhausted else "No step lowered the objective by more than rounding: raise tol"
            warn_user(
                f"ICA did not converge in {self.n_iter_} iterations: the gradient norm is {self.gradient_norm_:.2g}, "
                f"above tol={tol:.2g}. {advice}, or lower n_components: Gaussian directions cannot be separated.",
                ConvergenceWarning,
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


def _non_gaussianity(solution: Solution, contrast: Contrast, n: int) -> Array:
    """Return the deviation of every source's mean contrast from a Gaussian's, in units of the threshold."""
    values = solution.point.values
    gaussian, threshold = gaussian_reference(contrast.name)[0], gaussian_threshold(contrast.name, n, values.shape[0])
    return _xp.array_namespace(values).abs(values - gaussian) / threshold


def _stability(W: Array, others: list[Array]) -> Array | None:
    """Return the mean absolute correlation of each source with its match in the other rotations (None if none)."""
    if not others:
        return None
    xp = _xp.array_namespace(W)
    matched = np.zeros(W.shape[0])
    for other in others:
        # Whitened coordinates are uncorrelated: products of rotations are correlations of sources.
        correlations = np.abs(_xp.to_numpy(xp.matmul(W, xp.matrix_transpose(other))))
        rows, columns = linear_sum_assignment(correlations, maximize=True)
        matched[rows] += correlations[rows, columns]
    return _xp.asarray_like(np.minimum(matched / len(others), 1.0), W)
