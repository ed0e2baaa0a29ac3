"""What can be proved about a Semi-NMF fit: the spectrum that bounds its error, and diagnostics of atoms and codes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg

from isogeom import _xp
from isogeom._linalg import eigh_descending, fix_signs
from isogeom._moments import Moments
from isogeom._xp import Array
from isogeom.decomposition._directions import left_over, lift, thin_directions
from isogeom.decomposition._rows import Rows

# Largest Gram matrix that is decomposed whole; beyond it, a block Krylov space takes this many passes over the rows.
_GRAM_SIDE = 4096
_KRYLOV_PASSES = 6
# Share of the squared norm below which the error of the SVD is measured on the rows: differences of sums lose it. The
# same where the Gram matrix is a sum of float32 products; and the share below which the rest drowns in their rounding.
_SMALL_TAIL, _SMALL_TAIL_SINGLE, _LOST_TAIL_SINGLE = 1e-6, 1e-1, 1e-3
# Eigenvalue of codes scaled to unit columns that counts as dependence.
_DEPENDENT = 1e-13
_DUPLICATE = 0.99


@dataclass(frozen=True)
class Survey:
    """Size and leading singular directions of the rows."""

    n_samples: int
    n_features: int
    squares: float
    mean_norm: float
    axes: Array
    tail: float
    last: float
    # Units of the rows, in those of the caller.
    unit: float = 1.0
    # Scores of the rows on the directions, where they were found on the way.
    scores: Any = None

    @property
    def bound(self) -> float:
        """Frobenius error of the truncated SVD whose rank is the number of axes."""
        return math.sqrt(self.tail) * self.unit

    @property
    def bound_previous(self) -> float:
        """The same for one axis less."""
        return math.sqrt(self.tail + self.last) * self.unit


def survey(rows: Rows, rank: int, *, center: bool) -> tuple[Rows, Survey]:
    """Return the rows (centred if asked) and their leading directions, as many as `rank`, the rows and features allow.

    Singular values come from the smaller Gram matrix in the accumulator's dtype; above 4096 rows and features, from a
    block Krylov space, and the error bounds are then slightly too large rather than exact.
    """
    xp, (n, d) = rows.xp, rows.shape
    if center:
        mean = sum(xp.sum(block, axis=0) for _, block in rows) / n
        # As it will be stored: codes of a fit and of transform then start from the same rows.
        rows = rows.centred(xp.astype(xp.astype(mean, next(iter(rows.raw())).dtype), rows.dtype))
    rank_used = min(rank, n, d)
    thin = thin_directions(rows, rank_used)
    if thin is not None:
        last = float(thin.values[-1]) if rank <= rank_used else 0.0
        return rows, Survey(n, d, thin.squares, thin.norms / n, thin.axes, thin.tail, last, scores=thin.scores)
    narrow = d <= min(n - 1, _GRAM_SIDE)
    moments, total, squares, measured = Moments(), 0.0, 0.0, False
    for raw in rows.raw():
        block = lift(rows, raw)
        lengths = xp.vecdot(block, block)
        total += float(xp.sum(xp.sqrt(lengths)))
        squares += float(xp.sum(lengths))
        if narrow:
            moments.update(block if center else raw)
            measured = measured or not (center or raw.dtype == rows.dtype)
    if narrow:
        axes, values, tail = _from_moments(xp, moments, rank_used)
        # The mean is added in the accumulator's dtype: only products of what varies are rounded to float32.
        spread = float(xp.linalg.trace(moments.scatter))
        if measured and tail <= _LOST_TAIL_SINGLE * spread:
            # Rounding of the strong directions has turned the weak ones.
            moments, measured = Moments(), False
            for _, block in rows:
                moments.update(block)
            axes, values, tail = _from_moments(xp, moments, rank_used)
        measured = measured and tail <= _SMALL_TAIL_SINGLE * spread
    else:
        axes, values = _from_rows(rows, rank_used)
        tail = squares - float(xp.sum(values))
    last = float(values[-1])
    if measured or tail <= _SMALL_TAIL * squares:
        _, tail, last = left_over(rows, axes)
    return rows, Survey(n, d, squares, total / n, axes, tail, max(last, 0.0) if rank <= rank_used else 0.0)


def _from_moments(xp: Any, moments: Moments, count: int) -> tuple[Array, Array, float]:
    """Return the leading directions and values of the Gram matrix, and what is left of its own trace.

    The trace has the rounding of the values: it cancels, where the exact squared norm of the rows would keep it.
    """
    gram = moments.gram()
    axes, values = _leading(xp, gram, count)
    return axes, values, max(float(xp.linalg.trace(gram)) - float(xp.sum(values)), 0.0)


def _leading(xp: Any, gram: Array, count: int) -> tuple[Array, Array]:
    """Return the leading eigenvectors as rows and their eigenvalues, not below zero."""
    d = int(gram.shape[0])
    if _xp.is_numpy(xp) and 2 * count < d:
        values, vectors = scipy.linalg.eigh(gram, subset_by_index=[d - count, d - 1], check_finite=False)
        axes, values = fix_signs(np.ascontiguousarray(vectors.T[::-1])), values[::-1].copy()
    else:
        values, axes = eigh_descending(gram)
    return axes[:count, :], xp.clip(values[:count], 0, None)


def _from_rows(rows: Rows, count: int) -> tuple[Array, Array]:
    """Return leading directions where there are fewer rows than features, or too many of both for a Gram matrix."""
    xp, (n, d) = rows.xp, rows.shape
    if n <= min(d, _GRAM_SIDE):
        X = xp.concat([block for _, block in rows], axis=0)
        left, _ = _leading(xp, xp.matmul(X, xp.matrix_transpose(X)), count)
        # Orthonormal also where a singular value is zero.
        axes = xp.matrix_transpose(xp.linalg.qr(xp.matrix_transpose(xp.matmul(left, X)))[0])
    else:
        axes = _krylov(rows, n, d, count)
    turn, values = _leading(xp, _projected_gram(rows, xp.matrix_transpose(axes)), count)
    return fix_signs(xp.matmul(turn, axes)), values


def _projected_gram(rows: Rows, basis: Array) -> Array:
    """Return the Gram matrix of the scores of the rows on the columns of `basis`."""
    xp = rows.xp
    gram = xp.zeros((basis.shape[1], basis.shape[1]), dtype=rows.dtype, device=rows.device)
    for _, block in rows:
        part = xp.matmul(block, basis)
        gram = gram + xp.matmul(xp.matrix_transpose(part), part)
    return gram


def _krylov(rows: Rows, n: int, d: int, count: int) -> Array:
    """Return an orthonormal basis of the leading directions from a randomised block Krylov space."""
    xp = rows.xp
    width = min(count + 8, n, d)
    draws = np.random.default_rng(0).standard_normal((d, width))
    newest = xp.linalg.qr(xp.asarray(draws, dtype=rows.dtype, device=rows.device))[0]
    basis = [newest]
    for _ in range(_KRYLOV_PASSES):
        product = xp.zeros_like(newest)
        for _, block in rows:
            product = product + xp.matmul(xp.matrix_transpose(block), xp.matmul(block, newest))
        newest = xp.linalg.qr(product)[0]
        basis.append(newest)
    # No more columns than a basis can have.
    span = xp.linalg.qr(xp.concat(basis[-max(1, min(n, d) // width) :], axis=1))[0]
    turn, _ = _leading(xp, _projected_gram(rows, span), count)
    return xp.matmul(turn, xp.matrix_transpose(span))


def unique_energies(A: Array, D: Array) -> Array:
    """Return by how much the squared error rises if an atom is dropped and the others are refitted to the same codes.

    Parameters
    ----------
    A : array of shape (k, k)
        ``Z.T @ Z``.
    D : array of shape (k, n_features)
        Atoms; least-squares atoms for Z make the formula exact.

    Returns
    -------
    array of shape (k,)
        ``|d_j|² / [(Z.T @ Z)⁻¹]_jj``; 0 for an atom without codes, and about 0 where its codes depend on the others'.
    """
    xp = _xp.array_namespace(A, D)
    diagonal = xp.linalg.diagonal(A)
    live = diagonal > 0
    scale = xp.where(live, 1 / xp.sqrt(xp.where(live, diagonal, xp.ones_like(diagonal))), xp.zeros_like(diagonal))
    unit = xp.expand_dims(scale, axis=1) * A * scale
    eye = xp.eye(A.shape[0], dtype=A.dtype, device=_xp.device(A))
    values, vectors = xp.linalg.eigh(unit + eye * xp.astype(~live, A.dtype))
    inverse = xp.sum(vectors**2 / xp.clip(values, _DEPENDENT, None), axis=1)
    return xp.where(live, xp.sum(D * D, axis=1) * diagonal / inverse, xp.zeros_like(diagonal))


def coherence(D: Array) -> tuple[float, int]:
    """Return the largest |cosine| between two of the unit atoms (0 for one), and how many repeat an earlier one.

    The count is of atoms, by their signed cosine; :func:`code_statistics` counts pairs.
    """
    xp = _xp.array_namespace(D)
    k = int(D.shape[0])
    cosines = xp.matmul(D, xp.matrix_transpose(D)) * (1 - xp.eye(k, dtype=D.dtype, device=_xp.device(D)))
    below = xp.tril(cosines, k=-1)
    repeats = xp.count_nonzero(xp.any(below >= _DUPLICATE, axis=1))
    return min(float(xp.max(xp.abs(cosines))), 1.0), int(repeats)
