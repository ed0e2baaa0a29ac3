"""The steps of Semi-NMF as pure functions: exact codes, and the alternation of code and atom steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from isogeom import _xp
from isogeom._linalg import row_norms
from isogeom._xp import Array, Namespace
from isogeom.decomposition._nnls import coordinate_sweeps, nnls_shared_gram
from isogeom.decomposition._starts import unit_rows

# Sweeps of coordinate descent on the codes, and passes over the atoms, in one iteration.
_SWEEPS = 3
_ATOM_PASSES = 3
# How often dead atoms are moved before they are left alone.
_MOVES = 5


def encode(X: Array, components: Array, penalty: float) -> tuple[Array, float]:
    """Return the exact codes of the rows for fixed atoms, in the dtype of `X`, and their largest residual."""
    xp = _xp.array_namespace(X, components)
    D = xp.astype(components, _xp.accumulator_dtype(xp, _xp.device(X)))
    columns = xp.matrix_transpose(D)
    gram = xp.matmul(D, columns)
    codes, worst = [], 0.0
    for block in _xp.row_blocks(X):
        Z, residual, _ = nnls_shared_gram(gram, xp.matmul(xp.astype(block, D.dtype), columns), alpha=penalty)
        codes.append(xp.astype(Z, X.dtype))
        worst = max(worst, residual)
    return (codes[0] if len(codes) == 1 else xp.concat(codes, axis=0)), worst


def norms(X: Array) -> tuple[float, float]:
    """Return the mean norm of the rows and the squared Frobenius norm, both summed in the accumulator's dtype."""
    xp = _xp.array_namespace(X)
    acc = _xp.accumulator_dtype(xp, _xp.device(X))
    total, squares = 0.0, 0.0
    for block in _xp.row_blocks(X):
        lengths = row_norms(xp.astype(block, acc))
        total += float(xp.sum(lengths))
        squares += float(xp.sum(lengths * lengths))
    return total / X.shape[0], squares


def residuals(X: Array, codes: Iterable[Array], D: Array) -> Iterator[Array]:
    """Yield ``X - Z @ D`` per row block, in the accumulator's dtype; `codes` yields Z per row block."""
    xp = _xp.array_namespace(X, D)
    acc = _xp.accumulator_dtype(xp, _xp.device(X))
    D = xp.astype(D, acc)
    for block, Z in zip(_xp.row_blocks(X), codes):
        yield xp.astype(block, acc) - xp.matmul(xp.astype(Z, acc), D)


def alternate(
    X: Array, D: Array, codes: list[Array], squares: float, *, penalty: float, max_iter: int, tol: float
) -> tuple[Array, list[float], float]:
    """Alternate atom and code steps from a start; every step lowers the objective or leaves it.

    Parameters
    ----------
    X : array of shape (n_samples, n_features)
        Rows.
    D : array of shape (k, n_features)
        Unit atoms, in the accumulator's dtype.
    codes : list of arrays of shape (block, k)
        Starting codes per row block, same dtype; replaced in place.
    squares : float
        Squared Frobenius norm of X.
    penalty : float
        Absolute weight of the l1 penalty.
    max_iter : int
        Largest number of iterations.
    tol : float
        Relative decrease of the objective at which to stop.

    Returns
    -------
    D : array of shape (k, n_features)
        Unit atoms.
    path : list of float
        Objective after a first code step, and after every iteration.
    decrease : float
        Last relative decrease; 0 if the fit is exact to rounding, infinite if dead atoms were moved just then.
    """
    xp = _xp.array_namespace(X, D)
    # Half a squared norm that cannot be told from zero in sums of this size.
    floor = 10 * float(xp.finfo(D.dtype).eps) * squares
    A, B, sums = _code_step(X, D, codes, penalty)
    path = [_objective(A, B, sums, D, squares, penalty)]
    moves, decrease = _MOVES, math.inf
    while len(path) <= max_iter and decrease > tol:
        D, lengths = _atom_step(xp, A, B, D, penalty)
        for i, Z in enumerate(codes):
            codes[i] = Z * lengths
        dead = xp.linalg.diagonal(A) * lengths <= 0
        moved = False
        if moves and bool(xp.any(dead)):
            D, moved = _move_dead_atoms(X, D, codes, dead, max(penalty, math.sqrt(floor)))
            moves -= 1
        A, B, sums = _code_step(X, D, codes, penalty)
        path.append(_objective(A, B, sums, D, squares, penalty))
        fall = math.inf if moved else max(path[-2] - path[-1], 0.0)
        decrease = fall / path[-1] if path[-1] > floor else 0.0
    return D, path, decrease


def _code_step(X: Array, D: Array, codes: list[Array], penalty: float) -> tuple[Array, Array, Array]:
    """Improve the codes of every block; return Z^T Z, Z^T X and the column sums of Z."""
    xp = _xp.array_namespace(X, D)
    columns = xp.matrix_transpose(D)
    gram = xp.matmul(D, columns)
    A, B, sums = xp.zeros_like(gram), xp.zeros_like(D), xp.zeros_like(D[:, 0])
    for i, block in enumerate(_xp.row_blocks(X)):
        rows = xp.astype(block, D.dtype)
        Z = coordinate_sweeps(gram, xp.matmul(rows, columns), codes[i], alpha=penalty, n_sweeps=_SWEEPS)
        transposed = xp.matrix_transpose(Z)
        A, B = A + xp.matmul(transposed, Z), B + xp.matmul(transposed, rows)
        sums = sums + xp.sum(Z, axis=0)
        codes[i] = Z
    return A, B, sums


def _objective(A: Array, B: Array, sums: Array, D: Array, squares: float, penalty: float) -> float:
    """Return the objective from the statistics of the codes: no pass over the rows."""
    xp = _xp.array_namespace(A, B, D)
    fit = squares - 2 * float(xp.sum(B * D)) + float(xp.sum(xp.matmul(A, D) * D))
    return max(fit, 0.0) / 2 + penalty * float(xp.sum(sums))


def _atom_step(xp: Namespace, A: Array, B: Array, D: Array, penalty: float) -> tuple[Array, Array]:
    """Return better atoms, scaled to unit norm, and the lengths to scale the codes by in return."""
    new = _bounded_atoms(xp, A, B, D) if penalty > 0 else _least_squares_atoms(xp, A, B, D)
    return unit_rows(new)


def _least_squares_atoms(xp: Namespace, A: Array, B: Array, D: Array) -> Array:
    """Return the least-squares atoms, as the smallest change of `D`; directions the codes do not resolve stay."""
    diagonal = xp.linalg.diagonal(A)
    live = diagonal > 0
    scale = xp.where(live, 1 / xp.sqrt(xp.where(live, diagonal, xp.ones_like(diagonal))), xp.zeros_like(diagonal))
    rows = xp.expand_dims(scale, axis=1)
    # Codes scaled to unit columns: the eigenvalues then measure dependence only, not units.
    values, vectors = xp.linalg.eigh(rows * A * xp.expand_dims(scale, axis=0))
    keep = values > 1e6 * float(xp.finfo(A.dtype).eps)
    inverse = xp.where(keep, 1 / xp.where(keep, values, xp.ones_like(values)), xp.zeros_like(values))
    gap = rows * (B - xp.matmul(A, D))
    parts = xp.expand_dims(inverse, axis=1) * xp.matmul(xp.matrix_transpose(vectors), gap)
    return D + rows * xp.matmul(vectors, parts)


def _bounded_atoms(xp: Namespace, A: Array, B: Array, D: Array) -> Array:
    """Return atoms after passes of exact minimisation, one atom at a time, over the ball of norm 1."""
    D = xp.asarray(D, copy=True)
    diagonal = xp.linalg.diagonal(A)
    live = diagonal > 0
    inverse = xp.where(live, 1 / xp.where(live, diagonal, xp.ones_like(diagonal)), xp.zeros_like(diagonal))
    for _ in range(_ATOM_PASSES):
        for j in range(int(D.shape[0])):
            atom = D[j, :] + (B[j, :] - xp.matmul(A[j, :], D)) * inverse[j]
            D[j, :] = atom / xp.clip(xp.linalg.vector_norm(atom), 1, None)
    return D


def _move_dead_atoms(X: Array, D: Array, codes: list[Array], dead: Array, threshold: float) -> tuple[Array, bool]:
    """Point atoms without codes at the rows with the largest residuals; nothing changes in the product ``Z @ D``.

    Only rows whose residual is longer than `threshold` can use an atom.
    """
    xp = _xp.array_namespace(X, D)
    lengths = xp.concat([row_norms(block) for block in residuals(X, codes, D)], axis=0)
    worst = xp.argsort(lengths, descending=True, stable=True)
    D, moved = xp.asarray(D, copy=True), False
    targets = [j for j in range(int(D.shape[0])) if bool(dead[j])]
    for rank, j in enumerate(targets[: X.shape[0]]):
        i = int(worst[rank])
        if float(lengths[i]) <= threshold:
            break
        block, offset = divmod(i, _xp.BLOCK_ROWS)
        Z = codes[block][offset : offset + 1, :]
        residual = next(residuals(X[i : i + 1, :], [Z], D))
        D[j, :] = unit_rows(residual)[0][0, :]
        moved = True
    return D, moved
