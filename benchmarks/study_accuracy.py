"""The dimension of benchmark manifolds by every estimator, as a table: ``python benchmarks/study_accuracy.py``.

2000 rows of each manifold, settings at their defaults, but ``TwoNN("mle")`` and ``Gride(4)``. One search serves all
estimators based on neighbours.
"""

from __future__ import annotations

import sys
import time
import warnings

from isogeom.datasets import make_manifold
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
    PCADimension,
    TwoNN,
)

# Those with published values; others by name on the command line.
MANIFOLDS = sys.argv[1:] or [
    *("M1", "M2", "M3", "M5a", "M5b", "M6", "M7", "M9", "M10a", "M10b", "M10c", "M10d"),
    *("M11", "M12", "Mbeta", "Mp1", "Mp2", "Mp3"),
]
# The flag says whether the estimator starts from the shared table.
MODELS = {
    "TwoNN": (TwoNN("mle"), True),
    "Gride 4": (Gride(4), True),
    "MLE": (MLE(), True),
    "MOM": (MOM(), True),
    "MADA": (MADA(), True),
    "TLE": (TLE(), True),
    "MiND": (MiND(), True),
    "Binomial": (BinomialDimension(), True),
    "ABIDE": (ABIDE(), True),
    "ESS": (ESS(), True),
    "DANCo": (DANCo(), True),
    "CorrInt": (CorrelationDimension(), True),
    "kNN graph": (KNNGraphDimension(), False),
    "MST": (MSTDimension(), False),
    "graph distance": (GraphDistanceDimension(), False),
    "PCA": (PCADimension(), False),
    "local PCA": (LocalPCADimension(), True),
    "FisherS": (FisherS(), False),
}


def main() -> None:
    print(f"| set | d | p | {' | '.join(MODELS)} |")
    print("|---" * (len(MODELS) + 3) + "|")
    spent = dict.fromkeys(MODELS, 0.0)
    for name in MANIFOLDS:
        data = make_manifold(name)
        X = data.X
        table = NeighborTable.from_rows(X, 200)
        cells = []
        for label, (model, shared) in MODELS.items():
            begun = time.process_time()
            model.fit(table if shared else X)
            spent[label] += time.process_time() - begun
            doubtful = not getattr(model, "reliable_", True)
            cells.append(f"{model.dimension_:.2f}{'?' if doubtful else ''}")
        print(f"| {name} | {data.dimension} | {X.shape[1]} | {' | '.join(cells)} |", flush=True)
    print("\nCPU seconds:", {label: round(seconds, 2) for label, seconds in spent.items()})


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
