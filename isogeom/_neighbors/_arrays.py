"""Tables from the result of another search, which is checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._validation import check_integer, check_real, check_rows


def from_arrays(distances: Any, indices: Any, n_samples: int | None, queries: Any, recall: float) -> dict[str, Any]:
    """Return the fields of a table from arrays of distances and positions."""
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
    return {
        "distances": distances,
        "indices": xp.astype(indices, xp.int64)
        if _xp.is_foreign(indices)
        else _xp.asarray_like(host, distances, dtype=xp.int64),
        "queries": at,
        "n_samples": n,
        "n_reference": n,
        "recall": check_real(recall, "recall", low=0, high=1),
    }


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
