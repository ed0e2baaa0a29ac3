"""Dimensionality from angle and norm concentration."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from isogeom import _random, _xp
from isogeom._neighbors import NeighborTable
from isogeom._validation import check_choice, check_integer, warn_user
from isogeom._xp import Array
from isogeom.dimension._base import DimensionEstimator, Estimate
from isogeom.dimension._danco_calibration import CALIBRATION_ROWS, STEPS, Balls
from isogeom.dimension._danco_statistics import (
    angle_divergence,
    angle_moments,
    concentration,
    ratio_divergence,
    row_angles,
)
from isogeom.dimension._dependence import inflation, normal_interval
from isogeom.dimension._mind_law import first_to_last, likeliest, scores_and_information
from isogeom.dimension._parts import order_parts
from isogeom.dimension._patches import check_coordinates

# Largest dimension compared with where `max_dimension` is None.
_MAX_DIMENSION = 100


class DANCo(DimensionEstimator):
    r"""Intrinsic dimension by comparison of distances and angles of neighbours with those in balls of known dimension.

    Parameters
    ----------
    n_neighbors : int, default=10
        Number of neighbours k whose angles are compared; distances up to the (k + 1)-th are. At least 2; clipped, with
        a warning, to two less than the number of distinct rows.
    max_dimension : int, default=None
        Largest dimension compared with, 1 to the number of features; None for the number of features, at most 100.
    rounded : bool, default=True
        Whether `dimension_` and local dimensions are the integers of least divergence, as published; False places them
        between integers, on the interpolated curve of the balls.
    angle_formula : {'exact', 'published'}, default='exact'
        'published' takes the mean direction of angles from the arc tangent of a quotient, which cannot tell obtuse
        from acute, and averages concentrations, from an approximation, that can be infinite; 'exact' takes the
        concentration that belongs to the average length of mean vectors.
    n_neighbors_local : int, default=100
        Number of reference rows whose statistics `transform` pools; clipped to the number there is.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row. Rows with a kept duplicate are counted as dropped.
    anchors : int or array-like of int, default=None
        Rows to use, among the neighbours of all rows: that many drawn at random, or these positions.
    confidence_level : float, default=0.95
        Of `dimension_interval_`.
    n_jobs : int, default=None
        Number of threads of the search; None for one, -1 for all cores.
    random_state : int, RandomState instance, Generator or None, default=0
        Draws the balls and the anchors. With an integer, the balls are shared by all fits of the same size.

    Attributes
    ----------
    dimension_ : float
        The estimate.
    dimension_real_ : float
        The estimate between integers, whatever `rounded`.
    dimension_std_ : float
        Standard error of `dimension_real_`: that of the distances' part, corrected for the dependence of rows that are
        neighbours, with the noise of the balls, over the derivative of the balls' curve. Angles are taken to add none.
    dimension_interval_ : tuple of float
        Confidence interval from that error, stretched to hold `dimension_`.
    mind_dimension_ : float
        Maximum-likelihood dimension from the ratios ``r_1 / r_{k+1}``.
    angle_direction_, angle_concentration_ : float
        Direction (radians, mean over rows) and concentration of the von Mises law of the angles between neighbours.
    divergences_ : array of shape (n_candidates, 2)
        Divergences of the distances' and of the angles' laws from those of the balls of dimension 1, 2, ...; in nats.
    n_samples_used_, n_samples_dropped_, n_duplicates_ : int
        Rows that entered; rows left out because a distance is 0 or two are equal; rows that repeat another.
    table_ : NeighborTable
        The neighbours.
    n_features_in_ : int
        Number of features seen during `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if `X` had string column names.

    See Also
    --------
    MiND : The distances' part alone, not calibrated.

    Notes
    -----
    The divergence minimised is the sum of that between the laws of ``r_1 / r_{k+1}`` and that between von Mises laws
    of angles, of the data from uniform balls with as many rows (50 000 at most). Balls are measured at 2000 rows, for
    every dimension up to 10 and about one in six beyond, and kept between fits; those between are interpolated. The
    edges of the balls make the bias of MiND on bounded data cancel. Where the density is far from uniform the estimate
    is biased: 10 000 Gaussian rows of dimension 5, 10 and 20 give 5, 11 and 19.

    The standard error leaves out what the angles know, so it is too large: 1.3 to 1.9 times the true one of
    `dimension_real_` over 200 samples of 1000 and 2000 rows of a cube of dimension 3 and a sphere of dimension 5. For
    Gaussian rows of dimension 5 all samples gave 5.

    `transform` pools the statistics of `n_neighbors_local` reference rows: at 100 rows the relative noise is about
    4 %, to which rounding adds 0.3 in absolute terms.

    References
    ----------
    C. Ceruti, S. Bassis, A. Rozza, G. Lombardi, E. Casiraghi and P. Campadelli, "DANCo: an intrinsic dimensionality
    estimator exploiting angle and norm concentration", Pattern Recognition 47:2569-2581, 2014.
    :doi:`10.1016/j.patcog.2014.02.013`

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import DANCo
    >>> rng = np.random.default_rng(0)
    >>> X = rng.random((1000, 4)) @ rng.standard_normal((4, 6))
    >>> DANCo().fit(X).dimension_
    4.0
    """

    _needs_rows = True
    # The formula compares coordinates.
    metric = "euclidean"

    def __init__(
        self,
        n_neighbors: int = 10,
        *,
        max_dimension: int | None = None,
        rounded: bool = True,
        angle_formula: str = "exact",
        n_neighbors_local: int = 100,
        duplicates: str = "drop",
        anchors: Any = None,
        confidence_level: float = 0.95,
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.max_dimension = max_dimension
        self.rounded = rounded
        self.angle_formula = angle_formula
        self.n_neighbors_local = n_neighbors_local
        self.duplicates = duplicates
        self.anchors = anchors
        self.confidence_level = confidence_level
        self.n_jobs = n_jobs
        self.random_state = random_state

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_integer(self.n_neighbors, "n_neighbors", low=2)
        if self.max_dimension is not None:
            check_integer(self.max_dimension, "max_dimension", low=1)
        check_choice(self.rounded, "rounded", (False, True))
        check_choice(self.angle_formula, "angle_formula", ("exact", "published"))

    def _n_needed(self) -> int:
        return int(self.n_neighbors) + 1

    def _estimate(self, table: NeighborTable) -> Estimate:
        n_features = int(check_coordinates(table, type(self).__name__).shape[1])
        k = min(self._n_needed(), table.n_neighbors) - 1
        statistics, used = row_statistics(table, k, self.angle_formula)
        n = len(used)
        logs = statistics[:, 0]
        mind = float(likeliest(logs[np.newaxis, :], k)[0])
        direction, mean = statistics[:, 1:].mean(axis=0)
        tightness = float(concentration(mean, self.angle_formula))
        balls = self._balls(table, k, n_features)
        curve = balls.table(mind, tightness)
        pooled = np.asarray([[mind, direction, tightness]])
        best, real = (float(value[0]) for value in least(pooled, curve, k))
        parts = np.stack(divergences(pooled, curve[::STEPS], k), axis=2)[0]
        self._warn_if_capped(best, balls.largest, n_features)
        scores, information = scores_and_information(logs, mind, k)
        shares = order_parts(_xp.to_numpy(table.first(k + 1).distances)[used], 1, k + 1, mind)
        found = inflation(scores, used, table, k + 1, parts=shares, nominal=information / n)
        # A ball's statistic is as noisy as that of independent rows, as many as were measured.
        variance = (found.ratio + n / CALIBRATION_ROWS) / information
        std = math.sqrt(variance) / _slope(curve[:, 0], real)
        low, high = normal_interval(real, std, found, self.confidence_level)
        dimension = best if self.rounded else real
        kept = np.full((table.n_samples, 3), np.nan)
        kept[table.queries[used]] = statistics
        attributes = {
            "dimension_real_": real,
            "mind_dimension_": mind,
            "angle_direction_": float(direction),
            "angle_concentration_": tightness,
            "divergences_": _xp.asarray_like(parts, table.distances),
            "_row_statistics": _xp.asarray_like(kept, table.distances),
            "_calibration": balls,
        }
        interval = min(low, dimension), max(high, dimension)
        return Estimate(dimension, std, interval, n, table.n_queries - n, attributes)

    def _balls(self, table: NeighborTable, k: int, n_features: int) -> Balls:
        largest = min(n_features, _MAX_DIMENSION if self.max_dimension is None else int(self.max_dimension))
        seed = self.random_state
        if not isinstance(seed, numbers.Integral):
            seed = _random.check_rng(seed, "random_state").integers(2**31)
        return Balls(table.n_reference, k, self.angle_formula, int(seed), largest)

    def _warn_if_capped(self, best: float, largest: int, n_features: int) -> None:
        if best == largest < n_features:
            warn_user(
                f"The best dimension is the largest compared with, max_dimension={largest}: the dimension may be "
                f"larger. Pass a larger max_dimension, up to the number of features, {n_features}."
            )

    def _pool(self) -> np.ndarray | None:
        # Rows without statistics (duplicates, rows that are no anchors, ties) cannot contribute.
        known = np.flatnonzero(np.isfinite(_xp.to_numpy(self._row_statistics)[:, 0]))
        return None if len(known) == self.table_.n_samples else known

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:  # noqa: ARG002
        k = self._calibration.k
        found = _xp.to_numpy(self._row_statistics)[_xp.to_numpy(indices)]
        counts = np.isfinite(found[:, :, 0]).sum(axis=1)
        some = counts > 0
        pooled = np.full((len(found), 3), np.nan)
        pooled[some, 0] = likeliest(found[some, :, 0], k)
        pooled[some, 1:] = np.nanmean(found[some, :, 1:], axis=1)
        pooled[some, 2] = concentration(pooled[some, 2], self.angle_formula)
        values = np.full(len(found), np.nan)
        if some.any():
            curve = self._calibration.table(pooled[some, 0].max(), pooled[some, 2].max())
            best, real = least(pooled[some], curve, k)
            values[some] = best if self.rounded else real
        return _xp.asarray_like(values, distances)


def row_statistics(table: NeighborTable, k: int, formula: str) -> tuple[np.ndarray, np.ndarray]:
    """Return log ratio and two values of the angles of the rows that have them, (n, 3), and which rows these are."""
    near = table.first(max(k, 2))
    logs = _xp.to_numpy(first_to_last(table.first(k + 1).distances))
    moments = _xp.to_numpy(angle_moments(table.X, table.queries, near.distances, near.indices)).astype(np.float64)
    used = np.flatnonzero(np.isfinite(logs) & np.isfinite(moments).all(axis=1))
    if len(used) < 3:
        raise ValueError(
            f"Only {len(used)} row(s) have {k + 1} neighbours at different positive distances: 3 are needed."
        )
    return np.column_stack([logs[used].astype(np.float64), row_angles(moments[used], formula)]), used


def divergences(statistics: np.ndarray, curve: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the divergences of distances and of angles of data sets, (m, 3), from balls, (c, 3) or (m, c, 3)."""
    data = statistics[:, np.newaxis, :]
    ratio = ratio_divergence(curve[..., 0] / data[:, :, 0], k)
    return ratio, angle_divergence(data[:, :, 1], data[:, :, 2], curve[..., 1], curve[..., 2])


def _total(statistics: np.ndarray, curve: np.ndarray, k: int) -> np.ndarray:
    distances, angles = divergences(statistics, curve, k)
    return distances + angles


def least(statistics: np.ndarray, curve: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the integer dimension of least divergence of each data set, and the real one within 1 of it."""
    m = len(statistics)
    at = STEPS * np.argmin(_total(statistics, curve[::STEPS], k), axis=1)
    near = at[:, np.newaxis] + np.arange(-STEPS, STEPS + 1)
    inside = (near >= 0) & (near < len(curve))
    total = _total(statistics, curve[np.clip(near, 0, len(curve) - 1)], k)
    total = np.where(inside, total, np.inf)
    best, rows = np.argmin(total, axis=1), np.arange(m)
    # The vertex of the parabola through the lowest three, where there are three.
    middle = np.clip(best, 1, 2 * STEPS - 1)
    left, here, right = (total[rows, middle + step] for step in (-1, 0, 1))
    finite = (middle == best) & np.isfinite(left) & np.isfinite(right)
    left, right = np.where(finite, left, here), np.where(finite, right, here)
    bend = left - 2 * here + right
    shift = 0.5 * (left - right) / np.where(bend > 0, bend, 1.0)
    return at / STEPS + 1.0, (near[rows, best] + shift) / STEPS + 1.0


def _slope(curve: np.ndarray, dimension: float) -> float:
    """Return the derivative of a curve over dimensions 1, 1 + 1 / STEPS, ... at one of them, at least a hundredth."""
    at = round((dimension - 1) * STEPS)
    low, high = max(at - STEPS, 0), min(at + STEPS, len(curve) - 1)
    return max(float(curve[high] - curve[low]) / (high - low) * STEPS, 0.01) if high > low else 1.0
