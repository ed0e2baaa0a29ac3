"""Standard errors that know that neighbours are not independent.

The log ratios of two rows that share neighbours are correlated, so the variance of their mean is larger than their
variance over their number. Rows are linked where one is among the neighbours of the other; the variance of the mean is
the sum of the products of deviations over linked pairs, which is the jackknife over overlapping blocks of neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from scipy import special, stats

from isogeom import _xp
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


def inflation(values: np.ndarray, used: np.ndarray, table: NeighborTable, rank: int) -> Inflation:
    """Return the inflation of the variance of the mean of `values` by dependence.

    Parameters
    ----------
    values : ndarray of shape (n_used,)
        One contribution per row of the table that was used.
    used : ndarray of shape (n_used,)
        The rows of the table they belong to, increasing.
    table : NeighborTable
        Who is whose neighbour. With fewer than ``2 * rank`` neighbours the correction tends to be too large.
    rank : int
        Largest rank of a neighbour that a contribution depends on.

    Returns
    -------
    Inflation
    """
    n = len(values)
    deviations = values - values.mean()
    own = float(np.sum(deviations**2))
    if n < 3 or own == 0:
        return Inflation(1.0, float(max(n - 1, 1)))
    linked = _links(used, table, rank)
    pairs = float(deviations @ (linked @ deviations))
    # The sum has as many terms as the rows have links.
    freedom = max(n / (1 + float(linked.sum()) / n), 2.0)
    return Inflation(max(1.0, 1 + pairs / own), freedom)


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
