"""Intrinsic dimension from the distribution of distances along the graph of neighbours (Granata and Carnevale)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from isogeom import _random, _xp
from isogeom._neighbors import NeighborTable
from isogeom._validation import check_choice, check_integer, warn_user
from isogeom._xp import Array
from isogeom.dimension._base import DimensionEstimator, Estimate
from isogeom.dimension._geodesic_fit import GEODESIC_WINDOW, GRAPH_WINDOW, fit_sine
from isogeom.dimension._geodesics import NeighborGraphs, bin_counts, count_threads, patch_paths
from isogeom.dimension._graph_trials import (
    LARGEST_K,
    RECIPES,
    SMALLEST_K,
    Trial,
    choose,
    geodesic_trial,
    jackknife,
    published_trial,
    run_trial,
)

# Bins of the histogram of a patch, and tolerance of its fit, which is far below its noise.
_PATCH_BINS, _PATCH_TOL = 128, 1e-2


class GraphDistanceDimension(DimensionEstimator):
    r"""Intrinsic dimension from the distribution of graph distances, compared with that of geodesics on a sphere.

    Parameters
    ----------
    n_neighbors : int or 'auto', default='auto'
        Number of neighbours each row is linked to. 'auto' starts from the smallest number, at least 3, with which the
        largest component of the graph has (nearly) all rows that it can get, and raises it, to 24 at most, as long as
        estimates agree and the paths resolve the peak of the distances. With `compat`, the published number.
    n_sources : int or None, default=500
        Number of rows that paths start from, drawn at random; None for all. The end points are always all rows.
    distances : {'graph', 'geodesic'}, default='graph'
        'graph' measures along the graph of neighbours. 'geodesic' takes the distances given with
        ``metric="precomputed"`` as the geodesics themselves; `n_neighbors` and `n_sources` are ignored.
    compat : {None, 'granata2016', 'gong2019'}, default=None
        None fits by maximum likelihood. 'granata2016' is the published recipe, a least-squares fit to 50 bins of all
        distances with 3 neighbours; 'gong2019' that of cosine distances, with 4 neighbours, 100 bins and fewer
        allowances in the fit. Neither tells when it fails, except by an error where the recipe itself gives up.
    n_neighbors_local : int, default=100
        Number of reference rows of the patch from which `transform` computes the dimension at a row.
    metric : str, default='euclidean'
        'euclidean', 'precomputed', or for numpy rows any metric of :func:`sklearn.metrics.pairwise_distances`.
        With ``compat="gong2019"``, rows are compared by their cosine, and this can be 'euclidean' or 'precomputed'.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row. Kept ones are linked by edges of length 0.
    confidence_level : float, default=0.95
        Of `dimension_interval_`.
    n_jobs : int, default=None
        Number of threads; None for one, -1 for all cores. Nothing else depends on it.
    random_state : int, RandomState instance, Generator or None, default=0
        Draws the sources, and the groups of the jackknife.

    Attributes
    ----------
    dimension_ : float
        The estimate, at least 1 by maximum likelihood.
    dimension_rounded_ : int
        The nearest integer from 1; with `compat`, at most 25 ('granata2016') or the number of features ('gong2019').
    dimension_std_ : float or None
        Standard error by the jackknife over groups of sources; None if a group cannot be left out, or no group changes
        the estimate.
    dimension_interval_ : tuple of float or None
        Confidence interval from it, which knows nothing of the bias of graph distances.
    reliable_ : bool
        Whether nothing speaks against the estimate. If something does, `fit` warns.
    reasons_ : tuple of str
        What does.
    n_neighbors_ : int or None
        Number of neighbours used; None for given geodesics.
    k_profile_ : tuple of (int, float)
        Numbers of neighbours that were tried, and their estimates from at most 100 sources.
    n_components_ : int
        Number of components of the graph; only the largest is used.
    component_share_ : float
        Share of the (distinct) rows in it, 0 to 1.
    n_sources_ : int
        Number of rows that paths started from.
    peak_, peak_width_ : float
        r_max and the width of the peak of the distances, in the unit of the distances.
    peak_edges_ : float
        Width of the peak over the median edge.
    misfit_ : float
        Square root of the chi-squared distance between observed and fitted shares of distances in 16 parts of the
        window; with `compat`, the root mean squared residual of the logarithm of the counts.
    n_samples_used_, n_samples_dropped_, n_duplicates_ : int
        Rows in the largest component; rows outside of it; rows that repeat another.
    table_ : NeighborTable
        The neighbours.
    n_features_in_ : int
        Number of features seen during `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if `X` had string column names.

    See Also
    --------
    MLE : Uses short distances, which curvature and boundaries disturb less, but noise more.

    Notes
    -----
    Distances on a sphere of dimension D have the density ``sin^{D-1}(pi r / (2 r_max))``. D and r_max maximise its
    likelihood for the distances between r_max - 2 s and r_max + s / 2, with ``s = 2 r_max / (pi sqrt(D - 1))`` the
    width of the peak (for given geodesics, all up to r_max + s); the window is moved until it agrees with the fit.
    Distances are counted in a fine histogram while they are computed, one source after the other: no matrix of them
    exists.

    The histogram sees the largest scale of the data, so the estimate is that of the sphere whose distances are spread
    alike. Paths along a graph are sums of edges. With few neighbours they zigzag: they are too long by a length that
    does not grow with them, which raises the estimate. With many, few edges lead to the peak, and their number says
    little about D; in high dimension this is so for any affordable number of rows. `reliable_` is False if the peak is
    narrower than 1.75 median edges, if no three numbers of neighbours in a row give estimates within 10 % ('auto'), if
    the fit is bad (misfit above 0.1), if its peak is far from the mean distance, or if 10 % of the rows are missing.

    That judges the graph and the fit to a sphere. It does not see uneven density or edges, where a cloud can have the
    distances of a sphere of another dimension: of 2000 rows of ``make_manifold``, "Mbeta" (true dimension 10) gives
    3.2, "Mp1" (3) 2.1, "M3" (4) 3.1 and "M5b" (2) 2.4, all with `reliable_` True. Compare with :class:`MLE` or
    :class:`TwoNN` on the same table, and look for the reason where they differ by more than their errors.

    The distances from a source go together: the standard error is that of the choice of m sources, times ``sqrt(1 + 3 m
    / n)`` as the n end points are random too. Over 200 choices of 500 of 10000 rows, estimates on spheres, cubes and
    Gaussians of dimension 2 to 5 are within one such error of that from all sources in 69 to 76 % of cases, within 1.96
    in 94 to 98 %. It is too small, by half in places, where the fit is bad or the peak narrow (`reasons_`).

    With `compat`, paths start from every row and are computed twice, first for their range. A row is never its own
    neighbour. The program of 2019 adds about 1e-6 to every cosine distance and leaves out the nearest of the sorted
    rows, itself included: in rows of the same direction within rounding it may link a row to itself and lose one of
    its neighbours. Here such rows are linked by edges of length 0 or nearly. The table of neighbours, of
    shape (n, k), is taken to the host, where paths are computed. `transform` applies the fit to the distances between
    the `n_neighbors_local` rows around a row, along edges between them: with some ten edges across the patch it
    is noisy (tens of percent) and biased (in a ball of dimension 5 its mean is 2.7), a comparison between places rather
    than a dimension; it takes about 2 ms a row. Distances along curves have no peak: in dimension 1 the estimate comes
    from the moments of the distances, is near 2 and is called unreliable.

    References
    ----------
    D. Granata and V. Carnevale, "Accurate estimation of the intrinsic dimension using graph distances: unraveling the
    geometric complexity of datasets", Scientific Reports 6:31377, 2016. :doi:`10.1038/srep31377`

    S. Gong, V. N. Boddeti and A. K. Jain, "On the intrinsic dimensionality of image representations", CVPR 2019.
    :arxiv:`1803.09672`

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import GraphDistanceDimension
    >>> X = np.random.default_rng(0).standard_normal((1000, 3))
    >>> X /= np.linalg.norm(X, axis=1, keepdims=True)
    >>> model = GraphDistanceDimension().fit(X)
    >>> round(model.dimension_, 1), model.dimension_rounded_, model.reliable_
    (2.0, 2, True)
    """

    def __init__(
        self,
        n_neighbors: Any = "auto",
        *,
        n_sources: int | None = 500,
        distances: str = "graph",
        compat: str | None = None,
        n_neighbors_local: int = 100,
        metric: str = "euclidean",
        duplicates: str = "drop",
        confidence_level: float = 0.95,
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.n_sources = n_sources
        self.distances = distances
        self.compat = compat
        self.n_neighbors_local = n_neighbors_local
        self.metric = metric
        self.duplicates = duplicates
        self.confidence_level = confidence_level
        self.n_jobs = n_jobs
        self.random_state = random_state

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if not (isinstance(self.n_neighbors, str) and self.n_neighbors == "auto"):
            hint = 'Or pass "auto".'
            check_integer(self.n_neighbors, "n_neighbors", low=1, hint=hint)
        if self.n_sources is not None:
            check_integer(self.n_sources, "n_sources", low=1)
        count_threads(self.n_jobs)
        check_choice(self.distances, "distances", ("graph", "geodesic"))
        check_choice(self.compat, "compat", (None, *RECIPES))

    @property
    def _needs_all_distances(self) -> bool:  # type: ignore[override]
        return bool(self.distances == "geodesic")

    def _n_needed(self) -> int:
        if self.distances == "geodesic":
            return 1
        if not isinstance(self.n_neighbors, str):
            return int(self.n_neighbors)
        return SMALLEST_K if self.compat is None else RECIPES[self.compat].n_neighbors

    def _n_searched(self) -> int:
        automatic = isinstance(self.n_neighbors, str) and self.compat is None and self.distances == "graph"
        return LARGEST_K if automatic else self._n_needed()

    def _read(self, X: Any) -> NeighborTable:
        if self.compat == "gong2019":
            check_choice(self.metric, "metric", ("euclidean", "precomputed"))
        if self.compat != "gong2019" or isinstance(X, NeighborTable) or self.metric == "precomputed":
            return super()._read(X)
        X = _unit_rows(self._check_X(X, reset=True, min_samples=3))
        table = self._search(X)
        # On the unit sphere, one minus the cosine is half the squared distance, and as exact as that.
        return replace(table, distances=table.distances * table.distances / 2, metric="cosine")

    def _check_queries(self, X: Any) -> tuple[Any, Array]:
        queries, like = super()._check_queries(X)
        if self.compat == "gong2019" and self.table_.metric == "cosine":
            queries = _unit_rows(queries)
        return queries, like

    def _estimate(self, table: NeighborTable) -> Estimate:
        rng = _random.check_rng(self.random_state, "random_state")
        recipe = None if self.compat is None else RECIPES[self.compat]
        if self.distances == "geodesic":
            trial, unit = geodesic_trial(table, rng, recipe)
            return self._result(table, trial, unit, [], [])
        graphs = NeighborGraphs(table)
        rows = graphs.shuffled(rng)
        k = min(self._n_needed(), table.n_neighbors)
        reasons: list[str] = []
        if recipe is not None:
            trial = published_trial(graphs, k, rows, recipe, self.n_jobs)
        elif isinstance(self.n_neighbors, str):
            trial, profile, reasons = choose(graphs, rows, self.n_sources, self.n_jobs)
            return self._result(table, trial, graphs.unit, profile, reasons)
        else:
            trial = run_trial(graphs, k, rows, self.n_sources, self.n_jobs)
        return self._result(table, trial, graphs.unit, [(k, trial.fit.dimension)], reasons)

    def _result(
        self, table: NeighborTable, trial: Trial, unit: float, profile: list[tuple[int, float]], reasons: list[str]
    ) -> Estimate:
        fit, graph = trial.fit, trial.graph
        n_used = table.n_queries if graph is None else graph.n_nodes
        std, interval = jackknife(trial, trial.n_sources / n_used, float(self.confidence_level))
        rounded = max(int(np.floor(fit.dimension + 0.5)), 1)
        if self.compat is not None:
            cap = RECIPES[self.compat].largest
            if cap is None and table.X is not None:
                cap = int(table.X.shape[1])
            rounded = rounded if cap is None else min(rounded, cap)
        reasons = reasons + trial.reasons
        if reasons:
            warn_user(f"The graph-distance dimension {fit.dimension:.3g} is unreliable: {'; '.join(reasons)}.")
        attributes = {
            "dimension_rounded_": rounded,
            "reliable_": not reasons,
            "reasons_": tuple(reasons),
            "n_neighbors_": trial.k or None,
            "k_profile_": tuple(profile),
            "n_components_": 1 if graph is None else graph.n_components,
            "component_share_": 1.0 if graph is None else graph.share,
            "n_sources_": trial.n_sources,
            "peak_": fit.peak * unit,
            "peak_width_": fit.width * unit,
            "peak_edges_": None if graph is None or graph.typical == 0 else fit.width / graph.typical,
            "misfit_": fit.misfit,
            "_graph": graph,
        }
        return Estimate(fit.dimension, std, interval, n_used, table.n_queries - n_used, attributes)

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:  # noqa: ARG002
        members = self.table_.positions()[_xp.to_numpy(indices)]
        if self._graph is None:
            matrix, window = self._matrix(), GEODESIC_WINDOW
            found: Iterator[np.ndarray] = (matrix[np.ix_(some, some)] for some in members)
        else:
            place = np.full(self._graph.n_rows + 1, -1)
            place[self._graph.nodes] = np.arange(self._graph.n_nodes)
            # Rows that are not in the table have position -1, which is the last entry.
            found, window = patch_paths(self._graph, place[members]), GRAPH_WINDOW
        pairs = np.triu_indices(members.shape[1], 1)
        values = np.asarray([_patch_dimension(patch[pairs], window) for patch in found])
        return _xp.asarray_like(values, distances)

    def _matrix(self) -> np.ndarray:
        """Return the given distances as a matrix again."""
        table = self.table_
        n = table.n_queries
        matrix = np.zeros((n, n))
        columns = table.positions()[_xp.to_numpy(table.indices)]
        np.put_along_axis(matrix, columns, _xp.to_numpy(table.distances).astype(np.float64), axis=1)
        return matrix


def _patch_dimension(values: np.ndarray, window: tuple[float, float]) -> float:
    """Return the dimension from the distances between the rows of a patch; NaN if they do not differ."""
    values = values[np.isfinite(values)]
    if len(values) == 0 or not values.max() > 0:
        return np.nan
    edges = np.linspace(0, values.max(), _PATCH_BINS + 1)
    try:
        return fit_sine(bin_counts(values, edges), edges, window, tol=_PATCH_TOL).dimension
    except ValueError:
        return np.nan


def _unit_rows(X: Array) -> Array:
    """Return rows of length 1, in the accumulator's dtype."""
    xp = _xp.array_namespace(X)
    X = xp.astype(X, _xp.accumulator_dtype(xp, _xp.device(X)))
    largest = xp.max(xp.abs(X), axis=1, keepdims=True)
    if not bool(xp.all(largest > 0)):
        raise ValueError('X has a row of zeros, which has no cosine: compat="gong2019" needs rows with a direction.')
    X = X / largest
    return X / xp.sqrt(xp.sum(X * X, axis=1, keepdims=True))
