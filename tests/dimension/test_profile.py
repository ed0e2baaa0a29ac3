"""Scale profiles."""

import numpy as np
import pytest
from oracles import dimension as oracle

from isogeom.dimension import Gride, NeighborTable, TwoNN, id_profile

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
