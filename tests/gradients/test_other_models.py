"""harvest on quantised weights, convolutions, MLPs, torch's encoder and wrapped models, and what a failure leaves."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy, linear  # noqa: E402

from isogeom.gradients import harvest  # noqa: E402

torch.set_num_threads(1)


# ---------------------------------------------------------------------- weights without gradients


class Int8Linear(nn.Module):
    """Integer weights, dequantised on the fly, as bitsandbytes and torchao keep them: nothing to differentiate."""

    def __init__(self, weight):
        super().__init__()
        self.scale = nn.Parameter(weight.abs().amax(1, keepdim=True) / 127, requires_grad=False)
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def dequantised(self):
        return self.weight.float() * self.scale

    def forward(self, x):
        return linear(x, self.dequantised())


@pytest.mark.parametrize("site", ["0", "1", "3:in", "3"])
def test_quantised_weights(site):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 20, bias=False))
    embedding = nn.Embedding.from_pretrained(plain[0].weight.detach().clone())
    model = nn.Sequential(
        embedding, Int8Linear(plain[1].weight.detach()), nn.Tanh(), Int8Linear(plain[3].weight.detach())
    )
    with torch.no_grad():
        for i in (1, 3):
            plain[i].weight.copy_(model[i].dequantised())
    ids = torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(1))

    def loss(model, ids):
        return cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    states = [plain[0](ids)]
    for layer in plain[1:]:
        states.append(layer(states[-1]))
    place = 2 if site == "3:in" else int(site)
    total = cross_entropy(states[-1][:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    (expected,) = torch.autograd.grad(total, states[place])
    rows = harvest(model, [ids], [site], loss=loss)[site]
    np.testing.assert_allclose(rows.activations, states[place].detach().flatten(0, 1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rows.gradients, expected.flatten(0, 1), rtol=1e-5, atol=1e-7)
    assert model[1].weight.dtype == torch.int8
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:.*quantiz:")
def test_layers_quantised_by_torch_have_no_derivative():
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no quantised kernels for the CPU")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model, x = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}), torch.randn(3, 4)

    def loss(model, x):
        return model(x).square().sum()

    with torch.no_grad():
        states = [model[0](x), model[:2](x), model(x)]
    h = harvest(model, [x], ["0", "1", "2"], loss=loss, collect=["act"])
    for i, state in enumerate(states):
        np.testing.assert_allclose(h[str(i)].activations, state, rtol=1e-6)
    # Behind the last quantised layer there is a gradient, before it there is none and the error says why.
    np.testing.assert_allclose(harvest(model, [x], ["2"], loss=loss)["2"].gradients, 2 * states[2], rtol=1e-6)
    with pytest.raises(RuntimeError, match=r"'1' has no gradient in batch 0: .*no derivative .*quantised layers"):
        harvest(model, [x], ["1"], loss=loss)
    with pytest.raises(TypeError, match=r"nn\.Embedding only, not of torch\.ao\..*Linear"):
        harvest(model, [x], ["2:weight"], loss=loss)


# ---------------------------------------------------------------------- models without sequences


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 6, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.head = nn.Linear(6, 3)

    def forward(self, images):
        maps = self.second(torch.relu(self.first(images))).relu()
        return self.head(self.flatten(self.pool(maps)))


def label_loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def images_and_labels():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(7, 1, 5, 4, generator=generator), torch.randint(0, 3, (7,), generator=generator)


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_convolutional_network_pooled(frozen):
    model, (x, y) = Convolutional(), images_and_labels()
    maps = model.second(torch.relu(model.first(x))).relu()
    pooled = model.pool(maps).flatten(1)
    (expected,) = torch.autograd.grad(cross_entropy(model.head(pooled), y, reduction="sum"), pooled)
    model.requires_grad_(not frozen)
    h = harvest(model, [(x[:4], y[:4]), (x[4:], y[4:])], ["flatten", "head:in"], loss=label_loss)
    for rows in h.values():
        np.testing.assert_allclose(rows.activations, pooled.detach(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(rows.gradients, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_mlp_equals_autograd_at_every_layer(frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    x, y = torch.randn(9, 5), torch.randint(0, 3, (9,))
    states = [x]
    for layer in model:
        states.append(layer(states[-1]))
    expected = torch.autograd.grad(cross_entropy(states[-1], y, reduction="sum"), states[1:])
    model.requires_grad_(not frozen)
    h = harvest(model, [(x, y)], [str(i) for i in range(5)], loss=label_loss)
    for i in range(5):
        np.testing.assert_allclose(h[str(i)].activations, states[i + 1].detach(), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(h[str(i)].gradients, expected[i], rtol=1e-4, atol=1e-7)


# ---------------------------------------------------------------------- torch's own encoder


class Encoder(nn.Module):
    """nn.TransformerEncoder with padding: torch has a fused form of it, which packs the batch into a nested tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embed, self.encoder = nn.Embedding(20, 8), nn.TransformerEncoder(layer, 2)

    def forward(self, input_ids, attention_mask):
        return self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)


def cubes_of_real_tokens(model, batch):
    return (model(**batch)[batch["attention_mask"] == 1] ** 3).sum()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("collect", [("act",), ("act", "grad")], ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("site", ["encoder.layers.1:in", "encoder.layers.0", "encoder.layers.0.linear1:in"])
def test_encoder_of_torch_with_padding(site, frozen, collect):
    ids = torch.randint(20, (3, 6), generator=torch.Generator().manual_seed(0))
    real = torch.arange(6) < torch.tensor([[6], [4], [3]])
    model = Encoder().eval()
    # By hand, without the fused form, which is for calls that need no gradient.
    first, second = model.encoder.layers
    padding = ~real
    h = model.embed(ids)
    middle = first.norm1(h + first.self_attn(h, h, h, key_padding_mask=padding, need_weights=False)[0])
    end = first.norm2(middle + first.linear2(first.linear1(middle).relu()))
    total = (second(end, src_key_padding_mask=padding)[real] ** 3).sum()
    # What a linear layer reads is added to its result too: the gradient counts both ways.
    state = middle if "linear1" in site else end
    (gradient,) = torch.autograd.grad(total, state)
    model.requires_grad_(not frozen)
    batch = {"input_ids": ids, "attention_mask": real.long()}
    h = harvest(model, [batch], [site], loss=cubes_of_real_tokens, collect=collect)[site]
    assert torch.backends.mha.get_fastpath_enabled()
    np.testing.assert_allclose(h.activations, state[real].detach(), rtol=1e-4, atol=1e-5)
    if "grad" in collect:
        np.testing.assert_allclose(h.gradients, gradient[real], rtol=1e-3, atol=1e-4)


def test_the_fused_form_is_allowed_again_after_an_error():
    def loss(model, batch):
        assert not torch.backends.mha.get_fastpath_enabled()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        harvest(Encoder(), [{"input_ids": torch.zeros(1, 2, dtype=torch.long)}], ["embed"], loss=loss)
    assert torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        harvest(nn.Linear(3, 2), [torch.ones(2, 3)], [":out"], loss=lambda model, x: model(x).sum())
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


# ---------------------------------------------------------------------- wrappers and failures


def test_sharded_models_are_refused_with_the_way_out(tmp_path):
    distributed = pytest.importorskip("torch.distributed", reason="this torch has no torch.distributed")
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"FSDPModule.*harvest the bare model"):
            harvest(model, [torch.ones(3, 4)], ["0"], loss=lambda model, x: model(x).sum())
        from torch.distributed.fsdp import FullyShardedDataParallel

        first = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # wrapping needs an accelerator
        nn.Module.__init__(first)
        with pytest.raises(TypeError, match=r"FullyShardedDataParallel.*harvest the bare model"):
            harvest(nn.Sequential(first), [torch.ones(3, 4)], ["0"], loss=lambda model, x: model(x).sum())
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        with pytest.raises(TypeError, match=r"DistributedDataParallel.*model\.module"):
            harvest(wrapped, [torch.ones(3, 4)], ["module"], loss=lambda model, x: model(x).sum())
        rows = harvest(wrapped.module, [torch.ones(3, 4)], [":out"], loss=lambda model, x: model(x).sum())
        assert (rows[":out"].gradients == 1).all()
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("where", ["module", "backward", "batches"])
def test_nothing_is_left_wherever_it_fails(error, where):
    class Failing(nn.Module):
        def forward(self, x):
            if where == "module" and x.shape[0] == 2:
                raise error("stop")
            if where == "backward" and x.shape[0] == 2:
                x = x * 1
                x.register_hook(self.fail)
            return x

        def fail(self, _gradient):
            raise error("stop")

    def batches():
        yield torch.ones(3, 4)
        if where == "batches":
            raise error("stop")
        yield torch.ones(2, 4)

    model = nn.Sequential(nn.Linear(4, 4), Failing(), nn.Dropout(), nn.Linear(4, 2)).requires_grad_(False).train()
    state = torch.random.get_rng_state()
    with pytest.raises(error, match="stop"):
        harvest(model, batches(), ["0", "1:in", "3:weight"], loss=lambda model, x: model(x).square().sum())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert module.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.is_grad_enabled()
