"""Dimension and entropy from the length of the nearest-neighbour graph."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import gammaln, logsumexp

from isogeom import _random, _xp
from isogeom._neighbors import NeighborTable
from isogeom._neighbors._rows import nearest
from isogeom._validation import check_choice, check_integer, check_real
from isogeom._xp import Array
from isogeom.dimension._base import DimensionEstimator, Estimate
from isogeom.dimension._dependence import inflation, normal_interval
from isogeom.dimension._graph_lengths import (
    Growth,
    patch_distances,
    patch_subsamples,
    sample_sizes,
    slope_weights,
    warn_power,
)
from isogeom.dimension._rows_estimator import beside

# Rows of a table that are looked through at a time.
_BLOCK = 4096
# Largest integer dimension that is tried where the number of features is unknown.
_MOST = 1000


class KNNGraphDimension(DimensionEstimator):
    r"""Intrinsic dimension from the growth of the length of the nearest-neighbour graph with the number of rows.

    Parameters
    ----------
    n_neighbors : int, default=5
        Number of neighbours k of every row in the graph.
    gamma : float, default=1
        Power of the edge lengths; positive, and below the dimension for the theory to hold.
    method : {'slope', 'integer'}, default='slope'
        'slope' fits the logarithm of the length on that of the number of rows; 'integer' takes the integer dimension
        whose power law fits the lengths best.
    n_sizes : int, default=8
        Number of sizes of sub-samples, geometric from `min_share` of the rows to all of them.
    min_share : float, default=0.25
        Share of the rows in the smallest sub-samples, above 0 and below 1.
    n_repeats : int, default=10
        Number of sub-samples of each size, drawn without replacement.
    n_neighbors_local : int, default=100
        Number of rows of the neighbourhoods that `transform` applies the formula to.
    metric : str, default='euclidean'
        'euclidean', 'precomputed' (for `transform` all distances, for `fit` a graph of enough neighbours will do), or
        for numpy rows any metric of :func:`sklearn.metrics.pairwise_distances`.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row. Kept ones have edges of length 0.
    confidence_level : float, default=0.95
        Of `dimension_interval_`.
    n_jobs : int, default=None
        Number of threads of the search; None for one, -1 for all cores.
    random_state : int, RandomState instance, Generator or None, default=0
        Draws the sub-samples.

    Attributes
    ----------
    dimension_ : float
        The estimate by `method`.
    dimension_slope_ : float
        The estimate by the slope.
    dimension_integer_ : int
        The integer estimate, at most the number of features.
    dimension_std_ : float
        Standard error of the slope's estimate, corrected for the dependence of neighbours.
    dimension_interval_ : tuple of float
        Confidence interval around the slope's estimate.
    renyi_entropy_ : float
        Estimated Rényi entropy of order `renyi_order_` of the density on the manifold, in nats.
    renyi_order_ : float
        ``(d - gamma) / d`` for ``d = dimension_``.
    sizes_ : array of shape (n_sizes,)
        Sizes of the sub-samples.
    lengths_ : array of shape (n_sizes, n_repeats)
        Lengths of their graphs, in units of the median edge of the graph of all rows to the power `gamma`.
    n_samples_used_ : int
        Number of rows in the largest sub-sample.
    n_samples_dropped_ : int
        0.
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
    MSTDimension : The same with the minimum spanning tree.

    Notes
    -----
    The length :math:`L = \sum_i \sum_{j \le k} r_j(i)^\gamma` of the graph on n rows grows as
    :math:`\beta\, n^{\alpha} \exp((1 - \alpha) H_\alpha)`, :math:`\alpha = (d - \gamma) / d`, with the Rényi entropy
    :math:`H_\alpha`. So ``d = gamma / (1 - slope)``; the integer m minimises
    :math:`\sum_{q,j} (L_{qj} - c\, n_q^{(m - \gamma) / m})^2` with the best c. For smooth densities
    :math:`\beta = V_d^{-\gamma / d} \sum_{j \le k} \Gamma(j + \gamma / d) / \Gamma(j)`, :math:`V_d` the volume of the
    unit ball, which gives the entropy from the mean of :math:`\ln L - \alpha \ln n`.

    Sub-samples are drawn from the rows in order of their distances: the result does not depend on the order the rows
    came in, unless distances tie. A few rows far from all others can hold most of the length, and then decide the
    slope: drop outliers first.

    Neighbours within a sub-sample are exact: they are read off a table of all rows' neighbours, and searched among the
    rows of the sub-sample where the table does not reach far enough. The boundary bends the power law, so dimensions
    above about 10 come out too small. Lengths are computed on the host.

    The standard error takes rows where lengths grow differently, near edges or where the density changes, for dependent
    ones. Over 60 samples of 600 to 2000 rows it was 1.0 to 1.3 times the true one on a sphere of dimension 5 and in a
    cube of dimension 3, but 1.4 to 2.1 times it, growing with the rows, for Gaussian rows of dimension 5.

    `transform` applies the slope to sub-samples of neighbourhoods. For k = 100 its relative noise is about 0.06, and
    the boundary of the neighbourhood lowers it by a tenth (d = 2) to a third (d = 20).

    References
    ----------
    J. A. Costa and A. O. Hero, "Geodesic entropic graphs for dimension and entropy estimation in manifold learning",
    IEEE Transactions on Signal Processing 52(8), 2004. :doi:`10.1109/TSP.2004.831130`

    K. M. Carter, R. Raich and A. O. Hero, "On local intrinsic dimension estimation and its applications", IEEE
    Transactions on Signal Processing 58(2), 2010. :doi:`10.1109/TSP.2009.2031722`

    Examples
    --------
    >>> from isogeom.datasets import make_manifold
    >>> from isogeom.dimension import KNNGraphDimension
    >>> model = KNNGraphDimension().fit(make_manifold("M7", 1000).X)  # a Swiss roll
    >>> round(model.dimension_), model.dimension_integer_
    (2, 2)
    """

    _needs_all_distances = True

    def __init__(
        self,
        n_neighbors: int = 5,
        gamma: float = 1.0,
        method: str = "slope",
        *,
        n_sizes: int = 8,
        min_share: float = 0.25,
        n_repeats: int = 10,
        n_neighbors_local: int = 100,
        metric: str = "euclidean",
        duplicates: str = "drop",
        confidence_level: float = 0.95,
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.gamma = gamma
        self.method = method
        self.n_sizes = n_sizes
        self.min_share = min_share
        self.n_repeats = n_repeats
        self.n_neighbors_local = n_neighbors_local
        self.metric = metric
        self.duplicates = duplicates
        self.confidence_level = confidence_level
        self.n_jobs = n_jobs
        self.random_state = random_state

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_integer(self.n_neighbors, "n_neighbors", low=1)
        check_choice(self.method, "method", ("slope", "integer"))
        check_integer(self.n_sizes, "n_sizes", low=2)
        check_integer(self.n_repeats, "n_repeats", low=1)
        if check_real(self.gamma, "gamma", low=0) == 0:
            raise ValueError("gamma=0 must be positive.")
        if check_real(self.min_share, "min_share", low=0, high=1) in (0.0, 1.0):
            raise ValueError(f"min_share={self.min_share!r} must lie between 0 and 1, both excluded.")

    def _n_needed(self) -> int:
        return int(self.n_neighbors)

    def _n_searched(self) -> int:
        # The neighbours in the smallest sub-sample are binomial: four standard deviations of room.
        k, share = int(self.n_neighbors), float(self.min_share)
        return int(np.ceil((k + 4 * np.sqrt(k * (1 - share))) / share))

    def _estimate(self, table: NeighborTable) -> Estimate:
        if table.n_queries != table.n_reference:
            raise ValueError(
                f"The neighbours of all {table.n_reference} rows are needed, but the table has those of "
                f"{table.n_queries} anchors: make it without anchors."
            )
        n, k, gamma = table.n_queries, min(int(self.n_neighbors), table.n_neighbors), float(self.gamma)
        k = min(k, max(n // 2, 1))
        sizes = sample_sizes(n, int(self.n_sizes), float(self.min_share), k + 1)
        rng = _random.check_rng(self.random_state, "random_state")
        graph = _Graph(table, k, gamma, self.n_jobs)
        # Draws are from rows in the order of their distances, so that the order they came in does not matter.
        # Two: nearest neighbours of each other have the same nearest distance.
        order = np.argsort(graph.distances[:, : max(k, 2)].sum(axis=1), kind="stable")
        growth = Growth.empty(sizes, int(self.n_repeats), n)
        for q, size in enumerate(sizes):
            for r in range(int(self.n_repeats)):
                rows = np.sort(order[rng.permutation(n)[:size]]) if size < n else np.arange(n)
                growth.add(q, r, rows, graph.parts(rows))
        return self._summary(growth, table, graph.unit, k)

    def _summary(self, growth: Growth, table: NeighborTable, unit: float, k: int) -> Estimate:
        gamma, slope = float(self.gamma), growth.slope
        if not slope < 1:
            raise ValueError(growth.complaint("graph", "gamma", "raise n_neighbors or n_repeats"))
        by_slope = gamma / (1 - slope)
        most = int(self.n_features_in_) if table.X is not None else _MOST
        integer = integer_dimension(growth.sizes, growth.lengths, gamma, most)
        dimension = by_slope if self.method == "slope" else float(integer)
        used = np.arange(table.n_queries)
        found = inflation(
            growth.influence, used, table, min(table.n_neighbors, max(k, round(k / float(self.min_share))))
        )
        std = float(by_slope**2 / gamma * np.sqrt(len(used) * np.var(growth.influence, ddof=1) * found.ratio))
        interval = normal_interval(by_slope, std, found, self.confidence_level)
        warn_power("gamma", gamma, dimension, std)
        attributes = {
            "dimension_slope_": by_slope,
            "dimension_integer_": integer,
            "renyi_order_": (dimension - gamma) / dimension,
            "renyi_entropy_": entropy(growth.sizes, growth.lengths, dimension, gamma, k)
            + dimension * float(np.log(unit)),
            "sizes_": beside(growth.sizes, table),
            "lengths_": beside(growth.lengths, table),
        }
        return Estimate(dimension, std, interval, int(growth.sizes[-1]), 0, attributes)

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:  # noqa: ARG002
        width, gamma = int(indices.shape[1]), float(self.gamma)
        k = max(1, min(int(self.n_neighbors), width // 4))
        missing = np.full(int(indices.shape[0]), np.nan)
        if width < 6:
            return _xp.asarray_like(missing, distances)
        sizes, draws = patch_subsamples(width, k + 1, np.random.default_rng(0))
        weights, values = slope_weights(sizes), []
        for D in patch_distances(self.table_, indices):
            D[:, np.arange(width), np.arange(width)] = np.inf
            slope = np.zeros(len(D))
            for weight, repeats in zip(weights, draws):
                for at in repeats:
                    edges = np.partition(D[:, at[:, np.newaxis], at], k - 1, axis=2)[:, :, :k]
                    slope += weight / len(repeats) * _log(np.sum(edges**gamma, axis=(1, 2)))
            values.append(np.where(slope < 1, gamma / np.where(slope < 1, 1 - slope, 1.0), np.nan))
        return _xp.asarray_like(np.concatenate(values), distances)


class _Graph:
    """Edges of the graph on sub-samples of the rows of a table."""

    def __init__(self, table: NeighborTable, k: int, gamma: float, n_jobs: int | None) -> None:
        self.table, self.k, self.gamma, self.n_jobs = table, k, gamma, n_jobs
        self.distances = _xp.to_numpy(table.distances).astype(np.float64)
        self.indices = table.positions()[_xp.to_numpy(table.indices)]
        self.unit = float(np.median(self.distances[:, :k]))
        if self.unit <= 0:
            raise ValueError("Half of the edges have length 0: drop duplicates.")

    def parts(self, rows: np.ndarray) -> np.ndarray:
        """Return, for every row of a sub-sample, the sum of the powers of its edges."""
        found = np.empty(len(rows))
        chosen = np.zeros(self.table.n_queries, dtype=bool)
        chosen[rows] = True
        short = []
        for start in range(0, len(rows), _BLOCK):
            mine = rows[start : start + _BLOCK]
            inside = chosen[self.indices[mine]]
            rank = np.cumsum(inside, axis=1, dtype=np.int32)
            short.append(start + np.flatnonzero(rank[:, -1] < self.k))
            edges = (self.distances[mine] / self.unit) ** self.gamma
            found[start : start + len(mine)] = np.sum(edges, axis=1, where=inside & (rank <= self.k))
        missing = np.concatenate(short)
        if len(missing):
            found[missing] = self._searched(rows, rows[missing])
        return found

    def _searched(self, rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Return the sums of rows whose neighbours in the sub-sample lie beyond the table."""
        table = self.table
        if table.X is None:
            raise ValueError(
                f"{len(wanted)} row(s) have fewer than n_neighbors={self.k} of their {table.n_neighbors} neighbours in "
                "a sub-sample: pass a graph with more neighbours, all distances or rows, or raise min_share."
            )
        found, _ = nearest(
            table.X,
            table.X,
            self.k,
            own=table.queries[wanted],
            within=table.queries[rows],
            metric=table.metric,
            n_jobs=self.n_jobs,
        )
        return np.sum((_xp.to_numpy(found).astype(np.float64) / self.unit) ** self.gamma, axis=1)


def integer_dimension(sizes: np.ndarray, lengths: np.ndarray, gamma: float, most: int) -> int:
    """Return the integer, 1 to `most`, whose power law fits the lengths best in least squares."""
    x = sizes / sizes[-1]
    powers = x[np.newaxis, :] ** (1 - gamma / np.arange(1, most + 1)[:, np.newaxis])
    totals, repeats = lengths.sum(axis=1), lengths.shape[1]
    factor = (powers @ totals) / (repeats * np.sum(powers**2, axis=1))
    errors = np.sum((lengths[np.newaxis] - (factor[:, np.newaxis] * powers)[:, :, np.newaxis]) ** 2, axis=(1, 2))
    return 1 + int(np.argmin(errors))


def entropy(sizes: np.ndarray, lengths: np.ndarray, dimension: float, gamma: float, k: int) -> float:
    """Return the Rényi entropy of order ``1 - gamma / dimension`` from the intercept, for lengths in some unit."""
    share = gamma / dimension
    intercept = float(np.mean(np.log(lengths).mean(axis=1) - (1 - share) * np.log(sizes)))
    log_volume = dimension / 2 * np.log(np.pi) - gammaln(dimension / 2 + 1)
    ranks = np.arange(1, k + 1)
    log_constant = -share * log_volume + logsumexp(gammaln(ranks + share) - gammaln(ranks))
    return (intercept - float(log_constant)) / share


def _log(values: np.ndarray) -> np.ndarray:
    return np.log(np.where(values > 0, values, np.nan))
