"""Averages over the whitened rows at one rotation: what independent component analysis knows of its objective."""

from __future__ import annotations

from dataclasses import dataclass

from isogeom import _xp
from isogeom._xp import Array
from isogeom.decomposition._ica_contrasts import Contrast

# Entries per block of projections: the five arrays of a block stay within a cache of 1 MiB in float32.
_BLOCK_ENTRIES = 49_152
# Most rows per block: within one, sums run in the dtype of the rows. In float32, the gradient of 3000 rows of 5 sources
# is three times closer to that of float64 with this bound than without.
_BLOCK_ROWS = 1024
# Curvature below which a pair of sources counts as flat: two nearly Gaussian sources have next to none.
_FLAT = 0.01


@dataclass(frozen=True)
class Point:
    """Averages over the rows at one rotation, with ``s = W y``."""

    W: Array
    # E[g'(s_i)] and E[g(s_i) s_j].
    slopes: Array
    psi: Array
    # E[G(s_i)] and E[g'(s_i) s_j^2], for the objective and its curvatures: None unless the point is full.
    values: Array = None
    cross: Array = None

    @property
    def full(self) -> bool:
        """Whether the objective and its curvatures are known."""
        return self.values is not None

    def part(self, chosen: Array) -> Point:
        """Return the averages of some sources, given as columns of the identity, at the rotation that leaves them."""
        xp = _xp.array_namespace(chosen)
        transposed = xp.matrix_transpose(chosen)
        psi, cross = (
            None if a is None else xp.matmul(xp.matmul(transposed, a), chosen) for a in (self.psi, self.cross)
        )
        values = None if self.values is None else xp.matmul(self.values, chosen)
        eye = xp.eye(chosen.shape[1], dtype=chosen.dtype, device=_xp.device(chosen))
        return Point(eye, xp.matmul(self.slopes, chosen), psi, values, cross)

    def curvature(self) -> Array:
        """Return E[g'(s_i)] - E[g(s_i) s_i]: 0 for a Gaussian source, its sign tells super- from sub-Gaussian."""
        return self.slopes - _xp.array_namespace(self.psi).linalg.diagonal(self.psi)

    def signs(self) -> Array:
        """Return 1 for sources to minimise E[G], -1 for sources to maximise it."""
        curvature = self.curvature()
        one = _xp.array_namespace(curvature).ones_like(curvature)
        return _xp.array_namespace(curvature).where(curvature < 0, -one, one)

    def loss(self, signs: Array, reference: float = 0.0) -> float:
        """Return the objective: the sum of signed means, of their distance to the Gaussian value if that is given.

        The point must be full.
        """
        return float(_xp.array_namespace(signs).sum(signs * (self.values - reference)))

    def gradient(self, signs: Array) -> Array:
        """Return the skew gradient of the objective along rotations, (k, k)."""
        xp = _xp.array_namespace(signs)
        signed = xp.expand_dims(signs, axis=1) * self.psi
        return (signed - xp.matrix_transpose(signed)) / 2

    def curvatures(self, signs: Array) -> Array:
        """Return the size of the second derivative in the plane of each pair, (k, k); the point must be full.

        Exact on the diagonal of the Hessian, where E[g'(s_i)] E[s_j^2] would assume independence: on an elliptical
        subspace, the curvature of which is 0, that guess costs three times the iterations.
        """
        xp = _xp.array_namespace(signs)
        terms = xp.expand_dims(signs, axis=1) * (self.cross - xp.expand_dims(xp.linalg.diagonal(self.psi), axis=1))
        return xp.abs(terms + xp.matrix_transpose(terms)) / 2

    def hessian(self, signs: Array) -> Array:
        """Return the curvatures, bounded away from 0."""
        pairs = self.curvatures(signs)
        xp = _xp.array_namespace(pairs)
        return xp.where(pairs < _FLAT, xp.full_like(pairs, _FLAT), pairs)


def evaluate(Y: Array, W: Array, contrast: Contrast, *, full: bool = True) -> Point:
    """Return the averages at the rotation `W`, in one pass over the whitened rows `Y`.

    Products run in the dtype of `Y`, sums over blocks in the dtype of `W`. A point that is not full costs a third to a
    half less. Columns of `Y` beyond those of `W` count for nothing.
    """
    xp = _xp.array_namespace(Y, W)
    (n, k), used = Y.shape, W.shape[0]
    # A multiple of eight: see the sum of logarithms in `_ica_contrasts`.
    size = min(max(_BLOCK_ENTRIES // k // 8 * 8, 64), _BLOCK_ROWS, n)
    ones = xp.ones_like(Y[:size, 0])
    filled = W
    if used < k:
        filled = xp.zeros((k, k), dtype=W.dtype, device=_xp.device(W))
        filled[:used, :used] = W
    columns = xp.astype(xp.matrix_transpose(filled), Y.dtype)
    product, cross, slopes, means = (xp.zeros_like(a) for a in (filled, filled, filled[:, 0], filled[:, 0]))
    # Operators rather than functions of the namespace: on blocks of this size, a wrapper's own time shows.
    for block in _xp.row_blocks(Y, size):
        u = block @ columns
        g, slope = contrast.derivatives(xp, u)
        product = product + g.T @ block
        # Column sums as products with ones: faster than a reduction over rows, and no less accurate.
        count = ones[: block.shape[0]]
        slopes = slopes + count @ slope
        if full:
            means = means + contrast.total(xp, u, g, count)
            cross = cross + slope.T @ (u * u)
    psi = xp.matmul(product[:used, :used] / n, xp.matrix_transpose(W))
    known = (means[:used] / n, cross[:used, :used] / n) if full else ()
    return Point(W, slopes[:used] / n, psi, *known)
