import numpy as np
import pytest
from scipy import stats

from isogeom.datasets import make_sparse_codes, make_tangent_data
from isogeom.isotropy import isoscore

MAKERS = [make_tangent_data, make_sparse_codes]


class TestTangentData:
    def test_shapes_and_basis(self):
        data = make_tangent_data(50, 12, n_tangent=5, rng=0)
        assert data.X.shape == data.G.shape == (50, 12)
        assert data.X.dtype == data.G.dtype == data.basis.dtype == np.float64
        np.testing.assert_allclose(data.basis @ data.basis.T, np.eye(5), atol=1e-14)

    @pytest.mark.parametrize("share", [0.0, 0.125, 0.5, 0.9, 1.0])
    def test_share_of_gradient_energy(self, share):
        data = make_tangent_data(20_000, 32, n_tangent=4, tangent_share=share, rng=1)
        inside = np.sum((data.G @ data.basis.T) ** 2)
        total = np.sum(data.G**2)
        assert inside / total == pytest.approx(share, abs=0.01)
        assert total / 20_000 == pytest.approx(1, abs=0.02)
        if share in (0.0, 1.0):
            assert inside / total == pytest.approx(share, abs=1e-14)

    def test_chance_share_is_isotropic(self):
        data = make_tangent_data(20_000, 16, n_tangent=4, tangent_share=0.25, rng=2)
        assert isoscore(data.G) > 0.99

    def test_covariance_of_activations(self):
        data = make_tangent_data(50_000, 10, n_tangent=3, noise=0.5, rng=3)
        expected = data.basis.T @ data.basis + 0.25 * np.eye(10)
        np.testing.assert_allclose(np.cov(data.X.T), expected, atol=0.03)
        np.testing.assert_allclose(data.X.mean(axis=0), 0, atol=0.03)

    def test_isoscore_closed_form(self):
        r, d, v = 4, 20, 0.3**2
        ratio = (r + d * v) ** 2 / (r * (1 + v) ** 2 + (d - r) * v**2)
        data = make_tangent_data(50_000, d, n_tangent=r, noise=0.3, rng=4)
        assert isoscore(data.X) == pytest.approx((ratio - 1) / (d - 1), rel=0.02)

    def test_without_noise_activations_lie_in_the_subspace(self):
        data = make_tangent_data(30, 8, n_tangent=2, noise=0, rng=0)
        np.testing.assert_allclose(data.X @ data.basis.T @ data.basis, data.X, atol=1e-13)

    def test_activations_and_gradients_are_independent(self):
        data = make_tangent_data(20_000, 6, n_tangent=2, rng=5)
        assert np.abs(np.corrcoef(data.X.T, data.G.T)[:6, 6:]).max() < 0.04

    def test_span_is_uniform(self):
        # The squared length of the projection of a fixed vector on a Haar subspace is Beta(r/2, (d - r)/2).
        shares = [make_tangent_data(1, 7, n_tangent=2, rng=seed).basis[:, 0] for seed in range(400)]
        shares = [float(column @ column) for column in shares]
        assert stats.kstest(shares, stats.beta(1, 2.5).cdf).pvalue > 0.01

    @pytest.mark.parametrize(
        ("kwargs", "match"),
        [
            ({"n_tangent": 64}, "n_tangent=64 must be at least 1 and at most 63. Some feature must be left"),
            ({"n_tangent": 0}, "n_tangent=0"),
            ({"n_features": 1}, "n_features=1 must be at least 2"),
            ({"n_samples": 0}, "n_samples=0"),
            ({"tangent_share": 1.1}, "tangent_share=1.1"),
            ({"noise": -1}, "noise=-1"),
        ],
    )
    def test_out_of_range(self, kwargs, match):
        with pytest.raises(ValueError, match=match):
            make_tangent_data(**kwargs)


class TestSparseCodes:
    def test_construction(self):
        data = make_sparse_codes(4000, 30, 12, density=0.3, noise=0.1, rng=0)
        assert data.codes.shape == (4000, 12)
        np.testing.assert_allclose(np.linalg.norm(data.dictionary, axis=1), 1, atol=1e-14)
        residual = data.X - data.codes @ data.dictionary
        assert residual.std() == pytest.approx(0.1, rel=0.01)
        assert abs(residual.mean()) < 1e-3
        assert (data.codes > 0).mean() == pytest.approx(0.3, abs=0.01)
        assert data.codes.min() == 0.0
        assert stats.kstest(data.codes[data.codes > 0], stats.expon.cdf).pvalue > 0.01
        assert (data.dictionary < 0).mean() == pytest.approx(0.5, abs=0.1)

    @pytest.mark.parametrize(("density", "expected"), [(0, 0.0), (1, 1.0)])
    def test_extreme_densities(self, density, expected):
        data = make_sparse_codes(50, 6, 3, density=density, noise=0, rng=0)
        assert (data.codes > 0).mean() == expected
        np.testing.assert_array_equal(data.X, data.codes @ data.dictionary)

    def test_more_atoms_than_features(self):
        assert make_sparse_codes(5, 3, 10, rng=0).dictionary.shape == (10, 3)

    @pytest.mark.parametrize(
        ("kwargs", "match"),
        [
            ({"density": 1.5}, "density=1.5"),
            ({"density": -0.5}, "density=-0.5"),
            ({"noise": -1}, "noise=-1"),
            ({"n_samples": 0}, "n_samples=0"),
            ({"n_features": 0}, "n_features=0"),
            ({"n_components": 0}, "n_components=0"),
        ],
    )
    def test_out_of_range(self, kwargs, match):
        with pytest.raises(ValueError, match=match):
            make_sparse_codes(**kwargs)


@pytest.mark.parametrize("make", MAKERS)
class TestBoth:
    def test_seeds(self, make):
        first, again, other = make(rng=0), make(rng=0), make(rng=1)
        for name in first:
            np.testing.assert_array_equal(first[name], again[name])
            assert not np.array_equal(first[name], other[name])

    def test_generator_advances(self, make):
        rng = np.random.default_rng(0)
        assert not np.array_equal(make(rng=rng).X, make(rng=rng).X)

    def test_leaves_the_global_generator_alone(self, make):
        np.random.seed(0)  # noqa: NPY002
        expected = np.random.random()  # noqa: NPY002
        np.random.seed(0)  # noqa: NPY002
        make()
        assert np.random.random() == expected  # noqa: NPY002

    def test_wrong_types(self, make):
        with pytest.raises(TypeError, match=r"n_samples=2\.5 must be an integer"):
            make(2.5)
        with pytest.raises(TypeError, match="noise='a' must be a real number"):
            make(noise="a")
        with pytest.raises(ValueError, match="rng='a' must be None"):
            make(rng="a")
