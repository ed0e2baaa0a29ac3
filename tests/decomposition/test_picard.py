"""The optimiser over rotations, apart from the estimator."""

import numpy as np
import pytest
from oracles.ica import CONTRASTS, FUNCTIONS, elliptical_mixture, laplace_mixture, objective, stationarity, whiten
from scipy.integrate import quad
from scipy.linalg import expm

from isogeom import _xp
from isogeom.decomposition import _ica_contrasts, _ica_descent, _ica_memory, _ica_points, _picard
from isogeom.decomposition._ica_contrasts import gaussian_reference, gaussian_threshold

NP = _xp.array_namespace()
LOGCOSH = _ica_contrasts.CONTRASTS["logcosh"]


def rotation(k, seed):
    return _picard.polar(np.random.default_rng(seed).standard_normal((k, k)))


def random_skew(k, seed, size=1.0):
    A = np.random.default_rng(seed).standard_normal((k, k)) * size
    return (A - A.T) / 2


@pytest.fixture(scope="module")
def rows():
    """Whitened rows of a Laplace mixture, 5 sources."""
    return whiten(laplace_mixture(3000, 7, 5, seed=0)[0], 5)


# ---------------------------------------------------------------- contrasts


@pytest.mark.parametrize("fun", CONTRASTS)
def test_contrasts_are_consistent_with_their_derivatives(fun):
    u, h = np.linspace(-3, 3, 41), 1e-6
    contrast = _ica_contrasts.CONTRASTS[fun]
    g, slope = contrast.derivatives(NP, u)
    for ours, oracle in zip((contrast.value(NP, u), g, slope), FUNCTIONS[fun], strict=True):
        np.testing.assert_allclose(ours, oracle(u), atol=1e-12)
    np.testing.assert_allclose(g, (contrast.value(NP, u + h) - contrast.value(NP, u - h)) / (2 * h), atol=1e-7)


@pytest.mark.parametrize("fun", CONTRASTS)
@pytest.mark.parametrize("n", [1, 7, 12, 64, 1000])
def test_totals_are_column_sums_of_the_values(fun, n):
    # Far from 0, products of many factors of 2 must not overflow, nor small ones vanish.
    u = np.random.default_rng(0).standard_normal((n, 6)) * np.array([1e-3, 0.1, 1, 3, 30, 300])
    contrast = _ica_contrasts.CONTRASTS[fun]
    for dtype, rtol in ((np.float64, 1e-13), (np.float32, 1e-5)):
        v = u.astype(dtype)
        total = contrast.total(NP, v, contrast.derivatives(NP, v)[0], np.ones(n, dtype))
        assert total.dtype == dtype
        # log cosh u of small u is a difference of numbers near 1: exact in absolute terms, per row.
        np.testing.assert_allclose(
            total, contrast.value(NP, v.astype(float)).sum(axis=0), rtol=rtol, atol=n * np.finfo(dtype).eps
        )


def test_logcosh_does_not_overflow():
    u = np.asarray([-500.0, 0.0, 500.0], dtype=np.float32)
    np.testing.assert_allclose(LOGCOSH.value(NP, u), np.asarray([500, 0, 500]) - np.log(2) * (u != 0), rtol=1e-6)


@pytest.mark.parametrize("fun", CONTRASTS)
def test_gaussian_reference_by_quadrature(fun):
    G, g, _ = FUNCTIONS[fun]
    mean, deviation = gaussian_reference(fun)

    def expectation(f):
        return quad(lambda v: f(v) * np.exp(-(v**2) / 2) / np.sqrt(2 * np.pi), -12, 12, epsabs=1e-12)[0]

    m = expectation(G)
    np.testing.assert_allclose(mean, m, atol=1e-8)
    expected = np.sqrt(expectation(lambda v: (G(v) - m) ** 2) - expectation(lambda v: v * g(v)) ** 2 / 2)
    np.testing.assert_allclose(deviation, expected, rtol=1e-5)


@pytest.mark.parametrize("fun", CONTRASTS)
def test_gaussian_reference_is_the_spread_of_standardised_samples(fun):
    V = np.random.default_rng(0).standard_normal((400, 4000))
    V = (V - V.mean(axis=0)) / V.std(axis=0)
    means = FUNCTIONS[fun][0](V).mean(axis=0)
    # Standard error of a standard deviation from 4000 draws: 1.1 %; of order 1/400 besides, from the sample size.
    np.testing.assert_allclose(means.std() * np.sqrt(400), gaussian_reference(fun)[1], rtol=0.06)


def test_gaussian_threshold_for_one_direction_is_a_two_sided_test():
    # One direction is not searched: the bound 2 exp(-t^2 / 2) of the normal tail is the level.
    t = gaussian_threshold("cube", 100, 1) * 10 / gaussian_reference("cube")[1]
    np.testing.assert_allclose(2 * np.exp(-(t**2) / 2), 0.01)
    assert gaussian_threshold("cube", 400, 1) == pytest.approx(gaussian_threshold("cube", 100, 1) / 2)


# ---------------------------------------------------------------- averages and derivatives


@pytest.mark.parametrize("fun", CONTRASTS)
def test_gradient_is_the_derivative_along_rotations(rows, fun):
    contrast, W, h = _ica_contrasts.CONTRASTS[fun], rotation(5, 1), 1e-5
    point = _ica_points.evaluate(rows, W, contrast)
    sign = np.array([1.0, -1.0, 1.0, 1.0, -1.0])
    np.testing.assert_allclose(point.loss(sign), objective(rows @ W.T, fun, sign))
    for seed in range(3):
        E = random_skew(5, seed)
        ahead, behind = (objective(rows @ (expm(t * E) @ W).T, fun, sign) for t in (h, -h))
        np.testing.assert_allclose(np.sum(point.gradient(sign) * E), (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(np.abs(point.gradient(sign)).max(), stationarity(rows @ W.T, fun, sign))


@pytest.mark.parametrize("fun", CONTRASTS)
def test_hessian_is_the_second_derivative_in_a_plane(rows, fun):
    contrast, W, h = _ica_contrasts.CONTRASTS[fun], rotation(5, 1), 1e-3
    point = _ica_points.evaluate(rows, W, contrast)
    sign = point.signs()
    H = point.hessian(sign)
    for i, j in ((0, 1), (1, 4), (2, 3)):
        E = np.zeros((5, 5))
        E[i, j], E[j, i] = 1, -1
        ahead, here, behind = (objective(rows @ (expm(t * E) @ W).T, fun, sign) for t in (h, 0, -h))
        second = abs(ahead - 2 * here + behind) / h**2
        # The quadratic form counts both entries of the pair.
        np.testing.assert_allclose(np.sum(H * E * E), max(second, 2 * _ica_points._FLAT), rtol=1e-3)


def test_a_lesser_point_has_the_slopes_of_a_full_one(rows):
    full = _ica_points.evaluate(rows, rotation(5, 1), LOGCOSH)
    point = _ica_points.evaluate(rows, rotation(5, 1), LOGCOSH, full=False)
    assert np.array_equal(point.psi, full.psi)
    assert np.array_equal(point.slopes, full.slopes)
    assert (full.full, point.full, point.values, point.cross) == (True, False, None, None)


@pytest.mark.parametrize("fun", CONTRASTS)
def test_columns_beyond_the_sources_count_for_nothing(rows, fun):
    contrast, W = _ica_contrasts.CONTRASTS[fun], rotation(5, 1)
    filled = np.concatenate([rows, np.zeros((len(rows), 3))], axis=1)
    expected, point = _ica_points.evaluate(rows, W, contrast), _ica_points.evaluate(filled, W, contrast)
    for name in ("W", "values", "slopes", "psi", "cross"):
        np.testing.assert_allclose(getattr(point, name), getattr(expected, name), atol=1e-13)


def test_float32_gradient_of_many_rows_is_summed_in_float64():
    S = whiten(laplace_mixture(60_000, 4, 4, seed=1)[0], 4)
    cube = _ica_contrasts.CONTRASTS["cube"]
    single, double = (_ica_points.evaluate(S.astype(dtype), rotation(4, 1), cube) for dtype in (np.float32, np.float64))
    sign = np.ones(4)
    np.testing.assert_allclose(single.gradient(sign), double.gradient(sign), atol=1e-6)


def test_signs_tell_heavy_from_light_tails():
    rng = np.random.default_rng(0)
    S = np.column_stack([rng.laplace(size=5000), rng.uniform(-1, 1, 5000)])
    S = (S - S.mean(axis=0)) / S.std(axis=0)
    for fun, expected in (("logcosh", [1, -1]), ("exp", [1, -1]), ("cube", [-1, 1])):
        assert _ica_points.evaluate(S, np.eye(2), _ica_contrasts.CONTRASTS[fun]).signs().tolist() == expected


@pytest.mark.parametrize("entries", [5, 5 * 64, 5 * 1000, 10**9])
def test_block_size_changes_rounding_only(rows, entries, monkeypatch):
    expected = _ica_points.evaluate(rows, rotation(5, 1), LOGCOSH)
    monkeypatch.setattr(_ica_points, "_BLOCK_ENTRIES", entries)
    point = _ica_points.evaluate(rows, rotation(5, 1), LOGCOSH)
    for name in ("values", "slopes", "psi", "cross"):
        np.testing.assert_allclose(getattr(point, name), getattr(expected, name), atol=1e-13)


# ---------------------------------------------------------------- the iteration


def test_cayley_rotation_is_orthogonal_and_near_the_exponential():
    E = random_skew(6, 0)
    R = _ica_descent.rotation(E)
    np.testing.assert_allclose(R @ R.T, np.eye(6), atol=1e-14)
    errors = [np.abs(_ica_descent.rotation(t * E) - expm(t * E)).max() for t in (1e-2, 1e-3)]
    assert errors[1] < errors[0] * 1.1e-3


def test_memory_solves_a_quadratic():
    rng = np.random.default_rng(0)
    k, dim = 4, 6
    index = np.triu_indices(k, 1)

    def skew(v):
        A = np.zeros((k, k))
        A[index] = v
        return A - A.T

    B = rng.standard_normal((dim, dim))
    B = B @ B.T + np.eye(dim)
    memory, x = _ica_memory.Memory(20), rng.standard_normal(dim)
    ones = np.ones((k, k))
    for _ in range(60):
        g = B @ x
        d = memory.direction(skew(g), ones)[index]
        assert d @ g < 0
        step = -(d @ g) / (d @ B @ d) * d
        memory.add(skew(step), skew(B @ step))
        x = x + step
        if np.abs(x).max() < 1e-9:
            break
    # With exact line searches, quasi-Newton directions on a quadratic are conjugate: at most `dim` steps.
    assert np.abs(x).max() < 1e-9
    assert len(memory._pairs) <= dim + 1


def test_memory_refuses_negative_curvature():
    memory = _ica_memory.Memory(5)
    memory.add(random_skew(3, 0), -random_skew(3, 0))
    assert not memory


def test_line_search_refuses_an_ascent_direction(rows):
    point = _ica_points.evaluate(rows, rotation(5, 1), LOGCOSH)
    sign = point.signs()
    gradient = point.gradient(sign)
    assert _ica_descent.line_search(rows, point, sign, gradient, LOGCOSH, 1e-15) is None
    new, step = _ica_descent.line_search(rows, point, sign, -gradient, LOGCOSH, 1e-15)
    assert new.loss(sign) < point.loss(sign)
    np.testing.assert_allclose(new.W, _ica_descent.rotation(step) @ point.W)


@pytest.mark.parametrize("fun", CONTRASTS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_end_is_stationary_orthogonal_and_lower(rows, fun, dtype):
    Y = rows.astype(dtype)
    solution = _picard.minimise(Y, rotation(5, 2), _ica_contrasts.CONTRASTS[fun], max_iter=300, tol=1e-6)
    W = solution.point.W
    assert solution.gradient_norm <= 1e-6
    assert stationarity(rows @ W.T, fun, solution.signs) < (1e-6 + 1e-9 if dtype == np.float64 else 2e-6)
    np.testing.assert_allclose(W @ W.T, np.eye(5), atol=1e-12)
    assert len(solution.path) <= solution.n_iter + 1


def test_objective_falls_while_the_signs_stay(rows):
    solution = _picard.minimise(rows, rotation(5, 3), LOGCOSH, max_iter=300, tol=1e-8)
    point = _ica_points.evaluate(rows, rotation(5, 3), LOGCOSH)
    assert point.signs().tolist() == solution.signs.tolist() == [1] * 5
    assert np.all(np.diff(solution.path) <= 1e-13)
    expected = objective(rows @ solution.point.W.T, "logcosh", solution.signs) - 5 * gaussian_reference("logcosh")[0]
    np.testing.assert_allclose(solution.path[-1], expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_an_unattainable_tolerance_ends_at_rounding(rows, dtype):
    solution = _picard.minimise(rows.astype(dtype), rotation(5, 2), LOGCOSH, max_iter=1000, tol=0)
    assert solution.n_iter < 200
    assert solution.gradient_norm < (1e-13 if dtype == np.float64 else 1e-6)


def test_flipping_sources_are_frozen_and_still_converge():
    Y = whiten(np.random.default_rng(4).standard_normal((2000, 8)), 8)
    solution = _picard.minimise(Y, rotation(8, 0), LOGCOSH, max_iter=500, tol=1e-7)
    assert solution.gradient_norm <= 1e-7
    assert stationarity(Y @ solution.point.W.T, "logcosh", solution.signs) <= 1.01e-7


@pytest.mark.parametrize("seed", range(4))
def test_elliptical_subspaces_converge(seed):
    Y = whiten(elliptical_mixture(4000, 15, 10, seed), 10)
    solution = _picard.minimise(Y, rotation(10, seed), LOGCOSH, max_iter=500, tol=1e-7)
    assert solution.gradient_norm <= 1e-7


def test_warm_start_on_a_sample_comes_near(monkeypatch):
    Y = whiten(laplace_mixture(20_000, 6, 6, seed=3)[0], 6)
    monkeypatch.setattr(_picard, "_WARM_ROWS", 2000)
    start = rotation(6, 0)
    W, steps = _picard.warm_start(Y, start, LOGCOSH, max_steps=20, tol=1e-2)
    assert 1 <= steps < 20
    np.testing.assert_allclose(W @ W.T, np.eye(6), atol=1e-12)
    final = _picard.minimise(Y, W, LOGCOSH, max_iter=100, tol=1e-8)
    assert np.abs(final.point.W @ W.T).max(axis=1).min() > 0.98
    assert final.n_iter < _picard.minimise(Y, start, LOGCOSH, max_iter=100, tol=1e-8).n_iter
