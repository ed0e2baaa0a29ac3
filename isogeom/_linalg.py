"""Small linear algebra shared by the estimators, on any array library."""

from __future__ import annotations

import numpy as np
from scipy.linalg import get_lapack_funcs

from isogeom import _xp
from isogeom._xp import Array

# Below this size a full eigendecomposition costs less than choosing among its steps.
_SMALL_MATRIX = 512
# Columns per blocked step of LAPACK, for the size of its workspace.
_LAPACK_BLOCK = 64


def eigh_descending(symmetric: Array) -> tuple[Array, Array]:
    """Return eigenvalues in descending order and the eigenvectors as rows, signs fixed by :func:`fix_signs`."""
    xp = _xp.array_namespace(symmetric)
    values, vectors = xp.linalg.eigh(symmetric)
    rows = xp.flip(xp.matrix_transpose(vectors), axis=0)
    return xp.flip(values, axis=0), fix_signs(rows)


def fix_signs(rows: Array) -> Array:
    """Flip each row so that its entry of largest absolute value is positive (scikit-learn's PCA convention)."""
    xp = _xp.array_namespace(rows)
    pivot = _xp.largest_by(xp, rows, axis=1)
    one = xp.ones_like(pivot)
    return rows * xp.where(pivot < 0, -one, one)


def row_norms(rows: Array) -> Array:
    """Return the Euclidean norm of every row."""
    xp = _xp.array_namespace(rows)
    return xp.sqrt(xp.sum(rows * rows, axis=1))


def complement_basis(basis: Array) -> Array:
    """Return orthonormal rows spanning the orthogonal complement of the row span of `basis`.

    Parameters
    ----------
    basis : array of shape (r, d)
        Orthonormal rows, r < d.

    Returns
    -------
    array of shape (d - r, d)
        The last rows of a complete QR factorisation of ``basis.T``.
    """
    xp = _xp.array_namespace(basis)
    q, _ = xp.linalg.qr(xp.matrix_transpose(basis), mode="complete")
    return xp.matrix_transpose(q)[basis.shape[0] :, :]


def quadratic_form(rows: Array, symmetric: Array) -> Array:
    """Return ``rows @ symmetric @ rows.T``, symmetrised against rounding."""
    xp = _xp.array_namespace(rows, symmetric)
    product = xp.matmul(xp.matmul(rows, symmetric), xp.matrix_transpose(rows))
    return (product + xp.matrix_transpose(product)) / 2


def captured(rows: Array, symmetric: Array) -> float:
    """Return ``trace(rows @ symmetric @ rows.T)`` as a Python float, without forming the product of both sides."""
    xp = _xp.array_namespace(rows, symmetric)
    return float(xp.sum(xp.matmul(rows, symmetric) * rows))


def participation_ratio(covariance: Array) -> float:
    """Return ``trace(C)**2 / ||C||_F**2``, or NaN for the zero matrix (callers turn that into an error)."""
    xp = _xp.array_namespace(covariance)
    # Dividing by the largest entry keeps the squares away from overflow and underflow; the ratio has no scale.
    largest = float(xp.max(xp.abs(covariance)))
    if largest == 0:
        return float("nan")
    scaled = covariance / largest
    trace = float(xp.linalg.trace(scaled))
    return trace * trace / float(xp.sum(scaled * scaled))


def remove_directions(covariance: Array, basis: Array) -> Array:
    """Return ``P C P`` with ``P = I - basis.T @ basis``: the covariance after the directions are projected out."""
    xp = _xp.array_namespace(covariance, basis)
    projected = covariance - xp.matmul(xp.matrix_transpose(basis), xp.matmul(basis, covariance))
    projected = projected - xp.matmul(xp.matmul(projected, xp.matrix_transpose(basis)), basis)
    return (projected + xp.matrix_transpose(projected)) / 2


def eigh_top(symmetric: Array, k: int) -> tuple[Array, Array]:
    """Return all eigenvalues in descending order, and the first `k` eigenvectors as rows, signs fixed.

    The same numbers as :func:`eigh_descending` with the rows cut to `k`. On numpy it costs less than half of that for
    small `k`: the reduction to tridiagonal form is shared by the values and the few vectors.
    """
    d = int(symmetric.shape[0])
    if isinstance(symmetric, np.ndarray) and d >= _SMALL_MATRIX and k <= d // 8:
        found = _tridiagonal_top(symmetric, k)
        if found is not None:
            return found
    values, rows = eigh_descending(symmetric)
    return values, rows[:k, :]


def _tridiagonal_top(symmetric: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray] | None:
    """`eigh_top` through LAPACK's steps: reduce, all values, `k` vectors, rotate back; None if a step fails."""
    d = symmetric.shape[0]
    # A power of two scales without rounding, and keeps products inside the steps away from overflow and underflow.
    exponent = int(np.frexp(np.max(np.abs(symmetric)))[1])
    # The transpose of a symmetric matrix is the same matrix, in the order that LAPACK wants.
    scaled = np.ldexp(symmetric, -exponent).T
    reduce, values_of, vectors_of, rotate = get_lapack_funcs(("sytrd", "sterf", "stemr", "ormqr"), (scaled,))
    reflectors, diagonal, off, tau, info = reduce(scaled, lower=1, lwork=_LAPACK_BLOCK * d, overwrite_a=1)
    if info != 0:
        return None
    values, info = values_of(diagonal, off)
    if info != 0 or not np.all(np.isfinite(values)):
        return None
    padded = np.append(off, 0.0)
    found, _, vectors, info = vectors_of(diagonal, padded, 2, 0.0, 0.0, d - k + 1, d, lwork=18 * d, liwork=10 * d)
    if info != 0 or found != k:
        return None
    # The reflectors leave the first coordinate alone: rotating back concerns the others.
    rotated, _, info = rotate("L", "N", reflectors[1:, :-1], tau, vectors[1:, :k], lwork=_LAPACK_BLOCK * max(k, d))
    if info != 0:
        return None
    rows = np.concatenate([vectors[:1, :k], rotated], axis=0).T[::-1]
    return np.ldexp(values[::-1], exponent), fix_signs(np.ascontiguousarray(rows))
