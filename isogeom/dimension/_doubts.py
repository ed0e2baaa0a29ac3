"""What speaks against an estimate of any kind: tied distances, and more dimensions than features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._validation import warn_user

if TYPE_CHECKING:
    from isogeom.dimension._base import Estimate

# Share of the rows whose distances tie from which on the user is told. Rows from a continuous law have no ties; of the
# digits of 8 x 8 pixels in 17 grey levels, 1 in 100 ties; nearly all rows of short lists of integers do.
_TIED = 1 / 3
# An estimate above the number of features by this share, and by this many standard errors, is called impossible:
# several estimators are too large by up to a tenth where the cloud fills its space.
_ROOM, _ERRORS = 0.1, 3.0


def tied_share(table: NeighborTable) -> float:
    """Return the share of the rows whose nearest neighbour is at distance 0, or as far as the second or the last."""
    if table.n_neighbors < 2 or table.n_queries == 0:
        return 0.0
    xp = _xp.array_namespace(table.distances)
    first, second, last = (table.distances[:, column] for column in (0, 1, table.n_neighbors - 1))
    tied = (first == 0) | (first == second) | (first == last)
    return int(xp.sum(xp.astype(tied, xp.int64))) / table.n_queries


def report_doubts(owner: str, estimate: Estimate, table: NeighborTable) -> None:
    """Warn, once, if the distances tie on many rows or the estimate exceeds the number of features.

    Parameters
    ----------
    owner : str
        Name of the estimator.
    estimate : Estimate
        What it found.
    table : NeighborTable
        The rows and neighbours it was fitted on.
    """
    reasons = []
    share = tied_share(table)
    if share > _TIED:
        reasons.append(
            f"on {share:.0%} of the rows the distances to the nearest neighbours tie or are 0 "
            f"({estimate.n_dropped} rows were left out)"
        )
    if table.X is not None:
        p = int(table.X.shape[1])
        if estimate.dimension > (1 + _ROOM) * p + _ERRORS * (estimate.std or 0.0):
            reasons.append(f"the estimate exceeds the number of features, {p}")
    if not reasons:
        return
    advice = (
        "Integer or binary rows have no scale-free neighbourhoods: add noise below the resolution, or use larger "
        "scales (more neighbours)."
        if share > _TIED
        else "Are the rows integers, binary, or too few? Add noise below the resolution, pass more rows, or try "
        "another estimator."
    )
    warn_user(f"The dimension {estimate.dimension:.3g} by {owner} is doubtful: {' and '.join(reasons)}. {advice}")
