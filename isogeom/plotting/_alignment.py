"""Display of tangent-alignment results by probe and training regime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from isogeom._results import _require
from isogeom.tangent import TangentAlignmentResult

# Okabe-Ito colours: told apart by readers with any colour vision, and in print.
_COLOURS = ("#56B4E9", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00")


class TangentAlignmentDisplay:
    """Energy ratios with their null bands, and isotropy changes, by probe and regime.

    Build it with :meth:`from_results`.

    Parameters
    ----------
    results : mapping of (probe, regime) to TangentAlignmentResult
        Probes and regimes are drawn in the order in which they first appear.

    Attributes
    ----------
    figure_ : matplotlib.figure.Figure
        The figure, after :meth:`plot`.
    axes_ : ndarray of shape (2,)
        Its two axes: energy ratio, isotropy change.

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.plotting import TangentAlignmentDisplay
    >>> from isogeom.tangent import TangentProxy, tangent_alignment_test
    >>> X, G = np.random.default_rng(0).standard_normal((2, 200, 8)) * np.arange(1, 9)
    >>> result = tangent_alignment_test(G, TangentProxy(n_directions=2).fit(X), rng=0)
    >>> display = TangentAlignmentDisplay.from_results({("T1_in", "early"): result})
    >>> display.probes, display.regimes
    (['T1_in'], ['early'])
    """

    def __init__(self, results: Mapping[tuple[str, str], TangentAlignmentResult]) -> None:
        _check_results(results)
        self.results = dict(results)
        self.probes = list(dict.fromkeys(probe for probe, _ in self.results))
        self.regimes = list(dict.fromkeys(regime for _, regime in self.results))

    @classmethod
    def from_results(cls, results: Mapping[tuple[str, str], TangentAlignmentResult]) -> TangentAlignmentDisplay:
        """Build the display.

        Parameters
        ----------
        results : mapping of (probe, regime) to TangentAlignmentResult
            One result per probe and regime; missing pairs leave a gap.

        Returns
        -------
        TangentAlignmentDisplay

        Raises
        ------
        ValueError
            If `results` is empty or a key is not a (probe, regime) pair.
        TypeError
            If `results` is no mapping, or a value is not a TangentAlignmentResult.
        """
        return cls(results)

    def null_band(self, probe: str, regime: str) -> tuple[float, float] | None:
        """Return the central 95 % of the null, in units of the energy ratio.

        Parameters
        ----------
        probe, regime : str
            Which result.

        Returns
        -------
        tuple of two floats, or None
            Quantiles 0.025 and 0.975 of ``e_b / e_N``; None if the control captures nothing.
        """
        result = self.results[probe, regime]
        if result.share_normal <= 0:
            return None
        low, high = np.quantile(result.null_distribution, [0.025, 0.975]) / result.share_normal
        return float(low), float(high)

    def plot(self, *, axes: Any = None) -> TangentAlignmentDisplay:
        """Draw the two panels.

        Parameters
        ----------
        axes : sequence of 2 matplotlib.axes.Axes, default=None
            Where to draw; None makes a new figure.

        Returns
        -------
        TangentAlignmentDisplay
            This display, with `figure_` and `axes_`.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If `axes` does not hold two axes.
        """
        if axes is None:
            # A figure of its own, outside pyplot: no global state, no window, nothing to close.
            _require("matplotlib", "plot()", "plot")
            from matplotlib.figure import Figure

            figure = Figure(figsize=(11, 4.6), layout="constrained")
            axes = figure.subplots(1, 2)
        axes = np.ravel(np.asarray(axes, dtype=object))
        if axes.size != 2:
            raise ValueError(f"axes must hold 2 axes, got {axes.size}.")
        self.axes_ = axes
        self.figure_ = axes[0].figure
        self._plot_ratios(axes[0])
        self._plot_changes(axes[1])
        return self

    def _positions(self, regime: str, width: float) -> np.ndarray:
        offset = self.regimes.index(regime) - (len(self.regimes) - 1) / 2
        return np.arange(len(self.probes)) + offset * width

    def _plot_ratios(self, ax: Any) -> None:
        width = 0.8 / len(self.regimes)
        for i, regime in enumerate(self.regimes):
            bands = 0
            for probe, x in zip(self.probes, self._positions(regime, width)):
                result = self.results.get((probe, regime))
                if result is None or not np.isfinite(result.energy_ratio):
                    continue
                label = regime if probe == self.probes[0] else None
                # Bars on a logarithmic axis start at 1, where tangent and control capture the same.
                ratio = result.energy_ratio
                ax.bar(x, ratio - 1, 0.9 * width, bottom=1, color=_COLOURS[i % len(_COLOURS)], label=label)
                band = self.null_band(probe, regime)
                if band is not None:
                    name = "null, central 95 %" if i == 0 and bands == 0 else None
                    edges = [x - 0.45 * width, x + 0.45 * width]
                    ax.fill_between(edges, *band, facecolor="none", edgecolor="black", hatch="////", lw=0.6, label=name)
                    bands += 1
        ax.axhline(1, color="black", lw=0.8)
        ax.set_yscale("log")
        ax.set_xticks(range(len(self.probes)), self.probes)
        ax.set_ylabel("energy ratio  $e_T / e_N$")
        ax.set_title("Gradient energy, tangent against normal control")
        if ax.get_legend_handles_labels()[0]:
            _legend_below(ax)

    def _plot_changes(self, ax: Any) -> None:
        width = 0.8 / (2 * len(self.regimes))
        styles = (("T", "delta_isotropy_tangent", 1.0), ("N", "delta_isotropy_normal", 0.4))
        for i, regime in enumerate(self.regimes):
            centres = self._positions(regime, 2 * width)
            for j, (which, name, alpha) in enumerate(styles):
                heights = [self._change(probe, regime, name) for probe in self.probes]
                ax.bar(
                    centres + (j - 0.5) * width,
                    heights,
                    0.9 * width,
                    color=_COLOURS[i % len(_COLOURS)],
                    alpha=alpha,
                    label=f"{regime}, {which} removed",
                )
        ax.axhline(0, color="black", lw=0.8)
        ax.set_xticks(range(len(self.probes)), self.probes)
        ax.set_ylabel("change of IsoScore* (%)")
        ax.set_title("Gradient isotropy after a removal")
        _legend_below(ax)

    def _change(self, probe: str, regime: str, name: str) -> float:
        result = self.results.get((probe, regime))
        value = None if result is None else getattr(result, name)
        return np.nan if value is None else value


def _legend_below(ax: Any) -> None:
    """Put the legend under the axes, where no bar can be hidden by it."""
    # Patches come before bars in matplotlib's own order: bring the regimes to the front, the null to the end.
    entries = sorted(zip(*ax.get_legend_handles_labels()), key=lambda entry: entry[1].startswith("null"))
    handles, labels = zip(*entries)
    ax.legend(
        handles, labels, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, frameon=False
    )


def _check_results(results: Any) -> None:
    """Raise unless `results` maps (probe, regime) pairs to results."""
    if not isinstance(results, Mapping):
        raise TypeError(f"results must be a mapping {{(probe, regime): result}}, got {type(results).__name__}.")
    if not results:
        raise ValueError("results is empty: pass {(probe, regime): result}, at least one.")
    for key, value in results.items():
        if not (isinstance(key, tuple) and len(key) == 2):
            raise ValueError(f"results has the key {key!r}: keys must be (probe, regime) pairs.")
        if not isinstance(value, TangentAlignmentResult):
            raise TypeError(f"results[{key!r}] must be a TangentAlignmentResult, got {type(value).__name__}.")
