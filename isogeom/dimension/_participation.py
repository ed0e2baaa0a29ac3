"""Participation ratio without the bias of few rows and few features."""

from __future__ import annotations

from typing import Any

from isogeom import _xp
from isogeom._xp import Array

CORRECTIONS = (None, "samples", "features", "both")


def corrected_ratio(
    n: int, total: Any, fourth: Any, frobenius: Any, by_feature: tuple[Array, Array] | None, *, kind: str, center: bool
) -> Any:
    """Return the participation ratio with averages over distinct rows, distinct features, or both.

    Parameters
    ----------
    n : int
        Number of rows.
    total : float or array of shape (...)
        Sum over rows y (centred if `center`) of ``|y|^2``.
    fourth : float or array of shape (...)
        Sum over rows of ``|y|^4``.
    frobenius : float or array of shape (...)
        Sum over pairs of rows of ``(y . y')^2``, which is the squared Frobenius norm of the scatter.
    by_feature : tuple of array of shape (..., d) or None
        Sum over rows of ``y_a^2`` and of ``y_a^4`` for every feature; None if features are not corrected.
    kind : {'samples', 'features', 'both'}
        What is corrected.
    center : bool
        Whether rows were centred by their mean.

    Returns
    -------
    float or array of shape (...)
        NaN where the denominator is not positive.

    Notes
    -----
    The ratio is that of the averages over pairs of features a, b of ``C_aa C_bb`` and of ``C_ab^2``. Its unbiased
    estimates are U-statistics of four distinct rows (of two, if not centred), which depend on the rows through the
    three sums above only once these are centred. Distinct features leave out a = b: the same sums, feature by feature.
    """
    moments = _distinct_rows if kind in ("samples", "both") else _all_rows
    numerator, denominator = moments(n, total, fourth, frobenius, center)
    if by_feature is not None:
        squares, fourths = by_feature
        xp = _xp.array_namespace(squares)
        own_numerator, own_denominator = moments(n, squares, fourths, squares * squares, center)
        numerator = numerator - xp.sum(own_numerator, axis=-1)
        denominator = denominator - xp.sum(own_denominator, axis=-1)
    if isinstance(denominator, float):
        return numerator / denominator if denominator > 0 else float("nan")
    xp = _xp.array_namespace(denominator)
    good = denominator > 0
    return xp.where(
        good, numerator / xp.where(good, denominator, xp.ones_like(denominator)), xp.full_like(total, xp.nan)
    )


def _all_rows(n: int, total: Any, fourth: Any, frobenius: Any, center: bool) -> tuple[Any, Any]:  # noqa: ARG001
    return total * total / n**2, frobenius / n**2


def _distinct_rows(n: int, total: Any, fourth: Any, frobenius: Any, center: bool) -> tuple[Any, Any]:
    """Return the averages of ``C_aa C_bb`` and ``C_ab^2``, summed over a and b, from distinct rows i, j, l, r.

    With products ``g_ij`` of centred rows, whose rows sum to 0, every sum over distinct indices reduces to
    ``t = sum g_ii``, ``q = sum g_ii^2`` and ``f = sum g_ij^2``.
    """
    two = n * (n - 1)
    iijj = (total * total - fourth) / two
    ijij = (frobenius - fourth) / two
    if not center:
        return iijj, ijij
    three, four = two * (n - 2), two * (n - 2) * (n - 3)
    iijl = (2 * fourth - total * total) / three
    ijjl = (2 * fourth - frobenius) / three
    ijlr = (total * total - 6 * fourth + 2 * frobenius) / four
    return iijj - 2 * iijl + ijlr, ijij - 2 * ijjl + ijlr
