"""Rows in memory: against a list of all rows, never held twice, and in every storage dtype."""

import tracemalloc
from contextlib import ExitStack

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gradients.small_harvests import SITES, Model, assert_same, make_batches  # noqa: E402

from isogeom.gradients import ShardedRows, harvest, open_harvest  # noqa: E402
from isogeom.gradients._dtypes import encode  # noqa: E402
from isogeom.gradients._rowstore import RowStore, _permute  # noqa: E402
from isogeom.gradients._sampling import META_DTYPE, Selection, row_keys, smallest  # noqa: E402
from isogeom.gradients._store import DiskStore  # noqa: E402

torch.set_num_threads(1)
KEYS = [("a", "activations"), ("a", "gradients"), ("b", "activations")]
WIDTHS = [3, 4, 1]


def batch_of(rng, n, batch_id, first):
    meta = np.zeros(n, META_DTYPE)
    meta["sample_id"], meta["batch_id"] = np.arange(first, first + n), batch_id
    keys = row_keys(0, meta["sample_id"], meta["position"])
    rows = {key: rng.standard_normal((n, width)).astype(np.float32) for key, width in zip(KEYS, WIDTHS, strict=True)}
    return Selection(np.arange(n), None, keys, meta), rows


def fill(store, sizes, seed=0):
    """Add batches to a store; return the plain concatenation of all of them."""
    rng, first, parts = np.random.default_rng(seed), 0, []
    for i, n in enumerate(sizes):
        selection, rows = batch_of(rng, n, i, first)
        parts.append((selection.keys, selection.meta, {key: part.copy() for key, part in rows.items()}))
        store.add(selection, rows, i, n, 0.0)
        for part in rows.values():
            part.fill(np.nan)  # a store that kept a view would show it
        first += n
    keys, meta = (np.concatenate([part[j] for part in parts]) for j in range(2))
    return keys, meta, {key: np.concatenate([part[2][key] for part in parts]) for key in KEYS}


SIZES = [[5], [0, 3, 0, 2], [1] * 30, [40, 1, 1, 60, 2], list(range(12)), [0, 0]]


@pytest.mark.parametrize("budget", [None, 1, 7, 40, 1000])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("small", [0, 300, 1 << 26])
def test_a_store_is_a_list_of_rows(small, sizes, budget, monkeypatch):
    monkeypatch.setattr("isogeom.gradients._rowstore._SMALL_BYTES", small)
    store = RowStore(budget)
    for _ in range(2):  # a block on disk is drained, then the next one begins
        keys, meta, rows = fill(store, sizes)
        kept = np.arange(len(keys)) if budget is None else smallest(keys, budget)
        assert store.n_rows == len(kept)
        full = budget is not None and len(kept) == budget
        assert store.threshold == (keys[kept].max() if full else None)
        got_keys, got_meta, got = store.drain()
        np.testing.assert_array_equal(got_keys, keys[kept])
        np.testing.assert_array_equal(got_meta, meta[kept])
        assert list(got) == KEYS
        for key in KEYS:
            np.testing.assert_array_equal(got[key], rows[key][kept])
            assert got[key].dtype == np.float32
            assert got[key].flags.c_contiguous
        assert store.n_rows == 0


@pytest.mark.parametrize("budget", [None, 20_000, 60_000])
def test_rows_are_never_held_twice(budget, monkeypatch):
    """A buffer that was copied to grow, or pieces that were joined, would take twice the bytes of the rows."""
    monkeypatch.setattr("isogeom.gradients._rowstore._SMALL_BYTES", 1 << 20)  # below the 10 MB of these rows
    n, d, n_batches = 400, 64, 100
    store, rng = RowStore(budget), np.random.default_rng(0)
    rows = rng.standard_normal((n, d)).astype(np.float32)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i in range(n_batches):
            meta = np.zeros(n, META_DTYPE)
            meta["sample_id"] = np.arange(i * n, i * n + n)
            keys = row_keys(0, meta["sample_id"], meta["position"])
            store.add(Selection(np.arange(n), None, keys, meta), {KEYS[0]: rows}, i, n, 0.0)
        harvested = store.finish(["a"], [0.0] * n_batches)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    kept = min(n * n_batches, budget or n * n_batches)
    total = harvested["a"].activations.nbytes + harvested.meta.nbytes
    assert harvested["a"].activations.shape == (kept, d)
    assert after - before < 1.02 * total + 20_000
    # An eighth of room to grow; meta, keys and their order, a seventh of the rows here, are copied to be sorted.
    assert peak - before < 1.5 * total


def test_large_buffers_have_little_room_to_spare(monkeypatch):
    monkeypatch.setattr("isogeom.gradients._rowstore._SMALL_BYTES", 16 * 80)
    store = RowStore(None)
    fill(store, [3] * 50)
    # An eighth of room at a time: few moves, and little that nobody uses.
    assert store._capacity < 1.2 * store.n_rows
    _, _, rows = store.drain()
    assert all(part.base is None and part.flags.owndata for part in rows.values())


@pytest.mark.parametrize("width", [1, 7, 16, 100])
def test_permute_in_place(width):
    rng = np.random.default_rng(0)
    X, order = rng.standard_normal((30, width)), rng.permutation(30)
    expected = X[order]
    _permute(X, order)
    np.testing.assert_array_equal(X, expected)


# ---------------------------------------------------------------------- dtypes


def test_token_ids_stay_integers():
    store, ids = RowStore(None), np.array([[3], [2**40 + 1]])
    meta = np.zeros(2, META_DTYPE)
    for i in range(3):
        arrays = {("t", "activations"): ids, ("t", "gradients"): np.ones((2, 4), np.float32)}
        store.add(Selection(np.arange(2), None, np.arange(2, dtype=np.uint64), meta), arrays, i, 2, 0.0)
    site = store.finish(["t"], [0.0])["t"]
    np.testing.assert_array_equal(site.activations, np.tile(ids, (3, 1)))
    assert site.activations.dtype == np.int64
    assert site.gradients.dtype == np.float32


def test_bfloat16_rounds_as_torch_does():
    rng = np.random.default_rng(0)
    X = (rng.standard_normal((500, 3)) * 10.0 ** rng.integers(-44, 38, (500, 1))).astype(np.float32)
    X[:3] = [[0.0, -0.0, 1.00390625], [1.01171875, 1e-45, -3e38], [1 + 2**-9, 1 - 2**-9, 2**-133]]
    expected = torch.from_numpy(X).to(torch.bfloat16)
    np.testing.assert_array_equal(encode(X, "bfloat16", "s", "gradients"), expected.view(torch.uint16).numpy())
    with pytest.raises(ValueError, match=r"dtype='bfloat16' cannot hold 1 values of the gradients of site 's'.*3.4e"):
        encode(np.float32([[3.4e38]]), "bfloat16", "s", "gradients")


@pytest.mark.parametrize("options", [{}, {"max_rows": 17}], ids=str)
def test_bfloat16_in_memory_is_read_as_on_disk(options, tmp_path):
    full = harvest(Model(), make_batches(), SITES, **options)
    half = harvest(Model(), make_batches(), SITES, dtype="bfloat16", **options)
    disk = harvest(Model(), make_batches(), SITES, dtype="bfloat16", out=tmp_path, **options)
    assert_same(half, disk)
    for site in SITES:
        rows = half[site].gradients
        assert type(rows) is type(disk[site].gradients) is ShardedRows
        expected = torch.from_numpy(full[site].gradients).to(torch.bfloat16).float().numpy()
        np.testing.assert_array_equal(np.asarray(rows), expected)
        np.testing.assert_array_equal(half.select([3, 1])[site].gradients, expected[[3, 1]])
        blocks = [block[site].gradients for block in half.iter_blocks(9)]
        np.testing.assert_array_equal(np.concatenate(blocks), expected)


@pytest.mark.parametrize("budget", [None, 3])
def test_token_ids_stay_integers_on_disk(budget, tmp_path):
    mark = {"max_rows": budget, "seed": 0, "batches_per_shard": 2, "dtype": "float32", "reduce": None}
    ids = np.array([[3], [2**40 + 1]])
    keys = row_keys(0, np.arange(10), np.zeros(10, np.int64))
    with ExitStack() as stack:
        store = DiskStore(tmp_path, mark, ["t"], ["activations", "gradients"])
        store.open(stack)
        for i in range(5):
            assert store.known(i, i) is None
            meta = np.zeros(2, META_DTYPE)
            meta["sample_id"] = [2 * i, 2 * i + 1]
            arrays = {("t", "activations"): ids, ("t", "gradients"): np.ones((2, 4), np.float32)}
            store.add(Selection(np.arange(2), None, keys[2 * i : 2 * i + 2], meta), arrays, i, 2, 0.0)
        site = store.finish(["t"], [0.0] * 5)["t"]
    kept = np.arange(10) if budget is None else smallest(keys, budget)
    np.testing.assert_array_equal(np.asarray(site.activations), np.tile(ids, (5, 1))[kept])
    assert site.activations.dtype == site.activations[:2].dtype == np.int64
    assert site.gradients.dtype == np.float32
    assert open_harvest(tmp_path)["t"].activations.dtype == np.int64
