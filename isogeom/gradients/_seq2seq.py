"""The two kinds of rows of an encoder-decoder model: those of its encoder's tokens and those of its decoder's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from isogeom.gradients._losses import IGNORED, read_attention
from isogeom.gradients._sampling import BatchRows, Selection


@dataclasses.dataclass
class TwoSides:
    """The choice of rows of one batch of an encoder-decoder model; all sites of a call lie on one side."""

    encoder: BatchRows
    decoder: BatchRows
    decoder_grid: tuple[int, ...] | None  # shape of the decoder's tokens, if the batch tells
    padded: bool  # the decoder's tokens have padding, and nothing says where
    _first: tuple[str, str] | None = None

    @property
    def batch_id(self) -> int:
        """Number of the batch."""
        return self.encoder.batch_id

    @property
    def selection(self) -> Selection:
        """The rows of the batch, once a site has run."""
        return (self.decoder if self._first is not None and self._first[1] == "decoder" else self.encoder).selection

    def side_of(self, site: str, grid: tuple[int, ...], *, encoder_ran: bool) -> str:
        """Tell whose rows a module behind the encoder gives, if not the encoder's output itself went into it."""
        known = [array.shape for array in (self.encoder.token_ids, self.encoder.real) if array is not None]
        if grid not in known:
            return "decoder"
        if self.decoder_grid is not None and grid != self.decoder_grid:
            return "encoder"  # keys and values of a cross-attention
        if not encoder_ran:
            raise ValueError(
                f"site {site!r} is behind the encoder, which did not run in batch {self.batch_id}, and its rows have "
                f"the shape {grid} of input_ids or attention_mask, so whose tokens they are is unknown: let the model "
                "run its encoder, or leave the encoder's input_ids and attention_mask out of the batch"
            )
        return "decoder"

    def select(self, grid: tuple[int, ...], site: str, side: str) -> Selection:
        """Return the rows for a site of one side; every site of the batch gets the same ones."""
        if self._first is None:
            self._first = (site, side)
        first, chosen = self._first
        if side != chosen:
            raise ValueError(
                f"site {first!r} has rows of the {chosen} and site {site!r} of the {side} (batch {self.batch_id}): "
                "rows are aligned across sites, so harvest them in separate calls"
            )
        if side == "decoder" and self.padded and len(grid) == 2:
            raise ValueError(
                f"site {site!r} has rows of the decoder, and batch {self.batch_id} has padding but no "
                "'decoder_attention_mask' that tells which of them are real: add it to the batch, or use "
                "label_mask=True (rows whose label is not -100), mask=callable or rows='all'"
            )
        if side == "encoder" and self.decoder.label_mask is not None:
            raise ValueError(
                f"label_mask=True is for rows of the decoder, whose tokens have the labels, but site {site!r} has rows "
                "of the encoder: use mask=callable"
            )
        return (self.encoder if side == "encoder" else self.decoder).select(grid, site)


def two_sides(rows: BatchRows, batch: Any, *, every: bool, masked: bool) -> TwoSides:
    """Return the choice of rows of an encoder-decoder model.

    `rows` is that of the encoder; `every` says that all rows are wanted, `masked` that the caller brings a mask.
    """
    entries = batch if isinstance(batch, Mapping) else {}
    ids, labels = (_grid(entries.get(key)) for key in ("decoder_input_ids", "labels"))
    mask = entries.get("decoder_attention_mask")
    real = None if mask is None else _numpy(read_attention(entries, rows.batch_id, key="decoder_attention_mask"))
    decoder = dataclasses.replace(
        rows,
        token_ids=None if ids is None else _numpy(ids).astype(np.int64),
        real=real,
        token_mask=None if every or masked else real,
    )
    shapes = [array.shape for array in (decoder.token_ids, real, labels) if array is not None]
    padded = (labels is not None and bool((labels == IGNORED).any())) or (rows.real is not None and not rows.real.all())
    unknown = real is None and not every and not masked and rows.label_mask is None
    return TwoSides(rows, decoder, tuple(shapes[0]) if shapes else None, padded and unknown)


def _grid(value: Any) -> Tensor | None:
    integers = isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point()
    return value if integers else None


def _numpy(tensor: Any) -> NDArray[Any]:
    result: NDArray[Any] = tensor.cpu().numpy().copy()  # the loss may work in place
    return result
