"""The two-nearest-neighbours estimator."""

from __future__ import annotations

from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._validation import check_choice, check_real
from isogeom._xp import Array
from isogeom.dimension._base import Estimate, log_ratios
from isogeom.dimension._dependence import gamma_interval, inflation, normal_interval
from isogeom.dimension._mle import log_sums
from isogeom.dimension._pooled import PooledEstimator, count_and_sum


class TwoNN(PooledEstimator):
    r"""Intrinsic dimension from the ratio of the distances to the two nearest neighbours.

    Parameters
    ----------
    method : {'linear', 'mle', 'censored'}, default='linear'
        'linear' fits the cumulative distribution of the ratios by a line through the origin, as published; 'mle' is
        the unbiased maximum-likelihood estimate from all ratios; 'censored' is maximum likelihood where of the largest
        ratios only their number counts.
    discard_fraction : float, default=0.1
        Share of the largest ratios left out ('linear') or censored ('censored'), 0 to below 1; ignored by 'mle'.
    n_neighbors_local : int, default=100
        Number of reference rows whose ratios `transform` pools; clipped to the number there is.
    metric : str, default='euclidean'
        'euclidean', 'precomputed', or for numpy rows any metric of :func:`sklearn.metrics.pairwise_distances`.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row. Kept ones have no ratio and are counted as dropped.
    anchors : int or array-like of int, default=None
        Rows whose ratios are used, among the neighbours of all rows: that many drawn at random, or these positions.
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
        The standard error for independent ratios, ``d / sqrt(n - 2)`` for 'mle'.
    n_samples_used_ : int
        Number of ratios that entered.
    n_samples_dropped_ : int
        Number of rows without a ratio: r1 is 0, or r1 = r2.
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
    Gride : The same ratio between farther neighbours, at many scales.
    MLE : Uses the first k neighbours of every row.

    Notes
    -----
    Where the density is constant up to the second neighbour, ``mu = r2 / r1`` follows a Pareto law of exponent d, so
    ``ln mu`` is exponential with rate d. 'mle': ``d = (n - 1) / sum ln mu``. 'censored' with the m smallest of n:
    ``d = (m - 1) / S``, ``S = sum_{i<=m} x_(i) + (n - m) x_(m)``; for independent ratios ``2 d S`` is chi-squared with
    2m degrees of freedom. 'linear': the slope through the origin of ``-ln(1 - i / n)`` on ``x_(i)``, i = 1..m.

    The intervals are those laws with their shape divided by the inflation of the variance by dependence. `transform`
    pools the ratios of `n_neighbors_local` reference rows, ``(k - 1) / sum ln mu``: relative noise about
    ``1 / sqrt(n_neighbors_local)``.

    References
    ----------
    E. Facco, M. d'Errico, A. Rodriguez and A. Laio, "Estimating the intrinsic dimension of datasets by a minimal
    neighborhood information", Scientific Reports 7:12140, 2017. :doi:`10.1038/s41598-017-11873-y`

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import TwoNN
    >>> rng = np.random.default_rng(0)
    >>> X = rng.random((2000, 3)) @ rng.standard_normal((3, 20))
    >>> model = TwoNN(method="mle").fit(X)
    >>> round(model.dimension_, 1)
    2.9
    >>> model.transform(X[:5]).shape
    (5, 1)
    """

    def __init__(
        self,
        method: str = "linear",
        discard_fraction: float = 0.1,
        *,
        n_neighbors_local: int = 100,
        metric: str = "euclidean",
        duplicates: str = "drop",
        anchors: Any = None,
        confidence_level: float = 0.95,
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> None:
        self.method = method
        self.discard_fraction = discard_fraction
        self.n_neighbors_local = n_neighbors_local
        self.metric = metric
        self.duplicates = duplicates
        self.anchors = anchors
        self.confidence_level = confidence_level
        self.n_jobs = n_jobs
        self.random_state = random_state

    def score(self, X: Any, y: Any = None) -> float:  # noqa: ARG002
        """Return the mean log-likelihood of the ratios of new rows to their reference neighbours.

        Parameters
        ----------
        X : array-like of shape (n_queries, n_features)
            Rows.
        y : None
            Ignored.

        Returns
        -------
        float
            Mean of ``ln d - (d + 1) ln mu``, natural logarithm.
        """
        logs = self._query_values(X, 2, log_sums)
        d = self.dimension_
        return float(np.log(d) - (d + 1) * np.mean(logs))

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_choice(self.method, "method", ("linear", "mle", "censored"))
        if check_real(self.discard_fraction, "discard_fraction", low=0) >= 1:
            raise ValueError(f"discard_fraction={self.discard_fraction!r} must be below 1.")

    def _n_needed(self) -> int:
        return 2

    def _n_searched(self) -> int:
        return 2

    def _estimate(self, table: NeighborTable) -> Estimate:
        device_logs, used = log_ratios(table.distances, 1, 2)
        n = len(used)
        if n < 3:
            raise ValueError(f"Only {n} row(s) have two neighbours at different positive distances: 3 are needed.")
        logs = _xp.to_numpy(device_logs).astype(np.float64)
        share = 0.0 if self.method == "mle" else float(self.discard_fraction)
        m = max(int(np.floor(n * (1 - share))), 2)
        ordered = np.sort(logs)
        clipped = np.minimum(logs, ordered[m - 1])
        if self.method == "linear":
            dimension, slope = _line(ordered, m)
            # A ratio moves the line through its clipped square, to first order.
            squares = clipped**2
            found = inflation(squares, used, table, 2, parts=(squares - squares.mean())[:, np.newaxis])
            # No estimate from n ratios is better than the likeliest: tied ratios would give 0.
            nominal = max(slope * float(np.std(clipped**2)), dimension) / np.sqrt(n)
            interval = normal_interval(dimension, nominal * np.sqrt(found.ratio), found, self.confidence_level)
        else:
            total = float(ordered[:m].sum() + (n - m) * ordered[m - 1])
            dimension = (m - 1) / total
            # A ratio beyond the cut moves the cut too, by the mean excess of an exponential variable.
            values = clipped + (logs > ordered[m - 1]) / dimension
            parts = (values - values.mean())[:, np.newaxis]
            found = inflation(values, used, table, 2, parts=parts, nominal=total**2 / m / n)
            nominal = dimension / np.sqrt(max(m - 2, 1))
            interval = gamma_interval(total, m, found, self.confidence_level)
        attributes = {"dimension_std_nominal_": float(nominal), **self._keep(device_logs, used, table)}
        dropped = table.n_queries - n
        return Estimate(dimension, float(nominal * np.sqrt(found.ratio)), interval, n, dropped, attributes)

    def _pooled(self, logs: Array) -> Array:
        count, total = count_and_sum(logs)
        return (count - 1) / total


def _line(ordered: np.ndarray, m: int) -> tuple[float, float]:
    """Return the slope of ``-ln(1 - F)`` on the `m` smallest log ratios, and its sensitivity to their mean square.

    F = 1 has no logarithm, so the last ratio never enters. With the errors of F by their first-order effect, the slope
    moves by ``-d / (2 q)`` times the mean of the squares clipped at the largest ratio used, ``q = sum x^2 / n``.
    """
    n = len(ordered)
    x = ordered[: min(m, n - 1)]
    y = -np.log1p(-np.arange(1, len(x) + 1) / n)
    d = float(x @ y / (x @ x))
    return d, d / 2 * n / float(x @ x)
