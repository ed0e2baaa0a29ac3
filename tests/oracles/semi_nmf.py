"""Slow, obvious references for nonnegative coding and Semi-NMF. Rows are samples: X ~ Z @ D."""

import itertools

import numpy as np
from scipy.optimize import linear_sum_assignment, nnls


def nnls_rows(D, X):
    """Codes by SciPy's active-set solver, one row at a time."""
    return np.array([nnls(D.T, row, maxiter=10_000)[0] for row in X])


def kkt_violation(G, P, Z, alpha=0.0):
    """Largest violation of the optimality conditions: z >= 0, gradient >= 0, and one of them zero."""
    worst = 0.0
    for p, z in zip(P, Z):
        gradient = G @ z - p + alpha
        assert np.all(z >= 0)
        worst = max(worst, np.max(-gradient, initial=0.0), np.max(np.abs(gradient[z > 0]), initial=0.0))
    return worst


def objective(X, Z, D, penalty=0.0):
    return 0.5 * np.sum((X - Z @ D) ** 2) + penalty * np.sum(Z)


def svd_error(X, k):
    """Frobenius error of the best approximation of rank k."""
    values = np.linalg.svd(X, compute_uv=False)
    return np.sqrt(np.sum(values[k:] ** 2))


def rank_one_squared_error(u, v):
    """Optimal squared error of one nonnegative column of codes on ``outer(u, v)``: the smaller side of u is lost."""
    return np.sum(v**2) * min(np.sum(np.maximum(u, 0) ** 2), np.sum(np.maximum(-u, 0) ** 2))


def one_atom_squared_error(X):
    """Global optimum for k = 1 by trying every support of the codes (at most about 12 rows).

    On a support the stationary codes are eigenvectors of X X^T; those of one sign are feasible.
    """
    K = X @ X.T
    best = 0.0
    for size in range(1, len(X) + 1):
        for support in itertools.combinations(range(len(X)), size):
            values, vectors = np.linalg.eigh(K[np.ix_(support, support)])
            for value, vector in zip(values, vectors.T):
                if np.all(vector >= -1e-12) or np.all(vector <= 1e-12):
                    best = max(best, value)
    return np.sum(X**2) - best


def matched_cosines(found, true):
    """Cosines of the atoms under the best one-to-one matching."""
    found = found / np.linalg.norm(found, axis=1, keepdims=True)
    true = true / np.linalg.norm(true, axis=1, keepdims=True)
    cosines = true @ found.T
    rows, columns = linear_sum_assignment(-cosines)
    return cosines[rows, columns]


def planted(n, d, k, density, seed, noise=0.02):
    """Sparse exponential codes on random unit atoms; returns X, D."""
    rng = np.random.default_rng([2024, seed])
    D = rng.standard_normal((k, d))
    D /= np.linalg.norm(D, axis=1, keepdims=True)
    Z = rng.exponential(size=(n, k)) * (rng.random((n, k)) < density)
    return Z @ D + noise * rng.standard_normal((n, d)), D
