"""Squared distances by direct differences, in the accumulator's dtype."""

from __future__ import annotations

import numpy as np

from isogeom import _kernels, _xp
from isogeom._neighbors._cloud import DIFFERENCES, Cloud
from isogeom._xp import Array


def squared_differences(cloud: Cloud, block: Array, candidates: Array) -> Array:
    """Return the squared distances, times the squared scale, of each query to its candidates.

    Parameters
    ----------
    cloud : Cloud
    block : array of shape (m, d)
        Queries.
    candidates : array of shape (m, c)
        Positions in the cloud.
    """
    xp = _xp.array_namespace(block)
    m, c = candidates.shape
    rows = xp.broadcast_to(
        xp.expand_dims(xp.arange(m, dtype=xp.int64, device=_xp.device(block)), axis=1), candidates.shape
    )
    return xp.reshape(squared_pairs(cloud, block, xp.reshape(rows, (-1,)), xp.reshape(candidates, (-1,))), (m, c))


def squared_pairs(cloud: Cloud, block: Array, rows: Array, columns: Array) -> Array:
    """Return the squared distances, times the squared scale, of pairs of a query and a row of the cloud."""
    xp = _xp.array_namespace(block)
    # Whether to compile depends on the cloud, not on the pairs at hand: one search measures in one way.
    kernel = _kernels.available("pair_squares", xp, block.dtype, float(cloud.rows.shape[0]) ** 2 * block.shape[1])
    if kernel is not None:
        out = np.empty(len(rows))
        kernel(cloud.rows, block, np.ascontiguousarray(rows), np.ascontiguousarray(columns), cloud.scale, out)
        return out
    size = max(1, DIFFERENCES // int(block.shape[1]))
    parts = []
    for start in range(0, int(rows.shape[0]), size):
        stop = min(start + size, int(rows.shape[0]))
        differences = cloud.wide(xp.take(cloud.rows, columns[start:stop], axis=0))
        differences = differences - cloud.wide(xp.take(block, rows[start:stop], axis=0))
        parts.append(xp.sum(differences * differences, axis=1))
    if not parts:
        return xp.zeros((0,), dtype=cloud.shift.dtype, device=_xp.device(block))
    return xp.concat(parts, axis=0)
