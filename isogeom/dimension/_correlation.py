"""The correlation dimension."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy.sparse as sp

from isogeom import _random, _xp
from isogeom._neighbors import NeighborTable
from isogeom._neighbors._rows import check_anchors, clip_neighbors, nearest
from isogeom._validation import check_choice, check_integer
from isogeom._xp import Array
from isogeom.dimension._base import DimensionEstimator, Estimate
from isogeom.dimension._dependence import Inflation, normal_interval
from isogeom.dimension._pairs import Pairs, PairSums, collected, pairs_within, table_pairs
from isogeom.dimension._rows_estimator import beside, unsearched, used_rows

# Radii of the regression.
_N_RADII = 10
# Rows that tell beforehand about how large a radius must be, and which quantiles of theirs are tried.
_PILOT, _PILOT_SHARES = 200, (0.6, 0.75, 0.9)
# Entries of a table of distances that is sorted at a time.
_ENTRIES = 2**20


class CorrelationDimension(DimensionEstimator):
    r"""Intrinsic dimension from the growth of the number of pairs of rows with their distance.

    Parameters
    ----------
    n_neighbors_min : int, default=10
        The smaller radius is the median distance to the neighbour of this rank; unused by 'takens'.
    n_neighbors_max : int, default=20
        The larger radius is the median distance to the neighbour of this rank.
    method : {'radii', 'regression', 'takens'}, default='radii'
        'radii' takes the slope between the two radii; 'regression' fits the slope at ten radii between them; 'takens'
        is maximum likelihood from all pairs below the larger radius.
    n_neighbors_local : int, default=100
        Number of neighbours whose distances `transform` uses; clipped to the number there is.
    metric : str, default='euclidean'
        'euclidean', 'precomputed', or for numpy rows any metric of :func:`sklearn.metrics.pairwise_distances`.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row. Pairs at distance 0 count as pairs below every radius, but have
        no logarithm for 'takens'.
    anchors : int or array-like of int, default=None
        Rows whose pairs with all rows are counted: that many drawn at random, or these positions. None for all.
    confidence_level : float, default=0.95
        Of `dimension_interval_`.
    n_jobs : int, default=None
        Number of threads of searches in other metrics; None for one, -1 for all cores.
    random_state : int, RandomState instance, Generator or None, default=0
        Draws the anchors.

    Attributes
    ----------
    dimension_ : float
        The estimate.
    dimension_std_ : float
        Its standard error, by the jackknife over rows (the pairs of a row go together), for fixed radii.
    dimension_interval_ : tuple of float
        Confidence interval.
    radii_ : array of shape (n_radii,)
        The radii, increasing, in the unit of the rows.
    correlation_sums_ : array of shape (n_radii,)
        Share of the pairs below each radius, 0 to 1.
    n_samples_used_ : int
        Number of rows whose pairs were counted.
    n_samples_dropped_ : int
        Number of rows without a pair below the largest radius.
    n_duplicates_ : int
        Number of rows that repeat an earlier row.
    table_ : NeighborTable
        The rows or distances.
    n_features_in_ : int
        Number of features seen during `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if `X` had string column names.

    See Also
    --------
    MLE : Maximum likelihood from the neighbours of every row, at a scale of its own.

    Notes
    -----
    With the correlation sum :math:`C(r) = \frac{2}{n (n - 1)} \#\{i < j: d_{ij} < r\}`, the dimension is the slope of
    :math:`\ln C` on :math:`\ln r`; Takens' estimate is :math:`-1 / \langle \ln(d_{ij} / r) \rangle` over the pairs
    below r. Dense regions have more pairs, so they weigh more than in estimators that average over rows.

    Pairs are found in tiles and only sums of them are kept: memory grows with n times `n_neighbors_max`, not n^2.

    `transform` takes the row as the only centre: the slope of the logarithm of the rank on that of the distance,
    between the ranks k n_min / n_max and k ('radii'), over all of these ranks ('regression'), or ``(k - 2) / sum
    ln(r_k / r_j)`` ('takens'), k = `n_neighbors_local`. Relative noise for k = 100 is about 0.14, 0.15 and 0.1.

    A row far from all others has nearly equal distances to them, so its local value is huge: about its distance over
    the width of the cloud. Clip such values, or take their logarithm, before a model that is sensitive to scale.

    References
    ----------
    P. Grassberger and I. Procaccia, "Measuring the strangeness of strange attractors", Physica D 9, 1983.
    :doi:`10.1016/0167-2789(83)90298-1`

    F. Takens, "On the numerical determination of the dimension of an attractor", Lecture Notes in Mathematics 1125,
    1985. :doi:`10.1007/BFb0075637`

    Examples
    --------
    >>> from isogeom.datasets import make_manifold
    >>> from isogeom.dimension import CorrelationDimension
    >>> round(CorrelationDimension().fit(make_manifold("M7").X).dimension_, 2)
    1.95
    """

    _needs_all_distances = True

    def __init__(
        self,
        n_neighbors_min: int = 10,
        n_neighbors_max: int = 20,
        method: str = "radii",
        *,
        n_neighbors_local: int = 100,
        metric: str = "euclidean",
        duplicates: str = "drop",
        anchors: Any = None,
        confidence_level: float = 0.95,
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> None:
        self.n_neighbors_min = n_neighbors_min
        self.n_neighbors_max = n_neighbors_max
        self.method = method
        self.n_neighbors_local = n_neighbors_local
        self.metric = metric
        self.duplicates = duplicates
        self.anchors = anchors
        self.confidence_level = confidence_level
        self.n_jobs = n_jobs
        self.random_state = random_state

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_choice(self.method, "method", ("radii", "regression", "takens"))
        check_choice(self.duplicates, "duplicates", ("drop", "raise", "keep"))
        low = check_integer(self.n_neighbors_min, "n_neighbors_min", low=1)
        check_integer(
            self.n_neighbors_max, "n_neighbors_max", low=low + 1, hint="It must be larger than n_neighbors_min."
        )

    def _n_needed(self) -> int:
        return int(self.n_neighbors_max)

    def _read(self, X: Any) -> NeighborTable:
        if isinstance(X, NeighborTable) or self.metric == "precomputed":
            return super()._read(X)
        # No search: the pass over all pairs finds the neighbours too.
        table = unsearched(self._check_X(X, reset=True, min_samples=3), self.duplicates, self.metric)
        chosen = check_anchors(self.anchors, table.n_samples, self.random_state)
        self._centers = None if chosen is None else np.flatnonzero(np.isin(table.queries, chosen))
        return table

    def _estimate(self, table: NeighborTable) -> Estimate:
        low, high = int(self.n_neighbors_min), int(self.n_neighbors_max)
        available = table.n_reference - 1 if table.n_neighbors == 0 else table.n_neighbors
        if high > available:
            # A table or a matrix that is too short has been reported already.
            searched = table.n_neighbors > 0
            high = available if searched else clip_neighbors(high, available, f"{type(self).__name__}.n_neighbors_max")
            low = min(low, high - 1)
        if low < 1:
            raise ValueError(f"Every row has {available} neighbour(s): at least 2 are needed.")
        if table.n_neighbors:
            near, far = _medians(table.distances, low, high)
            sums, every = self._listed(table, near, far)
        else:
            sums, every = self._passed(table, low, high)
        return self._slope(sums, table, every)

    def _sums(self, near: float, far: float, m: int, once: bool, parts: Iterable[Pairs]) -> PairSums:
        if not 0 < near < far:
            raise ValueError(
                f"The median distances to the neighbours of ranks n_neighbors_min and n_neighbors_max are {near:.6g} "
                f"and {far:.6g}: they must be positive and differ. Drop duplicates, or raise n_neighbors_max."
            )
        sums = PairSums(_radii(self.method, near, far), m, once)
        for part in parts:
            sums.add(part, positive=self.method == "takens")
        return sums

    def _listed(self, table: NeighborTable, near: float, far: float) -> tuple[PairSums, bool]:
        """Count the pairs of a table: from its rows if it has them, else among its distances."""
        m, every = table.n_queries, table.n_queries == table.n_reference
        if table.X is None or table.metric == "precomputed":
            return self._sums(near, far, m, False, [table_pairs(table, far)]), every
        centers = None if every else table.queries
        parts = pairs_within(used_rows(table), far, centers=centers, metric=table.metric)
        return self._sums(near, far, m, every, parts), every

    def _passed(self, table: NeighborTable, low: int, high: int) -> tuple[PairSums, bool]:
        """Find the radii and the pairs below them in one pass: a few rows tell how far it must look."""
        rows, centers = used_rows(table), self._centers
        n = int(rows.shape[0])
        m, once = (n, True) if centers is None else (len(centers), False)
        if m == 0:
            raise ValueError("anchors holds only rows that repeat an earlier row: choose others.")
        every = np.arange(n) if centers is None else centers
        pilot = every if m <= _PILOT else np.sort(_random.check_rng(0).choice(every, size=_PILOT, replace=False))
        farthest = self._distances(rows, pilot, high)[:, -1]
        for share in _PILOT_SHARES:
            radius = float(np.quantile(farthest, share))
            pairs = collected(pairs_within(rows, radius, centers=centers, metric=self.metric), _most_pairs(m, high))
            if pairs is None:
                break
            near, far = np.median(_ranked(pairs, m, once, (low, high)), axis=0)
            if np.isfinite(far):
                return self._sums(float(near), float(far), m, once, [pairs]), once
        # Dense regions have too many pairs to keep: search the radii first, then count.
        near, far = _medians(self._distances(rows, every, high), low, high)
        parts = pairs_within(rows, far, centers=centers, metric=self.metric)
        return self._sums(near, far, m, once, parts), once

    def _distances(self, rows: Array, positions: np.ndarray, k: int) -> np.ndarray:
        found, _ = nearest(rows, rows, k, own=np.asarray(positions), metric=self.metric, n_jobs=self.n_jobs)
        return _xp.to_numpy(found)

    def _slope(self, sums: PairSums, table: NeighborTable, every: bool) -> Estimate:
        """Return the slope and its standard error; `every` tells whether all rows are centres."""
        n, m, radii = table.n_reference, sums.m, sums.radii
        below = sums.below
        if not (below > 0).all():
            raise ValueError("No pair of rows is below the smallest radius: pass more rows, or raise n_neighbors_min.")
        if self.method == "takens":
            mean = float(sums.logs.sum()) / (2 if sums.once else 1) / float(below[0])
            if mean <= 0:
                raise ValueError("All pairs below the radius have the same distance: they give no dimension.")
            dimension = 1 / mean
            parts = dimension * (sums.shells[:, 0] - dimension * sums.logs) / below[0]
            # Sum over pairs of (1 - d L)^2, L the logarithm of the pair.
            own = (dimension / below[0]) ** 2 * (dimension**2 * sums.squared_logs - below[0])
        else:
            x = np.log(radii / radii[-1])
            weights = (x - x.mean()) / np.sum((x - x.mean()) ** 2)
            dimension = float(weights @ np.log(below))
            if dimension <= 0:
                raise ValueError("No pair of rows lies between the radii: pass more rows, or raise n_neighbors_max.")
            # A pair in a shell counts for its radius and all larger ones.
            kernel = np.cumsum((weights / below)[::-1])[::-1]
            parts = sums.shells @ kernel
            own = float(np.diff(below, prepend=0.0) @ kernel**2)
        std = _jackknife(parts, own, once=sums.once, every=every)
        interval = normal_interval(dimension, std, Inflation(1.0, max(m - 1.0, 2.0)), self.confidence_level)
        all_pairs = n * (n - 1) / 2 if sums.once else m * (n - 1)
        dropped = int(np.sum(sums.shells.sum(axis=1) == 0))
        attributes = {"radii_": beside(radii, table), "correlation_sums_": beside(below / all_pairs, table)}
        return Estimate(dimension, std, interval, m - dropped, dropped, attributes)

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:  # noqa: ARG002
        xp = _xp.array_namespace(distances)
        k = int(distances.shape[1])
        j = min(max(1, round(k * int(self.n_neighbors_min) / int(self.n_neighbors_max))), k - 1)
        positive = distances > 0
        logs = xp.log(xp.where(positive, distances, xp.ones_like(distances)))
        if self.method == "takens":
            spread, share = xp.sum(logs[:, -1:] - logs, axis=1), float(max(k - 2, 1))
            good = xp.all(positive, axis=1)
        else:
            ranks = np.array([j, k] if self.method == "radii" else range(j, k + 1))
            weights = np.log(ranks) - np.log(ranks).mean()
            chosen = logs[:, j - 1 :: max(k - j, 1)] if self.method == "radii" else logs[:, j - 1 :]
            # Distances carry the noise, so the logarithm of the distance is regressed on that of the rank.
            spread = xp.sum(chosen * _xp.asarray_like(weights, chosen), axis=1)
            share, good = float(weights @ weights), positive[:, j - 1]
        fine = good & (spread > 0)
        return xp.where(fine, share / xp.where(fine, spread, xp.ones_like(spread)), xp.full_like(spread, xp.nan))


def _radii(method: str, near: float, far: float) -> np.ndarray:
    if method == "takens":
        return np.array([far])
    return np.geomspace(near, far, 2 if method == "radii" else _N_RADII)


def _medians(distances: Array, low: int, high: int) -> tuple[float, float]:
    return tuple(float(np.median(_xp.to_numpy(distances[:, rank - 1]))) for rank in (low, high))  # type: ignore[return-value]


def _ranked(pairs: Pairs, m: int, once: bool, ranks: tuple[int, int]) -> np.ndarray:
    """Return the distance of each row to its neighbours of some ranks, infinite where it lies beyond the pairs."""
    rows = np.concatenate((pairs.centers, pairs.others)) if once else pairs.centers
    distances = np.concatenate((pairs.distances, pairs.distances)) if once else pairs.distances
    columns = np.concatenate((pairs.others, pairs.centers)) if once else pairs.others
    grouped = sp.csr_array((distances, (rows, columns)), shape=(m, int(columns.max(initial=0)) + 1))
    counts = np.diff(grouped.indptr)
    found = np.full((m, len(ranks)), np.inf)
    for rank, column in zip(ranks, found.T):
        # The rows are taken in parts of similar counts: one dense row does not widen the table of all.
        order = np.argsort(counts, kind="stable")
        for part in np.array_split(order[counts[order] >= rank], 16):
            if len(part):
                column[part] = _partitioned(grouped, part, counts[part], rank)
    return found


def _partitioned(grouped: sp.csr_array, rows: np.ndarray, counts: np.ndarray, rank: int) -> np.ndarray:
    """Return the entry of this rank of some rows that have as many."""
    width = int(counts.max())
    result = np.empty(len(rows))
    size = max(1, _ENTRIES // width)
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        place = grouped.indptr[rows[part]][:, np.newaxis] + np.arange(width)
        inside = np.arange(width) < counts[part][:, np.newaxis]
        values = np.where(inside, grouped.data[np.minimum(place, len(grouped.data) - 1)], np.inf)
        result[part] = np.partition(values, rank - 1, axis=1)[:, rank - 1]
    return result


def _jackknife(parts: np.ndarray, own: float, *, once: bool, every: bool) -> float:
    """Return the standard error of a sum over pairs, of mean 0, from its parts by row.

    If all rows are centres, the parts of two rows share a pair, so the jackknife counts the noise of pairs twice: once
    of it, `own`, is taken off again, but never more than leaves that noise itself.
    """
    if every and not once:
        # Each pair came from both ends.
        parts, own = 2 * parts, 2 * own
    spread = float(np.sum((parts - parts.mean()) ** 2))
    return float(np.sqrt(max(spread - own, own) if every else spread))


def _most_pairs(m: int, high: int) -> int:
    return max(2**20, 8 * m * high)
