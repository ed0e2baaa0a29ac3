"""Exact codes of Semi-NMF for fixed atoms, and the certificates of a fit that need them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from isogeom import _xp
from isogeom._linalg import row_norms
from isogeom._xp import Array
from isogeom.decomposition._alternation import Problem, Statistics
from isogeom.decomposition._certificates import unique_energies
from isogeom.decomposition._nnls import nnls_shared_gram
from isogeom.decomposition._semi_rows import Rows

# Share of the squared norm below which the squared error is taken from explicit residuals.
_SMALL_ERROR = 1e-6


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


def coefficients(rows: Rows, D: Array, ridge: float) -> Array:
    """Return the Gram matrix of the atoms, with the ridge on its diagonal."""
    xp = rows.xp
    gram = xp.matmul(D, xp.matrix_transpose(D))
    return gram + ridge * xp.eye(D.shape[0], dtype=D.dtype, device=rows.device) if ridge else gram


def encode(rows: Rows, D: Array, penalty: float, ridge: float, dtype: Any) -> tuple[Array, float]:
    """Return the exact codes of the rows in `dtype`, and their largest residual."""
    xp = rows.xp
    gram, columns, codes, worst = coefficients(rows, D, ridge), xp.matrix_transpose(D), [], 0.0
    for _, block in rows:
        Z, residual, _ = nnls_shared_gram(gram, xp.matmul(block, columns), alpha=penalty, n_rows=rows.shape[0])
        codes.append(xp.astype(Z, dtype))
        worst = max(worst, residual)
    return (codes[0] if len(codes) == 1 else xp.concat(codes, axis=0)), worst


def measure(
    rows: Rows, D: Array, penalty: float, ridge: float, dtype: Any, *, keep: bool, explicit: bool = False
) -> Coding:
    """Return the exact codes and everything that is measured on them, in one pass over the rows.

    A small error is measured again on explicit residuals (a second pass): differences of sums would lose it.

    Cancellation is the mean over the rows of ``sum_j z_ij |d_j| / |x_i|``; zero rows are left out.
    """
    xp = rows.xp
    gram, columns, codes = coefficients(rows, D, ridge), xp.matrix_transpose(D), []
    statistics, worst, error, squares, ratio = Statistics.zeros(D), 0.0, 0.0, 0.0, 0.0
    n_live, n_used, lengths = 0, 0, row_norms(D)
    for _, block in rows:
        Z, residual, _ = nnls_shared_gram(gram, xp.matmul(block, columns), alpha=penalty, n_rows=rows.shape[0])
        worst = max(worst, residual)
        statistics.add(Z, block)
        kept = xp.astype(Z, dtype)
        if explicit:
            error += float(xp.sum((block - xp.matmul(xp.astype(kept, D.dtype), D)) ** 2))
        norms = xp.vecdot(block, block)
        squares += float(xp.sum(norms))
        norms = xp.sqrt(norms)
        live = norms > 0
        mass = xp.matmul(Z, lengths) / xp.where(live, norms, xp.ones_like(norms))
        ratio += float(xp.sum(xp.where(live, mass, xp.zeros_like(mass))))
        n_live += int(xp.count_nonzero(live))
        n_used += int(xp.count_nonzero(Z))
        if keep:
            codes.append(kept)
    if not explicit:
        error = 2 * Problem(squares).objective(statistics, D)
        if error <= _SMALL_ERROR * squares:
            return measure(rows, D, penalty, ridge, dtype, keep=keep, explicit=True)
    Z = None if not keep else codes[0] if len(codes) == 1 else xp.concat(codes, axis=0)
    n, k = rows.shape[0], int(D.shape[0])
    return Coding(Z, statistics, worst, squares, math.sqrt(error), ratio / max(n_live, 1), n_used / (n * k))


def atom_energies(A: Array, D: Array, sort_by: str) -> Array:
    """Return the energy of every atom from ``A = Z.T @ Z``: unique, or the sum of its squared codes."""
    xp = _xp.array_namespace(A, D)
    return unique_energies(A, D) if sort_by == "energy" else xp.linalg.diagonal(A) * xp.sum(D * D, axis=1)
