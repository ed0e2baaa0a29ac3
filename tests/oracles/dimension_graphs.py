"""Slow references of the lengths of nearest-neighbour graphs and minimum spanning trees."""

import numpy as np
from scipy.spatial.distance import cdist


def knn_parts(X, k, gamma):
    """Sum of the powers of the edges of every row."""
    D = np.sort(cdist(X, X), axis=1)
    return np.sum(D[:, 1 : k + 1] ** gamma, axis=1)


def spanning_edges(D):
    """Edge lengths of the minimum spanning tree, increasing, by Kruskal's algorithm."""
    n = len(D)
    group = list(range(n))
    edges = sorted((D[i, j], i, j) for i in range(n) for j in range(i))
    found = []
    for length, i, j in edges:
        if group[i] != group[j]:
            old, new = group[i], group[j]
            group = [new if g == old else g for g in group]
            found.append(length)
    return np.array(found)


def integer_dimension(sizes, lengths, gamma, most):
    """Best integer by trying all of them, the factor by linear least squares."""
    errors = []
    for m in range(1, most + 1):
        column = np.repeat(np.asarray(sizes, dtype=float) ** ((m - gamma) / m), lengths.shape[1])[:, np.newaxis]
        target = lengths.ravel()
        factor = np.linalg.lstsq(column, target, rcond=None)[0]
        errors.append(np.sum((target - column @ factor) ** 2))
    return 1 + int(np.argmin(errors))
