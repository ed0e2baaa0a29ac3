"""Exact codes of Semi-NMF for fixed atoms, and the certificates of a fit that need them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from isogeom import _xp
from isogeom._linalg import row_norms
from isogeom._xp import Array, Namespace
from isogeom.decomposition._alternation import Statistics
from isogeom.decomposition._certificates import unique_energies
from isogeom.decomposition._directions import cheap, lift, moderate
from isogeom.decomposition._nnls import gram_solver
from isogeom.decomposition._rows import Rows

# Share of the squared norm below which the squared error is taken from explicit residuals; after float32 products.
_SMALL_ERROR, _SMALL_ERROR_SINGLE = 1e-6, 1e-3
# Share of the squared norm within which a squared error from float32 products is not told from the bound: more than
# their rounding, which is about 1e-8 of it, or 1e-7 where the rounding of all rows has one sign.
_UNSURE = 1e-6
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
        # Wide times tall runs faster than tall times narrow.
        pieces = _xp.row_blocks(raw, _ENCODE_ROWS)
        products = [xp.matmul(D, xp.matrix_transpose(lift(rows, piece))) for piece in pieces]
        Z, residual, _ = solve(xp.matrix_transpose(_joined(xp, products, axis=1)))
        codes.append(xp.astype(Z if unit == 1 else Z * unit, dtype, copy=False))
        worst = max(worst, residual)
    return _joined(xp, codes, axis=0), worst


def _joined(xp: Namespace, parts: list[Array], axis: int) -> Array:
    return parts[0] if len(parts) == 1 else xp.concat(parts, axis=axis)


def measure(
    rows: Rows,
    D: Array,
    penalty: float,
    ridge: float,
    *,
    keep: bool = False,
    explicit: bool = False,
    guess: Array | None = None,
    span: tuple[Array, Array] | None = None,
    bound: float = -math.inf,
) -> Coding:
    """Return everything that is measured on the exact codes, in one pass over the rows, and the codes if `keep`.

    Unless codes are kept, products with float32 rows are made in float32: what is summed over the rows does not need
    more. A small error is measured again on explicit residuals (a second pass): differences of sums would lose it. So
    is one from float32 products whose square may be the `bound`, the least there can be.
    Codes near the solution (`guess`) save time. So do orthonormal axes and the scores of the rows on them (`span`): the
    products with atoms in the span of the axes, up to the rounding of float32, are those of the scores.

    Cancellation is the mean over the rows of ``sum_j z_ij |d_j| / |x_i|``; zero rows are left out.
    """
    xp = rows.xp
    gram, columns, codes = coefficients(rows, D, ridge), xp.matrix_transpose(D), []
    solve = gram_solver(gram, alpha=penalty, n_rows=rows.shape[0])
    exact = keep or explicit or not _is_apart(rows, gram)
    inside = None if exact or span is None else _inside(D, span[0])
    statistics, worst, error, squares, ratio = Statistics.zeros(D), 0.0, 0.0, 0.0, 0.0
    n_live, n_used, lengths, single, first = 0, 0, row_norms(D), False, 0
    for raw in rows.raw():
        block, norms = _lifted(rows, raw) if exact else cheap(rows, raw)
        place = slice(first, first + int(block.shape[0]))
        single, first = single or block.dtype != rows.dtype, place.stop
        if inside is None or span is None or block.dtype == rows.dtype:
            P = xp.astype(xp.matmul(block, xp.astype(columns, block.dtype)), rows.dtype, copy=False)
        else:
            P = xp.matmul(span[1][place, :], inside)
        Z, residual, _ = solve(P, None if guess is None else guess[place, :])
        worst = max(worst, residual)
        statistics.add(Z, block)
        squares += float(xp.sum(norms))
        # The sum of Z * P stands for that of D * (Z.T @ X).
        error += float(xp.sum((block - xp.matmul(Z, D)) ** 2) if explicit else -2 * xp.sum(xp.vecdot(Z, P)))
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
        near = single and error - bound <= _UNSURE * squares
        if near or error <= (_SMALL_ERROR_SINGLE if single else _SMALL_ERROR) * squares:
            return measure(rows, D, penalty, ridge, keep=keep, explicit=True, guess=guess)
    Z = _joined(xp, codes, axis=0) if keep else None
    n, k = rows.shape[0], int(D.shape[0])
    return Coding(Z, statistics, worst, squares, math.sqrt(error), ratio / max(n_live, 1), n_used / (n * k))


def _lifted(rows: Rows, block: Array) -> tuple[Array, Array]:
    """Return a block of ``rows.raw()`` in the accumulator's dtype, and its squared norms."""
    block = lift(rows, block)
    return block, rows.xp.vecdot(block, block)


def _inside(D: Array, axes: Array) -> Array | None:
    """Return the coordinates of the atoms on the axes, as columns; None unless they lie in the span of these."""
    xp = _xp.array_namespace(D, axes)
    coordinates = xp.matmul(axes, xp.matrix_transpose(D))
    outside = D - xp.matmul(xp.matrix_transpose(coordinates), axes)
    return coordinates if float(xp.max(row_norms(outside))) <= float(xp.finfo(xp.float32).eps) else None


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
