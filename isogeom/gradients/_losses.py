"""Reading batches, and the losses a harvest differentiates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Loss = Callable[[nn.Module, Any], Tensor]

IGNORED = -100  # the index that torch's cross-entropy and the data collators of transformers leave out


@dataclass(frozen=True)
class BatchInfo:
    """What the rows need to know of a batch."""

    n_samples: int
    token_ids: Tensor | None
    attention: Tensor | None  # bool, (batch, seq)
    sample_ids: Tensor | None = None  # (batch,), the batch's own


def move_batch(batch: Any, device: torch.device, batch_id: int) -> Any:
    """Return a copy of the batch with its tensors on `device`; any mapping becomes a dict.

    Tensors and arrays are copied even if they lie there already: a loss may work in place, and the caller's batch,
    which may be harvested again, is to stay as it is.
    """
    if not isinstance(batch, (Tensor, Mapping, tuple, list)):
        raise TypeError(
            f"batch {batch_id} is a {type(batch).__name__}; batches must yield mappings, tuples, lists or tensors (a "
            "loss of your own may unpack them as it likes)"
        )
    copies: dict[int, Any] = {}  # what stands in a batch twice stays one tensor
    if isinstance(batch, Mapping):
        return {key: _move(value, device, copies) for key, value in batch.items()}
    return _move(batch, device, copies)


def _move(value: Any, device: torch.device, copies: dict[int, Any]) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        if id(value) not in copies:
            copies[id(value)] = _copy_tensor(value, device) if isinstance(value, Tensor) else value.copy()
        return copies[id(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move(item, device, copies) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_move(item, device, copies) for item in value)
    if type(value) is dict:
        return {key: _move(item, device, copies) for key, item in value.items()}
    return value


def _copy_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    moved = tensor.detach().to(device)
    shared = moved.device == tensor.device
    return (moved.clone() if shared else moved).requires_grad_(tensor.requires_grad)


def batch_tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from batch_tensors(value)


def read_batch(batch: Any, batch_id: int, *, with_attention: bool) -> BatchInfo:
    """Find the number of samples, the token ids, the attention mask and the sample ids of a batch.

    An attention mask that says nothing about rows is an error if it is to be used, and passed over if not.
    """
    attention = sample_ids = None
    if isinstance(batch, Mapping):
        tensors = [value for key, value in batch.items() if isinstance(value, Tensor) and key != "sample_id"]
        token_ids = batch.get("input_ids")
        if not (isinstance(token_ids, Tensor) and _is_token_grid(token_ids)):
            token_ids = None
        attention = read_attention(batch, batch_id) if with_attention else _attention_if_usable(batch)
        sample_ids = batch.get("sample_id")
    else:
        tensors = [batch] if isinstance(batch, Tensor) else [value for value in batch if isinstance(value, Tensor)]
        # The first tensor counts the samples: an integer matrix of another length (the edges of a graph) has no tokens.
        n = next((len(value) for value in tensors if value.ndim > 0 and not value.is_nested), None)
        token_ids = next((value for value in tensors if _is_token_grid(value) and len(value) == n), None)
    known = [value for value in (token_ids, attention, *tensors) if value is not None]
    leading = [value for value in known if value.ndim > 0 and not value.is_nested]  # a nested tensor has no shape
    if not leading:
        items = (
            batch.items() if isinstance(batch, Mapping) else enumerate([batch] if isinstance(batch, Tensor) else batch)
        )
        holds = {key: type(value).__name__ for key, value in items}
        raise ValueError(
            f"batch {batch_id} holds no tensor with a batch axis, so its samples cannot be counted; it holds {holds}. "
            "Make tensors of lists and arrays (torch.as_tensor, or return_tensors='pt' of a tokenizer)"
        )
    n_samples = int(leading[0].shape[0])
    if sample_ids is not None:
        _check_sample_ids(sample_ids, n_samples, batch_id)
    return BatchInfo(n_samples, token_ids, attention, sample_ids)


def _attention_if_usable(batch: Mapping[str, Any]) -> Tensor | None:
    try:
        return read_attention(batch)
    except ValueError:
        return None


def _check_sample_ids(ids: Any, n_samples: int, batch_id: int) -> None:
    if not isinstance(ids, Tensor) or ids.shape != (n_samples,) or ids.is_floating_point() or ids.is_complex():
        got = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"sample_id of batch {batch_id} must be an integer tensor of shape ({n_samples},), got {got}")


def read_attention(
    batch: Mapping[str, Any], batch_id: int | None = None, *, key: str = "attention_mask"
) -> Tensor | None:
    """Return an attention mask of a mapping as bool (batch, seq), or None."""
    mask = batch.get(key)
    if mask is None:
        return None
    where = "" if batch_id is None else f" of batch {batch_id}"
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"{key}{where} must be a tensor of shape (batch, seq) to say which rows are real, got {shape}; "
            "with any other, use a loss of your own and mask=callable"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"{key}{where} must hold only 0 (padding) and 1 (real token)")
    return mask.bool()


def _is_token_grid(value: Tensor) -> bool:
    numbers = value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    return value.ndim == 2 and not numbers and not value.is_nested


def causal_targets(real: Tensor) -> Tensor:
    """Mark, in a bool (batch, seq) mask of real tokens, the positions that have a next token to predict."""
    keep = torch.zeros_like(real)
    keep[:, :-1] = real[:, :-1] & real[:, 1:]
    return keep


def causal_lm(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross-entropy of every next token, in nats, float32, of shape (n_targets,)."""
    ids = _entry(batch, "input_ids", "causal-lm")
    labels = batch.get("labels")
    labels = ids if labels is None else labels
    logits = _logits(model, batch, labels, "causal-lm")
    real = read_attention(batch)
    real = torch.ones_like(labels, dtype=torch.bool) if real is None else real
    if real.shape != labels.shape:
        raise ValueError(f"attention_mask has shape {tuple(real.shape)}, but the labels have {tuple(labels.shape)}")
    valid = causal_targets(real)[:, :-1] & (labels[:, 1:] != IGNORED)
    return cross_entropy(logits[:, :-1][valid].float(), labels[:, 1:][valid].long(), reduction="none")


def masked_lm(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross-entropy of every real position with a label, in nats, float32, of shape (n_targets,)."""
    labels = _entry(batch, "labels", "masked-lm")
    logits = _logits(model, batch, labels, "masked-lm")
    valid = labels != IGNORED
    # Of an encoder-decoder, the labels are those of the decoder.
    real = read_attention(batch, key="decoder_attention_mask" if "decoder_input_ids" in batch else "attention_mask")
    if real is not None:
        valid &= real
    return cross_entropy(logits[valid].float(), labels[valid].long(), reduction="none")


PRESETS: dict[str, Loss] = {"causal-lm": causal_lm, "masked-lm": masked_lm}


def resolve_loss(loss: str | Loss) -> Loss:
    """Return the loss function of a preset's name, or `loss` itself."""
    if isinstance(loss, str) and loss in PRESETS:
        return PRESETS[loss]
    if callable(loss):
        return loss
    kind = ValueError if isinstance(loss, str) else TypeError
    raise kind(f"loss={loss!r} is unknown: use {', '.join(map(repr, PRESETS))} or a callable (model, batch) -> Tensor")


def _entry(batch: Any, key: str, preset: str) -> Tensor:
    value = batch.get(key) if isinstance(batch, Mapping) else None
    if not (isinstance(value, Tensor) and _is_token_grid(value)):
        found = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        hint = "; labels are -100 wherever nothing is to be predicted" if key == "labels" else ""
        raise ValueError(
            f"loss={preset!r} needs mapping batches with an integer tensor {key!r} of shape (batch, seq){hint}; got "
            f"{found}. For other batches pass a callable (model, batch) -> Tensor"
        )
    return value


def _logits(model: nn.Module, batch: Mapping[str, Any], labels: Tensor, preset: str) -> Tensor:
    # No labels for the model: its own loss would be a mean, and rows would depend on the batch size.
    output = model(**{key: value for key, value in batch.items() if key not in ("labels", "sample_id")})
    if isinstance(output, Mapping):
        logits = output.get("logits")
    elif isinstance(output, (tuple, list)):
        logits = output[0] if output else None
    else:
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != labels.shape:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
        raise ValueError(
            f"loss={preset!r} needs logits of shape (batch, seq, vocabulary) = ({labels.shape[0]}, {labels.shape[1]}, "
            f"...), as the model's output, its first item or its 'logits'; got {got}. Pass a callable (model, batch) "
            "-> Tensor instead"
        )
    return logits


def sum_loss(value: Any, batch_id: int) -> tuple[Tensor, float]:
    """Check what a loss returned; return its sum, to differentiate, and its mean, to report."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"loss must return a tensor (a scalar, or one loss per token), got {type(value).__name__} in batch "
            f"{batch_id}; a loss such as `lambda model, batch: model(**batch)` should take the loss out of the output"
        )
    if not value.is_floating_point():
        raise TypeError(f"loss must return a real floating tensor, got {value.dtype} in batch {batch_id}")
    total = (value if value.dtype == torch.float64 else value.float()).sum()
    number = float(total.detach())
    if not torch.isfinite(total.detach()):
        raise ValueError(
            f"the loss of batch {batch_id} is {number}; look for overflow, empty rows or a masked-out sequence"
        )
    return total, number / max(value.numel(), 1)
