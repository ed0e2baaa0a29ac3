"""The same test for a weight gradient, with the null that input covariance alone cannot pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._linalg import captured
from isogeom._moments import Moments
from isogeom._random import check_rng
from isogeom._validation import check_beside, check_integer, check_rows, check_sample_rows
from isogeom._xp import Array
from isogeom.tangent._alignment import TangentAlignmentResult
from isogeom.tangent._proxy import TangentProxy
from isogeom.tangent._statistics import Settings, alignment_fields, check_groups, ratio, rows_by_group, take_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightAlignmentResult(TangentAlignmentResult):
    """Outcome of :func:`weight_alignment_test`: a :class:`TangentAlignmentResult` and the shuffled-pairing null.

    Attributes
    ----------
    n_pairs : int
        Pairs (x_t, g_t) that made the weight gradient; `n_samples` counts its rows (output features).
    shuffled_share : float
        Energy share expected if every x_t were paired with a random g_s: ratio of the closed-form expectations.
    ratio_to_shuffled : float
        ``share_tangent / shuffled_share``: above 1, the pairing itself points into the proxy.
    shuffled_pvalue : float or None
        Permutation p-value against that null; None if ``n_permutations=0``.
    n_permutations : int
        Number of permutations.
    """

    n_pairs: int
    shuffled_share: float
    ratio_to_shuffled: float
    shuffled_pvalue: float | None
    n_permutations: int


def weight_alignment_test(
    X: Any,
    G: Any,
    proxy: TangentProxy,
    *,
    control: str = "next",
    n_resamples: int = 999,
    n_permutations: int = 199,
    groups: Any = None,
    shrinkage: float = 0.2,
    denominator: str = "ambient",
    rng: Any = None,
) -> WeightAlignmentResult:
    """Test whether the gradient of a weight matrix concentrates, on its input side, in a tangent proxy.

    Parameters
    ----------
    X : array-like of shape (n_pairs, n_features)
        Inputs x_t of a Linear module.
    G : array-like of shape (n_pairs, n_outputs)
        Gradients g_t of the loss with respect to its outputs, row by row for the same tokens. The weight gradient is
        ``G.T @ X``.
    proxy : TangentProxy
        Fitted on inputs of that module (n_features).
    control : {"next", "complement", "lowest"}, default="next"
        Normal control, as in :func:`tangent_alignment_test`, which runs on the rows of the weight gradient.
    n_resamples : int, default=999
        Haar-random normal subspaces, likewise.
    n_permutations : int, default=199
        Random pairings for `shuffled_pvalue`; 0 leaves the closed-form `shuffled_share` alone. Each costs one
        product of the size of the weight gradient's.
    groups : array-like of shape (n_pairs,), default=None
        Evaluation step of each pair: one weight gradient per group, for the sign test.
    shrinkage : float, default=0.2
        Weight of the scaled identity in IsoScore*, 0 to 1.
    denominator : {"ambient", "complement"}, default="ambient"
        Dimension that IsoScore* refers to after the removal.
    rng : None, int or numpy.random.Generator, default=None
        Seed of both nulls.

    Returns
    -------
    WeightAlignmentResult
        The fields of the row test, and the shuffled-pairing null.

    Raises
    ------
    ValueError
        If X and G differ in their number of rows, fewer than 2 pairs are given, or as in
        :func:`tangent_alignment_test`.

    Notes
    -----
    The covariance of the inputs alone makes the share of ``G.T @ X`` high: random normal subspaces are then no
    evidence of alignment. The shuffled pairing keeps both factors and breaks their relation, see
    :func:`shuffled_pairing_share`.

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.tangent import TangentProxy, weight_alignment_test
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((3000, 12)) * np.linspace(3, 0.3, 12)
    >>> G = rng.standard_normal((3000, 5))  # independent of X
    >>> proxy = TangentProxy(n_directions=3).fit(X)
    >>> result = weight_alignment_test(X, G, proxy, rng=0)
    >>> result.energy_ratio > 2  # looks aligned against normal directions,
    True
    >>> 0.8 < result.ratio_to_shuffled < 1.25  # but it is the input covariance alone
    True
    """
    settings = Settings.check(proxy, control, n_resamples, "pooled", shrinkage, denominator)
    check_integer(n_permutations, "n_permutations", low=0)
    X, G = _check_pairs(X, G, proxy)
    generator = check_rng(rng)
    # Shares have no scale: with unit peaks, float32 products of the factors neither overflow nor vanish.
    X, G = _unit_peak(X, "X"), _unit_peak(G, "G")
    if groups is None:
        weight, parts = _cross(G, X), None
    else:
        labels = check_groups(groups, X.shape[0])
        gradients = [_cross(take_rows(G, rows), take_rows(X, rows)) for rows in rows_by_group(labels)]
        weight, parts = sum(gradients[1:], gradients[0]), [Moments().update(gradient) for gradient in gradients]
    fields = alignment_fields(Moments().update(weight), parts, proxy, settings, generator)
    shuffled = shuffled_pairing_share(X, G, proxy.basis_)
    pvalue = None
    if n_permutations:
        pvalue = _permutation_pvalue(X, G, proxy, fields["share_tangent"], n_permutations, generator)
    return WeightAlignmentResult(
        gradient="weight",
        **fields,
        n_pairs=int(X.shape[0]),
        shuffled_share=shuffled,
        ratio_to_shuffled=ratio(fields["share_tangent"], shuffled),
        shuffled_pvalue=pvalue,
        n_permutations=int(n_permutations),
    )


def _check_pairs(X: Any, G: Any, proxy: TangentProxy) -> tuple[Array, Array]:
    owner = "weight_alignment_test"
    X = check_sample_rows(X, name="X", owner=owner, n_features=proxy.n_features_in_, like=proxy.basis_)
    check_beside(G, X, name="G", other_name="X")
    G = check_rows(G, name="G", owner=owner)
    if X.shape[0] != G.shape[0]:
        raise ValueError(
            f"X has {X.shape[0]} rows and G has {G.shape[0]}: they must be inputs and output gradients of the same "
            "module, row by row."
        )
    if X.shape[0] < 2:
        raise ValueError("weight_alignment_test needs at least 2 pairs, got 1.")
    return X, G


def _unit_peak(rows: Array, name: str) -> Array:
    """Scale an array so that its largest entry is 1 in absolute value."""
    xp = _xp.array_namespace(rows)
    peak = float(xp.max(xp.abs(rows)))
    if peak == 0:
        raise ValueError(
            f"Every entry of {name} is zero, so there is no weight gradient: does the loss depend on this module?"
        )
    return rows / peak


def _cross(G: Array, X: Array) -> Array:
    """``G.T @ X`` in the accumulator's dtype, block by block."""
    xp = _xp.array_namespace(G, X)
    acc = _xp.accumulator_dtype(xp, _xp.device(X))
    total: Any = 0.0
    for g, x in zip(_xp.row_blocks(G), _xp.row_blocks(X)):
        common = xp.result_type(g, x)
        total = total + xp.astype(xp.matmul(xp.matrix_transpose(xp.astype(g, common)), xp.astype(x, common)), acc)
    return total


def shuffled_pairing_share(X: Any, G: Any, basis: Any) -> float:
    r"""Energy share of a weight gradient in a subspace, expected under random pairing of inputs and output gradients.

    Parameters
    ----------
    X : array-like of shape (n_pairs, n_features), or Moments
        Inputs of the module.
    G : array-like of shape (n_pairs, n_outputs), or Moments
        Gradients with respect to its outputs.
    basis : array-like of shape (n_directions, n_features)
        Orthonormal rows.

    Returns
    -------
    float
        Ratio of the two expectations, 0 to 1.

    Raises
    ------
    ValueError
        If shapes disagree, fewer than 2 pairs are given, or no pairing gives a gradient other than zero.

    Notes
    -----
    For a uniform permutation of the n pairs, with centred scatter matrices :math:`S_G` and :math:`S_X`,

    .. math:: E \|G^T \Pi X Q^T\|_F^2 = \frac{\operatorname{tr}(S_G) \operatorname{tr}(Q S_X Q^T)}{n - 1}
              + n^2 \|\bar g\|^2 \|Q \bar x\|^2 ,

    and Q = I in the denominator. It equals the explained-variance ratio of the subspace only if X or G is centred.

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.tangent import shuffled_pairing_share
    >>> X = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.5], [0.0, -0.5]])
    >>> G = np.array([[1.0], [2.0], [3.0], [4.0]])
    >>> round(shuffled_pairing_share(X, G, np.array([[1.0, 0.0]])), 6)  # X is centred: its explained variance
    0.8
    """
    x, g = (
        m if isinstance(m, Moments) else Moments().update(check_rows(m, name=name)) for m, name in ((X, "X"), (G, "G"))
    )
    basis = check_sample_rows(basis, name="basis", owner="shuffled_pairing_share", n_features=int(x.n_features or 0))
    check_beside(basis, x.mean, name="basis", other_name="X")
    check_beside(g.mean, x.mean, name="G", other_name="X")
    if x.count != g.count or x.count < 2:
        raise ValueError(f"X and G must hold the same pairs, at least 2: got {x.count} and {g.count} rows.")
    xp = _xp.array_namespace(x.mean)
    basis = xp.astype(basis, x.mean.dtype)
    products = xp.matmul(basis, xp.matrix_transpose(basis))
    if float(xp.max(xp.abs(products - xp.eye(products.shape[0], device=_xp.device(basis))))) > 1e-3:
        raise ValueError(
            "basis must have orthonormal rows: pass a proxy's basis_, or the Q factor of a QR, transposed."
        )
    n = x.count
    spread = float(xp.linalg.trace(g.scatter)) / (n - 1)
    drift = n**2 * float(xp.sum(g.mean**2))
    inside = spread * captured(basis, x.scatter) + drift * float(xp.sum(xp.matmul(basis, x.mean) ** 2))
    everything = spread * float(xp.linalg.trace(x.scatter)) + drift * float(xp.sum(x.mean**2))
    if not everything > 0:
        raise ValueError(
            "No pairing of X and G gives a weight gradient other than zero: check that neither is all zero."
        )
    return min(max(inside / everything, 0.0), 1.0)


def _permutation_pvalue(
    X: Array, G: Array, proxy: TangentProxy, observed: float, n_permutations: int, generator: np.random.Generator
) -> float:
    columns = proxy._basis64().T
    exceed = 0
    for _ in range(n_permutations):
        weight = _cross(G, take_rows(X, generator.permutation(X.shape[0])))
        xp = _xp.array_namespace(weight)
        inside, everything = xp.sum(xp.matmul(weight, columns) ** 2), xp.sum(weight**2)
        exceed += float(inside) >= observed * float(everything)
    return float((1 + exceed) / (1 + n_permutations))
