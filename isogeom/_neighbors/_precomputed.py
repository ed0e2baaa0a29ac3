"""Tables from distances that were computed elsewhere: full matrices and sparse graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from isogeom import _xp
from isogeom._neighbors._rows import report_duplicates
from isogeom._xp import Array

# Relative difference of an entry and its mirror image up to which a matrix is symmetric.
_SYMMETRY = 1e-6


def from_matrix(D: Array, k: int | None, *, duplicates: str) -> dict[str, Any]:
    """Return the fields of a table from all distances."""
    xp = _xp.array_namespace(D)
    n = int(D.shape[0])
    if D.shape[1] != n:
        raise ValueError(f"X has shape {tuple(D.shape)}: a matrix of distances must be square.")
    if not bool(xp.all(D >= 0)):
        raise ValueError("X has a negative entry: distances must be at least 0.")
    _check_symmetric(D)
    zero = _xp.to_numpy(D == 0)
    kept = _representatives(sp.csr_array(zero))
    _report(kept, n, duplicates)
    searched = np.arange(n) if duplicates == "keep" else kept
    k = len(searched) - 1 if k is None else min(k, len(searched) - 1)
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


def _check_symmetric(D: Array) -> None:
    """Raise if an entry differs from its mirror image by more than the rounding of expanded distances."""
    xp = _xp.array_namespace(D)
    largest = float(xp.max(D))
    rounded = 16 * float(xp.finfo(D.dtype).eps)
    for start in range(0, int(D.shape[0]) if largest > 0 else 0, 256):
        stop = min(start + 256, int(D.shape[0]))
        # In units of the largest distance, squares do not overflow.
        here, there = D[start:stop, :] / largest, xp.matrix_transpose(D[:, start:stop]) / largest
        gap = xp.abs(here - there)
        # Distances by way of products have errors of their squares that grow with the largest one.
        wrong = (gap > _SYMMETRY * xp.maximum(here, there)) & (gap * (here + there) > rounded)
        if bool(xp.any(wrong)):
            i, j = (int(places[0]) for places in xp.nonzero(wrong))
            i += start
            raise ValueError(
                f"X is not symmetric: X[{i}, {j}]={float(D[i, j]):.6g}, but X[{j}, {i}]={float(D[j, i]):.6g}. Pass "
                "(X + X.T) / 2 if the difference means nothing, or a sparse graph whose rows hold the neighbours."
            )


def from_graph(graph: Any, k: int | None, *, duplicates: str) -> dict[str, Any]:
    """Return the fields of a table from a sparse graph, whose stored entries (zeros too) are the neighbours.

    Rows without any entry, in their row and in their column, take no part: `NeighborTable.to_graph` leaves rows that
    repeat an earlier one like that.
    """
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
    others = rows != columns
    linked = np.zeros(n, dtype=bool)
    linked[rows[others]] = linked[columns[others]] = True
    kept = _representatives(links)
    kept = kept[linked[kept]]
    if duplicates == "raise" and not linked.all():
        raise ValueError(
            f"X has {n - int(linked.sum())} of {n} rows without any entry, which stand for rows that repeat an earlier "
            "one: remove them, or pass duplicates='drop'."
        )
    _report(kept, n, duplicates)
    searched = np.flatnonzero(linked) if duplicates == "keep" else kept
    alive = np.zeros(n, dtype=bool)
    alive[searched] = True
    use = alive[rows] & alive[columns] & others
    rows, columns, values = rows[use], columns[use], values[use]
    order = np.lexsort((columns, values, rows))
    rows, columns, values = rows[order], columns[order], values[order]
    counts = np.bincount(rows, minlength=n)[searched]
    fewest = int(counts.min())
    if fewest < 1:
        raise ValueError(
            f"X leaves {int((counts < 1).sum())} row(s) without any neighbour. The graph of a table with anchors is "
            "like that and cannot be read back: pass the table itself. Else make the graph with more neighbours."
        )
    k = fewest if k is None else min(k, fewest)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    at = starts[:, np.newaxis] + np.arange(k)
    return _fields(values[at], columns[at].astype(np.int64), searched, n, len(kept))


def to_graph(distances: Array, indices: Array, queries: np.ndarray, n: int) -> sp.csr_array:
    """Return the sparse graph of a table, as :func:`from_graph` reads it."""
    if not len(queries):
        return sp.csr_array((0, 0))
    rows = np.repeat(queries, int(distances.shape[1]))
    data, columns = _xp.to_numpy(distances).ravel(), _xp.to_numpy(indices).ravel()
    return sp.csr_array((data, (rows, columns)), shape=(n, n))


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


def without_diagonal(D: Array) -> Array:
    """Return distances of queries with a diagonal of 0, if the queries are the rows of `fit`: a symmetric matrix.

    Products leave rounding errors there, as `fit` takes for granted.
    """
    xp = _xp.array_namespace(D)
    n = int(D.shape[0])
    places = xp.arange(n, dtype=xp.int64, device=_xp.device(D))
    if D.shape[1] != n or not bool(xp.any(xp.take_along_axis(D, places[:, None], axis=1) != 0)):
        return D
    try:
        _check_symmetric(D)
    except ValueError:
        return D
    return xp.where(places[:, None] == places[None, :], xp.zeros_like(D), D)


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
