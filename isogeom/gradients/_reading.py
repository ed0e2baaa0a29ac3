"""Reading the folder of a harvest: read-only memory maps of its shards (numpy only)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isogeom.gradients._fingerprint import differences
from isogeom.gradients._manifest import FORMAT, MANIFEST, SHARDS, Manifest, fault
from isogeom.gradients._result import Harvest, SiteRows
from isogeom.gradients._rowstore import decode, storage_dtype
from isogeom.gradients._sampling import META_DTYPE


class ShardedRows:
    """Rows that lie in several files, read as one array of shape (n_rows, d); nothing is loaded before it is asked for.

    ``len``, ``shape``, ``dtype``, indexing by a slice, integers or a boolean mask, and :func:`numpy.asarray` work. A
    slice inside one shard is a view of its memory map; everything else is a copy in memory.

    Parameters
    ----------
    paths : sequence of path
        The ``.npy`` files, in order.
    lengths : sequence of int
        Rows of each.
    width : int
        Number of features.
    dtype : {"float32", "float16", "bfloat16"}, default="float32"
        Kind of numbers in the files; the 16 bits of bfloat16 are read as float32.

    Attributes
    ----------
    bounds : list of int
        Where each shard ends.

    Examples
    --------
    >>> import numpy as np, tempfile, pathlib
    >>> from isogeom.gradients import ShardedRows
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for i in range(2):
    ...     np.save(folder / f"{i}.npy", np.full((3, 2), i, dtype=np.float32))
    >>> rows = ShardedRows([folder / "0.npy", folder / "1.npy"], [3, 3], 2)
    >>> rows.shape, rows[[0, 5]].tolist()
    ((6, 2), [[0.0, 0.0], [1.0, 1.0]])
    """

    ndim = 2

    def __init__(
        self, paths: Sequence[str | os.PathLike[str]], lengths: Sequence[int], width: int, dtype: str = "float32"
    ) -> None:
        self._paths = [Path(path).absolute() for path in paths]  # opened late, maybe in another working directory
        self._kind = dtype
        self._maps: dict[int, NDArray[Any]] = {}
        self.bounds = np.cumsum(lengths).tolist() if len(lengths) else []
        self.shape = (self.bounds[-1] if self.bounds else 0, width)
        self.dtype = np.dtype("float32" if dtype == "bfloat16" else dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"ShardedRows(shape={self.shape}, dtype={self.dtype}, {len(self.bounds)} shards)"

    def shard(self, i: int) -> NDArray[Any]:
        """Return the read-only memory map of one shard (a copy in float32 for bfloat16).

        Parameters
        ----------
        i : int
            Number of the shard, from 0.

        Returns
        -------
        ndarray of shape (n_rows_of_shard, d)
            Its rows.
        """
        if i not in self._maps:
            self._maps[i] = np.load(self._paths[i], mmap_mode="r", allow_pickle=False)
        return decode(self._maps[i], self._kind)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            rows, *columns = index
            found = self[rows]
            return found[tuple(columns)] if isinstance(rows, (int, np.integer)) else found[(slice(None), *columns)]
        if isinstance(index, (int, np.integer)):
            return self[np.array([range(len(self))[index]])][0]
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1 and stop > start:
                first = int(np.searchsorted(self.bounds, start, side="right"))
                begin = self.bounds[first] - self._length(first)
                if stop <= self.bounds[first]:
                    return self.shard(first)[start - begin : stop - begin]
            index = np.arange(start, stop, step)
        index = np.asarray(index)
        if index.dtype == bool:
            if index.shape != (len(self),):
                raise IndexError(f"a boolean index must have shape ({len(self)},), got {index.shape}")
            index = np.flatnonzero(index)
        return self._gather(index.astype(np.intp) if index.size == 0 else index)

    def _length(self, i: int) -> int:
        return self.bounds[i] - (self.bounds[i - 1] if i else 0)

    def _gather(self, index: NDArray[Any]) -> NDArray[Any]:
        if index.ndim != 1 or index.dtype.kind not in "iu":
            raise IndexError(f"rows are chosen by a slice, integers or a boolean mask, got {index.dtype} {index.shape}")
        index = np.where(index < 0, index + len(self), index)
        if len(index) and (index.min() < 0 or index.max() >= len(self)):
            raise IndexError(f"a row index is outside 0 to {len(self) - 1}")
        result = np.empty((len(index), self.shape[1]), dtype=self.dtype)
        shards = np.searchsorted(self.bounds, index, side="right")
        for i in np.unique(shards):
            here = shards == i
            result[here] = self.shard(int(i))[index[here] - (self.bounds[i] - self._length(i))]
        return result

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("the rows lie in several files: an array of all of them is a copy")
        return self[np.arange(len(self))].astype(dtype or self.dtype, copy=False)


def open_harvest(path: Any, *, verify: bool = True) -> Harvest:
    """Open what ``harvest(..., out=path)`` wrote; several folders are joined, as after a run on several processes.

    Parameters
    ----------
    path : str, path, or list of them
        Folder of a finished harvest. Rows of several folders follow each other; all must come from the same call but
        for their batches. Samples and batches are counted on from folder to folder, unless the batches brought ids.
        After ``max_rows`` each folder holds a sample of its own batches; ``sample_rate`` gives one sample of all.
    verify : bool, default=True
        Read every shard once and compare its checksum; False compares sizes only.

    Returns
    -------
    Harvest
        Rows are read-only memory maps, one per site and kind, or :class:`ShardedRows` over those of several shards.

    Raises
    ------
    FileNotFoundError
        If a folder holds no harvest.
    ValueError
        If a harvest is unfinished or incomplete, a shard is missing, truncated or corrupt (it is named; run the same
        :func:`harvest` again to repair it), folders do not belong together, or two of them hold the same sample.

    Examples
    --------
    >>> import tempfile, torch
    >>> from isogeom.gradients import harvest
    >>> from isogeom.gradients import open_harvest
    >>> model, batches = torch.nn.Linear(3, 2), [torch.ones(4, 3), torch.ones(2, 3)]
    >>> folder = tempfile.mkdtemp()
    >>> h = harvest(model, batches, [":out"], loss=lambda m, x: m(x).sum(), out=folder)
    >>> open_harvest(folder)
    Harvest(6 rows, 1 site, 2 batches)
      :out  activations (6, 2), gradients (6, 2)
    """
    single = isinstance(path, (str, os.PathLike)) or not isinstance(path, Iterable)
    folders = [Path(item).expanduser().absolute() for item in ([path] if single else path)]
    if not folders:
        raise ValueError("path is an empty list: name at least one folder of a harvest")
    manifests = [_finished(folder, verify) for folder in folders]
    first = manifests[0].header or {}
    for manifest in manifests[1:]:
        unequal = differences(first["fingerprint"], (manifest.header or {})["fingerprint"])
        if unequal:
            raise ValueError(f"{manifest.folder} does not belong to {folders[0]}: " + "; ".join(unequal))
    return join(manifests)


def _finished(folder: Path, verify: bool) -> Manifest:
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{folder} holds no harvest: there is no {MANIFEST} in it")
    manifest = Manifest(folder)
    if manifest.header is not None and manifest.header["format"] != FORMAT:
        raise ValueError(f"{folder} has format {manifest.header['format']}, this version reads {FORMAT}")
    if manifest.header is None or manifest.end is None:
        damage = f"line {manifest.damaged} of its manifest is damaged" if manifest.damaged else "it was interrupted"
        raise ValueError(f"the harvest in {folder} is unfinished ({damage}): run the same call of harvest again")
    missing = manifest.missing()
    if missing:
        raise ValueError(f"the harvest in {folder} is incomplete ({missing}): run the same call of harvest again")
    if manifest.header["fingerprint"]["reduce"] is not None:
        raise ValueError(f"{folder} holds reduced moments, no rows: run the same call of harvest to get them")
    for record in manifest.files():
        wrong = fault(folder, record, checksum=verify)
        if wrong:
            raise ValueError(f"{wrong}; run the same call of harvest again to repair it")
    return manifest


def join(manifests: list[Manifest]) -> Harvest:
    """Return the rows that finished, checked manifests name."""
    header = manifests[0].header or {}
    shards = [manifest.folder / SHARDS for manifest in manifests for _ in manifest.blocks]
    records = [manifest.blocks[number] for manifest in manifests for number in sorted(manifest.blocks)]
    files: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        for shard, name in zip(record["shards"], ["meta", *header["arrays"]], strict=True):
            files.setdefault(name, []).append(shard)
    arrays: dict[tuple[str, str], Any] = {}
    for name, (site, kind) in header["arrays"].items():
        paths = [folder / shard["file"] for folder, shard in zip(shards, files[name], strict=True)]
        lengths = [shard["shape"][0] for shard in files[name]]
        rows = ShardedRows(paths, lengths, files[name][0]["shape"][1], header["fingerprint"]["dtype"])
        whole = len(paths) == 1 and rows.dtype == storage_dtype(header["fingerprint"]["dtype"])
        arrays[site, kind] = rows.shard(0) if whole else rows
    sites = {
        name: SiteRows(name, arrays.get((name, "activations")), arrays.get((name, "gradients")))
        for name in header["sites"]
    }
    losses = [batch["loss"] for record in records for batch in record["batches"]]
    return Harvest(sites, _meta(manifests), np.asarray(losses, dtype=np.float64))


def _meta(manifests: list[Manifest]) -> Any:
    """Join the meta of all blocks; count samples and batches on from folder to folder."""
    parts, seen = [np.empty(0, META_DTYPE)], np.empty(0, np.int64)
    n_samples = n_batches = 0
    for manifest in manifests:
        blocks = [manifest.blocks[number] for number in sorted(manifest.blocks)]
        own = bool((manifest.end or {}).get("own_ids"))
        meta = np.concatenate(
            [np.load(manifest.folder / SHARDS / block["shards"][0]["file"], allow_pickle=False) for block in blocks]
        )
        meta["batch_id"] += n_batches
        if own:
            ids = np.unique(meta["sample_id"])
            both = np.intersect1d(seen, ids)
            if len(both):
                raise ValueError(f"{manifest.folder} holds sample {both[0]}, which a folder before it holds as well")
            seen = np.union1d(seen, ids)
        else:
            meta["sample_id"] += n_samples
        n_samples += sum(batch["n_samples"] for block in blocks for batch in block["batches"])
        n_batches += sum(len(block["batches"]) for block in blocks)
        parts.append(meta)
    return np.concatenate(parts).view(np.recarray)
