"""Dependence of rows on the batch: planted dependences are found, and the harmless ones are called harmless."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from isogeom.gradients import check_batch_invariance  # noqa: E402

torch.set_num_threads(1)


class Model(nn.Module):
    """Causal mean over the tokens, with absolute positions, that reads the mask only if asked to."""

    def __init__(self, masked=True, positions=True):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(20, 6), nn.Embedding(12, 6)
        self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, 20)
        self.masked, self.absolute = masked, positions

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        x = self.tokens(input_ids)
        if self.absolute:
            places = torch.arange(input_ids.shape[1]).expand_as(input_ids) if position_ids is None else position_ids
            x = x + self.positions(places)
        weight = (
            attention_mask[..., None] if self.masked and attention_mask is not None else torch.ones_like(x[..., :1])
        )
        return self.head(self.mix((x * weight).cumsum(1) / weight.cumsum(1).clamp(min=1)).tanh())


def batch(n=4, seq=7, padding=None):
    ids = torch.randint(1, 20, (n, seq), generator=torch.Generator().manual_seed(1))
    if padding is None:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    for row in range(n):
        mask[row, slice(seq - row, seq) if padding == "right" else slice(0, row)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def test_a_model_without_interaction_differs_by_rounding_only():
    result = check_batch_invariance(Model(), batch(), "mix")
    assert (result.site, result.n_samples, result.n_rows) == ("mix", 4, 4 * 6)
    assert list(result.activations) == list(result.gradients) == ["repeat", "order", "alone"]
    assert result.activations["repeat"] == result.gradients["repeat"] == 0
    assert result.largest < 1e-5
    assert result.gradient_factor == pytest.approx(1, abs=1e-6)
    assert "repeat    activations         0  gradients         0" in str(result)
    table = pytest.importorskip("pandas", reason="pandas is not installed") and result.to_frame()
    assert table.run.tolist() == ["repeat", "order", "alone"]


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_that_is_masked_is_harmless(padding):
    result = check_batch_invariance(Model(positions=False), batch(padding=padding), "mix")
    assert list(result.gradients) == ["repeat", "order", "alone", "unpadded"]
    assert result.largest < 1e-5


def test_padding_that_reaches_real_tokens_is_found():
    result = check_batch_invariance(Model(masked=False, positions=False), batch(padding="left"), "mix")
    assert result.activations["alone"] < 1e-5  # the padding stays with the sample
    assert result.activations["unpadded"] > 0.05
    assert result.gradients["unpadded"] > 0.05


def test_left_padding_without_positions_is_found_and_cured():
    data = batch(padding="left")
    assert check_batch_invariance(Model(), data, "mix").activations["unpadded"] > 0.05
    data["position_ids"] = (data["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert check_batch_invariance(Model(), data, "mix").largest < 1e-5


def test_a_mean_loss_shows_in_the_factor():
    def mean(model, batch):
        logits = model(**batch)
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    result = check_batch_invariance(Model(), batch(n=5), "mix", loss=mean)
    assert result.gradient_factor == pytest.approx(1 / 5, rel=1e-5)
    assert result.activations["alone"] < 1e-5
    assert result.gradients["alone"] == pytest.approx(4 * np.sqrt(_peak()), rel=0.5)
    assert result.gradients["order"] < 1e-5


def _peak():
    """Squared norm of the largest gradient row over the mean squared norm, from autograd."""
    model, ids = Model().eval(), batch(n=5)["input_ids"]
    hidden = []
    model.mix.register_forward_hook(lambda _m, _a, out: hidden.append(out))
    loss = cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    squares = torch.autograd.grad(loss, hidden[0])[0][:, :-1].square().sum(-1)
    return float(squares.max() / squares.mean())


def test_samples_that_interact_are_found_and_the_worst_is_named():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return self.inner(x - x.mean(0))

    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    x[4] = 100
    result = check_batch_invariance(Centred(), x, "inner", loss=lambda model, x: model(x).square().sum())
    assert result.worst_sample == 4
    assert result.activations["alone"] > 0.5
    assert result.activations["order"] < 1e-5


def test_active_dropout_depends_on_the_place_in_the_batch():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return nn.functional.dropout(self.inner(x), 0.5, training=True)

    x = torch.ones(6, 3) * torch.arange(1, 7)[:, None]
    with pytest.warns(UserWarning, match="dropout is active"):
        result = check_batch_invariance(Noisy(), x, ":out", loss=lambda model, x: model(x).sum())
    assert result.activations["repeat"] == 0  # the seed is the same
    assert result.activations["order"] > 0.1


def test_tuples_with_what_is_no_tensor_are_cut_by_sample():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x, scale):
            return self.inner(x) * scale

    data = (torch.randn(4, 3), torch.randint(0, 2, (4,)), {"scale": torch.tensor(2.0)}, "name")

    def loss(model, parts):
        x, y, settings, name = parts
        assert name == "name"
        return cross_entropy(model(x, settings["scale"]), y, reduction="none")

    assert check_batch_invariance(Scaled(), data, "inner", loss=loss).largest < 1e-5


@pytest.mark.parametrize("padding", [None, "right"])
def test_the_batchs_own_numbers_of_samples_change_nothing(padding):
    model, data = Model(positions=False), batch(padding=padding)
    expected = check_batch_invariance(model, data, "mix")
    got = check_batch_invariance(model, {**data, "sample_id": torch.tensor([70, 3, -5, 12])}, "mix")
    assert got.to_dict() == expected.to_dict()
    assert got.largest < 1e-5


def test_the_worst_sample_is_a_place_whatever_its_number():
    data = batch(padding="left")
    ids = torch.tensor([9, 8, 7, 6])
    plain = check_batch_invariance(Model(masked=False), data, "mix", loss=first_logits)
    own = check_batch_invariance(Model(masked=False), {**data, "sample_id": ids}, "mix", loss=first_logits)
    assert own.worst_sample == plain.worst_sample == 3


def first_logits(model, batch):
    """A mean over the batch, weighted so that the last sample loses the most by it."""
    scale = batch["input_ids"].new_ones(len(batch["input_ids"]), dtype=torch.float32)
    logits = model(batch["input_ids"], batch["attention_mask"])
    return (logits.square().mean((1, 2)) * (scale + 5 * (batch["attention_mask"].sum(1) == 4))).mean()


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("empty", [0, 2])
def test_a_sample_of_padding_only_is_left_out(empty, own):
    data = batch(padding="right")
    data["attention_mask"][empty] = 0
    if own:
        data["sample_id"] = torch.tensor([5, 4, 3, 2])
    result = check_batch_invariance(Strict(positions=False), data, "mix")
    assert list(result.gradients) == ["repeat", "order", "alone", "unpadded"]
    assert result.largest < 1e-5
    assert result.n_rows == int((data["attention_mask"].sum(1) - 1).clamp(min=0).sum())


class Strict(Model):
    """Reads its first token, as transformers do where a mask has to be made, and so fails without any."""

    def forward(self, input_ids, attention_mask=None):
        input_ids.argmax(1)
        return super().forward(input_ids, attention_mask)


def test_repr_is_the_text():
    result = check_batch_invariance(Model(), batch(), "mix")
    assert repr(result) == str(result)
    assert repr(result).startswith("BatchInvarianceResult of 'mix': 24 rows of 4 samples\n  repeat ")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"batch": 3}, TypeError, "batch must be a mapping, tuple, list or tensor, got int"),
        ({"batch": {"name": 3}}, ValueError, "batch holds no tensor"),
        ({"batch": batch(n=1)}, ValueError, "batch has 1 sample: with fewer than 2"),
        ({"site": "*o*s"}, ValueError, r"site='\*o\*s' names 2 sites, tokens, positions: check one"),
        (
            {"batch": {**batch(), "sample_id": torch.tensor([1, 2, 1, 3])}},
            ValueError,
            "sample_id of the batch repeats 1",
        ),
        ({"site": ["mix"]}, TypeError, r"site must be a string, the name of one site, got \['mix'\]"),
        ({"site": "mixx"}, ValueError, "matches no module"),
        ({"mask": lambda b: b["input_ids"] != b["input_ids"].max()}, ValueError, "depends on the rest of the"),
    ],
)
def test_wrong_arguments(change, error, match):
    arguments = {"model": Model(), "batch": batch(), "site": "mix", **change}
    with pytest.raises(error, match=match):
        check_batch_invariance(**arguments)
