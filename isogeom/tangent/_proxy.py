"""The tangent proxy: a low-rank space of directions fitted on activations, then kept."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.utils import get_tags
from sklearn.utils.validation import check_is_fitted

from isogeom import _xp
from isogeom._linalg import captured, complement_basis, eigh_descending, eigh_top, remove_directions
from isogeom._moments import Moments
from isogeom._validation import (
    Transformer,
    check_beside,
    check_choice,
    check_integer,
    check_sample_rows,
)
from isogeom._xp import Array
from isogeom.decomposition import PCA
from isogeom.decomposition._base import expand, project
from isogeom.tangent._dictionary import check_decomposition, pca_directions, weighted_directions

CONTROLS = ("next", "complement", "lowest")


class TangentProxy(Transformer):
    """Low-rank proxy of the tangent space of a representation, from any decomposition of its activations.

    The decomposition is fitted on activations; the span of its atoms, cut to `n_directions`, is the proxy. Gradients
    are then compared with it: pass them as `y` to :meth:`score`, so that ``GridSearchCV(TangentProxy(), ...,
    cv=TimeSeriesSplit()).fit(X, G)`` fits on early activations and scores on later gradients.

    Parameters
    ----------
    decomposition : estimator, default=None
        Any decomposition with ``dictionary_``, ``mixing_`` or ``components_`` after `fit`, from isogeom or
        scikit-learn; cloned and fitted here. None means :class:`isogeom.decomposition.PCA`. Wrap a fitted one in
        :class:`sklearn.frozen.FrozenEstimator` to use it as it is. It sees the rows unchanged: PCA and ICA centre
        themselves, Semi-NMF does not centre.
    n_directions : int, float or None, default=None
        Rank r of the proxy: an int in [1, n_features - 1]; a float in (0, 1) for the smallest rank whose directions
        hold that share of the variance of the activations; None for ``min(16, n_features // 2)``, at least 1 and at
        most the rank of the dictionary.

    Attributes
    ----------
    basis_ : array of shape (n_directions_, n_features)
        Orthonormal rows spanning the proxy (Q_T), strongest direction first. Same library, device and dtype as `X`.
    n_directions_ : int
        Rank of the proxy.
    variance_share_ : float
        Share of the centred variance of the activations inside the proxy, 0 to 1.
    mean_ : array of shape (n_features,)
        Mean of the activations.
    covariance_ : array of shape (n_features, n_features)
        Covariance of the activations, in float64; the normal controls are drawn from it.
    decomposition_ : estimator
        The fitted decomposition.
    n_features_in_ : int
        Number of features seen during fit.

    See Also
    --------
    tangent_alignment_test : Test gradients against normal controls and nulls.

    Notes
    -----
    With codes Z and dictionary D, the directions are the first r right singular vectors of ``diag(rms(Z)) @ D``: the
    atoms weighted by how much they are used. For PCA these are the leading components; and for ICA too: its sources are
    uncorrelated with unit variance, so ``D.T @ D`` is the covariance on their span, and an ICA proxy has the axes of
    PCA. The rank test is relative to the largest singular value, at ``n_features * eps`` of the dtype of `X`.

    References
    ----------
    Bernas, Jourdan, Poché, Hudelot, "Revisiting Anisotropy in Language Transformers: The Geometry of Learning
    Dynamics", 2026. https://arxiv.org/abs/2604.08764

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.tangent import TangentProxy
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((500, 6)) * [5, 4, 0.1, 0.1, 0.1, 0.1]
    >>> proxy = TangentProxy(n_directions=2).fit(X)
    >>> proxy.basis_.shape
    (2, 6)
    >>> G = np.eye(6)[:3]  # two gradients inside the proxy, one outside
    >>> round(proxy.share(G), 3)
    0.667
    """

    def __init__(self, decomposition: Any = None, *, n_directions: int | float | None = None) -> None:
        self.decomposition = decomposition
        self.n_directions = n_directions

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # What is no estimator is reported by fit, which names the parameter.
        if hasattr(self.decomposition, "__sklearn_tags__") and not isinstance(self.decomposition, type):
            inner = get_tags(self.decomposition)
            tags.array_api_support = inner.array_api_support
            tags.non_deterministic = inner.non_deterministic
            tags.input_tags.positive_only = inner.input_tags.positive_only
        return tags

    @property
    def _n_features_out(self) -> int:
        return self.n_directions_

    def fit(self, X: Any, y: Any = None) -> TangentProxy:  # noqa: ARG002
        """Fit the decomposition on activations and keep the span of its atoms.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features), or Moments
            Activations, at least 2 rows and 2 features. Moments are enough for PCA.
        y : ignored
            Gradients or labels are never used here.

        Returns
        -------
        TangentProxy
            This estimator.

        Raises
        ------
        ValueError
            If `X` has no variance, or `n_directions` exceeds the rank of the dictionary or leaves no normal space.
        TypeError
            If the decomposition has no dictionary, or `X` is Moments and the decomposition needs rows.
        """
        base = PCA() if self.decomposition is None else check_decomposition(self.decomposition)
        streamed = isinstance(X, Moments)
        if streamed:
            moments = self._check_moments(X, base)
            dtype = moments.scatter.dtype
        else:
            X = self._check_X(X, reset=True, min_samples=2, min_features=2)
            moments = Moments().update(X)
            dtype = X.dtype
        # PCA depends on the rows through their moments alone: no second pass over X.
        by_moments = type(base) is PCA
        # Given by position: FrozenEstimator, the way to pass a fitted decomposition, has no default for y.
        self.decomposition_ = clone(base).fit(moments if by_moments else X, None)
        self.mean_ = moments.mean
        self.covariance_ = moments.covariance()
        if by_moments:
            rows, strengths = pca_directions(self.decomposition_)
        else:
            rows, strengths = weighted_directions(self.decomposition_, X)
        xp = _xp.array_namespace(rows)
        eps = float(xp.finfo(dtype).eps)
        rank = int(np.sum(strengths > strengths[0] * eps * max(rows.shape))) if strengths[0] > 0 else 0
        shares = self._variance_shares(rows)
        self.n_directions_ = r = self._resolve_n_directions(rank, shares)
        self.variance_share_ = float(shares[r - 1])
        self.basis_ = xp.astype(rows[:r, :], dtype)
        self.mean_ = xp.astype(self.mean_, dtype)
        return self

    def _check_moments(self, moments: Moments, base: Any) -> Moments:
        if type(base) is not PCA:
            raise TypeError(
                f"{type(base).__name__} needs rows, got Moments: pass the activations, or use decomposition=PCA() (a "
                "fitted or other decomposition is weighted by its codes, which moments do not hold)."
            )
        # Names seen by an earlier fit on a frame mean nothing for moments.
        if hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        if (moments.n_features or 0) < 2 or moments.count < 2:
            raise ValueError(f"TangentProxy needs moments of at least 2 rows and 2 features, got {moments!r}.")
        self.n_features_in_ = int(moments.n_features or 0)
        return moments

    def _variance_shares(self, rows: Array) -> np.ndarray:
        """Share of the centred variance inside the first 1, 2, ... directions."""
        xp = _xp.array_namespace(rows)
        rows = xp.astype(rows, self.covariance_.dtype)
        total = float(xp.linalg.trace(self.covariance_))
        if total <= 0:
            raise ValueError(
                "X has no variance (all rows are equal), so it has no tangent directions: check that the activations "
                "are not constant or all zero."
            )
        each = xp.sum(xp.matmul(rows, self.covariance_) * rows, axis=1)
        return np.minimum(np.cumsum(_xp.to_numpy(each)) / total, 1.0)

    def _resolve_n_directions(self, rank: int, shares: np.ndarray) -> int:
        d = self.n_features_in_
        r = self.n_directions
        if rank == 0:
            raise ValueError(
                "The dictionary of the decomposition is zero: it spans no direction. Refit it with other settings."
            )
        if r is None:
            return min(max(1, min(16, d // 2)), rank)
        if isinstance(r, (float, np.floating)) and not isinstance(r, numbers.Integral):
            if not 0 < r < 1:
                raise ValueError(
                    f"n_directions={r!r} must lie strictly between 0 and 1 when it is a float (share of variance to "
                    "reach); pass an int for a rank."
                )
            reachable = min(rank, d - 1)
            if shares[reachable - 1] < r:
                raise ValueError(
                    f"n_directions={r!r} is out of reach: the dictionary's {reachable} directions hold "
                    f"{shares[reachable - 1]:.4f} of the variance. Ask for less, or raise the decomposition's "
                    "n_components."
                )
            return int(np.argmax(shares >= r)) + 1
        r = check_integer(r, "n_directions", low=1)
        if r >= d:
            raise ValueError(f"n_directions={r} leaves no normal space: it must be below n_features={d}.")
        if r > rank:
            raise ValueError(
                f"n_directions={r} exceeds the rank {rank} of the dictionary of "
                f"{type(self.decomposition_).__name__}: lower it, raise the decomposition's n_components or add rows."
            )
        return r

    def transform(self, X: Any) -> Array:
        """Return the tangent coordinates of rows.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Gradients or activations; they are not centred.

        Returns
        -------
        array of shape (n_samples, n_directions)
            ``X @ basis_.T``.
        """
        check_is_fitted(self, "basis_")
        self._check_fitted_library(X, "basis_", "transform")
        X = self._check_X(X, reset=False)
        return project(X, self.basis_)

    def inverse_transform(self, X: Any) -> Array:
        """Return the rows inside the proxy that have given coordinates.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_directions)
            Coordinates, as :meth:`transform` returns them.

        Returns
        -------
        array of shape (n_samples, n_features)
            ``X @ basis_``.
        """
        check_is_fitted(self, "basis_")
        self._check_fitted_library(X, "basis_", "inverse_transform")
        Z = check_sample_rows(X, name="X", owner="TangentProxy", n_features=self.n_directions_)
        return expand(Z, self.basis_)

    def share(self, G: Any) -> float:
        """Return the share of the energy of gradients inside the proxy.

        Parameters
        ----------
        G : array-like of shape (n_samples, n_features), or Moments
            Gradients; they are not centred.

        Returns
        -------
        float
            ``||G basis_.T||_F**2 / ||G||_F**2``, 0 to 1; n_directions / n_features is chance.

        Raises
        ------
        ValueError
            If every gradient is zero.
        """
        check_is_fitted(self, "basis_")
        return self._energy(self._gradient_gram(G))[0]

    def score(self, X: Any, y: Any = None) -> float:
        """Return the log of the energy ratio to the mean matched-rank normal subspace.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Activations. They are scored themselves, centred at `mean_`, when `y` holds no gradients.
        y : array-like of shape (n_gradients, n_features), default=None
            Gradients. None and one-dimensional labels are ignored.

        Returns
        -------
        float
            ``log(e_T (d - r) / ((1 - e_T) r))``: 0 at chance, higher is better, within about ±45 (the share is kept
            one rounding unit away from 0 and 1). It moves with the rank by itself, down where few directions are
            strong and up where the spectrum falls slowly: compare decompositions at equal rank, and use
            :func:`share_scorer` or :func:`zscore_scorer` to look along ranks.

        Raises
        ------
        ValueError
            If `y` is two-dimensional with another number of columns than `X`, or every row to score is zero.
        """
        check_is_fitted(self, "basis_")
        share, _ = self._energy(self._scored_gram(X, y))
        eps = float(np.finfo(np.float64).eps)
        share = min(max(share, eps), 1 - eps)
        r, d = self.n_directions_, self.n_features_in_
        return math.log(share * (d - r) / ((1 - share) * r))

    def normal_control(self, control: str = "next") -> Array:
        """Return a deterministic subspace of the normal space with the rank of the proxy.

        Parameters
        ----------
        control : {"next", "complement", "lowest"}, default="next"
            "next": the next principal directions of the activations inside the normal space; "lowest": the last ones;
            "complement": the first rows that complete the proxy to a basis (QR), whatever the data.

        Returns
        -------
        array of shape (n_directions_, n_features)
            Orthonormal rows (Q_N), orthogonal to `basis_`.

        Raises
        ------
        ValueError
            If ``2 * n_directions_ > n_features``: the normal space is then too small for a matched control.
        """
        check_is_fitted(self, "basis_")
        check_choice(control, "control", CONTROLS)
        r, d = self.n_directions_, self.n_features_in_
        if 2 * r > d:
            raise ValueError(
                f"No matched-rank normal control exists: n_directions={r} is more than half of n_features={d}. Fit "
                f"the proxy with n_directions <= {d // 2}."
            )
        xp = _xp.array_namespace(self.basis_)
        tangent = self._basis64()
        if control == "complement":
            return xp.astype(complement_basis(tangent)[:r, :], self.basis_.dtype)
        # Shifting the tangent directions below every variance leaves the normal ones first, with no basis to build.
        shift = float(xp.linalg.trace(self.covariance_))
        deflated = remove_directions(self.covariance_, tangent)
        deflated = deflated - shift * xp.matmul(xp.matrix_transpose(tangent), tangent)
        axes = eigh_top(deflated, r)[1] if control == "next" else eigh_descending(deflated)[1][d - 2 * r : d - r, :]
        return xp.astype(axes, self.basis_.dtype)

    def _basis64(self) -> Array:
        """The basis in the accumulator's dtype, orthonormal to that precision."""
        xp = _xp.array_namespace(self.basis_)
        basis = xp.astype(self.basis_, self.covariance_.dtype)
        q, upper = xp.linalg.qr(xp.matrix_transpose(basis), mode="reduced")
        # QR may flip directions; the diagonal of R says which.
        signs = xp.sign(xp.linalg.diagonal(upper))
        return xp.matrix_transpose(q * signs)

    def _check_gradient_moments(self, G: Moments) -> Moments:
        """Validate moments of gradients: some rows, as many features, beside the proxy."""
        if G.count == 0:
            raise ValueError("G has moments of no rows: add gradients with update() first.")
        if G.n_features != self.n_features_in_:
            raise ValueError(
                f"G has moments of {G.n_features} features, but the proxy was fitted on {self.n_features_in_} features."
            )
        check_beside(G.mean, self.basis_, name="G")
        return G

    def _gradient_gram(self, G: Any, name: str = "G") -> Array:
        """Uncentred second moments of gradients, in the accumulator's dtype."""
        if isinstance(G, Moments):
            return self._check_gradient_moments(G).gram()
        G = check_sample_rows(G, name=name, owner="TangentProxy", n_features=self.n_features_in_, like=self.basis_)
        return Moments().update(G).gram()

    def _scored_gram(self, X: Any, y: Any) -> Array:
        """Second moments of what `score` looks at: the gradients in `y`, or the centred rows of `X`."""
        if isinstance(y, Moments):
            return self._gradient_gram(y)
        shape = () if y is None else tuple(y.shape) if hasattr(y, "shape") else np.shape(y)
        if y is not None and len(shape) != 1:
            if len(shape) != 2 or shape[1] != self.n_features_in_:
                raise ValueError(
                    f"y has shape {shape}, but gradients must have {self.n_features_in_} columns like X: pass "
                    f"gradients of "
                    "shape (n_gradients, n_features), one-dimensional labels, or None."
                )
            return self._gradient_gram(y, "y")
        self._check_fitted_library(X, "basis_", "score")
        X = self._check_X(X, reset=False)
        xp = _xp.array_namespace(X)
        moments = Moments().update(X)
        delta = moments.mean - xp.astype(self.mean_, moments.mean.dtype)
        return moments.scatter + xp.expand_dims(delta, axis=1) * xp.expand_dims(delta, axis=0) * moments.count

    def _energy(self, gram: Array) -> tuple[float, float]:
        """Share of the energy inside the proxy, and the total energy."""
        xp = _xp.array_namespace(gram)
        total = float(xp.linalg.trace(gram))
        if not total > 0:
            raise ValueError(
                "Every row is zero, so its energy share is 0/0: check that the loss depends on this layer and that "
                "padding was excluded."
            )
        return min(max(captured(self._basis64(), gram) / total, 0.0), 1.0), total
