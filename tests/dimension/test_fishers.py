import subprocess
import sys

import numpy as np
import pytest
from conftest import make_array
from oracles.dimension_fishers import fishers

from isogeom import _xp
from isogeom.datasets import hyper_ball, hyper_sphere, make_manifold
from isogeom.dimension import FisherS, NeighborTable
from isogeom.dimension import _fishers as module

# By other packages, from the same definition: the first two in MATLAB.
FIXTURES = [
    (lambda: np.hstack((hyper_ball(300, 5), np.zeros((300, 5)))), 5.03583335706),
    (lambda: hyper_sphere(300, 4, random_state=1), 5.07339117048),
    (lambda: hyper_ball(1000, 5), 5.000261658),
]
MANIFOLDS = {
    "M1": 11.03,
    "M2": 2.91,
    "M3": 3.37,
    "M5a": 2.91,
    "M5b": 2.92,
    "M6": 8.43,
    "M7": 2.88,
    "M9": 18.65,
    "M10a": 10.35,
    "M10b": 17.06,
    "M10c": 24.04,
    "M11": 1.97,
    "M12": 20.15,
    "Mbeta": 5.37,
    "Mp1": 0.90,
    "Mp2": 0.89,
    "Mp3": 0.89,
}


@pytest.mark.parametrize(("rows", "expected"), FIXTURES)
def test_fixtures(rows, expected):
    assert FisherS().fit(rows()).dimension_ == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", MANIFOLDS)
def test_benchmark_manifolds(name):
    assert FisherS().fit(make_manifold(name).X).dimension_ == pytest.approx(MANIFOLDS[name], abs=0.005 + 1e-9)


def test_seventy_dimensions_give_a_number():
    # All rows are separated at the published margins: a peer returns NaN.
    model = FisherS().fit(make_manifold("M10d").X)
    assert model.margin_ < 0.6
    assert model.dimension_ == pytest.approx(71, rel=0.1)
    assert np.isfinite(model.dimension_std_)


@pytest.mark.parametrize(("n", "d"), [(120, 3), (60, 90), (300, 8)])
def test_oracle(n, d):
    X = np.random.default_rng(n).standard_normal((n, d)) * np.geomspace(1, 0.1, d) + 3
    assert FisherS().fit(X).dimension_ == pytest.approx(fishers(X), rel=1e-9)


def test_tiles(monkeypatch):
    X = hyper_ball(300, 4)
    expected = FisherS().fit(X)
    monkeypatch.setattr(module, "_TILE", (37, 53))
    found = FisherS().fit(X)
    np.testing.assert_array_equal(found.inseparability_, expected.inseparability_)
    assert found.dimension_std_ == expected.dimension_std_


@pytest.mark.parametrize("margins", [module._MARGINS, module._LOW_MARGINS])
def test_bins(margins):
    inner = margins[1:]
    values = np.concatenate(
        (inner, np.nextafter(inner, 0), np.nextafter(margins, 1), np.linspace(margins[0], 1, 999)[1:])
    )
    np.testing.assert_array_equal(module._bins(values, margins), np.searchsorted(margins, values, side="left") - 1)


def test_closed_form():
    # The share of a sphere's surface within the cap is what the formula inverts, for large d.
    a, d = 0.5, 200.0
    share = (1 - a * a) ** (d / 2) / (a * np.sqrt(2 * np.pi * d * (1 - a * a)))
    assert module.sphere_dimension(np.array([share]), a)[0] == pytest.approx(d, rel=1e-10)


def test_standard_error():
    found = [FisherS().fit(hyper_ball(300, 5, random_state=s)) for s in range(60)]
    actual = np.std([m.dimension_ for m in found], ddof=1)
    assert 0.7 < np.mean([m.dimension_std_ for m in found]) / actual < 1.4
    low, high = found[0].dimension_interval_
    assert low < found[0].dimension_ < high


def test_import_changes_no_warning_filter():
    # A peer ignores all warnings of the process from its import on.
    code = (
        "import warnings, sklearn, scipy.linalg; before = list(warnings.filters); "
        "import isogeom.dimension; assert list(warnings.filters) == before; import sys; "
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_duplicates():
    X = hyper_ball(300, 5)
    twice = np.concatenate((X, X[:1]))
    model = FisherS().fit(twice)
    assert model.dimension_ == pytest.approx(FisherS().fit(X).dimension_, rel=1e-12)
    assert model.n_duplicates_ == 1
    assert FisherS(duplicates="keep").fit(twice).dimension_ == pytest.approx(model.dimension_, rel=0.05)


@pytest.mark.parametrize("scale", [1e-150, 1e150])
def test_invariance(scale):
    X = hyper_ball(200, 4)
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((9, 9)))[0]
    moved = (np.hstack((X, np.zeros((200, 5)))) @ rotation + 0.5)[::-1] * scale
    expected, found = FisherS().fit(X), FisherS().fit(moved)
    assert found.dimension_ == pytest.approx(expected.dimension_, rel=1e-9)
    np.testing.assert_allclose(found.transform(moved[:5]), expected.transform(X[::-1][:5]), rtol=1e-8)


def test_row_at_the_mean_is_left_out():
    X = hyper_ball(200, 3)
    X = np.concatenate((X, -X, np.zeros((1, 3))))
    model = FisherS().fit(X)
    assert (model.n_samples_used_, model.n_samples_dropped_) == (400, 1)
    assert np.isfinite(model.dimension_)


def test_local_dimensions():
    X = hyper_ball(1500, 5)
    model = FisherS()
    local = model.fit_transform(X)
    assert local.shape == (1500, 1)
    assert np.isfinite(local).all()
    assert local.mean() == pytest.approx(5, rel=0.08)
    table = NeighborTable.from_rows(X, 100)
    np.testing.assert_allclose(FisherS().fit(table).transform(table), local)
    # One neighbourhood, by the estimator itself.
    patch = X[np.asarray(table.indices[3])]
    assert local[3, 0] == pytest.approx(fishers(patch), rel=1e-9)


def test_patch_wider_than_long():
    X = np.random.default_rng(0).standard_normal((80, 40))
    model = FisherS(n_neighbors_local=20).fit(X)
    table = NeighborTable.from_rows(X, 20)
    expected = [fishers(X[np.asarray(table.indices[i])]) for i in range(5)]
    np.testing.assert_allclose(model.transform(X[:5])[:, 0], expected, rtol=1e-9)


def test_libraries_agree(as_array, library):
    X = hyper_ball(250, 4)
    expected = FisherS().fit(X)
    model = FisherS().fit(as_array(X))
    assert model.dimension_ == pytest.approx(expected.dimension_, rel=1e-10)
    np.testing.assert_allclose(_xp.to_numpy(model.transform(make_array(library, X[:20]))), expected.transform(X[:20]))


def test_float32():
    X = hyper_ball(500, 5)
    assert FisherS().fit((X + 3).astype(np.float32)).dimension_ == pytest.approx(FisherS().fit(X).dimension_, rel=1e-3)


def test_errors():
    X = hyper_ball(30, 3)
    with pytest.raises(ValueError, match=r"condition_number=0.5 must be at least 1"):
        FisherS(0.5).fit(X)
    with pytest.raises(ValueError, match="FisherS needs rows"):
        FisherS(metric="precomputed").fit(np.zeros((30, 30)))
    with pytest.raises(ValueError, match="needs the rows, not only their distances"):
        FisherS().fit(NeighborTable.from_arrays([[1.0], [1.0], [1.0]], [[1], [2], [0]]))


def test_a_table_with_anchors_is_treated_as_its_rows():
    X = hyper_ball(200, 3)
    twice = np.vstack((X, X[:20]))
    expected = FisherS().fit(X)
    for rows in (X, twice):
        model = FisherS().fit(NeighborTable.from_rows(rows, 10, anchors=30))
        assert (model.n_samples_used_, model.n_samples_dropped_) == (200, 0)
        assert model.dimension_ == pytest.approx(expected.dimension_, rel=1e-12)


def test_local_dimensions_do_not_depend_on_the_rows_asked_for():
    # In 40 dimensions some patches need the smaller margins and others do not.
    model = FisherS(n_neighbors_local=60).fit(hyper_ball(300, 40))
    together = model.transform(hyper_ball(300, 40)[:40])
    single = [model.transform(hyper_ball(300, 40)[i : i + 1])[0, 0] for i in range(40)]
    np.testing.assert_allclose(together[:, 0], single, rtol=1e-9)
