"""Second moments of rows, or of many small patches of them: what the eigenvalue rules read."""

from __future__ import annotations

from dataclasses import dataclass

from isogeom import _xp
from isogeom._moments import Moments
from isogeom._neighbors._cloud import Cloud
from isogeom._xp import Array
from isogeom.dimension._participation import corrected_ratio
from isogeom.dimension._pca_rules import Spectra
from isogeom.dimension._rows_estimator import patch_gram

# Entries of a block of columns, in the accumulator's dtype.
_BLOCK_ENTRIES = 2**21


@dataclass(frozen=True)
class Products:
    """Second moments of rows, in units of the largest value of the rows.

    Attributes
    ----------
    matrix : array of shape (m, m)
        Sum of the outer products of the (centred) rows or, for fewer rows than features, their Gram matrix.
    n, p : int
        Number of rows and of features.
    wide : bool
        Whether `matrix` is the Gram matrix.
    center : bool
        Whether the rows were centred.
    variances : array of shape (p,)
        Diagonal of the scatter.
    scale : float
        By which the rows were multiplied.
    mean : array of shape (p,)
        Subtracted from the scaled rows; zero if not centred.
    rows : array of shape (n, p) or None
        The rows as they came; None if only moments are known.
    """

    matrix: Array
    n: int
    p: int
    wide: bool
    center: bool
    variances: Array
    scale: float
    mean: Array
    rows: Array

    @property
    def freedom(self) -> int:
        """Number of independent rows."""
        return self.n - self.center

    @classmethod
    def of(cls, X: Array, center: bool) -> Products:
        """Compute them from rows, in one pass."""
        cloud = Cloud.of(X)
        xp = _xp.array_namespace(X)
        n, p = int(X.shape[0]), int(X.shape[1])
        mean = cloud.shift if center else xp.zeros_like(cloud.shift)
        if n >= p:
            moments = Moments()
            for block in _xp.row_blocks(X):
                moments.update(block * cloud.scale)
            return cls.from_moments(moments, center, cloud.scale, X)
        gram, variances, means = None, [], []
        size = max(1, _BLOCK_ENTRIES // n)
        for start in range(0, p, size):
            stop = min(start + size, p)
            rows = cloud.wide(X[:, start:stop]) - mean[start:stop]
            rest = xp.mean(rows, axis=0) if center else mean[start:stop]
            rows = rows - rest
            means.append(mean[start:stop] + rest)
            product = xp.matmul(rows, xp.matrix_transpose(rows))
            gram = product if gram is None else gram + product
            variances.append(xp.sum(rows * rows, axis=0))
        return cls(gram, n, p, True, center, xp.concat(variances), cloud.scale, xp.concat(means), X)

    @classmethod
    def from_moments(cls, moments: Moments, center: bool, scale: float = 1.0, X: Array | None = None) -> Products:
        """Read them off moments of scaled rows."""
        scatter = moments.scatter if center else moments.gram()
        xp = _xp.array_namespace(scatter)
        mean = moments.mean if center else xp.zeros_like(moments.mean)
        n, p = int(moments.count), int(scatter.shape[0])
        return cls(scatter, n, p, False, center, xp.linalg.diagonal(scatter), scale, mean, X)

    def spectra(self) -> Spectra:
        """Return the eigenvalues of the covariance, those that rounding cannot tell from 0 set to 0."""
        xp = _xp.array_namespace(self.matrix)
        m = int(self.matrix.shape[0])
        values = xp.flip(xp.linalg.eigvalsh(self.matrix), axis=0)[: min(m, self.freedom)]
        floor = values[0] * (m * float(xp.finfo(values.dtype).eps))
        return Spectra(xp.where(values > floor, values, xp.zeros_like(values)) / self.freedom, self.p, self.freedom)

    def row_statistics(self) -> tuple[Array, Array, Array]:
        """Return ``|y|^2`` and ``y . S y`` of every centred row y, S the scatter, and the fourth powers by feature."""
        xp = _xp.array_namespace(self.matrix)
        if self.wide:
            squares, forms = xp.linalg.diagonal(self.matrix), xp.sum(self.matrix * self.matrix, axis=1)
            fourths = [xp.sum(self._columns(part) ** 4, axis=0) for part in self._column_slices()]
            return squares, forms, xp.concat(fourths)
        size = max(1, _BLOCK_ENTRIES // self.p)
        found, fourth = [], xp.zeros_like(self.mean)
        for block in _xp.row_blocks(self.rows, size):
            rows = xp.astype(block, self.matrix.dtype) * self.scale - self.mean
            found.append((xp.sum(rows * rows, axis=1), xp.sum(xp.matmul(rows, self.matrix) * rows, axis=1)))
            fourth = fourth + xp.sum(rows**4, axis=0)
        return xp.concat([a for a, _ in found]), xp.concat([b for _, b in found]), fourth

    def _column_slices(self) -> list[slice]:
        size = max(1, _BLOCK_ENTRIES // self.n)
        return [slice(start, min(start + size, self.p)) for start in range(0, self.p, size)]

    def _columns(self, part: slice) -> Array:
        xp = _xp.array_namespace(self.matrix)
        return xp.astype(self.rows[:, part], self.matrix.dtype) * self.scale - self.mean[part]


def patch_products(patch: Array) -> Array:
    """Return the smaller of the Gram and the scatter matrix of every patch."""
    if patch.shape[1] <= patch.shape[2]:
        return patch_gram(patch)
    xp = _xp.array_namespace(patch)
    return xp.matmul(xp.matrix_transpose(patch), patch)


def patch_spectra(patch: Array) -> Spectra:
    """Return the eigenvalues of the covariance of every patch."""
    xp = _xp.array_namespace(patch)
    k, d = int(patch.shape[1]), int(patch.shape[2])
    products = patch_products(patch)
    values = xp.flip(xp.linalg.eigvalsh(products), axis=-1)[:, : min(k - 1, d)]
    floor = values[:, :1] * (max(k, d) * float(xp.finfo(values.dtype).eps))
    return Spectra(xp.where(values > floor, values, xp.zeros_like(values)), d, k - 1)


def patch_ratio(patch: Array, correction: str | None) -> Array:
    """Return the participation ratio of every patch."""
    xp = _xp.array_namespace(patch)
    products = patch_products(patch)
    squares = patch * patch
    total, frobenius = xp.sum(squares, axis=(1, 2)), xp.sum(products * products, axis=(1, 2))
    if correction is None:
        safe = xp.where(frobenius > 0, frobenius, xp.ones_like(frobenius))
        return xp.where(frobenius > 0, total * total / safe, xp.full_like(total, xp.nan))
    if patch.shape[1] < 4:
        return xp.full_like(total, xp.nan)
    norms = xp.sum(squares, axis=2)
    by_feature = None if correction == "samples" else (xp.sum(squares, axis=1), xp.sum(squares * squares, axis=1))
    fourth = xp.sum(norms * norms, axis=1)
    return corrected_ratio(int(patch.shape[1]), total, fourth, frobenius, by_feature, kind=correction, center=True)
