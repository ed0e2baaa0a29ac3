"""Harvests on disk that are refused: of another call, of another writer, on a full disk."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gradients.small_harvests import Model, content, make_batches, run  # noqa: E402

from isogeom.gradients import _manifest, open_harvest  # noqa: E402

torch.set_num_threads(1)


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
def test_another_call_is_refused_and_the_difference_named(reduce, change, match, memory_path):
    run(memory_path / "out", reduce=reduce)
    before = content(memory_path / "out")
    if reduce is not None and "reduce" in change:
        change, match = {"reduce": None}, "reduce: the store has 'moments', this call None"
    elif reduce is not None and {"max_rows", "dtype"} & change.keys():
        pytest.skip("goes with rows only")
    with pytest.raises(ValueError, match=match):
        run(memory_path / "out", **{"reduce": reduce, **change})
    assert content(memory_path / "out") == before


def test_more_batches_than_whole_blocks_are_refused(memory_path):
    run(memory_path / "out", batches=make_batches(6))
    with pytest.raises(ValueError, match="it ended after 6 batches, but there are more now"):
        run(memory_path / "out", batches=make_batches(7))


def test_other_versions_are_refused(memory_path, monkeypatch):
    run(memory_path / "out")
    monkeypatch.setattr("isogeom.__version__", "9.9")
    with pytest.raises(ValueError, match=r"version of isogeom: the store has '.*', this call '9.9'"):
        run(memory_path / "out")


def test_a_lambda_is_known_by_its_code(memory_path):
    run(memory_path / "out", mask=lambda b: b["input_ids"] > 1)
    model = Model()
    run(memory_path / "out", model, mask=lambda b: b["input_ids"] > 1)
    assert model.runs == 0
    with pytest.raises(ValueError, match="mask: "):
        run(memory_path / "out", mask=lambda b: b["input_ids"] > 2)


def test_folders_of_something_else_are_refused(memory_path):
    (memory_path / "empty" / "shards").mkdir(parents=True)
    run(memory_path / "empty")  # an interrupted run leaves that
    shutil.rmtree(memory_path / "empty")
    (memory_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no harvest"):
        run(memory_path)
    with pytest.raises(FileNotFoundError, match="holds no harvest"):
        open_harvest(memory_path)
    assert content(memory_path) == {"notes.txt": b"mine"}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder where nobody can write")
def test_a_folder_that_cannot_be_made_is_named():
    with pytest.raises(FileNotFoundError, match=r"out='/proc/harvest' could not be made .*: name a folder"):
        run("/proc/harvest")
    with pytest.raises(ValueError, match="out='~nobody-of-that-name/rows' names a home folder that is not known here"):
        run("~nobody-of-that-name/rows")


@pytest.mark.skipif(os.name != "posix", reason="locks are posix only")
def test_two_writers_are_refused(memory_path):
    def batches():
        with pytest.raises(RuntimeError, match="is being written by another process"):
            run(memory_path / "out")
        yield from make_batches()

    run(memory_path / "out", batches=batches())


@pytest.mark.parametrize("options", [{}, {"max_rows": 17}, {"reduce": "moments"}], ids=str)
@pytest.mark.parametrize("where", ["shard", "manifest"])
def test_a_full_disk_says_so_and_leaves_nothing_half_written(where, options, memory_path, monkeypatch):
    run(memory_path / "whole", **options)
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
            run(memory_path / "part", **options)
    assert caught.value.errno == errno.ENOSPC
    assert not list((memory_path / "part").rglob("*.tmp"))
    with pytest.raises(ValueError, match="unfinished"):
        open_harvest(memory_path / "part")
    run(memory_path / "part", **options)
    assert content(memory_path / "part") == content(memory_path / "whole")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_really_full_device(memory_path):
    (memory_path / "shards").mkdir()
    (memory_path / "shards" / "x.npy.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="the disk is full"):
        _manifest.write_shard(memory_path, "x.npy", np.ones(3))
    assert list((memory_path / "shards").iterdir()) == []
