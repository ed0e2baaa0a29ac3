import dataclasses
import re

import numpy as np
import pytest
from oracles.semi_nmf import planted
from sklearn.decomposition import NMF, FastICA
from sklearn.exceptions import NotFittedError

from isogeom import _xp
from isogeom.decomposition import ICA, PCA, SemiNMF, code_statistics, concept_importance, refine
from isogeom.decomposition._interpret import dictionary_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* did not converge:sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:n_gaussian_=:UserWarning"),
]


@pytest.fixture
def parts():
    rng = np.random.default_rng(0)
    return np.abs(rng.standard_normal((40, 5))), rng.standard_normal((40, 8)), rng.standard_normal((5, 8))


# ---------------------------------------------------------------- importance


def test_importances_of_a_linear_head_sum_to_its_output(parts):
    codes, gradients, atoms = parts
    head = gradients[0]
    importance = concept_importance(codes, np.tile(head, (40, 1)), atoms)
    np.testing.assert_allclose(importance.sum(axis=1), codes @ atoms @ head, rtol=1e-12)


@pytest.mark.parametrize("model", [PCA(3), PCA(3, whiten=True), ICA(3, random_state=0), SemiNMF(3, random_state=0)])
def test_importances_of_a_linear_head_on_fitted_models(model):
    X = np.random.default_rng(1).laplace(size=(200, 6)) + 2.0
    head = np.arange(1.0, 7.0)
    codes = model.fit(X).transform(X)
    importance = concept_importance(codes, np.tile(head, (200, 1)), model.dictionary_)
    base = model.inverse_transform(np.zeros((1, 3))) @ head
    np.testing.assert_allclose(importance.sum(axis=1) + base, model.inverse_transform(codes) @ head, rtol=1e-9)


def test_importance_is_code_times_finite_difference(parts):
    codes, _, atoms = parts
    head = np.linspace(-0.3, 0.3, 8)

    def f(z):
        return np.tanh(z @ atoms @ head)

    gradients = (1 - f(codes) ** 2)[:, None] * head
    step, numeric = 1e-6, np.empty_like(codes)
    for j in range(5):
        shift = step * np.eye(5)[j]
        numeric[:, j] = codes[:, j] * (f(codes + shift) - f(codes - shift)) / (2 * step)
    np.testing.assert_allclose(concept_importance(codes, gradients, atoms), numeric, atol=1e-8)


def test_importance_equals_autograd():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.manual_seed(0)
    codes, atoms = torch.rand(20, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    net = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.GELU(), torch.nn.Linear(7, 1)).double()
    leaf = codes.clone().requires_grad_()
    net(leaf @ atoms).sum().backward()
    rows = (codes @ atoms).requires_grad_()
    net(rows).sum().backward()
    torch.testing.assert_close(concept_importance(codes, rows.grad, atoms), codes * leaf.grad)


def test_aggregates_and_shares(parts):
    codes, gradients, atoms = parts
    full = codes * (gradients @ atoms.T)
    for aggregate, expected in (("mean", full.mean(0)), ("absolute", np.abs(full).mean(0))):
        np.testing.assert_allclose(concept_importance(codes, gradients, atoms, aggregate=aggregate), expected)
        shares = concept_importance(codes, gradients, atoms, aggregate=aggregate, normalize=True)
        np.testing.assert_allclose(shares, expected / np.abs(expected).sum())
    codes[3] = 0
    shares = concept_importance(codes, gradients, atoms, normalize=True)
    np.testing.assert_allclose(np.abs(shares).sum(axis=1), np.where(np.arange(40) == 3, 0.0, 1.0))


def test_importance_in_every_library(as_array, parts):
    codes, gradients, atoms = parts
    expected = concept_importance(codes, gradients, atoms, aggregate="mean", normalize=True)
    got = concept_importance(*map(as_array, parts), aggregate="mean", normalize=True)
    assert type(got) is type(as_array(codes)) or isinstance(got, np.ndarray)
    np.testing.assert_allclose(_xp.to_numpy(got), expected, rtol=1e-12)


def test_importance_keeps_the_dtype_of_the_codes(parts):
    codes, gradients, atoms = parts
    assert concept_importance(codes.astype("f4"), gradients, atoms).dtype == np.float32


def test_importance_names_what_does_not_fit(parts):
    codes, gradients, atoms = parts
    with pytest.raises(ValueError, match=r"gradients has shape \(39, 8\), expected \(40, 8\)"):
        concept_importance(codes, gradients[1:], atoms)
    with pytest.raises(ValueError, match="codes has 5 columns but dictionary has 4 rows"):
        concept_importance(codes, gradients, atoms[1:])
    with pytest.raises(ValueError, match="aggregate='sum' must be one of"):
        concept_importance(codes, gradients, atoms, aggregate="sum")
    with pytest.raises(TypeError, match="dictionary is a fitted PCA: pass its dictionary_"):
        concept_importance(codes, gradients, PCA(2).fit(gradients))


# ---------------------------------------------------------------- refinement


def test_refine_splits_a_concept_in_an_earlier_layer(as_array):
    # Early: 4 planted directions. Late: the first two are merged into one, the others too.
    rng = np.random.default_rng(0)
    kind = rng.integers(4, size=400)
    early = np.eye(4)[kind] * rng.uniform(1, 2, (400, 1))
    late = early @ np.array([[1.0, 0], [1.0, 0], [0, 1.0], [0, 1.0]])
    model = SemiNMF(2, alpha=0.01, random_state=0).fit(as_array(late))
    first = int(np.argmax(_xp.to_numpy(model.components_)[:, 0]))
    found = refine(model, as_array(late), first, X_earlier=as_array(early), threshold=0, n_components=2)
    np.testing.assert_array_equal(found.rows, np.flatnonzero(kind < 2))
    atoms = _xp.to_numpy(found.estimator.components_)
    np.testing.assert_allclose(np.sort(atoms @ np.eye(4)[:, :2], axis=0), [[0, 0], [1, 1]], atol=1e-6)
    assert found.n_rows == found.rows.size
    assert found.share == found.n_rows / 400


def test_refine_takes_the_strongest_rows_and_leaves_the_model_alone():
    X, _ = planted(300, 10, 4, 0.3, 0)
    model = SemiNMF(4, alpha=0.05, random_state=0).fit(X)
    before = model.components_.copy()
    codes = model.transform(X)[:, -1]
    found = refine(model, X, -1, threshold=0.75)
    expected = np.flatnonzero(codes >= np.sort(codes[codes > 0])[-found.n_rows])
    np.testing.assert_array_equal(found.rows, expected)
    assert found.n_rows == pytest.approx(0.25 * np.sum(codes > 0), abs=1)
    assert found.cut == codes[found.rows].min()
    assert found.component == 3
    np.testing.assert_array_equal(model.components_, before)
    np.testing.assert_array_equal(
        found.estimator.components_, SemiNMF(**model.get_params()).fit(X[expected]).components_
    )


@pytest.mark.parametrize("model", [PCA(2), ICA(2, random_state=0), FastICA(2, random_state=0)])
def test_refine_either_pole_of_any_decomposition(model):
    X = np.random.default_rng(0).laplace(size=(300, 5)) * np.array([5.0, 4, 1, 1, 1])
    codes = model.fit(X).transform(X)[:, 0]
    up, down = (refine(model, X, 0, threshold=0, side=side) for side in ("positive", "negative"))
    np.testing.assert_array_equal(up.rows, np.flatnonzero(codes > 0))
    np.testing.assert_array_equal(down.rows, np.flatnonzero(codes < 0))
    assert up.estimator is not model
    assert up.estimator.transform(X).shape == (300, 2)


def test_refine_of_a_model_that_returns_tables():
    pytest.importorskip("pandas")
    X, _ = planted(100, 6, 2, 0.5, 0)
    plain, tables = SemiNMF(2, random_state=0).fit(X), SemiNMF(2, random_state=0).set_output(transform="pandas").fit(X)
    np.testing.assert_array_equal(refine(tables, X, 1).rows, refine(plain, X, 1).rows)


def test_refine_result_is_frozen_and_prints_without_arrays():
    X, _ = planted(100, 6, 2, 0.5, 0)
    found = refine(SemiNMF(2, random_state=0).fit(X), X, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.component = 3
    assert "rows  " not in repr(found)
    assert found.to_dict()["component"] == 0


def test_refine_names_what_is_wrong():
    X, _ = planted(100, 6, 2, 0.5, 0)
    model = SemiNMF(2, random_state=0).fit(X)
    with pytest.raises(ValueError, match="X_earlier has 99 rows but X has 100"):
        refine(model, X, 0, X_earlier=X[1:])
    with pytest.raises(ValueError, match=r"threshold=1 must be below 1|threshold=1.0 must be below 1"):
        refine(model, X, 0, threshold=1)
    with pytest.raises(ValueError, match=r"component=0 is active in 0 of 100 rows .* lower threshold"):
        refine(model, X, 0, side="negative")
    with pytest.raises(ValueError, match="component=2 must be at least -2 and at most 1"):
        refine(model, X, 2)


def test_atoms_of_scikit_learn_models():
    X = np.random.default_rng(0).exponential(size=(100, 5))
    nmf = NMF(3, max_iter=1000, random_state=0).fit(X)
    np.testing.assert_allclose(dictionary_of(nmf), nmf.components_)
    ica = FastICA(3, random_state=0).fit(X)
    np.testing.assert_allclose(dictionary_of(ica), ica.mixing_.T, atol=1e-12)
    with pytest.raises(TypeError, match="object has neither dictionary_ nor components_"):
        dictionary_of(object())


# ---------------------------------------------------------------- statistics of the codes


def test_statistics_by_hand():
    codes = np.array([[3.0, 4.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    atoms = np.array([[1.0, 0.0], [0.0, 2.0], [0.0, 1.0], [-1.0, 0.0]])
    found = code_statistics(codes, atoms)
    np.testing.assert_allclose(found.density, [0.75, 0.5, 0.25, 0.0])
    assert found.mean_l0 == 1.5
    assert found.mean_density == 0.375
    rows = [(2 - 7 / 5), (2 - 1), (2 - 3 / np.sqrt(3))]
    assert found.hoyer == pytest.approx(np.mean(rows))
    np.testing.assert_allclose(found.energy_share, np.array([14, 4 * 17, 1, 0]) / 83)
    np.testing.assert_array_equal(found.dead, [False, False, False, True])
    # Opposite atoms are coherent, but no duplicates where codes are nonnegative.
    np.testing.assert_allclose(found.coherence, 1.0)
    np.testing.assert_array_equal(found.nearest, [3, 2, 1, 0])
    np.testing.assert_array_equal(found.duplicates, [[1, 2]])
    np.testing.assert_array_equal(code_statistics(-codes, atoms).duplicates, [[0, 3], [1, 2]])
    assert (found.n_dead, found.n_duplicates, found.max_coherence) == (1, 1, 1.0)


def test_unique_energy_is_the_rise_of_the_error_without_the_component():
    X, _ = planted(200, 10, 4, 0.4, 0)
    codes = SemiNMF(4, alpha=0.05, random_state=0).fit_transform(X)
    atoms = np.linalg.lstsq(codes, X, rcond=None)[0]
    full = np.sum((X - codes @ atoms) ** 2)
    rises = []
    for j in range(4):
        rest = np.delete(codes, j, axis=1)
        rises.append(np.sum((X - rest @ np.linalg.lstsq(rest, X, rcond=None)[0]) ** 2) - full)
    np.testing.assert_allclose(code_statistics(codes, atoms).unique_energy, rises, rtol=1e-8)


def test_a_dependent_component_has_no_unique_energy():
    codes = np.random.default_rng(0).exponential(size=(50, 3))
    codes = np.column_stack([codes, codes[:, 0] + codes[:, 1]])
    found = code_statistics(codes, np.eye(4))
    np.testing.assert_allclose(found.unique_energy[[0, 1, 3]], 0.0, atol=1e-8)
    assert found.unique_energy[2] > 1


def test_statistics_in_every_library(as_array, parts):
    codes, _, atoms = parts
    codes[codes < 0.5] = 0
    expected, found = code_statistics(codes, atoms), code_statistics(as_array(codes), as_array(atoms))
    for field in dataclasses.fields(expected):
        np.testing.assert_allclose(getattr(found, field.name), getattr(expected, field.name), rtol=1e-9)


def test_statistics_over_several_blocks():
    rng = np.random.default_rng(0)
    codes = rng.exponential(size=(2 * _xp.BLOCK_ROWS + 7, 3)) * (rng.random((2 * _xp.BLOCK_ROWS + 7, 3)) < 0.4)
    found = code_statistics(codes, np.eye(3), zero=0.1)
    np.testing.assert_allclose(found.density, (codes > 0.1).mean(axis=0))
    np.testing.assert_allclose(found.unique_energy, 1 / np.diag(np.linalg.inv(codes.T @ codes)), rtol=1e-9)


def test_statistics_of_one_component_and_of_no_codes():
    single = code_statistics(np.ones((3, 1)), np.ones((1, 2)))
    assert (single.hoyer, single.max_coherence, single.nearest[0]) == (None, 0.0, -1)
    nothing = code_statistics(np.zeros((3, 2)), np.zeros((2, 2)), duplicate=0)
    assert (nothing.hoyer, nothing.n_dead, nothing.n_duplicates) == (None, 2, 0)
    np.testing.assert_array_equal(nothing.energy_share, 0.0)
    np.testing.assert_array_equal(nothing.unique_energy, 0.0)


def test_statistics_table(parts):
    pytest.importorskip("pandas")
    codes, _, atoms = parts
    found = code_statistics(codes, atoms)
    frame = found.to_frame()
    assert frame.shape == (5, 6)
    np.testing.assert_array_equal(frame["density"], found.density)
    with pytest.raises(ValueError, match=r"duplicate=1\.5 must be at least 0 and at most 1"):
        code_statistics(codes, atoms, duplicate=1.5)


# ---------------------------------------------------------------- refinement as a method


def test_the_method_refines_as_the_function_does():
    X, _ = planted(200, 8, 3, 0.4, 0)
    early = np.random.default_rng(1).standard_normal((200, 5))
    model = SemiNMF(3, random_state=0).fit(X)
    for options in ({}, {"threshold": 0.2, "n_components": 2}, {"X_earlier": early, "n_components": 2}):
        mine, theirs = model.refine(X, -1, **options), refine(model, X, -1, **options)
        np.testing.assert_array_equal(mine.rows, theirs.rows)
        assert mine.to_dict().keys() == theirs.to_dict().keys()
        assert (mine.component, mine.cut, mine.share) == (theirs.component, theirs.cut, theirs.share)
        np.testing.assert_array_equal(mine.estimator.components_, theirs.estimator.components_)
    with pytest.raises(NotFittedError):
        SemiNMF(3).refine(X, 0)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_refinement_keeps_names_and_containers(library):
    frames = pytest.importorskip(library, reason=f"{library} is not installed")
    X, _ = planted(200, 4, 3, 0.4, 0)
    frame = frames.DataFrame({name: X[:, i] for i, name in enumerate("abcd")})
    model = SemiNMF(3, random_state=0).set_output(transform=library).fit(frame)
    found = model.refine(frame, 0, n_components=2)
    assert list(found.estimator.feature_names_in_) == list("abcd")
    table = found.estimator.transform(frame)
    assert isinstance(table, frames.DataFrame)
    assert list(table.columns) == ["seminmf0", "seminmf1"]
    plain = SemiNMF(3, random_state=0).fit(X).refine(X, 0, n_components=2)
    np.testing.assert_array_equal(found.rows, plain.rows)
    np.testing.assert_array_equal(found.estimator.components_, plain.estimator.components_)
    earlier = frames.DataFrame({"early": X[:, 0], "late": X[:, 1]})
    assert list(model.refine(frame, 0, X_earlier=earlier).estimator.feature_names_in_) == ["early", "late"]


# ---------------------------------------------------------------- statistics at any scale


@pytest.mark.parametrize(("codes_by", "atoms_by"), [(2.0**700, 2.0**-700), (2.0**-660, 2.0**660), (2.0**400, 1.0)])
def test_statistics_of_codes_and_atoms_of_any_size(as_array, parts, codes_by, atoms_by):
    codes, _, atoms = parts
    codes[codes < 0.5] = 0
    plain = code_statistics(codes, atoms)
    scaled = code_statistics(as_array(codes * codes_by), as_array(atoms * atoms_by))
    for field in dataclasses.fields(plain):
        unit = (codes_by * atoms_by) ** 2 if field.name == "unique_energy" else 1.0
        np.testing.assert_allclose(getattr(scaled, field.name), getattr(plain, field.name) * unit, rtol=1e-9)


def test_statistics_of_components_of_very_different_size(parts):
    codes, _, atoms = parts
    sizes = np.array([1e-200, 1.0, 1e200, 1e-100, 1e150])
    plain, mixed = code_statistics(codes, atoms), code_statistics(codes * sizes, atoms / sizes[:, None])
    for name in ("density", "energy_share", "unique_energy", "coherence", "nearest", "dead"):
        np.testing.assert_allclose(getattr(mixed, name), getattr(plain, name), rtol=1e-9, err_msg=name)
    # Rows of any size count alike.
    rows = codes * np.logspace(-250, 250, 40)[:, None]
    sizes = 1 / np.abs(rows).max(axis=0)
    assert code_statistics(rows, atoms * sizes[:, None]).hoyer == pytest.approx(plain.hoyer, rel=1e-9)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_energies_that_are_no_numbers_are_an_error(as_array, parts, scale):
    codes, _, atoms = parts
    with pytest.raises(
        ValueError, match=r"codes times dictionary reach about 1e[+-](199|20\d).*multiply codes by 2\.0"
    ) as e:
        code_statistics(as_array(codes * scale), as_array(atoms))
    factor = 2.0 ** float(re.search(r"2\.0\*\*(-?\d+)", str(e.value)).group(1))
    found = code_statistics(as_array(codes * scale * factor), as_array(atoms))
    np.testing.assert_allclose(found.energy_share, code_statistics(codes, atoms).energy_share, rtol=1e-9)
