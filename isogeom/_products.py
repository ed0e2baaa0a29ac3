"""Sums of products ``Y.T @ Y`` over row blocks: exact sums, and on numpy half the work through symmetry."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import blas

from isogeom import _xp
from isogeom._xp import Array

# Mean square per entry below which float32 products lose digits to underflow.
SMALL_SQUARE = 1e-28
# Rows whose products are added up in float32 before they go to the sum.
_SINGLE_ROWS = 4096
# Side of the tiles in which one triangle is copied to the other.
_TILE = 128


class ProductSum:
    """Sum of ``Y.T @ Y``, each product in the dtype of Y and the sum in the accumulator's dtype.

    Parameters
    ----------
    start : array of shape (n_features, n_features) or None
        Where the sum starts; it is copied.
    like : array of shape (n_samples, n_features)
        An array of the library and device of the rows.
    acc : dtype
        Dtype of the sum.

    Notes
    -----
    On numpy the BLAS routine for symmetric products adds to one triangle of a preallocated matrix: no (d, d) temporary
    per block, and half the operations of a general product. The lower one is the faster. Other libraries have no such
    routine.
    """

    def __init__(self, start: Array | None, like: Array, acc: Any) -> None:
        self.xp = _xp.array_namespace(like)
        self.acc = acc
        d = like.shape[1]
        self._in_place = not _xp.is_foreign(like)
        if start is None:
            self._sum = self.xp.zeros((d, d), dtype=acc, device=_xp.device(like))
        else:
            self._sum = start.copy() if self._in_place else start
        # Symmetric, so its transpose is the same matrix in the order that BLAS wants.
        if self._in_place:
            self._sum = np.ascontiguousarray(self._sum).T
        self._single: np.ndarray | None = None
        self._pending = 0

    def add(self, Y: Array) -> bool:
        """Add ``Y.T @ Y``; False, with nothing added, if the squares leave the range of the dtype of Y."""
        if Y.dtype == self.acc:
            self.add_exact(Y, 1)
            return True
        if self._in_place:
            flat = Y.reshape(-1)
            energy = float(np.dot(flat, flat))
        else:
            product = self.xp.matmul(self.xp.matrix_transpose(Y), Y)
            energy = float(self.xp.linalg.trace(product))
        if not SMALL_SQUARE * Y.shape[0] * Y.shape[1] <= energy < float("inf"):
            return False
        if self._in_place:
            self._add_single(Y)
        else:
            self._sum = self._sum + self.xp.astype(product, self.acc)
        return True

    def _add_single(self, Y: np.ndarray) -> None:
        """Add a float32 product; a few are added up in float32 before they move on, as in one longer product."""
        d = Y.shape[1]
        if self._single is None:
            self._single = np.zeros((d, d), dtype=Y.dtype, order="F")
        beta = 1.0 if self._pending else 0.0
        self._single = blas.ssyrk(1.0, Y.T, beta=beta, c=self._single, lower=1, overwrite_c=1)
        self._pending += Y.shape[0]
        if self._pending >= _SINGLE_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._sum += self._single
            self._pending = 0

    def add_exact(self, Y: Array, sign: int) -> None:
        """Add or subtract ``Y.T @ Y`` for rows in the accumulator's dtype."""
        if self._in_place:
            self._sum = blas.dsyrk(float(sign), Y.T, beta=1.0, c=self._sum, lower=1, overwrite_c=1)
        else:
            self._sum = self._sum + sign * self.xp.matmul(self.xp.matrix_transpose(Y), Y)

    def squares(self) -> Array:
        """Return the diagonal of the sum so far."""
        diagonal = self.xp.linalg.diagonal(self._sum)
        if self._single is not None and self._pending:
            return diagonal + np.diagonal(self._single)
        return diagonal

    def total(self) -> Array:
        """Return the symmetric sum; nothing may be added afterwards."""
        if self._in_place:
            self._flush()
            result = self._sum.T
            _mirror_upper(result)
            return result
        return self._sum


def _mirror_upper(square: np.ndarray) -> None:
    """Copy the upper triangle to the lower one, tile by tile: strided copies of a whole matrix miss the cache."""
    d = square.shape[0]
    for begin in range(0, d, _TILE):
        end = min(begin + _TILE, d)
        tile = square[begin:end, begin:end]
        tile[...] = np.triu(tile) + np.triu(tile, 1).T
        for other in range(end, d, _TILE):
            stop = min(other + _TILE, d)
            square[other:stop, begin:end] = square[begin:end, other:stop].T
