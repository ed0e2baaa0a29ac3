"""The options of a harvest, checked."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from isogeom._validation import check_choice, check_real
from isogeom.gradients._dtypes import DTYPES
from isogeom.gradients._losses import IGNORED, BatchInfo, Loss, batch_tensors, causal_targets, resolve_loss
from isogeom.gradients._manifest import folder_path
from isogeom.gradients._sampling import ROWS, BatchRows, RowRule
from isogeom.gradients._seq2seq import TwoSides, two_sides
from isogeom.gradients._sites import Site

_KINDS = {"act": "activations", "grad": "gradients", "activations": "activations", "gradients": "gradients"}


@dataclass(frozen=True)
class Options:
    """The checked options of a call."""

    loss: Loss | None  # None with activations only: the model is run, and that is all
    causal: bool
    kinds: tuple[str, ...]
    mask: Callable[[Any], Tensor] | None
    label_mask: bool
    rule: RowRule
    dtype: str
    batches_per_shard: int
    out: Path | None
    reduce: str | None
    given: Mapping[str, Any]  # what the fingerprint of a store names
    two_sided: bool = False  # the model has an encoder and a decoder, with rows of their own

    @property
    def gradients(self) -> bool:
        """Whether anything is to be differentiated."""
        return "gradients" in self.kinds

    @property
    def needs_attention(self) -> bool:
        """Whether an attention mask that says nothing about rows is an error."""
        return self.rule.rows != "all" and (self.causal or self.mask is None)

    def batch_rows(
        self, batch: Any, info: BatchInfo, batch_id: int, first_sample: int, threshold: np.uint64 | None
    ) -> BatchRows | TwoSides:
        """Return the choice of rows of one batch."""
        real = None
        if self.rule.rows != "all":
            real = info.attention if self.needs_attention else None
            predicts = self.causal and (self.loss is not None or isinstance(batch, Mapping))
            if predicts and info.token_ids is not None:
                known = torch.ones_like(info.token_ids, dtype=torch.bool) if info.attention is None else info.attention
                real = causal_targets(known)
        rows = BatchRows(
            batch_id=batch_id,
            first_sample=first_sample,
            rule=self.rule,
            sample_ids=_array(info.sample_ids, np.int64),
            token_ids=_array(info.token_ids, np.int64),
            real=_array(info.attention, np.bool_),
            token_mask=_array(real, np.bool_),
            label_mask=self._labels(batch, batch_id) if self.label_mask else None,
            row_mask=None if self.mask is None else _call_mask(self.mask, batch, batch_id),
            threshold=threshold,
        )
        if not self.two_sided:
            return rows
        return two_sides(rows, batch, every=self.rule.rows == "all", masked=self.mask is not None)

    def of_sites(self, sites: list[Site]) -> Options:
        """Return the options for some sites, or raise if they do not go together."""
        table = next((site.name for site in sites if site.is_table), None)
        # What is kept of an embedding are ids, which have no mean and no moments.
        if table is not None and (self.reduce is not None or self.rule.rows == "mean"):
            option = f"reduce={self.reduce!r}" if self.reduce is not None else "rows='mean'"
            raise ValueError(
                f"{option} cannot take site {table!r}, whose rows are token ids and gradients: harvest its rows, for "
                "weight_gradient_norms, or the output of the embedding"
            )
        if table is not None and self.dtype != "float32":
            raise ValueError(
                f"dtype={self.dtype!r} cannot take site {table!r}, whose rows are token ids, int64: use dtype='float32'"
            )
        if all(site.side is None for site in sites):
            return self
        if self.causal and self.loss is not None:
            raise ValueError(
                "loss='causal-lm' does not fit an encoder-decoder model, whose labels are not those of the next "
                "position: use loss='masked-lm' on batches with 'decoder_input_ids' and 'labels', or a callable"
            )
        return replace(self, causal=False, two_sided=True)

    def _labels(self, batch: Any, batch_id: int) -> NDArray[np.bool_]:
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if labels is None and self.causal:
            labels = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor):
            raise ValueError(
                f"label_mask=True needs a tensor 'labels' in every batch, -100 where nothing is to be predicted; batch "
                f"{batch_id} has none"
            )
        keep = labels != IGNORED
        if self.causal:
            # The label of a row is the next token's.
            keep = torch.cat([keep[:, 1:], torch.zeros_like(keep[:, :1])], dim=1)
        result: NDArray[np.bool_] = keep.cpu().numpy()
        return result


def _array(tensor: Tensor | None, dtype: Any) -> NDArray[Any] | None:
    return None if tensor is None else tensor.cpu().numpy().astype(dtype)


def _call_mask(mask: Callable[[Any], Tensor], batch: Any, batch_id: int) -> NDArray[np.bool_]:
    versions = {tensor: tensor._version for tensor in batch_tensors(batch)}
    with torch.no_grad():
        keep = mask(batch)
    if any(tensor._version != version for tensor, version in versions.items()):
        raise ValueError(f"mask changed a tensor of batch {batch_id} in place, so the model would see another batch")
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        got = keep.dtype if isinstance(keep, Tensor) else type(keep).__name__
        raise TypeError(f"mask must return a bool tensor, got {got} for batch {batch_id}")
    result: NDArray[np.bool_] = keep.cpu().numpy().copy()  # the loss may work in place
    return result


def check_options(
    *,
    collect: Any,
    loss: Any,
    rows: Any,
    mask: Any,
    label_mask: Any,
    exclude_token_ids: Any,
    positions: Any,
    max_rows: Any,
    sample_rate: Any,
    batches_per_shard: Any,
    seed: Any,
    dtype: Any,
    out: Any,
    reduce: Any,
) -> Options:
    """Check every option, or raise an error that names it."""
    if mask is not None and not callable(mask):
        raise TypeError(f"mask must be None or a callable (batch) -> bool tensor, got {type(mask).__name__}")
    if not isinstance(label_mask, (bool, np.bool_)):
        raise TypeError(f"label_mask must be True or False, got {label_mask!r}")
    ids = _token_ids(exclude_token_ids)
    if sample_rate is not None:
        check_real(sample_rate, "sample_rate", high=1, hint="It is the share of rows to keep.")
        if sample_rate <= 0:
            raise ValueError(f"sample_rate={sample_rate!r} must be above 0: it is the share of rows to keep.")
    rule = RowRule(
        rows=check_choice(rows, "rows", ROWS),
        exclude=np.array(sorted(ids), dtype=np.int64) if ids else None,
        positions=_positions(positions),
        seed=_integer("seed", seed, 0, 2**64 - 1),
        rate=None if sample_rate is None else float(sample_rate),
        budget=None if max_rows is None else _integer("max_rows", max_rows, 1, sys.maxsize),
    )
    check_choice(dtype, "dtype", DTYPES)
    check_choice(reduce, "reduce", (None, "moments"))
    folder = _folder(out)
    _check_together(dtype, reduce)
    kinds = _kinds(collect)
    steps = _integer("batches_per_shard", batches_per_shard, 1, sys.maxsize)
    if loss is None and "gradients" in kinds:
        loss = "causal-lm"
    causal = loss is None or (isinstance(loss, str) and loss == "causal-lm")
    function = None if loss is None else resolve_loss(loss)
    given = {
        "collect": list(kinds),
        "loss": loss,
        "rows": rule.rows,
        "mask": mask,
        "label_mask": bool(label_mask),
        "exclude_token_ids": sorted(ids) or None,
        "positions": list(rule.positions) if isinstance(rule.positions, tuple) else rule.positions,
        "max_rows": rule.budget,
        "sample_rate": rule.rate,
        "dtype": dtype,
        "batches_per_shard": steps,
        "seed": rule.seed,
        "reduce": reduce,
    }
    return Options(function, causal, kinds, mask, bool(label_mask), rule, dtype, steps, folder, reduce, given)


def _folder(out: Any) -> Path | None:
    if out is None:
        return None
    folder = folder_path(out, "out", "None or the path of a folder")
    if not os.fspath(out).strip():
        raise ValueError(f"out={out!r} is empty: name a folder, or use None to keep the rows in memory")
    return folder


def _kinds(collect: Any) -> tuple[str, ...]:
    if isinstance(collect, str) or not isinstance(collect, Iterable):
        raise TypeError(f"collect must be a tuple with some of 'act', 'grad', got {collect!r}")
    given = list(collect)
    if not given or any(not isinstance(kind, str) or kind not in _KINDS for kind in given):
        raise ValueError(
            f"collect must hold some of 'act', 'grad' (or 'activations', 'gradients'), got {tuple(given)!r}"
        )
    wanted = {_KINDS[kind] for kind in given}
    return tuple(kind for kind in ("activations", "gradients") if kind in wanted)


def _token_ids(exclude: Any) -> set[int]:
    if exclude is not None and (isinstance(exclude, (str, bytes)) or not isinstance(exclude, Iterable)):
        raise TypeError(f"exclude_token_ids must be a list of token ids, got {exclude!r}")
    try:
        items = [] if exclude is None else list(exclude)
    except TypeError:  # a tensor or array without an axis
        raise TypeError(f"exclude_token_ids must be a list of token ids, got {exclude!r}: use [{exclude}]") from None
    return {_integer("every item of exclude_token_ids", item, -(2**63), 2**63 - 1) for item in items}


def _positions(positions: Any) -> slice | tuple[int, ...] | None:
    if positions is None:
        return None
    if isinstance(positions, slice):
        parts = {name: getattr(positions, name) for name in ("start", "stop", "step")}
        start, stop, step = (
            None if part is None else _integer(f"{name} of positions={positions!r}", part, -(2**62), 2**62)
            for name, part in parts.items()
        )
        if step == 0:
            raise ValueError(f"positions={positions!r} has step 0: a step is at least 1, or negative")
        return slice(start, stop, step)
    if isinstance(positions, (str, bytes)) or not isinstance(positions, Iterable):
        raise TypeError(f"positions must be None, a slice or a list of integers, got {positions!r}")
    try:
        items = list(positions)
    except TypeError:  # a tensor or array without an axis
        raise TypeError(f"positions must be None, a slice or a list of integers, got {positions!r}") from None
    found = tuple(dict.fromkeys(_integer("every item of positions", item, -(2**62), 2**62) for item in items))
    if not found:
        raise ValueError("positions is empty: no row could be kept. Use None for all positions")
    return found


def _check_together(dtype: str, reduce: Any) -> None:
    if reduce is not None and dtype != "float32":
        raise ValueError(f"dtype={dtype!r} is for rows that are stored; leave it out with reduce={reduce!r}")


def _integer(name: str, value: Any, low: int, high: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not low <= number <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value!r}")
    return number


def run_model(model: nn.Module, batch: Any, batch_id: int) -> None:
    """Run the model without a loss."""
    if isinstance(batch, Mapping):
        model(**{key: value for key, value in batch.items() if key not in ("labels", "sample_id")})
    elif isinstance(batch, Tensor):
        model(batch)
    elif len(batch) == 1:
        model(batch[0])
    else:
        raise ValueError(
            f"batch {batch_id} is a sequence of {len(batch)} items, and which of them the model takes is unknown: pass "
            "loss=callable (model, batch) -> Tensor that calls it"
        )
