"""Search of numpy rows by compiled loops: tiles of float32 products, each pair of rows once, in bounded memory.

Candidates are those of `_exact.py`: the same lower bound, the same measuring, the same certificate. What differs is
speed: a pair of rows is multiplied once and offered to both, and blocks of products above all limits are skipped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from joblib import effective_n_jobs
from threadpoolctl import threadpool_limits

from isogeom._kernels._scan import knn_finish, knn_scan
from isogeom._neighbors._cloud import Cloud, rounding, smallest_normal
from isogeom._neighbors._exact import MARGIN, blocks, measure

# Side of a tile, less for long rows: two tiles of rows and one of products are held per thread.
_SIDE, _TILE_ENTRIES = 1024, 2**22
# Centred rows are kept from tile to tile up to this many bytes; beyond, they are centred for each tile.
_KEPT_BYTES = 48 * 2**20
# From this many neighbours on, the buffers lie in the memory of the result, twice as wide as it.
_IN_PLACE = 2 * MARGIN


class Coordinates:
    """Rows as float32 factors of products, tile by tile, and the squared norms of the lower bound.

    Parameters
    ----------
    cloud : Cloud
        Gives shift and scale.
    rows : ndarray of shape (n, d)
    positions : ndarray of int or None
        Rows that take part; None for all.
    """

    def __init__(self, cloud: Cloud, rows: np.ndarray, positions: np.ndarray | None) -> None:
        self._cloud, self._rows, self._positions = cloud, rows, positions
        self.n = len(rows) if positions is None else len(positions)
        self.width = rows.shape[1]
        # In float32 as exact as by way of float64, if the scale itself has a place there.
        self._direct = rows.dtype == np.float32 and 2.0**-100 < cloud.scale < 2.0**100
        self._kept: np.ndarray | None = None
        self.norms = self._prepare(self.n * self.width * 4 <= _KEPT_BYTES)

    @property
    def side(self) -> int:
        """Rows per tile."""
        return max(128, min(_SIDE, _TILE_ENTRIES // self.width))

    def _prepare(self, keep: bool) -> np.ndarray:
        """Return the norms, and keep the centred rows if they are few."""
        kept = np.empty((self.n, self.width), dtype=np.float32) if keep else None
        squares = np.empty(self.n)
        for part in blocks(self.n, self.side):
            tile = self._centred(part, None if kept is None else kept[part])
            wide = tile.astype(np.float64)
            squares[part] = np.einsum("ij,ij->i", wide, wide)
        self._kept = kept
        facts = np.finfo(np.float32)
        share, lost = rounding(self.width, float(facts.eps)), smallest_normal(self.width, float(facts.smallest_normal))
        return (squares * (1 - share) - lost).astype(np.float32)

    def _centred(self, part: slice, out: np.ndarray | None) -> np.ndarray:
        rows = self._rows[part] if self._positions is None else self._rows[self._positions[part]]
        if out is None:
            out = np.empty(rows.shape, dtype=np.float32)
        if self._direct:
            np.multiply(rows, np.float32(self._cloud.scale), out=out)
            out -= self._cloud.shift.astype(np.float32)
        else:
            out[...] = self._cloud.centred(rows)
        return out

    def tile(self, part: slice) -> np.ndarray:
        """Return centred rows in float32."""
        return self._centred(part, None) if self._kept is None else self._kept[part]


@dataclass
class Buffers:
    """Candidates of every query while tiles come by.

    Attributes
    ----------
    keys, places : ndarray of shape (m, width)
        Lower bounds in float32, and positions among the rows searched in int32.
    counts, limits : ndarray of shape (m,)
        Entries in use, and the bound that the entries left out reach.
    n_candidates : int
        Entries that a full buffer keeps.
    """

    keys: np.ndarray
    places: np.ndarray
    counts: np.ndarray
    limits: np.ndarray

    n_candidates: int

    @classmethod
    def over(cls, distances: np.ndarray, indices: np.ndarray, margin: int) -> Buffers:
        """Make buffers, in the memory of the result where they fit."""
        m, k = distances.shape
        if k >= _IN_PLACE:
            keys, places = distances.view(np.float32), indices.view(np.int32)
        else:
            keys, places = (np.empty((m, 2 * (k + margin)), dtype=dtype) for dtype in (np.float32, np.int32))
        # A buffer without room for more than its candidates would be reduced at every step.
        c = min(k + margin, 3 * keys.shape[1] // 4)
        return cls(keys, places, np.zeros(m, np.int32), np.full(m, np.inf, np.float32), c)


def tiled_neighbors(
    cloud: Cloud,
    queries: np.ndarray,
    k: int,
    *,
    own: np.ndarray | None,
    within: np.ndarray | None,
    n_jobs: int | None,
    bounded: bool = True,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return distances, positions and whether they are certified, as `array_neighbors` does.

    `bounded` allows the search by leading axes where a pilot says that it pays.
    """
    from isogeom._neighbors._bound import BOUND_MARGIN, leading_axes

    n_searched = len(cloud.rows) if within is None else len(within)
    m, n_others = len(queries), n_searched - (own is not None)
    symmetric = own is not None and m == n_searched
    local = np.full(m, -1) if own is None else own if within is None else np.searchsorted(within, own)
    threads = effective_n_jobs(n_jobs)
    short = leading_axes(cloud, queries, k, own=own, within=within, n_jobs=n_jobs) if bounded else None
    references: Any
    if short is None:
        references = Coordinates(cloud, cloud.rows, within)
        mine = references if symmetric else Coordinates(cloud, queries, None)
    else:
        references, mine = short
    distances, indices = np.empty((m, k)), np.empty((m, k), dtype=np.int64)
    buffers = Buffers.over(distances, indices, MARGIN if short is None else BOUND_MARGIN)
    c = min(buffers.n_candidates, n_others)
    sure = np.empty(m, dtype=bool)

    def settle(part: slice) -> None:
        candidates = buffers.places[part, :c].astype(np.int64)
        if within is not None:
            candidates = within[candidates]
        beyond = buffers.limits[part].astype(np.float64) if c < n_others else np.full(part.stop - part.start, np.inf)
        distances[part], indices[part], sure[part] = measure(cloud, queries[part], candidates, beyond, k)

    with threadpool_limits(1) if threads > 1 else nullcontext():
        _scan_all(mine, references, local, symmetric, c, buffers, threads)
        del references, mine
        for_each(settle, blocks(m, 256), threads)
    doubtful = np.flatnonzero(~sure)
    if short is not None and doubtful.size:
        redone = tiled_neighbors(
            cloud,
            queries[doubtful],
            k,
            own=None if own is None else own[doubtful],
            within=within,
            n_jobs=n_jobs,
            bounded=False,
        )
        distances[doubtful], indices[doubtful], sure[doubtful] = redone
    return distances, indices, sure


def _scan_all(
    queries: Any, references: Any, own: np.ndarray, symmetric: bool, c: int, buffers: Buffers, threads: int
) -> None:
    """Offer all pairs to the buffers, then reduce these to `c` candidates."""
    side = references.side
    columns = list(blocks(references.n, side))
    locks = [threading.Lock() for _ in columns]
    # Few queries are shared out among the threads.
    rows = columns if symmetric else list(blocks(queries.n, max(1, min(side, -(-queries.n // threads)))))
    state = (buffers.keys, buffers.places, buffers.counts, buffers.limits)

    def strip(a: int) -> None:
        part = rows[a]
        left, norms = queries.tile(part), queries.norms[part]
        products = np.empty((part.stop - part.start) * side, dtype=np.float32)
        for b in range(a if symmetric else 0, len(columns)):
            other = columns[b]
            shape = (part.stop - part.start, other.stop - other.start)
            tile = products[: shape[0] * shape[1]].reshape(shape)
            np.matmul(left, references.tile(other).T, out=tile)
            both = symmetric and b > a
            # A strip offers to the buffers of other strips too; only pairs of strips in order wait for each other.
            with locks[a] if symmetric else nullcontext(), locks[b] if both else nullcontext():
                knn_scan(tile, part.start, other.start, norms, references.norms[other], own[part], both, c, *state)

    for_each(strip, range(len(rows)), threads)
    for_each(lambda part: knn_finish(c, *(array[part] for array in state)), blocks(queries.n, side), threads)


def for_each(function: Callable[[Any], None], items: Iterable[Any], threads: int) -> None:
    """Call `function` on every item, on that many threads."""
    if threads == 1:
        for item in items:
            function(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(function, items):
            pass
