"""Lengths of graphs on growing sub-samples: what the entropic and the spanning-tree dimension share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._neighbors._metrics import check_metric
from isogeom._validation import warn_user
from isogeom._xp import Array
from isogeom.dimension._pairs import dense_distances, distance_matrix
from isogeom.dimension._rows_estimator import centred_patches, patch_gram

# Sizes and repeats of the sub-samples of a neighbourhood, and its smallest share.
PATCH_SIZES, PATCH_REPEATS, PATCH_SHARE = 5, 4, 0.4
# Neighbourhoods whose distances are held at a time, where they are not products.
_PATCHES = 64
# One in this many rows are few; if they hold more than this share of a length, they dominate it. They hold a tenth for
# cubes, up to a half for Gaussian rows of dimension 1 or 20 rows only, 0.85 where the law has no mean.
_FEW, _DOMINATED = 20, 0.6
# Standard errors by which a power must exceed the dimension before the user is told.
_ERRORS = 2.0


def sample_sizes(n: int, n_sizes: int, min_share: float, least: int) -> np.ndarray:
    """Return increasing sizes, geometric from a share of `n` to `n`, none below `least`.

    Raises
    ------
    ValueError
        If fewer than two sizes are left.
    """
    first = max(round(min_share * n), least)
    sizes = np.unique(np.round(np.geomspace(min(first, n), n, n_sizes)).astype(np.int64))
    if len(sizes) < 2:
        raise ValueError(
            f"{n} rows are too few for sub-samples of different sizes of at least {least}: pass more rows, or lower "
            "n_neighbors or min_share."
        )
    return sizes


def slope_weights(sizes: np.ndarray) -> np.ndarray:
    """Return the weights by which logarithms of lengths, one per size, add up to the slope on the size's logarithm."""
    x = np.log(sizes)
    x = x - x.mean()
    return x / (x @ x)


@dataclass
class Growth:
    """Lengths for every size and repeat, and what every row had to do with their slope.

    Attributes
    ----------
    sizes : ndarray of shape (n_sizes,)
        Rows per sub-sample.
    lengths : ndarray of shape (n_sizes, n_repeats)
        Total length.
    influence : ndarray of shape (n,)
        Derivative of the slope by the weight of the row.
    concentration : float
        Largest share of a length that belongs to one in 20 of the rows of its sub-sample.
    """

    sizes: np.ndarray
    lengths: np.ndarray
    influence: np.ndarray
    concentration: float = 0.0

    @classmethod
    def empty(cls, sizes: np.ndarray, n_repeats: int, n: int) -> Growth:
        """Prepare the arrays."""
        return cls(sizes, np.zeros((len(sizes), n_repeats)), np.zeros(n))

    def add(self, q: int, r: int, rows: np.ndarray, parts: np.ndarray, edges: np.ndarray | None = None) -> None:
        """Record a sub-sample: its rows, the part of each in the length, and its part in the number of edges.

        The number of edges of the graph is fixed, so a row's part counts beyond that of as many edges of mean length.
        """
        total = float(parts.sum())
        self.lengths[q, r] = total
        if total > 0:
            few = max(1, len(parts) // _FEW)
            share = float(np.partition(parts, len(parts) - few)[-few:].sum()) / total
            self.concentration = max(self.concentration, share)
            weight = slope_weights(self.sizes)[q] / self.lengths.shape[1]
            expected = 1 / len(rows) if edges is None else edges / edges.sum()
            self.influence[rows] += weight * (parts / total - expected)

    @property
    def slope(self) -> float:
        """Return the slope of the mean logarithm of the length on that of the size; NaN if a length is 0."""
        if not (self.lengths > 0).all():
            return float("nan")
        return float(slope_weights(self.sizes) @ np.log(self.lengths).mean(axis=1))

    def complaint(self, what: str, power: str, remedy: str) -> str:
        """Return why no dimension explains the slope, and what to do."""
        message = (
            f"The length of the {what} grows with the number of rows to the power {self.slope:.3g}, which no finite "
            "dimension explains: "
        )
        if self.concentration > _DOMINATED:
            return message + (
                f"up to {self.concentration:.0%} of it belongs to a few rows far from all others. Drop these outliers, "
                f"or lower {power}."
            )
        return message + f"pass more rows, or {remedy}."


def warn_power(name: str, power: float, dimension: float, std: float | None) -> None:
    """Warn if the power of the edges is above the dimension found: lengths then follow no law of growth."""
    if power > dimension + _ERRORS * (std or 0.0):
        warn_user(
            f"{name}={power:.3g} is above the dimension found, {dimension:.3g}: lengths of graphs tell the dimension "
            f"only for powers below it. Lower {name}."
        )


def patch_distances(table: NeighborTable, indices: Array) -> Iterator[np.ndarray]:
    """Yield the distances inside neighbourhoods, (m, k) to blocks (b, k, k), on the host, each in a unit of its own.

    They are in the metric of the table, whose rows are measured again if it holds them.
    """
    if table.X is None:
        D, position = dense_distances(table), table.positions()
        places = position[_xp.to_numpy(indices)]
        for start in range(0, len(places), _PATCHES):
            chosen = places[start : start + _PATCHES]
            yield D[chosen[:, :, np.newaxis], chosen[:, np.newaxis, :]]
        return
    if table.metric != "euclidean":
        check_metric(table.metric, table.X)
        for start in range(0, int(indices.shape[0]), _PATCHES):
            chosen = indices[start : start + _PATCHES]
            # As precise as the search.
            yield np.stack([distance_matrix(table.X[rows].astype(np.float64), table.metric) for rows in chosen])
        return
    for patch in centred_patches(table.X, indices):
        gram = _xp.to_numpy(patch_gram(patch))
        norms = np.einsum("bii->bi", gram)
        squares = norms[:, :, np.newaxis] + norms[:, np.newaxis, :] - 2 * gram
        yield np.sqrt(np.maximum(squares, 0.0))


def patch_subsamples(k: int, least: int, rng: np.random.Generator) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """Return the sizes of sub-samples of k rows and, for each, the positions of the repeats; equal for all patches."""
    sizes = sample_sizes(k, PATCH_SIZES, PATCH_SHARE, least)
    draws = [[np.sort(rng.permutation(k)[:size]) for _ in range(PATCH_REPEATS if size < k else 1)] for size in sizes]
    return sizes, draws
