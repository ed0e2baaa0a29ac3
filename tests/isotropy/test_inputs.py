import math
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from oracles.isotropy import (
    CLOUD,
    CLOUD_COVARIANCE,
    anisotropic,
    isoscore_by_eigenvalues,
    isoscore_by_gram,
)

from isogeom import Moments
from isogeom.isotropy import effective_rank, isoscore, isoscore_star, participation_ratio

SCORES = [isoscore, isoscore_star, participation_ratio, effective_rank]
COVARIANCE_SCORES = [isoscore, isoscore_star, participation_ratio]


class TestLibraries:
    @pytest.mark.parametrize("shape", [(50, 7), (7, 20)])
    @pytest.mark.parametrize("dtype", [np.float64, np.float32])
    def test_same_numbers_everywhere(self, as_array, shape, dtype):
        x = anisotropic(*shape, offset=2.0).astype(dtype)
        X = as_array(x)
        C = as_array(np.cov(x.T.astype(float)))
        spectrum = as_array(np.linalg.eigvalsh(np.cov(x.T.astype(float))))
        rel = 1e-10 if dtype == np.float64 else 1e-5
        for score in COVARIANCE_SCORES:
            expected = score(x.astype(float))
            for got in (score(X), score(covariance=C), score(spectrum=spectrum), score(moments=Moments().update(X))):
                assert isinstance(got, float)
                assert got == pytest.approx(expected, rel=rel)
        assert effective_rank(X) == pytest.approx(effective_rank(x.astype(float)), rel=1e-6)
        assert isoscore_star(X, target=C) == pytest.approx(isoscore(X), rel=rel)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_half_precision_tensors(self, dtype):
        torch = pytest.importorskip("torch")
        X = torch.asarray(anisotropic(60, 8) * 100).to(getattr(torch, dtype)).requires_grad_()
        expected = isoscore(X.detach().double())
        assert isoscore(X) == pytest.approx(expected, rel=1e-5)
        assert X.grad is None

    def test_half_precision_numpy(self):
        X = (anisotropic(60, 8) * 30).astype(np.float16)
        assert isoscore(X) == pytest.approx(isoscore(X.astype(float)), rel=1e-5)

    @pytest.mark.parametrize("kind", [np.uint8, np.int64, bool])
    def test_integers_and_booleans(self, kind):
        X = np.random.default_rng(0).integers(0, 255, (50, 6)).astype(kind)
        assert isoscore(X) == pytest.approx(isoscore(X.astype(float)), rel=1e-12)

    def test_layouts(self, tmp_path):
        X = anisotropic(60, 9)
        expected = isoscore(X[::-2, ::3].copy())
        assert isoscore(np.asfortranarray(X)[::-2, ::3]) == pytest.approx(expected, rel=1e-12)
        np.save(tmp_path / "x.npy", X)
        assert isoscore(np.load(tmp_path / "x.npy", mmap_mode="r")) == isoscore(X)

    @pytest.mark.parametrize("shape", [(50, 7), (7, 20)])
    def test_device_without_float64(self, shape):
        strict = pytest.importorskip("array_api_strict")
        x = anisotropic(*shape, offset=2.0).astype(np.float32)
        X = strict.asarray(x, device=strict.Device("no_float64"))
        for score in COVARIANCE_SCORES:
            assert score(X) == pytest.approx(score(x), rel=1e-4)
        assert effective_rank(X) == pytest.approx(effective_rank(x), rel=1e-3)
        with pytest.raises(ValueError, match="0/0"):
            isoscore(strict.full(shape, 0.1, dtype=strict.float32, device=strict.Device("no_float64")))

    def test_many_blocks(self):
        X = anisotropic(5000, 12, offset=3.0)
        assert isoscore(X) == pytest.approx(isoscore_by_eigenvalues(X), rel=1e-10)
        wide = anisotropic(90, 90)[:40] @ np.random.default_rng(1).standard_normal((90, 60_000)) + 1
        assert isoscore(wide) == pytest.approx(isoscore_by_gram(wide), rel=1e-10)


class TestPrecision:
    @pytest.mark.parametrize("shape", [(400, 32), (30, 64)])
    @pytest.mark.parametrize(("offset", "spread"), [(1e3, 1.0), (1e4, 1e-2)])
    def test_large_offset_in_float32(self, shape, offset, spread):
        X = (anisotropic(*shape) * spread + offset).astype(np.float32)
        assert isoscore(X) == pytest.approx(isoscore_by_eigenvalues(X), rel=1e-5)

    @pytest.mark.parametrize("shape", [(40, 6), (6, 40)])
    @pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-12, 1e12, 1e22, 1e30])
    def test_scale_of_float32(self, shape, scale):
        x = anisotropic(*shape)
        X = (x / np.abs(x).max()).astype(np.float32)
        scaled = X * np.float32(scale)
        for score in SCORES:
            assert score(scaled) == pytest.approx(score(X), rel=1e-5)

    @pytest.mark.parametrize("shape", [(40, 6), (6, 40)])
    @pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
    def test_scale_of_float64(self, shape, scale):
        X = anisotropic(*shape)
        for score in SCORES:
            assert score(X * scale) == pytest.approx(score(X), rel=1e-6)
        assert isoscore(covariance=np.cov(anisotropic(40, 6).T) * scale) == pytest.approx(isoscore(anisotropic(40, 6)))

    def test_spread_far_below_a_constant_column_of_float32(self):
        X = anisotropic(5, 12).astype(np.float32) * np.float32(1e-3)
        expected = isoscore(X) * 11 / 12
        assert isoscore(np.column_stack([X, np.full(5, 1e30, dtype=np.float32)])) == pytest.approx(expected, rel=1e-5)

    def test_rogue_constant_column_does_not_hide_the_others(self):
        X = anisotropic(200, 5)
        rogue = np.column_stack([X, np.full(200, 1e9)])
        assert participation_ratio(rogue) == pytest.approx(participation_ratio(X), rel=1e-6)

    @pytest.mark.parametrize("d", [2, 5, 300])
    def test_stays_in_range_on_the_bounds(self, d):
        rng = np.random.default_rng(d)
        rank_one = np.outer(rng.standard_normal(50), rng.standard_normal(d))
        isotropic = np.vstack([np.eye(d), -np.eye(d)])
        for X in (rank_one, rank_one.astype(np.float32)):
            assert 0 <= isoscore(X) < 1e-5
        for X in (isotropic, isotropic.astype(np.float32) / 3):
            assert 1 - 1e-6 < isoscore(X) <= 1


class TestInputErrors:
    @pytest.mark.parametrize("score", SCORES)
    def test_exactly_one_input(self, score):
        with pytest.raises(ValueError, match=r"exactly one of X, spectrum, covariance, moments; got none of them"):
            score()
        with pytest.raises(ValueError, match="got X and covariance"):
            score(CLOUD, covariance=CLOUD_COVARIANCE)
        with pytest.raises(ValueError, match="got spectrum and moments"):
            score(spectrum=[1.0, 2.0], moments=Moments().update(CLOUD))

    @pytest.mark.parametrize("score", SCORES)
    @pytest.mark.parametrize(
        ("kwargs", "error", "match"),
        [
            ({"X": np.zeros((5, 3))}, ValueError, "0/0 for an input with zero variance"),
            ({"X": np.zeros((3, 5))}, ValueError, "0/0"),
            ({"spectrum": [0.0, 0.0]}, ValueError, "0/0"),
            ({"covariance": np.zeros((3, 3))}, ValueError, "0/0"),
            ({"X": [[1, np.nan], [1, 2], [3, 4]]}, ValueError, "X contains NaN"),
            ({"X": [[1, np.inf], [1, 2], [3, 4]]}, ValueError, "X contains infinity"),
            ({"X": np.ones(4)}, ValueError, "Expected 2D array"),
            ({"X": sp.eye_array(4)}, TypeError, "X is sparse"),
            ({"covariance": sp.eye_array(4)}, TypeError, "covariance is sparse"),
            ({"X": np.ones((3, 2)) * 1j}, ValueError, "Complex data not supported"),
            ({"spectrum": [1.0, -0.5]}, ValueError, "spectrum holds the negative value -0.5"),
            ({"spectrum": [-1.0, -0.5]}, ValueError, "spectrum holds the negative value -1"),
            ({"spectrum": [1.0, np.nan]}, ValueError, "spectrum contains NaN"),
            ({"spectrum": [1.0, np.inf]}, ValueError, "spectrum contains NaN or infinity"),
            ({"spectrum": []}, ValueError, "spectrum must be a non-empty vector"),
            ({"spectrum": np.eye(2)}, ValueError, r"spectrum must be a non-empty vector.*\(2, 2\)"),
            ({"spectrum": [1j, 2]}, ValueError, "spectrum has dtype complex128"),
            ({"spectrum": ["a", "b"]}, ValueError, "must be numeric: spectrum"),
            ({"covariance": np.ones((3, 2))}, ValueError, "covariance must be square.*pass X"),
            ({"covariance": [[1.0, 0.5], [0.4, 1.0]]}, ValueError, r"covariance is not symmetric.*covariance.T\) / 2"),
            ({"covariance": np.diag([1.0, -0.5])}, ValueError, "negative diagonal entry -0.5"),
            ({"covariance": [[1.0, 3.0], [3.0, 1.0]]}, ValueError, "not positive semidefinite"),
            ({"covariance": [[0.0, 3.0], [3.0, 0.0]]}, ValueError, "not positive semidefinite"),
            ({"covariance": [[1.0, np.nan], [np.nan, 1.0]]}, ValueError, "covariance contains NaN"),
            ({"moments": CLOUD}, TypeError, "moments must be an isogeom.Moments, got ndarray"),
            ({"moments": Moments()}, ValueError, "moments of at least . rows, got 0"),
        ],
    )
    def test_messages(self, score, kwargs, error, match):
        with pytest.raises(error, match=match):
            score(**kwargs)

    @pytest.mark.parametrize("score", COVARIANCE_SCORES)
    @pytest.mark.parametrize("value", [3.0, 0.1, 1e6 + 0.1])
    @pytest.mark.parametrize("shape", [(5000, 3), (300, 3), (3, 5), (100, 2000)])
    @pytest.mark.parametrize("dtype", [np.float64, np.float32])
    def test_constant_rows(self, score, value, shape, dtype):
        X = np.full(shape, value, dtype=dtype)
        with pytest.raises(ValueError, match="0/0"):
            score(X)
        with pytest.raises(ValueError, match="0/0"):
            effective_rank(X, center=True)
        assert effective_rank(X) == pytest.approx(1, abs=1e-6)

    @pytest.mark.parametrize("score", COVARIANCE_SCORES)
    def test_constant_moments(self, score):
        parts = [np.full((n, 4), 0.1) for n in (1000, 17, 3, 2500)]
        moments = Moments()
        for part in parts:
            moments.update(part)
        with pytest.raises(ValueError, match="0/0"):
            score(moments)

    @pytest.mark.parametrize("score", COVARIANCE_SCORES)
    def test_one_row(self, score):
        with pytest.raises(ValueError, match="minimum of 2 is required"):
            score(CLOUD[:1])
        with pytest.raises(ValueError, match="at least 2 rows, got 1"):
            score(Moments().update(CLOUD[:1]))

    @pytest.mark.parametrize("score", [isoscore, isoscore_star])
    @pytest.mark.parametrize("kwargs", [{"X": CLOUD[:, :1]}, {"spectrum": [2.0]}, {"covariance": [[2.0]]}])
    def test_one_feature(self, score, kwargs):
        with pytest.raises(ValueError, match="needs >= 2 features, got 1"):
            score(**kwargs)

    def test_one_feature_has_a_participation_ratio(self):
        assert participation_ratio(CLOUD[:, :1]) == 1.0

    @pytest.mark.parametrize("score", COVARIANCE_SCORES)
    @pytest.mark.parametrize("d", [2, 30])
    def test_two_rows_warn_at_the_callers_line(self, score, d):
        X = np.random.default_rng(0).standard_normal((2, d))
        for rows in (X, Moments().update(X)):
            with pytest.warns(UserWarning, match="2 rows carries no information") as caught:
                score(rows)
            assert caught[0].filename == __file__
        with pytest.warns(UserWarning, match="isoscore of 2 rows"):
            assert isoscore(X) == pytest.approx(0, abs=1e-14)

    @pytest.mark.parametrize("score", COVARIANCE_SCORES)
    @pytest.mark.parametrize("n", [3, 4])
    def test_few_rows_do_not_warn(self, score, n):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert math.isfinite(score(CLOUD[:n]))

    def test_rounding_negatives_of_an_eigensolver_are_accepted(self):
        assert isoscore(spectrum=[2.0, 1.0, -1e-16]) == isoscore(spectrum=[2.0, 1.0, 0.0])
