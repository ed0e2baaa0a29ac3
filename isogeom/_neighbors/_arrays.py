"""Tables from the result of another search, which is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from isogeom import _xp
from isogeom._validation import check_integer, check_real, check_rows


def from_arrays(
    distances: Any, indices: Any, n_samples: int | None, queries: Any, recall: float, X: Any
) -> dict[str, Any]:
    """Return the fields of a table from arrays of distances and positions, and rows or None."""
    distances = check_rows(distances, name="distances", owner="NeighborTable")
    xp = _xp.array_namespace(distances)
    distances = xp.astype(distances, _xp.accumulator_dtype(xp, _xp.device(distances)))
    m = int(distances.shape[0])
    host = _positions(indices, "indices")
    if host.shape != distances.shape:
        raise ValueError(f"indices has shape {host.shape}, distances {tuple(distances.shape)}: they must agree.")
    if not bool(xp.all(distances >= 0)) or not bool(xp.all(distances[:, 1:] >= distances[:, :-1])):
        raise ValueError("distances must be nonnegative and increase along every row: sort each row first.")
    n = m if n_samples is None else check_integer(n_samples, "n_samples", low=1)
    at = np.arange(m) if queries is None else _positions(queries, "queries")
    if at.shape != (m,) or at.min() < 0 or at.max() >= n:
        raise ValueError(f"queries must hold {m} positions from 0 to {n - 1}.")
    if host.min() < 0 or host.max() >= n:
        raise ValueError(f"indices must be positions from 0 to n_samples - 1 = {n - 1}.")
    if bool((host == at[:, np.newaxis]).any()):
        raise ValueError("indices holds a row's own position: leave the row itself out (drop the first column).")
    _check_no_repeats(at[np.newaxis, :], "queries holds")
    _check_no_repeats(host, "A row of indices holds")
    if X is not None:
        X = check_rows(X, name="X", owner="NeighborTable")
        if X.shape[0] != n:
            raise ValueError(f"X has {X.shape[0]} rows, but n_samples={n}.")
    return {
        "distances": distances,
        "indices": xp.astype(indices, xp.int64)
        if _xp.is_foreign(indices)
        else _xp.asarray_like(host, distances, dtype=xp.int64),
        "queries": at,
        "n_samples": n,
        "n_reference": n,
        "n_duplicates": _repeats(_xp.to_numpy(distances) == 0, host, at, n),
        "recall": check_real(recall, "recall", low=0, high=1),
        "X": X,
    }


def _repeats(zero: np.ndarray, indices: np.ndarray, queries: np.ndarray, n: int) -> int:
    """Return the number of rows that repeat another: of each group that distance 0 connects, all but one."""
    rows, columns = np.nonzero(zero)
    if not rows.size:
        return 0
    links = sp.coo_array((np.ones(len(rows)), (queries[rows], indices[rows, columns])), shape=(n, n))
    return n - int(connected_components(links.tocsr(), directed=False)[0])


def _positions(values: Any, name: str) -> np.ndarray:
    host = _xp.to_numpy(values) if _xp.is_foreign(values) else np.asarray(values)
    if host.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integer positions, got {host.dtype}: convert them with astype(int).")
    return host.astype(np.int64)


def _check_no_repeats(positions: np.ndarray, what: str) -> None:
    ordered = np.sort(positions, axis=1)
    rows, columns = np.nonzero(ordered[:, 1:] == ordered[:, :-1])
    if rows.size:
        raise ValueError(f"{what} position {ordered[rows[0], columns[0]]} twice: every position may come once.")
