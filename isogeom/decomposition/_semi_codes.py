"""Exact codes of Semi-NMF for fixed atoms, and the certificates of a fit that need them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from isogeom import _xp
from isogeom._linalg import row_norms
from isogeom._xp import Array
from isogeom.decomposition._alternation import Statistics
from isogeom.decomposition._certificates import unique_energies
from isogeom.decomposition._nnls import gram_solver
from isogeom.decomposition._semi_directions import cheap, lift, moderate
from isogeom.decomposition._semi_rows import Rows

# Share of the squared norm below which the squared error is taken from explicit residuals; after float32 products.
_SMALL_ERROR, _SMALL_ERROR_SINGLE = 1e-6, 1e-3
# Smallest eigenvalue of the Gram matrix of the atoms, and number of entries, from which float32 products serve.
_APART, _SIZE = 1e-3, 2**20
# Rows whose copy in float64 stays in the cache between lifting and product.
_ENCODE_ROWS = 512


@dataclass
class Coding:
    """Exact codes of rows (None where they were not kept), their sums, and what they say about the fit."""

    Z: Array | None
    statistics: Statistics
    residual: float
    squares: float
    error: float
    cancellation: float
    density: float

    def times(self, unit: float) -> Coding:
        """Return the same for rows `unit` times as large; sums of squares may overflow to infinity."""
        sums = self.statistics
        scaled = Statistics(sums.A * unit * unit, sums.B * unit * unit, sums.sums * unit)
        return replace(
            self,
            Z=None if self.Z is None else self.Z * unit,
            statistics=scaled,
            squares=self.squares * unit * unit,
            error=self.error * unit,
        )


def coefficients(rows: Rows, D: Array, ridge: float) -> Array:
    """Return the Gram matrix of the atoms, with the ridge on its diagonal."""
    xp = rows.xp
    gram = xp.matmul(D, xp.matrix_transpose(D))
    return gram + ridge * xp.eye(D.shape[0], dtype=D.dtype, device=rows.device) if ridge else gram


def encode(rows: Rows, D: Array, penalty: float, ridge: float, dtype: Any) -> tuple[Array, float]:
    """Return the exact codes of the rows in `dtype`, and their largest residual."""
    xp, (rows, unit) = rows.xp, moderate(rows)
    penalty = penalty / unit
    solve = gram_solver(coefficients(rows, D, ridge), alpha=penalty, n_rows=rows.shape[0])
    codes, worst = [], 0.0
    for raw in rows.raw():
        for piece in _xp.row_blocks(raw, _ENCODE_ROWS):
            # Wide times tall runs faster than tall times narrow.
            products = xp.matmul(D, xp.matrix_transpose(lift(rows, piece)))
            Z, residual, _ = solve(xp.matrix_transpose(products))
            codes.append(xp.astype(Z if unit == 1 else Z * unit, dtype))
            worst = max(worst, residual)
    return (codes[0] if len(codes) == 1 else xp.concat(codes, axis=0)), worst


def measure(
    rows: Rows, D: Array, penalty: float, ridge: float, *, keep: bool = False, explicit: bool = False
) -> Coding:
    """Return everything that is measured on the exact codes, in one pass over the rows, and the codes if `keep`.

    Unless codes are kept, products with float32 rows are made in float32: what is summed over the rows does not need
    more. A small error is measured again on explicit residuals (a second pass): differences of sums would lose it.

    Cancellation is the mean over the rows of ``sum_j z_ij |d_j| / |x_i|``; zero rows are left out.
    """
    xp = rows.xp
    gram, columns, codes = coefficients(rows, D, ridge), xp.matrix_transpose(D), []
    solve = gram_solver(gram, alpha=penalty, n_rows=rows.shape[0])
    exact = keep or explicit or not _is_apart(rows, gram)
    statistics, worst, error, squares, ratio = Statistics.zeros(D), 0.0, 0.0, 0.0, 0.0
    n_live, n_used, lengths, single = 0, 0, row_norms(D), False
    for raw in rows.raw():
        block = lift(rows, raw) if exact else cheap(rows, raw)
        single = single or block.dtype != rows.dtype
        P = xp.astype(xp.matmul(block, xp.astype(columns, block.dtype)), rows.dtype)
        Z, residual, _ = solve(P)
        worst = max(worst, residual)
        statistics.add(Z, block)
        norms = xp.astype(xp.vecdot(block, block), rows.dtype)
        squares += float(xp.sum(norms))
        # The sum of Z * P stands for that of D * (Z.T @ X).
        error += float(xp.sum((block - xp.matmul(Z, D)) ** 2 if explicit else -2 * Z * P))
        norms = xp.sqrt(norms)
        live = norms > 0
        mass = xp.matmul(Z, lengths) / xp.where(live, norms, xp.ones_like(norms))
        ratio += float(xp.sum(xp.where(live, mass, xp.zeros_like(mass))))
        n_live += int(xp.count_nonzero(live))
        n_used += int(xp.count_nonzero(Z))
        if keep:
            codes.append(Z)
    if not explicit:
        error = max(squares + error + float(xp.sum(xp.matmul(D, columns) * statistics.A)), 0.0)
        if error <= (_SMALL_ERROR_SINGLE if single else _SMALL_ERROR) * squares:
            return measure(rows, D, penalty, ridge, keep=keep, explicit=True)
    Z = None if not keep else codes[0] if len(codes) == 1 else xp.concat(codes, axis=0)
    n, k = rows.shape[0], int(D.shape[0])
    return Coding(Z, statistics, worst, squares, math.sqrt(error), ratio / max(n_live, 1), n_used / (n * k))


def _is_apart(rows: Rows, gram: Array) -> bool:
    """Tell whether codes stand the rounding of products in float32: atoms far from dependent, and enough rows to gain.

    Where atoms depend on each other, codes have no limit along directions that only rounding sees.
    """
    xp, (n, d) = rows.xp, rows.shape
    if n * d < _SIZE:
        return False
    return float(xp.min(xp.linalg.eigvalsh(gram))) >= _APART * float(xp.max(xp.linalg.diagonal(gram)))


def atom_energies(A: Array, D: Array, sort_by: str) -> Array:
    """Return the energy of every atom from ``A = Z.T @ Z``: unique, or the sum of its squared codes."""
    xp = _xp.array_namespace(A, D)
    return unique_energies(A, D) if sort_by == "energy" else xp.linalg.diagonal(A) * xp.sum(D * D, axis=1)
