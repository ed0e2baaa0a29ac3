"""The choice of rows: masks, positions and a sample by hash, the same at every site, checkpoint and resume (numpy)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

META_DTYPE = np.dtype([("sample_id", "i8"), ("position", "i8"), ("token_id", "i8"), ("batch_id", "i8")])
ROWS = ("tokens", "mean", "last", "all")

Rows = dict[tuple[str, str], NDArray[Any]]  # (site, kind) -> rows


@dataclass(frozen=True)
class RowRule:
    """What a whole call says about its rows."""

    rows: str = "tokens"
    exclude: NDArray[np.int64] | None = None
    positions: slice | tuple[int, ...] | None = None
    seed: int = 0
    rate: float | None = None
    budget: int | None = None


@dataclass(frozen=True)
class Selection:
    """Rows of one batch.

    `keep` holds flat indices of the (batch, seq) grid that pass the masks and the sampling rate, `chosen` which of
    those the row budget lets through (None: all). With ``rows="mean"`` the kept rows from ``starts[i]`` on make row i.
    """

    keep: NDArray[np.intp]
    chosen: NDArray[np.intp] | None
    keys: NDArray[np.uint64]
    meta: NDArray[Any]
    starts: NDArray[np.intp] | None = None

    def pool(self, arrays: Rows) -> Rows:
        """Average the captured rows of every sample, for ``rows="mean"``; otherwise return them as they are."""
        if self.starts is None or len(self.keep) == 0:
            return arrays
        counts = np.diff(np.append(self.starts, len(self.keep)))[:, None]
        return {
            key: (np.add.reduceat(rows, self.starts, axis=0, dtype=np.float64) / counts).astype(rows.dtype)
            for key, rows in arrays.items()
        }


@dataclass
class BatchRows:
    """Choose the rows of one batch, once the first site has shown the shape (batch, seq) or (batch,) of its rows."""

    batch_id: int
    first_sample: int
    rule: RowRule = RowRule()
    sample_ids: NDArray[np.int64] | None = None  # the batch's own, of shape (batch,)
    token_ids: NDArray[np.int64] | None = None
    real: NDArray[np.bool_] | None = None  # attention mask: where positions start to count
    token_mask: NDArray[np.bool_] | None = None  # of the attention mask and the preset: for (batch, seq) rows only
    label_mask: NDArray[np.bool_] | None = None
    row_mask: NDArray[np.bool_] | None = None  # the user's: must have the shape of the rows
    threshold: np.uint64 | None = None
    _first: tuple[str, tuple[int, ...], Selection] | None = None

    @property
    def selection(self) -> Selection:
        """The rows of the batch, once a site has run."""
        if self._first is None:
            raise RuntimeError(f"no site has run in batch {self.batch_id}")
        return self._first[2]

    def select(self, grid: tuple[int, ...], site: str) -> Selection:
        """Return the rows for a site whose rows have shape `grid`; every site of the batch gets the same ones."""
        if self._first is None:
            self._first = (site, grid, self._choose(grid, site))
        first, shape, selection = self._first
        if grid != shape:
            raise ValueError(
                f"sites {first!r} and {site!r} have different rows in batch {self.batch_id}: shape {shape} against "
                f"{grid}; rows are aligned across sites, so harvest them in separate calls"
            )
        return selection

    def _choose(self, grid: tuple[int, ...], site: str) -> Selection:
        rule = self.rule
        keep = np.flatnonzero(self._mask(grid, site))
        sample = keep // (grid[1] if len(grid) == 2 else 1)
        if rule.rows == "last" and len(keep):
            last = np.append(sample[1:] != sample[:-1], True)
            keep, sample = keep[last], sample[last]
        meta, starts = self._meta(keep, sample, grid), None
        if rule.rows == "mean":
            starts = np.flatnonzero(np.append(True, sample[1:] != sample[:-1])) if len(keep) else np.empty(0, np.intp)
            meta = meta[starts]
            meta["position"] = meta["token_id"] = -1
        keys = row_keys(rule.seed, meta["sample_id"], meta["position"])
        drawn = np.ones(len(keys), dtype=bool) if rule.rate is None else keys < _bound(rule.rate)
        if starts is None:
            keep, keys, meta = keep[drawn], keys[drawn], meta[drawn]
            chosen = self._within_budget(keys)
            if chosen is None:
                return Selection(keep, None, keys, meta)
            return Selection(keep, chosen, keys[chosen], meta[chosen])
        # A mean needs all rows of its sample, so the budget acts on samples before their rows are captured.
        chosen = self._within_budget(keys[drawn])
        samples = np.flatnonzero(drawn) if chosen is None else np.flatnonzero(drawn)[chosen]
        lengths = np.diff(np.append(starts, len(keep)))
        stays = np.zeros(len(keys), dtype=bool)
        stays[samples] = True
        firsts = np.cumsum(lengths[samples]) - lengths[samples]
        return Selection(keep[np.repeat(stays, lengths)], None, keys[samples], meta[samples], firsts)

    def _meta(self, keep: NDArray[np.intp], sample: NDArray[np.intp], grid: tuple[int, ...]) -> NDArray[Any]:
        meta = np.empty(len(keep), dtype=META_DTYPE)
        meta["sample_id"] = sample + self.first_sample if self.sample_ids is None else self.sample_ids[sample]
        meta["position"] = keep % grid[1] - self._begins(grid)[sample] if len(grid) == 2 else 0
        ids = self.token_ids
        meta["token_id"] = ids.ravel()[keep] if ids is not None and ids.shape == grid else -1
        meta["batch_id"] = self.batch_id
        return meta

    def _within_budget(self, keys: NDArray[np.uint64]) -> NDArray[np.intp] | None:
        if self.rule.budget is None:
            return None
        chosen = smallest(keys, self.rule.budget)
        return chosen if self.threshold is None else chosen[keys[chosen] < self.threshold]

    def _begins(self, grid: tuple[int, ...]) -> NDArray[np.intp]:
        """First real token of every sample, so that padding on the left changes no position."""
        if self.real is None or self.real.shape != grid:
            return np.zeros(grid[0], dtype=np.intp)
        return np.argmax(self.real, axis=1)

    def _mask(self, grid: tuple[int, ...], site: str) -> NDArray[np.bool_]:
        mask = np.ones(grid, dtype=bool)
        if self.row_mask is not None:
            if self.row_mask.shape != grid:
                raise ValueError(
                    f"mask returned shape {self.row_mask.shape} for batch {self.batch_id}, but the rows of site "
                    f"{site!r} have shape {grid}; return a bool tensor of that shape"
                )
            mask &= self.row_mask
        if self.token_mask is not None and len(grid) == 2:
            if self.token_mask.shape != grid:
                raise ValueError(
                    f"the batch masks tokens of shape {self.token_mask.shape}, but the rows of site {site!r} have "
                    f"shape {grid} (batch {self.batch_id}); use a loss of your own and pass mask=callable that "
                    "returns a bool tensor of the site's shape"
                )
            mask &= self.token_mask
        if self.label_mask is not None:
            self._check_grid("label_mask=True", "label", self.label_mask, grid, site)
            mask &= self.label_mask
        if self.rule.exclude is not None:
            self._check_grid("exclude_token_ids", "token id", self.token_ids, grid, site)
            mask &= ~np.isin(np.asarray(self.token_ids), self.rule.exclude)
        if self.rule.positions is not None:
            mask &= self._position_mask(grid, site)
        return mask

    def _check_grid(self, option: str, what: str, values: Any, grid: tuple[int, ...], site: str) -> None:
        if values is None or values.shape != grid:
            source = "labels" if what == "label" else "input_ids"
            raise ValueError(
                f"{option} needs one {what} per row, but batch {self.batch_id} has none for the rows of site {site!r} "
                f"(shape {grid}); give {source!r} in the batch, or use mask=callable"
            )

    def _position_mask(self, grid: tuple[int, ...], site: str) -> NDArray[np.bool_]:
        if len(grid) != 2:
            raise ValueError(
                f"positions needs rows of shape (batch, seq), but those of site {site!r} have shape {grid} in batch "
                f"{self.batch_id}: leave positions out"
            )
        positions, mask, begins = self.rule.positions, np.zeros(grid, dtype=bool), self._begins(grid)
        for i, begin in enumerate(begins):
            known = self.real is not None and self.real.shape == grid
            end = int(np.flatnonzero(self.real[i]).max(initial=-1)) + 1 if known and self.real is not None else grid[1]
            index = np.arange(begin, max(end, begin))
            if isinstance(positions, slice):
                mask[i, index[positions]] = True
            else:
                mask[i, index[[p for p in positions or () if -len(index) <= p < len(index)]]] = True
        return mask


def row_keys(seed: int, sample: NDArray[np.int64], position: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash (seed, sample, position) to 64 bits, so that a row is chosen by what it is and not by when it came."""
    key = _mix(np.full(1, seed, dtype=np.uint64))
    key = _mix(key ^ sample.astype(np.uint64))
    return _mix(key ^ position.astype(np.uint64))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of SplitMix64; unsigned arrays wrap around silently."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _bound(rate: float) -> np.uint64:
    """Return the key below which a share `rate` of all keys lies."""
    return np.uint64(min(int(rate * 2.0**64), 2**64 - 1))


def smallest(keys: NDArray[np.uint64], k: int) -> NDArray[np.intp]:
    """Return the indices of the `k` smallest keys, in increasing order of index."""
    if len(keys) <= k:
        return np.arange(len(keys))
    return np.sort(np.argpartition(keys, k - 1)[:k])


def batch_seed(seed: int, batch_id: int) -> int:
    """Return the seed of torch's random state in a batch: a resumed call draws what an uninterrupted one draws."""
    key = row_keys(seed, np.array([batch_id]), np.array([-2]))
    return int(key[0])
