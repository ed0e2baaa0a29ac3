"""Scale profiles and tables of layers."""

import warnings

import numpy as np
import pytest
from oracles import dimension as oracle

from isogeom.dimension import MLE, Gride, NeighborTable, PCADimension, TwoNN, id_profile, layer_dimensions

X = oracle.hyper_ball(800, 3, 0)


def test_profile_holds_every_estimator_at_every_scale():
    profile = id_profile(X)
    gride = Gride().fit(X)
    np.testing.assert_allclose(profile.select("gride")["dimension"], gride.scales_["dimension"])
    np.testing.assert_array_equal(profile.select("gride")["rank"], [2, 4, 8, 16, 32, 64])
    np.testing.assert_array_equal(profile.select("binomial")["rank"], [4, 8, 16, 32, 64])
    two = profile.select("twonn")
    np.testing.assert_array_equal(two["rank"], [2, 4, 8, 16, 32])
    assert two["dimension"][0] == pytest.approx(TwoNN("mle").fit(X).dimension_)
    assert (np.diff(two["radius"]) > 0).all()
    assert (profile.lower < profile.dimension).all()
    assert (profile.dimension < profile.upper).all()
    # Boundaries make the ball look flatter at larger scales, not by half.
    assert (np.abs(profile.dimension - 3) < 0.6).all()


def test_parts_of_the_rows_are_a_partition():
    two = id_profile(X, estimators=("twonn",)).select("twonn")
    assert set(two["n_samples_used"]) == {800}


def test_noise_shows_at_small_scales():
    rng = np.random.default_rng(0)
    t = 2 * np.pi * rng.random(2000)
    circle = np.stack((np.cos(t), np.sin(t)), axis=1) @ np.linalg.qr(rng.standard_normal((8, 2)))[0].T
    noisy = circle + 1e-3 * rng.standard_normal((2000, 8))
    values = id_profile(noisy, max_neighbors=128).select("gride")["dimension"]
    assert values[0] > 1.5
    assert values[-1] == pytest.approx(1.0, abs=0.1)


def test_profile_of_a_table_without_rows_has_no_parts():
    distances, indices = oracle.torus_neighbors(300, 3, 0, 32)
    profile = id_profile(NeighborTable.from_arrays(distances, indices), max_neighbors=32)
    assert set(profile.estimator) == {"gride", "binomial"}


def test_profile_as_text_and_frame():
    profile = id_profile(X[:200], estimators=("gride",))
    assert "IDProfile of 200 rows" in str(profile)
    assert list(profile.to_frame()["estimator"]) == ["gride"] * 6
    assert profile._repr_html_().startswith("<pre>")
    with pytest.raises(ValueError, match="estimator='twonn' must be one of 'gride'"):
        profile.select("twonn")
    with pytest.raises(ValueError, match="estimators='mle' must be one of"):
        id_profile(X, estimators=("mle",))


def test_layers_share_anchors_and_searches():
    rng = np.random.default_rng(1)
    Z = rng.random((600, 4))
    layers = {"first": Z @ rng.standard_normal((4, 20)), "second": np.tanh(Z @ rng.standard_normal((4, 30)))}
    models = [TwoNN("mle"), MLE(10), Gride(4)]
    result = layer_dimensions(layers, estimators=models, anchors=300)
    assert [str(name) for name in result.layer] == ["first"] * 3 + ["second"] * 3
    expected = MLE(10, anchors=300).fit(layers["second"])
    assert result.dimension[4] == pytest.approx(expected.dimension_)
    assert (result.lower[4], result.upper[4]) != (None, None)
    assert (result.n_samples_used == 300).all()
    assert (result.seconds >= 0).all()
    frame = result.to_frame()
    assert set(frame.columns) >= {
        "layer",
        "estimator",
        "dimension",
        "lower",
        "upper",
        "n_neighbors",
        "radius",
        "seconds",
    }
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


def test_clipped_ranks_are_warned_about():
    with pytest.warns(
        UserWarning, match="max_neighbors=1000 of id_profile is clipped to 99, the number of o"
    ) as record:
        profile = id_profile(X[:100], max_neighbors=1000)
    assert [warning.filename for warning in record] == [__file__]
    assert profile.select("gride")["rank"].max() == 64
    with pytest.warns(
        UserWarning, match="max_neighbors=64 of id_profile is clipped to 20, the number of neighbours in"
    ):
        id_profile(NeighborTable.from_rows(X, 20))


def test_ties_at_small_ranks_leave_larger_ones():
    rows = np.random.default_rng(0).integers(0, 2, (400, 24)).astype(float)
    # With both values of the first two entries, every row has two neighbours at distance 1: r1 = r2 everywhere.
    for i in range(2):
        rows = np.concatenate((rows, np.abs(rows - np.eye(24)[i])))
    table = NeighborTable.from_rows(rows, 64)
    assert (table.distances[:, 0] == table.distances[:, 1]).all()
    profile = id_profile(rows)
    assert "twonn" not in profile.estimator
    assert profile.select("gride")["rank"].min() == 4
    assert profile.select("gride")["rank"].max() == 64
    assert np.isfinite(profile.dimension).all()
    with pytest.raises(ValueError, match="No scale of gride has 3 rows with different positive distances"):
        id_profile(np.eye(60), estimators=("gride",), max_neighbors=32)


def test_profile_names_what_is_wrong():
    for level in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"confidence_level={level} must lie between 0 and 1, both excluded"):
            id_profile(X, confidence_level=level)
    with pytest.raises(ValueError, match="estimators is empty"):
        id_profile(X, estimators=())
    with pytest.raises(TypeError, match=r"estimators='gride' must be a tuple of names: pass \('gride',\)"):
        id_profile(X, estimators="gride")
    with pytest.raises(ValueError, match="n_jobs=0 has no meaning"):
        id_profile(X, n_jobs=0)


def test_layers_tell_the_size_of_their_tables():
    repeated = np.repeat(X[:10], 30, axis=0)
    with pytest.warns(UserWarning, match="n_neighbors=20 of MLE is clipped to 9"):
        result = layer_dimensions({"a": repeated})
    np.testing.assert_array_equal(result.n_neighbors, [9, 9])
    with pytest.warns(UserWarning, match="n_neighbors=5000 of layer_dimensions is clipped to 299, .* of layer 'a'"):
        result = layer_dimensions({"a": X[:300]}, n_neighbors=5000)
    np.testing.assert_array_equal(result.n_neighbors, [299, 299])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(layer_dimensions({"a": X[:30]}).n_neighbors, [20, 20])


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
    assert np.isnan(result.lower[0])
    assert "nan" not in str(result)
    assert " none " in str(result)
