"""The presets, with language models of transformers, against losses written out by hand."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from isogeom.gradients import harvest  # noqa: E402

torch.set_num_threads(1)
VOCAB = 13


def gpt2():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config)


def bert():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
    )
    return transformers.BertForMaskedLM(config)


def make_ids(*shape, seed=1):
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def pad(sequences, side):
    """Batch of sequences of several lengths, padded with token 0."""
    width = max(map(len, sequences))
    ids, mask = (
        torch.zeros(len(sequences), width, dtype=torch.long),
        torch.zeros(len(sequences), width, dtype=torch.long),
    )
    for i, sequence in enumerate(sequences):
        where = slice(0, len(sequence)) if side == "right" else slice(width - len(sequence), width)
        ids[i, where], mask[i, where] = sequence, 1
    return {"input_ids": ids, "attention_mask": mask}


def block_gradient(model, block, batch, loss_of_logits):
    """Activation and gradient at a block's output, by retain_grad on the hidden state."""
    model.eval()
    kept = {}
    handle = block.register_forward_hook(lambda m, a, out: kept.update(h=out))
    logits = model(**batch).logits
    handle.remove()
    (gradient,) = torch.autograd.grad(loss_of_logits(logits), kept["h"])
    return kept["h"].detach(), gradient


@pytest.mark.parametrize(
    ("build", "site"), [(gpt2, "transformer.h.1"), (llama, "model.layers.1"), (gpt2, "transformer.h.0")]
)
def test_causal_preset_with_transformers(build, site):
    model, ids = build(), make_ids(3, 6)
    terms = []

    def loss(logits):
        logp = logits.log_softmax(-1)
        terms.extend(-logp[b, t, ids[b, t + 1]] for b in range(3) for t in range(5))
        return sum(terms)

    acts, grads = block_gradient(model, model.get_submodule(site), {"input_ids": ids}, loss)
    h = harvest(model, [{"input_ids": ids, "labels": ids}], [site])
    np.testing.assert_allclose(h[site].activations, acts[:, :-1].reshape(15, 8), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(h[site].gradients, grads[:, :-1].reshape(15, 8), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(h.losses, [np.mean([t.item() for t in terms])], rtol=1e-5)
    assert grads[:, -1].abs().max() == 0  # what is dropped is zero


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_no_row(side):
    model, sequences = llama(), [make_ids(n, seed=n) for n in (3, 6, 4)]
    alone = harvest(model, [{"input_ids": s[None]} for s in sequences], ["model.layers.0", "model.layers.1"])
    padded = harvest(model, [pad(sequences, side)], ["model.layers.0", "model.layers.1"])
    assert padded.n_rows == 2 + 5 + 3
    np.testing.assert_array_equal(padded.meta.token_id, alone.meta.token_id)
    np.testing.assert_array_equal(padded.meta.sample_id, alone.meta.sample_id)
    for site in padded:
        np.testing.assert_allclose(padded[site].activations, alone[site].activations, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(padded[site].gradients, alone[site].gradients, rtol=1e-3, atol=1e-5)
    # The mean over all targets: padding predicts nothing, and nothing predicts it.
    np.testing.assert_allclose(padded.losses, [alone.losses @ [0.2, 0.5, 0.3]], rtol=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_adds_nothing_to_the_weight_gradient(side):
    model, sequences = llama(), [make_ids(n, seed=n) for n in (3, 6)]
    site = "model.layers.0.mlp.down_proj"
    h = harvest(model, [pad(sequences, side)], [f"{site}:weight"])[f"{site}:weight"]
    model.eval()
    for sequence in sequences:
        logits = model(input_ids=sequence[None]).logits[0, :-1]
        nn.functional.cross_entropy(logits, sequence[1:], reduction="sum").backward()
    np.testing.assert_allclose(
        h.gradients.T @ h.activations, model.get_submodule(site).weight.grad, rtol=1e-3, atol=1e-5
    )


def test_ragged_batches_and_ignored_labels():
    model, ids = llama(), make_ids(2, 6)
    labels = ids.clone()
    labels[:, :3] = -100  # a prompt: no target, but its states feed later predictions
    h = harvest(model, [{"input_ids": ids, "labels": labels}, {"input_ids": make_ids(1, 3)}], ["model.layers.0"])
    assert h.meta.position.tolist() == [0, 1, 2, 3, 4] * 2 + [0, 1]

    def loss(logits):
        return nn.functional.cross_entropy(logits[:, 2:-1].flatten(0, 1), ids[:, 3:].flatten(), reduction="sum")

    np.testing.assert_allclose(h.losses[0], loss(model.eval()(input_ids=ids).logits).item() / 6, rtol=1e-5)
    _, grads = block_gradient(model, model.model.layers[0], {"input_ids": ids}, loss)
    got = h.select(h.meta.batch_id == 0)["model.layers.0"].gradients
    np.testing.assert_allclose(got, grads[:, :-1].reshape(10, 8), rtol=1e-4, atol=1e-6)
    assert np.abs(got[0]).max() > 0


def test_conv1d_weight_factors():
    model, ids = gpt2(), make_ids(3, 6)
    site = "transformer.h.0.mlp.c_fc"
    h = harvest(model, [{"input_ids": ids}], [f"{site}:weight"])[f"{site}:weight"]
    model.eval()
    logits = model(input_ids=ids).logits[:, :-1]
    nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    np.testing.assert_allclose(
        h.activations.T @ h.gradients, model.get_submodule(site).weight.grad, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_masked_preset_with_bert(frozen):
    model, batch = bert(), pad([make_ids(5), make_ids(7, seed=2)], "right")
    labels = torch.full_like(batch["input_ids"], -100)
    labels[0, 1], labels[1, 2], labels[1, 5] = 3, 4, 5
    labels[0, 6] = 7  # on padding: no target
    targets = [(0, 1, 3), (1, 2, 4), (1, 5, 5)]

    def loss(logits):
        return -sum(logits.log_softmax(-1)[b, t, v] for b, t, v in targets)

    site = "bert.encoder.layer.0"
    acts, grads = block_gradient(model, model.get_submodule(site), batch, loss)
    model.requires_grad_(not frozen)
    h = harvest(model, [{**batch, "labels": labels}], [site], loss="masked-lm")
    keep = batch["attention_mask"].bool()
    assert h.n_rows == 12  # every real token, the last included
    np.testing.assert_allclose(h[site].activations, acts[keep], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(h[site].gradients, grads[keep], rtol=1e-4, atol=1e-6)


def test_a_batch_without_masked_position_has_zero_gradients_and_loss():
    batch = {"input_ids": make_ids(2, 4), "labels": torch.full((2, 4), -100)}
    h = harvest(bert(), [batch], ["bert.encoder.layer.0"], loss="masked-lm")
    assert h.losses.tolist() == [0.0]
    assert h["bert.encoder.layer.0"].gradients.tolist() == np.zeros((8, 8)).tolist()


def test_tokenizer_output_is_a_mapping():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    batch = transformers.BatchEncoding(pad([make_ids(3), make_ids(6, seed=2)], "right"))
    h = harvest(llama(), [batch], ["model.layers.0"])
    assert h.n_rows == 2 + 5  # not one row per key
    with pytest.raises(TypeError, match="for a single batch pass"):
        harvest(llama(), batch, ["model.layers.0"])


def test_sites_named_by_probes():
    from isogeom.gradients import probes

    model, ids = gpt2(), make_ids(2, 5)
    sites = probes(model)
    h = harvest(model, [{"input_ids": ids}], list(sites.values()))
    assert h.n_rows == 8
    assert all(np.abs(rows.gradients).max() > 0 for rows in h.values())


class Plain(nn.Module):
    """Logits as a tensor, a tuple or a mapping."""

    def __init__(self, wrap):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.wrap = nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB), wrap

    def forward(self, input_ids, attention_mask=None):
        return self.wrap(self.head(self.embed(input_ids)))


@pytest.mark.parametrize("wrap", [lambda t: (t, None), lambda t: [t], lambda t: {"logits": t, "loss": None}])
def test_logits_in_any_wrapping(wrap):
    batch = {"input_ids": make_ids(2, 4)}
    expected = harvest(Plain(lambda t: t), [batch], ["embed"])
    got = harvest(Plain(wrap), [batch], ["embed"])
    np.testing.assert_array_equal(got["embed"].gradients, expected["embed"].gradients)
    np.testing.assert_array_equal(got.losses, expected.losses)


@pytest.mark.parametrize(
    ("batch", "loss", "match"),
    [
        (make_ids(2, 4), "causal-lm", "needs mapping batches with an integer tensor 'input_ids'.*got Tensor"),
        ({"ids": make_ids(2, 4)}, "causal-lm", r"'input_ids' of shape \(batch, seq\); got \['ids'\]"),
        ({"input_ids": make_ids(2, 4)}, "masked-lm", "'labels'.*-100 wherever nothing is to be predicted"),
        (
            {"input_ids": make_ids(2, 4), "labels": make_ids(2, 3)},
            "masked-lm",
            r"needs logits of shape .* \(2, 3, \.\.\.\)",
        ),
        (
            {"input_ids": make_ids(2, 4), "attention_mask": torch.ones(2, 1, 4, 4)},
            "causal-lm",
            "attention_mask of batch 0 must be",
        ),
        (
            {"input_ids": make_ids(2, 4), "attention_mask": torch.zeros(2, 4) - 9},
            "causal-lm",
            r"only 0 \(padding\) and 1",
        ),
        ({"input_ids": make_ids(2, 4), "attention_mask": torch.ones(2, 5)}, "causal-lm", r"\(2, 5\)"),
    ],
)
def test_batches_the_presets_cannot_read(batch, loss, match):
    with pytest.raises(ValueError, match=match):
        harvest(Plain(lambda t: t), [batch], ["embed"], loss=loss)


def test_outputs_the_presets_cannot_read():
    with pytest.raises(ValueError, match=r"needs logits of shape .* got dict"):
        harvest(Plain(lambda t: {"scores": t}), [{"input_ids": make_ids(2, 4)}], ["embed"])
    with pytest.raises(ValueError, match=r"got shape \(2, 13\)"):
        harvest(Plain(lambda t: t[:, 0]), [{"input_ids": make_ids(2, 4)}], ["embed"])
