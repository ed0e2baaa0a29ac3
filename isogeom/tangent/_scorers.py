"""Scorers that look along ranks, where the proxy's own score cannot."""

from __future__ import annotations

import math
from typing import Any

from sklearn.utils.validation import check_is_fitted

from isogeom import _xp
from isogeom.tangent._null import haar_moments
from isogeom.tangent._proxy import TangentProxy


def share_scorer(estimator: TangentProxy, X: Any, y: Any = None) -> float:
    """Scorer for model selection: energy share of the gradients `y` (or of the centred `X`) inside the proxy, 0 to 1.

    It rises with the rank. Use as ``GridSearchCV(..., scoring=share_scorer)``.

    Parameters
    ----------
    estimator : TangentProxy
        Fitted proxy.
    X : array-like of shape (n_samples, n_features)
        Activations.
    y : array-like of shape (n_gradients, n_features), default=None
        Gradients; None and one-dimensional labels mean that the centred `X` is scored.

    Returns
    -------
    float
        Energy share.
    """
    check_is_fitted(estimator, "basis_")
    return estimator._energy(estimator._scored_gram(X, y))[0]


def zscore_scorer(estimator: TangentProxy, X: Any, y: Any = None) -> float:
    """Scorer for model selection: energy share as a z-score against random subspaces of the whole space.

    The null is a Haar-random subspace of all ``n_features`` dimensions with the rank of the proxy; see
    :func:`haar_moments`. Use as ``GridSearchCV(..., scoring=zscore_scorer)``.

    Parameters
    ----------
    estimator : TangentProxy
        Fitted proxy.
    X : array-like of shape (n_samples, n_features)
        Activations.
    y : array-like of shape (n_gradients, n_features), default=None
        Gradients; None and one-dimensional labels mean that the centred `X` is scored.

    Returns
    -------
    float
        Standard deviations above the mean random subspace; 0.0 if every subspace captures the same share.
    """
    check_is_fitted(estimator, "basis_")
    gram = estimator._scored_gram(X, y)
    share, total = estimator._energy(gram)
    xp = _xp.array_namespace(gram)
    mean, variance = haar_moments(_xp.to_numpy(xp.linalg.eigvalsh(gram / total)), estimator.n_directions_)
    return (share - mean) / math.sqrt(variance) if variance > 0 else 0.0
