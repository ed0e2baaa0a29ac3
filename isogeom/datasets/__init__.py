"""Synthetic data with known answers: activations with gradients, and sparse nonnegative codes."""

from isogeom.datasets._synthetic import make_sparse_codes, make_tangent_data

__all__ = ["make_sparse_codes", "make_tangent_data"]
