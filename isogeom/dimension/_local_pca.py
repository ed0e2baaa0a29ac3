"""Dimension from the eigenvalues of the covariance of neighbourhoods."""

from __future__ import annotations

from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._validation import check_choice, check_real, warn_user
from isogeom._xp import Array
from isogeom.dimension._base import DimensionEstimator, Estimate
from isogeom.dimension._dependence import normal_interval
from isogeom.dimension._doubts import report_no_signal
from isogeom.dimension._overlap import patch_inflation
from isogeom.dimension._participation import CORRECTIONS
from isogeom.dimension._pca_products import patch_ratio, patch_spectra
from isogeom.dimension._pca_rules import RULES, apply_rule
from isogeom.dimension._rows_estimator import centred_patches

# Standard deviation of the median over that of the mean, for normal values.
_MEDIAN_LOSS = float(np.sqrt(np.pi / 2))
# Neighbourhoods of k rows span k - 1 dimensions: a mean above this share of these is cut off.
_SATURATED = 0.5
# Relative spreads below this are rounding.
_ROUNDING = 1e-10
_LOCAL_RULES = tuple(rule for rule in RULES if rule != "parallel")


class LocalPCADimension(DimensionEstimator):
    r"""Mean or median over rows of the dimension of their neighbourhoods, by a rule on the eigenvalues.

    Parameters
    ----------
    rule : str, default='fukunaga_olsen'
        Rule of :class:`PCADimension`; 'parallel' excepted.
    threshold : float, default=None
        Of 'share' (None for 0.95) and 'fukunaga_olsen' (0.05), 0 to 1.
    statistic : {'mean', 'median'}, default='mean'
        What `fit` makes of the local dimensions.
    bias_correction : {None, 'samples', 'features', 'both'}, default=None
        For 'participation', as in :class:`PCADimension`: with few rows per neighbourhood, 'samples' removes most bias.
    n_neighbors_local : int, default=100
        Number of rows of a neighbourhood, the row itself not counted; clipped to the number there is.
    metric : str, default='euclidean'
        'euclidean', or for numpy rows any metric of :func:`sklearn.metrics.pairwise_distances`.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row.
    anchors : int or array-like of int, default=None
        Rows whose neighbourhoods among all rows are used: that many drawn at random, or these positions. None for all.
    confidence_level : float, default=0.95
        Of `dimension_interval_`.
    n_jobs : int, default=None
        Number of threads of the search; None for one, -1 for all cores.
    random_state : int, RandomState instance, Generator or None, default=0
        Draws the anchors.

    Attributes
    ----------
    dimension_ : float
        Mean or median of the local dimensions.
    dimension_std_ : float or None
        Its standard error, corrected for the dependence of neighbourhoods that overlap. It says nothing of bias. None
        where a counting rule gives the same number everywhere, which says nothing of the error.
    dimension_interval_ : tuple of float or None
        Confidence interval; None as `dimension_std_`.
    n_samples_used_ : int
        Number of neighbourhoods.
    n_samples_dropped_ : int
        Number of neighbourhoods without variance.
    n_duplicates_ : int
        Number of rows that repeat an earlier row.
    table_ : NeighborTable
        The neighbours.
    n_features_in_ : int
        Number of features seen during `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if `X` had string column names.

    See Also
    --------
    PCADimension : The rules, on all rows at once.

    Notes
    -----
    The eigenvalues of a neighbourhood of k rows are those of its centred Gram matrix if k is at most the number of
    features, and of its covariance else; 'participation' needs none. A neighbourhood must have several times d rows and
    be small beside the radius of curvature: counts saturate at k - 1, and curvature adds dimensions. A warning tells if
    the estimate is above half of that.

    The standard error takes from theory how much neighbourhoods with rows in common are correlated, where directions
    are isotropic, and the noise from the differences between near ones. For 'participation' with 30 and 100 rows it
    was 0.86 to 1.36 times the true one over samples of 600 to 2000 rows of a sphere and a Gaussian law of dimension 5
    and a cube of dimension 3. It does not know the noise of curvature: with 30 of 300 rows on a sphere of dimension 2
    it was 0.7 times the true one. For counting rules that nearly always agree it is several times too large.

    With 100 rows and many features, each row costs an eigenvalue problem of 100 x 100, about 1 ms on one core. These
    are too small for the threads of the linear algebra: where cores are shared, ``OMP_NUM_THREADS=1`` can be faster.

    References
    ----------
    K. Fukunaga and D. R. Olsen, "An algorithm for finding intrinsic dimensionality of data", IEEE Transactions on
    Computers C-20(2), 1971. :doi:`10.1109/T-C.1971.223208`

    Examples
    --------
    >>> from isogeom.datasets import make_manifold
    >>> from isogeom.dimension import LocalPCADimension
    >>> X = make_manifold("M7", 1000).X  # a Swiss roll
    >>> LocalPCADimension(n_neighbors_local=15, statistic="median").fit(X).dimension_
    2.0
    """

    _needs_rows = True

    def __init__(
        self,
        rule: str = "fukunaga_olsen",
        threshold: float | None = None,
        *,
        statistic: str = "mean",
        bias_correction: str | None = None,
        n_neighbors_local: int = 100,
        metric: str = "euclidean",
        duplicates: str = "drop",
        anchors: Any = None,
        confidence_level: float = 0.95,
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> None:
        self.rule = rule
        self.threshold = threshold
        self.statistic = statistic
        self.bias_correction = bias_correction
        self.n_neighbors_local = n_neighbors_local
        self.metric = metric
        self.duplicates = duplicates
        self.anchors = anchors
        self.confidence_level = confidence_level
        self.n_jobs = n_jobs
        self.random_state = random_state

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_choice(self.rule, "rule", _LOCAL_RULES)
        check_choice(self.statistic, "statistic", ("mean", "median"))
        check_choice(self.bias_correction, "bias_correction", CORRECTIONS)
        if self.threshold is not None:
            check_real(self.threshold, "threshold", low=0, high=1)
        if self.metric == "precomputed":
            raise ValueError("metric='precomputed': LocalPCADimension needs rows, distances alone do not give them.")

    def _n_needed(self) -> int:
        return 2

    def _n_searched(self) -> int:
        return int(self.n_neighbors_local)

    def _estimate(self, table: NeighborTable) -> Estimate:
        k = min(int(self.n_neighbors_local), table.n_neighbors)
        values = _xp.to_numpy(self._values(table.X, table.indices[:, :k])).astype(np.float64)
        used = np.flatnonzero(np.isfinite(values))
        if len(used) < 3:
            raise ValueError(
                f"Only {len(used)} neighbourhood(s) of {k} rows give a value by rule={self.rule!r}: 3 are needed. "
                "Raise n_neighbors_local."
            )
        values = values[used]
        neighbors = _xp.to_numpy(table.indices[:, :k])[used]
        dimension = float(values.mean())
        rows = table.queries[used]
        found = patch_inflation(values, neighbors, rows, table.n_samples, dimension=dimension, power=2)
        std = float(values.std(ddof=1) * np.sqrt(found.ratio / len(values)))
        if self.statistic == "median":
            dimension, std = float(np.median(values)), std * _MEDIAN_LOSS
        # Corrected ratios are not bounded.
        if self.bias_correction is None and dimension > _SATURATED * (k - 1):
            warn_user(
                f"The dimension {dimension:.3g} is more than half of {k - 1}, the largest that neighbourhoods of {k} "
                "rows can give: it is a lower bound. Raise n_neighbors_local to several times the dimension."
            )
        if dimension < 1:
            report_no_signal(type(self).__name__, self.rule, dimension)
        if std <= _ROUNDING * dimension:
            # Equal values say nothing of the error.
            return Estimate(dimension, None, None, len(used), table.n_queries - len(used))
        interval = normal_interval(dimension, std, found, self.confidence_level)
        return Estimate(dimension, std, interval, len(used), table.n_queries - len(used))

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:  # noqa: ARG002
        return self._values(self.table_.X, indices)

    def _values(self, X: Array, indices: Array) -> Array:
        threshold = RULES[self.rule] if self.threshold is None else float(self.threshold)
        parts = []
        for patch in centred_patches(X, indices):
            if self.rule == "participation":
                parts.append(patch_ratio(patch, self.bias_correction))
            else:
                parts.append(apply_rule(self.rule, patch_spectra(patch), threshold))
        return _xp.array_namespace(X).concat(parts, axis=0)
