"""Compiled shortest paths from chosen sources, with a queue of buckets; the array code is `dimension/_geodesics.py`.

Nodes wait in circular buckets of equal width, linked into lists, so that a node moves between buckets in constant time.
A node may be settled again if a shorter path turns up within its own bucket: the distances are exact for every width.
Every sum runs along a path from its source, as in Dijkstra's algorithm, so they are also equal to the last bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile without the GIL, in IEEE arithmetic: infinite distances keep their meaning."""
    options: dict[str, Any] = {"nogil": True}
    if os.environ.get("ISOGEOM_NUMBA_CACHE", "1") != "0":
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:
            # No writable place for the cache (a read-only installation without a home folder).
            pass
    return numba.njit(**options)(function)


@_jit
def _search(starts, ends, weights, source, per_bucket, head, after, before, dist):
    """Write to `dist` the distances of all nodes from `source`, infinite where no path leads.

    The number of buckets, ``len(head)``, is a power of two above ``max(weights) * per_bucket + 2``: then two nodes that
    wait at the same time in one bucket belong to the same interval.
    """
    mask = head.shape[0] - 1
    for b in range(head.shape[0]):
        head[b] = -1
    for v in range(dist.shape[0]):
        dist[v] = np.inf
        # -2: does not wait; -1: first of its bucket.
        before[v] = -2
    dist[source] = 0.0
    head[0], after[source], before[source] = source, -1, -1
    waiting, b = 1, 0
    while waiting > 0:
        while head[b] < 0:
            b = (b + 1) & mask
        u = head[b]
        head[b] = after[u]
        if after[u] >= 0:
            before[after[u]] = -1
        before[u] = -2
        waiting -= 1
        reached = dist[u]
        for e in range(starts[u], starts[u + 1]):
            v = ends[e]
            length = reached + weights[e]
            if length < dist[v]:
                if before[v] != -2:
                    if before[v] >= 0:
                        after[before[v]] = after[v]
                    else:
                        head[np.int64(dist[v] * per_bucket) & mask] = after[v]
                    if after[v] >= 0:
                        before[after[v]] = before[v]
                    waiting -= 1
                dist[v] = length
                c = np.int64(length * per_bucket) & mask
                after[v], before[v] = head[c], -1
                if head[c] >= 0:
                    before[head[c]] = v
                head[c] = v
                waiting += 1


@_jit
def path_rows(starts, ends, weights, sources, per_bucket, n_buckets, out):
    """Write the distances from each source to a row of `out`, of shape (n_sources, n_nodes)."""
    n = out.shape[1]
    head, after, before = np.empty(n_buckets, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    for s in range(sources.shape[0]):
        _search(starts, ends, weights, sources[s], per_bucket, head, after, before, out[s])


@_jit
def path_counts(starts, ends, weights, sources, groups, per_bucket, n_buckets, edges, counts, facts):
    """Count the distances from the sources to all other nodes by bins, and sum them up.

    Parameters
    ----------
    sources, groups : ndarray of shape (n_sources,)
        The nodes to start from, and the row of `counts` of each.
    edges : ndarray of shape (n_bins + 1,)
        Equally spaced; the last bin includes its right edge. Without bins nothing is counted.
    counts : ndarray of shape (n_groups, n_bins)
        int64; added to.
    facts : ndarray of shape (n_sources, 3)
        Written: largest distance, sum of distances, sum of their squares, of the nodes that are reached.
    """
    n, n_bins = starts.shape[0] - 1, counts.shape[1]
    head, after, before = np.empty(n_buckets, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    dist = np.empty(n)
    scale = n_bins / (edges[n_bins] - edges[0]) if n_bins > 0 else 0.0
    for s in range(sources.shape[0]):
        _search(starts, ends, weights, sources[s], per_bucket, head, after, before, dist)
        longest, total, squares = 0.0, 0.0, 0.0
        row = counts[groups[s]]
        for v in range(n):
            d = dist[v]
            if v == sources[s] or d == np.inf:
                continue
            longest = max(longest, d)
            total += d
            squares += d * d
            if n_bins > 0 and edges[0] <= d <= edges[n_bins]:
                b = min(np.int64((d - edges[0]) * scale), n_bins - 1)
                # The edges decide, not the rounding of the product.
                if d < edges[b]:
                    b -= 1
                elif b + 1 < n_bins and d >= edges[b + 1]:
                    b += 1
                row[b] += 1
        facts[s, 0], facts[s, 1], facts[s, 2] = longest, total, squares


@_jit
def patch_paths(starts, ends, weights, members, per_bucket, n_buckets, out):
    """Write the distances between the members of patches, along paths inside of each patch.

    Parameters
    ----------
    members : ndarray of shape (n_patches, k)
        Nodes of each patch; -1 for none.
    out : ndarray of shape (n_patches, k, k)
        Written; infinite where no path leads.
    """
    n, k = starts.shape[0] - 1, members.shape[1]
    place = np.full(n, -1, np.int64)
    head, after, before = np.empty(n_buckets, np.int32), np.empty(k, np.int32), np.empty(k, np.int32)
    first, last = np.empty(k + 1, np.int64), np.empty(k * k, np.int32)
    lengths = np.empty(k * k)
    for p in range(members.shape[0]):
        for i in range(k):
            if members[p, i] >= 0:
                place[members[p, i]] = i
        size = 0
        for i in range(k):
            first[i] = size
            u = members[p, i]
            if u < 0 or place[u] != i:
                continue
            for e in range(starts[u], starts[u + 1]):
                j = place[ends[e]]
                if j >= 0:
                    last[size], lengths[size] = j, weights[e]
                    size += 1
        first[k] = size
        for i in range(k):
            _search(first, last, lengths, i, per_bucket, head, after, before, out[p, i])
        for i in range(k):
            if members[p, i] >= 0:
                place[members[p, i]] = -1
