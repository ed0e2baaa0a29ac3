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
    table = NeighborTable.from_rows(X, 10)
    matrix = NeighborGraphs(table).component(10).matrix()
    sources = np.arange(n if full else 500)
    start = time.process_time()
    for first in range(0, len(sources), 500):
        dijkstra(matrix, directed=False, indices=sources[first : first + 500])
    theirs = (time.process_time() - start) * n / len(sources)
    everything = GraphDistanceDimension(10, n_sources=None).fit(table)
    away = abs(model.dimension_ - everything.dimension_) / model.dimension_std_
    report(
        f"dimension from 500 of {n} sources, neighbours included: {ours:.2f} s; scipy, all pairs: {theirs:.1f} s "
        f"({'measured' if full else 'from 500 sources'}), {theirs / ours:.1f}x; automatic k={automatic.n_neighbors_}: "
        f"{auto_time:.2f} s, {theirs / auto_time:.1f}x"
    )
    report(
        f"500 sources {model.dimension_:.3f} +- {model.dimension_std_:.3f}, all {everything.dimension_:.3f}: "
        f"{away:.2f} standard errors"
    )
    assert theirs / ours > 20
    assert away < 2
