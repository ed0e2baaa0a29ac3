"""The maximum-likelihood estimator from the distances to the nearest neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._validation import check_choice, check_integer
from isogeom._xp import Array
from isogeom.dimension._base import DimensionEstimator, Estimate
from isogeom.dimension._dependence import gamma_interval, inflation
from isogeom.dimension._parts import log_parts


class MLE(DimensionEstimator):
    r"""Intrinsic dimension by maximum likelihood from the distances to the first k neighbours.

    Parameters
    ----------
    n_neighbors : int, default=20
        Number of neighbours k, at least 2; clipped, with a warning, to one less than the number of distinct rows.
    unbiased : bool, default=True
        Whether to divide by the mean of the inverse gamma law: exact for independent rows of a homogeneous process.
        False is the formula as published. The values that other packages call unbiased are that times
        ``(k - 2) / (k - 1)``, which is too small for a pooled estimate.
    average : {'inverse', 'mean'}, default='inverse'
        'inverse' averages the inverse dimensions of the rows (MacKay and Ghahramani), 'mean' the dimensions (Levina
        and Bickel), which is too large by a factor of about (k - 1) / (k - 2) unless `unbiased`.
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
    dimension_std_ : float
        Its standard error, corrected for the dependence of rows that are neighbours.
    dimension_interval_ : tuple of float
        Confidence interval with the same correction.
    dimension_std_nominal_ : float
        The standard error for independent rows, ``d / sqrt(n (k - 1) - 2)``.
    n_samples_used_, n_samples_dropped_, n_duplicates_ : int
        Rows that entered; rows left out because a distance of theirs is 0 or all are equal; rows that repeat another.
    table_ : NeighborTable
        The neighbours.
    n_features_in_ : int
        Number of features seen during `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if `X` had string column names.

    Notes
    -----
    With s_i the sum of ``ln(r_k / r_j)`` over j < k at row i, a gamma variable of shape k - 1 and rate d under a
    locally constant density, ``d = (n (k - 1) - 1) / sum_i s_i`` (`unbiased`; without it, no minus one) or the mean of
    ``(k - 2) / s_i`` (of ``(k - 1) / s_i``). `transform` gives ``(k - 2) / s`` with k = `n_neighbors_local`: the
    relative noise is about ``1 / sqrt(k - 3)``.

    References
    ----------
    E. Levina and P. J. Bickel, "Maximum likelihood estimation of intrinsic dimension", NIPS 17, 2004.

    D. J. C. MacKay and Z. Ghahramani, "Comments on 'Maximum likelihood estimation of intrinsic dimension'", 2005.

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import MLE
    >>> rng = np.random.default_rng(0)
    >>> X = rng.random((2000, 3)) @ rng.standard_normal((3, 20))
    >>> model = MLE(n_neighbors=10).fit(X)
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

    def score(self, X: Any, y: Any = None) -> float:  # noqa: ARG002
        """Return the mean log-likelihood of the distance ratios of new rows to their reference neighbours.

        Parameters
        ----------
        X : array-like of shape (n_queries, n_features)
            Rows.
        y : None
            Ignored.

        Returns
        -------
        float
            Mean over rows and j < k of ``ln d + (d - 1) ln(r_j / r_k)``, natural logarithm. Every ratio has the same
            law whatever k is, so scores of fits with different `n_neighbors` can be compared.
        """
        k = min(self.n_neighbors, self.table_.n_neighbors)
        sums = self._query_values(X, k, log_sums)
        d = self.dimension_
        return float(np.log(d) - (d - 1) * np.mean(sums) / (k - 1))

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_integer(self.n_neighbors, "n_neighbors", low=2)
        check_choice(self.unbiased, "unbiased", (False, True))
        check_choice(self.average, "average", ("inverse", "mean"))
        if self.average == "mean" and self.unbiased:
            check_integer(self.n_neighbors, "n_neighbors", low=3, hint="The unbiased mean divides by n_neighbors - 2.")

    def _n_needed(self) -> int:
        return int(self.n_neighbors)

    def _estimate(self, table: NeighborTable) -> Estimate:
        k = min(int(self.n_neighbors), table.n_neighbors)
        sums, used = _used(_xp.to_numpy(log_sums(table.first(k).distances)))
        n = len(sums)
        if n < 3:
            raise ValueError(f"Only {n} row(s) have {k} neighbours at different positive distances: 3 are needed.")
        parts = log_parts(_xp.to_numpy(table.distances[:, :k])[used])
        # The nominal variance of a sum is that of a gamma variable of shape k - 1.
        found = inflation(sums, used, table, k, parts=parts, nominal=float(sums.mean()) ** 2 / (k - 1))
        total = float(sums.sum())
        dimension = (n * (k - 1) - int(self.unbiased)) / total
        low, high = gamma_interval(total, n * (k - 1), found, self.confidence_level)
        if self.average == "mean":
            mean = float(np.mean((k - 1 - int(self.unbiased)) / sums))
            # The interval keeps its relative width: the two averages differ by a bias, not in their noise.
            low, high, dimension = low * mean / dimension, high * mean / dimension, mean
        nominal = dimension / np.sqrt(max(n * (k - 1) - 2, 1))
        attributes = {"dimension_std_nominal_": float(nominal)}
        dropped = table.n_queries - n
        return Estimate(dimension, float(nominal * np.sqrt(found.ratio)), (low, high), n, dropped, attributes)

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:  # noqa: ARG002
        k = int(distances.shape[1])
        xp = _xp.array_namespace(distances)
        sums = log_sums(distances)
        # A neighbour at distance 0, a duplicate that was kept, makes the sum infinite.
        positive = (sums > 0) & xp.isfinite(sums)
        safe = xp.where(positive, sums, xp.ones_like(sums))
        return xp.where(positive, max(k - 2, 1) / safe, xp.full_like(sums, xp.nan))


def log_sums(distances: Array) -> Array:
    """Return ``sum_j ln(r_k / r_j)`` over j < k of every row: infinite if a distance is 0, 0 if all are equal."""
    xp = _xp.array_namespace(distances)
    positive = distances > 0
    logs = xp.log(xp.where(positive, distances, xp.ones_like(distances)))
    sums = xp.sum(logs[:, -1:] - logs, axis=1)
    return xp.where(xp.all(positive, axis=1), sums, xp.full_like(sums, xp.inf))


def _used(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    used = np.flatnonzero(np.isfinite(sums) & (sums > 0))
    return sums[used].astype(np.float64), used
