"""Steps of the optimiser over rotations that are accepted by slopes, and checked by the objective now and then."""

import numpy as np
import pytest
from oracles.ica import elliptical_mixture, laplace_mixture, objective, whiten

from isogeom.decomposition import _ica_contrasts, _ica_descent, _ica_points, _picard

LOGCOSH = _ica_contrasts.CONTRASTS["logcosh"]


def rotation(k, seed):
    return _picard.polar(np.random.default_rng(seed).standard_normal((k, k)))


@pytest.fixture(scope="module")
def rows():
    return whiten(laplace_mixture(5000, 6, 6, seed=2)[0], 6)


@pytest.fixture(scope="module")
def flat_rows():
    return whiten(elliptical_mixture(5000, 10, 8, seed=3), 8)


def near(Y):
    """A rotation a few hundredths of a radian from a solution."""
    k = Y.shape[1]
    W = _picard.minimise(Y, rotation(k, 0), LOGCOSH, max_iter=300, tol=1e-8).point.W
    E = 0.02 * np.random.default_rng(5).standard_normal((k, k))
    return _ica_descent.rotation(E - E.T) @ W


def values_along(run, Y, n_steps):
    """Objective at the start and after each step, by the oracle."""
    found = []
    for _ in range(n_steps):
        found.append(objective(Y @ run._point.W.T, "logcosh", run._signs))
        if not run.advance():
            break
    return np.asarray(found)


@pytest.mark.parametrize("seed", range(3))
def test_steps_by_slope_lower_the_objective(rows, flat_rows, seed):
    for Y in (rows, flat_rows):
        run = _ica_descent.Descent(Y, rotation(Y.shape[1], seed), LOGCOSH)
        signs = run._signs
        found = values_along(run, Y, 25)
        assert np.array_equal(run._signs, signs)
        assert run._trusting
        assert len(found) == 25
        assert np.all(np.diff(found) < 1e-12)


def test_only_every_tenth_point_is_a_full_one(flat_rows, monkeypatch):
    evaluate, full, start = _ica_points.evaluate, [], near(flat_rows)

    def counted(*args, **kwargs):
        full.append(kwargs.get("full", True))
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(_ica_descent, "evaluate", counted)
    run = _ica_descent.Descent(flat_rows, start, LOGCOSH)
    known = [run.full]
    for _ in range(20):
        assert run.advance()
        known.append(run.full)
    assert np.flatnonzero(known).tolist() == [0, 10, 20]
    # Two of every ten steps shortened at most.
    assert 3 <= sum(full) <= 5
    assert len(full) <= 25


def test_a_step_too_long_is_cut_at_the_zero_of_its_slope(rows):
    """Along a direction scaled up, the step comes back to where the slope of the curve vanishes."""
    run = _ica_descent.Descent(rows, near(rows), LOGCOSH)
    direction = run._memory.direction(run._gradient, run._known.hessian(run._signs))
    assert np.abs(5 * direction).max() < 0.5
    point, step = run._step_by_slope(5 * direction)
    share = np.sum(step * direction) / np.sum(direction * direction)
    assert 0.5 < share < 2
    assert objective(rows @ point.W.T, "logcosh", run._signs) < objective(rows @ run._point.W.T, "logcosh", run._signs)


def test_a_step_too_long_to_trust_is_left_to_the_objective(rows):
    run = _ica_descent.Descent(rows, rotation(6, 0), LOGCOSH)
    direction = run._memory.direction(run._gradient, run._known.hessian(run._signs))
    assert np.abs(direction).max() > 0.5
    assert run._step_by_slope(direction) is None
    assert run.advance()
    assert run.full


@pytest.mark.parametrize("seed", range(2))
def test_a_run_led_uphill_goes_back_and_still_ends_at_the_solution(rows, monkeypatch, seed):
    """Slopes that lie, as if the objective had a ridge between two points: what they say is checked and undone."""
    Y, honest = rows, _ica_descent.Descent._step_by_slope

    def lying(self, direction):
        if len(lies) == 10:
            return honest(self, direction)
        lies.append(True)
        # Against the direction, which is uphill.
        step = -0.3 * direction / np.abs(direction).max()
        W = _ica_descent.rotation(step) @ self._point.W
        return _ica_points.evaluate(Y, W, LOGCOSH, full=self._age + 1 >= _ica_descent._REFRESH), step

    lies = []
    monkeypatch.setattr(_ica_descent.Descent, "_step_by_slope", lying)
    run = _ica_descent.Descent(Y, rotation(6, seed), LOGCOSH)
    # No sign follows what is found uphill.
    run._flips = np.full(6, float(_ica_descent._MAX_FLIPS))
    start, moved = run._point, []
    while run._trusting:
        moved.append(run.advance())
    assert moved == [True] * 9 + [False]
    assert run._point is run.best[0] is start
    assert run.full
    lies.clear()
    solution = _picard.minimise(Y, rotation(6, seed), LOGCOSH, max_iter=300, tol=1e-8)
    assert solution.gradient_norm <= 1e-8
    monkeypatch.undo()
    expected = _picard.minimise(Y, rotation(6, seed), LOGCOSH, max_iter=300, tol=1e-8)
    np.testing.assert_allclose(solution.path[-1], expected.path[-1], rtol=1e-9)


@pytest.mark.parametrize("max_iter", [0, 1, 7, 10, 33, 300])
def test_the_path_ends_at_the_objective_of_the_solution(flat_rows, max_iter):
    solution = _picard.minimise(flat_rows, rotation(8, 1), LOGCOSH, max_iter=max_iter, tol=1e-9)
    reference = np.sum(solution.signs) * _ica_contrasts.gaussian_reference("logcosh")[0]
    expected = objective(flat_rows @ solution.point.W.T, "logcosh", solution.signs) - reference
    np.testing.assert_allclose(solution.path[-1], expected, atol=1e-12)
    assert solution.point.full
    assert 1 <= len(solution.path) <= solution.n_iter + 1
