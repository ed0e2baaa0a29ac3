"""Which rows are kept: against plain loops over samples and positions."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from isogeom.gradients import harvest  # noqa: E402
from isogeom.gradients._sampling import BatchRows, RowRule, batch_seed, row_keys  # noqa: E402

torch.set_num_threads(1)
VOCAB = 12


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.head = nn.Embedding(VOCAB, 5), nn.Linear(5, 5), nn.Linear(5, VOCAB)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.block(self.embed(input_ids)).tanh())


def ids(*shape, seed=1):
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def padded(sequences, side):
    width = max(map(len, sequences))
    tokens, mask = torch.zeros(len(sequences), width, dtype=torch.long), torch.zeros(len(sequences), width)
    for i, sequence in enumerate(sequences):
        where = slice(0, len(sequence)) if side == "right" else slice(width - len(sequence), width)
        tokens[i, where], mask[i, where] = sequence, 1
    return {"input_ids": tokens, "attention_mask": mask}


SEQUENCES = [ids(n, seed=n) for n in (4, 7, 2, 5)]


def where(h):
    return list(zip(h.meta.sample_id.tolist(), h.meta.position.tolist(), strict=True))


def token_mask_loss(model, batch):
    return model(batch["input_ids"]).square()[batch["attention_mask"].bool()].sum()


# ---------------------------------------------------------------------- kinds of rows


@pytest.mark.parametrize("side", ["left", "right"])
def test_mean_and_last_are_those_of_the_kept_rows(side):
    batch = padded(SEQUENCES, side)
    tokens = harvest(Model(), [batch], ["block"], exclude_token_ids=[3])
    mean = harvest(Model(), [batch], ["block"], exclude_token_ids=[3], rows="mean")
    last = harvest(Model(), [batch], ["block"], exclude_token_ids=[3], rows="last")
    samples = sorted(set(tokens.meta.sample_id.tolist()))
    assert len(samples) >= 3
    assert mean.meta.sample_id.tolist() == last.meta.sample_id.tolist() == samples
    assert set(mean.meta.position) == set(mean.meta.token_id) == {-1}
    for row, sample in enumerate(samples):
        here = np.flatnonzero(tokens.meta.sample_id == sample)
        assert last.meta[row] == tokens.meta[here[-1]]
        for kind in ("activations", "gradients"):
            rows = getattr(tokens["block"], kind)[here]
            np.testing.assert_allclose(getattr(mean["block"], kind)[row], rows.mean(0), rtol=1e-5, atol=1e-7)
            np.testing.assert_array_equal(getattr(last["block"], kind)[row], rows[-1])
            assert getattr(mean["block"], kind).dtype == np.float32


@pytest.mark.parametrize("loss", ["causal-lm", token_mask_loss])
def test_all_keeps_padding_and_last_positions(loss):
    h = harvest(Model(), [padded(SEQUENCES, "right")], ["block"], rows="all", loss=loss)
    assert h.n_rows == 4 * 7
    weird = {"input_ids": ids(2, 3), "attention_mask": torch.ones(2, 3) * 0.5}
    h = harvest(Model(), [weird], ["block"], rows="all", loss=lambda m, b: m(b["input_ids"]).square().sum())
    assert h.n_rows == 6


@pytest.mark.parametrize("rows", ["tokens", "mean", "last", "all"])
def test_models_without_sequences(rows):
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh())
    h = harvest(model, [x], ["0"], loss=lambda m, x: m(x).sum(), rows=rows)
    expected = harvest(model, [x], ["0"], loss=lambda m, x: m(x).sum())
    np.testing.assert_array_equal(h["0"].gradients, expected["0"].gradients)
    assert h.meta.sample_id.tolist() == list(range(6))


# ---------------------------------------------------------------------- masks


def test_label_mask_of_the_causal_preset_looks_at_the_next_token():
    batch = {"input_ids": ids(2, 5), "labels": ids(2, 5)}
    batch["labels"][0, :3] = batch["labels"][1, 4] = -100
    h = harvest(Model(), [batch], ["block"], label_mask=True)
    assert where(h) == [(0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]
    assert (np.abs(h["block"].gradients).max(1) > 0).all()
    dropped = harvest(Model(), [batch], ["block"])
    outside = [pair not in where(h) for pair in where(dropped)]
    assert np.abs(dropped["block"].gradients[outside]).max() == 0  # here no later token sees an earlier one


def test_label_mask_of_the_masked_preset_and_of_a_callable():
    batch = {"input_ids": ids(2, 4), "labels": torch.full((2, 4), -100)}
    batch["labels"][0, 2] = batch["labels"][1, 0] = 5
    for loss in ("masked-lm", lambda m, b: m(b["input_ids"]).square().sum()):
        assert where(harvest(Model(), [batch], ["block"], loss=loss, label_mask=True)) == [(0, 2), (1, 0)]


def test_label_mask_without_labels():
    h = harvest(Model(), [{"input_ids": ids(2, 4)}], ["block"], label_mask=True)
    assert h.n_rows == 6  # the causal preset predicts input_ids
    with pytest.raises(ValueError, match=r"label_mask=True needs a tensor 'labels'.*batch 0 has none"):
        harvest(Model(), [{"input_ids": ids(2, 4)}], ["block"], loss=lambda m, b: m(**b).sum(), label_mask=True)
    with pytest.raises(ValueError, match=r"needs one label per row.*shape \(2, 4\)"):
        harvest(
            Model(),
            [{"input_ids": ids(2, 4), "labels": ids(2, 3)}],
            ["block"],
            loss=lambda m, b: m(b["input_ids"]).sum(),
            label_mask=True,
        )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "positions", [slice(1, None), slice(-2, None), slice(None, None, 2), [0, 3], [-1, 100, 1], (2,)]
)
def test_positions_count_from_the_first_real_token(side, positions):
    h = harvest(Model(), [padded(SEQUENCES, side)], ["block"], loss=token_mask_loss, positions=positions)
    expected = []
    for i, sequence in enumerate(SEQUENCES):
        index = list(range(len(sequence)))
        if isinstance(positions, slice):
            kept = index[positions]
        else:
            kept = sorted({index[p] for p in positions if -len(index) <= p < len(index)})
        expected += [(i, p, int(sequence[p])) for p in kept]
    assert (
        list(zip(*(h.meta[name].tolist() for name in ("sample_id", "position", "token_id")), strict=True)) == expected
    )


def test_positions_may_be_numpy_integers(tmp_path):
    batch = {"input_ids": ids(3, 5)}
    expected = harvest(Model(), [batch], ["embed"], positions=slice(1, None))
    for positions in (slice(np.int64(1), None), torch.tensor([1, 2, 3, 4])):
        found = harvest(Model(), [batch], ["embed"], positions=positions, out=tmp_path / type(positions).__name__)
        np.testing.assert_array_equal(found.meta, expected.meta)


def test_positions_need_a_sequence():
    with pytest.raises(ValueError, match=r"positions needs rows of shape \(batch, seq\).*shape \(6,\)"):
        harvest(nn.Linear(5, 2), [torch.ones(6, 5)], [":out"], loss=lambda m, x: m(x).sum(), positions=[0])


# ---------------------------------------------------------------------- samples


@pytest.mark.parametrize("rows", ["tokens", "mean", "last"])
@pytest.mark.parametrize("option", [{"sample_rate": 0.4}, {"max_rows": 9}], ids=str)
def test_a_sample_is_the_same_for_any_padding_batch_size_and_site(option, rows):
    sequences = [ids(n % 5 + 2, seed=n) for n in range(30)]
    reference = harvest(Model(), [{"input_ids": s[None]} for s in sequences], ["embed"], rows=rows, **option)
    assert 4 < reference.n_rows < 100
    for side, size in (("left", 30), ("right", 30), ("left", 7)):
        batches = [padded(sequences[i : i + size], side) for i in range(0, 30, size)]
        h = harvest(Model(), batches, ["block", "block:in"], rows=rows, **option)
        full = harvest(Model(), batches, ["block"], rows=rows)
        for name in ("sample_id", "position", "token_id"):
            np.testing.assert_array_equal(h.meta[name], reference.meta[name])
        index = [where(full).index(pair) for pair in where(h)]
        for kind in ("activations", "gradients"):
            np.testing.assert_array_equal(getattr(h["block"], kind), getattr(full["block"], kind)[index])


def test_sample_rate_is_a_rate_and_nests():
    batch = {"input_ids": ids(400, 6)}
    few, many = (harvest(Model(), [batch], ["embed"], sample_rate=rate) for rate in (0.1, 0.5))
    assert set(where(few)) < set(where(many))
    # Binomial over 2000 rows; the bounds are 5 standard deviations.
    assert abs(few.n_rows - 200) < 5 * np.sqrt(2000 * 0.1 * 0.9)
    assert abs(many.n_rows - 1000) < 5 * np.sqrt(2000 * 0.25)
    assert harvest(Model(), [batch], ["embed"], sample_rate=1).n_rows == 2000
    both = harvest(Model(), [batch], ["embed"], sample_rate=0.5, max_rows=150)
    assert set(where(both)) < set(where(few))  # the smallest keys are below every larger rate


@pytest.mark.parametrize(
    "option", [{"sample_rate": 0.4}, {"max_rows": 5}, {"sample_rate": 0.6, "max_rows": 3}], ids=str
)
@pytest.mark.parametrize("rows", ["tokens", "mean", "last"])
def test_a_sample_is_the_same_at_every_layer_and_checkpoint(rows, option, tmp_path):
    model, batches = Model(), [padded(SEQUENCES, "right"), padded([ids(n, seed=n) for n in (6, 3, 8)], "left")]
    reference, found = harvest(model, batches, ["embed", "block", "head"], rows=rows, **option), []
    found += [harvest(model, batches, [site], rows=rows, **option) for site in ("embed", "block:in", "block", "head")]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0)))
    later = harvest(model, batches, ["block"], rows=rows, out=tmp_path / "later", batches_per_shard=1, **option)
    assert 0 < reference.n_rows < harvest(model, batches, ["block"], rows=rows).n_rows
    for h in (*found, later):
        np.testing.assert_array_equal(h.meta, reference.meta)
    assert not np.array_equal(later["block"].activations[:], reference["block"].activations)


def test_own_sample_ids_rule_the_sample():
    tokens = ids(20, 4)
    whole = harvest(Model(), [{"input_ids": tokens}], ["embed"], max_rows=11)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(4))
    batch = {"input_ids": tokens[order], "sample_id": order}
    mixed = harvest(Model(), [batch], ["embed"], max_rows=11)
    assert set(where(mixed)) == set(where(whole))
    assert mixed.meta.sample_id.tolist() != whole.meta.sample_id.tolist()


@pytest.mark.parametrize(
    ("sample_id", "match"),
    [
        (torch.zeros(3, dtype=torch.long), r"integer tensor of shape \(2,\), got \(3,\)"),
        (torch.zeros(2), r"got \(2,\) torch.float32"),
        ([0, 1], "got list"),
    ],
)
def test_own_sample_ids_are_checked(sample_id, match):
    with pytest.raises(ValueError, match=match):
        harvest(Model(), [{"input_ids": ids(2, 4), "sample_id": sample_id}], ["embed"])


def test_own_sample_ids_come_with_every_batch_or_none():
    batches = [{"input_ids": ids(2, 4)}, {"input_ids": ids(2, 4), "sample_id": torch.arange(2)}]
    with pytest.raises(ValueError, match="batch 1: either every batch brings its own sample_id, or none does"):
        harvest(Model(), batches, ["embed"])


def test_keys_are_fixed_for_ever():
    # Stores on disk depend on them. The numbers are SplitMix64's, worked out with Python's integers.
    def mix(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    for seed, sample, position in [(0, 0, 0), (7, 123, 45), (2**64 - 1, 9, -1)]:
        expected = mix(mix(mix(seed) ^ sample) ^ (position % 2**64))
        assert int(row_keys(seed, np.array([sample]), np.array([position]))[0]) == expected
    assert len({batch_seed(seed, i) for seed in range(20) for i in range(50)}) == 1000


def test_a_row_rule_without_options_keeps_everything():
    selection = BatchRows(2, 10).select((2, 3), "site")
    assert selection.keep.tolist() == list(range(6))
    assert selection.chosen is None
    assert selection.meta["sample_id"].tolist() == [10, 10, 10, 11, 11, 11]
    empty = BatchRows(0, 0, RowRule(rows="mean"), row_mask=np.zeros((2, 3), dtype=bool)).select((2, 3), "site")
    assert len(empty.keep) == len(empty.meta) == len(empty.keys) == 0


@pytest.mark.parametrize(
    ("option", "error", "match"),
    [
        ({"rows": "sum"}, ValueError, "rows='sum' must be one of 'tokens', 'mean', 'last', 'all'"),
        ({"label_mask": 1}, TypeError, "label_mask must be True or False, got 1"),
        ({"positions": 3}, TypeError, "positions must be None, a slice or a list of integers, got 3"),
        ({"positions": [0.5]}, TypeError, "positions must be an integer, got 0.5"),
        ({"positions": []}, ValueError, "positions is empty"),
        ({"sample_rate": 0}, ValueError, "sample_rate=0 must be above 0"),
        ({"sample_rate": 1.5}, ValueError, "sample_rate=1.5 must be at most 1"),
        ({"sample_rate": "half"}, TypeError, "sample_rate='half' must be a real number"),
        ({"dtype": "float64"}, ValueError, "dtype='float64' must be one of 'float32', 'float16', 'bfloat16'"),
        ({"reduce": "mean"}, ValueError, "reduce='mean' must be one of None, 'moments'"),
        ({"reduce": "moments", "dtype": "float16"}, ValueError, "dtype='float16' is for rows that are stored"),
        ({"positions": slice(1, 3, 0)}, ValueError, r"positions=slice\(1, 3, 0\) has step 0"),
        (
            {"positions": slice(2.0, 3)},
            TypeError,
            r"start of positions=slice\(2.0, 3, None\) must be an integer, got 2",
        ),
        ({"positions": torch.tensor(3)}, TypeError, "positions must be None, a slice or a list of integers"),
        ({"exclude_token_ids": torch.tensor(3)}, TypeError, r"must be a list of token ids, got tensor\(3\)"),
        ({"exclude_token_ids": np.array(3)}, TypeError, r"must be a list of token ids, got array\(3\)"),
        ({"out": ""}, ValueError, "out='' is empty: name a folder"),
        ({"out": b"x"}, TypeError, "out must be None or the path of a folder"),
        ({"out": 3}, TypeError, "out must be None or the path of a folder, got 3"),
        ({"batches_per_shard": 0}, ValueError, "batches_per_shard must be between 1"),
    ],
)
def test_wrong_options(option, error, match):
    with pytest.raises(error, match=match):
        harvest(Model(), [{"input_ids": ids(2, 4)}], ["embed"], **option)


def test_float16_rows_in_memory():
    batch = {"input_ids": ids(3, 5)}
    full = harvest(Model(), [batch], ["block"])["block"]
    half = harvest(Model(), [batch], ["block"], dtype="float16")["block"]
    assert half.activations.dtype == half.gradients.dtype == np.float16
    np.testing.assert_array_equal(half.gradients, full.gradients.astype(np.float16))
    with pytest.raises(ValueError, match=r"dtype='float16' cannot hold .* of the gradients of site 'block'.*'float32'"):
        harvest(Model(), [batch], ["block"], dtype="float16", loss=lambda m, b: 1e7 * m(**b).square().sum())
