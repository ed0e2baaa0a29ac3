"""What speaks against an estimate: tied distances, more dimensions than features, no direction above noise, one row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._validation import warn_user
from isogeom._xp import Array

if TYPE_CHECKING:
    from isogeom.dimension._base import Estimate
    from isogeom.dimension._pca_products import Products

# Share of the rows whose distances tie from which on the user is told. Rows from a continuous law have no ties; of the
# digits of 8 x 8 pixels in 17 grey levels, 1 in 100 ties; nearly all rows of short lists of integers do.
_TIED = 1 / 3
# An estimate above the number of features by this share, and by this many standard errors, is called impossible:
# several estimators are too large by up to a tenth where the cloud fills its space.
_ROOM, _ERRORS = 0.1, 3.0
# Share of the total variance above which one row is reported, and number of rows from which on: of fewer, one often
# has it by chance.
_HEAVY, _FEWEST = 0.5, 10


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


def report_no_signal(owner: str, rule: str, dimension: float = 0.0) -> None:
    """Warn that a rule that counts directions above noise has found none.

    Parameters
    ----------
    owner : str
        Name of the estimator.
    rule : str
        Name of the rule.
    dimension : float, default=0.0
        The estimate; of an average over neighbourhoods it may lie between 0 and 1.
    """
    flat = "isotropic rows, nor to uncorrelated features" if rule == "parallel" else "isotropic rows"
    warn_user(
        f"The dimension {dimension:.3g} by {owner} is doubtful: by rule={rule!r} no direction stands out of noise, so "
        f"the rule does not apply to {flat}. Use rule='share' or 'participation' for the dimension of their span, or "
        "an estimator from distances."
    )


def report_heavy_row(owner: str, products: Products, positions: np.ndarray) -> None:
    """Warn if one of at least 10 rows alone carries more than half of the total variance, which must not be 0.

    Parameters
    ----------
    owner : str
        Name of the estimator.
    products : Products
        Moments of the rows, with the rows.
    positions : ndarray of shape (n,)
        Positions of the rows among those that the user passed.
    """
    if products.rows is None or products.n < _FEWEST:
        return
    squares = row_squares(products)
    xp = _xp.array_namespace(squares)
    heaviest = int(xp.argmax(squares))
    share = float(squares[heaviest] / xp.sum(squares))
    if share > _HEAVY:
        warn_user(
            f"The dimension by {owner} is doubtful: row {positions[heaviest]} alone carries {share:.3g} of the total "
            "variance, so its direction outweighs all others. Leave the row out, or use an estimator from distances."
        )


def row_squares(products: Products) -> Array:
    """Return the squared norms of the (centred) rows, in the unit of the products."""
    xp = _xp.array_namespace(products.matrix)
    if products.wide:
        return xp.linalg.diagonal(products.matrix)
    found = []
    for block in _xp.row_blocks(products.rows):
        rows = xp.astype(block, products.matrix.dtype) * products.scale - products.mean
        found.append(xp.sum(rows * rows, axis=1))
    return xp.concat(found)
