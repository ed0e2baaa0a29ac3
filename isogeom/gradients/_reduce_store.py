"""Moments in a folder: a harvest with reduce="moments" that can be interrupted and resumed (numpy only)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isogeom._validation import warn_user
from isogeom.gradients._manifest import SHARDS, fault, sync_folder
from isogeom.gradients._moment_files import read_moments, write_moments
from isogeom.gradients._reduce import HarvestMoments, MomentStore
from isogeom.gradients._result import Ties
from isogeom.gradients._sampling import Rows, Selection
from isogeom.gradients._store import DiskStore


class MomentDiskStore(DiskStore):
    """Like :class:`DiskStore`, but a block holds the moments of all batches so far, and replaces the block before."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sums = MomentStore()

    @property
    def n_rows(self) -> int:
        """Rows so far."""
        return self._sums.n_rows

    def add(self, selection: Selection, arrays: Rows, batch_id: int, n_samples: int, loss: float) -> None:
        """Add the rows of one batch; the last batch of a block writes the moments."""
        self._sums.add(selection, arrays, batch_id, n_samples, loss)
        self._note(n_samples, loss)
        if (batch_id + 1) % self.step == 0:
            self._flush(batch_id // self.step)

    def _result(self, losses: list[float]) -> HarvestMoments:
        return self._sums.finish(self.sites, losses, ties=self.ties)

    def _flush(self, number: int) -> None:
        self._sums.flush()
        self._write_moments(number, self._batches)
        self._batches = []

    def _write_moments(self, number: int, batches: list[dict[str, Any]]) -> None:
        """Write the moments as the last block, then drop what they replace."""
        shards = write_moments(self.manifest, number, self._sums)
        sync_folder(self.folder / SHARDS)
        self.manifest.append(
            {"block": number, "sampled": True, "batches": batches, "n_rows": self._sums.n_rows, "shards": shards}
        )
        self._drop_strays()

    def _drop_faulty(self) -> None:
        """Load the last block; if it is faulty, or one before it unknown, there is nothing to go on from."""
        blocks = self.manifest.blocks
        if not blocks:
            return
        # The last block holds the rows of those before it: to harvest one of those again would count them twice.
        faults = (fault(self.folder, shard) for shard in blocks[max(blocks)]["shards"])
        wrong = self.manifest.missing() or next(filter(None, faults), None)
        if wrong:
            warn_user(f"{wrong}; all batches are harvested again")
            blocks.clear()
            return
        self._sums = read_moments(self.manifest)


class SampleMomentDiskStore(MomentDiskStore):
    """With a row budget: shards hold the candidates, as for rows, until the end, when their moments replace them."""

    n_rows = DiskStore.n_rows
    add = DiskStore.add
    _flush = DiskStore._flush

    def _drop_faulty(self) -> None:
        if self.manifest.reduced:
            MomentDiskStore._drop_faulty(self)
        else:
            DiskStore._drop_faulty(self)

    def _ended(self) -> int | None:
        # Once there are moments, no batch can be added, though the line that ends the harvest may be missing.
        return self.manifest.n_batches if self.manifest.reduced else super()._ended()

    def _keys(self, block: dict[str, Any]) -> NDArray[np.uint64]:
        return np.empty(0, np.uint64) if self.manifest.reduced else super()._keys(block)

    def _drop_outside(self) -> None:
        """Reduce the rows of the sample to moments."""
        if self.manifest.reduced:
            return
        for _, _, _, rows in self._kept():
            self._sums.add_rows(rows)
        self._sums.flush()
        last = self.manifest.blocks[max(self.manifest.blocks)]
        self._write_moments(last["block"], last["batches"])


def moment_disk_store(
    folder: Path, fingerprint: dict[str, Any], sites: list[str], kinds: list[str], ties: Ties | None = None
) -> MomentDiskStore | SampleMomentDiskStore:
    """Return what takes the rows of a harvest with ``reduce="moments"`` and a folder."""
    store = MomentDiskStore if fingerprint["max_rows"] is None else SampleMomentDiskStore
    return store(folder, fingerprint, sites, kinds, ties)
