"""One named matrix of a model, wherever it is stored, read by blocks of rows."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class StoredMatrices:
    """The tensors of a state, by name; those of a file are read only when asked for, and only the rows asked for."""

    def __init__(self, state: Any, argument: str) -> None:
        self.argument = argument
        self.config: dict[str, Any] = {}
        if isinstance(state, nn.Module):
            state = state.state_dict()
        if isinstance(state, Mapping):
            self._tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            self.shapes = {name: tuple(value.shape) for name, value in self._tensors.items()}
            self._files: dict[str, Path] | None = None
            if state and not self._tensors:
                held = ", ".join(f"{name!r} ({type(value).__name__})" for name, value in list(state.items())[:5])
                raise TypeError(
                    f"{argument} is a mapping without a tensor, it holds {held}: pass the state_dict itself, or "
                    "tensors (torch.as_tensor)"
                )
        elif isinstance(state, (str, os.PathLike)):
            self._open(Path(state))
        else:
            raise TypeError(
                f"{argument} must be a module, a mapping of names to tensors, or the path of a .safetensors file or of "
                f"a folder with one, got {type(state).__name__}"
            )

    def _open(self, path: Path) -> None:
        files = _files(path, self.argument)
        folder = path if path.is_dir() else path.parent
        if (folder / "config.json").is_file():
            self.config = _read_json(folder / "config.json", self.argument)
        self._files, self.shapes = {}, {}
        for file in files:
            with _open_file(file, self.argument) as reader:
                for name in reader.keys():  # noqa: SIM118 (no mapping: it has no other way to list its names)
                    self._files[name] = file
                    self.shapes[name] = tuple(reader.get_slice(name).get_shape())

    def check(self, name: str) -> tuple[int, int]:
        """Return the shape of a matrix, or say which there are."""
        shape = self.shapes.get(name)
        if shape is None:
            matrices = [key for key, size in self.shapes.items() if len(size) == 2]
            close = difflib.get_close_matches(name, matrices, n=5, cutoff=0.4)
            tables = [key for key in matrices if any(part in key.lower() for part in ("emb", "wte", "token"))]
            shown = list(dict.fromkeys([*close, *tables]))[:8] or matrices[:8]
            listed = ", ".join(map(repr, shown)) or "none"
            raise ValueError(f"name={name!r} is not in {self.argument}; matrices there: {listed}")
        if len(shape) != 2:
            raise ValueError(f"name={name!r} has shape {shape} in {self.argument}; it must be a matrix (tokens, width)")
        return shape

    def blocks(self, name: str, starts: range, stop: int) -> Iterator[Tensor]:
        """Yield the rows of a matrix from each of `starts` on, up to the next one, in float64 on the host."""
        if self._files is None:
            matrix = self._tensors[name].detach()
            for start in starts:
                yield matrix[start : min(start + starts.step, stop)].to("cpu", torch.float64)
            return
        with _reader()(self._files[name], framework="pt") as reader:
            view = reader.get_slice(name)
            for start in starts:
                yield view[start : min(start + starts.step, stop)].to(torch.float64)

    def rounding(self, name: str) -> float:
        """Return the relative rounding error of the stored numbers."""
        if self._files is None:
            dtype = self._tensors[name].dtype
        else:
            with _reader()(self._files[name], framework="pt") as reader:
                dtype = reader.get_slice(name)[:1].dtype
        if not dtype.is_floating_point:
            raise TypeError(f"{name!r} is {dtype} in {self.argument}; dequantise it first")
        return float(torch.finfo(dtype).eps)

    def is_tied(self, name: str, n_rows: int, block: int) -> bool | None:
        """Tell whether another matrix of the same shape holds the same numbers; None if nothing tells."""
        twins = [other for other, shape in self.shapes.items() if other != name and shape == self.shapes[name]]
        for other in twins:
            pairs = zip(*(self.blocks(key, range(0, n_rows, block), n_rows) for key in (name, other)), strict=True)
            if all(torch.equal(one, two) for one, two in pairs):
                return True
        if twins:
            return False
        # A file keeps a tied matrix once, so the missing head may be this one: the configuration knows.
        declared = self.config.get("tie_word_embeddings")
        return declared if isinstance(declared, bool) else None


def _files(path: Path, argument: str) -> list[Path]:
    """Return the safetensors files behind a path."""
    if path.is_dir():
        if (path / _INDEX).is_file():
            found = [path / file for file in sorted(set(_read_json(path / _INDEX, argument)["weight_map"].values()))]
            absent = [file.name for file in found if not file.is_file()]
            if absent:
                raise FileNotFoundError(
                    f"{argument}={str(path)!r} is incomplete: {_INDEX} names {absent[0]}, which is not there; fetch it"
                )
            return found
        found = [path / _SINGLE] if (path / _SINGLE).is_file() else sorted(path.glob("*.safetensors"))
        if len(found) == 1:
            return found
        raise ValueError(f"{argument}={str(path)!r} holds {len(found)} .safetensors files and no index: name one file")
    if not path.is_file():
        raise FileNotFoundError(f"{argument}={str(path)!r} does not exist")
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{argument}={str(path)!r} is no .safetensors file; load it yourself (torch.load(..., weights_only=True)) "
            "and pass the mapping"
        )
    return [path]


def _read_json(path: Path, argument: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{argument}: {path} is damaged ({error}); fetch the checkpoint again") from error
    return content


def _open_file(path: Path, argument: str) -> Any:
    opener = _reader()
    from safetensors import SafetensorError

    try:
        return opener(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{argument}: {path} is damaged ({error}); fetch the checkpoint again") from error


def _reader() -> Callable[..., Any]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError("reading .safetensors files needs safetensors: pip install 'isogeom[hf]'") from error
    opener: Callable[..., Any] = safe_open
    return opener
