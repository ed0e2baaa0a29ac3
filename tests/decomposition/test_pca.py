import pickle

import numpy as np
import pytest
from sklearn.decomposition import PCA as SklearnPCA
from sklearn.exceptions import NotFittedError

from isogeom import Moments, _xp
from isogeom.decomposition import PCA


@pytest.fixture
def X():
    rng = np.random.default_rng(0)
    return rng.standard_normal((150, 3)) @ rng.standard_normal((3, 7)) + 0.1 * rng.standard_normal((150, 7)) + 5


def test_agrees_with_scikit_learn(X):
    ours, theirs = PCA(4).fit(X), SklearnPCA(4, svd_solver="full").fit(X)
    names = ["components_", "explained_variance_", "explained_variance_ratio_", "singular_values_", "mean_"]
    for name in names:
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-8, atol=1e-10, err_msg=name)
    assert ours.noise_variance_ == pytest.approx(theirs.noise_variance_, rel=1e-8)
    np.testing.assert_allclose(ours.transform(X), theirs.transform(X), atol=1e-10)
    np.testing.assert_allclose(ours.fit_transform(X), theirs.fit_transform(X), atol=1e-10)


def test_whitened_codes_have_unit_variance_and_agree_with_scikit_learn(X):
    ours, theirs = PCA(3, whiten=True).fit(X), SklearnPCA(3, whiten=True, svd_solver="full").fit(X)
    Z = ours.transform(X)
    np.testing.assert_allclose(Z.std(axis=0, ddof=1), 1, rtol=1e-10)
    np.testing.assert_allclose(Z, theirs.transform(X), atol=1e-8)
    np.testing.assert_allclose(ours.inverse_transform(Z), theirs.inverse_transform(Z), atol=1e-8)


@pytest.mark.parametrize("whiten", [False, True])
def test_rows_are_codes_times_dictionary_plus_mean(X, whiten):
    pca = PCA(whiten=whiten).fit(X)
    np.testing.assert_allclose(pca.transform(X) @ pca.dictionary_ + pca.mean_, X, atol=1e-10)
    np.testing.assert_allclose(pca.inverse_transform(pca.transform(X)), X, atol=1e-10)


@pytest.mark.parametrize("mean", [0, 10, 100, 1000])
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("float64", 1e-12)])
def test_eigenvalues_are_right_whatever_the_mean(mean, dtype, rtol):
    rng = np.random.default_rng(0)
    X = (rng.standard_normal((20_000, 128)) * np.linspace(1, 0.2, 128)).astype(dtype)
    X[:, 0] += mean
    X[:, 1] += mean / 2
    reference = np.linalg.eigvalsh(np.cov(X.astype(np.float64).T))[::-1][:20]
    np.testing.assert_allclose(PCA(20).fit(X).explained_variance_, reference, rtol=rtol)
    streamed = PCA(20)
    for part in np.array_split(X, 7):
        streamed.partial_fit(part)
    np.testing.assert_allclose(streamed.explained_variance_, reference, rtol=rtol)


def test_partial_fit_in_any_batches_equals_one_fit(X):
    whole = PCA(3).fit(X)
    for sizes in ([1] * 5 + [145], [2, 148], [75, 75], [149, 1]):
        streamed = PCA(3)
        for block in np.split(X, np.cumsum(sizes)[:-1]):
            streamed.partial_fit(block)
        np.testing.assert_allclose(streamed.explained_variance_, whole.explained_variance_, rtol=1e-10)
        np.testing.assert_allclose(streamed.components_, whole.components_, atol=1e-9)
        assert streamed.n_samples_ == 150


def test_partial_fit_keeps_fewer_components_while_rows_are_few(X):
    pca = PCA(5).partial_fit(X[:1])
    with pytest.raises(NotFittedError):
        pca.transform(X)
    assert pca.partial_fit(X[1:3]).n_components_ == 3
    assert pca.partial_fit(X[3:]).n_components_ == 5


def test_partial_fit_does_not_change_moments_taken_before(X):
    pca = PCA(2).partial_fit(X[:50])
    before = pca.moments_
    pca.partial_fit(X[50:])
    assert before.count == 50
    assert pca.moments_.count == 150


def test_fit_forgets_what_partial_fit_saw(X):
    pca = PCA(2).partial_fit(X * 100).fit(X)
    np.testing.assert_allclose(pca.explained_variance_, PCA(2).fit(X).explained_variance_)


def test_fit_from_moments(X):
    pca = PCA(3).fit(Moments().update(X))
    np.testing.assert_allclose(pca.components_, PCA(3).fit(X).components_, atol=1e-10)
    assert pca.n_features_in_ == 7
    with pytest.raises(ValueError, match="count=1"):
        PCA().fit(Moments().update(X[:1]))


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95, 0.999999])
def test_share_of_variance_picks_the_smallest_number(X, share):
    values = np.linalg.eigvalsh(np.cov(X.T))[::-1]
    shares = np.cumsum(values) / values.sum()
    assert PCA(share).fit(X).n_components_ == int(np.argmax(shares >= share)) + 1


def test_fewer_rows_than_features():
    X = np.random.default_rng(0).standard_normal((40, 120))
    # 40 centred rows have rank 39: a direction without variance is kept only where it is asked for.
    pca = PCA().fit(X)
    assert pca.components_.shape == (39, 120)
    asked = PCA(40).fit(X)
    assert asked.components_.shape == (40, 120)
    assert 0 <= asked.explained_variance_[-1] < 1e-12
    np.testing.assert_allclose(pca.inverse_transform(pca.transform(X)), X, atol=1e-9)


def test_constant_rows_have_no_variance_and_no_nan():
    for whiten in (False, True):
        pca = PCA(0.5 if whiten else 2, whiten=whiten).fit(np.full((5, 3), 7.0))
        assert np.all(pca.explained_variance_ratio_ == 0)
        assert np.all(pca.transform(np.full((2, 3), 7.0)) == 0)


def test_signs_are_deterministic_under_a_flip_of_the_data(X):
    a, b = PCA(3).fit(X), PCA(3).fit(-X)
    np.testing.assert_allclose(a.components_, b.components_, atol=1e-9)
    largest = np.take_along_axis(a.components_, np.abs(a.components_).argmax(axis=1)[:, None], axis=1)
    assert np.all(largest > 0)


def test_every_library_gives_the_same_fit(X, as_array):
    expected = PCA(3, whiten=True).fit(X)
    Xa = as_array(X)
    pca = PCA(3, whiten=True).fit(Xa)
    assert type(pca.components_) is type(Xa)
    np.testing.assert_allclose(_xp.to_numpy(pca.components_), expected.components_, atol=1e-9)
    Z = pca.transform(Xa)
    np.testing.assert_allclose(_xp.to_numpy(Z), expected.transform(X), atol=1e-8)
    np.testing.assert_allclose(_xp.to_numpy(pca.inverse_transform(Z)), expected.inverse_transform(_xp.to_numpy(Z)))
    np.testing.assert_allclose(
        _xp.to_numpy(PCA(3).partial_fit(Xa[:50, :]).partial_fit(Xa[50:, :]).explained_variance_),
        expected.explained_variance_,
        rtol=1e-9,
    )


def test_dtypes_follow_the_rows(X):
    pca = PCA(2).fit(X.astype(np.float32))
    assert pca.components_.dtype == pca.mean_.dtype == np.float32
    assert pca.explained_variance_.dtype == pca.singular_values_.dtype == np.float64
    assert pca.transform(X).dtype == np.float64
    assert pca.transform(X.astype(np.float32)).dtype == np.float32
    assert PCA(2).fit((X * 100).astype(np.float16)).components_.dtype == np.float32
    pixels = np.random.default_rng(0).integers(0, 255, (50, 5), dtype=np.uint8)
    assert PCA(2).fit(pixels).components_.dtype == np.float64


@pytest.mark.parametrize("scale", [1e-25, 1e30])
def test_float32_rows_whose_variance_is_no_float32(X, scale, as_array):
    rows = ((X - 5) * scale).astype(np.float32)
    pca = PCA(2, whiten=True).fit(as_array(rows))
    expected = PCA(2, whiten=True).fit(X - 5)
    variances = _xp.to_numpy(pca.explained_variance_)
    np.testing.assert_allclose(variances / scale**2, expected.explained_variance_, rtol=1e-5)
    codes = _xp.to_numpy(pca.transform(as_array(rows)))
    np.testing.assert_allclose(codes.astype(np.float64).std(axis=0, ddof=1), 1, rtol=1e-4)


def test_layout_does_not_matter(X, tmp_path):
    expected = PCA(3).fit(X).explained_variance_
    path = tmp_path / "rows.npy"
    np.save(path, X)
    for rows in (np.asfortranarray(X), X[::-1], np.load(path, mmap_mode="r")):
        np.testing.assert_allclose(PCA(3).fit(rows).explained_variance_, expected, rtol=1e-10)


def test_data_frames_name_the_output(X):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame(X, columns=list("abcdefg"))
    pca = PCA(2).set_output(transform="pandas").fit(frame)
    assert list(pca.feature_names_in_) == list("abcdefg")
    assert list(pca.transform(frame).columns) == ["pca0", "pca1"]


def test_pickle_round_trip_and_continued_stream(X):
    pca = pickle.loads(pickle.dumps(PCA(3).partial_fit(X[:70])))
    np.testing.assert_allclose(pca.partial_fit(X[70:]).components_, PCA(3).fit(X).components_, atol=1e-9)


@pytest.mark.parametrize(
    ("n_components", "error", "message"),
    [
        (0, ValueError, "n_components=0 must be at least 1"),
        (8, ValueError, r"n_components=8 must be at most min\(n_samples, n_features\)=7"),
        (1.0, ValueError, "n_components=1.0 must lie strictly between 0 and 1"),
        ("mle", TypeError, "n_components='mle' must be an integer"),
    ],
)
def test_bad_parameters_are_named(X, n_components, error, message):
    with pytest.raises(error, match=message):
        PCA(n_components).fit(X)


def test_bad_input_is_named(X):
    pca = PCA(2).fit(X)
    with pytest.raises(ValueError, match="X has 5 columns, but this PCA has 2 components"):
        pca.inverse_transform(X[:, :5])
    with pytest.raises(ValueError, match="7 features"):
        PCA(2).partial_fit(X).partial_fit(X[:, :3])
    with pytest.raises(ValueError, match="NaN"):
        PCA().fit(np.where(X == X[0, 0], np.nan, X))
    with pytest.raises(ValueError, match="minimum of 2 is required"):
        PCA().fit(X[:1])
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.asarray(X)
    with pytest.raises(ValueError, match="must use the same namespace"):
        PCA(2).partial_fit(X).partial_fit(tensor)
    with pytest.raises(ValueError, match="X contains NaN or infinity"):
        PCA().fit(tensor / 0)
    with pytest.raises(ValueError, match="Expected 2D array X"):
        PCA().fit(tensor[0])
    with pytest.raises(ValueError, match="Found array X with 1 sample"):
        PCA().fit(tensor[:1])
    with pytest.raises(ValueError, match="Complex data not supported"):
        PCA().fit(tensor.to(torch.complex64))


def test_a_stream_keeps_the_wider_dtype(X):
    pca = PCA(2).partial_fit(X).partial_fit(X[:5].astype(np.float32))
    assert pca.components_.dtype == pca.mean_.dtype == np.float64
    assert PCA(2).partial_fit(X.astype(np.float32)).partial_fit(X[:5]).components_.dtype == np.float64


def test_whitening_does_not_depend_on_the_dtype_of_the_rows():
    rows = np.random.default_rng(0).standard_normal((500, 3)) * [1, 1e-9, 1e-10]
    pca = PCA(3, whiten=True).fit(rows)
    for dtype in (np.float64, np.float32):
        np.testing.assert_allclose(pca.transform(rows.astype(dtype)).std(axis=0, ddof=1), 1, rtol=1e-3)


class TestChangedParameters:
    @pytest.mark.parametrize(
        ("n_components", "error", "message"),
        [
            (0, ValueError, "n_components=0 must be at least 1"),
            (-3, ValueError, "n_components=-3 must be at least 1"),
            (1.5, ValueError, "n_components=1.5 must lie strictly between 0 and 1"),
            ("mle", TypeError, "n_components='mle' must be an integer"),
        ],
    )
    def test_n_components_is_checked_when_a_stream_is_decomposed(self, X, n_components, error, message):
        pca = PCA(2).partial_fit(X).set_params(n_components=n_components)
        with pytest.raises(error, match=message):
            pca.transform(X)
        # Displays ask for attributes too.
        assert "PCA" in pca._repr_html_()
        assert not hasattr(pca, "components_")
        for name in ("components_", "dictionary_"):
            with pytest.raises(AttributeError, match=f"{name} cannot be computed: {message}"):
                getattr(pca, name)
        np.testing.assert_allclose(pca.set_params(n_components=3).transform(X), PCA(3).fit_transform(X), atol=1e-9)

    def test_whiten_is_checked_at_every_use(self, X):
        pca = PCA(2).partial_fit(X).set_params(whiten="yes")
        message = "whiten='yes' must be one of False, True"
        for use in (pca.transform, lambda X: pca.inverse_transform(X[:, :2]), pca.partial_fit, pca.fit):
            with pytest.raises(ValueError, match=message):
                use(X)
        settled = PCA(2).fit(X).set_params(whiten="yes")
        with pytest.raises(AttributeError, match=f"dictionary_ cannot be computed: {message}"):
            settled.dictionary_  # noqa: B018
        assert "PCA" in settled._repr_html_()


def test_warnings_name_the_line_of_the_call():
    pca = PCA(2, svd_solver="full").fit(np.eye(4))
    with pytest.warns(RuntimeWarning, match="starts anew") as record:
        pca.partial_fit(np.eye(4))
    assert record[0].filename == __file__
