"""Starts of Semi-NMF from the truncated SVD: one of guaranteed error, and the optimum where it has a closed form."""

from __future__ import annotations

from isogeom import _xp
from isogeom._linalg import row_norms
from isogeom._xp import Array
from isogeom.decomposition._directions import is_single, lift
from isogeom.decomposition._rows import Rows
from isogeom.decomposition._starts import unit_rows

# Steps of the search for a half-space, and the work (multiplications) it may take.
_SEARCH_STEPS, _SEARCH_WORK = 200, 1e8
# Rows from which the search first runs on the worst ones, and number of these.
_MANY_ROWS, _WORST_ROWS = 8192, 2048
# Smallest cosine between a row and the normal of the half-space; singular value, relative to the first, that counts.
_MARGIN, _RANK = 1e-6, 1e-9


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


def half_space(C: Array) -> Array | None:
    """Return y with ``C @ y > 0`` for every nonzero row of `C`, or None if none was found.

    The mean direction and the first axis are tried, then the point of the convex hull of the row directions that is
    nearest to the origin is approached (von Neumann's algorithm): it is such a y if one exists. A half-space of many
    rows is one of those that stand worst to the mean direction: where these have none, the others are not looked at.
    """
    xp = _xp.array_namespace(C)
    norms = xp.sqrt(xp.vecdot(C, C))
    live = xp.nonzero(norms > _RANK * xp.max(norms))[0]
    n, width = int(live.shape[0]), int(C.shape[1])
    if n == 0:
        return None
    if n < C.shape[0]:
        C, norms = xp.take(C, live, axis=0), xp.take(norms, live, axis=0)
    first = xp.zeros_like(C[0, :])
    first[0] = 1.0 if float(xp.sum(C[:, 0] / norms)) >= 0 else -1.0
    total = xp.sum(C, axis=0)
    cosines = xp.matmul(C, total) / norms
    for y, products in ((total, cosines), (first, C[:, 0] * first[0] / norms)):
        size = float(xp.linalg.vector_norm(y))
        if size > 0 and float(xp.min(products)) > _MARGIN * size:
            return y / size
    steps = int(min(_SEARCH_STEPS, max(10, _SEARCH_WORK // (n * width))))
    if n >= _MANY_ROWS:
        worst = xp.argsort(cosines, stable=True)[:_WORST_ROWS]
        W = xp.take(C, worst, axis=0) / xp.expand_dims(xp.take(norms, worst, axis=0), axis=1)
        if _nearest(W, steps) is None:
            return None
    return _nearest(C / xp.expand_dims(norms, axis=1), steps)


def _nearest(W: Array, steps: int) -> Array | None:
    """Approach the point of the convex hull of the unit rows that is nearest to the origin, until all are on its side.

    None if that takes more than so many steps.
    """
    xp = _xp.array_namespace(W)
    y = xp.mean(W, axis=0)
    for _ in range(steps):
        products = xp.matmul(W, y)
        worst = int(xp.argmin(products))
        size = float(xp.linalg.vector_norm(y))
        if size == 0:
            return None
        if float(products[worst]) > _MARGIN * size:
            return y / size
        step = W[worst, :] - y
        length = -float(xp.sum(y * step)) / float(xp.sum(step * step))
        y = y + min(max(length, 0.0), 1.0) * step
    return None


def closed_start(C: Array, axes: Array, k: int) -> tuple[Array, Array] | None:
    """Return atoms and codes whose error is that of the SVD of rank `k`, if the scores lie in an open half-space.

    With y such that x = U y > 0, ``alpha_j = max(0, max_i -U_ij / x_i)`` and ``T = I + y alpha^T``, the codes U T are
    nonnegative and ``T^-1 S V^T`` are their atoms (Gillis and Kumar 2015, section 4). None if there is no such y, or
    the rows have a rank below `k`.
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
    live = norms > _RANK * xp.max(norms)
    ratio = xp.where(live, -U / xp.where(live, x, xp.ones_like(x)), xp.zeros_like(U))
    # The margin covers the rounding of the products below.
    alpha = xp.clip(xp.max(ratio, axis=0), 0, None) * (1 + 1e-12)
    pivot = 1 + float(xp.sum(alpha * y))
    if abs(pivot) < 1e-6:
        alpha, pivot = 2 * alpha, 2 * pivot - 1
    codes = xp.where(live, xp.clip(U + x * alpha, 0, None), xp.zeros_like(U))
    weighted = xp.expand_dims(size, axis=1) * axes
    outer = xp.expand_dims(y, axis=1) * xp.expand_dims(xp.matmul(alpha, weighted), axis=0)
    D, lengths = unit_rows(weighted - outer / pivot)
    return D, codes * lengths
