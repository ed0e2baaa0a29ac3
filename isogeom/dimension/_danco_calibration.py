"""The statistics of DANCo on uniform balls of known dimension, made once per setting and kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.interpolate import PchipInterpolator

from isogeom._neighbors._rows import nearest
from isogeom.dimension._danco_statistics import angle_moments, concentration, row_angles
from isogeom.dimension._mind_law import first_to_last, likeliest

# Rows whose neighbourhoods are measured in each ball: the noise of a calibration is that of a data set of this size.
CALIBRATION_ROWS = 2000
# Up to this size many balls are searched at once by their matrices of distances.
_SMALL = 300
# Balls are no larger than this: beyond, the statistics change with the logarithm of the size only.
_LARGEST = 50_000
# Every dimension up to this is measured; beyond, one in about six, and those between by interpolation.
_DENSE, _GROWTH = 10, 1.18
# Interpolated dimensions per integer.
STEPS = 10


@dataclass(frozen=True)
class Balls:
    """Uniform balls to compare a data set with.

    Attributes
    ----------
    n : int
        Number of rows of a ball.
    k : int
        Number of neighbours nearer than the far one.
    formula : {'exact', 'published'}
        Of the angle statistics.
    seed : int
        Of the draws.
    largest : int
        Largest dimension.
    """

    n: int
    k: int
    formula: str
    seed: int
    largest: int

    def table(self, dimension: float, tightness: float) -> np.ndarray:
        """Return MiND dimension, direction and concentration of angles in dimensions 1, 1 + 1 / STEPS, ...

        Rows go on until the first and the last column have passed `dimension` and `tightness`, those of the data, with
        room to spare, or to the largest dimension.
        """
        nodes: list[int] = []
        found: list[tuple[float, float, float]] = []
        past = 0
        for node in _nodes(self.largest):
            nodes.append(node)
            found.append(ball_statistics(min(self.n, _LARGEST), self.k, node, self.formula, self.seed))
            past += found[-1][0] > dimension and found[-1][2] > tightness
            if past >= 2:
                break
        if len(nodes) == 1:
            return np.asarray(found)
        fine = np.arange((nodes[-1] - 1) * STEPS + 1) / STEPS + 1
        return np.asarray(PchipInterpolator(nodes, found, axis=0)(fine))


def _nodes(largest: int) -> list[int]:
    nodes = list(range(1, min(largest, _DENSE) + 1))
    while nodes[-1] < largest:
        nodes.append(min(max(round(nodes[-1] * _GROWTH), nodes[-1] + 1), largest))
    return nodes


@lru_cache(maxsize=4096)
def ball_statistics(n: int, k: int, dimension: int, formula: str, seed: int) -> tuple[float, float, float]:
    """Return MiND dimension, direction and concentration of the angles of `n` rows uniform in a ball.

    Measured at about `CALIBRATION_ROWS` rows, of several balls if they are small; kept for the next call.
    """
    rng = np.random.default_rng([seed, dimension])
    logs, moments = [], []
    for _ in range(1 if n <= _SMALL else -(-CALIBRATION_ROWS // n)):
        measure = _many_small if n <= _SMALL else _one_large
        more, angles = measure(n, k, dimension, rng)
        logs.append(more)
        moments.append(angles)
    ratio = likeliest(np.concatenate(logs)[np.newaxis, :], k)[0]
    direction, mean = row_angles(np.concatenate(moments), formula).mean(axis=0)
    return float(ratio), float(direction), float(concentration(mean, formula))


def _ball(n: int, dimension: int, rng: np.random.Generator) -> np.ndarray:
    rows = rng.standard_normal((n, dimension))
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / lengths * rng.random((n, 1)) ** (1 / dimension)


def _one_large(n: int, k: int, dimension: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    rows = _ball(n, dimension, rng)
    # The rows are in random order: the first are a sample.
    at = np.arange(min(n, CALIBRATION_ROWS))
    return _measure(rows, at, *nearest(rows, rows, max(k + 1, 2), own=at), k)


def _many_small(n: int, k: int, dimension: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    count = -(-CALIBRATION_ROWS // n)
    rows = _ball(n * count, dimension, rng)
    balls = rows.reshape(count, n, dimension)
    squares = np.sum(balls**2, axis=2)
    apart = squares[:, :, np.newaxis] + squares[:, np.newaxis, :] - 2 * balls @ balls.transpose(0, 2, 1)
    apart[:, np.arange(n), np.arange(n)] = np.inf
    local = np.argsort(apart, axis=2)[:, :, : max(k + 1, 2)]
    indices = (local + n * np.arange(count)[:, np.newaxis, np.newaxis]).reshape(n * count, -1)
    distances = np.stack([np.linalg.norm(rows[column] - rows, axis=1) for column in indices.T], axis=1)
    return _measure(rows, np.arange(n * count), distances, indices, k)


def _measure(
    rows: np.ndarray, at: np.ndarray, distances: np.ndarray, indices: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    near = max(k, 2)
    logs = np.asarray(first_to_last(distances[:, : k + 1]))
    moments = np.asarray(angle_moments(rows, at, distances[:, :near], indices[:, :near]))
    good = np.isfinite(logs) & np.isfinite(moments).all(axis=1)
    return logs[good], moments[good]
