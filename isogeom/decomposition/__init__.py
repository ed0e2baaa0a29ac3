"""Concept decompositions: PCA, ICA and Semi-NMF, on numpy arrays and torch tensors alike.

Every decomposition writes rows as ``X ≈ Z @ dictionary_ (+ mean_)``: codes `Z` from ``transform`` and atoms as the
rows of ``dictionary_``.
"""

from isogeom.decomposition._adapter import OvercompleteAdapter
from isogeom.decomposition._code_statistics import CodeStatisticsResult, code_statistics
from isogeom.decomposition._ica import ICA
from isogeom.decomposition._interpret import RefinementResult, concept_importance, refine
from isogeom.decomposition._nnls import NNLSResult, batched_nnls
from isogeom.decomposition._pca import PCA
from isogeom.decomposition._seminmf import SemiNMF
from isogeom.decomposition._stability import (
    DictionaryMatchResult,
    DictionaryStabilityResult,
    dictionary_stability,
    match_dictionaries,
)

__all__ = [
    "ICA",
    "PCA",
    "CodeStatisticsResult",
    "DictionaryMatchResult",
    "DictionaryStabilityResult",
    "NNLSResult",
    "OvercompleteAdapter",
    "RefinementResult",
    "SemiNMF",
    "batched_nnls",
    "code_statistics",
    "concept_importance",
    "dictionary_stability",
    "match_dictionaries",
    "refine",
]
