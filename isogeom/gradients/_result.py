"""What a harvest returns, and the choice of its rows (numpy only)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

META_DTYPE = np.dtype([("sample_id", "i8"), ("position", "i8"), ("token_id", "i8"), ("batch_id", "i8")])


@dataclass(frozen=True, eq=False)
class SiteRows:
    """Rows harvested at one site.

    Attributes
    ----------
    name : str
        The site.
    activations : ndarray of shape (n_rows, d), float32, or None
        Activation rows; for a ``":weight"`` site the inputs of the layer. None when they were not collected.
    gradients : ndarray of shape (n_rows, d), float32, or None
        Rows of the gradient of the summed loss with respect to the activation; for a ``":weight"`` site with respect to
        the outputs of the layer, of shape (n_rows, d_out). None when they were not collected.
    """

    name: str
    activations: NDArray[np.float32] | None
    gradients: NDArray[np.float32] | None

    def __repr__(self) -> str:
        return f"SiteRows({self.name!r}, {self._shapes()})"

    def _shapes(self) -> str:
        kinds = {"activations": self.activations, "gradients": self.gradients}
        return ", ".join(f"{kind} {rows.shape}" for kind, rows in kinds.items() if rows is not None)

    def _select(self, rows: Any) -> SiteRows:
        acts = None if self.activations is None else self.activations[rows]
        grads = None if self.gradients is None else self.gradients[rows]
        return SiteRows(self.name, acts, grads)


@dataclass(frozen=True, eq=False, repr=False)
class Harvest(Mapping[str, SiteRows]):
    """Aligned activation and gradient rows of several sites; a read-only mapping from site name to :class:`SiteRows`.

    Row ``i`` of every array of every site belongs to the token described by ``meta[i]``.

    Attributes
    ----------
    meta : recarray of shape (n_rows,)
        Fields ``sample_id`` (counted over all batches), ``position`` (0 for sites of shape (batch, d)), ``token_id``
        (-1 when unknown) and ``batch_id``, all int64. Rows stand in (batch, sample, position) order.
    losses : ndarray of shape (n_batches,), float64
        Per batch, the mean of what the loss returned: with the presets, the mean cross-entropy per predicted token, in
        nats. 0.0 for a batch without any loss term.

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.gradients import Harvest, SiteRows
    >>> meta = np.recarray(2, dtype=[("sample_id", "i8"), ("position", "i8"), ("token_id", "i8"), ("batch_id", "i8")])
    >>> meta["position"] = [0, 1]
    >>> rows = SiteRows("layer", activations=np.eye(2, dtype=np.float32), gradients=None)
    >>> h = Harvest({"layer": rows}, meta, np.array([0.5]))
    >>> h
    Harvest(2 rows, 1 site, 1 batch)
      layer  activations (2, 2)
    >>> h.select(h.meta.position == 1)["layer"].activations
    array([[0., 1.]], dtype=float32)
    """

    _sites: Mapping[str, SiteRows]
    meta: Any
    losses: NDArray[np.float64]

    @property
    def n_rows(self) -> int:
        """Number of rows, the same at every site."""
        return len(self.meta)

    def __getitem__(self, name: str) -> SiteRows:
        # "layer" and "layer:out" are one site, so both spellings find it.
        other = name.removesuffix(":out") if str(name).endswith(":out") else f"{name}:out"
        for key in (name, other):
            if key in self._sites:
                return self._sites[key]
        raise KeyError(f"no site {name!r} in this harvest; it has {', '.join(map(repr, self._sites))}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def __repr__(self) -> str:
        counts = [
            _plural(self.n_rows, "row"),
            _plural(len(self), "site"),
            _plural(len(self.losses), "batch", "batches"),
        ]
        head = f"Harvest({', '.join(counts)})"
        width = max(map(len, self._sites), default=0)
        return "\n".join([head, *(f"  {name:<{width}}  {rows._shapes()}" for name, rows in self._sites.items())])

    def select(self, rows: ArrayLike | slice) -> Harvest:
        """Return a harvest restricted to some rows, in the order given.

        Parameters
        ----------
        rows : bool array of shape (n_rows,), int array of shape (k,), or slice
            The rows to keep. `losses` is unchanged.

        Returns
        -------
        Harvest
            Copies of the selected rows.

        Raises
        ------
        ValueError, IndexError
            If `rows` is not one of the above, or points outside the harvest.
        """
        if isinstance(rows, slice):
            # Indices copy; a view would keep the arrays of the whole harvest alive.
            rows = np.arange(self.n_rows)[rows]
        else:
            rows = np.asarray(rows)
            if rows.shape == (0,):
                rows = rows.astype(np.intp)  # an empty list comes as float64
            if rows.ndim != 1 or rows.dtype.kind not in "bui" or (rows.dtype == bool and len(rows) != self.n_rows):
                raise ValueError(
                    f"rows must be a slice, a 1-D integer array or a boolean array of length {self.n_rows}, got an "
                    f"array of shape {rows.shape} and dtype {rows.dtype}"
                )
        sites = {name: site._select(rows) for name, site in self._sites.items()}
        return Harvest(sites, self.meta[rows], self.losses)


@dataclass(frozen=True)
class Selection:
    """Rows of one batch: flat indices `keep` that pass the masks, and which of those the row budget lets through."""

    keep: NDArray[np.intp]
    chosen: NDArray[np.intp] | None
    keys: NDArray[np.uint64]
    meta: NDArray[Any]


@dataclass
class BatchRows:
    """Choose the rows of one batch, once the first site has shown the shape (batch, seq) or (batch,) of its rows."""

    batch_id: int
    first_sample: int
    token_ids: NDArray[np.int64] | None = None
    token_mask: NDArray[np.bool_] | None = None  # of the attention mask and the preset: for (batch, seq) rows only
    row_mask: NDArray[np.bool_] | None = None  # the user's: must have the shape of the rows
    exclude: NDArray[np.int64] | None = None
    seed: int = 0
    budget: int | None = None
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
        keep = np.flatnonzero(self._mask(grid, site))
        sample, position = np.divmod(keep, grid[1] if len(grid) == 2 else 1)
        meta = np.empty(len(keep), dtype=META_DTYPE)
        meta["sample_id"] = sample + self.first_sample
        meta["position"] = position
        ids = self.token_ids
        meta["token_id"] = ids.ravel()[keep] if ids is not None and ids.shape == grid else -1
        meta["batch_id"] = self.batch_id
        keys = row_keys(self.seed, meta["sample_id"], meta["position"])
        if self.budget is None:
            return Selection(keep, None, keys, meta)
        chosen = smallest(keys, self.budget)
        if self.threshold is not None:
            chosen = chosen[keys[chosen] < self.threshold]
        return Selection(keep, chosen, keys[chosen], meta[chosen])

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
        if self.exclude is not None:
            if self.token_ids is None or self.token_ids.shape != grid:
                raise ValueError(
                    f"exclude_token_ids needs one token id per row, but batch {self.batch_id} has none for the rows "
                    f"of site {site!r} (shape {grid}); give 'input_ids' in the batch, or use mask=callable"
                )
            mask &= ~np.isin(self.token_ids, self.exclude)
        return mask


class RowStore:
    """Collect the rows of all batches, never more than `budget` of them."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.n_rows = 0
        self.threshold: np.uint64 | None = None
        self._chunks: list[tuple[NDArray[np.uint64], NDArray[Any], dict[tuple[str, str], NDArray[np.float32]]]] = []
        self._widths: dict[tuple[str, str], int] = {}

    def add(self, selection: Selection, arrays: dict[tuple[str, str], NDArray[np.float32]]) -> None:
        """Add the rows of one batch and drop those that no longer fit the budget."""
        for (site, kind), rows in arrays.items():
            width = self._widths.setdefault((site, kind), rows.shape[1])
            if rows.shape[1] != width:
                raise ValueError(
                    f"the {kind} of site {site!r} have {rows.shape[1]} features, but {width} in earlier batches"
                )
        if len(selection.keys):
            self._chunks.append((selection.keys, selection.meta, arrays))
            self.n_rows += len(selection.keys)
        if self.budget is not None and self.n_rows >= self.budget:
            self._prune(self.budget)

    def _prune(self, budget: int) -> None:
        keys = np.concatenate([chunk[0] for chunk in self._chunks])
        best = np.zeros(len(keys), dtype=bool)
        best[smallest(keys, budget)] = True
        self.threshold = keys[best].max()
        kept, start = [], 0
        for chunk in self._chunks:
            stay = best[start : start + len(chunk[0])]
            start += len(stay)
            if stay.all():
                kept.append(chunk)
            elif stay.any():
                kept.append((chunk[0][stay], chunk[1][stay], {key: rows[stay] for key, rows in chunk[2].items()}))
        self._chunks, self.n_rows = kept, int(best.sum())

    def finish(self, names: list[str], losses: list[float]) -> Harvest:
        """Join the batches, releasing the pieces as they are joined."""
        meta = np.concatenate([chunk[1] for chunk in self._chunks]).view(np.recarray)
        joined = {
            key: np.ascontiguousarray(np.concatenate([chunk[2].pop(key) for chunk in self._chunks]))
            for key in self._widths
        }
        sites = {
            name: SiteRows(name, joined.get((name, "activations")), joined.get((name, "gradients"))) for name in names
        }
        return Harvest(sites, meta, np.asarray(losses, dtype=np.float64))


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


def smallest(keys: NDArray[np.uint64], k: int) -> NDArray[np.intp]:
    """Return the indices of the `k` smallest keys, in increasing order of index."""
    if len(keys) <= k:
        return np.arange(len(keys))
    return np.sort(np.argpartition(keys, k - 1)[:k])


def _plural(n: int, word: str, many: str | None = None) -> str:
    return f"{n} {word if n == 1 else many or word + 's'}"
