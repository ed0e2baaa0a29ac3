"""Block principal pivoting on well-conditioned Gram matrices: the kernel, and how it is used."""

import sys
import types

import numpy as np
import pytest
from oracles.nnls import nnls_by_enumeration, single_steps_of_block_pivoting
from oracles.semi_nmf import kkt_violation, nnls_rows

from isogeom import _kernels
from isogeom._kernels._nnls_exchange import nnls_exchange
from isogeom.decomposition import _nnls, batched_nnls
from isogeom.decomposition._nnls import gram_solver, nnls_shared_gram


def problem(n, k, d, density=0.4, seed=0):
    """Unit atoms, and rows of both signs around their cone."""
    rng = np.random.default_rng([21, k, d, seed])
    D = rng.standard_normal((k, d))
    D /= np.linalg.norm(D, axis=1, keepdims=True)
    Z = np.abs(rng.standard_normal((n, k))) * (rng.random((n, k)) < density)
    X = Z @ D + 0.3 * rng.standard_normal((n, d))
    return D, X


def exchange(G, P, alpha=0.0, most=1000, guess=None):
    H, weights = np.linalg.inv(G), np.full(len(G), alpha)
    H = 0.5 * (H + H.T)
    U = (P - alpha) @ H
    return nnls_exchange(G, H, P, U, U if guess is None else guess, weights, 1e-12, most)


@pytest.mark.parametrize("alpha", [0.0, 0.2])
@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_agrees_with_the_best_of_all_supports(k, alpha):
    D, X = problem(40, k, 12)
    G, P = D @ D.T, X @ D.T
    Z, residuals = exchange(G, P, alpha)
    expected = np.array([nnls_by_enumeration(G, p, alpha) for p in P])
    np.testing.assert_allclose(Z, expected, rtol=0, atol=1e-12)
    assert residuals.max() < 1e-13


@pytest.mark.parametrize("density", [0.05, 0.5, 1.0])
@pytest.mark.parametrize(("k", "d"), [(7, 9), (25, 60), (64, 70), (65, 200), (100, 300)])
def test_agrees_with_scipy_for_small_and_large_supports(k, d, density):
    D, X = problem(40, k, d, density)
    Z, residual, sweeps = nnls_shared_gram(D @ D.T, X @ D.T, algorithm="numba")
    np.testing.assert_allclose(Z, nnls_rows(D, X), rtol=0, atol=1e-8)
    assert residual < 1e-11
    assert sweeps == 0
    assert kkt_violation(D @ D.T, X @ D.T, Z) < 1e-11
    array, _, _ = nnls_shared_gram(D @ D.T, X @ D.T, algorithm="array")
    np.testing.assert_allclose(Z, array, rtol=0, atol=1e-11)


@pytest.mark.parametrize("smallest", [1e-1, 1e-3, 2e-5])
def test_an_inverse_that_lost_digits_does_not_show(smallest):
    rng = np.random.default_rng(3)
    Q = np.linalg.qr(rng.standard_normal((30, 30)))[0]
    G = (Q * np.geomspace(smallest, 1, 30)) @ Q.T
    length = np.sqrt(np.diag(G))
    G = G / length / length[:, None]
    root = np.linalg.cholesky(G)
    X = rng.standard_normal((60, 30))
    P = X @ root.T
    Z, residual, _ = nnls_shared_gram(G, P, algorithm="numba")
    expected = nnls_rows(root, X)
    np.testing.assert_allclose(Z, expected, rtol=0, atol=1e-8 * expected.max())
    assert residual < 1e-11


def test_a_row_is_the_same_to_the_last_bit_in_any_batch():
    D, X = problem(200, 25, 60)
    G, P = D @ D.T, X @ D.T
    H = np.linalg.inv(G)
    H, U, weights = 0.5 * (H + H.T), P @ H, np.full(25, 0.05)
    Z, _ = nnls_exchange(G, H, P, U, U, weights, 1e-12, 1000)
    order = np.random.default_rng(0).permutation(200)[:77]
    part, _ = nnls_exchange(G, H, P[order], U[order], U[order], weights, 1e-12, 1000)
    assert np.array_equal(part, Z[order])


def test_any_guess_gives_the_same_codes_and_a_good_one_saves_exchanges():
    D, X = problem(60, 30, 50)
    G, P = D @ D.T, X @ D.T
    Z, _ = exchange(G, P)
    for guess in (np.zeros_like(P), np.ones_like(P), -P):
        other, residuals = exchange(G, P, guess=guess)
        np.testing.assert_allclose(other, Z, rtol=0, atol=1e-13)
        assert residuals.max() < 1e-13
    _, cold = exchange(G, P, most=1)
    _, warm = exchange(G, P, most=1, guess=Z)
    assert np.any(np.isinf(cold))
    assert not np.any(np.isinf(warm))


def test_exchanges_that_cycle_end_by_single_steps():
    # Graded atoms: blocks that change sides at once sometimes only go back and forth.
    rng, single = np.random.default_rng(0), 0
    for _ in range(20):
        atoms = rng.standard_normal((6, 6)) * np.geomspace(1, 0.05, 6)
        atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
        G, P = atoms @ atoms.T, rng.standard_normal((20, 6))
        if np.linalg.eigvalsh(G)[0] < 1e-4:
            continue
        Z, residuals = exchange(G, P)
        expected = np.array([nnls_by_enumeration(G, p) for p in P])
        np.testing.assert_allclose(Z, expected, rtol=0, atol=1e-9 * np.abs(expected).max())
        assert residuals.max() < 1e-12
        single += sum(single_steps_of_block_pivoting(G, p) > 0 for p in P)
    assert single > 0


def test_rows_that_run_out_of_exchanges_are_solved_by_sweeps(monkeypatch):
    D, X = problem(60, 30, 50)
    G, P = D @ D.T, X @ D.T
    expected, _, none = nnls_shared_gram(G, P, algorithm="numba")
    H = np.linalg.inv(G)

    def hasty(G, H, P, U, guess, alpha, tol, most):
        return nnls_exchange(G, H, P, U, guess, alpha, tol, 1)

    available = _kernels.available
    monkeypatch.setattr(
        _kernels, "available", lambda name, *rest: hasty if name == "nnls_exchange" else available(name, *rest)
    )
    Z, residual, sweeps = nnls_shared_gram(G, P, algorithm="numba")
    assert none == 0
    assert sweeps > 0
    assert residual < 1e-11
    assert np.any(np.isinf(hasty(G, H, P, P @ H, P @ H, np.zeros(30), 1e-12, 1)[1]))
    np.testing.assert_allclose(Z, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("algorithm", ["array", "numba"])
@pytest.mark.parametrize("kind", ["sound", "ill", "singular"])
def test_a_prepared_solver_gives_the_codes_of_one_call(algorithm, kind):
    D, X = problem(50, 12, 20)
    if kind != "sound":
        D[1] = D[0] + (1e-4 if kind == "ill" else 0.0) * D[2]
    G, P = D @ D.T, X @ D.T
    expected, residual, _ = nnls_shared_gram(G, P, alpha=0.1, algorithm=algorithm)
    solve = gram_solver(G, alpha=0.1, algorithm=algorithm, n_rows=50)
    Z = np.vstack([solve(P[first : first + 17])[0] for first in range(0, 50, 17)])
    np.testing.assert_allclose(Z, expected, rtol=0, atol=1e-9)
    again, _, _ = solve(P, expected)
    np.testing.assert_allclose(again, expected, rtol=0, atol=1e-9)
    assert residual < 1e-11


@pytest.mark.parametrize("height", [1, 7])
def test_blocks_of_the_kernel_do_not_show(monkeypatch, height):
    D, X = problem(40, 20, 40)
    G, P = D @ D.T, X @ D.T
    start = np.abs(np.random.default_rng(0).standard_normal(P.shape))
    expected, _, _ = nnls_shared_gram(G, P, start=start, algorithm="numba")
    monkeypatch.setattr(_nnls, "_BLOCK_ELEMENTS", 20 * height)
    Z, _, _ = nnls_shared_gram(G, P, start=start, algorithm="numba")
    np.testing.assert_allclose(Z, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("with_start", [False, True])
def test_columns_first_rows_do_not_compile_again(with_start):
    D, X = problem(40, 20, 40)
    G, P = D @ D.T, X @ D.T
    start = np.maximum(P, 0) if with_start else None
    expected, _, _ = nnls_shared_gram(G, P, start=start, algorithm="numba")
    before = len(nnls_exchange.signatures)
    columns = None if start is None else np.asfortranarray(start)
    Z, _, _ = nnls_shared_gram(np.asfortranarray(G), np.asfortranarray(P), start=columns, algorithm="numba")
    np.testing.assert_allclose(Z, expected, rtol=0, atol=1e-13)
    assert len(nnls_exchange.signatures) == before


def test_a_loaded_kernel_serves_small_problems_too(monkeypatch):
    from array_api_compat import numpy as xp

    module = types.ModuleType("loaded")
    module.kernel = types.SimpleNamespace(signatures=[])
    monkeypatch.setitem(sys.modules, "loaded", module)
    monkeypatch.setitem(_kernels._KERNELS, "kernel", ("loaded", 1e8))
    assert _kernels.available("kernel", xp, np.dtype(np.float64), 10) is None
    module.kernel.signatures.append("float64")
    assert _kernels.available("kernel", xp, np.dtype(np.float64), 10) is module.kernel


# ---------------------------------------------------------------- no minimum, and the ends of the range of floats


@pytest.mark.parametrize("algorithm", ["array", "numba"])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_zero_atom_whose_product_exceeds_alpha_shows_in_the_residual(algorithm, alpha):
    G = np.diag([2.0, 0.0, 1.0])
    P = np.array([[1.0, 0.75, 4.0], [1.0, -3.0, 4.0]])
    Z, residual, _ = nnls_shared_gram(G, P, alpha=alpha, algorithm=algorithm)
    np.testing.assert_allclose(Z, np.maximum(P - alpha, 0) * [0.5, 0.0, 1.0], atol=1e-14)
    # Relative to the largest product of the row; 0.75 along a coordinate without curvature.
    np.testing.assert_allclose(residual, (0.75 - alpha) / 4, rtol=1e-12)
    assert nnls_shared_gram(G, P[1:], alpha=alpha, algorithm=algorithm)[1] < 1e-12
    assert nnls_shared_gram(G, P, alpha=0.8, algorithm=algorithm)[1] < 1e-12


def test_batched_nnls_reports_an_objective_without_a_minimum(as_array, library):
    solution = batched_nnls(as_array(np.zeros((2, 2))), as_array(np.array([[0.0, 3.0], [0.0, -1.0]])), alpha=1.0)
    np.testing.assert_allclose(solution.kkt_residual, 2 / 3, rtol=1e-6)
    assert not np.any(np.asarray(solution.codes))


@pytest.mark.parametrize("algorithm", ["array", "numba"])
@pytest.mark.parametrize("kind", ["sound", "singular"])
@pytest.mark.parametrize(
    ("of_gram", "of_rows"),
    [(-160, 0), (160, 0), (0, -160), (0, 160), (-160, -160), (160, 160), (300, 300), (-300, -150), (0, 306)],
)
def test_scales_near_the_ends_of_floats(algorithm, kind, of_gram, of_rows):
    D, X = problem(20, 8, 12)
    if kind == "singular":
        D = np.vstack([D, D[:2]])
    G, P = D @ D.T, X @ D.T
    expected, _, _ = nnls_shared_gram(G, P, alpha=0.1, algorithm=algorithm)
    scaled = P * 10.0**of_rows
    with np.errstate(all="raise", under="ignore"):
        Z, residual, _ = nnls_shared_gram(G * 10.0**of_gram, scaled, alpha=0.1 * 10.0**of_rows, algorithm=algorithm)
    np.testing.assert_allclose(Z / 10.0 ** (of_rows - of_gram), expected, rtol=0, atol=1e-10)
    assert residual < 1e-11


@pytest.mark.parametrize("algorithm", ["array", "numba"])
@pytest.mark.parametrize(("of_gram", "of_rows"), [(-160, 160), (-300, 300)])
def test_codes_beyond_the_largest_float_are_an_error(algorithm, of_gram, of_rows):
    D, X = problem(20, 8, 12)
    with pytest.raises(ValueError, match=r"Codes overflow float64: they reach .*Rescale"), np.errstate(over="raise"):
        nnls_shared_gram(D @ D.T * 10.0**of_gram, X @ D.T * 10.0**of_rows, algorithm=algorithm)


def test_codes_beyond_the_dtype_of_the_rows_are_an_error():
    G, P = np.diag([1e-30, 1.0]).astype(np.float32), np.full((3, 2), 1e20, dtype=np.float32)
    with pytest.raises(ValueError, match=r"Codes of up to 1e\+50 overflow float32"):
        batched_nnls(G, P)
    assert batched_nnls(G.astype(float), P.astype(float)).codes.max() == pytest.approx(1e50)
