"""Running moments in a folder: a harvest with reduce="moments" that can be interrupted and resumed (numpy only)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isogeom._moments import Moments
from isogeom._validation import warn_user
from isogeom.gradients._manifest import SHARDS, fault, sync_folder, write_shard
from isogeom.gradients._reduce import HarvestMoments, MomentStore
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

    @property
    def threshold(self) -> None:
        """No row budget goes with moments."""
        return None

    def add(self, selection: Selection, arrays: Rows, batch_id: int, n_samples: int, loss: float) -> None:
        """Add the rows of one batch; the last batch of a block writes the moments."""
        self._sums.add(selection, arrays, batch_id, n_samples, loss)
        self._note(n_samples, loss)
        if (batch_id + 1) % self.step == 0:
            self._flush(batch_id // self.step)

    def finish(self, names: list[str], losses: list[float], *, own_ids: bool = False) -> HarvestMoments:  # type: ignore[override]
        """Write the last block, end the manifest and return the moments."""
        if self._batches:
            self._flush((self._n_batches - 1) // self.step)
        self._end(losses, own_ids)
        return self._sums.finish(names, losses)

    def _flush(self, number: int) -> None:
        self._sums.flush()
        shards = []
        for name, (site, kind) in self.arrays.items():
            moments = self._sums.moments.get((site, kind), Moments())
            shards.append(write_shard(self.folder, f"{number:06d}.{name}.moments.npy", _pack(moments)))
            if kind == "activations" and site in self._sums.cross:
                shards.append(write_shard(self.folder, f"{number:06d}.{name}.cross.npy", self._sums.cross[site]))
        sync_folder(self.folder / SHARDS)
        self.manifest.append(
            {"block": number, "sampled": True, "batches": self._batches, "n_rows": self._sums.n_rows, "shards": shards}
        )
        self._batches = []
        self._drop_strays()

    def _named(self) -> set[str]:
        blocks = self.manifest.blocks
        return {shard["file"] for shard in blocks[max(blocks)]["shards"]} if blocks else set()

    def _drop_faulty(self) -> None:
        """Load the last block; if it is faulty, or one before it unknown, there is nothing to go on from."""
        blocks = self.manifest.blocks
        if not blocks:
            return
        block = blocks[max(blocks)]
        # The last block holds the rows of those before it: to harvest one of those again would count them twice.
        faults = (fault(self.folder, shard) for shard in block["shards"])
        wrong = self.manifest.missing() or next(filter(None, faults), None)
        if wrong:
            warn_user(f"{wrong}; all batches are harvested again")
            blocks.clear()
            return
        files = {shard["file"]: self.folder / SHARDS / shard["file"] for shard in block["shards"]}
        for name, (site, kind) in self.arrays.items():
            path = files[f"{block['block']:06d}.{name}.moments.npy"]
            moments = _unpack(np.load(path, allow_pickle=False))
            if moments.count:
                self._sums.moments[site, kind] = moments
                self._sums.widths[site, kind] = int(moments.mean.shape[0])
            cross = files.get(f"{block['block']:06d}.{name}.cross.npy")
            if cross is not None:
                self._sums.cross[site] = np.load(cross, allow_pickle=False)
        self._sums.n_rows = block["n_rows"]


def _pack(moments: Moments) -> NDArray[np.float64]:
    state = moments.__getstate__()
    if moments.mean is None:
        return np.array([0.0, state["_lost"]])
    head = [float(moments.count), state["_lost"]]
    return np.concatenate([head, moments.mean, moments.scatter.ravel()])


def _unpack(packed: NDArray[np.float64]) -> Moments:
    d = int(np.sqrt(len(packed) - 2))  # d + d * d entries, so the root rounds down to d
    if d == 0:
        return Moments()
    moments = Moments(int(packed[0]), packed[2 : d + 2].copy(), packed[d + 2 :].reshape(d, d).copy())
    moments._lost = float(packed[1])
    return moments
