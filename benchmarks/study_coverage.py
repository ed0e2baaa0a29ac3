"""How honest the standard errors and the 95 % intervals of the dimension estimators are.

Coverage: uniform points on the flat torus have neither boundary nor curvature, so that nothing but the noise of the
estimator and the dependence of neighbours is at work (and, for large neighbourhoods in 10 dimensions, the bias of a
ball that meets itself around the torus). Spread: standard errors over the spread of the estimates on clouds with edges,
for the estimators that need coordinates too.

``python benchmarks/study_coverage.py coverage 2000`` and ``python benchmarks/study_coverage.py spread 200`` print the
tables of the documentation; numbers after these choose the dimensions, or the numbers of rows.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable

import numpy as np

from isogeom.dimension import (
    ABIDE,
    ESS,
    MADA,
    MLE,
    MOM,
    TLE,
    BinomialDimension,
    DANCo,
    Gride,
    KNNGraphDimension,
    LocalPCADimension,
    MiND,
    MSTDimension,
    NeighborTable,
    TwoNN,
)

N_SAMPLES = 1000
# Neighbours that the estimators below look at.
FEW, MANY = 32, 100
COVERAGE = {
    "TwoNN linear": TwoNN(),
    "TwoNN mle": TwoNN("mle"),
    "TwoNN censored": TwoNN("censored"),
    "Gride 4, 8": Gride(4, max_neighbors=2),
    "Gride 16, 32": Gride(16, max_neighbors=2),
    "MLE k=10": MLE(10),
    "MLE k=20": MLE(20),
    "Binomial k=20": BinomialDimension(20),
    "MADA k=20": MADA(20),
    "MOM k=20": MOM(20),
}
SPREAD = {
    "TwoNN mle": TwoNN("mle"),
    "Gride 16, 32": Gride(16, max_neighbors=2),
    "MLE k=20": MLE(20),
    "Binomial k=20": BinomialDimension(20),
    "MADA k=20": MADA(20),
    "MOM k=20": MOM(20),
    "MOM k=100": MOM(100),
    "ABIDE": ABIDE(),
    "TLE k=20": TLE(20),
    "MiND k=20": MiND(20),
    "ESS k=20": ESS(20),
    "ESS k=100": ESS(100),
    "local PCA k=30, ratio": LocalPCADimension("participation", n_neighbors_local=30),
    "local PCA k=100, ratio": LocalPCADimension("participation", n_neighbors_local=100),
    "local PCA k=30": LocalPCADimension(n_neighbors_local=30),
    "kNN graph": KNNGraphDimension(),
    "MST": MSTDimension(),
    "DANCo": DANCo(rounded=False),
}
CLOUDS: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "cube, d = 3": lambda n, rng: rng.random((n, 3)),
    "sphere, d = 5": lambda n, rng: _unit(rng.standard_normal((n, 6))),
    "Gaussian, d = 5": lambda n, rng: rng.standard_normal((n, 5)),
}


def _unit(X: np.ndarray) -> np.ndarray:
    return X / np.linalg.norm(X, axis=1, keepdims=True)


def torus(d: int, seed: int) -> NeighborTable:
    X = np.random.default_rng(seed).random((N_SAMPLES, d))
    squares = np.zeros((N_SAMPLES, N_SAMPLES))
    for column in X.T:
        gaps = np.abs(column[:, np.newaxis] - column)
        gaps = np.minimum(gaps, 1 - gaps)
        squares += gaps * gaps
    np.fill_diagonal(squares, np.inf)
    near = np.argpartition(squares, FEW, axis=1)[:, :FEW]
    order = np.argsort(np.take_along_axis(squares, near, axis=1), axis=1)
    near = np.take_along_axis(near, order, axis=1)
    return NeighborTable.from_arrays(np.sqrt(np.take_along_axis(squares, near, axis=1)), near)


def coverage(n_seeds: int, dimensions: list[int]) -> None:
    print("| estimator | d | mean | sd | mean std | nominal std | covers d | covers its mean | nominal covers it |")
    print("|---|---|---|---|---|---|---|---|---|")
    for d in dimensions:
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in COVERAGE}
        for seed in range(n_seeds):
            table = torus(d, seed)
            for name, model in COVERAGE.items():
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


def spread(n_seeds: int, sizes: list[int]) -> None:
    """Print the mean standard error over the spread of the estimates, and how often intervals hold their mean."""
    print("| cloud | n | estimator | mean | sd | mean std / sd | covers its mean | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, draw in CLOUDS.items():
        for n in sizes:
            found: dict[str, list[tuple[float, ...]]] = {name: [] for name in SPREAD}
            for seed in range(n_seeds):
                table = NeighborTable.from_rows(draw(n, np.random.default_rng(seed)), MANY)
                for name, model in SPREAD.items():
                    start = time.process_time()
                    model.fit(table)
                    seconds = time.process_time() - start
                    if model.dimension_std_ is not None:
                        found[name].append(
                            (model.dimension_, *model.dimension_interval_, model.dimension_std_, seconds)
                        )
            for name, rows in found.items():
                if len(rows) < 3:
                    continue
                values, low, high, std, seconds = np.array(rows).T
                mean, sd = values.mean(), values.std(ddof=1)
                if sd == 0:
                    # The same answer for every seed has no spread to compare with.
                    continue
                own = np.mean((low <= mean) & (mean <= high))
                print(
                    f"| {kind} | {n} | {name} | {mean:.3f} | {sd:.4f} | {std.mean() / sd:.2f} | {own:.1%} "
                    f"| {np.median(seconds):.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    warnings.simplefilter("error")
    which, seeds = sys.argv[1], int(sys.argv[2])
    numbers = [int(word) for word in sys.argv[3:]]
    if which == "coverage":
        coverage(seeds, numbers or [2, 5, 10])
    else:
        spread(seeds, numbers or [600, 1000, 2000])
