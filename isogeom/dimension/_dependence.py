"""Standard errors that know that neighbours are not independent.

The log ratios of two rows that share neighbours are correlated, so the variance of their mean is larger than their
variance over their number.

Where the value of a row is a sum of one part per neighbour, the variance of the sum is that of a sum over pairs of
points, and the jackknife corrected to second order gives it: the squares of all that depends on a point, less the
squares of all that depends on a pair of points, which the first sum has twice (Efron and Stein 1981). What is not such
a sum is left to the products of deviations over linked rows.

References
----------
B. Efron and C. Stein, "The jackknife estimate of variance", Annals of Statistics 9(3):586-596, 1981.
:doi:`10.1214/aos/1176345462`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from scipy import special, stats

from isogeom import _kernels, _xp
from isogeom._neighbors import NeighborTable

# Ranges of the links, in units of the largest rank that a contribution uses. Correlation changes sign with distance, so
# one range is too sensitive: products are averaged over three.
_RANGES = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Inflation:
    """How much larger a variance is than that of independent rows.

    Attributes
    ----------
    ratio : float
        Variance over that of independent rows, at least 1.
    freedom : float
        Degrees of freedom with which the ratio was estimated.
    """

    ratio: float
    freedom: float


def inflation(
    values: np.ndarray,
    used: np.ndarray,
    table: NeighborTable,
    rank: int,
    *,
    parts: np.ndarray | None = None,
    nominal: float | None = None,
) -> Inflation:
    """Return the inflation of the variance of the mean of `values` by dependence.

    Parameters
    ----------
    values : ndarray of shape (n_used,)
        One contribution per row of the table that was used.
    used : ndarray of shape (n_used,)
        The rows of the table they belong to, increasing.
    table : NeighborTable
        Who is whose neighbour. With fewer than ``2 * rank`` neighbours the correction tends to be too large where there
        are no `parts`, which need no more than `rank`.
    rank : int
        Largest rank of a neighbour that a contribution depends on.
    parts : ndarray of shape (n_used, n_parts), optional
        What each of the first neighbours adds to the value of the row, of mean 0, up to a common factor. The sum may
        be an approximation of the value: the rest is treated as without parts.
    nominal : float, optional
        Variance of one value that the nominal standard error supposes; None for the variance of the values.

    Returns
    -------
    Inflation
    """
    n = len(values)
    deviations = values - values.mean()
    own = float(np.sum(deviations**2))
    if n < 3 or own == 0:
        return Inflation(1.0, float(max(n - 1, 1)))
    if parts is None:
        linked = _links(used, table, rank)
        ratio = 1 + float(deviations @ (linked @ deviations)) / own
        # The sum has as many terms as the rows have links.
        freedom = n / (1 + float(linked.sum()) / n)
    else:
        ratio = 1 + _products(deviations, parts, used, table, rank) / own
        # The products are noise with as many terms as links beside the squares, which are known well: the noise of
        # their sum is 2 (1 + links) / n, and a chi-squared variable of f degrees has the relative variance 2 / f.
        freedom = n / (1 + np.count_nonzero(parts) / n) * max(ratio, 1.0) ** 2
    if nominal is not None:
        ratio *= own / n / nominal
    return Inflation(max(1.0, ratio), max(freedom, 2.0))


def _products(deviations: np.ndarray, parts: np.ndarray, used: np.ndarray, table: NeighborTable, rank: int) -> float:
    """Return the variance of the sum of all values, less that of independent values.

    With g_i(p) the part of neighbour p in row i, the point p changes the sum of all values by its own value and by the
    parts that it has in others, a pair of points by ``g_i(p) + g_p(i)``. In expectation the sum of squares of what sets
    of one, two, ... points change holds the variance of order m as often as m points have such subsets.
    """
    n, width = table.n_samples, parts.shape[1]
    rows = table.queries[used]
    columns = _xp.to_numpy(table.indices[:, : min(max(width, rank), table.n_neighbors)])[used]
    sums = parts.sum(axis=1)
    square = float(sums @ sums)
    factor = float(sums @ deviations) / square if square > 0 else 0.0
    parts, sums = factor * parts, factor * sums
    at = columns[:, :width].ravel()
    # The parts of every point in the values of other rows.
    outside = np.bincount(at, parts.ravel(), minlength=n)
    mutual = _mutual(parts, used, table)
    # What points change, squared, less twice what pairs change, squared: the variance that single points carry, less
    # three times that of triples. Where density and dimension are constant the first is 0 and the excess negative: a
    # third of it is then the variance of triples, which has to be added.
    excess = float(outside @ outside) - float(np.sum(parts**2)) + 2 * float(outside[rows] @ sums) - 2 * mutual
    shared = mutual + (excess if excess > 0 else excess * 2 / 3)
    return shared + _linked_sum(deviations, rows, columns, n) - _linked_sum(sums, rows, columns, n)


def _mutual(parts: np.ndarray, used: np.ndarray, table: NeighborTable) -> float:
    """Return the sum over ordered pairs of rows of the part of each in the other, multiplied."""
    m, width = parts.shape
    kernel = _kernels.available("mutual_pairs", _xp.array_namespace(parts), parts.dtype, float(m) * width * width)
    if kernel is None:
        n, columns = table.n_samples, _xp.to_numpy(table.indices[:, :width])[used]
        members = sp.csr_array((parts.ravel(), (np.repeat(table.queries[used], width), columns.ravel())), shape=(n, n))
        return float((members * members.T).sum())
    pairs, starts = table.shared(("mutual pairs", table.n_neighbors), lambda: _mutual_pairs(kernel, table))
    row, rank, other, back = pairs[:, : starts[width]]
    if m < table.n_queries:
        place = np.full(table.n_queries, -1, dtype=np.int32)
        place[used] = np.arange(m)
        row, other = place[row], place[other]
        both = (row >= 0) & (other >= 0)
        row, rank, other, back = row[both], rank[both], other[both], back[both]
    flat = parts.ravel()
    return 2 * float(flat[row * np.int64(width) + rank] @ flat[other * np.int64(width) + back])


def _mutual_pairs(kernel: Callable[..., int], table: NeighborTable) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs that are neighbours of each other, in the order of the larger rank; and where ranks start.

    Returns
    -------
    pairs : ndarray of shape (4, n_pairs), int32
        Row of the table, rank of the other one, the other one, rank of the row there.
    starts : ndarray of shape (n_neighbors + 1,)
        Number of pairs within the first 0, 1, 2, ... neighbours.
    """
    m, width = table.n_queries, table.n_neighbors
    place_of = np.full(table.n_samples, -1)
    place_of[table.queries] = np.arange(m)
    found = np.empty((m * width // 2 + 1, 4), dtype=np.int32)
    columns = np.ascontiguousarray(_xp.to_numpy(table.indices), dtype=np.int32)
    found = found[: kernel(columns, table.queries, place_of, found)]
    last = np.maximum(found[:, 1], found[:, 3]).astype(np.uint16 if width < 2**16 else np.int32)
    starts = np.concatenate(([0], np.cumsum(np.bincount(last, minlength=width))))
    return np.ascontiguousarray(found[np.argsort(last, kind="stable")].T), starts


def _linked_sum(values: np.ndarray, rows: np.ndarray, columns: np.ndarray, n: int) -> float:
    """Return the sum over rows of the value times the values of its neighbours."""
    spread = np.zeros(n)
    spread[rows] = values
    return float(values @ spread[columns].sum(axis=1))


def _links(used: np.ndarray, table: NeighborTable, rank: int) -> sp.csr_array:
    """Return the weights, 0 to 1, of the products of deviations of two rows."""
    n, ranges = len(used), [max(2, round(share * rank)) for share in _RANGES]
    k = min(max(ranges), table.n_neighbors)
    weights = np.mean([np.arange(k) < width for width in ranges], axis=0)
    row_of = np.full(table.n_samples, -1)
    row_of[table.queries[used]] = np.arange(n)
    neighbors = row_of[_xp.to_numpy(table.indices[:, :k])[used]].ravel()
    alive = neighbors >= 0
    rows, data = np.repeat(np.arange(n), k), np.tile(weights, n)
    linked = sp.csr_array((data[alive], (rows[alive], neighbors[alive])), shape=(n, n))
    return linked.maximum(linked.T).tocsr()


def gamma_interval(total: float, shape: float, found: Inflation, level: float) -> tuple[float, float]:
    """Return the interval of the rate of exponential variables from their sum.

    For independent variables ``total ~ Gamma(shape, rate)`` and the interval is exact; dependence divides the shape by
    the inflation of the variance, and the quantiles are widened as Student's t widens the normal's.
    """
    effective = shape / found.ratio
    tail = (1 - level) / 2
    widened = _widened(tail, found)
    low, high = special.gammaincinv(effective, widened), special.gammainccinv(effective, widened)
    return float(low / effective * shape / total), float(high / effective * shape / total)


def normal_interval(value: float, std: float, found: Inflation, level: float) -> tuple[float, float]:
    """Return the interval of a positive quantity from its standard error, symmetric in its logarithm."""
    half = -float(stats.norm.ppf(_widened((1 - level) / 2, found))) * std / value
    return value * float(np.exp(-half)), value * float(np.exp(half))


def _widened(tail: float, found: Inflation) -> float:
    """Return the tail of the normal law whose quantile is Student's at `tail`."""
    return float(stats.norm.sf(stats.t.isf(tail, found.freedom)))
