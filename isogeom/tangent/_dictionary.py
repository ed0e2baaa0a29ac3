"""Directions and strengths of the atoms of any fitted decomposition."""

from __future__ import annotations

from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._validation import check_beside, check_rows
from isogeom._xp import Array
from isogeom.decomposition import PCA


def dictionary_of(decomposition: Any) -> Array:
    """Return the atoms of a fitted decomposition as rows.

    `components_` is not that for ICA, where it holds the unmixing rows: `dictionary_` and `mixing_` are looked at
    first.
    """
    if hasattr(decomposition, "dictionary_"):
        return decomposition.dictionary_
    if hasattr(decomposition, "mixing_"):
        return decomposition.mixing_.T
    if hasattr(decomposition, "components_"):
        if getattr(decomposition, "whiten", False) is True and hasattr(decomposition, "explained_variance_"):
            return decomposition.components_ * decomposition.explained_variance_[:, None] ** 0.5
        return decomposition.components_
    raise TypeError(
        f"{type(decomposition).__name__} has none of dictionary_, mixing_ and components_ after fit: pass a "
        "decomposition, such as isogeom.decomposition.PCA, ICA or SemiNMF."
    )


def check_decomposition(decomposition: Any) -> Any:
    """Return `decomposition` if it is an estimator that can have a dictionary, or raise TypeError."""
    methods = all(callable(getattr(decomposition, name, None)) for name in ("fit", "transform"))
    if isinstance(decomposition, type) or not methods:
        raise TypeError(
            f"decomposition={decomposition!r} must be an estimator instance with fit and transform, such as "
            "isogeom.decomposition.PCA(), or None."
        )
    return decomposition


def pca_directions(pca: PCA) -> tuple[Array, np.ndarray]:
    """Directions and strengths (RMS codes) of a PCA: already orthonormal and sorted."""
    xp = _xp.array_namespace(pca.components_)
    return pca.components_, _xp.to_numpy(xp.sqrt(pca.explained_variance_))


def weighted_directions(decomposition: Any, X: Array) -> tuple[Array, np.ndarray]:
    """Right singular vectors and singular values of the atoms weighted by the RMS of their codes."""
    atoms = dictionary_of(decomposition)
    # scikit-learn's own estimators turn CPU tensors into numpy arrays silently.
    name = type(decomposition).__name__
    check_beside(atoms, X, name=f"The dictionary of {name}", other_name="X (use isogeom's, or numpy rows)")
    xp = _xp.array_namespace(X)
    acc = _xp.accumulator_dtype(xp, _xp.device(X))
    energy: Any = 0.0
    for block in _xp.row_blocks(X):
        codes = check_rows(decomposition.transform(block), name="codes", owner=type(decomposition).__name__)
        energy = energy + xp.sum(xp.astype(codes, acc) ** 2, axis=0)
    weights = xp.sqrt(energy / X.shape[0])
    weighted = xp.astype(atoms, acc) * xp.expand_dims(weights, axis=1)
    _, strengths, rows = xp.linalg.svd(weighted, full_matrices=False)
    return rows, _xp.to_numpy(strengths)
