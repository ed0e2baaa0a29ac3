"""The adaptive binomial estimator: every row's neighbourhood as large as its density is constant."""

from __future__ import annotations

import numpy as np
from scipy import stats

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._neighbors._table import limit_of
from isogeom._validation import check_integer, check_real
from isogeom._xp import Array
from isogeom.dimension._base import DimensionEstimator, Estimate
from isogeom.dimension._binomial import (
    BEST_SHARE,
    LARGEST_RATIO,
    binomial_estimate,
    binomial_inflation,
    local_dimensions,
)
from isogeom.dimension._dependence import normal_interval
from isogeom.dimension._mle import log_sums

# Fewer neighbours than this say nothing about a density.
_FEWEST = 4
_BLOCK = 4096


class ABIDE(DimensionEstimator):
    r"""Intrinsic dimension from neighbourhoods that each row makes as large as its density stays constant.

    Parameters
    ----------
    max_neighbors : int, default=100
        Largest neighbourhood, at least 6; clipped to the number of neighbours there is, with a warning unless it is the
        default.
    significance : float, default=1e-6
        Level of the test of equal densities that ends a neighbourhood, between 0 and 1.
    n_iter : int, default=5
        Number of times that neighbourhoods and dimension are made consistent.
    n_neighbors_local : int, default=100
        Number of neighbours from which `transform` computes the dimension at a row; clipped to the number there is.
    metric : str, default='euclidean'
        'euclidean', 'precomputed', or for numpy rows any metric of :func:`sklearn.metrics.pairwise_distances`.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row. Kept ones count as neighbours.
    confidence_level : float, default=0.95
        Of `dimension_interval_`.
    n_jobs : int, default=None
        Number of threads; None for one, -1 for all cores.

    Attributes
    ----------
    dimension_ : float
        The estimate.
    dimension_std_, dimension_interval_ : float, tuple of float
        Standard error and confidence interval, corrected for the dependence of rows that are neighbours.
    dimension_std_nominal_ : float
        The standard error of independent rows.
    dimension_path_ : list of float
        The estimate after every iteration; the first is that of the start.
    n_neighbors_mean_ : float
        Mean size of the neighbourhoods.
    radius_ratio_ : float
        Inner over outer radius.
    ks_statistic_, ks_pvalue_ : float
        Kolmogorov-Smirnov test that the counts are binomial, on the randomised probability transform; a small p value
        says that the density is not constant even in these neighbourhoods, or the dimension not one number.
    n_samples_used_, n_samples_dropped_, n_duplicates_ : int
        Rows that entered; rows whose outer radius is 0; rows that repeat another.
    table_ : NeighborTable
        The neighbours.
    n_features_in_ : int
        Number of features seen during `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if `X` had string column names.

    Notes
    -----
    Row i takes k neighbours as long as the likelihood ratio of equal densities at i and at its neighbour k + 1, with
    volumes ``V = r_k^d`` around both,

    .. math:: -2k [\ln V_i + \ln V_j - 2 \ln(V_i + V_j) + \ln 4] = 4k \ln\cosh(\tfrac d2 \ln(r_i / r_j)),

    stays below the quantile of chi-squared with 1 degree of freedom. The dimension is then that of
    :class:`BinomialDimension` with outer radius ``r_k`` at each row, at the inner radius that suits it best, and so on.
    The start is maximum likelihood on 5 neighbours.

    References
    ----------
    A. Di Noia, I. Macocco, A. Glielmo, A. Laio and A. Mira, "Beyond the noise: intrinsic dimension estimation with
    optimal neighbourhood identification", 2024. :arxiv:`2405.15132`

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import ABIDE
    >>> rng = np.random.default_rng(0)
    >>> X = rng.random((2000, 3)) @ rng.standard_normal((3, 20))
    >>> model = ABIDE().fit(X)
    >>> round(model.dimension_, 1)
    2.7
    """

    def __init__(
        self,
        max_neighbors: int = 100,
        *,
        significance: float = 1e-6,
        n_iter: int = 5,
        n_neighbors_local: int = 100,
        metric: str = "euclidean",
        duplicates: str = "drop",
        confidence_level: float = 0.95,
        n_jobs: int | None = None,
    ) -> None:
        self.max_neighbors = max_neighbors
        self.significance = significance
        self.n_iter = n_iter
        self.n_neighbors_local = n_neighbors_local
        self.metric = metric
        self.duplicates = duplicates
        self.confidence_level = confidence_level
        self.n_jobs = n_jobs

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_integer(self.max_neighbors, "max_neighbors", low=_FEWEST + 2)
        check_integer(self.n_iter, "n_iter", low=1)
        level = check_real(self.significance, "significance", low=0, high=1)
        if level in (0.0, 1.0):
            raise ValueError(f"significance={level!r} must lie between 0 and 1, both excluded.")

    def _n_needed(self) -> int:
        # A table with fewer neighbours than `max_neighbors` ends the neighbourhoods earlier.
        return 2

    def _n_searched(self) -> int:
        return int(self.max_neighbors)

    def _check_length(self, table: NeighborTable, given: bool) -> None:
        super()._check_length(table, given)
        self._warn_clipped("max_neighbors", table.n_neighbors, limit_of(table))

    def _estimate(self, table: NeighborTable) -> Estimate:
        if table.n_queries < table.n_reference:
            raise ValueError(
                "ABIDE compares the densities of neighbours: it needs the table of all rows, not of anchors."
            )
        table = table.first(min(int(self.max_neighbors), table.n_neighbors))
        start = _start(table)
        d, path = start, [start]
        distances, gaps = _xp.to_numpy(table.distances), radius_gaps(table)
        for _ in range(int(self.n_iter)):
            sizes = neighborhood_sizes(gaps, d, float(self.significance), table.n_neighbors)
            ratio = min(BEST_SHARE ** (1 / d), LARGEST_RATIO)
            used, inner, trials = _inner(distances, sizes)
            counts = np.sum(inner <= ratio, axis=1)
            d, nominal = binomial_estimate(counts, trials, ratio)
            path.append(d)
        found = binomial_inflation(inner, counts, trials, ratio, used, table)
        std = nominal * found.ratio**0.5
        statistic, pvalue = _binomial_test(counts, trials, ratio**d)
        attributes = {
            "dimension_std_nominal_": nominal,
            "dimension_path_": path,
            "n_neighbors_mean_": float(np.mean(sizes)),
            "radius_ratio_": ratio,
            "ks_statistic_": statistic,
            "ks_pvalue_": pvalue,
        }
        interval = normal_interval(d, std, found, self.confidence_level)
        return Estimate(d, std, interval, len(used), table.n_queries - len(used), attributes)

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:  # noqa: ARG002
        return local_dimensions(distances, self.radius_ratio_)


def _start(table: NeighborTable) -> float:
    """Return a first dimension: maximum likelihood on few neighbours."""
    k = min(5, table.n_neighbors)
    sums = _xp.to_numpy(log_sums(table.distances[:, :k]))
    sums = sums[np.isfinite(sums) & (sums > 0)]
    if len(sums) < 3:
        raise ValueError(f"Only {len(sums)} row(s) have {k} neighbours at different positive distances: 3 are needed.")
    return float((len(sums) * (k - 1) - 1) / sums.sum())


def radius_gaps(table: NeighborTable) -> Array:
    """Return, per row and number of neighbours from `_FEWEST` on, the larger over the smaller radius of two balls.

    One ball is around the row, the other around its next neighbour, both hold k neighbours; the gap is infinite where
    a radius is 0. Shape (n_queries, n_neighbors - `_FEWEST`).
    """
    xp = _xp.array_namespace(table.distances)
    k_max, flat = table.n_neighbors, xp.reshape(table.distances, (-1,))
    rows = _xp.asarray_like(table.positions(), table.indices, dtype=xp.int64)
    ranks = xp.expand_dims(xp.arange(_FEWEST, k_max, dtype=xp.int64, device=_xp.device(flat)), axis=0)
    gaps = []
    for start in range(0, table.n_queries, _BLOCK):
        stop = min(start + _BLOCK, table.n_queries)
        # With k neighbours, both balls have the radius of neighbour k; the other row is neighbour k + 1.
        own = table.distances[start:stop, _FEWEST - 1 : k_max - 1]
        other_row = xp.take(rows, xp.reshape(table.indices[start:stop, _FEWEST:k_max], (-1,)), axis=0)
        places = xp.reshape(other_row, own.shape) * k_max + (ranks - 1)
        other = xp.reshape(xp.take(flat, xp.reshape(places, (-1,)), axis=0), own.shape)
        small = xp.minimum(own, other)
        positive = small > 0
        gap = xp.maximum(own, other) / xp.where(positive, small, xp.ones_like(small))
        gaps.append(xp.where(positive, gap, xp.full_like(gap, xp.inf)))
    return xp.concat(gaps, axis=0)


def neighborhood_sizes(gaps: Array, d: float, significance: float, n_neighbors: int) -> np.ndarray:
    """Return the largest size at which every test of equal densities so far passes, per row of :func:`radius_gaps`.

    Where there are too few neighbours for a test it is their number, `n_neighbors`.
    """
    xp = _xp.array_namespace(gaps)
    quantile, n_tests = float(stats.chi2.isf(significance, 1)), int(gaps.shape[1])
    if n_tests == 0:
        return np.full(gaps.shape[0], n_neighbors)
    # The statistic 4 k ln cosh(d / 2 ln(own / other)) is below the quantile where the radii are within this factor.
    y = quantile / (4 * np.arange(_FEWEST, _FEWEST + n_tests))
    factor = np.exp(2 / d * (y + np.log1p(np.sqrt(-np.expm1(-2 * y)))))
    failed = gaps >= xp.expand_dims(_xp.asarray_like(factor, gaps, dtype=gaps.dtype), axis=0)
    first = xp.argmax(xp.astype(failed, xp.uint8), axis=1)
    passed = xp.where(xp.any(failed, axis=1), first, xp.full_like(first, n_tests))
    return _xp.to_numpy(_FEWEST - 1 + passed)


def _inner(distances: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows that have an outer radius, distances over that radius, and how many are nearer."""
    outer = distances[np.arange(len(sizes)), sizes - 1]
    used = np.flatnonzero(outer > 0)
    return used, distances[used] / outer[used][:, np.newaxis], sizes[used] - 1


def _binomial_test(counts: np.ndarray, trials: np.ndarray, share: float) -> tuple[float, float]:
    """Return statistic and p value of the test that the counts are binomial with this share.

    Counts are discrete: each is replaced by a uniform draw between the two ends of its jump in the distribution.
    """
    low, high = stats.binom.cdf(counts - 1, trials, share), stats.binom.cdf(counts, trials, share)
    draws = low + np.random.default_rng(0).random(len(counts)) * (high - low)
    result = stats.kstest(draws, "uniform")
    return float(result.statistic), float(result.pvalue)
