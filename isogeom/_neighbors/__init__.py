"""Nearest neighbours, exact and safe in float32: the table that every neighbour-based estimator starts from."""

from __future__ import annotations

from isogeom._neighbors._table import NeighborTable

__all__ = ["NeighborTable"]
