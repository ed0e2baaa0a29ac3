"""Leading directions from thin products, float32 products where they serve, and rows in other units."""

import warnings

import numpy as np
import pytest
from oracles.semi_nmf import svd_error

from isogeom import _xp
from isogeom.decomposition import SemiNMF, _directions
from isogeom.decomposition._certificates import survey
from isogeom.decomposition._directions import cheap, moderate, thin_directions
from isogeom.decomposition._rows import Rows
from isogeom.decomposition._semi_codes import measure

pytestmark = pytest.mark.filterwarnings("ignore:SemiNMF did not converge:sklearn.exceptions.ConvergenceWarning")


def low_rank(n=3000, d=400, k=6, noise=0.2, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.exponential(size=(n, k)) * (rng.random((n, k)) < 0.4)
    D = rng.standard_normal((k, d)) / np.sqrt(d)
    return (codes @ D + noise / np.sqrt(d) * rng.standard_normal((n, d))).astype(np.float32)


@pytest.fixture(scope="module")
def rows():
    return low_rank()


def test_thin_products_give_the_svd(rows):
    found = thin_directions(Rows.of_array(rows), 6)
    X = rows.astype(float)
    values, axes = np.linalg.svd(X, full_matrices=False)[1:]
    np.testing.assert_allclose(found.values, values[:6] ** 2, rtol=1e-7)
    np.testing.assert_allclose(np.abs(np.diag(found.axes @ axes[:6].T)), 1, atol=1e-7)
    np.testing.assert_allclose(found.axes @ found.axes.T, np.eye(6), atol=1e-10)
    np.testing.assert_allclose(found.scores, X @ found.axes.T, atol=1e-5)
    np.testing.assert_allclose(found.squares, np.sum(X**2), rtol=1e-8)
    np.testing.assert_allclose(found.norms, np.linalg.norm(X, axis=1).sum(), rtol=1e-7)
    facts = survey(Rows.of_array(rows), 6, center=False)[1]
    np.testing.assert_allclose(facts.bound, svd_error(X, 6), rtol=1e-6)
    np.testing.assert_allclose(facts.bound_previous, svd_error(X, 5), rtol=1e-6)


@pytest.mark.parametrize("chunk", [7, 500, 3000])
def test_thin_products_do_not_depend_on_chunks(rows, chunk):
    expected = thin_directions(Rows.of_array(rows), 6)
    found = thin_directions(Rows.of_array(rows, chunk=chunk), 6)
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-7)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)


def test_thin_products_in_every_library(as_array, library, rows):
    expected = thin_directions(Rows.of_array(rows), 6)
    found = thin_directions(Rows.of_array(as_array(rows)), 6)
    np.testing.assert_allclose(_xp.to_numpy(found.axes), expected.axes, atol=1e-5)
    np.testing.assert_allclose(_xp.to_numpy(found.values), expected.values, rtol=1e-6)


def test_directions_are_left_to_the_gram_matrix_where_thin_products_do_not_prove_enough(rows):
    rng = np.random.default_rng(1)
    slow_decay = (rng.standard_normal((3000, 400)) * np.arange(1, 401) ** -0.5).astype(np.float32)
    assert thin_directions(Rows.of_array(slow_decay), 6) is None
    # A large mean hides the rest from float32; float64 rows are promised float64; wide blocks cost more than they save.
    assert thin_directions(Rows.of_array(rows + np.float32(100)), 6) is None
    assert thin_directions(Rows.of_array(rows.astype(float)), 6) is None
    assert thin_directions(Rows.of_array(rows), 80) is None
    assert thin_directions(Rows.of_array(rows * np.float32(1e-20)), 6) is None
    facts = survey(Rows.of_array(slow_decay), 6, center=False)[1]
    np.testing.assert_allclose(facts.bound, svd_error(slow_decay.astype(float), 6), rtol=1e-6)


def test_proof_in_advance_ends_where_a_proof_afterwards_would(rows, monkeypatch):
    settled, products = [], _directions._thin_products

    def watched(*args, only_scores):
        settled.append(only_scores)
        return products(*args, only_scores=only_scores)

    monkeypatch.setattr(_directions, "_thin_products", watched)
    fast = thin_directions(Rows.of_array(rows), 6)
    # What was promised for a last pass holds: the tail is known to its accuracy.
    true = np.sum(np.linalg.svd(rows.astype(float), compute_uv=False)[6:] ** 2)
    np.testing.assert_allclose(fast.squares - np.sum(fast.values), true, rtol=1e-6)
    assert settled == [False, True]
    monkeypatch.setattr(_directions, "_thin_products", lambda *a, only_scores: products(*a, only_scores=False))
    slow = thin_directions(Rows.of_array(rows), 6)
    np.testing.assert_allclose(fast.values, slow.values, rtol=1e-12)
    np.testing.assert_allclose(fast.scores, slow.scores, atol=1e-12)


def test_scores_stand_for_rows_where_atoms_lie_in_their_span(rows):
    found = thin_directions(Rows.of_array(rows), 6)
    turn = np.random.default_rng(0).standard_normal((6, 6))
    inside = turn @ found.axes
    inside /= np.linalg.norm(inside, axis=1, keepdims=True)
    outside = np.random.default_rng(1).standard_normal((6, 400)) / 20
    span, guess = (found.axes, found.scores), np.ones((len(rows), 6))
    for D, rtol in ((inside, 1e-7), (outside, 1e-14)):
        direct = measure(Rows.of_array(rows), D, 0.01, 0.0)
        quick = measure(Rows.of_array(rows), D, 0.01, 0.0, guess=guess, span=span)
        np.testing.assert_allclose(quick.error, direct.error, rtol=rtol)
        np.testing.assert_allclose(quick.statistics.A, direct.statistics.A, atol=1e-6 * direct.statistics.A.max())
        np.testing.assert_allclose(quick.statistics.B, direct.statistics.B, atol=1e-6 * abs(direct.statistics.B).max())
        np.testing.assert_allclose(quick.cancellation, direct.cancellation, rtol=1e-6)


def test_a_basis_that_misses_a_direction_goes_on_until_it_is_found(rows, monkeypatch):
    monkeypatch.setattr(_directions, "_SAMPLE_PASSES", 1)
    monkeypatch.setattr(_directions, "_PASSES", 8)
    X = rows.copy()
    # The sixth direction is strong in a few rows that the sample hardly sees.
    X[::500] += 3 * np.eye(1, 400, 17, dtype=np.float32)
    facts = survey(Rows.of_array(X), 7, center=False)[1]
    np.testing.assert_allclose(facts.bound, svd_error(X.astype(float), 7), rtol=1e-6)


def test_float32_products_change_what_is_measured_by_rounding_only(rows, monkeypatch):
    D = np.random.default_rng(0).standard_normal((6, 400))
    D /= np.linalg.norm(D, axis=1, keepdims=True)
    fast = measure(Rows.of_array(rows), D, 0.01, 0.0)
    monkeypatch.setattr(_directions, "is_single", lambda rows, block: False)
    exact = measure(Rows.of_array(rows), D, 0.01, 0.0)
    np.testing.assert_allclose(fast.error, exact.error, rtol=1e-7)
    np.testing.assert_allclose(fast.statistics.A, exact.statistics.A, atol=1e-6 * exact.statistics.A.max())
    np.testing.assert_allclose(fast.statistics.B, exact.statistics.B, atol=1e-6 * np.abs(exact.statistics.B).max())
    assert fast.squares != exact.squares
    np.testing.assert_allclose(fast.squares, exact.squares, rtol=1e-8)


def test_blocks_whose_squares_leave_float32_are_lifted(rows):
    for factor, dtype in ((1, np.float32), (1e-20, np.float64), (1e22, np.float64)):
        X = rows[:10] * np.float32(factor)
        assert cheap(Rows.of_array(X), X)[0].dtype == dtype


# ---------------------------------------------------------------- units


@pytest.mark.parametrize("exponent", [-900, -530, 530, 900])
@pytest.mark.parametrize("params", [{}, {"alpha": 0}, {"center": True}])
def test_extreme_units_scale_the_fit_exactly(exponent, params):
    X = np.random.default_rng(3).standard_normal((120, 9)) + 0.7
    plain = SemiNMF(4, random_state=0, **params)
    Z = plain.fit_transform(X)
    unit = 2.0**exponent
    model = SemiNMF(4, random_state=0, **params)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        scaled = model.fit_transform(X * unit)
    assert np.array_equal(scaled, Z * unit)
    assert np.array_equal(model.transform(X * unit), scaled)
    assert np.array_equal(model.components_, plain.components_)
    assert model.n_iter_ == plain.n_iter_
    assert model.n_dead_atoms_ == 0
    np.testing.assert_allclose(model.penalty_ / unit, plain.penalty_, rtol=1e-14)
    np.testing.assert_allclose(model.reconstruction_err_ / unit, plain.reconstruction_err_, rtol=1e-14)
    np.testing.assert_allclose(model.svd_bound_ / unit, plain.svd_bound_, rtol=1e-14)
    np.testing.assert_allclose(model.svd_bound_prev_ / unit, plain.svd_bound_prev_, rtol=1e-14)
    assert not np.any(np.isnan(model.objective_path_))


def test_moderate_rows_keep_their_units():
    for X in (np.ones((5, 2)), np.zeros((5, 2)), np.full((5, 2), 1e100), np.full((5, 2), 1e-38, dtype=np.float32)):
        rows = Rows.of_array(X)
        assert moderate(rows) == (rows, 1.0)
    rows, unit = moderate(Rows.of_array(np.full((5, 2), 3e200)))
    assert np.log2(unit) == round(np.log2(unit))
    np.testing.assert_allclose(next(iter(rows))[1] * unit, 3e200, rtol=1e-15)
