"""Reading the folder of a harvest: read-only memory maps of its shards (numpy only)."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isogeom.gradients._dtypes import storage_dtype
from isogeom.gradients._fingerprint import differences
from isogeom.gradients._manifest import FORMAT, MANIFEST, SHARDS, Manifest, fault, folder_path
from isogeom.gradients._moment_files import open_moments
from isogeom.gradients._reduce import HarvestMoments
from isogeom.gradients._result import Harvest, SiteRows
from isogeom.gradients._sampling import META_DTYPE, row_keys, smallest
from isogeom.gradients._sharded import ShardedRows


def open_harvest(path: Any, *, verify: bool = True, allow_repeats: bool = False) -> Harvest | HarvestMoments:
    """Open what ``harvest(..., out=path)`` wrote; several folders are joined, as after a run on several processes.

    Parameters
    ----------
    path : str, path, or list of them
        Folder of a finished harvest. Rows of several folders follow each other, moments are merged; all folders must
        come from the same call but for their batches. Samples and batches are counted on from folder to folder, unless
        the batches brought ids. If they did, a sample (``sample_rate``, ``max_rows``) is what one process would have
        kept of all batches, in the order of the folders; otherwise, and for moments, every folder has its own sample of
        ``max_rows`` rows, and these are joined.
    verify : bool, default=True
        Read every shard once and compare its checksum; False compares sizes only.
    allow_repeats : bool, default=False
        Whether batches with equal contents may lie in several folders, as when a corpus holds a text twice: they then
        count as different samples. Ids that the batches brought must differ in any case.

    Returns
    -------
    Harvest or HarvestMoments
        Rows are :class:`ShardedRows`, read-only over the memory maps of the shards. Moments (``reduce="moments"``) are
        loaded.

    Raises
    ------
    FileNotFoundError
        If a folder holds no harvest.
    TypeError
        If an argument is not as described.
    ValueError
        If a harvest is unfinished or incomplete, a shard is missing, truncated or corrupt (it is named; run the same
        :func:`harvest` again to repair it), folders do not belong together, a folder is named twice, or two of them
        hold the same batch or sample, whose rows would count twice. Of moments only equal batches are seen.

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
    for name, value in (("verify", verify), ("allow_repeats", allow_repeats)):
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    single = isinstance(path, (str, bytes, os.PathLike)) or not isinstance(path, Iterable)
    wanted = "the folder of a harvest, or a list of them"
    folders = [folder_path(item, "path", wanted) for item in ([path] if single else path)]
    if not folders:
        raise ValueError("path is an empty list: name at least one folder of a harvest")
    _check_distinct(folders)
    manifests = [_finished(folder, verify) for folder in folders]
    first = manifests[0].header or {}
    for manifest in manifests[1:]:
        unequal = differences(first["fingerprint"], (manifest.header or {})["fingerprint"])
        if unequal:
            raise ValueError(f"{manifest.folder} does not belong to {folders[0]}: " + "; ".join(unequal))
    _check_ids(manifests)
    if not allow_repeats:
        _check_repeats(manifests)
    if first["fingerprint"]["reduce"] is not None:
        return functools.reduce(HarvestMoments.merge, map(open_moments, manifests))
    return join(manifests)


def _check_distinct(folders: list[Path]) -> None:
    seen: dict[Path, Path] = {}
    for folder in folders:
        same = seen.setdefault(folder.resolve(), folder)
        if same is not folder:
            again = "twice" if same == folder else f"again as {folder}"
            raise ValueError(f"path names {same} {again}: its rows would count twice")


def _check_ids(manifests: list[Manifest]) -> None:
    own = [bool((manifest.end or {}).get("own_ids")) for manifest in manifests]
    if len(set(own)) > 1:
        with_ids, without = manifests[own.index(True)].folder, manifests[own.index(False)].folder
        raise ValueError(
            f"the batches of {with_ids} brought a sample_id, those of {without} did not: counted samples and those of "
            "their own ids cannot be told apart. Harvest one of them again"
        )


def _check_repeats(manifests: list[Manifest]) -> None:
    seen: dict[str, tuple[Path, int]] = {}
    for manifest in manifests:
        batches = [batch for number in sorted(manifest.blocks) for batch in manifest.blocks[number]["batches"]]
        for number, batch in enumerate(batches):
            # Equal batches inside one folder are what its call was given.
            folder, other = seen.setdefault(batch["sha256"], (manifest.folder, number))
            if folder != manifest.folder:
                raise ValueError(
                    f"batch {number} of {manifest.folder} has the contents of batch {other} of {folder}: its rows "
                    "would count twice. If they are different samples that are equal, pass allow_repeats=True"
                )


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
    for record in manifest.files():
        wrong = fault(folder, record, checksum=verify)
        if wrong:
            raise ValueError(f"{wrong}; run the same call of harvest again to repair it")
    return manifest


def join(manifests: list[Manifest]) -> Harvest:
    """Return the rows that finished, checked manifests name."""
    header = manifests[0].header or {}
    meta, lengths = _meta(manifests)
    keep = _sample(manifests, meta)
    parts = None if keep is None else _split(keep, lengths)
    shards = [manifest.folder / SHARDS for manifest in manifests for _ in manifest.blocks]
    records = [manifest.blocks[number] for manifest in manifests for number in sorted(manifest.blocks)]
    files: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        for shard, name in zip(record["shards"], ["meta", *header["arrays"]], strict=True):
            files.setdefault(name, []).append(shard)
    arrays: dict[tuple[str, str], Any] = {}
    for name, (site, kind) in header["arrays"].items():
        paths = [folder / shard["file"] for folder, shard in zip(shards, files[name], strict=True)]
        stored, dtype = np.dtype(files[name][0]["dtype"]), header["fingerprint"]["dtype"]
        kind_of_number = dtype if stored == storage_dtype(dtype) else stored.name
        width = files[name][0]["shape"][1]
        kept = lengths if parts is None else list(map(len, parts))
        arrays[site, kind] = ShardedRows(paths, kept, width, kind_of_number, parts)
    ties = header.get("tied", {})
    sites = {
        name: SiteRows(
            name, arrays.get((name, "activations")), arrays.get((name, "gradients")), tuple(ties.get(name, ()))
        )
        for name in header["sites"]
    }
    losses = [batch["loss"] for record in records for batch in record["batches"]]
    meta = meta if keep is None else meta[keep]
    return Harvest(sites, meta.view(np.recarray), np.asarray(losses, dtype=np.float64))


def _sample(manifests: list[Manifest], meta: NDArray[Any]) -> NDArray[np.intp] | None:
    """Return which rows are in the sample of all folders, None if all are.

    The rows with the smallest keys of all are among those with the smallest keys of every folder.
    """
    mark = (manifests[0].header or {})["fingerprint"]
    own = bool((manifests[0].end or {}).get("own_ids"))
    if mark["max_rows"] is None or len(meta) <= mark["max_rows"] or not own:
        return None
    return smallest(row_keys(mark["seed"], meta["sample_id"], meta["position"]), mark["max_rows"])


def _split(keep: NDArray[np.intp], lengths: list[int]) -> list[NDArray[np.intp]]:
    """Return the rows of every shard."""
    ends = np.cumsum(lengths)
    cuts = np.searchsorted(keep, ends)
    return [part - begin for part, begin in zip(np.split(keep, cuts)[:-1], ends - lengths, strict=True)]


def _meta(manifests: list[Manifest]) -> tuple[NDArray[Any], list[int]]:
    """Join the meta of all blocks, and return their lengths; count samples and batches on from folder to folder."""
    parts, lengths = [np.empty(0, META_DTYPE)], []
    seen: list[tuple[Path, NDArray[np.int64]]] = []
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
            for folder, others in seen:
                both = np.intersect1d(others, ids)
                if len(both):
                    raise ValueError(
                        f"{manifest.folder} and {folder} both hold rows of sample {both[0]} ({len(both)} samples in "
                        "all): they would count twice. Give every process samples of its own"
                    )
            seen.append((manifest.folder, ids))
        else:
            meta["sample_id"] += n_samples
        n_samples += sum(batch["n_samples"] for block in blocks for batch in block["batches"])
        n_batches += sum(len(block["batches"]) for block in blocks)
        lengths += [block["n_rows"] for block in blocks]
        parts.append(meta)
    return np.concatenate(parts), lengths
