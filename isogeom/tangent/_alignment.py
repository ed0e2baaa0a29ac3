"""Test how much of a gradient, and of its anisotropy, a tangent proxy captures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._linalg import row_norms
from isogeom._moments import Moments, merge_all
from isogeom._random import check_rng
from isogeom._results import Result
from isogeom._validation import check_sample_rows
from isogeom._xp import Array
from isogeom.tangent._proxy import TangentProxy
from isogeom.tangent._statistics import Settings, alignment_fields, check_groups, rows_by_group, take_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TangentAlignmentResult(Result):
    """Outcome of :func:`tangent_alignment_test`; every number is a plain Python or NumPy one.

    Attributes
    ----------
    gradient : str
        Kind of gradient: "rows" (one gradient per row) or "weight" (rows of a weight gradient).
    n_samples, n_features, n_directions : int
        Rows tested, their dimension d, and the rank r of the proxy.
    share_tangent, share_normal : float
        Energy shares e_T and e_N of the proxy and of the deterministic normal control, 0 to 1.
    chance : float
        r / d, the expected share of a random subspace of the whole space.
    energy_ratio : float
        e_T / e_N (the paper's E_r); inf if the control captures nothing.
    ratio_to_mean_normal : float
        e_T over the mean share of random r-dimensional normal subspaces, in closed form; inf if e_T is 1.
    pvalue : float
        Monte-Carlo p-value, ``(1 + #{e_b >= e_T}) / (1 + n_resamples)``.
    zscore : float or None
        e_T against the closed-form mean and standard deviation of the same null; None where that null has no variance.
    delta_isotropy_tangent, delta_isotropy_normal : float or None
        Change of IsoScore* in percent when the proxy (the control) is projected out; None where a score is undefined
        because no variance is there, before or after.
    sign_test_pvalue : float or None
        One-sided exact sign test over groups that removing T raises IsoScore* more than removing N; None without
        groups.
    n_groups : int
        Groups tested, before ties are dropped; 0 without groups.
    control, aggregate, denominator : str
        Settings.
    shrinkage : float
        Settings.
    n_resamples : int
        Number of random subspaces.
    null_distribution : ndarray of shape (n_resamples,)
        Their shares.
    """

    gradient: str
    n_samples: int
    n_features: int
    n_directions: int
    share_tangent: float
    share_normal: float
    chance: float
    energy_ratio: float
    ratio_to_mean_normal: float
    pvalue: float
    zscore: float | None
    delta_isotropy_tangent: float | None
    delta_isotropy_normal: float | None
    sign_test_pvalue: float | None
    n_groups: int
    control: str
    aggregate: str
    denominator: str
    shrinkage: float
    n_resamples: int
    null_distribution: np.ndarray


def tangent_alignment_test(
    G: Any,
    proxy: TangentProxy,
    *,
    control: str = "next",
    n_resamples: int = 999,
    groups: Any = None,
    aggregate: str = "pooled",
    shrinkage: float = 0.2,
    denominator: str = "ambient",
    rng: Any = None,
) -> TangentAlignmentResult:
    """Test whether gradients concentrate in a tangent proxy more than in normal subspaces of the same rank.

    Parameters
    ----------
    G : array-like of shape (n_samples, n_features), Moments, or sequence of Moments
        Gradients, one per row, in the library and on the device of the proxy; or their moments, or one Moments per
        group (then `groups` stays None).
    proxy : TangentProxy
        Fitted proxy; it is not changed.
    control : {"next", "complement", "lowest"}, default="next"
        Deterministic matched-rank normal control, see :meth:`TangentProxy.normal_control`.
    n_resamples : int, default=999
        Haar-random normal subspaces of the Monte-Carlo null.
    groups : array-like of shape (n_samples,), default=None
        Evaluation step of each row, for the sign test. At least 2 rows each.
    aggregate : {"pooled", "mean"}, default="pooled"
        "pooled": energy summed over rows; "mean": mean of the rows' own shares (rows are scaled to unit norm first,
        zero rows dropped).
    shrinkage : float, default=0.2
        Weight of the scaled identity in IsoScore*, 0 to 1.
    denominator : {"ambient", "complement"}, default="ambient"
        Dimension that IsoScore* after the removal refers to: n_features (a plain projection) or what is left of it.
    rng : None, int or numpy.random.Generator, default=None
        Seed of the Monte-Carlo null.

    Returns
    -------
    TangentAlignmentResult
        Shares, ratios, p-value, z-score and isotropy changes, with the null distribution.

    Raises
    ------
    ValueError
        If ``2 * n_directions > n_features`` (no matched control exists), every gradient is zero, a value is not finite,
        or a setting is out of range.

    Notes
    -----
    With the energy share ``e(Q) = ||G Q^T||_F^2 / ||G||_F^2``, the null is e(Q_b) for Haar-random r-dimensional
    subspaces of the normal space. Everything runs from ``G^T G`` and the covariance of G, so streamed moments give
    the same result. The choices the paper leaves open (control, aggregation, IsoScore* target) are parameters here.

    References
    ----------
    Bernas, Jourdan, Poché, Hudelot, "Revisiting Anisotropy in Language Transformers: The Geometry of Learning
    Dynamics", 2026. https://arxiv.org/abs/2604.08764

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.tangent import TangentProxy, tangent_alignment_test
    >>> rng = np.random.default_rng(0)
    >>> scales = np.array([4.0, 4.0] + [1.0] * 10)
    >>> X, G = rng.standard_normal((2, 2000, 12)) * scales
    >>> result = tangent_alignment_test(G, TangentProxy(n_directions=2).fit(X), rng=0)
    >>> result.energy_ratio > 10, result.pvalue
    (True, 0.001)
    >>> result.delta_isotropy_tangent > result.delta_isotropy_normal
    True
    """
    settings = Settings.check(proxy, control, n_resamples, aggregate, shrinkage, denominator)
    parts, grouped = _as_parts(G, proxy, groups, aggregate)
    fields = alignment_fields(merge_all(parts), parts if grouped else None, proxy, settings, check_rng(rng))
    return TangentAlignmentResult(gradient="rows", **fields)


def _as_parts(G: Any, proxy: TangentProxy, groups: Any, aggregate: str) -> tuple[list[Moments], bool]:
    """Moments of G, one per group, and whether they are groups."""
    streamed = isinstance(G, Moments)
    if streamed or (isinstance(G, Sequence) and len(G) > 0 and all(isinstance(g, Moments) for g in G)):
        if groups is not None:
            raise ValueError("groups cannot be combined with Moments: pass one Moments per group as a list instead.")
        if aggregate != "pooled":
            raise ValueError(f"aggregate={aggregate!r} needs the rows of G; moments allow aggregate='pooled' only.")
        parts = [G] if streamed else list(G)
        return [proxy._check_gradient_moments(part) for part in parts], not streamed
    if isinstance(G, Sequence) and len(G) == 0:
        raise ValueError("G is empty: pass gradients of shape (n_samples, n_features), Moments, or a list of Moments.")
    G = check_sample_rows(
        G, name="G", owner="tangent_alignment_test", n_features=proxy.n_features_in_, like=proxy.basis_
    )
    labels = None if groups is None else check_groups(groups, G.shape[0])
    if aggregate == "mean":
        G, labels = _unit_rows(G, labels)
    if labels is None:
        return [Moments().update(G)], False
    return [Moments().update(take_rows(G, rows)) for rows in rows_by_group(labels)], True


def _unit_rows(G: Array, labels: np.ndarray | None) -> tuple[Array, np.ndarray | None]:
    """Scale rows to unit norm; drop zero rows, which have no direction."""
    xp = _xp.array_namespace(G)
    # Dividing by the largest entry first keeps squares of tiny float32 gradients from underflowing.
    largest = xp.max(xp.abs(G), axis=1)
    keep = _xp.to_numpy(largest > 0)
    if not keep.any():
        raise ValueError(
            "Every row of G is zero, so no row has an energy share: check that the loss depends on this layer."
        )
    if not keep.all():
        rows = np.flatnonzero(keep)
        G, largest = take_rows(G, rows), take_rows(largest, rows)
        labels = None if labels is None else labels[rows]
    scaled = G / xp.expand_dims(largest, axis=1)
    return scaled / xp.expand_dims(row_norms(scaled), axis=1), labels
