"""Lower bounds of distances from the leading axes of the rows, and the pilot that says whether they pay.

With orthonormal axes V and a centred row x, ``|x - y|^2 >= |V'x - V'y|^2 + (r_x - r_y)^2``, where r is the norm of what
the axes leave. So the coordinates on the axes with r beside them are rows of a short length whose distances are lower
bounds: the search runs on them, and the certificate stays what it is. On rows with few strong axes nearly all rows are
certified; on rows with none, nearly none, and the search would be for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from isogeom._neighbors._cloud import Cloud, rounding, smallest_normal
from isogeom._xp import row_blocks

# Candidates beyond the neighbours wanted: bounds rank rows less well than products of full rows do.
BOUND_MARGIN = 24
# Axes tried; fewer rows, queries or features than these leave nothing to gain.
_AXES = (32, 64)
_MIN_FEATURES, _MIN_ROWS, _MIN_QUERIES = 160, 4096, 2048
# Rows from which the axes come, and queries of the pilot.
_SAMPLE, _PILOT = 512, 256
# What a scan of a pair costs, in multiplications; and the largest share of the full cost that is worth the trouble.
_SCAN, _WORTH = 20, 0.6
_BYTES = 64 * 2**20
# Largest part of the squared distance of near rows that the bound may miss for a pilot to be run.
_MISSED = 0.25


class Axes(NamedTuple):
    """Orthonormal directions, strongest first, as columns in float64."""

    vectors: np.ndarray

    def coordinates(
        self, cloud: Cloud, rows: np.ndarray, positions: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return, in float32, coordinates with the residual norm as last column, and the full squared norms."""
        n = len(rows) if positions is None else len(positions)
        r = self.vectors.shape[1]
        found, squares = np.empty((n, r + 1), dtype=np.float32), np.empty(n)
        start = 0
        for block in row_blocks(rows if positions is None else positions):
            x = cloud.centred(block if positions is None else rows[block])
            part = slice(start, start + len(x))
            on_axes = x @ self.vectors
            squares[part] = np.einsum("ij,ij->i", x, x)
            found[part, :r] = on_axes
            left = squares[part] - np.einsum("ij,ij->i", on_axes, on_axes)
            found[part, r] = np.sqrt(np.maximum(left, 0.0))
            start = part.stop
        return found, squares


class Projected:
    """Coordinates on leading axes, tile by tile, as `Coordinates` gives those of the rows.

    Parameters
    ----------
    rows : ndarray of shape (n, r + 1), float32
        Coordinates, the residual norm last.
    squares : ndarray of shape (n,), float64
        Squared norms of the full rows.
    n_features : int
        Length of the full rows.
    """

    def __init__(self, rows: np.ndarray, squares: np.ndarray, n_features: int) -> None:
        self._rows = rows
        self.n, self.width = rows.shape
        self.side = 1024
        self.norms = (squares * (1 - share(self.width, n_features)) - lost(self.width)).astype(np.float32)

    def tile(self, part: slice) -> np.ndarray:
        """Return coordinates in float32."""
        return self._rows[part]


def share(width: int, n_features: int) -> float:
    """Return the share of the squared norms by which the bound can be wrong.

    Beside the rounding of short products, the residual norm, a difference of squares, is wrong by up to the root of
    their rounding errors.
    """
    exact = float(np.finfo(np.float64).eps)
    return rounding(width, float(np.finfo(np.float32).eps)) + 4 * ((n_features + width + 8) * exact) ** 0.5


def lost(width: int) -> float:
    """Return by how much the bound can be wrong because small products vanish."""
    return smallest_normal(width, float(np.finfo(np.float32).smallest_normal))


def leading_axes(
    cloud: Cloud, queries: np.ndarray, k: int, *, own: np.ndarray | None, within: np.ndarray | None, n_jobs: int | None
) -> tuple[Projected, Projected] | None:
    """Return the coordinates to search among and those of the queries, or None where full rows are the faster way."""
    n, d = len(cloud.rows) if within is None else len(within), queries.shape[1]
    if d < _MIN_FEATURES or n < _MIN_ROWS or len(queries) < _MIN_QUERIES or n * (_AXES[-1] + 1) * 4 > _BYTES:
        return None
    axes = _strong_axes(cloud, _spread(n, _SAMPLE) if within is None else within[_spread(n, _SAMPLE)])
    if axes is None:
        return None
    symmetric = own is not None and len(own) == n
    rows, squares = axes.coordinates(cloud, cloud.rows, within)
    mine = (rows, squares) if symmetric else axes.coordinates(cloud, queries, None)
    chosen = _spread(len(queries), _PILOT)
    limits = _kth_squares(cloud, queries, k, chosen, own=own, within=within, n_jobs=n_jobs)
    best, width = _WORTH, 0
    for r in sorted({min(r, axes.vectors.shape[1]) for r in _AXES}):
        few, few_mine = _shortened(rows, r), _shortened(mine[0][chosen], r)
        doubtful = _doubtful_share(few, squares, few_mine, mine[1][chosen], limits, k + (own is not None), d)
        # A doubtful row is searched by itself, not in pairs.
        cost = (r + 1 + _SCAN) / (d + _SCAN) + (2 if symmetric else 1) * doubtful
        if cost < best:
            best, width = cost, r
    if not width:
        return None
    references = Projected(_shortened(rows, width), squares, d)
    return references, references if symmetric else Projected(_shortened(mine[0], width), mine[1], d)


def _spread(n: int, count: int) -> np.ndarray:
    return np.unique(np.linspace(0, n - 1, min(n, count)).astype(np.int64))


def _strong_axes(cloud: Cloud, positions: np.ndarray) -> Axes | None:
    """Return the leading axes of a sample of rows, or None if they leave more than the distance of near rows."""
    sample = cloud.centred(cloud.rows[positions])
    squares = np.einsum("ij,ij->i", sample, sample)
    r = _AXES[-1]
    if not squares.any():
        return None
    basis = np.random.default_rng(0).standard_normal((sample.shape[1], r + 8))
    for _ in range(3):
        basis = _orthonormal(sample.T @ (sample @ basis))
    seen = sample @ basis
    _, turn = np.linalg.eigh(seen.T @ seen)
    vectors = basis @ turn[:, ::-1][:, :r]
    left = float(np.mean(squares - np.sum((sample @ vectors) ** 2, axis=1)))
    some = slice(0, len(sample), 4)
    between = squares[some, np.newaxis] + squares - 2 * (sample[some] @ sample.T)
    between[np.arange(len(between)), np.arange(0, len(sample), 4)] = np.inf
    # A bound misses up to twice what the axes leave: no good beside the distances of near rows.
    return None if 2 * left > _MISSED * float(np.median(between.min(axis=1))) else Axes(vectors)


def _orthonormal(columns: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis of the columns, without directions lost to rounding.

    Twice by the eigenvectors of their Gram matrix, which is a hundred times faster than a QR decomposition of this
    shape; the second pass makes up for the squared condition of the first.
    """
    for _ in range(2):
        values, vectors = np.linalg.eigh(columns.T @ columns)
        good = values > 1e-13 * values[-1]
        columns = columns @ (vectors[:, good] / np.sqrt(values[good]))
    return columns


def _kth_squares(
    cloud: Cloud,
    queries: np.ndarray,
    k: int,
    chosen: np.ndarray,
    *,
    own: np.ndarray | None,
    within: np.ndarray | None,
    n_jobs: int | None,
) -> np.ndarray:
    """Return the squared distances, in the unit of the coordinates, to the k-th neighbours of the queries chosen."""
    from isogeom._neighbors._tiles import tiled_neighbors

    mine = None if own is None else own[chosen]
    distances, _, _ = tiled_neighbors(cloud, queries[chosen], k, own=mine, within=within, n_jobs=n_jobs, bounded=False)
    return (distances[:, -1] * cloud.scale) ** 2


def _shortened(rows: np.ndarray, r: int) -> np.ndarray:
    """Return the first `r` coordinates and the norm of all others."""
    if r >= rows.shape[1] - 1:
        return rows
    rest = rows[:, r:].astype(np.float64)
    norm = np.sqrt(np.einsum("ij,ij->i", rest, rest))
    return np.concatenate((rows[:, :r], norm[:, np.newaxis].astype(np.float32)), axis=1)


def _doubtful_share(
    rows: np.ndarray,
    squares: np.ndarray,
    mine: np.ndarray,
    my_squares: np.ndarray,
    limits: np.ndarray,
    k: int,
    n_features: int,
) -> float:
    """Return the share of queries with too many rows whose bound is below the k-th distance."""
    allowed = share(rows.shape[1], n_features)
    counts = np.zeros(len(mine), dtype=np.int64)
    for start in range(0, len(rows), 4096):
        block = slice(start, start + 4096)
        bounds = (squares[block] * (1 - allowed)).astype(np.float32) - 2 * (mine @ rows[block].T)
        counts += np.count_nonzero(bounds <= (limits - my_squares * (1 - allowed))[:, np.newaxis], axis=1)
    return float(np.mean(counts >= k + BOUND_MARGIN))
