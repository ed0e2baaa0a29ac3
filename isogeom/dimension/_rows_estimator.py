"""Base of estimators that are global by nature: no search in `fit`, and local dimensions from patches of rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._neighbors._cloud import Cloud
from isogeom._neighbors._duplicates import first_occurrences
from isogeom._neighbors._rows import distinct_rows
from isogeom._validation import check_choice
from isogeom._xp import Array
from isogeom.dimension._base import DimensionEstimator

# Entries of the patches that are gathered at a time.
_PATCH_ENTRIES = 2**21


class RowsEstimator(DimensionEstimator):
    """Base of estimators whose `fit` needs rows and no neighbours.

    A subclass defines `_estimate`, and `_patch_values`, its formula on many small clouds at once.
    """

    _needs_rows = True

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_choice(self.duplicates, "duplicates", ("drop", "raise", "keep"))
        if self.metric == "precomputed":
            raise ValueError(
                f"metric='precomputed': {type(self).__name__} needs rows, distances alone do not give them."
            )

    def _n_needed(self) -> int:
        return 0

    def _read(self, X: Any) -> NeighborTable:
        if isinstance(X, NeighborTable):
            return super()._read(X)
        return unsearched(self._check_X(X, reset=True, min_samples=3), self.duplicates, self.metric)

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:  # noqa: ARG002
        parts = [self._patch_values(patch) for patch in centred_patches(self.table_.X, indices)]
        return _xp.array_namespace(indices).concat(parts, axis=0)

    @abstractmethod
    def _patch_values(self, patch: Array) -> Array:
        """Return the dimension of every patch, (b, k, d) to (b,), NaN where it has none; patches are centred."""


def unsearched(X: Array, duplicates: str, metric: str) -> NeighborTable:
    """Return the table of rows whose neighbours were not searched: it has no columns."""
    kept, n_duplicates = distinct_rows(X, duplicates)
    n = int(X.shape[0])
    queries = np.arange(n) if kept is None else kept
    xp, device = _xp.array_namespace(X), _xp.device(X)
    shape = (len(queries), 0)
    return NeighborTable(
        distances=xp.zeros(shape, dtype=_xp.accumulator_dtype(xp, device), device=device),
        indices=xp.zeros(shape, dtype=xp.int64, device=device),
        queries=queries,
        n_samples=n,
        n_reference=len(queries),
        n_duplicates=n_duplicates,
        metric=metric,
        dtype=str(X.dtype).rpartition(".")[2],
        X=X,
    )


def beside(values: np.ndarray, table: NeighborTable) -> Array:
    """Move a fitted attribute from the host to the library and device of the table."""
    xp = _xp.array_namespace(table.distances)
    dtype = xp.int64 if values.dtype.kind == "i" else table.distances.dtype
    return _xp.asarray_like(values, table.distances, dtype=dtype)


def reference_positions(table: NeighborTable) -> np.ndarray:
    """Return the positions of the rows that can be neighbours: all, or the distinct ones if duplicates were dropped.

    Anchors are rows like any other here.
    """
    if table.n_reference == table.n_samples:
        return np.arange(table.n_samples)
    return table.queries if table.n_queries == table.n_reference else first_occurrences(table.X)


def used_rows(table: NeighborTable) -> Array:
    """Return the rows that take part: all, or the distinct ones if duplicates were dropped."""
    if table.n_reference == table.n_samples:
        return table.X
    xp = _xp.array_namespace(table.X)
    return xp.take(table.X, _xp.asarray_like(reference_positions(table), table.X, dtype=xp.int64), axis=0)


def centred_patches(X: Array, indices: Array) -> Iterator[Array]:
    """Yield the rows at `indices`, (m, k) to blocks (b, k, d): in the accumulator's dtype, centred, largest value 1."""
    xp = _xp.array_namespace(X)
    cloud = Cloud.of(X)
    m, k = indices.shape
    d = int(X.shape[1])
    size = max(1, _PATCH_ENTRIES // (k * d))
    for start in range(0, m, size):
        chosen = indices[start : min(start + size, m), :]
        rows = xp.reshape(cloud.wide(xp.take(X, xp.reshape(chosen, (-1,)), axis=0)), (*chosen.shape, d))
        rows = rows - rows[:, :1, :]
        rows = rows - xp.mean(rows, axis=1, keepdims=True)
        largest = xp.max(xp.abs(rows), axis=(1, 2), keepdims=True)
        yield rows / xp.where(largest > 0, largest, xp.ones_like(largest))


def patch_gram(patch: Array) -> Array:
    """Return the (b, k, k) products of the rows of every patch."""
    xp = _xp.array_namespace(patch)
    return xp.matmul(patch, xp.matrix_transpose(patch))
