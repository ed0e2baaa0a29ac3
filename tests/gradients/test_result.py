"""Harvest, the mapping of sites to rows that harvest returns."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gradients.small_models import TinyLM, make_ids  # noqa: E402

from isogeom.gradients import harvest  # noqa: E402

torch.set_num_threads(1)


def make_harvest():
    return harvest(TinyLM(), [{"input_ids": make_ids(2, 4)}, {"input_ids": make_ids(1, 3)}], ["embed", "blocks.1:in"])


def test_harvest_is_a_mapping():
    h = make_harvest()
    assert list(h) == ["embed", "blocks.1:in"]
    assert len(h) == 2
    assert "embed" in h
    assert "embed:out" in h
    assert h["embed:out"] is h["embed"]
    assert h["embed"].name == "embed"
    assert "head" not in h
    assert 3 not in h
    assert [name for name, _ in h.items()] == list(h.keys())
    assert h.n_rows == len(h.meta) == 8
    assert repr(h).splitlines()[0] == "Harvest(8 rows, 2 sites, 2 batches)"
    assert "activations (8, 6), gradients (8, 6)" in repr(h["embed"])
    with pytest.raises(KeyError, match=r"no site 'head'.*'embed', 'blocks.1:in'"):
        h["head"]
    with pytest.raises(AttributeError):
        h.meta = None


@pytest.mark.parametrize(
    "rows", [slice(1, 6, 2), [3, 0, -1], np.arange(8) % 2 == 0, [], np.zeros(8, dtype=bool)], ids=str
)
def test_select(rows):
    h = make_harvest()
    part = h.select(rows)
    index = np.arange(8)[rows if isinstance(rows, slice) else np.asarray(rows, dtype=None if len(rows) else int)]
    np.testing.assert_array_equal(part.meta.token_id, h.meta.token_id[index])
    assert isinstance(part.meta, np.recarray)
    for site in h:
        np.testing.assert_array_equal(part[site].activations, h[site].activations[index])
        np.testing.assert_array_equal(part[site].gradients, h[site].gradients[index])
        assert not np.shares_memory(part[site].activations, h[site].activations)
    np.testing.assert_array_equal(part.losses, h.losses)


@pytest.mark.parametrize("rows", [[[0]], 3, [0.5], [True, False], "embed"])
def test_select_refuses_what_is_no_index(rows):
    with pytest.raises(ValueError, match="rows must be a slice, a 1-D integer array or a boolean array of length 8"):
        make_harvest().select(rows)
    with pytest.raises(IndexError):
        make_harvest().select([8])
