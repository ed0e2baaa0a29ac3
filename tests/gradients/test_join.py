"""Folders of several processes, read as one harvest."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gradients.small_harvests import SITES, Model, assert_same, make_batches, run, with_ids  # noqa: E402

from isogeom.gradients import harvest, open_harvest  # noqa: E402

torch.set_num_threads(1)


def test_folders_of_several_processes_are_joined(memory_path):
    batches = make_batches()
    expected = harvest(Model(), batches, SITES)
    run(memory_path / "rank0", batches=batches[:4])
    run(memory_path / "rank1", batches=batches[4:])
    assert_same(open_harvest([memory_path / "rank0", memory_path / "rank1"]), expected)
    run(memory_path / "other", Model(seed=1), batches=batches[4:])
    with pytest.raises(ValueError, match=r"other does not belong to .*rank0: model_sha256"):
        open_harvest([memory_path / "rank0", memory_path / "other"])
    with pytest.raises(ValueError, match="path is an empty list"):
        open_harvest([])


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"path": 3}, TypeError, "path must be the folder of a harvest, or a list of them, got 3"),
        ({"path": [b"rows"]}, TypeError, "path must be the folder of a harvest, .* got b'rows'"),
        ({"path": "~nobody-of-that-name/rows"}, ValueError, "names a home folder that is not known here"),
        ({"verify": "yes"}, TypeError, "verify must be True or False, got 'yes'"),
        ({"allow_repeats": "no"}, TypeError, "allow_repeats must be True or False, got 'no'"),
    ],
)
def test_wrong_arguments_of_open_harvest(change, error, match, memory_path):
    run(memory_path / "out")
    arguments = {"path": memory_path / "out", **change}
    with pytest.raises(error, match=match):
        open_harvest(arguments.pop("path"), **arguments)


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("options", [{}, {"sample_rate": 0.5}, {"rows": "mean", "sample_rate": 0.5}], ids=str)
def test_rows_do_not_depend_on_the_number_of_processes(options, n_ranks, memory_path):
    batches = with_ids(make_batches())
    whole = harvest(Model(), batches, SITES, **options)
    for rank in range(n_ranks):
        run(memory_path / f"rank{rank}", batches=batches[rank::n_ranks], **options)
    h = open_harvest([memory_path / f"rank{rank}" for rank in range(n_ranks)])
    order = np.lexsort((h.meta.position, h.meta.sample_id))
    for name in ("sample_id", "position", "token_id"):
        np.testing.assert_array_equal(h.meta[name][order], whole.meta[name])
    for site in SITES:
        for kind in ("activations", "gradients"):
            np.testing.assert_array_equal(getattr(h[site], kind)[order], getattr(whole[site], kind))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{"max_rows": 1}, {"max_rows": 17}, {"max_rows": 1000}, {"rows": "last", "max_rows": 9}], ids=str
)
def test_a_sample_of_several_processes_is_that_of_one(options, dtype, memory_path):
    batches = with_ids(make_batches())
    run(memory_path / "whole", batches=batches, dtype=dtype, **options)
    whole = open_harvest(memory_path / "whole")
    for rank in range(3):
        run(memory_path / str(rank), batches=batches[rank::3], dtype=dtype, **options)
    h = open_harvest([memory_path / str(rank) for rank in range(3)])
    order = np.lexsort((h.meta.position, h.meta.sample_id))
    for name in ("sample_id", "position", "token_id"):
        np.testing.assert_array_equal(h.meta[name][order], whole.meta[name])
    for site in SITES:
        rows, expected = h[site].gradients, np.asarray(whole[site].gradients)
        np.testing.assert_array_equal(rows[order], expected)
        back = np.argsort(order)
        np.testing.assert_array_equal(np.asarray(rows), expected[back])
        np.testing.assert_array_equal(rows[::-1], expected[back][::-1])
        np.testing.assert_array_equal(rows[1:8], expected[back][1:8])
        np.testing.assert_allclose(rows.mean(axis=0), expected.mean(axis=0), rtol=1e-5, atol=1e-8)
        blocks = [block[site].gradients for block in h.iter_blocks(4)]
        np.testing.assert_array_equal(np.concatenate(blocks), expected[back])


def test_samples_without_ids_are_those_of_every_folder(memory_path):
    batches = make_batches()
    parts = [run(memory_path / str(r), batches=batches[r::2], max_rows=9) for r in range(2)]
    h = open_harvest([memory_path / "0", memory_path / "1"])
    assert h.n_rows == 18
    for site in SITES:
        expected = np.concatenate([part[site].gradients[:] for part in parts])
        np.testing.assert_array_equal(np.asarray(h[site].gradients), expected)


# ---------------------------------------------------------------------- rows that would count twice


@pytest.mark.parametrize("reduce", [None, "moments"])
def test_a_folder_that_is_named_twice(reduce, memory_path):
    run(memory_path / "a", reduce=reduce)
    (memory_path / "link").symlink_to(memory_path / "a", target_is_directory=True)
    with pytest.raises(ValueError, match=r"path names .*a twice: its rows would count twice"):
        open_harvest([memory_path / "a", memory_path / "a"])
    for other in (memory_path / "link", str(memory_path / "a" / ".." / "a")):
        with pytest.raises(ValueError, match=r"path names .*a again as .*: its rows would count twice"):
            open_harvest([memory_path / "a", other], allow_repeats=True)


@pytest.mark.parametrize("reduce", [None, "moments"])
def test_batches_that_lie_in_two_folders(reduce, memory_path):
    batches = make_batches()
    run(memory_path / "a", batches=batches[:4], reduce=reduce)
    run(memory_path / "b", batches=batches[5:], reduce=reduce)
    run(memory_path / "c", batches=[*batches[4:5], batches[2]], reduce=reduce)
    folders = [memory_path / name for name in "abc"]
    with pytest.raises(ValueError, match=r"batch 1 of .*c has the contents of batch 2 of .*a: .*allow_repeats=True"):
        open_harvest(folders)
    h = open_harvest(folders, allow_repeats=True)
    everything = [*batches[:4], *batches[5:], batches[4], batches[2]]
    expected = harvest(Model(), everything, SITES, reduce=reduce)
    assert h.n_rows == expected.n_rows
    np.testing.assert_array_equal(h.losses, expected.losses)
    if reduce is None:
        assert_same(h, expected)


def test_equal_batches_of_one_call_are_its_own_business(memory_path):
    batches = make_batches(3)
    run(memory_path / "a", batches=[*batches, *batches])
    assert open_harvest(memory_path / "a").n_rows == 2 * harvest(Model(), batches, SITES).n_rows


def test_samples_that_lie_in_two_folders(memory_path):
    batches = with_ids(make_batches())
    run(memory_path / "a", batches=batches[:4])
    shutil.copytree(memory_path / "a", memory_path / "copy")
    with pytest.raises(ValueError, match=r"batch 0 of .*copy has the contents of batch 0 of .*a"):
        open_harvest([memory_path / "a", memory_path / "copy"])
    with pytest.raises(ValueError, match=r"copy and .*a both hold rows of sample 0 \(12 samples in all\)"):
        open_harvest([memory_path / "a", memory_path / "copy"], allow_repeats=True)
    # The same samples, cut into batches in another way.
    mixed = [{key: torch.cat([batches[i][key][:2] for i in (0, 3)]) for key in batches[0]}]
    run(memory_path / "b", batches=batches[4:])
    run(memory_path / "c", batches=mixed)
    with pytest.raises(ValueError, match=r"c and .*a both hold rows of sample 0 \(4 samples in all\)"):
        open_harvest([memory_path / "b", memory_path / "a", memory_path / "c"])


def test_ids_come_with_every_folder_or_none(memory_path):
    batches = make_batches()
    run(memory_path / "a", batches=batches[:4])
    run(memory_path / "b", batches=with_ids(batches[4:]))
    with pytest.raises(ValueError, match=r"the batches of .*b brought a sample_id, those of .*a did not"):
        open_harvest([memory_path / "a", memory_path / "b"])


# ---------------------------------------------------------------------- torch.distributed

GLOO_WORKER = """
import sys, torch, torch.distributed as dist
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from gradients.small_harvests import SITES, Model, make_batches, with_ids
from isogeom.gradients import harvest

rank, root = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=2)
share = with_ids(make_batches())[rank::2]
options = {"sample_rate": 0.5, "batches_per_shard": 2}
harvest(Model(), share, SITES, out=root / f"rows{rank}", **options)
mine = harvest(Model(), share, SITES, reduce="moments", **options)
harvest(Model(), share, SITES, reduce="moments", out=root / f"moments{rank}", **options)
everything = [None, None]
dist.all_gather_object(everything, mine)
merged = everything[0].merge(everything[1])
if rank == 0:
    torch.save({site: (m.cross, m.gradients.covariance()) for site, m in merged.items()}, root / "merged.pt")
dist.barrier()
dist.destroy_process_group()
"""


def test_two_processes_of_torch_distributed(memory_path):
    if not torch.distributed.is_available():
        pytest.skip("torch.distributed is not available")
    tests = Path(__file__).parents[1]
    commands = [
        [sys.executable, "-c", GLOO_WORKER, str(r), str(memory_path), str(memory_path / "gloo"), tests]
        for r in range(2)
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        for command in commands
    ]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    whole = harvest(Model(), make_batches(), SITES, sample_rate=0.5)
    h = open_harvest([memory_path / "rows0", memory_path / "rows1"])
    order = np.lexsort((h.meta.position, h.meta.sample_id))
    gathered = torch.load(memory_path / "merged.pt", weights_only=False)
    opened = open_harvest([memory_path / "moments0", memory_path / "moments1"])
    assert opened.n_rows == whole.n_rows
    for name in ("sample_id", "position", "token_id"):
        np.testing.assert_array_equal(h.meta[name][order], whole.meta[name])
    for site in SITES:
        np.testing.assert_array_equal(h[site].gradients[order], whole[site].gradients)
        for cross, covariance in (gathered[site], (opened[site].cross, opened[site].gradients.covariance())):
            np.testing.assert_allclose(cross, whole[site].activations.T @ whole[site].gradients, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(covariance, np.cov(whole[site].gradients.T), rtol=1e-4, atol=1e-7)
