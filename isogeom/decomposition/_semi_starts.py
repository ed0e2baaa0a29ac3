"""Starts of Semi-NMF from the truncated SVD: one of guaranteed error, and the optimum where it has a closed form."""

from __future__ import annotations

import numpy as np

from isogeom import _xp
from isogeom._linalg import row_norms
from isogeom._xp import Array
from isogeom.decomposition._directions import is_single, lift
from isogeom.decomposition._half_space import NO_ROW, half_space
from isogeom.decomposition._rows import Rows
from isogeom.decomposition._starts import unit_rows

# Singular value, relative to the first, that counts.
_RANK = 1e-9
# Steps by which the closed form's codes are enlarged, and its determinant, relative to its terms, that counts as zero.
_ENLARGED, _SINGULAR = 2.0 ** np.arange(-8, 9), 1e-9


def scores(rows: Rows, axes: Array, n_samples: int) -> Array:
    """Return ``rows @ axes.T``; products with float32 rows are made in float32."""
    xp, start = rows.xp, 0
    out = xp.zeros((n_samples, axes.shape[0]), dtype=rows.dtype, device=rows.device)
    columns: Array = None
    for block in rows.raw():
        block = block if is_single(rows, block) else lift(rows, block)
        if columns is None or columns.dtype != block.dtype:
            columns = xp.astype(xp.matrix_transpose(axes), block.dtype)
        stop = start + int(block.shape[0])
        out[start:stop, :] = xp.astype(xp.matmul(block, columns), rows.dtype)
        start = stop
    return out


def svd_start(C: Array, axes: Array, k: int, spare: Array) -> tuple[Array, Array]:
    """Return atoms and codes whose error is that of the SVD of rank ``k - 1``.

    With the truncated SVD written as C B and ``s_i = max(0, -min_j C_ij)``, the codes ``[C + s, s]`` are nonnegative
    and the atoms ``[B; -sum of the rows of B]`` give the same product (Gillis and Kumar 2015, section 3). For k = 1 the
    start is the leading direction, with the sign that explains more energy.

    Parameters
    ----------
    C : array of shape (n_samples, r)
        Scores on the leading right singular vectors.
    axes : array of shape (r, n_features)
        Those vectors as rows.
    k : int
        Number of atoms.
    spare : array of shape (k, n_features)
        Unit atoms to use, without codes, beyond the rank.
    """
    xp = _xp.array_namespace(C, axes)
    rank = max(1, min(k - 1, int(axes.shape[0])))
    C, axes = C[:, :rank], axes[:rank, :]
    # Signs that put more energy on the positive side keep the common offset s small.
    tilt = xp.sum(C * xp.abs(C), axis=0)
    sign = xp.where(tilt < 0, -xp.ones_like(tilt), xp.ones_like(tilt))
    C, axes = C * sign, axes * xp.expand_dims(sign, axis=1)
    if k == 1:
        return axes, xp.clip(C, 0, None)
    last, norm = unit_rows(-xp.sum(axes, axis=0, keepdims=True))
    offset = xp.clip(-xp.min(C, axis=1, keepdims=True), 0, None)
    n_spare = k - rank - 1
    empty = xp.zeros((C.shape[0], n_spare), dtype=C.dtype, device=_xp.device(C))
    D = xp.concat([axes, last, spare[:n_spare, :]], axis=0)
    return D, xp.concat([C + offset, offset * norm, empty], axis=1)


def closed_start(C: Array, axes: Array, k: int) -> tuple[Array, Array] | None:
    """Return atoms and codes whose error is that of the SVD of rank `k`, if the scores lie in an open half-space.

    With y such that x = U y > 0, every ``alpha_j >= max(0, max_i -U_ij / x_i)`` and ``T = I + y alpha^T``, the codes
    U T are nonnegative and ``T^-1 S V^T`` are their atoms (Gillis and Kumar 2015, section 4). None if there is no such
    y, or the rows have a rank below `k`.
    """
    xp = _xp.array_namespace(C, axes)
    if int(axes.shape[0]) < k:
        return None
    C, axes = C[:, :k], axes[:k, :]
    y = half_space(C)
    if y is None:
        return None
    size = xp.sqrt(xp.sum(C * C, axis=0))
    if float(xp.min(size)) <= _RANK * float(xp.max(size)):
        return None
    # Scaling the columns of U and y in opposite ways changes neither the products nor their signs.
    U, y = C / size, y * size
    x = xp.expand_dims(xp.matmul(U, y), axis=1)
    norms = xp.expand_dims(row_norms(C), axis=1)
    live = norms > NO_ROW * xp.max(norms)
    ratio = xp.where(live, -U / xp.where(live, x, xp.ones_like(x)), xp.zeros_like(U))
    # The margin covers the rounding of the products below.
    alpha = xp.clip(xp.max(ratio, axis=0), 0, None) * (1 + 1e-12)
    weights = xp.where(live, 1 / xp.where(live, norms, xp.ones_like(norms)), xp.zeros_like(norms))
    lower, normal, scale, sums = (_xp.to_numpy(a) for a in (alpha, y, size, xp.sum(U * weights, axis=0)))
    alpha = _xp.asarray_like(_least_cancelling(lower, normal, scale, sums, float(xp.sum(x * weights))), C)
    codes = xp.where(live, xp.clip(U + x * alpha, 0, None), xp.zeros_like(U))
    weighted = xp.expand_dims(size, axis=1) * axes
    outer = xp.expand_dims(y, axis=1) * xp.expand_dims(xp.matmul(alpha, weighted), axis=0)
    D, lengths = unit_rows(weighted - outer / (1 + float(xp.sum(alpha * y))))
    return D, codes * lengths


def _least_cancelling(
    alpha: np.ndarray, y: np.ndarray, size: np.ndarray, codes: np.ndarray, shift: float
) -> np.ndarray:
    """Return `alpha`, or a larger one whose codes cancel less: those of its sum with multiples of y+ or y- do.

    Where ``1 + alpha @ y``, the determinant of T, is near zero, atoms are long and their codes large. The sum of the
    relative lengths of all codes, ``sum_ij z_ij |d_j| / |x_i|``, takes no pass over the rows: the sums over the rows
    are ``codes + shift * alpha``, and ``d_j`` is ``s_j v_j - y_j sum_l alpha_l s_l v_l / (1 + alpha @ y)`` for
    orthonormal ``v``.
    """
    candidates = [alpha]
    for way in (np.clip(y, 0, None), np.clip(-y, 0, None)):
        largest = way.max()
        if largest > 0:
            # Of the order of alpha or, where that is next to nothing, of what turns the determinant.
            unit = max(alpha.max(), 1 / np.abs(y).max()) / largest
            candidates += [alpha + step * unit * way for step in _ENLARGED]

    def cancellation(a: np.ndarray) -> float:
        pivot = 1 + a @ y
        if abs(pivot) < _SINGULAR * (1 + np.abs(a) @ np.abs(y)):
            return np.inf
        squares = size**2 * (1 - 2 * y * a / pivot) + y**2 * np.sum((a * size) ** 2) / pivot**2
        return float((codes + shift * a) @ np.sqrt(np.clip(squares, 0, None)))

    return min(candidates, key=cancellation)
