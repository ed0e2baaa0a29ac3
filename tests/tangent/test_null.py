import numpy as np
import pytest
from scipy import stats

from isogeom.tangent import haar_moments, haar_null


@pytest.mark.parametrize(("rank", "dim"), [(1, 2), (2, 5), (3, 7), (8, 20)])
def test_moments_of_one_vector_are_those_of_the_beta_law(rank, dim):
    law = stats.beta(rank / 2, (dim - rank) / 2)
    mean, variance = haar_moments([1.0] + [0.0] * (dim - 1), rank)
    assert mean == pytest.approx(law.mean(), rel=1e-12)
    assert variance == pytest.approx(law.var(), rel=1e-12)


def test_draws_of_one_vector_follow_the_beta_law():
    draws = haar_null([1.0] + [0.0] * 8, 3, n_resamples=4000, rng=0)
    assert stats.kstest(draws, stats.beta(1.5, 3).cdf).pvalue > 0.01


def test_draws_have_the_closed_form_moments():
    spectrum = np.arange(12.0) ** 2
    mean, variance = haar_moments(spectrum, 4)
    draws = haar_null(spectrum, 4, n_resamples=20_000, rng=1)
    standard_error = np.sqrt(variance / draws.size)
    assert abs(draws.mean() - mean) < 4 * standard_error
    assert draws.var() == pytest.approx(variance, rel=0.05)


def test_no_variance_where_every_subspace_captures_the_same():
    assert haar_moments([2.0, 2.0, 2.0], 2) == (pytest.approx(4.0), 0.0)
    assert haar_moments([5.0, 1.0], 2) == (pytest.approx(6.0), 0.0)
    np.testing.assert_allclose(haar_null([5.0, 1.0], 2, n_resamples=7, rng=0), 6.0)


def test_rounding_of_equal_eigenvalues_is_no_variance_but_a_small_spread_is():
    equal = 0.1 * (1 + np.finfo(float).eps * np.array([0, 1, -1, 2]))
    assert haar_moments(equal, 2)[1] == 0.0
    assert haar_moments(0.1 * (1 + 1e-10 * np.array([0, 1, -1, 2])), 2)[1] > 0


def test_draws_do_not_depend_on_their_block_size(monkeypatch):
    from isogeom.tangent import _null

    whole = haar_null(np.arange(6.0), 2, n_resamples=50, rng=3)
    monkeypatch.setattr(_null, "_DRAW_SIZE", 30)
    np.testing.assert_allclose(haar_null(np.arange(6.0), 2, n_resamples=50, rng=3), whole, rtol=1e-13)


@pytest.mark.parametrize(
    ("spectrum", "rank", "error", "message"),
    [
        ([], 1, ValueError, "non-empty"),
        ([[1.0]], 1, ValueError, "vector"),
        ([1.0, np.nan], 1, ValueError, "NaN"),
        ([1.0, 1j], 1, ValueError, "complex"),
        ([1.0, 1e200], 1, ValueError, "squares overflow"),
        ([1.0, 2.0], 3, ValueError, "rank=3 must be at least 1 and at most 2"),
        ([1.0, 2.0], 0, ValueError, "rank=0"),
        ([1.0, 2.0], 1.5, TypeError, "rank=1.5 must be an integer"),
    ],
)
def test_bad_input_is_named(spectrum, rank, error, message):
    with pytest.raises(error, match=message):
        haar_moments(spectrum, rank)


def test_bad_number_of_resamples_is_named():
    with pytest.raises(ValueError, match="n_resamples=0"):
        haar_null([1.0, 2.0], 1, n_resamples=0)
