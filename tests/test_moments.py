import pickle
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from isogeom import Moments, _moments, _xp
from isogeom._moments import merge_all, passes


def reference(X):
    """Count, mean and scatter in long double, row by row differences."""
    X = np.asarray(X).astype(np.longdouble)
    Y = X - X.mean(axis=0)
    return len(X), X.mean(axis=0).astype(float), np.einsum("ni,nj->ij", Y, Y).astype(float)


def assert_equals_reference(moments, X, rel):
    count, mean, scatter = reference(X)
    assert moments.count == count
    spread = np.sqrt(np.diag(scatter) / count)
    # Errors are measured against the spread of the two features involved, so that small entries count for something.
    assert np.all(np.abs(_xp.to_numpy(moments.mean) - mean) <= rel * spread + 1e-15 * np.abs(mean))
    assert np.all(np.abs(_xp.to_numpy(moments.scatter) - scatter) <= rel * count * np.outer(spread, spread))


def top_eigenvalues(C, k=20):
    return np.linalg.eigvalsh(np.asarray(C, dtype=np.float64))[::-1][:k]


def largest_error(values, expected):
    return float(np.max(np.abs(values / expected - 1)))


def two_offset_features(m, n=20_000, d=128):
    """Float32 rows in which two features have the means m and m / 2, as massive activations do."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, d)) / np.arange(1, d + 1)
    X[:, 3] += m
    X[:, 40] += m / 2
    return X.astype(np.float32)


@st.composite
def split_rows(draw):
    n, d = draw(st.integers(2, 60)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    X = rng.standard_normal((n, d)) * rng.uniform(0.1, 10, d) + rng.uniform(-20, 20, d)
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=5)))
    return X, np.split(X, cuts)


class TestSplits:
    @settings(max_examples=60, deadline=None)
    @given(split_rows(), st.randoms(use_true_random=False), st.integers(1, 9))
    def test_any_split_and_merge_tree_in_float64(self, rows, random, block_rows):
        X, parts = rows
        pool = [Moments().update(part, block_rows=block_rows) for part in parts]
        while len(pool) > 1:
            random.shuffle(pool)
            pool.append(pool.pop().merge(pool.pop()))
        assert_equals_reference(pool[0], X, rel=1e-10)
        assert_equals_reference(merge_all(Moments().update(part) for part in parts), X, rel=1e-10)
        streamed = Moments()
        for part in parts:
            assert streamed.update(part) is streamed
        assert_equals_reference(streamed, X, rel=1e-10)

    @settings(max_examples=40, deadline=None)
    @given(split_rows(), st.randoms(use_true_random=False))
    def test_any_split_in_float32(self, rows, random):
        X, parts = rows
        parts = [part.astype(np.float32) for part in parts]
        random.shuffle(parts)
        merged = merge_all(Moments().update(part) for part in parts)
        assert_equals_reference(merged, X.astype(np.float32), rel=1e-5)
        assert merged.scatter.dtype == merged.mean.dtype == np.float64

    @pytest.mark.parametrize("block_rows", [1, 7, 100, 2048, 10_000])
    def test_block_rows(self, block_rows):
        X = np.random.default_rng(0).standard_normal((5000, 4)) + 3
        assert_equals_reference(Moments().update(X, block_rows=block_rows), X, rel=1e-11)

    def test_default_block_is_crossed(self):
        X = np.random.default_rng(0).standard_normal((2 * _xp.BLOCK_ROWS + 1, 3)) + 3
        assert_equals_reference(Moments().update(X), X, rel=1e-12)

    def test_passes_are_joined(self):
        X = np.random.default_rng(0).standard_normal((3 * _moments._BLOCKS_PER_PASS + 5, 3)) + np.arange(3) * 100
        assert_equals_reference(Moments().update(X, block_rows=1), X, rel=1e-11)

    def test_a_result_is_not_changed_by_later_updates(self, as_array):
        X = np.random.default_rng(0).standard_normal((20, 4))
        moments = Moments().update(as_array(X[:10, :]))
        scatter, mean = moments.scatter, moments.mean
        before = np.array(_xp.to_numpy(scatter)), np.array(_xp.to_numpy(mean))
        moments.update(as_array(X[10:, :]))
        np.testing.assert_array_equal(_xp.to_numpy(scatter), before[0])
        np.testing.assert_array_equal(_xp.to_numpy(mean), before[1])

    def test_drifting_blocks(self):
        rng = np.random.default_rng(0)
        parts = [rng.standard_normal((200, 5)) + 10.0**k * rng.standard_normal(5) for k in range(7)]
        for order in (parts, parts[::-1]):
            assert_equals_reference(merge_all(Moments().update(p) for p in order), np.vstack(parts), rel=1e-10)

    def test_merge_changes_neither_object(self):
        rng = np.random.default_rng(0)
        a, b = Moments().update(rng.standard_normal((5, 2))), Moments().update(rng.standard_normal((4, 2)))
        before = [(m.count, m.mean.copy(), m.scatter.copy()) for m in (a, b)]
        merged = a.merge(b)
        assert merged.count == 9
        for m, (count, mean, scatter) in zip((a, b), before):
            assert m.count == count
            np.testing.assert_array_equal(m.mean, mean)
            np.testing.assert_array_equal(m.scatter, scatter)

    def test_copy_is_independent(self):
        X = np.random.default_rng(0).standard_normal((6, 2))
        first = Moments().update(X[:3])
        copy = first.copy()
        first.update(X[3:])
        assert (copy.count, first.count) == (3, 6)
        assert_equals_reference(copy, X[:3], rel=1e-12)

    def test_empty_parts_are_neutral(self):
        X = np.random.default_rng(0).standard_normal((6, 2))
        moments = Moments().update(X)
        for joined in (moments.merge(Moments()), Moments().merge(moments), Moments().update(X[:0]).update(X)):
            np.testing.assert_array_equal(joined.scatter, moments.scatter)
        assert merge_all([]).count == 0
        assert Moments().update(X[:0]).n_features is None

    def test_one_row(self):
        moments = Moments().update(np.array([[3.0, 4.0]]))
        np.testing.assert_array_equal(moments.mean, [3, 4])
        np.testing.assert_array_equal(moments.scatter, np.zeros((2, 2)))


class TestPrecision:
    @pytest.mark.parametrize("m", [0, 10, 100, 1000])
    def test_offset_features_in_float32(self, m):
        X = two_offset_features(m)
        expected = top_eigenvalues(np.cov(X.astype(np.float64).T))
        assert largest_error(top_eigenvalues(Moments().update(X).covariance()), expected) <= 1e-5

    @pytest.mark.parametrize("m", [100, 1000])
    def test_covariance_solver_of_scikit_learn_fails_on_them(self, m):
        # Why this object exists: X.T @ X - n m m.T in the dtype of the rows loses the spread in the mean.
        X = two_offset_features(m)
        expected = top_eigenvalues(np.cov(X.astype(np.float64).T))
        theirs = PCA(20, svd_solver="covariance_eigh").fit(X).explained_variance_
        assert largest_error(theirs, expected) > 0.1

    def test_all_features_offset_by_1000(self):
        rng = np.random.default_rng(0)
        X = (rng.standard_normal((20_000, 64)) @ rng.standard_normal((64, 64)) / 8 + 1000).astype(np.float32)
        expected = top_eigenvalues(np.cov(X.astype(np.float64).T))
        assert largest_error(top_eigenvalues(Moments().update(X).covariance()), expected) <= 1e-5
        theirs = PCA(20, svd_solver="covariance_eigh").fit(X).explained_variance_
        assert largest_error(theirs, expected) > 0.1

    def test_large_offset_and_small_spread(self):
        rng = np.random.default_rng(0)
        base = rng.standard_normal((1000, 8)) @ rng.standard_normal((8, 64))
        X = (base * 1e-2 + 1e4).astype(np.float32)
        assert_equals_reference(Moments().update(X), X, rel=1e-5)
        naive = X.T @ X / 1000 - np.outer(X.mean(axis=0), X.mean(axis=0))
        assert naive.diagonal().min() < 0

    @pytest.mark.parametrize("scale", [1e-30, 1e-21, 1e-15, 1e15, 1e21, 1e30])
    def test_squares_outside_the_range_of_float32(self, scale):
        X = (np.random.default_rng(0).standard_normal((300, 4)) * scale).astype(np.float32)
        assert_equals_reference(Moments().update(X), X, rel=1e-5)

    def test_constant_columns(self):
        X = np.random.default_rng(0).standard_normal((4000, 4)).astype(np.float32)
        X[:, 1], X[:, 3] = 0.0, 0.1
        moments = Moments().update(X)
        for column in (1, 3):
            assert not moments.scatter[column].any()
            assert moments.mean[column] == X[0, column]

    def test_scatter_is_symmetric_and_positive(self):
        X = (np.random.default_rng(0).standard_normal((500, 30)) + 50).astype(np.float32)
        scatter = Moments().update(X).scatter
        np.testing.assert_allclose(scatter, scatter.T, rtol=1e-12)
        assert np.linalg.eigvalsh(scatter)[0] > 0


class TestWeights:
    @settings(max_examples=40, deadline=None)
    @given(split_rows(), st.integers(1, 9), st.integers(0, 2**31))
    def test_whole_weights_equal_repeated_rows(self, rows, block_rows, seed):
        X, _ = rows
        weights = np.random.default_rng(seed).integers(0, 4, len(X))
        weighted = Moments().update(X, weights, block_rows=block_rows)
        if not weights.any():
            assert weighted.count == 0
            return
        assert isinstance(weighted.count, int)
        assert_equals_reference(weighted, np.repeat(X, weights, axis=0), rel=1e-10)

    def test_any_weights_agree_with_numpy(self, as_array):
        rng = np.random.default_rng(0)
        X, weights = rng.standard_normal((500, 4)) + 5, rng.random(500)
        given_as = (weights, as_array(weights), list(weights))
        for w in given_as:
            moments = Moments().update(as_array(X[:200, :]), w[:200]).update(as_array(X[200:, :]), w[200:])
            assert moments.count == pytest.approx(weights.sum(), rel=1e-13)
            expected = np.cov(X.T, aweights=weights, ddof=0)
            np.testing.assert_allclose(_xp.to_numpy(moments.covariance(ddof=0)), expected, rtol=1e-11, atol=1e-13)
            np.testing.assert_allclose(_xp.to_numpy(moments.mean), np.average(X, axis=0, weights=weights), rtol=1e-13)

    @pytest.mark.parametrize("m", [0, 1000])
    def test_offset_features_in_float32(self, m):
        X = two_offset_features(m)
        weights = np.random.default_rng(1).integers(0, 3, len(X))
        expected = top_eigenvalues(np.cov(X.astype(np.float64).T, fweights=weights))
        assert largest_error(top_eigenvalues(Moments().update(X, weights).covariance()), expected) <= 1e-5

    def test_rows_of_weight_zero_have_no_say(self, as_array):
        X = np.random.default_rng(0).standard_normal((6, 2))
        spoilt = np.vstack([[np.nan, np.inf], X, [np.inf, 1e200]])
        weighted = Moments().update(as_array(spoilt), [0, 1, 1, 1, 1, 1, 1, 0])
        assert_equals_reference(weighted, X, rel=1e-12)
        assert Moments().update(as_array(X), np.zeros(6)).count == 0

    def test_constant_columns(self):
        X = np.full((50, 2), 0.1, dtype=np.float32)
        weights = np.random.default_rng(0).random(50)
        moments = Moments().update(X, weights, block_rows=7)
        assert not moments.scatter.any()
        assert np.all(moments.mean == X[0, 0])

    @pytest.mark.parametrize(
        ("weights", "match"),
        [
            ([1, 1, -1], "negative, NaN or infinite"),
            ([1, 1, np.nan], "negative, NaN or infinite"),
            ([1, 1, np.inf], "negative, NaN or infinite"),
            ([1, 1], r"sample_weight has shape \(2,\), but X has 3 rows"),
            ([[1], [1], [1]], r"sample_weight has shape \(3, 1\)"),
            (1.0, r"sample_weight has shape \(\)"),
        ],
    )
    def test_errors_leave_the_object_unchanged(self, as_array, weights, match):
        moments = Moments().update(as_array(np.ones((3, 2))))
        with pytest.raises(ValueError, match=match):
            moments.update(as_array(np.ones((3, 2))), weights)
        assert moments.count == 3


class TestInputs:
    @pytest.mark.parametrize("dtype", [np.float64, np.float32])
    def test_libraries_agree(self, as_array, dtype):
        x = (np.random.default_rng(0).standard_normal((300, 7)) * 2 + 40).astype(dtype)
        X = as_array(x)
        moments = Moments().update(X[:100, :]).merge(Moments().update(X[100:, :], block_rows=64))
        assert_equals_reference(moments, x, rel=1e-12 if dtype == np.float64 else 1e-5)
        xp = _xp.array_namespace(X)
        for array in (moments.mean, moments.scatter, moments.covariance(), moments.gram()):
            assert type(array) is type(xp.asarray(X)) or isinstance(array, np.ndarray)
            assert array.dtype == xp.float64
            assert _xp.device(array) == _xp.device(X)

    def test_device_without_float64(self):
        strict = pytest.importorskip("array_api_strict")
        x = (np.random.default_rng(0).standard_normal((300, 7)) + 40).astype(np.float32)
        X = strict.asarray(x, device=strict.Device("no_float64"))
        moments = Moments().update(X[:100, :]).update(X[100:, :])
        assert moments.scatter.dtype == strict.float32
        assert moments.scatter.device == X.device
        count, _, scatter = reference(x)
        np.testing.assert_allclose(_xp.to_numpy(moments.scatter), scatter, atol=1e-5 * count)

    def test_layouts(self, tmp_path):
        x = np.random.default_rng(0).standard_normal((60, 9))
        view = np.asfortranarray(x)[::-2, ::3]
        assert_equals_reference(Moments().update(view), view, rel=1e-12)
        frozen = x.copy()
        frozen.setflags(write=False)
        assert_equals_reference(Moments().update(frozen), x, rel=1e-12)
        np.save(tmp_path / "x.npy", x)
        mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
        moments = Moments().update(mapped)
        assert_equals_reference(moments, x, rel=1e-12)
        assert type(moments.scatter) is np.ndarray
        assert_equals_reference(Moments().update(x.tolist()), x, rel=1e-12)

    def test_input_is_left_alone(self):
        x = np.random.default_rng(0).standard_normal((60, 9)).astype(np.float32)
        before = x.copy()
        Moments().update(x)
        np.testing.assert_array_equal(x, before)

    @pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, bool, np.float16, np.longdouble])
    def test_other_dtypes_do_not_wrap_or_overflow(self, dtype):
        x = (np.random.default_rng(0).uniform(0, 250, (400, 5)) > 100) * 250.0
        X = x.astype(dtype)
        assert_equals_reference(Moments().update(X), X.astype(float), rel=1e-5 if dtype == np.float16 else 1e-12)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "uint8"])
    def test_other_dtypes_of_torch(self, dtype):
        torch = pytest.importorskip("torch")
        X = torch.asarray(np.random.default_rng(0).uniform(0, 250, (400, 5))).to(getattr(torch, dtype))
        assert_equals_reference(Moments().update(X), X.double().numpy(), rel=1e-5)

    def test_gradients_are_not_tracked(self):
        torch = pytest.importorskip("torch")
        X = torch.randn(10, 3, generator=torch.manual_seed(0), requires_grad=True)
        assert not Moments().update(X).scatter.requires_grad

    def test_pickle(self, as_array):
        X = as_array(np.random.default_rng(0).standard_normal((20, 3)))
        moments = Moments().update(X)
        loaded = pickle.loads(pickle.dumps(moments))
        assert loaded.count == 20
        np.testing.assert_array_equal(_xp.to_numpy(loaded.scatter), _xp.to_numpy(moments.scatter))
        np.testing.assert_array_equal(_xp.to_numpy(loaded.mean), _xp.to_numpy(moments.mean))


class TestDerived:
    def test_covariance_and_gram(self):
        X = np.random.default_rng(0).standard_normal((50, 4)) + 2
        moments = Moments().update(X)
        np.testing.assert_allclose(moments.covariance(), np.cov(X.T), rtol=1e-12)
        np.testing.assert_allclose(moments.covariance(ddof=0), np.cov(X.T, ddof=0), rtol=1e-12)
        np.testing.assert_allclose(moments.gram(), X.T @ X, rtol=1e-12)

    def test_properties(self):
        moments = Moments()
        assert (moments.count, moments.n_features) == (0, None)
        assert repr(moments) == "Moments(count=0, n_features=None)"
        assert repr(moments.update(np.ones((3, 2)))) == "Moments(count=3, n_features=2)"

    def test_too_few_rows(self):
        with pytest.raises(ValueError, match="needs more than 1 rows, got 1"):
            Moments().update(np.ones((1, 2))).covariance()
        with pytest.raises(ValueError, match="needs more than 0 rows, got 0"):
            Moments().covariance(ddof=0)
        with pytest.raises(ValueError, match="No rows were seen"):
            Moments().gram()


class TestErrors:
    @pytest.mark.parametrize("shape", [(3,), (2, 3, 4)])
    def test_dimensions(self, shape):
        with pytest.raises(ValueError, match=r"needs rows of shape \(n_samples, n_features\), got shape"):
            Moments().update(np.ones(shape))

    def test_block_rows(self):
        with pytest.raises(ValueError, match="block_rows=0 must be at least 1"):
            Moments().update(np.ones((3, 2)), block_rows=0)

    def test_number_of_features(self):
        moments = Moments().update(np.ones((3, 2)))
        for bad in (lambda: moments.update(np.ones((3, 4))), lambda: moments.merge(Moments().update(np.ones((3, 4))))):
            with pytest.raises(ValueError, match="Cannot join moments of 2 features with rows of 4 features"):
                bad()

    @pytest.mark.parametrize("dtype", [np.float64, np.float32])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_not_finite_leaves_the_object_unchanged(self, as_array, dtype, value):
        x = np.ones((10, 2), dtype=dtype)
        moments = Moments().update(as_array(x))
        x[7, 1] = value
        with pytest.raises(ValueError, match="X contains NaN, infinity"):
            moments.update(as_array(x), block_rows=5)
        assert moments.count == 10

    def test_squares_overflow_in_float64(self):
        with pytest.raises(ValueError, match=r"squares overflow.*rescale X"):
            Moments().update(np.array([[1e200, 0.0], [-1e200, 1.0]]))

    @pytest.mark.parametrize(("dtype", "match"), [(complex, "Complex data"), (object, "must be numeric")])
    def test_dtypes(self, dtype, match):
        with pytest.raises(ValueError, match=match):
            Moments().update(np.ones((3, 2), dtype=dtype))

    def test_libraries_do_not_mix(self):
        strict = pytest.importorskip("array_api_strict")
        with pytest.raises(TypeError, match="pass all arrays in one library"):
            Moments().update(np.ones((3, 2))).update(strict.ones((3, 2)))


def test_public_name_is_lazy():
    import isogeom

    assert isogeom.Moments is _moments.Moments


def test_only_moments_can_be_merged():
    with pytest.raises(TypeError, match="other must be Moments, got ndarray"):
        Moments().merge(np.eye(3))


class TestScale:
    @pytest.mark.parametrize("scale", [2.0**-500, 2.0**500])
    def test_powers_of_two_change_no_digit(self, as_array, scale):
        x = np.random.default_rng(0).standard_normal((300, 6)) + 1
        plain, scaled = Moments().update(as_array(x)), Moments().update(as_array(x * scale))
        np.testing.assert_array_equal(_xp.to_numpy(scaled.mean), _xp.to_numpy(plain.mean) * scale)
        np.testing.assert_array_equal(_xp.to_numpy(scaled.covariance()), _xp.to_numpy(plain.covariance()) * scale**2)

    @pytest.mark.parametrize(("scale", "what"), [(1e-300, "underflow"), (1e-160, "underflow"), (1e160, "overflow")])
    def test_spreads_without_squares_are_named(self, as_array, scale, what):
        x = np.random.default_rng(0).standard_normal((300, 6))
        with pytest.raises(ValueError, match=rf"X spreads over about \de[+-]\d+, whose squares {what}: rescale X") as e:
            Moments().update(as_array(x * scale)).covariance()
        factor = 2.0 ** float(re.search(r"2\.0\*\*(-?\d+)", str(e.value)).group(1))
        # The advice works.
        got = _xp.to_numpy(Moments().update(as_array(x * scale * factor)).covariance())
        np.testing.assert_allclose(got / (scale * factor) ** 2, np.cov(x.T), rtol=1e-9, atol=1e-12)

    def test_equal_rows_have_no_spread_at_any_scale(self, as_array):
        for value in (0.0, 1e-300, 0.1, 1e300):
            moments = Moments().update(as_array(np.full((5, 3), value))).update(as_array(np.full((4, 3), value)))
            assert not _xp.to_numpy(moments.covariance()).any()
            assert np.all(_xp.to_numpy(moments.mean) == value)

    def test_a_tiny_batch_in_a_stream_of_others_is_no_error(self):
        x = np.random.default_rng(0).standard_normal((300, 6))
        tiny = Moments().update(x[:100] * 1e-200)
        assert_equals_reference(tiny.copy().update(x[100:]), np.vstack([x[:100] * 1e-200, x[100:]]), rel=1e-12)
        assert_equals_reference(tiny.merge(Moments().update(x)), np.vstack([x[:100] * 1e-200, x]), rel=1e-12)

    def test_the_loss_is_remembered(self):
        x = np.random.default_rng(0).standard_normal((300, 6)) * 1e-200
        lost = Moments().update(x[:100])
        apart = Moments().update(x[:1]).merge(Moments().update(x[1:2]))
        weighted = Moments().update(np.vstack([x[:3], [[np.nan] * 6]]), [1, 1, 1, 0])
        for moments in (lost.copy(), lost.merge(Moments()), Moments().merge(lost), apart, weighted,
                        pickle.loads(pickle.dumps(lost)), lost.merge(Moments().update(x[:1]))):  # fmt: skip
            with pytest.raises(ValueError, match="squares underflow"):
                moments.covariance()

    def test_pickles_of_before_are_read(self):
        moments = Moments()
        moments.__setstate__({"count": 2, "mean": np.zeros(2), "scatter": np.eye(2)})
        np.testing.assert_array_equal(moments.covariance(), np.eye(2))


def test_passes_give_what_one_update_gives(monkeypatch):
    monkeypatch.setattr(_moments, "_BLOCKS_PER_PASS", 2)
    X = np.random.default_rng(0).standard_normal((5 * _xp.BLOCK_ROWS, 3))
    parts = list(passes(X))
    assert len(parts) == 3
    whole, stepped = Moments().update(X), Moments()
    for rows in parts:
        stepped.update(X[rows])
    np.testing.assert_array_equal(stepped.scatter, whole.scatter)
    np.testing.assert_array_equal(stepped.mean, whole.mean)
