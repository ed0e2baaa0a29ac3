"""harvest against gradients and activations recomputed without any hook."""

import subprocess
import sys
import weakref
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from isogeom.gradients import harvest  # noqa: E402

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]


class Block(nn.Module):
    """Residual block; the mixing over positions is causal, so that later tokens reach earlier gradients."""

    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.act = nn.Tanh()
        self.down = nn.Linear(2 * d, d)

    def forward(self, x):
        h = self.norm(x)
        steps = torch.arange(1, x.shape[1] + 1, dtype=h.dtype)[:, None]
        h = h.cumsum(1) / steps
        return x + self.down(self.act(self.up(h)))


class TinyLM(nn.Module):
    def __init__(self, vocab=11, d=6, n_blocks=3, tied=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(n_blocks))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(d, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids, attention_mask=None):
        return self.trace(input_ids)["logits"]

    def trace(self, ids):
        out = {"embed": self.embed(ids)}
        h = out["embed"]
        for i, block in enumerate(self.blocks):
            h = out[f"blocks.{i}"] = block(h)
        out["logits"] = self.head(self.drop(h))
        return out


def make_ids(*shape, vocab=11, seed=3):
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def next_token_sum(logits, ids):
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def reference(model, ids, name):
    """Rows of activation and gradient at `name`, all but the last position, without hooks."""
    model.eval()
    trace = model.trace(ids)
    (g,) = torch.autograd.grad(next_token_sum(trace["logits"], ids), trace[name])
    rows = [x[:, :-1].reshape(-1, x.shape[-1]).detach().numpy() for x in (trace[name], g)]
    model.train()
    return rows


def freeze(model):
    return model.requires_grad_(False)


def hook_counts(model):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]


def flat_loss(model, batch):
    """A loss for any module with a tensor output: smooth, not linear."""
    out = model(batch)
    return (out**2).sum() / 2 + out.sin().sum()


# ---------------------------------------------------------------------- against autograd


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["embed", "blocks.0", "blocks.2"])
def test_rows_equal_autograd_without_hooks(name, tied):
    model, batches = TinyLM(tied=tied), [make_ids(4, 5), make_ids(2, 7, seed=4)]
    h = harvest(model, [{"input_ids": ids} for ids in batches], [name])
    acts, grads = (np.concatenate(part) for part in zip(*(reference(model, ids, name) for ids in batches), strict=True))
    np.testing.assert_array_equal(h[name].activations, acts)
    np.testing.assert_allclose(h[name].gradients, grads, rtol=1e-5, atol=1e-7)
    assert np.abs(grads).max() > 0.01


def test_arrays_and_meta_describe_the_rows():
    batches = [make_ids(2, 4), make_ids(3, 3, seed=4)]
    h = harvest(TinyLM(), [{"input_ids": ids} for ids in batches], ["blocks.0", "blocks.1:in"])
    for rows in h.values():
        assert rows.activations.dtype == rows.gradients.dtype == np.float32
        assert rows.activations.flags.c_contiguous
        assert rows.gradients.flags.c_contiguous
    assert isinstance(h.meta, np.recarray)
    assert h.meta.dtype.names == ("sample_id", "position", "token_id", "batch_id")
    assert h.meta.sample_id.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4]
    assert h.meta.position.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 0, 1]
    assert h.meta.batch_id.tolist() == [0] * 6 + [1] * 6
    expected = np.concatenate([ids[:, :-1].flatten().numpy() for ids in batches])
    np.testing.assert_array_equal(h.meta.token_id, expected)
    np.testing.assert_array_equal(h["blocks.0"].activations, h["blocks.1:in"].activations)
    np.testing.assert_array_equal(h["blocks.0"].gradients, h["blocks.1:in"].gradients)


def test_losses_are_the_mean_cross_entropy_per_predicted_token():
    model, ids = TinyLM(), make_ids(4, 5)
    h = harvest(model, [{"input_ids": ids}], ["blocks.0"])
    expected = next_token_sum(model.eval()(ids), ids).item() / 16
    np.testing.assert_allclose(h.losses, [expected], rtol=1e-6)


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize(
    "site", ["embed", "blocks.1", "blocks.1:in", "blocks.1.norm:in", "blocks.0.up:in", "blocks.1.up"]
)
def test_frozen_and_trainable_models_agree_everywhere(site, frozen):
    # "blocks.1.norm:in" is the residual stream: the norm and the addition both consume it.
    ids = make_ids(3, 5)
    expected = harvest(TinyLM(), [{"input_ids": ids}], [site])[site]
    model = freeze(TinyLM()) if frozen else TinyLM()
    got = harvest(model, [{"input_ids": ids}], [site])[site]
    np.testing.assert_array_equal(got.activations, expected.activations)
    np.testing.assert_allclose(got.gradients, expected.gradients, rtol=1e-6, atol=1e-8)
    assert all(p.requires_grad is not frozen for p in model.parameters())


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_tensor_consumed_twice_gives_the_total_gradient(frozen):
    model, ids = TinyLM(), make_ids(3, 5)
    expected = reference(model, ids, "embed")[1]  # block 0 uses it in the norm and in the residual sum
    model = freeze(model) if frozen else model
    h = harvest(model, [{"input_ids": ids}], ["blocks.0:in", "blocks.0.norm:in"])
    np.testing.assert_allclose(h["blocks.0:in"].gradients, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(h["blocks.0.norm:in"].gradients, expected, rtol=1e-5, atol=1e-7)


def test_partly_frozen_model():
    model, ids = TinyLM(), make_ids(3, 5)
    expected = reference(model, ids, "blocks.0")[1]
    freeze(model.embed), freeze(model.blocks[0])
    h = harvest(model, [{"input_ids": ids}], ["embed", "blocks.0"])
    np.testing.assert_allclose(h["blocks.0"].gradients, expected, rtol=1e-5, atol=1e-7)
    assert np.abs(h["embed"].gradients).max() > 0.01


# ---------------------------------------------------------------------- outputs of every kind


class Wrapped(nn.Module):
    """An affine layer whose output is wrapped by `wrap`, and a reader that unwraps it."""

    def __init__(self, wrap, unwrap, d=4):
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Module()
        self.inner.forward = lambda x: wrap(self.linear(x))
        self.linear = nn.Linear(d, d)
        self.unwrap = unwrap
        self.last = nn.Linear(d, 3)

    def forward(self, x):
        return self.last(self.unwrap(self.inner(x)).tanh())


def _wrappings():
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Out:
        state: torch.Tensor
        extra: int = 3

    pair = namedtuple("pair", "state weights")
    return {
        "tuple": (lambda t: (t, None), lambda o: o[0], "inner"),
        "list": (lambda t: [t], lambda o: o[0], "inner:out[0]"),
        "dict": (lambda t: {"state": t, "n": 1}, lambda o: o["state"], "inner:out[state]"),
        "namedtuple": (lambda t: pair(t, t.mean()), lambda o: o.state, "inner"),
        "dataclass": (lambda t: Out(t), lambda o: o.state, "inner:out[state]"),
        "nested": (lambda t: (1, {"state": (t,)}), lambda o: o[1]["state"][0], "inner:out[1][state][0]"),
        "several": (lambda t: (t, t * 2), lambda o: o[0], "inner:out[0]"),
        "mapping by number": (lambda t: {"state": t, "n": 1}, lambda o: o["state"], "inner:out[0]"),
        "same tensor twice": (lambda t: (t, t), lambda o: o[1], "inner"),
    }


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("case", list(_wrappings()))
def test_wrapped_outputs(case, frozen):
    wrap, unwrap, site = _wrappings()[case]
    model, x = Wrapped(wrap, unwrap), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    state = model.linear(x)
    (expected,) = torch.autograd.grad(flat_loss(lambda s: model.last(s.tanh()), state), state)
    model = freeze(model) if frozen else model
    rows = harvest(model, [x], [site], loss=flat_loss)[site]
    np.testing.assert_allclose(rows.activations, state.detach().reshape(6, 4), rtol=1e-6)
    np.testing.assert_allclose(rows.gradients, expected.reshape(6, 4), rtol=1e-5, atol=1e-7)


def test_model_output_keeps_its_class_when_replaced():
    outputs = pytest.importorskip("transformers.modeling_outputs", reason="transformers is not installed")
    seen = []

    def unwrap(output):
        seen.append(type(output))
        return output.last_hidden_state

    model = freeze(Wrapped(lambda t: outputs.BaseModelOutput(last_hidden_state=t), unwrap))
    rows = harvest(model, [torch.ones(2, 3, 4)], ["inner:out[last_hidden_state]"], loss=flat_loss)
    assert seen == [outputs.BaseModelOutput]
    assert np.abs(rows["inner:out[last_hidden_state]"].gradients).max() > 0


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Module()
        self.layer.forward = self._layer
        self.linear = nn.Linear(4, 4)

    def _layer(self, positions=None, hidden_states=None, scale=None):
        return self.linear(hidden_states).tanh() * scale

    def forward(self, x):
        h = self.linear(x)
        return self.layer(positions=torch.arange(3), hidden_states=h, scale=torch.ones(2, 3, 1)) + h


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("site", ["layer:in", "layer:in[hidden_states]", "layer:in[1]"])
def test_inputs_by_keyword(site, frozen):
    model, x = Keywords(), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(5))
    h = model.linear(x)
    out = model.linear(h).tanh() + h
    (expected,) = torch.autograd.grad((out**2).sum() / 2 + out.sin().sum(), h)
    model = freeze(model) if frozen else model
    rows = harvest(model, [x], [site], loss=flat_loss)[site]
    np.testing.assert_allclose(rows.activations, h.detach().reshape(6, 4), rtol=1e-6)
    np.testing.assert_allclose(rows.gradients, expected.reshape(6, 4), rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------- in-place operations


class InPlace(nn.Module):
    """What `first` returns is changed in place at once; a 3-D linear layer with bias returns a view."""

    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4, bias=bias)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(x)
        h *= 3
        h += 1
        return self.last(self.relu(h))

    def plain(self, h):
        return self.last(torch.relu(3 * h + 1))


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("bias", [False, True], ids=["tensor", "view"])
@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4)])
def test_in_place_operation_after_the_site(shape, bias, frozen):
    model, x = InPlace(bias), torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    h = model.first(x).detach().requires_grad_(True)
    (expected,) = torch.autograd.grad(flat_loss(model.plain, h), h)
    model = freeze(model) if frozen else model
    rows = harvest(model, [x], ["first"], loss=flat_loss)["first"]
    np.testing.assert_allclose(rows.activations, h.detach().reshape(-1, 4), rtol=1e-6)
    np.testing.assert_allclose(rows.gradients, expected.reshape(-1, 4), rtol=1e-5, atol=1e-7)


def test_input_changed_in_place_by_its_module():
    model, x = InPlace(bias=False), torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    h = (3 * model.first(x) + 1).detach().requires_grad_(True)
    (expected,) = torch.autograd.grad(flat_loss(lambda h: model.last(torch.relu(h)), h), h)
    rows = harvest(model, [x], ["relu:in"], loss=flat_loss)["relu:in"]
    np.testing.assert_allclose(rows.activations, h.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rows.gradients, expected, rtol=1e-5, atol=1e-7)


def test_view_as_input_changed_in_place_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.relu = nn.Linear(4, 4), nn.ReLU(inplace=True)

        def forward(self, x):
            return self.relu(self.first(x).view(2, 3, 4))

    with pytest.raises(RuntimeError, match="'relu:in' is a view that was changed in place"):
        harvest(Model(), [torch.ones(2, 3, 4)], ["relu:in"], loss=flat_loss)


# ---------------------------------------------------------------------- what is left behind


def test_state_is_restored():
    model, ids = TinyLM(), make_ids(3, 5)
    model.blocks[1].eval()
    freeze(model.blocks[0].up)
    model(ids).sum().backward()
    before = {
        name: (p.requires_grad, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()
    }
    modes = [m.training for m in model.modules()]
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with torch.no_grad():
        h = harvest(model, [{"input_ids": ids}], ["blocks.1:in", "blocks.0.down:weight"], seed=5)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.rand(3), expected)
    assert torch.is_grad_enabled()
    assert [m.training for m in model.modules()] == modes
    for name, p in model.named_parameters():
        assert p.requires_grad is before[name][0]
        assert (p.grad is None) == (before[name][1] is None)
        assert p.grad is None or torch.equal(p.grad, before[name][1])
    assert np.abs(h["blocks.1:in"].gradients).max() > 0


def test_random_state_inside_follows_the_seed():
    def noisy(model, batch):
        return (model(batch["input_ids"]) * torch.rand(3, 5, 11)).sum()

    batch = {"input_ids": make_ids(3, 5)}
    one, again, other = (harvest(TinyLM(), [batch], ["blocks.0"], loss=noisy, seed=s)["blocks.0"] for s in (1, 1, 2))
    np.testing.assert_array_equal(one.gradients, again.gradients)
    assert not np.array_equal(one.gradients, other.gradients)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_after_an_exception(error):
    model, ids = freeze(TinyLM()), make_ids(3, 5)
    calls = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append("post"))
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append("pre"))
    before = hook_counts(model)

    def failing(model, batch):
        model(**batch)
        raise error("stop")

    with pytest.raises(error, match="stop"):
        harvest(model, [{"input_ids": ids}], ["blocks.*", "blocks.0:in", "head:weight"], loss=failing)
    assert hook_counts(model) == before
    assert model.training
    assert not any(p.requires_grad for p in model.parameters())
    harvest(model, [{"input_ids": ids}], ["blocks.*", "blocks.0:in", "head:weight"])
    assert hook_counts(model) == before
    assert calls == ["pre", "post"] * 2


def test_the_users_tensors_get_no_gradient():
    x = torch.randn(2, 3, 4, requires_grad=True)
    harvest(InPlace(), [x], ["first:in", "first"], loss=flat_loss)
    assert x.grad is None
    assert x.requires_grad
    assert not x._backward_hooks


# ---------------------------------------------------------------------- a site must run exactly once


def test_shared_module_called_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.shared(self.shared(x)))

    with pytest.raises(RuntimeError, match=r"'shared' fired 2 times in batch 0, not once: .*shared module"):
        harvest(Twice(), [torch.ones(2, 3, 4)], ["last", "shared"], loss=flat_loss)

    def other_shape(model, batch):
        return flat_loss(model, batch) + flat_loss(model.shared, batch[:1, 0])

    with pytest.raises(RuntimeError, match=r"'shared' fired 3 times .*the loss calls the model several times"):
        harvest(Twice(), [torch.ones(2, 3, 4)], ["shared"], loss=other_shape)


@pytest.mark.parametrize("kind", ["never", "forward", "attention"])
def test_module_that_is_not_called(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.never, self.forwarded = nn.Linear(4, 4), nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            return self.attention(*[self.forwarded.forward(x)] * 3)[0]

    site = {"never": "never", "forward": "forwarded", "attention": "attention.out_proj:weight"}[kind]
    with pytest.raises(
        RuntimeError, match=rf"'{site}' fired 0 times .*{'out_proj' if kind == 'attention' else 'forward'}"
    ):
        harvest(Model(), [torch.ones(2, 3, 4)], [site], loss=flat_loss)
    h = harvest(Model(), [torch.ones(2, 3, 4)], ["attention:in", "attention:out[0]"], loss=flat_loss)
    assert h["attention:in"].gradients.shape == (6, 4)


def test_site_without_influence_on_the_loss():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.side, self.main = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            self.side(x)
            return self.main(x)

    with pytest.raises(RuntimeError, match="'side' has no gradient in batch 0: the loss does not depend on it"):
        harvest(Model(), [torch.ones(2, 3, 4)], ["main", "side"], loss=flat_loss)
    h = harvest(Model(), [torch.ones(2, 3, 4)], ["main", "side"], loss=flat_loss, collect=["activations"])
    assert h["side"].activations.shape == (6, 4)


@pytest.mark.parametrize("where", ["model", "submodule", "in place", "closure"])
def test_compiled_models_run_eagerly(where):
    ids, model = make_ids(3, 5), TinyLM()
    expected = harvest(TinyLM(), [{"input_ids": ids}], ["blocks.1"])["blocks.1"]
    loss = "causal-lm"
    given, site = model, "blocks.1"
    if where == "model":
        given = torch.compile(model, backend="eager")
        given(ids)
    elif where == "closure":
        compiled = torch.compile(model, backend="eager")
        compiled(ids)
        loss = lambda _, batch: next_token_sum(compiled(batch["input_ids"]), batch["input_ids"])  # noqa: E731
    elif where == "in place":
        model.blocks[1].compile(backend="eager")
        model(ids)
    else:
        model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
        model(ids)
    rows = harvest(given, [{"input_ids": ids}], [site], loss=loss, mask=lambda b: torch.arange(5).repeat(3, 1) < 4)[
        site
    ]
    np.testing.assert_allclose(rows.gradients, expected.gradients, rtol=1e-5, atol=1e-7)


class Checkpointed(TinyLM):
    def __init__(self, use_reentrant, **kwargs):
        super().__init__(**kwargs)
        self.use_reentrant = use_reentrant

    def trace(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.use_reentrant)
        return {"logits": self.head(h)}


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("site", ["blocks.1", "blocks.1.up", "blocks.1.down:weight", "blocks.1.norm:in"])
def test_checkpointing_without_reentry(site, frozen):
    batch = {"input_ids": make_ids(3, 5)}
    expected = harvest(TinyLM(), [batch], [site])[site]
    model = Checkpointed(False)
    got = harvest(freeze(model) if frozen else model, [batch], [site])[site]
    np.testing.assert_array_equal(got.activations, expected.activations)
    np.testing.assert_allclose(got.gradients, expected.gradients, rtol=1e-6, atol=1e-8)


def test_reentrant_checkpointing_is_refused_for_gradients_only():
    batch, model = {"input_ids": make_ids(3, 5)}, Checkpointed(True)
    with pytest.raises(RuntimeError, match=r"'blocks.1.up' ran without a graph.*use_reentrant=False"):
        harvest(model, [batch], ["blocks.1.up"])
    with pytest.raises(RuntimeError, match="reentrant checkpointing, which cannot differentiate"):
        harvest(model, [batch], ["embed"])
    acts = harvest(model, [batch], ["blocks.1.up"], collect=["activations"])["blocks.1.up"].activations
    np.testing.assert_array_equal(acts, harvest(TinyLM(), [batch], ["blocks.1.up"])["blocks.1.up"].activations)


# ---------------------------------------------------------------------- rows


def test_rows_do_not_depend_on_the_batch_size():
    ids = make_ids(6, 5)
    one, two = (harvest(TinyLM(), [{"input_ids": b} for b in ids.split(n)], ["blocks.1"]) for n in (6, 2))
    np.testing.assert_allclose(one["blocks.1"].gradients, two["blocks.1"].gradients, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(one.meta.sample_id, two.meta.sample_id)
    assert not np.array_equal(one.meta.batch_id, two.meta.batch_id)


def test_mask_callable_rules_activations_and_gradients():
    ids = make_ids(3, 5)
    h = harvest(TinyLM(), [{"input_ids": ids}], ["blocks.0"], mask=lambda batch: batch["input_ids"] % 2 == 0)
    full = harvest(TinyLM(), [{"input_ids": ids}], ["blocks.0"])
    keep = full.meta.token_id % 2 == 0
    assert 0 < keep.sum() < len(keep)
    assert (h.meta.token_id % 2 == 0).all()
    np.testing.assert_array_equal(h["blocks.0"].gradients, full["blocks.0"].gradients[keep])


def test_own_loss_keeps_every_position_and_default_mask_keeps_real_tokens():
    ids, real = make_ids(2, 4), torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]])

    def loss(model, batch):
        return next_token_sum(model(batch["input_ids"]), batch["input_ids"])

    assert harvest(TinyLM(), [{"input_ids": ids}], ["embed"], loss=loss).meta.position.tolist() == [0, 1, 2, 3] * 2
    h = harvest(TinyLM(), [{"input_ids": ids, "attention_mask": real}], ["embed"], loss=loss)
    assert h.meta.position.tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("kind", [list, np.array, set, lambda ids: iter(ids)])
def test_exclude_token_ids(kind):
    ids = torch.tensor([[0, 1, 2, 3], [1, 1, 0, 5]])
    h = harvest(TinyLM(), [{"input_ids": ids}], ["embed"], exclude_token_ids=kind([0, 2]))
    assert h.meta.token_id.tolist() == [1, 1, 1]
    assert h["embed"].activations.shape == (3, 6)


def test_exclude_token_ids_needs_token_ids():
    with pytest.raises(ValueError, match="exclude_token_ids needs one token id per row"):
        harvest(InPlace(), [torch.ones(2, 3, 4)], ["first"], loss=flat_loss, exclude_token_ids=[0])


@pytest.mark.parametrize("batch_size", [1, 4, 20])
def test_max_rows_is_the_same_sample_everywhere(batch_size):
    ids = make_ids(20, 6)
    batches = [{"input_ids": b} for b in ids.split(batch_size)]
    full = harvest(TinyLM(), batches, ["blocks.0", "blocks.2"])
    part = harvest(TinyLM(), batches, ["blocks.0", "blocks.2"], max_rows=17, seed=0)
    reference = harvest(TinyLM(seed=1), [{"input_ids": ids}], ["embed"], max_rows=17, seed=0)
    assert part.n_rows == 17
    for field in ("sample_id", "position", "token_id"):
        np.testing.assert_array_equal(part.meta[field], reference.meta[field])
    where = part.meta.sample_id * 5 + part.meta.position
    assert (np.diff(where) > 0).all()
    for site in part:
        np.testing.assert_array_equal(part[site].activations, full[site].activations[where])
        np.testing.assert_array_equal(part[site].gradients, full[site].gradients[where])
    other = harvest(TinyLM(), batches, ["blocks.0"], max_rows=17, seed=1)
    assert not np.array_equal(other.meta.sample_id * 5 + other.meta.position, where)


def test_max_rows_nests_and_is_uniform():
    ids = make_ids(100, 6)
    counts = np.zeros((100, 5))
    for seed in range(20):
        small, large = (
            harvest(TinyLM(n_blocks=0), [{"input_ids": ids}], ["embed"], max_rows=n, seed=seed) for n in (50, 250)
        )
        keys = [set(zip(h.meta.sample_id.tolist(), h.meta.position.tolist(), strict=True)) for h in (small, large)]
        assert keys[0] < keys[1]
        np.add.at(counts, (large.meta.sample_id, large.meta.position), 1)
    # Each row is drawn 20 times with probability 1/2; the bounds on the marginals are 5 standard errors.
    np.testing.assert_allclose(counts.mean(0), 10, atol=5 * np.sqrt(5 / 100))
    np.testing.assert_allclose(counts.var(), 5, rtol=0.35)


def test_max_rows_bounds_what_is_held():
    from isogeom.gradients._rowstore import RowStore
    from isogeom.gradients._sampling import BatchRows, RowRule

    store, held = RowStore(10), []
    for i in range(50):
        choice = BatchRows(i, 4 * i, RowRule(seed=3, budget=10), threshold=store.threshold)
        selection = choice.select((4, 8), "site")
        assert len(selection.keys) <= 10
        assert store.threshold is None or (selection.keys < store.threshold).all()
        rows = {("site", "activations"): np.full((len(selection.keys), 2), i, dtype=np.float32)}
        store.add(selection, rows, i, 4, 0.0)
        held.append(store.n_rows)
    h = store.finish(["site"], [0.0] * 50)
    assert max(held) == 10
    np.testing.assert_array_equal(h["site"].activations[:, 0], h.meta.batch_id)


def test_rows_of_shape_batch_d():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    x, y = torch.randn(7, 3), torch.randint(0, 2, (7,))

    def loss(model, batch):
        return cross_entropy(model(batch[0]), batch[1], reduction="none")

    h = harvest(model, [(x[:4], y[:4]), [x[4:], y[4:]]], ["0", "2"], loss=loss, mask=lambda batch: batch[1] >= 0)
    hidden = model[0](x)
    (expected,) = torch.autograd.grad(cross_entropy(model[1:](hidden), y, reduction="sum"), hidden)
    np.testing.assert_allclose(h["0"].gradients, expected, rtol=1e-5, atol=1e-7)
    assert h.meta.sample_id.tolist() == list(range(7))
    assert set(h.meta.position) == {0}
    assert set(h.meta.token_id) == {-1}


def test_attention_masks_of_other_shapes_are_the_users_business_with_a_mask():
    ids, seen = make_ids(2, 4), []

    def loss(model, batch):
        seen.append(batch["attention_mask"].shape)
        return next_token_sum(model(batch["input_ids"]), batch["input_ids"])

    batch = {"input_ids": ids, "attention_mask": torch.ones(2, 1, 4, 4)}
    h = harvest(TinyLM(), [batch], ["embed"], loss=loss, mask=lambda batch: batch["input_ids"] >= 0)
    assert h.n_rows == 8
    assert seen == [(2, 1, 4, 4)]
    with pytest.raises(
        ValueError, match=r"got \(2, 1, 4, 4\); with any other, use a loss of your own and mask=callable"
    ):
        harvest(TinyLM(), [batch], ["embed"], loss=loss)


def test_sites_must_share_their_rows():
    class Pooled(TinyLM):
        def __init__(self):
            super().__init__()
            self.pool = nn.Identity()

        def forward(self, input_ids):
            h = self.embed(input_ids)
            return self.head(h) + self.head(self.pool(h.mean(1)))[:, None]

    batch = {"input_ids": make_ids(2, 4), "attention_mask": torch.ones(2, 4)}

    def loss(model, batch):
        return model(batch["input_ids"]).square().sum()

    with pytest.raises(
        ValueError, match=r"'embed' and 'pool' have different rows in batch 0: shape \(2, 4\) against \(2,\)"
    ):
        harvest(Pooled(), [batch], ["embed", "pool"], loss=loss)
    assert harvest(Pooled(), [batch], ["pool"], loss=loss).n_rows == 2


# ---------------------------------------------------------------------- weight sites


def test_weight_factors_give_the_weight_gradient():
    model, ids = TinyLM(), make_ids(4, 5)
    sites = ["blocks.1.up:weight", "blocks.*.down:weight", "head:weight"]
    h = harvest(model, [{"input_ids": ids[:1]}, {"input_ids": ids[1:]}], sites)
    assert list(h) == ["blocks.1.up:weight", *(f"blocks.{i}.down:weight" for i in range(3)), "head:weight"]
    next_token_sum(model.eval()(ids), ids).backward()
    for name, rows in h.items():
        weight = model.get_submodule(name.removesuffix(":weight")).weight
        np.testing.assert_allclose(rows.gradients.T @ rows.activations, weight.grad, rtol=1e-4, atol=1e-5)
        assert rows.activations.shape == (16, weight.shape[1])


def test_weight_factors_of_a_frozen_layer():
    model, ids = TinyLM(), make_ids(4, 5)
    expected = harvest(model, [{"input_ids": ids}], ["blocks.1.up:weight"])["blocks.1.up:weight"]
    got = harvest(freeze(model), [{"input_ids": ids}], ["blocks.1.up:weight"])["blocks.1.up:weight"]
    np.testing.assert_array_equal(got.activations, expected.activations)
    np.testing.assert_allclose(got.gradients, expected.gradients, rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------------- dtypes and numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_come_as_float32(dtype):
    model, ids = TinyLM().to(dtype), make_ids(3, 5)
    h = harvest(model, [{"input_ids": ids}], ["blocks.1"])
    model.eval()
    trace = model.trace(ids)
    (g,) = torch.autograd.grad(
        next_token_sum(trace["logits"].float() if dtype == torch.bfloat16 else trace["logits"], ids), trace["blocks.1"]
    )
    assert h["blocks.1"].gradients.dtype == np.float32
    np.testing.assert_array_equal(h["blocks.1"].activations, trace["blocks.1"][:, :-1].reshape(-1, 6).detach().float())
    np.testing.assert_allclose(h["blocks.1"].gradients, g[:, :-1].reshape(-1, 6).float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["activations", "gradients"])
def test_values_that_are_not_finite(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            nn.init.zeros_(self.first.weight), nn.init.ones_(self.first.bias)

        def forward(self, x):
            h = self.first(x)
            if kind == "gradients":
                return (h - 1 + x[..., :1] * 1e-40).abs().sqrt()  # infinite slope where x is 0
            return h

        def extra_repr(self):
            return kind

    model, good, bad = Model(), torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    if kind == "gradients":
        bad[0, 1] = 0

        def loss(model, x):
            out = model(x)
            return out[torch.isfinite(out)].sum()
    else:
        bad[0, 1, 0] = torch.nan

        def loss(model, x):
            return model(x).nan_to_num().sum()

    with pytest.raises(ValueError, match=rf"the {kind} of site 'first' hold \d+ values that are not finite.*batch 1"):
        harvest(model, [good, bad], ["first"], loss=loss)

    def mask(x):
        return torch.isfinite(x).all(-1) & (x != 0).all(-1)

    h = harvest(model, [good, bad], ["first"], loss=loss, mask=mask, collect=[kind])
    assert h.n_rows == 11


def test_only_what_is_asked_for_is_collected():
    batch = {"input_ids": make_ids(2, 4)}
    enabled = []

    def loss(model, batch):
        enabled.append(torch.is_grad_enabled())
        return next_token_sum(model(batch["input_ids"]), batch["input_ids"])

    acts = harvest(TinyLM(), [batch], ["embed"], loss=loss, collect=["activations"])["embed"]
    grads = harvest(TinyLM(), [batch], ["embed"], loss=loss, collect=("gradients",))["embed"]
    assert enabled == [False, True]
    assert acts.gradients is None
    assert grads.activations is None
    assert acts.activations.shape == grads.gradients.shape == (8, 6)
    with torch.inference_mode():
        same = harvest(TinyLM(), [batch], ["embed"], loss=loss, collect=["activations"])["embed"]
    np.testing.assert_array_equal(same.activations, acts.activations)


def test_models_that_return_their_own_loss():
    class WithLoss(TinyLM):
        def forward(self, input_ids):
            return {"loss": next_token_sum(super().forward(input_ids), input_ids)}

    ids = make_ids(3, 5)
    h = harvest(WithLoss(), [{"input_ids": ids}], ["blocks.0"], loss=lambda model, batch: model(**batch)["loss"])
    expected = reference(TinyLM(), ids, "blocks.0")[1]
    np.testing.assert_allclose(h["blocks.0"].gradients[h.meta.position < 4], expected, rtol=1e-5, atol=1e-7)
    assert np.abs(h["blocks.0"].gradients[h.meta.position == 4]).max() == 0


def test_memory_of_past_batches_is_released():
    # A token in the autograd node of each batch lives exactly as long as the graph does.
    class Token:
        pass

    class Tagged(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.token = Token()
            tokens.append(weakref.ref(ctx.token))
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    def loss(model, x):
        alive.append(sum(token() is not None for token in tokens))
        return flat_loss(model, Tagged.apply(x.requires_grad_()))

    tokens, alive = [], []
    harvest(nn.Sequential(nn.Linear(4, 4)), [torch.ones(2, 3, 4) for _ in range(6)], ["0:in", "0"], loss=loss)
    assert len(tokens) == 6
    assert max(alive) <= 1


# Resident memory after 40 and after 200 batches.
_FLAT = """
import sys
import torch
from torch import nn
from isogeom.gradients import harvest

torch.set_num_threads(1)
PAGE = 4096
resident = []

def loss(model, x):
    with open("/proc/self/statm") as file:
        resident.append(int(file.read().split()[1]) * PAGE)
    return model(x).square().sum()

model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.Tanh())])
batches = (torch.randn(250, 128) for _ in range(200))
options = {"rows": {"max_rows": 100}, "moments": {"reduce": "moments"}, "disk": {"out": sys.argv[2]}}[sys.argv[1]]
harvest(model, batches, ["0:in", "3", "7:out", "8:weight"], loss=loss, **options)
print(resident[40], resident[-1], len(resident))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("kind", ["rows", "moments", "disk"])
def test_memory_is_flat_over_200_batches(kind, tmp_path):
    command = [sys.executable, "-c", _FLAT, kind, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    early, late, n = map(int, done.stdout.split())
    assert n == 200
    # The graphs of these 160 batches hold 50 MB and more, their rows 150 MB and more.
    assert late - early < 16e6


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"batches": []}, ValueError, "batches is empty"),
        ({"batches": {"input_ids": make_ids(2, 3)}}, TypeError, "for a single batch pass"),
        ({"batches": make_ids(2, 3)}, TypeError, "for a single batch pass"),
        ({"batches": 3}, TypeError, "batches must be an iterable"),
        ({"batches": ["text"]}, TypeError, "batch 0 is a str"),
        ({"batches": [{"text": "a"}]}, ValueError, "no tensor with a batch axis"),
        ({"sites": []}, ValueError, "sites is empty"),
        ({"collect": "activations"}, TypeError, "collect must be a tuple"),
        ({"collect": ("acts",)}, ValueError, "'act', 'grad'"),
        ({"collect": ()}, ValueError, "'act', 'grad'"),
        ({"loss": "mse"}, ValueError, "'causal-lm', 'masked-lm'"),
        ({"loss": 3}, TypeError, "callable"),
        ({"mask": "all"}, TypeError, "mask must be None or a callable"),
        ({"mask": lambda b: b["input_ids"]}, TypeError, "mask must return a bool tensor"),
        ({"mask": lambda b: torch.ones(2, dtype=torch.bool)}, ValueError, r"mask returned shape \(2,\)"),
        ({"mask": lambda b: b["input_ids"] < 0}, ValueError, "no row is left"),
        ({"exclude_token_ids": 3}, TypeError, "exclude_token_ids must be a list"),
        ({"exclude_token_ids": [1.5]}, TypeError, "exclude_token_ids must be an integer"),
        ({"max_rows": 0}, ValueError, "max_rows must be between 1"),
        ({"max_rows": 2.5}, TypeError, "max_rows must be an integer, got 2.5"),
        ({"max_rows": True}, TypeError, "max_rows must be an integer"),
        ({"seed": -1}, ValueError, "seed must be between 0"),
        ({"loss": lambda m, b: m(**b).sum().item()}, TypeError, "loss must return a tensor .* got float"),
        ({"loss": lambda m, b: m(**b).sum().to(torch.complex64)}, TypeError, "real floating tensor"),
        ({"loss": lambda m, b: m(**b).sum().detach()}, RuntimeError, "does not require grad"),
        ({"loss": lambda m, b: m(**b).sum() * torch.nan}, ValueError, "the loss of batch 0 is nan"),
        ({"model": print}, TypeError, "model must be a torch.nn.Module"),
        ({"model": nn.DataParallel(TinyLM())}, TypeError, "DataParallel.*model.module"),
    ],
)
def test_wrong_arguments(change, error, match):
    arguments = {"model": TinyLM(), "batches": [{"input_ids": make_ids(2, 3)}], "sites": ["blocks.0"], **change}
    with pytest.raises(error, match=match):
        harvest(arguments.pop("model"), arguments.pop("batches"), arguments.pop("sites"), **arguments)


def test_script_modules_are_refused():
    class Traced(nn.Module):
        def forward(self, x):
            return x * 2

    scripted = object.__new__(torch.jit.ScriptModule)
    with pytest.raises(TypeError, match="ScriptModule"):
        harvest(scripted, [torch.ones(2, 3)], ["x"], loss=flat_loss)
    assert harvest(Traced(), [torch.ones(2, 3)], [":out"], loss=flat_loss, collect=["activations"]).n_rows == 2


def test_inference_mode_is_refused_for_gradients():
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        harvest(TinyLM(), [{"input_ids": make_ids(2, 3)}], ["blocks.0"])


def test_changing_width_between_batches():
    with pytest.raises(ValueError, match="activations of site ':out' have 5 features, but 4 in earlier batches"):
        harvest(nn.Identity(), [torch.ones(2, 4), torch.ones(2, 5)], [":out"], loss=flat_loss, collect=["activations"])


def test_progress_shows_where_somebody_watches(capsys, monkeypatch):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    batches = [{"input_ids": make_ids(2, 3)}] * 2

    def shown(**options):
        assert harvest(TinyLM(), batches, ["blocks.0"], **options).n_rows == 8
        return "rows=8" in capsys.readouterr().err

    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert not shown()  # a captured stream is no terminal
    assert not shown(progress=True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert shown()
    assert shown(progress=True)
    assert not shown(progress=False)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert not shown()
    monkeypatch.setattr(sys, "stderr", None)
    assert harvest(TinyLM(), batches, ["blocks.0"]).n_rows == 8


@pytest.mark.parametrize("progress", [None, 1, "auto"])
def test_progress_is_true_or_false(progress):
    with pytest.raises(TypeError, match=f"progress must be True or False, got {progress!r}"):
        harvest(TinyLM(), [], ["blocks.0"], progress=progress)


# ---------------------------------------------------------------------- the result


def make_harvest():
    return harvest(TinyLM(), [{"input_ids": make_ids(2, 4)}, {"input_ids": make_ids(1, 3)}], ["embed", "blocks.1:in"])


def test_harvest_is_a_mapping():
    h = make_harvest()
    assert list(h) == ["embed", "blocks.1:in"]
    assert len(h) == 2
    assert "embed" in h
    assert "embed:out" in h
    assert h["embed:out"] is h["embed"]
    assert h["embed"].name == "embed"
    assert "head" not in h
    assert 3 not in h
    assert [name for name, _ in h.items()] == list(h.keys())
    assert h.n_rows == len(h.meta) == 8
    assert repr(h).splitlines()[0] == "Harvest(8 rows, 2 sites, 2 batches)"
    assert "activations (8, 6), gradients (8, 6)" in repr(h["embed"])
    with pytest.raises(KeyError, match=r"no site 'head'.*'embed', 'blocks.1:in'"):
        h["head"]
    with pytest.raises(AttributeError):
        h.meta = None


@pytest.mark.parametrize(
    "rows", [slice(1, 6, 2), [3, 0, -1], np.arange(8) % 2 == 0, [], np.zeros(8, dtype=bool)], ids=str
)
def test_select(rows):
    h = make_harvest()
    part = h.select(rows)
    index = np.arange(8)[rows if isinstance(rows, slice) else np.asarray(rows, dtype=None if len(rows) else int)]
    np.testing.assert_array_equal(part.meta.token_id, h.meta.token_id[index])
    assert isinstance(part.meta, np.recarray)
    for site in h:
        np.testing.assert_array_equal(part[site].activations, h[site].activations[index])
        np.testing.assert_array_equal(part[site].gradients, h[site].gradients[index])
        assert not np.shares_memory(part[site].activations, h[site].activations)
    np.testing.assert_array_equal(part.losses, h.losses)


@pytest.mark.parametrize("rows", [[[0]], 3, [0.5], [True, False], "embed"])
def test_select_refuses_what_is_no_index(rows):
    with pytest.raises(ValueError, match="rows must be a slice, a 1-D integer array or a boolean array of length 8"):
        make_harvest().select(rows)
    with pytest.raises(IndexError):
        make_harvest().select([8])


# ---------------------------------------------------------------------- batches and imports


def test_batches_may_nest_and_keep_their_types():
    Pair = namedtuple("Pair", "x extra")
    seen = []

    def loss(model, batch):
        seen.append((type(batch), type(batch.extra), list(batch.extra)))
        return flat_loss(model, batch.x)

    h = harvest(nn.Linear(4, 2), [Pair(torch.ones(2, 3, 4), {"y": [torch.zeros(2)], "name": "a"})], [":out"], loss=loss)
    assert h.n_rows == 6
    assert seen == [(Pair, dict, ["y", "name"])]


@pytest.mark.parametrize("kind", ["mapping", "tuple", "tensor", "nested"])
def test_a_loss_that_works_in_place_leaves_the_callers_batch_alone(kind):
    x, extra = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), np.ones(2)
    batch = {
        "mapping": {"x": x, "extra": extra},
        "tuple": (x, extra),
        "tensor": x,
        "nested": ({"x": [x]}, extra, torch.zeros(4)),
    }[kind]
    before, bases = x.clone(), []

    def loss(model, batch):
        value = batch if kind == "tensor" else batch["x"] if kind == "mapping" else batch[0]
        value = value["x"][0] if kind == "nested" else value
        bases.append(value.data_ptr())
        value.mul_(2).add_(1)
        if kind == "mapping":
            batch["extra"] *= 0
            batch["new"] = batch.pop("x")
        elif kind != "tensor":
            batch[1][:] = 0
        return model(value).square().sum()

    first, again = (harvest(nn.Linear(3, 2).requires_grad_(False), [batch], [":out"], loss=loss) for _ in range(2))
    assert torch.equal(x, before)
    assert extra.tolist() == [1, 1]
    assert x.data_ptr() not in bases
    assert kind != "mapping" or list(batch) == ["x", "extra"]
    assert first.n_rows == again.n_rows == 4


def test_one_tensor_in_two_places_of_a_batch_stays_one():
    x = torch.ones(2, 3)

    def loss(model, batch):
        assert batch["a"] is batch["b"][0]
        assert batch["a"].requires_grad
        assert batch["a"].is_leaf
        return flat_loss(model, batch["a"])

    x.requires_grad_(True)
    harvest(nn.Linear(3, 2), [{"a": x, "b": [x]}], [":out"], loss=loss)
    assert x.grad is None


def test_a_mask_that_changes_the_batch_is_refused():
    with pytest.raises(ValueError, match="mask changed a tensor of batch 0 in place"):
        harvest(nn.Linear(3, 2), [torch.ones(2, 3)], [":out"], loss=flat_loss, mask=lambda x: x.mul_(2).sum(1) > 0)


def test_a_mask_taken_from_the_batch_is_read_before_the_loss_runs():
    def loss(model, batch):
        batch["keep"].zero_()
        return flat_loss(model, batch["x"])

    batch = {"x": torch.ones(3, 3), "keep": torch.tensor([True, False, True])}
    h = harvest(nn.Linear(3, 2), [batch], [":out"], loss=loss, mask=lambda batch: batch["keep"])
    assert h.meta.sample_id.tolist() == [0, 2]


def test_missing_torch_names_the_extra():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "try:\n    import isogeom.gradients\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "pip install 'isogeom[torch]'" in done.stdout
