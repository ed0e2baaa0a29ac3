"""ICA against scikit-learn's FastICA (both whitenings) and picard, on an easy and on a hard mixture."""

import itertools

import numpy as np
import pytest
from scipy.linalg import eigh
from scipy.optimize import linear_sum_assignment
from sklearn.decomposition import FastICA

from isogeom.decomposition import ICA

N_FEATURES, K = 768, 50
N_ROWS = {False: 10_000, True: 50_000}
# Peer, and where isogeom stops: at its default tolerance, or at a tenth of the gradient that the peer ends with.
CASES = [
    ("FastICA", "default"),
    ("FastICA", "tenth"),
    ("FastICA eigh", "default"),
    ("FastICA eigh", "tenth"),
    ("picard", "default"),
]


def sources(n, mixture):
    """Independent Laplace sources; or a hard set, where the model holds for a part of them only.

    The hard set has 20 Laplace sources, 20 that share one random scale per row (dependent: no rotation makes them
    independent), and 10 of a generalised normal close to the Gaussian.
    """
    rng = np.random.default_rng(1)
    S = rng.laplace(size=(n, K))
    if mixture == "hard":
        S[:, 20:40] = rng.standard_normal((n, 20)) * rng.gamma(2.0, size=(n, 1)) ** 0.5
        size = rng.gamma(1 / 1.8, size=(n, 10)) ** (1 / 1.8)
        S[:, 40:] = size * rng.choice([-1.0, 1.0], size=(n, 10))
    return S / S.std(axis=0)


def mixed(S):
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((K, N_FEATURES)).astype(np.float32)
    X = S.astype(np.float32) @ mixing
    for start in range(0, len(X), 2000):
        X[start : start + 2000] += 0.05 * rng.standard_normal(X[start : start + 2000].shape, dtype=np.float32)
    return X


def gradient(S):
    """Largest entry of the gradient of the log-cosh contrast along rotations, in float64, for anybody's sources.

    They are made exactly uncorrelated first, so whitening errors of a solver do not count as a gradient.
    """
    S = S.astype(np.float64) - S.mean(axis=0, dtype=np.float64)
    values, vectors = eigh(S.T @ S / len(S))
    S = S @ (vectors / np.sqrt(values)) @ vectors.T
    psi = np.tanh(S)
    moment = psi.T @ S / len(S)
    sign = np.sign(np.mean(1 - psi**2, axis=0) - np.diag(moment))
    signed = sign[:, None] * moment
    return float(np.max(np.abs(signed - signed.T))) / 2


def recovery(S, true):
    """Mean absolute correlation of the true sources with their partners."""
    k = true.shape[1]
    correlation = np.abs(np.corrcoef(true.T, S.T)[:k, k:])
    return float(correlation[linear_sum_assignment(-correlation)].mean())


def make_peer(name):
    if name == "picard":
        picard = pytest.importorskip("picard", reason="python-picard is not installed")
        return picard.Picard(n_components=K, random_state=0)
    return FastICA(K, whiten_solver="eigh" if name == "FastICA eigh" else "svd", random_state=0)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("peer_name", "stop"), CASES)
@pytest.mark.parametrize("mixture", ["laplace", "hard"])
def test_fit(compare, full, mixture, peer_name, stop):
    # Warnings are off: a peer may stop early on the hard set, and how far it got shows in the gradient.
    true = sources(N_ROWS[full], mixture)
    X = mixed(true)
    found, options = {}, {}
    # On the hard set, rounding alone changes the number of iterations by a third: every repeat starts elsewhere.
    starts = itertools.count()

    def ours():
        found["ours"] = ICA(K, random_state=next(starts), **options).fit(X)

    def peer():
        found["peer"] = make_peer(peer_name).fit(X)

    # One call of each that does not count: imports, compilation.
    ICA(3, random_state=0, max_iter=5).fit(X[:2000])
    make_peer(peer_name).set_params(n_components=3).fit(X[:2000])
    if stop == "tenth":
        peer()
        options["tol"] = gradient(found["peer"].transform(X)) / 10
    ratio = compare(
        f"ICA({K}) {len(X)} x {N_FEATURES} float32, {mixture}, {stop} stop",
        ours,
        peer,
        peer_name=peer_name,
        repeats=1 if full and peer_name == "picard" else 5 if mixture == "hard" else 3,
        warm=False,
    )
    got = {who: model.transform(X) for who, model in found.items()}
    slopes = {who: gradient(S) for who, S in got.items()}
    identifiable = true if mixture == "laplace" else true[:, :20]
    hits = {who: recovery(S, identifiable) for who, S in got.items()}
    compare.annotate(
        f"gradient {slopes['ours']:.1e} / {slopes['peer']:.1e}; recovery {hits['ours']:.4f} / {hits['peer']:.4f}; "
        f"iterations {found['ours'].n_iter_} / {getattr(found['peer'], 'n_iter_', '-')}"
    )
    assert hits["ours"] > max(0.99, hits["peer"] - 1e-3)
    assert slopes["ours"] < (1e-5 if stop == "default" else 0.11 * slopes["peer"])
    assert ratio > 0.3
