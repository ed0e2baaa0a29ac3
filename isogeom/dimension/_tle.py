"""Tight local intrinsic dimensionality."""

from __future__ import annotations

from typing import Any

import numpy as np

from isogeom import _kernels, _xp
from isogeom._neighbors import NeighborTable
from isogeom._validation import check_choice, check_integer
from isogeom._xp import Array
from isogeom.dimension._average import average, usable
from isogeom.dimension._base import DimensionEstimator, Estimate
from isogeom.dimension._parts import log_parts
from isogeom.dimension._patches import check_coordinates, check_queries, offset_patches

# Distances below this share of the radius count as coincidence: a hundred times the rounding error of a distance that
# is computed from products.
_COINCIDENCE = 1e-6
# What the roots and logarithms of a pair cost, in multiplications.
_PAIR = 100


class TLE(DimensionEstimator):
    r"""Tight local intrinsic dimensionality: distances between the neighbours of a row take part.

    Parameters
    ----------
    n_neighbors : int, default=20
        Number of neighbours k, at least 2; clipped, with a warning, to one less than the number of distinct rows.
    average : {'inverse', 'mean'}, default='inverse'
        Average the inverse dimensions of the rows, or, as published, the dimensions, which is larger.
    n_neighbors_local : int, default=100
        Number of neighbours from which `transform` computes the dimension at a row; clipped to the number there is.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row. Rows with a kept duplicate are counted as dropped.
    anchors : int or array-like of int, default=None
        Rows to use, among the neighbours of all rows: that many drawn at random, or these positions.
    confidence_level : float, default=0.95
        Of `dimension_interval_`.
    n_jobs : int, default=None
        Number of threads of the search; None for one, -1 for all cores.
    random_state : int, RandomState instance, Generator or None, default=0
        Draws the anchors.

    Attributes
    ----------
    dimension_ : float
        The estimate.
    dimension_std_ : float or None
        Its standard error, corrected for the dependence of rows that are neighbours; None, as the interval and the
        nominal error, if the values of all rows are equal (short lists of integers).
    dimension_interval_ : tuple of float or None
        Confidence interval with the same correction, around the mean of the estimate: its bias is not covered.
    dimension_std_nominal_ : float or None
        The standard error for independent rows.
    n_samples_used_, n_samples_dropped_, n_duplicates_ : int
        Rows that entered; rows left out because a distance of theirs is 0 or all are equal; rows that repeat another.
    table_ : NeighborTable
        The neighbours.
    n_features_in_ : int
        Number of features seen during `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if `X` had string column names.

    See Also
    --------
    MLE : The same mean of log ratios over distances from the row alone; it has an exact law.

    Notes
    -----
    With u_i the distance of neighbour i, r = u_k, v_ij the distance of two neighbours and
    ``z_ij^2 = 2 u_i^2 + 2 u_j^2 - v_ij^2`` that to the reflection of one, each h of v_ij and z_ij gives a distance
    seen from neighbour i in a ball tangent to the neighbourhood's ::

        s = r (sqrt(a^2 + 4 h^2 (r^2 - u_i^2)) - a) / (2 (r^2 - u_i^2)),    a = u_i^2 + h^2 - u_j^2

    and the dimension is minus the inverse of the mean of ``ln(s / r)`` and ``ln(u_i / r)`` (these twice). Coincidences
    are left out where s is below 1e-6 r, which does not depend on the unit of the rows. No exact law is known, and the
    estimate is too large where the density is constant: by 5 % at k = 20 in dimensions 2 and 5, 8 % for 'mean'. The
    coordinates must be Euclidean.

    `transform` gives the value of one row, with k = `n_neighbors_local`. Memory does not grow with the number of rows
    times k^2: patches are treated a bounded block at a time, for numpy rows by a compiled kernel.

    A row far from all others has nearly equal distances to them, so its local value is huge: about its distance over
    the width of the cloud. Clip such values, or take their logarithm, before a model that is sensitive to scale.

    References
    ----------
    L. Amsaleg, O. Chelly, M. E. Houle, K. Kawarabayashi, M. Radovanović and W. Treeratanajaru, "Intrinsic
    dimensionality estimation within tight localities", SIAM International Conference on Data Mining, 2019.
    :doi:`10.1137/1.9781611975673.21`

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import TLE
    >>> rng = np.random.default_rng(0)
    >>> X = rng.random((2000, 3)) @ rng.standard_normal((3, 20))
    >>> model = TLE(n_neighbors=10).fit(X)
    >>> round(model.dimension_, 1)
    3.2
    """

    _needs_rows = True
    # The formula compares coordinates.
    metric = "euclidean"

    def __init__(
        self,
        n_neighbors: int = 20,
        *,
        average: str = "inverse",
        n_neighbors_local: int = 100,
        duplicates: str = "drop",
        anchors: Any = None,
        confidence_level: float = 0.95,
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.average = average
        self.n_neighbors_local = n_neighbors_local
        self.duplicates = duplicates
        self.anchors = anchors
        self.confidence_level = confidence_level
        self.n_jobs = n_jobs
        self.random_state = random_state

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_integer(self.n_neighbors, "n_neighbors", low=2)
        check_choice(self.average, "average", ("inverse", "mean"))

    def _n_needed(self) -> int:
        return int(self.n_neighbors)

    def _estimate(self, table: NeighborTable) -> Estimate:
        check_coordinates(table, type(self).__name__)
        k = min(int(self.n_neighbors), table.n_neighbors)
        near = table.first(k)
        inverses = tight_inverses(table.X, table.queries, near.distances, near.indices)
        values, used = usable(_xp.to_numpy(inverses), k)
        # The value goes with the mean log ratio, which the neighbours add up to.
        parts = log_parts(_xp.to_numpy(near.distances)[used])
        return average(values, used, table, how=self.average, rank=k, level=self.confidence_level, parts=parts)

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:
        centers = check_queries(queries, type(self).__name__)
        inverses = tight_inverses(self.table_.X, centers, distances, indices)
        xp = _xp.array_namespace(inverses)
        # From far away the neighbours are one point up to rounding, which may have either sign.
        known = inverses > 0
        return xp.where(known, 1 / xp.where(known, inverses, xp.ones_like(inverses)), xp.full_like(inverses, xp.nan))


def tight_inverses(X: Array, queries: Array | np.ndarray, distances: Array, indices: Array) -> Array:
    """Return the inverse tight dimension of each neighbourhood; NaN if a distance is 0 or all are equal."""
    xp = _xp.array_namespace(X)
    m, k = (int(size) for size in indices.shape)
    kernel = _kernels.available("tight_inverses", xp, X.dtype, float(m) * k * k * (int(X.shape[1]) + _PAIR))
    parts = []
    for offsets, shares in offset_patches(X, queries, distances, indices):
        products = xp.matmul(offsets, xp.matrix_transpose(offsets))
        parts.append(_inverses(products, shares) if kernel is None else kernel(products, shares, _COINCIDENCE))
    return xp.concat(parts, axis=0)


def _inverses(products: Array, u: Array) -> Array:
    """Return minus the mean logarithm of the tight distances of patches of radius 1, from their inner products."""
    xp = _xp.array_namespace(products)
    k = int(u.shape[1])
    good = (u[:, 0] > 0) & (u[:, -1] > u[:, 0])
    u = xp.where(xp.expand_dims(good, axis=1), u, xp.ones_like(u))
    squares = u * u
    own, other = xp.expand_dims(squares, axis=2), xp.expand_dims(squares, axis=1)
    off = xp.eye(k, dtype=xp.bool, device=_xp.device(u)) == xp.zeros((), dtype=xp.bool, device=_xp.device(u))
    total = 2 * xp.sum(xp.log(u), axis=1)
    count = xp.full_like(total, float(2 * k))
    for sign in (-1.0, 1.0):
        apart = own + other + 2 * sign * products
        apart = xp.where(apart > 0, apart, xp.zeros_like(apart))
        s = _tight(apart, own, other)
        counted = off & (s > _COINCIDENCE)
        logs = xp.log(xp.where(counted, s, xp.ones_like(s)))
        total = total + xp.sum(logs, axis=(1, 2))
        count = count + xp.sum(xp.astype(counted, u.dtype), axis=(1, 2))
    return xp.where(good, -total / count, xp.full_like(total, xp.nan))


def _tight(apart: Array, own: Array, other: Array) -> Array:
    """Return the tight distance s at radius 1 from squared distances; the form without cancellation for either sign."""
    xp = _xp.array_namespace(apart)
    a = own + apart - other
    room = 1 - own
    root = xp.sqrt(a * a + 4 * apart * room)
    ahead = a >= 0
    ones = xp.ones_like(a)
    # Where a and the root are both 0 so is the distance, and s; where a is negative there is room.
    below = xp.where(ahead & (root > 0), root + a, ones)
    beside = xp.where(ahead, ones, 2 * room + 0 * a)
    return xp.where(ahead, 2 * apart / below, (root - a) / xp.where(beside > 0, beside, ones))
