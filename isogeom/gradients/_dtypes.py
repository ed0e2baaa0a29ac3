"""How rows are stored: float32, float16, or the bits of bfloat16, which numpy does not know (numpy only)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = ("float32", "float16", "bfloat16")


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype for the bytes of `dtype`; numpy has no bfloat16, whose bits are kept as uint16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def encode(rows: NDArray[Any], dtype: str, site: str, kind: str) -> NDArray[Any]:
    """Return float32 rows in the storage dtype, rounded to nearest; overflow is an error."""
    if dtype == "float32":
        return np.ascontiguousarray(rows)
    result: NDArray[Any]
    if dtype == "float16":
        with np.errstate(over="ignore"):
            result = rows.astype(np.float16)
        overflow = np.isinf(result)
    else:
        bits = np.ascontiguousarray(rows).view(np.uint32)
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # to nearest, ties to even
        result = ((bits + half) >> np.uint32(16)).astype(np.uint16)
        overflow = (result & 0x7FFF) == 0x7F80
    if overflow.any():
        raise ValueError(
            f"dtype={dtype!r} cannot hold {int(overflow.sum())} values of the {kind} of site {site!r}, the largest of "
            f"size {np.abs(rows).max():.3g}: use dtype='float32'"
        )
    return result


def decode(rows: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return rows as numbers: bfloat16 bits become float32, other dtypes stay."""
    if dtype != "bfloat16":
        return rows
    return (np.asarray(rows).astype(np.uint32) << np.uint32(16)).view(np.float32)
