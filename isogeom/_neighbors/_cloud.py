"""Rows prepared for a search by products, and the rounding errors that their lower bounds allow for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from isogeom import _xp
from isogeom._xp import Array

# Rows whose median is the origin of products. Any origin gives the right answer; a central one gives tight bounds.
_SAMPLE = 256
# Entries of a block of differences.
DIFFERENCES = 2**20
# Queries whose entries are up to this power of two times those of the rows are compared in the scale of the rows.
_FAR = 40


@dataclass(frozen=True)
class Cloud:
    """Rows prepared for a search: shifted and scaled by a power of two, which leaves the order of distances alone.

    Attributes
    ----------
    rows : array of shape (n, d)
        The rows as they came.
    shift : array of shape (d,)
        Subtracted before products, in the accumulator's dtype; its values have a float32 representation.
    scale : float
        Power of two by which differences are multiplied: squares then neither overflow nor vanish.
    """

    rows: Array
    shift: Array
    scale: float

    @classmethod
    def of(cls, X: Array) -> Cloud:
        """Prepare the rows of `X`; nothing of its size is copied."""
        xp = _xp.array_namespace(X)
        dtype = _xp.accumulator_dtype(xp, _xp.device(X))
        scale = unit_scale(X)
        n = int(X.shape[0])
        # The median of rows from all over: a few massive rows would pull the mean away from all others.
        chosen = np.unique(np.linspace(0, n - 1, min(n, _SAMPLE)).astype(np.int64))
        sample = xp.take(X, _xp.asarray_like(chosen, X, dtype=xp.int64), axis=0)
        # The order of equal numbers says nothing, and keeping it takes numpy four times as long.
        middle = xp.sort(xp.astype(sample, dtype) * scale, axis=0, stable=False)[len(chosen) // 2, :]
        return cls(X, xp.astype(xp.astype(middle, xp.float32), dtype), scale)

    def at_scale(self, scale: float) -> Cloud:
        """Return the same rows in another scale, a power of two."""
        xp = _xp.array_namespace(self.rows)
        shift = xp.astype(self.shift * (scale / self.scale), xp.float32)
        return replace(self, shift=xp.astype(shift, self.shift.dtype), scale=scale)

    def far_groups(self, queries: Array) -> list[tuple[float, np.ndarray]] | None:
        """Group queries whose squares may overflow in the scale of the rows; None if there are none.

        Returns
        -------
        list of (float, ndarray of int)
            A scale, and the positions of the queries, in which neither their squares overflow nor their distances
            vanish: the first group has the scale of the rows.
        """
        xp = _xp.array_namespace(queries)
        largest = [_xp.to_numpy(xp.max(xp.abs(block), axis=1)) for block in _xp.row_blocks(queries)]
        # As exponents: the numbers themselves could overflow.
        exponents = np.frexp(np.concatenate(largest).astype(np.float64))[1] + math.frexp(self.scale)[1] - 1
        steps = np.maximum(-(-exponents // _FAR), 1) - 1
        if not steps.any():
            return None
        tiny = float(xp.finfo(self.shift.dtype).smallest_normal)
        scales = [max(self.scale * 2.0 ** (-_FAR * (step + 1) if step else 0), tiny) for step in range(steps.max() + 1)]
        return [(scales[step], np.flatnonzero(steps == step)) for step in np.unique(steps).tolist()]

    def wide(self, rows: Array) -> Array:
        """Return rows scaled, in the accumulator's dtype, not shifted."""
        return _xp.array_namespace(rows).astype(rows, self.shift.dtype) * self.scale

    def centred(self, rows: Array) -> Array:
        """Return rows scaled and shifted, in the accumulator's dtype."""
        return self.wide(rows) - self.shift


def check_vanished(cloud: Cloud, queries: Array, distances: Array, indices: Array) -> None:
    """Raise ValueError if rows that differ are so near, beside the largest entry, that their squares vanish."""
    xp = _xp.array_namespace(distances)
    # In units of the largest entry.
    least = 2.0**5 * float(xp.finfo(cloud.shift.dtype).smallest_normal) ** 0.5 / cloud.scale
    if float(xp.min(distances[:, 0])) >= least:
        return
    rows, columns = np.nonzero(_xp.to_numpy(distances) < least)
    found = _xp.to_numpy(indices)[rows, columns]
    size = max(1, DIFFERENCES // int(queries.shape[1]))
    for start in range(0, len(rows), size):
        near, mine = (
            xp.take(x, _xp.asarray_like(at[start : start + size], x, dtype=xp.int64), axis=0)
            for x, at in ((cloud.rows, found), (queries, rows))
        )
        if not bool(xp.all(near == mine)):
            raise ValueError(
                "X has rows whose distance vanishes beside its largest entry: drop the rows with entries far above all "
                "others, or divide these features by a constant."
            )


def unit_scale(X: Array) -> float:
    """Return the power of two that brings the largest entry of `X` between 1/2 and 1."""
    xp = _xp.array_namespace(X)
    largest = max(max(float(xp.max(block)), -float(xp.min(block))) for block in _xp.row_blocks(X))
    # Rows of denormal numbers would need a power above the largest float.
    return math.ldexp(1.0, min(-math.frexp(largest)[1], 1023)) if 0 < largest < math.inf else 1.0


def rounding(d: int, eps: float) -> float:
    """Return the share of ``|x|^2 + |y|^2`` by which an expanded squared distance of rows can be wrong.

    Products of length `d` accumulate at most ``d eps / 2``; storing the rows and norms, adding the three terms and
    comparing with a limit, twelve more.
    """
    return (d / 2 + 12) * eps


def smallest_normal(d: int, tiny: float) -> float:
    """Return by how much an expanded squared distance can be wrong because products below `tiny` vanish."""
    return 8 * (d + 4) * tiny
