"""`fit` of iterables of matrices, also of those that can be read only once."""

import tempfile
import tracemalloc
from collections import deque

import numpy as np
import pytest
from oracles.semi_nmf import planted
from sklearn.exceptions import NotFittedError

from isogeom import _xp
from isogeom.decomposition import SemiNMF
from isogeom.decomposition._rows import gives_batches
from isogeom.decomposition._spool import Spool

pytestmark = pytest.mark.filterwarnings("ignore:SemiNMF did not converge:sklearn.exceptions.ConvergenceWarning")

OPTIONS = {"n_components": 4, "random_state": 0, "max_iter": 10}
N = 60


@pytest.fixture(scope="module")
def rows():
    return planted(N, 12, 4, 0.3, seed=0)[0]


@pytest.fixture
def opened(monkeypatch):
    """The temporary files that were opened."""
    files, make = [], tempfile.TemporaryFile

    def remember(*args, **options):
        files.append(make(*args, **options))
        return files[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", remember)
    return files


class Loader:
    """Batches whose reading starts afresh, and which has neither a length nor entries."""

    def __init__(self, parts):
        self.parts = parts

    def __iter__(self):
        return iter(self.parts)


def split(X, size):
    n = int(X.shape[0])
    return [X[start : min(start + size, n), ...] for start in range(0, n, size)]


KINDS = {
    "list": list,
    "tuple": tuple,
    "loader": Loader,
    "iterator": iter,
    "generator": lambda parts: (part for part in parts),
    "map": lambda parts: map(lambda part: part, parts),
    "deque": deque,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 7, N - 1, N])
def test_iterables_give_the_fit_of_all_rows(as_array, library, rows, kind, size, opened):
    expected = SemiNMF(**OPTIONS).fit(rows)
    model = SemiNMF(**OPTIONS).fit(KINDS[kind](split(as_array(rows), size)))
    assert type(model.components_) is type(as_array(rows))
    np.testing.assert_allclose(_xp.to_numpy(model.components_), expected.components_, atol=1e-8)
    assert model.reconstruction_err_ == pytest.approx(expected.reconstruction_err_, rel=1e-8)
    assert (model.n_samples_seen_, model.n_features_in_) == (N, 12)
    assert len(opened) == (kind in ("iterator", "generator", "map"))
    assert all(file.closed for file in opened)


@pytest.mark.parametrize("kind", ["list", "generator"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_keep_their_dtype(rows, kind, dtype):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    X = torch.asarray(rows).to(getattr(torch, dtype))
    expected = SemiNMF(**OPTIONS).fit(X)
    model = SemiNMF(**OPTIONS).fit(KINDS[kind](split(X, 7)))
    assert model.components_.dtype == torch.float32
    assert torch.equal(model.components_, expected.components_)


@pytest.mark.parametrize("kind", ["loader", "generator"])
def test_fit_batches_is_the_same_fit(rows, kind):
    expected = SemiNMF(**OPTIONS).fit(KINDS[kind](split(rows, 7)))
    model = SemiNMF(**OPTIONS).fit_batches(KINDS[kind](split(rows, 7)))
    np.testing.assert_array_equal(model.components_, expected.components_)


@pytest.mark.parametrize("kind", ["list", "loader", "generator"])
@pytest.mark.parametrize("center", [False, True])
def test_fit_transform_gives_the_codes_of_all_batches(as_array, library, rows, kind, center):
    model = SemiNMF(**OPTIONS, center=center)
    Z = model.fit_transform(KINDS[kind](split(as_array(rows), 7)))
    assert tuple(Z.shape) == (N, 4)
    np.testing.assert_allclose(_xp.to_numpy(Z), _xp.to_numpy(model.transform(as_array(rows))), atol=1e-6)
    frames = pytest.importorskip("pandas", reason="pandas is not installed")
    if isinstance(Z, np.ndarray):
        named = SemiNMF(**OPTIONS).set_output(transform="pandas").fit_transform(KINDS[kind](split(rows, 7)))
        assert isinstance(named, frames.DataFrame)
        assert named.shape == (N, 4)


@pytest.mark.parametrize("kind", ["list", "generator"])
def test_mixed_dtypes_and_empty_batches(rows, kind):
    X = np.round(rows)
    parts = [X[:0], X[:5].astype(np.float32), X[5:20].astype(np.int16), X[20:21].astype(np.float16), [], X[21:]]
    expected = SemiNMF(**OPTIONS).fit(X)
    model = SemiNMF(**OPTIONS).fit(KINDS[kind](parts))
    assert model.components_.dtype == np.float32
    np.testing.assert_allclose(model.components_, expected.components_, atol=1e-6)


def test_batches_of_a_loader_may_come_in_lists(rows):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.utils.data import DataLoader, TensorDataset

    X = torch.asarray(rows)
    expected = SemiNMF(**OPTIONS).fit(X).components_
    loader = DataLoader(TensorDataset(X), batch_size=7)
    for batches in (loader, iter(loader), list(loader), [(X[:9],), [X[9:]]]):
        np.testing.assert_allclose(SemiNMF(**OPTIONS).fit(batches).components_, expected, atol=1e-8)


def test_a_reader_may_use_one_buffer_for_all_batches(rows):
    def buffered():
        room = np.empty((10, 12))
        for begin in range(0, N, 10):
            room[...] = rows[begin : begin + 10]
            yield room

    np.testing.assert_array_equal(
        SemiNMF(**OPTIONS).fit(buffered()).components_, SemiNMF(**OPTIONS).fit(rows).components_
    )


def test_frames_keep_their_names(rows):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame(rows).rename(columns=str)
    expected = SemiNMF(**OPTIONS).fit(frame)
    for kind in ("list", "generator"):
        model = SemiNMF(**OPTIONS).fit(KINDS[kind]([frame[:25], frame[25:]]))
        assert list(model.feature_names_in_) == list(frame.columns)
        np.testing.assert_allclose(model.components_, expected.components_, atol=1e-12)


def test_array_likes_are_no_batches(rows):
    expected = SemiNMF(**OPTIONS).fit(rows).components_

    class NotAnArray:
        def __array__(self, dtype=None, copy=None):
            return np.array(rows, dtype=dtype)

        def __iter__(self):
            raise AssertionError("read row by row")

    for given in (rows.tolist(), list(rows), tuple(rows), NotAnArray(), deque(rows.tolist())):
        assert not gives_batches(given)
        np.testing.assert_array_equal(SemiNMF(**OPTIONS).fit(given).components_, expected)
    assert not gives_batches("rows")
    assert not gives_batches({"rows": rows})
    for wrong, match in ((3, "Expected 2D array"), ([], "Expected 2D array"), ([1.0, 2.0], "Expected 2D array")):
        with pytest.raises(ValueError, match=match):
            SemiNMF(2).fit(wrong)


@pytest.mark.parametrize("kind", ["loader", "generator"])
def test_nothing_to_fit_is_an_error(rows, kind, opened):
    for parts in ([], [rows[:0]], [rows[:0], []]):
        with pytest.raises(ValueError, match="X is empty: pass at least one array of rows"):
            SemiNMF(2).fit(KINDS[kind](parts))
        with pytest.raises(ValueError, match="batches is empty: pass at least one array of rows"):
            SemiNMF(2).fit_batches(KINDS[kind](parts))
    assert all(file.closed for file in opened)


@pytest.mark.parametrize("kind", ["list", "loader", "generator"])
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda X: X[:, :5], "X has 5 features, but SemiNMF is expecting 12"),
        (lambda X: X * np.nan, "contains NaN"),
        (lambda X: X[0], "Expected 2D array"),
    ],
)
def test_an_error_names_the_batch_and_leaves_no_file(rows, kind, change, match, opened):
    with pytest.raises(ValueError, match=match) as error:
        SemiNMF(2).fit(KINDS[kind]([rows, rows, change(rows)]))
    assert error.value.__notes__ == ["This is batch 2 of X, counted from 0."]
    assert len(opened) == (kind == "generator")
    assert all(file.closed for file in opened)


def test_an_error_of_the_reader_or_of_the_fit_leaves_no_file(rows, opened):
    def broken():
        yield rows
        raise KeyError("shard 1")

    with pytest.raises(KeyError, match="shard 1"):
        SemiNMF(2).fit(broken())
    with pytest.raises(ValueError, match="init"):
        SemiNMF(2, init="best").fit(iter([rows]))
    assert len(opened) == 2
    assert all(file.closed for file in opened)
    model = SemiNMF(2)
    with pytest.raises(ValueError, match="tol"):
        model.set_params(tol=-1).fit(iter([rows]))
    with pytest.raises(NotFittedError):
        model.transform(rows)


def test_iterators_want_one_library(rows):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(ValueError, match="Batch 1 must use the same namespace and the same device as the first"):
        SemiNMF(2).fit(iter([rows, torch.asarray(rows)]))
    with pytest.raises(TypeError, match="Batch 0 of X is a list of 2 entries, and only rows are wanted"):
        SemiNMF(2).fit(iter([[rows, rows[:, 0]]]))


def test_a_full_disk_is_explained(rows, monkeypatch):
    class Full:
        closed = False

        def seek(self, *place):
            return 0

        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            self.closed = True

    full = Full()
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: full)
    with pytest.raises(OSError, match="No space left") as error:
        SemiNMF(2).fit(iter([rows]))
    assert "set TMPDIR to a folder with room for all rows" in error.value.__notes__[0]
    assert full.closed


def test_rows_of_a_generator_are_never_in_memory_together():
    X = planted(20_000, 200, 5, 0.3, seed=3)[0].astype(np.float32)
    options = {"n_components": 5, "max_iter": 3, "init": X[:5]}

    def batches():
        for start in range(0, len(X), 500):
            yield X[start : start + 500].copy()

    # Kernels are loaded, and compiled, outside of the measurement.
    expected = SemiNMF(**options).fit(X)
    tracemalloc.start()
    try:
        model = SemiNMF(**options).fit(batches())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_allclose(model.components_, expected.components_, atol=1e-6)
    assert peak < 0.9 * X.nbytes


def test_batches_return_to_their_device(rows):
    strict = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    device = strict.Device("device1")
    model = SemiNMF(**OPTIONS).fit(strict.asarray(part, device=device) for part in split(rows, 7))
    assert model.components_.device == device
    host = _xp.to_numpy(model.components_)
    np.testing.assert_allclose(host, SemiNMF(**OPTIONS).fit(rows).components_, atol=1e-8)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8", "uint16", "bool", ">f4"])
def test_a_spool_gives_back_what_was_written(dtype):
    parts = [np.arange(6).reshape(2, 3).astype(dtype), np.asfortranarray(np.eye(3, dtype=dtype))]
    with Spool() as spool:
        for part in parts:
            spool.write(part)
        # Two passes at once.
        for first, second, part in zip(spool, spool, parts, strict=True):
            assert first.dtype == second.dtype == part.dtype
            np.testing.assert_array_equal(first, part)
            np.testing.assert_array_equal(second, part)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "bool"])
def test_a_spool_gives_tensors_back(dtype):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    X = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
    with Spool() as spool:
        spool.write(X)
        (got,) = spool
    assert got.dtype == X.dtype
    assert torch.equal(got, X)


@pytest.mark.parametrize("wrong", [None, 3, iter([np.ones((4, 3))])], ids=["none", "number", "iterator"])
def test_a_batch_that_is_no_array_is_named(wrong):
    batches = [np.random.default_rng(0).random((20, 3)), wrong]
    with pytest.raises(TypeError, match=r"Batch 1 of X is a \w+: give arrays of shape \(any, n_features\)"):
        SemiNMF(2).fit(iter(batches))
