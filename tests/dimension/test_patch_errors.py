"""Standard errors of means over patches: correlations by simulation, sums as written, spreads of samples."""

import numpy as np
import pytest
from oracles import dimension as oracle

from isogeom import _kernels
from isogeom.dimension import ESS, LocalPCADimension, NeighborTable
from isogeom.dimension._overlap import pair_correlation, patch_inflation


@pytest.mark.parametrize("power", [0, 1, 2])
@pytest.mark.parametrize("d", [2, 3, 6])
def test_correlations_are_those_of_tensors_of_points_in_two_balls(d, power):
    rng = np.random.default_rng(d)
    y = rng.standard_normal((200_000, d))
    y *= rng.random((len(y), 1)) ** (1 / d) / np.linalg.norm(y, axis=1, keepdims=True)

    def tensors(points):
        lengths = np.linalg.norm(points, axis=1)[:, np.newaxis, np.newaxis]
        units = points[:, :, np.newaxis] / lengths
        return (lengths**power * (units * units.transpose(0, 2, 1) - np.eye(d) / d)).reshape(len(points), d * d)

    shares, correlations = pair_correlation(d, power)
    here = tensors(y)
    norm = np.sum((here.T @ here / len(y)) ** 2)
    for distance in (0.2, 0.5, 1.0):
        moved = y - distance * np.eye(d)[0]
        common = np.linalg.norm(moved, axis=1) < 1
        both = here[common].T @ tensors(moved[common]) / len(y)
        # Means of 200 000 points, squared, and a grid of 120 points.
        assert np.interp(common.mean(), shares, correlations) == pytest.approx(np.sum(both**2) / norm, abs=0.015)


@pytest.mark.parametrize("d", [1.0, 2.0, 3.3, 400.0])
def test_correlations_end_at_none_and_one(d):
    shares, correlations = pair_correlation(d, 1)
    assert (shares[0], correlations[0]) == (0.0, 0.0)
    assert (shares[-1], correlations[-1]) == pytest.approx((1.0, 1.0))
    assert (np.diff(shares) > 0).all()
    assert (correlations >= 0).all()
    assert (correlations <= 1 + 1e-12).all()


@pytest.mark.parametrize("path", ["array", "kernel"])
@pytest.mark.parametrize("anchors", [None, 150])
def test_the_inflation_is_as_written(anchors, path, monkeypatch):
    if path == "kernel":
        monkeypatch.setitem(_kernels._KERNELS, "overlap_counts", ("isogeom._kernels._overlaps", 0))
    else:
        monkeypatch.setattr(_kernels, "available", lambda *_args: None)
    table = NeighborTable.from_rows(np.random.default_rng(0).random((200, 3)), 20, anchors=anchors)
    m = table.n_queries
    values = np.random.default_rng(1).standard_normal(m)
    shares, correlations = pair_correlation(3.0, 2)
    sets = [set(line) for line in table.indices.tolist()]
    c = np.array([[np.interp(len(a & b) / 20, shares, correlations) for b in sets] for a in sets])
    place = {int(row): i for i, row in enumerate(table.queries)}
    pairs = [(i, place[p]) for i, line in enumerate(table.indices.tolist()) for p in line[:2] if p in place]
    total = c.sum() / m
    noise = np.mean([(values[i] - values[j]) ** 2 / 2 for i, j in pairs]) / np.mean([1 - c[i, j] for i, j in pairs])
    own = values.var(ddof=1)
    noise = min(noise, own)
    found = patch_inflation(values, table.indices, table.queries, 200, dimension=3.0, power=2)
    assert found.ratio == pytest.approx((own - noise + noise * total) / own, rel=1e-9)
    assert found.freedom == pytest.approx(max(m / total - 1, 2.0), rel=1e-9)


def test_patches_without_common_rows_are_independent():
    values = np.random.default_rng(0).standard_normal(30)
    neighbors = 100 + np.arange(300).reshape(30, 10)
    found = patch_inflation(values, neighbors, np.arange(30), 400, dimension=3.0, power=1)
    assert found.ratio == pytest.approx(1.0)
    assert found.freedom == pytest.approx(29.0)
    assert patch_inflation(np.ones(30), neighbors, np.arange(30), 400, dimension=3.0, power=1).ratio == 1.0


@pytest.mark.parametrize("model", [ESS(20), LocalPCADimension("participation", n_neighbors_local=30)])
@pytest.mark.parametrize("cloud", ["cube", "sphere"])
def test_standard_errors_are_the_spread(model, cloud):
    """Counting what differs at edges as dependence gave 1.6 times the spread in the cube."""
    fits = []
    for seed in range(60):
        X = np.random.default_rng(seed).random((600, 3)) if cloud == "cube" else oracle.hyper_sphere(600, 5, seed)
        fits.append((model.fit(X).dimension_, model.dimension_std_))
    values, errors = np.array(fits).T
    # 60 samples tell the spread to a tenth.
    assert errors.mean() == pytest.approx(values.std(ddof=1), rel=0.25)
