"""Sites of encoder-decoder models: each side's rows have its own tokens, mask and positions."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.functional import cross_entropy  # noqa: E402

from isogeom.gradients import check_batch_invariance, harvest  # noqa: E402

torch.set_num_threads(1)
VOCABULARY, WIDTH = 20, 16
SOURCE = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14]])
TARGET = torch.tensor([[0, 15, 16, 17, 18, 19], [0, 3, 5, 7, 9, 11]])
CROSS = {"t5": "decoder.block.1.layer.1.EncDecAttention", "bart": "model.decoder.layers.1.encoder_attn"}
BLOCK = {"t5": "decoder.block.1", "bart": "model.decoder.layers.1"}
ENCODER = {"t5": "encoder.block.0", "bart": "model.encoder.layers.0"}
FAMILIES = ["t5", "bart"]


def make_model(family):
    transformers = pytest.importorskip("transformers", reason="the families live in transformers (the hf extra)")
    torch.manual_seed(0)
    if family == "t5":
        sizes = {"d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    else:
        layers = {f"{part}_layers": 2 for part in ("encoder", "decoder")}
        sizes = {**layers, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32}
    sizes |= {"d_model": WIDTH, "vocab_size": VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 1}
    config, model = {
        "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration),
        "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration),
    }[family]
    return model(config(**sizes)).eval()


def make_batch(n_target=6, **changes):
    target = TARGET[:, :n_target].contiguous()
    return {"input_ids": SOURCE, "decoder_input_ids": target, "labels": target.flip(1).contiguous(), **changes}


def summed(model, batch):
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return cross_entropy(model(**inputs).logits.transpose(1, 2), batch["labels"], reduction="none")


def trace(model, batch, names):
    """Outputs of modules and the gradients there, by plain hooks."""
    seen, handles = {}, []
    for name in names:

        def hook(_module, _args, output, name=name):
            seen[name] = output[0] if isinstance(output, tuple) else output

        handles.append(model.get_submodule(name).register_forward_hook(hook))
    total = summed(model, batch).sum()
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(total, list(seen.values()))
    return {name: (seen[name].detach(), gradient) for name, gradient in zip(seen, gradients, strict=True)}


@pytest.mark.parametrize("n_target", [6, 4], ids=["same length", "other length"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_side_has_its_own_tokens(family, frozen, n_target):
    model, batch, cross = make_model(family), make_batch(n_target), CROSS[family]
    key, query = (f"{cross}.{part}" for part in (("k", "q") if family == "t5" else ("k_proj", "q_proj")))
    sides = {
        "encoder": ([ENCODER[family], key], SOURCE),
        "decoder": ([query, f"{cross}:out[0]", f"{BLOCK[family]}:out"], batch["decoder_input_ids"]),
    }
    names = [name.partition(":")[0] for sites, _ in sides.values() for name in sites]
    expected = trace(model, batch, names)
    model.requires_grad_(not frozen)
    for sites, ids in sides.values():
        h = harvest(model, [batch], sites, loss=summed)
        np.testing.assert_array_equal(h.meta.token_id, ids.flatten())
        np.testing.assert_array_equal(h.meta.position, np.tile(np.arange(ids.shape[1]), 2))
        for site in sites:
            state, gradient = expected[site.partition(":")[0]]
            np.testing.assert_allclose(h[site].activations, state.flatten(0, 1), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(h[site].gradients, gradient.flatten(0, 1), rtol=1e-3, atol=1e-6)
    with pytest.raises(ValueError, match=r"rows of the encoder and site .* of the decoder .*separate calls"):
        harvest(model, [batch], [ENCODER[family], BLOCK[family]], loss=summed)


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("n_target", [6, 4], ids=["same length", "other length"])
def test_what_the_decoder_reads_of_the_encoder_has_its_tokens(n_target, frozen):
    model, batch = make_model("bart").requires_grad_(not frozen), make_batch(n_target)
    sites = [
        f"{BLOCK['bart']}:in[encoder_hidden_states]",
        f"{CROSS['bart']}.v_proj:in",
        f"{CROSS['bart']}.v_proj:weight",
        ":out[encoder_last_hidden_state]",
        "model.encoder:out[last_hidden_state]",
    ]
    h = harvest(model, [batch], sites, loss=summed)
    np.testing.assert_array_equal(h.meta.token_id, SOURCE.flatten())
    np.testing.assert_array_equal(h[sites[1]].activations, h[sites[4]].activations)


@pytest.mark.parametrize("site", [BLOCK["t5"], "lm_head:in", ":out[logits]"])
def test_rows_of_the_decoder_without_its_tokens_have_none(site):
    batch = {"input_ids": SOURCE, "labels": TARGET}
    for given in (batch, {"encoder_ids": SOURCE, "labels": TARGET}, {**batch, "labels": TARGET[:, :4].contiguous()}):

        def loss(model, batch):
            return model(input_ids=batch.get("input_ids", SOURCE), labels=batch["labels"]).loss

        h = harvest(make_model("t5"), [given], [site], loss=loss)
        assert h.n_rows == given["labels"].numel()
        assert (h.meta.token_id == -1).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_of_either_side_is_left_out(family):
    source, target = torch.ones_like(SOURCE), torch.ones_like(TARGET)
    source[0, 3:], target[1, 2:] = 0, 0
    batch = make_batch(attention_mask=source, decoder_attention_mask=target)
    batch["labels"][target == 0] = -100
    model = make_model(family)
    encoder = harvest(model, [batch], [ENCODER[family]], loss="masked-lm")
    decoder = harvest(model, [batch], [BLOCK[family]], loss="masked-lm")
    np.testing.assert_array_equal(encoder.meta.token_id, SOURCE[source.bool()])
    np.testing.assert_array_equal(decoder.meta.token_id, TARGET[target.bool()])
    # The second sample by itself, without its padding.
    alone = {"input_ids": SOURCE[1:], "decoder_input_ids": TARGET[1:, :2], "labels": batch["labels"][1:, :2]}
    one = harvest(model, [alone], [BLOCK[family]], loss="masked-lm")[BLOCK[family]]
    second = decoder.select(decoder.meta.sample_id == 1)[BLOCK[family]]
    np.testing.assert_allclose(second.activations, one.activations, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(second.gradients, one.gradients, rtol=1e-3, atol=1e-6)
    loss = summed(model, batch)[target.bool()].mean()
    np.testing.assert_allclose(decoder.losses, [loss.item()], rtol=1e-5)


@pytest.mark.parametrize("pads", ["source", "labels"])
def test_padding_of_the_decoder_needs_a_mask(pads):
    model, batch, site = make_model("t5"), make_batch(4), BLOCK["t5"]
    if pads == "source":
        batch["attention_mask"] = torch.ones_like(SOURCE)
        batch["attention_mask"][0, 4:] = 0
    batch["labels"][1, 3:] = -100
    with pytest.raises(ValueError, match=r"rows of the decoder.*'decoder_attention_mask'.*label_mask=True.*rows='all'"):
        harvest(model, [batch], [site], loss="masked-lm")
    ways = [
        ({"label_mask": True}, 7),
        ({"mask": lambda batch: batch["labels"] != -100}, 7),
        ({"rows": "all"}, 8),
    ]
    for options, n_rows in ways:
        assert harvest(model, [batch], [site], loss="masked-lm", **options).n_rows == n_rows
    with pytest.raises(ValueError, match="label_mask=True is for rows of the decoder"):
        harvest(model, [batch], [ENCODER["t5"]], loss="masked-lm", label_mask=True)


def test_activations_without_a_loss_keep_the_last_position():
    batch = {key: value for key, value in make_batch(4).items() if key != "labels"}
    for site, n_rows in [(ENCODER["t5"], 12), (BLOCK["t5"], 8)]:
        assert harvest(make_model("t5"), [batch], [site], collect=["act"]).n_rows == n_rows


def test_the_causal_preset_is_refused():
    with pytest.raises(ValueError, match=r"loss='causal-lm' does not fit an encoder-decoder.*'masked-lm'"):
        harvest(make_model("t5"), [make_batch()], [BLOCK["t5"]])


def test_an_encoder_that_does_not_run_leaves_equal_lengths_unknown():
    model = make_model("t5")
    states = model.encoder(SOURCE).last_hidden_state.detach()

    def loss(model, batch):
        return model(encoder_outputs=(states,), labels=batch["labels"]).loss

    batch = {"input_ids": SOURCE, "labels": TARGET}
    for site in (BLOCK["t5"], f"{CROSS['t5']}.k"):
        with pytest.raises(ValueError, match="the encoder, which did not run in batch 0"):
            harvest(model, [batch], [site], loss=loss)
        other = harvest(model, [{**batch, "labels": TARGET[:, :4]}], [site], loss=loss)
        # With other lengths, the lengths tell.
        assert other.meta.token_id.tolist() == (SOURCE.flatten().tolist() if site.endswith("k") else [-1] * 8)
    assert harvest(model, [{"labels": TARGET, "x": SOURCE}], [BLOCK["t5"]], loss=loss).n_rows == 12


def test_two_models_joined_as_encoder_and_decoder():
    transformers = pytest.importorskip("transformers", reason="the families live in transformers (the hf extra)")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["intermediate_size"] = 24
    encoder = transformers.BertConfig(**sizes)
    decoder = transformers.BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = transformers.EncoderDecoderModel(config).eval()
    cross = "decoder.bert.encoder.layer.1.crossattention"
    own = {
        "encoder.encoder.layer.0": SOURCE,
        f"{cross}.self.key": SOURCE,
        f"{cross}.self.query": TARGET,
        ":out[logits]": TARGET,
    }
    for site, ids in own.items():
        h = harvest(model, [make_batch()], [site], loss="masked-lm")
        np.testing.assert_array_equal(h.meta.token_id, ids.flatten())


def test_an_encoder_by_itself_has_one_side():
    transformers = pytest.importorskip("transformers", reason="the families live in transformers (the hf extra)")
    config = make_model("t5").config
    config.is_encoder_decoder = False
    model = transformers.T5EncoderModel(config).eval()
    for site in (":out", "encoder.block.0"):
        h = harvest(model, [{"input_ids": SOURCE}], [site], collect=["act"], rows="all")
        np.testing.assert_array_equal(h.meta.token_id, SOURCE.flatten())


@pytest.mark.parametrize("padded", ["source", "target", "both"])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_padding_of_either_side_reaches_no_row(side, padded):
    batch, source, target = make_batch(), torch.ones_like(SOURCE), torch.ones_like(TARGET)
    source[0, 4:] = 0 if padded != "target" else 1
    target[1, 3:] = 0 if padded != "source" else 1
    batch |= {"attention_mask": source, "decoder_attention_mask": target}
    batch["labels"][target == 0] = -100
    site = (ENCODER if side == "encoder" else BLOCK)["bart"]
    result = check_batch_invariance(make_model("bart"), batch, site, loss="masked-lm")
    assert set(result.activations) == {"repeat", "order", "alone", "unpadded"}
    assert result.largest < 1e-4


@pytest.mark.parametrize("mask", ["attention_mask", "decoder_attention_mask"])
def test_a_mask_that_the_model_does_not_get_is_seen(mask):
    def forgets(model, batch):
        return summed(model, {key: value for key, value in batch.items() if key != mask})

    batch = make_batch(attention_mask=torch.ones_like(SOURCE), decoder_attention_mask=torch.ones_like(TARGET))
    batch[mask][0, :2] = 0
    batch["labels"][batch["decoder_attention_mask"] == 0] = -100
    result = check_batch_invariance(make_model("bart"), batch, BLOCK["bart"], loss=forgets)
    assert result.activations["unpadded"] > 1e-3


def test_labels_stay_whole_where_only_the_source_is_padded():
    def own(model, batch):
        return cross_entropy(model(**batch).logits.transpose(1, 2), batch["labels"], reduction="none")

    batch = {"input_ids": SOURCE, "attention_mask": torch.ones_like(SOURCE), "labels": TARGET}
    batch["attention_mask"][0, 4:] = 0
    result = check_batch_invariance(make_model("t5"), batch, ENCODER["t5"], loss=own)
    assert result.largest < 1e-4
