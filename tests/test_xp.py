import subprocess
import sys

import numpy as np
import pytest

from isogeom import _xp


def strict():
    return pytest.importorskip("array_api_strict")


def torch():
    return pytest.importorskip("torch")


class TestNamespace:
    def test_foreign(self, as_array, library):
        assert _xp.is_foreign(as_array(np.ones(2))) == (not library.startswith("numpy"))

    @pytest.mark.parametrize("x", [1.0, np.float32(1), [1, 2], None, "a", np.ones(2), np.ma.ones(2)])
    def test_host_objects_are_not_foreign(self, x):
        assert not _xp.is_foreign(x)
        assert _xp.is_numpy(_xp.array_namespace(x))

    def test_follows_the_arrays(self, as_array, library):
        x = as_array(np.ones(2))
        xp = _xp.array_namespace(x, x)
        assert _xp.is_numpy(xp) == library.startswith("numpy")
        assert _xp.is_torch(xp) == library.startswith("torch")
        assert type(xp.zeros(2)) is type(x)
        assert _xp.array_namespace(x, [1.0], 2.0, None) is xp

    def test_nothing_is_numpy(self):
        assert _xp.is_numpy(_xp.array_namespace())

    def test_mixed_with_numpy(self, as_array, library):
        if library.startswith("numpy"):
            pytest.skip("numpy does not mix with itself")
        with pytest.raises(TypeError, match=r"Got a numpy array together with a .* pass all arrays in one library"):
            _xp.array_namespace(np.ones(2), as_array(np.ones(2)))

    def test_two_foreign_libraries(self):
        with pytest.raises(TypeError):
            _xp.array_namespace(strict().ones(2), torch().ones(2))

    def test_import_is_light(self):
        heavy = ["torch", "numba", "matplotlib", "pandas", "dask", "sklearn"]
        code = (
            "import sys, isogeom, isogeom._xp; import numpy as np; xp = isogeom._xp.array_namespace(np.ones(2));"
            f"assert not isogeom._xp.is_torch(xp); print([m for m in {heavy} if m in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout.strip() == "[]", done.stderr


class TestDtypes:
    def test_accumulator(self, as_array):
        x = as_array(np.ones(2, dtype=np.float32))
        xp = _xp.array_namespace(x)
        assert _xp.accumulator_dtype(xp, _xp.device(x)) == xp.float64

    def test_accumulator_without_float64(self):
        xp = strict()
        assert _xp.accumulator_dtype(xp, xp.Device("no_float64")) == xp.float32

    @pytest.mark.parametrize(
        ("dtype", "expected"), [(np.float32, True), (np.float64, True), (int, False), (bool, False)]
    )
    def test_real_floating(self, as_array, dtype, expected):
        x = as_array(np.ones(2), dtype)
        assert _xp.is_real_floating(_xp.array_namespace(x), x) is expected

    def test_real_floating_half(self):
        for x in (np.ones(2, dtype=np.float16), torch().ones(2, dtype=torch().bfloat16)):
            assert _xp.is_real_floating(_xp.array_namespace(x), x)

    @pytest.mark.parametrize(
        ("dtype", "expected"),
        [("float32", "float32"), ("float64", "float64"), ("int32", "float64"), ("bool", "float64")],
    )
    def test_as_real_floating(self, as_array, dtype, expected):
        x = as_array(np.array([0, 1, 1]), dtype)
        xp = _xp.array_namespace(x)
        got = _xp.as_real_floating(x, "X")
        assert got.dtype == getattr(xp, expected)
        assert _xp.device(got) == _xp.device(x)
        np.testing.assert_array_equal(_xp.to_numpy(got), [0, 1, 1])

    def test_as_real_floating_keeps_what_is_fine(self):
        x = np.ones(3, dtype=np.float32)
        assert _xp.as_real_floating(x, "X") is x

    def test_as_real_floating_of_other_widths(self):
        assert _xp.as_real_floating(np.ones(2, dtype=np.float16), "X").dtype == np.float32
        assert _xp.as_real_floating(np.ones(2, dtype=np.longdouble), "X").dtype == np.float64
        for half in (torch().float16, torch().bfloat16):
            x = torch().ones(2, dtype=half, requires_grad=True)
            got = _xp.as_real_floating(x, "X")
            assert got.dtype == torch().float32
            assert not got.requires_grad

    def test_as_real_floating_errors(self):
        for x in (np.ones(2, dtype=complex), torch().ones(2, dtype=torch().complex64)):
            with pytest.raises(ValueError, match="Complex data not supported: codes has dtype"):
                _xp.as_real_floating(x, "codes")
        with pytest.raises(ValueError, match="Data must be numeric: codes has dtype"):
            _xp.as_real_floating(np.array(["a"]), "codes")


class TestMoves:
    def test_asarray_like(self, as_array):
        ref = as_array(np.ones(2, dtype=np.float32))
        xp = _xp.array_namespace(ref)
        got = _xp.asarray_like(np.arange(3.0), ref)
        assert got.dtype == ref.dtype
        assert _xp.device(got) == _xp.device(ref)
        assert type(got) is type(xp.asarray(ref))
        assert _xp.asarray_like(np.arange(3), ref, dtype=xp.int64).dtype == xp.int64

    def test_asarray_like_follows_the_device(self):
        xp = strict()
        ref = xp.ones(2, device=xp.Device("device1"))
        assert _xp.asarray_like(np.ones(2), ref).device == xp.Device("device1")

    def test_round_trip(self, as_array):
        x = np.arange(6.0).reshape(2, 3)
        got = _xp.to_numpy(as_array(x))
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, x)

    def test_to_numpy_of_other_objects(self):
        xp = strict()
        np.testing.assert_array_equal(_xp.to_numpy([1, 2]), [1, 2])
        np.testing.assert_array_equal(_xp.to_numpy(xp.ones(2, device=xp.Device("device2"))), [1, 1])
        for half in (torch().float16, torch().bfloat16):
            got = _xp.to_numpy(torch().ones(2, dtype=half, requires_grad=True))
            assert got.dtype == np.float32

    def test_to_numpy_of_any_other_library_uses_dlpack(self, monkeypatch):
        # Stands for a library that is neither torch nor array-api-strict, CuPy say.
        monkeypatch.setattr(_xp, "is_foreign", lambda x: True)
        monkeypatch.setattr(_xp, "array_namespace", lambda x: np)
        np.testing.assert_array_equal(_xp.to_numpy(np.arange(3)), [0, 1, 2])


class TestBlocks:
    @pytest.mark.parametrize(("n", "size", "expected"), [(5, 2, [2, 2, 1]), (4, 2, [2, 2]), (1, 9, [1]), (0, 3, [])])
    def test_lengths_and_order(self, as_array, n, size, expected):
        x = np.arange(n * 2.0).reshape(n, 2)
        blocks = list(_xp.row_blocks(as_array(x), size))
        assert [block.shape[0] for block in blocks] == expected
        joined = [_xp.to_numpy(block) for block in blocks]
        np.testing.assert_array_equal(np.concatenate([*joined, x[:0]]), x)

    def test_blocks_are_views(self):
        x = np.zeros((5, 2))
        next(_xp.row_blocks(x, 2))[...] = 1
        assert x.sum() == 4

    def test_default_size(self):
        sizes = [block.shape[0] for block in _xp.row_blocks(np.zeros((_xp.BLOCK_ROWS + 1, 1)))]
        assert sizes == [_xp.BLOCK_ROWS, 1]


@pytest.mark.parametrize("axis", [0, 1])
def test_largest_by(as_array, axis):
    x = np.array([[1.0, -3, 3], [-4, 2, 0], [0, 0, 0]])
    X = as_array(x)
    got = _xp.to_numpy(_xp.largest_by(_xp.array_namespace(X), X, axis))
    lines = x if axis == 1 else x.T
    expected = [max(line, key=abs) for line in lines]
    assert got.shape == ((3, 1) if axis == 1 else (1, 3))
    np.testing.assert_array_equal(got.ravel(), expected)
