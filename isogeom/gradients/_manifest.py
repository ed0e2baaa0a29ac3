"""The folder of a harvest: shards with checksums, and the append-only manifest that says which of them to believe."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MANIFEST = "manifest.jsonl"
SHARDS = "shards"
FORMAT = 1
_CHUNK = 1 << 22


def folder_path(value: Any, name: str, wanted: str) -> Path:
    """Return the absolute path of a folder, or raise an error that names the parameter and what is wanted."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{name} must be {wanted}, got {value!r}")
    try:
        # Absolute: shards are opened when they are read, maybe in another working directory.
        return Path(value).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{name}={os.fspath(value)!r} names a home folder that is not known here") from error


class Manifest:
    """The lines of a manifest, each with a checksum of its own.

    The first line is the header (fingerprint), then comes one line per finished block (a later line for the same block
    replaces the earlier one), then one that ends the harvest. A repair starts with a line that reopens the harvest: it
    takes back the end and names the blocks that are still good. A line is written after the shards it names are on
    disk, so whatever a crash leaves behind without a line is not believed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / MANIFEST
        self.header: dict[str, Any] | None = None
        self.blocks: dict[int, dict[str, Any]] = {}
        self.end: dict[str, Any] | None = None
        self.valid_bytes = 0
        self.damaged: int | None = None  # number of the first line that is not whole
        self.torn = False  # the damage is at the very end: what an interrupted write leaves
        if self.path.is_file():
            self._read(self.path.read_bytes())

    def _read(self, content: bytes) -> None:
        lines = content.split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            entry = _parse(line)
            if entry is None or (number == 1) != ("header" in entry):
                self.damaged, self.torn = number, False
                return
            self._apply(entry)
            self.valid_bytes += len(line) + 1
        if lines[-1]:
            self.damaged, self.torn = len(lines), True

    def _apply(self, entry: dict[str, Any]) -> None:
        if "header" in entry:
            self.header = entry["header"]
        elif "block" in entry:
            self.blocks[entry["block"]] = entry
        elif "reopened" in entry:
            self.end = None
            self.blocks = {number: self.blocks[number] for number in entry["reopened"] if number in self.blocks}
        else:
            self.end = entry

    @property
    def n_batches(self) -> int:
        """Batches of the blocks that have a line."""
        return sum(len(block["batches"]) for block in self.blocks.values())

    @property
    def reduced(self) -> bool:
        """Whether the last block holds the moments of all rows, those of the blocks before it included."""
        moments = self.header is not None and self.header["fingerprint"]["reduce"] is not None
        return moments and bool(self.blocks) and bool(self.blocks[max(self.blocks)]["sampled"])

    def missing(self) -> str | None:
        """Return which block or batches have no line though later ones have, None if all is there."""
        absent = sorted(set(range(max(self.blocks, default=-1))) - self.blocks.keys())
        if absent:
            return f"{self.path} names no block {absent[0]}, but later ones"
        if self.end is not None and self.n_batches != self.end["end"]:
            return f"{self.path} names blocks of {self.n_batches} batches, but the harvest had {self.end['end']}"
        candidates = [number for number in sorted(self.blocks) if not self.blocks[number]["sampled"]]
        if self.end is not None and candidates and not self.reduced:
            return f"{self.path} names only the candidates of block {candidates[0]}, not its sample"
        return None

    def restart(self) -> None:
        """Forget all lines: the next one that is appended becomes the first."""
        self.header = self.end = self.damaged = None
        self.blocks, self.valid_bytes, self.torn = {}, 0, False

    def append(self, entry: dict[str, Any]) -> None:
        """Write a line and wait until it is on disk; on failure the file is as before."""
        body = _dump(entry)
        line = f'{body[:-1]},"check":"{_check(body)}"}}\n'.encode()
        try:
            with self.path.open("r+b" if self.path.exists() else "xb") as file:
                file.seek(self.valid_bytes)
                try:
                    file.write(line)
                    file.truncate()
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    # A buffer that could not be written is written again on closing: cut what it leaves.
                    with contextlib.suppress(OSError):
                        file.close()
                    os.truncate(self.path, self.valid_bytes)
                    raise
        except OSError as error:
            raise _disk_error(error, self.path) from error
        self.valid_bytes += len(line)
        sync_folder(self.folder)
        self._apply(entry)

    def files(self) -> Iterator[dict[str, Any]]:
        """Yield the record of every shard that counts."""
        for number in sorted(self.blocks)[-1 if self.reduced else 0 :]:
            yield from self.blocks[number]["shards"]


def _dump(entry: dict[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":"), allow_nan=False)


def _check(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        check = entry.pop("check")
        return entry if check == _check(_dump(entry)) else None
    except (ValueError, KeyError, AttributeError, TypeError):
        return None


def sync_folder(folder: Path) -> None:
    """Wait until renames inside a folder are on disk, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_shard(folder: Path, name: str, array: NDArray[Any]) -> dict[str, Any]:
    """Write an array as ``shards/name`` so that the file is either whole or absent; return its record."""
    path = folder / SHARDS / name
    temporary = path.with_name(name + ".tmp")
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(array))
    pieces = [memoryview(head.getvalue()), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data]
    digest = hashlib.sha256()
    try:
        with temporary.open("wb", buffering=0) as file:
            for piece in pieces:
                digest.update(piece)
                written = 0
                while written < len(piece):  # a raw write may take less than it is given
                    written += file.write(piece[written : written + _CHUNK])
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _disk_error(error, path) from error
    return {
        "file": name,
        "bytes": sum(map(len, pieces)),
        "sha256": digest.hexdigest(),
        "dtype": np.lib.format.dtype_to_descr(array.dtype),
        "shape": list(array.shape),
    }


def fault(folder: Path, record: dict[str, Any], *, checksum: bool = True) -> str | None:
    """Return what is wrong with a shard, None if nothing is."""
    path = folder / SHARDS / record["file"]
    if not path.is_file():
        return f"shard {path} is missing"
    size = path.stat().st_size
    if size != record["bytes"]:
        return f"shard {path} is truncated or overwritten: {size} bytes instead of {record['bytes']}"
    if checksum:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
                return f"shard {path} is corrupt: its sha256 is not that of the manifest"
    return None


def _disk_error(error: OSError, path: Path) -> OSError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = (
            f"the disk is full, {path} could not be written: the blocks finished before it are safe. Free some space "
            "and run the same call again to continue"
        )
    else:
        message = f"{path} could not be written ({error.strerror}): run the same call again to continue"
    return OSError(error.errno, message)
