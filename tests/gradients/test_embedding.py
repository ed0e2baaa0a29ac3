"""Updates of an embedding between checkpoints, against what was planted and against real optimisers."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from isogeom.gradients import embedding_update  # noqa: E402

NAME = "tokens.weight"


def state(n=10, d=4, seed=0, dtype=torch.float32):
    return {NAME: torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).to(dtype), "bias": torch.ones(3)}


def moved(early, rows, seed=1):
    late = {name: value.clone() for name, value in early.items()}
    noise = torch.randn(len(rows), early[NAME].shape[1], generator=torch.Generator().manual_seed(seed))
    late[NAME][rows] += noise.to(late[NAME].dtype)
    return late


def test_rows_norms_and_masks_are_those_planted():
    early = state()
    late = moved(early, [1, 4, 7])
    result = embedding_update(early, late, NAME)
    expected = (late[NAME].double() - early[NAME].double()).numpy()
    np.testing.assert_allclose(result.update, expected, rtol=1e-6)
    assert result.update.dtype == np.float32
    np.testing.assert_allclose(result.norms, np.linalg.norm(expected, axis=1), rtol=1e-12)
    np.testing.assert_allclose(result.initial_norms, early[NAME].double().norm(dim=1), rtol=1e-12)
    np.testing.assert_array_equal(result.token_ids, np.arange(10))
    assert np.flatnonzero(~result.never_seen).tolist() == [1, 4, 7]
    assert (result.n_tokens, result.n_features, result.n_padding, result.n_never_seen) == (10, 4, 0, 7)
    assert result.tied is None
    assert result.decay == 1
    assert repr(result) == str(result)
    assert repr(result).startswith("EmbeddingUpdateResult\n  name ")
    table = pytest.importorskip("pandas", reason="pandas is not installed") and result.to_frame()
    assert list(table.columns) == ["token_id", "norm", "initial_norm", "never_seen"]
    assert len(table) == 10


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(30, 8), nn.Linear(8, 30, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(self.tokens(ids).tanh())


def trained(tied, optimiser, steps=300, **settings):
    """Train on tokens 0 to 19 only; return the state before and after."""
    model = Model(tied)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = optimiser(model.parameters(), **settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, 20, (16,), generator=generator)
        nn.functional.cross_entropy(model(ids), ids.roll(1)).backward()
        step.step()
        step.zero_grad()
    return before, model


@pytest.mark.parametrize(
    ("optimiser", "settings", "factor"),
    [
        (torch.optim.SGD, {"lr": 0.1}, 1),
        (torch.optim.Adam, {"lr": 1e-3}, 1),
        (torch.optim.SGD, {"lr": 1e-4}, 1),  # rows move by a millionth, and are seen all the same
        (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}, (1 - 1e-4) ** 300),
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.3}, (1 - 3e-3) ** 300),
    ],
)
def test_tokens_without_an_example_are_found_under_real_optimisers(optimiser, settings, factor):
    before, model = trained(False, optimiser, **settings)
    result = embedding_update(before, model, NAME)
    assert np.flatnonzero(result.never_seen).tolist() == list(range(20, 30))
    assert result.decay == pytest.approx(factor, rel=1e-5)
    assert result.tied is False


def test_decay_is_found_in_bfloat16():
    before, model = trained(False, torch.optim.AdamW, lr=1e-2, weight_decay=0.3)
    half = [{name: value.to(torch.bfloat16) for name, value in s.items()} for s in (before, model.state_dict())]
    assert np.flatnonzero(embedding_update(*half, NAME).never_seen).tolist() == list(range(20, 30))


def test_a_tied_matrix_is_reported_and_needs_counts():
    before, model = trained(True, torch.optim.Adam, lr=1e-3)
    result = embedding_update(before, model, NAME)
    assert result.tied is True
    assert result.n_never_seen == 0  # the output softmax moves every row
    counts = np.r_[np.ones(20, int), np.zeros(10, int)]
    assert np.flatnonzero(embedding_update(before, model, NAME, counts=counts).never_seen).tolist() == [*range(20, 30)]


def test_padded_rows_and_other_vocabularies():
    early = state(10)
    late = {NAME: torch.cat([moved(early, [2])[NAME], torch.ones(6, 4)])}
    with pytest.raises(ValueError, match=r"10 rows in state_a and 16 in state_b: one is padded.*n_tokens=len.*most 10"):
        embedding_update(early, late, NAME)
    result = embedding_update(early, late, NAME, n_tokens=9)
    assert (result.n_tokens, result.n_padding) == (9, 7)
    assert np.flatnonzero(result.norms).tolist() == [2]
    for n_tokens in (0, 11, -1):
        with pytest.raises(ValueError, match=rf"n_tokens={n_tokens} must be between 1 and 10"):
            embedding_update(early, late, NAME, n_tokens=n_tokens)
    with pytest.raises(TypeError, match=r"n_tokens must be an integer or None, got 2\.5"):
        embedding_update(early, late, NAME, n_tokens=2.5)


def test_many_blocks_give_the_rows_of_one(monkeypatch):
    early = state(1000)
    late = moved(early, list(range(0, 1000, 3)))
    whole = embedding_update(early, late, NAME)
    monkeypatch.setattr("isogeom.gradients._embedding._BLOCK", 7)
    parts = embedding_update(early, late, NAME)
    np.testing.assert_array_equal(parts.update, whole.update)
    np.testing.assert_array_equal(parts.never_seen, whole.never_seen)


# ---------------------------------------------------------------------- files


@pytest.fixture
def save():
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors (the hf extra) is not installed")
    return safetensors.save_file


def test_files_and_folders_give_the_same_rows(tmp_path, save):
    early = state(50)
    late = moved(early, [3, 30])
    expected = embedding_update(early, late, NAME)
    (tmp_path / "b").mkdir()
    save(early, tmp_path / "a.safetensors")
    save(late, tmp_path / "b" / "model.safetensors")
    (tmp_path / "b" / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    result = embedding_update(str(tmp_path / "a.safetensors"), tmp_path / "b", NAME)
    np.testing.assert_array_equal(result.update, expected.update)
    np.testing.assert_array_equal(result.never_seen, expected.never_seen)
    assert result.tied is True


def test_sharded_folders_are_read_and_only_the_rows_asked_for(tmp_path, save, monkeypatch):
    early = state(50)
    save({NAME: early[NAME]}, tmp_path / "model-1.safetensors")
    save({"bias": early["bias"]}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {NAME: "model-1.safetensors", "bias": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    safetensors = pytest.importorskip("safetensors")
    read = []

    class Slice:
        def __init__(self, inner):
            self.inner = inner

        def get_shape(self):
            return self.inner.get_shape()

        def __getitem__(self, rows):
            read.append((rows.start, rows.stop))
            return self.inner[rows]

    class Reader:
        def __init__(self, *args, **kwargs):
            self.opened = original(*args, **kwargs)

        def __enter__(self):
            self.inner = self.opened.__enter__()
            return self

        def __exit__(self, *error):
            return self.opened.__exit__(*error)

        def keys(self):
            return self.inner.keys()

        def get_slice(self, name):
            return Slice(self.inner.get_slice(name))

    original = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", Reader)
    monkeypatch.setattr("isogeom.gradients._embedding._BLOCK", 16)
    result = embedding_update(tmp_path, moved(early, [5]), NAME, n_tokens=40)
    assert np.flatnonzero(result.norms).tolist() == [5]
    assert read == [(None, 1), (0, 16), (16, 32), (32, 40)]


def test_paths_that_cannot_be_read(tmp_path, save):
    with pytest.raises(FileNotFoundError, match=r"state_a=.*does not exist"):
        embedding_update(tmp_path / "none.safetensors", state(), NAME)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no \.safetensors file; load it yourself"):
        embedding_update(state(), tmp_path / "model.bin", NAME)
    with pytest.raises(ValueError, match=r"holds 0 \.safetensors files"):
        embedding_update(tmp_path, state(), NAME)
    save(state(), tmp_path / "one.safetensors")
    save(state(), tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match=r"holds 2 \.safetensors files and no index: name one"):
        embedding_update(tmp_path, state(), NAME)
    (tmp_path / "two.safetensors").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"state_b: .*two\.safetensors is damaged .*fetch the checkpoint again"):
        embedding_update(state(), tmp_path / "two.safetensors", NAME)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"tokens.weight": "three.safetensors"}}', encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"state_a=.* is incomplete: .* names three\.safetensors, which is not"):
        embedding_update(tmp_path, state(), NAME)
    for name in (index.name, "config.json"):
        (tmp_path / name).write_text('{"weight_map', encoding="utf-8")
        with pytest.raises(ValueError, match=rf"state_a: .*{name} is damaged"):
            embedding_update(tmp_path if name == index.name else tmp_path / "one.safetensors", state(), NAME)


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"state_a": 3}, TypeError, "state_a must be a module, a mapping of names to tensors, or the path.*got int"),
        (
            {"state_a": {"model": state()}},
            TypeError,
            r"state_a is a mapping without a tensor, it holds 'model' \(dict\)",
        ),
        ({"state_b": {NAME: np.ones((10, 4))}}, TypeError, "state_b is .* 'tokens.weight' \\(ndarray\\): .*as_tensor"),
        ({"name": 3}, TypeError, "name must be a string, got 3"),
        ({"name": "token.weight"}, ValueError, r"'token.weight' is not in state_a; matrices there: 'tokens.weight'"),
        ({"name": "bias"}, ValueError, r"'bias' has shape \(3,\) in state_a; it must be a matrix"),
        ({"state_b": {NAME: torch.ones(10, 5)}}, ValueError, "width 4 in state_a and 5 in state_b"),
        ({"state_b": {NAME: torch.full((10, 4), torch.nan)}}, ValueError, "not finite in rows 0 to 9"),
        ({"state_b": {NAME: torch.ones(10, 4, dtype=torch.int8)}}, TypeError, "int8 in state_b; dequantise"),
        ({"counts": np.ones(9)}, ValueError, r"counts must be numbers of shape \(10,\), got shape \(9,\)"),
        ({"counts": -np.ones(10)}, ValueError, "counts must be nonnegative"),
        ({"counts": np.full(10, np.nan)}, ValueError, "counts must be nonnegative"),
    ],
)
def test_wrong_arguments(change, error, match):
    arguments = {"state_a": state(), "state_b": moved(state(), [1]), "name": NAME, **change}
    with pytest.raises(error, match=match):
        embedding_update(**arguments)


def test_one_state_twice_warns():
    with pytest.warns(UserWarning, match="no row of 'tokens.weight' moved"):
        result = embedding_update(state(), state(), NAME)
    assert result.never_seen.all()
