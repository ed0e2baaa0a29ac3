"""A small causal language model trained on text that every CPython ships.

The corpus is :mod:`pydoc_data.topics`, so nothing is downloaded and nothing is stored; it grows by a few per cent with
each Python version, and losses move with it. Everything else is fixed by the configuration and the seed: two runs with
the same number of threads give bit-identical parameters.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

UNKNOWN = "<unk>"
# Words and numbers stay whole; every punctuation sign, and the underscore, is a token of its own.
_TOKEN = re.compile(r"[^\W\d_]+|\d+|_|[^\w\s]")


@dataclass(frozen=True)
class Config:
    """Size of the model, of its training and of its evaluation; the defaults take about a minute on one CPU thread."""

    vocabulary_size: int = 1024
    context: int = 64
    d_model: int = 128
    n_heads: int = 4
    n_blocks: int = 4
    n_steps: int = 600
    batch_size: int = 16
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup_share: float = 0.05  # share of the steps, 0 to 1
    clip_norm: float = 1.0
    evaluation_batch_size: int = 8
    n_evaluation_batches: int = 40

    def __post_init__(self) -> None:
        """Refuse a configuration whose three checkpoints would coincide or whose heads do not divide the width."""
        if self.n_steps < 10:
            raise ValueError(f"n_steps={self.n_steps} must be at least 10: the early checkpoint is at 10 % of them.")
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model={self.d_model} must be a multiple of n_heads={self.n_heads}.")

    @property
    def steps(self) -> dict[str, int]:
        """Optimiser steps taken at each checkpoint: ``init`` 0, ``early`` 10 %, ``late`` all of them."""
        return {"init": 0, "early": self.n_steps // 10, "late": self.n_steps}


DEFAULT = Config()
# d_model stays at 64: below that, sixteen tangent directions would leave too little normal space to compare with.
QUICK = Config(d_model=64, n_steps=100, batch_size=8, evaluation_batch_size=2, n_evaluation_batches=20)


def load_corpus() -> list[str]:
    """Return the lower-cased tokens of Python's own language reference, in a fixed order (about 120 000)."""
    from pydoc_data.topics import topics

    return _TOKEN.findall("\n".join(topics[key] for key in sorted(topics)).lower())


def build_vocabulary(tokens: Sequence[str], size: int) -> list[str]:
    """Return the ``size - 1`` most frequent tokens behind ``"<unk>"`` (id 0).

    Parameters
    ----------
    tokens : sequence of str
    size : int
        Length of the vocabulary, the unknown token included; fewer distinct tokens give a shorter one.

    Returns
    -------
    list of str
        A token's place is its id: most frequent first, ties in alphabetical order.

    Raises
    ------
    ValueError
        If ``size`` leaves no room for a token besides ``"<unk>"``.
    """
    if size < 2:
        raise ValueError(f"size={size} must be at least 2: one place is taken by {UNKNOWN!r}.")
    counts = Counter(token for token in tokens if token != UNKNOWN)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return [UNKNOWN, *ranked[: size - 1]]


def encode(tokens: Sequence[str], vocabulary: Sequence[str]) -> torch.Tensor:
    """Return the token ids, shape (n_tokens,), int64; tokens outside the vocabulary become id 0."""
    ids = {token: i for i, token in enumerate(vocabulary)}
    return torch.tensor([ids.get(token, 0) for token in tokens], dtype=torch.int64)


class Attention(nn.Module):
    """Causal multi-head self-attention with one joint projection, so that one Linear consumes the block's input."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix each position with those before it; x and the result have shape (batch, seq, d_model)."""
        batch, seq, d = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.n_heads, d // self.n_heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, d))


class Block(nn.Module):
    """Pre-norm transformer block: attention, then a two-layer GELU network, each added to the residual stream."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, n_heads)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after this block, shape (batch, seq, d_model)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyLM(nn.Module):
    """Causal transformer language model: learned positions, pre-norm blocks, final norm, separate output head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.d_model
        self.tokens = nn.Embedding(config.vocabulary_size, d)
        self.positions = nn.Embedding(config.context, d)
        self.blocks = nn.ModuleList(Block(d, config.n_heads) for _ in range(config.n_blocks))
        self.norm = nn.LayerNorm(d)
        # Untied: the embedding is then shaped by what the blocks read only, not by the output softmax as well.
        self.head = nn.Linear(d, config.vocabulary_size, bias=False)
        self._initialise(config.n_blocks)

    def _initialise(self, n_blocks: int) -> None:
        """Draw GPT-2's initial weights: std 0.02, smaller where a layer writes into the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue  # norms start at the identity; biases are zeroed below
            writes_residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * n_blocks) if writes_residual else 0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return next-token logits, shape (batch, seq, vocabulary_size), for ids of shape (batch, seq)."""
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the cross-entropy of each next token in nats, shape (batch, seq - 1), unreduced."""
    ids = batch["input_ids"]
    return functional.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


def initial_model(config: Config, seed: int) -> TinyLM:
    """Return the untrained model of a seed, without touching the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return TinyLM(config)


def spread_windows(ids: torch.Tensor, context: int, n_windows: int) -> torch.Tensor:
    """Cut windows spread evenly over a token sequence, in its order and without overlap.

    Parameters
    ----------
    ids : Tensor of shape (n_tokens,)
    context : int
        Tokens in a window, at least 2 (a window of one token predicts nothing).
    n_windows : int

    Returns
    -------
    Tensor of shape (n_windows, context)
        The first window starts at the first token, the last one ends at the last token.

    Raises
    ------
    ValueError
        If a size is too small or the sequence is too short.
    """
    if context < 2 or n_windows < 1:
        raise ValueError(f"context={context} must be at least 2 and the number of windows, {n_windows}, at least 1.")
    if ids.shape[0] < n_windows * context:
        raise ValueError(
            f"The text is too short: {n_windows} windows of {context} tokens need {n_windows * context} tokens, it has "
            f"{ids.shape[0]}. Give a longer text, or lower n_batches, batch_size or context."
        )
    span = ids.shape[0] - context
    # Whole-number steps of at least span // (n_windows - 1) >= context: evenly spread, and no two windows overlap.
    starts = [i * span // max(n_windows - 1, 1) for i in range(n_windows)]
    return torch.stack([ids[start : start + context] for start in starts])


def evaluation_batches(
    ids: torch.Tensor, context: int = 64, batch_size: int = 8, n_batches: int = 40
) -> list[dict[str, torch.Tensor]]:
    """Return ``n_batches`` dicts with ``input_ids`` of shape (batch_size, context), windows in the text's order.

    Raises
    ------
    ValueError
        If a size is too small or the text too short for windows that do not overlap.
    """
    windows = spread_windows(ids, context, batch_size * n_batches)
    return [{"input_ids": rows} for rows in windows.split(batch_size)]


@dataclass(frozen=True)
class Checkpoints:
    """What training leaves behind: three snapshots, the losses, and the data they were measured on."""

    config: Config
    seed: int
    states: dict[str, dict[str, torch.Tensor]]  # "init", "early", "late"
    losses: list[float]  # mean training loss of each step, nats per token
    validation_losses: dict[str, float]  # by checkpoint, nats per token
    vocabulary: list[str]
    ids: torch.Tensor  # the whole corpus; the last tenth is validation

    def model(self, name: str) -> TinyLM:
        """Return the model at checkpoint ``name`` in eval mode.

        Raises
        ------
        ValueError
            If there is no such checkpoint.
        """
        if name not in self.states:
            raise ValueError(f"name={name!r} is no checkpoint; there are {sorted(self.states)}.")
        model = initial_model(self.config, self.seed)
        model.load_state_dict(self.states[name])
        return model.eval()

    def batches(self) -> list[dict[str, torch.Tensor]]:
        """Return the configuration's evaluation batches over the whole corpus."""
        config = self.config
        return evaluation_batches(self.ids, config.context, config.evaluation_batch_size, config.n_evaluation_batches)


def _learning_rate(config: Config) -> Callable[[int], float]:
    """Return the factor on the learning rate by step: linear warm-up, then a cosine down to a tenth."""
    warmup = max(1, round(config.warmup_share * config.n_steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, config.n_steps - warmup)
        return 0.55 + 0.45 * math.cos(math.pi * progress)

    return factor


def _training_batches(ids: torch.Tensor, config: Config, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield ``n_steps`` batches of windows at random places of the training tokens."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(config.context)
    for _ in range(config.n_steps):
        starts = torch.randint(ids.shape[0] - config.context + 1, (config.batch_size, 1), generator=generator)
        yield {"input_ids": ids[starts + offsets]}


@torch.no_grad()
def _mean_loss(model: nn.Module, batches: Sequence[dict[str, torch.Tensor]]) -> float:
    """Return the mean next-token loss in nats over batches of equal size."""
    return float(torch.stack([token_losses(model, batch).double().mean() for batch in batches]).mean())


def _snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the parameters: a state_dict alone would keep changing with the training."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(config: Config = DEFAULT, seed: int = 0, progress: bool = True) -> Checkpoints:
    """Train the model with AdamW and keep it at the start, at a tenth of the steps and at the end.

    Parameters
    ----------
    config : Config
    seed : int
        Fixes the initial weights and the order of the training windows.
    progress : bool
        Show a bar with the running mean of the loss on standard error.

    Returns
    -------
    Checkpoints
    """
    from tqdm import tqdm

    tokens = load_corpus()
    vocabulary = build_vocabulary(tokens, config.vocabulary_size)
    ids = encode(tokens, vocabulary)
    n_train = ids.shape[0] * 9 // 10
    validation = evaluation_batches(ids[n_train:], config.context, 8, 8)
    model = initial_model(config, seed)
    optimiser = torch.optim.AdamW(
        model.parameters(), config.learning_rate, betas=(0.9, 0.98), weight_decay=config.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, _learning_rate(config))
    wanted = {step: name for name, step in config.steps.items()}
    states = {"init": _snapshot(model)}
    validation_losses = {"init": _mean_loss(model, validation)}
    losses: list[float] = []
    average = math.nan
    batches = _training_batches(ids[:n_train], config, seed)
    bar = tqdm(batches, "training", config.n_steps, unit="step", disable=not progress)
    for step, batch in enumerate(bar, start=1):
        loss = token_losses(model, batch).mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        average = losses[-1] if step == 1 else 0.9 * average + 0.1 * losses[-1]
        bar.set_postfix(loss=f"{average:.3f}", refresh=False)
        if step in wanted:
            states[wanted[step]] = _snapshot(model)
            validation_losses[wanted[step]] = _mean_loss(model, validation)
    return Checkpoints(config, seed, states, losses, validation_losses, vocabulary, ids)
