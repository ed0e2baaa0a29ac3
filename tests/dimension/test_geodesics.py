import numpy as np
import pytest
import scipy.sparse as sp
from oracles.graph_distance import all_paths, largest_component, neighbor_matrix
from scipy.sparse.csgraph import dijkstra

from isogeom._kernels import _shortest_paths as kernels
from isogeom.dimension import NeighborTable
from isogeom.dimension import _geodesics as geodesics
from isogeom.dimension._geodesics import NeighborGraphs, bin_counts, count_paths, count_threads, patch_paths, path_rows


def graph_of(X, k, **parameters):
    return NeighborGraphs(NeighborTable.from_rows(X, k, **parameters)).component(k)


@pytest.fixture(params=["array code", "kernel"])
def engine(request, monkeypatch):
    """Run with and without the kernels."""
    if request.param == "kernel":
        monkeypatch.setattr(geodesics, "available", lambda name, *args: getattr(kernels, name))
    else:
        monkeypatch.setattr(geodesics, "available", lambda *args: None)
    return request.param


def two_parts():
    rng = np.random.default_rng(0)
    return np.vstack((rng.standard_normal((60, 3)), 100 + rng.standard_normal((25, 3)), [[50, 0, 0], [50, 0, 1.0]]))


def test_paths_are_those_of_the_full_matrix(engine):
    X = two_parts()
    W = neighbor_matrix(X, 3)
    nodes, n_components = largest_component(W)
    graph = graph_of(X, 3)
    assert graph.n_components == n_components >= 2
    np.testing.assert_array_equal(graph.nodes, nodes)
    assert graph.share == len(nodes) / len(X)
    expected = all_paths(W[np.ix_(nodes, nodes)])
    np.testing.assert_allclose(path_rows(graph, np.arange(len(nodes))) * graph.unit, expected, rtol=1e-13)


@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150])
def test_the_kernel_gives_the_distances_of_scipy_to_the_last_bit(scale):
    rng = np.random.default_rng(1)
    X = np.exp(2 * rng.standard_normal((400, 4)))
    graph = graph_of(scale * X, 6)
    out = np.empty((graph.n_nodes, graph.n_nodes))
    kernels.path_rows(graph.starts, graph.ends, graph.weights, np.arange(graph.n_nodes), *graph.queue(), out)
    np.testing.assert_array_equal(out, dijkstra(graph.matrix(), directed=False))


@pytest.mark.parametrize("per_bucket", [1e-3, 0.3, 40.0])
def test_the_width_of_the_buckets_changes_nothing(per_bucket):
    graph = graph_of(np.random.default_rng(2).standard_normal((150, 3)), 5)
    n_buckets = 1 << int(graph.longest * per_bucket + 3).bit_length()
    out = np.empty((4, graph.n_nodes))
    kernels.path_rows(graph.starts, graph.ends, graph.weights, np.arange(4), per_bucket, n_buckets, out)
    np.testing.assert_array_equal(out, dijkstra(graph.matrix(), indices=np.arange(4)))


def test_very_unequal_edges_do_not_need_many_buckets(engine):
    X = np.r_[np.arange(50) * 1e-9, 1e6, 1e6 + 1e-3][:, np.newaxis]
    graph = graph_of(X, 50)
    assert graph.queue()[1] <= 2**17
    np.testing.assert_allclose(path_rows(graph, np.array([0]))[0] * graph.unit, X[:, 0], rtol=1e-12, atol=1e-20)


def test_edges_of_length_zero_are_edges(engine):
    X = np.random.default_rng(3).standard_normal((40, 2))
    X = np.vstack((X, X[:5]))
    graph = graph_of(X, 4, duplicates="keep")
    assert (graph.weights == 0).sum() == 10
    assert graph.n_nodes == 45
    rows = path_rows(graph, np.arange(45))
    np.testing.assert_array_equal(rows[np.arange(5), np.arange(40, 45)], np.zeros(5))
    np.testing.assert_allclose(rows * graph.unit, all_paths(neighbor_matrix(X, 4)), rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize("n_jobs", [None, 1, 3, -1])
def test_counts_are_the_histogram_of_the_matrix(engine, n_jobs):
    graph = graph_of(np.random.default_rng(4).standard_normal((200, 3)), 5)
    sources = np.random.default_rng(5).permutation(graph.n_nodes)[:150]
    groups = np.arange(150) % 4
    D = dijkstra(graph.matrix(), indices=sources)
    # Edges that are distances themselves, and a range that leaves some out.
    edges = np.linspace(np.sort(D.ravel())[3000], D.max(), 38)
    counts, facts = count_paths(graph, sources, groups, edges, 4, n_jobs)
    for group in range(4):
        mine = D[groups == group]
        np.testing.assert_array_equal(counts[group], np.histogram(mine[mine > 0], edges)[0])
    np.testing.assert_array_equal(facts[:, 0], D.max(axis=1))
    np.testing.assert_allclose(facts[:, 1:], np.stack((D.sum(axis=1), (D**2).sum(axis=1)), axis=1), rtol=1e-12)


def test_bins_are_those_of_numpy():
    values = np.random.default_rng(6).integers(0, 41, 5000) / 40
    for n_bins in (1, 7, 40, 50):
        edges = np.linspace(0, 1, n_bins + 1)
        np.testing.assert_array_equal(bin_counts(values, edges), np.histogram(values, edges)[0])


def test_paths_of_a_patch_stay_inside(engine):
    graph = graph_of(np.random.default_rng(7).standard_normal((120, 3)), 4)
    members = np.stack((np.arange(0, 60, 2), np.r_[np.arange(70, 98), -1, -1]))
    W = np.full((graph.n_nodes,) * 2, np.inf)
    coo = sp.coo_array(graph.matrix())
    W[coo.row, coo.col] = coo.data
    for row, found in zip(members, patch_paths(graph, members)):
        inside = row >= 0
        np.testing.assert_allclose(found[np.ix_(inside, inside)], all_paths(W[np.ix_(row[inside], row[inside])]))
        assert np.isinf(found[np.ix_(inside, ~inside)]).all()


def test_a_table_with_anchors_has_no_graph():
    table = NeighborTable.from_rows(np.random.default_rng(8).standard_normal((30, 2)), 4, anchors=10)
    with pytest.raises(ValueError, match="without anchors"):
        NeighborGraphs(table)


def test_number_of_threads():
    assert count_threads(None) == 1
    assert count_threads(3) == 3
    assert count_threads(-1) >= 1
    with pytest.raises(ValueError, match="n_jobs=0"):
        count_threads(0)


def test_shuffled_rows_do_not_depend_on_their_order():
    X = np.random.default_rng(9).standard_normal((50, 3))
    order = np.random.default_rng(10).permutation(50)
    first = NeighborGraphs(NeighborTable.from_rows(X, 6)).shuffled(np.random.default_rng(0))
    second = NeighborGraphs(NeighborTable.from_rows(X[order], 6)).shuffled(np.random.default_rng(0))
    np.testing.assert_array_equal(order[second], first)


def test_groups_out_of_range_are_refused(engine):
    # The kernel does not check its indices.
    graph = graph_of(two_parts(), 3)
    with pytest.raises(ValueError, match="outside 0 to 0"):
        count_paths(graph, np.arange(2), np.arange(2), np.zeros(1), 1)


def test_graphs_of_all_numbers_of_neighbors_come_from_one_sort():
    X = np.random.default_rng(5).standard_normal((120, 3))
    graphs = NeighborGraphs(NeighborTable.from_rows(X, 10))
    for k in (10, 1, 3, 2, 7):
        W = neighbor_matrix(X, k)
        nodes, n_components = largest_component(W)
        graph = graphs.component(k)
        np.testing.assert_array_equal(graph.nodes, nodes)
        assert graph.n_components == n_components
        expected = np.where(np.isfinite(W), W, 0)[np.ix_(nodes, nodes)]
        found = graph.matrix()
        assert found.has_sorted_indices
        np.testing.assert_allclose(found.toarray() * graph.unit, expected, rtol=1e-12)


def test_the_smaller_of_two_weights_of_an_edge_counts_once_both_ends_list_it():
    # Rows 0 and 1 disagree about their distance; row 1 lists row 0 last.
    indices, distances = [[1, 2, 3], [2, 3, 0], [1, 3, 0], [1, 2, 0]], [[2, 3, 4], [1, 1, 1.5], [1, 2, 3], [1, 2, 4]]
    table = NeighborTable.from_precomputed(
        sp.csr_array((np.ravel(distances).astype(float), np.ravel(indices), np.arange(0, 13, 3)), shape=(4, 4))
    )
    graphs = NeighborGraphs(table)
    for k, weight in ((1, 2.0), (2, 2.0), (3, 1.5)):
        graph = graphs.component(k)
        assert graph.matrix().toarray()[0, 1] * graph.unit == weight
