"""harvest on the families that people have, against the hidden states that they return and torch.autograd.grad.

Padding on either side, ragged batches, checkpointing, half precision, tied heads and encoder-decoders.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.functional import cross_entropy  # noqa: E402

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
