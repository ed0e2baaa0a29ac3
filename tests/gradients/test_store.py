"""Harvests on disk: equal to those in memory, resumed to the bit, and never believed when damaged."""

import errno
import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gradients.small_harvests import (  # noqa: E402
    SITES,
    VOCAB,
    Model,
    StopError,
    assert_same,
    content,
    make_batches,
    run,
    stopping,
)
from torch import nn  # noqa: E402

from isogeom.decomposition import PCA  # noqa: E402
from isogeom.gradients import ShardedRows, _manifest, harvest, open_harvest  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture
def tmp_path():
    """A folder in memory where there is one: on a disk these tests would wait for fsync."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


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
def test_disk_equals_memory(options, tmp_path):
    expected = harvest(Model(), make_batches(), SITES, **options)
    assert_same(run(tmp_path / "a" / "b", **options), expected)
    assert_same(open_harvest(tmp_path / "a" / "b"), expected)
    assert_same(open_harvest(str(tmp_path / "a" / "b"), verify=False), expected)


def test_bfloat16_is_read_as_rounded_float32(tmp_path):
    full, h = harvest(Model(), make_batches(), SITES), run(tmp_path / "out", dtype="bfloat16")
    for site in full:
        expected = torch.from_numpy(full[site].gradients).to(torch.bfloat16).float().numpy()
        assert h[site].gradients.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(h[site].gradients), expected)
        np.testing.assert_array_equal(h[site].gradients[3:5], expected[3:5])


# ---------------------------------------------------------------------- resume


@pytest.mark.parametrize("options", [{}, {"max_rows": 17}, {"sample_rate": 0.3}, {"reduce": "moments"}], ids=str)
@pytest.mark.parametrize("n", range(8))
def test_interrupted_runs_end_with_the_same_bytes(n, options, tmp_path):
    run(tmp_path / "whole", **options)
    if n < 7:
        with pytest.raises(StopError):
            run(tmp_path / "part", batches=stopping(n), **options)
    else:
        run(tmp_path / "part", **options)
    model = Model()
    run(tmp_path / "part", model, **options)
    assert model.runs == (7 - n // 2 * 2 if n < 7 else 0)  # finished blocks of 2 are not computed again
    assert content(tmp_path / "part") == content(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore:random numbers were drawn")
def test_random_losses_resume_to_the_bit(tmp_path):
    def noisy(model, batch):
        return (model(**batch) * torch.rand(1)).sum()

    run(tmp_path / "whole", loss=noisy)
    with pytest.raises(StopError):
        run(tmp_path / "part", batches=stopping(5), loss=noisy)
    run(tmp_path / "part", loss=noisy)
    assert content(tmp_path / "part") == content(tmp_path / "whole")


@pytest.mark.parametrize("options", [{}, {"max_rows": 10}, {"reduce": "moments"}], ids=str)
def test_a_crash_at_every_write_resumes_to_the_same_bytes(options, tmp_path, monkeypatch):
    """Stop before each call to the system in turn, as a kill would."""

    class Killed(BaseException):
        pass

    calls = {"left": 10**9}

    def counted(function):
        def call(*args, **kwargs):
            calls["left"] -= 1
            if calls["left"] < 0:
                raise Killed
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(_manifest.os, name, counted(getattr(os, name)))
    batches = make_batches(5)
    run(tmp_path / "whole", batches=batches, **options)
    total = 10**9 - calls["left"]
    expected = content(tmp_path / "whole")
    assert total > 20
    for at in range(0, total, 2 if total > 60 else 1):
        shutil.rmtree(tmp_path / "part", ignore_errors=True)
        calls["left"] = at
        with pytest.raises(Killed):
            run(tmp_path / "part", batches=batches, **options)
        calls["left"] = 10**9
        run(tmp_path / "part", batches=batches, **options)
        assert content(tmp_path / "part") == expected


def test_a_torn_last_line_is_dropped(tmp_path):
    run(tmp_path / "out")
    expected = content(tmp_path / "out")
    manifest = tmp_path / "out" / "manifest.jsonl"
    for size in (len(expected["manifest.jsonl"]) - 3, expected["manifest.jsonl"].index(b"\n") + 20, 10, 0):
        manifest.write_bytes(expected["manifest.jsonl"][:size])
        with pytest.raises(ValueError, match="is unfinished"):
            open_harvest(tmp_path / "out")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(tmp_path / "out")
        assert content(tmp_path / "out") == expected


def test_a_damaged_line_is_named_and_harvested_again(tmp_path):
    expected = run(tmp_path / "out")
    manifest = tmp_path / "out" / "manifest.jsonl"
    lines = manifest.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"n_rows":', b'"n_rows":1')
    manifest.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match="line 3 of its manifest is damaged"):
        open_harvest(tmp_path / "out")
    model = Model()
    with pytest.warns(UserWarning, match="line 3 of .*manifest.jsonl is damaged"):
        assert_same(run(tmp_path / "out", model), expected)
    assert model.runs == 5


def test_a_damaged_header_is_refused(tmp_path):
    run(tmp_path / "out")
    manifest = tmp_path / "out" / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes().replace(b'"seed":0', b'"seed":1', 1))
    before = content(tmp_path / "out")
    with pytest.raises(ValueError, match=r"line 1 of .*manifest.jsonl is damaged.*delete this one to start over"):
        run(tmp_path / "out")
    with pytest.raises(ValueError, match="is unfinished"):
        open_harvest(tmp_path / "out")
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize("options", [{}, {"max_rows": 17}], ids=str)
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "empty"])
def test_a_damaged_shard_is_named_and_harvested_again(damage, options, tmp_path):
    expected = harvest(Model(), make_batches(), SITES, **options)
    run(tmp_path / "out", **options)
    path = tmp_path / "out" / "shards" / "000001.01-block-in-0.gradients.npy"
    original = path.read_bytes()
    if damage == "flip":
        path.write_bytes(original[:-2] + bytes([original[-2] ^ 1]) + original[-1:])
    elif damage == "delete":
        path.unlink()
    else:
        path.write_bytes(original[:-5] if damage == "truncate" else b"")
    word = {"flip": "corrupt", "delete": "missing"}.get(damage, "truncated")
    with pytest.raises(ValueError, match=rf"shard .*000001.01-block-in-0.gradients.npy is {word}.*run the same call"):
        open_harvest(tmp_path / "out")
    model = Model()
    with pytest.warns(UserWarning, match=rf"000001.01-block-in-0.gradients.npy is {word}.*harvested again"):
        assert_same(run(tmp_path / "out", model, **options), expected)
    assert model.runs == 2
    assert path.read_bytes() == original
    assert_same(open_harvest(tmp_path / "out"), expected)


def test_damaged_moments_start_over(tmp_path):
    expected = run(tmp_path / "out", reduce="moments")
    path = next((tmp_path / "out" / "shards").glob("*.cross.npy"))
    path.write_bytes(path.read_bytes()[:-1])
    model = Model()
    with pytest.warns(UserWarning, match="cross.npy is truncated.*all batches are harvested again"):
        got = run(tmp_path / "out", model, reduce="moments")
    assert model.runs == 7
    np.testing.assert_array_equal(got["embed"].cross, expected["embed"].cross)
    np.testing.assert_array_equal(open_harvest(tmp_path / "out")["embed"].cross, expected["embed"].cross)


def drop_line(folder, number):
    path = Path(folder) / "manifest.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[number]
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"max_rows": 17}], ids=str)
def test_a_deleted_line_is_noticed_and_harvested_again(options, number, tmp_path):
    expected = harvest(Model(), make_batches(), SITES, **options)
    run(tmp_path / "out", **options)
    # With a budget every block has a line for its candidates and one for what is left of them.
    # The second is at first four lines on.
    for line in (number, number + 3) if options else (number,):
        drop_line(tmp_path / "out", line)
    with pytest.raises(ValueError, match=r"is incomplete .*run the same call of harvest again"):
        open_harvest(tmp_path / "out")
    model = Model()
    with pytest.warns(UserWarning, match="what is missing is harvested again"):
        assert_same(run(tmp_path / "out", model, **options), expected)
    assert model.runs == (1 if number == 4 else 2)
    assert_same(open_harvest(tmp_path / "out"), expected)


def test_candidates_are_not_taken_for_the_sample(tmp_path):
    options = {"max_rows": 17}
    expected = harvest(Model(), make_batches(), SITES, **options)
    run(tmp_path / "out", **options)
    with pytest.raises(StopError):
        run(tmp_path / "part", batches=stopping(6), **options)
    shutil.copytree(tmp_path / "part" / "shards", tmp_path / "out" / "shards", dirs_exist_ok=True)
    drop_line(tmp_path / "out", 5)
    with pytest.raises(ValueError, match="names only the candidates of block 0, not its sample"):
        open_harvest(tmp_path / "out")
    model = Model()
    with pytest.warns(UserWarning, match="names only the candidates of block 0"):
        assert_same(run(tmp_path / "out", model, **options), expected)
    assert model.runs == 0


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_deleted_line_counts_no_moments_twice(number, finished, tmp_path):
    expected = run(tmp_path / "whole", reduce="moments")
    run(tmp_path / "out", reduce="moments")
    if not finished:
        drop_line(tmp_path / "out", -1)
    drop_line(tmp_path / "out", number)
    model = Model()
    with pytest.warns(UserWarning, match="all batches are harvested again"):
        got = run(tmp_path / "out", model, reduce="moments")
    assert model.runs == 7
    assert got.n_rows == expected.n_rows == got["embed"].activations.count
    np.testing.assert_array_equal(got["embed"].cross, expected["embed"].cross)
    model = Model()
    assert run(tmp_path / "out", model, reduce="moments").n_rows == expected.n_rows
    assert model.runs == 0


@pytest.mark.parametrize("options", [{}, {"max_rows": 17}, {"reduce": "moments"}], ids=str)
def test_an_interrupted_repair_is_not_finished(options, tmp_path):
    expected = run(tmp_path / "out", **options)
    before = content(tmp_path / "out")
    sorted((tmp_path / "out" / "shards").iterdir())[0].unlink()
    with pytest.warns(UserWarning, match="is missing"), pytest.raises(StopError):
        run(tmp_path / "out", batches=stopping(3), **options)
    with pytest.raises(ValueError, match="is unfinished"):
        open_harvest(tmp_path / "out")
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = run(tmp_path / "out", model, **options)
    assert model.runs == (5 if "reduce" in options else 0)  # the block of the repair is kept
    after = content(tmp_path / "out")
    del before["manifest.jsonl"], after["manifest.jsonl"]
    assert after == before
    if "reduce" in options:
        np.testing.assert_array_equal(got["embed"].cross, expected["embed"].cross)
    else:
        assert_same(open_harvest(tmp_path / "out"), got)


def test_a_first_run_that_failed_binds_nobody(tmp_path):
    with pytest.raises(ValueError, match="the loss of batch 0 is nan"):
        run(tmp_path / "out", loss=lambda m, b: m(**b).sum() * torch.nan)
    run(tmp_path / "out", seed=3)
    run(tmp_path / "whole", seed=3)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    with pytest.raises(ValueError, match="seed: the store has 3"):
        run(tmp_path / "out")


# ---------------------------------------------------------------------- what the caller draws


class SelfSeeding:
    """Start over with the same random batches, drawn from torch's global state."""

    def __iter__(self):
        torch.manual_seed(0)
        for _ in range(5):
            yield {"input_ids": torch.randint(0, VOCAB, (3, 4))}


def test_batches_are_drawn_in_the_callers_random_state(tmp_path):
    plain, seen = list(SelfSeeding()), []

    def spy():
        for batch in SelfSeeding():
            seen.append(batch)
            yield batch

    after = torch.rand(2, generator=torch.Generator().set_state(torch.get_rng_state()))
    whole = run(tmp_path / "whole", batches=spy())
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(plain, seen, strict=True))
    assert torch.equal(torch.rand(2), after)
    model = Model()
    assert_same(run(tmp_path / "whole", model, batches=SelfSeeding()), whole)
    assert model.runs == 0
    fresh = ({"input_ids": torch.randint(0, VOCAB, (3, 4))} for _ in range(4))
    h = harvest(Model(), fresh, SITES)
    assert len({tuple(h.meta.token_id[h.meta.batch_id == i]) for i in range(4)}) == 4


def test_shards_are_found_from_another_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = harvest(Model(), make_batches(), SITES)
    h = run("out")
    opened = open_harvest("out")
    monkeypatch.chdir("/")
    assert_same(h, expected)
    assert_same(opened, expected)


def test_the_home_folder_is_found_and_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    run("~/out")
    assert (tmp_path / "out" / "manifest.jsonl").is_file()
    assert open_harvest("~/out").n_rows > 0
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(NotADirectoryError, match=r"out=.*cannot be a folder: .*file is a file"):
            run(out)
    assert (tmp_path / "file").read_text() == "mine"


# ---------------------------------------------------------------------- no loss


@pytest.mark.parametrize("reduce", [None, "moments"])
def test_activations_need_no_loss(reduce, tmp_path):
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
        harvest(model, batches, ["inner.embed"], out=tmp_path, **options) for model in (Encoder(), Encoder().train())
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


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 1}, "seed: the store has 0, this call 1"),
        ({"sites": ["embed"]}, r"sites: the store has \['embed', 'block:in\[0\]', ':out'\], this call \['embed'\]"),
        ({"label_mask": True}, "label_mask: the store has False, this call True"),
        ({"model": Model(seed=1)}, "model_sha256"),
        ({"collect": ["act"]}, "collect: .*'gradients'"),
        ({"loss": lambda m, b: m(**b).sum()}, "loss: the store has 'causal-lm', this call .*lambda"),
        ({"mask": lambda b: b["input_ids"] > 0}, "mask: the store has None"),
        ({"rows": "mean"}, "rows: the store has 'tokens', this call 'mean'"),
        ({"exclude_token_ids": [3]}, r"exclude_token_ids: the store has None, this call \[3\]"),
        ({"positions": slice(1, None)}, r"positions: the store has None, this call \[1, None, None\]"),
        ({"max_rows": 9, "sample_rate": 0.5}, "max_rows: .*sample_rate: "),
        ({"batches_per_shard": 3}, "batches_per_shard: the store has 2, this call 3"),
        ({"dtype": "float16"}, "dtype: the store has 'float32'"),
        ({"reduce": "moments"}, "reduce: the store has None"),
        ({"batches": make_batches(6)}, "it holds 7 batches, but there are only 6 now"),
        ({"batches": make_batches(8)}, "it has no batch 7"),
        ({"batches": make_batches(9)}, "it has no batch 7"),
        ({"batches": make_batches(seed=1)}, "batch 0 has other contents"),
    ],
)
@pytest.mark.parametrize("reduce", [None, "moments"])
def test_another_call_is_refused_and_the_difference_named(reduce, change, match, tmp_path):
    run(tmp_path / "out", reduce=reduce)
    before = content(tmp_path / "out")
    if reduce is not None and "reduce" in change:
        change, match = {"reduce": None}, "reduce: the store has 'moments', this call None"
    elif reduce is not None and {"max_rows", "dtype"} & change.keys():
        pytest.skip("goes with rows only")
    with pytest.raises(ValueError, match=match):
        run(tmp_path / "out", **{"reduce": reduce, **change})
    assert content(tmp_path / "out") == before


def test_more_batches_than_whole_blocks_are_refused(tmp_path):
    run(tmp_path / "out", batches=make_batches(6))
    with pytest.raises(ValueError, match="it ended after 6 batches, but there are more now"):
        run(tmp_path / "out", batches=make_batches(7))


def test_other_versions_are_refused(tmp_path, monkeypatch):
    run(tmp_path / "out")
    monkeypatch.setattr("isogeom.__version__", "9.9")
    with pytest.raises(ValueError, match=r"version of isogeom: the store has '.*', this call '9.9'"):
        run(tmp_path / "out")


def test_a_lambda_is_known_by_its_code(tmp_path):
    run(tmp_path / "out", mask=lambda b: b["input_ids"] > 1)
    model = Model()
    run(tmp_path / "out", model, mask=lambda b: b["input_ids"] > 1)
    assert model.runs == 0
    with pytest.raises(ValueError, match="mask: "):
        run(tmp_path / "out", mask=lambda b: b["input_ids"] > 2)


def test_folders_of_something_else_are_refused(tmp_path):
    (tmp_path / "empty" / "shards").mkdir(parents=True)
    run(tmp_path / "empty")  # an interrupted run leaves that
    shutil.rmtree(tmp_path / "empty")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no harvest"):
        run(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no harvest"):
        open_harvest(tmp_path)
    assert content(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.skipif(os.name != "posix", reason="locks are posix only")
def test_two_writers_are_refused(tmp_path):
    def batches():
        with pytest.raises(RuntimeError, match="is being written by another process"):
            run(tmp_path / "out")
        yield from make_batches()

    run(tmp_path / "out", batches=batches())


@pytest.mark.parametrize("options", [{}, {"max_rows": 17}, {"reduce": "moments"}], ids=str)
@pytest.mark.parametrize("where", ["shard", "manifest"])
def test_a_full_disk_says_so_and_leaves_nothing_half_written(where, options, tmp_path, monkeypatch):
    run(tmp_path / "whole", **options)
    real, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        name = os.readlink(f"/proc/self/fd/{handle}") if Path("/proc/self/fd").exists() else "shard"
        if len(calls) > 12 and ("manifest" in name) == (where == "manifest") and not os.path.isdir(name):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(_manifest.os, "fsync", full)
        with pytest.raises(OSError, match=r"the disk is full.*run the same call again") as caught:
            run(tmp_path / "part", **options)
    assert caught.value.errno == errno.ENOSPC
    assert not list((tmp_path / "part").rglob("*.tmp"))
    with pytest.raises(ValueError, match="unfinished"):
        open_harvest(tmp_path / "part")
    run(tmp_path / "part", **options)
    assert content(tmp_path / "part") == content(tmp_path / "whole")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_really_full_device(tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "x.npy.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="the disk is full"):
        _manifest.write_shard(tmp_path, "x.npy", np.ones(3))
    assert list((tmp_path / "shards").iterdir()) == []


# ---------------------------------------------------------------------- reading


def test_one_shard_is_a_read_only_aligned_memory_map(tmp_path):
    h = run(tmp_path / "out", batches_per_shard=100)
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
def test_one_shard_and_many_read_alike(batches_per_shard, tmp_path):
    expected = harvest(Model(), make_batches(), SITES)["block:in[0]"].gradients
    rows = run(tmp_path / "out", batches_per_shard=batches_per_shard)["block:in[0]"].gradients
    n = {1: 7, 2: 4, 100: 1}[batches_per_shard]
    assert repr(rows) == f"ShardedRows(shape={expected.shape}, dtype=float32, {n} shard{'s' * (n > 1)})"
    for index in (slice(None), slice(3, 30), [0, -1, 7], np.arange(len(rows)) % 3 == 0, 4, (slice(2, 9), slice(1, 3))):
        np.testing.assert_array_equal(rows[index], expected[index])
    np.testing.assert_allclose(rows.mean(axis=0), expected.mean(axis=0), rtol=1e-5, atol=1e-8)
    with pytest.raises(TypeError, match="ShardedRows has no subtract"):
        rows - 1


@pytest.mark.parametrize("block_rows", [1, 11, 60, 8192])
@pytest.mark.parametrize("batches_per_shard", [1, 2, 100, None])
def test_blocks_depend_on_their_size_alone(batches_per_shard, block_rows, tmp_path):
    memory = harvest(Model(), make_batches(), SITES)
    h = memory if batches_per_shard is None else run(tmp_path / "out", batches_per_shard=batches_per_shard)
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


def test_the_size_of_blocks_is_checked(tmp_path):
    h = run(tmp_path / "out")
    assert [block.n_rows for block in h.iter_blocks(block_rows=np.int64(40))] == [40, 20]
    for wrong, error in ((0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match=f"block_rows.*{wrong}"):
            h.iter_blocks(wrong)


def test_blocks_feed_partial_fit(tmp_path):
    h, memory = run(tmp_path / "out"), harvest(Model(), make_batches(), SITES)
    expected = PCA(3).fit(memory["embed"].activations)
    fits = [PCA(3), PCA(3)]
    for pca, source in zip(fits, (h, memory), strict=True):
        for block in source.iter_blocks(25):
            pca.partial_fit(block["embed"].activations)
    np.testing.assert_array_equal(fits[0].explained_variance_, fits[1].explained_variance_)
    np.testing.assert_allclose(fits[0].explained_variance_, expected.explained_variance_, rtol=1e-5)
    np.testing.assert_allclose(PCA(3).fit(h["embed"].activations).explained_variance_, expected.explained_variance_)


def test_select_on_disk(tmp_path):
    h, memory = run(tmp_path / "out"), harvest(Model(), make_batches(), SITES)
    late = h.meta.batch_id > 2
    assert_same(h.select(late), memory.select(late))


def test_the_manifest_can_be_read_by_eye(tmp_path):
    run(tmp_path / "out")
    header, *blocks, end = [json.loads(line) for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()]
    mark = header["header"]["fingerprint"]
    assert {"sites", "loss", "mask", "dtype", "model_sha256", "version of torch", "seed"} <= set(mark)
    assert [block["block"] for block in blocks] == [0, 1, 2, 3]
    assert [len(block["batches"]) for block in blocks] == [2, 2, 2, 1]
    assert {len(batch["sha256"]) for block in blocks for batch in block["batches"]} == {64}
    assert end["end"] == 7
    names = {shard["file"] for block in blocks for shard in block["shards"]}
    assert {p.name for p in (tmp_path / "out" / "shards").iterdir()} == names
    assert len(names) == 4 * (1 + 3 * 2)


# ---------------------------------------------------------------------- memory


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("options", [{"out": "out"}, {"reduce": "moments"}, {"max_rows": 300}], ids=str)
def test_memory_is_flat_over_200_batches(options, tmp_path):
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
        options = {"out": tmp_path / "out", "batches_per_shard": 4}
    harvest(model, batches(), ["0"], loss=lambda m, x: m(x).square().sum(), **options)
    assert len(resident) == 200
    # After 60 batches the buffers have their size; 140 batches more would be 210 MB if their rows stayed.
    assert max(resident[60:]) - max(resident[40:60]) < 25
