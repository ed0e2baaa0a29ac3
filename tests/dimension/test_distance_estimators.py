"""What MOM, MADA, MiND, TLE, ESS and DANCo share: invariances, libraries, duplicates, intervals, error messages."""

import warnings

import numpy as np
import pytest
from oracles import dimension as oracle
from sklearn.base import clone

from isogeom.dimension import ESS, MADA, MOM, TLE, DANCo, MiND, NeighborTable

MODELS = [
    MOM(20),
    MOM(20, unbiased=False, average="mean"),
    MADA(),
    MADA(average="mean"),
    MiND(),
    MiND(method="mli"),
    TLE(),
    TLE(average="mean"),
    ESS(30),
    ESS(30, "b", average="mean"),
    DANCo(),
    DANCo(rounded=False, angle_formula="published"),
]
each = pytest.mark.parametrize("model", MODELS, ids=repr)
X = np.random.default_rng(0).standard_normal((160, 4))


def small(model):
    """A copy whose local dimensions are cheap."""
    return clone(model).set_params(n_neighbors_local=20)


@pytest.mark.filterwarnings("ignore:The best dimension is the largest:UserWarning")
@each
def test_rotation_translation_padding_and_order(model):
    rng = np.random.default_rng(1)
    rotation, _ = np.linalg.qr(rng.standard_normal((7, 7)))
    order = rng.permutation(160)
    moved = (np.pad(X, ((0, 0), (0, 3))) @ rotation + 3.0)[order]
    first, second = small(model).fit(X), small(model).fit(moved)
    if isinstance(model, DANCo):
        # With more features more dimensions are compared; those of the data are among both.
        assert second.mind_dimension_ == pytest.approx(first.mind_dimension_, rel=1e-8)
        second = small(model).set_params(max_dimension=4).fit(moved)
    assert second.dimension_ == pytest.approx(first.dimension_, rel=1e-8)
    assert second.dimension_std_ == pytest.approx(first.dimension_std_, rel=1e-6)
    np.testing.assert_allclose(second.transform(moved), first.transform(X)[order], rtol=1e-6)


@each
@pytest.mark.parametrize("unit", [1e-150, 1e150])
def test_unit(model, unit):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = small(model).fit(X), small(model).fit(X * unit)
        assert second.dimension_ == pytest.approx(first.dimension_, rel=1e-9)
        np.testing.assert_allclose(second.transform(X * unit), first.transform(X), rtol=1e-6)


@each
def test_same_numbers_in_every_library(model, as_array):
    expected = small(model).fit(X)
    found = small(model).fit(as_array(X))
    assert found.dimension_ == pytest.approx(expected.dimension_, rel=1e-9)
    np.testing.assert_allclose(found.dimension_interval_, expected.dimension_interval_, rtol=1e-6)
    local = found.transform(as_array(X[:40]))
    assert type(local) is type(as_array(X))
    local = local.cpu() if hasattr(local, "cpu") else local
    np.testing.assert_allclose(np.asarray(local), expected.transform(X[:40]), rtol=1e-6)


@each
def test_float32_rows_far_from_the_origin(model):
    shifted = (X + 100.0).astype(np.float32)
    expected = small(model).fit(shifted.astype(np.float64))
    found = small(model).fit(shifted)
    assert found.dimension_ == pytest.approx(expected.dimension_, rel=1e-6)
    assert found.transform(shifted).dtype == np.float32


@each
@pytest.mark.parametrize("duplicates", ["drop", "keep"])
def test_one_repeated_row_changes_little(model, duplicates):
    repeated = np.concatenate([X, X[:1]])
    found, plain = small(model).set_params(duplicates=duplicates).fit(repeated), small(model).fit(X)
    assert found.n_duplicates_ == 1
    assert found.dimension_ == pytest.approx(plain.dimension_, rel=0.05)
    if duplicates == "drop":
        assert found.dimension_ == pytest.approx(plain.dimension_, rel=1e-12)
    assert np.isfinite(found.transform(repeated)).all()
    with pytest.raises(ValueError, match="1 of 161 rows"):
        small(model).set_params(duplicates="raise").fit(repeated)


@each
def test_table_and_anchors(model):
    table = NeighborTable.from_rows(X, 60)
    assert small(model).fit(table).dimension_ == pytest.approx(small(model).fit(X).dimension_, rel=1e-12)
    anchored = small(model).set_params(anchors=80).fit(X)
    assert anchored.n_samples_used_ == 80
    assert anchored.dimension_ == pytest.approx(small(model).fit(X).dimension_, rel=0.3)
    assert np.isfinite(anchored.transform(X)).all()
    with pytest.raises(ValueError, match="n_neighbors"):
        small(model).fit(NeighborTable.from_rows(X, 3))


@each
def test_local_dimensions_of_new_rows(model):
    fitted = small(model).fit(X[:120])
    both = fitted.transform(X)
    assert both.shape == (160, 1)
    np.testing.assert_allclose(both[:120], small(model).fit_transform(X[:120]), rtol=1e-9)
    np.testing.assert_allclose(fitted.transform(X[120:]), both[120:], rtol=1e-9)


@each
def test_intervals(model):
    narrow, wide = (small(model).set_params(confidence_level=level).fit(X) for level in (0.5, 0.99))
    assert wide.dimension_interval_[0] <= narrow.dimension_interval_[0] <= narrow.dimension_
    assert narrow.dimension_ <= narrow.dimension_interval_[1] <= wide.dimension_interval_[1]
    assert narrow.dimension_std_ == wide.dimension_std_ > 0


@each
def test_grids_lines_and_few_rows(model):
    """Ties, a degenerate cloud, and as few rows as there may be."""
    grid = np.stack(np.meshgrid(np.arange(8.0), np.arange(8.0)), axis=-1).reshape(-1, 2)
    line = np.random.default_rng(0).random((60, 1)) * np.ones((1, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "n_neighbors", UserWarning)
        warnings.filterwarnings("ignore", ".* is doubtful", UserWarning)
        for rows in (grid, line, X[:5], X[:4], X[: 4 if isinstance(model, ESS) else 3]):
            fitted = small(model).fit(rows)
            assert np.isfinite(fitted.dimension_)
            assert np.isfinite(fitted.transform(rows)).all()
            assert fitted.dimension_std_ is None or np.isfinite(fitted.dimension_std_)
    with pytest.raises(ValueError, match="3"):
        small(model).fit(X[:2])


@each
def test_bad_parameters(model):
    for name in ("n_neighbors", "n_neighbors_local"):
        for bad in (0, -3, 2.5, "many"):
            with pytest.raises((ValueError, TypeError), match=name):
                clone(model).set_params(**{name: bad}).fit(X)
    for name in ("average", "version", "method", "unbiased", "rounded", "angle_formula"):
        if name in model.get_params():
            with pytest.raises(ValueError, match=name):
                clone(model).set_params(**{name: "wrong"}).fit(X)


@pytest.mark.parametrize("model", [MOM(20), MADA(), MiND()], ids=repr)
def test_precomputed_distances(model):
    D = oracle.all_distances(X)
    np.fill_diagonal(D, 0)
    found = small(model).set_params(metric="precomputed").fit(D)
    expected = small(model).fit(X)
    assert found.dimension_ == pytest.approx(expected.dimension_, rel=1e-9)
    np.testing.assert_allclose(found.transform(D), expected.transform(X), rtol=1e-9)


@pytest.mark.parametrize("model", [MOM(10), MADA(10), MiND(10)], ids=repr)
def test_standard_error_on_the_torus(model):
    """The dependence of neighbours is in the standard error: without it 0.7 to 0.9 of the spread."""
    fits = []
    for seed in range(60):
        distances, indices = oracle.torus_neighbors(250, 2, seed, 22)
        fits.append(clone(model).fit(NeighborTable.from_arrays(distances, indices)))
    spread = np.std([fit.dimension_ for fit in fits], ddof=1)
    assert np.mean([fit.dimension_ for fit in fits]) == pytest.approx(2, abs=4 * spread / np.sqrt(60))
    # The spread of 60 fits is known to a tenth.
    assert 0.75 < np.mean([fit.dimension_std_ for fit in fits]) / spread < 1.4
    inside = [fit.dimension_interval_[0] <= 2 <= fit.dimension_interval_[1] for fit in fits]
    assert np.mean(inside) >= 0.85
