"""PCA: in one batch against scikit-learn's covariance solver, streamed against IncrementalPCA."""

import functools

import numpy as np
import pytest
import sklearn.decomposition
from scipy.linalg import subspace_angles

from isogeom import Moments
from isogeom.decomposition import PCA

N_FEATURES, N_TOP, BATCH = 768, 50, 2000
N_ROWS = {False: 20_000, True: 100_000}


@functools.lru_cache(maxsize=1)
def data(n, dtype):
    X = rows(n, dtype)
    return X, exact(X)


def rows(n, dtype):
    """Rows with variances 1 / i on a random basis and with means of 1."""
    rng = np.random.default_rng(0)
    rotation, _ = np.linalg.qr(rng.standard_normal((N_FEATURES, N_FEATURES)))
    spectrum = np.arange(1, N_FEATURES + 1.0) ** -0.5
    X = np.empty((n, N_FEATURES), dtype=dtype)
    for start in range(0, n, BATCH):
        noise = rng.standard_normal((min(BATCH, n - start), N_FEATURES))
        X[start : start + BATCH] = (noise * spectrum) @ rotation + 1.0
    return X


def batches(X):
    return (X[start : start + BATCH] for start in range(0, len(X), BATCH))


def exact(X):
    """Top eigenvalues and directions in float64, the covariance summed about the mean."""
    mean = X.mean(axis=0, dtype=np.float64)
    scatter = sum((batch - mean).T @ (batch - mean) for batch in batches(X))
    values, vectors = np.linalg.eigh(scatter / (len(X) - 1))
    return values[::-1][:N_TOP], vectors.T[::-1][:N_TOP]


def errors(model, expected):
    """Largest relative error of an eigenvalue, and largest angle to the true subspace in degrees."""
    values, vectors = expected
    value = float(np.max(np.abs(np.asarray(model.explained_variance_, dtype=float) / values - 1)))
    angle = float(np.degrees(subspace_angles(np.asarray(model.components_, dtype=float).T, vectors.T)[0]))
    return value, angle


def show(name, found):
    return f"{name} {found[0]:.1e}, {found[1]:.1e}°"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_batch(compare, full, dtype):
    X, expected = data(N_ROWS[full], dtype)

    def ours():
        return PCA(N_TOP).fit(X)

    def peer():
        return sklearn.decomposition.PCA(N_TOP, svd_solver="covariance_eigh").fit(X)

    mine, theirs = errors(ours(), expected), errors(peer(), expected)
    assert mine[0] < (1e-6 if dtype == "float32" else 1e-12)
    assert mine[1] < 1e-2
    assert mine[0] <= 2 * theirs[0] + 1e-12
    ratio = compare(
        f"PCA({N_TOP}).fit {len(X)} x {N_FEATURES} {dtype}",
        ours,
        peer,
        peer_name="PCA covariance_eigh",
        values=f"{show('ours', mine)}; {show('peer', theirs)}",
    )
    assert ratio > 0.3


@pytest.mark.parametrize("way", ["partial_fit", "Moments"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_streamed(compare, full, dtype, way):
    X, expected = data(N_ROWS[full], dtype)

    def partial_fit():
        model = PCA(N_TOP)
        for batch in batches(X):
            model.partial_fit(batch)
        assert model.components_.shape == (N_TOP, N_FEATURES)  # in the timing, should it be computed when read
        return model

    def moments():
        total = Moments()
        for batch in batches(X):
            total.update(batch)
        return PCA(N_TOP).fit(total)

    def peer():
        model = sklearn.decomposition.IncrementalPCA(N_TOP)
        for batch in batches(X):
            model.partial_fit(batch)
        found["peer"] = model

    found = {}
    ours = partial_fit if way == "partial_fit" else moments
    mine = errors(ours(), expected)
    assert mine[0] < (1e-6 if dtype == "float32" else 1e-12)
    assert mine[1] < 1e-2
    ratio = compare(
        f"{way} of {len(X)} x {N_FEATURES} {dtype} in batches of {BATCH}, top {N_TOP}",
        ours,
        peer,
        peer_name="IncrementalPCA",
        repeats=1 if full else 3,
        warm=False,
    )
    theirs = errors(found["peer"], expected)
    compare.annotate(f"{show('ours', mine)}; {show('peer', theirs)}")
    # The peer truncates after every batch: it is the slower and the less exact one.
    assert theirs[0] > 1e-2
    assert ratio > 2
