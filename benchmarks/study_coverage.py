"""How often the 95 % intervals of the dimension estimators hold the truth, on the flat torus.

Uniform points on the torus have neither boundary nor curvature, so that nothing but the noise of the estimator and the
dependence of neighbours is at work (and, for large neighbourhoods in 10 dimensions, the bias of a ball that meets
itself around the torus). ``python benchmarks/study_coverage.py 2000`` prints the table of the documentation.
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
from scipy.spatial import cKDTree

from isogeom.dimension import MLE, BinomialDimension, Gride, NeighborTable, TwoNN

N_SAMPLES, N_NEIGHBORS = 1000, 64
MODELS = {
    "TwoNN linear": TwoNN(),
    "TwoNN mle": TwoNN("mle"),
    "TwoNN censored": TwoNN("censored"),
    "Gride 4, 8": Gride(4, max_neighbors=2),
    "Gride 16, 32": Gride(16, max_neighbors=2),
    "MLE k=10": MLE(10),
    "MLE k=20": MLE(20),
    "Binomial k=20": BinomialDimension(20),
}


def torus(d: int, seed: int) -> NeighborTable:
    X = np.random.default_rng(seed).random((N_SAMPLES, d))
    distances, indices = cKDTree(X, boxsize=1.0).query(X, N_NEIGHBORS + 1)
    return NeighborTable.from_arrays(distances[:, 1:], indices[:, 1:])


def main(n_seeds: int) -> None:
    print("| estimator | d | mean | sd | mean std | nominal std | covers d | covers its mean | nominal covers it |")
    print("|---|---|---|---|---|---|---|---|---|")
    for d in (2, 5, 10):
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in MODELS}
        for seed in range(n_seeds):
            table = torus(d, seed)
            for name, model in MODELS.items():
                model.fit(table)
                low, high = model.dimension_interval_
                found[name].append((model.dimension_, low, high, model.dimension_std_, model.dimension_std_nominal_))
        for name, rows in found.items():
            values, low, high, std, nominal = np.array(rows).T
            mean = values.mean()
            true, own = np.mean((low <= d) & (d <= high)), np.mean((low <= mean) & (mean <= high))
            plain = np.mean(np.abs(values - mean) <= 1.96 * nominal)
            print(
                f"| {name} | {d} | {mean:.3f} | {values.std():.3f} | {std.mean():.3f} | {nominal.mean():.3f} "
                f"| {true:.1%} | {own:.1%} | {plain:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
