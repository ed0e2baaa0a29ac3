"""The seam to the array libraries: namespace, device, dtype policy and what the standard lacks.

Everything above this file is written once, against the array API standard, and follows its input: numpy arrays give
numpy arrays, torch tensors give tensors on the same device. Dispatch is on the type of the input alone, never on a
global switch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import array_api_compat
import numpy as np

# Arrays of any array-API library, and their namespaces: no common base class exists to name here.
Array = Any
Namespace = Any

# Rows per block in streamed products: large enough for full GEMM speed, small enough that a block of 4096 features
# stays below 32 MiB in float32.
BLOCK_ROWS = 2048


def is_foreign(x: Any) -> bool:
    """Tell whether `x` is an array of another library than numpy (a torch tensor, say)."""
    if isinstance(x, (np.ndarray, np.generic)):
        return False
    return array_api_compat.is_array_api_obj(x) and not array_api_compat.is_numpy_array(x)


def array_namespace(*arrays: Any) -> Namespace:
    """Return the array-API namespace shared by `arrays`; anything that is not an array of a library counts as numpy.

    Raises
    ------
    TypeError
        If the arrays belong to different libraries.
    """
    foreign = [a for a in arrays if is_foreign(a)]
    if not foreign:
        return array_api_compat.array_namespace(np.empty(0))
    plain = [a for a in arrays if isinstance(a, np.ndarray)]
    if plain:
        raise TypeError(
            f"Got a numpy array together with a {type(foreign[0]).__module__} array: pass all arrays in one library "
            "(np.asarray(tensor.cpu()), or torch.asarray(array))."
        )
    return array_api_compat.array_namespace(*foreign)


def device(x: Array) -> Any:
    """Return the device of `x`."""
    return array_api_compat.device(x)


def is_numpy(xp: Namespace) -> bool:
    """Tell whether `xp` is the numpy namespace."""
    return array_api_compat.is_numpy_namespace(xp)


def is_torch(xp: Namespace) -> bool:
    """Tell whether `xp` is the torch namespace (False, without importing torch, if torch is not loaded)."""
    return "torch" in sys.modules and array_api_compat.is_torch_namespace(xp)


def accumulator_dtype(xp: Namespace, dev: Any = None) -> Any:
    """Return float64 where the device has it, else float32 (Apple's MPS)."""
    if is_numpy(xp):
        return xp.float64
    available = xp.__array_namespace_info__().dtypes(kind="real floating", device=dev)
    return xp.float64 if "float64" in available else xp.float32


def is_real_floating(xp: Namespace, x: Array) -> bool:
    """Tell whether the dtype of `x` is real floating, half precisions included."""
    if is_torch(xp):
        return bool(x.dtype.is_floating_point)
    return bool(xp.isdtype(x.dtype, "real floating"))


def as_real_floating(X: Array, name: str) -> Array:
    """Detach `X` and bring its dtype to float32 or float64: half precision is widened, integers become floating.

    Raises
    ------
    ValueError
        If the dtype is complex or not numeric; the message calls the array `name`.
    """
    xp = array_namespace(X)
    if hasattr(X, "detach"):
        X = X.detach()
    if X.dtype in (xp.float32, xp.float64):
        return X
    if is_real_floating(xp, X):
        # Products and sums of float16 overflow at 65504; numpy's long double is the only dtype wider than float64.
        return xp.astype(X, xp.float32 if xp.finfo(X.dtype).bits < 32 else xp.float64)
    if xp.isdtype(X.dtype, ("integral", "bool")):
        return xp.astype(X, accumulator_dtype(xp, device(X)))
    kind = "Complex data not supported" if xp.isdtype(X.dtype, "complex floating") else "Data must be numeric"
    raise ValueError(f"{kind}: {name} has dtype {X.dtype}; pass real rows.")


def asarray_like(x: Any, ref: Array, dtype: Any = None) -> Array:
    """Bring the host array `x` to the library and device of `ref`."""
    xp = array_namespace(ref)
    return xp.asarray(x, dtype=ref.dtype if dtype is None else dtype, device=device(ref))


def to_numpy(x: Any) -> np.ndarray:
    """Copy `x` to a numpy array on the host.

    Only displays, tables and the host-side statistics of results call this: production code never moves data silently.
    """
    if not is_foreign(x):
        return np.asarray(x)
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        return x.float().numpy() if str(x.dtype) in ("torch.bfloat16", "torch.float16") else x.numpy()
    xp = array_namespace(x)
    if xp.__name__ == "array_api_strict":
        return np.asarray(array_api_compat.to_device(x, xp.Device("CPU_DEVICE")))
    return np.from_dlpack(array_api_compat.to_device(x, "cpu"))


def float32_products_exact(xp: Namespace) -> bool:
    """Tell whether float32 products are made in float32: torch can be told to round their factors to TF32."""
    if not is_torch(xp):
        return True
    return bool(sys.modules["torch"].get_float32_matmul_precision() == "highest")


def row_blocks(X: Array, size: int = BLOCK_ROWS) -> Iterator[Array]:
    """Yield consecutive blocks of at most `size` rows of `X`, as views."""
    n = X.shape[0]
    for start in range(0, n, size):
        yield X[start : min(start + size, n), ...]


def largest_by(xp: Namespace, values: Array, axis: int) -> Array:
    """Return the entry of largest absolute value along `axis` (the first on a tie), that axis kept at length 1."""
    index = xp.expand_dims(xp.argmax(xp.abs(values), axis=axis), axis=axis)
    return xp.take_along_axis(values, index, axis=axis)
