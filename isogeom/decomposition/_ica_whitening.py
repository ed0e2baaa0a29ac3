"""Whitening for independent component analysis: from streamed moments, in float32 where that is exact enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isogeom import _xp
from isogeom._linalg import eigh_descending, eigh_top
from isogeom._moments import Moments
from isogeom._xp import Array, Namespace
from isogeom.decomposition._directions import guess_directions, thin_directions
from isogeom.decomposition._rows import Rows

# Products of float32 rows leave errors of about 1e-7 of the largest variance in the covariance: a kept direction with
# a thousandth of it is then known to 1e-4, and the second step makes the kept coordinates white to rounding.
SAFE_RATIO = 1e-3
# Largest sine of the angle between directions from thin products and the leading ones: what full products of float32
# rows allow at that ratio.
_LARGEST_SINE = 1e-4
# Larger than in other streamed products: a (d, d) product is converted to float64 once per block.
_PRODUCT_ROWS = 2 * _xp.BLOCK_ROWS


@dataclass(frozen=True)
class Spectrum:
    """Principal variances of the rows, largest first: at least those wanted, and the directions wanted."""

    mean: Array
    variances: Array
    directions: Array
    # Number of variances above rounding, or min(n - 1, d) or `wanted` where float32 products were enough to see that.
    rank: int
    exact: bool
    # Centred rows on the directions, where they were found on the way.
    scores: Array | None = None


def principal_spectrum(X: Array, wanted: int | None) -> Spectrum:
    """Return the spectrum of the covariance, accurate for its `wanted` largest variances (None: for all).

    float32 rows are multiplied in float32 first, by a few directions where these hold nearly all of the variance. The
    result stands if the smallest variance wanted is at least ``SAFE_RATIO`` of the largest; otherwise the products are
    repeated in float64.
    """
    xp = _xp.array_namespace(X)
    acc = _xp.accumulator_dtype(xp, _xp.device(X))
    most = min(X.shape[0] - 1, X.shape[1])
    wanted = most if wanted is None else wanted
    if X.dtype != acc and wanted <= most:
        thin = _thin_spectrum(X, wanted)
        if thin is not None:
            return thin
        moments = Moments().update(X, block_rows=_PRODUCT_ROWS)
        variances, directions = eigh_top(moments.covariance(ddof=0), wanted)
        if float(variances[wanted - 1]) > SAFE_RATIO * float(variances[0]):
            return Spectrum(moments.mean, variances, directions, wanted, exact=False)
    moments = _exact_moments(X)
    variances, directions = eigh_top(moments.covariance(ddof=0), wanted)
    return Spectrum(moments.mean, variances, directions, _numerical_rank(xp, variances, moments, X.dtype), exact=True)


def _thin_spectrum(X: Array, wanted: int) -> Spectrum | None:
    """Return the wanted part of the spectrum from thin products; None unless they are known to give it."""
    xp, (n, d) = _xp.array_namespace(X), X.shape
    plain = Rows.of_array(X)
    basis = guess_directions(plain, wanted, centred=True)
    if basis is None:
        return None
    total = xp.zeros((d,), dtype=plain.dtype, device=plain.device)
    first = X[:1, :]
    for block in plain.raw():
        # Sums of differences to one row: a large mean costs no digits.
        total = total + xp.astype(xp.sum(block - first, axis=0), plain.dtype)
    mean = xp.astype(first[0, :], plain.dtype) + total / n
    shift = xp.astype(mean, X.dtype)
    # In the dtype of `X`, unlike plain.centred(mean): thin products are for rows in float32.
    centred = Rows(lambda: (block - shift for block in plain.raw()), X, chunk=plain.chunk, shape=(n, d))
    thin = thin_directions(centred, wanted, largest_sine=_LARGEST_SINE, basis=basis)
    if thin is None or not float(thin.values[wanted - 1]) > SAFE_RATIO * float(thin.values[0]):
        return None
    return Spectrum(mean, thin.values / n, thin.axes, wanted, exact=False, scores=thin.scores)


def _exact_moments(X: Array) -> Moments:
    """Return the moments of the rows, with products in float64 where the device has it."""
    xp = _xp.array_namespace(X)
    acc, moments = _xp.accumulator_dtype(xp, _xp.device(X)), Moments()
    for block in _xp.row_blocks(X):
        moments.update(xp.astype(block, acc))
    return moments


def _numerical_rank(xp: Namespace, variances: Array, moments: Moments, dtype: Any) -> int:
    """Count the variances that stand above the rounding of the products and of the stored values themselves."""
    d = int(variances.shape[0])
    products = float(variances[0]) * max(d, _xp.BLOCK_ROWS) * float(xp.finfo(variances.dtype).eps)
    # A value x is stored with an error of up to eps |x| / 2, which looks like noise of that size in every feature.
    second = xp.linalg.diagonal(moments.scatter) / moments.count + moments.mean * moments.mean
    storage = float(xp.max(second)) * float(xp.finfo(dtype).eps) ** 2
    return int(xp.count_nonzero(variances > products + storage))


def whiten(X: Array, spectrum: Spectrum, k: int) -> tuple[Array, Array, Array]:
    """Return the whitened rows in the dtype of `X`, the map to them (k, d) and the map back (k, d), transposed."""
    xp = _xp.array_namespace(X)
    deviations = xp.expand_dims(xp.sqrt(spectrum.variances[:k]), axis=1)
    directions = spectrum.directions[:k, :]
    forward, back = directions / deviations, directions * deviations
    if spectrum.exact:
        return _scores(X, spectrum.mean, forward, spectrum.mean.dtype), forward, back
    if spectrum.scores is None:
        Y = _scores(X, spectrum.mean, forward, X.dtype)
    else:
        Y = xp.astype(spectrum.scores / xp.matrix_transpose(deviations), X.dtype)
    # Second step: the kept coordinates are white up to 1e-7 / SAFE_RATIO; their own covariance makes them so.
    moments = _exact_moments(Y)
    variances, rotation = eigh_descending(moments.covariance(ddof=0))
    turn, root = xp.matrix_transpose(rotation), xp.expand_dims(xp.sqrt(variances), axis=1)
    correction, inverse = xp.matmul(turn, rotation / root), xp.matmul(turn, rotation * root)
    return _scores(Y, moments.mean, correction, X.dtype), xp.matmul(correction, forward), xp.matmul(inverse, back)


def _scores(X: Array, mean: Array, rows: Array, dtype: Any) -> Array:
    """Return ``(X - mean) @ rows.T`` in the dtype of `X`, products in `dtype`, block by block."""
    xp = _xp.array_namespace(X)
    shift, columns = xp.astype(mean, dtype), xp.astype(xp.matrix_transpose(rows), dtype)
    # What rounding the mean to `dtype` left over: with a mean of 1000 it would show in the scores.
    rest = xp.astype(xp.matmul(rows, mean - xp.astype(shift, mean.dtype)), dtype)
    blocks = [
        xp.astype(xp.matmul(xp.astype(block, dtype) - shift, columns) - rest, X.dtype) for block in _xp.row_blocks(X)
    ]
    return blocks[0] if len(blocks) == 1 else xp.concat(blocks, axis=0)
