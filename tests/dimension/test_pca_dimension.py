import numpy as np
import pytest
from conftest import make_array
from oracles import dimension_pca as oracle
from scipy.linalg import hadamard

from isogeom import Moments, _xp
from isogeom.datasets import hyper_ball, hyper_sphere, make_manifold
from isogeom.dimension import NeighborTable, PCADimension
from isogeom.dimension._pca_rules import RULES, Spectra, apply_rule, marchenko_pastur_median, null_quantile
from isogeom.isotropy import participation_ratio

A = np.hstack((hyper_ball(300, 5), np.zeros((300, 5))))
B = hyper_sphere(300, 4, random_state=1)
COUNTS = ("share", "kaiser", "broken_stick", "fukunaga_olsen", "max_gap", "fan")
# Fukunaga-Olsen count and participation ratio of benchmark manifolds, 2000 rows.
MANIFOLDS = {
    "M1": (11, 10.92),
    "M2": (3, 2.20),
    "M3": (5, 2.77),
    "M5a": (3, 2.41),
    "M5b": (3, 2.22),
    "M6": (12, 11.92),
    "M7": (3, 2.93),
    "M9": (20, 19.78),
    "M10a": (11, 10.93),
    "M10b": (18, 17.82),
    "M10c": (25, 24.73),
    "M10d": (71, 68.62),
    "M11": (3, 2.15),
    "M12": (20, 19.78),
    "Mbeta": (10, 10.60),
    "Mp1": (1, 1.25),
    "Mp2": (1, 1.06),
    "Mp3": (1, 1.02),
}


def spiked(n, p, strengths, seed):
    """Rows with a few spikes above noise of variance 1, rotated."""
    variances = np.ones(p)
    variances[: len(strengths)] += strengths
    return (np.random.RandomState(seed).randn(n, p) * np.sqrt(variances)) @ hadamard(p) / np.sqrt(p)


class TestFixtures:
    @pytest.mark.parametrize(
        ("X", "rule", "expected"),
        [
            (A, "fukunaga_olsen", 5),
            (A, "fan", 4),
            (A, "max_gap", 5),
            (B, "fukunaga_olsen", 5),
            (B, "fan", 2),
            (B, "max_gap", 1),
        ],
    )
    def test_other_packages(self, X, rule, expected):
        assert PCADimension(rule).fit(X).dimension_ == expected

    @pytest.mark.parametrize("center", [True, False])
    @pytest.mark.parametrize(
        ("rows", "expected"), [((500, 128, (10, 6, 3), 0), (3, 3, 3)), ((200, 256, (20, 10), 1), (2, 2, 2))]
    )
    def test_signal_rank(self, rows, expected, center):
        X = spiked(*rows)
        rules = ("marchenko_pastur", "gavish_donoho", "parallel")
        assert tuple(PCADimension(rule, center=center).fit(X).dimension_ for rule in rules) == expected

    @pytest.mark.parametrize("center", [True, False])
    def test_signal_rank_of_known_noise(self, center):
        X = spiked(256, 128, (5, 1, 0.8, 0.6), 2)
        for scale in (1.0, 1e3):
            found = [
                PCADimension(rule, noise_variance=scale**2, center=center).fit(scale * X).dimension_
                for rule in ("marchenko_pastur", "gavish_donoho")
            ]
            assert found == [2, 1]

    @pytest.mark.parametrize("name", MANIFOLDS)
    def test_benchmark_manifolds(self, name):
        X = make_manifold(name).X
        count, ratio = MANIFOLDS[name]
        assert PCADimension("fukunaga_olsen").fit(X).dimension_ == count
        assert PCADimension("participation").fit(X).dimension_ == pytest.approx(ratio, abs=0.005 + 1e-9)

    def test_share_keeps_most_of_the_variance(self):
        # A peer's default threshold is 0.05, so that its answer is 1 almost always.
        model = PCADimension().fit(make_manifold("M9").X)
        shares = np.cumsum(model.eigenvalues_) / np.sum(model.eigenvalues_)
        assert shares[int(model.dimension_) - 1] >= 0.95 > shares[int(model.dimension_) - 2]


class TestRules:
    @pytest.mark.parametrize("rule", COUNTS)
    def test_oracle(self, rule):
        rng = np.random.default_rng(0)
        spectra = np.sort(rng.exponential(size=(40, 12)) ** 3, axis=1)[:, ::-1]
        found = apply_rule(rule, Spectra(spectra, 12, 100), RULES[rule])
        np.testing.assert_array_equal(found, [oracle.count(rule, s) for s in spectra])

    @pytest.mark.parametrize("rule", COUNTS)
    def test_zeros_that_are_left_out(self, rule):
        # With fewer rows than features only the other eigenvalues are known.
        values = np.array([5.0, 3, 1, 0.4, 0.3, 0.2, 0.1])
        short = Spectra(values, 12, 7)
        padded = Spectra(np.concatenate((values, np.full(5, 1e-300))), 12, 7)
        assert apply_rule(rule, short, RULES[rule]) == apply_rule(rule, padded, RULES[rule])

    def test_participation_of_a_flat_spectrum(self):
        for m in (1, 4, 9):
            values = np.concatenate((np.ones(m), np.zeros(9 - m)))
            assert float(apply_rule("participation", Spectra(values, 9, 50), None)) == m

    def test_zero_spectrum(self):
        for rule in (*COUNTS, "participation", "marchenko_pastur"):
            assert np.isnan(apply_rule(rule, Spectra(np.zeros((2, 5)), 5, 50), RULES[rule])).all()

    @pytest.mark.parametrize("aspect", [0.1, 0.5, 1.0])
    def test_median_of_the_noise(self, aspect):
        sample = oracle.marchenko_pastur_sample(aspect, np.random.default_rng(0))
        assert marchenko_pastur_median(aspect) == pytest.approx(np.median(sample), rel=0.02)

    def test_null_of_many_rows_is_that_of_rows(self):
        variances = np.array([3.0, 2, 1, 0.5])
        rng = np.random.default_rng(0)
        drawn = [np.linalg.eigvalsh(np.cov((rng.standard_normal((31, 4)) * np.sqrt(variances)).T)) for _ in range(4000)]
        expected = np.quantile(drawn, 0.9, axis=0)[::-1]
        np.testing.assert_allclose(null_quantile(variances, 30, 0.9, 4000, rng), expected, rtol=0.03)
        wide = null_quantile(np.ones(40), 10, 0.5, 200, rng)
        assert wide.shape == (10,)
        assert wide[0] == pytest.approx((1 + 2) ** 2, rel=0.15)


class TestParticipation:
    X = np.random.default_rng(0).standard_normal((7, 5)) * [1, 2, 1, 0.5, 1] + [3, 0, 0, 1, 0]

    @pytest.mark.parametrize("center", [True, False])
    @pytest.mark.parametrize("kind", ["samples", "features", "both"])
    @pytest.mark.parametrize("transpose", [False, True])
    def test_oracle(self, kind, center, transpose):
        X = np.ascontiguousarray(self.X.T) if transpose else self.X
        expected = oracle.corrected_ratio(X, kind, center)
        model = PCADimension("participation", bias_correction=kind, center=center, duplicates="keep")
        if expected <= 0 or not np.isfinite(expected):
            with pytest.raises(ValueError, match="is not positive"):
                model.fit(X)
        else:
            assert model.fit(X).dimension_ == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize("shape", [(60, 12), (12, 60)])
    def test_equals_the_function(self, shape):
        X = np.random.default_rng(1).standard_normal(shape) @ np.diag(np.geomspace(1, 0.1, shape[1])) + 5
        assert PCADimension("participation").fit(X).dimension_ == pytest.approx(participation_ratio(X), rel=1e-10)

    def test_uncentred(self):
        X = self.X
        G = X.T @ X
        expected = np.trace(G) ** 2 / np.sum(G * G)
        assert PCADimension("participation", center=False).fit(X).dimension_ == pytest.approx(expected, rel=1e-10)
        assert PCADimension("participation").fit(X).dimension_ != pytest.approx(expected, rel=0.1)

    def test_corrections_remove_the_bias(self):
        # 40 rows of 30 equal variances: 1 / PR is too large by 1 / 40.
        rng = np.random.default_rng(0)
        naive, corrected = [], []
        for _ in range(60):
            X = rng.standard_normal((40, 30))
            naive.append(PCADimension("participation").fit(X).dimension_)
            corrected.append(PCADimension("participation", bias_correction="samples").fit(X).dimension_)
        assert np.mean(naive) < 18
        # The ratio is that of unbiased estimates.
        assert 1 / np.mean(1 / np.array(corrected)) == pytest.approx(30, rel=0.03)

    def test_few_features_of_a_population(self):
        # Features drawn from a population whose covariance has 10 equal directions.
        rng = np.random.default_rng(0)
        inverses = []
        for _ in range(40):
            X = rng.standard_normal((300, 10)) @ rng.standard_normal((10, 25))
            inverses.append(1 / PCADimension("participation", bias_correction="both").fit(X).dimension_)
        assert 1 / np.mean(inverses) == pytest.approx(10, rel=0.05)

    def test_standard_error(self):
        scales = np.arange(1, 9)
        found = [
            PCADimension("participation", bias_correction=c).fit(
                np.random.default_rng(s).standard_normal((300, 8)) * scales
            )
            for c in (None, "samples")
            for s in range(80)
        ]
        for part in (found[:80], found[80:]):
            actual = np.std([m.dimension_ for m in part], ddof=1)
            assert np.mean([m.dimension_std_ for m in part]) == pytest.approx(actual, rel=0.25)
        low, high = found[0].dimension_interval_
        assert low < found[0].dimension_ < high

    def test_too_few_rows(self):
        with pytest.raises(ValueError, match="needs at least 4 rows, got 3"):
            PCADimension("participation", bias_correction="samples").fit(np.eye(3))


class TestMoments:
    @pytest.mark.parametrize("rule", list(RULES))
    @pytest.mark.parametrize("center", [True, False])
    def test_equal_rows(self, rule, center):
        X = spiked(300, 32, (10, 6), 0) + 1
        moments = Moments().update(X[:100]).merge(Moments().update(X[100:]))
        model = PCADimension(rule, center=center, n_resamples=20).fit(moments)
        expected = PCADimension(rule, center=center, n_resamples=20).fit(X)
        assert model.dimension_ == pytest.approx(expected.dimension_, rel=1e-10)
        assert model.n_samples_used_ == 300
        assert model.n_features_in_ == 32
        np.testing.assert_allclose(model.eigenvalues_, expected.eigenvalues_, rtol=1e-8)
        with pytest.raises(ValueError, match="was fitted on moments"):
            model.transform(X)

    def test_corrections(self):
        X = self.rows = spiked(300, 32, (10, 6), 0)
        moments = Moments().update(X)
        model = PCADimension("participation", bias_correction="features")
        assert model.fit(moments).dimension_ == pytest.approx(model.fit(X).dimension_, rel=1e-10)
        with pytest.raises(ValueError, match="moments hold no fourth powers"):
            PCADimension("participation", bias_correction="both").fit(moments)
        with pytest.raises(ValueError, match="X has moments of 2"):
            PCADimension().fit(Moments().update(X[:2]))


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("scale", [1e-150, 1e150])
def test_scale_and_rotation(rule, scale):
    X = spiked(100, 16, (10, 6), 0)
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((16, 16)))[0]
    expected = PCADimension(rule, n_resamples=20).fit(X)
    found = PCADimension(rule, n_resamples=20).fit((X @ rotation + 0.5)[::-1] * scale)
    if rule == "parallel":
        # The null has the variances of the features, which a rotation changes.
        expected = PCADimension(rule, n_resamples=20).fit(X @ rotation)
    assert found.dimension_ == pytest.approx(expected.dimension_, rel=1e-9)


@pytest.mark.parametrize("rule", ["share", "participation", "fukunaga_olsen"])
def test_zero_padding(rule):
    X = hyper_sphere(200, 4)
    padded = np.hstack((X, np.zeros((200, 7))))
    assert PCADimension(rule).fit(padded).dimension_ == pytest.approx(PCADimension(rule).fit(X).dimension_, rel=1e-10)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("k", [8, 60])
def test_local_dimensions(rule, k):
    """The rule on the rows of a neighbourhood is what a fit on them gives."""
    X = spiked(150, 16, (30, 20), 0)
    table = NeighborTable.from_rows(X, k)
    model = PCADimension(rule, n_neighbors_local=k, n_resamples=20)
    local = model.fit_transform(X)
    assert local.shape == (150, 1)
    assert np.isfinite(local).all()
    if rule == "parallel":
        assert set(np.unique(local)) <= set(range(17))
        return
    expected = [PCADimension(rule).fit(X[np.asarray(table.indices[i])]).dimension_ for i in range(6)]
    np.testing.assert_allclose(local[:6, 0], expected, rtol=1e-9)


@pytest.mark.parametrize("kind", ["samples", "features", "both"])
def test_local_corrections(kind):
    X = np.random.default_rng(0).standard_normal((120, 5)) @ np.random.default_rng(1).standard_normal((5, 30))
    table = NeighborTable.from_rows(X, 40)
    model = PCADimension("participation", bias_correction=kind, n_neighbors_local=40).fit(X)
    expected = [
        PCADimension("participation", bias_correction=kind).fit(X[np.asarray(table.indices[i])]).dimension_
        for i in range(4)
    ]
    np.testing.assert_allclose(model.transform(X[:4])[:, 0], expected, rtol=1e-8)


def test_duplicates():
    X = hyper_ball(100, 3)
    twice = np.concatenate((X, X[:1]))
    kept, dropped = (
        PCADimension("participation").fit(twice),
        PCADimension("participation", duplicates="drop").fit(twice),
    )
    assert dropped.dimension_ == pytest.approx(participation_ratio(X), rel=1e-12)
    assert kept.dimension_ == pytest.approx(participation_ratio(twice), rel=1e-12)
    assert (kept.n_duplicates_, kept.n_samples_used_, dropped.n_samples_used_) == (1, 101, 100)
    with pytest.raises(ValueError, match="1 of 101 rows repeat"):
        PCADimension(duplicates="raise").fit(twice)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (PCADimension("x"), "rule='x' must be one of 'share'"),
        (PCADimension(threshold=2.0), "threshold=2.0"),
        (PCADimension(center=2), "center=2"),
        (PCADimension(bias_correction="rows"), "bias_correction='rows'"),
        (PCADimension(noise_variance=0), "noise_variance=0 must be positive"),
        (PCADimension(n_resamples=0), "n_resamples=0"),
        (PCADimension(metric="precomputed"), "PCADimension needs rows"),
    ],
)
def test_bad_parameters(model, match):
    with pytest.raises(ValueError, match=match):
        model.fit(hyper_ball(20, 3))


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("shape", [(90, 8), (20, 40)])
def test_libraries_agree(rule, shape, as_array, library):
    X = np.random.default_rng(0).standard_normal(shape) * np.geomspace(3, 0.1, shape[1])
    expected = PCADimension(rule, n_resamples=10, n_neighbors_local=15).fit(X)
    model = PCADimension(rule, n_resamples=10, n_neighbors_local=15).fit(as_array(X))
    assert model.dimension_ == pytest.approx(expected.dimension_, rel=1e-9)
    local = _xp.to_numpy(model.transform(make_array(library, X[:5])))
    np.testing.assert_allclose(local, expected.transform(X[:5]), rtol=1e-8)


def test_float32():
    X = (spiked(300, 32, (10, 6), 0) + 100).astype(np.float32)
    expected = PCADimension("participation").fit(X.astype(np.float64)).dimension_
    assert PCADimension("participation").fit(X).dimension_ == pytest.approx(expected, rel=1e-5)


def test_variances_beyond_the_range_of_floats():
    import warnings

    X = np.random.default_rng(0).standard_normal((50, 4))
    expected = PCADimension().fit(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale, end in ((1e200, np.inf), (1e-200, 0.0)):
            model = PCADimension().fit(X * scale)
            assert model.dimension_ == expected.dimension_
            np.testing.assert_array_equal(model.eigenvalues_, end)
