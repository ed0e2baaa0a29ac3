"""Coordinates of neighbourhoods, relative to their centre and in units of their radius, a bounded block at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._xp import Array

# Largest block of coordinates, or of products of the rows of patches, in elements; of numpy's, which work through it
# several times, so many that they stay in a cache (1 MiB).
_ELEMENTS, _CACHED_ELEMENTS = 2**20, 2**17


def check_coordinates(table: NeighborTable, owner: str) -> Array:
    """Return the rows of the table, whose Euclidean distances it must hold."""
    if table.X is None or table.metric != "euclidean":
        raise ValueError(
            f"{owner} compares Euclidean coordinates of neighbours, but the table has metric={table.metric!r}: pass X, "
            'or a table made with NeighborTable.from_rows(X, metric="euclidean").'
        )
    return table.X


def check_queries(queries: Array | None, owner: str) -> Array:
    """Return the rows of `transform`, which a table made from distances lacks."""
    if queries is None:
        raise ValueError(f"{owner} needs the rows, not only their distances: pass X, or a table that holds them.")
    return queries


def offset_patches(
    X: Array, queries: Array | np.ndarray, distances: Array, indices: Array
) -> Iterator[tuple[Array, Array]]:
    """Yield the differences of neighbours and their centre, over the distance of the last one.

    Parameters
    ----------
    X : array of shape (n_samples, n_features)
        The rows that neighbours are among.
    queries : array of shape (m, n_features), or ndarray of int of shape (m,)
        The centres, as rows or as positions in `X`.
    distances, indices : array of shape (m, k)
        The neighbours.

    Yields
    ------
    offsets : array of shape (b, k, n_features)
        In the accumulator's dtype; of length at most 1, up to rounding. Where all distances are 0, of length 0.
    shares : array of shape (b, k)
        Distances over the last one.
    """
    xp = _xp.array_namespace(X)
    dtype = _xp.accumulator_dtype(xp, _xp.device(X))
    m, k = distances.shape
    most = _CACHED_ELEMENTS if _xp.is_numpy(xp) else _ELEMENTS
    size = max(1, most // (int(k) * max(int(k), int(X.shape[1]))))
    for start in range(0, int(m), size):
        stop = min(start + size, int(m))
        yield _patch(xp, X, _rows(xp, X, queries, start, stop), distances[start:stop, :], indices[start:stop, :], dtype)


def _rows(xp: Any, X: Array, queries: Array | np.ndarray, start: int, stop: int) -> Array:
    if queries.ndim == 2:
        return queries[start:stop, :]
    return xp.take(X, _xp.asarray_like(np.asarray(queries[start:stop]), X, dtype=xp.int64), axis=0)


def _patch(xp: Any, X: Array, centers: Array, distances: Array, indices: Array, dtype: Any) -> tuple[Array, Array]:
    b, k = indices.shape
    rows = xp.reshape(xp.take(X, xp.reshape(indices, (-1,)), axis=0), (int(b), int(k), int(X.shape[1])))
    radius = xp.astype(distances[:, -1:], dtype)
    radius = xp.where(radius > 0, radius, xp.ones_like(radius))
    # A difference of float32 rows and float64 centres is taken in float64.
    offsets = rows - xp.expand_dims(xp.astype(centers, dtype), axis=1)
    offsets /= xp.expand_dims(radius, axis=2)
    return offsets, xp.astype(distances, dtype) / radius
