"""Metrics other than the Euclidean one: which there are, and what to do in place of those that there are not."""

from __future__ import annotations

from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._validation import check_choice
from isogeom._xp import Array

# Metrics with parameters that no estimator takes, and what gives the same distances.
_NEEDS = {
    "mahalanobis": "needs a covariance, which cannot be passed: whiten the rows, as PCA(whiten=True) does, and pass "
    "metric='euclidean'.",
    "seuclidean": "needs the variances of the features, which cannot be passed: divide the features by their standard "
    "deviations, as StandardScaler does, and pass metric='euclidean'.",
    "wminkowski": "needs weights, which cannot be passed: multiply the features by their square roots and pass "
    "metric='euclidean'.",
    "precomputed": "takes distances, not rows: pass these to fit, or make a table with NeighborTable.from_precomputed.",
}
# Metrics that square the entries, and the largest entry for which sums of squares stay finite.
_SQUARING = frozenset(("correlation", "cosine", "l2", "minkowski", "nan_euclidean", "sqeuclidean"))
_LARGEST = 2.0**500


def offered_metrics() -> tuple[str, ...]:
    """Return the names of the metrics for numpy rows: those of scikit-learn that need no parameter."""
    from sklearn.neighbors import VALID_METRICS

    return tuple(sorted(set(VALID_METRICS["brute"]) - set(_NEEDS)))


def check_metric(metric: Any, X: Array) -> None:
    """Raise ValueError unless rows like `X` can be compared by the metric."""
    if metric == "euclidean":
        return
    if isinstance(metric, str) and metric in _NEEDS:
        raise ValueError(f"metric={metric!r} {_NEEDS[metric]}")
    if _xp.is_foreign(X):
        check_choice(metric, "metric", ("euclidean", "precomputed"))
    if callable(metric):
        return
    check_choice(metric, "metric", offered_metrics())
    if metric == "haversine" and X.shape[1] != 2:
        raise ValueError(
            f"metric='haversine' compares 2 features, latitude and longitude in radians, but X has {X.shape[1]}: pass "
            "these two."
        )


def check_magnitude(metric: Any, *arrays: Any) -> None:
    """Raise ValueError if entries are so large that the metric would square them to infinity."""
    if metric in _SQUARING and any(abs(array).max() > _LARGEST for array in arrays):
        raise ValueError(
            f"X has entries above {_LARGEST:.3g}, whose squares overflow in metric={metric!r}: divide all rows by a "
            "constant."
        )


def check_measured(metric: Any, distances: np.ndarray, rows: np.ndarray, queries: np.ndarray, at: np.ndarray) -> None:
    """Raise ValueError unless all distances are numbers, but for those of a row to itself, which are set to 0.

    Parameters
    ----------
    metric : str
        Its name.
    distances, at : ndarray of shape (m, k)
        Of the queries to the rows at these positions.
    rows, queries : ndarray of shape (n, d) and (m, d)
        What was compared.
    """
    first, column = np.nonzero(~np.isfinite(distances))
    if not first.size:
        return
    # Shares of nothing: a row of zeros has no distance to itself by some metrics.
    same = (rows[at[first, column]] == queries[first]).all(axis=1)
    distances[first[same], column[same]] = 0.0
    if not same.all():
        raise ValueError(
            f"metric={metric!r} gives no finite distance for {len(np.unique(first[~same]))} row(s), as that of a "
            "constant row from others by correlation: drop these rows, or choose another metric."
        )
