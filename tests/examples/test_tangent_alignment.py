"""The main example, on its quick settings and on tiny Hugging Face models of every family."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the models are torch models")
pandas = pytest.importorskip("pandas", reason="pandas is not installed")

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (
    "model,gradient,probe,regime,n,r,e_T,e_N,chance,energy_ratio,ratio_to_mean_normal,pvalue,zscore,shuffled_share,"
    "delta_isotropy_tangent,delta_isotropy_normal,sign_test_pvalue,n_groups"
)
FAMILIES = ["gpt_neox", "llama", "olmo", "eurobert", "modernbert", "camembert"]


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        yield importlib.import_module("tangent_alignment")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the script as typed, with the same seed."""
    folders = [tmp_path_factory.mktemp("run") for _ in range(2)]
    outputs = []
    for folder in folders:
        command = [sys.executable, "examples/tangent_alignment.py", "--quick", "--seed", "3", "--out", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ.copy(), check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done)
    return folders, outputs


def test_the_script_writes_the_table_and_the_figure(runs):
    (folder, _), (done, _) = runs
    lines = (folder / "tangent_alignment.csv").read_text().splitlines()
    assert lines[0] == COLUMNS
    assert (folder / "tangent_alignment.png").read_bytes().startswith(b"\x89PNG")
    assert str(folder / "tangent_alignment.csv") in done.stdout
    assert str(folder / "tangent_alignment.png") in done.stdout
    assert "loss=" in done.stderr
    assert len([line for line in done.stdout.splitlines() if line.strip().startswith("tiny")]) == len(lines) - 1


def test_two_runs_with_one_seed_write_the_same_bytes(runs):
    (first, second), _ = runs
    for name in ("tangent_alignment.csv", "tangent_alignment.png"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_the_table_has_a_row_per_probe_and_regime_and_consistent_numbers(runs):
    (folder, _), _ = runs
    table = pandas.read_csv(folder / "tangent_alignment.csv")
    rows = table[table.gradient == "rows"]
    assert set(rows.probe) == {"E0_out", "T1_in", "T1_out", "Tm", "Tl"}
    assert set(table[table.gradient == "weight"].probe) == {"T1_in", "T1_out", "Tm", "Tl"}
    assert set(zip(table.model, table.regime)) == {("tiny", "early"), ("tiny", "late"), ("tiny-random", "init")}
    assert len(table) == 3 * 9
    np.testing.assert_allclose(table.energy_ratio, table.e_T / table.e_N)
    np.testing.assert_allclose(table.chance, table.r / 64)
    assert (table.n_groups >= 10).all()
    assert table.pvalue.between(1e-3, 1).all()
    assert table.shuffled_share.notna().equals(table.gradient == "weight")
    # 20 batches of 2 windows of 64: 14 are tested, and the last position of a window has no gradient.
    assert set(table.n) == {14 * 2 * 63}


def test_training_is_what_aligns_the_gradient_rows(runs):
    (folder, _), _ = runs
    table = pandas.read_csv(folder / "tangent_alignment.csv")
    rows = table[table.gradient == "rows"].set_index(["regime", "probe"]).energy_ratio
    assert (rows["late"] > 1.5 * rows["init"]).all()


def hub_command(folder, early, late, text, out):
    options = {"model": folder, "revision-early": early, "revision-late": late, "text": text, "out": out, "context": 16}
    return ["--quick", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


def test_another_decomposition_and_rank(example, tmp_path, tiny_checkpoints):
    folder, text = tiny_checkpoints
    options = ["--decomposition", "semi-nmf", "--n-directions", "3"]
    table = example.main(hub_command(folder, "step1000", "step143000", text, tmp_path) + options)
    assert set(table.r) == {3}
    assert np.isfinite(table.zscore).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_models_by_path(example, tmp_path, family):
    tiny_models = pytest.importorskip("tiny_models", reason="the hf extra is not installed")
    folder = tiny_models.save_checkpoints(tmp_path / family, family, ["step10", "step100"])
    text = tmp_path / "text.txt"
    text.write_text(tiny_models.TEXT, encoding="utf-8")
    table = example.main(hub_command(folder, "step10", "step100", text, tmp_path / "out"))
    assert set(table.model) == {family, f"{family}-random"}
    assert set(table.regime) == {"early", "late", "init"}
    assert {"T1_in", "T1_out", "Tm", "Tl", "E0_out"} <= set(table[table.gradient == "rows"].probe)
    assert table.e_T.between(0, 1).all()
    assert np.isfinite(table.energy_ratio).all()
    # The early and the late model are both random here: nothing may look aligned by more than a random subspace allows.
    first = table[(table.gradient == "rows") & (table.probe == "T1_in")]
    assert (first.e_T < 0.9).all()
    assert (tmp_path / "out" / "tangent_alignment.csv").read_text().startswith(COLUMNS)


def test_identical_revisions_are_an_error(example, tmp_path, tiny_checkpoints):
    folder, text = tiny_checkpoints
    with pytest.raises(ValueError, match="identical parameters"):
        example.main(hub_command(folder, "step1000", "step1000", text, tmp_path))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--n-directions", "0"], "0 is not positive"),
        (["--seed", "-1"], "-1 is negative"),
        (["--seed", "x"], "invalid _natural value"),
    ],
)
def test_bad_numbers_are_refused_by_the_parser(example, capsys, argv, message):
    with pytest.raises(SystemExit):
        example.main(argv)
    assert message in capsys.readouterr().err


def test_a_rank_without_a_control_is_refused_before_training(example, monkeypatch):
    import _tiny_lm

    monkeypatch.setattr(_tiny_lm, "train", lambda *_: pytest.fail("training started"))
    with pytest.raises(SystemExit, match="--n-directions 40 is more than half of the model's width 64"):
        example.main(["--quick", "--n-directions", "40"])


def test_half_a_hub_command_is_an_error(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--model", "x"])
    assert "go together" in capsys.readouterr().err
