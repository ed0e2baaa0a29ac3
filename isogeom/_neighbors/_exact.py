"""Exact Euclidean neighbours: float32 products find candidates, float64 differences measure them, a bound certifies.

The squared distance expanded as ``|x|^2 + |y|^2 - 2 x.y`` cancels where distances are small beside the norms. It only
picks candidates here, through a lower bound that holds for every rounding error; what is returned is measured by direct
differences in float64, and a row whose candidates are not proven to hold its neighbours is searched again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from isogeom import _kernels, _xp
from isogeom._neighbors._cloud import Cloud, rounding, smallest_normal
from isogeom._neighbors._measure import squared_differences
from isogeom._neighbors._refine import refine
from isogeom._xp import Array, Namespace

# Candidates beyond the neighbours wanted, for the certificate to have room.
MARGIN = 8
# Largest block of products, in elements.
_TILE_ROWS, _TILE_COLUMNS = 1024, 4096


def exact_neighbors(
    cloud: Cloud,
    queries: Array,
    k: int,
    *,
    own: np.ndarray | None = None,
    within: np.ndarray | None = None,
    n_jobs: int | None = None,
) -> tuple[Array, Array]:
    """Return the distances to, and the positions of, the `k` nearest rows of the cloud.

    Parameters
    ----------
    cloud : Cloud
        The rows searched.
    queries : array of shape (m, d)
        Rows to find neighbours of, in the library and on the device of the cloud.
    k : int
        Number of neighbours, at most the number of rows searched, one less if `own` is given.
    own : ndarray of shape (m,), default=None
        Position in the cloud of each query: that row is not its own neighbour.
    within : ndarray of shape (n_searched,), default=None
        Increasing positions of the rows that take part; None for all. Every entry of `own` must be among them.
    n_jobs : int, default=None
        Number of threads for numpy rows; None for one, -1 for all cores. The result does not depend on it.

    Returns
    -------
    distances : array of shape (m, k)
        In the accumulator's dtype, increasing along rows; equal distances in order of position.
    indices : array of shape (m, k)
        int64 positions in the cloud.
    """
    xp = _xp.array_namespace(queries)
    n = int(cloud.rows.shape[0]) if within is None else len(within)
    if _kernels.available("knn_scan", xp, queries.dtype, float(queries.shape[0]) * n * int(queries.shape[1])):
        from isogeom._neighbors._tiles import tiled_neighbors

        found, at, sure = tiled_neighbors(cloud, queries, k, own=own, within=within, n_jobs=n_jobs)
    else:
        found, at, sure = array_neighbors(cloud, queries, k, own=own, within=within)
    return refine(cloud, queries, found, at, np.flatnonzero(~sure), own=own, within=within)


def array_neighbors(
    cloud: Cloud, queries: Array, k: int, *, own: np.ndarray | None, within: np.ndarray | None
) -> tuple[Array, Array, np.ndarray]:
    """Return distances, positions and, on the host, whether they are certified; the code of every library."""
    n = int(cloud.rows.shape[0]) if within is None else len(within)
    c = min(k + MARGIN, n - (own is not None))
    distances, indices, certified = [], [], []
    for rows in blocks(int(queries.shape[0]), _TILE_ROWS):
        block = queries[rows, :]
        skip = None if own is None else own[rows]
        candidates, beyond = _candidates(cloud, block, c, skip, within)
        found, at, sure = measure(cloud, block, candidates, beyond, k)
        distances.append(found)
        indices.append(at)
        certified.append(_xp.to_numpy(sure))
    xp = _xp.array_namespace(queries)
    return xp.concat(distances, axis=0), xp.concat(indices, axis=0), np.concatenate(certified)


def blocks(n: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` that cover `n` rows."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def _candidates(
    cloud: Cloud, block: Array, c: int, own: np.ndarray | None, within: np.ndarray | None
) -> tuple[Array, Array]:
    """Return the `c` rows of smallest lower bound for each query, and the bound that all others reach."""
    xp = _xp.array_namespace(block)
    narrow = xp.float32 if _xp.float32_products_exact(xp) else cloud.shift.dtype
    facts = xp.finfo(narrow)
    share, lost = (
        f(int(block.shape[1]), float(v)) for f, v in ((rounding, facts.eps), (smallest_normal, facts.smallest_normal))
    )
    centred = cloud.centred(block)
    squares = xp.expand_dims(xp.sum(centred * centred, axis=1), axis=1) * (1 - share) - lost
    left = xp.astype(centred, narrow)
    m, n = int(block.shape[0]), int(cloud.rows.shape[0]) if within is None else len(within)
    device = _xp.device(block)
    best = xp.full((m, 0), 0.0, dtype=narrow, device=device)
    at = xp.zeros((m, 0), dtype=xp.int64, device=device)
    for columns in blocks(n, _TILE_COLUMNS):
        places = xp.arange(columns.start, columns.stop, dtype=xp.int64, device=device)
        if within is not None:
            places = _xp.asarray_like(within[columns], block, dtype=xp.int64)
        other = cloud.centred(cloud.rows[columns, :] if within is None else xp.take(cloud.rows, places, axis=0))
        norms = xp.expand_dims(xp.sum(other * other, axis=1), axis=0) * (1 - share)
        products = xp.matmul(left, xp.matrix_transpose(xp.astype(other, narrow)))
        bounds = xp.astype(squares + norms, narrow) - 2 * products
        if own is not None:
            mine = xp.expand_dims(_xp.asarray_like(own, block, dtype=xp.int64), axis=1)
            bounds = xp.where(mine == xp.expand_dims(places, axis=0), xp.full_like(bounds, xp.inf), bounds)
        value, where = smallest(xp, bounds, min(c, columns.stop - columns.start))
        best = xp.concat((best, value), axis=1)
        at = xp.concat((at, xp.reshape(xp.take(places, xp.reshape(where, (-1,)), axis=0), where.shape)), axis=1)
        if best.shape[1] > c:
            best, where = smallest(xp, best, c)
            at = xp.take_along_axis(at, where, axis=1)
    beyond = xp.max(best, axis=1) if c < n - (own is not None) else xp.full((m,), xp.inf, dtype=narrow, device=device)
    return at, xp.astype(beyond, cloud.shift.dtype)


def smallest(xp: Namespace, values: Array, k: int) -> tuple[Array, Array]:
    """Return the `k` smallest entries of every row, in any order, and their columns."""
    if k == values.shape[1]:
        columns = xp.broadcast_to(xp.arange(k, dtype=xp.int64, device=_xp.device(values)), values.shape)
        return values, columns
    if _xp.is_numpy(xp):
        columns = np.argpartition(values, k - 1, axis=1)[:, :k]
    elif _xp.is_torch(xp):
        return tuple(xp.topk(values, k, dim=1, largest=False, sorted=False))
    else:
        columns = xp.argsort(values, axis=1)[:, :k]
    return xp.take_along_axis(values, columns, axis=1), columns


def measure(cloud: Cloud, block: Array, candidates: Array, beyond: Array, k: int) -> tuple[Array, Array, Array]:
    """Measure candidates in full precision.

    Returns
    -------
    distances, indices : array of shape (m, k)
        The nearest of the candidates.
    certified : array of shape (m,)
        Whether every row outside of the candidates is farther.
    """
    xp = _xp.array_namespace(block)
    candidates = xp.sort(candidates, axis=1)
    squares = squared_differences(cloud, block, candidates)
    # Candidates are in order of position, so a stable sort settles ties by it.
    order = xp.argsort(squares, axis=1, stable=True)[:, :k]
    squares, indices = xp.take_along_axis(squares, order, axis=1), xp.take_along_axis(candidates, order, axis=1)
    # Measured squares have rounding errors too: a row outside must be farther by more than that.
    slack = 1 + 2 * rounding(int(block.shape[1]), float(xp.finfo(squares.dtype).eps))
    return xp.sqrt(squares) / cloud.scale, indices, squares[:, -1] * slack < beyond
