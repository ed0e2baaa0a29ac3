"""Concept decompositions: PCA, ICA and Semi-NMF, on numpy arrays and torch tensors alike.

Every decomposition writes rows as ``X ≈ Z @ dictionary_ (+ mean_)``: codes `Z` from ``transform`` and atoms as the
rows of ``dictionary_``.
"""

from isogeom.decomposition._ica import ICA
from isogeom.decomposition._pca import PCA
from isogeom.decomposition._seminmf import SemiNMF

__all__ = ["ICA", "PCA", "SemiNMF"]
