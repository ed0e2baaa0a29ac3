import numpy as np
import pytest
from conftest import make_array

from isogeom import _xp
from isogeom.datasets import hyper_ball, hyper_sphere, make_manifold
from isogeom.dimension import LocalPCADimension, NeighborTable, PCADimension

RULES = ["share", "participation", "kaiser", "fukunaga_olsen", "max_gap", "fan", "gavish_donoho", "marchenko_pastur"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("statistic", ["mean", "median"])
def test_is_a_mean_of_local_dimensions(rule, statistic):
    X = make_manifold("M3", 200).X
    model = LocalPCADimension(rule, statistic=statistic, n_neighbors_local=30)
    local = model.fit_transform(X)
    expected = PCADimension(rule, n_neighbors_local=30).fit(X).transform(X)
    np.testing.assert_allclose(local, expected, rtol=1e-9)
    assert model.dimension_ == pytest.approx(getattr(np, statistic)(local))
    assert model.n_samples_used_ == 200


def test_anchors_and_tables():
    X = hyper_ball(300, 4)
    anchors = np.arange(0, 300, 5)
    model = LocalPCADimension("participation", n_neighbors_local=40, anchors=anchors).fit(X)
    local = LocalPCADimension("participation", n_neighbors_local=40).fit_transform(X)
    assert model.dimension_ == pytest.approx(local[anchors].mean())
    assert model.n_samples_used_ == 60
    np.testing.assert_allclose(model.transform(X), local, rtol=1e-12)
    table = NeighborTable.from_rows(X, 60, anchors=anchors)
    again = LocalPCADimension("participation", n_neighbors_local=40).fit(table)
    assert again.dimension_ == pytest.approx(model.dimension_, rel=1e-12)


@pytest.mark.parametrize(("name", "d"), [("M2", 3), ("M7", 2), ("M11", 2), ("M13a", 2), ("M5a", 1)])
def test_manifolds(name, d):
    model = LocalPCADimension(n_neighbors_local=15, statistic="median").fit(make_manifold(name, 1500).X)
    assert model.dimension_ == d


def test_correction_of_few_rows():
    # A flat 20-dimensional cloud in 50 features, 30 rows per neighbourhood.
    rng = np.random.default_rng(0)
    X = rng.standard_normal((300, 20)) @ np.linalg.qr(rng.standard_normal((50, 20)))[0].T
    naive = LocalPCADimension("participation", n_neighbors_local=30).fit(X).dimension_
    corrected = LocalPCADimension("participation", bias_correction="samples", n_neighbors_local=30).fit(X).dimension_
    assert naive < 13
    assert corrected == pytest.approx(20, abs=1.5)


@pytest.mark.parametrize(
    "rows", [lambda s: hyper_ball(300, 5, random_state=s), lambda s: hyper_sphere(1000, 2, random_state=s)]
)
def test_standard_error(rows):
    # On a sphere of 300 rows a patch is a tenth of it: curvature, which the error does not know, lowers it to 0.7.
    found = [LocalPCADimension("participation", n_neighbors_local=30).fit(rows(s)) for s in range(40)]
    actual = np.std([m.dimension_ for m in found], ddof=1)
    assert 0.7 < np.mean([m.dimension_std_ for m in found]) / actual < 2
    low, high = found[0].dimension_interval_
    assert low < found[0].dimension_ < high


def test_equal_values_everywhere():
    model = LocalPCADimension(n_neighbors_local=30).fit(hyper_ball(200, 3))
    assert (model.dimension_, model.dimension_std_, model.dimension_interval_) == (3.0, None, None)


def test_duplicates():
    X = hyper_ball(200, 3)
    model = LocalPCADimension("participation", n_neighbors_local=30)
    expected = model.fit(X).dimension_
    assert model.fit(np.concatenate((X, X[:1]))).dimension_ == pytest.approx(expected, rel=1e-9)
    assert model.n_duplicates_ == 1


@pytest.mark.parametrize("scale", [1e-150, 1e150])
def test_scale(scale):
    X = hyper_sphere(120, 3)
    for rule in RULES:
        model = LocalPCADimension(rule, n_neighbors_local=20)
        assert model.fit(X * scale).dimension_ == pytest.approx(model.fit(X).dimension_, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (LocalPCADimension("parallel"), "rule='parallel' must be one of"),
        (LocalPCADimension(statistic="sum"), "statistic='sum'"),
        (LocalPCADimension(threshold=-1.0), "threshold=-1.0"),
        (LocalPCADimension(metric="precomputed"), "LocalPCADimension needs rows"),
        (LocalPCADimension("participation", bias_correction="samples", n_neighbors_local=3), "Raise n_neighbors_local"),
    ],
)
def test_bad_parameters(model, match):
    with pytest.raises(ValueError, match=match):
        model.fit(hyper_ball(20, 3))


@pytest.mark.parametrize("rule", ["participation", "fukunaga_olsen"])
def test_libraries_agree(rule, as_array, library):
    X = hyper_ball(150, 12)
    expected = LocalPCADimension(rule, n_neighbors_local=20).fit(X)
    model = LocalPCADimension(rule, n_neighbors_local=20).fit(as_array(X))
    assert model.dimension_ == pytest.approx(expected.dimension_, rel=1e-9)
    assert model.dimension_std_ == pytest.approx(expected.dimension_std_, rel=1e-6)
    local = _xp.to_numpy(model.transform(make_array(library, X[:5])))
    np.testing.assert_allclose(local, expected.transform(X[:5]), rtol=1e-8)
