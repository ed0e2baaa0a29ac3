"""Batches that can be read only once, kept in a temporary file so that a fit can read them again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._xp import Array


class Spool:
    """A temporary file of batches, for a ``with`` block; at its end the file is gone, also after an error.

    Batches come back in their order, each in its dtype and library and on its device, one in memory at a time.
    """

    def __enter__(self) -> Spool:
        self._file = tempfile.TemporaryFile()
        # Of every batch: an array without entries that tells library, device and dtype, and an array's place, shape and
        # dtype in the file.
        self._batches: list[tuple[Array, int, tuple[int, ...], np.dtype]] = []
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, rows: Array) -> None:
        """Append a batch with at least one entry.

        Raises
        ------
        OSError
            If the file cannot be written (a full disk).
        """
        # On the host, half precision of torch is single precision; it becomes what it was when the batch is read.
        host = np.ascontiguousarray(_xp.to_numpy(rows))
        try:
            place = self._file.seek(0, 2)
            self._file.write(host.data)
            self._file.flush()
        except OSError as error:
            error.add_note(
                "Batches that can be read only once are copied to a temporary file in "
                f"{tempfile.gettempdir()}: set TMPDIR to a folder with room for all rows, or pass a list or an object "
                "whose __iter__ starts afresh."
            )
            raise
        like = _xp.array_namespace(rows).empty((0,), dtype=rows.dtype, device=_xp.device(rows))
        self._batches.append((like, place, host.shape, host.dtype))

    def __iter__(self) -> Iterator[Any]:
        for like, place, shape, dtype in self._batches:
            host = np.empty(shape, dtype=dtype)
            # Two passes may be under way at once: each goes to the place of its batch.
            self._file.seek(place)
            self._file.readinto(host.data)
            yield host if isinstance(like, np.ndarray) else _xp.asarray_like(host, like)
