"""Rows in the precision and the units that a pass needs, and leading directions of float32 rows from thin products."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from isogeom import _xp
from isogeom._linalg import eigh_descending, fix_signs
from isogeom._xp import Array, Namespace
from isogeom.decomposition._rows import Rows

# Rows and passes of the search for a first guess, fewest columns beyond those asked for, and passes over all rows.
_SAMPLE, _SAMPLE_PASSES, _EXTRA, _PASSES = 1024, 3, 4, 3
# Entries below which the Gram matrix is as fast; features per direction from which thin products are faster.
_SIZE, _THIN = 2**20, 6
# The spectrum must drop to this share behind the last direction: each pass divides the error by about its inverse.
_DROP = 0.1
# Share of what the last direction holds that may be left over where angles are to be bounded.
_MOST_LEFT = 0.5
# Share of the squared norm that must be left over: directions from float32 products are known well enough for so much.
# And the share below which it is measured on the rows: sums of such products know it to about 1e-8 of the whole.
_LEAST_TAIL, _SMALL_TAIL = 1e-5, 1e-2
# Largest entry of float64 rows from which, and from its inverse, a fit takes other units.
_TINY = 1e-120
# Squared norms of rows beyond this, or its inverse, are left to float64.
_LEAST_SQUARE = 1e-25
# Proven relative error of the tail at which to stop.
_ACCURACY = 1e-7


def lift(rows: Rows, block: Array) -> Array:
    """Return a block of ``rows.raw()`` in the accumulator's dtype and centred: one reading serves both."""
    lifted = rows.xp.astype(block, rows.dtype, copy=rows.batched)
    return lifted if rows.mean is None else lifted - rows.mean


def moderate(rows: Rows) -> tuple[Rows, float]:
    """Return the rows, divided by a power of two if their squares leave the range of float64, and that power.

    The division is exact, so that a fit of the quotient is the fit of the rows in other units.
    """
    xp, largest = rows.xp, 0.0
    # Squares of float32 are far inside.
    if rows.mean is None and next(iter(rows.raw())).dtype == rows.dtype and xp.finfo(rows.dtype).bits == 64:
        for block in rows.raw():
            largest = max(largest, float(xp.max(block)), -float(xp.min(block)))
    if largest == 0 or _TINY < largest < 1 / _TINY:
        return rows, 1.0
    unit = math.ldexp(1.0, max(min(math.frexp(largest)[1], 1000), -1000))
    return _Divided(rows, unit), unit


class _Divided(Rows):
    """Rows of another source divided by a power of two."""

    def __init__(self, source: Rows, unit: float) -> None:
        super().__init__(source.read, next(iter(source.raw())), chunk=source.chunk, shape=source.shape)
        self.source, self.unit = source, unit

    def raw(self) -> Iterator[Array]:
        """Yield the blocks of the source, divided."""
        for block in self.source.raw():
            yield block / self.unit

    def centred(self, mean: Array) -> Rows:
        """Return the same rows minus `mean`, given in the units of the quotient."""
        rows = _Divided(self.source, self.unit)
        rows.mean = mean
        return rows


def is_single(rows: Rows, block: Array) -> bool:
    """Tell whether products of a block of ``rows.raw()`` may be made in float32: rows as they are, and no TF32."""
    return rows.mean is None and block.dtype == rows.xp.float32 and _xp.float32_products_exact(rows.xp)


def cheap(rows: Rows, block: Array) -> tuple[Array, Array]:
    """Return a block of ``rows.raw()`` as it is if float32 products do for it, else lifted; and its squared norms."""
    xp = rows.xp
    if is_single(rows, block):
        with np.errstate(over="ignore", under="ignore"):
            squares = xp.vecdot(block, block)
        if _LEAST_SQUARE < float(xp.max(squares)) < 1 / _LEAST_SQUARE:
            return block, xp.astype(squares, rows.dtype)
    block = lift(rows, block)
    return block, xp.vecdot(block, block)


@dataclass(frozen=True)
class Thin:
    """Leading directions as rows, eigenvalues of the Gram matrix, scores, and what they leave of the squared norm.

    Also the squared norm itself, and the sum of the norms of rows.
    """

    axes: Array
    values: Array
    scores: Array
    tail: float
    squares: float
    norms: float


def thin_directions(
    rows: Rows, count: int, *, largest_sine: float | None = None, basis: Array | None = None
) -> Thin | None:
    """Return the leading directions of the rows and what was found on the way.

    A block of directions (`basis`, by default from :func:`guess_directions`) is multiplied by the Gram matrix of all
    rows, without forming it. At every pass the residual of the directions bounds how much of the squared norm they
    miss; None if that does not become negligible soon, or products in the dtype of the rows are not accurate enough.

    With `largest_sine`, the sine of the largest angle to the leading directions is bounded instead, and that none was
    overlooked is proved: all the rest of the squared norm must be smaller than what the last direction holds.
    """
    xp, n = rows.xp, rows.shape[0]
    first = next(iter(rows.raw()))
    basis = guess_directions(rows, count) if basis is None else basis
    sizes, settled = None, False
    for _ in range(_PASSES if basis is not None else 0):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            sizes, scores, cross, gram = _thin_products(rows, basis, sizes, only_scores=settled)
        norms, squares = sizes
        if not n * _LEAST_SQUARE < squares < 1 / _LEAST_SQUARE:
            return None
        wide = xp.astype(basis, rows.dtype)
        values, turn = ritz(xp, gram, wide)
        axes = xp.matmul(turn, xp.matrix_transpose(wide))[:count, :]
        tail = squares - float(xp.sum(values[:count]))
        # The next value is known from below only: twice that much is taken for its limit. No value exceeds the tail.
        beyond = 2 * float(values[count]) if largest_sine is None else max(tail, 2 * float(values[count]))
        gap = float(values[count - 1]) - beyond
        if gap <= 0 or (largest_sine is None and tail < _LEAST_TAIL * squares):
            return None
        if not settled:
            missed = xp.matmul(turn, cross)[:count, :] - xp.expand_dims(values[:count], axis=1) * axes
            missed = float(xp.sum(missed * missed))
        allowed = _ACCURACY * tail * gap if largest_sine is None else (largest_sine * gap) ** 2
        if settled or missed <= allowed:
            final, inside = _finish(rows, axes, turn[:count, :], scores)
            if largest_sine is None and tail < _SMALL_TAIL * squares:
                squares, tail, _ = left_over(rows, final, inside)
            return Thin(final, values[:count], inside, tail, squares, norms)
        basis = xp.astype(xp.linalg.qr(xp.matrix_transpose(cross))[0], first.dtype)
        # The residual over the gap bounds the sine of the angle to the leading directions (Davis and Kahan). The
        # product with the Gram matrix divided its tangent by the drop of the spectrum; energy is lost with its square.
        sine = missed / gap**2
        angle = sine / (1 - sine) * (beyond / float(values[count - 1])) ** 2 if sine < 1 else math.inf
        settled = float(values[0]) * angle <= _ACCURACY * tail if largest_sine is None else angle <= largest_sine**2
    return None


def _finish(rows: Rows, axes: Array, turn: Array, scores: list[Array]) -> tuple[Array, Array]:
    """Return the directions with the signs they shall have, and the scores on them."""
    xp, final = rows.xp, fix_signs(axes)
    # The signs of the turn follow those of the directions.
    signs = xp.sum(axes * final, axis=1, keepdims=True)
    columns = xp.matrix_transpose(turn * signs)
    # A rounded turn would shift the scores of all rows alike.
    inside = xp.empty((rows.shape[0], axes.shape[0]), dtype=rows.dtype, device=rows.device)
    start = 0
    for Y in scores:
        stop = start + int(Y.shape[0])
        inside[start:stop, :] = xp.matmul(xp.astype(Y, rows.dtype), columns)
        start = stop
    return final, inside


def left_over(rows: Rows, axes: Array, scores: Array | None = None) -> tuple[float, float, float]:
    """Return the squared norms of the rows, of what orthonormal axes leave of them, and of the scores on the last axis.

    Measured on the residual of every row: a difference of the first and of squared scores would lose a small rest. With
    `scores`, which must then be those of the rows on the axes, the product is made in the dtype of the rows.
    """
    xp, start = rows.xp, 0
    squares, tail, last = 0.0, 0.0, 0.0
    columns = xp.matrix_transpose(axes)
    for raw in rows.raw():
        block = lift(rows, raw)
        squares += float(xp.sum(xp.vecdot(block, block)))
        if scores is None:
            inside = xp.matmul(block, columns)
            residual = block - xp.matmul(inside, axes)
        else:
            inside = scores[start : start + int(raw.shape[0]), :]
            residual = raw - xp.matmul(xp.astype(inside, raw.dtype), xp.astype(axes, raw.dtype))
        tail += float(xp.sum(xp.astype(xp.vecdot(residual, residual), rows.dtype)))
        last += float(xp.sum(inside[:, -1] ** 2))
        start += int(raw.shape[0])
    return squares, tail, last


def guess_directions(rows: Rows, count: int, *, centred: bool = False) -> Array | None:
    """Return a basis near the leading directions, as columns, from a sample of the rows.

    None where thin products are not faster, are not accurate, or the spectrum does not drop behind `count` directions.

    If `centred`, the sample is less its mean, and for the sake of proofs all the rest of the squared norm must be less
    than half of what the last direction holds.
    """
    xp, (n, d) = rows.xp, rows.shape
    # A multiple of 8: the inner loops of products have no remainder.
    width = -(-(count + _EXTRA) // 8) * 8
    if not is_single(rows, next(iter(rows.raw()))) or n * d < _SIZE or width * _THIN > d or n <= _SAMPLE:
        return None
    rng = np.random.default_rng(0)
    chosen, start, parts = np.sort(rng.choice(n, size=_SAMPLE, replace=False)), 0, []
    for block in rows.raw():
        inside = chosen[(chosen >= start) & (chosen < start + block.shape[0])] - start
        start += block.shape[0]
        if inside.size:
            parts.append(xp.take(block, xp.asarray(inside, dtype=xp.int64, device=rows.device), axis=0))
    sample = xp.concat(parts, axis=0)
    if centred:
        first = sample[:1, :]
        sample = sample - (first + xp.mean(sample - first, axis=0))
    if not _LEAST_SQUARE < float(xp.max(sample)) ** 2 < 1 / _LEAST_SQUARE:
        # Squares leave the range of float32.
        return None
    basis = xp.asarray(rng.standard_normal((d, width)), dtype=sample.dtype, device=rows.device)
    for _ in range(_SAMPLE_PASSES):
        scores = xp.matmul(sample, basis)
        basis = xp.linalg.qr(xp.matmul(xp.matrix_transpose(sample), scores))[0]
    values = xp.linalg.svdvals(xp.matmul(sample, basis)) ** 2
    last = float(values[count - 1])
    if centred and float(xp.sum(sample * sample)) - float(xp.sum(values[:count])) > _MOST_LEFT * last:
        return None
    return basis if float(values[count]) <= _DROP * last else None


def _thin_products(
    rows: Rows, basis: Array, sizes: tuple[float, float] | None, *, only_scores: bool
) -> tuple[tuple[float, float], list[Array], Array, Array]:
    """Return the sums of norms and of squared norms; ``Y = X @ basis`` in blocks, ``Y.T @ X`` and ``Y.T @ Y``.

    The first are computed where `sizes` does not have them already, ``Y.T @ X`` (else zero) unless `only_scores`.
    """
    xp = rows.xp
    cross = xp.zeros((basis.shape[1], basis.shape[0]), dtype=rows.dtype, device=rows.device)
    gram = xp.zeros((basis.shape[1], basis.shape[1]), dtype=rows.dtype, device=rows.device)
    norms, squares = 0.0, 0.0
    kept = []
    for block in rows.raw():
        if sizes is None:
            lengths = xp.astype(xp.vecdot(block, block), rows.dtype)
            norms, squares = norms + float(xp.sum(xp.sqrt(lengths))), squares + float(xp.sum(lengths))
        scores = xp.matmul(block, basis)
        if not only_scores:
            cross = cross + xp.astype(xp.matmul(xp.matrix_transpose(scores), block), rows.dtype)
        kept.append(scores)
        # Sums of squares of one sign lose a digit in float32.
        scores = xp.astype(scores, rows.dtype)
        gram = gram + xp.matmul(xp.matrix_transpose(scores), scores)
    return (norms, squares) if sizes is None else sizes, kept, cross, gram


def ritz(xp: Namespace, gram: Array, basis: Array) -> tuple[Array, Array]:
    """Return falling eigenvalues in the span of the basis, and their directions as combinations of it (rows).

    `gram` is that of the scores on the columns of the basis.

    The rounded basis is orthonormal to float32 only: its own Gram matrix is divided out.
    """
    lower = xp.linalg.cholesky(xp.matmul(xp.matrix_transpose(basis), basis))
    inverse = xp.linalg.inv(lower)
    values, turn = eigh_descending(xp.matmul(xp.matmul(inverse, gram), xp.matrix_transpose(inverse)))
    return values, xp.matmul(turn, inverse)
