"""What each neighbour adds to the value of a row: the parts that standard errors are made of."""

from __future__ import annotations

import numpy as np
from scipy import special

# Points of the table of a smooth function on (0, 1).
_GRID = 4097


def log_parts(distances: np.ndarray) -> np.ndarray:
    """Return ``ln(r_k / r_j)`` of the neighbours j < k, less their mean: shape (n, k - 1).

    Parameters
    ----------
    distances : ndarray of shape (n, k)
        Positive, increasing.
    """
    distances = np.asarray(distances, dtype=np.float64)
    logs = np.log(distances[:, -1:] / distances[:, :-1])
    return logs - logs.mean()


def ratio_parts(distances: np.ndarray) -> np.ndarray:
    """Return ``r_j / r_k`` of the neighbours j < k, less their mean: shape (n, k - 1)."""
    distances = np.asarray(distances, dtype=np.float64)
    ratios = distances[:, :-1] / distances[:, -1:]
    return ratios - ratios.mean()


def order_parts(distances: np.ndarray, near: int, far: int, dimension: float) -> np.ndarray:
    r"""Return what each neighbour adds to ``ln(r_far / r_near)``, to first order: shape (n, far - 1).

    Parameters
    ----------
    distances : ndarray of shape (n, far) or wider
        Increasing; ``r_far`` positive.
    near, far : int
        The two ranks.
    dimension : float
        The dimension.

    Notes
    -----
    The shares ``u = (r_j / r_far)^d`` of the neighbours nearer than `far` are independent and uniform, and the ratio is
    that of the order statistic of rank `near`. Its mean given that one of them is u has the derivative
    ``-P(B = near - 1) / u`` with B the number of the other far - 2 that are below u; the integral is an incomplete beta
    function, or the tail of a logarithm for the nearest neighbour.
    """
    with np.errstate(divide="ignore"):
        u = np.exp(dimension * np.log(distances[:, : far - 1] / distances[:, far - 1 : far], dtype=np.float64))
    if near == 1:
        others = far - 2
        safe = np.clip(u, np.finfo(np.float64).tiny, 1.0)
        parts = -np.log(safe) - 1 / (others + 1)
        power = np.ones_like(safe)
        for j in range(1, others + 1):
            power = power * (1 - safe)
            parts -= power / j
        return parts
    grid = np.linspace(0, 1, _GRID)
    table = ((far - near) / (far - 1) - special.betainc(near - 1, far - near, grid)) / (near - 1)
    # Linear between points, whose places need no search as they are evenly spaced.
    at = u * (_GRID - 1)
    lower = np.minimum(at.astype(np.int32), _GRID - 2)
    at -= lower
    return table[lower] + at * np.diff(table)[lower]
