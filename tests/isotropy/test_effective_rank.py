import numpy as np
import pytest
from oracles.isotropy import CLOUD, CLOUD_COVARIANCE, anisotropic, effective_rank_by_svd

from isogeom.isotropy import effective_rank


@pytest.mark.parametrize("shape", [(60, 8), (8, 60), (9, 9)])
@pytest.mark.parametrize("on", ["singular-values", "eigenvalues"])
@pytest.mark.parametrize("center", [False, True])
def test_svd_oracle(shape, on, center):
    X = anisotropic(*shape, offset=0.3)
    expected = effective_rank_by_svd(X, on=on, center=center)
    assert effective_rank(X, on=on, center=center) == pytest.approx(expected, rel=1e-6)


def test_low_rank_in_float32_is_not_inflated_by_a_tail_of_rounding():
    rng = np.random.default_rng(0)
    X = (rng.standard_normal((3000, 4)) @ rng.standard_normal((4, 300))).astype(np.float32)
    expected = effective_rank_by_svd(X, on="singular-values", center=False)
    assert effective_rank(X) == pytest.approx(expected, rel=1e-4)
    assert effective_rank(X) < 4.01


def test_exact_low_rank_has_no_tail():
    X = np.outer(np.arange(1.0, 40), np.ones(30)) + np.outer(np.ones(39), np.arange(30.0))
    expected = effective_rank_by_svd(X, on="singular-values", center=False)
    assert effective_rank(X) == pytest.approx(expected, rel=1e-9)
    assert effective_rank(X) < 2


def test_cut():
    spectrum = [16.0, 9.0, 4.0, 1.0]
    shares = np.array([4, 3]) / 7
    assert effective_rank(spectrum=spectrum, n_components=2) == pytest.approx(np.exp(-(shares @ np.log(shares))))
    assert effective_rank(spectrum=spectrum, n_components=1) == 1.0
    assert effective_rank(spectrum=spectrum, n_components=9) == effective_rank(spectrum=spectrum)


def test_matrix_is_taken_as_it_is():
    raw = CLOUD.T @ CLOUD
    assert effective_rank(covariance=raw) == pytest.approx(effective_rank(CLOUD), rel=1e-12)
    for center in (True, False):
        assert effective_rank(covariance=CLOUD_COVARIANCE, center=center) == pytest.approx(2.5456772, abs=5e-8)


def test_single_row_and_single_feature():
    assert effective_rank([[3.0, 4.0]]) == 1.0
    assert effective_rank([[3.0], [4.0]]) == 1.0


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"on": "values"}, ValueError, "on='values'.*'singular-values', 'eigenvalues'"),
        ({"center": "yes"}, ValueError, "center='yes'"),
        ({"n_components": 0}, ValueError, "n_components=0 must be at least 1"),
        ({"n_components": 1.5}, TypeError, "n_components=1.5 must be an integer"),
    ],
)
def test_bad_options(kwargs, error, match):
    with pytest.raises(error, match=match):
        effective_rank(CLOUD, **kwargs)


def test_a_negative_eigenvalue_is_an_error():
    covariance = np.eye(4)
    covariance[0, 1] = covariance[1, 0] = 1.3
    with pytest.raises(ValueError, match=r"eigenvalue -0\.13 relative to its largest"):
        effective_rank(covariance=covariance)
