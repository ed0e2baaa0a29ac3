"""Interrupted harvests are resumed to the bit, and damaged ones are never believed."""

import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gradients.small_harvests import SITES, VOCAB, Model, StopError, assert_same, content, make_batches, run, stopping  # noqa: E402

from isogeom.gradients import _manifest, harvest, open_harvest  # noqa: E402

torch.set_num_threads(1)


# ---------------------------------------------------------------------- resume


@pytest.mark.parametrize("options", [{}, {"max_rows": 17}, {"sample_rate": 0.3}, {"reduce": "moments"}], ids=str)
@pytest.mark.parametrize("n", range(8))
def test_interrupted_runs_end_with_the_same_bytes(n, options, memory_path):
    run(memory_path / "whole", **options)
    if n < 7:
        with pytest.raises(StopError):
            run(memory_path / "part", batches=stopping(n), **options)
    else:
        run(memory_path / "part", **options)
    model = Model()
    run(memory_path / "part", model, **options)
    assert model.runs == (7 - n // 2 * 2 if n < 7 else 0)  # finished blocks of 2 are not computed again
    assert content(memory_path / "part") == content(memory_path / "whole")


@pytest.mark.filterwarnings("ignore:random numbers were drawn")
def test_random_losses_resume_to_the_bit(memory_path):
    def noisy(model, batch):
        return (model(**batch) * torch.rand(1)).sum()

    run(memory_path / "whole", loss=noisy)
    with pytest.raises(StopError):
        run(memory_path / "part", batches=stopping(5), loss=noisy)
    run(memory_path / "part", loss=noisy)
    assert content(memory_path / "part") == content(memory_path / "whole")


@pytest.mark.parametrize(
    ("options", "fewest"),
    [({}, 21), ({"max_rows": 10}, 21), ({"reduce": "moments"}, 21), ({"reduce": "moments", "max_rows": 10}, 61)],
    ids=str,
)
def test_a_crash_at_every_write_resumes_to_the_same_bytes(options, fewest, memory_path, monkeypatch):
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
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    batches = make_batches(5)
    run(memory_path / "whole", batches=batches, **options)
    total = 10**9 - calls["left"]
    expected = content(memory_path / "whole")
    assert total >= fewest
    for at in range(total):
        shutil.rmtree(memory_path / "part", ignore_errors=True)
        calls["left"] = at
        with pytest.raises(Killed):
            run(memory_path / "part", batches=batches, **options)
        calls["left"] = 10**9
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(memory_path / "part", batches=batches, **options)
        assert content(memory_path / "part") == expected, at


def test_a_torn_last_line_is_dropped(memory_path):
    run(memory_path / "out")
    expected = content(memory_path / "out")
    manifest = memory_path / "out" / "manifest.jsonl"
    for size in (len(expected["manifest.jsonl"]) - 3, expected["manifest.jsonl"].index(b"\n") + 20, 10, 0):
        manifest.write_bytes(expected["manifest.jsonl"][:size])
        with pytest.raises(ValueError, match="is unfinished"):
            open_harvest(memory_path / "out")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(memory_path / "out")
        assert content(memory_path / "out") == expected


def test_a_damaged_line_is_named_and_harvested_again(memory_path):
    expected = run(memory_path / "out")
    manifest = memory_path / "out" / "manifest.jsonl"
    lines = manifest.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"n_rows":', b'"n_rows":1')
    manifest.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match="line 3 of its manifest is damaged"):
        open_harvest(memory_path / "out")
    model = Model()
    with pytest.warns(UserWarning, match="line 3 of .*manifest.jsonl is damaged"):
        assert_same(run(memory_path / "out", model), expected)
    assert model.runs == 5


@pytest.mark.parametrize("options", [{}, {"max_rows": 17}, {"reduce": "moments"}], ids=str)
def test_a_damaged_line_behind_the_end_is_dropped(options, memory_path):
    run(memory_path / "out", **options)
    manifest, model = memory_path / "out" / "manifest.jsonl", Model()
    shards = content(memory_path / "out" / "shards")
    with manifest.open("ab") as file:
        file.write(b"noise\n")
    with pytest.warns(UserWarning, match="line .* of .*manifest.jsonl is damaged"):
        run(memory_path / "out", model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(memory_path / "out", model, **options)
    assert model.runs == 0
    assert content(memory_path / "out" / "shards") == shards
    assert b"noise" not in manifest.read_bytes()


def test_a_damaged_header_is_refused(memory_path):
    run(memory_path / "out")
    manifest = memory_path / "out" / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes().replace(b'"seed":0', b'"seed":1', 1))
    before = content(memory_path / "out")
    with pytest.raises(ValueError, match=r"line 1 of .*manifest.jsonl is damaged.*delete this one to start over"):
        run(memory_path / "out")
    with pytest.raises(ValueError, match="is unfinished"):
        open_harvest(memory_path / "out")
    assert content(memory_path / "out") == before


@pytest.mark.parametrize("options", [{}, {"max_rows": 17}], ids=str)
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "empty"])
def test_a_damaged_shard_is_named_and_harvested_again(damage, options, memory_path):
    expected = harvest(Model(), make_batches(), SITES, **options)
    run(memory_path / "out", **options)
    path = memory_path / "out" / "shards" / "000001.01-block-in-0.gradients.npy"
    original = path.read_bytes()
    if damage == "flip":
        path.write_bytes(original[:-2] + bytes([original[-2] ^ 1]) + original[-1:])
    elif damage == "delete":
        path.unlink()
    else:
        path.write_bytes(original[:-5] if damage == "truncate" else b"")
    word = {"flip": "corrupt", "delete": "missing"}.get(damage, "truncated")
    with pytest.raises(ValueError, match=rf"shard .*000001.01-block-in-0.gradients.npy is {word}.*run the same call"):
        open_harvest(memory_path / "out")
    model = Model()
    with pytest.warns(UserWarning, match=rf"000001.01-block-in-0.gradients.npy is {word}.*harvested again"):
        assert_same(run(memory_path / "out", model, **options), expected)
    assert model.runs == 2
    assert path.read_bytes() == original
    assert_same(open_harvest(memory_path / "out"), expected)


def test_damaged_moments_start_over(memory_path):
    expected = run(memory_path / "out", reduce="moments")
    path = next((memory_path / "out" / "shards").glob("*.cross.npy"))
    path.write_bytes(path.read_bytes()[:-1])
    model = Model()
    with pytest.warns(UserWarning, match="cross.npy is truncated.*all batches are harvested again"):
        got = run(memory_path / "out", model, reduce="moments")
    assert model.runs == 7
    np.testing.assert_array_equal(got["embed"].cross, expected["embed"].cross)
    np.testing.assert_array_equal(open_harvest(memory_path / "out")["embed"].cross, expected["embed"].cross)


def drop_line(folder, number):
    path = Path(folder) / "manifest.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[number]
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"max_rows": 17}], ids=str)
def test_a_deleted_line_is_noticed_and_harvested_again(options, number, memory_path):
    expected = harvest(Model(), make_batches(), SITES, **options)
    run(memory_path / "out", **options)
    # With a budget every block has a line for its candidates and one for what is left of them.
    # The second is at first four lines on.
    for line in (number, number + 3) if options else (number,):
        drop_line(memory_path / "out", line)
    with pytest.raises(ValueError, match=r"is incomplete .*run the same call of harvest again"):
        open_harvest(memory_path / "out")
    model = Model()
    with pytest.warns(UserWarning, match="what is missing is harvested again"):
        assert_same(run(memory_path / "out", model, **options), expected)
    assert model.runs == (1 if number == 4 else 2)
    assert_same(open_harvest(memory_path / "out"), expected)


def test_candidates_are_not_taken_for_the_sample(memory_path):
    options = {"max_rows": 17}
    expected = harvest(Model(), make_batches(), SITES, **options)
    run(memory_path / "out", **options)
    with pytest.raises(StopError):
        run(memory_path / "part", batches=stopping(6), **options)
    shutil.copytree(memory_path / "part" / "shards", memory_path / "out" / "shards", dirs_exist_ok=True)
    drop_line(memory_path / "out", 5)
    with pytest.raises(ValueError, match="names only the candidates of block 0, not its sample"):
        open_harvest(memory_path / "out")
    model = Model()
    with pytest.warns(UserWarning, match="names only the candidates of block 0"):
        assert_same(run(memory_path / "out", model, **options), expected)
    assert model.runs == 0


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_deleted_line_counts_no_moments_twice(number, finished, memory_path):
    expected = run(memory_path / "whole", reduce="moments")
    run(memory_path / "out", reduce="moments")
    if not finished:
        drop_line(memory_path / "out", -1)
    drop_line(memory_path / "out", number)
    model = Model()
    with pytest.warns(UserWarning, match="all batches are harvested again"):
        got = run(memory_path / "out", model, reduce="moments")
    assert model.runs == 7
    assert got.n_rows == expected.n_rows == got["embed"].activations.count
    np.testing.assert_array_equal(got["embed"].cross, expected["embed"].cross)
    model = Model()
    assert run(memory_path / "out", model, reduce="moments").n_rows == expected.n_rows
    assert model.runs == 0


@pytest.mark.parametrize("options", [{}, {"max_rows": 17}, {"reduce": "moments"}], ids=str)
def test_an_interrupted_repair_is_not_finished(options, memory_path):
    expected = run(memory_path / "out", **options)
    before = content(memory_path / "out")
    sorted((memory_path / "out" / "shards").iterdir())[0].unlink()
    with pytest.warns(UserWarning, match="is missing"), pytest.raises(StopError):
        run(memory_path / "out", batches=stopping(3), **options)
    with pytest.raises(ValueError, match="is unfinished"):
        open_harvest(memory_path / "out")
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = run(memory_path / "out", model, **options)
    assert model.runs == (5 if "reduce" in options else 0)  # the block of the repair is kept
    after = content(memory_path / "out")
    del before["manifest.jsonl"], after["manifest.jsonl"]
    assert after == before
    if "reduce" in options:
        np.testing.assert_array_equal(got["embed"].cross, expected["embed"].cross)
    else:
        assert_same(open_harvest(memory_path / "out"), got)


def test_a_first_run_that_failed_binds_nobody(memory_path):
    with pytest.raises(ValueError, match="the loss of batch 0 is nan"):
        run(memory_path / "out", loss=lambda m, b: m(**b).sum() * torch.nan)
    run(memory_path / "out", seed=3)
    run(memory_path / "whole", seed=3)
    assert content(memory_path / "out") == content(memory_path / "whole")
    with pytest.raises(ValueError, match="seed: the store has 3"):
        run(memory_path / "out")


# ---------------------------------------------------------------------- what the caller draws


class SelfSeeding:
    """Start over with the same random batches, drawn from torch's global state."""

    def __iter__(self):
        torch.manual_seed(0)
        for _ in range(5):
            yield {"input_ids": torch.randint(0, VOCAB, (3, 4))}


def test_batches_are_drawn_in_the_callers_random_state(memory_path):
    plain, seen = list(SelfSeeding()), []

    def spy():
        for batch in SelfSeeding():
            seen.append(batch)
            yield batch

    after = torch.rand(2, generator=torch.Generator().set_state(torch.get_rng_state()))
    whole = run(memory_path / "whole", batches=spy())
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(plain, seen, strict=True))
    assert torch.equal(torch.rand(2), after)
    model = Model()
    assert_same(run(memory_path / "whole", model, batches=SelfSeeding()), whole)
    assert model.runs == 0
    fresh = ({"input_ids": torch.randint(0, VOCAB, (3, 4))} for _ in range(4))
    h = harvest(Model(), fresh, SITES)
    assert len({tuple(h.meta.token_id[h.meta.batch_id == i]) for i in range(4)}) == 4


def test_shards_are_found_from_another_working_directory(memory_path, monkeypatch):
    monkeypatch.chdir(memory_path)
    expected = harvest(Model(), make_batches(), SITES)
    h = run("out")
    opened = open_harvest("out")
    monkeypatch.chdir("/")
    assert_same(h, expected)
    assert_same(opened, expected)


def test_the_home_folder_is_found_and_files_are_refused(memory_path, monkeypatch):
    monkeypatch.setenv("HOME", str(memory_path))
    monkeypatch.setenv("USERPROFILE", str(memory_path))
    run("~/out")
    assert (memory_path / "out" / "manifest.jsonl").is_file()
    assert open_harvest("~/out").n_rows > 0
    (memory_path / "file").write_text("mine")
    for out in (memory_path / "file", memory_path / "file" / "out"):
        with pytest.raises(NotADirectoryError, match=r"out=.*cannot be a folder: .*file is a file"):
            run(out)
    assert (memory_path / "file").read_text() == "mine"
