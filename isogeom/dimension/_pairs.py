"""All pairs of rows within a distance, found tile by tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._neighbors._cloud import Cloud, rounding, smallest_normal
from isogeom._neighbors._measure import squared_pairs
from isogeom._neighbors._rows import rows_at
from isogeom._xp import Array

# Side of a block of rows that is prepared at a time, and of the products that are made of it at a time on numpy.
_BLOCK, _CACHED = 2048, (256, 512)
# Prepared rows are kept from block to block up to this many bytes.
_KEPT_BYTES = 48 * 2**20
# Tiles of other metrics.
_TILE_ROWS, _TILE_COLUMNS = 512, 2048
# Share of the squared norms below which a squared distance by products has lost too many digits.
_DOUBTFUL = 1e-5


@dataclass(frozen=True)
class Pairs:
    """Distances of pairs of rows, each pair once or in both directions.

    Attributes
    ----------
    centers, others : ndarray of shape (n_pairs,)
        Positions among the centres, and among the rows.
    distances : ndarray of shape (n_pairs,)
        float64, in the unit of the rows.
    """

    centers: np.ndarray
    others: np.ndarray
    distances: np.ndarray


def pairs_within(
    X: Array, radius: float, *, centers: np.ndarray | None = None, metric: str = "euclidean"
) -> Iterator[Pairs]:
    """Yield the pairs of rows at a distance of at most `radius`, tile by tile.

    Parameters
    ----------
    X : array of shape (n, d)
        Rows.
    radius : float
        Largest distance.
    centers : ndarray of shape (m,), default=None
        Rows whose pairs are wanted; every pair of a centre is then given in its direction. None for all pairs, once.
    metric : str
        'euclidean', or for numpy rows a metric of scikit-learn.

    Yields
    ------
    Pairs
        On the host. Squared distances expanded into products only exclude pairs; what is returned was measured by
        differences in float64.
    """
    finder = _by_products if metric == "euclidean" else _by_metric
    for part in finder(X, radius, centers, metric):
        if len(part.centers):
            yield part


def collected(parts: Iterator[Pairs], most: int) -> Pairs | None:
    """Join the parts, or return None as soon as there are more than `most` pairs."""
    kept, total = [], 0
    for part in parts:
        total += len(part.centers)
        if total > most:
            return None
        kept.append(part)
    if not kept:
        none = np.zeros(0, dtype=np.int64)
        return Pairs(none, none, np.zeros(0))
    return Pairs(*(np.concatenate(columns) for columns in zip(*((p.centers, p.others, p.distances) for p in kept))))


class PairSums:
    """What the slopes of the correlation sum and their errors need of the pairs: sums by row, added part by part.

    Parameters
    ----------
    radii : ndarray of shape (n_radii,)
        Increasing.
    m : int
        Number of centres.
    once : bool
        Whether pairs are given once: both ends are then centres.
    """

    def __init__(self, radii: np.ndarray, m: int, once: bool) -> None:
        self.radii, self.m, self.once = radii, m, once
        # shells[:, b]: pairs of each row beyond radius b - 1 and below radius b.
        self.shells = np.zeros((m, len(radii)), dtype=np.int64)
        self.logs = np.zeros(m)
        self.squared_logs = 0.0

    def add(self, pairs: Pairs, *, positive: bool) -> None:
        """Add pairs; `positive` leaves out those at distance 0, which have no logarithm."""
        used = pairs.distances < self.radii[-1]
        if positive:
            used &= pairs.distances > 0
        ends = [pairs.centers[used]] + ([pairs.others[used]] if self.once else [])
        distances = pairs.distances[used]
        shell = np.searchsorted(self.radii, distances, side="right")
        width = len(self.radii)
        for rows in ends:
            self.shells += np.bincount(rows * width + shell, minlength=self.m * width).reshape(self.m, width)
        if positive:
            logs = np.log(self.radii[-1]) - np.log(distances)
            for rows in ends:
                self.logs += np.bincount(rows, logs, minlength=self.m)
            self.squared_logs += float(logs @ logs)

    @property
    def below(self) -> np.ndarray:
        """Return the number of pairs below each radius."""
        return np.cumsum(self.shells.sum(axis=0)) / (2 if self.once else 1)


def _by_products(X: Array, radius: float, centers: np.ndarray | None, metric: str) -> Iterator[Pairs]:  # noqa: ARG001
    cloud = Cloud.of(X)
    limit = (radius * cloud.scale) ** 2 * (1 + 1e-6)
    n = int(X.shape[0])
    m = n if centers is None else len(centers)
    prepared = _Blocks(cloud)
    for start in range(0, m, _BLOCK):
        stop = min(start + _BLOCK, m)
        mine = np.arange(start, stop) if centers is None else centers[start:stop]
        left, left_half = prepared.block(start) if centers is None else prepared.rows(rows_at(X, mine))
        left_half = left_half - limit / 2
        for begin in range(0 if centers is not None else start, n, _BLOCK):
            right, right_half = prepared.block(begin)
            # Of a block with itself only the pairs above the diagonal are wanted.
            twice = centers is None and begin == start
            rows, columns = _near(left, left_half, right, right_half, twice)
            columns += begin
            wanted = columns > rows + start if centers is None else columns != mine[rows]
            rows, columns = rows[wanted], columns[wanted]
            distances = _differences(cloud, mine[rows], columns)
            kept = distances <= radius
            yield Pairs(rows[kept] + start, columns[kept], distances[kept])


class _Blocks:
    """Rows as factors of products, block by block, and half of a lower bound of their squared norms."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        n, d = cloud.rows.shape
        # Few rows are prepared once, many for every block that they meet.
        self._kept: dict[int, tuple[Array, Array]] | None = {} if 4 * n * d <= _KEPT_BYTES else None

    def block(self, start: int) -> tuple[Array, Array]:
        """Return the rows from this position on."""
        if self._kept is not None and start in self._kept:
            return self._kept[start]
        stop = min(start + _BLOCK, int(self._cloud.rows.shape[0]))
        found = self.rows(self._cloud.rows[start:stop, :])
        if self._kept is not None:
            self._kept[start] = found
        return found

    def rows(self, rows: Array) -> tuple[Array, Array]:
        """Return these rows."""
        xp = _xp.array_namespace(rows)
        narrow = xp.float32 if _xp.float32_products_exact(xp) else self._cloud.shift.dtype
        facts, d = xp.finfo(narrow), int(rows.shape[1])
        centred = self._cloud.centred(rows)
        squares = xp.sum(centred * centred, axis=1) * (1 - rounding(d, float(facts.eps)))
        lost = smallest_normal(d, float(facts.smallest_normal))
        return xp.astype(centred, narrow), (squares - lost) / 2


def _near(left: Array, left_half: Array, right: Array, right_half: Array, twice: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of the pairs that may be near: ``x.y >= (|x|^2 - limit) / 2 + |y|^2 / 2``.

    `twice` tells that both blocks are the same: parts of them that lie below the diagonal are left out.
    """
    xp = _xp.array_namespace(left)
    # Products of this size stay in the cache of one core; other libraries prefer few calls.
    height, width = _CACHED if _xp.is_numpy(xp) else (_BLOCK, _BLOCK)
    m, n = int(left.shape[0]), int(right.shape[0])
    left_half, right_half = xp.astype(left_half, left.dtype), xp.astype(right_half, left.dtype)
    found = []
    for start in range(0, m, height):
        part = slice(start, min(start + height, m))
        rows, half = left[part, :], xp.expand_dims(left_half[part], axis=1)
        for begin in range(start // width * width if twice else 0, n, width):
            part = slice(begin, min(begin + width, n))
            products = xp.matmul(rows, xp.matrix_transpose(right[part, :])) - right_half[part]
            places = _xp.to_numpy(xp.nonzero(xp.reshape(products >= half, (-1,)))[0])
            found.append((places // (part.stop - begin) + start, places % (part.stop - begin) + begin))
    return np.concatenate([r for r, _ in found]), np.concatenate([c for _, c in found])


def _differences(cloud: Cloud, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the distances of pairs of rows by direct differences."""
    rows = cloud.rows
    xp = _xp.array_namespace(rows)
    places = (_xp.asarray_like(positions, rows, dtype=xp.int64) for positions in (first, second))
    return np.sqrt(_xp.to_numpy(squared_pairs(cloud, rows, *places)).astype(np.float64)) / cloud.scale


def _by_metric(X: Array, radius: float, centers: np.ndarray | None, metric: str) -> Iterator[Pairs]:
    from sklearn.metrics import pairwise_distances

    n = X.shape[0]
    m = n if centers is None else len(centers)
    for start in range(0, m, _TILE_ROWS):
        stop = min(start + _TILE_ROWS, m)
        mine = np.arange(start, stop) if centers is None else centers[start:stop]
        for begin in range(0 if centers is not None else start, n, _TILE_COLUMNS):
            end = min(begin + _TILE_COLUMNS, n)
            # Some metrics would be computed in float32.
            near, far = (rows.astype(np.float64) for rows in (X[mine], X[begin:end]))
            tile = pairwise_distances(near, far, metric=metric)
            rows, columns = np.nonzero(tile <= radius)
            distances = tile[rows, columns]
            columns = columns + begin
            wanted = columns > rows + start if centers is None else columns != mine[rows]
            yield Pairs(rows[wanted] + start, columns[wanted], distances[wanted])


def table_pairs(table: NeighborTable, radius: float) -> Pairs:
    """Return the pairs within a radius from a table of distances alone, in the direction of its rows.

    Raises
    ------
    ValueError
        If a row may have more neighbours within the radius than the table lists.
    """
    distances = _xp.to_numpy(table.distances).astype(np.float64)
    if table.n_neighbors < table.n_reference - 1 and bool((distances[:, -1] <= radius).any()):
        short = int((distances[:, -1] <= radius).sum())
        raise ValueError(
            f"{short} row(s) have all their {table.n_neighbors} neighbours within the radius {radius:.6g}, so there "
            "may be more that the table does not list: pass more neighbours, rows, or all distances."
        )
    rows, columns = np.nonzero(distances <= radius)
    return Pairs(rows, _xp.to_numpy(table.indices)[rows, columns], distances[rows, columns])


def distance_matrix(X: Array, metric: str) -> np.ndarray:
    """Return all distances between a few rows, on the host, in float64 and in units of the largest.

    Squared distances that the expansion into products would round are measured by differences.
    """
    if metric != "euclidean":
        from sklearn.metrics import pairwise_distances

        D = np.asarray(pairwise_distances(X, metric=metric), dtype=np.float64)
    else:
        xp = _xp.array_namespace(X)
        cloud = Cloud.of(X)
        rows = cloud.centred(X)
        norms = xp.sum(rows * rows, axis=1)
        sums = xp.expand_dims(norms, axis=1) + xp.expand_dims(norms, axis=0)
        squares = sums - 2 * xp.matmul(rows, xp.matrix_transpose(rows))
        doubtful = _xp.to_numpy(squares <= _DOUBTFUL * sums)
        D = np.sqrt(np.maximum(_xp.to_numpy(squares), 0.0))
        first, second = np.nonzero(np.triu(doubtful, 1))
        D[first, second] = D[second, first] = _differences(cloud, first, second) * cloud.scale
        D = np.maximum(D, D.T)
    np.fill_diagonal(D, 0.0)
    largest = float(D.max())
    return D / largest if largest > 0 else D


def dense_distances(table: NeighborTable) -> np.ndarray:
    """Return the matrix of distances among the rows of a table that lists all of them, in units of the largest.

    Raises
    ------
    ValueError
        If rows or neighbours are missing.
    """
    n = table.n_reference
    if table.n_queries != n or table.n_neighbors != n - 1:
        raise ValueError(
            f"The distances between all {n} rows are needed, but the table lists {table.n_neighbors} neighbours of "
            f"{table.n_queries} rows: pass rows, or a full matrix of distances."
        )
    position = table.positions()
    D = np.zeros((n, n))
    np.put_along_axis(
        D, position[_xp.to_numpy(table.indices)], _xp.to_numpy(table.distances).astype(np.float64), axis=1
    )
    largest = float(D.max())
    return D / largest if largest > 0 else D
