"""Tables from distances that were computed elsewhere: full matrices and sparse graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from isogeom import _xp
from isogeom._neighbors._rows import clip_neighbors, report_duplicates
from isogeom._xp import Array


def from_matrix(D: Array, k: int | None, *, duplicates: str) -> dict[str, Any]:
    """Return the fields of a table from all distances."""
    xp = _xp.array_namespace(D)
    n = int(D.shape[0])
    if D.shape[1] != n:
        raise ValueError(f"X has shape {tuple(D.shape)}: a matrix of distances must be square.")
    if not bool(xp.all(D >= 0)):
        raise ValueError("X has a negative entry: distances must be at least 0.")
    zero = _xp.to_numpy(D == 0)
    kept = _representatives(sp.csr_array(zero))
    _report(kept, n, duplicates)
    searched = np.arange(n) if duplicates == "keep" else kept
    k = len(searched) - 1 if k is None else clip_neighbors(k, len(searched) - 1)
    places = _xp.asarray_like(searched, D, dtype=xp.int64)
    dtype = _xp.accumulator_dtype(xp, _xp.device(D))
    distances, indices = [], []
    for start in range(0, len(searched), 256):
        mine = places[start : min(start + 256, len(searched))]
        block = xp.take(xp.take(D, mine, axis=0), places, axis=1)
        own = xp.expand_dims(mine, axis=1) == xp.expand_dims(places, axis=0)
        block = xp.where(own, xp.full_like(block, xp.inf), block)
        order = xp.argsort(block, axis=1, stable=True)[:, :k]
        distances.append(xp.astype(xp.take_along_axis(block, order, axis=1), dtype))
        indices.append(xp.reshape(xp.take(places, xp.reshape(order, (-1,)), axis=0), order.shape))
    return _fields(xp.concat(distances, axis=0), xp.concat(indices, axis=0), searched, n, len(kept))


def from_graph(graph: Any, k: int | None, *, duplicates: str) -> dict[str, Any]:
    """Return the fields of a table from a sparse graph, whose stored entries (zeros too) are the neighbours."""
    graph = sp.csr_array(graph, dtype=np.float64)
    n = graph.shape[0]
    if graph.shape[1] != n:
        raise ValueError(f"X has shape {graph.shape}: a graph of neighbours must be square.")
    if not np.isfinite(graph.data).all() or (graph.data < 0).any():
        raise ValueError("X has a negative or non-finite entry: distances must be at least 0 and finite.")
    rows = np.repeat(np.arange(n), np.diff(graph.indptr))
    columns, values = graph.indices, graph.data
    zero = values == 0
    links = sp.csr_array((np.ones(int(zero.sum())), (rows[zero], columns[zero])), shape=graph.shape)
    kept = _representatives(links)
    _report(kept, n, duplicates)
    searched = np.arange(n) if duplicates == "keep" else kept
    alive = np.zeros(n, dtype=bool)
    alive[searched] = True
    use = alive[rows] & alive[columns] & (rows != columns)
    rows, columns, values = rows[use], columns[use], values[use]
    order = np.lexsort((columns, values, rows))
    rows, columns, values = rows[order], columns[order], values[order]
    counts = np.bincount(rows, minlength=n)[searched]
    fewest = int(counts.min())
    if fewest < 1:
        raise ValueError("X leaves a row without any neighbour: make the graph with more neighbours.")
    k = fewest if k is None else clip_neighbors(k, fewest)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    at = starts[:, np.newaxis] + np.arange(k)
    return _fields(values[at], columns[at].astype(np.int64), searched, n, len(kept))


def _representatives(zero: Any) -> np.ndarray:
    """Return the first row of every group that distance 0 connects."""
    _, labels = connected_components(zero, directed=False)
    return np.sort(np.unique(labels, return_index=True)[1])


def _report(kept: np.ndarray, n: int, duplicates: str) -> None:
    report_duplicates(n - len(kept), n, duplicates)
    if len(kept) < 3:
        raise ValueError(f"X has {len(kept)} distinct row(s) among {n}: at least 3 are needed to compare distances.")


def _fields(distances: Array, indices: Array, searched: np.ndarray, n: int, n_distinct: int) -> dict[str, Any]:
    return {
        "distances": distances,
        "indices": indices,
        "queries": searched,
        "n_samples": n,
        "n_reference": len(searched),
        "n_duplicates": n - n_distinct,
    }


def query_matrix(D: Array, k: int, pool: np.ndarray | None) -> tuple[Array, Array]:
    """Return the `k` nearest reference rows of new rows, from their distances to all reference rows."""
    xp = _xp.array_namespace(D)
    places = _xp.asarray_like(np.arange(int(D.shape[1])) if pool is None else pool, D, dtype=xp.int64)
    block = xp.astype(xp.take(D, places, axis=1), _xp.accumulator_dtype(xp, _xp.device(D)))
    order = xp.argsort(block, axis=1, stable=True)[:, :k]
    return xp.take_along_axis(block, order, axis=1), xp.reshape(
        xp.take(places, xp.reshape(order, (-1,)), axis=0), order.shape
    )


def query_graph(graph: Any, k: int, pool: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest reference rows of new rows from a sparse graph: at most `k`, as many as every row has."""
    graph = sp.csr_array(graph)
    m = graph.shape[0]
    rows, columns, values = np.repeat(np.arange(m), np.diff(graph.indptr)), graph.indices, graph.data
    if pool is not None:
        alive = np.isin(columns, pool)
        rows, columns, values = rows[alive], columns[alive], values[alive]
    order = np.lexsort((columns, values, rows))
    columns, values = columns[order], values[order]
    counts = np.bincount(rows, minlength=m)
    k = min(k, int(counts.min()))
    if k < 3:
        raise ValueError("X has a row with fewer than 3 neighbours: make the graph with more of them.")
    at = np.concatenate(([0], np.cumsum(counts)[:-1]))[:, np.newaxis] + np.arange(k)
    return values[at].astype(np.float64), columns[at].astype(np.int64)
