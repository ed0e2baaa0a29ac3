"""Rows that are all zero because float16 holds nothing so small."""

from __future__ import annotations

import torch
from torch import Tensor

_SCALE = "multiply the loss by a scale, for instance 1024"


def underflow(rows: Tensor, kind: str, made: torch.dtype, stored: str) -> str | None:
    """Say how `rows` (float32, made in the dtype `made`) come to be all zero in float16, and the cure; or None."""
    if not rows.numel():
        return None
    if not bool(rows.any()):
        # Zero activations have other reasons; a gradient that is zero in every row has lost its numbers on the way.
        if made != torch.float16 or kind != "gradients":
            return None
        return f"which holds nothing below 6e-8; run the model in bfloat16 or float32, or {_SCALE}"
    if stored != "float16" or bool(rows.to(torch.float16).any()):
        return None
    largest = float(rows.abs().max())
    return f"as the largest is {largest:.3g}; store them with dtype='float32' or dtype='bfloat16', or {_SCALE}"
