"""Slow, obvious references for nearest neighbours: all distances by direct differences in float64."""

import numpy as np


def all_distances(queries, rows):
    """Distances of all pairs, one query at a time; each difference is scaled, so no square leaves float64."""
    queries, rows = np.asarray(queries, dtype=np.float64), np.asarray(rows, dtype=np.float64)
    result = np.empty((len(queries), len(rows)))
    for i, query in enumerate(queries):
        scale = max(np.abs(query).max(), np.abs(rows).max(axis=1).max())
        unit = 2.0 ** -int(np.frexp(scale)[1]) if scale > 0 else 1.0
        result[i] = np.sqrt(((rows * unit - query * unit) ** 2).sum(axis=1)) / unit
    return result


def brute_neighbors(rows, k, *, queries=None, own=None, within=None):
    """Distances and positions of the `k` nearest rows; equal distances in order of position."""
    rows = np.asarray(rows)
    places = np.arange(len(rows)) if within is None else np.asarray(within)
    wanted = rows[own] if queries is None else queries
    distances = all_distances(wanted, rows[places])
    if own is not None:
        distances[np.asarray(own)[:, np.newaxis] == places] = np.inf
    order = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(distances, order, axis=1), places[order]


def first_rows(rows):
    """Positions of the rows that equal no earlier row."""
    seen, kept = set(), []
    for i, row in enumerate(np.asarray(rows)):
        key = tuple(row.tolist())
        if key not in seen:
            seen.add(key)
            kept.append(i)
    return np.array(kept)
