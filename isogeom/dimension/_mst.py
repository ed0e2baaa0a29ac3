"""Dimension from the length of the minimum spanning tree."""

from __future__ import annotations

from typing import Any

import numpy as np

from isogeom import _random, _xp
from isogeom._neighbors import NeighborTable
from isogeom._neighbors._cloud import Cloud
from isogeom._neighbors._metrics import check_metric
from isogeom._neighbors._rows import rows_at
from isogeom._validation import check_choice, check_integer, check_real
from isogeom._xp import Array
from isogeom.dimension._base import DimensionEstimator, Estimate
from isogeom.dimension._dependence import Inflation, inflation, normal_interval
from isogeom.dimension._graph_lengths import (
    Growth,
    patch_distances,
    patch_subsamples,
    sample_sizes,
    slope_weights,
    warn_power,
)
from isogeom.dimension._pairs import dense_distances, distance_matrix
from isogeom.dimension._rows_estimator import beside, reference_positions, unsearched, used_rows

# Fewest rows of a tree, and neighbours that a row's part of the length is taken to depend on.
_LEAST, _RANK = 5, 8
# Fewest rows whose standard error is reported: below, it was half of the true one.
_LEAST_FOR_ERROR = 20


class MSTDimension(DimensionEstimator):
    r"""Intrinsic dimension from the growth of the length of the minimum spanning tree with the number of rows.

    Parameters
    ----------
    alpha : float, default=1
        Power of the edge lengths; positive, and below the dimension for the theory to hold.
    n_sizes : int, default=8
        Number of sizes of sub-samples, geometric from `min_share` of the rows of a repeat to all of them.
    min_share : float, default=0.25
        Share of the smallest sub-samples, above 0 and below 1.
    n_repeats : int, default=10
        Number of sub-samples of each size, drawn without replacement.
    max_samples : int, default=2000
        Most rows of a sub-sample. A repeat holds the square of this number of distances at a time. With more rows, the
        repeats take different ones of them, and the tree sees a coarser scale than that of all rows.
    n_neighbors_local : int, default=100
        Number of rows of the neighbourhoods that `transform` applies the formula to.
    metric : str, default='euclidean'
        'euclidean', 'precomputed' (all distances), or for numpy rows any metric of
        :func:`sklearn.metrics.pairwise_distances`.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row. Kept ones have edges of length 0.
    confidence_level : float, default=0.95
        Of `dimension_interval_`.
    n_jobs : int, default=None
        Ignored: products use the threads of the array library.
    random_state : int, RandomState instance, Generator or None, default=0
        Draws the sub-samples.

    Attributes
    ----------
    dimension_ : float
        The estimate.
    dimension_std_ : float or None
        Its standard error, corrected for the dependence of neighbours. None for fewer than 20 rows.
    dimension_interval_ : tuple of float or None
        Confidence interval. None for fewer than 20 rows.
    sizes_ : array of shape (n_sizes,)
        Sizes of the sub-samples.
    lengths_ : array of shape (n_sizes, n_repeats)
        Sums of the edges to the power `alpha`, in units of the largest distance of the repeat.
    n_samples_used_ : int
        Number of rows that entered a tree.
    n_samples_dropped_ : int
        Number of rows that entered none.
    n_duplicates_ : int
        Number of rows that repeat an earlier row.
    table_ : NeighborTable
        The rows or distances.
    n_features_in_ : int
        Number of features seen during `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if `X` had string column names.

    See Also
    --------
    KNNGraphDimension : The same with the nearest-neighbour graph.

    Notes
    -----
    :math:`E_\alpha(n) = \sum_{e \in MST} |e|^\alpha` of n rows grows as :math:`n^{(d - \alpha) / d}`, so with the slope
    m of the mean of :math:`\ln E_\alpha` on :math:`\ln n`, ``d = alpha / (1 - m)``. The edges of the tree are the
    lifetimes of the connected components of growing balls, so this is the persistent-homology dimension of degree 0.

    At least 10 distinct rows are needed, and 20 for a standard error. Few rows make the estimate too large: 30 in a
    cube of dimension 5 give 6, 15 give 9. Sub-samples are drawn from the rows in order of their distance from the mean:
    the result does not depend on the order the rows came in, unless these tie. A table with anchors is treated as its
    rows, anchors or not. A few rows far from all others can hold most of the length, and then decide the slope: drop
    outliers first.

    The standard error takes rows where lengths grow differently, near edges or where the density changes, for dependent
    ones. Over 60 samples of 600 to 2000 rows it was 1.0 to 1.2 times the true one in a cube of dimension 3 and on a
    sphere of dimension 5, but 1.4 to 2.0 times it, growing with the rows, for Gaussian rows of dimension 5.

    Trees are exact (Prim's algorithm on all distances of a sub-sample, on the host). The boundary bends the power law,
    so dimensions above about 10 come out too small.

    `transform` applies the formula to sub-samples of neighbourhoods. For k = 100 its relative noise is about 0.05
    (d = 2) to 0.15 (d = 20), and the boundary of the neighbourhood lowers it by a tenth where d is above 5.

    References
    ----------
    B. Schweinhart, "Fractal dimension and the persistent homology of random geometric complexes", Advances in
    Mathematics 372, 2020. :doi:`10.1016/j.aim.2020.107291`

    H. Adams et al., "A fractal dimension for measures via persistent homology", Topological Data Analysis, Abel
    Symposia 15, 2020. :arxiv:`1808.01079`

    Examples
    --------
    >>> from isogeom.datasets import make_manifold
    >>> from isogeom.dimension import MSTDimension
    >>> round(MSTDimension().fit(make_manifold("M7", 500).X).dimension_)  # a Swiss roll
    2
    """

    _needs_all_distances = True

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        n_sizes: int = 8,
        min_share: float = 0.25,
        n_repeats: int = 10,
        max_samples: int = 2000,
        n_neighbors_local: int = 100,
        metric: str = "euclidean",
        duplicates: str = "drop",
        confidence_level: float = 0.95,
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> None:
        self.alpha = alpha
        self.n_sizes = n_sizes
        self.min_share = min_share
        self.n_repeats = n_repeats
        self.max_samples = max_samples
        self.n_neighbors_local = n_neighbors_local
        self.metric = metric
        self.duplicates = duplicates
        self.confidence_level = confidence_level
        self.n_jobs = n_jobs
        self.random_state = random_state

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_choice(self.duplicates, "duplicates", ("drop", "raise", "keep"))
        check_integer(self.n_sizes, "n_sizes", low=2)
        check_integer(self.n_repeats, "n_repeats", low=1)
        check_integer(self.max_samples, "max_samples", low=2 * _LEAST)
        if check_real(self.alpha, "alpha", low=0) == 0:
            raise ValueError("alpha=0 must be positive.")
        if check_real(self.min_share, "min_share", low=0, high=1) in (0.0, 1.0):
            raise ValueError(f"min_share={self.min_share!r} must lie between 0 and 1, both excluded.")

    def _n_needed(self) -> int:
        return 0

    def _read(self, X: Any) -> NeighborTable:
        if isinstance(X, NeighborTable) or self.metric == "precomputed":
            return super()._read(X)
        return unsearched(self._check_X(X, reset=True, min_samples=3), self.duplicates, self.metric)

    def _estimate(self, table: NeighborTable) -> Estimate:
        alpha, repeats = float(self.alpha), int(self.n_repeats)
        source = _Distances(table)
        n = source.n
        if n < 2 * _LEAST:
            raise ValueError(
                f"MSTDimension needs at least {2 * _LEAST} distinct rows for trees of different sizes, got {n}: pass "
                "more rows."
            )
        size = min(n, int(self.max_samples))
        sizes = sample_sizes(size, int(self.n_sizes), float(self.min_share), _LEAST)
        rng = _random.check_rng(self.random_state, "random_state")
        whole = size == n
        entered = np.zeros(n, dtype=bool)
        if whole:
            D = source.among(np.arange(n))
            growths = [_growth(D, sizes, repeats, alpha, rng)]
            spreads = [_spread(growths[0].influence, D)]
            entered[:] = True
        else:
            growths, spreads, order = [], [], np.arange(n)
            for r in range(repeats):
                # Parts of a permutation: repeats share no row until there are too few left.
                part = r % (n // size)
                order = rng.permutation(n) if part == 0 else order
                rows = np.sort(order[part * size : (part + 1) * size])
                D = source.among(rows)
                growths.append(_growth(D, sizes, 1, alpha, rng))
                spreads.append(_spread(growths[-1].influence, D))
                entered[rows] = True
        slope = float(np.mean([growth.slope for growth in growths]))
        if not slope < 1:
            worst = max(growths, key=lambda growth: growth.concentration)
            raise ValueError(worst.complaint("tree", "alpha", "raise n_repeats"))
        dimension = alpha / (1 - slope)
        # Repeats of different rows are independent as long as there are rows.
        independent = max(1.0, min(len(growths), n / size))
        variance = float(np.mean([v for v, _ in spreads])) / independent
        std = dimension**2 / alpha * float(np.sqrt(variance))
        found = Inflation(1.0, min(f.freedom for _, f in spreads))
        interval = normal_interval(dimension, std, found, self.confidence_level)
        trusted = n >= _LEAST_FOR_ERROR
        warn_power("alpha", alpha, dimension, std)
        lengths = np.concatenate([growth.lengths for growth in growths], axis=1)
        used = int(entered.sum())
        attributes = {"sizes_": beside(sizes, table), "lengths_": beside(lengths, table)}
        return Estimate(dimension, std if trusted else None, interval if trusted else None, used, n - used, attributes)

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:  # noqa: ARG002
        width, alpha = int(indices.shape[1]), float(self.alpha)
        if width < 2 * _LEAST:
            return _xp.asarray_like(np.full(int(indices.shape[0]), np.nan), distances)
        sizes, draws = patch_subsamples(width, _LEAST, np.random.default_rng(0))
        weights, values = slope_weights(sizes), []
        for D in patch_distances(self.table_, indices):
            slope = np.zeros(len(D))
            for weight, repeats in zip(weights, draws):
                for at in repeats:
                    lengths, _ = spanning_trees(D[:, at[:, np.newaxis], at])
                    total = np.sum(lengths[:, 1:] ** alpha, axis=1)
                    slope += weight / len(repeats) * np.log(np.where(total > 0, total, np.nan))
            values.append(np.where(slope < 1, alpha / np.where(slope < 1, 1 - slope, 1.0), np.nan))
        return _xp.asarray_like(np.concatenate(values), distances)


class _Distances:
    """Distances among some rows of a table, which are numbered in an order that their positions do not decide."""

    def __init__(self, table: NeighborTable) -> None:
        self.table, self.full = table, None
        if table.X is not None:
            check_metric(table.metric, table.X)
            positions = reference_positions(table)
            self.rows = positions[np.argsort(_spreads(used_rows(table)), kind="stable")]
        elif table.n_queries != table.n_reference:
            raise ValueError(
                f"The distances between all {table.n_reference} rows are needed, but the table has those of "
                f"{table.n_queries} anchors: make it without anchors, or with rows."
            )
        else:
            self.full = dense_distances(table)
            largest = float(self.full.max())
            squares = np.sum((self.full / (largest if largest > 0 else 1.0)) ** 2, axis=1)
            self.rows = np.argsort(squares, kind="stable")
        self.n = len(self.rows)

    def among(self, numbers: np.ndarray) -> np.ndarray:
        rows = self.rows[numbers]
        if self.full is not None:
            return self.full[np.ix_(rows, rows)]
        chosen = rows_at(self.table.X, rows)
        if self.table.metric != "euclidean":
            # As precise as a search.
            chosen = chosen.astype(np.float64)
        return distance_matrix(chosen, self.table.metric)


def _spreads(X: Array) -> np.ndarray:
    """Return the squared distance of every row from the mean: up to a constant, the mean of that to all rows."""
    xp, cloud = _xp.array_namespace(X), Cloud.of(X)
    total = sum(xp.sum(cloud.centred(block), axis=0) for block in _xp.row_blocks(X))
    mean = total / int(X.shape[0])
    found = [_xp.to_numpy(xp.sum((cloud.centred(block) - mean) ** 2, axis=1)) for block in _xp.row_blocks(X)]
    return np.concatenate(found)


def _growth(D: np.ndarray, sizes: np.ndarray, repeats: int, alpha: float, rng: np.random.Generator) -> Growth:
    """Return the lengths of the trees of sub-samples of every size."""
    growth = Growth.empty(sizes, repeats, len(D))
    every = np.arange(len(D))
    for q, size in enumerate(sizes):
        # All rows have one tree.
        known = _parts(D, alpha) if size == len(D) else None
        for r in range(repeats):
            rows = every if known is not None else np.sort(rng.permutation(len(D))[:size])
            growth.add(q, r, rows, *(_parts(D[np.ix_(rows, rows)], alpha) if known is None else known))
    return growth


def _parts(D: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts of every row in the length of the tree and in its edges: half of each belongs to either end."""
    lengths, ends = spanning_trees(D[np.newaxis])
    halves, (new, old) = lengths[0, 1:] ** alpha / 2, ends[:, 0, 1:]
    both = np.concatenate((new, old))
    return np.bincount(both, np.tile(halves, 2), minlength=len(D)), np.bincount(both, minlength=len(D)) / 2


def spanning_trees(D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges of the minimum spanning trees of many small matrices of distances, by Prim's algorithm.

    Parameters
    ----------
    D : ndarray of shape (b, m, m)
        Symmetric distances; zeros are distances too.

    Returns
    -------
    lengths : ndarray of shape (b, m)
        Length of the edge by which each vertex was joined, in order of joining; entry 0 is 0.
    ends : ndarray of shape (2, b, m)
        The vertex that was joined, and the one that it was joined to.
    """
    b, m, _ = D.shape
    each = np.arange(b)
    lengths, ends = np.zeros((b, m)), np.zeros((2, b, m), dtype=np.int64)
    best, parent = D[:, 0, :].copy(), np.zeros((b, m), dtype=np.int64)
    best[:, 0] = np.inf
    joined = np.zeros((b, m), dtype=bool)
    joined[:, 0] = True
    for step in range(1, m):
        new = np.argmin(best, axis=1)
        lengths[:, step] = best[each, new]
        ends[0, :, step], ends[1, :, step] = new, parent[each, new]
        joined[each, new] = True
        row = D[each, new]
        nearer = (row < best) & ~joined
        np.copyto(best, row, where=nearer)
        np.copyto(parent, new[:, np.newaxis], where=nearer)
        best[each, new] = np.inf
    return lengths, ends


def _spread(influence: np.ndarray, D: np.ndarray) -> tuple[float, Inflation]:
    """Return the variance of the slope, and the degrees of freedom of that estimate."""
    n = len(influence)
    k = min(2 * _RANK, n - 1)
    others = D.copy()
    np.fill_diagonal(others, np.inf)
    at = np.argpartition(others, k - 1, axis=1)[:, :k]
    near = np.take_along_axis(others, at, axis=1)
    order = np.argsort(near, axis=1, kind="stable")
    table = NeighborTable(
        distances=np.take_along_axis(near, order, axis=1),
        indices=np.take_along_axis(at, order, axis=1),
        queries=np.arange(n),
        n_samples=n,
        n_reference=n,
    )
    found = inflation(influence, np.arange(n), table, min(_RANK, k))
    return n * float(np.var(influence, ddof=1)) * found.ratio, found
