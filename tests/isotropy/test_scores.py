from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.isotropy import (
    CLOUD,
    CLOUD_COVARIANCE,
    anisotropic,
    isoscore_by_eigenvalues,
    isoscore_chain,
    isoscore_star_by_eigenvalues,
)

from isogeom import Moments
from isogeom.isotropy import effective_rank, isoscore, isoscore_star, participation_ratio

OCTAHEDRON = np.array([[2, 0, 0], [-2, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]])
SCORES = [isoscore, isoscore_star, participation_ratio, effective_rank]
COVARIANCE_SCORES = [isoscore, isoscore_star, participation_ratio]


def exact_isoscore(spectrum):
    values = [Fraction(v) for v in spectrum]
    ratio = sum(values) ** 2 / sum(v * v for v in values)
    return (ratio - 1) / (len(values) - 1)


SPECTRA = [
    ((3, 2, 1), Fraction(11, 14)),
    ((3, 1), Fraction(3, 5)),
    ((1, 1, 0), Fraction(1, 2)),
    ((4, 1, 1), Fraction(1, 2)),
    ((9, 4, 1), Fraction(1, 2)),
    ((10, *[1] * 9), Fraction(28, 109)),
    ((*[1] * 384, *[0] * 384), Fraction(383, 767)),
    ((1,) * 7, Fraction(1)),
    ((1, 0, 0), Fraction(0)),
]


class TestExactSpectra:
    @pytest.mark.parametrize(("spectrum", "expected"), SPECTRA)
    def test_isoscore(self, spectrum, expected):
        assert exact_isoscore(spectrum) == expected
        assert isoscore(spectrum=spectrum) == pytest.approx(float(expected), rel=1e-14, abs=0)
        assert isoscore(spectrum=spectrum[::-1]) == pytest.approx(float(expected), rel=1e-14, abs=0)
        assert isoscore(covariance=np.diag(spectrum)) == pytest.approx(float(expected), rel=1e-14, abs=0)

    @pytest.mark.parametrize(
        ("first", "expected", "rel"), [(100, 0.0897185846, 1e-9), (10**6, 2.0008e-06, 3e-5), (10**6, None, 1e-9)]
    )
    def test_one_dominant_direction_of_768(self, first, expected, rel):
        spectrum = (first, *[1] * 767)
        expected = float(exact_isoscore(spectrum)) if expected is None else expected
        assert isoscore(spectrum=spectrum) == pytest.approx(expected, rel=rel)

    @pytest.mark.parametrize("d", [2, 3, 64])
    def test_one_direction_is_exactly_zero_and_identity_exactly_one(self, d):
        assert isoscore(spectrum=[1.0] + [0.0] * (d - 1)) == 0.0
        assert isoscore(covariance=np.eye(d)) == 1.0
        assert participation_ratio(covariance=np.eye(d)) == d
        direction = np.random.default_rng(d).standard_normal(d)
        assert isoscore(covariance=np.outer(direction, direction)) == pytest.approx(0, abs=1e-15)

    def test_equal_isoscore_separates_from_other_scores(self):
        spectra = [(1, 1, 0), (4, 1, 1), (9, 4, 1)]
        assert [round(isoscore(spectrum=s), 12) for s in spectra] == [0.5, 0.5, 0.5]
        ranks = [effective_rank(spectrum=s, on="eigenvalues") for s in spectra]
        assert ranks == pytest.approx([2, 2.381, 2.294], abs=5e-4)

    @given(st.lists(st.floats(0, 1e6), min_size=2, max_size=12).filter(lambda v: max(v) > 1e-3))
    def test_published_chain_on_any_spectrum(self, spectrum):
        assert isoscore(spectrum=spectrum) == pytest.approx(isoscore_chain(spectrum), rel=1e-9, abs=1e-12)
        assert 0 <= isoscore(spectrum=spectrum) <= 1


class TestFixedClouds:
    def test_cloud(self):
        assert isoscore(CLOUD) == pytest.approx(575 / 1892, rel=1e-13)
        assert participation_ratio(CLOUD) == pytest.approx(1.6078224101, rel=1e-10)
        assert isoscore(covariance=CLOUD_COVARIANCE) == pytest.approx(575 / 1892, rel=1e-13)
        assert isoscore(CLOUD.T) == pytest.approx(0.1046, abs=5e-5)

    def test_cloud_star(self):
        assert isoscore_star(CLOUD, target="identity") == pytest.approx(0.4322052166, rel=1e-9)
        assert isoscore_star(CLOUD) == pytest.approx(0.4651505153, rel=1e-9)

    def test_octahedron(self):
        assert isoscore(OCTAHEDRON) == pytest.approx(0.5, rel=1e-14)

    @pytest.mark.parametrize(
        ("on", "center", "expected"),
        [
            ("singular-values", False, 2.4436866),
            ("singular-values", True, 2.5456772),
            ("eigenvalues", True, 1.9109885),
        ],
    )
    def test_effective_rank(self, on, center, expected):
        assert effective_rank(CLOUD, on=on, center=center) == pytest.approx(expected, abs=5e-8)
        assert effective_rank(Moments().update(CLOUD), on=on, center=center) == pytest.approx(expected, abs=5e-8)

    def test_effective_rank_default_is_the_original_definition(self):
        assert effective_rank(CLOUD) == effective_rank(CLOUD, on="singular-values", center=False)


class TestStar:
    @pytest.mark.parametrize(("scale", "identity"), [(1, 0.575221), (100, 0.500832), (0.01, 0.995896)])
    def test_scale_trap(self, scale, identity):
        spectrum = scale * np.array([4.0, 1, 1])
        assert isoscore_star(spectrum=spectrum, target="identity") == pytest.approx(identity, abs=5e-7)
        assert isoscore_star(spectrum=spectrum) == pytest.approx(0.636364, abs=5e-7)

    @pytest.mark.parametrize("shrinkage", [0, 0.2, 0.75, 1])
    @pytest.mark.parametrize("shape", [(40, 6), (6, 15)])
    def test_targets_against_explicit_matrices(self, shrinkage, shape):
        X = anisotropic(*shape)
        C, d = np.cov(X.T), shape[1]
        reference = np.cov(anisotropic(100, d, seed=3).T)
        moments = Moments().update(X)
        for target, matrix in [
            ("identity", np.eye(d)),
            ("scaled-identity", np.trace(C) / d * np.eye(d)),
            (reference, reference),
        ]:
            expected = isoscore_star_by_eigenvalues(C, shrinkage, matrix)
            for given_as in ({"X": X}, {"covariance": C}, {"moments": moments}, {"X": moments}):
                got = isoscore_star(**given_as, shrinkage=shrinkage, target=target)
                assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)

    def test_no_shrinkage_is_isoscore(self):
        for target in ("identity", "scaled-identity", np.eye(3)):
            assert isoscore_star(CLOUD, shrinkage=0, target=target) == pytest.approx(isoscore(CLOUD), rel=1e-14)

    def test_zero_covariance_against_a_fixed_target_is_zero_variance_too(self):
        with pytest.raises(ValueError, match="0/0"):
            isoscore_star(np.ones((5, 3)), target="identity")

    def test_zero_target(self):
        assert isoscore_star(CLOUD, target=np.zeros((3, 3))) == pytest.approx(isoscore(CLOUD), rel=1e-14)
        with pytest.raises(ValueError, match="0/0"):
            isoscore_star(CLOUD, target=np.zeros((3, 3)), shrinkage=1)

    @pytest.mark.parametrize("scale", [1e-200, 1e200])
    def test_extreme_units(self, scale):
        assert isoscore_star(CLOUD * scale) == pytest.approx(0.4651505153, rel=1e-9)
        limit = 1.0 if scale < 1 else isoscore(CLOUD)
        assert isoscore_star(CLOUD * scale, target="identity") == pytest.approx(limit, rel=1e-12)

    @pytest.mark.parametrize(
        ("kwargs", "error", "match"),
        [
            ({"shrinkage": 1.5}, ValueError, "shrinkage=1.5 must be at least 0 and at most 1"),
            ({"shrinkage": -0.1}, ValueError, "shrinkage=-0.1"),
            ({"shrinkage": "a"}, TypeError, "shrinkage='a' must be a real number"),
            ({"target": "eye"}, ValueError, "target='eye' must be one of 'scaled-identity', 'identity'"),
            ({"target": np.eye(4)}, ValueError, r"target must have shape \(3, 3\).*got \(4, 4\)"),
            ({"target": np.ones((3, 2))}, ValueError, "target must be square"),
            ({"target": np.triu(np.ones((3, 3)))}, ValueError, "target is not symmetric"),
            ({"target": np.diag([1, 1, np.nan])}, ValueError, "target contains NaN"),
            ({"target": np.diag([1.0, 1, -1])}, ValueError, "target has the negative diagonal entry -1"),
        ],
    )
    def test_bad_options(self, kwargs, error, match):
        with pytest.raises(error, match=match):
            isoscore_star(CLOUD, **kwargs)

    def test_array_target_needs_eigenvectors(self):
        with pytest.raises(ValueError, match="cannot be added to a spectrum"):
            isoscore_star(spectrum=[2.0, 1.0], target=np.eye(2))

    def test_target_in_another_library(self):
        strict = pytest.importorskip("array_api_strict")
        with pytest.raises(TypeError, match="pass all arrays in one library"):
            isoscore_star(CLOUD, target=strict.eye(3))

    def test_indefinite_target(self):
        # A zero diagonal escapes the cheap checks; the mixture does not.
        with pytest.raises(ValueError, match="not positive semidefinite"):
            isoscore_star(CLOUD, target=np.array([[0.0, 9, 0], [9, 0, 0], [0, 0, 0]]), shrinkage=1)


class TestInvariance:
    @settings(max_examples=30, deadline=None)
    @given(st.integers(3, 40), st.integers(2, 30), st.integers(0, 2**31), st.floats(-12, 12), st.floats(-3, 3))
    def test_rotation_scale_translation_permutation(self, n, d, seed, exponent, offset):
        rng = np.random.default_rng(seed)
        X = rng.standard_normal((n, d)) * rng.uniform(0.05, 3, d)
        rotation, _ = np.linalg.qr(rng.standard_normal((d, d)))
        moved = (X @ rotation)[rng.permutation(n)] * 10**exponent
        moved = moved + offset * np.abs(moved).max() * rng.standard_normal(d)
        for score in COVARIANCE_SCORES:
            assert score(moved) == pytest.approx(score(X), rel=1e-9, abs=1e-11)
        centred = {"center": True, "on": "eigenvalues"}
        assert effective_rank(moved, **centred) == pytest.approx(effective_rank(X, **centred), rel=1e-6)
        assert effective_rank(X @ rotation * 10**exponent) == pytest.approx(effective_rank(X), rel=1e-6)

    @settings(max_examples=30, deadline=None)
    @given(st.integers(3, 40), st.integers(2, 30), st.integers(0, 2**31))
    def test_repeating_all_rows_changes_nothing(self, n, d, seed):
        X = np.random.default_rng(seed).standard_normal((n, d))
        twice = np.vstack([X, X])
        # The covariance only changes by the factor between the divisors n - 1 and n - 1/2, which cancels.
        for score in SCORES:
            assert score(twice) == pytest.approx(score(X), rel=1e-6)
        factor = (n - 1) / (n - 0.5)
        shrunk = isoscore_star(covariance=factor * np.cov(X.T), target="identity")
        assert isoscore_star(twice, target="identity") == pytest.approx(shrunk, rel=1e-9)

    @settings(max_examples=20, deadline=None)
    @given(st.integers(3, 60), st.integers(2, 40), st.integers(0, 2**31), st.data())
    def test_moments_of_any_split(self, n, d, seed, data):
        X = np.random.default_rng(seed).standard_normal((n, d)) + 5
        cut = data.draw(st.integers(0, n))
        moments = Moments().update(X[cut:]).merge(Moments().update(X[:cut]))
        for score in COVARIANCE_SCORES:
            assert score(moments=moments) == pytest.approx(score(X), rel=1e-9, abs=1e-12)
            assert score(moments) == score(moments=moments)

    @pytest.mark.parametrize("n", [3, 20, 64, 65, 300])
    def test_rows_covariance_spectrum_and_chain_agree(self, n):
        X = anisotropic(n, 64, offset=1.0)
        C = np.cov(X.T)
        expected = isoscore_by_eigenvalues(X)
        assert isoscore(X) == pytest.approx(expected, rel=1e-10)
        assert isoscore(covariance=C) == pytest.approx(expected, rel=1e-10)
        assert isoscore(spectrum=np.linalg.eigvalsh(C)) == pytest.approx(expected, rel=1e-10)

    def test_few_rows_cap(self):
        X = np.random.default_rng(0).standard_normal((20, 64))
        assert isoscore(X) <= 18 / 63 + 1e-12
        # Equidistant rows (a regular simplex) attain it.
        assert isoscore(np.eye(20, 64)) == pytest.approx(18 / 63, rel=1e-12)

    def test_finite_sample_bias_is_as_documented(self):
        assert isoscore(np.random.default_rng(0).standard_normal((1000, 768))) == pytest.approx(0.564, abs=0.01)


class TestReferencePackage:
    @pytest.fixture(scope="class")
    def reference(self):
        pytest.importorskip("torch")
        return pytest.importorskip("IsoScore.IsoScore", reason="IsoScore is not installed")

    @pytest.mark.filterwarnings("ignore::UserWarning")
    @pytest.mark.parametrize("shape", [(5, 3), (200, 16), (60, 100)])
    def test_agreement(self, reference, shape):
        X = CLOUD if shape == (5, 3) else anisotropic(*shape)
        # The package computes constants in float32.
        assert isoscore(X) == pytest.approx(float(reference.IsoScore(X)), abs=2e-6)
        theirs = float(reference.IsoScore_star(X, np.eye(shape[1]), 0.2))
        assert isoscore_star(X, target="identity") == pytest.approx(theirs, abs=2e-6)


def test_public_names():
    import isogeom.isotropy

    assert isogeom.isotropy.__all__ == ["effective_rank", "isoscore", "isoscore_star", "participation_ratio"]
