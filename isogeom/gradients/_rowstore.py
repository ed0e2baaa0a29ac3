"""Rows held in memory: growing buffers, the row budget and the storage dtype (numpy only)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isogeom.gradients._dtypes import encode, storage_dtype
from isogeom.gradients._result import Harvest, SiteRows, Ties
from isogeom.gradients._sampling import META_DTYPE, Rows, Selection, smallest
from isogeom.gradients._sharded import ShardedRows

_SMALL_BYTES = 1 << 26  # a buffer up to this size has room for twice its rows: pages that nobody touches cost nothing
_GROWTH = 1.125  # a larger one, which is filled with zeros when it grows
_FIRST = 16  # batches that the first buffer has room for
_SLICES = 16  # of the columns, brought into order one after the other


class RowStore:
    """Collect the rows of all batches, never more than `budget` of them.

    Every array is one buffer that grows with its rows and is cut to size at the end. Where the system can move pages
    (Linux), growing a large one copies nothing, so that the rows are never held twice. Rows that a full sample drops
    give their places to others: pieces that outlive their batch, many and small, would pin the memory of all batches
    between them.
    """

    def __init__(self, budget: int | None, dtype: str = "float32") -> None:
        self.budget = budget
        self.dtype = dtype
        self.n_rows = 0
        self.widths: dict[tuple[str, str], int] = {}
        self.dtypes: dict[tuple[str, str], np.dtype[Any]] = {}
        self._n_seen = 0
        self._expected = 0  # rows of the last block: room for as many is made at once
        self._clear()

    def _clear(self) -> None:
        self._capacity = 0
        self._keys = np.empty(0, np.uint64)
        self._meta = np.empty(0, META_DTYPE)
        self._order = np.empty(0, np.int64)  # of arrival, for a sample
        self._rows: Rows = {}

    @property
    def threshold(self) -> np.uint64 | None:
        """Key that a row must stay below to have a place in the sample, None while there is room."""
        full = self.budget is not None and self.n_rows >= self.budget
        return self._keys[: self.n_rows].max() if full else None

    def known(self, _batch_id: int, _batch: Any) -> float | None:
        """Return the loss of a batch that needs no harvest: none is known here."""
        return None

    def add(self, selection: Selection, arrays: Rows, _batch_id: int, _n_samples: int, _loss: float) -> None:
        """Add the rows of one batch and drop those that no longer fit the budget."""
        check_widths(self.widths, arrays)
        for key, rows in arrays.items():  # token ids, the rows of a lookup, stay integers
            self.dtypes[key] = storage_dtype(self.dtype) if rows.dtype.kind == "f" else rows.dtype
        if len(selection.keys) == 0:
            return
        new = np.arange(len(selection.keys))
        free = np.empty(0, np.intp)
        if self.budget is not None and self.n_rows + len(new) > self.budget:
            stays = np.zeros(self.n_rows + len(new), dtype=bool)
            keys = np.concatenate([self._keys[: self.n_rows], selection.keys])
            stays[smallest(keys, self.budget)] = True
            free, new = np.flatnonzero(~stays[: self.n_rows]), np.flatnonzero(stays[self.n_rows :])
        n_more = len(new) - len(free)
        self._reserve(self.n_rows + n_more)
        # New rows follow the others where nothing is dropped: a slice is faster than a list of places.
        end = slice(self.n_rows, self.n_rows + n_more)
        places: Any = np.concatenate([free, np.arange(end.start, end.stop)]) if len(free) else end
        every = len(new) == len(selection.keys)
        self._keys[places] = selection.keys[new]
        self._meta[places] = selection.meta[new]
        self._order[places] = self._n_seen + np.arange(len(new))
        for key, rows in arrays.items():
            self._rows[key][places] = encode(rows if every else rows[new], self.dtype, *key)
        self.n_rows += n_more
        self._n_seen += len(new)

    def _reserve(self, n_rows: int) -> None:
        """Make room for `n_rows` rows."""
        for key, width in self.widths.items():
            if key not in self._rows:
                dtype = self.dtypes.get(key, storage_dtype(self.dtype))
                self._rows[key] = np.empty((self._capacity, width), dtype)
        if n_rows <= self._capacity:
            return
        widest = max(array.itemsize * array.shape[1] for array in self._rows.values())
        small = min((2 if self.n_rows else _FIRST) * n_rows, _SMALL_BYTES // max(widest, 1))
        room = max(n_rows, int(self._capacity * _GROWTH) + 1, small, self._expected)
        room = room if self.budget is None else min(room, self.budget)
        self._keys, self._meta, self._order = (self._grown(a, room) for a in (self._keys, self._meta, self._order))
        for key in self._rows:
            self._rows[key] = self._grown(self._rows[key], room)
        self._capacity = room

    def _grown(self, array: NDArray[Any], n_rows: int) -> NDArray[Any]:
        if array.nbytes > _SMALL_BYTES:
            # A realloc: a new array and a copy would hold the rows twice. No view of a buffer is kept.
            array.resize((n_rows, *array.shape[1:]), refcheck=False)
            return array
        larger = np.empty((n_rows, *array.shape[1:]), array.dtype)
        larger[: self.n_rows] = array[: self.n_rows]
        return larger

    def drain(self) -> tuple[NDArray[np.uint64], NDArray[Any], Rows]:
        """Return keys, meta and rows of all batches in order, and be empty."""
        self._reserve(self.n_rows)  # an array for every site, rows or none
        for array in (self._keys, self._meta, self._order, *self._rows.values()):
            array.resize((self.n_rows, *array.shape[1:]), refcheck=False)
        keys, meta, rows = self._keys, self._meta, self._rows
        if (self._order[1:] < self._order[:-1]).any():
            order = np.argsort(self._order)
            keys, meta = keys[order], meta[order]
            for array in rows.values():
                _permute(array, order)
        self._expected, self.n_rows, self._n_seen = self.n_rows, 0, 0
        self._clear()
        return keys, meta, rows

    def finish(self, names: list[str], losses: list[float], *, ties: Ties | None = None, **_own: Any) -> Harvest:
        """Return the rows of all batches; `ties` are the modules with the weight of a site."""
        _, meta, rows = self.drain()
        found: dict[tuple[str, str], Any] = dict(rows)
        if self.dtype == "bfloat16":
            found = {key: ShardedRows([bits], [len(bits)], bits.shape[1], self.dtype) for key, bits in rows.items()}
        ties = ties or {}
        sites = {
            name: SiteRows(
                name, found.get((name, "activations")), found.get((name, "gradients")), tuple(ties.get(name, ()))
            )
            for name in names
        }
        return Harvest(sites, meta.view(np.recarray), np.asarray(losses, dtype=np.float64))


def _permute(array: NDArray[Any], order: NDArray[np.intp]) -> None:
    """Bring rows into order in place, some columns at a time, so that they are never held twice."""
    step = max(array.shape[1] // _SLICES, 1)
    for begin in range(0, array.shape[1], step):
        columns = slice(begin, begin + step)
        array[:, columns] = array[order, columns]


def check_widths(widths: dict[tuple[str, str], int], arrays: Rows) -> None:
    """Note the number of features of every array, or raise if it changed since an earlier batch."""
    for (site, kind), rows in arrays.items():
        width = widths.setdefault((site, kind), rows.shape[1])
        if rows.shape[1] != width:
            raise ValueError(
                f"the {kind} of site {site!r} have {rows.shape[1]} features, but {width} in earlier batches"
            )
