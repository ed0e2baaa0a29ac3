"""Folders of moments: opened again, merged, and reduced from a sample of rows."""

import os
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gradients.small_harvests import SITES, Model, StopError, content, make_batches, run, stopping, with_ids  # noqa: E402

from isogeom.gradients import HarvestMoments, harvest, open_harvest  # noqa: E402

torch.set_num_threads(1)
SAMPLE = {"reduce": "moments", "max_rows": 17}


def assert_equal(got, expected):
    """Equal to the last bit."""
    assert isinstance(got, HarvestMoments)
    assert list(got) == list(expected)
    assert got.n_rows == expected.n_rows
    np.testing.assert_array_equal(got.losses, expected.losses)
    for site in expected:
        assert (got[site].cross is None) == (expected[site].cross is None)
        if expected[site].cross is not None:
            np.testing.assert_array_equal(got[site].cross, expected[site].cross)
        for kind in ("activations", "gradients"):
            a, b = getattr(got[site], kind), getattr(expected[site], kind)
            assert (a is None) == (b is None)
            if b is not None:
                assert a.count == b.count
                assert type(a.count) is type(b.count)
                np.testing.assert_array_equal(a.mean, b.mean)
                np.testing.assert_array_equal(a.scatter, b.scatter)
                assert a.__getstate__()["_lost"] == b.__getstate__()["_lost"]


def assert_moments_of(got, rows):
    """The moments of rows, which are computed here in float64 from all of them."""
    assert got.n_rows == rows.n_rows
    np.testing.assert_array_equal(got.losses, rows.losses)
    for site in rows:
        X, G = (np.asarray(getattr(rows[site], kind), np.float64) for kind in ("activations", "gradients"))
        np.testing.assert_allclose(got[site].cross, X.T @ G, rtol=1e-5, atol=1e-6 * np.abs(X.T @ G).max())
        for data, m in ((X, got[site].activations), (G, got[site].gradients)):
            assert m.count == len(data)
            np.testing.assert_allclose(m.mean, data.mean(0), rtol=1e-5, atol=1e-6 * np.abs(data).max())
            np.testing.assert_allclose(m.covariance(), np.cov(data.T), rtol=1e-4, atol=1e-6 * data.var(0).max())


# ---------------------------------------------------------------------- opened again


@pytest.mark.parametrize(
    "options",
    [{}, {"collect": ["act"]}, {"collect": ["grad"]}, {"sample_rate": 0.1}, {"max_rows": 17}, {"batches_per_shard": 1}],
    ids=str,
)
def test_a_folder_of_moments_is_opened_again(options, memory_path):
    expected = run(memory_path / "a", reduce="moments", **options)
    for got in (open_harvest(memory_path / "a"), open_harvest([str(memory_path / "a")], verify=False)):
        assert_equal(got, expected)
    model = Model()
    assert_equal(run(memory_path / "a", model, reduce="moments", **options), expected)
    assert model.runs == 0


def test_a_harvest_without_a_loss_is_opened_again(memory_path):
    h = harvest(Model(), make_batches(), ["embed"], collect=["act"], reduce="moments", out=memory_path)
    assert np.isnan(open_harvest(memory_path).losses).all()
    assert_equal(open_harvest(memory_path), h)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damaged_moments_are_named_and_not_read(damage, memory_path):
    run(memory_path / "a", reduce="moments")
    path = next((memory_path / "a" / "shards").glob("*.cross.npy"))
    original = path.read_bytes()
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(original[:-1] if damage == "truncate" else original[:-1] + bytes([original[-1] ^ 1]))
    word = {"flip": "is corrupt", "truncate": "is truncated", "delete": "is missing"}[damage]
    with pytest.raises(ValueError, match=rf"{path.name} {word}.*run the same call of harvest again"):
        open_harvest(memory_path / "a")


def test_an_unfinished_folder_of_moments_is_refused(memory_path):
    with pytest.raises(StopError):
        run(memory_path / "a", batches=stopping(5), reduce="moments")
    with pytest.raises(ValueError, match=r"is unfinished \(it was interrupted\)"):
        open_harvest(memory_path / "a")


# ---------------------------------------------------------------------- merged


@pytest.mark.parametrize("options", [{}, {"sample_rate": 0.5}, {"collect": ["act"]}], ids=str)
def test_folders_of_moments_are_merged(options, memory_path):
    batches = with_ids(make_batches())
    parts = [run(memory_path / f"rank{r}", batches=batches[r::2], reduce="moments", **options) for r in range(2)]
    folders = [memory_path / "rank0", memory_path / "rank1"]
    assert_equal(open_harvest(folders), parts[0].merge(parts[1]))
    whole = harvest(Model(), batches, SITES, reduce="moments", **options)
    got = open_harvest(folders)
    assert got.n_rows == whole.n_rows
    np.testing.assert_array_equal(np.sort(got.losses), np.sort(whole.losses))
    for site in SITES:
        a, b = got[site].activations, whole[site].activations
        np.testing.assert_allclose(a.mean, b.mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(a.covariance(), b.covariance(), rtol=1e-4, atol=1e-6)


def test_samples_of_two_processes_are_merged(memory_path):
    batches = make_batches()
    parts = [run(memory_path / str(r), batches=batches[r::2], **SAMPLE) for r in range(2)]
    got = open_harvest([memory_path / "0", memory_path / "1"])
    assert_equal(got, parts[0].merge(parts[1]))
    assert got.n_rows == 34


def test_folders_of_moments_that_do_not_belong_together(memory_path):
    batches = make_batches()
    run(memory_path / "a", batches=batches[:4], reduce="moments")
    run(memory_path / "rows", batches=batches[4:])
    run(memory_path / "other", Model(seed=1), batches=batches[4:], reduce="moments")
    run(memory_path / "overlap", batches=batches[3:], reduce="moments")
    with pytest.raises(
        ValueError, match=r"rows does not belong to .*a: reduce: the store has 'moments', this call None"
    ):
        open_harvest([memory_path / "a", memory_path / "rows"])
    with pytest.raises(ValueError, match=r"other does not belong to .*a: model_sha256"):
        open_harvest([memory_path / "a", memory_path / "other"])
    with pytest.raises(ValueError, match=r"batch 0 of .*overlap has the contents of batch 3 of .*a: .* count twice"):
        open_harvest([memory_path / "a", memory_path / "overlap"])


# ---------------------------------------------------------------------- of a sample


@pytest.mark.parametrize("max_rows", [1, 17, 10_000])
@pytest.mark.parametrize("rows", ["tokens", "mean"])
def test_moments_of_a_sample_are_those_of_its_rows(rows, max_rows, memory_path):
    options = {"max_rows": max_rows, "rows": rows}
    sample = harvest(Model(), make_batches(), SITES, **options)
    memory = harvest(Model(), make_batches(), SITES, reduce="moments", **options)
    disk = run(memory_path / "a", reduce="moments", **options)
    if max_rows > 1:
        assert_moments_of(memory, sample)
        assert_moments_of(disk, sample)
    else:
        assert memory.n_rows == disk.n_rows == 1
        np.testing.assert_allclose(disk["embed"].activations.mean, sample["embed"].activations[0], rtol=1e-6)
    assert_equal(open_harvest(memory_path / "a"), disk)


def test_one_shot_batches_and_any_batch_size_give_the_same_sample():
    ids = torch.cat([batch["input_ids"][:, :3] for batch in make_batches()])
    one = harvest(Model(), iter([{"input_ids": ids}]), SITES, **SAMPLE)
    for size in (1, 4):
        got = harvest(Model(), ({"input_ids": part} for part in ids.split(size)), SITES, **SAMPLE)
        assert got.n_rows == one.n_rows == 17
        for site in SITES:
            np.testing.assert_allclose(got[site].cross, one[site].cross, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(got[site].gradients.mean, one[site].gradients.mean, rtol=1e-4, atol=1e-7)


def test_a_folder_of_a_sample_holds_no_rows_in_the_end(memory_path):
    run(memory_path / "a", **SAMPLE)
    names = sorted(path.name for path in (memory_path / "a" / "shards").iterdir())
    assert len(names) == 9
    assert all(name.endswith((".moments.npy", ".cross.npy")) for name in names)
    d = 5
    sizes = [path.stat().st_size for path in (memory_path / "a" / "shards").glob("*embed.*.moments.npy")]
    assert sizes == [128 + 8 * (2 + d + d * d)] * 2


@pytest.mark.parametrize("n", range(1, 8))
def test_interrupted_samples_end_with_the_same_bytes(n, memory_path):
    run(memory_path / "whole", **SAMPLE)
    if n < 7:
        with pytest.raises(StopError):
            run(memory_path / "part", batches=stopping(n), **SAMPLE)
    model = Model()
    run(memory_path / "part", model, **SAMPLE)
    assert model.runs == 7 - n // 2 * 2 if n < 7 else 7
    assert content(memory_path / "part") == content(memory_path / "whole")


def test_a_sample_that_is_reduced_takes_no_more_batches(memory_path):
    run(memory_path / "a", batches=make_batches(6), **SAMPLE)
    manifest = memory_path / "a" / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    manifest.write_bytes(b"".join(lines[:-1]))  # stopped before the line that ends it
    with pytest.raises(ValueError, match="is unfinished"):
        open_harvest(memory_path / "a")
    with pytest.raises(ValueError, match="it ended after 6 batches, but there are more now"):
        run(memory_path / "a", batches=make_batches(7), **SAMPLE)
    with pytest.raises(ValueError, match="it holds 6 batches, but there are only 5 now"):
        run(memory_path / "a", batches=make_batches(5), **SAMPLE)
    model = Model()
    run(memory_path / "a", model, batches=make_batches(6), **SAMPLE)
    assert model.runs == 0
    assert manifest.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("line", [1, 2, 4, 5])
def test_a_sample_with_a_deleted_line_is_harvested_again(line, memory_path):
    expected = run(memory_path / "a", **SAMPLE)
    manifest = memory_path / "a" / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    assert len(lines) == 7
    del lines[line]
    manifest.write_bytes(b"".join(lines))
    if line == 4:  # the candidates of the last block, which the moments replace
        assert_equal(open_harvest(memory_path / "a"), expected)
        return
    with pytest.raises(ValueError, match="run the same call of harvest again"):
        open_harvest(memory_path / "a")
    model = Model()
    with pytest.warns(UserWarning, match="harvested again"):
        got = run(memory_path / "a", model, **SAMPLE)
    assert model.runs == 7
    assert_equal(got, expected)
    assert_equal(open_harvest(memory_path / "a"), expected)


def test_damaged_candidates_are_harvested_again(memory_path):
    expected = run(memory_path / "whole", **SAMPLE)
    with pytest.raises(StopError):
        run(memory_path / "a", batches=stopping(5), **SAMPLE)
    path = sorted((memory_path / "a" / "shards").glob("000001.*gradients*"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    model = Model()
    with pytest.warns(UserWarning, match=rf"{path.name} is truncated.*its batches are harvested again"):
        got = run(memory_path / "a", model, **SAMPLE)
    assert model.runs == 2 + 3
    assert_equal(got, expected)


def test_damaged_moments_of_a_sample_start_over(memory_path):
    expected = run(memory_path / "a", **SAMPLE)
    path = sorted((memory_path / "a" / "shards").iterdir())[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="is truncated.*all batches are harvested again"), pytest.raises(StopError):
        run(memory_path / "a", batches=stopping(5), **SAMPLE)
    with pytest.raises(ValueError, match="is unfinished"):
        open_harvest(memory_path / "a")
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(run(memory_path / "a", model, **SAMPLE), expected)
    assert model.runs == 3  # the blocks of the repair are kept
    assert_equal(open_harvest(memory_path / "a"), expected)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("out", [False, True])
def test_memory_of_a_sample_is_that_of_its_rows(out, memory_path):
    """Every batch has 1.5 MB of rows, 300 MB in all; the sample has 1.5 MB."""
    d, resident = 192, []
    model = torch.nn.Sequential(torch.nn.Linear(4, d), torch.nn.Tanh(), torch.nn.Linear(d, 1))
    x = torch.ones(16, 64, 4)

    def batches():
        for _ in range(200):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
            yield x

    options = {"out": memory_path / "out", "batches_per_shard": 4} if out else {}
    h = harvest(
        model, batches(), ["0"], loss=lambda m, x: m(x).square().sum(), max_rows=1000, reduce="moments", **options
    )
    assert h.n_rows == 1000
    assert max(resident[60:]) - max(resident[40:60]) < 25
