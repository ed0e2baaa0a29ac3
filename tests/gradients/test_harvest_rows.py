"""Which rows harvest keeps: masks, tokens and samples, the same for activations and gradients."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gradients.small_models import InPlace, TinyLM, flat_loss, make_ids, next_token_sum  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from isogeom.gradients import harvest  # noqa: E402

torch.set_num_threads(1)


def test_rows_do_not_depend_on_the_batch_size():
    ids = make_ids(6, 5)
    one, two = (harvest(TinyLM(), [{"input_ids": b} for b in ids.split(n)], ["blocks.1"]) for n in (6, 2))
    np.testing.assert_allclose(one["blocks.1"].gradients, two["blocks.1"].gradients, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(one.meta.sample_id, two.meta.sample_id)
    assert not np.array_equal(one.meta.batch_id, two.meta.batch_id)


def test_mask_callable_rules_activations_and_gradients():
    ids = make_ids(3, 5)
    h = harvest(TinyLM(), [{"input_ids": ids}], ["blocks.0"], mask=lambda batch: batch["input_ids"] % 2 == 0)
    full = harvest(TinyLM(), [{"input_ids": ids}], ["blocks.0"])
    keep = full.meta.token_id % 2 == 0
    assert 0 < keep.sum() < len(keep)
    assert (h.meta.token_id % 2 == 0).all()
    np.testing.assert_array_equal(h["blocks.0"].gradients, full["blocks.0"].gradients[keep])


def test_own_loss_keeps_every_position_and_default_mask_keeps_real_tokens():
    ids, real = make_ids(2, 4), torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]])

    def loss(model, batch):
        return next_token_sum(model(batch["input_ids"]), batch["input_ids"])

    assert harvest(TinyLM(), [{"input_ids": ids}], ["embed"], loss=loss).meta.position.tolist() == [0, 1, 2, 3] * 2
    h = harvest(TinyLM(), [{"input_ids": ids, "attention_mask": real}], ["embed"], loss=loss)
    assert h.meta.position.tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("kind", [list, np.array, set, lambda ids: iter(ids)])
def test_exclude_token_ids(kind):
    ids = torch.tensor([[0, 1, 2, 3], [1, 1, 0, 5]])
    h = harvest(TinyLM(), [{"input_ids": ids}], ["embed"], exclude_token_ids=kind([0, 2]))
    assert h.meta.token_id.tolist() == [1, 1, 1]
    assert h["embed"].activations.shape == (3, 6)


def test_exclude_token_ids_needs_token_ids():
    with pytest.raises(ValueError, match="exclude_token_ids needs one token id per row"):
        harvest(InPlace(), [torch.ones(2, 3, 4)], ["first"], loss=flat_loss, exclude_token_ids=[0])


@pytest.mark.parametrize("batch_size", [1, 4, 20])
def test_max_rows_is_the_same_sample_everywhere(batch_size):
    ids = make_ids(20, 6)
    batches = [{"input_ids": b} for b in ids.split(batch_size)]
    full = harvest(TinyLM(), batches, ["blocks.0", "blocks.2"])
    part = harvest(TinyLM(), batches, ["blocks.0", "blocks.2"], max_rows=17, seed=0)
    reference = harvest(TinyLM(seed=1), [{"input_ids": ids}], ["embed"], max_rows=17, seed=0)
    assert part.n_rows == 17
    for field in ("sample_id", "position", "token_id"):
        np.testing.assert_array_equal(part.meta[field], reference.meta[field])
    where = part.meta.sample_id * 5 + part.meta.position
    assert (np.diff(where) > 0).all()
    for site in part:
        np.testing.assert_array_equal(part[site].activations, full[site].activations[where])
        np.testing.assert_array_equal(part[site].gradients, full[site].gradients[where])
    other = harvest(TinyLM(), batches, ["blocks.0"], max_rows=17, seed=1)
    assert not np.array_equal(other.meta.sample_id * 5 + other.meta.position, where)


def test_max_rows_nests_and_is_uniform():
    ids = make_ids(100, 6)
    counts = np.zeros((100, 5))
    for seed in range(20):
        small, large = (
            harvest(TinyLM(n_blocks=0), [{"input_ids": ids}], ["embed"], max_rows=n, seed=seed) for n in (50, 250)
        )
        keys = [set(zip(h.meta.sample_id.tolist(), h.meta.position.tolist(), strict=True)) for h in (small, large)]
        assert keys[0] < keys[1]
        np.add.at(counts, (large.meta.sample_id, large.meta.position), 1)
    # Each row is drawn 20 times with probability 1/2; the bounds on the marginals are 5 standard errors.
    np.testing.assert_allclose(counts.mean(0), 10, atol=5 * np.sqrt(5 / 100))
    np.testing.assert_allclose(counts.var(), 5, rtol=0.35)


def test_max_rows_bounds_what_is_held():
    from isogeom.gradients._rowstore import RowStore
    from isogeom.gradients._sampling import BatchRows, RowRule

    store, held = RowStore(10), []
    for i in range(50):
        choice = BatchRows(i, 4 * i, RowRule(seed=3, budget=10), threshold=store.threshold)
        selection = choice.select((4, 8), "site")
        assert len(selection.keys) <= 10
        assert store.threshold is None or (selection.keys < store.threshold).all()
        rows = {("site", "activations"): np.full((len(selection.keys), 2), i, dtype=np.float32)}
        store.add(selection, rows, i, 4, 0.0)
        held.append(store.n_rows)
    h = store.finish(["site"], [0.0] * 50)
    assert max(held) == 10
    np.testing.assert_array_equal(h["site"].activations[:, 0], h.meta.batch_id)


def test_rows_of_shape_batch_d():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    x, y = torch.randn(7, 3), torch.randint(0, 2, (7,))

    def loss(model, batch):
        return cross_entropy(model(batch[0]), batch[1], reduction="none")

    h = harvest(model, [(x[:4], y[:4]), [x[4:], y[4:]]], ["0", "2"], loss=loss, mask=lambda batch: batch[1] >= 0)
    hidden = model[0](x)
    (expected,) = torch.autograd.grad(cross_entropy(model[1:](hidden), y, reduction="sum"), hidden)
    np.testing.assert_allclose(h["0"].gradients, expected, rtol=1e-5, atol=1e-7)
    assert h.meta.sample_id.tolist() == list(range(7))
    assert set(h.meta.position) == {0}
    assert set(h.meta.token_id) == {-1}


def test_attention_masks_of_other_shapes_are_the_users_business_with_a_mask():
    ids, seen = make_ids(2, 4), []

    def loss(model, batch):
        seen.append(batch["attention_mask"].shape)
        return next_token_sum(model(batch["input_ids"]), batch["input_ids"])

    batch = {"input_ids": ids, "attention_mask": torch.ones(2, 1, 4, 4)}
    h = harvest(TinyLM(), [batch], ["embed"], loss=loss, mask=lambda batch: batch["input_ids"] >= 0)
    assert h.n_rows == 8
    assert seen == [(2, 1, 4, 4)]
    with pytest.raises(
        ValueError, match=r"got \(2, 1, 4, 4\); with any other, use a loss of your own and mask=callable"
    ):
        harvest(TinyLM(), [batch], ["embed"], loss=loss)


def test_sites_must_share_their_rows():
    class Pooled(TinyLM):
        def __init__(self):
            super().__init__()
            self.pool = nn.Identity()

        def forward(self, input_ids):
            h = self.embed(input_ids)
            return self.head(h) + self.head(self.pool(h.mean(1)))[:, None]

    batch = {"input_ids": make_ids(2, 4), "attention_mask": torch.ones(2, 4)}

    def loss(model, batch):
        return model(batch["input_ids"]).square().sum()

    with pytest.raises(
        ValueError, match=r"'embed' and 'pool' have different rows in batch 0: shape \(2, 4\) against \(2,\)"
    ):
        harvest(Pooled(), [batch], ["embed", "pool"], loss=loss)
    assert harvest(Pooled(), [batch], ["pool"], loss=loss).n_rows == 2
