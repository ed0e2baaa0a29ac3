"""Finding the tensor of a site inside nested inputs and outputs."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from isogeom.gradients._sites import Site

Path = tuple[Any, ...]


def _items(obj: Any) -> list[tuple[Any, Any]]:
    if isinstance(obj, Mapping):
        return list(obj.items())
    if isinstance(obj, (tuple, list)):
        return list(enumerate(obj))
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return [(field.name, getattr(obj, field.name)) for field in dataclasses.fields(obj)]
    return []


def tensors(obj: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield every tensor in nested tuples, lists, mappings and dataclasses, with its path."""
    if isinstance(obj, Tensor):
        yield path, obj
    for key, value in _items(obj):
        yield from tensors(value, (*path, key))


def replace(obj: Any, path: Path, value: Any) -> Any:
    """Return `obj` with the item at `path` replaced; containers on the way are copied, their types kept."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(obj, Mapping):
        new: Any = copy.copy(obj)
        new[key] = replace(obj[key], rest, value)
        return new
    if isinstance(obj, (tuple, list)):
        items = list(obj)
        items[key] = replace(items[key], rest, value)
        return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
    new = copy.copy(obj)
    object.__setattr__(new, key, replace(getattr(obj, key), rest, value))
    return new


def _follow(obj: Any, selectors: tuple[str, ...], site: Site) -> tuple[Path, Any]:
    path: Path = ()
    for selector in selectors:
        items = dict(_items(obj))
        key: Any = selector
        if key not in items and re.fullmatch(r"-?\d+", selector):
            key = int(selector)
            if key not in items and -len(items) <= key < len(items):
                key = list(items)[key]  # the first item of a mapping or a dataclass, the last of a tuple
        if key not in items:
            has = f"items {list(items)}" if items else f"no items, it is a {type(obj).__name__}"
            raise ValueError(f"site {site.name!r}: there is no item [{selector}]; the value has {has}")
        path, obj = (*path, key), items[key]
    return path, obj


def _input_path(site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Path, Any]:
    """Find the argument that the first selector names, by position or by name, however the caller passed it."""
    names = list(inspect.signature(site.module.forward).parameters)
    first = site.selectors[0]
    index = int(first) if first.isdigit() else names.index(first) if first in names else len(args)
    name = names[index] if first.isdigit() and index < len(names) else first
    if name in kwargs:
        start: Path = (1, name)
    elif index < len(args):
        start = (0, index)
    else:
        raise ValueError(
            f"site {site.name!r}: there is no input [{first}]; the inputs of {type(site.module).__name__} are {names}, "
            f"and it was called with {len(args)} of them by position and {list(kwargs)} by name"
        )
    path, value = _follow((args, kwargs)[start[0]][start[1]], site.selectors[1:], site)
    return start + path, value


def locate(site: Site, kind: str, tree: Any, n_samples: int) -> tuple[Tensor, list[Path]]:
    """Find the tensor of a site in (args, kwargs) or in an output, and every place where it stands."""
    if not site.selectors:
        start, value = (), tree
    else:
        start, value = _input_path(site, *tree) if kind == "in" else _follow(tree, site.selectors, site)
    every = [(start + path, tensor) for path, tensor in tensors(value)]
    packed = [path for path, t in every if t.is_nested]
    every = [(path, t) for path, t in every if not t.is_nested]
    fit = [(path, t) for path, t in every if t.is_floating_point() and t.ndim in (2, 3) and t.shape[0] == n_samples]
    if kind == "in":
        fit = _principal(fit)
    if len({id(tensor) for _, tensor in fit}) != 1:
        seen = "; ".join(f"{_spell(path, kind)} {tuple(t.shape)} {t.dtype}" for path, t in fit or every)
        found = f"several fit, choose one by its suffix: {seen}" if fit else f"none fits: {seen or 'no tensor at all'}"
        found += "" if fit else _hint([tuple(t.shape) for _, t in every if t.is_floating_point()], n_samples)
        if packed:
            found += f". {_spell(packed[0], kind)} is a nested tensor, which has no shape (batch, seq, d): pad it"
        raise ValueError(
            f"site {site.name!r} needs one floating tensor of shape (batch, seq, d) or (batch, d), with "
            f"batch={n_samples}; {found}"
        )
    tensor = fit[0][1]
    if site.maps is not None and tensor.ndim == 3:
        raise ValueError(
            f"site {site.name!r} has maps of shape (batch, channels, length) = {tuple(tensor.shape)}, as {site.maps} "
            "makes them, which have no rows of features: name the layer that pools or flattens them, or a module that "
            "returns them transposed, (batch, length, channels)"
        )
    return tensor, [path for path, other in tensors(tree) if other is tensor]


def _hint(shapes: list[tuple[int, ...]], n_samples: int) -> str:
    """Say what tensors that do not fit may be, and which site to name instead."""
    if any(len(shape) > 3 for shape in shapes):
        return ". Maps of shape (batch, channels, ...) have no rows: name the layer that pools or flattens them"
    if n_samples > 1 and any(len(shape) in (2, 3) and shape[0] == 1 for shape in shapes):
        return ". A batch of 1 stands for all samples (positions, for instance): name a module behind it"
    if any(len(shape) == 2 and shape[0] > n_samples and shape[0] % n_samples == 0 for shape in shapes):
        return ". Rows of all samples may have been joined, (batch * seq, d): name a module around this one"
    return ""


def _principal(fit: list[tuple[Path, Tensor]]) -> list[tuple[Path, Tensor]]:
    """Drop the inputs that only accompany others: those inside containers, and one number per token."""
    # Blocks of language models get rotary embeddings as a pair, and masks or scales of shape (batch, seq[, 1]).
    depth = min((len(path) for path, _ in fit), default=0)
    plain = [(path, t) for path, t in fit if len(path) == depth]
    grids = {tuple(t.shape[:2]) for _, t in plain if t.ndim == 3 and t.shape[2] > 1}
    return [(path, t) for path, t in plain if tuple(t.shape) not in grids | {(*g, 1) for g in grids}]


def _spell(path: Path, kind: str) -> str:
    return f":{kind}" + "".join(f"[{key}]" for key in (path[1:] if kind == "in" else path))
