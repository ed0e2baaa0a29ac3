"""Second search of the rows whose neighbours are not certain: every row that may be as near is measured."""

from __future__ import annotations

import numpy as np

from isogeom import _xp
from isogeom._neighbors._cloud import Cloud, rounding, smallest_normal
from isogeom._neighbors._measure import squared_differences, squared_pairs
from isogeom._xp import Array

_ROWS, _COLUMNS = 512, 4096


def refine(
    cloud: Cloud,
    queries: Array,
    distances: Array,
    indices: Array,
    doubtful: np.ndarray,
    *,
    own: np.ndarray | None,
    within: np.ndarray | None,
) -> tuple[Array, Array]:
    """Search the doubtful rows again.

    The k-th distance found before is an upper bound of the true one, so the neighbours are among the rows whose lower
    bound, now from products in float64, is at most that; all of these are measured by direct differences. Ties (rows
    of zeros and ones) and far-apart clusters end here.
    """
    if not doubtful.size:
        return distances, indices
    xp, k = _xp.array_namespace(queries), int(distances.shape[1])
    parts = []
    for start in range(0, len(doubtful), _ROWS):
        chosen = doubtful[start : start + _ROWS]
        places = _xp.asarray_like(chosen, queries, dtype=xp.int64)
        block, known = xp.take(queries, places, axis=0), xp.take(indices, places, axis=0)
        limit = _xp.to_numpy(xp.max(squared_differences(cloud, block, known), axis=1))
        parts.append(_below(cloud, block, k, limit, own=None if own is None else own[chosen], within=within))
    squares, found = (np.concatenate(arrays) for arrays in zip(*parts))
    # Rows are put back by a permutation: the standard has no assignment at a list of rows.
    rest = np.setdiff1d(np.arange(int(queries.shape[0])), doubtful)
    back = _xp.asarray_like(np.argsort(np.concatenate((rest, doubtful))), queries, dtype=xp.int64)
    sure = _xp.asarray_like(rest, queries, dtype=xp.int64)

    def merged(old: Array, new: np.ndarray) -> Array:
        fresh = _xp.asarray_like(new, queries, dtype=old.dtype)
        return xp.take(xp.concat((xp.take(old, sure, axis=0), fresh), axis=0), back, axis=0)

    return merged(distances, np.sqrt(squares) / cloud.scale), merged(indices, found)


def _below(
    cloud: Cloud, block: Array, k: int, limit: np.ndarray, *, own: np.ndarray | None, within: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the `k` smallest squared distances of each query, at most `limit`, and their positions; on the host."""
    xp = _xp.array_namespace(block)
    facts = xp.finfo(cloud.shift.dtype)
    d = int(block.shape[1])
    share, lost = rounding(d, float(facts.eps)), smallest_normal(d, float(facts.smallest_normal))
    # What was measured has rounding errors as well.
    slack = 1 + 4 * share
    left = cloud.centred(block)
    norms = xp.expand_dims(xp.sum(left * left, axis=1), axis=1) * (1 - share) - lost
    n, m = int(cloud.rows.shape[0]) if within is None else len(within), int(block.shape[0])
    best = np.full((m, k), np.inf, dtype=limit.dtype)
    at = np.full((m, k), -1, dtype=np.int64)
    for start in range(0, n, _COLUMNS):
        stop = min(start + _COLUMNS, n)
        places = np.arange(start, stop) if within is None else within[start:stop]
        on_device = _xp.asarray_like(places, block, dtype=xp.int64)
        other = cloud.centred(cloud.rows[start:stop, :] if within is None else xp.take(cloud.rows, on_device, axis=0))
        bounds = norms + xp.expand_dims(xp.sum(other * other, axis=1), axis=0) * (1 - share)
        bounds = bounds - 2 * xp.matmul(left, xp.matrix_transpose(other))
        top = _xp.asarray_like(np.minimum(limit, best[:, -1]) * slack, block, dtype=cloud.shift.dtype)
        keep = bounds <= xp.expand_dims(top, axis=1)
        if own is not None:
            mine = xp.expand_dims(_xp.asarray_like(own, block, dtype=xp.int64), axis=1)
            keep = keep & (mine != xp.expand_dims(on_device, axis=0))
        rows, columns = xp.nonzero(keep)
        if rows.shape[0]:
            columns = xp.take(on_device, columns, axis=0)
            squares = _xp.to_numpy(squared_pairs(cloud, block, rows, columns))
            best, at = merge_pairs(best, at, _xp.to_numpy(rows), squares, _xp.to_numpy(columns))
    return best, at


def merge_pairs(
    best: np.ndarray, at: np.ndarray, rows: np.ndarray, values: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Merge pairs into the sorted lists of the smallest values of each row; equal values in order of column."""
    m, k = best.shape
    use = values <= best[rows, -1]
    rows, values, columns = rows[use], values[use], columns[use]
    all_rows = np.concatenate((np.repeat(np.arange(m), k), rows))
    values, columns = np.concatenate((best.ravel(), values)), np.concatenate((at.ravel(), columns))
    order = np.lexsort((columns, values, all_rows))
    counts = np.bincount(all_rows, minlength=m)
    first = np.concatenate(([0], np.cumsum(counts)[:-1]))
    chosen = order[first[:, np.newaxis] + np.arange(k)]
    return values[chosen], columns[chosen]
