"""Run a model over batches and collect activation and gradient rows."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isogeom.gradients._capture import Capture
from isogeom.gradients._fingerprint import fingerprint
from isogeom.gradients._layouts import encoder_of
from isogeom.gradients._losses import Loss, move_batch, read_batch, sum_loss
from isogeom.gradients._options import Options, check_options, run_model
from isogeom.gradients._reduce import HarvestMoments, moment_store
from isogeom.gradients._reduce_store import moment_disk_store
from isogeom.gradients._result import Harvest
from isogeom.gradients._rowstore import RowStore
from isogeom.gradients._sampling import BatchRows, batch_seed
from isogeom.gradients._seq2seq import TwoSides
from isogeom.gradients._sites import Site, resolve_sites
from isogeom.gradients._store import DiskStore

_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def harvest(
    model: nn.Module,
    batches: Iterable[Any],
    sites: Iterable[str],
    *,
    collect: Iterable[str] = ("act", "grad"),
    loss: str | Loss | None = None,
    rows: str = "tokens",
    mask: Callable[[Any], Tensor] | None = None,
    label_mask: bool = False,
    exclude_token_ids: Iterable[int] | None = None,
    positions: slice | Iterable[int] | None = None,
    max_rows: int | None = None,
    sample_rate: float | None = None,
    batches_per_shard: int = 16,
    seed: int = 0,
    dtype: str = "float32",
    out: str | os.PathLike[str] | None = None,
    reduce: str | None = None,
    progress: bool = True,
) -> Any:
    r"""Collect aligned activation and gradient rows at named sites of a model.

    Parameters
    ----------
    model : torch.nn.Module
        Any eager model; a model from :func:`torch.compile` is run uncompiled. It runs in evaluation mode. Training
        flags, ``requires_grad`` flags and ``.grad`` are afterwards as before, and no hook stays. Torch's random state
        (CPU, and the model's CUDA devices) is left to `batches`: model, loss and mask draw from one of their own.
    batches : iterable of mappings, tuples, lists or tensors
        Batch-first (a sequence-first model whose batch is as long as its sequences cannot be told apart, and would give
        rows with the wrong meta). Model, loss and mask get copies: of tensors, on the model's device, of numpy arrays,
        and dicts for mappings. The batch size is the first length of ``input_ids``, else of the attention mask, else of
        the first tensor. Integers of shape (batch,) under the key ``sample_id`` replace the count of samples, for
        several processes that share a data set.
    sites : list of str
        Names from ``model.named_modules()``, each with an optional suffix:

        - none or ``:out``: the output; ``:out[0]``, ``:out[key]``, ``:out[1][0]``: an item of a tuple, mapping or
          dataclass;
        - ``:in``: the one suitable input (plain ones before those inside containers; one number per token does not
          count; several are an error that lists them); ``:in[0]``, ``:in[name]``: the input at that position or of
          that name;
        - ``:weight``: factor rows of the weight gradient of a linear layer (:class:`torch.nn.Linear`, transformers'
          ``Conv1D``) or an embedding: inputs as activations (of :class:`torch.nn.Embedding` the token ids, int64 of
          shape (n_rows, 1)), gradients of the outputs as gradients. A weight with other uses warns and names them (see
          `tied` of :class:`SiteRows`); so does a linear layer with a ``forward`` of its own.

        Without an item, the one floating tensor of shape (batch, seq, d) or (batch, d) is taken. Parts of a name may be
        globs: ``"blocks.*"`` is all blocks (``*`` does not cross a dot; containers such as ``ModuleList`` are left
        out). The empty name, as in ``":out[logits]"``, is the model itself. Maps (batch, channels, length) are refused
        where the layer shows it (``Conv1d``, ``BatchNorm1d``), not behind an activation or in a module of your own.

        In an encoder-decoder of transformers, a call has sites of one side. Those inside the encoder, and those that
        read its output alone (keys and values of a cross-attention), go by ``input_ids`` and ``attention_mask``; all
        others by ``decoder_input_ids`` (token id -1 without) and ``decoder_attention_mask``, which padding needs,
        unless ``label_mask=True`` or `mask` tells what to keep.
    collect : iterable of {"act", "grad"}, default=("act", "grad")
        ``"activations"`` and ``"gradients"`` are the same. With activations only, nothing is differentiated.
    loss : {"causal-lm", "masked-lm"}, callable or None, default=None
        None is ``"causal-lm"`` if gradients are collected. With activations only it is no loss: the model is called
        with the batch (a tensor, the one item of a sequence, or a mapping as for the presets), `losses` are NaN, and
        mappings with ``input_ids`` keep the rows of ``"causal-lm"``, so that they match those of a gradient call.

        A callable ``(model, batch) -> Tensor`` runs the model once and returns a scalar or losses of any shape, which
        are **summed**, so that a row does not depend on which samples share its batch; return sums or one loss per
        token, since a mean makes every gradient row smaller in a larger batch. The presets take mappings with
        ``input_ids``, pass all but ``labels`` and ``sample_id`` to the model and sum the float32 cross-entropy of its
        logits over the targets: the next token (of ``labels``, if given, else ``input_ids``; both tokens real by
        ``attention_mask``), or for ``"masked-lm"`` every real position of ``labels``; targets of -100 are left out. An
        encoder-decoder takes ``"masked-lm"``, on batches with ``decoder_input_ids`` and ``labels``.
    rows : {"tokens", "mean", "last", "all"}, default="tokens"
        ``"tokens"``: one row per real token. ``"mean"``: one per sample, the mean of its kept rows, of activations and
        gradients alike (times their number, the mean gradient is the derivative along a common shift of them).
        ``"last"``: the last kept row of every sample. ``"all"``: every row, padding and last positions included. One
        rule holds for activations and gradients, so that they stay aligned.
    mask : callable or None, default=None
        ``(batch) -> bool tensor`` of shape (batch, seq), or (batch,) for sites of that shape: the rows to keep. None
        keeps the real tokens by ``attention_mask``, if the batch has one. With ``"causal-lm"`` a row also needs a real
        next token, with either mask: the last position predicts nothing and its gradient is exactly 0.
    label_mask : bool, default=False
        Keep only rows with a label: where ``labels`` is not -100; for ``"causal-lm"``, where that of the next token is
        not.
    exclude_token_ids : iterable of int or None, default=None
        Rows of these tokens are dropped (special tokens, for instance). Token ids are ``input_ids`` of a mapping, else
        the first integer tensor of shape (batch, seq).
    positions : slice, list of int or None, default=None
        Positions to keep, counted from the first real token of each sample, so that padding on the left changes
        nothing; negative ones from its last real token.
    max_rows : int or None, default=None
        Keep at most so many rows: those with the smallest hash of (seed, sample, position), a uniform sample without
        replacement [1]_, [2]_ that is the same at every site and checkpoint and for every batch size. At most one batch
        more is held in memory; on disk, shards hold candidates until the end. With ``reduce="moments"`` the rows of the
        sample are held like that until the end, since its members are known only then: ``max_rows * d`` numbers per
        site and kind, beside the moments.
    sample_rate : float or None, default=None
        Keep each row with this probability, by the same hash: likewise the same rows everywhere, and a part of those of
        any larger rate.
    batches_per_shard : int, default=16
        Batches per block of a folder: what an interruption costs at most.
    seed : int, default=0
        Seed of the row sample, and, with the number of the batch, of torch's random state in every batch.
    dtype : {"float32", "float16", "bfloat16"}, default="float32"
        How rows are stored. An overflow of float16 is an error; below 6e-8 it holds 0. numpy has no
        bfloat16: such rows come as :class:`ShardedRows`, which hold 2 bytes per number and are read as float32.
    out : path or None, default=None
        Folder for the rows, new or of an interrupted call, which is then continued: blocks on disk are not computed
        again, and the result is the same to the last bit. `batches` must start over, with the same contents. A folder
        made with other options, another model or other batches is refused; a damaged shard is harvested again, with
        a warning. Compared are: of the model, its parameters, its buffers and the plain values (numbers, strings,
        tuples of them) that its modules keep as attributes, but neither private ones and caches nor its code, its
        config and attributes of classes; of `loss` and `mask`, their code with the values that they close over, that
        are bound to them or that their object holds, and, among the globals that they name, plain values, tensors,
        arrays and functions of the same file, but no other global, and no code elsewhere. Use a new folder when
        anything of the rest changes. A folder without a finished block binds nobody.
    reduce : {None, "moments"}, default=None
        ``"moments"`` keeps count, mean, scatter and the cross products of activations and gradients instead of rows.
    progress : bool, default=True
        Show a progress bar with the row count and the loss, in a terminal or a notebook and if tqdm is there; log files
        and tests stay clean.

    Returns
    -------
    Harvest or HarvestMoments
        Mapping from site to rows on the host, float32 unless `dtype` says otherwise; from `out` :class:`ShardedRows`,
        read-only over memory maps; see :class:`Harvest`. With ``reduce="moments"``, to moments; see
        :class:`HarvestMoments`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; if sites disagree on the shape of their rows; if a kept activation, a kept
        gradient or a loss is not finite; if there is no batch or no row; if `out` holds anything else.
    OSError
        If `out` is a file, or a shard cannot be written, for a full disk for instance. What is on disk stays valid.
    RuntimeError
        If a site does not run exactly once per forward pass, has no gradient, or the loss has none; the message has the
        reasons.

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
    out. For an embedding :math:`x_t` is one-hot, with the one at the token's id, and :math:`g_t` is 0 for its
    ``padding_idx``, which torch leaves untrained. :func:`weight_gradient_norms` has the norms sample by sample. A tied
    weight has further contributions where it is used elsewhere: a call with both sites gives both.

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
    options = check_options(
        collect=collect,
        loss=loss,
        rows=rows,
        mask=mask,
        label_mask=label_mask,
        exclude_token_ids=exclude_token_ids,
        positions=positions,
        max_rows=max_rows,
        sample_rate=sample_rate,
        batches_per_shard=batches_per_shard,
        seed=seed,
        dtype=dtype,
        out=out,
        reduce=reduce,
    )
    if not isinstance(progress, (bool, np.bool_)):
        raise TypeError(f"progress must be True or False, got {progress!r}")
    if isinstance(batches, (str, bytes, Mapping, Tensor)) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be an iterable of batches, got one {type(batches).__name__}; for a single batch pass [batch]"
        )
    found = resolve_sites(model, sites)
    options = options.of_sites(found)
    capture = Capture(found, frozenset(options.kinds), options.dtype, encoder_of(model) if options.two_sided else None)
    if options.gradients and torch.is_inference_mode_enabled():
        raise RuntimeError(
            "harvest cannot collect gradients inside torch.inference_mode(); leave it, or use torch.no_grad()"
        )
    with ExitStack() as stack:
        sink = _sink(stack, model, capture.sites, options)
        _prepare(stack, model, capture.sites, options)
        capture.attach(stack)
        return _run(model, batches, capture, sink, options, progress)


def _sink(stack: ExitStack, model: nn.Module, sites: list[Site], options: Options) -> Any:
    """Return what takes the rows: memory, moments or a folder."""
    if options.out is not None:
        names, ties = [site.name for site in sites], {site.name: site.tied for site in sites}
        mark = fingerprint(model, {"sites": names, **options.given})
        store = (DiskStore if options.reduce is None else moment_disk_store)(
            options.out, mark, names, list(options.kinds), ties
        )
        store.open(stack)
        return store
    return RowStore(options.rule.budget, options.dtype) if options.reduce is None else moment_store(options.rule.budget)


def _run(
    model: nn.Module, batches: Iterable[Any], capture: Capture, sink: Any, options: Options, progress: bool
) -> Harvest | HarvestMoments:
    """Run the batches that are not known yet."""
    bar, losses, first_sample, own_ids = _progress_bar(batches, progress), [], 0, set()
    for batch_id, batch in enumerate(batches if bar is None else bar):
        loss = sink.known(batch_id, batch)
        moved = move_batch(batch, _device(model), batch_id) if loss is None else batch
        info = read_batch(moved, batch_id, with_attention=options.needs_attention)
        own_ids.add(info.sample_ids is not None)
        if len(own_ids) > 1:
            raise ValueError(f"batch {batch_id}: either every batch brings its own sample_id, or none does")
        if loss is None:
            seed = batch_seed(options.rule.seed, batch_id)
            # Forked for every batch, since the next one is drawn from the caller's random state.
            with torch.random.fork_rng(devices=_cuda_devices(model)):
                _seed(model, seed)
                rows = options.batch_rows(moved, info, batch_id, first_sample, sink.threshold)
                _seed(model, seed)
                loss = _run_batch(model, moved, capture, rows, options, info.n_samples)
            sink.add(rows.selection, rows.selection.pool(capture.arrays), batch_id, info.n_samples, loss)
        losses.append(loss)
        first_sample += info.n_samples
        if bar is not None:
            known = {} if np.isnan(losses[-1]) else {"loss": f"{np.mean(losses):.4g}"}
            bar.set_postfix(rows=sink.n_rows, **known)
    if not losses:
        raise ValueError("batches is empty: there is nothing to harvest (a generator can be consumed only once)")
    if not sink.n_rows:
        raise ValueError(
            "no row is left: mask, attention_mask, label_mask, exclude_token_ids, positions or sample_rate drop every "
            "row of every batch"
        )
    names, ties = [site.name for site in capture.sites], {site.name: site.tied for site in capture.sites}
    result: Harvest | HarvestMoments = sink.finish(names, losses, ties=ties, own_ids=own_ids == {True})
    return result


def _run_batch(
    model: nn.Module, batch: Any, capture: Capture, rows: BatchRows | TwoSides, options: Options, n_samples: int
) -> float:
    """Run one batch forward and, for gradients, backward; return its mean loss, NaN without a loss."""
    with torch.set_grad_enabled(options.gradients):
        capture.begin(rows, n_samples)
        if options.loss is None:
            run_model(model, batch, rows.batch_id)
            capture.end_forward(rows.batch_id)
            return math.nan
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


def _prepare(stack: ExitStack, model: nn.Module, sites: list[Site], options: Options) -> None:
    """Set evaluation mode and, for ':in' gradients, trainable flags; `stack` undoes all."""
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
    # The fused encoder layers of torch pack padded batches into nested tensors, and call none of their submodules.
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)
    if "torch._dynamo" in sys.modules:
        # Compiled submodules would run without our hooks. Asking only if the compiler is loaded spares its slow import.
        stack.enter_context(torch.compiler.set_stance("force_eager"))


def _cuda_devices(model: nn.Module) -> list[int]:
    tensors = itertools.chain(model.parameters(), model.buffers())
    return sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})


def _seed(model: nn.Module, seed: int) -> None:
    """Seed every batch by itself: what was harvested before a resumed call draws nothing any more."""
    torch.default_generator.manual_seed(seed)
    for index in _cuda_devices(model):
        torch.cuda.default_generators[index].manual_seed(seed)


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


def _progress_bar(batches: Iterable[Any], progress: bool) -> Any:
    # A bar is for somebody who watches: in a log file or a test it would be noise.
    watched = "ipykernel" in sys.modules or bool(sys.stderr is not None and sys.stderr.isatty())
    if not (progress and watched):
        return None
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm(batches, desc="harvest", unit="batch")
