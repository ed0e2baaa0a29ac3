"""What a harvest returns (numpy only)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ties = Mapping[str, Sequence[str]]  # site -> the other modules that have its weight


@dataclass(frozen=True, eq=False)
class SiteRows:
    """Rows harvested at one site.

    Attributes
    ----------
    name : str
        The site.
    activations : ndarray or ShardedRows of shape (n_rows, d), float32 or float16, or None
        Activation rows; for a ``":weight"`` site the inputs of the layer, or the ids of an embedding, int64 of shape
        (n_rows, 1). None when they were not collected. From a folder, and for ``dtype="bfloat16"``, they are
        :class:`ShardedRows`: read-only, and read as they are asked for.
    gradients : ndarray or ShardedRows of shape (n_rows, d), float32 or float16, or None
        Rows of the gradient of the summed loss with respect to the activation; for a ``":weight"`` site with respect to
        the outputs of the layer, of shape (n_rows, d_out). None when they were not collected.
    tied : tuple of str
        For a ``":weight"`` site, the other modules that have the same weight, by name: its gradient is the sum of what
        all of them add. Empty for a weight that is not tied, and for other sites.
    """

    name: str
    activations: Any
    gradients: Any
    tied: tuple[str, ...] = ()

    def __repr__(self) -> str:
        tied = f", tied with {', '.join(map(repr, self.tied))}" if self.tied else ""
        return f"SiteRows({self.name!r}, {self._shapes()}{tied})"

    def _shapes(self) -> str:
        kinds = {"activations": self.activations, "gradients": self.gradients}
        return ", ".join(f"{kind} {rows.shape}" for kind, rows in kinds.items() if rows is not None)

    def _select(self, rows: Any) -> SiteRows:
        acts = None if self.activations is None else self.activations[rows]
        grads = None if self.gradients is None else self.gradients[rows]
        return SiteRows(self.name, acts, grads, self.tied)


@dataclass(frozen=True, eq=False, repr=False)
class Harvest(Mapping[str, SiteRows]):
    """Aligned activation and gradient rows of several sites; a read-only mapping from site name to :class:`SiteRows`.

    Row ``i`` of every array of every site belongs to the token described by ``meta[i]``.

    Attributes
    ----------
    meta : recarray of shape (n_rows,)
        Fields ``sample_id`` (counted over all batches, or the batches' own), ``position`` (from the first real token;
        0 for sites of shape (batch, d), -1 for means), ``token_id`` (-1 when unknown) and ``batch_id``, all int64. Rows
        stand in (batch, sample, position) order.
    losses : ndarray of shape (n_batches,), float64
        Per batch, the mean of what the loss returned: with the presets, the mean cross-entropy per predicted token, in
        nats. 0.0 for a batch without any loss term; NaN with activations only and no loss.

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

    def iter_blocks(self, block_rows: int = 8192) -> Iterator[Harvest]:
        """Go through the rows block by block, for estimators with ``partial_fit``.

        Parameters
        ----------
        block_rows : int, default=8192
            Rows per block, the last one being shorter. Blocks depend on this alone: they are the same for rows in
            memory and in a folder, and for any `batches_per_shard`.

        Yields
        ------
        Harvest
            The next rows at all sites with their `meta`, in order; `losses` is unchanged. Blocks are views of the rows,
            without a copy, but for those that cross from one shard of a folder to the next.

        Raises
        ------
        TypeError, ValueError
            If `block_rows` is no positive integer.

        Examples
        --------
        >>> import numpy as np
        >>> from isogeom.gradients import Harvest, SiteRows
        >>> meta = np.recarray(5, dtype=[("sample_id", "i8"), ("position", "i8")])
        >>> h = Harvest({"layer": SiteRows("layer", np.ones((5, 3), dtype=np.float32), None)}, meta, np.array([0.5]))
        >>> [block["layer"].activations.shape for block in h.iter_blocks(2)]
        [(2, 3), (2, 3), (1, 3)]
        """
        if isinstance(block_rows, bool) or not isinstance(block_rows, (int, np.integer)):
            raise TypeError(f"block_rows must be an integer, got {block_rows!r}")
        if block_rows < 1:
            raise ValueError(f"block_rows={block_rows!r} must be at least 1")
        return self._blocks(int(block_rows))

    def _blocks(self, block_rows: int) -> Iterator[Harvest]:
        for start in range(0, self.n_rows, block_rows):
            rows = slice(start, start + block_rows)
            sites = {name: site._select(rows) for name, site in self._sites.items()}
            yield Harvest(sites, self.meta[rows], self.losses)


def _plural(n: int, word: str, many: str | None = None) -> str:
    return f"{n} {word if n == 1 else many or word + 's'}"
