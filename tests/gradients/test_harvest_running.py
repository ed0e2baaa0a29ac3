"""How harvest runs a model: each site once, and nothing is left behind, whatever fails."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gradients.small_models import InPlace, TinyLM, flat_loss, freeze, hook_counts, make_ids, next_token_sum  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from isogeom.gradients import harvest  # noqa: E402

torch.set_num_threads(1)


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


@pytest.mark.filterwarnings("ignore:random numbers were drawn")
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


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_is_refused_for_gradients_only():
    batch, model = {"input_ids": make_ids(3, 5)}, Checkpointed(True)
    with pytest.raises(RuntimeError, match=r"'blocks.1.up' ran without a graph.*use_reentrant=False"):
        harvest(model, [batch], ["blocks.1.up"])
    with pytest.raises(RuntimeError, match="reentrant checkpointing, which cannot differentiate"):
        harvest(model, [batch], ["embed"])
    acts = harvest(model, [batch], ["blocks.1.up"], collect=["activations"])["blocks.1.up"].activations
    np.testing.assert_array_equal(acts, harvest(TinyLM(), [batch], ["blocks.1.up"])["blocks.1.up"].activations)
