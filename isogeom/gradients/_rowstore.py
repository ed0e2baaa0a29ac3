"""Rows held in memory: the row budget and the storage dtype (numpy only)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isogeom.gradients._result import Harvest, SiteRows
from isogeom.gradients._sampling import META_DTYPE, Rows, Selection, smallest

DTYPES = ("float32", "float16", "bfloat16")


@dataclass
class _Full:
    """As many rows as the budget allows, in any order; `order` sorts them by arrival."""

    keys: NDArray[np.uint64]
    meta: NDArray[Any]
    order: NDArray[np.int64]
    n_seen: int
    rows: Rows


class RowStore:
    """Collect the rows of all batches, never more than `budget` of them."""

    def __init__(self, budget: int | None, dtype: str = "float32") -> None:
        self.budget = budget
        self.dtype = dtype
        self.n_rows = 0
        self.threshold: np.uint64 | None = None
        self.widths: dict[tuple[str, str], int] = {}
        self._chunks: list[tuple[NDArray[np.uint64], NDArray[Any], Rows]] = []
        self._full: _Full | None = None  # instead of the pieces, once the budget is reached

    def known(self, _batch_id: int, _batch: Any) -> float | None:
        """Return the loss of a batch that needs no harvest: none is known here."""
        return None

    def add(self, selection: Selection, arrays: Rows, _batch_id: int, _n_samples: int, _loss: float) -> None:
        """Add the rows of one batch and drop those that no longer fit the budget."""
        check_widths(self.widths, arrays)
        if len(selection.keys) == 0:
            return
        stored = {key: encode(rows, self.dtype, *key) for key, rows in arrays.items()}
        if self._full is not None:
            self._replace(self._full, selection, stored)
            return
        self._chunks.append((selection.keys, selection.meta, stored))
        self.n_rows += len(selection.keys)
        if self.budget is not None and self.n_rows >= self.budget:
            keys, meta, rows = self._join()
            best = smallest(keys, self.budget)
            rows = {key: rows.pop(key)[best] for key in list(rows)}
            self._full = _Full(keys[best], meta[best], np.arange(len(best)), len(best), rows)
            self.n_rows, self.threshold = len(best), keys[best].max()

    def _replace(self, full: _Full, selection: Selection, stored: Rows) -> None:
        """Put rows with smaller keys in the places of those with the largest.

        In place: pieces that outlive their batch, many and small, would pin the memory of all batches between them.
        """
        n = len(full.keys)
        stays = np.zeros(n + len(selection.keys), dtype=bool)
        stays[smallest(np.concatenate([full.keys, selection.keys]), n)] = True
        old, new = np.flatnonzero(~stays[:n]), np.flatnonzero(stays[n:])
        full.keys[old], full.meta[old] = selection.keys[new], selection.meta[new]
        full.order[old] = full.n_seen + np.arange(len(new))
        full.n_seen += len(new)
        for key, rows in full.rows.items():
            rows[old] = stored[key][new]
        self.threshold = full.keys.max()

    def _join(self) -> tuple[NDArray[np.uint64], NDArray[Any], Rows]:
        """Join the pieces, releasing them as they are joined."""
        keys = np.concatenate([np.empty(0, np.uint64), *(chunk[0] for chunk in self._chunks)])
        meta = np.concatenate([np.empty(0, META_DTYPE), *(chunk[1] for chunk in self._chunks)])
        rows: Rows = {}
        for key, width in self.widths.items():
            pieces = [chunk[2].pop(key) for chunk in self._chunks]
            rows[key] = np.concatenate(pieces) if pieces else np.empty((0, width), storage_dtype(self.dtype))
            pieces.clear()
        self._chunks = []
        return keys, meta, rows

    def drain(self) -> tuple[NDArray[np.uint64], NDArray[Any], Rows]:
        """Return keys, meta and rows of all batches in order, and be empty."""
        if self._full is None:
            keys, meta, rows = self._join()
        else:
            full, order = self._full, np.argsort(self._full.order)
            keys, meta = full.keys[order], full.meta[order]
            rows = {key: full.rows.pop(key)[order] for key in list(full.rows)}
        self._full, self.n_rows, self.threshold = None, 0, None
        return keys, meta, rows

    def finish(self, names: list[str], losses: list[float], **_own: Any) -> Harvest:
        """Join the batches."""
        _, meta, rows = self.drain()
        sites = {name: SiteRows(name, rows.get((name, "activations")), rows.get((name, "gradients"))) for name in names}
        return Harvest(sites, meta.view(np.recarray), np.asarray(losses, dtype=np.float64))


def check_widths(widths: dict[tuple[str, str], int], arrays: Rows) -> None:
    """Note the number of features of every array, or raise if it changed since an earlier batch."""
    for (site, kind), rows in arrays.items():
        width = widths.setdefault((site, kind), rows.shape[1])
        if rows.shape[1] != width:
            raise ValueError(
                f"the {kind} of site {site!r} have {rows.shape[1]} features, but {width} in earlier batches"
            )


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype for the bytes of `dtype`; numpy has no bfloat16, whose bits are kept as uint16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def encode(rows: NDArray[Any], dtype: str, site: str, kind: str) -> NDArray[Any]:
    """Return float32 rows in the storage dtype, rounded to nearest; overflow is an error."""
    if dtype == "float32":
        return np.ascontiguousarray(rows)
    result: NDArray[Any]
    if dtype == "float16":
        with np.errstate(over="ignore"):
            result = rows.astype(np.float16)
        overflow = np.isinf(result)
    else:
        bits = np.ascontiguousarray(rows).view(np.uint32)
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # to nearest, ties to even
        result = ((bits + half) >> np.uint32(16)).astype(np.uint16)
        overflow = (result & 0x7FFF) == 0x7F80
    if overflow.any():
        raise ValueError(
            f"dtype={dtype!r} cannot hold {int(overflow.sum())} values of the {kind} of site {site!r}, the largest of "
            f"size {np.abs(rows).max():.3g}: use dtype='float32'"
        )
    return result


def decode(rows: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return rows as numbers: bfloat16 bits become float32, other dtypes stay."""
    if dtype != "bfloat16":
        return rows
    return (np.asarray(rows).astype(np.uint32) << np.uint32(16)).view(np.float32)
