import math
import pickle

import numpy as np
import pytest
from scipy.linalg import subspace_angles
from sklearn.decomposition import NMF, FastICA, TruncatedSVD
from sklearn.decomposition import PCA as SklearnPCA
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, TimeSeriesSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from isogeom import Moments, _xp
from isogeom.decomposition import ICA, PCA, SemiNMF
from isogeom.tangent import TangentProxy, share_scorer, zscore_scorer


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    scales = np.array([6.0, 5.0, 4.0, 3.0] + [0.3] * 8)
    rotation, _ = np.linalg.qr(rng.standard_normal((12, 12)))
    X = (rng.standard_normal((400, 12)) * scales) @ rotation + 2.0
    G = (rng.standard_normal((300, 12)) * scales) @ rotation
    return X, G, rotation


def angle(A, B):
    return float(np.max(subspace_angles(np.asarray(A).T, np.asarray(B).T)))


def test_pca_proxy_is_the_leading_eigenspace(data):
    X, _, _ = data
    proxy = TangentProxy(n_directions=3).fit(X)
    values, vectors = np.linalg.eigh(np.cov(X.T))
    assert angle(proxy.basis_, vectors[:, ::-1][:, :3].T) < 1e-7
    assert proxy.variance_share_ == pytest.approx(values[::-1][:3].sum() / values.sum(), rel=1e-10)
    np.testing.assert_allclose(proxy.basis_ @ proxy.basis_.T, np.eye(3), atol=1e-12)


@pytest.mark.parametrize("decomposition", [PCA(4), ICA(4, random_state=0), FastICA(4, random_state=0), SklearnPCA(4)])
def test_centred_decompositions_find_the_planted_space(data, decomposition):
    X, _, rotation = data
    proxy = TangentProxy(decomposition, n_directions=4).fit(X)
    assert angle(proxy.basis_, rotation[:4]) < 0.05


def test_semi_nmf_and_uncentred_svd_span_their_atoms(data):
    X, _, _ = data
    for decomposition in (SemiNMF(4, random_state=0), TruncatedSVD(4, random_state=0)):
        proxy = TangentProxy(decomposition, n_directions=4).fit(X)
        assert angle(proxy.basis_, proxy.decomposition_.components_) < 1e-6


def test_more_atoms_than_directions_keeps_the_strongest_span(data):
    X, _, _ = data
    proxy = TangentProxy(SemiNMF(8, random_state=0), n_directions=3).fit(X)
    codes, atoms = proxy.decomposition_.transform(X), proxy.decomposition_.components_
    weighted = np.sqrt((codes**2).mean(axis=0))[:, None] * atoms
    expected = np.linalg.svd(weighted)[2][:3]
    assert angle(proxy.basis_, expected) < 1e-6


def test_ica_uses_mixing_columns_not_unmixing_rows(data):
    X, _, _ = data
    ica = FastICA(4, random_state=0).fit(X)
    proxy = TangentProxy(FrozenEstimator(ica), n_directions=4).fit(X)
    assert angle(proxy.basis_, ica.mixing_.T) < 1e-6


def test_a_frozen_decomposition_is_not_refitted(data):
    X, _, _ = data
    pca = PCA(3).fit(X[:50])
    proxy = TangentProxy(FrozenEstimator(pca), n_directions=3).fit(X)
    assert angle(proxy.basis_, pca.components_) < 1e-7


@pytest.mark.parametrize("cls", [PCA, SklearnPCA])
def test_whitening_does_not_change_the_proxy(data, cls):
    X, _, _ = data
    plain = TangentProxy(cls(6), n_directions=2).fit(X)
    whitened = TangentProxy(cls(6, whiten=True), n_directions=2).fit(X)
    assert angle(plain.basis_, whitened.basis_) < 1e-6


@pytest.mark.parametrize(("d", "expected"), [(2, 1), (3, 1), (12, 6), (40, 16)])
def test_default_rank_is_half_the_dimension_up_to_sixteen(d, expected):
    X = np.random.default_rng(0).standard_normal((100, d))
    assert TangentProxy().fit(X).n_directions_ == expected


def test_default_rank_never_exceeds_the_dictionary(data):
    assert TangentProxy(PCA(2)).fit(data[0]).n_directions_ == 2


def test_share_of_variance_picks_the_smallest_rank(data):
    X, _, _ = data
    proxy = TangentProxy(n_directions=0.9).fit(X)
    values = np.linalg.eigvalsh(np.cov(X.T))[::-1]
    shares = np.cumsum(values) / values.sum()
    assert proxy.n_directions_ == int(np.argmax(shares >= 0.9)) + 1
    assert proxy.variance_share_ >= 0.9


def test_transform_gives_uncentred_coordinates_and_inverse_projects(data):
    X, G, _ = data
    proxy = TangentProxy(n_directions=3).fit(X)
    np.testing.assert_allclose(proxy.transform(G), G @ proxy.basis_.T, rtol=1e-12)
    projected = proxy.inverse_transform(proxy.transform(G))
    np.testing.assert_allclose(projected, G @ proxy.basis_.T @ proxy.basis_, rtol=1e-10, atol=1e-12)
    assert list(proxy.get_feature_names_out()) == ["tangentproxy0", "tangentproxy1", "tangentproxy2"]


def test_share_and_score_by_definition(data):
    X, G, _ = data
    proxy = TangentProxy(n_directions=3).fit(X)
    share = np.sum((G @ proxy.basis_.T) ** 2) / np.sum(G**2)
    assert proxy.share(G) == pytest.approx(share, rel=1e-12)
    assert proxy.share(Moments().update(G)) == pytest.approx(share, rel=1e-12)
    expected = math.log(share * 9 / ((1 - share) * 3))
    assert proxy.score(X, G) == pytest.approx(expected, rel=1e-10)
    assert isinstance(proxy.score(X, G), float)


def test_score_without_gradients_looks_at_the_centred_rows(data):
    X, _, _ = data
    proxy = TangentProxy(n_directions=3).fit(X)
    centred = X[:70] - X.mean(axis=0)
    share = np.sum((centred @ proxy.basis_.T) ** 2) / np.sum(centred**2)
    expected = math.log(share * 9 / ((1 - share) * 3))
    assert proxy.score(X[:70]) == pytest.approx(expected, rel=1e-10)
    assert proxy.score(X[:70], np.zeros(70)) == pytest.approx(expected, rel=1e-10)
    assert proxy.score(X[:70], ["a"] * 70) == pytest.approx(expected, rel=1e-10)
    assert share_scorer(proxy, X[:70]) == pytest.approx(share, rel=1e-10)


def test_score_is_zero_at_chance():
    d, r = 8, 2
    proxy = TangentProxy(n_directions=r).fit(np.random.default_rng(0).standard_normal((50, d)))
    assert proxy.score(np.eye(d), np.eye(d)) == pytest.approx(0.0, abs=1e-12)


def test_score_moves_with_the_rank_by_itself():
    """Same axes for activations and gradients: the score falls on a spiked spectrum and rises on a slow one."""
    spiked, slow = np.diag([8.0, 4.0] + [1.0] * 10), np.diag(np.linspace(3, 0.3, 12))
    scores = {}
    for name, rows in (("spiked", spiked), ("slow", slow)):
        X = np.vstack([rows, -rows])
        scores[name] = [TangentProxy(n_directions=r).fit(X).score(X, X) for r in (2, 4, 6)]
    assert scores["spiked"] == sorted(scores["spiked"], reverse=True)
    assert scores["slow"] == sorted(scores["slow"])


def test_score_stays_finite_when_everything_or_nothing_is_captured(data):
    X, _, _ = data
    proxy = TangentProxy(n_directions=3).fit(X)
    inside = proxy.basis_.copy()
    outside = proxy.normal_control("next")
    assert 30 < proxy.score(X, inside) < 45
    assert -45 < proxy.score(X, outside) < -30


def test_zscore_scorer_matches_random_subspaces(data):
    X, G, _ = data
    proxy = TangentProxy(n_directions=3).fit(X)
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(3000):
        q, _ = np.linalg.qr(rng.standard_normal((12, 3)))
        shares.append(np.sum((G @ q) ** 2) / np.sum(G**2))
    expected = (proxy.share(G) - np.mean(shares)) / np.std(shares)
    assert zscore_scorer(proxy, X, G) == pytest.approx(expected, rel=0.05)
    assert zscore_scorer(proxy, X, np.eye(12)) == 0.0


@pytest.mark.parametrize("control", ["next", "complement", "lowest"])
def test_controls_are_orthonormal_and_normal(data, control):
    X, _, _ = data
    proxy = TangentProxy(n_directions=4).fit(X)
    Q_N = proxy.normal_control(control)
    np.testing.assert_allclose(Q_N @ Q_N.T, np.eye(4), atol=1e-10)
    np.testing.assert_allclose(Q_N @ proxy.basis_.T, 0, atol=1e-10)


def test_next_and_lowest_controls_are_principal_directions_of_the_normal_space(data):
    X, _, _ = data
    proxy = TangentProxy(n_directions=3).fit(X)
    vectors = np.linalg.eigh(np.cov(X.T))[1][:, ::-1].T
    assert angle(proxy.normal_control("next"), vectors[3:6]) < 1e-6
    assert angle(proxy.normal_control("lowest"), vectors[-3:]) < 1e-6


def test_next_control_of_an_oblique_proxy_maximises_variance_inside_the_normal_space(data):
    X, _, _ = data
    proxy = TangentProxy(SemiNMF(3, random_state=0), n_directions=3).fit(X)
    P = np.eye(12) - proxy.basis_.T @ proxy.basis_
    values, vectors = np.linalg.eigh(P @ np.cov(X.T) @ P)
    assert angle(proxy.normal_control("next"), vectors[:, ::-1][:, :3].T) < 1e-6
    assert values[-1] > 0


def test_matched_control_needs_half_the_dimension(data):
    proxy = TangentProxy(n_directions=7).fit(data[0])
    with pytest.raises(ValueError, match=r"n_directions=7 is more than half of n_features=12.*<= 6"):
        proxy.normal_control()


def test_fit_from_moments_equals_fit_from_rows(data):
    X, G, _ = data
    rows = TangentProxy(n_directions=3).fit(X)
    streamed = TangentProxy(n_directions=3).fit(Moments().update(X[:123]).merge(Moments().update(X[123:])))
    assert angle(rows.basis_, streamed.basis_) < 1e-7
    assert streamed.n_features_in_ == 12
    assert streamed.share(G) == pytest.approx(rows.share(G), rel=1e-10)


def test_names_of_an_earlier_frame_are_forgotten_by_moments(data):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    X, G, _ = data
    proxy = TangentProxy(n_directions=3).fit(pandas.DataFrame(X, columns=list("abcdefghijkl")))
    proxy.fit(Moments().update(X[:, :8]))
    assert not hasattr(proxy, "feature_names_in_")
    assert proxy.transform(pandas.DataFrame(G[:, :8], columns=list("stuvwxyz"))).shape == (300, 3)


def test_controls_of_tiny_activations_are_those_of_large_ones(data):
    X, _, _ = data
    plain, tiny = TangentProxy(n_directions=3).fit(X), TangentProxy(n_directions=3).fit(X * 1e-12)
    for control in ("next", "lowest"):
        assert angle(plain.normal_control(control), tiny.normal_control(control)) < 1e-6


def test_an_ica_proxy_has_the_axes_of_pca():
    """Uncorrelated sources of unit variance: the atoms' second moment is the covariance on their span."""
    X = np.random.default_rng(0).laplace(size=(600, 5)) @ np.random.default_rng(1).standard_normal((5, 12))
    ica = TangentProxy(ICA(5, random_state=0), n_directions=2).fit(X)
    assert angle(ica.basis_, TangentProxy(n_directions=2).fit(X).basis_) < 1e-5


def test_fit_never_uses_y(data):
    X, G, _ = data
    np.testing.assert_array_equal(TangentProxy().fit(X).basis_, TangentProxy().fit(X, G[: len(X)]).basis_)


def test_every_library_gives_the_same_proxy(data, as_array, library):
    X, G, _ = data
    expected = TangentProxy(n_directions=3).fit(X)
    Xa, Ga = as_array(X), as_array(G)
    proxy = TangentProxy(n_directions=3).fit(Xa)
    assert type(proxy.basis_) is type(Xa)
    assert proxy.transform(Ga).shape == (300, 3)
    np.testing.assert_allclose(_xp.to_numpy(proxy.basis_), expected.basis_, atol=1e-8)
    np.testing.assert_allclose(
        _xp.to_numpy(proxy.normal_control("lowest")), expected.normal_control("lowest"), atol=1e-6
    )
    assert proxy.score(Xa, Ga) == pytest.approx(expected.score(X, G), rel=1e-8)


@pytest.mark.parametrize("decomposition", [PCA(4), ICA(4, random_state=0), SemiNMF(4, random_state=0)])
def test_torch_tensors_with_every_decomposition(data, decomposition):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    X, G, _ = data
    expected = TangentProxy(decomposition, n_directions=4).fit(X)
    proxy = TangentProxy(decomposition, n_directions=4).fit(torch.asarray(X))
    assert isinstance(proxy.basis_, torch.Tensor)
    assert proxy.share(torch.asarray(G)) == pytest.approx(expected.share(G), rel=1e-6)


def test_half_precision_and_graph_tensors(data):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    X = torch.asarray(data[0]).to(torch.bfloat16).requires_grad_()
    proxy = TangentProxy(n_directions=3).fit(X)
    assert proxy.basis_.dtype == torch.float32
    assert proxy.transform(X).shape == (400, 3)
    expected = TangentProxy(n_directions=3).fit(data[0]).share(data[1])
    assert proxy.share(torch.asarray(data[1], dtype=torch.float16)) == pytest.approx(expected, rel=1e-2)


def test_libraries_do_not_mix(data):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    X, G, _ = data
    proxy = TangentProxy(n_directions=3).fit(torch.asarray(X))
    with pytest.raises(ValueError, match="must use the same namespace"):
        proxy.transform(X)
    for gradients in (G, Moments().update(G)):
        with pytest.raises(ValueError, match="G is on numpy, the fitted proxy on torch on device cpu"):
            proxy.share(gradients)
    with pytest.raises(ValueError, match="y is on numpy, the fitted proxy on torch"):
        proxy.score(torch.asarray(X), G)
    with pytest.raises(ValueError, match=r"The dictionary of TruncatedSVD is on numpy, X .* on torch"):
        TangentProxy(TruncatedSVD(3)).fit(torch.asarray(X))


def test_float32_with_a_large_mean(data):
    X, G, _ = data
    shifted = (X + 1000).astype(np.float32)
    proxy = TangentProxy(n_directions=3).fit(shifted)
    assert proxy.basis_.dtype == np.float32
    assert proxy.share(G.astype(np.float32)) == pytest.approx(TangentProxy(n_directions=3).fit(X).share(G), rel=1e-4)


def test_grid_search_over_rank_and_decomposition(data):
    X, _, _ = data
    G = X[::-1].copy()
    grid = {"n_directions": [2, 3, 4], "decomposition": [PCA(), SemiNMF(n_components=4, random_state=0)]}
    search = GridSearchCV(TangentProxy(PCA()), grid, cv=TimeSeriesSplit(3)).fit(X, G)
    assert set(search.best_params_) == set(grid)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    by_share = GridSearchCV(TangentProxy(), {"n_directions": [2, 4]}, cv=TimeSeriesSplit(3), scoring=share_scorer)
    assert by_share.fit(X, G).best_params_ == {"n_directions": 4}
    by_z = GridSearchCV(TangentProxy(), {"n_directions": [1, 4]}, cv=TimeSeriesSplit(3), scoring=zscore_scorer)
    assert by_z.fit(X, G).best_score_ > 0


def test_time_series_split_fits_early_and_scores_late(data):
    X, G, _ = data
    G = np.vstack([G, G[:100]])
    (train, test), *_ = TimeSeriesSplit(3).split(X)
    expected = TangentProxy(n_directions=3).fit(X[train]).score(X[test], G[test])
    search = GridSearchCV(TangentProxy(), {"n_directions": [3]}, cv=TimeSeriesSplit(3), refit=False).fit(X, G)
    assert search.cv_results_["split0_test_score"][0] == pytest.approx(expected, rel=1e-12)


def test_works_as_a_pipeline_step(data):
    X, _, _ = data
    pipeline = make_pipeline(StandardScaler(), TangentProxy(n_directions=2)).fit(X)
    assert pipeline.transform(X).shape == (400, 2)
    frame = make_pipeline(TangentProxy(n_directions=2)).set_output(transform="pandas").fit_transform(X)
    assert list(frame.columns) == ["tangentproxy0", "tangentproxy1"]


def test_pickle_round_trip(data):
    X, G, _ = data
    proxy = TangentProxy(n_directions=3).fit(X)
    assert pickle.loads(pickle.dumps(proxy)).score(X, G) == proxy.score(X, G)


@pytest.mark.parametrize(
    ("n_directions", "error", "message"),
    [
        (0, ValueError, "n_directions=0 must be at least 1"),
        (12, ValueError, "n_directions=12 leaves no normal space"),
        (5, ValueError, "n_directions=5 exceeds the rank 4"),
        (1.5, ValueError, "n_directions=1.5 must lie strictly between 0 and 1"),
        (0.9999999, ValueError, "n_directions=0.9999999 is out of reach"),
        ("8", TypeError, "n_directions='8' must be an integer"),
        (True, TypeError, "n_directions=True must be an integer"),
    ],
)
def test_bad_rank_is_named(data, n_directions, error, message):
    with pytest.raises(error, match=message):
        TangentProxy(PCA(4), n_directions=n_directions).fit(data[0])


def test_bad_input_is_named(data):
    X, G, _ = data
    with pytest.raises(ValueError, match="no variance"):
        TangentProxy().fit(np.full((10, 4), 3.0))
    with pytest.raises(ValueError, match="dictionary of the decomposition is zero"):
        TangentProxy(FrozenEstimator(_ZeroAtoms())).fit(X)
    with pytest.raises(ValueError, match="1 feature"):
        TangentProxy().fit(X[:, :1])
    with pytest.raises(ValueError, match="1 sample"):
        TangentProxy().fit(X[:1])
    with pytest.raises(TypeError, match="FunctionTransformer has none of dictionary_, mixing_ and components_"):
        TangentProxy(FunctionTransformer()).fit(X)
    for wrong in ("pca", 3, PCA, LogisticRegression()):
        with pytest.raises(TypeError, match=r"decomposition=.* must be an estimator instance with fit and transform"):
            TangentProxy(wrong).fit(X)
    with pytest.raises(TypeError, match="SemiNMF needs rows, got Moments"):
        TangentProxy(SemiNMF(2)).fit(Moments().update(X))
    with pytest.raises(ValueError, match="at least 2 rows"):
        TangentProxy().fit(Moments().update(X[:1]))
    with pytest.raises(NotFittedError):
        TangentProxy().share(G)


def test_bad_gradients_are_named(data):
    X, G, _ = data
    proxy = TangentProxy(n_directions=3).fit(X)
    with pytest.raises(ValueError, match="y has shape"):
        proxy.score(X, G[:, :5])
    with pytest.raises(ValueError, match="y has shape"):
        proxy.score(X, np.zeros((400, 1)))
    with pytest.raises(ValueError, match=r"y has shape \(10, 40, 12\)"):
        proxy.score(X, X.reshape(10, 40, 12))
    with pytest.raises(ValueError, match=r"y has shape \(\)"):
        proxy.score(X, 3.0)
    with pytest.raises(ValueError, match="Input y contains NaN"):
        proxy.score(X, np.full((2, 12), np.nan))
    assert proxy.score(X, G.tolist()) == proxy.score(X, G)
    with pytest.raises(ValueError, match="moments of no rows"):
        proxy.share(Moments())
    with pytest.raises(ValueError, match="Every row is zero"):
        proxy.share(np.zeros((3, 12)))
    with pytest.raises(ValueError, match="G has 5 features"):
        proxy.share(G[:, :5])
    with pytest.raises(ValueError, match="moments of 5 features"):
        proxy.share(Moments().update(G[:, :5]))
    with pytest.raises(ValueError, match="G contains NaN"):
        proxy.share(np.full((2, 12), np.nan))
    with pytest.raises(ValueError, match="control='top' must be one of 'next', 'complement', 'lowest'"):
        proxy.normal_control("top")


def test_nonnegative_decompositions_keep_their_tag():
    X = np.abs(np.random.default_rng(0).standard_normal((60, 6)))
    proxy = TangentProxy(NMF(2, init="nndsvda", max_iter=1000), n_directions=2)
    assert proxy.__sklearn_tags__().input_tags.positive_only
    assert proxy.fit(X).basis_.shape == (2, 6)


class _ZeroAtoms(FunctionTransformer):
    """A fitted decomposition whose atoms are all zero."""

    components_ = np.zeros((2, 12))

    def transform(self, X):
        return X[:, :2]
