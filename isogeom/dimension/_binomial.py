"""The binomial estimator: neighbours within a fraction of a radius."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import special

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._validation import check_integer, check_real
from isogeom._xp import Array
from isogeom.dimension._base import DimensionEstimator, Estimate
from isogeom.dimension._dependence import Inflation, inflation, normal_interval

# The share of points inside that makes the variance of the estimate smallest, and the largest ratio of radii used.
BEST_SHARE, LARGEST_RATIO = 0.2032, 0.975
# Fixed-point steps between the dimension and the ratio of radii that is best for it.
_ROUNDS = 20


class BinomialDimension(DimensionEstimator):
    r"""Intrinsic dimension from the share of a row's neighbours within a fraction of their radius.

    Parameters
    ----------
    n_neighbors : int, default=20
        Rank of the neighbour whose distance is the outer radius, at least 2; clipped, with a warning, to one less than
        the number of distinct rows.
    radius_ratio : float, default=None
        Inner over outer radius, between 0 and 1; None for the ratio of smallest variance, ``0.2032 ** (1 / d)`` and at
        most 0.975, found together with the dimension.
    n_neighbors_local : int, default=100
        Number of neighbours from which `transform` computes the dimension at a row; clipped to the number there is.
    metric : str, default='euclidean'
        'euclidean', 'precomputed', or for numpy rows any metric of :func:`sklearn.metrics.pairwise_distances`.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row. Kept ones count as neighbours.
    anchors : int or array-like of int, default=None
        Rows to use, among the neighbours of all rows: that many drawn at random, or these positions.
    confidence_level : float, default=0.95
        Of `dimension_interval_`.
    n_jobs : int, default=None
        Number of threads; None for one, -1 for all cores.
    random_state : int, RandomState instance, Generator or None, default=0
        Draws the anchors.

    Attributes
    ----------
    dimension_ : float
        The estimate.
    dimension_std_, dimension_interval_ : float, tuple of float
        Standard error and confidence interval, corrected for the dependence of rows that are neighbours.
    dimension_std_nominal_ : float
        The standard error of independent rows.
    radius_ratio_ : float
        The ratio that was used.
    n_samples_used_, n_samples_dropped_, n_duplicates_ : int
        Rows that entered; rows whose outer radius is 0; rows that repeat another.
    table_ : NeighborTable
        The neighbours.
    n_features_in_ : int
        Number of features seen during `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if `X` had string column names.

    See Also
    --------
    ABIDE : Chooses the neighbourhood of every row.

    Notes
    -----
    With the radius at neighbour k, each of the k - 1 nearer ones lies within ``rho r_k`` with probability ``rho^d``
    under a locally constant density, so ``d = ln(sum n / sum (k - 1)) / ln rho``. `transform` uses, at each row, the
    mean of the posterior of d for a uniform prior of ``rho^d``, which exists for every count.

    References
    ----------
    I. Macocco, A. Glielmo, J. Grilli and A. Laio, "Intrinsic dimension estimation for discrete metrics", Physical
    Review Letters 130:067401, 2023. :doi:`10.1103/PhysRevLett.130.067401`

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import BinomialDimension
    >>> rng = np.random.default_rng(0)
    >>> X = rng.random((2000, 3)) @ rng.standard_normal((3, 20))
    >>> model = BinomialDimension().fit(X)
    >>> round(model.dimension_, 1)
    2.9
    """

    def __init__(
        self,
        n_neighbors: int = 20,
        *,
        radius_ratio: float | None = None,
        n_neighbors_local: int = 100,
        metric: str = "euclidean",
        duplicates: str = "drop",
        anchors: Any = None,
        confidence_level: float = 0.95,
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.radius_ratio = radius_ratio
        self.n_neighbors_local = n_neighbors_local
        self.metric = metric
        self.duplicates = duplicates
        self.anchors = anchors
        self.confidence_level = confidence_level
        self.n_jobs = n_jobs
        self.random_state = random_state

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_integer(self.n_neighbors, "n_neighbors", low=2)
        if self.radius_ratio is not None:
            ratio = check_real(self.radius_ratio, "radius_ratio", low=0, high=1)
            if ratio in (0.0, 1.0):
                raise ValueError(f"radius_ratio={ratio!r} must lie between 0 and 1, both excluded.")

    def _n_needed(self) -> int:
        return int(self.n_neighbors)

    def _estimate(self, table: NeighborTable) -> Estimate:
        k = min(int(self.n_neighbors), table.n_neighbors)
        distances = _xp.to_numpy(table.distances[:, :k])
        used = np.flatnonzero(distances[:, -1] > 0)
        if len(used) < 3:
            raise ValueError(f"Only {len(used)} row(s) have a neighbour {k} at a positive distance: 3 are needed.")
        inner = distances[used, :-1] / distances[used, -1:]
        trials = np.full(len(used), k - 1)
        ratio, counts = settle_ratio(inner, trials, self.radius_ratio)
        value = binomial_estimate(counts, trials, ratio)
        found = binomial_inflation(inner, counts, trials, ratio, used, table)
        interval = normal_interval(value[0], value[1] * found.ratio**0.5, found, self.confidence_level)
        attributes = {"dimension_std_nominal_": value[1], "radius_ratio_": ratio}
        std = value[1] * found.ratio**0.5
        return Estimate(value[0], std, interval, len(used), table.n_queries - len(used), attributes)

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:  # noqa: ARG002
        return local_dimensions(distances, self.radius_ratio_)


def settle_ratio(inner: np.ndarray, trials: np.ndarray, given: float | None) -> tuple[float, np.ndarray]:
    """Return the ratio of radii, and how many neighbours of each row it holds.

    Parameters
    ----------
    inner : ndarray of shape (n_rows, n_neighbors)
        Distances over the outer radius of the row; above 1 for those that do not count.
    trials : ndarray of shape (n_rows,)
        Number of neighbours that count.
    given : float or None
        The ratio, or None to find the best one.
    """
    ratio = 0.5 if given is None else float(given)
    for _ in range(1 if given is not None else _ROUNDS):
        counts = np.sum(inner <= ratio, axis=1)
        if given is not None:
            break
        d = binomial_estimate(counts, trials, ratio)[0]
        best = min(BEST_SHARE ** (1 / d), LARGEST_RATIO)
        if abs(best - ratio) <= 1e-6 * ratio:
            break
        ratio = best
    return ratio, np.sum(inner <= ratio, axis=1)


def binomial_estimate(counts: np.ndarray, trials: np.ndarray, ratio: float) -> tuple[float, float]:
    """Return the dimension and its standard error for independent rows."""
    inside, total = float(counts.sum()), float(trials.sum())
    # None or all inside: half a point keeps the logarithm finite and the estimate on the right side.
    share = min(max(inside, 0.5), total - 0.5) / total
    d = float(np.log(share) / np.log(ratio))
    return d, float(np.sqrt((1 / share - 1) / total) / abs(np.log(ratio)))


def binomial_inflation(
    inner: np.ndarray, counts: np.ndarray, trials: np.ndarray, ratio: float, used: np.ndarray, table: NeighborTable
) -> Inflation:
    """Return the inflation of the variance of the total count; `inner` as in :func:`settle_ratio`."""
    share = float(counts.sum() / trials.sum())
    parts = np.where(np.arange(inner.shape[1]) < trials[:, np.newaxis], (inner <= ratio) - share, 0.0)
    # Where all or none are inside the nominal variance is not of this law, and nothing varies.
    nominal = share * (1 - share) * float(trials.mean())
    rank = inner.shape[1] + 1
    return inflation(counts - trials * share, used, table, rank, parts=parts, nominal=nominal or None)


def local_dimensions(distances: Array, ratio: float) -> Array:
    """Return the posterior mean at each row with its last distance as outer radius; NaN where that is 0."""
    xp = _xp.array_namespace(distances)
    outer = distances[:, -1:]
    inside = xp.sum(xp.astype(distances[:, :-1] <= ratio * outer, outer.dtype), axis=1)
    values = posterior_mean(inside, xp.full_like(inside, float(distances.shape[1]) - 1), ratio)
    return xp.where(outer[:, 0] > 0, values, xp.full_like(values, xp.nan))


def posterior_mean(inside: Array, trials: Array, ratio: float) -> Array:
    """Return the posterior mean of d at each row, for a uniform prior of ``ratio ** d``."""
    xp = _xp.array_namespace(inside)
    # digamma(a) - digamma(a + b) at integers is minus a sum of inverses: a table of all of them.
    largest = int(xp.max(trials)) + 2
    table = _xp.asarray_like(special.digamma(np.arange(1, largest + 1)), inside)
    a = xp.astype(inside, xp.int64)
    ends = xp.astype(trials, xp.int64) + 1
    return (xp.take(table, a, axis=0) - xp.take(table, ends, axis=0)) / float(np.log(ratio))
