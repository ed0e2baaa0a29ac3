"""Global dimension estimators against scikit-dimension: the same definition, the same numbers."""

import numpy as np
import pytest

from isogeom.datasets import hyper_ball
from isogeom.dimension import (
    CorrelationDimension,
    FisherS,
    KNNGraphDimension,
    LocalPCADimension,
    MSTDimension,
    PCADimension,
)

skdim = pytest.importorskip("skdim", reason="scikit-dimension is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cloud():
    """Rows on a curved manifold of 12 dimensions in 50 or 768 features."""

    def draw(n, d, dtype="float32"):
        rng = np.random.default_rng(0)
        return np.tanh(rng.standard_normal((n, 12)) @ rng.standard_normal((12, d)) / 3).astype(dtype)

    return draw


@pytest.mark.parametrize(("d", "floor"), [(50, 3.5), (768, 3.5)])
def test_correlation_dimension(compare, full, cloud, d, floor):
    X = cloud(10_000 if full else 5000, d)
    ours = CorrelationDimension().fit(X).dimension_
    theirs = skdim.id.CorrInt(k1=10, k2=20).fit(X).dimension_
    assert ours == pytest.approx(theirs, rel=1e-4)
    ratio = compare(
        f"correlation dimension {len(X)} x {d}",
        lambda: CorrelationDimension().fit(X),
        lambda: skdim.id.CorrInt(k1=10, k2=20).fit(X),
        peer_name="scikit-dimension",
        repeats=3,
        warm=False,
        values=f"{ours:.4f} / {theirs:.4f}",
    )
    assert ratio > floor


def test_fishers(compare, full, cloud):
    X = cloud(10_000 if full else 5000, 50)
    ours, theirs = FisherS().fit(X).dimension_, skdim.id.FisherS().fit(X).dimension_
    assert ours == pytest.approx(theirs, rel=1e-4)
    ratio = compare(
        f"FisherS {len(X)} x 50",
        lambda: FisherS().fit(X),
        lambda: skdim.id.FisherS().fit(X),
        peer_name="scikit-dimension",
        repeats=3,
        warm=False,
        values=f"{ours:.4f} / {theirs:.4f}",
    )
    assert ratio > 12


def test_knn_graph(compare, full, cloud):
    X = cloud(10_000 if full else 3000, 50)
    ours = KNNGraphDimension().fit(X).dimension_
    theirs = skdim.id.KNN(random_state=0).fit(X).dimension_
    compare(
        f"nearest-neighbour graph {len(X)} x 50, 8 sizes x 10 repeats against 4 x 1 of 3 to 6 rows",
        lambda: KNNGraphDimension().fit(X),
        lambda: skdim.id.KNN(random_state=0).fit(X),
        peer_name="scikit-dimension",
        repeats=3,
        warm=False,
        values=f"{ours:.2f} / {theirs:.2f} (12 is true)",
    )


def test_spanning_tree(compare, full):
    # The peer measures 1000 trees on all distances; ours 71 of the same sizes.
    X = hyper_ball(1000 if full else 400, 5)
    ours = MSTDimension(min_share=0.5).fit(X).dimension_
    theirs = skdim.id.PH(random_state=0).fit(X).dimension_
    compare(
        f"spanning trees {len(X)} x 5",
        lambda: MSTDimension(min_share=0.5).fit(X),
        lambda: skdim.id.PH(random_state=0).fit(X),
        peer_name="scikit-dimension",
        repeats=1,
        warm=False,
        values=f"{ours:.2f} / {theirs:.2f} (5 is true)",
    )


@pytest.mark.parametrize("d", [50, 768])
def test_pca(compare, full, cloud, d):
    X = cloud(10_000 if full else 5000, d)
    ours = PCADimension("fukunaga_olsen").fit(X).dimension_
    theirs = skdim.id.lPCA(ver="FO").fit(X).dimension_
    assert ours == theirs
    compare(
        f"PCA, Fukunaga-Olsen, {len(X)} x {d}",
        lambda: PCADimension("fukunaga_olsen").fit(X),
        lambda: skdim.id.lPCA(ver="FO").fit(X),
        peer_name="scikit-dimension",
        repeats=3,
        warm=False,
        values=f"{ours:.0f} / {theirs:.0f}",
    )


def test_local_pca(compare, full, cloud):
    X = cloud(5000 if full else 1000, 50)
    ours = LocalPCADimension().fit_transform(X)
    theirs = skdim.id.lPCA(ver="FO").fit_transform_pw(X, n_neighbors=100)
    assert np.mean(ours[:, 0] == np.asarray(theirs)) > 0.9
    ratio = compare(
        f"local PCA, Fukunaga-Olsen, {len(X)} x 50, 100 neighbours",
        lambda: LocalPCADimension().fit_transform(X),
        lambda: skdim.id.lPCA(ver="FO").fit_transform_pw(X, n_neighbors=100),
        peer_name="scikit-dimension",
        repeats=1,
        warm=False,
        values=f"{ours.mean():.2f} / {np.mean(theirs):.2f}",
    )
    assert ratio > 2
