"""Graph distances without their matrix: the graph of neighbours, its largest component, and histograms of its paths.

Works on the host: the table of neighbours, of shape (n, k), is all that is taken there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components, dijkstra

from isogeom import _xp
from isogeom._kernels import available
from isogeom._neighbors import NeighborTable
from isogeom._validation import check_integer

# Width of the buckets of the queue, in mean edges (the time depends little on it), and their largest number.
_BUCKET, _MOST_BUCKETS = 0.1, 2**16
# Sources of a task, and rows of distances that the array code holds, in elements.
_BLOCK_SOURCES, _BLOCK_ELEMENTS = 64, 2**20


@dataclass(frozen=True)
class PathGraph:
    """The largest component of a graph of neighbours, as compressed rows.

    Attributes
    ----------
    starts, ends, weights : ndarray
        Edges of node i: ``ends[starts[i]:starts[i + 1]]``, each edge in both directions. Weights are distances divided
        by `unit`, a power of two, so that their squares neither overflow nor vanish.
    nodes : ndarray of shape (n_nodes,)
        Increasing rows of the table that the nodes are.
    n_components : int
        Number of components of the whole graph.
    n_rows : int
        Number of rows of the table.
    unit : float
        Unit of the weights.
    """

    starts: np.ndarray
    ends: np.ndarray
    weights: np.ndarray
    nodes: np.ndarray
    n_components: int
    n_rows: int
    unit: float

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @property
    def share(self) -> float:
        """Share of the rows in this component."""
        return self.n_nodes / self.n_rows

    @property
    def longest(self) -> float:
        """Longest edge, in units of the weights."""
        return float(self.weights.max())

    @property
    def typical(self) -> float:
        """Median edge, in units of the weights."""
        return float(np.median(self.weights))

    def queue(self) -> tuple[float, int]:
        """Return buckets per distance and the number of buckets, a power of two, for the kernels."""
        longest, mean = self.longest, float(self.weights.mean())
        if longest == 0:
            return 1.0, 4
        per_bucket = 1 / max(_BUCKET * mean, longest / (_MOST_BUCKETS - 8))
        return per_bucket, 1 << int(longest * per_bucket + 3).bit_length()

    def matrix(self) -> sp.csr_array:
        """Return the graph as a sparse matrix; zero distances are stored entries, which are edges."""
        return sp.csr_array((self.weights, self.ends, self.starts), shape=(self.n_nodes, self.n_nodes))


class NeighborGraphs:
    """Graphs of the first k neighbours, for any k that the table has.

    Parameters
    ----------
    table : NeighborTable
        Neighbours of all rows.
    """

    def __init__(self, table: NeighborTable) -> None:
        self.distances = _xp.to_numpy(table.distances).astype(np.float64)
        self.neighbors = table.positions()[_xp.to_numpy(table.indices)]
        if (self.neighbors < 0).any():
            raise ValueError(
                f"The table lists the neighbours of {table.n_queries} of {table.n_reference} rows: a graph needs those "
                "of all rows (a table without anchors)."
            )
        largest = float(self.distances.max())
        self.unit = 2.0 ** int(np.frexp(largest)[1]) if largest > 0 else 1.0
        self._components: dict[int, PathGraph] = {}

    @property
    def largest_k(self) -> int:
        """Number of neighbours in the table."""
        return int(self.distances.shape[1])

    def component(self, k: int) -> PathGraph:
        """Return the largest component of the graph in which rows are linked to their `k` nearest, and these to them.

        A row that repeats another one is linked to it by an edge of length 0, which counts like any other.
        """
        if k not in self._components:
            self._components[k] = self._component(k)
        return self._components[k]

    def _component(self, k: int) -> PathGraph:
        n = len(self.distances)
        rows, columns, ranks, others, weights, least = self._edges
        kept = ranks < k
        rows, columns = rows[kept], columns[kept]
        weights = np.where(others[kept] < k, least[kept], weights[kept])
        starts = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=n))))
        n_components, labels = connected_components(
            sp.csr_array((np.ones(len(rows), dtype=np.int8), columns, starts), shape=(n, n)), directed=False
        )
        alive = labels == np.argmax(np.bincount(labels))
        nodes, place = np.flatnonzero(alive), np.cumsum(alive) - 1
        kept = alive[rows]
        rows, columns, weights = place[rows[kept]], place[columns[kept]], weights[kept]
        starts = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=len(nodes)))))
        return PathGraph(
            starts.astype(np.int32),
            columns.astype(np.int32),
            np.ascontiguousarray(weights),
            nodes,
            int(n_components),
            n,
            self.unit,
        )

    @cached_property
    def _edges(self) -> tuple[np.ndarray, ...]:
        """Return all edges in both directions, in order of rows and columns: one sort serves all numbers of neighbours.

        Rows, columns, the rank at which one end lists the other, and at which the other lists it (the number of ranks
        if it does not), the weight given by the first of them, and the smaller one.
        """
        n, k = self.distances.shape
        first, second = np.repeat(np.arange(n), k), self.neighbors.ravel()
        key = np.minimum(first, second) * n + np.maximum(first, second)
        ranks, weights = np.tile(np.arange(k), n), self.distances.ravel() / self.unit
        order = np.lexsort((ranks, key))
        key, ranks, weights = key[order], ranks[order], weights[order]
        once = np.flatnonzero(np.concatenate(([True], key[1:] != key[:-1])))
        last = np.concatenate((once[1:], [len(key)])) - 1
        others = np.where(last > once, ranks[last], k)
        low, high = np.divmod(key[once], n)
        least = np.minimum(weights[once], weights[last])
        rows, columns = np.concatenate((low, high)), np.concatenate((high, low))
        order = np.lexsort((columns, rows))
        return (
            rows[order],
            columns[order],
            *(np.tile(values, 2)[order] for values in (ranks[once], others, weights[once], least)),
        )

    def shuffled(self, rng: np.random.Generator) -> np.ndarray:
        """Return the rows in an order drawn at random that does not depend on the order they came in.

        Rows are put in order of the distances to their nearest neighbours before they are shuffled.
        """
        columns = self.distances[:, : min(self.largest_k, 4)]
        return rng.permutation(np.lexsort(columns.T[::-1]))


def count_threads(n_jobs: int | None) -> int:
    """Return the number of threads that `n_jobs` asks for: None one, -1 all cores, -2 all but one."""
    if n_jobs is None:
        return 1
    jobs = check_integer(n_jobs, "n_jobs")
    if jobs == 0:
        raise ValueError("n_jobs=0 has no meaning: pass None or a number of threads, -1 for all cores.")
    return jobs if jobs > 0 else max((os.cpu_count() or 1) + 1 + jobs, 1)


def count_paths(
    graph: PathGraph,
    sources: np.ndarray,
    groups: np.ndarray,
    edges: np.ndarray,
    n_groups: int,
    n_jobs: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Count shortest-path distances by bins, source after source; they are never stored.

    Parameters
    ----------
    graph : PathGraph
        The graph.
    sources, groups : ndarray of shape (n_sources,)
        Nodes to start from, and the group, from 0, that each belongs to.
    edges : ndarray of shape (n_bins + 1,)
        Equally spaced edges of the bins in units of the weights, as for :func:`numpy.histogram`; one edge for no bins.
    n_groups : int
        Number of groups.
    n_jobs : int, default=None
        Number of threads. Nothing depends on it.

    Returns
    -------
    counts : ndarray of shape (n_groups, n_bins)
        int64; distances from the sources to all other nodes.
    facts : ndarray of shape (n_sources, 3)
        Largest distance, sum of distances and of their squares, of each source.
    """
    if len(groups) and not 0 <= groups.min() <= groups.max() < n_groups:
        # The kernel does not check its indices.
        raise ValueError(f"groups has entries from {groups.min()} to {groups.max()}, outside 0 to {n_groups - 1}.")
    kernel = available("path_counts", np, np.dtype(np.float64), float(len(sources)) * len(graph.ends))
    count = _compiled_counts(graph, kernel) if kernel is not None else _plain_counts(graph)
    blocks = [slice(start, start + _BLOCK_SOURCES) for start in range(0, len(sources), _BLOCK_SOURCES)]
    counts = np.zeros((n_groups, len(edges) - 1), dtype=np.int64)
    facts = np.empty((len(sources), 3))

    def work(block: slice) -> np.ndarray:
        mine = np.zeros_like(counts)
        count(sources[block], groups[block], edges, mine, facts[block])
        return mine

    threads = count_threads(n_jobs)
    if threads == 1:
        for block in blocks:
            count(sources[block], groups[block], edges, counts, facts[block])
        return counts, facts
    with ThreadPoolExecutor(threads) as pool:
        for mine in pool.map(work, blocks):
            counts += mine
    return counts, facts


_Count = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


def _compiled_counts(graph: PathGraph, kernel: Callable[..., None]) -> _Count:
    per_bucket, n_buckets = graph.queue()

    def count(
        sources: np.ndarray, groups: np.ndarray, edges: np.ndarray, counts: np.ndarray, facts: np.ndarray
    ) -> None:
        starts, ends, weights = graph.starts, graph.ends, graph.weights
        kernel(starts, ends, weights, sources, groups, per_bucket, n_buckets, edges, counts, facts)

    return count


def _plain_counts(graph: PathGraph) -> _Count:
    matrix = graph.matrix()

    def count(
        sources: np.ndarray, groups: np.ndarray, edges: np.ndarray, counts: np.ndarray, facts: np.ndarray
    ) -> None:
        size = max(1, _BLOCK_ELEMENTS // graph.n_nodes)
        for start in range(0, len(sources), size):
            some = sources[start : start + size]
            rows = dijkstra(matrix, directed=True, indices=some)
            others = np.isfinite(rows)
            others[np.arange(len(some)), some] = False
            seen = np.where(others, rows, 0.0)
            facts[start : start + size] = np.stack((seen.max(axis=1), seen.sum(axis=1), (seen**2).sum(axis=1)), axis=1)
            for i, group in enumerate(groups[start : start + size]):
                counts[group] += bin_counts(rows[i][others[i]], edges)

    return count


def bin_counts(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return :func:`numpy.histogram` of values for equally spaced edges; those outside are left out."""
    n_bins = len(edges) - 1
    if n_bins < 1:
        return np.zeros(0, dtype=np.int64)
    values = values[(values >= edges[0]) & (values <= edges[-1])]
    at = np.minimum(((values - edges[0]) * (n_bins / (edges[-1] - edges[0]))).astype(np.int64), n_bins - 1)
    at -= values < edges[at]
    at += (at + 1 < n_bins) & (values >= edges[at + 1])
    return np.bincount(at, minlength=n_bins)


def path_rows(graph: PathGraph, sources: np.ndarray) -> np.ndarray:
    """Return the distances from some nodes to all nodes, shape (n_sources, n_nodes), in units of the weights."""
    kernel = available("path_rows", np, np.dtype(np.float64), float(len(sources)) * len(graph.ends))
    if kernel is None:
        return np.atleast_2d(dijkstra(graph.matrix(), directed=True, indices=sources))
    out = np.empty((len(sources), graph.n_nodes))
    kernel(graph.starts, graph.ends, graph.weights, sources, *graph.queue(), out)
    return out


def patch_paths(graph: PathGraph, members: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the distances between the members of each patch, along paths that stay among them.

    Parameters
    ----------
    graph : PathGraph
        The graph.
    members : ndarray of shape (n_patches, k)
        Different nodes; -1 for rows outside of the graph.

    Yields
    ------
    ndarray of shape (k, k)
        Infinite where no path leads.
    """
    m, k = members.shape
    kernel = available("patch_paths", np, np.dtype(np.float64), float(m) * k * k * len(graph.ends) / graph.n_nodes)
    if kernel is None:
        matrix = graph.matrix()
        for row in members:
            inside = np.flatnonzero(row >= 0)
            found = np.full((k, k), np.inf)
            if len(inside):
                some = row[inside]
                found[np.ix_(inside, inside)] = dijkstra(matrix[some][:, some], directed=True)
            yield found
        return
    size = max(1, _BLOCK_ELEMENTS // (k * k))
    for start in range(0, m, size):
        some = np.ascontiguousarray(members[start : start + size])
        out = np.empty((len(some), k, k))
        kernel(graph.starts, graph.ends, graph.weights, some, *graph.queue(), out)
        yield from out
