"""Local dimensions of estimators whose value at one row has no mean: log ratios pooled over a neighbourhood."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._xp import Array
from isogeom.dimension._base import DimensionEstimator


class PooledEstimator(DimensionEstimator):
    """Base of estimators that keep one log ratio per reference row, and pool them."""

    def _keep(self, logs: Array, used: np.ndarray, table: NeighborTable) -> dict[str, Any]:
        """Return the private attributes that `transform` needs: the log ratio of every row, NaN where it has none."""
        values = np.full(table.n_samples, np.nan)
        values[table.queries[used]] = _xp.to_numpy(logs)
        return {"_log_ratios": _xp.asarray_like(values, logs, dtype=logs.dtype)}

    def _pool(self) -> np.ndarray | None:
        # Rows without a log ratio (duplicates, rows that are no anchors, ties) cannot contribute.
        known = np.flatnonzero(np.isfinite(_xp.to_numpy(self._log_ratios)))
        return None if len(known) == self.table_.n_samples else known

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:  # noqa: ARG002
        xp = _xp.array_namespace(indices)
        logs = xp.reshape(xp.take(self._log_ratios, xp.reshape(indices, (-1,)), axis=0), indices.shape)
        return self._pooled(logs)

    @abstractmethod
    def _pooled(self, logs: Array) -> Array:
        """Return one dimension per row of log ratios, (m, k) to (m,); NaN marks ratios that are missing."""


def count_and_sum(logs: Array) -> tuple[Array, Array]:
    """Return how many log ratios each row has, and their sum."""
    xp = _xp.array_namespace(logs)
    known = xp.isfinite(logs)
    filled = xp.where(known, logs, xp.zeros_like(logs))
    return xp.sum(xp.astype(known, logs.dtype), axis=1), xp.sum(filled, axis=1)
