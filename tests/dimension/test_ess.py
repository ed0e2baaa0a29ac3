"""ESS: published values, the skewness by loops, reference values and their inverse, and the compiled kernel."""

import math

import numpy as np
import pytest
from oracles import dimension as oracle
from oracles.dimension_ess import ess_value, expected_skewness, skewness

from isogeom import _kernels
from isogeom.dimension import ESS, NeighborTable, _simplex
from isogeom.dimension._patches import offset_patches

A, B = oracle.fixture_a(), oracle.fixture_b()


@pytest.mark.parametrize(
    ("X", "version", "expected"),
    [(A, "a", 5.08681575430), (A, "b", 5.11274496624), (B, "a", 4.90970362627), (B, "b", 4.84587852965)],
)
def test_published_values_of_one_patch(X, version, expected):
    found, _ = _simplex.invert(_simplex.skewness(X[np.newaxis, :30], version), version)
    assert found[0] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("version", ["a", "b"])
def test_equals_the_loops_over_pairs(version):
    k = 8
    table = NeighborTable.from_rows(A, k)
    patches = [A[table.indices[i]] for i in range(len(A))]
    model = ESS(k, version, average="mean", n_neighbors_local=k).fit(A)
    values = np.array([ess_value(patch, version) for patch in patches])
    np.testing.assert_allclose(model.transform(A)[:, 0], values, rtol=1e-9)
    assert model.dimension_ == pytest.approx(values.mean(), rel=1e-10)
    pooled = np.mean([skewness(patch, version) for patch in patches])
    expected, _ = _simplex.invert(np.array([pooled]), version)
    assert ESS(k, version).fit(A).dimension_ == pytest.approx(expected[0], rel=1e-10)


@pytest.mark.parametrize("version", ["a", "b"])
def test_reference_values(version):
    found = _simplex.reference(version, 150)
    np.testing.assert_allclose(found, [expected_skewness(n, version) for n in range(1, 151)], rtol=1e-11)
    known = {"a": (2 / math.pi, math.pi / 4), "b": (2 / math.pi, 1 / 2)}[version]
    np.testing.assert_allclose(found[1:3], known, rtol=1e-14)


@pytest.mark.parametrize("version", ["a", "b"])
def test_inverse_of_the_reference_values(version):
    wanted = np.array([1, 2, 3, 10, 100, 5000])
    values = _simplex.reference(version, 5001)
    found, slope = _simplex.invert(values[wanted - 1], version)
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    between, _ = _simplex.invert(0.75 * values[wanted - 1] + 0.25 * values[wanted], version)
    np.testing.assert_allclose(between, wanted + 0.25, rtol=1e-9)
    np.testing.assert_allclose(slope * (values[wanted] - values[wanted - 1]), 1, rtol=1e-9)


def test_a_skewness_out_of_range_gives_an_end_of_the_range():
    found, _ = _simplex.invert(np.array([-1e-12, 1.0, np.nan]), "a")
    assert found[0] == 1
    assert found[1] > 10_000
    assert np.isnan(found[2])
    found, _ = _simplex.invert(np.array([1 + 1e-12, 0.0]), "b")
    assert found[0] == 1
    assert found[1] > 10_000


def by_array_code(patches, version):
    return np.concatenate([_simplex.skewness(offsets, version) for offsets, _ in offset_patches(*patches)])


@pytest.fixture
def compiled(monkeypatch):
    """Compiled code for problems of any size, and no array code."""

    def switch_on():
        for name in ("centred_patches", "simplex_skewness"):
            module, _ = _kernels._KERNELS[name]
            monkeypatch.setitem(_kernels._KERNELS, name, (module, 0))
        monkeypatch.setattr(_simplex, "skewness", None)

    return switch_on


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 2e-6), ("float64", 1e-10)])
@pytest.mark.parametrize("version", ["a", "b"])
@pytest.mark.parametrize(("p", "k"), [(1, 3), (1, 30), (2, 4), (2, 30), (3, 20), (7, 30), (50, 9)])
def test_kernel_equals_the_array_code(compiled, dtype, rtol, version, p, k):
    X = (np.random.default_rng(0).standard_normal((50, p)) + 30).astype(dtype)
    table = NeighborTable.from_rows(X, k)
    patches = table.X, table.queries, table.distances, table.indices
    expected = by_array_code(patches, version)
    compiled()
    found = _simplex.patch_skewness(*patches, version)
    # The sine of parallel vectors is the root of a rounding error, here of every pair.
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-7 if p == 1 else 0)


@pytest.mark.parametrize("version", ["a", "b"])
def test_blocks_of_patches_change_nothing(compiled, version, monkeypatch):
    X = np.random.default_rng(1).standard_normal((90, 6))
    table = NeighborTable.from_rows(X, 12)
    compiled()
    expected = _simplex.patch_skewness(X, table.queries, table.distances, table.indices, version)
    for elements in (1, 500):
        monkeypatch.setattr(_simplex, "_ELEMENTS", elements)
        found = _simplex.patch_skewness(X, table.queries, table.distances, table.indices, version)
        np.testing.assert_allclose(found, expected, rtol=1e-13)


def test_sines_of_nearly_flat_patches_of_float32_rows_are_exact(compiled):
    """A curve whose directions are 1e-3 apart: products in float32 would leave an error of 1e-4 in every sine."""
    t = np.linspace(0, 1, 400)
    X = np.stack((t, 1e-3 * np.sin(40 * t), np.zeros(400)), axis=1).astype(np.float32)
    table = NeighborTable.from_rows(X, 20)
    patches = table.X, table.queries, table.distances, table.indices
    expected = by_array_code(patches, "a")
    assert 1e-4 < expected.mean() < 0.05
    compiled()
    np.testing.assert_allclose(_simplex.patch_skewness(*patches, "a"), expected, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_float32_rows_in_extreme_units(compiled, scale):
    X = np.random.default_rng(2).standard_normal((60, 5))
    table = NeighborTable.from_rows(X, 15)
    expected = by_array_code((X, table.queries, table.distances, table.indices), "a")
    X = (scale * X).astype(np.float32)
    table = NeighborTable.from_rows(X, 15)
    compiled()
    found = _simplex.patch_skewness(X, table.queries, table.distances, table.indices, "a")
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("version", ["a", "b"])
def test_patches_without_extent_have_no_skewness(compiled, version):
    assert np.isnan(_simplex.skewness(np.ones((1, 4, 3)), version)).all()
    compiled()
    nowhere = np.zeros((1, 4)), np.array([[1, 2, 3, 4]])
    assert np.isnan(_simplex.patch_skewness(np.ones((5, 3)), np.zeros(1), *nowhere, version)).all()


def test_the_kernel_is_used_where_it_pays(compiled):
    X = np.random.default_rng(0).standard_normal((300, 12))
    plain = ESS(30).fit(X)
    compiled()
    assert ESS(30).fit(X).dimension_ == pytest.approx(plain.dimension_, rel=1e-12)


@pytest.mark.parametrize(("version", "d"), [("a", 1), ("b", 1), ("a", 6), ("b", 6), ("a", 30), ("b", 30)])
def test_known_dimensions(version, d):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((400, d)) @ rng.standard_normal((d, 40)) if d < 6 else rng.standard_normal((400, d))
    assert ESS(version=version).fit(X).dimension_ == pytest.approx(d, rel=0.07)


@pytest.mark.parametrize("version", ["a", "b"])
def test_nominal_error_is_the_spread_over_independent_patches(version):
    """Each row's patch is one of its own: only the formula is tested, not the dependence."""
    rng = np.random.default_rng(0)
    skews = _simplex.skewness(rng.standard_normal((100 * 60, 15, 4)), version).reshape(100, 60)
    means = skews.mean(axis=1)
    dimensions, slopes = _simplex.invert(means, version)
    errors = np.abs(slopes) * skews.std(axis=1, ddof=1) / np.sqrt(60)
    assert errors.mean() == pytest.approx(dimensions.std(ddof=1), rel=0.25)


def test_rows_and_a_longer_table_give_the_same_standard_error():
    X = np.random.default_rng(0).random((300, 3))
    table = NeighborTable.from_rows(X, 80)
    assert ESS(20).fit(X).dimension_std_ == pytest.approx(ESS(20).fit(table).dimension_std_, rel=1e-12)


def test_standard_error_of_small_patches():
    models = [ESS(20).fit(np.random.default_rng(seed).random((1000, 3))) for seed in range(40)]
    true = np.std([model.dimension_ for model in models], ddof=1)
    # 40 samples tell the true one to 11 %.
    assert np.mean([model.dimension_std_ for model in models]) == pytest.approx(true, rel=0.35)
