import numpy as np
import pytest
from oracles.semi_nmf import nnls_rows

from isogeom import _xp
from isogeom.decomposition import batched_nnls
from isogeom.decomposition._nnls import nnls_shared_gram
from isogeom.decomposition._nnls_descent import _accelerate, burst_length


def problem(n, k, condition, seed=0):
    """Atoms of about unit norm whose Gram matrix has about this condition number, and rows of either sign."""
    rng = np.random.default_rng([7, k, seed])
    left, right = np.linalg.qr(rng.standard_normal((k, k)))[0], np.linalg.qr(rng.standard_normal((k + 20, k)))[0]
    D = (left * np.logspace(0, -0.5 * np.log10(condition), k)) @ right.T
    D /= np.linalg.norm(D, axis=1, keepdims=True)
    codes = rng.exponential(size=(n, k)) * (rng.random((n, k)) < 0.3)
    X = np.where(rng.random((n, 1)) < 0.5, codes @ D, rng.standard_normal((n, k + 20)))
    return D, X + 0.05 * rng.standard_normal(X.shape)


def accelerated_row(G, p, l1, z, n_iter):
    """Minimise over one row as written in the papers; also count the restarts."""
    largest = np.linalg.eigvalsh(G)[-1]
    y, t, restarts = z.copy(), 1.0, 0
    for _ in range(n_iter):
        new = np.maximum(y - (G @ y - p + l1) / largest, 0)
        if (y - new) @ (new - z) > 0:
            y, t, restarts = new, 1.0, restarts + 1
        else:
            following = (1 + np.sqrt(1 + 4 * t**2)) / 2
            y, t = new + (t - 1) / following * (new - z), following
        z = new
    return z, restarts


def accelerated(G, P, l1, Z, n_iter, as_array=np.asarray):
    largest = np.linalg.eigvalsh(G)[-1]
    arrays = (np.eye(len(G)) - G / largest, (P - l1).T / largest, Z.T)
    arrays = [as_array(np.ascontiguousarray(a)) for a in arrays]
    return _xp.to_numpy(_accelerate(_xp.array_namespace(*arrays), *arrays, n_iter)).T


@pytest.mark.parametrize("condition", [10, 1e3])
def test_iterations_are_those_of_every_row_alone(as_array, library, condition):
    D, X = problem(20, 12, condition)
    G, P, l1 = D @ D.T, X @ D.T, np.full(12, 0.1)
    start = np.abs(np.random.default_rng(0).standard_normal(P.shape))
    Z = accelerated(G, P, l1, start, 60, as_array)
    expected, restarts = zip(*(accelerated_row(G, p, l1, z, 60) for p, z in zip(P, start)))
    np.testing.assert_allclose(Z, expected, rtol=0, atol=1e-11)
    # Rows restart on their own: a restart of all rows at once would give other iterates.
    assert len(set(restarts)) > 1


def test_momentum_pays():
    D, X = problem(30, 20, 1e3)
    G, P, zeros = D @ D.T, X @ D.T, np.zeros((30, 20))
    exact = nnls_rows(D, X)
    plain = zeros
    for _ in range(300):
        plain = np.maximum(plain - (plain @ G - P) / np.linalg.eigvalsh(G)[-1], 0)
    fast = accelerated(G, P, np.zeros(20), zeros, 300)
    assert np.abs(fast - exact).max() < 0.01 * np.abs(plain - exact).max()


@pytest.mark.parametrize("condition", [10, 1e3, 1e6])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_agrees_with_scipy_at_any_conditioning(as_array, library, k, condition):
    D, X = problem(30, k, condition)
    expected = nnls_rows(D, X)
    Z, residual, n_iter = nnls_shared_gram(as_array(D @ D.T), as_array(X @ D.T), algorithm="array")
    np.testing.assert_allclose(_xp.to_numpy(Z), expected, rtol=0, atol=1e-8 * np.abs(expected).max())
    assert residual < 1e-11
    assert n_iter > 0


@pytest.mark.parametrize("max_sweeps", [0, 1])
def test_pivots_alone_are_exact(as_array, library, max_sweeps):
    D, X = problem(30, 12, 1e4)
    expected = nnls_rows(D, X)
    Z, residual, n_iter = nnls_shared_gram(
        as_array(D @ D.T), as_array(X @ D.T), max_sweeps=max_sweeps, algorithm="array"
    )
    np.testing.assert_allclose(_xp.to_numpy(Z), expected, rtol=0, atol=1e-8 * np.abs(expected).max())
    assert residual < 1e-11
    assert (n_iter == 0) == (max_sweeps == 0)


@pytest.mark.parametrize("exponent", [-300, -160, 150, 300])
def test_rows_of_extreme_scales_restart_alike(exponent):
    D, X = problem(30, 12, 1e3)
    G, P = D @ D.T, X @ D.T
    expected, _, n_iter = nnls_shared_gram(G, P, algorithm="array")
    # A power of two: every iterate is the same but for its exponent, and so is the number of iterations.
    factor = 2.0 ** round(exponent * np.log2(10))
    with np.errstate(all="raise", under="ignore"):
        Z, _, again = nnls_shared_gram(G, P * factor, algorithm="array")
    assert again == n_iter
    np.testing.assert_allclose(Z / factor, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_a_penalty_far_above_the_rows_gives_zero_codes(as_array, library):
    D, X = problem(10, 6, 10)
    solution = batched_nnls(as_array(D @ D.T), as_array(X @ D.T * 1e-300), alpha=1e200)
    assert solution.kkt_residual == 0
    assert not np.any(_xp.to_numpy(solution.codes))


def test_zero_atoms_and_zero_rows_keep_zero_codes_in_array_code(as_array, library):
    D, X = problem(20, 6, 10)
    D[2], X[4] = 0, 0
    Z, residual, _ = nnls_shared_gram(as_array(D @ D.T), as_array(X @ D.T), algorithm="array")
    Z = _xp.to_numpy(Z)
    assert not np.any(Z[:, 2])
    assert not np.any(Z[4])
    assert residual < 1e-11
    np.testing.assert_allclose(Z @ D, nnls_rows(D, X) @ D, atol=1e-8)


def test_worse_conditioning_gives_longer_bursts_up_to_a_limit():
    assert [burst_length(40, 1 / condition, 1.0) for condition in (1, 100, 1e4, 1e8)] == [12, 30, 74, 74]
    assert burst_length(400, 1.0, 1.0) > burst_length(40, 1.0, 1.0)
    # Few atoms: a few exact steps go through all their supports.
    assert burst_length(2, 1e-8, 1.0) < 10
