import os
import subprocess
import sys

import numpy as np
import pytest
from oracles.semi_nmf import kkt_violation, nnls_rows

from isogeom import _xp
from isogeom._kernels import _nnls_pivots as kernels
from isogeom.decomposition import _nnls
from isogeom.decomposition._nnls import nnls_shared_gram
from isogeom.decomposition._nnls_pivots import solve_pivots

KINDS = [
    "wide",
    "very wide",
    "square",
    "duplicates",
    "copies of all",
    "zero atoms",
    "opposite",
    "close",
    "nearly equal",
    "one",
]


def atoms(kind, seed=0):
    """Atoms with a singular Gram matrix; atoms that repeat or vanish are what learning leaves behind."""
    rng = np.random.default_rng([11, seed])
    sizes = {"wide": (64, 50), "very wide": (60, 6), "square": (20, 20), "zero atoms": (40, 24), "one": (9, 1)}
    D = rng.standard_normal(sizes.get(kind, (10, 16)))
    if kind == "square":
        D[:, -1] = D[:, 0]
    if kind == "zero atoms":
        D[[0, 7, 39]] = 0
    if kind == "duplicates":
        D = np.vstack([D, D[:4], D[:2]])
    if kind == "copies of all":
        D = np.vstack([D, 3 * D])
    if kind == "opposite":
        D = np.vstack([D, -D])
    if kind in ("close", "nearly equal"):
        D = np.vstack([D, D[:4] + (1e-6 if kind == "close" else 1e-9) * rng.standard_normal((4, 16))])
    return D


def rows_of(D, n, seed=0):
    """Half the rows within the cone of the atoms, half anywhere; some of them zero."""
    rng = np.random.default_rng([12, seed])
    X = rng.standard_normal((n, D.shape[1]))
    X[::2] = rng.random((len(X[::2]), len(D))) @ D + 0.01 * X[::2]
    X[5::20] = 0
    return X


def normalised(D, X):
    scale = np.linalg.norm(D, axis=1)
    scale[scale == 0] = 1
    E = D / scale[:, None]
    return E @ E.T, X @ E.T


@pytest.mark.parametrize("algorithm", ["array", "numba"])
@pytest.mark.parametrize("kind", KINDS)
def test_objective_is_that_of_scipy_on_200_rows(algorithm, kind):
    D = atoms(kind)
    X = rows_of(D, 200)
    Z, residual, sweeps = nnls_shared_gram(D @ D.T, X @ D.T, algorithm=algorithm)
    expected = np.sum((X - nnls_rows(D, X) @ D) ** 2, axis=1)
    size = np.sum(X**2, axis=1) + 1e-300
    np.testing.assert_allclose(np.sum((X - Z @ D) ** 2, axis=1) / size, expected / size, rtol=0, atol=1e-8)
    assert sweeps == 0
    assert residual < 1e-11
    assert kkt_violation(D @ D.T, X @ D.T, Z) < 1e-8
    assert not np.any(Z[5::20])
    assert not np.any(Z[:, ~np.any(D, axis=1)])


@pytest.mark.parametrize("kind", ["wide", "very wide", "duplicates", "opposite", "one"])
@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_atoms_in_use_are_independent(kind, alpha):
    D = atoms(kind)
    X = rows_of(D, 60)
    Z, _, _ = nnls_shared_gram(D @ D.T, X @ D.T, alpha=alpha, algorithm="array")
    for z in Z:
        used = D[z > 0]
        assert np.linalg.matrix_rank(used) == len(used)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("close", "nearly equal")])
@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_every_library_the_kernel_and_any_batch_choose_the_same_codes(as_array, library, kind, alpha):
    D = atoms(kind, seed=1)
    X = rows_of(D, 45, seed=1)
    G, P = D @ D.T, X @ D.T
    expected, _, _ = nnls_shared_gram(G, P, alpha=alpha, algorithm="array")
    size = max(1, np.abs(expected).max())
    Z, residual, _ = nnls_shared_gram(as_array(G), as_array(P), alpha=alpha)
    np.testing.assert_allclose(_xp.to_numpy(Z), expected, rtol=0, atol=1e-8 * size)
    assert residual < 1e-11
    if library == "numpy":
        compiled, _, _ = nnls_shared_gram(G, P, alpha=alpha, algorithm="numba")
        np.testing.assert_allclose(compiled, expected, rtol=0, atol=1e-8 * size)
        order = np.random.default_rng(0).permutation(45)
        shuffled = np.vstack([nnls_shared_gram(G, P[i : i + 1], alpha=alpha)[0] for i in order])
        np.testing.assert_allclose(shuffled, expected[order], rtol=0, atol=1e-8 * size)


@pytest.mark.parametrize("kind", ["duplicates", "copies of all"])
@pytest.mark.parametrize("algorithm", ["array", "numba"])
def test_the_first_of_equal_atoms_is_used(kind, algorithm):
    D = atoms(kind)
    X = rows_of(D, 100)
    Z, _, _ = nnls_shared_gram(D @ D.T, X @ D.T, algorithm=algorithm)
    assert np.any(Z[:, :4])
    assert not np.any(Z[:, 10:])


@pytest.mark.parametrize("kind", KINDS)
def test_pivots_are_few_and_those_of_the_kernel(kind):
    D = atoms(kind)
    G, P = normalised(D, rows_of(D, 100))
    arguments = (G, P, np.zeros(len(D)), 1e-12, 2e-13, 1e-8, 10_000)
    _, _, pivots = solve_pivots(_xp.array_namespace(G), *arguments)
    _, _, compiled = kernels.nnls_pivots(*arguments)
    # Every atom of a support enters once, some leave and a few come back: about 2 pivots for each atom.
    rank = np.linalg.matrix_rank(D)
    assert pivots.mean() < 2.5 * rank + 2
    assert pivots.max() < 6 * rank + 10
    assert np.all(pivots[5::20] == 0)
    np.testing.assert_allclose(compiled.mean(), pivots.mean(), rtol=0.1)


@pytest.mark.parametrize("algorithm", ["array", "numba"])
def test_an_objective_without_a_minimum_and_too_few_pivots_end_with_an_honest_residual(algorithm, monkeypatch):
    # Codes of opposite atoms can grow together at no cost; these products then ask for more without end.
    D = atoms("opposite")
    P = np.random.default_rng(0).standard_normal((20, 20))
    for limit in (1000, 3):
        monkeypatch.setattr(_nnls, "_max_pivots", lambda G, limit=limit: limit)
        Z, residual, _ = nnls_shared_gram(D @ D.T, P, algorithm=algorithm)
        assert np.all(np.isfinite(Z))
        assert np.all(Z >= 0)
        assert residual > 1e-6


def test_few_rows_do_not_load_numba():
    script = (
        "import sys, numpy as np\n"
        "from isogeom.decomposition import batched_nnls\n"
        "D = np.random.default_rng(0).standard_normal((64, 50))\n"
        "assert batched_nnls(D @ D.T, D[:3] @ D.T).kkt_residual < 1e-11\n"
        "assert 'numba' not in sys.modules\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "SCIPY_ARRAY_API"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("algorithm", ["array", "numba"])
def test_stacks_do_not_show(algorithm, monkeypatch):
    from isogeom.decomposition import _nnls_pivots

    D = atoms("wide")
    X = rows_of(D, 50)
    expected, residual, _ = nnls_shared_gram(D @ D.T, X @ D.T, algorithm=algorithm)
    monkeypatch.setattr(_nnls_pivots, "_STACK_ELEMENTS", 7 * 64**2)
    monkeypatch.setattr(_nnls, "_BLOCK_ROWS", 20)
    Z, again, _ = nnls_shared_gram(D @ D.T, X @ D.T, algorithm=algorithm)
    np.testing.assert_allclose(Z, expected, rtol=0, atol=1e-10)
    assert max(residual, again) < 1e-11
