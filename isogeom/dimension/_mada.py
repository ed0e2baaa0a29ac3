"""Manifold-adaptive dimension estimation."""

from __future__ import annotations

import math
from typing import Any

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._validation import check_choice, check_integer
from isogeom._xp import Array
from isogeom.dimension._average import average, usable
from isogeom.dimension._base import DimensionEstimator, Estimate
from isogeom.dimension._parts import order_parts
from isogeom.dimension._ratio_law import inverse_mean, local_constant, mean_log_ratio


class MADA(DimensionEstimator):
    r"""Intrinsic dimension from the ratio of the distances to the k-th and to the (k/2)-th neighbour.

    Parameters
    ----------
    n_neighbors : int, default=20
        Number of neighbours k, at least 2; clipped, with a warning, to one less than the number of distinct rows.
    unbiased : bool, default=True
        Whether to divide by the mean of the law of the log ratio: exact for independent rows of a homogeneous process.
        False is the formula as published, with ``ln(k / floor(k / 2))``, which is ln 2 for even k.
    average : {'inverse', 'mean'}, default='inverse'
        Average the inverse dimensions of the rows, or the dimensions. `unbiased` corrects either.
    n_neighbors_local : int, default=100
        Number of neighbours from which `transform` computes the dimension at a row; clipped to the number there is.
    metric : str, default='euclidean'
        'euclidean', 'precomputed', or for numpy rows any metric of :func:`sklearn.metrics.pairwise_distances`.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row. Rows with a kept duplicate are counted as dropped.
    anchors : int or array-like of int, default=None
        Rows to use, among the neighbours of all rows: that many drawn at random, or these positions.
    confidence_level : float, default=0.95
        Of `dimension_interval_`.
    n_jobs : int, default=None
        Number of threads; None for one, -1 for all cores.
    random_state : int, RandomState instance, Generator or None, default=0
        Draws the anchors.

    Attributes
    ----------
    dimension_ : float
        The estimate.
    dimension_std_ : float or None
        Its standard error, corrected for the dependence of rows that are neighbours; None, as the interval and the
        nominal error, if the values of all rows are equal (short lists of integers).
    dimension_interval_ : tuple of float or None
        Confidence interval with the same correction.
    dimension_std_nominal_ : float or None
        The standard error for independent rows.
    n_samples_used_, n_samples_dropped_, n_duplicates_ : int
        Rows that entered; rows left out because a distance is 0 or the two are equal; rows that repeat another.
    table_ : NeighborTable
        The neighbours.
    n_features_in_ : int
        Number of features seen during `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if `X` had string column names.

    See Also
    --------
    Gride : The same ratio by maximum likelihood, at many scales.

    Notes
    -----
    With h = floor(k / 2), ``d ln(r_k / r_h)`` is a sum of independent exponential variables of rates h..k - 1 under a
    locally constant density. The published dimension of a row is ``ln(k / h) / ln(r_k / r_h)``; the mean of the law is
    ``sum_{h <= j < k} 1 / j``, 4 % more at k = 20. `transform` gives the value of one row, without bias if `unbiased`,
    with k = `n_neighbors_local`: the relative noise is about ``1.4 / sqrt(k)``, 15 % at 100.

    A row far from all others has nearly equal distances to them, so its local value is huge: about its distance over
    the width of the cloud. Clip such values, or take their logarithm, before a model that is sensitive to scale.

    References
    ----------
    A. M. Farahmand, C. Szepesvári and J.-Y. Audibert, "Manifold-adaptive dimension estimation", ICML, 2007.
    :doi:`10.1145/1273496.1273530`

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import MADA
    >>> rng = np.random.default_rng(0)
    >>> X = rng.random((2000, 3)) @ rng.standard_normal((3, 20))
    >>> model = MADA(n_neighbors=10).fit(X)
    >>> round(model.dimension_, 1)
    2.9
    """

    def __init__(
        self,
        n_neighbors: int = 20,
        *,
        unbiased: bool = True,
        average: str = "inverse",
        n_neighbors_local: int = 100,
        metric: str = "euclidean",
        duplicates: str = "drop",
        anchors: Any = None,
        confidence_level: float = 0.95,
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.unbiased = unbiased
        self.average = average
        self.n_neighbors_local = n_neighbors_local
        self.metric = metric
        self.duplicates = duplicates
        self.anchors = anchors
        self.confidence_level = confidence_level
        self.n_jobs = n_jobs
        self.random_state = random_state

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_integer(self.n_neighbors, "n_neighbors", low=2)
        check_choice(self.unbiased, "unbiased", (False, True))
        check_choice(self.average, "average", ("inverse", "mean"))
        if self.average == "mean" and self.unbiased:
            check_integer(self.n_neighbors, "n_neighbors", low=3, hint="With 2 the unbiased mean does not exist.")

    def _n_needed(self) -> int:
        return int(self.n_neighbors)

    def _estimate(self, table: NeighborTable) -> Estimate:
        k = min(int(self.n_neighbors), table.n_neighbors)
        logs, used = usable(_xp.to_numpy(half_logs(table.first(k).distances)), k)
        half = k // 2
        constant = math.log(k / half)
        if self.unbiased:
            # A clipped k of 2 has no inverse mean; the mean of inverses is then infinite for any numerator.
            constant = inverse_mean(half, k) if self.average == "mean" and k > 2 else mean_log_ratio(half, k)
        dimension = mean_log_ratio(half, k) / float(logs.mean())
        parts = order_parts(_xp.to_numpy(table.distances[:, :k])[used], half, k, dimension)
        level = self.confidence_level
        return average(logs / constant, used, table, how=self.average, rank=k, level=level, parts=parts)

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:  # noqa: ARG002
        k = int(distances.shape[1])
        return local_constant(k // 2, k, self.unbiased, math.log(k / (k // 2))) / half_logs(distances)


def half_logs(distances: Array) -> Array:
    """Return ``ln(r_k / r_h)``, h = floor(k / 2), of every row; NaN if a distance is 0 or the two are equal."""
    xp = _xp.array_namespace(distances)
    low, high = distances[:, int(distances.shape[1]) // 2 - 1], distances[:, -1]
    good = (distances[:, 0] > 0) & (high > low)
    ones = xp.ones_like(low)
    logs = xp.log(xp.where(good, high, ones) / xp.where(good, low, ones))
    return xp.where(good, logs, xp.full_like(logs, xp.nan))
