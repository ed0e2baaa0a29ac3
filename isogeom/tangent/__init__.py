"""Tangent proxies, and tests of how much of a gradient they capture."""

from isogeom.tangent._alignment import TangentAlignmentResult, tangent_alignment_test
from isogeom.tangent._null import haar_moments, haar_null
from isogeom.tangent._proxy import TangentProxy
from isogeom.tangent._scorers import share_scorer, zscore_scorer
from isogeom.tangent._weight import WeightAlignmentResult, shuffled_pairing_share, weight_alignment_test

__all__ = [
    "TangentAlignmentResult",
    "TangentProxy",
    "WeightAlignmentResult",
    "haar_moments",
    "haar_null",
    "share_scorer",
    "shuffled_pairing_share",
    "tangent_alignment_test",
    "weight_alignment_test",
    "zscore_scorer",
]
