"""All pairs of queries and rows, tile by tile: products of float32 rows, offered to buffers of candidates."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from isogeom._kernels._scan import knn_scan, knn_start
from isogeom._neighbors._exact import blocks

# Rows of a strip, fewer if they are long: two strips' rows and the products of one tile are held per thread.
_SIDE, _STRIP_ENTRIES = 2048, 2**22
# Columns of a tile, whose products stay in a core's cache; and rows below which a diagonal tile is not halved.
_STEP, _DIAGONAL = 512, 128
# From this many neighbours on, the buffers lie in the memory of the result, twice as wide as it.
_IN_PLACE = 16
# Other buffers are this wide, or as wide as that many bytes for all allow.
_WIDTH, _BUFFER_BYTES = 64, 24 * 2**20


def strip_side(width: int) -> int:
    """Return the number of rows of length `width` in a strip."""
    return max(128, min(_SIDE, _STRIP_ENTRIES // width))


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

    @staticmethod
    def n_bytes(m: int, k: int, margin: int) -> int:
        """Return the size of buffers outside of the result, 0 where they lie in its memory."""
        # A key and a place take eight bytes.
        return 0 if k >= _IN_PLACE else 8 * m * max(2 * (k + margin), min(_WIDTH, _BUFFER_BYTES // (8 * max(m, 1))))

    @classmethod
    def over(cls, distances: np.ndarray, indices: np.ndarray, margin: int) -> Buffers:
        """Make buffers, in the memory of the result where they fit."""
        m, k = distances.shape
        size = cls.n_bytes(m, k, margin)
        if size == 0:
            keys, places = distances.view(np.float32), indices.view(np.int32)
        else:
            keys, places = (np.empty((m, size // (8 * m)), dtype=dtype) for dtype in (np.float32, np.int32))
        # A buffer without room for more than its candidates would be reduced at every step.
        c = min(k + margin, 3 * keys.shape[1] // 4)
        return cls(keys, places, np.zeros(m, np.int32), np.full(m, np.inf, np.float32), c)

    def arrays(self, part: slice = slice(None)) -> tuple[np.ndarray, ...]:
        """Return the arrays of some queries, as the kernels take them."""
        return self.keys[part], self.places[part], self.counts[part], self.limits[part]


@dataclass
class Plan:
    """Order in which the rows are searched: a sample of them first, whose products give limits to begin with.

    Attributes
    ----------
    order : ndarray of shape (n,), int64
        Positions among the rows searched.
    size : int
        Number of rows of the first strip.
    rank, n_groups : int
        As for `knn_start`; rank 0 for no limits to begin with.
    """

    order: np.ndarray
    size: int
    rank: int = 0
    n_groups: int = 0

    @classmethod
    def of(cls, n: int, side: int, k: int, c: int, sampled: bool) -> Plan:
        """Choose the sample for `k` neighbours and `c` candidates, or none where it would say little."""
        size = min(side, n // 8) if sampled else 0
        # The neighbours among all rows reach beyond this rank in the sample with a chance of about 1 in 10^4; at rank
        # k + 2 the sample itself has k others below the limit, even of a row that is in it.
        expected = c * size / n
        rank = min(math.ceil(expected + 3.5 * math.sqrt(expected) + 2), k + 2)
        n_groups = max(64, 1 << (3 * rank).bit_length())
        if n_groups > size:
            return cls(np.arange(n), min(side, n))
        sample = np.arange(size) * n // size
        return cls(np.concatenate((sample, np.delete(np.arange(n), sample))), size, rank, n_groups)


@dataclass
class Pairs:
    """Every query with every row that is not itself.

    Attributes
    ----------
    queries, references : objects with `n`, `width`, `norms` and `tile`
        Rows as float32 factors of products. With `symmetric` they are the same, in the order of the plan.
    order, own : ndarray of int64
        Buffer of each query, and its position among the rows searched or -1.
    """

    queries: Any
    references: Any
    order: np.ndarray
    own: np.ndarray
    plan: Plan
    symmetric: bool
    buffers: Buffers
    n_candidates: int
    strips: list[slice] = field(init=False)
    locks: list[threading.Lock] = field(init=False)

    def __post_init__(self) -> None:
        n, head, side = self.references.n, self.plan.size, strip_side(self.references.width)
        self.strips = [slice(0, head), *(slice(head + b.start, head + b.stop) for b in blocks(n - head, side))]
        self._local = threading.local()
        self.locks = [threading.Lock() for _ in self.strips]

    def offer(self, threads: int) -> None:
        """Offer all pairs to the buffers."""
        if self.symmetric:
            # The rows of the sample get their limits before all others are offered to them.
            self._first(0)
            for_each(self._first, range(1, len(self.strips)), threads)
            for_each(self._strip, range(1, len(self.strips)), threads)
        else:
            # Few queries are shared out among the threads.
            size = max(1, min(strip_side(self.references.width), -(-self.queries.n // threads)))
            for_each(self._all_columns, blocks(self.queries.n, size), threads)

    def _first(self, a: int) -> None:
        """Offer the rows of strip `a` to those of the first, and the other way round."""
        rows = self.strips[a]
        with self.locks[0], self.locks[a] if a else nullcontext():
            self._tile(self.references.tile(rows), rows, self.strips[0], both=a > 0, start=True)

    def _strip(self, a: int) -> None:
        """Offer the rows of strip `a` to themselves and to those of all later strips, and the other way round."""
        self._diagonal(a, self.strips[a])
        left = self.references.tile(self.strips[a])
        for b in range(a + 1, len(self.strips)):
            for columns in _steps(self.strips[b]):
                # Only pairs of strips, in order, wait for each other.
                with self.locks[a], self.locks[b]:
                    self._tile(left, self.strips[a], columns, both=True)

    def _diagonal(self, a: int, rows: slice) -> None:
        """Offer rows of strip `a` to each other: halves of them among themselves, and one half to the other."""
        middle = (rows.start + rows.stop) // 2
        halves = [slice(rows.start, middle), slice(middle, rows.stop)]
        if rows.stop - rows.start < 2 * _DIAGONAL:
            with self.locks[a]:
                self._tile(self.references.tile(rows), rows, rows)
            return
        for half in halves:
            self._diagonal(a, half)
        with self.locks[a]:
            self._tile(self.references.tile(halves[0]), *halves, both=True)

    def _all_columns(self, rows: slice) -> None:
        left = self.queries.tile(rows)
        self._tile(left, rows, self.strips[0], start=True)
        for strip in self.strips[1:]:
            for columns in _steps(strip):
                self._tile(left, rows, columns)

    def _tile(self, left: np.ndarray, rows: slice, columns: slice, *, both: bool = False, start: bool = False) -> None:
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        products = self._memory(shape)
        np.matmul(left, self.references.tile(columns).T, out=products)
        norms, others = self.queries.norms[rows], self.references.norms[columns]
        at, own = self.order[rows], self.own[rows]
        if start and self.plan.rank:
            knn_start(products, at, norms, others, self.plan.rank, self.plan.n_groups, self.buffers.limits)
        places = self.plan.order[columns]
        knn_scan(products, at, places, own, norms, others, both, self.n_candidates, *self.buffers.arrays())

    def _memory(self, shape: tuple[int, int]) -> np.ndarray:
        """Return an array of the thread for products: new memory for every tile would be cleared each time."""
        size = shape[0] * shape[1]
        if len(getattr(self._local, "products", ())) < size:
            self._local.products = np.empty(size, dtype=np.float32)
        return self._local.products[:size].reshape(shape)


def _steps(strip: slice) -> Iterable[slice]:
    return (slice(strip.start + b.start, strip.start + b.stop) for b in blocks(strip.stop - strip.start, _STEP))


def for_each(function: Callable[[Any], None], items: Iterable[Any], threads: int) -> None:
    """Call `function` on every item, on that many threads."""
    if threads == 1:
        for item in items:
            function(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(function, items):
            pass
