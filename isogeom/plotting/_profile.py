"""Display of the dimension by scale."""

from __future__ import annotations

from typing import Any

from isogeom._results import _require
from isogeom.dimension import IDProfile

# Okabe-Ito colours: told apart by readers with any colour vision, and in print.
_STYLES = {"gride": ("#0072B2", "o"), "twonn": ("#E69F00", "s"), "binomial": ("#009E73", "^")}
_LABELS = {"gride": "Gride", "twonn": "TwoNN on parts of the rows", "binomial": "binomial"}


class IDProfileDisplay:
    """Intrinsic dimension against the radius of the neighbourhoods, with confidence bands.

    Build it with :meth:`from_profile`.

    Parameters
    ----------
    profile : IDProfile
        What to draw.

    Attributes
    ----------
    figure_ : matplotlib.figure.Figure
        The figure, after :meth:`plot`.
    ax_ : matplotlib.axes.Axes
        Its axes.

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import id_profile
    >>> from isogeom.plotting import IDProfileDisplay
    >>> X = np.random.default_rng(0).standard_normal((500, 4))
    >>> display = IDProfileDisplay.from_profile(id_profile(X))
    >>> display.profile.n_samples
    500
    """

    def __init__(self, profile: IDProfile) -> None:
        if not isinstance(profile, IDProfile):
            raise TypeError(f"profile must be an IDProfile, got {type(profile).__name__}: use id_profile(X).")
        self.profile = profile

    @classmethod
    def from_profile(cls, profile: IDProfile) -> IDProfileDisplay:
        """Build the display.

        Parameters
        ----------
        profile : IDProfile
            Result of :func:`isogeom.dimension.id_profile`.

        Returns
        -------
        IDProfileDisplay

        Raises
        ------
        TypeError
            If `profile` is something else.
        """
        return cls(profile)

    def plot(self, *, ax: Any = None) -> IDProfileDisplay:
        """Draw the profile.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, default=None
            Where to draw; None for a new figure.

        Returns
        -------
        IDProfileDisplay
            This display, with `figure_` and `ax_`.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        if ax is None:
            ax = _require("matplotlib.pyplot", "plot()", "plot").subplots(figsize=(6, 4), layout="constrained")[1]
        for name in dict.fromkeys(str(entry) for entry in self.profile.estimator):
            columns = self.profile.select(name)
            colour, marker = _STYLES[name]
            ax.plot(columns["radius"], columns["dimension"], color=colour, marker=marker, label=_LABELS[name])
            ax.fill_between(columns["radius"], columns["lower"], columns["upper"], color=colour, alpha=0.2, linewidth=0)
        ax.set_xscale("log")
        ax.set_xlabel("radius (mean distance to the farthest neighbour used)")
        ax.set_ylabel("intrinsic dimension")
        ax.legend(frameon=False)
        self.ax_, self.figure_ = ax, ax.figure
        return self
