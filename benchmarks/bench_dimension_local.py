"""ESS and DANCo against scikit-dimension, on a curved cloud of dimension 10.

The peer takes about 45 ms per row for ESS and one to two minutes for DANCo at 10 000 x 50: the moderate sizes are 400
and 5000 rows, the same for both packages. DANCo is timed with an empty cache of balls, as in the first fit of a
process.
"""

import time

import numpy as np
import pytest

from isogeom.dimension import ESS, DANCo, NeighborTable
from isogeom.dimension._danco_calibration import ball_statistics

skdim = pytest.importorskip("skdim", reason="scikit-dimension is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")


def cloud(n, p, d=10):
    """Rows near a curved manifold of dimension d."""
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((n, d))
    mix, bend = rng.standard_normal((d, p)), rng.standard_normal((d, p))
    return latent @ mix + 0.1 * np.sin(latent @ bend)


def ball(n, d):
    rng = np.random.default_rng(d)
    rows = rng.standard_normal((n, d))
    return rows * rng.random((n, 1)) ** (1 / d) / np.linalg.norm(rows, axis=1, keepdims=True)


def fresh_danco(X):
    ball_statistics.cache_clear()
    return DANCo().fit(X)


def test_ess(compare, report, full):
    n = 1000 if full else 400
    X = cloud(n, 50)
    # Both average the dimension over the patches of 100 neighbours of all rows.
    mine, peer = ESS(average="mean").fit(X), skdim.id.ESS()
    ratio = compare(
        f"ESS {n} x 50, k=100",
        lambda: ESS(average="mean").fit(X),
        lambda: peer.fit(X, n_neighbors=100),
        peer_name="scikit-dimension",
        repeats=1,
        warm=False,
    )
    theirs = np.asarray(peer.dimension_pw_)
    np.testing.assert_allclose(mine.transform(X)[:, 0], theirs, rtol=1e-6)
    compare.annotate(f"{mine.dimension_:.4f} / {theirs.mean():.4f}")
    large = cloud(10_000, 50)
    start = time.process_time()
    table = NeighborTable.from_rows(large, 100)
    found = time.process_time()
    value = ESS().fit(table).dimension_
    report(
        f"ESS 10000 x 50, k=100: neighbours {found - start:.2f} s, the rest {time.process_time() - found:.2f} s "
        f"({value:.2f})"
    )
    assert ratio > (300 if full else 200)


def test_danco(compare, report, full):
    n = 10_000 if full else 5000
    X = cloud(n, 50)
    mine, peer = fresh_danco(X), skdim.id.DANCo()
    ratio = compare(
        f"DANCo {n} x 50, first fit",
        lambda: fresh_danco(X),
        lambda: peer.fit(X),
        peer_name="scikit-dimension",
        repeats=1,
        warm=False,
    )
    compare.annotate(f"{mine.dimension_:.2f} / {float(peer.dimension_):.2f}")
    start = time.process_time()
    DANCo().fit(X)
    report(f"DANCo {n} x 50, balls known from an earlier fit: {time.process_time() - start:.2f} s")
    # The balls take a larger share of the time of small fits.
    assert ratio > (30 if full else 15)


def test_danco_accuracy(report):
    for d in (5, 10, 20):
        X = ball(1000, d)
        mine, peer = DANCo().fit(X).dimension_, float(skdim.id.DANCo().fit(X).dimension_)
        report(f"DANCo on 1000 rows of a ball of dimension {d}: isogeom {mine:g}, scikit-dimension {peer:g}")
        assert abs(mine - d) <= max(abs(peer - d), 1)
