"""harvest against gradients and activations recomputed without any hook."""

from collections import namedtuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gradients.small_models import InPlace, TinyLM, flat_loss, freeze, make_ids, next_token_sum, reference  # noqa: E402
from torch import nn  # noqa: E402

from isogeom.gradients import harvest  # noqa: E402

torch.set_num_threads(1)


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
