"""Rows in one piece or several are the same array to read, and never an array by accident."""

import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from sklearn.model_selection import GridSearchCV, train_test_split  # noqa: E402

from isogeom import Moments  # noqa: E402
from isogeom.decomposition import ICA, PCA, SemiNMF  # noqa: E402
from isogeom.dimension import MLE, TwoNN  # noqa: E402
from isogeom.gradients import ShardedRows  # noqa: E402
from isogeom.isotropy import isoscore  # noqa: E402
from isogeom.tangent import TangentProxy, tangent_alignment_test  # noqa: E402

N, D = 20, 5
LENGTHS = {"one": [20], "several": [4, 0, 1, 9, 6], "ends": [0, 20, 0]}


def write(folder, X, lengths, dtype="float32"):
    stored = (X.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else X.astype(dtype)
    paths, start = [], 0
    for i, length in enumerate(lengths):
        paths.append(folder / f"{i}.npy")
        np.save(paths[-1], stored[start : start + length])
        start += length
    return ShardedRows(paths, lengths, X.shape[1], dtype)


@pytest.fixture(params=LENGTHS)
def lengths(request):
    return LENGTHS[request.param]


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture
def X():
    # Whole numbers up to 100 are exact in every dtype.
    return np.arange(N * D, dtype=np.float32).reshape(N, D)


@pytest.fixture
def rows(tmp_path, lengths, dtype, X):
    return write(tmp_path, X, lengths, dtype)


INDICES = [
    slice(None),
    slice(3, 9),
    slice(-3, None),
    slice(4, 5),
    slice(None, None, -2),
    slice(13, 6, -3),
    slice(1, 100, 3),
    slice(5, 5),
    [0, -1, 7],
    [],
    np.array([], int),
    np.array([3, 3], np.uint8),
    np.arange(N) % 3 == 0,
    np.zeros(N, bool),
    (np.arange(N) % 3 == 0).tolist(),
    4,
    -1,
    np.int64(7),
    ...,
    (..., 2),
    (3, ...),
    (slice(2, 9), slice(1, 3)),
    (slice(2, 9), [4, 0]),
    (slice(None), 1),
    (slice(None), np.arange(D) > 2),
    (3, 2),
    (3, [1, 2]),
    ([1, 12], 0),
    ([1, 12], slice(1, 3)),
    ([1, 12, 3], [0, 4, 2]),
    ([1, 12, 3], [2]),
    ([1, 12], np.arange(D) > 2),
    ([1, 12], ..., 0),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_is_numpys(index, rows, X):
    expected, got = X[index], rows[index]
    np.testing.assert_array_equal(got, expected)
    assert np.shape(got) == np.shape(expected)
    assert got.dtype == rows.dtype
    plain = isinstance(index, (int, np.integer, slice)) or index is ...
    if isinstance(got, np.ndarray) and plain:
        assert not got.flags.writeable
    if isinstance(index, (list, np.ndarray)):
        assert got.flags.writeable


@pytest.mark.parametrize(
    "index", [N, -N - 1, [0, N], np.ones(N + 1, bool), np.ones((N, D), bool), [[0]], [0.5], 1.0, True, None, "a"]
)
def test_wrong_indices(index, rows):
    with pytest.raises(IndexError):
        rows[index]
    with pytest.raises(IndexError):
        rows[0, 0, 0]


def test_a_slice_inside_a_shard_is_its_memory_map(tmp_path, lengths, X):
    rows = write(tmp_path, X, lengths)
    begin = 5 if len(lengths) > 1 else 0
    for index in (slice(begin, begin + 4), slice(begin + 3, begin, -1)):
        assert isinstance(rows[index], np.memmap)
        assert not rows[index].flags.writeable
    largest = int(np.argmax(lengths))
    np.testing.assert_array_equal(rows.shard(largest), X[sum(lengths[:largest]) :][: lengths[largest]])
    assert rows.shard(-1).shape == (lengths[-1], D)
    with pytest.raises(IndexError):
        rows.shard(len(lengths))


def test_shape_and_size(rows, X, dtype, lengths):
    assert (rows.shape, rows.ndim, rows.size, len(rows)) == (X.shape, 2, X.size, N)
    assert rows.dtype == (np.float16 if dtype == "float16" else np.float32)
    assert rows.nbytes == np.asarray(rows).nbytes
    word = "1 shard" if len(lengths) == 1 else f"{len(lengths)} shards"
    assert repr(rows) == f"ShardedRows(shape=(20, 5), dtype={rows.dtype}, {word})"
    for row, expected in zip(rows, X, strict=True):
        np.testing.assert_array_equal(row, expected)


def test_as_arrays(rows, X, lengths, dtype):
    whole = np.asarray(rows)
    assert type(whole) is np.ndarray
    assert whole.dtype == rows.dtype
    np.testing.assert_array_equal(whole, X)
    # One rule for any number of shards: what is not asked to be a copy cannot be written to.
    assert not whole.flags.writeable
    for copy in (np.array(rows), np.asarray(rows, dtype=np.float64), rows.astype(np.float64), rows.astype(rows.dtype)):
        np.testing.assert_array_equal(copy, X)
        copy[0] = 7
    np.testing.assert_array_equal(rows[0], X[0])
    assert rows.astype("f8").dtype == np.float64
    if len(lengths) == 1 and dtype != "bfloat16":
        assert np.shares_memory(np.array(rows, copy=False), whole)
    else:
        with pytest.raises(ValueError, match="an array of all rows is a copy"):
            np.array(rows, copy=False)
    with pytest.raises(ValueError, match="an array of all rows is a copy"):
        np.array(rows, dtype=np.int64, copy=False)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1, -2, None])
def test_mean(axis, keepdims, rows, X, monkeypatch):
    monkeypatch.setattr("isogeom.gradients._sharded._CHUNK", 4 * D * 3)  # three rows at a time
    expected = X.astype(np.float64).mean(axis, keepdims=keepdims).astype(rows.dtype)
    for got in (rows.mean(axis, keepdims=keepdims), np.mean(rows, axis=axis, keepdims=keepdims)):
        np.testing.assert_array_equal(got, expected)
        assert np.shape(got) == np.shape(expected)
        assert got.dtype == rows.dtype
    assert rows.mean(axis, dtype=np.float64).dtype == np.float64


def test_mean_keeps_digits(tmp_path):
    X = np.full((3000, 2), 1e4, dtype=np.float32)
    X[::2] += 1
    rows = write(tmp_path, X, [1000, 2000])
    np.testing.assert_array_equal(rows.mean(axis=0, dtype=np.float64), [10000.5, 10000.5])
    with pytest.raises(ValueError, match=r"rows of shape \(0, 2\) have no mean"):
        write(tmp_path, X, [0]).mean()
    with pytest.raises(ValueError, match="axis=2 must be 0, 1 or None"):
        rows.mean(2)
    with pytest.raises(ValueError, match="out is not supported"):
        np.mean(rows, axis=0, out=np.empty(2))


OPERATIONS = {
    "subtract": lambda r: r - 1,
    "right subtract": lambda r: np.ones(D) - r,
    "matmul": lambda r: r @ np.ones((D, D)),
    "right matmul": lambda r: np.ones((N, N)) @ r,
    "tensor": lambda r: torch.ones(D) - r,
    "in place": lambda r: r.__iadd__(1),
    "negative": lambda r: -r,
    "equal": lambda r: r == np.ones(D),
    "right equal": lambda r: np.ones(D) == r,
    "less": lambda r: r < 0,
    "ufunc": np.isfinite,
    "sum": np.sum,
    "reduce": np.add.reduce,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_arithmetic_says_what_to_do(name, rows):
    with pytest.raises(TypeError, match=r"ShardedRows has no .*np.asarray\(rows\).*iter_blocks\(\)"):
        OPERATIONS[name](rows)


def test_what_is_missing_says_what_to_do(rows):
    for name in ("T", "sum", "std", "reshape", "max"):
        assert not hasattr(rows, name)
        with pytest.raises(AttributeError, match=rf"ShardedRows has no {name}: .*np.asarray\(rows\).*iter_blocks"):
            getattr(rows, name)
    with pytest.raises(AttributeError, match=r"ShardedRows has no nonsense$"):
        rows.nonsense  # noqa: B018
    with pytest.raises(ValueError, match="ShardedRows is read-only"):
        rows[0] = 1
    assert len({rows, rows}) == 1


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_rows_that_do_not_belong_are_skipped(index, dtype, tmp_path, X):
    junk = np.full((N, D), 99, np.float32)
    both = np.stack([junk, X], axis=1).reshape(-1, D)  # every other row
    parts = [slice(0, 9), slice(9, 9), slice(9, 12), slice(12, 2 * N)]
    keep = [np.flatnonzero(np.arange(part.start, part.stop) % 2) for part in parts]
    whole = write(tmp_path, both, [part.stop - part.start for part in parts], dtype)
    rows = ShardedRows(whole._parts, list(map(len, keep)), D, dtype, keep)
    np.testing.assert_array_equal(rows[index], X[index])
    np.testing.assert_array_equal(np.asarray(rows), X)
    np.testing.assert_array_equal(rows.mean(0, dtype=np.float64), X.mean(0, dtype=np.float64))
    np.testing.assert_array_equal(rows.shard(3), X[6:])


def test_pickles_name_the_files(tmp_path, X):
    X = np.tile(X, (500, 1))
    rows = write(tmp_path, X, [5000, 5000])
    rows.mean()
    pickled = pickle.dumps(rows)
    assert len(pickled) < 2000
    np.testing.assert_array_equal(np.asarray(pickle.loads(pickled)), X)


def test_arrays_in_memory(X):
    rows = ShardedRows([X[:7], X[7:]], [7, 13], D)
    np.testing.assert_array_equal(rows[3:12], X[3:12])
    view = rows[2:5]
    assert np.shares_memory(view, X)
    assert not view.flags.writeable
    assert X.flags.writeable
    bits = (X.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(ShardedRows([bits], [N], D, "bfloat16")[::-1], X[::-1])
    ids = ShardedRows([np.arange(4)[:, None]], [4], 1, "int64")
    assert ids[1:].dtype == np.int64


# ---------------------------------------------------------------------- into what takes arrays


@pytest.fixture(params=["one", "several"])
def cloud(request, tmp_path):
    rng = np.random.default_rng(0)
    X = (rng.laplace(size=(400, 6)) * [4, 3, 2, 1, 1, 1]).astype(np.float32)
    return X, write(tmp_path, X, [400] if request.param == "one" else [150, 150, 100])


FITS = {
    "moments": lambda X: Moments().update(X).covariance(),
    "isoscore": isoscore,
    "pca": lambda X: PCA(3).fit(X).transform(X),
    "ica": lambda X: ICA(3, random_state=0).fit(X).components_,
    "seminmf": lambda X: SemiNMF(3, random_state=0, tol=1e-2).fit(X).components_,
    "twonn": lambda X: TwoNN().fit(X).dimension_,
    "mle": lambda X: MLE().fit(X).transform(X),
    "proxy": lambda X: TangentProxy(n_directions=2).fit(X).score(X, X),
    "test": lambda X: tangent_alignment_test(X, TangentProxy(n_directions=2).fit(X), n_resamples=99, rng=0).zscore,
    "search": lambda X: (
        GridSearchCV(TangentProxy(), {"n_directions": [1, 3]}, cv=3).fit(X, X).cv_results_["rank_test_score"]
    ),
    "split": lambda X: train_test_split(X, random_state=0)[0],
    "norm": lambda X: np.linalg.norm(X, axis=1),
    "tensor": lambda X: torch.as_tensor(np.array(X)).numpy(),
}


@pytest.mark.parametrize("name", FITS)
def test_whatever_takes_arrays_takes_them(name, cloud):
    X, rows = cloud
    np.testing.assert_array_equal(FITS[name](rows), FITS[name](X))
