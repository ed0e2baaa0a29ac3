"""The page on harvesting runs as typed."""

import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "harvest.md"


def test_the_page_on_harvesting_runs_as_typed():
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S):
        exec(block, names)
    assert names["unknown"].lists == {"": "1 x Linear, 1 x Tanh"}
    assert list(names["rows"]) == list(dict.fromkeys(names["found"].values()))
    assert names["head"].tied == ("embed",)
    model, losses = names["model"].eval(), 0
    for batch in names["batches"]:
        logits = model(**batch)[:, :-1]
        targets = batch["input_ids"][:, 1:]
        losses = losses + torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    losses.backward()
    np.testing.assert_allclose(names["gradient"], model.blocks[1].up.weight.grad, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(names["total"], model.embed.weight.grad, rtol=1e-3, atol=1e-4)
