"""How much the rows of a sample depend on the samples that share its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from isogeom._results import Result, _require, format_value
from isogeom.gradients._harvest import harvest
from isogeom.gradients._layouts import encoder_of
from isogeom.gradients._losses import Loss

_KINDS = ("activations", "gradients")


@dataclass(frozen=True, eq=False, repr=False)
class BatchInvarianceResult(Result):
    """Differences between the rows of one batch run in several ways; see :func:`check_batch_invariance`.

    Attributes
    ----------
    site : str
        The site.
    n_samples, n_rows : int
        Samples in the batch and rows compared.
    activations, gradients : dict of str to float
        Largest difference of a row, as a share of the root mean square norm of the rows, by way of running:
        "repeat" (the same batch again), "order" (the samples reversed), "alone" (each sample alone, padding kept) and,
        with an attention mask, "unpadded" (each sample alone, without its padding). 0 is bit for bit the same.
    gradient_factor : float
        Least-squares factor from the gradients of samples alone to those in the batch: 1 for a loss that is summed,
        ``1 / n_samples`` for a mean.
    worst_sample : int
        Place in the batch of the sample with the largest difference between alone and in the batch.
    """

    site: str
    n_samples: int
    n_rows: int
    activations: dict[str, float]
    gradients: dict[str, float]
    gradient_factor: float
    worst_sample: int

    @property
    def largest(self) -> float:
        """The largest of all differences."""
        return max([*self.activations.values(), *self.gradients.values()])

    def to_frame(self) -> Any:
        """Return one line per way of running as a :class:`pandas.DataFrame`.

        Raises
        ------
        ImportError
            If pandas is not installed.
        """
        pandas = _require("pandas", "to_frame()", "plot")
        table = {"activations": self.activations, "gradients": self.gradients}
        return pandas.DataFrame(table).rename_axis("run").reset_index()

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        head = f"BatchInvarianceResult of {self.site!r}: {self.n_rows} rows of {self.n_samples} samples"
        lines = [
            f"  {run:<9} activations {format_value(self.activations[run]):>9}  gradients {format_value(value):>9}"
            for run, value in self.gradients.items()
        ]
        return "\n".join([head, *lines, f"  factor of the gradients in the batch: {self.gradient_factor:.4g}"])


def check_batch_invariance(
    model: nn.Module,
    batch: Any,
    site: str,
    *,
    loss: str | Loss = "causal-lm",
    mask: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
) -> BatchInvarianceResult:
    """Measure how far the rows of a sample depend on the rest of its batch.

    Parameters
    ----------
    model : torch.nn.Module
        As in :func:`harvest`.
    batch : mapping, tuple, list or tensor
        One batch of at least two samples, as :func:`harvest` takes it. Tensors whose first length is the batch size are
        cut by sample; everything else is passed on as it is. Samples that are all padding are not run alone. A
        ``sample_id`` must differ from sample to sample.
    site : str
        Name of one site, as in :func:`harvest`.
    loss : {"causal-lm", "masked-lm"} or callable, default="causal-lm"
        As in :func:`harvest`.
    mask : callable or None, default=None
        As in :func:`harvest`; called with whole batches and with single samples.
    seed : int, default=0
        Seed of torch's random state, the same for every run.

    Returns
    -------
    BatchInvarianceResult
        Relative differences by way of running; print it for a table.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As :func:`harvest`; also if the batch has fewer than two samples, or `site` is a glob of several.

    Notes
    -----
    What to read from it: in float32, differences of 1e-7 to 1e-5 are rounding (kernels choose another order of sums for
    another batch size). Large "unpadded" ones mean that padding reaches real tokens: an attention mask that is not
    passed on, or positions that count the padding (left padding without ``position_ids``). Large "alone" ones with a
    factor near ``1 / n_samples`` mean a mean loss: return losses per token instead; with another factor, samples
    interact by construction (batch norm in training mode, contrastive losses). "repeat" above 0 means kernels that are
    not deterministic; if "order" differs as well, and the model draws random numbers, its dropout is active.

    Examples
    --------
    >>> import torch
    >>> from isogeom.gradients import check_batch_invariance
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    >>> x = torch.randn(5, 4)
    >>> def mean_loss(model, x):
    ...     return model(x).square().mean()
    >>> result = check_batch_invariance(model, x, "1", loss=mean_loss)
    >>> result.activations["alone"] < 1e-6
    True
    >>> round(result.gradient_factor, 3)  # a mean over five samples
    0.2
    """
    if not isinstance(site, str):
        raise TypeError(f"site must be a string, the name of one site, got {site!r}")
    n_samples = _n_samples(batch)
    settings = {"loss": loss, "mask": mask, "seed": seed}
    ids = _own_ids(batch, n_samples)
    reference, meta = _rows(model, [batch], range(n_samples), ids, site, settings)
    attention, target = (_attention(batch, n_samples, key) for key in ("attention_mask", "decoder_attention_mask"))
    padding = {i for mask in (attention, target) if mask is not None for i in range(n_samples) if not mask[i].any()}
    # A sample that is all padding has nothing to run alone, unless a mask of the user's keeps rows of it.
    alone = [i for i in range(n_samples) if i not in padding or i in meta[:, 0]]
    cut = {i: _take(batch, torch.tensor([i]), n_samples) for i in alone}
    back = range(n_samples - 1, -1, -1)
    runs: dict[str, tuple[list[Any], Sequence[int]]] = {
        "repeat": ([batch], range(n_samples)),
        "order": ([_take(batch, torch.tensor(back), n_samples)], back),
        "alone": (list(cut.values()), alone),
    }
    if attention is not None or target is not None:
        real = [i for i in alone if i not in padding]
        masks = [tuple(None if mask is None else mask[i] for mask in (attention, target)) for i in real]
        two_sided = encoder_of(model) is not None
        runs["unpadded"] = ([_unpad(cut[i], two_sided, *mask) for i, mask in zip(real, masks, strict=True)], real)
    differences: dict[str, dict[str, float]] = {kind: {} for kind in _KINDS}
    factor, worst = 1.0, 0
    for run, (batches, places) in runs.items():
        rows, found = _rows(model, batches, places, ids, site, settings)
        # Without its padding, a token may stand elsewhere: its position is not compared.
        columns = slice(0, 2) if run == "unpadded" else slice(0, 3)
        if not np.array_equal(found[:, columns], meta[:, columns]):
            raise ValueError(
                f"site {site!r} gives other rows in the run {run!r} than in the batch ({len(found)} and {len(meta)}): "
                "which rows are kept depends on the rest of the batch, see mask"
            )
        per_row = {kind: _differences(reference[kind], rows[kind]) for kind in _KINDS}
        for kind in _KINDS:
            differences[kind][run] = float(per_row[kind].max())
        if run == "alone":
            worst = int(meta[np.argmax(np.maximum(per_row["activations"], per_row["gradients"])), 0])
            single = rows["gradients"]
            energy = float((single**2).sum())
            factor = float((single * reference["gradients"]).sum()) / energy if energy else float("nan")
    return BatchInvarianceResult(
        site=site,
        n_samples=n_samples,
        n_rows=len(meta),
        activations=differences["activations"],
        gradients=differences["gradients"],
        gradient_factor=factor,
        worst_sample=worst,
    )


def _rows(
    model: nn.Module,
    batches: list[Any],
    places: Sequence[int],
    ids: NDArray[np.int64] | None,
    site: str,
    settings: dict[str, Any],
) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.int64]]:
    """Return the rows of a run in float64, by sample; and the place of the sample, token and position of each.

    `places` are those of the samples that the run has, in its order, and `ids` are the samples' own names, by place.
    """
    found = harvest(model, batches, sites=[site], **settings)
    if len(found) != 1:
        raise ValueError(f"site={site!r} names {len(found)} sites, {', '.join(found)}: check one at a time")
    (rows,) = found.values()
    meta = found.meta
    if ids is None:
        place = np.asarray(places)[meta.sample_id]
    else:
        order = np.argsort(ids)
        place = order[np.searchsorted(ids[order], meta.sample_id)]
    back = np.argsort(place, kind="stable")
    arrays = {kind: np.asarray(getattr(rows, kind), dtype=np.float64)[back] for kind in _KINDS}
    return arrays, np.stack([place, meta.token_id, meta.position], axis=1).astype(np.int64)[back]


def _differences(expected: NDArray[np.float64], got: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the norm of each row's difference over the root mean square norm of the expected rows."""
    norms = np.linalg.norm(got - expected, axis=1)
    scale = np.sqrt((expected**2).sum(1).mean())
    return norms / scale if scale else np.where(norms > 0, np.inf, 0.0)


# ---------------------------------------------------------------------- cutting batches


def _tensors(batch: Any) -> list[Tensor]:
    values = batch.values() if isinstance(batch, Mapping) else [batch] if isinstance(batch, Tensor) else batch
    return [value for value in values if isinstance(value, Tensor) and value.ndim]


def _n_samples(batch: Any) -> int:
    if not isinstance(batch, (Mapping, Tensor, tuple, list)):
        raise TypeError(f"batch must be a mapping, tuple, list or tensor, got {type(batch).__name__}")
    first = batch.get("input_ids") if isinstance(batch, Mapping) else None
    tensors = [first] if isinstance(first, Tensor) else _tensors(batch)
    if not tensors:
        raise ValueError("batch holds no tensor with a batch axis, so its samples cannot be counted")
    if len(tensors[0]) < 2:
        raise ValueError(f"batch has {len(tensors[0])} sample: with fewer than 2 there is nothing to compare")
    return len(tensors[0])


def _own_ids(batch: Any, n_samples: int) -> NDArray[np.int64] | None:
    """Return the batch's own `sample_id`, by which the rows of a sample are found again."""
    own = batch.get("sample_id") if isinstance(batch, Mapping) else None
    if not isinstance(own, Tensor) or own.shape != (n_samples,):
        return None
    ids = own.cpu().numpy().astype(np.int64)
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < n_samples:
        raise ValueError(
            f"sample_id of the batch repeats {values[counts.argmax()]}: samples with one number cannot be told apart; "
            "number them differently, or leave sample_id out"
        )
    return ids


def _map(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the batch with its tensors changed, at any depth; the types of containers are kept but for mappings."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _map(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(value, change) for value in batch))
    if type(batch) in (tuple, list):
        return type(batch)(_map(value, change) for value in batch)
    return batch


def _take(batch: Any, samples: Tensor, n_samples: int) -> Any:
    return _map(batch, lambda x: x[samples.to(x.device)] if x.ndim and len(x) == n_samples else x)


def _attention(batch: Any, n_samples: int, key: str) -> Tensor | None:
    """Return an attention mask, (batch, seq) bool, if there is one with padding in it."""
    mask = batch.get(key) if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != n_samples or bool((mask != 0).all()):
        return None
    return mask != 0


def _unpad(sample: Any, two_sided: bool, real: Tensor | None, target: Tensor | None) -> Any:
    """Drop the padded columns of a single sample from every tensor that has them.

    In an encoder-decoder, those of the decoder are others, even if there are as many.
    """
    if not (two_sided and isinstance(sample, Mapping)):
        return _drop(sample, real)
    behind = {key for key in sample if key == "labels" or str(key).startswith("decoder_")}
    return {key: _drop(value, target if key in behind else real) for key, value in sample.items()}


def _drop(value: Any, real: Tensor | None) -> Any:
    if real is None:
        return value
    return _map(value, lambda x: x[:, real.to(x.device)] if x.ndim > 1 and x.shape[1] == len(real) else x)
