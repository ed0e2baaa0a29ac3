"""What ICA promises about its solution: certificates, peers, stability, and data without independent directions."""

import warnings

import numpy as np
import pytest
from oracles.ica import CONTRASTS, amari_distance, elliptical_mixture, laplace_mixture, signs, stationarity, whiten
from sklearn.datasets import load_digits
from sklearn.decomposition import FastICA
from sklearn.exceptions import ConvergenceWarning

from isogeom import _xp
from isogeom.decomposition import ICA, _ica_points


@pytest.fixture(scope="module")
def mixture():
    """2000 rows in 8 features from 4 Laplace sources, with a mean."""
    X, atoms = laplace_mixture(2000, 8, 4, seed=0)
    return X + np.arange(8.0), atoms


@pytest.fixture(scope="module")
def gaussian():
    """50 000 Gaussian rows, 6 features."""
    return np.random.default_rng(0).standard_normal((50_000, 6))


def fit_quietly(X, **params):
    """Fit on data with sources that may look Gaussian; anything but that warning still fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="n_gaussian_=")
        return ICA(**params).fit(X)


# ---------------------------------------------------------------- the certificate


@pytest.mark.parametrize("fun", CONTRASTS)
@pytest.mark.parametrize("tol", [1e-3, 1e-10])
def test_gradient_norm_recomputed_from_the_sources(mixture, fun, tol):
    X, _ = mixture
    model = ICA(n_components=4, fun=fun, tol=tol, random_state=1).fit(X)
    S = model.transform(X)
    assert model.converged_
    assert model.gradient_norm_ <= tol
    np.testing.assert_allclose(model.gradient_norm_, stationarity(S, fun), rtol=1e-3, atol=1e-13)
    assert model.contrast_signs_.tolist() == signs(S, fun).tolist()


def test_float32_certificate_holds_in_float64(mixture):
    X = mixture[0].astype(np.float32)
    model = ICA(n_components=4, random_state=1).fit(X)
    assert model.gradient_norm_ <= 1e-6
    S = (X.astype(np.float64) - X.mean(axis=0, dtype=np.float64)) @ model.components_.T.astype(np.float64)
    # components_ are stored in float32: their rounding alone moves the gradient by about 1e-7.
    assert stationarity(S, "logcosh") < 3e-6


def test_tolerance_is_ten_times_below_what_fast_ica_leaves():
    for seed in range(3):
        X, _ = laplace_mixture(20_000, 12, 12, seed)
        theirs = FastICA(12, whiten="unit-variance", random_state=seed).fit_transform(X)
        model = ICA(random_state=seed).fit(X)
        assert model.gradient_norm_ < stationarity(theirs, "logcosh") / 10


def test_iteration_count_on_a_fixed_case():
    X, _ = laplace_mixture(5000, 10, 10, seed=0)
    assert ICA(random_state=0).fit(X).n_iter_ <= 14


def test_running_out_of_iterations_warns_with_the_numbers(mixture):
    X, _ = mixture
    with pytest.warns(
        ConvergenceWarning, match=r"in 2 iterations: the gradient norm is .*, above tol=1e-15. Raise max"
    ):
        model = ICA(n_components=4, max_iter=2, tol=1e-15, random_state=0).fit(X)
    assert model.n_iter_ == 2
    assert model.converged_ is False


def test_an_unattainable_tolerance_says_so(mixture):
    X, _ = mixture
    with pytest.warns(ConvergenceWarning, match="by more than rounding: raise tol"):
        model = ICA(n_components=4, tol=0, random_state=0).fit(X.astype(np.float32))
    assert model.n_iter_ < 100
    assert model.gradient_norm_ < 1e-6


def test_objective_path(mixture):
    X, _ = mixture
    model = ICA(n_components=4, random_state=0).fit(X)
    assert isinstance(model.objective_path_, tuple)
    assert 1 <= len(model.objective_path_) <= model.n_iter_ + 1
    assert np.all(np.diff(model.objective_path_) <= 1e-13)


@pytest.mark.parametrize("entries", [1000, 10**8])
def test_block_sizes_change_rounding_only(mixture, monkeypatch, entries):
    X, _ = mixture
    expected = ICA(n_components=4, random_state=0).fit(X)
    monkeypatch.setattr(_ica_points, "_BLOCK_ENTRIES", entries)
    monkeypatch.setattr(_xp.row_blocks, "__defaults__", (97,))
    model = ICA(n_components=4, random_state=0).fit(X)
    assert model.n_iter_ == expected.n_iter_
    np.testing.assert_allclose(model.components_, expected.components_, atol=1e-10)


# ---------------------------------------------------------------- peers


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_amari_distance_within_5_percent_of_picard(seed, dtype):
    """The rule: on the same rows, our distance to the planted mixing is at most 1.05 times picard's."""
    picard = pytest.importorskip("picard", reason="python-picard is not installed")
    X, atoms = laplace_mixture(8000, 20, 10, seed, noise=0.05)
    X = X.astype(dtype)
    model = ICA(n_components=10, random_state=seed).fit(X)
    K, W, _ = picard.picard(X.T.astype(float), n_components=10, ortho=True, extended=True, random_state=seed)
    theirs = amari_distance(W @ K, atoms.T)
    assert amari_distance(model.components_, atoms.T) <= 1.05 * theirs
    assert theirs < 0.05


def test_same_solution_as_picard(mixture):
    picard = pytest.importorskip("picard", reason="python-picard is not installed")
    X, _ = mixture
    ours = ICA(n_components=4, tol=1e-10, random_state=0).fit(X)
    K, W, _ = picard.picard(X.T.copy(), n_components=4, ortho=True, extended=True, tol=1e-9, random_state=0)
    S = (X - X.mean(axis=0)) @ (W @ K).T
    correlations = np.abs(np.corrcoef(S.T, ours.transform(X).T)[:4, 4:])
    assert np.sort(correlations.max(axis=1))[0] > 1 - 1e-8


@pytest.mark.parametrize("seed", range(4))
def test_converges_where_the_model_does_not_hold_and_the_fixed_point_stalls(seed):
    X = elliptical_mixture(8000, 20, 12, seed)
    theirs = FastICA(12, whiten="unit-variance", random_state=seed, max_iter=1000).fit_transform(X)
    model = fit_quietly(X, n_components=12, random_state=seed, max_iter=150)
    assert model.converged_
    assert stationarity(model.transform(X), "logcosh") < 1.01e-6
    assert stationarity(theirs, "logcosh") > 1e-4


# ---------------------------------------------------------------- Gaussian sources


@pytest.mark.parametrize("fun", CONTRASTS)
@pytest.mark.parametrize("shape", [(50_000, 6), (5000, 20), (1000, 3)])
def test_gaussian_rows_are_reported(fun, shape):
    k = shape[1]
    for seed in range(3):
        X = np.random.default_rng([5, seed]).standard_normal(shape)
        with pytest.warns(UserWarning, match=rf"n_gaussian_={k} of {k} sources .*not identifiable"):
            model = ICA(fun=fun, random_state=seed, max_iter=1000).fit(X)
        assert model.n_gaussian_ == k
        assert np.all(model.non_gaussianity_ <= 1)


@pytest.mark.parametrize("fun", CONTRASTS)
def test_one_gaussian_source_alone_is_reported(fun):
    X = np.random.default_rng(0).standard_normal((2000, 10))
    with pytest.warns(UserWarning, match="n_gaussian_=1: the only source cannot be told from a Gaussian one"):
        model = ICA(1, fun=fun, random_state=0).fit(X)
    assert model.n_gaussian_ == model.n_components_ == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ICA(1, fun=fun, random_state=0).fit(np.random.default_rng(0).laplace(size=(2000, 1))).n_gaussian_ == 0


def test_gaussian_rows_do_not_pass_as_independent_sources(gaussian):
    model = fit_quietly(gaussian, random_state=0)
    kurtosis = np.abs(np.mean(model.transform(gaussian) ** 4, axis=0) - 3)
    assert kurtosis.max() < 0.2


@pytest.mark.parametrize("n_gaussian", [0, 1, 3])
def test_gaussian_sources_are_counted_among_others(n_gaussian):
    rng = np.random.default_rng(1)
    S = np.hstack([rng.standard_normal((20_000, n_gaussian)), rng.laplace(size=(20_000, 4))])
    S = np.hstack([S, rng.uniform(-1, 1, (20_000, 2))])
    atoms = rng.standard_normal((S.shape[1], 10))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = ICA(n_components=S.shape[1], random_state=0).fit(S @ atoms)
    assert model.n_gaussian_ == n_gaussian
    # One Gaussian source is identifiable: it is what the others leave.
    assert len(caught) == (n_gaussian >= 2)
    recovered = np.abs(np.corrcoef(S.T, model.transform(S @ atoms).T)[: S.shape[1], S.shape[1] :]).max(axis=1)
    assert recovered[n_gaussian:].min() > 0.98


def test_laplace_sources_are_not_called_gaussian(mixture):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = ICA(n_components=4, random_state=0).fit(mixture[0])
    assert model.n_gaussian_ == 0
    assert model.non_gaussianity_.min() > 1


# ---------------------------------------------------------------- restarts


def test_stability_of_planted_sources_and_of_gaussian_ones(mixture):
    planted = ICA(n_components=4, n_init=4, random_state=0).fit(mixture[0])
    assert planted.stability_.shape == (4,)
    assert planted.stability_.min() > 0.999
    X = np.random.default_rng(3).standard_normal((2000, 10))
    noise = fit_quietly(X, n_init=4, random_state=0, max_iter=1000)
    assert noise.stability_.mean() < 0.9
    assert np.all((noise.stability_ >= 0) & (noise.stability_ <= 1))


def test_stability_belongs_to_its_source():
    # Two Laplace sources, six Gaussian: the order by energy mixes them.
    rng = np.random.default_rng(2)
    S = np.hstack([rng.laplace(size=(5000, 2)), rng.standard_normal((5000, 6))])
    X = S * np.array([1.0, 4.0, 8.0, 0.5, 2.0, 3.0, 6.0, 0.7])
    model = fit_quietly(X, n_init=5, random_state=0, max_iter=1000)
    correlation = np.abs(np.corrcoef(S[:, :2].T, model.transform(X).T)[:2, 2:])
    planted = correlation.argmax(axis=1)
    assert correlation.max(axis=1).min() > 0.98
    assert model.stability_[planted].min() > 0.98
    assert model.stability_.argmax() in planted
    assert set(np.argsort(model.non_gaussianity_)[-2:]) == set(planted)


def test_one_start_has_no_stability(mixture):
    assert ICA(n_components=4, random_state=0).fit(mixture[0]).stability_ is None


def test_more_starts_never_keep_a_worse_solution():
    X = load_digits().data
    one = fit_quietly(X, n_components=15, random_state=0)
    best = fit_quietly(X, n_components=15, n_init=4, random_state=0)
    assert best.non_gaussianity_.sum() >= one.non_gaussianity_.sum() - 1e-9


# ---------------------------------------------------------------- dtypes and units


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_units_do_not_matter_in_float32(mixture, factor):
    X = mixture[0].astype(np.float32)
    plain, scaled = (ICA(n_components=4, random_state=0).fit(Y) for Y in (X, X * np.float32(factor)))
    np.testing.assert_allclose(scaled.mixing_ / factor, plain.mixing_, rtol=1e-3, atol=1e-3)
    assert scaled.n_gaussian_ == 0


def test_float32_is_close_to_float64():
    X, atoms = laplace_mixture(20_000, 30, 10, seed=1, noise=0.1)
    double = ICA(n_components=10, random_state=0).fit(X)
    single = ICA(n_components=10, random_state=0).fit(X.astype(np.float32))
    np.testing.assert_allclose(single.mixing_, double.mixing_, atol=2e-4)
    assert amari_distance(single.components_, atoms.T) == pytest.approx(
        amari_distance(double.components_, atoms.T), rel=0.01
    )


# ---------------------------------------------------------------- real data


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("fun", CONTRASTS)
def test_digits(fun, dtype):
    X = load_digits().data.astype(dtype)
    model = fit_quietly(X, n_components=15, fun=fun, random_state=0, max_iter=1000)
    assert model.converged_
    S = whiten(X.astype(float), 64)[:, :15]
    assert np.abs(np.corrcoef(S.T, model.transform(X).T)[:15, 15:] ** 2).sum(axis=0) == pytest.approx(1, abs=1e-3)


def test_minilm_activations(shared_file):
    X = np.load(shared_file("minilm_block3.npz"))["activations"]
    model = fit_quietly(X, n_components=30, random_state=0)
    assert model.converged_
    assert model.components_.dtype == np.float32
    assert stationarity(model.transform(X).astype(float), "logcosh", model_signs(model)) < 1e-5


def test_glove_vectors(shared_file):
    data = np.load(shared_file("glove50_top20k.npz"))
    X = next(data[name] for name in data.files if data[name].ndim == 2)
    model = fit_quietly(X, n_components=20, random_state=0)
    assert model.converged_
    assert model.n_gaussian_ < 20


def model_signs(model):
    return np.asarray(model.contrast_signs_, dtype=float)
