"""Synthetic data with known answers: activations with gradients, sparse nonnegative codes, and manifolds."""

from isogeom.datasets._manifolds import hyper_ball, hyper_sphere, make_manifold
from isogeom.datasets._synthetic import make_sparse_codes, make_tangent_data

__all__ = ["hyper_ball", "hyper_sphere", "make_manifold", "make_sparse_codes", "make_tangent_data"]
