import inspect

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.utils import get_tags

from isogeom import Moments, _xp
from isogeom._validation import (
    Transformer,
    check_choice,
    check_integer,
    check_real,
    check_rows,
    check_same_library,
    check_sample_rows,
    take_rows,
    warn_user,
)
from isogeom.decomposition import ICA, PCA


class Identity(Transformer):
    def fit(self, X, y=None):
        self.mean_ = self._check_X(X, reset=True, min_samples=2, min_features=2)[0, ...]
        self._n_features_out = self.n_features_in_
        return self

    def transform(self, X):
        self._check_fitted_library(X, "mean_", "transform")
        return self._check_X(X, reset=False)


class TestCheckRows:
    @pytest.mark.parametrize(
        ("dtype", "expected"), [("float32", "float32"), ("float64", "float64"), ("int64", "float64")]
    )
    def test_keeps_library_device_and_precision(self, as_array, dtype, expected):
        X = as_array(np.arange(6).reshape(3, 2), dtype)
        got = check_rows(X, name="X")
        assert got.dtype == getattr(_xp.array_namespace(X), expected)
        assert _xp.device(got) == _xp.device(X)
        np.testing.assert_array_equal(_xp.to_numpy(got), np.arange(6).reshape(3, 2))

    def test_no_copy_where_none_is_needed(self, as_array):
        X = as_array(np.ones((3, 2)))
        assert np.shares_memory(_xp.to_numpy(check_rows(X, name="X")), _xp.to_numpy(X))

    def test_lists_booleans_and_half(self):
        assert check_rows([[1, 2], [3, 4]], name="X").dtype == np.float64
        assert check_rows(np.ones((2, 2), dtype=bool), name="X").dtype == np.float64
        assert check_rows(np.ones((2, 2), dtype=np.float16), name="X").dtype == np.float32

    def test_data_frame(self):
        pandas = pytest.importorskip("pandas")
        assert check_rows(pandas.DataFrame({"a": [1.0, 2], "b": [3, 4]}), name="X").shape == (2, 2)

    def test_tensors_of_half_precision_that_require_gradients(self):
        torch = pytest.importorskip("torch")
        got = check_rows(torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True), name="X")
        assert got.dtype == torch.float32
        assert not got.requires_grad

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_not_finite(self, as_array, value):
        x = np.ones((3, 2))
        x[1, 1] = value
        with pytest.raises(ValueError, match=r"G contains (NaN|infinity)"):
            check_rows(as_array(x), name="G")

    @pytest.mark.parametrize("shape", [(3,), (2, 2, 2)])
    def test_dimensions(self, as_array, shape):
        with pytest.raises(ValueError, match=r"Expected 2D array|dim 3"):
            check_rows(as_array(np.ones(shape)), name="G", owner="score")

    def test_too_small(self, as_array):
        X = as_array(np.ones((3, 2)))
        with pytest.raises(ValueError, match=r"3 sample\(s\) \(shape=.*\) while a minimum of 4 is required by score"):
            check_rows(X, name="G", min_samples=4, owner="score")
        with pytest.raises(ValueError, match=r"2 feature\(s\) \(shape=.*\) while a minimum of 3 is required by score"):
            check_rows(X, name="G", min_features=3, owner="score")
        with pytest.raises(ValueError, match=r"a minimum of 4 is required\."):
            check_rows(X, name="G", min_samples=4)

    def test_complex(self, as_array):
        with pytest.raises(ValueError, match="Complex data not supported"):
            check_rows(as_array(np.ones((3, 2), dtype=complex)), name="G")

    def test_sparse(self):
        with pytest.raises(TypeError, match=r"G is sparse.*pass G\.toarray\(\)"):
            check_rows(sp.eye_array(3), name="G")


class TestSampleRows:
    def test_passes(self, as_array):
        X = as_array(np.ones((3, 2)))
        assert check_sample_rows(X, name="G", owner="Proxy", n_features=2, like=X).shape == (3, 2)
        assert check_sample_rows(X, name="G", owner="Proxy", n_features=2).shape == (3, 2)

    def test_number_of_features(self, as_array):
        with pytest.raises(ValueError, match="G has 2 features, but Proxy is expecting 5 features as input"):
            check_sample_rows(as_array(np.ones((3, 2))), name="G", owner="Proxy", n_features=5)

    def test_other_library(self, as_array, library):
        if library.startswith("numpy"):
            pytest.skip("numpy is the other library")
        with pytest.raises(ValueError, match="must use the same namespace and the same device"):
            check_sample_rows(as_array(np.ones((3, 2))), name="G", owner="Proxy", n_features=2, like=np.ones(2))


class TestSameLibrary:
    def test_same(self, as_array):
        check_same_library(as_array(np.ones(2)), as_array(np.zeros(3)), owner="PCA", method="transform")
        check_same_library([1.0], np.ones(2), owner="PCA", method="transform")

    def test_different_libraries(self):
        strict = pytest.importorskip("array_api_strict")
        message = r"PCA\.transform\(\) must use the same namespace and the same device.*Fitted on numpy, called with "
        with pytest.raises(ValueError, match=message + "array_api_strict on device"):
            check_same_library(strict.ones(2), np.ones(2), owner="PCA", method="transform")
        with pytest.raises(ValueError, match=r"Fitted on array_api_strict on device .*, called with numpy"):
            check_same_library(np.ones(2), strict.ones(2), owner="PCA", method="transform")

    def test_different_devices(self):
        strict = pytest.importorskip("array_api_strict")
        elsewhere = strict.ones(2, device=strict.Device("device1"))
        with pytest.raises(ValueError, match=r"Fitted on .*device1.*, called with .*CPU_DEVICE"):
            check_same_library(strict.ones(2), elsewhere, owner="PCA", method="transform")

    def test_two_foreign_libraries(self):
        strict, torch = pytest.importorskip("array_api_strict"), pytest.importorskip("torch")
        with pytest.raises(ValueError, match=r"Fitted on torch on device cpu, called with array_api_strict"):
            check_same_library(strict.ones(2), torch.ones(2), owner="PCA", method="transform")


class TestTransformer:
    def test_tags(self):
        tags = get_tags(Identity())
        assert tags.array_api_support
        assert tags.transformer_tags.preserves_dtype == ["float64", "float32"]

    def test_fit_and_transform(self, as_array):
        X = as_array(np.arange(6.0).reshape(3, 2))
        model = Identity().fit(X)
        assert model.n_features_in_ == 2
        assert list(model.get_feature_names_out()) == ["identity0", "identity1"]
        assert type(model.transform(X)) is type(X)
        with pytest.raises(ValueError, match="3 features, but Identity is expecting 2 features"):
            model.transform(as_array(np.ones((3, 3))))

    def test_minimum_shapes(self, as_array):
        with pytest.raises(ValueError, match="minimum of 2 is required by Identity"):
            Identity().fit(as_array(np.ones((1, 2))))
        with pytest.raises(ValueError, match="minimum of 2 is required by Identity"):
            Identity().fit(as_array(np.ones((2, 1))))

    def test_half_precision(self):
        assert Identity().fit(np.ones((2, 2), dtype=np.float16)).mean_.dtype == np.float32

    def test_feature_names(self):
        pandas = pytest.importorskip("pandas")
        model = Identity().fit(pandas.DataFrame({"a": [1.0, 2], "b": [3, 4]}))
        assert list(model.feature_names_in_) == ["a", "b"]

    def test_library_of_fit(self):
        strict = pytest.importorskip("array_api_strict")
        with pytest.raises(ValueError, match=r"Identity\.transform\(\) must use the same namespace"):
            Identity().fit(np.ones((2, 2))).transform(strict.ones((2, 2)))


class TestInteger:
    @pytest.mark.parametrize("value", [3, np.int32(3), np.uint8(3)])
    def test_returns_an_int(self, value):
        assert type(check_integer(value, "k", low=3, high=3)) is int

    @pytest.mark.parametrize("value", [3.0, "3", None, True, np.bool_(True)])
    def test_types(self, value):
        with pytest.raises(TypeError, match=r"k=.* must be an integer, got \w+\. Use one\."):
            check_integer(value, "k", hint="Use one.")

    @pytest.mark.parametrize(
        ("bounds", "match"),
        [
            ({"low": 5}, r"k=3 must be at least 5\.$"),
            ({"high": 2}, r"k=3 must be at most 2\.$"),
            ({"low": 5, "high": 9}, r"k=3 must be at least 5 and at most 9\.$"),
            ({"low": 5, "hint": "Or more."}, r"k=3 must be at least 5\. Or more\.$"),
        ],
    )
    def test_bounds(self, bounds, match):
        with pytest.raises(ValueError, match=match):
            check_integer(3, "k", **bounds)


class TestReal:
    @pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.float64(0.5)])
    def test_returns_a_float(self, value):
        assert type(check_real(value, "s", low=0.5, high=0.5)) is float
        assert check_real(1, "s") == 1.0

    @pytest.mark.parametrize("value", ["a", None, True, np.bool_(False), 1j, [0.5]])
    def test_types(self, value):
        with pytest.raises(TypeError, match=r"s=.* must be a real number, got "):
            check_real(value, "s")

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_not_finite(self, value):
        with pytest.raises(ValueError, match=r"s=.* must be finite\. Or else\."):
            check_real(value, "s", hint="Or else.")

    def test_bounds(self):
        with pytest.raises(ValueError, match=r"s=0\.5 must be at least 1 and at most 2\."):
            check_real(0.5, "s", low=1, high=2)


class TestChoice:
    def test_accepts(self):
        assert check_choice("a", "mode", ("a", "b")) == "a"
        assert check_choice(np.str_("a"), "mode", ("a", "b")) == "a"
        assert check_choice(None, "mode", ("a", None)) is None
        assert check_choice(np.True_, "flag", (False, True)) is True

    @pytest.mark.parametrize("value", ["c", None, 1, 0.0, ["a"], np.ones(2)])
    def test_rejects(self, value):
        with pytest.raises(ValueError, match=r"mode=.* must be one of 'a', False\."):
            check_choice(value, "mode", ("a", False))


class TestWarnUser:
    def test_names_the_line_outside_of_the_packages(self):
        # Two library frames and one of scikit-learn between the call and the warning.
        inner = {"__name__": "isogeom.decomposition._inner", "warn_user": warn_user}
        exec("def report():\n    warn_user('weak', RuntimeWarning)\n\ndef fit():\n    report()", inner)
        wrapper = {"__name__": "sklearn.utils._set_output", "fit": inner["fit"]}
        exec("def wrapped():\n    fit()", wrapper)
        for call in (inner["report"], inner["fit"], wrapper["wrapped"]):
            with pytest.warns(RuntimeWarning, match="weak") as record:
                call()
            line = inspect.currentframe().f_lineno - 1
            assert [(w.filename, w.lineno) for w in record] == [(__file__, line)]

    def test_a_package_that_only_starts_alike_is_the_users(self):
        theirs = {"__name__": "sklearn_extra.thing", "warn_user": warn_user}
        exec(compile("def fit():\n    warn_user('weak')", "theirs.py", "exec"), theirs)
        with pytest.warns(UserWarning, match="weak") as record:
            theirs["fit"]()
        assert record[0].filename == "theirs.py"


class Lazy(Transformer):
    """Leaves the dtype of the rows alone, as estimators that convert block by block do."""

    def fit(self, X, y=None):
        self.rows_ = self._check_X(X, reset=True, min_samples=2, convert=False)
        return self


class TestUnconvertedRows:
    @pytest.mark.parametrize("dtype", ["float16", "uint8", "int32", "bool"])
    def test_small_dtypes_are_kept_without_a_copy(self, dtype):
        X = np.ones((4, 3), dtype=dtype)
        rows = Lazy().fit(X).rows_
        assert np.shares_memory(rows, X)
        assert rows.dtype == X.dtype

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "uint8"])
    def test_tensors_too(self, dtype):
        torch = pytest.importorskip("torch", reason="torch is not installed")
        X = torch.ones((4, 3)).to(getattr(torch, dtype))
        rows = Lazy().fit(X.requires_grad_() if dtype != "uint8" else X).rows_
        assert rows.data_ptr() == X.data_ptr()
        assert not rows.requires_grad

    def test_what_fit_checks_is_checked_all_the_same(self):
        bad = np.ones((4, 3), dtype=np.float16)
        bad[2, 1] = np.inf
        with pytest.raises(ValueError, match="Input X contains infinity"):
            Lazy().fit(bad)
        torch = pytest.importorskip("torch", reason="torch is not installed")
        with pytest.raises(ValueError, match="Input X contains NaN or infinity"):
            Lazy().fit(torch.asarray(bad))
        for X in (np.ones((1, 3), dtype=np.uint8), torch.ones((1, 3), dtype=torch.uint8)):
            with pytest.raises(ValueError, match=r"1 sample\(s\).*minimum of 2 is required"):
                Lazy().fit(X)
        with pytest.raises(ValueError, match="Expected 2D array"):
            Lazy().fit(np.ones(3, dtype=np.uint8))
        model = Lazy().fit(np.ones((4, 3), dtype=np.uint8))
        with pytest.raises(ValueError, match="2 features, but Lazy is expecting 3 features"):
            model._check_X(np.ones((4, 2), dtype=np.uint8), reset=False, convert=False)

    def test_other_dtypes_are_converted(self):
        for X in ([[1, 2], [3, 4]], np.ones((2, 2), dtype=np.longdouble), np.ones((2, 2), dtype=object)):
            assert Lazy().fit(X).rows_.dtype == np.float64


def test_a_value_that_is_not_finite_is_found_in_any_block(monkeypatch, as_array):
    monkeypatch.setattr("isogeom._validation._FINITE_ELEMENTS", 1)
    x = np.ones((3 * _xp.BLOCK_ROWS + 2, 2))
    x[-1, 0] = np.nan
    with pytest.raises(ValueError, match="G contains NaN"):
        check_rows(as_array(x), name="G")


def test_rows_are_taken_from_anything(as_array):
    x = np.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(_xp.to_numpy(take_rows(as_array(x), np.array([2, 0]))), x[[2, 0]])
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = take_rows(pandas.DataFrame(x, columns=list("abc")), np.array([2, 0]))
    assert list(frame.columns) == list("abc")
    np.testing.assert_array_equal(frame.to_numpy(), x[[2, 0]])


@pytest.mark.parametrize("step", ["fit", "transform", "partial_fit"])
def test_moments_where_rows_are_needed_are_refused(step):
    X = np.random.default_rng(0).standard_normal((50, 3))
    model = PCA(2).fit(X) if step != "fit" else ICA(2)
    with pytest.raises(TypeError, match=f"X is Moments, but {type(model).__name__} needs the rows"):
        getattr(model, step)(Moments().update(X))
