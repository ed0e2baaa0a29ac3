"""Rows of a Semi-NMF fit, read block by block as often as needed: of an array, or of batches from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from isogeom import _xp
from isogeom._xp import Array

# Elements of a block in float64 (8 MiB), and the fewest rows for which products run at full speed.
_CHUNK_ELEMENTS, _MIN_CHUNK = 2**20, 256


class Rows:
    """Rows that can be read again and again, at most `chunk` at a time.

    Parameters
    ----------
    read : callable
        Starts a pass: returns an iterable of arrays of shape (any, n_features).
    reference : array
        Any array of the library, on the device and with the features of the rows.
    chunk : int, default=None
        Largest number of rows in one block; None for 2048, or fewer where rows are long.
    mean : array of shape (n_features,), default=None
        Subtracted from every row.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Array]],
        reference: Array,
        *,
        chunk: int | None = None,
        mean: Array | None = None,
    ) -> None:
        self.read = read
        self.xp = _xp.array_namespace(reference)
        self.device = _xp.device(reference)
        self.dtype = _xp.accumulator_dtype(self.xp, self.device)
        self.chunk = chunk or max(_MIN_CHUNK, min(_xp.BLOCK_ROWS, _CHUNK_ELEMENTS // int(reference.shape[-1])))
        self.mean = mean
        self._shape: tuple[int, int] | None = None

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
        return cls(lambda: (X,), X, chunk=chunk, mean=mean)

    def centred(self, mean: Array) -> Rows:
        """Return the same rows minus `mean`."""
        rows = Rows(self.read, mean, chunk=self.chunk, mean=mean)
        rows._shape = self._shape
        return rows

    def raw(self) -> Iterator[Array]:
        """Yield blocks as they come, in their own dtype and not centred."""
        for batch in self.read():
            yield from _xp.row_blocks(batch, self.chunk)

    def __iter__(self) -> Iterator[tuple[slice, Array]]:
        """Yield the place of every block among all rows, and the block in the accumulator's dtype."""
        first = 0
        for block in self.raw():
            rows = self.xp.astype(block, self.dtype)
            last = first + int(rows.shape[0])
            yield slice(first, last), (rows if self.mean is None else rows - self.mean)
            first = last


def check_batch(known: list[tuple[int, float]], place: int, rows: Array) -> None:
    """Compare a batch with the one that stood at its place at the first reading; note it if this is that reading."""
    xp = _xp.array_namespace(rows)
    weights = xp.astype(xp.arange(1, rows.shape[0] + 1, device=_xp.device(rows)), rows.dtype)
    # Weighted by place, so that a permutation within the batch shows too.
    found = int(rows.shape[0]), float(xp.sum(xp.matmul(weights, rows)))
    if place == len(known):
        known.append(found)
    elif place > len(known) or known[place] != found:
        raise ValueError(
            f"Batch {place} of batches has changed since it was first read: give the same rows in the same order every "
            "time (a DataLoader needs shuffle=False)."
        )
