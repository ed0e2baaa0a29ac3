"""Rows that lie in several pieces, read as one read-only array (numpy only)."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from isogeom.gradients._dtypes import decode

_CHUNK = 1 << 24  # bytes of rows that a sum over all of them looks at together
_HINT = (
    "load the rows with np.asarray(rows), or a part of them with rows[i:j], or go through the harvest block by block "
    "with iter_blocks()"
)


class ShardedRows(NDArrayOperatorsMixin):
    """Rows in one or several pieces, read as one read-only array of shape (n_rows, d); nothing is loaded unasked.

    The rows of a folder come as this, however many shards it has, and so do rows of ``dtype="bfloat16"`` in memory, so
    that code written for one works on the others. What works:

    - indexing as in numpy, by slices, integers, index lists and boolean masks, with columns if you like. A slice or an
      integer gives a read-only array, without a copy where it stays inside one shard; lists and masks give a new array;
    - ``len``, ``shape``, ``ndim``, ``size``, ``nbytes``, ``dtype``, iteration over rows, and :meth:`mean`, which goes
      through the rows piece by piece;
    - :func:`numpy.asarray` and :meth:`astype`, which load all rows (:func:`numpy.asarray` of a single shard is its
      memory map, read-only like the array that it makes of several shards; :func:`numpy.array` gives a writable copy).
      Estimators and numpy's functions that take any array-like do the same.

    Arithmetic, comparisons and numpy's element-wise functions raise TypeError, since they would load everything
    unnoticed; what else an array has (``T``, ``sum``) raises AttributeError.

    Parameters
    ----------
    parts : sequence of path or ndarray
        The ``.npy`` files, in order, or arrays in memory.
    lengths : sequence of int
        Rows of each.
    width : int
        Number of features.
    dtype : {"float32", "float16", "bfloat16"} or another dtype of numpy, default="float32"
        Kind of numbers in the parts; the 16 bits of bfloat16 (uint16 for numpy) are read as float32.
    keep : sequence of ndarray of int, default=None
        Rows of each part that belong to the array, as many as `lengths` says, in increasing order; None for all. With
        it every slice is a copy.

    Attributes
    ----------
    bounds : list of int
        Where each part ends.

    Examples
    --------
    >>> import numpy as np, tempfile, pathlib
    >>> from isogeom.gradients import ShardedRows
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for i in range(2):
    ...     np.save(folder / f"{i}.npy", np.full((3, 2), i, dtype=np.float32))
    >>> rows = ShardedRows([folder / "0.npy", folder / "1.npy"], [3, 3], 2)
    >>> rows.shape, rows[[0, 5]].tolist(), rows.mean(axis=0).tolist()
    ((6, 2), [[0.0, 0.0], [1.0, 1.0]], [0.5, 0.5])
    >>> rows - 1
    Traceback (most recent call last):
    TypeError: ShardedRows has no subtract: load the rows with np.asarray(rows), ...
    """

    ndim = 2
    __hash__ = object.__hash__

    def __init__(
        self,
        parts: Sequence[str | os.PathLike[str] | NDArray[Any]],
        lengths: Sequence[int],
        width: int,
        dtype: str = "float32",
        keep: Sequence[NDArray[np.intp]] | None = None,
    ) -> None:
        # Absolute: files are opened late, maybe in another working directory.
        self._parts = [part if isinstance(part, np.ndarray) else Path(part).absolute() for part in parts]
        self._kind = dtype
        self._keep = keep
        self._maps: dict[int, NDArray[Any]] = {}
        self.bounds = np.cumsum(lengths).tolist() if len(lengths) else []
        self.shape = (self.bounds[-1] if self.bounds else 0, width)
        self.dtype = np.dtype("float32" if dtype == "bfloat16" else dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        n = len(self.bounds)
        return f"ShardedRows(shape={self.shape}, dtype={self.dtype}, {n} shard{'s' * (n != 1)})"

    def __getstate__(self) -> dict[str, Any]:
        # A memory map would be pickled with its contents; the files are opened again instead.
        return {**self.__dict__, "_maps": {}}

    @property
    def size(self) -> int:
        """Number of values."""
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows once they are loaded, in `dtype`."""
        return self.size * self.dtype.itemsize

    def _read(self, i: int, rows: slice | NDArray[np.intp]) -> NDArray[Any]:
        """Return rows of one part; of a slice a view, where they are stored as they are read."""
        part = self._parts[i]
        if not isinstance(part, np.ndarray):
            if i not in self._maps:
                self._maps[i] = np.load(part, mmap_mode="r", allow_pickle=False)
            part = self._maps[i]
        return decode(part[rows if self._keep is None else self._keep[i][rows]], self._kind)

    def shard(self, i: int) -> NDArray[Any]:
        """Return the rows of one part, read-only: its memory map, or a copy in float32 for bfloat16.

        Parameters
        ----------
        i : int
            Number of the part, from 0.

        Returns
        -------
        ndarray of shape (n_rows_of_part, d)
            Its rows.
        """
        number = range(len(self._parts))[i]
        return self[self._begin(number) : self.bounds[number]]

    def mean(self, axis: int | None = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> Any:
        """Return the mean over rows, over columns or over all, looking at a part of the rows at a time.

        Parameters
        ----------
        axis : {0, 1, None}, default=None
            0 for the mean row, 1 for one number per row, None for one number.
        dtype : dtype, default=None
            Of the result; None is that of the rows. Sums are float64 in any case.
        out : None
            Not supported; it is here for :func:`numpy.mean`.
        keepdims : bool, default=False
            Whether the axes that are averaged stay, with length 1.

        Returns
        -------
        ndarray or scalar
            The mean.

        Raises
        ------
        ValueError
            If there is nothing to average, `axis` is not one of the above, or `out` is given.
        """
        if axis not in (None, 0, 1, -1, -2):
            raise ValueError(f"axis={axis!r} must be 0, 1 or None: rows have two axes")
        if out is not None:
            raise ValueError("out is not supported: assign the result instead")
        if not self.size:
            raise ValueError(f"rows of shape {self.shape} have no mean")
        if axis in (1, -1):
            found = np.concatenate([piece.mean(axis=1, dtype=np.float64) for piece in self._pieces()])[:, None]
        else:
            found = np.zeros((1, self.shape[1]))
            for piece in self._pieces():
                found += piece.sum(axis=0, dtype=np.float64)
            found /= len(self)
        if axis is None:
            found = found.mean(axis=1, keepdims=True)
        found = found.astype(self.dtype if dtype is None else dtype)
        if keepdims:
            return found
        return found[0, 0] if axis is None else found.ravel()

    def astype(self, dtype: Any) -> NDArray[Any]:
        """Return all rows as a new array in memory.

        Parameters
        ----------
        dtype : dtype
            Of the result.

        Returns
        -------
        ndarray of shape (n_rows, d)
            The rows.
        """
        result = np.empty(self.shape, dtype)
        start = 0
        for piece in self._pieces():
            result[start : start + len(piece)] = piece
            start += len(piece)
        return result

    def _pieces(self) -> Iterator[NDArray[Any]]:
        """Go through all rows, a few at a time."""
        step = max(_CHUNK // max(4 * self.shape[1], 1), 1)
        for i, end in enumerate(self.bounds):
            for start in range(self._begin(i), end, step):
                yield self[start : min(start + step, end)]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        for piece in self._pieces():
            yield from piece

    # ------------------------------------------------------------------ indexing

    def __getitem__(self, index: Any) -> Any:
        rows, columns = _split(index)
        found = self._rows(rows)
        if columns is None:
            return found
        if found.ndim == 1:
            return found[columns]
        if isinstance(rows, slice) or np.ndim(columns) == 0:
            return found[:, columns]
        columns = np.asarray(columns)
        # Two lists name pairs of row and column, as in numpy.
        return found[np.arange(len(found)), np.flatnonzero(columns) if columns.dtype == bool else columns]

    def _rows(self, rows: Any) -> NDArray[Any]:
        if isinstance(rows, slice):
            return self._slice(range(len(self))[rows])
        if isinstance(rows, (list, tuple, np.ndarray)) and np.ndim(rows) > 0:
            return self._gather(self._checked(np.asarray(rows)))
        try:
            if isinstance(rows, (bool, np.bool_)):
                raise TypeError
            number = operator.index(rows)
        except TypeError:
            raise IndexError(
                f"rows are chosen by a slice, an integer, integers or a boolean mask, got {rows!r}"
            ) from None
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} is outside 0 to {len(self) - 1}")
        number %= len(self)
        found: NDArray[Any] = self._slice(range(number, number + 1))[0]
        return found

    def _slice(self, rows: range) -> NDArray[Any]:
        """Return equally spaced rows, read-only; inside one part they are a view of it."""
        if not rows:
            result = np.empty((0, self.shape[1]), self.dtype)
        else:
            low, high = min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1
            first, last = (int(np.searchsorted(self.bounds, row, side="right")) for row in (low, high - 1))
            if first == last:
                begin = self._begin(first)
                result = self._read(first, slice(low - begin, high - begin))[:: rows.step]
            elif rows.step == 1:
                result = np.empty((len(rows), self.shape[1]), self.dtype)
                for i in range(first, last + 1):
                    begin = self._begin(i)
                    start, end = max(low, begin), min(high, self.bounds[i])
                    result[start - low : end - low] = self._read(i, slice(start - begin, end - begin))
            else:
                result = self._gather(np.arange(rows.start, rows.stop, rows.step))
        result.flags.writeable = False
        return result

    def _begin(self, i: int) -> int:
        return self.bounds[i - 1] if i else 0

    def _checked(self, index: NDArray[Any]) -> NDArray[Any]:
        if index.dtype == bool:
            if index.shape != (len(self),):
                raise IndexError(f"a boolean index must have shape ({len(self)},), got {index.shape}")
            return np.flatnonzero(index)
        if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
            raise IndexError(f"rows are chosen by a slice, integers or a boolean mask, got {index.dtype} {index.shape}")
        index = index.astype(np.intp)
        index = np.where(index < 0, index + len(self), index)
        if len(index) and (index.min() < 0 or index.max() >= len(self)):
            raise IndexError(f"a row index is outside 0 to {len(self) - 1}")
        return index

    def _gather(self, index: NDArray[Any]) -> NDArray[Any]:
        result = np.empty((len(index), self.shape[1]), dtype=self.dtype)
        shards = np.searchsorted(self.bounds, index, side="right")
        for i in np.unique(shards):
            here = shards == i
            result[here] = self._read(int(i), index[here] - self._begin(int(i)))
        return result

    # ------------------------------------------------------------------ as an array, and where it is none

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        same = dtype is None or np.dtype(dtype) == self.dtype
        one = len(self._parts) == 1 and self._kind != "bfloat16" and self._keep is None
        if copy is False and not (same and one):
            raise ValueError("an array of all rows is a copy: they lie in several files, or have another dtype")
        return self[:] if same and not copy else self.astype(self.dtype if same else dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *_inputs: Any, **_options: Any) -> Any:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        raise TypeError(f"ShardedRows has no {name}: {_HINT}")

    def __setitem__(self, _index: Any, _value: Any) -> None:
        raise ValueError(f"ShardedRows is read-only: {_HINT}")

    def __getattr__(self, name: str) -> Any:
        # Only for names that are not found. AttributeError, so that hasattr tells what is there.
        hint = f": {_HINT}" if not name.startswith("_") and hasattr(np.ndarray, name) else ""
        raise AttributeError(f"ShardedRows has no {name}{hint}")


def _split(index: Any) -> tuple[Any, Any]:
    """Split an index into that of rows and that of columns, None for all."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is Ellipsis for part in parts):
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        if len(parts) < 3:
            parts = (*parts[:at], *[slice(None)] * (3 - len(parts)), *parts[at + 1 :])
        else:
            parts = (*parts[:at], *parts[at + 1 :])
    if not 0 < len(parts) < 3 or any(part is None for part in parts):
        raise IndexError(f"rows have two axes and no new one can be made, got the index {index!r}")
    return parts[0], parts[1] if len(parts) == 2 else None
