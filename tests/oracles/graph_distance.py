"""Graph distances as full matrices, and the published recipe step by step."""

import numpy as np
from scipy.sparse.csgraph import connected_components


def neighbor_matrix(X, k):
    """Dense symmetric matrix of edges: infinite where there is none, rows linked to their k nearest."""
    D = np.sqrt(((X[:, None, :] - X[None, :, :]) ** 2).sum(axis=2))
    np.fill_diagonal(D, np.inf)
    W = np.full_like(D, np.inf)
    for i in range(len(D)):
        for j in np.argsort(D[i], kind="stable")[:k]:
            W[i, j] = W[j, i] = D[i, j]
    return W


def largest_component(W):
    """Positions of the nodes of the largest component, and the number of components."""
    n, labels = connected_components(np.isfinite(W).astype(int), directed=False)
    return np.flatnonzero(labels == np.argmax(np.bincount(labels))), n


def all_paths(W):
    """All shortest-path distances, by Floyd and Warshall; zero edges are edges."""
    D = W.copy()
    np.fill_diagonal(D, 0)
    for k in range(len(D)):
        D = np.minimum(D, D[:, k, None] + D[None, k, :])
    return D


def published(distances, longest_edge, n_bins):
    """Real and integer dimension of the recipe of 2016 from all distances, as one long function."""
    h, edges = np.histogram(distances, n_bins)
    dx = edges[1] - edges[0]
    x = edges[:-1] + dx / 2
    mean, std = distances.mean(), distances.std()
    peak, width, height = x[h.argmax()], std, np.log(h.max())
    for turn in (1, 2):
        right = peak + width / 2 + (dx if turn == 2 else 0)
        keep = (x > peak - width) & (x <= right) & (h > 0)
        a, b, c = np.polyfit(x[keep], np.log(h[keep]), 2)
        top = -b / 2 / a
        if a < 0 and abs(top - peak) < width / (2 * turn) + dx:
            height = np.polyval((a, b, c), top)
            peak, width = top, np.sqrt(-1 / 2 / a)
        elif turn == 1:
            peak = mean
    low = max(peak - 2 * width - dx / 2, 0, longest_edge)
    keep = (x > low) & (x <= peak + dx / 4) & (h > 0)
    y = np.log(h[keep]) - height
    u = np.log(np.sin(np.pi * x[keep] / 2 / peak))
    D = np.arange(1, 301)
    rms = np.sqrt((((D[:, None] - 1) * u - y) ** 2).mean(axis=1))
    return 1 + (u @ y) / (u @ u), int(D[np.argmin(rms)])


def published_2019(distances, longest_edge, n_bins):
    """Real and integer dimension of the recipe of 2019 from all distances; None where it gives up."""
    h, edges = np.histogram(distances, n_bins)
    dx = edges[1] - edges[0]
    x = edges[:-1] + dx / 2
    mean, std = distances.mean(), distances.std()
    peak = x[h.argmax()]
    if abs(peak - mean) > std or peak <= longest_edge + dx:
        return None
    keep = (x > peak - std) & (x < peak + std / 2)
    first = np.polyfit(x[keep], np.log(h[keep]), 2)
    peak1, width1 = -first[1] / first[0] / 2, np.sqrt(abs(1 / first[0] / 2))
    keep = (x > peak1 - width1) & (x < peak1 + width1 / 2)
    second = np.polyfit(x[keep], np.log(h[keep]), 2)
    peak2, width2 = abs(second[1] / second[0] / 2), np.sqrt(abs(1 / second[0] / 2))
    low = max(peak2 - 2 * width2 - dx / 2, longest_edge)
    near = abs(peak2 - peak1) <= width1 / 4
    peak, parabola = (peak2, second) if near else (peak1, first)
    keep = (x > low) & (x <= peak + dx / 4) & (h > 0)
    height = np.polyval(parabola, -parabola[1] / 2 / parabola[0])
    y = np.log(h[keep]) - height
    u = np.log(np.sin(np.pi * x[keep] / 2 / peak))
    D = np.arange(1, 301)
    rms = np.sqrt((((D[:, None] - 1) * u - y) ** 2).mean(axis=1))
    return 1 + (u @ y) / (u @ u), int(D[np.argmin(rms)])
