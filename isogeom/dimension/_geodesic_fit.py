"""Fits of the histogram of geodesic distances by that of a sphere: maximum likelihood, and the published recipe."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Window of the likelihood in units of the width of the peak: below it and above it. Along graphs, short paths are too
# long and the far side feels the boundary; given geodesics have only the second fault.
GRAPH_WINDOW = (2.0, 0.5)
GEODESIC_WINDOW = (np.inf, 1.0)
# Fewest distances, and bins, that a window must hold.
_FEWEST_DISTANCES, _FEWEST_BINS = 20, 8
_MAX_WINDOWS, _MAX_STEPS = 60, 60
# Largest width of a peak, as a share of its place: in dimension 1 there is no peak.
_WIDEST = 0.9
# Below this exponent a density is flat: the dimension is 1, and there is no peak to place.
_FLAT = 1e-3
# Relative change of both parameters at which a maximum is found, over the tolerance of the window.
_FINER = 1e-3
# Bins in which the fitted and the observed shares are compared.
_COARSE = 16


@dataclass(frozen=True)
class SineFit:
    """A density ``sin^{D-1}(pi r / (2 r_max))`` fitted to distances.

    Attributes
    ----------
    dimension : float
        D, at least 1.
    peak : float
        r_max, in the unit of the distances.
    width : float
        Standard deviation of the normal density with the curvature of the peak, ``2 r_max / (pi sqrt(D - 1))``; at most
        0.9 r_max.
    misfit : float
        Root of the chi-squared distance between observed and fitted shares, over the window in 16 parts: 0 is perfect.
    settled : bool
        Whether the window and the fit agree; where False, the dimension comes from the moments of all distances.
    """

    dimension: float
    peak: float
    width: float
    misfit: float
    settled: bool


def fit_sine(
    counts: np.ndarray,
    edges: np.ndarray,
    window: tuple[float, float],
    start: SineFit | None = None,
    tol: float = 1e-4,
) -> SineFit:
    """Fit the density of distances on a sphere by maximum likelihood, in a window that follows its peak.

    Parameters
    ----------
    counts : ndarray of shape (n_bins,)
        Numbers of distances.
    edges : ndarray of shape (n_bins + 1,)
        Edges of the bins, equally spaced.
    window : tuple of float
        The window reaches this many widths of the peak below it, and above it.
    start : SineFit, default=None
        A fit of similar counts.
    tol : float, default=1e-4
        Change of peak and width, in widths, at which the window is settled.

    Returns
    -------
    SineFit

    Raises
    ------
    ValueError
        If all distances are in one bin.
    """
    # In units of the range: squares of distances of 1e-200 would vanish.
    unit = float(edges[-1])
    x = (edges[1:] + edges[:-1]) / (2 * unit)
    mean, std = moments(counts, x)
    if std == 0:
        raise ValueError("All graph distances are equal: they have no histogram to fit.")
    peak, width = (mean, std) if start is None else (start.peak / unit, start.width / unit)
    bin_width = float(x[1] - x[0])
    for step in range(_MAX_WINDOWS):
        low, high = peak - window[0] * width, peak + window[1] * width
        # The share of each bin that is inside: the fit then changes smoothly with the window.
        share = np.clip((x - low) / bin_width + 0.5, 0.0, 1.0) * np.clip((high - x) / bin_width + 0.5, 0.0, 1.0)
        inside = share > 0
        found = _maximum(
            counts[inside], x[inside], share[inside], (2 * peak / (np.pi * width)) ** 2, peak, _FINER * tol
        )
        if found is None:
            break
        exponent, new, misfit = found
        if exponent < _FLAT:
            # No peak: its place means nothing, and the window stays.
            return SineFit(1.0, peak * unit, width * unit, misfit, True)
        spread = min(2 / (np.pi * np.sqrt(exponent)), _WIDEST) * new
        moved = max(abs(new - peak), abs(spread - width))
        if moved <= tol * width:
            return SineFit(1 + exponent, new * unit, spread * unit, misfit, True)
        # Windows that jump back and forth meet in the middle.
        pace = 1.0 if step < 8 else 0.5 if step < 30 else 0.2
        peak, width = peak + pace * (new - peak), width + pace * (spread - width)
    return SineFit(1 + (2 * mean / (np.pi * std)) ** 2, mean * unit, std * unit, np.inf, False)


def moments(counts: np.ndarray, centres: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation of binned values."""
    total = counts.sum()
    mean = float(counts @ centres / total)
    return mean, float(np.sqrt(counts @ (centres - mean) ** 2 / total))


def _maximum(
    counts: np.ndarray, x: np.ndarray, share: np.ndarray, exponent: float, peak: float, tol: float
) -> tuple[float, float, float] | None:
    """Maximise the likelihood of a truncated density over the exponent ``D - 1`` and the peak, by Fisher scoring.

    The density is of an exponential family in the exponent, so score and information are differences of means, and
    covariances, of the derivatives of its logarithm. Returns None where there is too little to fit, or no maximum.
    """
    counts = counts * share
    total = counts.sum()
    if total < _FEWEST_DISTANCES or np.count_nonzero(counts) < _FEWEST_BINS:
        return None
    p = counts / total
    # The sine must stay positive up to the end of the window.
    lowest, highest = 0.5 * x[-1] * (1 + 1e-9), 2 * x[-1]
    log_exponent, peak = np.log(max(exponent, 2 * _FLAT)), max(peak, 1.01 * lowest)
    now = _likelihood(p, x, share, log_exponent, peak)
    for _ in range(_MAX_STEPS):
        value, score, information, _ = now
        first, mixed, second = information
        determinant = first * second - mixed**2
        if determinant > 1e-12 * first * second:
            along = (second * score[0] - mixed * score[1]) / determinant
            across = (first * score[1] - mixed * score[0]) / determinant
        elif first > 0:
            # A density that is almost flat has no peak to move.
            along, across = score[0] / first, 0.0
        else:
            return None
        along, across = min(max(along, -1.0), 1.0), min(max(across, -0.2 * peak), 0.2 * peak)
        for _ in range(40):
            trial = log_exponent + along, min(max(peak + across, lowest), highest)
            now = _likelihood(p, x, share, *trial)
            if now[0] >= value - 1e-13 * abs(value):
                break
            along, across = along / 2, across / 2
        else:
            break
        log_exponent, peak = trial
        if np.exp(log_exponent) < _FLAT or max(abs(along), abs(across) / peak) < tol:
            break
    else:
        return None
    if not lowest < peak < highest and np.exp(log_exponent) >= _FLAT:
        return None
    return float(np.exp(log_exponent)), float(peak), _misfit(p, now[3])


def _likelihood(
    p: np.ndarray, x: np.ndarray, share: np.ndarray, log_exponent: float, peak: float
) -> tuple[float, tuple[float, float], tuple[float, float, float], np.ndarray]:
    """Return mean log-likelihood, score, information and fitted shares at a logarithm of the exponent and a peak.

    The information is a symmetric matrix of side 2: its first entry, that off the diagonal, and the last.
    """
    exponent = float(np.exp(log_exponent))
    z = (0.5 * np.pi / peak) * x
    log_sine = np.log(np.sin(z))
    # Derivatives of the logarithm of the density by both parameters.
    first, second = exponent * log_sine, (-exponent / peak) * z / np.tan(z)
    top = float(log_sine.max())
    q = share * np.exp(exponent * (log_sine - top))
    norm = float(q.sum())
    q /= norm
    value = exponent * (float(p @ log_sine) - top) - float(np.log(norm))
    means = float(q @ first), float(q @ second)
    away, aside = first - means[0], second - means[1]
    information = float(q @ away**2), float(q @ (away * aside)), float(q @ aside**2)
    return value, (float(p @ away), float(p @ aside)), information, q


def _misfit(p: np.ndarray, q: np.ndarray) -> float:
    starts = np.unique(np.linspace(0, len(p), _COARSE + 1).astype(int)[:-1])
    observed, fitted = np.add.reduceat(p, starts), np.add.reduceat(q, starts)
    return float(np.sqrt(np.sum((observed - fitted) ** 2 / np.maximum(fitted, 1e-12))))


@dataclass(frozen=True)
class PublishedFit:
    """Outcome of the published recipe: dimension (real), peak, width, and root mean squared residual of ln counts."""

    dimension: float
    peak: float
    width: float
    misfit: float


def fit_published(
    counts: np.ndarray, edges: np.ndarray, mean: float, std: float, longest_edge: float, *, strict: bool = False
) -> PublishedFit:
    """Fit the logarithm of a histogram by least squares, as published.

    Parameters
    ----------
    counts : ndarray of shape (n_bins,)
        Numbers of distances.
    edges : ndarray of shape (n_bins + 1,)
        Edges of the bins, from the smallest to the largest distance.
    mean, std : float
        Of all distances.
    longest_edge : float
        Longest edge of the graph: shorter distances are not used.
    strict : bool, default=False
        False for the rules of 2016, True for those of 2019.

    Returns
    -------
    PublishedFit

    Raises
    ------
    ValueError
        Where the recipe gives up: the peak is far from the mean, or not beyond the longest edge, or has too few bins.

    Notes
    -----
    The place of the peak is refined by two parabolas through the logarithms of the counts; then ``ln h - ln h_max =
    (D - 1) ln sin(pi r / (2 r_max))`` is fitted to the bins from two widths below the peak up to it, with the height of
    the last parabola. These details are not all in the papers: they are those that give the outputs of their programs.

    The rules differ. In 2016 a peak may be two bins beyond one standard deviation from the mean; a parabola counts if
    it opens downwards and its vertex is near, the first being replaced by the mean if not; the window of the second
    ends one bin later; few bins are made up to four. In 2019 there are no such allowances: the first parabola always
    counts, the second if its vertex is near, but the fit begins two widths below its vertex even if not.
    """
    bin_width = float(edges[1] - edges[0])
    x = (edges[1:] + edges[:-1]) / 2
    used = counts > 0
    logs = np.log(np.maximum(counts, 1))
    peak = float(x[np.argmax(counts)])
    if abs(peak - mean) > std + (0 if strict else 2 * bin_width):
        raise ValueError(f"The histogram of distances peaks at {peak:.4g}, far from its mean {mean:.4g} +- {std:.4g}.")
    if peak <= longest_edge + bin_width:
        raise ValueError(
            f"The histogram of distances peaks at {peak:.4g}, not beyond the longest edge {longest_edge:.4g}: take "
            "fewer neighbours."
        )
    refine = _strict_peak if strict else _lenient_peak
    peak, width, height, low = refine(x, logs, used, bin_width, peak, mean, std)
    low = max(low, 0.0, longest_edge)
    inside = used & (x > low) & (x <= peak + bin_width / 4)
    if not strict and inside.sum() < 4 and longest_edge < peak:
        # At least four bins, if need be the last ones before the peak.
        inside = used & (x <= peak + bin_width / 4) & (x > peak + bin_width / 4 - 5 * bin_width)
    if inside.sum() < (3 if strict else 2):
        raise ValueError(f"{inside.sum()} bins lie between the longest edge and the peak of the histogram: too few.")
    y, u = logs[inside] - height, np.log(np.sin(np.pi * x[inside] / (2 * peak)))
    slope = float(u @ y / (u @ u))
    return PublishedFit(1 + slope, peak, width, float(np.sqrt(np.mean((slope * u - y) ** 2))))


def _lenient_peak(
    x: np.ndarray, logs: np.ndarray, used: np.ndarray, bin_width: float, peak: float, mean: float, std: float
) -> tuple[float, float, float, float]:
    """Return peak, width, height and the begin of the fit by the rules of 2016."""
    width, height = std, float(logs.max())
    for beyond, tolerance in ((0.0, 2), (bin_width, 4)):
        a, vertex, top = _parabola(x, logs, used & (x > peak - width) & (x <= peak + width / 2 + beyond))
        if a < 0 and abs(vertex - peak) < width / tolerance + bin_width:
            peak, width, height = vertex, float(np.sqrt(-0.5 / a)), top
        elif tolerance == 2:
            peak = mean
    return peak, width, height, peak - 2 * width - bin_width / 2


def _strict_peak(
    x: np.ndarray,
    logs: np.ndarray,
    used: np.ndarray,
    bin_width: float,
    peak: float,
    mean: float,  # noqa: ARG001
    std: float,
) -> tuple[float, float, float, float]:
    """Return peak, width, height and the begin of the fit by the rules of 2019."""
    found = []
    width = std
    for _ in range(2):
        near = (x > peak - width) & (x < peak + width / 2)
        if not used[near].all():
            # The recipe takes the logarithm of these counts.
            raise ValueError("The peak of the histogram of distances holds empty bins: more rows are needed.")
        a, peak, height = _parabola(x, logs, near)
        width = float(np.sqrt(abs(0.5 / a)))
        found.append((peak, width, height))
    first, second = found
    low = abs(second[0]) - 2 * second[1] - bin_width / 2
    settled = abs(abs(second[0]) - first[0]) <= first[1] / 4
    peak, _, height = second if settled else first
    return abs(peak), second[1], height, low


def _parabola(x: np.ndarray, logs: np.ndarray, near: np.ndarray) -> tuple[float, float, float]:
    """Return the curvature, half of the second derivative, and place and height of the vertex."""
    if near.sum() < 3:
        raise ValueError(f"The peak of the histogram of distances holds {near.sum()} bins: 3 are needed.")
    a, b, c = (float(value) for value in np.polyfit(x[near], logs[near], 2))
    if a == 0:
        raise ValueError("The histogram of distances has no peak: its logarithm is a line there.")
    return a, -b / (2 * a), c - b**2 / (4 * a)
