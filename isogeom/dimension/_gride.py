"""The generalised ratios estimator: any two ranks, and the dimension at every scale."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import special

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._neighbors._table import limit_of
from isogeom._validation import check_integer
from isogeom._xp import Array
from isogeom.dimension._base import Estimate, log_ratios
from isogeom.dimension._dependence import gamma_interval, inflation
from isogeom.dimension._parts import order_parts
from isogeom.dimension._pooled import PooledEstimator, count_and_sum

# Newton steps in the logarithm of the dimension; each at most a factor of e. A dozen reach rounding.
_STEPS = 60


class Gride(PooledEstimator):
    r"""Intrinsic dimension from the ratio of the distances to two neighbours of given ranks, at every scale.

    Parameters
    ----------
    n1 : int, default=1
        Rank of the nearer neighbour for `dimension_`, at least 1.
    n2 : int, default=None
        Rank of the farther neighbour, above `n1`; None for ``2 * n1``.
    max_neighbors : int, default=64
        Largest rank of `scales_`, which holds n1 = 1, 2, 4, ... with n2 = 2 n1 up to it; clipped to the number of
        neighbours there is, with a warning unless it is the default.
    n_neighbors_local : int, default=100
        Number of reference rows whose ratios `transform` pools; clipped to the number there is.
    metric : str, default='euclidean'
        'euclidean', 'precomputed', or for numpy rows any metric of :func:`sklearn.metrics.pairwise_distances`.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row. Rows without a ratio are counted as dropped.
    anchors : int or array-like of int, default=None
        Rows whose ratios are used, among the neighbours of all rows: that many drawn at random, or these positions.
    confidence_level : float, default=0.95
        Of the intervals.
    n_jobs : int, default=None
        Number of threads; None for one, -1 for all cores.
    random_state : int, RandomState instance, Generator or None, default=0
        Draws the anchors.

    Attributes
    ----------
    dimension_ : float
        The estimate at ranks `n1` and `n2`.
    dimension_std_, dimension_interval_ : float, tuple of float
        Standard error and confidence interval, corrected for the dependence of rows that are neighbours.
    dimension_std_nominal_ : float
        The standard error of independent ratios, from the observed information.
    scales_ : dict of str to ndarray
        Columns 'n1', 'n2', 'radius' (mean distance to neighbour n2), 'dimension', 'std', 'lower', 'upper',
        'n_samples_used', one entry per scale.
    n_samples_used_, n_samples_dropped_, n_duplicates_ : int
        Rows that entered `dimension_`; rows left out because r_n1 is 0 or equals r_n2; rows that repeat another.
    table_ : NeighborTable
        The neighbours.
    n_features_in_ : int
        Number of features seen during `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if `X` had string column names.

    See Also
    --------
    id_profile : The scale curve with other estimators beside it.

    Notes
    -----
    Where the density is constant up to neighbour n2, ``(r_n1 / r_n2)^d`` is a beta variable with parameters n1 and
    n2 - n1. With x the log ratio the estimate solves

    .. math:: \frac{N - 1}{d} + (n_2 - n_1 - 1) \sum \frac{x}{1 - e^{-dx}} - (n_2 - 1) \sum x = 0,

    which has one root; N - 1 in place of N makes it the unbiased estimate of :class:`TwoNN` at ranks 1 and 2. No ratio
    is cut off as an outlier: a cut biases small dimensions. `transform` solves the same equation for the ratios of
    `n_neighbors_local` reference rows.

    References
    ----------
    F. Denti, D. Doimo, A. Laio and A. Mira, "The generalized ratios intrinsic dimension estimator", Scientific Reports
    12:20005, 2022. :doi:`10.1038/s41598-022-20991-1`

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import Gride
    >>> rng = np.random.default_rng(0)
    >>> X = rng.random((2000, 3)) @ rng.standard_normal((3, 20))
    >>> model = Gride(n1=4).fit(X)
    >>> round(model.dimension_, 1)
    2.9
    >>> model.scales_["n1"]
    array([ 1,  2,  4,  8, 16, 32])
    """

    def __init__(
        self,
        n1: int = 1,
        n2: int | None = None,
        *,
        max_neighbors: int = 64,
        n_neighbors_local: int = 100,
        metric: str = "euclidean",
        duplicates: str = "drop",
        anchors: Any = None,
        confidence_level: float = 0.95,
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> None:
        self.n1 = n1
        self.n2 = n2
        self.max_neighbors = max_neighbors
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
            Mean log density of the ratio ``r_n2 / r_n1``, natural logarithm. Ratios of other ranks have other laws:
            scores compare dimensions and rows at equal `n1` and `n2`; they do not choose these.
        """
        n1, n2 = self._ranks()

        def logs(distances: Array) -> Array:
            xp = _xp.array_namespace(distances)
            low, high = distances[:, n1 - 1], distances[:, n2 - 1]
            return xp.log(high / xp.where(low > 0, low, xp.full_like(low, xp.nan)))

        x, d = self._query_values(X, n2, logs), self.dimension_
        density = np.log(d) - special.betaln(n2 - n1, n1) - ((n2 - 1) * d + 1) * x
        if n2 - n1 > 1:
            density = density + (n2 - n1 - 1) * (d * x + np.log1p(-np.exp(-d * x)))
        return float(np.mean(density))

    def _ranks(self) -> tuple[int, int]:
        return int(self.n1), 2 * int(self.n1) if self.n2 is None else int(self.n2)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        n1 = check_integer(self.n1, "n1", low=1)
        if self.n2 is not None:
            check_integer(self.n2, "n2", low=n1 + 1)
        check_integer(self.max_neighbors, "max_neighbors", low=2)

    def _n_needed(self) -> int:
        return self._ranks()[1]

    def _n_searched(self) -> int:
        return max(self._ranks()[1], int(self.max_neighbors))

    def _check_length(self, table: NeighborTable, given: bool) -> None:
        # A ratio of other ranks would be another estimate: nothing is clipped.
        n2, available = self._ranks()[1], table.n_neighbors
        if n2 > available:
            longer = f", or make the table with n_neighbors={n2} or more" if given else ""
            raise ValueError(
                f"n2={n2} is above the {available} neighbours that every row has: choose smaller ranks{longer}."
            )
        self._warn_clipped("max_neighbors", available, limit_of(table))

    def _estimate(self, table: NeighborTable) -> Estimate:
        n1, n2 = self._ranks()
        logs, used = log_ratios(table.distances, n1, n2)
        value = ratio_estimate(logs, used, table, n1, n2, self.confidence_level)
        scales = gride_scales(table, int(self.max_neighbors), self.confidence_level)
        attributes = {
            "dimension_std_nominal_": value["nominal"],
            "scales_": scales,
            **self._keep(logs, used, table),
        }
        interval = value["lower"], value["upper"]
        return Estimate(value["dimension"], value["std"], interval, len(used), table.n_queries - len(used), attributes)

    def _pooled(self, logs: Array) -> Array:
        return solve_ratios(logs, *self._ranks())


def gride_scales(table: NeighborTable, max_neighbors: int, level: float) -> dict[str, np.ndarray]:
    """Return the estimates at n1 = 1, 2, 4, ..., n2 = 2 n1, as columns of equal length."""
    most = min(max_neighbors, table.n_neighbors)
    scales = table.shared(("gride scales", most, level), lambda: _scales(table, most, level))
    return {name: column.copy() for name, column in scales.items()}


def _scales(table: NeighborTable, most: int, level: float) -> dict[str, np.ndarray]:
    rows = []
    n1 = 1
    while 2 * n1 <= most:
        logs, used = log_ratios(table.distances, n1, 2 * n1)
        if len(used) >= 3:
            value = ratio_estimate(logs, used, table, n1, 2 * n1, level)
            radius = float(np.mean(_xp.to_numpy(table.distances[:, 2 * n1 - 1])[used]))
            rows.append(
                (n1, 2 * n1, radius, *(value[name] for name in ("dimension", "std", "lower", "upper")), len(used))
            )
        n1 *= 2
    names = ("n1", "n2", "radius", "dimension", "std", "lower", "upper", "n_samples_used")
    return {name: np.array([row[i] for row in rows]) for i, name in enumerate(names)}


def ratio_estimate(
    logs: Array, used: np.ndarray, table: NeighborTable, n1: int, n2: int, level: float
) -> dict[str, float]:
    """Return the estimate from log ratios of two ranks, with its standard errors and interval."""
    n = len(used)
    if n < 3:
        raise ValueError(
            f"Only {n} row(s) have positive, different distances to neighbours {n1} and {n2}: 3 are needed."
        )
    x = _xp.to_numpy(logs).astype(np.float64)
    d = float(solve_ratios(x[np.newaxis, :], n1, n2)[0])
    y = d * x
    information = (n + (n2 - n1 - 1) * float(np.sum((y / 2 / np.sinh(np.minimum(y / 2, 300.0))) ** 2))) / d**2
    if n1 == 1 and n2 == 2:
        # The exact law is gamma with n as its shape, less 2 for the variance of the inverse.
        information = (n - 2) / d**2
    scores = 1 / d - (n2 - 1) * x + (n2 - n1 - 1) * x / -np.expm1(-y)
    parts = order_parts(_xp.to_numpy(table.distances[:, :n2])[used], n1, n2, d)
    found = inflation(scores, used, table, n2, parts=parts, nominal=information / n)
    shape = information * d**2
    low, high = gamma_interval(shape / d, shape, found, level)
    nominal = information**-0.5
    return {
        "dimension": d,
        "nominal": float(nominal),
        "std": float(nominal * found.ratio**0.5),
        "lower": low,
        "upper": high,
    }


def solve_ratios(logs: Array, n1: int, n2: int) -> Array:
    """Return the dimension that solves the score equation for each row of log ratios; NaN marks missing ratios."""
    xp = _xp.array_namespace(logs)
    count, total = count_and_sum(logs)
    many = xp.where(count > 1, count, xp.full_like(count, xp.nan))
    if n2 == n1 + 1 and n1 == 1:
        return (many - 1) / total
    x = xp.where(xp.isfinite(logs), logs, xp.zeros_like(logs))
    m = n2 - n1 - 1
    # The mean log ratio is (psi(n2) - psi(n1)) / d.
    d = float(special.digamma(n2) - special.digamma(n1)) * many / total
    for _ in range(_STEPS):
        y = xp.expand_dims(d, axis=1) * x
        small = y < 1e-8
        safe = xp.where(small, xp.ones_like(y), y)
        # y / (1 - exp(-y)) and its derivative times y, with their limits at 0, which missing ratios must not reach.
        share = xp.where(small, 1 + y / 2, safe / -xp.expm1(-safe))
        slope = xp.where(small, y / 2, share * (1 - (safe / xp.expm1(xp.clip(safe, None, 600.0)))))
        known = xp.astype(xp.isfinite(logs), x.dtype)
        score = (many - 1) + m * xp.sum(share * known, axis=1) - (n2 - 1) * d * total
        change = m * xp.sum(slope * known, axis=1) - (n2 - 1) * d * total
        step = xp.clip(-score / change, -1.0, 1.0)
        d = d * xp.exp(step)
        if not bool(xp.any(xp.abs(step) > 1e-13)):
            break
    return d
