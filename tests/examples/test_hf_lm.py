"""Hugging Face models saved to disk with random weights and loaded back: no network."""

import gzip
import importlib
import math
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="the models are torch models")
transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

from tiny_models import FAMILIES, TEXT, make_model, make_tokenizer  # noqa: E402

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def hf():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("_hf_lm")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """One folder per family with two checkpoints; the tokenizer is shared, or lies beside each, by turns."""
    root = tmp_path_factory.mktemp("models")
    for place, family in enumerate(FAMILIES):
        for seed, step in enumerate(("step10", "step100")):
            make_model(family, seed).save_pretrained(root / family / step)
            if place % 2:
                tokenizer.save_pretrained(root / family / step)
        if not place % 2:
            tokenizer.save_pretrained(root / family)
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_path_of_a_family(hf, saved, family):
    early, tokenizer, kind = hf.load_model(saved / family, "step10")
    late, _, _ = hf.load_model(saved / family, "step100")
    assert kind == FAMILIES[family][1]
    assert not early.training
    assert early.dtype == torch.float32
    assert early.config._attn_implementation == "eager"
    for loaded, seed in ((early, 0), (late, 1)):
        for (name, found), (_, expected) in zip(
            loaded.named_parameters(), make_model(family, seed).named_parameters(), strict=True
        ):
            assert torch.equal(found, expected), name
    hf.check_distinct(early, late)
    with pytest.raises(ValueError, match="identical parameters"):
        hf.check_distinct(early, hf.load_model(saved / family, "step10")[0])
    assert tokenizer.convert_ids_to_tokens([0, 4, 5]) == ["<pad>", "<mask>", "w0"]

    batches = hf.text_batches(TEXT, tokenizer, early, kind, context=20, batch_size=3, n_batches=5)
    assert len(batches) == 5
    for batch in batches:
        assert {key: value.shape for key, value in batch.items()} == dict.fromkeys(batch, (3, 20))
        with torch.no_grad():
            result = early(**batch)
        scores, labels = result.logits, batch["labels"]
        if kind == "causal-lm":
            scores, labels = scores[:, :-1], labels[:, 1:]
        chosen = scores.log_softmax(-1)[labels != -100, labels[labels != -100]]
        # The labels mean to transformers what they mean here, and random weights guess no better than chance.
        assert float(result.loss) == pytest.approx(-float(chosen.mean()), rel=1e-5)
        assert float(result.loss) == pytest.approx(math.log(128), abs=0.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_like_is_a_fresh_model_of_the_same_shape(hf, saved, family):
    model = hf.load_model(saved / family, "step10")[0]
    state = torch.get_rng_state()
    first, again, other = (hf.random_like(model, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert type(first) is type(model)
    assert not first.training
    assert first.config._attn_implementation == "eager"
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert {name: p.shape for name, p in first.named_parameters()} == shapes
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters(), strict=True))
    hf.check_distinct(first, other)


def test_causal_windows_are_bare_text_in_order(hf, tokenizer):
    model = make_model("llama")
    batches = hf.text_batches(TEXT, tokenizer, model, "causal-lm", context=30, batch_size=4, n_batches=25)
    ids = torch.cat([batch["input_ids"] for batch in batches])
    assert tokenizer.decode(ids.flatten()) == TEXT  # 100 windows of 30: all 3000 words, nothing added
    for batch in batches:
        assert set(batch) == {"input_ids", "attention_mask", "labels"}
        assert torch.equal(batch["labels"], batch["input_ids"])
        assert torch.equal(batch["attention_mask"], torch.ones(4, 30, dtype=torch.int64))


@pytest.mark.parametrize("template", [True, False])
def test_masked_windows_have_their_ends_and_a_fixed_number_of_masks(hf, template):
    tokenizer = make_tokenizer(template)
    model = make_model("camembert")
    text = TEXT.replace("w5 ", "unheard ")

    def make(seed):
        return hf.text_batches(text, tokenizer, model, "masked-lm", context=32, batch_size=2, n_batches=50, seed=seed)

    ids, labels = (torch.cat([batch[key] for batch in make(0)]) for key in ("input_ids", "labels"))
    masked = labels != -100
    assert (ids[:, 0] == 1).all()
    assert (ids[:, -1] == 2).all()
    assert torch.equal(ids == 4, masked)
    original = torch.where(masked, labels, ids)
    assert tokenizer.decode(original[:, 1:-1].flatten()) == text.replace("unheard", "<unk>")
    assert not torch.isin(labels, torch.arange(5)).any()  # neither the ends nor unknown words are asked for
    ordinary = (original >= 5).sum(1)
    assert masked.sum(1).tolist() == [round(0.15 * n) for n in ordinary.tolist()]
    for batch, again in zip(make(0), make(0), strict=True):
        assert all(torch.equal(batch[key], again[key]) for key in batch)
    assert any(not torch.equal(a["labels"], b["labels"]) for a, b in zip(make(0), make(1), strict=True))


def test_a_short_window_still_has_one_mask(hf, tokenizer):
    batches = hf.text_batches(
        TEXT, tokenizer, make_model("eurobert"), "masked-lm", context=4, batch_size=1, n_batches=3
    )
    assert [int((batch["labels"] != -100).sum()) for batch in batches] == [1, 1, 1]


def test_mask_token_can_be_named(hf):
    bare = make_tokenizer(mask=None)
    arguments = {"context": 20, "batch_size": 1, "n_batches": 2}
    model = make_model("modernbert")
    with pytest.raises(ValueError, match="mask_token=None"):
        hf.text_batches(TEXT, bare, model, "masked-lm", **arguments)
    with pytest.raises(ValueError, match="mask_token='nonsense'"):
        hf.text_batches(TEXT, bare, model, "masked-lm", mask_token="nonsense", **arguments)
    batch = hf.text_batches(TEXT, bare, model, "masked-lm", mask_token="<mask>", **arguments)[0]
    assert torch.equal(batch["input_ids"] == 4, batch["labels"] != -100)


def test_unfit_inputs_are_errors_with_the_numbers(hf, tokenizer):
    model = make_model("camembert")
    assert hf.longest_context(model) == 39  # 40 rows, of which pad_token_id + 1 = 1 are never used
    assert hf.longest_context(make_model("llama")) == 40
    for arguments, message in (
        ({"context": 40}, r"context=40 is longer than the 39 positions"),
        ({"context": 20}, r"160 windows of 18 tokens need 2880 tokens, it has 2000"),
        ({"context": 3}, r"context=3 must be at least 4: 2 special"),
    ):
        with pytest.raises(ValueError, match=message):
            hf.text_batches(" ".join(TEXT.split()[:2000]), tokenizer, model, "masked-lm", **arguments)
    short = {"context": 20, "batch_size": 1, "n_batches": 1}
    for text, used, wanted, kind, message in (
        (TEXT, None, model, "masked-lm", "No tokenizer"),
        (TEXT, tokenizer, model, "seq2seq", "kind='seq2seq'"),
        ("x " * 50, tokenizer, model, "masked-lm", "special or unknown"),
        (TEXT, tokenizer, make_model("llama", vocab_size=100), "causal-lm", r"ids up to 1\d\d, beyond the 100 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            hf.text_batches(text, used, wanted, kind, **short)
    with torch.no_grad():  # the longest context allowed does run
        batch = hf.text_batches(TEXT, tokenizer, model, "masked-lm", context=39, batch_size=1, n_batches=1)[0]
        assert torch.isfinite(model(**batch).logits).all()


def test_a_revision_on_disk_is_a_sub_folder(hf, saved, tmp_path):
    with pytest.raises(ValueError, match=r"revision='step7'.*step10, step100"):
        hf.load_model(saved / "llama", "step7")
    with pytest.raises(ValueError, match="Sub-folders with a model: none"):
        hf.load_model(tmp_path, "main")
    with pytest.raises(FileNotFoundError, match="is no folder"):
        hf.load_model(tmp_path / "absent")
    model, tokenizer, _ = hf.load_model(str(saved / "llama" / "step10"))  # a checkpoint's own folder needs no revision
    assert model.config.model_type == "llama"
    assert len(tokenizer) == 128


def test_a_name_passes_its_revision_on(hf):
    assert hf._locate("EleutherAI/pythia-70m", "step1000") == ("EleutherAI/pythia-70m", {"revision": "step1000"})
    assert hf._locate("almanach/camembert-base", None) == ("almanach/camembert-base", {})


def test_no_tokenizer_is_none(hf, tmp_path):
    make_model("olmo").save_pretrained(tmp_path)
    assert hf.load_model(tmp_path)[1] is None


def test_a_named_model_may_lack_a_tokenizer(hf, monkeypatch):
    calls = []

    def load(name, **keywords):
        calls.append((name, keywords))
        if name == "a/none":
            raise OSError("no tokenizer files")
        return "tokenizer"

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    assert hf._load_tokenizer("a/none", "a/none", {}) is None
    assert hf._load_tokenizer("a/b", "a/b", {"revision": "step10"}) == "tokenizer"
    assert calls[1] == ("a/b", {"trust_remote_code": False, "revision": "step10"})


def test_an_architecture_without_eager_attention_is_loaded_as_it_is(hf):
    class Auto:
        @staticmethod
        def from_pretrained(source, attn_implementation=None, **options):
            if attn_implementation is not None:
                raise ValueError("no such attention")
            return source, options

    source, options = hf._load_weights(Auto, "folder", {"revision": "x"})
    assert source == "folder"
    assert options["revision"] == "x"
    assert options["dtype"] == torch.float32
    assert options["trust_remote_code"] is False


def test_weights_without_a_head_are_refused(hf, tmp_path):
    make_model("camembert").roberta.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no weights for .*lm_head"):
        hf.load_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "architectures", "kind"),
    [
        ("GPT2Config", ["GPT2LMHeadModel"], "causal-lm"),
        ("GPT2Config", None, "causal-lm"),
        ("CamembertConfig", None, "masked-lm"),
        ("CamembertConfig", ["CamembertForCausalLM"], "causal-lm"),
        ("BertConfig", ["BertForPreTraining"], "masked-lm"),
        ("ModernBertConfig", ["ModernBertModel"], "masked-lm"),
    ],
)
def test_kind_follows_the_saved_class_then_the_mapping(hf, config, architectures, kind):
    made = getattr(transformers, config)()
    made.architectures = architectures
    assert hf._kind(made) == kind


def test_a_bert_decoder_is_causal_and_other_models_are_refused(hf):
    assert hf._kind(transformers.BertConfig(is_decoder=True)) == "causal-lm"
    with pytest.raises(ValueError, match="'t5' is an encoder-decoder"):
        hf._kind(transformers.T5Config())
    with pytest.raises(ValueError, match="'vit' is neither"):
        hf._kind(transformers.ViTConfig())


def test_different_architectures_are_refused(hf):
    with pytest.raises(ValueError, match="differ in architecture"):
        hf.check_distinct(make_model("llama"), make_model("llama", hidden_size=64))


def test_text_is_read_plain_or_compressed(hf, tmp_path):
    text = "déjà vu\nœuvre\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    assert hf.read_text(tmp_path / "a.txt") == hf.read_text(str(tmp_path / "a.txt.gz")) == text


def test_without_transformers_the_extra_is_named(hf, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'isogeom\[hf\]'"):
        hf.load_model("gpt2")
