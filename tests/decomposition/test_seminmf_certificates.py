"""Recovery of planted atoms, and everything that a fit certifies."""

import warnings

import numpy as np
import pytest
from oracles.semi_nmf import matched_cosines, planted, svd_error
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning

from isogeom.decomposition import SemiNMF, _semi_solve
from isogeom.decomposition._alternation import Problem, Statistics
from isogeom.decomposition._certificates import coherence, survey, unique_energies
from isogeom.decomposition._rows import Rows
from isogeom.decomposition._semi_starts import closed_start, half_space

pytestmark = pytest.mark.filterwarnings("ignore:SemiNMF did not converge:sklearn.exceptions.ConvergenceWarning")


@pytest.mark.parametrize("k", [10, 20, 40])
@pytest.mark.parametrize("density", [0.1, 0.2, 0.3])
def test_default_recovers_every_planted_atom(k, density):
    # From half as many rows, 40 atoms of density 0.3 come out at 0.985 to 0.994, whatever the start: see the next test.
    complete = 0
    for seed in range(10):
        X, D = planted(2000, 30, k, density, seed)
        model = SemiNMF(k, random_state=seed).fit(X)
        complete += matched_cosines(model.components_, D).min() > 0.99
    assert complete >= 9


@pytest.mark.parametrize("seed", range(3))
def test_with_few_rows_the_default_ends_where_a_fit_from_the_true_atoms_does(seed):
    """What separates these atoms from the planted ones is the error of the estimate, not a start or a stop."""
    X, D = planted(1000, 30, 40, 0.3, seed)
    model, ideal = SemiNMF(40, random_state=seed).fit(X), SemiNMF(init=D, tol=1e-7, max_iter=1000).fit(X)
    np.testing.assert_allclose(model.objective_path_[-1], ideal.objective_path_[-1], rtol=1e-6)
    assert matched_cosines(model.components_, ideal.components_).min() > 0.9999
    assert 0.98 < matched_cosines(ideal.components_, D).min() < 0.995


def test_density_of_the_planted_codes_is_found():
    X, _ = planted(2000, 30, 10, 0.2, seed=0)
    model = SemiNMF(10, random_state=0).fit(X)
    assert model.code_density_ == pytest.approx(0.2, abs=0.03)
    assert model.atom_coherence_ < 0.7
    assert model.n_dead_atoms_ == model.n_duplicate_atoms_ == 0
    assert model.code_cancellation_ < 3


@pytest.mark.parametrize("alpha", [0.0, 0.05])
def test_planted_atoms_in_the_subspace_of_many_features(alpha):
    X, D = planted(6000, 200, 12, 0.2, seed=1)
    model = SemiNMF(12, alpha=alpha, init="kmeans", random_state=0).fit(X)
    assert matched_cosines(model.components_, D).min() > 0.98
    if alpha == 0:
        assert model.reconstruction_err_ <= model.svd_bound_ * (1 + 5e-3)


def test_starts_are_compared_on_a_sample_where_rows_abound():
    X, D = planted(18_000, 10, 5, 0.3, seed=0)
    model = SemiNMF(5, random_state=0).fit(X)
    assert matched_cosines(model.components_, D).min() > 0.99
    assert model.converged_
    assert model.n_iter_ <= 30


# ---------------------------------------------------------------- the closed form


def shifted(seed=0):
    return np.random.default_rng(seed).standard_normal((500, 40)) + 1.5


@pytest.mark.parametrize("k", [2, 5, 7, 12])
@pytest.mark.parametrize("data", ["positive", "sparse nonnegative", "shifted", "shifted and zero rows"])
def test_closed_form_reaches_the_svd_error(data, k):
    rng = np.random.default_rng(1)
    X = {
        "positive": rng.random((300, 60)) + 0.1,
        "sparse nonnegative": rng.random((300, 60)) * (rng.random((300, 60)) < 0.3),
        "shifted": shifted(),
        "shifted and zero rows": np.vstack([np.zeros((3, 40)), shifted()]),
    }[data]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = SemiNMF(k, alpha=0, random_state=0).fit(X)
    np.testing.assert_allclose(model.reconstruction_err_, svd_error(X, k), rtol=1e-10)
    assert model.attains_svd_bound_
    assert model.stop_reason_ == "bound"
    assert np.all(model.transform(X) >= 0)


def test_closed_form_needs_full_rank_and_a_half_space():
    rng = np.random.default_rng(0)
    centred = rng.standard_normal((60, 5))
    centred -= centred.mean(axis=0)
    assert half_space(centred) is None
    assert half_space(np.zeros((4, 2))) is None
    assert half_space(np.array([[1.0, 0.0], [-1.0, 0.0]])) is None
    assert closed_start(centred, np.eye(5), 5) is None
    assert closed_start(np.abs(centred)[:, :2], np.eye(2), 3) is None
    flat = np.column_stack([np.ones(4), np.zeros(4)])
    assert closed_start(flat, np.eye(2), 2) is None


@pytest.mark.parametrize("seed", range(5))
def test_half_space_of_many_rows_is_found_or_denied_by_the_worst_of_them(seed):
    rng = np.random.default_rng(seed)
    C = rng.standard_normal((10_000, 4)) * [1.0, 1.0, 1.0, 0.2]
    normal = np.array([0.1, -0.2, 0.3, 0.9]) / np.sqrt(0.95)
    C += (np.clip(0.5 - C @ normal, 0, None) * (1 + rng.random(10_000)))[:, None] * normal
    found = half_space(C)
    assert found is not None
    assert np.all(C @ found > 0)
    # One row and its opposite: no half-space holds both.
    assert half_space(np.concatenate([C, -C[:1]])) is None


@pytest.mark.parametrize("seed", range(5))
def test_half_space_is_found_when_neither_mean_nor_axis_gives_it(seed):
    rng = np.random.default_rng(seed)
    y = np.array([1.0, 0.0, 0.0])
    # Most rows far to one side of the half-space, a few just inside on the other.
    C = np.vstack([rng.random((200, 3)) * [0.1, 4, 1] + [0.05, 3, 0], rng.random((5, 3)) * [0.1, -4, 1] + [1.0, -3, 0]])
    assert np.all(C @ y > 0)
    found = half_space(C)
    assert found is not None
    assert np.all(C @ found > 0)


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("shape", [(200, 15), (15, 200), (60, 60)])
@pytest.mark.parametrize("center", [False, True])
def test_bounds_are_the_svd_errors(shape, center):
    X = np.random.default_rng(0).standard_normal(shape) * np.linspace(2, 1, shape[1]) + 0.3
    model = SemiNMF(6, center=center, random_state=0, max_iter=5).fit(X)
    used = X - X.mean(axis=0) if center else X
    np.testing.assert_allclose(model.svd_bound_, svd_error(used, 6), rtol=1e-10)
    np.testing.assert_allclose(model.svd_bound_prev_, svd_error(used, 5), rtol=1e-10)
    assert model.svd_bound_ <= model.reconstruction_err_
    assert not model.attains_svd_bound_


def test_bounds_of_exact_low_rank_are_not_lost_in_differences():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((300, 4)) @ rng.standard_normal((4, 50))
    model = SemiNMF(5, alpha=0, random_state=0).fit(X)
    assert model.svd_bound_ < 1e-12 * np.linalg.norm(X)
    np.testing.assert_allclose(SemiNMF(4, max_iter=2).fit(X).svd_bound_prev_, svd_error(X, 3), rtol=1e-10)


def test_krylov_space_finds_the_leading_directions(monkeypatch):
    from isogeom.decomposition import _certificates

    X = np.random.default_rng(0).standard_normal((90, 70)) * np.logspace(0, -2, 70)
    exact = survey(Rows.of_array(X), 5, center=False)[1]
    monkeypatch.setattr(_certificates, "_GRAM_SIDE", 40)
    approximate = survey(Rows.of_array(X), 5, center=False)[1]
    np.testing.assert_allclose(approximate.bound, exact.bound, rtol=1e-6)
    assert approximate.bound >= exact.bound * (1 - 1e-12)
    np.testing.assert_allclose(np.abs(approximate.axes @ exact.axes.T), np.eye(5), atol=1e-3)


@pytest.mark.parametrize("k", [2, 5, 9])
def test_automatic_start_is_never_worse_than_one_rank_less(k):
    X = np.random.default_rng(3).standard_normal((150, 50))
    X -= X.mean(axis=0)
    model = SemiNMF(k, alpha=0, random_state=0).fit(X)
    assert model.svd_bound_ < model.reconstruction_err_ <= model.svd_bound_prev_


def test_digits():
    X = load_digits().data
    model = SemiNMF(10, random_state=0).fit(X)
    assert model.converged_
    assert model.svd_bound_ <= model.reconstruction_err_ < 1.5 * model.svd_bound_
    plain = SemiNMF(10, alpha=0, init="kmeans", random_state=0).fit(X)
    # Overcomplete's multiplicative updates stop at 5.6 % over the bound.
    assert plain.reconstruction_err_ < 1.04 * plain.svd_bound_
    assert SemiNMF(10, alpha=0, random_state=0).fit(X).attains_svd_bound_


# ---------------------------------------------------------------- the path and the warnings


@pytest.mark.parametrize("alpha", [0.0, 0.05])
@pytest.mark.parametrize("ridge", [0.0, 0.3])
@pytest.mark.parametrize("init", ["auto", "kmeans", "svd"])
def test_objective_never_rises_through_the_subspace_and_beyond(monkeypatch, alpha, ridge, init):
    monkeypatch.setattr(_semi_solve, "_SUBSPACE_SIZE", 0)
    X, _ = planted(400, 60, 6, 0.3, seed=2, noise=0.3)
    model = SemiNMF(6, alpha=alpha, ridge=ridge, init=init, tol=0, max_iter=40, random_state=0)
    Z = model.fit_transform(X)
    path, scale = model.objective_path_, np.sum(X**2)
    assert path.shape == (model.n_iter_ + 1,)
    assert np.all(np.diff(path) <= 1e-12 * scale)
    final = 0.5 * np.sum((X - Z @ model.components_) ** 2) + model.penalty_ * Z.sum() + ridge / 2 * np.sum(Z**2)
    assert final <= path[-1] + 1e-12 * scale
    np.testing.assert_allclose(final, path[-1], rtol=1e-2)


def test_ill_posed_rows_end_with_finite_codes_and_a_warning():
    X = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    with pytest.warns((UserWarning, ConvergenceWarning), match="cancel each other|did not converge"):
        model = SemiNMF(2, alpha=0, tol=1e-8, random_state=0).fit(X)
    assert np.all(np.isfinite(model.transform(X)))
    for params in ({"alpha": 0.05}, {"alpha": 0, "ridge": 0.05}):
        regular = SemiNMF(2, random_state=0, **params).fit(X)
        assert regular.code_cancellation_ < 10
        assert np.all(np.isfinite(regular.transform(X)))


def test_cancellation_is_the_mean_ratio_of_codes_to_rows():
    X, _ = planted(100, 12, 4, 0.5, seed=0)
    model = SemiNMF(4, random_state=0)
    Z = model.fit_transform(np.vstack([X, np.zeros((2, 12))]))[:100]
    norms = np.linalg.norm(X, axis=1)
    np.testing.assert_allclose(model.code_cancellation_, np.mean(Z.sum(axis=1)[norms > 0] / norms[norms > 0]))


# ---------------------------------------------------------------- atoms


@pytest.mark.parametrize("k", [1, 3, 8])
def test_unique_energy_is_the_rise_after_deletion_and_refit(k):
    rng = np.random.default_rng(k)
    Z, X = np.abs(rng.standard_normal((80, k))), rng.standard_normal((80, 11))

    def error(codes):
        return np.sum((X - codes @ np.linalg.lstsq(codes, X, rcond=None)[0]) ** 2) if codes.size else np.sum(X**2)

    D = np.linalg.lstsq(Z, X, rcond=None)[0]
    rise = [error(np.delete(Z, j, axis=1)) - error(Z) for j in range(k)]
    np.testing.assert_allclose(unique_energies(Z.T @ Z, D), rise, rtol=1e-10)


def test_unique_energy_of_dead_and_repeated_atoms_is_nothing():
    Z = np.abs(np.random.default_rng(0).standard_normal((30, 3)))
    Z = np.column_stack([Z, Z[:, 0], np.zeros(30)])
    energies = unique_energies(Z.T @ Z, np.eye(5))
    assert energies[4] == 0
    assert np.all(energies[[0, 3]] < 1e-10 * energies[1])


def test_atoms_are_sorted_by_unique_energy():
    X, _ = planted(300, 20, 6, 0.3, seed=1)
    model = SemiNMF(6, random_state=0)
    Z = model.fit_transform(X)
    np.testing.assert_allclose(model.energies_, unique_energies(Z.T @ Z, model.components_), rtol=1e-9)
    assert np.all(np.diff(model.energies_) <= 0)
    other = SemiNMF(6, sort_by="codes", random_state=0)
    np.testing.assert_allclose(other.fit(X).energies_, np.sum(other.transform(X) ** 2, axis=0), rtol=1e-9)


def test_repeated_and_dead_atoms_are_counted():
    D = np.eye(4)[[0, 1, 0, 2, 1]]
    assert coherence(D) == (1.0, 2)
    assert coherence(-D[:2] + D[1:3]) == pytest.approx((1.0, 0))
    assert coherence(np.eye(3)[:1]) == (0.0, 0)
    model = SemiNMF(6, alpha=0.5, random_state=0).fit(np.repeat(np.eye(3), 5, axis=0))
    assert model.n_dead_atoms_ >= 3
    assert np.count_nonzero(model.energies_) == 6 - model.n_dead_atoms_


def test_sums_give_the_objective():
    rng = np.random.default_rng(0)
    Z, D, X = rng.random((20, 3)), rng.standard_normal((3, 5)), rng.standard_normal((20, 5))
    sums = Statistics.zeros(D)
    sums.add(Z[:7], X[:7])
    rest = Statistics.zeros(D)
    rest.add(Z[7:], X[7:])
    sums.merge(rest)
    expected = 0.5 * np.sum((X - Z @ D) ** 2) + 0.3 * Z.sum() + 0.2 * np.sum(Z**2)
    np.testing.assert_allclose(Problem(np.sum(X**2), 0.3, 0.4).objective(sums, D), expected)


@pytest.mark.parametrize("scale", [1e-25, 1e19])
def test_energies_of_float32_rows_are_no_float32(scale):
    rows = np.random.default_rng(0).standard_normal((200, 6))
    expected = SemiNMF(3, random_state=0).fit(rows.astype(np.float32)).energies_
    energies = SemiNMF(3, random_state=0).fit((rows * scale).astype(np.float32)).energies_
    np.testing.assert_allclose(energies / scale**2, expected, rtol=1e-3)


def test_a_penalty_that_leaves_no_code_warns():
    rows = np.random.default_rng(0).standard_normal((200, 6))
    with pytest.warns(UserWarning, match="Every code is zero: alpha=5.0 is too large"):
        model = SemiNMF(3, alpha=5.0, random_state=0).fit(rows)
    assert model.n_dead_atoms_ == 3
