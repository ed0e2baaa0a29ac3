"""Estimates from graph distances at several numbers of neighbours, their errors, and what speaks against them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom.dimension._dependence import Inflation, normal_interval
from isogeom.dimension._geodesic_fit import (
    GEODESIC_WINDOW,
    GRAPH_WINDOW,
    PublishedFit,
    SineFit,
    fit_published,
    fit_sine,
    moments,
)
from isogeom.dimension._geodesics import NeighborGraphs, PathGraph, bin_counts, count_paths

# Fewest and most neighbours that are tried.
SMALLEST_K, LARGEST_K = 3, 24
# Numbers tried grow by this factor; estimates of neighbouring ones, and of the last few, must agree within the share.
_FACTOR, _AGREEING, _PLATEAU = 1.35, 3, 0.1
# Sources of a trial: enough to see whether estimates agree.
_TRIAL_SOURCES = 100
# A component is giant if more neighbours would add less than this share to it.
_GROWTH = 0.02
# Bins of the streaming histogram, and groups of sources that the jackknife leaves out in turn.
_BINS, _GROUPS = 1024, 20
# Given distances that are counted at a time.
_BLOCK_ELEMENTS = 2**20
# Limits beyond which an estimate is called unreliable: share of rows in the graph, misfit, and width of the peak in
# edges: paths are sums of edges, so they do not resolve a narrower peak. Of spheres, cubes and Gaussians of dimension 2
# to 8 with 500 to 10000 rows, three estimates at wider peaks that agree came within 16 % of the dimension.
_LEAST_SHARE, _MOST_MISFIT, _LEAST_EDGES = 0.9, 0.1, 1.75


@dataclass(frozen=True)
class Recipe:
    """What a published recipe fixes: neighbours, bins, largest rounded dimension (None: features), and its rules."""

    n_neighbors: int
    n_bins: int
    largest: int | None
    strict: bool


RECIPES = {"granata2016": Recipe(3, 50, 25, False), "gong2019": Recipe(4, 100, None, True)}


@dataclass(frozen=True)
class Trial:
    """An estimate from one set of distances.

    Attributes
    ----------
    k : int
        Number of neighbours of the graph; 0 if the distances were given.
    graph : PathGraph or None
        The graph; None if the distances were given.
    counts : ndarray of shape (n_groups, n_bins)
        Distances by groups of sources.
    n_sources : int
        Number of sources.
    fit : SineFit or PublishedFit
        The fit of their histogram.
    refit : callable
        Computes the dimension from other counts in the same bins.
    reasons : list of str
        What speaks against the estimate.
    """

    k: int
    graph: PathGraph | None
    counts: np.ndarray
    n_sources: int
    fit: SineFit | PublishedFit
    refit: Callable[[np.ndarray], float]
    reasons: list[str]


def sources_of(graph: PathGraph, rows: np.ndarray, n_sources: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the first nodes among some rows, in their order, and the groups they belong to."""
    place = np.full(graph.n_rows, -1)
    place[graph.nodes] = np.arange(graph.n_nodes)
    found = place[rows]
    found = found[found >= 0][:n_sources]
    return found, np.arange(len(found)) % _GROUPS


def run_trial(graphs: NeighborGraphs, k: int, rows: np.ndarray, n_sources: int | None, n_jobs: int | None) -> Trial:
    """Estimate the dimension by maximum likelihood with `k` neighbours."""
    graph = graphs.component(k)
    sources, groups = sources_of(graph, rows, n_sources)
    _, facts = count_paths(graph, sources[:1], groups[:1], np.zeros(1), 1)
    # No two nodes are farther apart than twice the farthest from any one.
    edges = _edges(0.0, 2 * float(facts[0, 0]), _BINS)
    counts, _ = count_paths(graph, sources, groups, edges, _GROUPS, n_jobs)
    return _likelihood_trial(k, graph, counts, edges, len(sources))


def _likelihood_trial(k: int, graph: PathGraph | None, counts: np.ndarray, edges: np.ndarray, n_sources: int) -> Trial:
    total = counts.sum(axis=0)
    window = GEODESIC_WINDOW if graph is None else GRAPH_WINDOW
    fit = fit_sine(total, edges, window)
    reasons = _fit_misgivings(fit, total, edges)
    if graph is not None:
        reasons += _graph_misgivings(graph, fit.width)

    def refit(left: np.ndarray) -> float:
        return fit_sine(left, edges, window, fit if fit.settled else None).dimension

    return Trial(k, graph, counts, n_sources, fit, refit, reasons)


def choose(
    graphs: NeighborGraphs, rows: np.ndarray, n_sources: int | None, n_jobs: int | None
) -> tuple[Trial, list[tuple[int, float]], list[str]]:
    """Return the trial with the number of neighbours to use, all numbers tried with their estimates, and misgivings.

    Starts from the smallest number whose largest component hardly grows with more neighbours. More neighbours make
    paths straighter, and their lengths coarser: the last number is taken at which the peak is still resolved and the
    estimate that of the numbers before. A jump tells of short cuts.
    """
    most = _TRIAL_SOURCES if n_sources is None else min(n_sources, _TRIAL_SOURCES)
    run: list[Trial] = []
    profile = []
    for k in _candidates(graphs):
        trial = run_trial(graphs, k, rows, most, n_jobs)
        profile.append((k, trial.fit.dimension))
        if not _is_resolved(trial) and (run or len(profile) > 1):
            break
        if _fits(trial) and (not run or _agree([run[-1], trial])):
            run.append(trial)
        elif len(run) >= _AGREEING:
            break
        else:
            run = [trial] if _fits(trial) else []
    reasons = []
    if len(run) < _AGREEING or not _agree(run[-_AGREEING:]):
        listed = ", ".join(f"{value:.3g} (k={k})" for k, value in profile)
        reasons = [f"no {_AGREEING} numbers of neighbours in a row give good fits that agree: {listed}"]
        found = run_trial(graphs, run[-1].k if run else profile[0][0], rows, n_sources, n_jobs)
    else:
        for trial in reversed(run[_AGREEING - 1 :]):
            found = run_trial(graphs, trial.k, rows, n_sources, n_jobs)
            # With all sources, a peak at the limit of resolution may turn out to be narrower.
            if not found.reasons:
                break
    return found, profile, reasons


def _candidates(graphs: NeighborGraphs) -> Iterator[int]:
    """Yield the numbers of neighbours to try, growing geometrically."""
    largest = min(LARGEST_K, graphs.largest_k)
    wanted = (1 - _GROWTH) * graphs.component(largest).n_nodes
    k = min(SMALLEST_K, largest)
    while graphs.component(k).n_nodes < wanted:
        k += 1
    while k <= largest:
        yield k
        k = max(k + 1, round(_FACTOR * k))


def _is_resolved(trial: Trial) -> bool:
    return trial.graph is None or trial.fit.width >= _LEAST_EDGES * trial.graph.typical


def _fits(trial: Trial) -> bool:
    return isinstance(trial.fit, SineFit) and trial.fit.settled and trial.fit.misfit <= _MOST_MISFIT


def _agree(trials: list[Trial]) -> bool:
    values = [trial.fit.dimension for trial in trials]
    return max(values) <= (1 + _PLATEAU) * min(values)


def published_trial(graphs: NeighborGraphs, k: int, rows: np.ndarray, recipe: Recipe, n_jobs: int | None) -> Trial:
    """Fit as published: distances between all rows, in bins from the smallest to the largest of them."""
    graph = graphs.component(k)
    sources, groups = sources_of(graph, rows, None)
    _, facts = count_paths(graph, sources, groups, np.zeros(1), _GROUPS, n_jobs)
    # The shortest edge is the shortest path.
    ends = float(graph.weights.min()), float(facts[:, 0].max())
    edges = _edges(*ends, recipe.n_bins)
    counts, _ = count_paths(graph, sources, groups, edges, _GROUPS, n_jobs)
    n_pairs = graph.n_nodes * (graph.n_nodes - 1)
    means = facts[:, 1].sum() / n_pairs, facts[:, 2].sum() / n_pairs
    return _published(k, graph, counts, edges, means, len(sources), recipe.strict)


def _published(
    k: int,
    graph: PathGraph | None,
    counts: np.ndarray,
    edges: np.ndarray,
    means: tuple[float, float],
    n_sources: int,
    strict: bool,
) -> Trial:
    mean, mean_square = means
    std = float(np.sqrt(max(mean_square - mean**2, 0.0)))
    longest = 0.0 if graph is None else graph.longest

    def refit(left: np.ndarray) -> float:
        return fit_published(left, edges, mean, std, longest, strict=strict).dimension

    fit = fit_published(counts.sum(axis=0), edges, mean, std, longest, strict=strict)
    reasons = [] if graph is None else _graph_misgivings(graph, fit.width)
    return Trial(k, graph, counts, n_sources, fit, refit, reasons)


def geodesic_trial(table: NeighborTable, rng: np.random.Generator, recipe: Recipe | None) -> tuple[Trial, float]:
    """Fit given distances, by maximum likelihood or as published; return their unit too."""
    if table.n_neighbors < table.n_reference - 1 or table.n_queries < table.n_reference:
        raise ValueError(
            'distances="geodesic" takes the distances between all rows: pass their matrix with metric="precomputed".'
        )
    largest = max(float(block.max()) for _, block in _blocks(table))
    unit = 2.0 ** int(np.frexp(largest)[1])
    n = table.n_queries
    groups = rng.permutation(n) % _GROUPS
    smallest, total, squares = np.inf, 0.0, 0.0
    for _, block in _blocks(table):
        block = block / unit
        smallest, total, squares = min(smallest, block.min()), total + block.sum(), squares + (block**2).sum()
    low, n_bins = (0.0, _BINS) if recipe is None else (float(smallest), recipe.n_bins)
    edges = _edges(low, largest / unit, n_bins)
    counts = np.zeros((_GROUPS, len(edges) - 1), dtype=np.int64)
    for start, block in _blocks(table):
        for i, row in enumerate(block / unit):
            counts[groups[start + i]] += bin_counts(row, edges)
    if recipe is None:
        return _likelihood_trial(0, None, counts, edges, n), unit
    n_pairs = n * table.n_neighbors
    return _published(0, None, counts, edges, (total / n_pairs, squares / n_pairs), n, recipe.strict), unit


def _blocks(table: NeighborTable) -> Iterator[tuple[int, np.ndarray]]:
    size = max(1, _BLOCK_ELEMENTS // table.n_neighbors)
    for start in range(0, table.n_queries, size):
        stop = min(start + size, table.n_queries)
        yield start, _xp.to_numpy(table.distances[start:stop, :]).astype(np.float64)


def _edges(low: float, high: float, n_bins: int) -> np.ndarray:
    if not low < high:
        raise ValueError("All distances are equal: they have no histogram to fit.")
    return np.linspace(low, high, n_bins + 1)


def _graph_misgivings(graph: PathGraph, width: float) -> list[str]:
    """Return what a graph says against an estimate from it."""
    reasons = []
    if graph.share < _LEAST_SHARE:
        reasons.append(f"the largest of {graph.n_components} components of the graph has {graph.share:.0%} of the rows")
    if width < _LEAST_EDGES * graph.typical:
        reasons.append(
            f"the peak of the distances is {width / graph.typical:.2g} edges wide, too narrow for paths to resolve: "
            "more rows are needed"
        )
    return reasons


def _fit_misgivings(fit: SineFit, counts: np.ndarray, edges: np.ndarray) -> list[str]:
    """Return what a fit says against itself."""
    if not fit.settled:
        return ["no density of a sphere fits the distances near their peak, and their moments were used"]
    reasons = []
    if fit.misfit > _MOST_MISFIT:
        reasons.append(f"the density of a sphere fits badly (misfit {fit.misfit:.2g})")
    unit = float(edges[-1])
    mean, std = moments(counts, (edges[1:] + edges[:-1]) / (2 * unit))
    if abs(fit.peak / unit - mean) > std:
        reasons.append(f"the fitted peak {fit.peak:.3g} is far from the mean distance {mean * unit:.3g}")
    return reasons


def jackknife(trial: Trial, share: float, level: float) -> tuple[float | None, tuple[float, float] | None]:
    """Return the standard error over groups of sources, and the interval from it.

    Leaving out sources tells how far the mean over m sources is from that over infinitely many, with the end points
    as they are. That part of the variance is to the whole one as 1 / m to 1 / m + 3 / n: of the mean over pairs, each
    row carries twice its own share as a source and an end point, and these are the same rows.
    """
    counts, dimension = trial.counts, trial.fit.dimension
    filled = np.flatnonzero(counts.sum(axis=1))
    total, n_groups = counts.sum(axis=0), len(filled)
    if n_groups < 2:
        return None, None
    try:
        values = np.asarray([trial.refit(total - counts[group]) for group in filled])
    except ValueError:
        return None, None
    variance = (n_groups - 1) / n_groups * float(np.sum((values - values.mean()) ** 2))
    std = float(np.sqrt(variance * (1 + 3 * share)))
    # At the limit of the fit, dimension 1, no group changes anything: that says nothing of the error.
    if not np.isfinite(std) or std == 0 or dimension <= 0:
        return None, None
    return std, normal_interval(dimension, std, Inflation(1.0, float(n_groups - 1)), level)
