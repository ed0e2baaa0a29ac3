import numpy as np
import pytest
from oracles.graph_distance import published, published_2019
from scipy.optimize import minimize

from isogeom.dimension._geodesic_fit import GEODESIC_WINDOW, GRAPH_WINDOW, fit_published, fit_sine, moments


def sine_counts(dimension, n_bins=4000, total=1e9):
    """Exact expected counts of distances on a sphere of radius 1."""
    edges = np.linspace(0, np.pi, n_bins + 1)
    weights = np.sin((edges[1:] + edges[:-1]) / 2) ** (dimension - 1)
    return total * weights / weights.sum(), edges


@pytest.mark.parametrize("window", [GRAPH_WINDOW, GEODESIC_WINDOW])
@pytest.mark.parametrize("dimension", [1.7, 2, 5, 10, 40])
def test_the_exact_density_gives_its_dimension(dimension, window):
    fit = fit_sine(*sine_counts(dimension), window)
    assert fit.settled
    assert fit.dimension == pytest.approx(dimension, rel=1e-5)
    assert fit.peak == pytest.approx(np.pi / 2, rel=1e-5)
    assert fit.width == pytest.approx(min(1 / np.sqrt(dimension - 1), 0.45 * np.pi), rel=1e-4)
    assert fit.misfit < 1e-5


def test_the_fit_is_the_maximum_of_the_likelihood_in_its_window():
    rng = np.random.default_rng(0)
    counts = np.histogram(rng.gamma(20, 1.0, 20000), np.linspace(0, 60, 601))[0]
    edges = np.linspace(0, 60, 601)
    fit = fit_sine(counts, edges, GRAPH_WINDOW)
    x = (edges[1:] + edges[:-1]) / 2
    low, high = fit.peak - 2 * fit.width, fit.peak + fit.width / 2
    share = np.clip((x - low) / 0.1 + 0.5, 0, 1) * np.clip((high - x) / 0.1 + 0.5, 0, 1)
    keep = share > 0
    x, share = x[keep], share[keep]
    p = counts[keep] * share / (counts[keep] @ share)

    def loss(parameters):
        logs = parameters[0] * np.log(np.sin(np.pi * x / 2 / parameters[1]))
        return np.log(share @ np.exp(logs)) - p @ logs

    best = minimize(loss, [8.0, 19.0], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-15, "maxiter": 5000})
    assert fit.settled
    assert fit.dimension == pytest.approx(1 + best.x[0], rel=1e-3)
    assert fit.peak == pytest.approx(best.x[1], rel=1e-3)


def test_distances_on_a_line_have_dimension_1():
    edges = np.linspace(0, 1, 501)
    # Between points of a segment, and of a circle.
    segment, circle = 1e6 * (1 - (edges[1:] + edges[:-1]) / 2), np.full(500, 1e6)
    for counts in (segment, circle):
        fit = fit_sine(counts, edges, GRAPH_WINDOW)
        assert 1 <= fit.dimension < 2.7
    assert fit_sine(circle, edges, GRAPH_WINDOW).dimension == pytest.approx(1, abs=0.02)


def test_what_cannot_be_fitted_is_said_so():
    counts = np.zeros(100)
    counts[[30, 60]] = 50, 50
    fit = fit_sine(counts, np.linspace(0, 1, 101), GRAPH_WINDOW)
    assert not fit.settled
    mean, std = 0.455, 0.15
    assert fit.dimension == pytest.approx(1 + (2 * mean / (np.pi * std)) ** 2)
    counts[60] = 0
    with pytest.raises(ValueError, match="equal"):
        fit_sine(counts, np.linspace(0, 1, 101), GRAPH_WINDOW)


def test_scale_of_the_distances_does_not_matter():
    counts, edges = sine_counts(6.0)
    reference = fit_sine(counts, edges, GRAPH_WINDOW)
    for scale in (1e-150, 1e150):
        fit = fit_sine(counts, scale * edges, GRAPH_WINDOW)
        assert fit.dimension == pytest.approx(reference.dimension, rel=1e-9)
        assert fit.peak == pytest.approx(scale * reference.peak, rel=1e-9)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dimension", [2, 6, 15])
def test_published_recipe_equals_its_oracle(dimension, strict):
    v = np.random.default_rng(dimension).standard_normal((300, dimension + 1))
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    values = np.arccos(np.clip(v @ v.T, -1, 1))[np.triu_indices(300, 1)]
    counts, edges = np.histogram(values, 50)
    fit = fit_published(counts, edges, values.mean(), values.std(), 0.1, strict=strict)
    real, integer = (published_2019 if strict else published)(values, 0.1, 50)
    assert fit.dimension == pytest.approx(real, rel=1e-9)
    # Least squares over the integers is a parabola with its lowest point at the real value.
    assert integer == round(fit.dimension)


def test_published_recipe_gives_up_with_a_reason():
    counts, edges = sine_counts(5, n_bins=50)
    counts = counts.astype(np.int64)
    mean, std = moments(counts, (edges[1:] + edges[:-1]) / 2)
    with pytest.raises(ValueError, match="longest edge"):
        fit_published(counts, edges, mean, std, 2.0)
    with pytest.raises(ValueError, match="far from its mean"):
        fit_published(counts, edges, mean + 2, std, 0.1)
    # One bin beyond a standard deviation is allowed by the rules of 2016 only.
    peak = (edges[np.argmax(counts)] + edges[np.argmax(counts) + 1]) / 2
    away = peak + std + edges[1] - edges[0]
    assert fit_published(counts, edges, away, std, 0.1).dimension > 1
    with pytest.raises(ValueError, match="far from its mean"):
        fit_published(counts, edges, away, std, 0.1, strict=True)
    counts[np.argmax(counts) - 2] = 0
    with pytest.raises(ValueError, match="empty bins"):
        fit_published(counts, edges, mean, std, 0.1, strict=True)
