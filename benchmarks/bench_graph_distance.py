"""Graph distances against scipy's shortest paths, and the estimate from sampled sources against that from all."""

import time

import numpy as np
import pytest
from scipy.sparse.csgraph import dijkstra

from isogeom.dimension import GraphDistanceDimension, NeighborTable
from isogeom.dimension._geodesics import NeighborGraphs, count_paths, path_rows


def rows(n, d=12, p=50):
    rng = np.random.default_rng(0)
    return rng.standard_normal((n, d)) @ rng.standard_normal((d, p))


@pytest.mark.parametrize("n", [5000, 10_000])
def test_paths(compare, full, n):
    graph = NeighborGraphs(NeighborTable.from_rows(rows(n), 10)).component(10)
    sources = np.random.default_rng(1).permutation(graph.n_nodes)[: None if full else 300]
    matrix, edges = graph.matrix(), np.linspace(0, 10, 4097)
    some = sources[:20]
    np.testing.assert_array_equal(path_rows(graph, some), dijkstra(matrix, directed=False, indices=some))

    def scipy_paths(directed):
        for start in range(0, len(sources), 300):
            dijkstra(matrix, directed=directed, indices=sources[start : start + 300])

    def ours():
        count_paths(graph, sources, np.arange(len(sources)) % 20, edges, 20)

    label = f"paths from {len(sources)} of {n} rows, k=10"
    ratio = compare(label, ours, lambda: scipy_paths(False), peer_name="scipy Dijkstra, directed=False", repeats=3)
    compare(label, ours, lambda: scipy_paths(True), peer_name="scipy Dijkstra, directed=True", repeats=3)
    assert ratio > 2.5


def test_paths_on_two_threads(report, full):
    # Wall seconds: they say little unless two cores are idle.
    n = 10_000 if full else 5000
    graph = NeighborGraphs(NeighborTable.from_rows(rows(n), 10)).component(10)
    sources = np.random.default_rng(1).permutation(graph.n_nodes)[: None if full else 1000]
    groups, edges, matrix = np.arange(len(sources)) % 20, np.linspace(0, 10, 4097), graph.matrix()

    def scipy_paths():
        for start in range(0, len(sources), 300):
            dijkstra(matrix, directed=False, indices=sources[start : start + 300])

    def wall(function):
        start = time.perf_counter()
        result = function()
        return time.perf_counter() - start, result

    def ours(threads):
        return count_paths(graph, sources, groups, edges, 20, threads)

    times = []
    for _ in range(3):
        one, two = wall(lambda: ours(1)), wall(lambda: ours(2))
        for first, second in zip(one[1], two[1]):
            np.testing.assert_array_equal(first, second)
        times.append((one[0], two[0], wall(scipy_paths)[0]))
    one, two, theirs = np.min(times, axis=0)
    report(
        f"paths from {len(sources)} of {n} rows, wall: {one:.2f} s on one thread, {two:.2f} s on two; scipy "
        f"{theirs:.2f} s: {theirs / one:.1f}x and {theirs / two:.1f}x (least of 3)"
    )


def test_sampled_sources(report, full):
    n = 10_000
    X = rows(n, d=5)
    GraphDistanceDimension(10).fit(X[:3000])
    start = time.process_time()
    model = GraphDistanceDimension(10).fit(X)
    ours = time.process_time() - start
    start = time.process_time()
    automatic = GraphDistanceDimension().fit(X)
    auto_time = time.process_time() - start
    matrix = NeighborGraphs(NeighborTable.from_rows(X, 10)).component(10).matrix()
    sources = np.arange(n if full else 500)
    start = time.process_time()
    for first in range(0, len(sources), 500):
        dijkstra(matrix, directed=False, indices=sources[first : first + 500])
    theirs = (time.process_time() - start) * n / len(sources)
    report(
        f"dimension from {model.n_sources_} of {n} sources, neighbours included: {ours:.2f} s; scipy, all pairs: "
        f"{theirs:.1f} s ({'measured' if full else 'from 500 sources'}), {theirs / ours:.1f}x; automatic "
        f"k={automatic.n_neighbors_}: {auto_time:.2f} s, {theirs / auto_time:.1f}x"
    )
    assert theirs / ours > 20


@pytest.mark.parametrize("k", [10, "auto"])
def test_sampled_sources_against_all(report, full, k):
    n, n_choices = 10_000, 40 if full else 8
    table = NeighborTable.from_rows(rows(n, d=5), 24)
    everything = GraphDistanceDimension(k, n_sources=None).fit(table)
    found = [GraphDistanceDimension(k, random_state=seed).fit(table) for seed in range(n_choices)]
    values, errors = (np.asarray([getattr(model, key) for model in found]) for key in ("dimension_", "dimension_std_"))
    away = np.abs(values - everything.dimension_) / errors
    report(
        f"{n_choices} choices of {found[0].n_sources_} of {n} sources, k={k}: {values.mean():.3f} +- "
        f"{values.std(ddof=1):.3f}, reported error {errors.mean():.3f}; all sources {everything.dimension_:.3f}: "
        f"within one error in {np.mean(away < 1):.0%}, within 1.96 in {np.mean(away < 1.96):.0%}"
    )
    # Three standard errors of a share below 68 and 95 %.
    assert np.mean(away < 1) > 0.68 - 3 * np.sqrt(0.68 * 0.32 / n_choices)
    assert np.mean(away < 1.96) > 0.95 - 3 * np.sqrt(0.95 * 0.05 / n_choices)
