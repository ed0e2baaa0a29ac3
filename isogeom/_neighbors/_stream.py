"""Neighbours of anchors among rows that come in batches: a running merge of the nearest, exact in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._neighbors._duplicates import first_occurrences
from isogeom._neighbors._rows import check_jobs, clip_neighbors, nearest, report_duplicates
from isogeom._validation import check_choice, check_integer, check_rows, check_same_library
from isogeom._xp import Array

# Odd multipliers of the words of a row, drawn once: equal rows have equal marks, others differ but for 1 in 2^64.
_SEED = 0x6E656172


class NeighborStream:
    """Nearest neighbours of fixed anchors among all rows seen so far.

    The memory does not grow with the rows: distances, positions and a mark of each row for every anchor and neighbour.
    Only telling repeated rows takes 8 bytes per row seen; ``duplicates="keep"`` does without, and counts none.

    Parameters
    ----------
    anchors : array-like of shape (n_anchors, n_features)
        Rows to find the neighbours of. They may be among the rows of the batches: the first row that equals an anchor
        is the anchor itself, no neighbour.
    n_neighbors : int, default=100
        Number of neighbours.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row of any batch: leave them out; raise; or let them be neighbours.
    n_jobs : int, default=None
        Number of threads; None for one, -1 for all cores. The numbers do not depend on it.

    Examples
    --------
    >>> from isogeom.dimension import NeighborStream
    >>> stream = NeighborStream([[0.0], [3.0]], n_neighbors=2)
    >>> for batch in ([[0.0], [1.0]], [[3.0], [7.0]]):
    ...     stream = stream.update(batch)
    >>> stream.fields()["distances"]
    array([[1., 3.],
           [2., 3.]])
    """

    def __init__(
        self, anchors: Any, n_neighbors: int = 100, *, duplicates: str = "drop", n_jobs: int | None = None
    ) -> None:
        check_choice(duplicates, "duplicates", ("drop", "raise", "keep"))
        self.anchors = check_rows(anchors, name="anchors", owner="NeighborStream")
        self.n_neighbors = check_integer(n_neighbors, "n_neighbors", low=1)
        self.duplicates, self.n_jobs = duplicates, check_jobs(n_jobs)
        if len(first_occurrences(self.anchors)) < self.anchors.shape[0]:
            raise ValueError("anchors holds a row twice: pass distinct rows.")
        m = int(self.anchors.shape[0])
        # One more than wanted: an anchor that comes by in a batch leaves the list at the end.
        self._distances = np.full((m, self.n_neighbors + 1), np.inf)
        self._indices = np.full((m, self.n_neighbors + 1), -1, dtype=np.int64)
        self._marks = np.zeros((m, self.n_neighbors + 1), dtype=np.uint64)
        self._seen = np.zeros(0, dtype=np.uint64)
        self.n_samples = 0

    def update(self, batch: Any) -> NeighborStream:
        """Search one more batch of rows.

        Parameters
        ----------
        batch : array-like of shape (n_rows, n_features)
            Rows in the library, on the device and of the dtype of the anchors.

        Returns
        -------
        NeighborStream
            The stream itself.

        Raises
        ------
        ValueError
            If the number of features differs from that of the anchors, or a row repeats and `duplicates` is 'raise'.
        """
        batch = check_rows(batch, name="batch", owner="NeighborStream")
        check_same_library(batch, self.anchors, owner="NeighborStream", method="update")
        if batch.shape[1] != self.anchors.shape[1]:
            raise ValueError(f"batch has {batch.shape[1]} features, the anchors {self.anchors.shape[1]}.")
        if batch.dtype != self.anchors.dtype:
            raise ValueError(f"batch has dtype {batch.dtype}, the anchors {self.anchors.dtype}: convert one of them.")
        n = int(batch.shape[0])
        marks = row_marks(batch)
        fresh = np.arange(n)
        if self.duplicates != "keep":
            _, fresh = np.unique(marks, return_index=True)
            fresh = np.sort(fresh[~_member(marks[fresh], self._seen)])
            report_duplicates(n - len(fresh), n, self.duplicates)
            self._seen = np.union1d(self._seen, marks[fresh])
        if len(fresh):
            k = min(self.n_neighbors + 1, len(fresh))
            within = None if len(fresh) == n else fresh
            found = nearest(batch, self.anchors, k, within=within, n_jobs=self.n_jobs)
            distances, indices = (_xp.to_numpy(array) for array in found)
            self._merge(distances, indices + self.n_samples, marks[indices])
        self.n_samples += n
        return self

    def merge(self, other: NeighborStream) -> NeighborStream:
        """Add what another stream with the same anchors has seen, as if its batches came after those of this one.

        Parameters
        ----------
        other : NeighborStream
            Not changed.

        Returns
        -------
        NeighborStream
            The stream itself.

        Raises
        ------
        ValueError
            If the anchors or the parameters differ, or a row repeats and `duplicates` is 'raise'.
        """
        if (self.n_neighbors, self.duplicates) != (other.n_neighbors, other.duplicates) or not np.array_equal(
            row_marks(self.anchors), row_marks(other.anchors)
        ):
            raise ValueError("other has other anchors, n_neighbors or duplicates: merge streams of the same search.")
        union = np.union1d(self._seen, other._seen)
        report_duplicates(len(self._seen) + len(other._seen) - len(union), other.n_samples, self.duplicates)
        self._seen = union
        offset = np.where(other._indices >= 0, other._indices + self.n_samples, -1)
        self._merge(other._distances, offset, other._marks)
        self.n_samples += other.n_samples
        return self

    def _merge(self, distances: np.ndarray, indices: np.ndarray, marks: np.ndarray) -> None:
        """Keep the nearest of those known and those given, equal distances in order of position."""
        width = self.n_neighbors + 1
        distances = np.concatenate((self._distances, distances), axis=1)
        indices = np.concatenate((self._indices, indices), axis=1)
        marks = np.concatenate((self._marks, marks), axis=1)
        if self.duplicates != "keep":
            # The same row from two shards: its first position stays.
            order = np.lexsort((indices, marks), axis=1)
            again = np.zeros(marks.shape, dtype=bool)
            ordered = np.take_along_axis(marks, order, axis=1)
            real = np.take_along_axis(indices, order, axis=1) >= 0
            same = (ordered[:, 1:] == ordered[:, :-1]) & real[:, 1:] & real[:, :-1]
            np.put_along_axis(again, order[:, 1:], same, axis=1)
            distances = np.where(again, np.inf, distances)
            indices = np.where(again, -1, indices)
        order = np.lexsort((indices, distances), axis=1)[:, :width]
        self._distances, self._indices, self._marks = (
            np.take_along_axis(array, order, axis=1) for array in (distances, indices, marks)
        )

    def fields(self) -> dict[str, Any]:
        """Return the fields of a table of what was seen.

        Raises
        ------
        ValueError
            If fewer than 3 distinct rows were seen.
        """
        m = len(self._distances)
        n_distinct = self.n_samples if self.duplicates == "keep" else len(self._seen)
        if n_distinct < 3:
            raise ValueError(f"The batches have {n_distinct} distinct row(s): at least 3 are needed.")
        itself = self._distances[:, 0] == 0
        shift = np.where(itself, 1, 0)[:, np.newaxis] + np.arange(self.n_neighbors)
        k = clip_neighbors(self.n_neighbors, n_distinct - int(itself.any()))
        distances, indices = (
            np.take_along_axis(array, shift[:, :k], axis=1) for array in (self._distances, self._indices)
        )
        # An anchor that did not come by has a position after all rows.
        absent = np.cumsum(~itself) - 1 + self.n_samples
        queries = np.where(itself, self._indices[:, 0], absent)
        like = self.anchors
        xp = _xp.array_namespace(like)
        return {
            "distances": _xp.asarray_like(distances, like, dtype=_xp.accumulator_dtype(xp, _xp.device(like))),
            "indices": _xp.asarray_like(indices, like, dtype=xp.int64),
            "queries": queries,
            "n_samples": self.n_samples + int(m - itself.sum()),
            "n_reference": n_distinct,
            # With 'keep' the rows that repeat are not counted: it would take memory for every row.
            "n_duplicates": self.n_samples - n_distinct,
        }


def _member(marks: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Tell which marks are in an increasing array."""
    if not len(ordered):
        return np.zeros(len(marks), dtype=bool)
    at = np.minimum(np.searchsorted(ordered, marks), len(ordered) - 1)
    return ordered[at] == marks


def row_marks(X: Array) -> np.ndarray:
    """Return 64 bits per row, equal for equal rows, on the host; other rows agree with a chance of 2^-64."""
    marks = []
    for block in _xp.row_blocks(X):
        # Adding zero turns -0.0 into 0.0, which is the same number.
        rows = np.ascontiguousarray(_xp.to_numpy(block)) + 0.0
        words = rows.view(np.uint32 if rows.dtype == np.float32 else np.uint64).astype(np.uint64)
        keys = np.random.default_rng(_SEED).integers(0, 2**63, (2, words.shape[1]), dtype=np.uint64) * 2 + 1
        # Words are mixed before they are added: numbers with few digits differ in their highest bits alone.
        words = words * keys[0]
        words ^= words >> np.uint64(32)
        marks.append((words * keys[1]).sum(axis=1, dtype=np.uint64))
    return np.concatenate(marks)
