"""Run a model over batches and collect activation and gradient rows."""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from isogeom.gradients._losses import BatchInfo, Loss, causal_targets, move_batch, read_batch, resolve_loss, sum_loss
from isogeom.gradients._result import BatchRows, Harvest, RowStore
from isogeom.gradients._sites import Capture, Site, resolve_sites

_KINDS = ("activations", "gradients")
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def harvest(
    model: nn.Module,
    batches: Iterable[Any],
    sites: Iterable[str],
    *,
    loss: str | Loss = "causal-lm",
    collect: Iterable[str] = ("activations", "gradients"),
    mask: Callable[[Any], Tensor] | None = None,
    exclude_token_ids: Iterable[int] | None = None,
    max_rows: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Harvest:
    r"""Collect aligned activation and gradient rows at named sites of a model.

    Parameters
    ----------
    model : torch.nn.Module
        Any eager model; a model from :func:`torch.compile` is run uncompiled. It runs in evaluation mode. Training
        flags, ``requires_grad`` flags, ``.grad`` and torch's random state (CPU, and the model's CUDA devices) are
        afterwards as before, and no hook stays.
    batches : iterable of mappings, tuples, lists or tensors
        Batch-first (a sequence-first model whose batch is as long as its sequences cannot be told apart, and would give
        rows with the wrong meta); tensors are moved to the model's device and mappings become dicts. The batch size
        is the first length of ``input_ids``, else of the attention mask, else of the first tensor.
    sites : list of str
        Names from ``model.named_modules()``, each with an optional suffix:

        - none or ``:out``: the output; ``:out[0]``, ``:out[key]``, ``:out[1][0]``: an item of a tuple, mapping or
          dataclass;
        - ``:in``: the first suitable input; ``:in[0]``, ``:in[name]``: the input at that position or of that name;
        - ``:weight``: factor rows of the weight gradient of a linear layer (:class:`torch.nn.Linear`, transformers'
          ``Conv1D``): inputs as activations, gradients of the outputs as gradients.

        Without an item, the one floating tensor of shape (batch, seq, d) or (batch, d) is taken. Parts of a name may be
        globs: ``"blocks.*"`` is all blocks (``*`` does not cross a dot). The empty name, as in ``":out[logits]"``, is
        the model itself.
    loss : {"causal-lm", "masked-lm"} or callable, default="causal-lm"
        A callable ``(model, batch) -> Tensor`` runs the model once and returns a scalar or losses of any shape, which
        are **summed**, so that a row does not depend on which samples share its batch; return sums or one loss per
        token, since a mean makes every gradient row smaller in a larger batch. The presets take mappings with
        ``input_ids``, pass all but ``labels`` to the model and sum the float32 cross-entropy of its logits over the
        targets: the next token (of ``labels``, if given, else ``input_ids``; both tokens real by ``attention_mask``),
        or for ``"masked-lm"`` every real position of ``labels``; targets of -100 are left out.
    collect : iterable of {"activations", "gradients"}, default=("activations", "gradients")
        With activations only, nothing is differentiated.
    mask : callable or None, default=None
        ``(batch) -> bool tensor`` of shape (batch, seq), or (batch,) for sites of that shape: the rows to keep. None
        keeps the real tokens by ``attention_mask``, if the batch has one. With ``"causal-lm"`` a row also needs a real
        next token, with either mask: the last position predicts nothing and its gradient is exactly 0.
    exclude_token_ids : iterable of int or None, default=None
        Rows of these tokens are dropped (special tokens, for instance). Token ids are ``input_ids`` of a mapping, else
        the first integer tensor of shape (batch, seq).
    max_rows : int or None, default=None
        Keep at most so many rows: those with the smallest hash of (seed, sample, position), a uniform sample without
        replacement [1]_, [2]_ that is the same at every site and checkpoint and for every batch size. At most one batch
        more is held in memory.
    seed : int, default=0
        Seed of the row sample, and of torch's random state during the call.
    progress : bool, default=False
        Show a progress bar with the row count and the loss.

    Returns
    -------
    Harvest
        Mapping from site to rows, float32 on the host; see :class:`Harvest`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; if sites disagree on the shape of their rows; if a kept activation, a kept
        gradient or a loss is not finite; if there is no batch or no row.
    RuntimeError
        If a site does not run exactly once per forward pass, has no gradient, or the loss has none; the message has the
        reasons.
    ImportError
        If `progress` is asked for and tqdm is missing.

    Notes
    -----
    The gradient of a site is the total derivative of the summed loss with respect to the tensor at that place, before
    any later in-place operation, through all of its consumers. In a model with frozen parameters, a tensor that depends
    on nothing trainable is replaced at the site by a differentiable copy; for ``:in`` sites frozen floating parameters
    are marked trainable during the call instead, since others may consume the same tensor. So other consumers of the
    same tensor go uncounted in two cases only: an input without a graph (the raw batch, a detached tensor), and, in a
    frozen model, the output of a module that returns its own input (inactive dropout).

    A model in half precision differentiates in it: gradients below about 1e-8 become exactly 0 in float16. Run it in
    bfloat16 or float32, or scale the loss.

    For a ``:weight`` site with inputs :math:`x_t` and output gradients :math:`g_t`, the weight gradient through this
    layer is :math:`\sum_t g_t x_t^\top` (its transpose for ``Conv1D``), if no row with a gradient is masked or sampled
    out. A tied weight has further contributions where it is used elsewhere.

    References
    ----------
    .. [1] E. Cohen and H. Kaplan, "Summarizing data using bottom-k sketches", PODC 2007. :doi:`10.1145/1281100.1281133`
    .. [2] G. L. Steele, D. Lea and C. H. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
       :doi:`10.1145/2660193.2660195`

    Examples
    --------
    >>> import torch
    >>> from isogeom.gradients import harvest
    >>> _ = torch.manual_seed(0)
    >>> layers = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 10)
    >>> model = torch.nn.Sequential(*layers)
    >>> batches = [torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[7, 8, 9]])]
    >>> def next_token(model, ids):
    ...     logits = model(ids)[:, :-1]
    ...     return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    >>> h = harvest(model, batches, sites=["0", "2"], loss=next_token)
    >>> h
    Harvest(9 rows, 2 sites, 2 batches)
      0  activations (9, 4), gradients (9, 4)
      2  activations (9, 3), gradients (9, 3)
    >>> h.meta.token_id
    array([1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> bool((h["2"].gradients[h.meta.position == 2] == 0).all())
    True
    """
    model = _check_model(model)
    options = _check_options(loss, collect, mask, exclude_token_ids, max_rows, seed)
    if isinstance(batches, (str, bytes, Mapping, Tensor)) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be an iterable of batches, got one {type(batches).__name__}; for a single batch pass [batch]"
        )
    capture = Capture(resolve_sites(model, sites), options.collect)
    if options.gradients and torch.is_inference_mode_enabled():
        raise RuntimeError(
            "harvest cannot collect gradients inside torch.inference_mode(); leave it, or use torch.no_grad()"
        )
    bar = _progress_bar(batches) if progress else None
    store, losses = RowStore(options.max_rows), []
    with ExitStack() as stack:
        _prepare(stack, model, capture.sites, options)
        capture.attach(stack)
        first_sample = 0
        for batch_id, batch in enumerate(batches if bar is None else bar):
            batch = move_batch(batch, _device(model), batch_id)
            info = read_batch(batch, batch_id, with_attention=options.causal or options.mask is None)
            rows = options.rows(batch, info, batch_id, first_sample, store.threshold)
            losses.append(_run_batch(model, batch, capture, rows, info.n_samples, options))
            store.add(rows.selection, capture.arrays)
            first_sample += info.n_samples
            if bar is not None:
                bar.set_postfix(rows=store.n_rows, loss=f"{np.mean(losses):.4g}")
    if not losses:
        raise ValueError("batches is empty: there is nothing to harvest (a generator can be consumed only once)")
    if not store.n_rows:
        raise ValueError("no row is left: mask, attention_mask and exclude_token_ids drop every row of every batch")
    return store.finish([site.name for site in capture.sites], losses)


@dataclass(frozen=True)
class _Options:
    """The checked options of a call."""

    loss: Loss
    causal: bool
    collect: frozenset[str]
    mask: Callable[[Any], Tensor] | None
    exclude: NDArray[np.int64] | None
    max_rows: int | None
    seed: int

    @property
    def gradients(self) -> bool:
        return "gradients" in self.collect

    def rows(
        self, batch: Any, info: BatchInfo, batch_id: int, first_sample: int, threshold: np.uint64 | None
    ) -> BatchRows:
        real = info.attention
        if self.causal and info.token_ids is not None:
            known = torch.ones_like(info.token_ids, dtype=torch.bool) if info.attention is None else info.attention
            real = causal_targets(known)
        return BatchRows(
            batch_id=batch_id,
            first_sample=first_sample,
            token_ids=None if info.token_ids is None else info.token_ids.cpu().numpy().astype(np.int64),
            token_mask=None if real is None else real.cpu().numpy(),
            row_mask=None if self.mask is None else _call_mask(self.mask, batch, batch_id),
            exclude=self.exclude,
            seed=self.seed,
            budget=self.max_rows,
            threshold=threshold,
        )


def _call_mask(mask: Callable[[Any], Tensor], batch: Any, batch_id: int) -> NDArray[np.bool_]:
    with torch.no_grad():
        keep = mask(batch)
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        got = keep.dtype if isinstance(keep, Tensor) else type(keep).__name__
        raise TypeError(f"mask must return a bool tensor, got {got} for batch {batch_id}")
    result: NDArray[np.bool_] = keep.cpu().numpy()
    return result


def _run_batch(
    model: nn.Module, batch: Any, capture: Capture, rows: BatchRows, n_samples: int, options: _Options
) -> float:
    """Run one batch forward and, for gradients, backward; return its mean loss."""
    with torch.set_grad_enabled(options.gradients):
        capture.begin(rows, n_samples)
        value = options.loss(model, batch)
        capture.end_forward(rows.batch_id)
        total, mean = sum_loss(value, rows.batch_id)
        if options.gradients:
            if not total.requires_grad:
                raise RuntimeError(
                    f"the loss of batch {rows.batch_id} does not require grad, so it depends on no site; it must be "
                    "computed from the model's output without .detach(), .item() or torch.no_grad()"
                )
            capture.backward(total, rows.batch_id)
    return mean


def _prepare(stack: ExitStack, model: nn.Module, sites: list[Site], options: _Options) -> None:
    """Set evaluation mode, random state and, for ':in' gradients, trainable flags; `stack` undoes all of it."""
    tensors = [*model.parameters(), *model.buffers()]
    devices = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
    stack.enter_context(torch.random.fork_rng(devices=devices))
    torch.default_generator.manual_seed(options.seed)
    for index in devices:
        torch.cuda.default_generators[index].manual_seed(options.seed)
    for module in model.modules():
        # Not model.eval(): a train() of the user's own may do more than set the flag, and must not run twice.
        stack.callback(setattr, module, "training", module.training)
        module.training = False
    if options.gradients and any(site.kind == "in" for site in sites):
        for parameter in model.parameters():
            free = parameter.is_leaf and parameter.is_floating_point() and not parameter.is_inference()
            if free and not parameter.requires_grad:
                stack.callback(parameter.requires_grad_, False)
                parameter.requires_grad_(True)
    if "torch._dynamo" in sys.modules:
        # Compiled submodules would run without our hooks. Asking only if the compiler is loaded spares its slow import.
        stack.enter_context(torch.compiler.set_stance("force_eager"))


def _device(model: nn.Module) -> torch.device:
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        return tensor.device
    return torch.device("cpu")


def _check_model(model: Any) -> nn.Module:
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model is a ScriptModule, whose inner modules run no hooks; harvest the eager model")
    for module in model.modules():
        wrapper = _WRAPPERS.intersection(cls.__name__ for cls in type(module).__mro__)
        if wrapper:
            raise TypeError(
                f"model contains {wrapper.pop()}, whose replicas or shards hide the sites; harvest the bare model "
                "(model.module) on one device, over the batches of this process"
            )
    return model


def _check_options(loss: Any, collect: Any, mask: Any, exclude: Any, max_rows: Any, seed: Any) -> _Options:
    if isinstance(collect, str) or not isinstance(collect, Iterable):
        raise TypeError(f"collect must be a tuple with some of {_KINDS}, got {collect!r}")
    kinds = list(collect)
    if not kinds or any(kind not in _KINDS for kind in kinds):
        raise ValueError(f"collect must hold some of {_KINDS}, got {tuple(kinds)!r}")
    if mask is not None and not callable(mask):
        raise TypeError(f"mask must be None or a callable (batch) -> bool tensor, got {type(mask).__name__}")
    if exclude is not None and (isinstance(exclude, (str, bytes)) or not isinstance(exclude, Iterable)):
        raise TypeError(f"exclude_token_ids must be a list of token ids, got {exclude!r}")
    ids = [_integer("exclude_token_ids", item, -(2**63), 2**63 - 1) for item in (() if exclude is None else exclude)]
    return _Options(
        loss=resolve_loss(loss),
        causal=isinstance(loss, str) and loss == "causal-lm",
        collect=frozenset(kinds),
        mask=mask,
        exclude=np.array(ids, dtype=np.int64) if ids else None,
        max_rows=None if max_rows is None else _integer("max_rows", max_rows, 1, sys.maxsize),
        seed=_integer("seed", seed, 0, 2**64 - 1),
    )


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


def _progress_bar(batches: Iterable[Any]) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as exc:
        raise ImportError("progress=True needs tqdm: pip install 'isogeom[torch]', or pass progress=False") from exc
    return tqdm(batches, desc="harvest", unit="batch")
