"""Slow, obvious reference for nonnegative least squares: every support is tried."""

import itertools

import numpy as np


def nnls_by_enumeration(G, p, alpha=0.0):
    """Minimiser of z G z / 2 - p z + alpha sum(z) over z >= 0 (at most about 10 coordinates, nonsingular G)."""
    k = len(p)
    best, lowest = np.zeros(k), 0.0
    for size in range(1, k + 1):
        for support in itertools.combinations(range(k), size):
            on = list(support)
            z = np.zeros(k)
            z[on] = np.linalg.solve(G[np.ix_(on, on)], p[on] - alpha)
            value = 0.5 * z @ G @ z - (p - alpha) @ z
            if np.all(z >= 0) and value < lowest:
                best, lowest = z, value
    return best


def single_steps_of_block_pivoting(G, p, patience=3, most=1000):
    """Number of exchanges of one coordinate that block principal pivoting needs (Kim and Park 2011, algorithm 2)."""
    on, fewest, left, single = np.linalg.solve(G, p) > 0, len(p) + 1, patience, 0
    for _ in range(most):
        z = np.zeros(len(p))
        z[on] = np.linalg.solve(G[np.ix_(on, on)], p[on])
        wrong = np.flatnonzero((on & (z < 0)) | (~on & (G @ z - p < -1e-12 * np.abs(p).max())))
        if len(wrong) == 0:
            break
        if len(wrong) < fewest:
            fewest, left = len(wrong), patience
        elif left > 0:
            left -= 1
        else:
            wrong, single = wrong[-1:], single + 1
        on[wrong] = ~on[wrong]
    return single
