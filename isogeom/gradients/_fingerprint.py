"""What makes two harvests the same: hashes of batches, parameters and callables."""

from __future__ import annotations

import datetime
import functools
import hashlib
import pathlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import isogeom

_CHUNK = 1 << 24  # bytes hashed at a time, so that a large tensor is not copied whole
_DEPTH = 2  # objects inside objects that are looked into
# Values whose repr is the same in every process.
_PLAIN = (
    *(str, bytes, int, float, complex, bool, type(None), type(...), slice, range, np.generic, np.dtype),
    *(torch.dtype, torch.device, pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta),
)


def batch_digest(batch: Any) -> str:
    """Return the sha256 of the contents of a batch.

    Tensors and numpy arrays count by dtype, shape and bytes; numbers, strings, paths and the like by their value;
    mappings and sequences by their items; other objects by their type and the values of their attributes, down to two
    objects deep. What an object holds elsewhere (slots, memory of an extension type, a file) is not seen.
    """
    digest = hashlib.sha256()
    _add(digest, batch)
    return digest.hexdigest()


def _add(digest: Any, value: Any, inside: tuple[int, ...] = (), depth: int = 0) -> None:
    """Hash a value; `inside` are the ids of what it lies in, `depth` says how many objects deep it lies."""
    if isinstance(value, Tensor):
        _add_tensor(digest, value)
    elif isinstance(value, np.ndarray):
        _add_array(digest, value, inside, depth)
    elif isinstance(value, _PLAIN):
        digest.update(f"{value!r}\n".encode())
    elif id(value) in inside:
        digest.update(b"itself\n")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(f"key {key!r}\n".encode() if isinstance(key, _PLAIN) else b"key\n")
            _add(digest, item, (*inside, id(value)), depth)
    elif isinstance(value, (tuple, list)):
        digest.update(f"sequence {len(value)}\n".encode())
        for item in value:
            _add(digest, item, (*inside, id(value)), depth)
    elif isinstance(value, (set, frozenset)):
        # The order of a set of strings changes from process to process.
        digest.update(f"set {sorted(repr(v) if isinstance(v, _PLAIN) else _name(type(v)) for v in value)}\n".encode())
    elif isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
        digest.update(f"{_name(value)}\n".encode())
    elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        _add_function(digest, value, (*inside, id(value)), depth)
    else:
        _add_object(digest, value, (*inside, id(value)), depth)


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _add_tensor(digest: Any, tensor: Tensor) -> None:
    if tensor.is_nested:
        digest.update(b"nested\n")
        for part in tensor.unbind():
            _add_tensor(digest, part)
        return
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    if tensor.device.type == "meta":
        return
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    step = max(_CHUNK // max(flat.element_size(), 1), 1)
    for begin in range(0, flat.numel(), step):
        digest.update(flat[begin : begin + step].cpu().contiguous().view(torch.uint8).numpy().data)


def _add_array(digest: Any, array: NDArray[Any], inside: tuple[int, ...], depth: int) -> None:
    digest.update(f"array {array.dtype} {array.shape}\n".encode())
    if array.dtype.hasobject:
        _add(digest, array.tolist(), (*inside, id(array)), depth)
    elif array.nbytes:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _add_object(digest: Any, value: Any, inside: tuple[int, ...], depth: int) -> None:
    """Hash an object by its type, the code of its ``__call__`` and its attributes; its repr may hold its address."""
    digest.update(f"{_name(type(value))}\n".encode())
    if depth >= _DEPTH:
        return
    if isinstance(value, nn.Module):
        _add_module(digest, value)
        return
    call = getattr(type(value), "__call__", None)  # noqa: B004
    if isinstance(call, types.FunctionType):
        _add_function(digest, call, inside, depth + 1)
    for name, item in sorted(getattr(value, "__dict__", {}).items()):
        digest.update(f"attribute {name}\n".encode())
        _add(digest, item, inside, depth + 1)


def _add_module(digest: Any, module: nn.Module) -> None:
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            digest.update(f"{kind} {name}\n".encode())
            _add_tensor(digest, tensor)
    digest.update(f"{sorted(model_attributes(module).items())}\n".encode())


def _add_function(digest: Any, value: Any, inside: tuple[int, ...], depth: int) -> None:
    """Hash the code of a function, what it closes over, its defaults and the plain globals it names."""
    digest.update(f"{_name(value)}\n".encode())
    if isinstance(value, functools.partial):
        for part in (value.func, value.args, dict(sorted(value.keywords.items()))):
            _add(digest, part, inside, depth)
        return
    if isinstance(value, types.MethodType):
        _add(digest, value.__self__, inside, depth)
        _add(digest, value.__func__, inside, depth)
        return
    _add_own(digest, value, inside, depth)
    for name, item in _globals(value).items():
        digest.update(f"global {name}\n".encode())
        if isinstance(item, types.FunctionType):
            _add_own(digest, item, (*inside, id(item)), depth)
        else:
            _add(digest, item, inside, depth)


def _add_own(digest: Any, function: types.FunctionType, inside: tuple[int, ...], depth: int) -> None:
    _add_code(digest, function.__code__)
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    _add(digest, [cells, function.__defaults__, dict(sorted((function.__kwdefaults__ or {}).items()))], inside, depth)


def _globals(function: types.FunctionType) -> dict[str, Any]:
    """Return the plain globals and the functions of its own file that a function names, itself or through these."""
    found: dict[str, Any] = {}
    todo = [function]
    while todo:
        for name in _names(todo.pop().__code__) & function.__globals__.keys() - found.keys():
            item = function.__globals__[name]
            helper = isinstance(item, types.FunctionType) and item.__globals__ is function.__globals__
            if helper and item is not function:
                todo.append(item)
                found[name] = item
            elif isinstance(item, (Tensor, np.ndarray, tuple, *_PLAIN)):
                found[name] = item
    return dict(sorted(found.items()))


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


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


def model_attributes(model: nn.Module) -> dict[str, str]:
    """Return a hash per name of the plain values (numbers, strings, tuples of them) that modules keep as attributes.

    Left out are private names and caches, which a forward pass may change, and what every module has, such as its
    training flag. Attributes of classes, other objects (a config, a list) and the code of the modules are not seen.
    """
    digests: dict[str, Any] = {}
    common = nn.Module().__dict__
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name in common or name.startswith("_") or "cache" in name or not _is_plain(value):
                continue
            digests.setdefault(name, hashlib.sha256()).update(f"{path} {value!r}\n".encode())
    return {name: digests[name].hexdigest()[:16] for name in sorted(digests)}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def describe(value: Any, model: nn.Module | None = None) -> Any:
    """Return a JSON value that names an option.

    A callable is named by itself and a hash: of its code; of the contents of its defaults, of its closure, of the
    arguments of a :func:`functools.partial` and of the attributes of its object (see :func:`batch_digest`; modules by
    parameters, buffers and plain attributes); of the numbers, strings, tuples, tensors and arrays among the globals
    that it names, and of the functions of its own file that it names. `model`, which is compared by itself, is left
    out. Not seen are other globals (lists, dicts, objects, modules), functions of other files, attributes of classes,
    the code of methods other than ``__call__``, and what lies in slots or more than two objects deep.
    """
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if not callable(value):
        return value
    digest = hashlib.sha256()
    _add(digest, value, () if model is None else (id(model),))
    name = f"partial of {_name(value.func)}" if isinstance(value, functools.partial) else _name(value)
    return f"{name} {digest.hexdigest()[:16]}"


def fingerprint(model: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a store must have been made with: options, model and versions, as JSON values."""
    versions = {"isogeom": isogeom.__version__, "torch": torch.__version__}
    if any(type(module).__module__.startswith("transformers.") for module in model.modules()):
        versions["transformers"] = sys.modules["transformers"].__version__
    return {
        **{name: describe(value, model) for name, value in options.items()},
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "model_sha256": model_digest(model),
        **{f"model attribute {name!r}": value for name, value in model_attributes(model).items()},
        **{f"version of {name}": version for name, version in versions.items()},
    }


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Say what differs between the fingerprint of a store and that of a call."""
    return [
        f"{name}: the store has {found.get(name)!r}, this call {wanted.get(name)!r}"
        for name in dict.fromkeys([*found, *wanted])
        if found.get(name) != wanted.get(name)
    ]
