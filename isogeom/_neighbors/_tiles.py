"""Search of numpy rows by compiled loops: tiles of float32 products, each pair of rows once, in bounded memory.

Candidates are found by the lower bound of `_exact.py`, measured and certified as there. What differs is speed: a pair
of rows is multiplied once and offered to both; the first tile of every row holds a sample of all rows, whose products
give a limit that few others are below; and blocks of products above all limits are skipped.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from joblib import effective_n_jobs
from threadpoolctl import threadpool_limits

from isogeom._kernels._scan import knn_settle
from isogeom._neighbors._cloud import Cloud, rounding, smallest_normal
from isogeom._neighbors._exact import MARGIN, blocks
from isogeom._neighbors._pairs import Buffers, Pairs, Plan, for_each, strip_side

# Centred rows are kept from tile to tile up to this many bytes; beyond, they are centred for each tile.
_KEPT_BYTES = 60 * 2**20
# Queries measured together, and the most pairs that they and their neighbours may be.
_SETTLED, _SETTLED_PAIRS = 512, 2**17
# Largest buffers, in bytes. Queries that need more are searched for in parts, each pair of rows twice.
_LARGEST_BUFFERS = 64 * 2**20
# Entries of the wide buffers of doubtful rows, and the fewest for a row.
_WIDE_ENTRIES, _LEAST_WIDE = 2**18, 256


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

    def _prepare(self, keep: bool) -> np.ndarray:
        """Return the norms, and keep the centred rows if they are few."""
        kept = np.empty((self.n, self.width), dtype=np.float32) if keep else None
        squares = np.empty(self.n)
        for part in blocks(self.n, strip_side(self.width)):
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


def tiled_neighbors(
    cloud: Cloud,
    queries: np.ndarray,
    k: int,
    *,
    own: np.ndarray | None,
    within: np.ndarray | None,
    n_jobs: int | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return distances, positions and whether they are certified, as `array_neighbors` does."""
    m = len(queries)
    n_parts = -(-Buffers.n_bytes(m, k, MARGIN) // _LARGEST_BUFFERS)
    if n_parts > 1:
        whole = np.empty((m, k)), np.empty((m, k), dtype=np.int64), np.empty(m, dtype=bool)
        for part in blocks(m, -(-m // n_parts)):
            mine = None if own is None else own[part]
            found = tiled_neighbors(cloud, queries[part], k, own=mine, within=within, n_jobs=n_jobs)
            for all_rows, rows in zip(whole, found):
                all_rows[part] = rows
        return whole
    search = _Search(cloud, k, within, own is not None, effective_n_jobs(n_jobs))
    distances, indices, sure, bounded = search.nearest(queries, own, bounded=True)
    # Rows whose bounds say too little, or whose limit left too few candidates.
    again = np.flatnonzero(~sure if bounded else np.isinf(distances[:, -1]))
    for sampled in (True, False) if bounded else (False,):
        if again.size:
            mine = None if own is None else own[again]
            distances[again], indices[again], sure[again], _ = search.nearest(queries[again], mine, sampled=sampled)
            again = again[np.isinf(distances[again, -1])]
    # Rows among many that products cannot tell apart: all of these become candidates, if they are not too many.
    doubtful = np.flatnonzero(~sure)
    if doubtful.size and search.has_room(doubtful.size):
        mine = None if own is None else own[doubtful]
        wide = search.nearest(queries[doubtful], mine, reached=distances[doubtful, -1])
        distances[doubtful], indices[doubtful], sure[doubtful] = wide[:3]
    return distances, indices, sure


class _Search:
    """Searches for `k` neighbours among the same rows."""

    def __init__(self, cloud: Cloud, k: int, within: np.ndarray | None, omits_own: bool, threads: int) -> None:
        self.cloud, self.k, self.within, self.threads = cloud, k, within, threads
        self.n = len(cloud.rows) if within is None else len(within)
        self.n_others = self.n - omits_own
        self._full: tuple[Plan, Coordinates] | None = None

    def nearest(
        self,
        queries: np.ndarray,
        own: np.ndarray | None,
        *,
        bounded: bool = False,
        sampled: bool = True,
        reached: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
        """Return distances, positions, whether they are certified, and whether leading axes were used.

        `bounded` allows these where a pilot says that it pays, `sampled` limits from a sample of rows. A query that has
        too few candidates because of a limit has infinite distances. With `reached`, distances that the neighbours are
        known not to exceed, all rows whose bound is below are candidates, as far as there is room.
        """
        from isogeom._neighbors._bound import BOUND_MARGIN, leading_axes

        def kth_distances(places: np.ndarray) -> np.ndarray:
            return self.nearest(queries[places], None if own is None else own[places])[0][:, -1]

        short = None
        if bounded:
            short = leading_axes(self.cloud, queries, self.k, own=own, within=self.within, kth_distances=kth_distances)
        m, symmetric = len(queries), own is not None and len(own) == self.n
        distances, indices, sure = np.empty((m, self.k)), np.empty((m, self.k), dtype=np.int64), np.empty(m, dtype=bool)
        wide = short is not None and Buffers.n_bytes(m, self.k, BOUND_MARGIN) <= _LARGEST_BUFFERS // 2
        buffers = Buffers.over(distances, indices, BOUND_MARGIN if wide else MARGIN)
        if reached is not None:
            buffers = self._wide_buffers(reached)
        c = min(buffers.n_candidates, self.n_others)
        references: Any
        if short is None:
            plan, references = self._full_rows(c, sampled)
            plan = plan if reached is None else replace(plan, rank=0)
            mine = references if symmetric else Coordinates(self.cloud, queries, None)
        else:
            self._full = None
            plan = Plan.of(self.n, strip_side(short[0].width), self.k, c, sampled)
            references = short[0].ordered(plan.order)
            mine = references if symmetric else short[1]
        order = plan.order if symmetric else np.arange(m)
        places = np.full(m, -1) if own is None else own if self.within is None else np.searchsorted(self.within, own)
        with threadpool_limits(1) if self.threads > 1 else nullcontext():
            Pairs(mine, references, order, places[order], plan, symmetric, buffers, c).offer(self.threads)
            self._settle(queries, buffers, distances, indices, sure)
        return distances, indices, sure, short is not None

    def _full_rows(self, c: int, sampled: bool) -> tuple[Plan, Coordinates]:
        """Return the plan of a search by full rows, and these; those of the pilot serve the search after it."""
        plan = Plan.of(self.n, strip_side(self.cloud.rows.shape[1]), self.k, c, sampled)
        if self._full is None or not np.array_equal(self._full[0].order, plan.order):
            order = plan.order if self.within is None else self.within[plan.order]
            self._full = plan, Coordinates(self.cloud, self.cloud.rows, order)
        return plan, self._full[1]

    def has_room(self, m: int) -> bool:
        """Tell whether buffers of `m` rows can be so wide that a second search is worth it."""
        return m * max(4 * self.k, _LEAST_WIDE) <= _WIDE_ENTRIES

    def _wide_buffers(self, reached: np.ndarray) -> Buffers:
        m, slack = len(reached), 1 + 1e-6
        width = min(self.n_others + 1, _WIDE_ENTRIES // m)
        keys, places = (np.empty((m, width), dtype=dtype) for dtype in (np.float32, np.int32))
        # Rounded up, and beyond what is measured again by more than its rounding errors: what is left out is farther.
        limits = np.nextafter(((reached * self.cloud.scale) ** 2 * slack).astype(np.float32), np.float32(np.inf))
        return Buffers(keys, places, np.zeros(m, np.int32), limits, max(self.k, 3 * width // 4))

    def _settle(
        self, queries: np.ndarray, buffers: Buffers, distances: np.ndarray, indices: np.ndarray, sure: np.ndarray
    ) -> None:
        cloud, within = self.cloud, np.zeros(0, dtype=np.int64) if self.within is None else self.within
        slack = 1 + 2 * rounding(queries.shape[1], float(np.finfo(np.float64).eps))

        def settle(part: slice) -> None:
            results = distances[part], indices[part], sure[part]
            knn_settle(cloud.rows, queries[part], within, cloud.scale, slack, *buffers.arrays(part), *results)

        size = max(64, min(_SETTLED, _SETTLED_PAIRS // self.k))
        for_each(settle, blocks(len(queries), size), self.threads)
