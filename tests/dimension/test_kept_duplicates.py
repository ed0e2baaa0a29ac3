"""A duplicate that is kept: local dimensions stay near those without it, whatever the rows came in."""

import numpy as np
import pytest
from oracles import dimension as oracle
from sklearn.neighbors import kneighbors_graph

from isogeom.dimension import (
    ABIDE,
    ESS,
    MADA,
    MLE,
    MOM,
    TLE,
    BinomialDimension,
    CorrelationDimension,
    DANCo,
    FisherS,
    GraphDistanceDimension,
    Gride,
    KNNGraphDimension,
    LocalPCADimension,
    MiND,
    MSTDimension,
    NeighborTable,
    TwoNN,
)

X = np.random.default_rng(0).standard_normal((300, 5))
ONCE_MORE = np.concatenate((X, X[:1]))
ESTIMATORS = [
    ABIDE,
    BinomialDimension,
    CorrelationDimension,
    DANCo,
    ESS,
    FisherS,
    GraphDistanceDimension,
    Gride,
    KNNGraphDimension,
    LocalPCADimension,
    MADA,
    MiND,
    MLE,
    MOM,
    MSTDimension,
    TLE,
    TwoNN,
]


@pytest.mark.filterwarnings("ignore:The graph-distance dimension .* is unreliable")
@pytest.mark.parametrize("cls", ESTIMATORS, ids=lambda cls: cls.__name__)
def test_local_dimensions_with_a_kept_duplicate(cls):
    local = cls(duplicates="keep").fit(ONCE_MORE).transform(ONCE_MORE)
    clean = cls().fit(X).transform(X)
    # Both copies, which see each other at distance 0.
    assert np.all(np.abs(np.log(local[[0, 300]] / clean[0])) < 0.35)
    # One neighbour in a hundred is a copy for the rows around them, and none for all others.
    assert np.median(np.abs(local[:300] / clean - 1)) < 0.1
    assert local.min() > clean.min() / 2


@pytest.mark.parametrize("kind", ["rows", "table", "arrays", "matrix", "graph", "torch"])
def test_mle_has_a_value_on_every_path(kind):
    keep = NeighborTable.from_rows(ONCE_MORE, 100, duplicates="keep")
    data = {
        "rows": ONCE_MORE,
        "table": keep,
        "arrays": NeighborTable.from_arrays(keep.distances, keep.indices),
        "matrix": oracle.all_distances(ONCE_MORE),
        "graph": kneighbors_graph(ONCE_MORE, 101, mode="distance"),
    }
    if kind == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        data["torch"] = torch.asarray(ONCE_MORE)
    metric = "precomputed" if kind in ("matrix", "graph") else "euclidean"
    model = MLE(duplicates="keep", metric=metric).fit(data[kind])
    local = np.asarray(model.transform(data[kind]))
    assert local[[0, 300], 0] == pytest.approx(model.dimension_, rel=0.2)
    assert local.min() > 2
