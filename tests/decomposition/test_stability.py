import itertools

import numpy as np
import pytest
from oracles.semi_nmf import planted
from sklearn.decomposition import NMF, IncrementalPCA

from isogeom.decomposition import ICA, PCA, SemiNMF, dictionary_stability, match_dictionaries

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* did not converge:sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:n_gaussian_=:UserWarning"),
]


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("signed", [True, False])
def test_matching_is_the_best_permutation(seed, signed):
    rng = np.random.default_rng(seed)
    A, B = rng.standard_normal((5, 3)), rng.standard_normal((5, 3))
    cosines = unit(A) @ unit(B).T
    gain = cosines if signed else np.abs(cosines)
    best = max(itertools.permutations(range(5)), key=lambda p: gain[range(5), p].sum())
    found = match_dictionaries(A, B, signed=signed)
    np.testing.assert_array_equal(found.indices, best)
    np.testing.assert_allclose(found.cosines, gain[range(5), best], rtol=1e-12)
    assert found.mean_cosine == pytest.approx(found.cosines.mean())
    assert found.min_cosine == found.cosines.min()


def test_matching_recovers_permutation_scale_and_sign(as_array):
    rng = np.random.default_rng(0)
    A, order = rng.standard_normal((6, 9)), rng.permutation(6)
    B = A[order] * rng.uniform(0.1, 9, (6, 1))
    found = match_dictionaries(as_array(A), as_array(B))
    np.testing.assert_array_equal(order[found.indices], np.arange(6))
    np.testing.assert_allclose(found.cosines, 1.0)
    assert match_dictionaries(as_array(A), as_array(-B)).mean_cosine < 0.9
    np.testing.assert_allclose(match_dictionaries(as_array(A), as_array(-B), signed=False).cosines, 1.0)


def test_matching_of_unequal_numbers_of_atoms():
    A = np.eye(4)
    found = match_dictionaries(A, A[[2, 0]])
    np.testing.assert_array_equal(found.indices, [1, -1, 0, -1])
    np.testing.assert_array_equal(found.cosines, [1, 0, 1, 0])
    assert (found.n_matched, found.mean_cosine) == (2, 1.0)
    np.testing.assert_array_equal(match_dictionaries(A[[2, 0]], A).indices, [2, 0])


def test_matching_is_safe_with_zero_and_extreme_atoms():
    A = np.array([[0.0, 0.0], [1e-200, 0.0], [0.0, 1e200]])
    found = match_dictionaries(A, np.eye(2))
    np.testing.assert_array_equal(found.indices, [-1, 0, 1])
    np.testing.assert_allclose(found.cosines, [0, 1, 1])
    with pytest.raises(ValueError, match="A has 2 features but B has 3"):
        match_dictionaries(A, np.eye(3))


def test_planted_atoms_are_stable_and_those_of_noise_are_not():
    X, D = planted(1000, 30, 6, 0.2, 0)
    sparse = dictionary_stability(SemiNMF(6, alpha=0.05), X, n_fits=4, rng=0)
    assert sparse.min_stability > 0.99
    assert match_dictionaries(D, sparse.estimator.dictionary_).min_cosine > 0.99
    noise = np.random.default_rng(0).standard_normal((100, 30))
    found = dictionary_stability(SemiNMF(6, alpha=0.05, init="random", max_iter=30), noise, n_fits=4, rng=0)
    assert found.mean_stability < 0.9


def test_stability_numbers_are_those_of_the_pairs():
    X = np.random.default_rng(0).standard_normal((60, 8))
    model = ICA(4, max_iter=20)
    found = dictionary_stability(model, X, n_fits=3, rng=1)
    assert not hasattr(model, "components_")
    np.testing.assert_array_equal(found.pairwise, found.pairwise.T)
    np.testing.assert_array_equal(np.diag(found.pairwise), 1.0)
    assert found.reference == np.argmax(found.pairwise.sum(axis=1))
    np.testing.assert_allclose(found.cosines.mean(axis=1), found.pairwise[found.reference], rtol=1e-12)
    others = [i for i in range(3) if i != found.reference]
    np.testing.assert_allclose(found.stability, found.cosines[others].mean(axis=0))
    assert found.mean_stability == pytest.approx(found.stability.mean())
    again = dictionary_stability(model, X, n_fits=3, rng=1)
    np.testing.assert_array_equal(again.pairwise, found.pairwise)
    seeds = {found.estimator.random_state, dictionary_stability(model, X, n_fits=3, rng=2).estimator.random_state}
    assert len(seeds) == 2


def test_resampling_shows_which_principal_axes_the_data_fix():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((500, 4)) * np.array([9.0, 4.0, 1.0, 1.0])
    found = dictionary_stability(PCA(4), X, n_fits=6, resample=True, signed=False, rng=0)
    assert found.stability[:2].min() > 0.99
    assert found.stability[2:].max() < 0.99
    with pytest.raises(ValueError, match=r"IncrementalPCA has no random_state.*resample=True"):
        dictionary_stability(IncrementalPCA(2), X)


def test_other_libraries_and_scikit_learn_models(as_array):
    X = as_array(np.random.default_rng(0).laplace(size=(3000, 3)))
    assert dictionary_stability(ICA(3), X, n_fits=2, rng=0).min_stability > 0.999
    found = dictionary_stability(NMF(2, max_iter=500), np.random.default_rng(0).random((50, 4)), n_fits=2, rng=0)
    assert 0 < found.mean_stability <= 1


def test_stability_table_and_errors():
    pytest.importorskip("pandas")
    X = np.random.default_rng(0).laplace(size=(500, 3))
    found = dictionary_stability(ICA(2), X, n_fits=3, rng=0)
    frame = found.to_frame()
    assert list(frame.columns) == ["stability", "lowest", "highest"]
    assert (frame["lowest"] <= frame["stability"]).all()
    assert set(found.to_dict()) >= {"n_fits", "mean_stability", "reference"}
    with pytest.raises(ValueError, match=r"n_fits=1 must be at least 2\. One fit"):
        dictionary_stability(ICA(2), X, n_fits=1)
