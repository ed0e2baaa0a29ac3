"""Estimates that are a function of the mean of one value per row, with the error of that mean carried over."""

from __future__ import annotations

import numpy as np

from isogeom._neighbors import NeighborTable
from isogeom.dimension._base import Estimate
from isogeom.dimension._dependence import Inflation, inflation, normal_interval

# Relative spreads below this are rounding.
_ROUNDING = 1e-10


def usable(values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the values that are finite and positive, in float64, and the rows of the table they belong to.

    Raises
    ------
    ValueError
        If there are fewer than 3.
    """
    used = np.flatnonzero(np.isfinite(values) & (values > 0))
    if len(used) < 3:
        raise ValueError(f"Only {len(used)} row(s) have {k} neighbours at different positive distances: 3 are needed.")
    return values[used].astype(np.float64), used


def from_mean(
    values: np.ndarray,
    used: np.ndarray,
    table: NeighborTable,
    *,
    rank: int,
    dimension: float,
    slope: float,
    level: float,
    parts: np.ndarray | None = None,
    found: Inflation | None = None,
) -> Estimate:
    """Return the estimate `dimension`, a function of the mean of `values` with derivative `slope` there.

    Parameters
    ----------
    values, used : ndarray of shape (n_used,)
        One value per row, and the rows of the table.
    table : NeighborTable
        The neighbours.
    rank : int
        Largest rank of a neighbour that a value depends on.
    dimension, slope : float
        Value and derivative of the function at the mean.
    level : float
        Confidence level.
    parts : ndarray of shape (n_used, n_parts), optional
        What each of the first neighbours adds to a value; see :func:`inflation`.
    found : Inflation, optional
        The inflation of the variance of the mean, if it is known already.

    Returns
    -------
    Estimate
        Its nominal standard error is that of independent rows. Without errors where all values are equal.
    """
    n = len(values)
    nominal = abs(slope) * float(np.std(values, ddof=1)) / np.sqrt(n)
    if nominal <= _ROUNDING * dimension:
        # Equal values say nothing of the error.
        return Estimate(dimension, None, None, n, table.n_queries - n, {"dimension_std_nominal_": None})
    if found is None:
        found = inflation(values, used, table, rank, parts=parts)
    std = float(nominal * np.sqrt(found.ratio))
    interval = normal_interval(dimension, std, found, level)
    attributes = {"dimension_std_nominal_": float(nominal)}
    return Estimate(dimension, std, interval, n, table.n_queries - n, attributes)


def average(
    inverses: np.ndarray,
    used: np.ndarray,
    table: NeighborTable,
    *,
    how: str,
    rank: int,
    level: float,
    parts: np.ndarray | None = None,
) -> Estimate:
    """Return the mean of the dimensions of the rows ('mean'), or the inverse of the mean of their inverses."""
    if how == "inverse":
        dimension = float(1 / inverses.mean())
        slope = dimension**2
        return from_mean(inverses, used, table, rank=rank, dimension=dimension, slope=slope, level=level, parts=parts)
    values = 1 / inverses
    dimension = float(values.mean())
    return from_mean(values, used, table, rank=rank, dimension=dimension, slope=1.0, level=level, parts=parts)
