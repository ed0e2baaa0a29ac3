"""Manifold-adaptive dimension, row by row."""

import math


def mada_values(distances, k):
    """Dimension of every row from its k-th and its floor(k / 2)-th distance."""
    half = k // 2
    return [math.log(k / half) / math.log(row[k - 1] / row[half - 1]) for row in distances]
