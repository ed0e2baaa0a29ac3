import os
import subprocess
import sys

import numpy as np
import pytest
from oracles.semi_nmf import kkt_violation, nnls_rows
from sklearn.linear_model import Lasso

from isogeom import _kernels, _xp
from isogeom.decomposition import _nnls, _nnls_descent, batched_nnls
from isogeom.decomposition._nnls import coordinate_sweeps, nnls_shared_gram
from isogeom.decomposition._nnls_descent import burst_length

ALGORITHMS = ["array", "numba"]


def problem(n, k, d, seed, decay=0.0):
    """Unit atoms, ill-conditioned for a large decay, and rows of both signs around their cone."""
    rng = np.random.default_rng([5, seed])
    D = rng.standard_normal((k, d)) * np.logspace(0, -decay, d)
    D /= np.linalg.norm(D, axis=1, keepdims=True)
    Z = np.abs(rng.standard_normal((n, k))) * (rng.random((n, k)) < 0.4)
    return D, Z @ D + 0.3 * rng.standard_normal((n, d))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("k", "d", "decay"), [(1, 5, 0), (4, 10, 0), (16, 64, 0), (16, 20, 2), (16, 16, 4), (40, 64, 1), (40, 41, 3)]
)
def test_agrees_with_scipy_row_by_row(algorithm, k, d, decay):
    D, X = problem(60, k, d, seed=k + d, decay=decay)
    Z, residual, _ = nnls_shared_gram(D @ D.T, X @ D.T, algorithm=algorithm)
    expected = nnls_rows(D, X)
    np.testing.assert_allclose(Z, expected, rtol=0, atol=1e-8 * np.abs(expected).max())
    assert residual < 1e-11


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("k", "d"), [(6, 20), (12, 8)])
def test_l1_agrees_with_lasso(algorithm, k, d):
    D, X = problem(20, k, d, seed=k)
    alpha = 0.2
    Z, _, _ = nnls_shared_gram(D @ D.T, X @ D.T, alpha=alpha, algorithm=algorithm)
    lasso = Lasso(alpha=alpha / d, positive=True, fit_intercept=False, tol=1e-14, max_iter=10**6)
    expected = np.array([lasso.fit(D.T, x).coef_ for x in X])
    np.testing.assert_allclose(Z, expected, rtol=0, atol=1e-6)
    assert kkt_violation(D @ D.T, X @ D.T, Z, alpha) < 1e-10


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_orthonormal_atoms_have_a_closed_form(algorithm):
    rng = np.random.default_rng(0)
    D = np.linalg.qr(rng.standard_normal((9, 5)))[0].T
    X = rng.standard_normal((30, 9))
    Z, _, _ = nnls_shared_gram(D @ D.T, X @ D.T, alpha=0.1, algorithm=algorithm)
    np.testing.assert_allclose(Z, np.maximum(X @ D.T - 0.1, 0), atol=1e-14)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", ["more atoms than features", "duplicates", "zero atom", "opposite", "one feature"])
@pytest.mark.parametrize("alpha", [0.0, 0.15])
def test_dependent_atoms(algorithm, kind, alpha):
    D, X = problem(50, 12, 8, seed=1) if kind == "more atoms than features" else problem(50, 6, 10, seed=1)
    if kind == "duplicates":
        D = np.vstack([D, D[:3], D[:1]])
    if kind == "zero atom":
        D[2] = 0
    if kind == "opposite":
        D = np.vstack([D, -D])
    if kind == "one feature":
        D, X = D[:, :1], X[:, :1]
    G, P = D @ D.T, X @ D.T
    Z, residual, _ = nnls_shared_gram(G, P, alpha=alpha, algorithm=algorithm)
    assert np.all(np.isfinite(Z))
    assert residual < 1e-10
    assert kkt_violation(G, P, Z, alpha) < 1e-9
    if alpha == 0:
        # The codes may be a choice among many; the product is unique.
        np.testing.assert_allclose(Z @ D, nnls_rows(D, X) @ D, atol=1e-8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["duplicates", "more atoms than features"])
@pytest.mark.parametrize("seed", range(5))
def test_codes_of_dependent_atoms_do_not_follow_rounding_errors(algorithm, alpha, kind, seed):
    D, X = problem(50, 20, 8, seed) if kind == "more atoms than features" else problem(50, 6, 10, seed)
    if kind == "duplicates":
        D = np.vstack([D, D[:3]])
    G, P = D @ D.T, X @ D.T
    Z, _, _ = nnls_shared_gram(G, P, alpha=alpha, algorithm=algorithm)
    noisy = P * (1 + 1e-15 * np.random.default_rng(0).standard_normal(P.shape))
    np.testing.assert_allclose(nnls_shared_gram(G, noisy, alpha=alpha, algorithm=algorithm)[0], Z, atol=1e-9)
    np.testing.assert_allclose(nnls_shared_gram(G, P, alpha=alpha, algorithm="array")[0], Z, atol=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_atoms_and_rows_of_any_scale(algorithm):
    D, X = problem(40, 7, 12, seed=2)
    Z, _, _ = nnls_shared_gram(D @ D.T, X @ D.T, algorithm=algorithm)
    scale, row = np.logspace(-6, 6, 7)[:, None], np.logspace(-20, 20, 40)[:, None]
    E, Y = D * scale, X * row
    scaled, _, _ = nnls_shared_gram(E @ E.T, Y @ E.T, algorithm=algorithm)
    np.testing.assert_allclose(scaled * scale.T / row, Z, atol=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_do_not_depend_on_their_batch(algorithm):
    D, X = problem(70, 16, 20, seed=3, decay=2)
    G, P = D @ D.T, X @ D.T
    Z, _, _ = nnls_shared_gram(G, P, algorithm=algorithm)
    single = np.vstack([nnls_shared_gram(G, P[i : i + 1], algorithm=algorithm)[0] for i in range(70)])
    np.testing.assert_allclose(single, Z, rtol=0, atol=1e-11)
    order = np.random.default_rng(0).permutation(70)
    np.testing.assert_allclose(nnls_shared_gram(G, P[order], algorithm=algorithm)[0], Z[order], rtol=0, atol=1e-11)


@pytest.mark.parametrize("k", [15, 16])
def test_permuted_atoms_permute_the_codes(k):
    D, X = problem(50, k, 20, seed=4, decay=1)
    order = np.random.default_rng(1).permutation(k)
    Z, _, _ = nnls_shared_gram(D @ D.T, X @ D.T)
    permuted, _, _ = nnls_shared_gram(D[order] @ D[order].T, X @ D[order].T)
    np.testing.assert_allclose(permuted, Z[:, order], atol=1e-10)


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_every_library_gives_the_same_codes(as_array, library, alpha):
    D, X = problem(80, 10, 14, seed=5, decay=1)
    G, P = D @ D.T, X @ D.T
    expected, _, _ = nnls_shared_gram(G, P, alpha=alpha, algorithm="array")
    Z, residual, _ = nnls_shared_gram(as_array(G), as_array(P), alpha=alpha)
    assert type(Z) is type(as_array(G))
    np.testing.assert_allclose(_xp.to_numpy(Z), expected, atol=1e-11)
    compiled, _, _ = nnls_shared_gram(G, P, alpha=alpha, algorithm="numba")
    np.testing.assert_allclose(compiled, expected, atol=1e-11)
    assert residual < 1e-11


@pytest.mark.parametrize("decay", [0, 3])
def test_block_boundaries_do_not_show(as_array, library, monkeypatch, decay):
    D, X = problem(40, 8, 9, seed=6, decay=decay)
    G, P = D @ D.T, X @ D.T
    expected, _, _ = nnls_shared_gram(G, P)
    monkeypatch.setattr(_nnls, "_BLOCK_ROWS", 7)
    monkeypatch.setattr(_nnls_descent, "_STACK_ELEMENTS", 3 * 64)
    Z, _, _ = nnls_shared_gram(as_array(G), as_array(P))
    np.testing.assert_allclose(_xp.to_numpy(Z), expected, atol=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_pivots_allowed_gives_an_honest_residual(algorithm, monkeypatch):
    D, X = problem(40, 16, 16, seed=7, decay=4)
    monkeypatch.setattr(_nnls, "_max_pivots", lambda G: 1)
    Z, residual, sweeps = nnls_shared_gram(D @ D.T, X @ D.T, max_sweeps=4, algorithm=algorithm)
    # Four sweeps, or the iterations that array code makes in their place.
    eigenvalues = np.linalg.eigvalsh(D @ D.T)
    assert sweeps == (4 if algorithm == "numba" else burst_length(16, eigenvalues[0], eigenvalues[-1]))
    assert np.all(Z >= 0)
    gradient = Z @ (D @ D.T) - X @ D.T
    natural = np.abs(np.minimum(Z, gradient)).max(axis=1) / np.abs(X @ D.T).max(axis=1)
    np.testing.assert_allclose(residual, natural.max(), rtol=1e-9)
    assert residual > 1e-6


def test_zero_rows_and_a_penalty_above_every_product_give_zero_codes(as_array, library):
    D, X = problem(10, 4, 6, seed=8)
    X[3] = 0
    Z, residual, _ = nnls_shared_gram(as_array(D @ D.T), as_array(X @ D.T), alpha=1e6)
    assert residual == 0
    assert np.all(_xp.to_numpy(Z) == 0)
    Z, _, _ = nnls_shared_gram(as_array(D @ D.T), as_array(X @ D.T))
    assert np.all(_xp.to_numpy(Z)[3] == 0)


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_sweeps_never_raise_the_objective_and_end_at_the_solution(as_array, library, alpha):
    D, X = problem(30, 6, 10, seed=9)
    G, P = D @ D.T, X @ D.T
    Z, values = as_array(np.zeros((30, 6))), []
    for _ in range(30):
        Z = coordinate_sweeps(as_array(G), as_array(P), Z, alpha=alpha, n_sweeps=1)
        z = _xp.to_numpy(Z)
        values.append(0.5 * np.sum((z @ G) * z) - np.sum(P * z) + alpha * z.sum())
    assert np.all(np.diff(values) <= 1e-12)
    many = coordinate_sweeps(as_array(G), as_array(P), as_array(np.zeros((30, 6))), alpha=alpha, n_sweeps=200)
    np.testing.assert_allclose(_xp.to_numpy(many), nnls_shared_gram(G, P, alpha=alpha)[0], atol=1e-10)


def test_kernels_are_for_large_numpy_problems(monkeypatch):
    from array_api_compat import numpy as xp

    monkeypatch.setattr(_kernels, "_is_loaded", lambda module, name: False)

    assert _kernels.available("nnls_solve", xp, np.dtype(np.float64), 1e12) is not None
    assert _kernels.available("nnls_solve", xp, np.dtype(np.float64), 10) is None
    assert _kernels.available("nnls_solve", xp, np.dtype(np.int64), 1e12) is None
    torch = pytest.importorskip("torch")
    torch_xp = _xp.array_namespace(torch.zeros(1))
    assert _kernels.available("nnls_solve", torch_xp, torch.float64, 1e12) is None


def test_without_numba_the_array_code_runs(monkeypatch):
    monkeypatch.setattr(_kernels.importlib.util, "find_spec", lambda name: None)
    D, X = problem(20, 5, 8, seed=10)
    Z, _, _ = nnls_shared_gram(D @ D.T, X @ D.T, algorithm="numba")
    np.testing.assert_allclose(Z, nnls_rows(D, X), atol=1e-10)


def test_kernel_compiles_without_a_cache():
    script = (
        "import numpy as np\n"
        "from isogeom.decomposition._nnls import nnls_shared_gram\n"
        "Z, _, _ = nnls_shared_gram(np.eye(2), np.array([[1.0, -2.0]]), algorithm='numba')\n"
        "assert Z.tolist() == [[1.0, 0.0]], Z\n"
        "from isogeom._kernels import _nnls_exchange\n"
        "assert _nnls_exchange.nnls_exchange.stats.cache_path is None\n"
    )
    environment = {**os.environ, "ISOGEOM_NUMBA_CACHE": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_kernel_compiles_where_no_cache_can_be_written(monkeypatch):
    from isogeom._kernels import _nnls as kernels

    njit = kernels.numba.njit

    def without_cache(*args, **options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*args, **options)

    monkeypatch.setattr(kernels.numba, "njit", without_cache)
    monkeypatch.delenv("ISOGEOM_NUMBA_CACHE", raising=False)
    assert kernels._jit(lambda x: x + 1)(1) == 2


def test_importing_the_decompositions_loads_neither_numba_nor_torch():
    script = "import sys, isogeom.decomposition; assert not {'numba', 'torch'} & set(sys.modules)"
    environment = {k: v for k, v in os.environ.items() if k != "SCIPY_ARRAY_API"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- the public function


@pytest.mark.parametrize(("k", "d"), [(1, 4), (12, 30), (30, 12)])
@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_batched_nnls_agrees_with_scipy_and_the_optimality_conditions(as_array, library, k, d, alpha):
    D, X = problem(40, k, d, seed=k)
    G, P = D @ D.T, X @ D.T
    solution = batched_nnls(as_array(G), as_array(P), alpha=alpha)
    Z = _xp.to_numpy(solution.codes)
    assert type(solution.codes) is type(as_array(G))
    assert solution.kkt_residual < 1e-11
    assert kkt_violation(G, P, Z, alpha) < 1e-9
    if alpha == 0:
        np.testing.assert_allclose(Z @ D, nnls_rows(D, X) @ D, atol=1e-8)
        if k <= d:
            np.testing.assert_allclose(Z, nnls_rows(D, X), atol=1e-8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", ["solution", "zeros", "far", "dependent"])
def test_a_warm_start_gives_the_same_codes(algorithm, kind):
    D, X = problem(50, 8, 12, seed=11, decay=2)
    if kind == "dependent":
        D = np.vstack([D, D[:2]])
    G, P = D @ D.T, X @ D.T
    cold, _, _ = nnls_shared_gram(G, P, algorithm=algorithm)
    start = {"zeros": np.zeros_like(P), "far": 100 * np.random.default_rng(0).random(P.shape)}.get(kind, cold)
    warm, residual, _ = nnls_shared_gram(G, P, start=start, algorithm=algorithm)
    np.testing.assert_allclose(warm, cold, rtol=0, atol=1e-9 * max(1, np.abs(cold).max()))
    assert residual < 1e-11
    np.testing.assert_allclose(batched_nnls(G, P, warm_start=start).codes, cold, atol=1e-9 * max(1, np.abs(cold).max()))


@pytest.mark.parametrize("k", [24, 40, 60])
def test_large_supports(k):
    rng = np.random.default_rng(k)
    D = rng.standard_normal((k, k + 30))
    X = rng.random((30, k)) @ D + 0.01 * rng.standard_normal((30, k + 30))
    Z, residual, _ = nnls_shared_gram(D @ D.T, X @ D.T, algorithm="numba")
    np.testing.assert_allclose(Z, nnls_rows(D, X), atol=1e-8)
    assert residual < 1e-11


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_compiled_sweeps_are_those_of_the_array_code(monkeypatch, alpha):
    D, X = problem(30, 9, 12, seed=12)
    G, P = D @ D.T, X @ D.T
    Z = np.random.default_rng(0).random(P.shape) * (np.random.default_rng(1).random(P.shape) < 0.5)
    before = Z.copy()
    expected = coordinate_sweeps(G, P, Z, alpha=alpha, n_sweeps=3)
    monkeypatch.setitem(_kernels._KERNELS, "nnls_sweep", ("isogeom._kernels._nnls", 0.0))
    np.testing.assert_allclose(coordinate_sweeps(G, P, Z, alpha=alpha, n_sweeps=3), expected, atol=1e-12)
    assert np.array_equal(Z, before)


def test_float32_codes_keep_their_dtype():
    D, X = problem(20, 6, 10, seed=13)
    solution = batched_nnls((D @ D.T).astype(np.float32), (X @ D.T).astype(np.float32))
    assert solution.codes.dtype == np.float32
    np.testing.assert_allclose(solution.codes, nnls_rows(D, X), atol=1e-4)
    assert list(solution.to_dict()) == ["kkt_residual", "n_sweeps"]
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert list(batched_nnls(torch.eye(2), torch.ones((3, 2))).to_dict()) == ["kkt_residual", "n_sweeps"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"G": np.eye(3)[:2]}, r"G has shape \(2, 3\)"),
        ({"P": np.ones((4, 2))}, r"P has shape \(4, 2\)"),
        ({"G": np.eye(3) + np.eye(3, k=1)}, "G is not symmetric: entries differ by 1"),
        ({"alpha": -1.0}, "alpha=-1.0 must be at least 0"),
        ({"warm_start": -np.ones((4, 3))}, "warm_start must hold nonnegative codes"),
        ({"warm_start": np.ones((3, 3))}, "warm_start must hold nonnegative codes"),
        ({"P": np.full((4, 3), np.nan)}, "P contains NaN"),
    ],
)
def test_batched_nnls_names_what_is_wrong(change, match):
    arguments = {"G": np.eye(3), "P": np.ones((4, 3)), **change}
    with pytest.raises(ValueError, match=match):
        batched_nnls(arguments.pop("G"), arguments.pop("P"), **arguments)


def test_batched_nnls_wants_one_library():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(ValueError, match=r"^P must use the same namespace and the same device as G: P is on numpy"):
        batched_nnls(torch.eye(3), np.ones((4, 3)))
    with pytest.raises(ValueError, match=r"^warm_start must use the same namespace and the same device as G"):
        batched_nnls(np.eye(3), np.ones((4, 3)), warm_start=torch.ones((4, 3)))


@pytest.mark.parametrize("G", [-np.eye(2), np.array([[1.0, 2.0], [2.0, 1.0]])])
def test_a_matrix_without_a_minimum_is_an_error(G):
    with pytest.raises(ValueError, match="not positive semidefinite"):
        batched_nnls(G, np.ones((3, 2)))
