"""Harvests on disk: equal to those in memory, read block by block, in flat memory."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gradients.small_harvests import SITES, Model, assert_same, make_batches, run  # noqa: E402
from torch import nn  # noqa: E402

from isogeom.decomposition import PCA  # noqa: E402
from isogeom.gradients import ShardedRows, harvest, open_harvest  # noqa: E402

torch.set_num_threads(1)


OPTIONS = [
    {},
    {"max_rows": 17},
    {"sample_rate": 0.3},
    {"rows": "mean", "max_rows": 5},
    {"collect": ["grad"]},
    {"dtype": "float16"},
    {"batches_per_shard": 1, "sample_rate": 0.02},  # shards without a row
    {"batches_per_shard": 100},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_disk_equals_memory(options, memory_path):
    expected = harvest(Model(), make_batches(), SITES, **options)
    assert_same(run(memory_path / "a" / "b", **options), expected)
    assert_same(open_harvest(memory_path / "a" / "b"), expected)
    assert_same(open_harvest(str(memory_path / "a" / "b"), verify=False), expected)


def test_bfloat16_is_read_as_rounded_float32(memory_path):
    full, h = harvest(Model(), make_batches(), SITES), run(memory_path / "out", dtype="bfloat16")
    for site in full:
        expected = torch.from_numpy(full[site].gradients).to(torch.bfloat16).float().numpy()
        assert h[site].gradients.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(h[site].gradients), expected)
        np.testing.assert_array_equal(h[site].gradients[3:5], expected[3:5])


# ---------------------------------------------------------------------- no loss


@pytest.mark.parametrize("reduce", [None, "moments"])
def test_activations_need_no_loss(reduce, memory_path):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Model()

        def forward(self, input_ids):
            self.inner(input_ids)

    batches = make_batches()
    with_loss = harvest(Model(), batches, ["embed"], loss="causal-lm", collect=["act"])
    options = {"collect": ["act"], "reduce": reduce}
    h = harvest(Encoder(), batches, ["inner.embed"], **options)
    again = [
        harvest(model, batches, ["inner.embed"], out=memory_path, **options) for model in (Encoder(), Encoder().train())
    ]
    for got in (h, *again):
        assert got.n_rows == with_loss.n_rows
        assert np.isnan(got.losses).all()
        assert len(got.losses) == 7
        if reduce is None:
            np.testing.assert_array_equal(got["inner.embed"].activations, with_loss["embed"].activations)
    assert np.isfinite(with_loss.losses).all()


def test_batches_without_a_loss():
    x = torch.ones(2, 3)
    for batch in (x, [x], (x,), {"input": x}):
        assert harvest(nn.Linear(3, 4), [batch], [":out"], collect=["act"]).n_rows == 2
    with pytest.raises(ValueError, match=r"batch 0 is a sequence of 2 items.*pass loss=callable"):
        harvest(nn.Linear(3, 4), [(x, x)], [":out"], collect=["act"])


# ---------------------------------------------------------------------- reading


def test_one_shard_is_a_read_only_aligned_memory_map(memory_path):
    h = run(memory_path / "out", batches_per_shard=100)
    for site in h.values():
        for rows in (site.activations, site.gradients):
            assert isinstance(rows, ShardedRows)
            for view in (rows[:], np.asarray(rows), rows.shard(0)):
                assert not view.flags.writeable
                assert view.flags.aligned
                assert view.ctypes.data % 64 == 0
            assert isinstance(rows[:], np.memmap)
            assert np.shares_memory(np.asarray(rows), rows[:])
    with pytest.raises(ValueError, match="read-only"):
        h["embed"].activations[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        h["embed"].activations[:][0] = 1


@pytest.mark.parametrize("batches_per_shard", [1, 2, 100])
def test_one_shard_and_many_read_alike(batches_per_shard, memory_path):
    expected = harvest(Model(), make_batches(), SITES)["block:in[0]"].gradients
    rows = run(memory_path / "out", batches_per_shard=batches_per_shard)["block:in[0]"].gradients
    n = {1: 7, 2: 4, 100: 1}[batches_per_shard]
    assert repr(rows) == f"ShardedRows(shape={expected.shape}, dtype=float32, {n} shard{'s' * (n > 1)})"
    for index in (slice(None), slice(3, 30), [0, -1, 7], np.arange(len(rows)) % 3 == 0, 4, (slice(2, 9), slice(1, 3))):
        np.testing.assert_array_equal(rows[index], expected[index])
    np.testing.assert_allclose(rows.mean(axis=0), expected.mean(axis=0), rtol=1e-5, atol=1e-8)
    with pytest.raises(TypeError, match="ShardedRows has no subtract"):
        rows - 1


@pytest.mark.parametrize("block_rows", [1, 11, 60, 8192])
@pytest.mark.parametrize("batches_per_shard", [1, 2, 100, None])
def test_blocks_depend_on_their_size_alone(batches_per_shard, block_rows, memory_path):
    memory = harvest(Model(), make_batches(), SITES)
    h = memory if batches_per_shard is None else run(memory_path / "out", batches_per_shard=batches_per_shard)
    blocks = list(h.iter_blocks(block_rows))
    assert [block.n_rows for block in blocks] == [
        min(block_rows, h.n_rows - start) for start in range(0, h.n_rows, block_rows)
    ]
    for i, block in enumerate(blocks):
        expected = memory.select(slice(i * block_rows, (i + 1) * block_rows))
        assert_same(block, expected)
        assert all(
            isinstance(rows, np.ndarray) for site in block.values() for rows in (site.activations, site.gradients)
        )


def test_the_size_of_blocks_is_checked(memory_path):
    h = run(memory_path / "out")
    assert [block.n_rows for block in h.iter_blocks(block_rows=np.int64(40))] == [40, 20]
    for wrong, error in ((0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match=f"block_rows.*{wrong}"):
            h.iter_blocks(wrong)


def test_blocks_feed_partial_fit(memory_path):
    h, memory = run(memory_path / "out"), harvest(Model(), make_batches(), SITES)
    expected = PCA(3).fit(memory["embed"].activations)
    fits = [PCA(3), PCA(3)]
    for pca, source in zip(fits, (h, memory), strict=True):
        for block in source.iter_blocks(25):
            pca.partial_fit(block["embed"].activations)
    np.testing.assert_array_equal(fits[0].explained_variance_, fits[1].explained_variance_)
    np.testing.assert_allclose(fits[0].explained_variance_, expected.explained_variance_, rtol=1e-5)
    np.testing.assert_allclose(PCA(3).fit(h["embed"].activations).explained_variance_, expected.explained_variance_)


def test_select_on_disk(memory_path):
    h, memory = run(memory_path / "out"), harvest(Model(), make_batches(), SITES)
    late = h.meta.batch_id > 2
    assert_same(h.select(late), memory.select(late))


def test_the_manifest_can_be_read_by_eye(memory_path):
    run(memory_path / "out")
    header, *blocks, end = [
        json.loads(line) for line in (memory_path / "out" / "manifest.jsonl").read_text().splitlines()
    ]
    mark = header["header"]["fingerprint"]
    assert {"sites", "loss", "mask", "dtype", "model_sha256", "version of torch", "seed"} <= set(mark)
    assert [block["block"] for block in blocks] == [0, 1, 2, 3]
    assert [len(block["batches"]) for block in blocks] == [2, 2, 2, 1]
    assert {len(batch["sha256"]) for block in blocks for batch in block["batches"]} == {64}
    assert end["end"] == 7
    names = {shard["file"] for block in blocks for shard in block["shards"]}
    assert {p.name for p in (memory_path / "out" / "shards").iterdir()} == names
    assert len(names) == 4 * (1 + 3 * 2)


# ---------------------------------------------------------------------- memory


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("options", [{"out": "out"}, {"reduce": "moments"}, {"max_rows": 300}], ids=str)
def test_memory_is_flat_over_200_batches(options, memory_path):
    """Every batch has 1.5 MB of rows, 300 MB in all."""
    d, resident = 192, []
    model = nn.Sequential(nn.Linear(4, d), nn.Tanh(), nn.Linear(d, 1))
    x = torch.ones(16, 64, 4)

    def batches():
        for _ in range(200):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
            yield x

    if "out" in options:
        options = {"out": memory_path / "out", "batches_per_shard": 4}
    harvest(model, batches(), ["0"], loss=lambda m, x: m(x).square().sum(), **options)
    assert len(resident) == 200
    # After 60 batches the buffers have their size; 140 batches more would be 210 MB if their rows stayed.
    assert max(resident[60:]) - max(resident[40:60]) < 25
