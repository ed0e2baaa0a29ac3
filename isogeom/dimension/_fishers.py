"""Dimension from the linear separability of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import lambertw

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._validation import check_real
from isogeom._xp import Array
from isogeom.dimension._base import Estimate
from isogeom.dimension._dependence import Inflation, normal_interval
from isogeom.dimension._doubts import report_heavy_row
from isogeom.dimension._pca_products import Products
from isogeom.dimension._rows_estimator import RowsEstimator, beside, patch_gram, reference_positions, used_rows

# The margins that are tried, and the share of the largest useful one that is reported at, as published.
_MARGINS = np.arange(60, 100, 2) / 100
_REPORTED = 0.9
# Smaller margins, for rows that are all separable at the published ones.
_LOW_MARGINS = np.arange(2, 60, 2) / 100
# Sides of a tile of products on numpy, and elsewhere.
_TILE, _LARGE_TILE = (256, 512), 4096
# Inseparable pairs that are counted at a time.
_PAIRS = 2**20


class FisherS(RowsEstimator):
    r"""Dimension of the sphere on which rows would be as often inseparable from each other as they are here.

    Parameters
    ----------
    condition_number : float, default=10
        Principal components with a variance below the largest one divided by this are left out, at least 1.
    n_neighbors_local : int, default=100
        Number of rows of the neighbourhoods that `transform` applies the formula to.
    metric : str, default='euclidean'
        Metric of those neighbourhoods.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row: no margin separates them.
    confidence_level : float, default=0.95
        Of `dimension_interval_`.
    n_jobs : int, default=None
        Ignored: products use the threads of the array library.
    random_state : int, RandomState instance, Generator or None, default=0
        Ignored: nothing is drawn.

    Attributes
    ----------
    dimension_ : float
        The estimate, at `margin_`.
    dimension_std_ : float
        Its standard error, by the jackknife over rows. It leaves out the noise of the principal components.
    dimension_interval_ : tuple of float
        Confidence interval.
    margin_ : float
        The margin a at which the dimension is reported.
    margins_ : array of shape (n_margins,)
        All margins that were tried.
    inseparability_ : array of shape (n_margins,)
        Mean share of rows from which a row is not separated, 0 to 1, for each margin.
    dimensions_ : array of shape (n_margins,)
        The dimension by each margin, infinite where all rows are separated.
    n_components_ : int
        Number of principal components kept.
    n_samples_used_ : int
        Number of rows that entered.
    n_samples_dropped_ : int
        Number of rows that are 0 after centring, which have no direction.
    n_duplicates_ : int
        Number of rows that repeat an earlier row.
    table_ : NeighborTable
        The rows.
    n_features_in_ : int
        Number of features seen during `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if `X` had string column names.

    Notes
    -----
    Rows are centred, reduced to their leading principal components, whitened and divided by their norms. Row i is not
    separated from j with margin a if :math:`\langle x_i, x_j\rangle > a \langle x_i, x_i\rangle`. With :math:`p_a` the
    mean share of such j, :math:`w = -\ln(1 - a^2)` and W Lambert's function,

    .. math:: d_a = \frac1w W\left(\frac{w}{2\pi p_a^2 a^2 (1 - a^2)}\right),

    the dimension (published: of the surrounding space, so a d-sphere gives d + 1) of a uniform sphere with the same
    :math:`p_a`. Reported is the margin nearest to 0.9 times the largest one with :math:`p_a > 0`, among 0.60, 0.62,
    ..., 0.98. Where rows are separated at all of these, which happens above 60 dimensions for thousands of rows,
    smaller margins are tried, down to 0.02.

    `transform` takes 0.1 to 0.3 ms a row on one core for k = 100, and 1 ms in 70 dimensions, which needs the small
    margins.

    Components are kept by their variance beside the largest one, so a row far from all others can leave only its own
    direction: `fit` warns if a row carries more than half of the total variance.

    Whitening makes the estimate one of the linear span. `transform` applies it to neighbourhoods: for k = 100 its
    relative noise is about 0.01 (d = 2), 0.03 (5), 0.07 (10) and 0.1 (20), and in balls of these dimensions it is too
    large by 0, 3, 9 and 19 %.

    References
    ----------
    L. Albergante, J. Bac and A. Zinovyev, "Estimating the effective dimension of large biological datasets using Fisher
    separability analysis", IJCNN 2019. :doi:`10.1109/IJCNN.2019.8852450`

    Examples
    --------
    >>> from isogeom.datasets import hyper_ball
    >>> from isogeom.dimension import FisherS
    >>> round(FisherS().fit(hyper_ball(1000, 5)).dimension_, 2)
    5.0
    """

    def __init__(
        self,
        condition_number: float = 10,
        *,
        n_neighbors_local: int = 100,
        metric: str = "euclidean",
        duplicates: str = "drop",
        confidence_level: float = 0.95,
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> None:
        self.condition_number = condition_number
        self.n_neighbors_local = n_neighbors_local
        self.metric = metric
        self.duplicates = duplicates
        self.confidence_level = confidence_level
        self.n_jobs = n_jobs
        self.random_state = random_state

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_real(self.condition_number, "condition_number", low=1)

    def _estimate(self, table: NeighborTable) -> Estimate:
        rows = used_rows(table)
        products = Products.of(rows, True)
        directions = whitened_directions(products, float(self.condition_number))
        report_heavy_row(type(self).__name__, products, reference_positions(table))
        n, dropped = int(directions.shape[0]), int(rows.shape[0]) - int(directions.shape[0])
        if n < 3:
            raise ValueError(f"Only {n} row(s) differ from the mean: 3 are needed.")
        margins = _MARGINS
        counts = inseparable(directions, margins)
        if not counts.any():
            margins = _LOW_MARGINS
            counts = inseparable(directions, margins)
        if not counts.any():
            raise ValueError(
                f"Every one of {n} rows is separated from every other at all margins down to {margins[0]}: too few "
                "rows for FisherS."
            )
        shares = counts.sum(axis=0) / (n * (n - 1))
        values = sphere_dimension(shares, margins)
        at = int(reported(shares[np.newaxis, :], margins)[0])
        relative = jackknife(counts[:, at])
        # One step in ln p moves the estimate by the derivative, taken numerically.
        step = 1e-4
        nearby = sphere_dimension(shares[at] * np.exp([-step, step]), margins[at])
        std = float(abs(nearby[1] - nearby[0]) / (2 * step) * relative)
        dimension = float(values[at])
        interval = normal_interval(dimension, std, Inflation(1.0, n - 1.0), self.confidence_level)
        attributes = {
            "margin_": float(margins[at]),
            "margins_": beside(margins, table),
            "inseparability_": beside(shares, table),
            "dimensions_": beside(values, table),
            "n_components_": int(directions.shape[1]),
        }
        return Estimate(dimension, std, interval, n, dropped, attributes)

    def _patch_values(self, patch: Array) -> Array:
        cosines = patch_cosines(patch, float(self.condition_number))
        pairs = int(patch.shape[1]) * (int(patch.shape[1]) - 1)
        result = np.full(int(patch.shape[0]), np.nan)
        for margins in (_MARGINS, _LOW_MARGINS):
            open_ones = np.flatnonzero(~np.isfinite(result))
            shares = patch_counts(cosines, margins) / pairs
            at = reported(shares, margins)
            result[open_ones] = sphere_dimension(shares, margins)[np.arange(len(at)), at]
            left = np.flatnonzero(~np.isfinite(result[open_ones]))
            if len(left) == 0:
                break
            xp = _xp.array_namespace(cosines)
            cosines = xp.take(cosines, _xp.asarray_like(left, cosines, dtype=xp.int64), axis=0)
        return _xp.asarray_like(result, patch)


def whitened_directions(products: Products, condition_number: float) -> Array:
    """Return the rows on their leading principal components, of equal variance, divided by their norms.

    Rows that have no direction are left out.
    """
    xp = _xp.array_namespace(products.matrix)
    values, vectors = xp.linalg.eigh(products.matrix)
    if float(values[-1]) <= 0:
        raise ValueError("X has no variance: its rows must differ.")
    first = int(xp.sum(xp.astype(values <= values[-1] / condition_number, xp.int64)))
    vectors = vectors[:, first:]
    if products.wide:
        # Whitened scores are the eigenvectors of the Gram matrix.
        scores = vectors
    else:
        axes = vectors / xp.sqrt(values[first:])
        blocks = [
            xp.matmul(xp.astype(block, axes.dtype) * products.scale - products.mean, axes)
            for block in _xp.row_blocks(products.rows)
        ]
        scores = xp.concat(blocks, axis=0)
    norms = xp.sqrt(xp.sum(scores * scores, axis=1))
    # Typical whitened rows have norm sqrt(components / rows); rounding leaves far less.
    alive = np.flatnonzero(_xp.to_numpy(norms) > 1e-12 * float(xp.max(norms)))
    if len(alive) < int(norms.shape[0]):
        places = _xp.asarray_like(alive, scores, dtype=xp.int64)
        scores, norms = xp.take(scores, places, axis=0), xp.take(norms, places, axis=0)
    return scores / xp.expand_dims(norms, axis=1)


def inseparable(directions: Array, margins: np.ndarray) -> np.ndarray:
    """Return, for every row and margin, the number of other rows at a larger cosine: (n, n_margins), tile by tile."""
    xp = _xp.array_namespace(directions)
    n, m = int(directions.shape[0]), len(margins)
    # Products of this size stay in the cache of one core; other libraries prefer few calls.
    height, width = _TILE if _xp.is_numpy(xp) else (_LARGE_TILE, _LARGE_TILE)
    # counts[:, b]: cosines between margins b and b + 1.
    counts = np.zeros(n * m, dtype=np.int64)
    found: list[tuple[np.ndarray, ...]] = []
    for start in range(0, n, height):
        left = directions[start : min(start + height, n), :]
        for begin in range(start, n, width):
            cosines = xp.matmul(left, xp.matrix_transpose(directions[begin : min(begin + width, n), :]))
            rows, columns, values = _above(cosines, float(margins[0]))
            found.append((rows + start, columns + begin, values))
        if start + height >= n or sum(len(part[0]) for part in found) > _PAIRS:
            rows, columns, values = (np.concatenate(column) for column in zip(*found))
            other = columns > rows
            bins = _bins(values[other], margins)
            ends = np.concatenate((rows[other], columns[other]))
            counts += np.bincount(ends * m + np.tile(bins, 2), minlength=n * m)
            found = []
    return np.cumsum(counts.reshape(n, m)[:, ::-1], axis=1)[:, ::-1]


def _above(cosines: Array, margin: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, columns and values of the entries above a margin, on the host."""
    xp = _xp.array_namespace(cosines)
    flat = xp.reshape(cosines, (-1,))
    places = xp.nonzero(flat > margin)[0]
    found = _xp.to_numpy(xp.take(flat, places, axis=0))
    places, width = _xp.to_numpy(places), int(cosines.shape[-1])
    return places // width, places % width, found


def _bins(values: np.ndarray, margins: np.ndarray) -> np.ndarray:
    """Return the position of the largest of the evenly spaced margins that each value exceeds; all exceed the first."""
    last = len(margins) - 1
    at = np.clip(((values - margins[0]) / (margins[1] - margins[0])).astype(np.int64), 0, last)
    # Rounding can miss by one.
    at -= values <= margins[at]
    at += (values > margins[np.minimum(at + 1, last)]) & (at < last)
    return at


def patch_counts(cosines: Array, margins: np.ndarray) -> np.ndarray:
    """Return the number of pairs of rows above every margin, of every patch: (b, k, k) to (b, n_margins)."""
    b, k, m = int(cosines.shape[0]), int(cosines.shape[1]), len(margins)
    rows, columns, found = _above(cosines, float(margins[0]))
    other = columns != rows % k
    rows, found = rows[other], found[other]
    bins = _bins(found, margins)
    counts = np.bincount(rows // k * m + bins, minlength=b * m).reshape(b, m)
    return np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]


def sphere_dimension(shares: np.ndarray, margins: Any) -> np.ndarray:
    """Return the dimension of the sphere with these shares of inseparable rows; infinite for a share of 0."""
    shares, margins = np.asarray(shares, dtype=np.float64), np.asarray(margins, dtype=np.float64)
    w = -np.log1p(-(margins**2))
    some = shares > 0
    squares = np.where(some, shares, 1.0) ** 2
    values = lambertw(w / (2 * np.pi * squares * margins**2 * (1 - margins**2))).real / w
    return np.where(some, values, np.inf)


def reported(shares: np.ndarray, margins: np.ndarray) -> np.ndarray:
    """Return, for every row of shares, the position of the margin that is reported."""
    largest = np.max(np.where(shares > 0, margins, 0.0), axis=1)
    return np.argmin(np.abs(margins - _REPORTED * largest[:, np.newaxis]), axis=1)


def jackknife(counts: np.ndarray) -> float:
    """Return the relative standard error of the number of pairs, from the number of pairs of every row.

    The jackknife over rows counts the noise of the pairs themselves twice; once of it is taken off.
    """
    n, total = len(counts), float(counts.sum())
    rows = 4 * float(np.var(counts, ddof=1)) * n / total**2
    return float(np.sqrt(max(rows - 2 / total, 1 / total)))


def patch_cosines(patch: Array, condition_number: float) -> Array:
    """Return the cosines between whitened rows of every patch: (b, k, k); 0 for rows without direction."""
    xp = _xp.array_namespace(patch)
    k, d = int(patch.shape[1]), int(patch.shape[2])
    if k <= d:
        values, scores = xp.linalg.eigh(patch_gram(patch))
    else:
        values, axes = xp.linalg.eigh(xp.matmul(xp.matrix_transpose(patch), patch))
        scores = xp.matmul(patch, axes)
    kept = (values > values[:, -1:] / condition_number) & (values > 0)
    safe = xp.where(kept, values, xp.ones_like(values))
    weights = xp.where(kept, xp.ones_like(values) if k <= d else 1 / xp.sqrt(safe), xp.zeros_like(values))
    scores = scores * xp.expand_dims(weights, axis=1)
    norms = xp.sqrt(xp.sum(scores * scores, axis=2, keepdims=True))
    scores = scores / xp.where(norms > 0, norms, xp.ones_like(norms))
    return xp.matmul(scores, xp.matrix_transpose(scores))
