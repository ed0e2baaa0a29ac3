"""What makes two harvests the same: hashes of batches, parameters and callables."""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import isogeom

_CHUNK = 1 << 24  # bytes hashed at a time, so that a large tensor is not copied whole


def batch_digest(batch: Any) -> str:
    """Return the sha256 of the contents of a batch: tensors by their bytes, everything else by its repr."""
    digest = hashlib.sha256()
    _add(digest, batch)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        _add_tensor(digest, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(f"key {key!r}\n".encode())
            _add(digest, item)
    elif isinstance(value, (tuple, list)):
        digest.update(f"sequence {len(value)}\n".encode())
        for item in value:
            _add(digest, item)
    elif isinstance(value, (str, bytes, int, float, complex, bool, type(None))):
        digest.update(f"{value!r}\n".encode())
    else:
        # The repr of most other objects holds their address, which changes from run to run.
        digest.update(f"{type(value).__module__}.{type(value).__qualname__}\n".encode())


def _add_tensor(digest: Any, tensor: Tensor) -> None:
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.detach().reshape(-1)
    step = max(_CHUNK // max(flat.element_size(), 1), 1)
    for begin in range(0, flat.numel(), step):
        digest.update(flat[begin : begin + step].cpu().contiguous().view(torch.uint8).numpy().data)


def model_digest(model: nn.Module) -> str:
    """Return the sha256 of names, dtypes, shapes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            digest.update(f"{kind} {name}\n".encode())
            if tensor.device.type == "meta":
                raise ValueError(f"model: {kind} {name!r} is on the meta device and holds no numbers: load the model")
            _add_tensor(digest, tensor)
    return digest.hexdigest()


def describe(value: Any) -> Any:
    """Return a JSON value that names an option.

    Callables are named by themselves, by the hash of their code and of the plain values among their defaults and in
    their closure; anything else that they refer to is not seen.
    """
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if not callable(value):
        return value
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if isinstance(value, functools.partial):
        return f"partial of {describe(value.func)} {_plain([*value.args, *sorted(value.keywords.items())])}"
    code = getattr(value, "__code__", None)
    if code is None:
        return name
    digest = hashlib.sha256()
    _add_code(digest, code)
    cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if _is_filled(cell)]
    defaults = [
        *(getattr(value, "__defaults__", None) or ()),
        *sorted((getattr(value, "__kwdefaults__", None) or {}).items()),
    ]
    digest.update(_plain([*cells, None, *defaults]).encode())
    return f"{name} {digest.hexdigest()[:16]}"


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _plain(values: Any) -> str:
    """Return the repr of numbers, strings and sequences of them, and the type of everything else."""
    if isinstance(values, (list, tuple)):
        return f"[{', '.join(map(_plain, values))}]"
    if isinstance(values, (str, bytes, int, float, complex, bool, type(None))):
        return repr(values)
    return type(values).__qualname__


def _add_code(digest: Any, code: types.CodeType) -> None:
    digest.update(code.co_code)
    digest.update(repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _add_code(digest, constant)
        elif isinstance(constant, frozenset):
            # The order of a set of strings changes from process to process.
            digest.update(repr(sorted(map(repr, constant))).encode())
        else:
            digest.update(repr(constant).encode())


def fingerprint(model: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a store must have been made with: options, model and versions, as JSON values."""
    versions = {"isogeom": isogeom.__version__, "torch": torch.__version__}
    if any(type(module).__module__.startswith("transformers.") for module in model.modules()):
        versions["transformers"] = sys.modules["transformers"].__version__
    return {
        **{name: describe(value) for name, value in options.items()},
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "model_sha256": model_digest(model),
        **{f"version of {name}": version for name, version in versions.items()},
    }


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Say what differs between the fingerprint of a store and that of a call."""
    return [
        f"{name}: the store has {found.get(name)!r}, this call {wanted.get(name)!r}"
        for name in dict.fromkeys([*found, *wanted])
        if found.get(name) != wanted.get(name)
    ]
