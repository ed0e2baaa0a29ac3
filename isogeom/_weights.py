"""Weights of rows: how often each of them counts."""

from __future__ import annotations

from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._xp import Array


def check_weights(sample_weight: Any, X: Array) -> Array:
    """Return the weights of the rows of `X` as an array beside it, in the accumulator's dtype.

    Raises
    ------
    ValueError
        If the shape is not (n_samples,), or a weight is negative or not finite.
    """
    xp = _xp.array_namespace(X)
    acc = _xp.accumulator_dtype(xp, _xp.device(X))
    if _xp.is_foreign(X):
        # Lists and numpy arrays hold few numbers: they follow X, as y does.
        weights = xp.asarray(sample_weight, dtype=acc, device=_xp.device(X))
    else:
        weights = np.asarray(sample_weight, dtype=acc)
    if weights.ndim != 1 or weights.shape[0] != X.shape[0]:
        raise ValueError(
            f"sample_weight has shape {tuple(weights.shape)}, but X has {X.shape[0]} rows: pass one weight per row, "
            f"shape ({X.shape[0]},)."
        )
    if not bool(xp.all(xp.isfinite(weights) & (weights >= 0))):
        raise ValueError("sample_weight has a value that is negative, NaN or infinite: weights must be at least 0.")
    return weights


def drop_unweighted(xp: Any, block: Array, weights: Array) -> tuple[Array, Array]:
    """Leave out the rows of weight 0, so that nothing in them has a say, not even through the shift."""
    kept = weights > 0
    if bool(xp.all(kept)):
        return block, weights
    index = xp.nonzero(kept)[0]
    return xp.take(block, index, axis=0), xp.take(weights, index)
