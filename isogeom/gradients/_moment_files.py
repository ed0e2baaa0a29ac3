"""Moments as shards: one file of count, mean and scatter per site and kind, one of the cross product (numpy only)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isogeom._moments import Moments
from isogeom.gradients._manifest import SHARDS, Manifest, write_shard
from isogeom.gradients._reduce import HarvestMoments, MomentStore


def write_moments(manifest: Manifest, number: int, store: MomentStore) -> list[dict[str, Any]]:
    """Write the moments of all sites as shards of block `number`; return their records."""
    shards = []
    for name, (site, kind) in (manifest.header or {})["arrays"].items():
        moments = store.moments.get((site, kind), Moments())
        shards.append(write_shard(manifest.folder, f"{number:06d}.{name}.moments.npy", _pack(moments)))
        if kind == "activations" and site in store.cross:
            shards.append(write_shard(manifest.folder, f"{number:06d}.{name}.cross.npy", store.cross[site]))
    return shards


def read_moments(manifest: Manifest) -> MomentStore:
    """Return the moments that the last block names: those of all batches."""
    block = manifest.blocks[max(manifest.blocks)]
    files = {shard["file"]: manifest.folder / SHARDS / shard["file"] for shard in block["shards"]}
    store = MomentStore()
    for name, (site, kind) in (manifest.header or {})["arrays"].items():
        moments = _unpack(np.load(files[f"{block['block']:06d}.{name}.moments.npy"], allow_pickle=False))
        if moments.count:
            store.moments[site, kind] = moments
            store.widths[site, kind] = int(moments.mean.shape[0])
        cross = files.get(f"{block['block']:06d}.{name}.cross.npy")
        if cross is not None:
            store.cross[site] = np.load(cross, allow_pickle=False)
    store.n_rows = block["n_rows"]
    return store


def open_moments(manifest: Manifest) -> HarvestMoments:
    """Return what the harvest of a finished, checked manifest returned."""
    losses = [batch["loss"] for number in sorted(manifest.blocks) for batch in manifest.blocks[number]["batches"]]
    header = manifest.header or {}
    filled = [np.nan if loss is None else loss for loss in losses]
    return read_moments(manifest).finish(header["sites"], filled, ties=header.get("tied", {}))


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
