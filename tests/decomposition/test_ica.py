import pickle
import warnings

import numpy as np
import pytest
from oracles.ica import CONTRASTS, amari_distance, laplace_mixture
from oracles.semi_nmf import matched_cosines
from sklearn.decomposition import FastICA

from isogeom import _xp
from isogeom.decomposition import ICA


@pytest.fixture(scope="module")
def mixture():
    """2000 rows in 8 features from 4 Laplace sources, with a mean."""
    X, atoms = laplace_mixture(2000, 8, 4, seed=0)
    return X + np.arange(8.0), atoms


def absolute_cosines(dictionary, atoms):
    return matched_cosines(np.vstack([dictionary, -dictionary]), atoms)


# ---------------------------------------------------------------- recovery


@pytest.mark.parametrize("fun", CONTRASTS)
def test_laplace_sources_are_unmixed(mixture, fun):
    X, atoms = mixture
    model = ICA(n_components=4, fun=fun, random_state=1).fit(X)
    assert amari_distance(model.components_, atoms.T) < (0.05 if fun == "cube" else 0.03)


@pytest.mark.parametrize("seed", range(3))
def test_many_sources_in_many_rows(seed):
    X, atoms = laplace_mixture(20_000, 20, 20, seed)
    model = ICA(random_state=100 + seed).fit(X)
    assert model.converged_
    assert amari_distance(model.components_, atoms.T) < 0.01


@pytest.mark.parametrize("seed", range(3))
def test_dictionary_holds_the_planted_mixing_columns_and_components_do_not(seed):
    X, atoms = laplace_mixture(20_000, 12, 5, seed, noise=0.01)
    # Correlated atoms: there the unmixing rows point elsewhere, the trap in scikit-learn's `components_`.
    skew = np.eye(5) + 0.8
    X, atoms = X @ np.linalg.pinv(atoms) @ skew @ atoms, skew @ atoms
    model = ICA(n_components=5, random_state=100 + seed).fit(X)
    assert absolute_cosines(model.dictionary_, atoms).min() > 0.99
    assert absolute_cosines(model.components_, atoms).min() < 0.9
    theirs = FastICA(5, whiten="unit-variance", random_state=0).fit(X)
    assert absolute_cosines(theirs.components_, atoms).min() < 0.9


def test_agrees_with_scikit_learn(mixture):
    X, _ = mixture
    ours = ICA(n_components=4, tol=1e-10, random_state=0).fit(X)
    theirs = FastICA(4, whiten="unit-variance", tol=1e-12, max_iter=1000, random_state=0).fit(X)
    assert absolute_cosines(ours.components_, theirs.components_).min() > 1 - 1e-8


def test_sub_and_super_gaussian_sources_together():
    rng = np.random.default_rng(0)
    S = np.hstack([rng.laplace(size=(20_000, 2)), rng.uniform(-1, 1, (20_000, 2))])
    atoms = rng.standard_normal((4, 6))
    model = ICA(n_components=4, random_state=1).fit(S @ atoms)
    assert absolute_cosines(model.dictionary_, atoms).min() > 0.99
    assert model.converged_
    heavy = np.mean(model.transform(S @ atoms) ** 4, axis=0) > 3
    assert model.contrast_signs_.tolist() == np.where(heavy, 1, -1).tolist()


# ---------------------------------------------------------------- the attributes


@pytest.mark.parametrize("n_components", [2, 4])
def test_attributes_fit_together(mixture, n_components):
    X, _ = mixture
    model = ICA(n_components=n_components, random_state=0).fit(X)
    S = model.transform(X)
    np.testing.assert_allclose(S.mean(axis=0), 0, atol=1e-10)
    np.testing.assert_allclose(S.T @ S / len(S), np.eye(n_components), atol=1e-10)
    np.testing.assert_allclose(model.components_ @ model.mixing_, np.eye(n_components), atol=1e-10)
    np.testing.assert_allclose(model.mixing_, np.linalg.pinv(model.components_), atol=1e-10)
    np.testing.assert_allclose(model.dictionary_, model.mixing_.T)
    np.testing.assert_allclose(S, (X - X.mean(axis=0)) @ model.components_.T, atol=1e-10)
    energy = np.linalg.norm(model.mixing_, axis=0)
    assert np.all(np.diff(energy) <= 0)
    assert np.all(model.mixing_[np.abs(model.mixing_).argmax(axis=0), range(n_components)] > 0)
    whitened = (X - X.mean(axis=0)) @ model.whitening_.T
    np.testing.assert_allclose(whitened.T @ whitened / len(X), np.eye(n_components), atol=1e-10)


def test_round_trip(mixture):
    X, _ = mixture
    model = ICA(random_state=0)
    with pytest.warns(UserWarning, match="numerical rank 4"):
        S = model.fit_transform(X)
    np.testing.assert_allclose(model.inverse_transform(S), X, atol=1e-10)
    with pytest.raises(ValueError, match="4 components"):
        model.inverse_transform(S[:, :2])


def test_same_seed_same_fit_and_other_seed_same_sources(mixture):
    X, _ = mixture
    one, same = (ICA(n_components=4, random_state=3).fit(X) for _ in range(2))
    assert np.array_equal(one.components_, same.components_)
    other = ICA(n_components=4, random_state=4).fit(X)
    np.testing.assert_allclose(other.components_, one.components_, atol=1e-4)


@pytest.mark.parametrize("factor", [1e-9, 1e6])
def test_units_do_not_matter(mixture, factor):
    X, _ = mixture
    plain, scaled = (ICA(n_components=4, random_state=0).fit(Y) for Y in (X, X * factor))
    np.testing.assert_allclose(scaled.mixing_, plain.mixing_ * factor, rtol=1e-6, atol=1e-8 * factor)


# ---------------------------------------------------------------- libraries, dtypes, layouts


@pytest.mark.parametrize("fun", CONTRASTS)
def test_every_library_gives_the_same_fit(as_array, library, mixture, fun):
    data, _ = mixture
    expected = ICA(n_components=4, fun=fun, random_state=0).fit(data)
    X = as_array(data)
    model = ICA(n_components=4, fun=fun, random_state=0)
    S = model.fit_transform(X)
    assert model.n_iter_ == expected.n_iter_
    fitted = (model.components_, model.mixing_, model.mean_, model.whitening_)
    reports = (model.contrast_signs_, model.non_gaussianity_)
    for value in (S, *fitted, *reports, model.inverse_transform(S)):
        assert type(value) is type(X)
        assert _xp.device(value) == _xp.device(X)
    np.testing.assert_allclose(_xp.to_numpy(model.mixing_), expected.mixing_, atol=1e-9)
    np.testing.assert_allclose(_xp.to_numpy(S), expected.transform(data), atol=1e-9)


def test_strict_second_device():
    strict = pytest.importorskip("array_api_strict")
    device = strict.Device("device1")
    X = strict.asarray(laplace_mixture(300, 5, 5, seed=0)[0], device=device)
    model = ICA(n_components=3, random_state=0)
    assert model.fit_transform(X).device == device
    assert model.mixing_.device == device


@pytest.mark.parametrize("library_", ["numpy", "torch"])
def test_float32_rows_with_a_mean_of_1000(library_):
    data, atoms = laplace_mixture(5000, 12, 6, seed=1)
    X = (data + 1000).astype(np.float32)
    if library_ == "torch":
        X = pytest.importorskip("torch").asarray(X)
    model = ICA(n_components=6, random_state=0).fit(X)
    S = _xp.to_numpy(model.transform(X))
    assert S.dtype == np.float32
    assert np.all(np.isfinite(S))
    np.testing.assert_allclose(S.std(axis=0), 1, atol=1e-3)
    assert amari_distance(_xp.to_numpy(model.components_), atoms.T) < 0.02


def test_float32_in_tiny_units():
    data, atoms = laplace_mixture(5000, 8, 8, seed=2)
    model = ICA(random_state=0).fit((data * 1e-6).astype(np.float32))
    assert amari_distance(model.components_, atoms.T) < 0.02


@pytest.mark.parametrize("layout", ["fortran", "strided", "readonly"])
def test_memory_layouts(mixture, layout):
    X = mixture[0].copy()
    if layout == "fortran":
        X = np.asfortranarray(X)
    if layout == "strided":
        X = np.asfortranarray(X)[::-2, ::2]
    if layout == "readonly":
        X.setflags(write=False)
    before = np.array(X)
    model, plain = (ICA(n_components=3, random_state=0).fit(Y) for Y in (X, before.copy()))
    np.testing.assert_allclose(model.components_, plain.components_, atol=1e-8)
    assert np.array_equal(X, before)


def test_pickle(mixture):
    X, _ = mixture
    model = ICA(n_components=2, random_state=0).fit(X)
    assert np.array_equal(pickle.loads(pickle.dumps(model)).transform(X), model.transform(X))


# ---------------------------------------------------------------- rank, nasty inputs, errors

BASE = laplace_mixture(400, 24, 8, seed=3)[0]


def _with(X, change):
    X = X.copy()
    change(X)
    return X


NASTY = {
    "exact duplicates": (np.vstack([BASE, BASE[:50]]), 8),
    "constant columns": (_with(BASE, lambda X: X.__setitem__((slice(None), [5, 9]), [0.0, 3.0])), 8),
    "zero rows": (_with(BASE, lambda X: X.__setitem__(slice(None, None, 10), 0.0)), 8),
    "rogue dimensions": (_with(BASE, lambda X: X.__setitem__((slice(None), 3), X[:, 3] * 20 + 300)), 8),
    "attention sinks": (_with(BASE, lambda X: X.__setitem__(slice(None, None, 100), X[::100] * 1000)), 8),
    "fewer rows than features": (np.random.default_rng(0).laplace(size=(10, 24)), 9),
    "two rows": (BASE[:2], 1),
    "one feature": (BASE[:, :1], 1),
    "rank one": (np.outer(np.random.default_rng(1).laplace(size=50), np.arange(1.0, 6)), 1),
    "lattice": (np.random.default_rng(2).integers(0, 3, (200, 6)).astype(float), 6),
    "tiny": (BASE * 1e-150, 8),
    "huge": (BASE * 1e150, 8),
}


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("fun", CONTRASTS)
def test_nasty_inputs(name, fun):
    X, rank = NASTY[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)
        model = ICA(fun=fun, random_state=0, max_iter=50)
        S = model.fit_transform(X)
    assert model.n_components_ == rank
    assert np.all(np.isfinite(S))
    assert np.all(np.isfinite(model.mixing_))
    np.testing.assert_allclose(S.var(axis=0), 1, rtol=1e-6)
    np.testing.assert_allclose(model.inverse_transform(S), X, atol=1e-7 * np.abs(X).max())


def test_float32_rank_is_judged_by_what_float32_can_store():
    for offset in (0, 1000):
        X = (BASE + offset).astype(np.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert ICA(random_state=0).fit(X).n_components_ == 8
        assert any("numerical rank 8" in str(warning.message) for warning in caught)


def test_more_components_than_the_rank():
    with pytest.raises(ValueError, match=r"n_components=9 .*numerical rank .*, 8 \(n_samples=400, n_features=24\)"):
        ICA(n_components=9).fit(BASE)


@pytest.mark.parametrize("shape", [(2, 1), (10, 4)])
def test_equal_rows(shape):
    with pytest.raises(ValueError, match="ICA needs rows that differ"):
        ICA().fit(np.full(shape, 3.1))


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"n_components": 0}, "n_components=0 must be at least 1"),
        ({"fun": "tanh"}, "fun='tanh' must be one of 'logcosh', 'exp', 'cube'"),
        ({"max_iter": 0}, "max_iter=0"),
        ({"tol": -1.0}, "tol=-1.0"),
        ({"n_init": 0}, "n_init=0 must be at least 1"),
        ({"random_state": -1}, "random_state=-1"),
    ],
)
def test_errors_name_the_parameter(params, match):
    with pytest.raises(ValueError, match=match):
        ICA(**params).fit(BASE)


def test_output_names(mixture):
    model = ICA(n_components=2, random_state=0).fit(mixture[0])
    assert list(model.get_feature_names_out()) == ["ica0", "ica1"]


def test_one_row_is_refused():
    with pytest.raises(ValueError, match="minimum of 2"):
        ICA().fit(BASE[:1])
