import pickle
import warnings

import numpy as np
import pytest
from oracles.semi_nmf import (
    kkt_violation,
    matched_cosines,
    nnls_rows,
    objective,
    one_atom_squared_error,
    planted,
    rank_one_squared_error,
    svd_error,
)
from scipy.stats import ortho_group
from sklearn.base import clone
from sklearn.decomposition import DictionaryLearning
from sklearn.exceptions import ConvergenceWarning

from isogeom import _xp
from isogeom.decomposition import SemiNMF, _seminmf, _starts
from isogeom.decomposition._semi_starts import svd_start
from isogeom.decomposition._starts import kmeans_start, random_start, unit_rows

pytestmark = pytest.mark.filterwarnings("ignore:SemiNMF did not converge:sklearn.exceptions.ConvergenceWarning")


@pytest.fixture
def rows():
    return np.random.default_rng(3).standard_normal((120, 9)) + 0.7


# ---------------------------------------------------------------- known optima


@pytest.mark.parametrize("seed", range(5))
def test_rank_one_closed_form(seed):
    rng = np.random.default_rng(seed)
    u, v = rng.standard_normal(20), rng.standard_normal(6)
    X = np.outer(u, v)
    expected = rank_one_squared_error(u, v)
    np.testing.assert_allclose(
        SemiNMF(1, alpha=0, init="svd", tol=0).fit(X).reconstruction_err_ ** 2, expected, rtol=1e-10
    )
    random = [
        SemiNMF(1, alpha=0, init="random", tol=0, random_state=100 + s).fit(X).reconstruction_err_ for s in range(6)
    ]
    np.testing.assert_allclose(min(random) ** 2, expected, rtol=1e-10)
    # One k-means centre is the mean: it ends at the optimum of its own side, which need not be the better one.
    side = np.sum(v**2) * np.sum(np.minimum(u * np.sign(u.sum()), 0) ** 2)
    kmeans = SemiNMF(1, alpha=0, init="kmeans", tol=0, random_state=0).fit(X)
    np.testing.assert_allclose(kmeans.reconstruction_err_**2, side, rtol=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_one_atom_reaches_the_optimum_by_brute_force(seed):
    X = np.random.default_rng(seed).standard_normal((9, 5))
    expected = one_atom_squared_error(X)
    errors = [
        SemiNMF(1, alpha=0, init="random", tol=1e-14, max_iter=3000, random_state=100 + s).fit(X).reconstruction_err_
        ** 2
        for s in range(20)
    ]
    assert min(errors) >= expected * (1 - 1e-10)
    np.testing.assert_allclose(min(errors), expected, rtol=1e-8)


@pytest.mark.parametrize("k", [2, 5, 8])
def test_positive_rows_reach_the_svd_error(k):
    X = np.random.default_rng(1).random((200, 12)) + 0.1
    model = SemiNMF(k, alpha=0, init="kmeans", tol=1e-9, max_iter=3000, random_state=0).fit(X)
    bound = svd_error(X, k)
    assert bound * (1 - 1e-12) <= model.reconstruction_err_ <= bound * (1 + 1e-3)


@pytest.mark.parametrize("k", [2, 4, 7])
def test_centred_rows_end_between_the_svd_errors_of_k_and_k_minus_one(k):
    X = np.random.default_rng(2).standard_normal((150, 10)) * np.linspace(3, 1, 10)
    X -= X.mean(axis=0)
    model = SemiNMF(k, alpha=0, init="svd", random_state=0).fit(X)
    assert svd_error(X, k) < model.reconstruction_err_ <= svd_error(X, k - 1)


@pytest.mark.parametrize("shape", [(40, 7), (7, 40), (5, 5)])
@pytest.mark.parametrize("k", [1, 3, 5, 9])
def test_svd_start_has_the_svd_error_of_one_rank_less(shape, k):
    X = np.random.default_rng(4).standard_normal(shape)
    axes = np.linalg.svd(X, full_matrices=False)[2][:k]
    D, Z = svd_start(X @ axes.T, axes, k, random_start(X, k, np.random.default_rng(0)))
    assert Z.min() >= 0
    assert D.shape == (k, shape[1])
    np.testing.assert_allclose(np.linalg.norm(D, axis=1), 1)
    error = np.linalg.norm(X - Z @ D)
    if k == 1:
        assert error <= svd_error(X, 0)
    else:
        np.testing.assert_allclose(error, svd_error(X, k - 1), atol=1e-12 * np.linalg.norm(X))


@pytest.mark.parametrize("seed", range(5))
def test_kmeans_start_finds_every_tight_cluster(seed):
    rng = np.random.default_rng([9, seed])
    centres = rng.standard_normal((12, 6))
    X = np.repeat(centres, 30, axis=0) + 1e-6 * rng.standard_normal((360, 6))
    D = kmeans_start(X, 12, np.random.default_rng(seed))
    assert matched_cosines(D, centres).min() > 1 - 1e-9


def test_kmeans_start_samples_the_rows_of_a_large_matrix(monkeypatch):
    monkeypatch.setattr(_starts, "_KMEANS_ROWS", 50)
    monkeypatch.setattr(_starts, "_KMEANS_ROWS_PER_ATOM", 10)
    X = np.repeat(np.eye(4), 100, axis=0)
    assert matched_cosines(kmeans_start(X, 4, np.random.default_rng(0)), np.eye(4)).min() == 1


def test_one_more_atom_than_the_rank_fits_exactly():
    X = np.vstack([np.eye(4), -np.eye(4)])
    model = SemiNMF(5, alpha=0, init="svd").fit(X)
    assert model.reconstruction_err_ < 1e-7
    assert model.converged_


def test_objective_is_not_above_scikit_learns_dictionary_learning():
    X, _ = planted(150, 8, 4, 0.3, seed=0)
    model = SemiNMF(4, alpha=0.05, tol=1e-8, max_iter=2000, random_state=100).fit(X)
    learner = DictionaryLearning(
        4,
        alpha=model.penalty_,
        positive_code=True,
        fit_algorithm="cd",
        transform_algorithm="lasso_cd",
        random_state=0,
        max_iter=300,
    ).fit(X)
    theirs = objective(X, learner.transform(X), learner.components_, model.penalty_)
    ours = objective(X, model.transform(X), model.components_, model.penalty_)
    assert ours <= theirs * (1 + 1e-4)


# ---------------------------------------------------------------- the path


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("init", ["kmeans", "svd", "random"])
def test_objective_never_rises_and_is_what_it_says(rows, alpha, init):
    model = SemiNMF(6, alpha=alpha, init=init, tol=0, max_iter=60, random_state=0)
    Z = model.fit_transform(rows)
    path = model.objective_path_
    scale = np.sum(rows**2)
    assert path.shape == (model.n_iter_ + 1,)
    assert np.all(np.diff(path) <= 1e-12 * scale)
    final = objective(rows, Z, model.components_, model.penalty_)
    assert final <= path[-1] + 1e-12 * scale
    np.testing.assert_allclose(final, path[-1], rtol=1e-2)
    np.testing.assert_allclose(model.reconstruction_err_, np.linalg.norm(rows - Z @ model.components_), rtol=1e-12)


def test_iteration_count_on_a_fixed_case():
    X, _ = planted(500, 20, 8, 0.2, seed=0)
    assert SemiNMF(8, alpha=0.05, random_state=100).fit(X).n_iter_ <= 60


def test_running_out_of_iterations_warns_with_the_numbers(rows):
    with pytest.warns(ConvergenceWarning, match=r"in 2 iterations: the objective still fell by .* above tol=1e-12"):
        model = SemiNMF(4, max_iter=2, tol=1e-12, random_state=0).fit(rows)
    assert model.n_iter_ == 2
    assert model.converged_ is False


def test_codes_that_are_not_exact_are_reported(rows, monkeypatch):
    model = SemiNMF(3, random_state=0).fit(rows)
    monkeypatch.setattr(_seminmf, "encode", lambda rows, D, penalty, ridge, dtype: (rows, 1e-3))
    with pytest.warns(ConvergenceWarning, match="not exact .relative residual 0.001"):
        model.transform(rows)


# ---------------------------------------------------------------- atoms and codes


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_atoms_are_unit_and_sorted_and_codes_are_exact(rows, alpha):
    model = SemiNMF(5, alpha=alpha, sort_by="codes", random_state=0)
    Z = model.fit_transform(rows)
    D = model.components_
    np.testing.assert_allclose(np.linalg.norm(D, axis=1), 1, rtol=1e-12)
    assert np.all(np.diff(np.sum(Z**2, axis=0)) <= 0)
    assert model.dictionary_ is D
    np.testing.assert_allclose(model.penalty_, alpha * np.linalg.norm(rows, axis=1).mean())
    assert kkt_violation(D @ D.T, rows @ D.T, Z, model.penalty_) < 1e-10
    assert model.kkt_residual_ < 1e-11
    if alpha == 0:
        np.testing.assert_allclose(Z, nnls_rows(D, rows), atol=1e-8)


@pytest.mark.parametrize(
    "params", [{}, {"alpha": 0}, {"n_components": 15}, {"init": "svd"}, {"center": True}, {"ridge": 0.1}]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fit_transform_is_fit_then_transform(rows, params, dtype):
    X = rows.astype(dtype)
    model = SemiNMF(**{"n_components": 4, "random_state": 0, **params})
    Z = model.fit_transform(X)
    other = clone(model).fit(X)
    assert np.array_equal(Z, other.transform(X))
    assert np.array_equal(model.components_, other.components_)
    assert Z.dtype == X.dtype == model.components_.dtype


@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize("k", [6, 15])
def test_a_code_does_not_depend_on_its_batch(rows, alpha, k):
    model = SemiNMF(k, alpha=alpha, random_state=0).fit(rows)
    Z = model.transform(rows)
    assert np.array_equal(Z, model.transform(rows))
    single = np.vstack([model.transform(rows[i : i + 1]) for i in range(len(rows))])
    np.testing.assert_allclose(single, Z, atol=1e-11)
    np.testing.assert_allclose(model.transform(rows[::-1])[::-1], Z, atol=1e-11)


def test_many_row_blocks_change_nothing(rows, monkeypatch):
    expected = SemiNMF(4, init="svd", random_state=0).fit(rows)
    whole = expected.transform(rows)
    monkeypatch.setattr(_xp.row_blocks, "__defaults__", (13,))
    monkeypatch.setattr(_xp, "BLOCK_ROWS", 13)
    model = SemiNMF(4, init="svd", random_state=0)
    np.testing.assert_allclose(model.fit_transform(rows), whole, atol=1e-7)
    np.testing.assert_allclose(model.objective_path_, expected.objective_path_, rtol=1e-10)


def test_inverse_transform(rows):
    model = SemiNMF(4, random_state=0)
    Z = model.fit_transform(rows)
    np.testing.assert_allclose(model.inverse_transform(Z), Z @ model.components_)
    with pytest.raises(ValueError, match="4 components"):
        model.inverse_transform(Z[:, :3])


# ---------------------------------------------------------------- invariances


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_rotating_the_rows_rotates_the_atoms(rows, alpha):
    Q = ortho_group.rvs(9, random_state=0)
    start = unit_rows(np.random.default_rng(0).standard_normal((4, 9)))[0]
    options = {"alpha": alpha, "max_iter": 40, "tol": 0}
    plain = SemiNMF(init=start, **options).fit(rows)
    turned = SemiNMF(init=start @ Q, **options).fit(rows @ Q)
    np.testing.assert_allclose(turned.components_, plain.components_ @ Q, atol=1e-8)
    np.testing.assert_allclose(turned.transform(rows @ Q), plain.transform(rows), atol=1e-8)


@pytest.mark.parametrize("factor", [1e-12, 2.0, 1e9])
@pytest.mark.parametrize("init", ["kmeans", "svd"])
def test_scaling_the_rows_scales_the_codes(rows, factor, init):
    options = {"n_components": 4, "alpha": 0.1, "init": init, "random_state": 0, "max_iter": 50}
    plain, scaled = SemiNMF(**options).fit(rows), SemiNMF(**options).fit(rows * factor)
    np.testing.assert_allclose(scaled.components_, plain.components_, atol=1e-8)
    np.testing.assert_allclose(scaled.transform(rows * factor), plain.transform(rows) * factor, atol=1e-7 * factor)
    np.testing.assert_allclose(scaled.penalty_, plain.penalty_ * factor)


def test_alpha_means_the_same_on_repeated_rows(rows):
    start = rows[:4]
    once = SemiNMF(init=start, alpha=0.1, max_iter=50, tol=0).fit(rows)
    twice = SemiNMF(init=start, alpha=0.1, max_iter=50, tol=0).fit(np.vstack([rows, rows]))
    np.testing.assert_allclose(twice.components_, once.components_, atol=1e-8)


def test_permuting_the_rows_permutes_the_codes(rows):
    order = np.random.default_rng(0).permutation(len(rows))
    options = {"init": rows[:4], "max_iter": 50, "tol": 0}
    Z = SemiNMF(**options).fit_transform(rows)
    np.testing.assert_allclose(SemiNMF(**options).fit_transform(rows[order]), Z[order], atol=1e-8)


# ---------------------------------------------------------------- libraries, dtypes, layouts


@pytest.mark.parametrize(
    "params", [{}, {"alpha": 0.0}, {"init": "svd", "alpha": 0}, {"init": "random"}, {"center": True, "ridge": 0.1}]
)
def test_every_library_gives_the_same_fit(as_array, library, rows, params):
    options = {"n_components": 4, "max_iter": 25, "tol": 0, "random_state": 0, **params}
    expected = SemiNMF(**options).fit(rows)
    X = as_array(rows)
    model = SemiNMF(**options)
    Z = model.fit_transform(X)
    for value in (Z, model.components_, model.objective_path_, model.inverse_transform(Z)):
        assert type(value) is type(X)
        assert _xp.device(value) == _xp.device(X)
    np.testing.assert_allclose(_xp.to_numpy(model.components_), expected.components_, atol=1e-8)
    np.testing.assert_allclose(_xp.to_numpy(Z), expected.transform(rows), atol=1e-7)
    np.testing.assert_allclose(_xp.to_numpy(model.objective_path_), expected.objective_path_, rtol=1e-10)


def test_strict_second_device():
    strict = pytest.importorskip("array_api_strict")
    device = strict.Device("device1")
    X = strict.asarray(np.random.default_rng(0).standard_normal((40, 5)) + 1, device=device)
    for params in (
        {},
        {"alpha": 0},
        {"init": "svd", "alpha": 0},
        {"n_components": 8},
        {"center": True},
        {"ridge": 0.1},
    ):
        model = SemiNMF(**{"n_components": 3, "random_state": 0, "max_iter": 10, **params})
        assert model.fit_transform(X).device == device
        arrays = [value for value in vars(model).values() if hasattr(value, "__array_namespace__")]
        assert len(arrays) >= 6
        assert all(value.device == device for value in arrays)
    model = SemiNMF(3, random_state=0).fit_batches([X[:20, :], X[20:, :]]).partial_fit(X[:7, :])
    assert model.transform(X).device == device


def test_float32_is_as_good_as_float64():
    X, D = planted(1000, 30, 10, 0.2, seed=7)
    model = SemiNMF(10, alpha=0.05, random_state=100).fit(X.astype(np.float32) * np.float32(1e-3))
    assert model.components_.dtype == np.float32
    assert model.transform(X.astype(np.float32)).dtype == np.float32
    assert model.transform(X).dtype == np.float64
    assert matched_cosines(model.components_, D).min() > 0.99


@pytest.mark.parametrize("layout", ["fortran", "strided", "readonly", "memmap"])
def test_memory_layouts(rows, layout, tmp_path):
    X = rows.copy()
    if layout == "fortran":
        X = np.asfortranarray(rows)
    if layout == "strided":
        X = np.asfortranarray(rows)[::-2, ::3]
    if layout == "readonly":
        X.setflags(write=False)
    if layout == "memmap":
        np.save(tmp_path / "x.npy", rows)
        X = np.load(tmp_path / "x.npy", mmap_mode="r")
    before = np.array(X)
    options = {"n_components": 3, "alpha": 0.05, "random_state": 0}
    model, plain = SemiNMF(**options).fit(X), SemiNMF(**options).fit(before.copy())
    np.testing.assert_allclose(model.components_, plain.components_, atol=1e-8)
    assert np.array_equal(X, before)


def test_half_precision_and_integers_are_lifted():
    torch = pytest.importorskip("torch")
    X = np.random.default_rng(0).integers(-3, 4, (40, 5))
    assert SemiNMF(2, random_state=0).fit_transform(X).dtype == np.float64
    assert SemiNMF(2, random_state=0).fit_transform(X.astype(np.float16)).dtype == np.float32
    half = torch.asarray(X).to(torch.bfloat16).requires_grad_()
    assert SemiNMF(2, random_state=0).fit_transform(half).dtype == torch.float32


def test_pickle(rows):
    model = SemiNMF(3, random_state=0).fit(rows)
    assert np.array_equal(pickle.loads(pickle.dumps(model)).transform(rows), model.transform(rows))


# ---------------------------------------------------------------- nasty inputs

BASE = np.random.default_rng(0).standard_normal((200, 8)) @ np.random.default_rng(1).standard_normal((8, 24))


def _with(X, change):
    X = X.copy()
    change(X)
    return X


NASTY = {
    "zero matrix": np.zeros((10, 4)),
    "constant": np.full((10, 4), 3.0),
    "constant negative": np.full((10, 4), -3.0),
    "one row": BASE[:1],
    "two rows": BASE[:2],
    "one feature": BASE[:, :1],
    "exact duplicates": np.repeat(BASE[:3], 50, axis=0),
    "near duplicates": np.vstack([BASE, BASE[:50] * (1 + 1e-12)]),
    "dead and constant columns": _with(BASE, lambda X: X.__setitem__((slice(None), [5, 9]), [0.0, 3.0])),
    "zero rows": _with(BASE, lambda X: X.__setitem__(slice(None, None, 10), 0.0)),
    "rogue dimensions": _with(BASE, lambda X: X.__setitem__((slice(None), [3, 20]), X[:, [3, 20]] * 20 + [300, -150])),
    "attention sinks": _with(BASE, lambda X: X.__setitem__(slice(None, None, 100), X[::100] * 1000)),
    "fewer rows than features": BASE[:10],
    "large offset": BASE * 1e-2 + 1e4,
    "lattice": np.random.default_rng(2).integers(0, 3, (200, 6)).astype(float),
    "one-hot": np.eye(6)[np.random.default_rng(3).integers(0, 6, 100)],
    "rank one": np.outer(np.linspace(-1, 1, 30), np.arange(1.0, 6)),
    "tiny": BASE * 1e-150,
    "huge": BASE * 1e100,
    "ill-posed": np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]),
}


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize(
    "params", [{}, {"alpha": 0}, {"alpha": 0, "init": "svd"}, {"init": "random", "ridge": 0.1}, {"center": True}]
)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_nasty_inputs_give_finite_results(name, params, dtype):
    X = NASTY[name]
    if dtype == "float32" and name in ("tiny", "huge"):
        pytest.skip("outside the range of float32")
    X = X.astype(dtype)
    model = SemiNMF(**{"n_components": 8, "random_state": 0, "max_iter": 30, **params})
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        Z = model.fit_transform(X)
    for value in (Z, model.components_, model.objective_path_, model.reconstruction_err_):
        assert np.all(np.isfinite(value))
    np.testing.assert_allclose(np.linalg.norm(model.components_, axis=1), 1, rtol=1e-5)
    assert Z.min() >= 0
    assert model.reconstruction_err_ <= np.linalg.norm(X.astype(float)) * (1 + 1e-6)
    assert np.array_equal(Z, model.transform(X))
    assert model.kkt_residual_ < 1e-6


def test_more_atoms_than_distinct_rows_fit_them_exactly():
    model = SemiNMF(8, alpha=0, random_state=0).fit(NASTY["exact duplicates"])
    assert model.reconstruction_err_ < 1e-6 * np.linalg.norm(NASTY["exact duplicates"])


@pytest.mark.parametrize("alpha", [0.0, 0.05])
def test_dead_atoms_move_to_badly_fitted_rows(alpha):
    # Rows along two axes, the second far from the first row block of the matrix; no row wants the second atom.
    X = np.zeros((40, 4))
    X[:30, 0], X[30:, 1] = np.linspace(1, 2, 30), np.linspace(2, 3, 10)
    start = np.array([[1.0, 0.0, 0.0, 0.0], [-1.0, -1.0, 0.0, 0.0]])
    model = SemiNMF(init=start, alpha=alpha, tol=1e-10).fit(X)
    np.testing.assert_allclose(np.abs(model.components_) @ np.ones(4), 1, atol=1e-6)
    assert np.all(model.transform(X).sum(axis=0) > 0)
    assert model.reconstruction_err_ <= (1e-6 if alpha == 0 else model.penalty_ * np.sqrt(40) * (1 + 1e-9))
    assert np.all(np.diff(model.objective_path_) <= 1e-12 * np.sum(X**2))


def test_a_penalty_above_every_row_switches_all_atoms_off(rows):
    model = SemiNMF(3, alpha=100.0, random_state=0)
    assert np.all(model.fit_transform(rows) == 0)
    assert model.converged_
    np.testing.assert_allclose(model.reconstruction_err_, np.linalg.norm(rows))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"n_components": 0}, "n_components=0 must be at least 1"),
        ({"alpha": -0.1}, "alpha=-0.1 must be at least 0"),
        ({"alpha": np.nan}, "alpha=nan must be finite"),
        ({"tol": -1.0}, "tol=-1.0"),
        ({"max_iter": 0}, "max_iter=0"),
        ({"init": "nndsvd"}, "init='nndsvd' must be one of 'auto', 'kmeans', 'svd', 'random'"),
        ({"init": np.ones((2, 4))}, "init has 4 features, but X has 9"),
        ({"init": np.ones((2, 9)), "n_components": 3}, "init has 2 rows but n_components=3"),
        ({"init": None}, "init=None must be one of .*, or real numbers of shape"),
        ({"init": 3.5}, "init=3.5 must be one of"),
        ({"init": [1.0, 2.0]}, r"init=\[1.0, 2.0\] must be one of"),
        ({"init": [[1.0], [2.0, 3.0]]}, r"init=\[\[1.0\], \[2.0, 3.0\]\] must be one of"),
        ({"init": np.ones((2, 9), dtype=complex)}, r"init=an array of shape \(2, 9\) must be .* real numbers"),
        ({"init": np.full((2, 9), np.nan)}, "Input init contains NaN"),
        ({"random_state": -1}, "random_state=-1"),
        ({"ridge": -1.0}, "ridge=-1.0 must be at least 0"),
        ({"n_init": 0}, "n_init=0 must be at least 1"),
        ({"chunk_size": 0}, "chunk_size=0 must be at least 1"),
        ({"sort_by": "norm"}, "sort_by='norm' must be one of 'energy', 'codes'"),
        ({"center": "mean"}, "center='mean' must be one of False, True"),
    ],
)
def test_errors_name_the_parameter(rows, params, match):
    with pytest.raises(ValueError, match=match):
        SemiNMF(**params).fit(rows)


def test_init_array_follows_the_library_of_the_rows(as_array, library, rows):
    X = as_array(rows)
    model = SemiNMF(init=rows[:3], max_iter=5).fit(X)
    assert model.n_components_ == 3
    same = SemiNMF(init=as_array(rows[:3]), max_iter=5).fit(X)
    np.testing.assert_allclose(_xp.to_numpy(same.components_), _xp.to_numpy(model.components_))
    if library == "strict":
        torch = pytest.importorskip("torch")
        with pytest.raises(ValueError, match="init must use the same namespace and the same device as X"):
            SemiNMF(init=torch.asarray(rows[:3])).fit(X)


def test_none_means_the_smaller_side(rows):
    assert SemiNMF(random_state=0, max_iter=3).fit(rows).n_components_ == 9
    assert SemiNMF(random_state=0, max_iter=3).fit(rows[:5]).n_components_ == 5


def test_output_names_and_pandas(rows):
    pandas = pytest.importorskip("pandas")
    model = SemiNMF(2, random_state=0).set_output(transform="pandas")
    frame = model.fit_transform(rows)
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["seminmf0", "seminmf1"]
