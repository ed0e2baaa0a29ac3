"""The half-space of the closed-form start: found however narrow, denied where there is none, cheap in both cases."""

import numpy as np
import pytest
from oracles.semi_nmf import svd_error
from scipy.optimize import linprog, nnls

from isogeom import _xp
from isogeom.decomposition import SemiNMF, _half_space
from isogeom.decomposition._half_space import half_space
from isogeom.decomposition._semi_starts import _least_cancelling, closed_start


def narrow(n, k, margin, seed):
    """Unit rows in an open half-space, the closest of them at about this cosine."""
    rng = np.random.default_rng(seed)
    C, y = rng.standard_normal((n, k)), rng.standard_normal(k)
    y /= np.linalg.norm(y)
    C += (np.abs(C @ y) + margin * np.linalg.norm(C, axis=1) - C @ y)[:, None] * y
    return C / np.linalg.norm(C, axis=1)[:, None], y


def best_cosine(C):
    """Norm of the point of the convex hull nearest to the origin, from all rows at once: the best smallest cosine."""
    weights = nnls(np.vstack([1e3 * C.T, np.ones(len(C))]), np.append(np.zeros(C.shape[1]), 1.0))[0]
    return np.linalg.norm(weights @ C) / weights.sum()


def exists(C):
    """Whether a half-space holds the rows, by linear programming: the largest t with C y >= t in the unit cube."""
    n, k = C.shape
    found = linprog(
        np.append(np.zeros(k), -1.0),
        A_ub=np.column_stack([-C, np.ones(n)]),
        b_ub=np.zeros(n),
        bounds=[(-1, 1)] * k + [(None, 1)],
    )
    return -found.fun > 1e-9


@pytest.mark.parametrize("margin", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize(("n", "k"), [(300, 5), (2000, 10), (20_000, 10)])
@pytest.mark.parametrize("seed", range(3))
def test_a_narrow_half_space_is_found(n, k, margin, seed):
    C, _ = narrow(n, k, margin, seed)
    y = half_space(C)
    np.testing.assert_allclose(np.linalg.norm(y), 1)
    assert np.min(C @ y) >= min(0.05, 0.5 * best_cosine(C) * (1 - 1e-6))


def test_it_is_found_exactly_where_linear_programming_finds_one():
    answers = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        n, k = int(rng.integers(1, 30)), int(rng.integers(1, 6))
        C = rng.standard_normal((n, k)) + rng.exponential() * rng.standard_normal(k)
        C /= np.linalg.norm(C, axis=1)[:, None]
        y = half_space(C)
        assert (y is not None) == exists(C)
        assert y is None or np.all(C @ y > 0)
        answers.append(y is not None)
    assert 60 < sum(answers) < 240


@pytest.mark.parametrize("margin", [1e-2, 1e-4])
def test_one_row_on_the_other_side_leaves_no_half_space(margin):
    C, y = narrow(3000, 6, margin, 0)
    assert half_space(np.vstack([C, -C[:1]])) is None
    assert half_space(np.vstack([C, -y])) is None


def test_repeated_and_zero_rows_change_nothing():
    C, _ = narrow(200, 4, 1e-3, 0)
    many = np.vstack([np.zeros((3, 4)), np.repeat(C, 5, axis=0), np.zeros((50, 4))])
    y = half_space(many)
    assert np.all(many[3:1003] @ y > 0)
    assert half_space(np.zeros((5, 3))) is None
    np.testing.assert_array_equal(half_space(np.array([[-2.0], [0.0]])), [-1.0])
    assert half_space(np.array([[-2.0], [1.0]])) is None


@pytest.mark.parametrize("n", [500, 20_000])
@pytest.mark.parametrize("margin", [3e-2, 1e-2, 1e-3])
def test_the_fit_attains_the_svd_error(n, margin):
    rng = np.random.default_rng(1)
    A = np.linalg.qr(rng.standard_normal((40, 5)))[0].T
    noise = rng.standard_normal((n, 40))
    X = narrow(n, 5, margin, 0)[0] @ A + 0.01 * (noise - noise @ A.T @ A)
    with pytest.warns(UserWarning, match="cancel each other"):
        model = SemiNMF(5, alpha=0, random_state=0).fit(X)
    assert model.attains_svd_bound_
    assert model.stop_reason_ == "bound"
    # The attribute is a difference of sums, in which large codes cancel; the residual itself is exact to rounding.
    residual = np.linalg.norm(X - model.transform(X) @ model.components_)
    np.testing.assert_allclose(residual, svd_error(X, 5), rtol=1e-10)
    np.testing.assert_allclose(model.reconstruction_err_, residual, rtol=1e-13 * model.code_cancellation_**2)


def test_every_library_finds_the_same(as_array):
    for C in (narrow(500, 5, 1e-3, 0)[0], narrow(5000, 8, 1e-2, 1)[0]):
        y = half_space(as_array(C))
        assert type(y) is type(as_array(C))
        np.testing.assert_allclose(_xp.to_numpy(y), half_space(C), atol=1e-9)
    assert half_space(as_array(np.vstack([C, -C[:1]]))) is None


@pytest.mark.parametrize("kind", ["planted", "gaussian", "narrow"])
def test_few_rows_are_looked_at_in_few_rounds(monkeypatch, kind):
    rng = np.random.default_rng(0)
    if kind == "planted":
        Z = rng.exponential(size=(20_000, 25)) * (rng.random((20_000, 25)) < 0.2)
        C = Z @ rng.standard_normal((25, 25)) + 0.05 * rng.standard_normal((20_000, 25))
    else:
        C = rng.standard_normal((20_000, 25)) if kind == "gaussian" else narrow(20_000, 25, 1e-3, 0)[0]
    seen, nearest = [], _half_space._nearest
    monkeypatch.setattr(_half_space, "_nearest", lambda W, distance: seen.append(len(W)) or nearest(W, distance))
    y = half_space(C)
    assert (y is None) == (kind != "narrow")
    assert len(seen) <= (30 if kind == "narrow" else 2)
    assert max(seen) <= 2 * 4 * 25 + 2


def test_a_solver_that_gives_up_is_no_error(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr(_half_space, "nnls", fail)
    assert half_space(narrow(200, 4, 1e-3, 0)[0]) is None


# ---------------------------------------------------------------- the codes of the closed form


@pytest.mark.parametrize("margin", [0.1, 1e-2, 1e-3])
@pytest.mark.parametrize("seed", range(6))
def test_codes_cancel_no_more_than_the_smallest_ones(margin, seed):
    C = narrow(500, 5, margin, seed)[0]
    U, s, axes = np.linalg.svd(C, full_matrices=False)
    D, Z = closed_start(U * s, axes, 5)
    np.testing.assert_allclose(Z @ D, C, atol=1e-10 / margin)
    assert Z.min() >= 0
    cancellation = Z.sum()
    y = half_space(U * s) * s
    x = U @ y
    alpha = np.clip(np.max(-U / x[:, None], axis=0), 0, None)
    T = np.eye(5) + np.outer(y, alpha)
    lengths = np.linalg.norm(np.linalg.inv(T) * s, axis=1)
    assert cancellation <= ((U @ T) @ lengths).sum() * (1 + 1e-6)
    # And the sum that was minimised is the sum it stands for: unit rows, so the plain sum of the codes.
    chosen = _least_cancelling(alpha, y, s, U.sum(axis=0), x.sum())
    T = np.eye(5) + np.outer(y, chosen)
    np.testing.assert_allclose(((U @ T) @ np.linalg.norm(np.linalg.inv(T) * s, axis=1)).sum(), cancellation, rtol=1e-6)


def test_a_singular_map_of_the_codes_is_left():
    y, alpha, size = np.array([1.0, -2.0]), np.array([1.0, 1.0]), np.ones(2)
    chosen = _least_cancelling(alpha, y, size, np.ones(2), 1.0)
    assert np.all(chosen >= alpha)
    assert abs(1 + chosen @ y) > 1e-3
