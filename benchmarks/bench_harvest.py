"""Cost of a harvest of a small transformer over its bare passes, and against hand-written hooks, nnsight and captum."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy, scaled_dot_product_attention  # noqa: E402

from isogeom import Moments  # noqa: E402
from isogeom.gradients import harvest  # noqa: E402

D, N_BLOCKS, N_HEADS, VOCABULARY, N_SEQUENCES, LENGTH, N_BATCHES = 256, 4, 4, 2000, 4, 128, 4
SITES = [f"blocks.{i}" for i in range(N_BLOCKS)]


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self):
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norm2, self.mlp = nn.LayerNorm(D), nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, h):
        """Return the next residual stream."""
        parts = self.qkv(self.norm1(h)).unflatten(-1, (3, N_HEADS, D // N_HEADS)).permute(2, 0, 3, 1, 4)
        h = h + self.out(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return h + self.mlp(self.norm2(h))


class Transformer(nn.Module):
    """A causal language model of four blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = nn.Embedding(VOCABULARY, D), nn.Embedding(LENGTH, D)
        self.blocks = nn.ModuleList(Block() for _ in range(N_BLOCKS))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, input_ids):
        """Return the logits."""
        h = self.embed(input_ids) + self.position.weight[: input_ids.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


@pytest.fixture(scope="module")
def model():
    return Transformer().eval()


@pytest.fixture(scope="module")
def batches():
    ids = torch.randint(0, VOCABULARY, (N_BATCHES, N_SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": batch} for batch in ids]


@pytest.fixture
def folder():
    """A folder in memory, where there is one: CPU seconds are compared, not disks."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        yield Path(name)


def loss_of(model, ids):
    logits = model(input_ids=ids)
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def forward_backward(model, batches):
    for batch in batches:
        loss_of(model, batch["input_ids"]).backward()
        model.zero_grad(set_to_none=True)


def forward(model, batches):
    with torch.no_grad():
        for batch in batches:
            loss_of(model, batch["input_ids"])


def rate(seconds):
    return f"{N_BATCHES * N_SEQUENCES * LENGTH / seconds:.0f} tokens/s"


def check(h, model, batch):
    """The last batch's rows against a hand-written hook."""
    kept = {}
    handle = model.blocks[1].register_forward_hook(lambda _m, _a, out: kept.update(h=out))
    total = loss_of(model, batch["input_ids"])
    handle.remove()
    if not total.requires_grad:
        return
    (expected,) = torch.autograd.grad(total, kept["h"])
    got = h.select(h.meta.batch_id == N_BATCHES - 1)["blocks.1"]
    np.testing.assert_allclose(got.activations, kept["h"][:, :-1].detach().reshape(-1, D), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.gradients, expected[:, :-1].reshape(-1, D), rtol=1e-3, atol=1e-6)


def summed_loss(model, ids):
    """One loss per sequence, as captum wants it: the gradients of its rows are those of the sum."""
    logits = model(input_ids=ids)
    losses = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.unflatten(0, (len(ids), -1)).sum(1)


def rows_of(batches):
    """Join lists of one tensor per site, a list a batch, into one array of rows per site; the last position goes."""
    return [torch.cat([h[:, :-1].detach().reshape(-1, D) for h in site]).numpy() for site in zip(*batches)]


def by_hand(model, batches):
    """What a user writes without a library: hooks that keep the outputs, and one call of autograd."""
    acts, grads = [], []
    for batch in batches:
        kept = []
        handles = [
            block.register_forward_hook(lambda _m, _a, out, kept=kept: kept.append(out)) for block in model.blocks
        ]
        total = loss_of(model, batch["input_ids"])
        for handle in handles:
            handle.remove()
        grads.append(torch.autograd.grad(total, kept))
        acts.append([h.detach() for h in kept])
    return rows_of(acts), rows_of(grads)


def with_nnsight(model, batches):
    NNsight = pytest.importorskip("nnsight", reason="nnsight is not installed").NNsight
    wrapped, acts, grads = NNsight(model), [], []
    for batch in batches:
        ids = batch["input_ids"]
        with wrapped.trace(input_ids=ids):
            outputs = [wrapped.blocks[i].output for i in range(N_BLOCKS)]
            logits = wrapped.output
            total = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            kept = [h.detach().clone() for h in outputs].save()
            slopes = list().save()
            with total.backward():
                for h in reversed(outputs):
                    slopes.append(h.grad.clone())
        acts.append(kept)
        grads.append(slopes[::-1])
        # Its backward pass leaves gradients in the parameters.
        model.zero_grad(set_to_none=True)
    return rows_of(acts), rows_of(grads)


def with_captum(model, batches):
    attr = pytest.importorskip("captum.attr", reason="captum is not installed")
    layers = list(model.blocks)
    activation = attr.LayerActivation(lambda ids: summed_loss(model, ids), layers)
    gradient = attr.LayerGradientXActivation(lambda ids: summed_loss(model, ids), layers, multiply_by_inputs=False)
    ids = [batch["input_ids"] for batch in batches]
    return rows_of([activation.attribute(x) for x in ids]), rows_of([gradient.attribute(x) for x in ids])


def run_timed(compare, label, ours, peer, peer_name, most):
    ratio = compare(label, ours, peer, peer_name=peer_name, repeats=7)
    seconds = 1 / ratio
    assert seconds < most, f"{label}: {seconds:.3f} times {peer_name}"
    return ratio


def test_memory(compare, model, batches):
    check(harvest(model, batches, SITES), model, batches[-1])
    run_timed(
        compare,
        "activations and gradients at 4 sites",
        lambda: harvest(model, batches, SITES),
        lambda: forward_backward(model, batches),
        "bare forward and backward",
        1.05,
    )


@pytest.mark.parametrize("name", ["hand-written hooks", "nnsight", "captum"])
def test_against_peers(compare, model, batches, name):
    peer = {"hand-written hooks": by_hand, "nnsight": with_nnsight, "captum": with_captum}[name]
    h = harvest(model, batches, SITES)
    for site, activations, gradients in zip(SITES, *peer(model, batches)):
        np.testing.assert_allclose(h[site].activations, activations, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(h[site].gradients, gradients, rtol=1e-3, atol=1e-6)
    ratio = compare(
        "the same rows",
        lambda: harvest(model, batches, SITES),
        lambda: peer(model, batches),
        peer_name=name,
        repeats=7,
        values="the peer keeps no mask, positions or ids",
    )
    assert ratio > 0.9


def test_frozen(compare, model, batches):
    model.requires_grad_(False)
    harvested = lambda: harvest(model, batches, SITES)  # noqa: E731

    def bare():
        model.requires_grad_(True)
        forward_backward(model, batches)
        model.requires_grad_(False)

    try:
        run_timed(compare, "likewise, parameters frozen", harvested, bare, "bare forward and backward", 0.9)
    finally:
        model.requires_grad_(True)


def test_activations_only(compare, model, batches):
    run_timed(
        compare,
        "activations only",
        lambda: harvest(model, batches, SITES, collect=["act"]),
        lambda: forward(model, batches),
        "bare forward",
        1.15,
    )


def test_disk(compare, model, batches, folder):
    def disk():
        shutil.rmtree(folder / "out", ignore_errors=True)
        return harvest(model, batches, SITES, out=folder / "out")

    check(disk(), model, batches[-1])
    memory = lambda: harvest(model, batches, SITES)  # noqa: E731
    run_timed(compare, "to disk", disk, memory, "to memory", 1.25)


def test_moments(compare, model, batches):
    """The harvest to moments against the harvest to rows followed by the products that moments are made of."""

    def rows():
        h = harvest(model, batches, SITES)
        for site in h.values():
            Moments().update(site.activations)
            Moments().update(site.gradients)
            site.activations.T @ site.gradients

    run_timed(
        compare,
        "moments",
        lambda: harvest(model, batches, SITES, reduce="moments"),
        rows,
        "rows, then the same products",
        1.1,
    )


def test_tokens_per_second(report, model, batches):
    import time

    for label, options in [
        ("memory", {}),
        ("activations only", {"collect": ["act"]}),
        ("moments", {"reduce": "moments"}),
    ]:
        start = time.process_time()
        harvest(model, batches, SITES, **options)
        report(f"{label}: {rate(time.process_time() - start)}")
