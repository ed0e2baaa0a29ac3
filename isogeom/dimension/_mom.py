"""The method of moments."""

from __future__ import annotations

from typing import Any

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._validation import check_choice, check_integer
from isogeom._xp import Array
from isogeom.dimension._average import from_mean, usable
from isogeom.dimension._base import DimensionEstimator, Estimate
from isogeom.dimension._parts import ratio_parts


class MOM(DimensionEstimator):
    r"""Intrinsic dimension by the method of moments: from the mean of the distances to the first k neighbours.

    Parameters
    ----------
    n_neighbors : int, default=100
        Number of neighbours k, at least 2; clipped, with a warning, to one less than the number of distinct rows.
    unbiased : bool, default=True
        Whether the mean runs over the neighbours before the k-th, whose ratios to it have a known law. False is the
        formula as published, which counts the k-th distance as its own neighbour: too large by about
        ``(d + 1) / (k - 1)``.
    average : {'pooled', 'mean'}, default='pooled'
        'pooled' averages the moments of the rows and turns their mean into a dimension; 'mean' averages the dimensions
        of the rows, which is too large by about ``d / k``.
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
        Rows that entered; rows left out because a distance of theirs is 0 or all are equal; rows that repeat another.
    table_ : NeighborTable
        The neighbours.
    n_features_in_ : int
        Number of features seen during `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if `X` had string column names.

    See Also
    --------
    MLE : From the mean logarithm of the same ratios, with less noise.

    Notes
    -----
    Under a locally constant density the ratios ``r_j / r_k``, j < k, in random order are independent Beta(d, 1)
    variables of mean ``d / (d + 1)``. With m the mean ratio, ``d = m / (1 - m)``. `transform` gives it for one row
    with k = `n_neighbors_local`: the relative noise is about ``(d + 1) / sqrt(k d (d + 2))``.

    With neighbourhoods that hold a tenth of all rows the standard error tends to be too small: with k = 100, over 100
    samples of 1000 rows, 0.83 of the true one for Gaussian rows of dimension 5, 0.9 on a sphere, 1.06 in a cube.

    A row far from all others has nearly equal distances to them, so its local value is huge: about its distance over
    the width of the cloud. Clip such values, or take their logarithm, before a model that is sensitive to scale.

    References
    ----------
    L. Amsaleg, O. Chelly, T. Furon, S. Girard, M. E. Houle, K. Kawarabayashi and M. Nett, "Extreme-value-theoretic
    estimation of local intrinsic dimensionality", Data Mining and Knowledge Discovery 32:1768-1805, 2018.
    :doi:`10.1007/s10618-018-0578-6`

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import MOM
    >>> rng = np.random.default_rng(0)
    >>> X = rng.random((2000, 3)) @ rng.standard_normal((3, 20))
    >>> model = MOM(n_neighbors=20).fit(X)
    >>> round(model.dimension_, 1)
    2.9
    """

    def __init__(
        self,
        n_neighbors: int = 100,
        *,
        unbiased: bool = True,
        average: str = "pooled",
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
        check_choice(self.average, "average", ("pooled", "mean"))

    def _n_needed(self) -> int:
        return int(self.n_neighbors)

    def _estimate(self, table: NeighborTable) -> Estimate:
        k = min(int(self.n_neighbors), table.n_neighbors)
        moments, used = usable(_xp.to_numpy(mean_ratios(table.first(k).distances, self.unbiased)), k)
        if self.average == "pooled":
            mean = float(moments.mean())
            values, dimension, slope = moments, mean / (1 - mean), (1 - mean) ** -2
        else:
            values = moments / (1 - moments)
            dimension, slope = float(values.mean()), 1.0
        level, parts = self.confidence_level, ratio_parts(_xp.to_numpy(table.distances[:, :k])[used])
        return from_mean(values, used, table, rank=k, dimension=dimension, slope=slope, level=level, parts=parts)

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:  # noqa: ARG002
        moments = mean_ratios(distances, self.unbiased)
        return moments / (1 - moments)


def mean_ratios(distances: Array, unbiased: bool) -> Array:
    """Return the mean of ``r_j / r_k`` of every row, over j < k or, if not `unbiased`, over j <= k.

    NaN if a distance is 0 or all are equal.
    """
    xp = _xp.array_namespace(distances)
    first, last = distances[:, :1], distances[:, -1:]
    good = (first > 0) & (last > first)
    ratios = distances / xp.where(good, last, xp.ones_like(last))
    means = xp.mean(ratios[:, : int(distances.shape[1]) - int(unbiased)], axis=1)
    return xp.where(good[:, 0], means, xp.full_like(means, xp.nan))
