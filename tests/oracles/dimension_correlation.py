"""Slow references of the correlation dimension."""

import numpy as np
from scipy.spatial.distance import cdist


def distances(X, metric="euclidean"):
    return cdist(X, X, metric)


def radii(D, low, high):
    ranked = np.sort(D, axis=1)
    return np.median(ranked[:, low]), np.median(ranked[:, high])


def correlation_sum(D, r):
    n, found = len(D), 0
    for i in range(n):
        for j in range(i):
            found += D[i, j] < r
    return 2 * found / (n * (n - 1))


def two_radii(D, low, high):
    near, far = radii(D, low, high)
    return np.log(correlation_sum(D, far) / correlation_sum(D, near)) / np.log(far / near)


def regression(D, low, high, n_radii=10):
    r = np.geomspace(*radii(D, low, high), n_radii)
    return np.polyfit(np.log(r), [np.log(correlation_sum(D, x)) for x in r], 1)[0]


def takens(D, high):
    far = radii(D, 1, high)[1]
    pairs = D[np.tril_indices(len(D), -1)]
    return -1 / np.mean(np.log(pairs[(pairs > 0) & (pairs < far)] / far))
