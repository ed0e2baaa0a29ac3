"""Search of the neighbours of rows: duplicates, anchors, and the engine for the metric at hand."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from isogeom import _random, _xp
from isogeom._neighbors._cloud import Cloud, check_vanished, unit_scale
from isogeom._neighbors._duplicates import first_occurrences
from isogeom._neighbors._exact import exact_neighbors
from isogeom._neighbors._metrics import check_magnitude, check_measured, check_metric
from isogeom._neighbors._refine import refine
from isogeom._validation import check_integer, warn_user
from isogeom._xp import Array

# Up to this many features, trees beat products.
_TREE_FEATURES = 10


def check_anchors(anchors: Any, n: int, random_state: Any) -> np.ndarray | None:
    """Return the increasing positions of the anchors, None for all rows."""
    if anchors is None:
        return None
    if isinstance(anchors, numbers.Integral) and not isinstance(anchors, bool):
        count = check_integer(anchors, "anchors", low=1, high=n)
        return np.sort(_random.check_rng(random_state, "random_state").choice(n, size=count, replace=False))
    chosen = np.asarray(anchors)
    if chosen.ndim != 1 or chosen.size == 0 or chosen.dtype.kind not in "iu":
        raise ValueError("anchors must be None, an integer or a non-empty one-dimensional array of row positions.")
    if chosen.min() < 0 or chosen.max() >= n:
        raise ValueError(f"anchors must hold row positions from 0 to {n - 1}, got {chosen.min()} to {chosen.max()}.")
    return np.unique(chosen)


def distinct_rows(X: Array, duplicates: str) -> tuple[np.ndarray | None, int]:
    """Apply the policy: return the positions of the rows to search (None for all) and the number of repeated rows."""
    kept = first_occurrences(X)
    n = int(X.shape[0])
    report_duplicates(n - len(kept), n, duplicates)
    if len(kept) < 3:
        raise ValueError(f"X has {len(kept)} distinct row(s) among {n}: at least 3 are needed to compare distances.")
    return (None if duplicates == "keep" or len(kept) == n else kept), n - len(kept)


def report_duplicates(n_duplicates: int, n: int, duplicates: str) -> None:
    """Raise if rows repeat and the policy forbids it."""
    if n_duplicates and duplicates == "raise":
        raise ValueError(f"{n_duplicates} of {n} rows repeat an earlier row: remove them, or pass duplicates='drop'.")


# What limits the number of neighbours, in warnings.
OTHER_ROWS = "the number of other distinct rows"


def clip_neighbors(k: int, available: int, name: str = "n_neighbors", limit: str = OTHER_ROWS) -> int:
    """Return `k`, or the number available with a warning that names the parameter ("MLE.n_neighbors") and its limit."""
    if k > available:
        owner, dot, parameter = name.rpartition(".")
        warn_user(f"{parameter}={k}{f' of {owner}' if dot else ''} is clipped to {available}, {limit}.")
    return min(k, available)


def check_jobs(n_jobs: Any) -> int | None:
    """Return `n_jobs` if it is None or an integer other than 0, or raise an error that says what it means."""
    if n_jobs is None:
        return None
    hint = "It is the number of threads: None for one, -1 for all cores, -2 for all but one."
    jobs = check_integer(n_jobs, "n_jobs", hint=hint)
    if jobs == 0:
        raise ValueError(f"n_jobs=0 has no meaning. {hint}")
    return jobs


def rows_at(X: Array, positions: np.ndarray) -> Array:
    """Return the rows of `X` at some positions, which lie on the host."""
    xp = _xp.array_namespace(X)
    return xp.take(X, _xp.asarray_like(positions, X, dtype=xp.int64), axis=0)


def search_rows(
    X: Array, k: int, *, metric: str, duplicates: str, anchors: np.ndarray | None, n_jobs: int | None
) -> dict[str, Any]:
    """Return the fields of a table of exact neighbours: `k` of them, or as many as there are."""
    n = int(X.shape[0])
    within, n_duplicates = distinct_rows(X, duplicates)
    searched = np.arange(n) if within is None else within
    own = searched if anchors is None else np.intersect1d(anchors, searched)
    k = min(k, len(searched) - 1)
    distances, indices = nearest(X, X, k, own=own, within=within, metric=metric, n_jobs=n_jobs)
    return {
        "distances": distances,
        "indices": indices,
        "queries": own,
        "n_samples": n,
        "n_reference": len(searched),
        "n_duplicates": n_duplicates,
    }


def nearest(
    X: Array,
    queries: Array,
    k: int,
    *,
    own: np.ndarray | None = None,
    within: np.ndarray | None = None,
    metric: str = "euclidean",
    n_jobs: int | None = None,
) -> tuple[Array, Array]:
    """Return distances and positions of the `k` nearest rows of `X`.

    With `own`, the queries are the rows of `X` at these positions, and a row is no neighbour of itself.
    """
    check_metric(metric, X)
    if metric == "euclidean" and own is None:
        cloud = Cloud.of(X)
        groups = cloud.far_groups(queries)
        if groups is not None:
            return _of_far(cloud, groups, queries, k, within=within, n_jobs=n_jobs)
    if metric == "euclidean" and not (_xp.is_numpy(_xp.array_namespace(X)) and X.shape[1] <= _TREE_FEATURES):
        rows = queries if own is None else X if len(own) == X.shape[0] else rows_at(X, own)
        cloud = cloud if own is None else Cloud.of(X)
        distances, indices = exact_neighbors(cloud, rows, k, own=own, within=within, n_jobs=n_jobs)
        check_vanished(cloud, rows, distances, indices)
        return distances, indices
    return _by_scikit_learn(X, queries, k, own=own, within=within, metric=metric, n_jobs=n_jobs)


def _of_far(
    cloud: Cloud,
    groups: list[tuple[float, np.ndarray]],
    queries: Array,
    k: int,
    *,
    within: np.ndarray | None,
    n_jobs: int | None,
) -> tuple[Array, Array]:
    """Return the neighbours of queries some of which are far beyond the rows: each group in its own scale."""
    xp = _xp.array_namespace(queries)
    found = []
    for scale, places in groups:
        part = rows_at(queries, places)
        if scale == cloud.scale:
            found.append(nearest(cloud.rows, part, k, within=within, n_jobs=n_jobs))
        else:
            found.append(exact_neighbors(cloud.at_scale(scale), part, k, within=within, n_jobs=n_jobs))
    back = np.argsort(np.concatenate([places for _, places in groups]))
    distances, indices = (rows_at(xp.concat(arrays, axis=0), back) for arrays in zip(*found))
    if not bool(xp.all(xp.isfinite(distances))):
        raise ValueError(
            "X has rows so far from those of fit that their distance overflows: divide all rows by a constant, or drop "
            "these."
        )
    return distances, indices


def _by_scikit_learn(
    X: np.ndarray,
    queries: np.ndarray,
    k: int,
    *,
    own: np.ndarray | None,
    within: np.ndarray | None,
    metric: str,
    n_jobs: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.neighbors import NearestNeighbors

    places = np.arange(X.shape[0]) if within is None else within
    # Trees and pairwise metrics work in float64, and measure by differences.
    rows = np.asarray(X if within is None else X[within], dtype=np.float64)
    tree = metric == "euclidean"
    check_magnitude(metric, rows)
    # A power of two leaves the digits alone, and keeps the squares of a tree from vanishing or overflowing.
    scale = unit_scale(rows) if tree else 1.0
    if tree:
        rows = rows * scale
    finder = NearestNeighbors(metric=metric, algorithm="kd_tree" if tree else "auto", n_jobs=n_jobs).fit(rows)
    # One more than needed shows whether a tie is cut.
    size = min(k + (own is not None) + 1, len(places))
    if own is not None and len(own) == len(places):
        wanted = rows
    else:
        wanted = np.asarray(queries if own is None else X[own], dtype=np.float64)
        wanted = wanted * scale if tree else wanted
        check_magnitude(metric, wanted)
    distances, local = finder.kneighbors(wanted, size)
    distances = distances / scale
    indices = places[local]
    if own is not None:
        distances, indices = without_self(distances, indices, own)
    asked = queries if own is None else X if len(own) == X.shape[0] else X[own]
    if tree:
        check_vanished(Cloud.of(X), asked, distances, indices)
    else:
        check_measured(metric, distances, X, asked, indices)
    cut = np.flatnonzero(distances[:, k - 1] == distances[:, -1]) if distances.shape[1] > k else np.zeros(0, dtype=int)
    distances, indices = _settle(distances[:, :k], indices[:, :k])
    if not (tree and cut.size):
        return distances, indices
    # Trees cut ties anywhere: which of the rows equally far comes in is for the position to say.
    return refine(Cloud.of(X), asked, distances, indices, cut, own=own, within=within)


def without_self(distances: np.ndarray, indices: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Drop from each row its own position (or, if ties at distance 0 pushed it out, the last neighbour)."""
    mine = indices == own[:, np.newaxis]
    mine[~mine.any(axis=1), -1] = True
    shape = (len(own), indices.shape[1] - 1)
    return distances[~mine].reshape(shape), indices[~mine].reshape(shape)


def _settle(distances: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put equal distances in order of position."""
    order = np.lexsort((indices, distances), axis=1)
    return np.take_along_axis(distances, order, axis=1), np.take_along_axis(indices, order, axis=1).astype(np.int64)
