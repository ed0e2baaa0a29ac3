import math

import numpy as np
import pytest
from oracles.tangent import delta_isotropy, energy_share, isoscore_star_by_eigenvalues, random_normal_share
from scipy import stats

from isogeom import Moments
from isogeom.tangent import TangentProxy, haar_moments, tangent_alignment_test
from isogeom.tangent._statistics import sign_test_pvalue


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(1)
    scales = np.array([3.0, 2.5, 2.0] + [1.0] * 7)
    X = rng.standard_normal((500, 10)) * scales + 1
    G = rng.standard_normal((240, 10)) * scales * 1e-3 + 2e-4
    return X, G, TangentProxy(n_directions=3).fit(X)


def test_shares_and_ratios_by_definition(case):
    _, G, proxy = case
    r = tangent_alignment_test(G, proxy, n_resamples=9, rng=0)
    e_T, e_N = energy_share(G, proxy.basis_), energy_share(G, proxy.normal_control("next"))
    assert r.share_tangent == pytest.approx(e_T, rel=1e-10)
    assert r.share_normal == pytest.approx(e_N, rel=1e-10)
    assert r.energy_ratio == pytest.approx(e_T / e_N, rel=1e-10)
    assert r.chance == 0.3
    assert r.ratio_to_mean_normal == pytest.approx(e_T * 7 / ((1 - e_T) * 3), rel=1e-10)
    assert (r.n_samples, r.n_features, r.n_directions) == (240, 10, 3)


def test_null_matches_random_normal_subspaces(case):
    _, G, proxy = case
    r = tangent_alignment_test(G, proxy, n_resamples=2000, rng=0)
    rng = np.random.default_rng(5)
    reference = np.array([random_normal_share(G, proxy.basis_, rng) for _ in range(1000)])
    assert stats.ks_2samp(r.null_distribution, reference).pvalue > 0.01
    assert r.zscore == pytest.approx((r.share_tangent - reference.mean()) / reference.std(), rel=0.1)
    mean_normal = (1 - r.share_tangent) * 3 / 7
    assert r.null_distribution.mean() == pytest.approx(mean_normal, rel=0.01)


def test_pvalue_counts_draws_at_least_as_large(case):
    X, _, proxy = case
    G = np.random.default_rng(3).standard_normal((30, 10))
    r = tangent_alignment_test(G, proxy, n_resamples=199, rng=0)
    assert r.pvalue == (1 + np.sum(r.null_distribution >= r.share_tangent)) / 200
    floor = tangent_alignment_test(X - 1, proxy, n_resamples=999, rng=0)
    assert floor.pvalue == 0.001


@pytest.mark.parametrize("control", ["next", "complement", "lowest"])
def test_isotropy_changes_by_removing_directions_from_the_rows(case, control):
    _, G, proxy = case
    r = tangent_alignment_test(G, proxy, control=control, n_resamples=9, rng=0)
    assert r.delta_isotropy_tangent == pytest.approx(delta_isotropy(G, proxy.basis_, 0.2), rel=1e-8)
    assert r.delta_isotropy_normal == pytest.approx(delta_isotropy(G, proxy.normal_control(control), 0.2), rel=1e-8)


def test_complement_denominator_counts_the_dimensions_left(case):
    _, G, proxy = case
    r = tangent_alignment_test(G, proxy, denominator="complement", shrinkage=0.1, n_resamples=9, rng=0)
    before = isoscore_star_by_eigenvalues(np.cov(G.T), 0.1)
    P = np.eye(10) - proxy.basis_.T @ proxy.basis_
    after = isoscore_star_by_eigenvalues(P @ np.cov(G.T) @ P, 0.1, dimension=7)
    assert r.delta_isotropy_tangent == pytest.approx(100 * (after - before) / before, rel=1e-8)


def test_scale_of_the_gradients_does_not_matter(case):
    _, G, proxy = case
    small = tangent_alignment_test(G * 1e-9, proxy, rng=0)
    large = tangent_alignment_test(G * 1e9, proxy, rng=0)
    assert small.delta_isotropy_tangent == pytest.approx(large.delta_isotropy_tangent, rel=1e-8)
    assert small.zscore == pytest.approx(large.zscore, rel=1e-8)
    assert small.pvalue == large.pvalue


def test_mean_aggregation_averages_the_shares_of_rows(case):
    _, G, proxy = case
    G = np.vstack([G, np.zeros((3, 10)), 1e-30 * G[:2]]).astype(np.float32)
    r = tangent_alignment_test(G, proxy, aggregate="mean", n_resamples=9, rng=0)
    rows = np.vstack([G[:240], G[:2]]).astype(np.float64)
    shares = np.sum((rows @ proxy.basis_.T) ** 2, axis=1) / np.sum(rows**2, axis=1)
    assert r.share_tangent == pytest.approx(shares.mean(), rel=1e-5)
    assert r.n_samples == 242


def test_groups_give_the_exact_sign_test(case):
    _, G, proxy = case
    labels = np.repeat(np.arange(12), 20)
    r = tangent_alignment_test(G, proxy, groups=labels, n_resamples=9, rng=0)
    wins = sum(
        delta_isotropy(G[labels == g], proxy.basis_, 0.2)
        > delta_isotropy(G[labels == g], proxy.normal_control("next"), 0.2)
        for g in range(12)
    )
    assert r.n_groups == 12
    assert r.sign_test_pvalue == pytest.approx(stats.binomtest(wins, 12, alternative="greater").pvalue, rel=1e-12)
    without = tangent_alignment_test(G, proxy, n_resamples=9, rng=0)
    assert (without.sign_test_pvalue, without.n_groups) == (None, 0)
    assert without.share_tangent == pytest.approx(r.share_tangent, rel=1e-12)


@pytest.mark.parametrize(("wins", "losses"), [(10, 0), (9, 1), (0, 10), (5, 5), (40, 12)])
def test_sign_test_is_the_exact_binomial(wins, losses):
    expected = stats.binomtest(wins, wins + losses, alternative="greater").pvalue
    assert sign_test_pvalue(wins, losses) == pytest.approx(expected, rel=1e-12)


def test_sign_test_without_decided_groups_is_one():
    assert sign_test_pvalue(0, 0) == 1.0


def test_moments_give_the_same_result_as_rows(case):
    _, G, proxy = case
    labels = np.repeat([0, 1, 2], 80)
    rows = tangent_alignment_test(G, proxy, groups=labels, rng=0)
    parts = [Moments().update(G[labels == g]) for g in range(3)]
    streamed = tangent_alignment_test(parts, proxy, rng=0)
    whole = tangent_alignment_test(Moments().update(G), proxy, rng=0)
    for name in ("share_tangent", "energy_ratio", "zscore", "pvalue", "delta_isotropy_tangent"):
        assert getattr(streamed, name) == pytest.approx(getattr(rows, name), rel=1e-9)
        assert getattr(whole, name) == pytest.approx(getattr(rows, name), rel=1e-9)
    assert (streamed.sign_test_pvalue, streamed.n_groups) == (rows.sign_test_pvalue, 3)
    assert whole.n_groups == 0


def test_every_library_gives_the_same_result(case, as_array):
    X, G, _ = case
    labels = np.repeat(np.arange(4), 60)
    expected = tangent_alignment_test(G, TangentProxy(n_directions=3).fit(X), groups=labels, rng=0).to_dict()
    proxy = TangentProxy(n_directions=3).fit(as_array(X))
    result = tangent_alignment_test(as_array(G), proxy, groups=labels, rng=0).to_dict()
    for name, value in expected.items():
        assert result[name] == (pytest.approx(value, rel=1e-7) if isinstance(value, float) else value), name
        assert isinstance(result[name], (float, int, str))


def test_float32_agrees_with_float64(case):
    X, G, proxy = case
    proxy32 = TangentProxy(n_directions=3).fit(X.astype(np.float32))
    r32 = tangent_alignment_test(G.astype(np.float32), proxy32, rng=0)
    r64 = tangent_alignment_test(G, proxy, rng=0)
    assert r32.share_tangent == pytest.approx(r64.share_tangent, rel=1e-4)
    assert r32.delta_isotropy_tangent == pytest.approx(r64.delta_isotropy_tangent, rel=1e-3)


def test_the_same_seed_gives_the_same_null_and_another_seed_another(case):
    _, G, proxy = case
    a, b, c = (tangent_alignment_test(G, proxy, rng=seed).null_distribution for seed in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)


def test_half_rank_has_no_haar_variance(case):
    X, G, _ = case
    r = tangent_alignment_test(G, TangentProxy(n_directions=5).fit(X), rng=0)
    assert r.zscore is None
    np.testing.assert_allclose(r.null_distribution, r.null_distribution[0], rtol=1e-10)
    assert r.ratio_to_mean_normal == pytest.approx(r.energy_ratio, rel=1e-8)


def test_gradients_inside_the_proxy_leave_nothing_outside(case):
    _, G, proxy = case
    inside = G @ proxy.basis_.T @ proxy.basis_
    r = tangent_alignment_test(inside, proxy, rng=0)
    assert r.share_tangent == pytest.approx(1.0, abs=1e-12)
    assert r.delta_isotropy_tangent is None
    assert abs(r.delta_isotropy_normal) < 1e-6
    axis = TangentProxy(n_directions=1).fit(np.random.default_rng(0).standard_normal((9, 4)) * [9, 0, 0, 0])
    exact = tangent_alignment_test(np.eye(4)[:1] * [[1.0], [2.0]], axis, rng=0)
    assert math.isinf(exact.energy_ratio)
    assert math.isinf(exact.ratio_to_mean_normal)


def test_constant_gradients_have_energy_but_no_isotropy(case):
    _, _, proxy = case
    r = tangent_alignment_test(np.ones((40, 10)), proxy, rng=0)
    assert r.share_tangent == pytest.approx(energy_share(np.ones((1, 10)), proxy.basis_), rel=1e-10)
    assert (r.delta_isotropy_tangent, r.delta_isotropy_normal) == (None, None)
    one = tangent_alignment_test(np.ones((1, 10)), proxy, rng=0)
    assert one.delta_isotropy_tangent is None


def test_groups_without_variance_are_left_out_with_a_warning(case):
    _, G, proxy = case
    G = np.vstack([G, np.ones((20, 10))])
    labels = np.repeat(np.arange(13), 20)
    with pytest.warns(UserWarning, match="1 of 13 groups"):
        r = tangent_alignment_test(G, proxy, groups=labels, rng=0)
    assert r.n_groups == 12


def test_a_sign_test_without_a_usable_group_was_not_made(case):
    _, _, proxy = case
    G = np.repeat(np.random.default_rng(0).standard_normal((3, 10)), 20, axis=0)
    with pytest.warns(UserWarning, match="3 of 3 groups"):
        r = tangent_alignment_test(G, proxy, groups=np.repeat([0, 1, 2], 20), rng=0)
    assert (r.sign_test_pvalue, r.n_groups) == (None, 0)


@pytest.mark.parametrize("missing", [np.nan, None])
def test_missing_labels_are_an_error_not_lost_rows(case, missing):
    _, G, proxy = case
    labels = np.repeat(np.arange(4.0), 60).astype(object if missing is None else float)
    labels[:7] = missing
    with pytest.raises(ValueError, match="groups holds a missing label"):
        tangent_alignment_test(G, proxy, groups=labels)


def test_labels_may_be_strings_but_not_mixed(case):
    _, G, proxy = case
    labels = np.repeat(["a", "b", "c", "d"], 60)
    assert tangent_alignment_test(G, proxy, groups=labels, rng=0).n_groups == 4
    mixed = labels.astype(object)
    mixed[:60] = 1
    with pytest.raises(TypeError, match="groups mixes labels"):
        tangent_alignment_test(G, proxy, groups=mixed)


def test_results_compare_by_identity_and_hash(case):
    _, G, proxy = case
    a, b = (tangent_alignment_test(G, proxy, rng=0) for _ in range(2))
    assert a != b
    assert len({a, b, a}) == 2


def test_spectrum_of_the_null_is_that_of_the_normal_space(case):
    _, G, proxy = case
    r = tangent_alignment_test(G, proxy, n_resamples=1, rng=0)
    normal = np.linalg.svd(proxy.basis_)[2][3:]
    values = np.linalg.eigvalsh((G @ normal.T).T @ (G @ normal.T) / np.sum(G**2))
    mean, variance = haar_moments(values, 3)
    assert r.zscore == pytest.approx((r.share_tangent - mean) / np.sqrt(variance), rel=1e-9)


def test_result_prints_and_turns_into_a_table(case):
    _, G, proxy = case
    r = tangent_alignment_test(G, proxy, rng=0)
    frame = r.to_frame()
    assert frame.shape[0] == 1
    assert frame.loc[0, "energy_ratio"] == r.energy_ratio
    assert "null_distribution" not in frame
    assert "energy_ratio" in str(r)
    assert "<table>" in r._repr_html_()
    with pytest.raises(AttributeError):
        r.pvalue = 0.5


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"control": "first"}, ValueError, "control='first' must be one of"),
        ({"aggregate": "sum"}, ValueError, "aggregate='sum' must be one of"),
        ({"denominator": "d"}, ValueError, "denominator='d' must be one of"),
        ({"n_resamples": 0}, ValueError, "n_resamples=0 must be at least 1"),
        ({"n_resamples": 9.0}, TypeError, "n_resamples=9.0 must be an integer"),
        ({"shrinkage": 1.2}, ValueError, "shrinkage=1.2 must be at least 0 and at most 1"),
        ({"rng": "seed"}, ValueError, "rng='seed'"),
        ({"groups": [0, 1]}, ValueError, r"groups must have shape \(240,\)"),
        ({"groups": np.arange(240)}, ValueError, "single row"),
    ],
)
def test_bad_settings_are_named(case, change, error, message):
    _, G, proxy = case
    with pytest.raises(error, match=message):
        tangent_alignment_test(G, proxy, **change)


def test_bad_input_is_named(case):
    X, G, proxy = case
    with pytest.raises(TypeError, match="proxy must be a fitted TangentProxy, got ndarray"):
        tangent_alignment_test(G, G)
    with pytest.raises(ValueError, match="G has 4 features"):
        tangent_alignment_test(G[:, :4], proxy)
    with pytest.raises(ValueError, match="NaN"):
        tangent_alignment_test(np.where(G == G[0, 0], np.nan, G), proxy)
    with pytest.raises(ValueError, match="Every row is zero"):
        tangent_alignment_test(np.zeros_like(G), proxy)
    with pytest.raises(ValueError, match="Every row of G is zero"):
        tangent_alignment_test(np.zeros_like(G), proxy, aggregate="mean")
    with pytest.raises(ValueError, match="n_directions=6 is more than half"):
        tangent_alignment_test(G, TangentProxy(n_directions=6).fit(X))
    with pytest.raises(ValueError, match="G is empty"):
        tangent_alignment_test([], proxy)
    m = Moments().update(G)
    with pytest.raises(ValueError, match="groups cannot be combined with Moments"):
        tangent_alignment_test([m, m], proxy, groups=[0, 1])
    with pytest.raises(ValueError, match="aggregate='mean' needs the rows"):
        tangent_alignment_test(m, proxy, aggregate="mean")
    with pytest.raises(ValueError, match="moments of 4 features"):
        tangent_alignment_test(Moments().update(G[:, :4]), proxy)
