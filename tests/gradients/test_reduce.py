"""Moments instead of rows: equal to the moments of the rows, and enough for what runs from them."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from isogeom import Moments  # noqa: E402
from isogeom.decomposition import PCA, SemiNMF  # noqa: E402
from isogeom.gradients import harvest  # noqa: E402
from isogeom.gradients._reduce import MomentStore  # noqa: E402
from isogeom.isotropy import effective_rank, isoscore, isoscore_star, participation_ratio  # noqa: E402
from isogeom.tangent import TangentProxy, shuffled_pairing_share, tangent_alignment_test  # noqa: E402

torch.set_num_threads(1)
VOCAB, SITES = 30, ["embed", "block", "head:weight"]


class Model(nn.Module):
    def __init__(self, offset=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.head = nn.Embedding(VOCAB, 9), nn.Linear(9, 7), nn.Linear(7, VOCAB)
        self.block.bias.data += offset

    def forward(self, input_ids):
        return self.head(self.block(self.embed(input_ids)).tanh())


def make_batches(n=6, size=40):
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, VOCAB, (size, 5 + i % 2), generator=generator)} for i in range(n)]


@pytest.fixture(scope="module")
def both():
    return harvest(Model(), make_batches(), SITES), harvest(Model(), make_batches(), SITES, reduce="moments")


def test_moments_are_those_of_the_rows(both):
    rows, moments = both
    assert list(moments) == list(rows)
    assert len(moments) == 3
    assert moments.n_rows == rows.n_rows
    np.testing.assert_array_equal(moments.losses, rows.losses)
    assert repr(moments) == f"HarvestMoments({rows.n_rows} rows, 3 sites, 6 batches)"
    assert moments["embed:out"] is moments["embed"]
    shown = f"Moments(count={rows.n_rows}, n_features=9)"
    assert repr(moments["embed"]) == f"SiteMoments('embed', activations {shown}, gradients {shown}, cross (9, 9))"
    with pytest.raises(KeyError, match="no site 'x'"):
        moments["x"]
    for name in SITES:
        for kind in ("activations", "gradients"):
            X, m = getattr(rows[name], kind).astype(np.float64), getattr(moments[name], kind)
            assert isinstance(m, Moments)
            assert m.count == len(X)
            np.testing.assert_allclose(m.mean, X.mean(0), rtol=1e-5, atol=1e-8)
            np.testing.assert_allclose(m.covariance(), np.cov(X.T), rtol=1e-4, atol=1e-7 * X.var(0).max())
            np.testing.assert_allclose(m.gram(), X.T @ X, rtol=1e-4, atol=1e-6 * (X**2).sum(0).max())
        cross = rows[name].activations.astype(np.float64).T @ rows[name].gradients.astype(np.float64)
        np.testing.assert_allclose(moments[name].cross, cross, rtol=1e-4, atol=1e-5 * np.abs(cross).max())
        assert moments[name].cross.dtype == np.float64


def test_the_cross_product_of_a_weight_site_is_the_weight_gradient(both):
    model, total = Model().eval(), 0
    for batch in make_batches():
        ids = batch["input_ids"]
        logits = model(ids)[:, :-1]
        total = total + nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    (expected,) = torch.autograd.grad(total, model.head.weight)
    np.testing.assert_allclose(both[1]["head:weight"].cross.T, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("score", [isoscore, isoscore_star, participation_ratio, effective_rank])
def test_isotropy_scores_run_from_them(score, both):
    for kind in ("activations", "gradients"):
        got, expected = (score(getattr(h["block"], kind)) for h in (both[1], both[0]))
        assert got == pytest.approx(expected, rel=1e-4)


def test_pca_proxies_and_tests_run_from_them(both):
    rows, moments = (h["block"] for h in both)
    np.testing.assert_allclose(
        PCA(3).fit(moments.activations).explained_variance_,
        PCA(3).fit(rows.activations).explained_variance_,
        rtol=1e-4,
    )
    proxy, expected = (
        TangentProxy(n_directions=2).fit(moments.activations),
        TangentProxy(n_directions=2).fit(rows.activations),
    )
    np.testing.assert_allclose(np.abs(proxy.basis_), np.abs(expected.basis_), atol=1e-3)
    assert proxy.score(rows.activations, moments.gradients) == pytest.approx(
        proxy.score(rows.activations, rows.gradients), rel=1e-4, abs=1e-6
    )
    one = tangent_alignment_test(moments.gradients, proxy, n_resamples=99, rng=0)
    two = tangent_alignment_test(rows.gradients, proxy, n_resamples=99, rng=0)
    for name in ("energy_ratio", "pvalue", "zscore", "delta_isotropy_tangent"):
        assert getattr(one, name) == pytest.approx(getattr(two, name), rel=1e-3, abs=1e-6)
    assert shuffled_pairing_share(moments.activations, moments.gradients, proxy.basis_) == pytest.approx(
        shuffled_pairing_share(rows.activations, rows.gradients, proxy.basis_), rel=1e-4
    )
    with pytest.raises(TypeError, match="SemiNMF needs rows, got Moments"):
        TangentProxy(SemiNMF(3)).fit(moments.activations)


def test_large_means_cost_no_digits():
    batches, model = make_batches(), nn.Sequential(nn.Embedding(VOCAB, 4))
    with torch.no_grad():
        model[0].weight.add_(1000)
    options = {"collect": ["act"], "loss": lambda m, b: m(b["input_ids"]).sum()}
    rows, moments = (harvest(model, batches, ["0"], reduce=r, **options) for r in (None, "moments"))
    expected = np.cov(rows["0"].activations.astype(np.float64).T)
    np.testing.assert_allclose(moments["0"].activations.covariance(), expected, rtol=1e-4, atol=1e-5)
    assert moments["0"].gradients is None
    assert moments["0"].cross is None


def test_merge_is_the_harvest_of_all_batches(both):
    batches = make_batches()
    a, b = (harvest(Model(), part, SITES, reduce="moments") for part in (batches[:2], batches[2:]))
    merged = a.merge(b)
    assert merged.n_rows == both[1].n_rows
    np.testing.assert_array_equal(merged.losses, both[1].losses)
    for name in SITES:
        np.testing.assert_allclose(merged[name].cross, both[1][name].cross, rtol=1e-5, atol=1e-5)
        for kind in ("activations", "gradients"):
            got, expected = (getattr(h[name], kind).covariance() for h in (merged, both[1]))
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())
    with pytest.raises(TypeError, match="other must be HarvestMoments, got int"):
        a.merge(3)
    with pytest.raises(ValueError, match=r"other has sites \['embed'\]"):
        a.merge(harvest(Model(), batches, ["embed"], reduce="moments"))
    with pytest.raises(ValueError, match="only one of the harvests has gradients of site 'embed'"):
        a.merge(harvest(Model(), batches, SITES, reduce="moments", collect=["act"]))


@pytest.mark.parametrize("size", [1, 7, 240])
def test_batches_change_rounding_only(size, both):
    ids = torch.cat([b["input_ids"][:, :5] for b in make_batches()])
    one = harvest(Model(), [{"input_ids": ids}], SITES, reduce="moments")
    got = harvest(Model(), [{"input_ids": part} for part in ids.split(size)], SITES, reduce="moments")
    for name in SITES:
        np.testing.assert_allclose(got[name].cross, one[name].cross, rtol=1e-4, atol=1e-5)
        expected = one[name].gradients.covariance()
        np.testing.assert_allclose(got[name].gradients.covariance(), expected, rtol=1e-4, atol=1e-6 * expected.max())


def test_gradients_of_any_size():
    batches = make_batches(2)
    expected = harvest(Model(), batches, ["block"], reduce="moments")["block"].cross
    for scale in (1e-25, 1e25):

        def loss(model, batch, scale=scale):
            return (model(**batch) * scale).sin().sum() if scale < 1 else scale * model(**batch).square().sum()

        rows = harvest(Model(), batches, ["block"], loss=loss)["block"]
        got = harvest(Model(), batches, ["block"], loss=loss, reduce="moments")["block"].cross
        product = rows.activations.astype(np.float64).T @ rows.gradients.astype(np.float64)
        np.testing.assert_allclose(got, product, rtol=1e-4, atol=1e-5 * np.abs(product).max())
        assert not np.allclose(got, expected)


def test_disk_and_memory_agree(tmp_path):
    memory = harvest(Model(), make_batches(), SITES, reduce="moments")
    disk = harvest(Model(), make_batches(), SITES, reduce="moments", out=tmp_path / "out", batches_per_shard=2)
    again = harvest(Model(), make_batches(), SITES, reduce="moments", out=tmp_path / "out", batches_per_shard=2)
    assert disk.n_rows == again.n_rows == memory.n_rows
    for name in SITES:
        np.testing.assert_array_equal(again[name].cross, disk[name].cross)
        np.testing.assert_allclose(disk[name].cross, memory[name].cross, rtol=1e-4, atol=1e-5)
        for kind in ("activations", "gradients"):
            a, d, m = (getattr(h[name], kind) for h in (again, disk, memory))
            assert a.count == d.count == m.count
            assert isinstance(a.count, int)
            np.testing.assert_array_equal(a.scatter, d.scatter)
            np.testing.assert_array_equal(a.mean, d.mean)
            np.testing.assert_allclose(d.scatter, m.scatter, rtol=1e-4, atol=1e-6 * np.abs(m.scatter).max())


def test_few_rows_wait():
    store = MomentStore()
    for i in range(30):
        arrays = {("s", "activations"): np.full((1000, 3), i, dtype=np.float32)}
        store.add(type("S", (), {"keys": np.empty(1000)}), arrays, i, 1, 0.0)
        assert store._n_pending < 5000
    assert store.finish(["s"], [0.0])["s"].activations.count == 30_000
