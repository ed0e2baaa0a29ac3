"""The example of intrinsic dimensions, on its quick settings."""

import importlib
from pathlib import Path

import pytest

pandas = pytest.importorskip("pandas", reason="pandas is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_example_writes_its_tables_and_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    importlib.import_module("intrinsic_dimension").main(["--quick", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "IDProfile of 600 rows" in printed
    layers = pandas.read_csv(tmp_path / "layers.csv")
    assert len(layers) == 7 * 3
    assert (layers["lo"] < layers["dimension"]).all()
    assert (layers["dimension"] < layers["hi"]).all()
    # 64 pixels of digits: published estimates lie between 5 and 12, never near 64.
    assert layers["dimension"].between(3, 15).all()
    assert (tmp_path / "profile.png").stat().st_size > 10_000
    assert set(pandas.read_csv(tmp_path / "profile.csv")["estimator"]) == {"gride", "twonn", "binomial"}
