"""Small linear algebra shared by the estimators, on any array library."""

from __future__ import annotations

from isogeom import _xp
from isogeom._xp import Array


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
