"""Rows of a fit, read block by block as often as needed: of an array, or of batches from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._validation import check_beside
from isogeom._xp import Array
from isogeom.decomposition._spool import Spool

# Elements of a block in float64 (2 MiB: a pass holds up to four such arrays, and larger ones are no faster), and the
# fewest rows for which products run at full speed.
_CHUNK_ELEMENTS, _MIN_CHUNK = 2**18, 256
# Elements of a slice of a matrix that is not in memory.
_SLICE_ELEMENTS = 2**20


class Rows:
    """Rows that can be read again and again, `chunk` at a time, whatever batches they come in.

    Parameters
    ----------
    read : callable
        Starts a pass: returns an iterable of arrays of shape (any, n_features), of any real dtype.
    reference : array
        Any array of the library, on the device and with the features of the rows.
    chunk : int, default=None
        Largest number of rows in one block; None for 2048, or fewer where rows are long.
    mean : array of shape (n_features,), default=None
        Subtracted from every row.
    batched : bool, default=False
        Whether `read` gives arrays of any size that are to leave no trace in the blocks.
    shape : tuple of (int, int), default=None
        Numbers of rows and features, where they are known. None: counted at the first look.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Array]],
        reference: Array,
        *,
        chunk: int | None = None,
        mean: Array | None = None,
        batched: bool = False,
        shape: tuple[int, int] | None = None,
    ) -> None:
        self.read = read
        self.xp = _xp.array_namespace(reference)
        self.device = _xp.device(reference)
        self.dtype = _xp.accumulator_dtype(self.xp, self.device)
        self.chunk = chunk or max(_MIN_CHUNK, min(_xp.BLOCK_ROWS, _CHUNK_ELEMENTS // int(reference.shape[-1])))
        self.mean = mean
        self.batched = batched
        self._shape = shape

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and features; the first look takes a pass."""
        if self._shape is None:
            count, width = 0, 0
            for batch in self.read():
                count, width = count + int(batch.shape[0]), int(batch.shape[1])
            self._shape = count, width
        return self._shape

    @classmethod
    def of_array(cls, X: Array, *, chunk: int | None = None, mean: Array | None = None) -> Rows:
        """Return the rows of one array; nothing is copied."""
        return cls(lambda: (X,), X, chunk=chunk, mean=mean, shape=(int(X.shape[0]), int(X.shape[1])))

    def centred(self, mean: Array) -> Rows:
        """Return the same rows minus `mean`."""
        return Rows(self.read, mean, chunk=self.chunk, mean=mean, batched=self.batched, shape=self._shape)

    def raw(self) -> Iterator[Array]:
        """Yield blocks in their own floating dtype, not centred."""
        blocks = self._joined() if self.batched else (b for X in self.read() for b in _xp.row_blocks(X, self.chunk))
        for block in blocks:
            yield _xp.as_real_floating(block, "X")

    def _joined(self) -> Iterator[Array]:
        """Yield the blocks that one array of all rows would have, joined from batches of any size.

        Many tiny batches then cost what few large ones do. What is kept is copied: a reader may use one buffer again
        and again. Batches of another dtype start a new block.
        """
        held: Any = None
        n_held = 0
        for batch in self.read():
            n, begin = int(batch.shape[0]), 0
            while begin < n:
                if n_held and held.dtype != batch.dtype:
                    yield held[:n_held, ...]
                    n_held = 0
                taken = min(self.chunk - n_held, n - begin)
                piece = batch[begin : begin + taken, ...]
                begin += taken
                if taken == self.chunk:
                    yield piece
                    continue
                if n_held == 0:
                    held = self.xp.empty((self.chunk, int(batch.shape[1])), dtype=batch.dtype, device=self.device)
                held[n_held : n_held + taken, ...] = piece
                n_held += taken
                if n_held == self.chunk:
                    yield held
                    n_held = 0
        if n_held:
            yield held[:n_held, ...]

    def __iter__(self) -> Iterator[tuple[slice, Array]]:
        """Yield the place of every block among all rows, and the block in the accumulator's dtype."""
        first = 0
        for block in self.raw():
            # The buffer of joined batches is filled again: what is yielded must not change with it.
            rows = self.xp.astype(block, self.dtype, copy=self.batched)
            last = first + int(rows.shape[0])
            yield slice(first, last), (rows if self.mean is None else rows - self.mean)
            first = last


@contextmanager
def open_rows(model: Any, X: Any, chunk: int | None, *, batches: bool = False) -> Iterator[tuple[Rows, Array]]:
    """Validate what `fit` got; give its rows for the time of a ``with`` block, and one in the dtype of the results.

    `X` is an array, or iterable batches; where `batches` says that it must be these, so do error messages.
    """
    name = "batches" if batches else "X"
    if not batches and not gives_batches(X):
        X = model._check_X(X, reset=True, convert=False)
        yield Rows.of_array(X, chunk=chunk), _xp.as_real_floating(X[:1, ...], "X")
    elif isinstance(X, Iterator):
        with Spool() as spool:
            yield batched_rows(model, X, chunk, name=name, spool=spool)
    else:
        yield batched_rows(model, X, chunk, name=name)


def gives_batches(X: Any) -> bool:
    """Tell whether `X` is an iterable of matrices, and not array-like itself."""
    if isinstance(X, (str, bytes, Mapping)) or any(hasattr(X, name) for name in ("shape", "__array__", "columns")):
        return False
    if isinstance(X, Sequence):
        # Lists of numbers, and of lists of numbers, are array-likes.
        return any(_is_matrix(x) or (isinstance(x, (tuple, list)) and any(map(_is_matrix, x[:1]))) for x in X)
    return isinstance(X, Iterable)


def _is_matrix(x: Any) -> bool:
    return getattr(x, "ndim", 0) == 2


def batched_rows(
    model: Any, batches: Any, chunk: int | None, *, name: str = "batches", spool: Spool | None = None
) -> tuple[Rows, Array]:
    """Return the rows of the batches that a fit got as `name`, and one of them in the dtype of the results.

    A first reading validates every batch as `fit` validates its rows; later ones are compared with it. Where `spool` is
    given, there is one reading of `batches`, which fills it, and later ones read what it holds.
    """
    if _is_stored(batches):
        batches = _Slices(batches)
    _check_readable(batches, name)
    known: list[tuple[int, float]] = []
    n_rows, like = 0, None
    for number, batch in enumerate(batches):
        batch = _unwrap(batch, number, name)
        if _is_empty(batch):
            continue
        if like is not None:
            check_beside(batch, like, name=f"Batch {number}", other_name="the first batch")
        try:
            rows = model._check_X(batch, reset=like is None, convert=False)
        except (TypeError, ValueError) as error:
            error.add_note(f"This is batch {number} of {name}, counted from 0.")
            raise
        like = _xp.as_real_floating(rows[:1, ...], name) if like is None else like
        n_rows += int(rows.shape[0])
        if spool is None:
            known.append(_fingerprint(rows))
        else:
            spool.write(rows)
    if like is None:
        raise ValueError(f"{name} is empty: pass at least one array of rows.")

    def read() -> Iterator[Array]:
        n_read = 0
        for number, batch in enumerate(batches):
            batch = _unwrap(batch, number, name)
            if _is_empty(batch):
                continue
            rows = _plain(batch, model)
            # Codes belong to rows by their place: a shuffling loader would give every row another's code.
            if n_read == len(known) or known[n_read] != _fingerprint(rows):
                raise ValueError(
                    f"Batch {number} of {name} has changed since it was first read: give the same rows in the same "
                    "order every time (a DataLoader needs shuffle=False)."
                )
            n_read += 1
            yield rows
        if n_read < len(known):
            raise ValueError(f"{name} gave {len(known)} batches, then {n_read}: they must be the same every time.")

    shape = n_rows, int(like.shape[1])
    return Rows(read if spool is None else spool.__iter__, like, chunk=chunk, batched=True, shape=shape), like


def _is_stored(batches: Any) -> bool:
    """Tell whether `batches` is one matrix that gives rows by slices and is no array: shards, HDF5, Zarr."""
    if isinstance(batches, np.ndarray) or _xp.is_foreign(batches) or hasattr(batches, "columns"):
        return False
    return len(getattr(batches, "shape", ())) == 2 and hasattr(batches, "__getitem__")


class _Slices:
    """The rows of a stored matrix, a slice at a time, as often as asked for."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix
        self.size = max(_MIN_CHUNK, _SLICE_ELEMENTS // max(1, int(matrix.shape[1])))

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, int(self.matrix.shape[0]), self.size):
            yield self.matrix[start : start + self.size]


def _check_readable(batches: Any, name: str) -> None:
    """Raise TypeError unless `batches` can be iterated over, and is not one matrix of rows."""
    shape = getattr(batches, "shape", None)
    if shape is not None and len(shape) != 3:
        raise TypeError(
            f"{name} is one {type(batches).__name__} of shape {tuple(shape)}, not an iterable of arrays: use fit(X), "
            "or pass [X]."
        )
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise TypeError(f"{name} must be an iterable of arrays of rows, got {type(batches).__name__}.")


def _unwrap(batch: Any, number: int, name: str) -> Any:
    """Return the rows of a batch; the loader of a TensorDataset puts them into a list of one."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not hasattr(parts, "__len__") and not hasattr(parts, "shape"):
        raise TypeError(
            f"Batch {number} of {name} is a {type(batch).__name__}: give arrays of shape (any, n_features)."
        )
    if not isinstance(parts, (tuple, list)) or not any(map(_is_matrix, parts)):
        return batch
    if len(parts) == 1 and parts is batch:
        return parts[0]
    raise TypeError(
        f"Batch {number} of {name} is a {type(batch).__name__} of {len(parts)} entries, and only rows are wanted: "
        "give one array per batch (a DataLoader of TensorDataset(X), without labels)."
    )


def _is_empty(batch: Any) -> bool:
    shape = getattr(batch, "shape", None)
    return len(batch) == 0 if shape is None else len(shape) == 2 and shape[0] == 0


def _plain(batch: Any, model: Any) -> Array:
    """Return a batch that was validated before as an array; its dtype is left alone."""
    if _xp.is_foreign(batch):
        return batch.detach() if hasattr(batch, "detach") else batch
    if isinstance(batch, np.ndarray) and (batch.dtype.kind in "iub" or batch.dtype in (np.float32, np.float64)):
        return np.asarray(batch)
    return model._check_X(batch, reset=False, convert=False)


def _fingerprint(rows: Array) -> tuple[int, float]:
    """Return the number of rows and a sum of their values, weighted by place: a permutation shows too."""
    xp, total, place = _xp.array_namespace(rows), 0.0, 1
    for block in _xp.row_blocks(rows):
        block = _xp.as_real_floating(block, "X")
        last = place + int(block.shape[0])
        weights = xp.astype(xp.arange(place, last, device=_xp.device(block)), block.dtype)
        total, place = total + float(xp.sum(xp.matmul(weights, block))), last
    return int(rows.shape[0]), total
