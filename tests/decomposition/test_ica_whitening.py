import numpy as np
import pytest

from isogeom import _xp
from isogeom.decomposition import ICA, _directions, _ica_whitening
from isogeom.decomposition._ica_whitening import SAFE_RATIO, principal_spectrum, whiten

D = 12


def rows(ratio, k=6, n=4000, mean=0.0):
    """float32 rows whose k-th variance is about `ratio` of the largest, on top of smaller noise."""
    rng = np.random.default_rng(9)
    deviations = np.concatenate([np.geomspace(1, ratio**0.5, k), np.full(D - k, ratio**0.5 / 50)])
    basis = np.linalg.qr(rng.standard_normal((D, D)))[0]
    return (rng.laplace(size=(n, D)) * deviations @ basis + mean).astype(np.float32)


@pytest.mark.parametrize(("ratio", "exact"), [(0.5, False), (5e-3, False), (2e-4, True), (1e-6, True)])
def test_float32_products_where_the_variances_kept_are_large(ratio, exact):
    assert principal_spectrum(rows(ratio), 6).exact is exact
    # All the variances are wanted: the noise is 2500 times smaller.
    assert principal_spectrum(rows(ratio), None).exact is True
    assert principal_spectrum(rows(ratio).astype(np.float64), 6).exact is True


@pytest.mark.parametrize("ratio", [0.5, 1.5 * SAFE_RATIO, 1e-6])
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_rows_are_white_and_the_maps_are_inverse(ratio, mean, as_array):
    if mean and ratio < SAFE_RATIO:
        mean = 10.0  # With a mean of 1000, float32 cannot store deviations of 0.001.
    data = rows(ratio, mean=mean)
    X = as_array(data)
    Y, forward, back = whiten(X, principal_spectrum(X, 6), 6)
    assert Y.dtype == X.dtype
    Y, forward, back = (_xp.to_numpy(a).astype(float) for a in (Y, forward, back))
    np.testing.assert_allclose(Y.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(Y.T @ Y / len(Y), np.eye(6), atol=2e-6)
    np.testing.assert_allclose(forward @ back.T, np.eye(6), atol=1e-10)
    exact = data.astype(float) - data.mean(axis=0, dtype=float)
    np.testing.assert_allclose(exact @ forward.T, Y, atol=2e-3 if mean else 1e-4)


@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_float32_spectrum_against_float64(mean):
    X = rows(1.5 * SAFE_RATIO, mean=mean)
    spectrum = principal_spectrum(X, 6)
    assert spectrum.exact is False
    exact = principal_spectrum(X.astype(np.float64), 6)
    np.testing.assert_allclose(spectrum.variances[:6], exact.variances[:6], rtol=1e-4)
    # Same subspace: the angle is bounded by the error over the gap to the next variance.
    cosines = np.linalg.svd(spectrum.directions[:6] @ exact.directions[:6].T)[1]
    assert cosines.min() > 1 - 1e-6


def test_more_components_than_rows_allow_go_to_the_exact_rank():
    X = rows(0.5)[:5]
    assert principal_spectrum(X, 8).rank == 4
    assert principal_spectrum(X, None).rank == 4


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_units_do_not_matter(factor):
    X = rows(0.01)
    plain, scaled = (whiten(A, principal_spectrum(A, 6), 6)[0] for A in (X, X * np.float32(factor)))
    np.testing.assert_allclose(scaled, plain, atol=1e-4)


# ---------------------------------------------------------------- few directions in wide rows


def wide(n=3000, d=400, k=6, noise=0.1, mean=0.0, last=1.0):
    """float32 rows of k sources in many more features, with noise in all of them."""
    rng = np.random.default_rng(3)
    atoms = np.linalg.qr(rng.standard_normal((d, k)))[0].T * np.geomspace(1, last, k)[:, None] * np.sqrt(d)
    return (rng.laplace(size=(n, k)) @ atoms + noise * rng.standard_normal((n, d)) + mean).astype(np.float32)


def sine(directions, X, k=6):
    """Sine of the largest angle between directions and the leading ones, from a float64 SVD."""
    X = X.astype(float)
    leading = np.linalg.svd(X - X.mean(axis=0), full_matrices=False)[2][:k]
    directions = _xp.to_numpy(directions)[:k]
    return np.linalg.norm(directions - directions @ leading.T @ leading, 2)


@pytest.mark.parametrize("options", [{}, {"noise": 0.6}, {"mean": 1000.0}, {"last": 0.1}, {"mean": -3.0, "noise": 0.3}])
def test_thin_products_give_the_leading_directions(options, as_array):
    data = wide(**options)
    X = as_array(data)
    spectrum = principal_spectrum(X, 6)
    assert spectrum.scores is not None
    assert (spectrum.rank, spectrum.exact) == (6, False)
    exact = principal_spectrum(data.astype(np.float64), 6)
    np.testing.assert_allclose(_xp.to_numpy(spectrum.variances), exact.variances[:6], rtol=1e-5)
    np.testing.assert_allclose(_xp.to_numpy(spectrum.mean), data.mean(axis=0, dtype=float), atol=5e-6)
    assert sine(spectrum.directions, data) < 1e-4
    Y, forward, back = (_xp.to_numpy(a).astype(float) for a in whiten(X, spectrum, 6))
    np.testing.assert_allclose(Y.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(Y.T @ Y / len(Y), np.eye(6), atol=2e-6)
    np.testing.assert_allclose(forward @ back.T, np.eye(6), atol=1e-10)
    centred = data.astype(float) - data.mean(axis=0, dtype=float)
    np.testing.assert_allclose(centred @ forward.T, Y, atol=2e-3 if options.get("mean") == 1000 else 1e-4)


def test_rows_that_a_sample_overlooks_are_not_lost():
    """A few rows hold a direction of larger variance than the last one kept."""
    X = wide(n=20_000)
    outliers = np.arange(3000, 3004)
    X[outliers, 0] += 5e3
    sampled = np.random.default_rng(0).choice(len(X), size=_directions._SAMPLE, replace=False)
    assert not np.isin(outliers, sampled).any()
    spectrum = principal_spectrum(X, 6)
    assert spectrum.scores is None
    assert sine(spectrum.directions, X) < 1e-4
    assert np.abs(spectrum.directions[:6, 0]).max() > 0.9


@pytest.mark.parametrize(
    "options", [{"noise": 2.0}, {"n": 1000}, {"d": 90}, {"last": 0.02}], ids=["noisy", "few rows", "narrow", "uneven"]
)
def test_full_products_elsewhere(options):
    X = wide(**options)
    spectrum = principal_spectrum(X, 6)
    assert spectrum.scores is None
    assert sine(spectrum.directions, X) < 1e-4


def test_a_fit_from_thin_products_is_that_of_float64(monkeypatch):
    X = wide(n=8000)
    thin, double = (ICA(6, random_state=0).fit(A) for A in (X, X.astype(np.float64)))
    np.testing.assert_allclose(thin.mixing_, double.mixing_, atol=2e-3)
    monkeypatch.setattr(_ica_whitening, "guess_directions", lambda *_, **__: None)
    full = ICA(6, random_state=0).fit(X)
    np.testing.assert_allclose(thin.mixing_, full.mixing_, atol=1e-3)
    assert thin.gradient_norm_ <= 1e-6
