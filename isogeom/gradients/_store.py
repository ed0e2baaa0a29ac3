"""Writing a harvest to a folder, block by block, so that it can be interrupted at any moment and resumed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isogeom._validation import warn_user
from isogeom.gradients._fingerprint import batch_digest, differences
from isogeom.gradients._manifest import FORMAT, MANIFEST, SHARDS, Manifest, fault, sync_folder, write_shard
from isogeom.gradients._reading import join
from isogeom.gradients._result import Ties
from isogeom.gradients._rowstore import RowStore
from isogeom.gradients._sampling import Rows, Selection, row_keys, smallest

_AGAIN = "use a new folder for another harvest, or run the call that made this one"


class DiskStore:
    """Collect rows into shards of `batches_per_shard` batches; finished blocks of an earlier run are kept.

    A block is on disk once its line stands in the manifest. Its shards depend on the batches alone, not on where a run
    was interrupted. With a row budget, shards hold candidates until the end, when those outside the sample are dropped.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: dict[str, Any],
        sites: list[str],
        kinds: list[str],
        ties: Ties | None = None,
    ) -> None:
        self.folder = folder
        self.budget: int | None = fingerprint["max_rows"]
        self.seed: int = fingerprint["seed"]
        self.step: int = fingerprint["batches_per_shard"]
        self.sites = sites
        names = {f"{i:02d}-{_slug(site)}.{kind}": [site, kind] for i, site in enumerate(sites) for kind in kinds}
        self.arrays: dict[str, list[str]] = names
        self.fingerprint = fingerprint
        self.ties = {site: list(names) for site, names in (ties or {}).items() if names}
        self._rows = RowStore(self.budget, fingerprint["dtype"])
        self._best = np.empty(0, np.uint64)  # smallest keys of the blocks so far, at most the budget
        self._batches: list[dict[str, Any]] = []  # of the block that is being harvested
        self._digest = ""
        self._n_batches = 0
        self._n_before = 0

    def open(self, stack: ExitStack) -> None:
        """Lock the folder until `stack` closes, and find out which blocks of an earlier run can be kept."""
        shards = self.folder / SHARDS
        file = next((p for p in (self.folder, *self.folder.parents) if p.exists() and not p.is_dir()), None)
        if file is not None:
            raise NotADirectoryError(f"out={str(self.folder)!r} cannot be a folder: {file} is a file; name another one")
        if self.folder.exists() and not (self.folder / MANIFEST).exists():
            # An empty folder of shards is what a run leaves that was stopped at its very start.
            foreign = [p for p in self.folder.iterdir() if p != shards or not p.is_dir() or any(p.iterdir())]
            if foreign:
                raise ValueError(
                    f"out={str(self.folder)!r} is not empty and holds no harvest: name a new or empty folder"
                )
        try:
            shards.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"out={str(self.folder)!r} could not be made ({error.strerror}): name a folder that you can write"
            raise OSError(error.errno, message) from error
        _lock(stack, self.folder)
        self.manifest = Manifest(self.folder)
        header = self.manifest.header
        if self.manifest.damaged == 1 and not self.manifest.torn:
            raise ValueError(
                f"line 1 of {self.manifest.path} is damaged, so what the folder holds is unknown: name another folder, "
                "or delete this one to start over"
            )
        if header is not None and header["format"] != FORMAT:
            raise ValueError(f"{self.folder} has format {header['format']}, this version writes {FORMAT}: {_AGAIN}")
        unequal = [] if header is None else differences(header["fingerprint"], self.fingerprint)
        whole = self.manifest.damaged is None or self.manifest.torn
        if unequal and whole and not self.manifest.blocks:
            # A first run that failed before any block was finished binds nobody.
            self.manifest.restart()
            header = None
        if header is None:
            self.manifest.append(
                {
                    "header": {
                        "format": FORMAT,
                        "sites": self.sites,
                        "arrays": self.arrays,
                        "fingerprint": self.fingerprint,
                        "tied": self.ties,
                    }
                }
            )
        elif unequal:
            raise ValueError(f"out={str(self.folder)!r} holds another harvest: {'; '.join(unequal)}. Please {_AGAIN}")
        if self.manifest.damaged and not self.manifest.torn:
            warn_user(
                f"line {self.manifest.damaged} of {self.manifest.path} is damaged: what follows is harvested again"
            )
        named = set(self.manifest.blocks)
        incomplete = self.manifest.end is not None and self.manifest.missing() is not None
        if incomplete and self.fingerprint["reduce"] is None:
            warn_user(f"{self.manifest.missing()}: what is missing is harvested again")
        self._drop_faulty()
        behind = self.manifest.damaged and not self.manifest.torn and self.manifest.end is not None
        if incomplete or behind or named != set(self.manifest.blocks):
            # Before anything changes: a repair that is interrupted must not be taken for a finished harvest. It also
            # drops damaged lines behind the end.
            self.manifest.append({"reopened": sorted(self.manifest.blocks)})
        self._drop_strays()

    def _drop_faulty(self) -> None:
        for number, block in list(self.manifest.blocks.items()):
            wrong = next(filter(None, (fault(self.folder, shard) for shard in block["shards"])), None)
            if wrong:
                warn_user(f"{wrong}; its batches are harvested again")
                del self.manifest.blocks[number]
        for block in self.manifest.blocks.values():
            for shard, (site, kind) in zip(block["shards"][1:], self.arrays.values(), strict=True):
                self._rows.widths[site, kind] = shard["shape"][1]
                self._rows.dtypes[site, kind] = np.dtype(shard["dtype"])

    def _named(self) -> set[str]:
        return {shard["file"] for shard in self.manifest.files()}

    def _drop_strays(self) -> None:
        """Delete what an interrupted run left and no line names."""
        named = self._named()
        for path in (self.folder / SHARDS).iterdir():
            if path.name not in named and re.fullmatch(r"\d{6,}\..*\.npy(\.tmp)?", path.name):
                path.unlink()

    # ------------------------------------------------------------------ batch by batch

    @property
    def n_rows(self) -> int:
        """Rows so far, at most the budget."""
        total = self._n_before + self._rows.n_rows
        return total if self.budget is None else min(total, self.budget)

    @property
    def threshold(self) -> np.uint64 | None:
        """Key that a row must stay below to have a place in the sample, None while there is room."""
        keys = [key for key in (self._rows.threshold, self._best_threshold()) if key is not None]
        return min(keys) if keys else None

    def _best_threshold(self) -> np.uint64 | None:
        return self._best.max() if self.budget is not None and len(self._best) >= self.budget else None

    def known(self, batch_id: int, batch: Any) -> float | None:
        """Return the loss of a batch whose block is on disk already, None if it has to run."""
        self._digest = batch_digest(batch)
        self._n_batches += 1
        block = self.manifest.blocks.get(batch_id // self.step)
        within = batch_id % self.step
        if block is None:
            ended = self._ended()
            if ended is not None and batch_id >= ended:
                raise self._other_batches(f"it ended after {ended} batches, but there are more now")
            return None
        if within >= len(block["batches"]):
            raise self._other_batches(f"it has no batch {batch_id}: its last one was batch {batch_id - 1}")
        record = block["batches"][within]
        if record["sha256"] != self._digest:
            raise self._other_batches(f"batch {batch_id} has other contents than when it was harvested")
        if within == 0:
            self._n_before += block["n_rows"]
            if self.budget is not None:
                self._remember(self._keys(block))
        return math.nan if record["loss"] is None else float(record["loss"])

    def _ended(self) -> int | None:
        """Return how many batches the harvest has, None while more may come."""
        return None if self.manifest.end is None else int(self.manifest.end["end"])

    def _other_batches(self, what: str) -> ValueError:
        return ValueError(
            f"batches differ from those of the harvest in out={str(self.folder)!r}: {what}. Please {_AGAIN}"
        )

    def add(self, selection: Selection, arrays: Rows, batch_id: int, n_samples: int, loss: float) -> None:
        """Add the rows of one batch; the last batch of a block writes its shards."""
        self._rows.add(selection, arrays, batch_id, n_samples, loss)
        self._note(n_samples, loss)
        if (batch_id + 1) % self.step == 0:
            self._flush(batch_id // self.step)

    def _note(self, n_samples: int, loss: float) -> None:
        # JSON knows no NaN, which stands for a batch without a loss.
        self._batches.append(
            {"sha256": self._digest, "n_samples": n_samples, "loss": None if math.isnan(loss) else loss}
        )

    def _flush(self, number: int) -> None:
        keys, meta, rows = self._rows.drain()
        # Within the block the sample was drawn from its own rows; the blocks before leave less room.
        bound = self._best_threshold()
        if bound is not None:
            stay = keys < bound
            keys, meta, rows = keys[stay], meta[stay], {key: part[stay] for key, part in rows.items()}
        tag = "" if self.budget is None else ".candidates"
        self._write(number, tag, self._batches, meta, rows)
        self._n_before += len(meta)
        self._remember(keys)
        self._batches = []

    def _write(self, number: int, tag: str, batches: list[dict[str, Any]], meta: NDArray[Any], rows: Rows) -> None:
        """Write the shards of a block, then the line that makes them count."""
        shards = [write_shard(self.folder, f"{number:06d}.meta{tag}.npy", meta)]
        for name, (site, kind) in self.arrays.items():
            shards.append(write_shard(self.folder, f"{number:06d}.{name}{tag}.npy", rows[site, kind]))
        sync_folder(self.folder / SHARDS)
        self.manifest.append(
            {"block": number, "sampled": not tag, "batches": batches, "n_rows": len(meta), "shards": shards}
        )

    def _remember(self, keys: NDArray[np.uint64]) -> None:
        if self.budget is not None:
            self._best = np.concatenate([self._best, keys])
            self._best = self._best[smallest(self._best, self.budget)]

    def _keys(self, block: dict[str, Any]) -> NDArray[np.uint64]:
        meta = np.load(self.folder / SHARDS / block["shards"][0]["file"], allow_pickle=False)
        return row_keys(self.seed, meta["sample_id"], meta["position"])

    # ------------------------------------------------------------------ the end

    def finish(self, _names: list[str], losses: list[float], *, own_ids: bool = False, **_ties: Any) -> Any:
        """Write the last block, drop the rows outside the sample, end the manifest and open what is there."""
        if self._batches:
            self._flush((self._n_batches - 1) // self.step)
        held = self.manifest.n_batches
        if held != self._n_batches:
            raise self._other_batches(f"it holds {held} batches, but there are only {self._n_batches} now")
        if self.budget is not None:
            self._drop_outside()
        if self.manifest.end is None:
            self.manifest.append({"end": len(losses), "own_ids": own_ids})
        return self._result(losses)

    def _result(self, _losses: list[float]) -> Any:
        return join([self.manifest])

    def _drop_outside(self) -> None:
        for block, files, meta, rows in self._kept():
            self._write(block["block"], "", block["batches"], meta, rows)
            for file in files:
                file.unlink()

    def _kept(self) -> Iterator[tuple[dict[str, Any], list[Path], NDArray[Any], Rows]]:
        """Go through the blocks of candidates: the block, its files, and the meta and rows of the sample."""
        for number in sorted(self.manifest.blocks):
            block = self.manifest.blocks[number]
            if block["sampled"]:
                continue
            stay = self._keys(block) <= self._best.max(initial=0)
            files = [self.folder / SHARDS / shard["file"] for shard in block["shards"]]
            meta, *parts = (np.load(file, mmap_mode="r", allow_pickle=False)[stay] for file in files)
            rows = {(site, kind): part for (site, kind), part in zip(self.arrays.values(), parts, strict=True)}
            yield block, files, meta, rows


def _slug(site: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", site).strip("-.")[:80] or "model"


def _lock(stack: ExitStack, folder: Path) -> None:
    """Refuse a second writer; the system drops the lock when the process ends, however it ends."""
    if os.name != "posix":
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    stack.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RuntimeError(
            f"out={str(folder)!r} is being written by another process: wait for it, or give each process its own folder"
        ) from error
    except OSError:
        # Some network file systems have no locks.
        return
