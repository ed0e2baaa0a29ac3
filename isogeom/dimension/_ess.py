"""Expected simplex skewness."""

from __future__ import annotations

from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._validation import check_choice, check_integer
from isogeom._xp import Array
from isogeom.dimension._average import from_mean, usable
from isogeom.dimension._base import DimensionEstimator, Estimate
from isogeom.dimension._overlap import patch_inflation
from isogeom.dimension._patches import check_coordinates, check_queries
from isogeom.dimension._simplex import invert, patch_skewness


class ESS(DimensionEstimator):
    r"""Intrinsic dimension from the expected skewness of simplices: the angles of pairs of neighbours.

    Parameters
    ----------
    n_neighbors : int, default=100
        Number of neighbours k that make the patch of a row, the row itself left out; at least 3. Clipped, with a
        warning, to one less than the number of distinct rows.
    version : {'a', 'b'}, default='a'
        'a' compares the area of the parallelogram of two vectors with the product of their lengths (sines), 'b' their
        inner product (cosines).
    average : {'pooled', 'mean'}, default='pooled'
        'pooled' averages the skewness of the patches and turns the mean into a dimension, 'mean' averages the
        dimensions of the patches.
    n_neighbors_local : int, default=100
        Number of neighbours that make the patch from which `transform` computes the dimension at a row; clipped to the
        number there is.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row. Kept ones count as neighbours like any other.
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
        The estimate, at least 1.
    dimension_std_ : float or None
        Its standard error, corrected for the dependence of rows that are neighbours; see the notes.
    dimension_interval_ : tuple of float or None
        Confidence interval with the same correction, around the mean of the estimate: its bias is not covered.
    dimension_std_nominal_ : float or None
        The standard error for independent rows.
    n_samples_used_, n_samples_dropped_, n_duplicates_ : int
        Rows that entered; rows left out because all their neighbours coincide; rows that repeat another.
    table_ : NeighborTable
        The neighbours.
    n_features_in_ : int
        Number of features seen during `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if `X` had string column names.

    See Also
    --------
    TLE : From distances between neighbours.

    Notes
    -----
    With v_i the neighbours relative to the mean of their patch, the skewness is
    ``s = sum_{i<j} |v_i| |v_j| |sin(v_i, v_j)| / sum_{i<j} |v_i| |v_j|``, with the cosine in place of the sine for 'b'.
    Directions uniform on the sphere in dimension n have the mean ``e_a(n) = Gamma(n/2)^2 / (Gamma((n+1)/2)
    Gamma((n-1)/2))`` or ``e_b(n) = Gamma(n/2) / (sqrt(pi) Gamma((n+1)/2))``. The dimension is n where e is s, linear
    between integers. Curvature and noise of the whole patch enter: it must lie where the manifold is nearly flat.

    The standard error takes from theory how much patches with rows in common are correlated, where directions are
    isotropic, and the noise from the differences between near ones. With k = 20 and k = 100 it was 0.93 to 1.45 times
    the true one over samples of 600 to 2000 rows of a sphere and a Gaussian law of dimension 5, and of a cube of
    dimension 3; with patches of a third of the cloud it can be twice too large. It is None where all are alike.

    `transform` gives the value of the patch of one row. Patches are treated a bounded block at a time; for numpy rows
    by a compiled kernel.

    References
    ----------
    K. Johnsson, C. Soneson and M. Fontes, "Low bias local intrinsic dimension estimation from expected simplex
    skewness", IEEE Transactions on Pattern Analysis and Machine Intelligence 37:196-202, 2015.
    :doi:`10.1109/TPAMI.2014.2343220`

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import ESS
    >>> rng = np.random.default_rng(0)
    >>> X = rng.random((2000, 3)) @ rng.standard_normal((3, 20))
    >>> model = ESS(n_neighbors=30).fit(X)
    >>> round(model.dimension_, 1)
    2.9
    """

    _needs_rows = True
    # The formula compares coordinates.
    metric = "euclidean"

    def __init__(
        self,
        n_neighbors: int = 100,
        version: str = "a",
        *,
        average: str = "pooled",
        n_neighbors_local: int = 100,
        duplicates: str = "drop",
        anchors: Any = None,
        confidence_level: float = 0.95,
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.version = version
        self.average = average
        self.n_neighbors_local = n_neighbors_local
        self.duplicates = duplicates
        self.anchors = anchors
        self.confidence_level = confidence_level
        self.n_jobs = n_jobs
        self.random_state = random_state

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_integer(self.n_neighbors, "n_neighbors", low=3)
        check_choice(self.version, "version", ("a", "b"))
        check_choice(self.average, "average", ("pooled", "mean"))

    def _n_needed(self) -> int:
        return int(self.n_neighbors)

    def _estimate(self, table: NeighborTable) -> Estimate:
        check_coordinates(table, type(self).__name__)
        k = min(int(self.n_neighbors), table.n_neighbors)
        if k < 3:
            raise ValueError(f"ESS needs patches of 3 neighbours, so 4 distinct rows; here rows have {k} neighbours.")
        near = table.first(k)
        found = _xp.to_numpy(patch_skewness(table.X, table.queries, near.distances, near.indices, self.version))
        # A skewness of 0 (a line, version 'a') is a value like any other.
        _, used = usable(np.where(np.isfinite(found), 1.0, np.nan), k)
        values = found[used].astype(np.float64)
        if self.average == "pooled":
            dimensions, slopes = invert(np.asarray([values.mean()]), self.version)
            dimension, slope = float(dimensions[0]), float(slopes[0])
        else:
            values, _ = invert(values, self.version)
            dimension, slope = float(values.mean()), 1.0
        neighbors, rows = _xp.to_numpy(near.indices)[used], table.queries[used]
        # Skewness weights each direction by its length.
        inflated = patch_inflation(values, neighbors, rows, table.n_samples, dimension=dimension, power=1)
        level = self.confidence_level
        return from_mean(values, used, table, rank=k, dimension=dimension, slope=slope, level=level, found=inflated)

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:
        centers = check_queries(queries, type(self).__name__)
        found = patch_skewness(self.table_.X, centers, distances, indices, self.version)
        dimensions, _ = invert(_xp.to_numpy(found).astype(np.float64), self.version)
        return _xp.asarray_like(dimensions, found)
