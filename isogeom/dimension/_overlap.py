"""Standard errors of means over neighbourhoods that overlap: how the spectra and angles of two of them are correlated.

A neighbourhood whose directions are isotropic does not change in the mean with one of its rows, only with pairs of
rows. So the covariance of two neighbourhoods is that of what pairs in common do in both: less than their number says,
as a direction is another one from another centre.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import scipy.sparse as sp

from isogeom import _kernels, _xp
from isogeom.dimension._dependence import Inflation

# Points along either axis of the integrals over balls, and distances of two balls, from 0 to 2 radii.
_POINTS, _DISTANCES = 120, 33
# Dimension above which correlations hardly change: they tend to the squared share of rows in common.
_LARGEST = 50.0
# Neighbourhoods whose overlaps are counted, and how many at a time. Their mean is all that is needed.
_MOST, _ROWS = 500, 100
# Share of the neighbours that are near enough for differences to be noise.
_NEAR = 0.1


def patch_inflation(
    values: np.ndarray, neighbors: np.ndarray, rows: np.ndarray, n: int, *, dimension: float, power: int
) -> Inflation:
    """Return the inflation of the variance of a mean over neighbourhoods that share rows.

    Parameters
    ----------
    values : ndarray of shape (m,)
        One value per neighbourhood, a function of the directions of its rows.
    neighbors : ndarray of shape (m, k)
        Positions of the rows of every neighbourhood, the nearest first.
    rows : ndarray of shape (m,)
        Position of the row that each neighbourhood belongs to.
    n : int
        Number of rows.
    dimension : float
        The dimension.
    power : int
        Power of the distance from the centre that a row has in the directions: see :func:`pair_correlation`.

    Returns
    -------
    Inflation
        Over the variance of the values, with `m - 1` in its denominator.

    Notes
    -----
    Neighbourhoods at an edge have other means than those inside, which is no dependence. So the noise is taken from the
    differences between rows and their nearest neighbours: half their mean square is its variance times one less the
    correlation. What is left of the variance of the values is that of their means at independent places.
    """
    m, k = neighbors.shape
    own = float(np.var(values, ddof=1))
    if own == 0:
        return Inflation(1.0, float(max(m - 1, 2)))
    near = max(1, round(_NEAR * k))
    place = np.full(n, -1)
    place[rows] = np.arange(m)
    others = place[neighbors[:, :near]]
    total, apart = _overlaps(neighbors, others, n, pair_correlation(dimension, power))
    known = others >= 0
    noise = own
    if known.any() and apart > 0:
        differences = (values[:, np.newaxis] - values[others])[known]
        noise = min(float(differences @ differences) / (2 * len(differences)) / apart, own)
    return Inflation(max(1.0, (own - noise + noise * total) / own), max(m / total - 1, 2.0))


def _overlaps(
    neighbors: np.ndarray, others: np.ndarray, n: int, correlation: tuple[np.ndarray, np.ndarray]
) -> tuple[float, float]:
    """Return the mean over neighbourhoods of the sum of their correlations, and of one less that with `others`.

    `others` holds places of near neighbourhoods, -1 where there is none.
    """
    m, k = neighbors.shape
    member = sp.csr_array((np.ones(m * k), neighbors.ravel(), np.arange(0, m * k + 1, k)), shape=(m, n))
    columns = member.T.tocsr()
    # Of many neighbourhoods, evenly spaced ones stand for all; they meet all.
    some = np.unique(np.linspace(0, m - 1, min(m, _MOST)).astype(np.int64))
    # How often neighbourhoods share 0, 1, ..., k rows: with any other, and with the near ones.
    counts = np.zeros((2, k + 1), dtype=np.int64)
    # A term of a sparse product costs as much as ten multiplications.
    size = 10.0 * len(some) * k * k
    kernel = _kernels.available("overlap_counts", _xp.array_namespace(member.data), member.dtype, size)
    if kernel is not None:
        kernel(neighbors, columns.indptr, columns.indices, some, others, counts)
    for start in range(0, len(some) if kernel is None else 0, _ROWS):
        chosen = some[start : start + _ROWS]
        shared = (member[chosen] @ columns).tocsr()
        counts[0] += np.bincount(shared.data.astype(np.int64), minlength=k + 1)
        line, rank = np.nonzero(others[chosen] >= 0)
        if len(line):
            near = np.asarray(shared[line, others[chosen][line, rank]]).ravel()
            counts[1] += np.bincount(near.astype(np.int64), minlength=k + 1)
    correlations = np.interp(np.arange(k + 1) / k, *correlation)
    total, pairs = float(counts[0] @ correlations), int(counts[1].sum())
    return total / len(some), 1 - float(counts[1] @ correlations) / pairs if pairs else 0.0


def pair_correlation(dimension: float, power: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Return shares of rows in common, increasing from 0 to 1, and the correlations of two neighbourhoods at them.

    Parameters
    ----------
    dimension : float
        The dimension, from 2 to 50; others are taken as the nearer of these.
    power : int
        2 for covariances, which weight directions by the squared distance from the centre; 1 for the product of one
        length each, 0 for directions alone.

    Notes
    -----
    To second order what a pair y, z does in a ball is a multiple of ``A(y) : A(z)`` with the traceless tensor
    ``A(y) = |y|^power (u u' - I / d)``, u the direction. For two balls the covariance is the squared norm of the mean
    over both, zero outside one of them, of ``A (x) A'`` with A' from the other centre. Around the axis through the
    centres the tensors fall in three parts that do not mix: along it, across it, and within the plane.
    """
    return _pair_correlation(round(float(np.clip(dimension, 2.0, _LARGEST)), 1), power)


@lru_cache(maxsize=64)
def _pair_correlation(d: float, power: int) -> tuple[np.ndarray, np.ndarray]:
    along = (np.arange(_POINTS) + 0.5) / _POINTS * 2 - 1
    aside = (np.arange(_POINTS) + 0.5) / _POINTS
    t, r = np.meshgrid(along, aside, indexing="ij")
    weight = np.where(t**2 + r**2 < 1, r ** (d - 2), 0.0)
    weight /= weight.sum()
    # Traceless tensors of the plane, of side d - 1.
    within = d * (d - 1) / 2 - 1
    shares, norms = [], []
    here = _tensor(t, r, d, power)
    for distance in np.linspace(2, 0, _DISTANCES):
        common = np.where((t - distance) ** 2 + r**2 < 1, weight, 0.0)
        first, second, third = (float(np.sum(common * a * b)) for a, b in zip(here, _tensor(t - distance, r, d, power)))
        norm = (d / (d - 1) * first) ** 2 + (2 * second) ** 2 / (d - 1)
        if within > 0:
            norm += ((d - 2) / (d - 1) * third) ** 2 / within
        shares.append(float(common.sum()))
        norms.append(norm)
    return np.asarray(shares), np.asarray(norms) / norms[-1]


def _tensor(t: np.ndarray, r: np.ndarray, d: float, power: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    square = t**2 + r**2
    scale = square ** (power / 2 - 1)
    return scale * (t**2 - square / d), scale * t * r, scale * r**2
