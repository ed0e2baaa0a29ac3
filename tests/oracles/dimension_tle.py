"""Tight local intrinsic dimensionality by loops over pairs of neighbours."""

import math

import numpy as np


def tle_value(center, neighbors):
    """Dimension at `center` from its neighbours, nearest first; none may coincide."""
    k = len(neighbors)
    u = [float(np.linalg.norm(x - center)) for x in neighbors]
    r = u[-1]
    total = 2 * sum(math.log(ui / r) for ui in u)
    for i in range(k):
        for j in range(k):
            if i == j:
                continue
            v2 = float(np.sum((neighbors[i] - neighbors[j]) ** 2))
            z2 = 2 * u[i] ** 2 + 2 * u[j] ** 2 - v2
            for h2 in (v2, z2):
                a, room = u[i] ** 2 + h2 - u[j] ** 2, r**2 - u[i] ** 2
                if u[i] == r:
                    s = r * h2 / (r**2 + h2 - u[j] ** 2)
                else:
                    s = r * (math.sqrt(a**2 + 4 * h2 * room) - a) / (2 * room)
                total += math.log(s / r)
    return -2 * k**2 / total
