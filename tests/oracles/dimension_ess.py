"""Expected simplex skewness by loops over pairs, with gamma functions for the reference values."""

import math

import numpy as np


def expected_skewness(n, version):
    """Mean of the skewness of directions uniform on the sphere in dimension n."""
    if version == "a":
        if n == 1:
            return 0.0
        return math.gamma(n / 2) ** 2 / (math.gamma((n + 1) / 2) * math.gamma((n - 1) / 2))
    return math.gamma(n / 2) / (math.sqrt(math.pi) * math.gamma((n + 1) / 2))


def skewness(patch, version):
    """Skewness of one patch of rows."""
    rows = patch - patch.mean(axis=0)
    top, bottom = 0.0, 0.0
    for i in range(len(rows)):
        for j in range(i):
            lengths = np.linalg.norm(rows[i]) * np.linalg.norm(rows[j])
            cosine = float(np.clip(rows[i] @ rows[j] / lengths, -1, 1))
            top += lengths * (math.sin(math.acos(cosine)) if version == "a" else abs(cosine))
            bottom += lengths
    return top / bottom


def ess_value(patch, version):
    """Dimension of one patch of rows, linear between integers."""
    s = skewness(patch, version)
    for n in range(1, 200):
        low, high = expected_skewness(n, version), expected_skewness(n + 1, version)
        if (low <= s < high) or (high < s <= low):
            return n + (s - low) / (high - low)
    raise ValueError("the skewness is that of no dimension below 200")
