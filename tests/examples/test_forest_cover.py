"""The Forest Cover example, on its quick settings and on the rows of the optional real data."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the network is a torch model")
pandas = pytest.importorskip("pandas", reason="pandas is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def data_home(shared_file, tmp_path):
    """Folder as fetch_covtype leaves it: two joblib files, which it then reads without looking at the network."""
    import joblib

    data = np.load(shared_file("covtype_sample.npz"))
    home = tmp_path / "data" / "covertype"
    home.mkdir(parents=True)
    joblib.dump(data["X"].astype(np.float64), home / "samples_py3", compress=3)
    joblib.dump(data["y"].astype(np.int32), home / "targets_py3", compress=3)
    return home.parent


def test_the_example_writes_its_tables_and_figure(data_home, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    out = tmp_path / "out"
    arguments = ["--quick", "--offline", "--data-home", str(data_home), "--out", str(out)]
    tables = importlib.import_module("forest_cover").main(arguments)
    printed = capsys.readouterr().out
    assert "Grid search, 2000 rows" in printed
    assert (out / "forest_cover.png").read_bytes().startswith(b"\x89PNG")
    for name, table in tables.items():
        assert len(pandas.read_csv(out / f"{name}.csv")) == len(table)

    grid = tables["grid"]
    assert set(grid.decomposition) == {"PCA", "ICA", "SemiNMF"}
    assert set(grid.n_components) == {4, 12}
    assert grid.balanced_accuracy.between(1 / 7, 1).all()  # always naming one class scores 1 / 7
    assert (grid.groupby("n_components").balanced_accuracy.mean().diff().dropna() > 0).all()

    alignment = tables["alignment"]
    assert len(alignment) == 3 * 2 * 2
    np.testing.assert_allclose(alignment.energy_ratio, alignment.share_tangent / alignment.share_normal, rtol=1e-12)
    assert (alignment.chance == 0.25).all()
    assert alignment.pvalue.between(1 / 1000, 1).all()

    classes = tables["classes"]
    assert set(classes.regime) == {"early", "late"}
    assert classes.groupby("regime").frequency.sum().to_numpy() == pytest.approx([1, 1])
    assert classes.n.nunique() == 1  # equally many rows of each class, or their scores could not be compared
    assert classes.isoscore_star.between(0, 1).all()
    recall = classes.groupby("regime").recall.mean()
    assert recall["late"] > recall["early"]


@pytest.fixture
def full_home(shared_file, tmp_path):
    """Folder with all 581 012 rows, as a user with a network has it after fetch_covtype."""
    import joblib

    data = np.load(shared_file("covtype_full_delta.npz"))
    measured = np.cumsum(data["quant_delta"], axis=1, dtype=np.int16).T  # int16, as the differences were taken
    X = np.zeros((len(measured), 54))
    X[:, :10] = measured
    rows = np.arange(len(X))
    X[rows, 10 + data["wilderness"]] = 1
    X[rows, 14 + data["soil"]] = 1
    home = tmp_path / "data" / "covertype"
    home.mkdir(parents=True)
    joblib.dump(X, home / "samples_py3")
    joblib.dump(data["cover_type"].astype(np.int32), home / "targets_py3")
    return home.parent


def test_the_full_settings_on_all_rows(full_home, tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable,
        "examples/forest_cover.py",
        "--offline",
        "--data-home",
        str(full_home),
        "--out",
        str(out),
    ]
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    grid, alignment, classes = (pandas.read_csv(out / f"{name}.csv") for name in ("grid", "alignment", "classes"))
    # UCI's counts: the commonest class, lodgepole pine, has 283 301 of 581 012 rows, the rarest 2747.
    shares = classes[classes.regime == "late"].set_index("class").frequency
    np.testing.assert_allclose(shares[["lodgepole pine", "cottonwood/willow"]], np.array([283301, 2747]) / 581012)
    assert set(grid.n_components) == {8, 16, 24}
    assert grid.balanced_accuracy.max() > 0.6
    # Early gradients lie in the proxy of the activations more than in a normal control, at every layer.
    early = alignment[alignment.regime == "early"]
    assert (early.energy_ratio > 1).all()
    assert (early.pvalue < 0.01).all()
    recall = classes.groupby("regime").recall.mean()
    assert recall["late"] > recall["early"] + 0.1


def test_without_data_it_says_in_one_sentence_how_to_get_it(tmp_path):
    command = [sys.executable, "examples/forest_cover.py", "--offline", "--data-home", str(tmp_path / "none")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "fetch_covtype() once with a network, or give --data-home" in done.stderr


def test_a_failed_download_is_the_same_sentence(tmp_path, monkeypatch):
    from urllib.error import URLError

    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("forest_cover")

    def unreachable(*_args, **_kwargs):
        raise URLError("no route to host")

    monkeypatch.setattr(example, "fetch_covtype", unreachable)
    with pytest.raises(SystemExit, match=r"was not downloaded .*no route to host.*: run sklearn"):
        example.main(["--data-home", str(tmp_path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_search_on_the_page_runs_as_typed():
    pages = (ROOT / "docs" / "forest_cover.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.+?)```", pages, re.S)
    names = {}
    exec(block, names)
    rng = np.random.default_rng(0)
    X = np.hstack([rng.standard_normal((90, 10)), rng.integers(0, 2, (90, 44))])
    names["search"].set_params(param_grid={**names["grid"], "decompose__n_components": [2, 3]})
    found = names["search"].fit(X, rng.integers(0, 3, 90))
    assert len(found.cv_results_["params"]) == 6
