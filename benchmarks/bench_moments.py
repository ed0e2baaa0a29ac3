"""Streamed moments against scikit-learn's IncrementalPCA (streamed too) and its covariance solver (not streamed)."""

import numpy as np
import pytest
from scipy.linalg import subspace_angles
from sklearn.decomposition import PCA, IncrementalPCA

from isogeom import Moments
from isogeom._linalg import eigh_descending

N_ROWS, N_FEATURES, N_TOP, BATCH = 30_000, 768, 50, 2000


def rows(dtype, offset=0.0):
    rng = np.random.default_rng(0)
    rotation, _ = np.linalg.qr(rng.standard_normal((N_FEATURES, N_FEATURES)))
    spectrum = np.arange(1, N_FEATURES + 1.0) ** -0.5
    return ((rng.standard_normal((N_ROWS, N_FEATURES)) * spectrum) @ rotation + offset).astype(dtype)


def batches(X):
    return (X[start : start + BATCH] for start in range(0, len(X), BATCH))


def streamed(X):
    moments = Moments()
    for batch in batches(X):
        moments.update(batch)
    values, vectors = eigh_descending(moments.covariance())
    return values[:N_TOP], vectors[:N_TOP]


def incremental(X):
    model = IncrementalPCA(N_TOP)
    for batch in batches(X):
        model.partial_fit(batch)
    return model


def exact(X):
    values, vectors = np.linalg.eigh(np.cov(X.astype(np.float64).T))
    return values[::-1][:N_TOP], vectors.T[::-1][:N_TOP]


def error(values, expected):
    return float(np.max(np.abs(values / expected - 1)))


@pytest.mark.parametrize(("dtype", "floor", "tolerance"), [("float32", 12, 1e-6), ("float64", 8, 1e-12)])
def test_incremental_pca(compare, dtype, floor, tolerance):
    X = rows(dtype)
    expected, vectors = exact(X)
    ours, directions = streamed(X)
    assert error(ours, expected) < tolerance
    assert np.degrees(subspace_angles(directions.T, vectors.T)[0]) < 1e-2
    # The peer truncates after every batch: its values are off by percents, so it is the slower and the less exact one.
    assert error(incremental(X).explained_variance_, expected) > 1e-2
    ratio = compare(
        f"top {N_TOP} of {N_ROWS} x {N_FEATURES} {dtype}, batches of {BATCH}",
        lambda: streamed(X),
        lambda: incremental(X),
        peer_name="IncrementalPCA",
        repeats=3,
    )
    assert ratio > floor


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_covariance_solver(compare, dtype):
    X = rows(dtype)
    expected, _ = exact(X)

    def peer():
        return PCA(N_TOP, svd_solver="covariance_eigh").fit(X)

    assert error(streamed(X)[0], expected) < 1e-6
    assert error(peer().explained_variance_, expected) < 1e-4
    # It holds all rows at once and sums in their dtype: the price of streaming, and of float64 sums, is bounded here.
    ratio = compare(
        f"top {N_TOP} of {N_ROWS} x {N_FEATURES} {dtype}", lambda: streamed(X), peer, peer_name="PCA covariance_eigh"
    )
    assert ratio > 0.5


def test_values_of_offset_float32_rows():
    X = rows("float32", offset=1000.0)
    expected, _ = exact(X)
    assert error(streamed(X)[0], expected) < 1e-5
    assert error(PCA(N_TOP, svd_solver="covariance_eigh").fit(X).explained_variance_, expected) > 0.1
