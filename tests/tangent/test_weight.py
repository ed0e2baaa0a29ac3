import numpy as np
import pytest
from oracles.tangent import all_pairings, delta_isotropy

from isogeom import Moments, _xp
from isogeom.tangent import TangentProxy, shuffled_pairing_share, tangent_alignment_test, weight_alignment_test


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(2)
    X = rng.standard_normal((300, 8)) * np.linspace(3, 0.5, 8) + 0.7
    G = X @ rng.standard_normal((8, 5)) * 0.1 + rng.standard_normal((300, 5)) + 0.3
    return X, G, TangentProxy(n_directions=2).fit(X)


def test_shuffled_share_is_the_ratio_of_expectations_over_all_pairings():
    rng = np.random.default_rng(0)
    X, G = rng.standard_normal((6, 4)) + 1.5, rng.standard_normal((6, 3)) - 0.5
    Q, _ = np.linalg.qr(rng.standard_normal((4, 2)))
    inside, everything = all_pairings(G, X, Q.T)
    assert shuffled_pairing_share(X, G, Q.T) == pytest.approx(inside / everything, rel=1e-12)
    assert shuffled_pairing_share(Moments().update(X), Moments().update(G), Q.T) == pytest.approx(
        inside / everything, rel=1e-12
    )


def test_shuffled_share_is_the_explained_variance_ratio_when_centred(case):
    X, G, proxy = case
    centred = X - X.mean(axis=0)
    ratio = np.sum((centred @ proxy.basis_.T) ** 2) / np.sum(centred**2)
    assert shuffled_pairing_share(centred, G, proxy.basis_) == pytest.approx(ratio, rel=1e-10)
    second = np.sum((X @ proxy.basis_.T) ** 2) / np.sum(X**2)
    assert abs(shuffled_pairing_share(X, G, proxy.basis_) - second) > 1e-3


def test_the_test_runs_on_the_rows_of_the_weight_gradient(case):
    X, G, proxy = case
    rows = tangent_alignment_test(G.T @ X, proxy, rng=0)
    r = weight_alignment_test(X, G, proxy, n_permutations=0, rng=0)
    for name in ("share_tangent", "share_normal", "energy_ratio", "zscore", "pvalue", "delta_isotropy_tangent"):
        assert getattr(r, name) == pytest.approx(getattr(rows, name), rel=1e-9)
    assert (r.gradient, r.n_samples, r.n_pairs, r.shuffled_pvalue) == ("weight", 5, 300, None)
    assert r.ratio_to_shuffled == pytest.approx(r.share_tangent / r.shuffled_share)


def test_groups_have_a_weight_gradient_each(case):
    X, G, proxy = case
    labels = np.repeat(np.arange(10), 30)
    r = weight_alignment_test(X, G, proxy, groups=labels, n_permutations=0, rng=0)
    ungrouped = weight_alignment_test(X, G, proxy, n_permutations=0, rng=0)
    assert r.share_tangent == pytest.approx(ungrouped.share_tangent, rel=1e-10)
    wins = sum(
        delta_isotropy(G[labels == g].T @ X[labels == g], proxy.basis_, 0.2)
        > delta_isotropy(G[labels == g].T @ X[labels == g], proxy.normal_control("next"), 0.2)
        for g in range(10)
    )
    from scipy import stats

    assert r.n_groups == 10
    assert r.sign_test_pvalue == pytest.approx(stats.binomtest(wins, 10, alternative="greater").pvalue)


def test_permutations_calibrate_independent_factors_and_detect_pairing():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((400, 8)) * np.linspace(3, 0.5, 8)
    proxy = TangentProxy(n_directions=2).fit(X)
    independent = rng.standard_normal((400, 4))
    null = weight_alignment_test(X, independent, proxy, n_permutations=99, rng=0)
    assert null.shuffled_pvalue > 0.01
    paired = X @ proxy.basis_.T @ rng.standard_normal((2, 4)) + rng.standard_normal((400, 4))
    aligned = weight_alignment_test(X, paired, proxy, n_permutations=99, rng=0)
    assert aligned.shuffled_pvalue == 0.01
    assert aligned.ratio_to_shuffled > 1.2


def test_mean_of_permuted_shares_is_near_the_closed_form(case):
    X, G, proxy = case
    rng = np.random.default_rng(0)
    inside = everything = 0.0
    for _ in range(2000):
        weight = G.T @ X[rng.permutation(len(X))]
        inside += np.sum((weight @ proxy.basis_.T) ** 2)
        everything += np.sum(weight**2)
    assert shuffled_pairing_share(X, G, proxy.basis_) == pytest.approx(inside / everything, rel=0.01)


def test_every_library_gives_the_same_result(case, as_array):
    X, G, _ = case
    labels = np.repeat(np.arange(10), 30)
    options = {"groups": labels, "n_permutations": 9, "rng": 0}
    expected = weight_alignment_test(X, G, TangentProxy(n_directions=2).fit(X), **options).to_dict()
    proxy = TangentProxy(n_directions=2).fit(as_array(X))
    result = weight_alignment_test(as_array(X), as_array(G), proxy, **options).to_dict()
    for name, value in expected.items():
        assert result[name] == (pytest.approx(value, rel=1e-7) if isinstance(value, float) else value), name


def test_mixed_precision_pairs(case):
    X, G, proxy = case
    mixed = weight_alignment_test(X.astype(np.float32), G, proxy, n_permutations=0, rng=0)
    plain = weight_alignment_test(X, G, proxy, n_permutations=0, rng=0)
    assert mixed.share_tangent == pytest.approx(plain.share_tangent, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_of_float32_factors_does_not_matter(case, scale):
    X, G, proxy = case
    plain = weight_alignment_test(X.astype(np.float32), G.astype(np.float32), proxy, n_permutations=9, rng=0)
    scaled = (X * scale).astype(np.float32), (G * scale).astype(np.float32)
    r = weight_alignment_test(*scaled, proxy, n_permutations=9, rng=0)
    assert r.share_tangent == pytest.approx(plain.share_tangent, rel=1e-5)
    assert r.shuffled_pvalue == plain.shuffled_pvalue


def test_blocks_do_not_change_the_weight_gradient(case, monkeypatch):
    X, G, proxy = case
    whole = weight_alignment_test(X, G, proxy, n_permutations=0, rng=0)
    blocks = _xp.row_blocks
    monkeypatch.setattr(_xp, "row_blocks", lambda rows, size=7: blocks(rows, min(size, 7)))
    small = weight_alignment_test(X, G, proxy, n_permutations=0, rng=0)
    assert small.share_tangent == pytest.approx(whole.share_tangent, rel=1e-10)


def test_bad_input_is_named(case):
    X, G, proxy = case
    with pytest.raises(ValueError, match="X has 300 rows and G has 299"):
        weight_alignment_test(X, G[:-1], proxy)
    with pytest.raises(ValueError, match="X has 5 features"):
        weight_alignment_test(G, G, proxy)
    with pytest.raises(ValueError, match="at least 2 pairs"):
        weight_alignment_test(X[:1], G[:1], proxy)
    with pytest.raises(ValueError, match="n_permutations=-1 must be at least 0"):
        weight_alignment_test(X, G, proxy, n_permutations=-1)
    with pytest.raises(ValueError, match="Every entry of G is zero"):
        weight_alignment_test(X, np.zeros_like(G), proxy)
    with pytest.raises(ValueError, match="No pairing"):
        shuffled_pairing_share(X, np.zeros_like(G), proxy.basis_)
    with pytest.raises(ValueError, match="orthonormal rows"):
        shuffled_pairing_share(X, G, 3 * np.ones((2, 8)))
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(ValueError, match="G is on torch on device cpu, X on numpy"):
        shuffled_pairing_share(X, torch.asarray(G), proxy.basis_)
    with pytest.raises(ValueError, match="same pairs"):
        shuffled_pairing_share(X, G[:10], proxy.basis_)
