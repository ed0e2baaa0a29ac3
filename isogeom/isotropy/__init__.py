"""Isotropy scores and effective ranks of clouds of vectors, from rows, moments, a covariance or its eigenvalues."""

from isogeom.isotropy._scores import effective_rank, isoscore, isoscore_star, participation_ratio

__all__ = ["effective_rank", "isoscore", "isoscore_star", "participation_ratio"]
