"""The tiny language model of the main example: data, model, training."""

import collections
import dataclasses
import importlib
import math
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the example trains a torch model")
pytest.importorskip("tqdm", reason="the example shows a progress bar")

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def lm():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("_tiny_lm")


@pytest.fixture(scope="module")
def tiny(lm):
    return lm.Config(vocabulary_size=64, context=16, d_model=16, n_heads=2, n_blocks=2, n_steps=20, batch_size=4)


@pytest.fixture(scope="module")
def trained(lm):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    checkpoints = lm.train(lm.QUICK, seed=0, progress=False)
    assert torch.equal(torch.get_rng_state(), state)  # training leaves the global generator alone
    torch.set_num_threads(threads)
    return checkpoints


def test_corpus_is_lower_cased_words_and_single_signs(lm):
    tokens = lm.load_corpus()
    assert len(tokens) > 90_000
    assert all(token == token.lower() and not any(c.isspace() for c in token) for token in tokens)
    assert all(token.isalpha() or token.isdecimal() or len(token) == 1 for token in tokens)
    # Splitting only drops white space, so the characters are those of the source in its order.
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics)).lower()
    assert "".join(tokens) == "".join(text.split())


def test_vocabulary_is_ranked_by_frequency_then_alphabet(lm):
    tokens = ["b", "a", "c", "c", "b", "a", "d", "<unk>", "<unk>", "<unk>"]
    assert lm.build_vocabulary(tokens, 10) == ["<unk>", "a", "b", "c", "d"]
    assert lm.build_vocabulary(tokens, 3) == ["<unk>", "a", "b"]
    with pytest.raises(ValueError, match="size=1"):
        lm.build_vocabulary(tokens, 1)


def test_vocabulary_of_the_corpus_against_a_slow_count(lm):
    tokens = lm.load_corpus()
    vocabulary = lm.build_vocabulary(tokens, 1024)
    counts = collections.Counter(tokens)
    frequency = [counts[token] for token in vocabulary[1:]]
    assert len(vocabulary) == len(set(vocabulary)) == 1024
    assert frequency == sorted(frequency, reverse=True)
    assert frequency[-1] >= max(count for token, count in counts.items() if token not in set(vocabulary))
    assert 0.02 < 1 - sum(frequency) / len(tokens) < 0.08  # share of unknown tokens


def test_encoding_is_undone_by_the_vocabulary(lm):
    vocabulary = ["<unk>", "a", "b"]
    ids = lm.encode(["b", "x", "a"], vocabulary)
    assert ids.dtype == torch.int64
    assert [vocabulary[i] for i in ids] == ["b", "<unk>", "a"]


def test_windows_are_in_order_and_spread_over_the_text(lm):
    ids = torch.arange(1000)
    windows = lm.spread_windows(ids, 10, 33)
    starts = windows[:, 0]
    assert torch.equal(windows, starts[:, None] + torch.arange(10))  # contiguous
    assert starts[0] == 0
    assert windows[-1, -1] == 999
    gaps = starts.diff()
    assert gaps.min() >= 10
    assert gaps.max() - gaps.min() <= 1
    assert torch.equal(lm.spread_windows(ids, 10, 100).flatten(), ids)  # exactly full
    assert torch.equal(lm.spread_windows(ids, 10, 1), ids[None, :10])


@pytest.mark.parametrize(("context", "n"), [(10, 101), (1, 5), (10, 0)])
def test_impossible_windows_are_an_error_with_numbers(lm, context, n):
    with pytest.raises(ValueError, match=f"{n}|context={context}"):
        lm.spread_windows(torch.arange(1000), context, n)


def test_evaluation_batches_keep_the_order_of_the_windows(lm):
    batches = lm.evaluation_batches(torch.arange(5000), 8, 3, 5)
    assert [batch["input_ids"].shape for batch in batches] == [(3, 8)] * 5
    assert torch.equal(torch.cat([b["input_ids"] for b in batches]), lm.spread_windows(torch.arange(5000), 8, 15))


def test_configurations_leave_enough_evaluation_batches(lm):
    for config, fewest in ((lm.DEFAULT, 40), (lm.QUICK, 16)):
        assert config.n_evaluation_batches >= fewest
        assert config.n_evaluation_batches - math.ceil(0.3 * config.n_evaluation_batches) >= 10
        assert config.d_model >= 64
        assert config.n_blocks == 4
        assert config.steps == {"init": 0, "early": config.n_steps // 10, "late": config.n_steps}


@pytest.mark.parametrize(("change", "message"), [({"n_steps": 9}, "n_steps=9"), ({"d_model": 30}, "d_model=30")])
def test_bad_configurations_are_named(lm, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(lm.QUICK, **change)


def test_a_later_token_leaves_earlier_logits_unchanged(lm, tiny):
    model = lm.initial_model(tiny, 0)
    ids = torch.arange(16)[None]
    changed = ids.clone()
    changed[0, 9] = 40
    with torch.no_grad():
        first, second = model(ids), model(changed)
    assert first.shape == (1, 16, 64)
    torch.testing.assert_close(first[:, :9], second[:, :9], rtol=0, atol=1e-6)
    assert (first[:, 9:] - second[:, 9:]).abs().amax(dim=-1).min() > 1e-4


def test_model_against_numpy(lm, tiny):
    """One forward pass and its losses, written out with loops over heads and positions."""
    model = lm.initial_model(tiny, 3)
    with torch.no_grad():  # move norms and biases off their initial values, so that forgetting one shows
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    p = {name: value.double().numpy() for name, value in model.state_dict().items()}
    ids = np.array([5, 1, 60, 7, 7, 0])

    def norm(x, name):
        z = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return z * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x, name):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    x = p["tokens.weight"][ids] + p["positions.weight"][:6]
    for b in ("blocks.0", "blocks.1"):
        q, k, v = np.split(linear(norm(x, f"{b}.norm1"), f"{b}.attention.qkv"), 3, axis=-1)
        mixed = np.zeros_like(x)
        for head in (slice(0, 8), slice(8, 16)):
            for t in range(6):
                weights = np.exp(k[: t + 1, head] @ q[t, head] / math.sqrt(8))
                mixed[t, head] = weights @ v[: t + 1, head] / weights.sum()
        x = x + linear(mixed, f"{b}.attention.out")
        h = linear(norm(x, f"{b}.norm2"), f"{b}.mlp.0")
        x = x + linear(h * 0.5 * (1 + np.vectorize(math.erf)(h / math.sqrt(2))), f"{b}.mlp.2")
    logits = norm(x, "norm") @ p["head.weight"].T
    expected = np.log(np.exp(logits[:-1]).sum(-1)) - logits[np.arange(5), ids[1:]]
    found = lm.token_losses(model, {"input_ids": torch.from_numpy(ids)[None]})
    np.testing.assert_allclose(found.detach().numpy(), expected[None], rtol=2e-5)


def test_initial_model_is_near_uniform_and_leaves_the_rng_alone(lm):
    state = torch.get_rng_state()
    model = lm.initial_model(lm.QUICK, 5)
    assert torch.equal(torch.get_rng_state(), state)
    assert float(model.tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.02)
    assert float(model.blocks[0].attention.out.weight.detach().std()) == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
    assert not model.blocks[0].attention.qkv.bias.any()
    ids = torch.arange(64)[None]
    assert float(lm.token_losses(model, {"input_ids": ids}).detach().mean()) == pytest.approx(math.log(1024), abs=0.1)


def test_training_twice_gives_the_same_bits(lm, tiny):
    first, again, other = (lm.train(tiny, seed=seed, progress=False) for seed in (1, 1, 2))
    assert first.losses == again.losses
    assert first.validation_losses == again.validation_losses
    for name, state in first.states.items():
        assert all(torch.equal(value, again.states[name][key]) for key, value in state.items())
    assert not torch.equal(first.states["init"]["tokens.weight"], other.states["init"]["tokens.weight"])
    assert first.losses != other.losses


def test_training_takes_snapshots_and_lowers_the_loss(lm, trained):
    assert list(trained.states) == list(trained.validation_losses) == ["init", "early", "late"]
    assert len(trained.losses) == lm.QUICK.n_steps
    start, early, late = trained.validation_losses.values()
    assert start == pytest.approx(math.log(1024), abs=0.1)
    counts = torch.bincount(trained.ids).double()
    shares = counts[counts > 0] / counts.sum()
    entropy = -float((shares * shares.log()).sum())
    assert start > early > late
    assert late < entropy < early  # the first tenth has not yet learnt the word frequencies, the end more than those
    initial = lm.initial_model(lm.QUICK, 0).state_dict()
    assert all(torch.equal(value, trained.states["init"][name]) for name, value in initial.items())


def test_checkpoint_models_and_batches_reproduce_the_recorded_losses(lm, trained):
    validation = lm.evaluation_batches(trained.ids[trained.ids.shape[0] * 9 // 10 :], lm.QUICK.context, 8, 8)
    for name, expected in trained.validation_losses.items():
        model = trained.model(name)
        assert not model.training
        with torch.no_grad():
            losses = torch.cat([lm.token_losses(model, batch) for batch in validation])
        assert float(losses.double().mean()) == pytest.approx(expected, rel=1e-6)
    batches = trained.batches()
    assert len(batches) == lm.QUICK.n_evaluation_batches
    assert batches[0]["input_ids"].shape == (lm.QUICK.evaluation_batch_size, lm.QUICK.context)
    with pytest.raises(ValueError, match="'middle'"):
        trained.model("middle")


def test_training_windows_are_random_places(lm, tiny):
    batches = list(lm._training_batches(torch.arange(900), tiny, 0))
    starts = torch.cat([batch["input_ids"][:, 0] for batch in batches])
    assert len(batches) == tiny.n_steps
    assert all(torch.equal(b["input_ids"], b["input_ids"][:, :1] + torch.arange(16)) for b in batches)
    assert 0 <= int(starts.min()) < 100 < 784 < int(starts.max()) <= 900 - 16
    assert starts.unique().numel() > 60


def test_training_never_sees_the_last_tenth(lm, tiny, monkeypatch):
    given = []
    draw = lm._training_batches
    monkeypatch.setattr(lm, "_training_batches", lambda ids, *rest: given.append(ids) or draw(ids, *rest))
    ids = lm.train(tiny, seed=0, progress=False).ids
    assert torch.equal(given[0], ids[: ids.shape[0] * 9 // 10])


def test_learning_rate_warms_up_and_decays(lm):
    factor = lm._learning_rate(lm.DEFAULT)
    rates = [factor(step) for step in range(lm.DEFAULT.n_steps + 1)]
    assert rates.index(max(rates)) in (29, 30)  # 5 % of 600
    assert max(rates) == 1
    assert rates[0] == pytest.approx(1 / 30)
    assert rates[-1] == pytest.approx(0.1)


def test_progress_bar_shows_the_loss(lm, tiny, capsys):
    lm.train(tiny, seed=0)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "20/20" in shown.err
    assert "loss=" in shown.err


def test_probes_of_the_model_are_seen_by_hooks(lm, tiny):
    from isogeom.gradients._probes import probes, weight_sites

    model = lm.initial_model(dataclasses.replace(tiny, n_blocks=4), 0)
    found = probes(model)
    assert found == {
        "E0_out": "tokens",
        "T1_in": "blocks.0:in",
        "T1_out": "blocks.0",
        "Tm": "blocks.2:in",
        "Tl": "blocks.3:in",
    }
    shapes, order = [], []
    for site in found.values():
        name, _, suffix = site.partition(":")
        model.get_submodule(name).register_forward_hook(
            lambda _m, args, out, suffix=suffix: shapes.append(args[0].shape if suffix else out.shape)
        )
    for name, module in model.blocks[2].named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _m, _a, name=name: order.append(name))
    model(torch.arange(12)[None])
    assert shapes == [(1, 12, 16)] * 5
    assert order[0] == "attention.qkv"
    assert weight_sites(model)["Tm"] == "blocks.2.attention.qkv:weight"
