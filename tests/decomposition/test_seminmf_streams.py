"""Rows in chunks, batches and streams: the same fit, with bounded memory."""

import tracemalloc

import numpy as np
import pytest
from oracles.semi_nmf import matched_cosines, planted

from isogeom import _xp
from isogeom.decomposition import SemiNMF, _rows, _semi_solve
from isogeom.decomposition._alternation import Statistics, atom_step
from isogeom.decomposition._rows import Rows, batched_rows

pytestmark = pytest.mark.filterwarnings("ignore:SemiNMF did not converge:sklearn.exceptions.ConvergenceWarning")


@pytest.fixture(scope="module")
def rows():
    return planted(300, 40, 5, 0.3, seed=0)[0]


class Shards:
    """Batches that can be read again and count how often they were."""

    def __init__(self, *parts):
        self.parts, self.passes = parts, 0

    def __iter__(self):
        self.passes += 1
        return iter(self.parts)


@pytest.mark.parametrize("alpha", [0.0, 0.05])
@pytest.mark.parametrize("sizes", [[300], [1, 150, 149], [100, 100, 100]])
@pytest.mark.parametrize("subspace", [False, True])
def test_batches_give_the_fit_of_all_rows(monkeypatch, rows, alpha, sizes, subspace):
    if subspace:
        monkeypatch.setattr(_semi_solve, "_SUBSPACE_SIZE", 0)
    options = {"n_components": 5, "alpha": alpha, "init": "kmeans", "random_state": 0, "max_iter": 30}
    whole = SemiNMF(**options).fit(rows)
    shards = Shards(*np.split(rows, np.cumsum(sizes)[:-1]))
    streamed = SemiNMF(**options).fit_batches(shards)
    np.testing.assert_allclose(streamed.components_, whole.components_, atol=1e-8)
    np.testing.assert_allclose(streamed.objective_path_, whole.objective_path_, rtol=1e-9)
    np.testing.assert_allclose(streamed.energies_, whole.energies_, rtol=1e-7)
    for name in ("reconstruction_err_", "svd_bound_", "svd_bound_prev_", "penalty_", "code_cancellation_"):
        assert getattr(streamed, name) == pytest.approx(getattr(whole, name), rel=1e-8)
    assert streamed.n_samples_seen_ == 300
    # In the subspace, iterations read scores and not rows.
    assert shards.passes < 20 if subspace else shards.passes >= streamed.n_iter_


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_chunks_change_nothing(rows, chunk_size):
    options = {"n_components": 4, "random_state": 0, "center": True, "max_iter": 20}
    whole = SemiNMF(**options).fit(rows)
    parts = SemiNMF(chunk_size=chunk_size, **options).fit(rows)
    np.testing.assert_allclose(parts.components_, whole.components_, atol=1e-9)
    np.testing.assert_allclose(parts.transform(rows), whole.transform(rows), atol=1e-9)


def test_memory_map_is_not_copied(tmp_path):
    X, D = planted(20_000, 200, 5, 0.3, seed=3)
    np.save(tmp_path / "x.npy", X.astype(np.float32))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    # Kernels are loaded, and compiled, outside of the measurement.
    SemiNMF(5, random_state=0, max_iter=2).fit(mapped)
    tracemalloc.start()
    model = SemiNMF(5, random_state=0).fit(mapped)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.7 * mapped.nbytes
    assert matched_cosines(model.components_, D).min() > 0.99


def test_batches_in_every_library(as_array, library, rows):
    options = {"n_components": 4, "random_state": 0, "max_iter": 10}
    expected = SemiNMF(**options).fit(rows)
    model = SemiNMF(**options).fit_batches([as_array(rows[:100]), as_array(rows[100:])])
    assert type(model.components_) is type(as_array(rows))
    np.testing.assert_allclose(_xp.to_numpy(model.components_), expected.components_, atol=1e-8)


def test_tiles_of_a_host_array_move_to_the_device_one_by_one(rows):
    """Rows stay on the host; every reading moves them to the device again, tile by tile, as for a GPU."""
    strict = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    device = strict.Device("device1")

    class Tiles:
        def __init__(self, X, size):
            self.X, self.size, self.largest = X, size, 0

        def __iter__(self):
            for start in range(0, len(self.X), self.size):
                tile = strict.asarray(self.X[start : start + self.size], device=device)
                self.largest = max(self.largest, int(tile.shape[0]))
                yield tile

    tiles = Tiles(rows, 64)
    model = SemiNMF(4, random_state=0, max_iter=10).fit_batches(tiles)
    assert model.components_.device == device
    assert tiles.largest == 64
    assert model.n_samples_seen_ == len(rows)
    expected = SemiNMF(4, random_state=0, max_iter=10).fit(rows)
    host = _xp.to_numpy(strict.asarray(model.components_, device=strict.Device("CPU_DEVICE")))
    np.testing.assert_allclose(host, expected.components_, atol=1e-8)


def test_batches_must_hold_rows_of_one_width(rows):
    with pytest.raises(ValueError, match="batches is empty"):
        SemiNMF(2).fit_batches([])
    with pytest.raises(ValueError, match="features"):
        SemiNMF(2).fit_batches([rows, rows[:, :5]])


# ---------------------------------------------------------------- partial_fit


def test_first_partial_fit_is_a_fit(rows):
    first, whole = SemiNMF(4, random_state=0).partial_fit(rows), SemiNMF(4, random_state=0).fit(rows)
    assert np.array_equal(first.components_, whole.components_)
    assert first.svd_bound_ == whole.svd_bound_


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_an_update_is_one_atom_step_on_the_sums_of_all_codes(rows, alpha):
    model = SemiNMF(4, alpha=alpha, random_state=0).fit(rows[:200])
    D, Z = model.components_, model.transform(rows[:200])
    new = model.transform(rows[200:])
    sums = Statistics.zeros(D)
    sums.add(np.vstack([Z, new]), rows)
    expected, lengths = atom_step(sums, D, bounded=alpha > 0)
    codes = np.vstack([Z, new]) * lengths
    model.partial_fit(rows[200:])
    np.testing.assert_allclose(model.components_, expected, atol=1e-10)
    np.testing.assert_allclose(model.reconstruction_err_, np.linalg.norm(rows - codes @ expected), rtol=1e-10)
    np.testing.assert_allclose(model.penalty_, alpha * np.linalg.norm(rows, axis=1).mean())
    assert model.n_samples_seen_ == 300
    assert not hasattr(model, "svd_bound_")
    np.testing.assert_allclose(model.code_density_, np.mean(codes > 0))


def test_a_stream_improves_the_atoms():
    X, D = planted(8000, 20, 10, 0.2, seed=5)
    model = SemiNMF(10, random_state=0).fit(X[:60])
    early = matched_cosines(model.components_, D).mean()
    for start in range(60, 8000, 200):
        model.partial_fit(X[start : start + 200])
    late = matched_cosines(model.components_, D).mean()
    assert late > max(early, 0.95)


def test_atoms_that_the_first_batch_left_idle_are_used_later():
    model = SemiNMF(3, random_state=0).partial_fit(np.eye(3)[:1] * 2)
    assert model.n_dead_atoms_ == 2
    for _ in range(3):
        model.partial_fit(np.eye(3)[1:] * 3)
    assert matched_cosines(model.components_, np.eye(3)).min() > 0.9
    assert model.n_dead_atoms_ == 0


def test_a_stream_cannot_be_centred(rows):
    assert not hasattr(SemiNMF(2, center=True), "partial_fit")
    with pytest.raises(AttributeError, match="has no attribute 'partial_fit'") as error:
        SemiNMF(2, center=True).partial_fit(rows)
    assert "center=True cannot be streamed" in str(error.value.__cause__)


def test_a_stream_keeps_its_number_of_atoms_and_its_origin(rows):
    model = SemiNMF(2, random_state=0).fit(rows)
    before = model.components_.copy()
    with pytest.raises(ValueError, match="n_components=3, but this SemiNMF has 2 atoms"):
        model.set_params(n_components=3).partial_fit(rows)
    assert np.array_equal(model.components_, before)
    assert model.n_samples_seen_ == len(rows)
    assert model.set_params(n_components=2).partial_fit(rows).n_samples_seen_ == 2 * len(rows)
    assert model.set_params(n_components=None).partial_fit(rows).n_components_ == 2
    centred = SemiNMF(2, center=True, random_state=0).fit(rows).set_params(center=False)
    with pytest.raises(ValueError, match="fitted with center=True, and a stream cannot be centred"):
        centred.partial_fit(rows)


class Shuffled:
    """Batches of the same rows in another order every time, as a shuffling loader gives them."""

    def __init__(self, rows, size):
        self.rows, self.size, self.n_reads = rows, size, 0

    def __iter__(self):
        self.n_reads += 1
        order = np.random.default_rng(self.n_reads).permutation(len(self.rows))
        return iter([self.rows[order[i : i + self.size]] for i in range(0, len(order), self.size)])


def test_batches_that_change_between_readings_are_an_error():
    rows = np.random.default_rng(0).standard_normal((200, 6))
    for size in (50, 200):
        with pytest.raises(ValueError, match="Batch 0 of batches has changed since it was first read"):
            SemiNMF(3, random_state=0).fit_batches(Shuffled(rows, size))


def test_batches_that_get_fewer_are_an_error():
    rows = np.random.default_rng(0).standard_normal((200, 6))

    class Shrinking:
        n_reads = 0

        def __iter__(self):
            self.n_reads += 1
            return iter([rows[:100], rows[100:]][: 2 if self.n_reads <= 3 else 1])

    with pytest.raises(ValueError, match="batches gave 2 batches, then 1"):
        SemiNMF(3, random_state=0).fit_batches(Shrinking())


def test_partial_fit_removes_what_the_fit_said_of_its_convergence():
    rows = np.random.default_rng(0).standard_normal((200, 6))
    model = SemiNMF(3, random_state=0).fit(rows)
    assert model.stop_reason_
    model.partial_fit(rows[:20])
    assert not hasattr(model, "stop_reason_")
    assert not hasattr(model, "converged_")


# ---------------------------------------------------------------- what counts as batches


OPTIONS = {"n_components": 4, "random_state": 0, "max_iter": 10}


@pytest.mark.parametrize("sizes", [[1] * 300, [7] * 42 + [6], [256, 1, 43], [3, 290, 7], [0, 150, 0, 0, 150, 0]])
def test_blocks_do_not_depend_on_the_sizes_of_batches(as_array, rows, sizes):
    parts = [as_array(part) for part in np.split(rows, np.cumsum(sizes)[:-1])]
    blocks = list(batched_rows(SemiNMF(), parts, 64)[0].raw())
    expected = [_xp.to_numpy(block) for block in Rows.of_array(as_array(rows), chunk=64).raw()]
    assert [len(block) for block in expected] == [int(block.shape[0]) for block in blocks]
    for block, wanted in zip(blocks, expected):
        np.testing.assert_array_equal(_xp.to_numpy(block), wanted)


def test_tiny_batches_give_exactly_the_fit_of_all_rows(rows):
    fitted = SemiNMF(chunk_size=64, **OPTIONS).fit_batches([rows[i : i + 7] for i in range(0, 300, 7)])
    np.testing.assert_array_equal(fitted.components_, SemiNMF(chunk_size=64, **OPTIONS).fit(rows).components_)
    assert fitted.n_samples_seen_ == 300


def test_a_reader_may_use_one_buffer_for_all_batches(rows):
    class Buffered:
        def __iter__(self):
            room = np.empty((10, 40))
            for begin in range(0, 300, 10):
                room[...] = rows[begin : begin + 10]
                yield room

    np.testing.assert_array_equal(
        SemiNMF(**OPTIONS).fit_batches(Buffered()).components_, SemiNMF(**OPTIONS).fit(rows).components_
    )


def test_batches_of_mixed_dtypes_keep_their_digits(rows):
    parts = [rows[:5].astype(np.float32), rows[5:100], rows[100:103].astype(np.float16), rows[103:]]
    blocks = list(batched_rows(SemiNMF(), parts, 64)[0].raw())
    assert [block.dtype for block in blocks] == [np.float32, *[np.float64] * 2, np.float32, *[np.float64] * 4]
    np.testing.assert_array_equal(np.concatenate(blocks), np.concatenate([part.astype(np.float64) for part in parts]))


def test_a_loader_of_tensors_may_wrap_them_in_a_list(rows):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.utils.data import DataLoader, TensorDataset

    X = torch.asarray(rows)
    expected = SemiNMF(**OPTIONS).fit(X).components_
    for batches in (
        DataLoader(TensorDataset(X), batch_size=64),
        [(X[:100],), [X[100:]]],
        torch.stack([X[:150], X[150:]]),
    ):
        assert torch.equal(SemiNMF(**OPTIONS).fit_batches(batches).components_, expected)
    labelled = DataLoader(TensorDataset(X, torch.zeros(300)), batch_size=64)
    with pytest.raises(TypeError, match="Batch 0 of batches is a list of 2 entries, and only rows are wanted"):
        SemiNMF(2).fit_batches(labelled)
    with pytest.raises(TypeError, match="Batch 1 of batches is a dict of 1 entries"):
        SemiNMF(2).fit_batches([X, {"rows": X}])


def test_lists_and_frames_are_batches_too(rows):
    expected = SemiNMF(**OPTIONS).fit(rows).components_
    np.testing.assert_array_equal(SemiNMF(**OPTIONS).fit_batches(np.split(rows, 3)).components_, expected)
    nested = [rows[:150].tolist(), rows[150:].tolist()]
    np.testing.assert_array_equal(SemiNMF(**OPTIONS).fit_batches(nested).components_, expected)
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame(rows).rename(columns=str)
    model = SemiNMF(**OPTIONS).fit_batches([frame[:100], frame[100:]])
    np.testing.assert_array_equal(model.components_, expected)
    assert list(model.feature_names_in_) == list(frame.columns)
    with pytest.raises(ValueError, match="feature names"):
        SemiNMF(**OPTIONS).fit_batches([frame[:100], frame[100:].rename(columns={"0": "z"})])


def test_one_matrix_is_no_iterable_of_batches(as_array, rows):
    with pytest.raises(TypeError, match=r"batches is one \w+ of shape \(300, 40\), not an iterable .*: use fit\(X\)"):
        SemiNMF(2).fit_batches(as_array(rows))
    with pytest.raises(TypeError, match="batches must be an iterable of arrays of rows, got int"):
        SemiNMF(2).fit_batches(3)
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    with pytest.raises(TypeError, match=r"batches is one DataFrame of shape \(300, 40\)"):
        SemiNMF(2).fit_batches(pandas.DataFrame(rows))


class Stored:
    """A matrix that is not in memory: it has a shape, and gives rows by slices (as HDF5, Zarr and shards do)."""

    def __init__(self, X):
        self.X, self.shape, self.longest = X, X.shape, 0

    def __getitem__(self, part):
        assert isinstance(part, slice)
        self.longest = max(self.longest, len(self.X[part]))
        return self.X[part]

    def __array__(self, dtype=None, copy=None):
        raise MemoryError("all rows asked for at once")


def test_a_stored_matrix_is_read_slice_by_slice(rows, monkeypatch):
    monkeypatch.setattr(_rows, "_MIN_CHUNK", 70)
    monkeypatch.setattr(_rows, "_SLICE_ELEMENTS", 1)
    stored = Stored(rows)
    model = SemiNMF(**OPTIONS).fit_batches(stored)
    assert stored.longest == 70
    assert model.n_samples_seen_ == len(rows)
    np.testing.assert_array_equal(model.components_, SemiNMF(**OPTIONS).fit_batches([rows]).components_)
    with pytest.raises(ValueError, match="batches is empty"):
        SemiNMF(**OPTIONS).fit_batches(Stored(rows[:0]))


def test_the_shards_of_a_harvest_are_read_slice_by_slice(tmp_path):
    gradients = pytest.importorskip("isogeom.gradients", reason="torch is not installed")
    X = np.random.default_rng(0).standard_normal((40_000, 100)).astype(np.float32)
    paths = [tmp_path / "0.npy", tmp_path / "1.npy"]
    for path, part in zip(paths, np.split(X, 2)):
        np.save(path, part)
    shards = gradients.ShardedRows(paths, [20_000, 20_000], 100)
    options = {"n_components": 3, "max_iter": 2, "init": X[:3]}
    expected = SemiNMF(**options).fit(X)
    tracemalloc.start()
    try:
        model = SemiNMF(**options).fit_batches(shards)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(model.components_, expected.components_)
    assert peak < 0.9 * X.nbytes


def test_nothing_but_empty_batches_is_an_error(as_array, rows):
    for batches in ([], [as_array(rows[:0])], [as_array(rows[:0]), []]):
        with pytest.raises(ValueError, match="batches is empty"):
            SemiNMF(2).fit_batches(batches)


@pytest.mark.parametrize("change", [lambda X: X[:, :5], lambda X: X * np.nan, lambda X: X[0]])
def test_an_error_names_the_batch(rows, change):
    with pytest.raises(ValueError) as error:
        SemiNMF(2).fit_batches([rows, rows, change(rows)])
    assert error.value.__notes__ == ["This is batch 2 of batches, counted from 0."]


def test_batches_want_one_library(rows):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(ValueError, match="Batch 1 must use the same namespace and the same device as the first"):
        SemiNMF(2).fit_batches([rows, torch.asarray(rows)])


def test_rows_that_trade_places_across_blocks_are_noticed():
    rows = np.random.default_rng(0).standard_normal((2 * _xp.BLOCK_ROWS, 3))

    class Swapped:
        n_reads = 0

        def __iter__(self):
            self.n_reads += 1
            first, second = rows[: _xp.BLOCK_ROWS], rows[_xp.BLOCK_ROWS :]
            return iter([rows if self.n_reads == 1 else np.concatenate([second, first])])

    with pytest.raises(ValueError, match="Batch 0 of batches has changed"):
        SemiNMF(2, random_state=0).fit_batches(Swapped())


# ---------------------------------------------------------------- dtypes that are converted block by block


@pytest.mark.parametrize("dtype", ["float16", "uint8", "int16"])
def test_memory_maps_of_other_dtypes_are_not_copied(tmp_path, dtype):
    rng = np.random.default_rng(0)
    X = np.round(rng.gamma(0.5, 2, (20_000, 5)) @ rng.uniform(0, 5, (5, 200)))
    np.save(tmp_path / "x.npy", np.minimum(X, 255).astype(dtype))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    model = SemiNMF(5, random_state=0, max_iter=3)
    # Kernels are loaded, and compiled, outside of the measurement.
    model.fit(mapped)
    tracemalloc.start()
    model.fit(mapped)
    model.partial_fit(mapped)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A copy in the dtype of the results would need 16 MB (float16) or 32 MB.
    assert peak < 12e6
    result = np.float32 if dtype == "float16" else np.float64
    assert model.components_.dtype == result
    assert model.transform(mapped).dtype == result


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float16"])
def test_rows_of_other_dtypes_give_the_fit_of_their_values(as_array, dtype):
    X = np.round(np.random.default_rng(0).gamma(0.5, 20, (100, 6)).clip(max=250)).astype(dtype)
    given = X if dtype == "float16" else as_array(X)
    expected = SemiNMF(3, random_state=0).fit(X.astype(np.float32 if dtype == "float16" else np.float64))
    model = SemiNMF(3, random_state=0).fit(given)
    np.testing.assert_allclose(_xp.to_numpy(model.components_), expected.components_, atol=1e-8)
    streamed = SemiNMF(3, random_state=0).fit_batches([given[:50, ...], given[50:, ...]])
    np.testing.assert_allclose(_xp.to_numpy(streamed.components_), expected.components_, atol=1e-6)
