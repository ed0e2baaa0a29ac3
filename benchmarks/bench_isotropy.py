"""IsoScore and IsoScore* against the reference package, and effective rank against a plain SVD."""

import numpy as np
import pytest

from isogeom.isotropy import effective_rank, isoscore, isoscore_star

reference = pytest.importorskip("IsoScore.IsoScore", reason="IsoScore is not installed")
torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

# (rows, features, dtype, repeats, ratio that must be exceeded: about three quarters of what was measured)
CASES = [
    (20_000, 768, "float32", 3, 2),
    (20_000, 768, "float64", 3, 2),
    (2048, 768, "float32", 5, 5),
    (256, 768, "float32", 9, 30),
]


def rows(n, d, dtype):
    rng = np.random.default_rng(0)
    return (rng.standard_normal((n, d)) * np.geomspace(1, 0.02, d) + 0.5).astype(dtype)


@pytest.mark.parametrize(("n", "d", "dtype", "repeats", "floor"), CASES)
def test_isoscore(compare, n, d, dtype, repeats, floor):
    X = rows(n, d, dtype)
    tensor = torch.from_numpy(X)
    assert isoscore(X) == pytest.approx(float(reference.IsoScore(tensor)), rel=2e-3, abs=1e-5)
    ratio = compare(
        f"IsoScore {n} x {d} {dtype}",
        lambda: isoscore(X),
        lambda: reference.IsoScore(tensor),
        peer_name="IsoScore",
        repeats=repeats,
    )
    assert ratio > floor


@pytest.mark.parametrize(("n", "d", "dtype", "repeats", "floor"), CASES)
def test_isoscore_star(compare, n, d, dtype, repeats, floor):
    X = rows(n, d, dtype)
    tensor, identity = torch.from_numpy(X), torch.eye(d, dtype=getattr(torch, dtype))
    theirs = float(reference.IsoScore_star(tensor, identity, 0.2))
    assert isoscore_star(X, target="identity") == pytest.approx(theirs, rel=2e-3, abs=1e-5)
    ratio = compare(
        f"IsoScore* {n} x {d} {dtype}",
        lambda: isoscore_star(X, target="identity"),
        lambda: reference.IsoScore_star(tensor, identity, 0.2),
        peer_name="IsoScore",
        repeats=repeats,
    )
    assert ratio > floor


def test_isoscore_of_a_wide_batch(compare):
    X = rows(256, 2048, "float32")
    tensor = torch.from_numpy(X)
    assert isoscore(X) == pytest.approx(float(reference.IsoScore(tensor)), rel=2e-3, abs=1e-5)
    ratio = compare(
        "IsoScore 256 x 2048 float32",
        lambda: isoscore(X),
        lambda: reference.IsoScore(tensor),
        peer_name="IsoScore",
        repeats=3,
    )
    assert ratio > 100


def test_effective_rank(compare):
    X = rows(10_000, 512, "float32")

    def by_svd():
        values = np.linalg.svd(X, compute_uv=False)
        shares = values / values.sum()
        return float(np.exp(-np.sum(shares * np.log(shares))))

    assert effective_rank(X) == pytest.approx(by_svd(), rel=1e-4)
    compare("effective rank 10000 x 512 float32", lambda: effective_rank(X), by_svd, peer_name="numpy svd", repeats=3)
