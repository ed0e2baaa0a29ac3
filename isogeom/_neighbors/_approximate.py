"""Approximate neighbours by nearest-neighbour descent, with the share of true ones measured."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from joblib import effective_n_jobs

from isogeom import _random, _xp
from isogeom._neighbors._cloud import Cloud
from isogeom._neighbors._exact import blocks
from isogeom._neighbors._measure import squared_differences
from isogeom._neighbors._rows import check_jobs, clip_neighbors, distinct_rows, nearest
from isogeom._validation import check_choice, check_integer

# Share of rows, and least number of them, that are searched exactly to measure the recall.
_SAMPLE, _LEAST = 0.01, 100
# Fewest neighbours that the descent works with: with fewer it gets stuck.
_WIDTH = 30


def descend(X: np.ndarray, k: int, *, duplicates: str, n_jobs: int | None, random_state: Any) -> dict[str, Any]:
    """Return the fields of a table of approximate neighbours, whose distances are measured exactly."""
    check_choice(duplicates, "duplicates", ("drop", "raise", "keep"))
    check_jobs(n_jobs)
    k = check_integer(k, "n_neighbors", low=1)
    if _xp.is_foreign(X):
        raise ValueError(f"X is a {type(X).__module__} array: approximate neighbours take numpy rows.")
    try:
        from pynndescent import NNDescent
    except ImportError as error:
        raise ImportError(
            "approximate neighbours need pynndescent: pip install 'isogeom[approximate]' (or pip install pynndescent)."
        ) from error
    within, n_duplicates = distinct_rows(X, duplicates)
    searched = np.arange(len(X)) if within is None else within
    k = clip_neighbors(k, len(searched) - 1)
    rng = _random.check_rng(random_state, "random_state")
    cloud = Cloud.of(X)
    # Centred and scaled, the rows keep their distances in float32.
    rows = np.concatenate([cloud.centred(X[searched[part]]).astype(np.float32) for part in blocks(len(searched), 2048)])
    with warnings.catch_warnings():
        # Rows without enough neighbours are completed below.
        warnings.simplefilter("ignore")
        index = NNDescent(
            rows,
            n_neighbors=min(max(k + 1, _WIDTH), len(searched)),
            random_state=int(rng.integers(2**31)),
            n_jobs=effective_n_jobs(n_jobs),
        )
        local = np.array(index.neighbor_graph[0], dtype=np.int64)
    distances, indices = _completed(cloud, X, searched, local, k, n_jobs)
    size = min(len(searched), max(_LEAST, round(_SAMPLE * len(searched))))
    sample = np.sort(rng.choice(len(searched), size=size, replace=False))
    limit = nearest(X, X, k, own=searched[sample], within=within, n_jobs=n_jobs)[0][:, -1:]
    return {
        "distances": distances,
        "indices": indices,
        "queries": searched,
        "n_samples": len(X),
        "n_reference": len(searched),
        "n_duplicates": n_duplicates,
        # By distance, so that one of several equally near rows is as good as another.
        "recall": float(np.mean(distances[sample] <= limit * (1 + 1e-12))),
    }


def _completed(
    cloud: Cloud, X: np.ndarray, searched: np.ndarray, local: np.ndarray, k: int, n_jobs: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Measure the neighbours found, the row itself left out; rows with too few of them are searched exactly."""
    n = len(searched)
    distances, indices = np.empty((n, k)), np.empty((n, k), dtype=np.int64)
    short = np.zeros(n, dtype=bool)
    for part in blocks(n, 1024):
        found = np.sort(local[part], axis=1)
        own = np.arange(part.start, part.stop)[:, np.newaxis]
        usable = (found >= 0) & (found != own)
        usable[:, 1:] &= found[:, 1:] != found[:, :-1]
        places = searched[np.maximum(found, 0)]
        squares = np.where(usable, squared_differences(cloud, X[searched[part]], places), np.inf)
        order = np.lexsort((places, squares), axis=1)[:, :k]
        squares = np.take_along_axis(squares, order, axis=1)
        short[part] = ~np.isfinite(squares[:, -1])
        distances[part] = np.sqrt(squares) / cloud.scale
        indices[part] = np.take_along_axis(places, order, axis=1)
    if short.any():
        within = None if n == len(X) else searched
        distances[short], indices[short] = nearest(X, X, k, own=searched[short], within=within, n_jobs=n_jobs)
    return distances, indices
