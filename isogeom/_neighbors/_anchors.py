"""The part of a table that anchors choose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from isogeom._neighbors._rows import rows_at
from isogeom._neighbors._table import NeighborTable


def part_of(table: NeighborTable, positions: np.ndarray) -> NeighborTable:
    """Return the table of some rows, whose neighbours remain all rows, as anchors give it."""
    chosen = np.flatnonzero(np.isin(table.queries, positions))
    if not chosen.size:
        raise ValueError(f"anchors holds none of the {table.n_queries} rows that the table lists: choose others.")
    distances, indices = rows_at(table.distances, chosen), rows_at(table.indices, chosen)
    return replace(table, distances=distances, indices=indices, queries=table.queries[chosen])
