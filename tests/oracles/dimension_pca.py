"""Slow references of the eigenvalue rules."""

import itertools

import numpy as np


def corrected_ratio(X, kind, center=True):
    """Participation ratio by averages over distinct rows i, j, l, r and features a, b: plain loops."""
    n, p = X.shape
    pairs = [(a, b) for a in range(p) for b in range(p) if a != b or kind == "samples"]

    def v(i, j, k, m):
        return np.mean([X[i, a] * X[j, a] * X[k, b] * X[m, b] for a, b in pairs])

    if kind == "features":
        C = np.cov(X.T, ddof=0) if center else X.T @ X / n
        return np.mean([C[a, a] * C[b, b] for a, b in pairs]) / np.mean([C[a, b] ** 2 for a, b in pairs])
    two = list(itertools.permutations(range(n), 2))
    numerator = np.mean([v(i, i, j, j) for i, j in two])
    denominator = np.mean([v(i, j, i, j) for i, j in two])
    if center:
        three = list(itertools.permutations(range(n), 3))
        four = list(itertools.permutations(range(n), 4))
        last = np.mean([v(i, j, k, m) for i, j, k, m in four])
        numerator += -2 * np.mean([v(i, i, j, k) for i, j, k in three]) + last
        denominator += -2 * np.mean([v(i, j, j, k) for i, j, k in three]) + last
    return numerator / denominator


def count(rule, values):
    """Apply a rule to all p eigenvalues, descending, one at a time."""
    values = list(values)
    total, p = sum(values), len(values)
    if rule == "share":
        return next(m for m in range(1, p + 1) if sum(values[:m]) >= 0.95 * total)
    if rule == "kaiser":
        return sum(v > total / p for v in values)
    if rule == "fukunaga_olsen":
        return sum(v > 0.05 * values[0] for v in values)
    if rule == "max_gap":
        ratios = [values[j] / values[j + 1] for j in range(p - 1)]
        return 1 + ratios.index(max(ratios))
    if rule == "broken_stick":
        found = 0
        for j in range(1, p + 1):
            if values[j - 1] / total <= sum(1 / i for i in range(j, p + 1)) / p:
                break
            found += 1
        return found
    if rule == "fan":
        first = next(m for m in range(1, p + 1) if sum(values[:m]) >= 0.95 * total)
        noise = sum(values[first - 1 :]) / (p - first + 1)
        signal = [v - noise for v in values]
        for j in range(p):
            gap = j + 1 == p or (signal[j + 1] > 0 and signal[j] / signal[j + 1] > 10)
            if gap or sum(signal[: j + 1]) > 0.8 * sum(signal):
                return j + 1
    raise AssertionError(rule)


def marchenko_pastur_sample(aspect, rng, n=1500):
    """Eigenvalues of a large matrix of noise of this ratio of features to rows."""
    p = round(n * aspect)
    return np.linalg.eigvalsh(np.cov(rng.standard_normal((p, n)), ddof=0))
