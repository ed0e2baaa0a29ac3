"""Lower bounds of distances from the leading axes of the rows, and the pilot that says whether they pay.

With orthonormal axes V and a centred row x, ``|x - y|^2 >= |V'x - V'y|^2 + (r_x - r_y)^2``, where r is the norm of what
the axes leave. So the coordinates on the axes with r beside them are rows of a short length whose distances are lower
bounds: the search runs on them, and the certificate stays what it is. On rows with few strong axes nearly all rows are
certified; on rows with none, nearly none, and the search would be for nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from isogeom._neighbors._cloud import Cloud, rounding, smallest_normal
from isogeom._xp import row_blocks

# Candidates beyond the neighbours wanted: bounds rank rows less well than products of full rows do.
BOUND_MARGIN = 24
# Axes tried; fewer rows, queries or features than these leave nothing to gain.
_AXES = (32, 64)
_MIN_FEATURES, _MIN_ROWS, _MIN_QUERIES = 160, 4096, 2048
# Rows from which the axes come, queries of the pilot, and the fewest rows and the share of all that these are held to.
_SAMPLE, _PILOT, _LEAST, _PART = 512, 128, 2048, 0.25
# What a scan of a pair costs, in multiplications; and the largest share of the full cost that is worth the trouble.
_SCAN, _WORTH = 20, 0.6
# Largest coordinates on axes: two copies are held.
_BYTES = 32 * 2**20
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
        # Small blocks: they are in float64, beside the rows that the pilot keeps.
        for block in row_blocks(rows if positions is None else positions, 512):
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
        self.norms = (squares * (1 - share(self.width, n_features)) - lost(self.width)).astype(np.float32)

    def ordered(self, order: np.ndarray) -> Projected:
        """Return the same rows in another order."""
        found = copy.copy(self)
        found._rows, found.norms = self._rows[order], self.norms[order]
        return found

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
    cloud: Cloud,
    queries: np.ndarray,
    k: int,
    *,
    own: np.ndarray | None,
    within: np.ndarray | None,
    kth_distances: Callable[[np.ndarray], np.ndarray],
) -> tuple[Projected, Projected] | None:
    """Return the coordinates to search among and those of the queries, or None where full rows are the faster way.

    `kth_distances` gives the distances to the `k`-th neighbours of the queries at some places.
    """
    n, d = len(cloud.rows) if within is None else len(within), queries.shape[1]
    if d < _MIN_FEATURES or n < _MIN_ROWS or len(queries) < _MIN_QUERIES or n * (_AXES[-1] + 1) * 4 > _BYTES:
        return None
    some = _spread(n, _SAMPLE)
    axes = _strong_axes(cloud, some if within is None else within[some])
    if axes is None:
        return None
    width = _pilot(axes, cloud, queries, k, own=own, within=within, kth_distances=kth_distances)
    if not width:
        return None
    rows, squares = axes.coordinates(cloud, cloud.rows, within)
    references = Projected(_shortened(rows, width), squares, d)
    if own is not None and len(own) == n:
        return references, references
    rows, squares = axes.coordinates(cloud, queries, None)
    return references, Projected(_shortened(rows, width), squares, d)


def _pilot(
    axes: Axes,
    cloud: Cloud,
    queries: np.ndarray,
    k: int,
    *,
    own: np.ndarray | None,
    within: np.ndarray | None,
    kth_distances: Callable[[np.ndarray], np.ndarray],
) -> int:
    """Return the number of axes with which the search costs least, or 0 if it is none."""
    n, d = len(cloud.rows) if within is None else len(within), queries.shape[1]
    chosen = _spread(len(queries), _PILOT)
    limits = (kth_distances(chosen) * cloud.scale) ** 2
    part = _spread(n, max(_LEAST, round(_PART * n)))
    rows, squares = axes.coordinates(cloud, cloud.rows, part if within is None else within[part])
    mine, my_squares = axes.coordinates(cloud, queries, chosen)
    # So many of a part of the rows stand for too many of all.
    most = (k + BOUND_MARGIN + (own is not None)) * len(part) / n
    best, width = _WORTH, 0
    for r in sorted({min(r, axes.vectors.shape[1]) for r in _AXES}):
        doubtful = _doubtful_share(_shortened(rows, r), squares, _shortened(mine, r), my_squares, limits, most, d)
        # A doubtful row is searched by itself, not in pairs.
        cost = (r + 1 + _SCAN) / (d + _SCAN) + (2 if own is not None and len(own) == n else 1) * doubtful
        if cost < best:
            best, width = cost, r
    return width


def _spread(n: int, count: int) -> np.ndarray:
    return np.unique(np.linspace(0, n - 1, min(n, count)).astype(np.int64))


def _strong_axes(cloud: Cloud, positions: np.ndarray) -> Axes | None:
    """Return the leading axes of a sample of rows, or None if they leave more than the distance of near rows."""
    sample = cloud.centred(cloud.rows[positions])
    squares = np.einsum("ij,ij->i", sample, sample)
    r = _AXES[-1]
    if not squares.any():
        return None
    some = slice(0, len(sample), 4)
    products = sample[some] @ sample.T
    between = squares[some, np.newaxis] + squares - 2 * products
    between[np.arange(len(between)), np.arange(0, len(sample), 4)] = np.inf
    # A bound misses up to twice what the axes leave: no good beside the distances of near rows.
    most = _MISSED / 2 * float(np.median(between.min(axis=1)))
    # By Cauchy and Schwarz, the largest r eigenvalues sum to at most the root of r times the sum of all squares.
    strongest = (r * float(np.mean(products**2))) ** 0.5
    if float(np.mean(squares)) - strongest > most:
        return None
    seen = sample @ np.random.default_rng(0).standard_normal((sample.shape[1], r + 8))
    for _ in range(3):
        basis = _orthonormal(sample.T @ seen)
        seen = sample @ basis
        # What a first round leaves, later ones make little smaller.
        if float(np.mean(squares)) - float(np.sum(seen**2)) / len(sample) > 1.3 * most:
            return None
    _, turn = np.linalg.eigh(seen.T @ seen)
    vectors = basis @ turn[:, ::-1][:, :r]
    left = float(np.mean(squares - np.sum((sample @ vectors) ** 2, axis=1)))
    return None if left > most else Axes(vectors)


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
    most: float,
    n_features: int,
) -> float:
    """Return the share of queries with at least `most` rows whose bound is below the k-th distance."""
    allowed = share(rows.shape[1], n_features)
    counts = np.zeros(len(mine), dtype=np.int64)
    for start in range(0, len(rows), 4096):
        block = slice(start, start + 4096)
        bounds = (squares[block] * (1 - allowed)).astype(np.float32) - 2 * (mine @ rows[block].T)
        counts += np.count_nonzero(bounds <= (limits - my_squares * (1 - allowed))[:, np.newaxis], axis=1)
    return float(np.mean(counts >= most))
