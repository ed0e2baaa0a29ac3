import math

import numpy as np
import pytest

from isogeom import _linalg, _xp


def symmetric(d, seed=0):
    A = np.random.default_rng(seed).standard_normal((d, d + 3))
    return A @ A.T


def orthonormal(r, d, seed=1):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((d, r)))[0].T


def test_eigh_descending(as_array):
    C = symmetric(6)
    values, rows = map(_xp.to_numpy, _linalg.eigh_descending(as_array(C)))
    assert np.all(np.diff(values) < 0)
    np.testing.assert_allclose(rows.T * values @ rows, C, atol=1e-12)
    np.testing.assert_allclose(rows @ rows.T, np.eye(6), atol=1e-14)
    assert all(max(row, key=abs) > 0 for row in rows)
    np.testing.assert_allclose(values, np.sort(np.linalg.eigvals(C).real)[::-1], rtol=1e-12)


@pytest.mark.parametrize(("d", "k"), [(6, 2), (6, 6), (600, 1), (600, 75), (600, 76)])
def test_eigh_top(as_array, d, k):
    C = symmetric(d)
    values, rows = map(_xp.to_numpy, _linalg.eigh_top(as_array(C), k))
    expected, vectors = map(_xp.to_numpy, _linalg.eigh_descending(as_array(C)))
    np.testing.assert_allclose(values, expected, atol=1e-13 * expected[0])
    assert rows.shape == (k, d)
    np.testing.assert_allclose(rows @ rows.T, np.eye(k), atol=1e-11)
    np.testing.assert_allclose(rows @ C, values[:k, None] * rows, atol=1e-12 * values[0])
    np.testing.assert_allclose(rows, vectors[:k], atol=1e-8)


@pytest.mark.parametrize("scale", [1e-290, 1.0, 1e290])
def test_eigh_top_of_matrices_without_gaps(scale):
    d, k = 600, 20
    half = np.diag(np.repeat([2.0, 1.0], d // 2))
    for C, expected in ((np.eye(d), 1.0), (half, 2.0), (np.zeros((d, d)), 0.0), (np.full((d, d), 1 / d), None)):
        values, rows = _linalg.eigh_top(C * scale, k)
        np.testing.assert_allclose(rows @ rows.T, np.eye(k), atol=1e-12)
        np.testing.assert_allclose(values[0], (expected if expected is not None else 1.0) * scale, rtol=1e-12)
        np.testing.assert_allclose(rows @ C, (values[:k, None] / scale) * rows, atol=1e-12)


def test_eigh_top_falls_back_where_a_step_fails(monkeypatch):
    C = symmetric(600)
    monkeypatch.setattr(_linalg, "_tridiagonal_top", lambda symmetric, k: None)
    values, rows = _linalg.eigh_top(C, 3)
    np.testing.assert_allclose(rows @ C, values[:3, None] * rows, atol=1e-10 * values[0])


def test_fix_signs(as_array):
    rows = np.array([[1.0, -2, 0.5], [-1, 0, 1], [0, 0, 0], [3, 1, -3]])
    got = _xp.to_numpy(_linalg.fix_signs(as_array(rows)))
    np.testing.assert_array_equal(got, [[-1, 2, -0.5], [1, 0, -1], [0, 0, 0], [3, 1, -3]])


def test_row_norms(as_array):
    got = _xp.to_numpy(_linalg.row_norms(as_array(np.array([[3.0, 4], [0, 0], [5, 12]]))))
    np.testing.assert_allclose(got, [5, 0, 13], rtol=1e-15)


@pytest.mark.parametrize(("r", "d"), [(1, 2), (2, 5), (4, 5)])
def test_complement_basis(as_array, r, d):
    basis = orthonormal(r, d)
    rest = _xp.to_numpy(_linalg.complement_basis(as_array(basis)))
    assert rest.shape == (d - r, d)
    whole = np.vstack([basis, rest])
    np.testing.assert_allclose(whole @ whole.T, np.eye(d), atol=1e-14)


def test_quadratic_form_and_captured(as_array):
    C, rows = symmetric(5), np.random.default_rng(2).standard_normal((3, 5))
    expected = np.array([[a @ C @ b for a in rows] for b in rows])
    got = _xp.to_numpy(_linalg.quadratic_form(as_array(rows), as_array(C)))
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(got, got.T)
    assert _linalg.captured(as_array(rows), as_array(C)) == pytest.approx(np.trace(expected), rel=1e-13)
    assert isinstance(_linalg.captured(as_array(rows), as_array(C)), float)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_participation_ratio(as_array, scale):
    C = symmetric(6)
    values = np.linalg.eigvalsh(C)
    got = _linalg.participation_ratio(as_array(C * scale))
    assert got == pytest.approx(values.sum() ** 2 / np.sum(values**2), rel=1e-12)


def test_participation_ratio_of_nothing(as_array):
    assert math.isnan(_linalg.participation_ratio(as_array(np.zeros((3, 3)))))


@pytest.mark.parametrize("r", [1, 3, 5])
def test_remove_directions(as_array, r):
    C, basis = symmetric(5), orthonormal(r, 5)
    P = np.eye(5) - basis.T @ basis
    got = _xp.to_numpy(_linalg.remove_directions(as_array(C), as_array(basis)))
    np.testing.assert_allclose(got, P @ C @ P, atol=1e-12)
    np.testing.assert_array_equal(got, got.T)
    np.testing.assert_allclose(basis @ got, 0, atol=1e-12)
