"""The ways to a decomposition: they agree where they are exact, and weights count rows whatever the way."""

import tracemalloc

import numpy as np
import pytest
from scipy.linalg import subspace_angles
from sklearn.decomposition import PCA as SklearnPCA

from isogeom import Moments, _xp
from isogeom.decomposition import PCA
from isogeom.decomposition._pca_solvers import choose_solver

EXACT = ["covariance", "full"]
SOLVERS = [*EXACT, "randomized"]
NAMES = ["components_", "explained_variance_", "explained_variance_ratio_", "singular_values_", "mean_"]


def decaying_rows(n=300, d=40, offset=3.0, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)) * 0.8 ** np.arange(d) + offset


@pytest.fixture
def X():
    return decaying_rows()


def assert_same_fit(a, b, atol=1e-9):
    for name in NAMES:
        np.testing.assert_allclose(
            _xp.to_numpy(getattr(a, name)), _xp.to_numpy(getattr(b, name)), rtol=1e-7, atol=atol, err_msg=name
        )
    assert a.noise_variance_ == pytest.approx(b.noise_variance_, rel=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_agrees_with_scikit_learn(X, as_array, solver):
    ours = PCA(4, svd_solver=solver, iterated_power=20, random_state=0).fit(as_array(X))
    theirs = SklearnPCA(4, svd_solver="full").fit(X)
    for name in NAMES:
        got = _xp.to_numpy(getattr(ours, name))
        np.testing.assert_allclose(got, getattr(theirs, name), rtol=1e-7, atol=1e-8, err_msg=name)
    assert ours.noise_variance_ == pytest.approx(theirs.noise_variance_, rel=1e-8)


@pytest.mark.parametrize("solver", EXACT)
@pytest.mark.parametrize("shape", [(30, 8), (9, 30)])
def test_tail_energies_are_the_errors_of_truncation(as_array, solver, shape):
    X = decaying_rows(*shape)
    pca = PCA(2, svd_solver=solver).fit(as_array(X))
    singular = np.linalg.svd(X - X.mean(axis=0), compute_uv=False)
    expected = [np.sqrt(np.sum(singular[k:] ** 2)) for k in range(shape[1] + 1)]
    got = _xp.to_numpy(pca.tail_energies_)
    assert got.shape == (shape[1] + 1,)
    # Through the covariance a vanishing tail is known to the square root of the rounding of its square.
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-6 * expected[0])
    error = np.linalg.norm(X - _xp.to_numpy(pca.inverse_transform(pca.transform(as_array(X)))))
    assert got[2] == pytest.approx(error, rel=1e-9)
    assert np.all(np.diff(got) <= 0)


def test_tail_energies_of_the_randomized_solver_are_those_of_its_approximations(X):
    pca = PCA(5, svd_solver="randomized", iterated_power=2, random_state=0).fit(X)
    exact = PCA().fit(X).tail_energies_
    assert pca.tail_energies_.shape == (6,)
    assert pca.tail_energies_[0] == pytest.approx(exact[0], rel=1e-12)
    assert np.all(pca.tail_energies_ >= exact[:6] * (1 - 1e-9))
    error = np.linalg.norm(X - pca.inverse_transform(pca.transform(X)))
    assert pca.tail_energies_[5] == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("size", [3, 30, 100, 600])
def test_randomized_beside_one_dominant_direction(as_array, size, turned, dtype):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2000, 60)) * np.linspace(1, 0.2, 60)
    rows[:, 0] = size * rng.choice([-1, 1], 2000)
    if turned:
        rows = rows @ np.linalg.qr(rng.standard_normal((60, 60)))[0]
    rows = rows.astype(dtype)
    pca = PCA(10, svd_solver="randomized", random_state=0).fit(as_array(rows))
    Y = rows.astype(float) - rows.astype(float).mean(axis=0)
    singular = np.linalg.svd(Y, compute_uv=False)
    best = np.sqrt(np.cumsum(singular[::-1] ** 2)[::-1][:11])
    tails = _xp.to_numpy(pca.tail_energies_)
    # The spectrum is flat behind the first direction: no method of a few passes finds the very best.
    assert np.all(tails >= best * (1 - 1e-7))
    np.testing.assert_allclose(tails, best, rtol=3e-3)
    axes = _xp.to_numpy(pca.components_).astype(float)
    np.testing.assert_allclose(tails[10], np.linalg.norm(Y - Y @ axes.T @ axes), rtol=1e-7)
    np.testing.assert_allclose(pca.noise_variance_, tails[10] ** 2 / (2000 - 1) / 50, rtol=1e-12)
    np.testing.assert_allclose(tails[0] ** 2, np.sum(Y**2), rtol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("dtype", "rounding"), [(np.float32, 2e-7), (np.float64, 1e-14)])
def test_randomized_tails_beyond_the_rank_are_rounding(dtype, rounding, weighted):
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((300, 4)) @ rng.standard_normal((4, 50)) + 1).astype(dtype)
    weights = rng.integers(1, 4, 300) if weighted else None
    pca = PCA(6, svd_solver="randomized", random_state=0).fit(rows, sample_weight=weights)
    assert np.all(pca.tail_energies_[4:] <= rounding * pca.tail_energies_[0])
    assert pca.noise_variance_ <= rounding**2 * pca.explained_variance_[0]


@pytest.mark.parametrize("mean", [0, 1000])
def test_randomized_in_float32_whatever_the_mean(mean):
    X = decaying_rows(5000, 60, offset=mean).astype(np.float32)
    values, vectors = np.linalg.eigh(np.cov(X.astype(np.float64).T))
    pca = PCA(5, svd_solver="randomized", random_state=0).fit(X)
    assert pca.components_.dtype == np.float32
    np.testing.assert_allclose(pca.explained_variance_, values[::-1][:5], rtol=1e-5)
    assert subspace_angles(pca.components_.T.astype(float), vectors[:, ::-1][:, :5])[0] < 1e-3


@pytest.mark.parametrize("scale", [1e-21, 1e18])
def test_randomized_beyond_the_squares_of_float32(scale):
    X = decaying_rows(200, 20, offset=0) * scale
    pca = PCA(3, svd_solver="randomized", random_state=0).fit(X.astype(np.float32))
    expected = np.linalg.svd(X - X.mean(axis=0), compute_uv=False)[:3]
    np.testing.assert_allclose(pca.singular_values_, expected, rtol=1e-4)


def test_randomized_repeats_with_its_seed_on_every_library(X, as_array):
    ours = PCA(3, svd_solver="randomized", iterated_power=0, random_state=5)
    expected = ours.fit(X).components_
    np.testing.assert_allclose(_xp.to_numpy(ours.fit(as_array(X)).components_), expected, atol=1e-10)
    other = PCA(3, svd_solver="randomized", iterated_power=0, random_state=6).fit(X).components_
    assert np.abs(other - expected).max() > 1e-6


def test_more_power_iterations_come_closer(X):
    rows = np.random.default_rng(1).standard_normal((500, 100))
    best = PCA(5).fit(rows).explained_variance_.sum()
    caught = [
        PCA(5, svd_solver="randomized", iterated_power=q, random_state=0).fit(rows).explained_variance_.sum() / best
        for q in (0, 2, 8)
    ]
    assert caught[0] < caught[1] < caught[2] <= 1 + 1e-12


@pytest.mark.parametrize(
    ("n_components", "shape", "expected"),
    [
        (5, (1000, 100), "covariance"),
        (5, (20, 100), "covariance"),
        (5, (100, 2000), "full"),
        (None, (100, 2000), "full"),
        (5, (1000, 2000), "covariance"),
        (50, (50_000, 10_000), "randomized"),
        (0.9, (50_000, 10_000), "covariance"),
        (None, (50_000, 10_000), "covariance"),
        (9000, (50_000, 10_000), "covariance"),
        (50, (5000, 100_000), "randomized"),
    ],
)
def test_the_automatic_choice(n_components, shape, expected):
    assert choose_solver("auto", n_components, *shape) == expected
    assert choose_solver("full", n_components, *shape) == "full"


def test_few_wide_rows_take_the_thin_way():
    X = decaying_rows(20, 1200)
    pca = PCA(4).fit(X)
    assert not hasattr(pca, "moments_")
    assert_same_fit(pca, PCA(4, svd_solver="covariance").fit(X))


class TestWeights:
    @pytest.mark.parametrize("solver", SOLVERS)
    def test_whole_weights_equal_repeated_rows(self, X, as_array, solver):
        weights = np.random.default_rng(1).integers(0, 4, len(X))
        settings = {"svd_solver": solver, "iterated_power": 20, "random_state": 0}
        repeated = PCA(3, **settings).fit(as_array(np.repeat(X, weights, axis=0)))
        weighted = PCA(3, **settings).fit(as_array(X), sample_weight=weights)
        assert_same_fit(weighted, repeated)
        assert weighted.n_samples_ == repeated.n_samples_ == weights.sum()
        np.testing.assert_allclose(
            _xp.to_numpy(weighted.tail_energies_), _xp.to_numpy(repeated.tail_energies_), rtol=1e-7, atol=1e-5
        )

    def test_weights_stream(self, X):
        weights = np.random.default_rng(1).random(len(X)) * 3
        whole = PCA(3).fit(X, sample_weight=weights)
        streamed = PCA(3).partial_fit(X[:100], sample_weight=weights[:100])
        streamed.partial_fit(X[100:], sample_weight=weights[100:])
        assert_same_fit(streamed, whole)
        expected = np.cov(X.T, aweights=weights, ddof=0) * weights.sum() / (weights.sum() - 1)
        values = np.linalg.eigvalsh(expected)[::-1][:3]
        np.testing.assert_allclose(whole.explained_variance_, values, rtol=1e-10)

    @pytest.mark.parametrize("solver", SOLVERS)
    def test_bad_weights_are_named(self, X, solver):
        pca = PCA(2, svd_solver=solver, random_state=0)
        cases = [
            (np.full(len(X), -1.0), "negative"),
            (np.full(len(X), np.nan), "NaN"),
            (np.ones(3), r"shape \(3,\), but X has 300 rows"),
            (np.ones((len(X), 1)), r"shape \(300, 1\)"),
            (np.zeros(len(X)), "zero for every row"),
            (np.full(len(X), 1 / len(X)), "must add up to at least 2"),
        ]
        for weights, message in cases:
            with pytest.raises(ValueError, match=message):
                pca.fit(X, sample_weight=weights)
        with pytest.raises(ValueError, match="cannot be combined with Moments"):
            pca.fit(Moments().update(X), sample_weight=np.ones(len(X)))


class TestMerge:
    @pytest.mark.parametrize("cut", [1, 7, 150, 299])
    def test_equals_one_fit_on_all_rows(self, X, as_array, cut):
        parts = [PCA(4).partial_fit(as_array(part)) for part in np.split(X, [cut])]
        merged = parts[0].merge(parts[1])
        assert_same_fit(merged, PCA(4).fit(X))
        assert merged.n_samples_ == 300
        assert [part.n_samples_ for part in parts] == [cut, 300 - cut]
        np.testing.assert_allclose(_xp.to_numpy(merged.transform(as_array(X))), PCA(4).fit(X).transform(X), atol=1e-8)

    def test_keeps_parameters_names_and_the_wider_dtype(self, X):
        pandas = pytest.importorskip("pandas", reason="pandas is not installed")
        frame = pandas.DataFrame(X, columns=[f"x{i}" for i in range(40)])
        a, b = PCA(2, whiten=True).fit(frame[:100].astype("float32")), PCA(5).fit(frame[100:])
        merged = a.merge(b)
        assert merged.get_params() == a.get_params()
        assert merged.components_.dtype == np.float64
        assert list(merged.feature_names_in_) == list(frame.columns)
        with pytest.raises(ValueError, match="different feature_names_in_"):
            a.merge(PCA().fit(frame.rename(columns={"x0": "z"})))

    def test_refuses_what_cannot_be_merged(self, X):
        pca = PCA(2).fit(X)
        with pytest.raises(TypeError, match="other must be a fitted PCA, got ndarray"):
            pca.merge(X)
        with pytest.raises(ValueError, match="Cannot join moments of 40 features"):
            pca.merge(PCA(2).fit(X[:, :5]))
        for solver in ("full", "randomized"):
            with pytest.raises(ValueError, match=f"merge needs the moments.*{solver}.*refit with"):
                pca.merge(PCA(2, svd_solver=solver, random_state=0).fit(X))
        torch = pytest.importorskip("torch", reason="torch is not installed")
        with pytest.raises(ValueError, match=r"PCA\.merge\(\) must use the same namespace"):
            pca.merge(PCA(2).fit(torch.asarray(X)))


class TestStream:
    def test_results_are_computed_when_asked_for(self, X):
        pca = PCA(3).partial_fit(X[:100])
        assert "components_" not in vars(pca)
        first = pca.components_
        assert "components_" in vars(pca)
        pca.partial_fit(X[100:])
        assert "components_" not in vars(pca)
        assert np.abs(pca.components_ - first).max() > 0
        with pytest.raises(AttributeError, match="'PCA' object has no attribute 'nothing_'"):
            _ = pca.nothing_

    def test_parameters_are_checked_at_once(self, X):
        with pytest.raises(ValueError, match=r"n_components=1\.5 must lie strictly between 0 and 1"):
            PCA(1.5).partial_fit(X)
        with pytest.raises(ValueError, match="svd_solver='arpack' must be one of"):
            PCA(2, svd_solver="arpack").partial_fit(X)

    @pytest.mark.parametrize("solver", SOLVERS)
    def test_a_stream_goes_through_the_covariance_whatever_the_solver(self, X, solver):
        assert_same_fit(PCA(2, svd_solver=solver).partial_fit(X), PCA(2).fit(X))

    def test_a_fit_that_kept_no_moments_is_not_continued_silently(self):
        X = decaying_rows(20, 1200)
        with pytest.warns(RuntimeWarning, match="partial_fit needs the moments of the rows.*starts anew"):
            pca = PCA(2).fit(X).partial_fit(X[:10])
        assert pca.n_samples_ == 10

    def test_rows_of_weight_zero_leave_a_stream_alone(self, X):
        pca = PCA(2).partial_fit(X, sample_weight=np.zeros(len(X)))
        assert not hasattr(pca, "components_")
        assert_same_fit(pca.partial_fit(X), PCA(2).fit(X))

    def test_a_failed_fit_leaves_no_results(self, X):
        pca = PCA(2).fit(X)
        with pytest.raises(ValueError, match="NaN"):
            pca.fit(np.full((5, 3), np.nan))
        assert not hasattr(pca, "components_")


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"svd_solver": "arpack"}, ValueError, "svd_solver='arpack' must be one of 'auto', 'covariance'"),
        ({"svd_solver": "randomized"}, TypeError, "n_components=None must be an integer.*needs a number"),
        ({"svd_solver": "randomized", "n_components": 0.5}, TypeError, "n_components=0.5 must be an integer"),
        ({"svd_solver": "randomized", "n_components": 41}, ValueError, "n_components=41 must be at most"),
        ({"svd_solver": "full", "n_components": 41}, ValueError, "n_components=41 must be at most"),
        ({"svd_solver": "randomized", "n_components": 2, "n_oversamples": -1}, ValueError, "n_oversamples=-1 must be"),
        ({"svd_solver": "randomized", "n_components": 2, "iterated_power": "x"}, TypeError, "iterated_power='x'"),
    ],
)
def test_bad_parameters_are_named(X, parameters, error, message):
    with pytest.raises(error, match=message):
        PCA(**parameters).fit(X)


class TestScale:
    @pytest.mark.parametrize("solver", SOLVERS)
    @pytest.mark.parametrize("scale", [2.0**-500, 2.0**495])
    def test_fits_scale_with_the_rows(self, X, as_array, solver, scale):
        settings = {"svd_solver": solver, "random_state": 0}
        plain, scaled = PCA(3, **settings).fit(as_array(X)), PCA(3, **settings).fit(as_array(X * scale))
        for name, power in (("components_", 0), ("explained_variance_ratio_", 0), ("mean_", 1),
                            ("singular_values_", 1), ("tail_energies_", 1), ("explained_variance_", 2)):  # fmt: skip
            got, expected = (_xp.to_numpy(getattr(pca, name)) for pca in (scaled, plain))
            atol = 1e-6 * np.abs(expected).max() if name == "tail_energies_" else 1e-13
            np.testing.assert_allclose(got / scale**power, expected, rtol=1e-10, atol=atol, err_msg=name)

    @pytest.mark.parametrize("solver", SOLVERS)
    @pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-160, 1e160, 1e200, 1e300])
    @pytest.mark.filterwarnings("error::RuntimeWarning")
    def test_variances_that_are_no_numbers_are_an_error(self, X, as_array, solver, scale):
        what = "overflow" if scale > 1 else "underflow"
        pca = PCA(3, svd_solver=solver, random_state=0)
        with pytest.raises(ValueError, match=rf"X spreads over about .*, whose squares {what}: rescale X first"):
            pca.fit(as_array(X * scale))
        assert not hasattr(pca, "components_")

    @pytest.mark.parametrize("solver", SOLVERS)
    @pytest.mark.parametrize("value", [0.0, 1e-200, 1e200, 1.7e308])
    def test_equal_rows_are_no_error_at_any_scale(self, as_array, solver, value):
        pca = PCA(2, svd_solver=solver, random_state=0).fit(as_array(np.full((5, 3), value)))
        np.testing.assert_allclose(_xp.to_numpy(pca.explained_variance_) / max(value, 1e-300), 0, atol=1e-15)

    def test_a_stream_names_the_scale_when_it_is_asked_for_results(self, X):
        pca = PCA(2).partial_fit(X * 1e-200)
        with pytest.raises(ValueError, match="squares underflow: rescale X"):
            pca.transform(X)
        with pytest.raises(ValueError, match="squares overflow: rescale X"):
            PCA(2).partial_fit(X * 1e200)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", ["float16", "uint8", "int32", "bool"])
def test_rows_of_other_dtypes_give_the_fit_of_their_values(as_array, solver, dtype):
    rows = (np.random.default_rng(0).uniform(0, 250, (300, 8)) * 0.7 ** np.arange(8)).astype(dtype)
    given = rows if dtype == "float16" else as_array(rows)
    pca = PCA(2, svd_solver=solver, iterated_power=20, random_state=0).fit(given)
    expected = PCA(2, svd_solver="full").fit(rows.astype(np.float64))
    precise = dtype != "float16"
    result = np.float64 if precise else np.float32
    assert _xp.to_numpy(pca.components_).dtype == _xp.to_numpy(pca.transform(given)).dtype == result
    np.testing.assert_allclose(
        _xp.to_numpy(pca.explained_variance_), expected.explained_variance_, rtol=1e-9 if precise else 1e-5
    )
    np.testing.assert_allclose(
        _xp.to_numpy(pca.transform(given)), expected.transform(rows.astype(np.float64)), atol=1e-7 if precise else 1e-2
    )


@pytest.mark.parametrize("solver", ["covariance", "randomized"])
@pytest.mark.parametrize("dtype", ["float16", "uint8", "int16"])
def test_a_memory_map_of_another_dtype_is_converted_block_by_block(tmp_path, solver, dtype):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 200, (60_000, 100)).astype(dtype))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    pca = PCA(3, svd_solver=solver, random_state=0)
    tracemalloc.start()
    pca.fit(mapped)
    if solver == "covariance":
        pca.partial_fit(mapped)
    pca.transform(mapped)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A copy in the dtype of the results would need 24 MB (float16) or 48 MB.
    assert peak < 10e6
