"""What both alignment tests compute from moments: shares, nulls, isotropy changes and the sign test."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from isogeom import _xp
from isogeom._linalg import captured, complement_basis, quadratic_form, remove_directions
from isogeom._moments import Moments
from isogeom._validation import check_choice, check_integer, check_real, warn_user
from isogeom._xp import Array
from isogeom.isotropy import isoscore_star
from isogeom.tangent._null import haar_moments, haar_null
from isogeom.tangent._proxy import CONTROLS, TangentProxy

AGGREGATES = ("pooled", "mean")
DENOMINATORS = ("ambient", "complement")


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked settings of an alignment test."""

    control: str
    aggregate: str
    denominator: str
    shrinkage: float
    n_resamples: int

    @classmethod
    def check(
        cls, proxy: Any, control: Any, n_resamples: Any, aggregate: Any, shrinkage: Any, denominator: Any
    ) -> Settings:
        """Validate the proxy and the settings, naming what is wrong."""
        if not isinstance(proxy, TangentProxy):
            raise TypeError(f"proxy must be a fitted TangentProxy, got {type(proxy).__name__}.")
        check_is_fitted(proxy, "basis_")
        return cls(
            control=check_choice(control, "control", CONTROLS),
            aggregate=check_choice(aggregate, "aggregate", AGGREGATES),
            denominator=check_choice(denominator, "denominator", DENOMINATORS),
            shrinkage=check_real(shrinkage, "shrinkage", low=0, high=1),
            n_resamples=check_integer(n_resamples, "n_resamples", low=1),
        )


def alignment_fields(
    whole: Moments,
    groups: list[Moments] | None,
    proxy: TangentProxy,
    settings: Settings,
    generator: np.random.Generator,
) -> dict[str, Any]:
    """Fields of a TangentAlignmentResult from the moments of all gradient rows, and of each group."""
    r, d = proxy.n_directions_, proxy.n_features_in_
    spaces = Spaces.of(proxy, settings)
    gram = whole.gram()
    share_tangent, total = proxy._energy(gram)
    xp = _xp.array_namespace(gram)
    share_normal = min(max(captured(spaces.normal, gram) / total, 0.0), 1.0)

    # The null only needs the spectrum of the second moments inside the normal space. Projecting the proxy out leaves
    # that spectrum and r zeros, which are the smallest: nothing else is negative but rounding.
    inside = remove_directions(gram / total, spaces.tangent)
    spectrum = np.maximum(np.sort(_xp.to_numpy(xp.linalg.eigvalsh(inside)))[r:], 0.0)
    null = haar_null(spectrum, r, n_resamples=settings.n_resamples, rng=generator)
    mean, variance = haar_moments(spectrum, r)
    change_tangent, change_normal = isotropy_changes(whole, spaces, settings)
    pvalue, n_groups = (None, 0) if groups is None else _sign_test(groups, spaces, settings)
    return {
        "n_samples": whole.count,
        "n_features": d,
        "n_directions": r,
        "share_tangent": share_tangent,
        "share_normal": share_normal,
        "chance": r / d,
        "energy_ratio": ratio(share_tangent, share_normal),
        "ratio_to_mean_normal": ratio(share_tangent * (d - r), (1 - share_tangent) * r),
        "pvalue": float((1 + np.count_nonzero(null >= share_tangent)) / (1 + null.size)),
        "zscore": (share_tangent - mean) / math.sqrt(variance) if variance > 0 else None,
        "delta_isotropy_tangent": change_tangent,
        "delta_isotropy_normal": change_normal,
        "sign_test_pvalue": pvalue,
        "n_groups": n_groups,
        "null_distribution": null,
        **asdict(settings),
    }


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient, inf over zero."""
    return numerator / denominator if denominator > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Spaces:
    """The proxy and its normal control in the accumulator's dtype, and what is left when each is removed."""

    tangent: Array
    normal: Array
    # Bases of the two complements, where isotropy refers to their dimension; None for the ambient one.
    left: tuple[Array, Array] | None

    @classmethod
    def of(cls, proxy: TangentProxy, settings: Settings) -> Spaces:
        """Build the spaces once: they depend on the proxy alone, not on the gradients."""
        tangent = proxy._basis64()
        xp = _xp.array_namespace(tangent)
        normal = xp.astype(proxy.normal_control(settings.control), tangent.dtype)
        ambient = settings.denominator == "ambient"
        return cls(tangent, normal, None if ambient else (complement_basis(tangent), complement_basis(normal)))

    def remove(self, covariance: Array) -> Iterator[Array]:
        """Yield the covariance without the proxy, then without the control."""
        if self.left is None:
            yield remove_directions(covariance, self.tangent)
            yield remove_directions(covariance, self.normal)
        else:
            yield from (quadratic_form(basis, covariance) for basis in self.left)


def isotropy_changes(moments: Moments, spaces: Spaces, settings: Settings) -> tuple[float | None, float | None]:
    """Change of IsoScore* in percent when each subspace is removed; None where a score is 0/0."""
    if moments.count < 2:
        return None, None
    covariance = moments.covariance()
    xp = _xp.array_namespace(covariance)
    total = float(xp.linalg.trace(covariance))
    if not total > 0:
        return None, None
    # What a projection leaves of a covariance inside the subspace is rounding: no isotropy can be read from it.
    floor = total * covariance.shape[0] * float(xp.finfo(covariance.dtype).eps)
    before = isoscore_star(covariance=covariance, shrinkage=settings.shrinkage)
    changes: list[float | None] = []
    for left in spaces.remove(covariance):
        if float(xp.linalg.trace(left)) <= floor or before <= 0 or left.shape[0] < 2:
            changes.append(None)
        else:
            changes.append(100 * (isoscore_star(covariance=left, shrinkage=settings.shrinkage) - before) / before)
    return changes[0], changes[1]


def _sign_test(groups: list[Moments], spaces: Spaces, settings: Settings) -> tuple[float | None, int]:
    """One-sided exact sign test over groups, and the number of groups that have both changes."""
    changes = [isotropy_changes(moments, spaces, settings) for moments in groups]
    defined = [(t, n) for t, n in changes if t is not None and n is not None]
    if len(defined) < len(groups):
        warn_user(
            f"{len(groups) - len(defined)} of {len(groups)} groups have no isotropy change (no variance before or "
            "after a removal) and are left out of the sign test.",
            UserWarning,
        )
    wins = sum(t > n for t, n in defined)
    losses = sum(t < n for t, n in defined)
    return (sign_test_pvalue(wins, losses) if defined else None), len(defined)


def sign_test_pvalue(wins: int, losses: int) -> float:
    """One-sided exact p-value of at least `wins` heads in ``wins + losses`` fair tosses; 1.0 without tosses."""
    n = wins + losses
    return sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n


def check_groups(groups: Any, n: int) -> np.ndarray:
    """Return the labels on the host; every group needs 2 rows to have a covariance."""
    labels = _xp.to_numpy(groups)
    if labels.shape != (n,):
        raise ValueError(f"groups must have shape ({n},), one label per row of G, got shape {labels.shape}.")
    # A NaN equals no label, not even itself: its rows would be lost.
    if any(label is None or label != label for label in labels.tolist()):
        raise ValueError(
            "groups holds a missing label (NaN or None): every row of G belongs to a step; drop those rows."
        )
    try:
        _, counts = np.unique(labels, return_counts=True)
    except TypeError as error:
        raise TypeError("groups mixes labels that cannot be compared: use integers, or strings.") from error
    if counts.min() < 2:
        raise ValueError(
            "groups has a label with a single row, which has no covariance: use labels that gather at least 2 rows "
            "each, such as evaluation batches."
        )
    return labels


def rows_by_group(labels: np.ndarray) -> list[np.ndarray]:
    """Row numbers of every group, groups in sorted order of their labels."""
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]


def take_rows(G: Array, rows: np.ndarray) -> Array:
    """Return these rows of `G`, on its device."""
    xp = _xp.array_namespace(G)
    return xp.take(G, xp.asarray(rows, device=_xp.device(G)), axis=0)
