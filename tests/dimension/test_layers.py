"""Tables of layers."""

import warnings

import numpy as np
import pytest
from oracles import dimension as oracle

from isogeom.dimension import (
    ABIDE,
    ESS,
    MLE,
    CorrelationDimension,
    DANCo,
    FisherS,
    GraphDistanceDimension,
    Gride,
    KNNGraphDimension,
    LocalPCADimension,
    MiND,
    MSTDimension,
    NeighborTable,
    PCADimension,
    TwoNN,
    id_profile,
    layer_dimensions,
)

X = oracle.hyper_ball(800, 3, 0)


def sorted_distances(rows):
    """Distances from every row to the others, ascending, by the definition."""
    found = np.sqrt(((rows[:, np.newaxis, :] - rows[np.newaxis, :, :]) ** 2).sum(axis=2))
    return np.sort(found, axis=1)[:, 1:]


def test_scale_is_that_of_the_estimator():
    rows = X[:300]
    radii = sorted_distances(rows).mean(axis=0)
    models = {
        TwoNN("mle"): 2,
        Gride(16): 32,
        MLE(20): 20,
        MiND(10): 11,
        DANCo(10): 11,
        ESS(12): 12,
        CorrelationDimension(): 20,
        KNNGraphDimension(n_neighbors=4): 4,
        LocalPCADimension(n_neighbors_local=40): 40,
        GraphDistanceDimension(n_neighbors=8): 8,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The graph-distance dimension", UserWarning)
        result = layer_dimensions({"a": rows}, estimators=list(models))
    np.testing.assert_array_equal(result.k, list(models.values()))
    np.testing.assert_allclose(result.radius, [radii[k - 1] for k in models.values()], rtol=1e-12)


def test_scale_does_not_depend_on_the_other_estimators():
    alone = layer_dimensions({"a": X}, estimators=[MLE(20)])
    beside = layer_dimensions({"a": X}, estimators=[MLE(20), Gride(16), ABIDE(50)])
    assert (alone.k[0], alone.radius[0]) == (beside.k[0], beside.radius[0])
    default = layer_dimensions({"a": X})
    profile = id_profile(X, max_neighbors=4).select("gride")
    assert default.k[0] == profile["rank"][0] == 2
    assert default.radius[0] == pytest.approx(profile["radius"][0], rel=1e-12)


def test_scale_of_adaptive_neighbourhoods_is_their_mean():
    rows = X[:400]
    # A table with more neighbours than the estimator looks at.
    result = layer_dimensions({"a": rows}, estimators=[ABIDE(40)], n_neighbors=60)
    table = NeighborTable.from_rows(rows, 40)
    model = ABIDE(40).fit(table)
    from scipy.stats import chi2

    sizes = oracle.adaptive_sizes(table.distances, table.indices, model.dimension_path_[-2], chi2.isf(1e-6, 1))
    assert result.k[0] == pytest.approx(model.n_neighbors_mean_, rel=1e-12)
    assert result.k[0] == pytest.approx(np.mean(sizes), rel=1e-12)
    expected = table.distances[np.arange(400), np.asarray(sizes) - 1].mean()
    assert result.radius[0] == pytest.approx(expected, rel=1e-12)


def test_estimators_without_neighbours_have_no_scale():
    result = layer_dimensions({"a": X[:300]}, estimators=[PCADimension(), FisherS(), MSTDimension(), MLE()])
    assert np.isnan(result.k[:3]).all()
    assert np.isnan(result.radius[:3]).all()
    assert result.k[3] == 20


@pytest.mark.parametrize("model", [ABIDE(), GraphDistanceDimension(), KNNGraphDimension()])
def test_anchors_are_refused_where_all_rows_are_needed(model):
    with pytest.raises(ValueError, match=r"Layer 'a': .*all .*rows.*anchors"):
        layer_dimensions({"a": X}, estimators=[model], anchors=200)


@pytest.mark.parametrize("model", [MSTDimension(), PCADimension(), FisherS()])
def test_anchors_leave_estimators_without_neighbours_alone(model):
    result = layer_dimensions({"a": X}, estimators=[model], anchors=200)
    assert result.n[0] == len(X)
    assert result.dimension[0] == pytest.approx(model.fit(X).dimension_, rel=1e-9)


def test_layers_share_anchors_and_searches():
    rng = np.random.default_rng(1)
    Z = rng.random((600, 4))
    layers = {"first": Z @ rng.standard_normal((4, 20)), "second": np.tanh(Z @ rng.standard_normal((4, 30)))}
    models = [TwoNN("mle"), MLE(10), Gride(4)]
    result = layer_dimensions(layers, estimators=models, anchors=300)
    assert [str(name) for name in result.layer] == ["first"] * 3 + ["second"] * 3
    expected = MLE(10, anchors=300).fit(layers["second"])
    assert result.dimension[4] == pytest.approx(expected.dimension_)
    assert (result.lo[4], result.hi[4]) == pytest.approx(expected.dimension_interval_)
    assert (result.n == 300).all()
    assert (result.seconds >= 0).all()
    frame = result.to_frame()
    names = ["layer", "estimator", "dimension", "lo", "hi", "n", "k", "radius", "seconds"]
    assert list(frame.columns) == names
    assert result.search_seconds[0] == result.search_seconds[2] > 0
    assert "MLE(n_neighbors=10)" in str(result)
    assert not hasattr(models[0], "dimension_")


def test_layers_name_what_is_wrong():
    with pytest.raises(ValueError, match="Layer 'b': Input X contains NaN"):
        layer_dimensions({"a": X, "b": np.full((5, 2), np.nan)})
    with pytest.raises(TypeError, match="layers must map names to rows"):
        layer_dimensions(X)
    with pytest.raises(ValueError, match="layers is empty"):
        layer_dimensions({})
    with pytest.raises(TypeError, match="estimators holds a str"):
        layer_dimensions({"a": X}, estimators=["mle"])


def test_layers_clip_with_a_warning():
    repeated = np.repeat(X[:10], 30, axis=0)
    with pytest.warns(UserWarning, match="n_neighbors=20 of MLE is clipped to 9"):
        result = layer_dimensions({"a": repeated})
    np.testing.assert_array_equal(result.k, [2, 9])
    with pytest.warns(UserWarning, match="n_neighbors=5000 of layer_dimensions is clipped to 299, .* of layer 'a'"):
        result = layer_dimensions({"a": X[:300]}, n_neighbors=5000)
    # More neighbours in the table than an estimator uses do not change its scale.
    np.testing.assert_array_equal(result.k, [2, 20])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(layer_dimensions({"a": X[:30]}).k, [2, 20])


def test_layers_refuse_in_terms_of_the_caller():
    with pytest.raises(
        ValueError, match="n_neighbors=5 is too small for MLE, which needs 20 neighbours: pass at least"
    ):
        layer_dimensions({"a": X}, n_neighbors=5)
    with pytest.raises(TypeError, match=r"estimators must be a sequence, got one MLE: pass \[MLE\(\)\]"):
        layer_dimensions({"a": X}, estimators=MLE())
    with pytest.raises(ValueError, match="estimators is empty"):
        layer_dimensions({"a": X}, estimators=[])
    with pytest.raises(TypeError, match="Layer 'a' is a NeighborTable: pass its rows"):
        layer_dimensions({"a": NeighborTable.from_rows(X, 10)})
    with pytest.raises(ValueError, match="n_jobs=0 has no meaning"):
        layer_dimensions({"a": X}, n_jobs=0)
    with pytest.raises(ValueError, match="n_neighbors=1 must be at least 2"):
        layer_dimensions({"a": X}, n_neighbors=1)


def test_layers_without_an_interval_say_so():
    result = layer_dimensions({"a": X}, estimators=[PCADimension()])
    assert np.isnan(result.lo[0])
    assert "nan" not in str(result)
    assert " none " in str(result)
