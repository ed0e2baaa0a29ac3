"""What the README and the docs tell people to type runs as typed."""

import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(path, language="python"):
    text = (ROOT / path).read_text(encoding="utf-8")
    return [block for block in re.findall(rf"```{language}\n(.*?)```", text, re.S) if ">>>" not in block]


@pytest.fixture(scope="module")
def quickstart():
    """Names after the set-up of the quick start and the snippet of the README, and after the rest of the quick "
    "start."""
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("pandas", reason="pandas is not installed")
    names = {}
    setup, *rest = code_blocks("docs/quickstart.md")
    exec(setup, names)
    (snippet,) = code_blocks("README.md")
    # The last line shows its value in a notebook: keep it.
    head, last = snippet.rstrip().rsplit("\n", 1)
    exec(head, names)
    names["best_params"] = eval(last, names)
    later = dict(names)
    for block in rest:
        exec(block, later)
    return names, later


def test_the_snippet_runs_as_typed(quickstart):
    names, _ = quickstart
    assert names["X"].shape == names["G"].shape == (12 * 8 * 16, 48)
    assert names["X"].dtype == names["G"].dtype == "float32"
    assert {"sample_id", "position", "token_id"} <= set(names["h"].meta.dtype.names)
    assert names["r"].to_frame().shape[0] == 1
    assert names["best_params"]["n_directions"] in (4, 8, 16)


def test_the_quick_start_runs_as_typed(quickstart):
    import torch

    _, names = quickstart
    assert isinstance(names["coordinates"], torch.Tensor)
    assert names["same"].share_tangent == pytest.approx(names["result"].share_tangent, rel=1e-6)


def test_the_user_guide_runs_as_typed():
    names = {}
    for block in code_blocks("docs/user_guide.md"):
        exec(block, names)
    assert len(names["curve"]) == 5
    assert all(a <= b + 1e-12 for a, b in zip(names["curve"], names["curve"][1:]))


def test_the_page_on_dimension_runs_as_typed():
    names = {}
    for block in code_blocks("docs/dimension.md"):
        exec(block, names)
    assert all(3 < value < 5 for value in names["dimensions"].values())
    assert names["features"].shape == (2000, 51)


def test_doctests_of_the_docs():
    import doctest

    for path in sorted((ROOT / "docs").glob("*.md")):
        failed, _ = doctest.testfile(str(path), module_relative=False)
        assert failed == 0, path.name


def test_links_point_to_something():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_hub_command_of_the_readme_runs_on_a_local_model(tmp_path, monkeypatch, tiny_checkpoints):
    (line,) = re.findall(r"^python (examples/tangent_alignment\.py --model .*)$", README, re.M)
    argv = shlex.split(line)[1:]
    folder, text = tiny_checkpoints
    argv[argv.index("--model") + 1] = str(folder)
    argv[argv.index("--text") + 1] = str(text)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    options = ["--quick", "--context", "16", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["tangent_alignment.py", *argv, *options])
    import tangent_alignment

    table = tangent_alignment.main()
    assert set(table["regime"]) == {"early", "late", "init"}


def test_both_top_commands_install_this_package():
    commands = re.findall(r"<!-- (?:main|test) command -->\n```bash\n(.+?)\n```", README)
    assert len(commands) == 2
    assert all('pip install -e ".[' in command for command in commands)
