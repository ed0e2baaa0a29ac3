"""Sums of products over blocks: exact, symmetric, and with the products in the dtype of the rows."""

import numpy as np
import pytest

from isogeom import _xp
from isogeom._products import ProductSum


@pytest.mark.parametrize("d", [1, 5, 127, 128, 129, 300])
def test_sum_of_products(as_array, d):
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((n, d)) for n in (3, 1, 40)]
    total = ProductSum(None, as_array(parts[0]), _xp.array_namespace(as_array(parts[0])).float64)
    for part in parts[:2]:
        assert total.add(as_array(part))
    total.add_exact(as_array(parts[2]), -1)
    expected = sum(s * p.T @ p for s, p in zip((1, 1, -1), parts))
    got = _xp.to_numpy(total.total())
    np.testing.assert_allclose(got, expected, atol=1e-12)
    np.testing.assert_allclose(got, got.T, atol=1e-13)


def test_the_start_is_copied():
    start = np.eye(3)
    total = ProductSum(start, np.empty((0, 3)), np.float64)
    total.add(np.ones((1, 3)))
    np.testing.assert_array_equal(total.total(), np.eye(3) + 1)
    np.testing.assert_array_equal(start, np.eye(3))


def test_float32_products_are_added_in_float64(as_array):
    Y = as_array(np.array([[1.0, 2.0]], dtype=np.float32))
    xp = _xp.array_namespace(Y)
    total = ProductSum(as_array(np.full((2, 2), 1e9)), Y, xp.float64)
    assert total.add(Y)
    result = total.total()
    assert result.dtype == xp.float64
    np.testing.assert_array_equal(_xp.to_numpy(result) - 1e9, [[1, 2], [2, 4]])


@pytest.mark.parametrize("value", [1e25, 1e-25, np.nan])
def test_squares_out_of_range_are_refused_and_add_nothing(as_array, value):
    Y = as_array(np.full((2, 2), value, dtype=np.float32))
    total = ProductSum(None, Y, _xp.array_namespace(Y).float64)
    with np.errstate(all="ignore"):
        assert not total.add(Y)
    np.testing.assert_array_equal(_xp.to_numpy(total.total()), np.zeros((2, 2)))
