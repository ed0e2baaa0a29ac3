"""Scores of a covariance spectrum: IsoScore, IsoScore*, participation ratio and effective rank."""

from __future__ import annotations

import numpy as np

from isogeom import _linalg, _xp
from isogeom._moments import Moments
from isogeom._validation import check_choice, check_integer, check_real
from isogeom._xp import Array
from isogeom.isotropy._spectrum import Spectrum, check_symmetric, no_variance, resolve


def participation_ratio(
    X: Array | Moments | None = None,
    *,
    spectrum: Array | None = None,
    covariance: Array | None = None,
    moments: Moments | None = None,
) -> float:
    r"""Return the participation ratio of the covariance spectrum: how many directions share the variance.

    Exactly one of the four inputs must be given.

    Parameters
    ----------
    X : array-like of shape (n_samples, n_features) or Moments, default=None
        Rows, centred here; at least 2. numpy arrays and tensors of any array-API library are computed where they live;
        half precision is widened to float32.
    spectrum : array-like of shape (n_features,), default=None
        Eigenvalues of the covariance, zeros included, in any order and unit.
    covariance : array-like of shape (n_features, n_features), default=None
        Symmetric positive semidefinite matrix, in any unit; checked by its diagonal and its Frobenius norm.
    moments : Moments, default=None
        Streamed moments of the rows.

    Returns
    -------
    float
        Between 1 (one direction) and `n_features` (the same variance in all directions).

    Raises
    ------
    ValueError
        If not exactly one input is given, if the variance is zero (the ratio is 0/0), or if the input has a NaN, an
        infinity, a wrong shape, an asymmetry or a negative eigenvalue.
    TypeError
        If `X` is sparse or `moments` is of another type.

    Warns
    -----
    UserWarning
        With 2 rows: the ratio is then 1 whatever the data.

    See Also
    --------
    isoscore : The same number, rescaled to the range 0 to 1.
    effective_rank : The count by entropy, less ruled by the largest eigenvalue.

    Notes
    -----
    With eigenvalues λ of the covariance C,

    .. math:: PR = \frac{(\sum_i λ_i)^2}{\sum_i λ_i^2} = \frac{(\mathrm{tr}\, C)^2}{\|C\|_F^2},

    so no eigendecomposition is made: rows are streamed in blocks into a (d, d) scatter, or, for n < d, into the (n, n)
    Gram matrix of the centred rows. The estimate is biased downwards in small samples: for Gaussian rows 1/PR is too
    large by about 1/(n - 1), so groups should be compared at equal n.

    Examples
    --------
    >>> from isogeom.isotropy import participation_ratio
    >>> round(participation_ratio(spectrum=[3.0, 2.0, 1.0]), 6)
    2.571429
    """
    return _ratio(resolve(X, spectrum, covariance, moments, owner="participation_ratio"))


def isoscore(
    X: Array | Moments | None = None,
    *,
    spectrum: Array | None = None,
    covariance: Array | None = None,
    moments: Moments | None = None,
) -> float:
    r"""Return the IsoScore: the share of directions that the variance of a cloud uses evenly, 0 to 1.

    Exactly one of the four inputs must be given.

    Parameters
    ----------
    X : array-like of shape (n_samples, n_features) or Moments, default=None
        Rows (samples, not features, are rows), centred here; at least 2, with at least 2 features. numpy arrays and
        tensors of any array-API library are computed where they live; half precision is widened to float32.
    spectrum : array-like of shape (n_features,), default=None
        Eigenvalues of the covariance, zeros included, in any order and unit.
    covariance : array-like of shape (n_features, n_features), default=None
        Symmetric positive semidefinite matrix, in any unit; checked by its diagonal and its Frobenius norm.
    moments : Moments, default=None
        Streamed moments of the rows.

    Returns
    -------
    float
        0 if the cloud varies along one direction only, 1 if its covariance is a multiple of the identity. It does not
        change under translation, rotation or scaling of the rows.

    Raises
    ------
    ValueError
        If not exactly one input is given, if there is 1 row or 1 feature, if the variance is zero (the score is 0/0),
        or if the input has a NaN, an infinity, a wrong shape, an asymmetry or a negative eigenvalue.
    TypeError
        If `X` is sparse or `moments` is of another type.

    Warns
    -----
    UserWarning
        With 2 rows: the score is then 0 whatever the data.

    See Also
    --------
    isoscore_star : The same with a shrunken covariance, for few rows.
    participation_ratio : The same number before rescaling.

    Notes
    -----
    The published chain [1]_ normalises the eigenvalues λ to :math:`s = \sqrt{d}\, λ/\|λ\|`, measures the defect
    :math:`δ = \|s - 1\| / \sqrt{2(d - \sqrt{d})}`, turns it into :math:`φ = (d - δ^2 (d - \sqrt{d}))^2 / d^2` and
    rescales to :math:`(dφ - 1)/(d - 1)`. Since :math:`\|s - 1\|^2 = 2(d - \sqrt{d\, PR})`, this is exactly

    .. math:: \mathrm{IsoScore} = \frac{PR - 1}{d - 1}, \qquad
              PR = \frac{(\mathrm{tr}\, C)^2}{\|C\|_F^2}.

    With n <= d rows the covariance has rank n - 1 at most, so the score cannot exceed (n - 2)/(d - 1), and with
    few more it is still far below that of the population: for n = 1000 isotropic Gaussian rows of 768 features it is
    about 0.56, not 1. Compare groups of rows at equal n.

    References
    ----------
    .. [1] Rudman, Gillman, Rayne, Eickhoff, "IsoScore: Measuring the Uniformity of Embedding Space Utilization",
       Findings of ACL 2022. https://doi.org/10.18653/v1/2022.findings-acl.262

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.isotropy import isoscore
    >>> octahedron = np.array([[2, 0, 0], [-2, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 1], [0, 0, -1]])
    >>> round(isoscore(octahedron), 6)
    0.5
    >>> round(isoscore(spectrum=[3.0, 1.0]), 6)
    0.6
    """
    found = resolve(X, spectrum, covariance, moments, owner="isoscore", min_features=2)
    return _rescale(_ratio(found), found.n_features)


def isoscore_star(
    X: Array | Moments | None = None,
    *,
    shrinkage: float = 0.2,
    target: str | Array = "scaled-identity",
    spectrum: Array | None = None,
    covariance: Array | None = None,
    moments: Moments | None = None,
) -> float:
    r"""Return IsoScore*: the IsoScore of a covariance shrunken towards a target, 0 to 1.

    Exactly one of `X`, `spectrum`, `covariance` and `moments` must be given.

    Parameters
    ----------
    X : array-like of shape (n_samples, n_features) or Moments, default=None
        Rows, centred here; at least 2, with at least 2 features. numpy arrays and tensors of any array-API library are
        computed where they live; half precision is widened to float32.
    shrinkage : float, default=0.2
        Weight ζ of the target, 0 to 1. 0 gives :func:`isoscore`; 1 ignores the data but for its scale.
    target : {"scaled-identity", "identity"} or array of shape (n_features, n_features), default="scaled-identity"
        The matrix C0 to shrink to.

        - "scaled-identity": (tr C / d) I. The score then has no unit, like IsoScore.
        - "identity": I, as in the published code. The score then depends on the scale of the rows (see Notes): use it
          to compare with published numbers.
        - an array: symmetric positive semidefinite, in the library and on the device of the data and in the unit of its
          covariance (divisor n - 1), say the covariance of a large reference sample.
    spectrum : array-like of shape (n_features,), default=None
        Eigenvalues of the covariance. A `target` array cannot be used with it: the eigenvectors are missing.
    covariance : array-like of shape (n_features, n_features), default=None
        Symmetric positive semidefinite matrix; checked by its diagonal and its Frobenius norm.
    moments : Moments, default=None
        Streamed moments of the rows.

    Returns
    -------
    float
        0 to 1.

    Raises
    ------
    ValueError
        As for :func:`isoscore`, or if `shrinkage` or `target` is invalid.
    TypeError
        If `X` is sparse, `moments` is of another type, or `target` lives in another library than the data.

    Warns
    -----
    UserWarning
        With 2 rows: their covariance has rank one whatever the data.

    Notes
    -----
    With t = tr C and q = ||C||_F^2, the shrunken covariance (1 - ζ) C + ζ c I has

    .. math:: \mathrm{tr} = (1-ζ)\, t + ζ c d, \qquad
              \|\cdot\|_F^2 = (1-ζ)^2 q + 2 ζ (1-ζ)\, c\, t + ζ^2 c^2 d,

    so both identity targets cost no more than IsoScore itself. Scale trap of "identity": for the covariance
    s diag(4, 1, 1) and ζ = 0.2 it gives 0.575 at s = 1, 0.501 at s = 100 and 0.996 at s = 0.01; "scaled-identity" gives
    0.636 at any s.

    References
    ----------
    Rudman, Eickhoff, "Stable Anisotropic Regularization", ICLR 2024. https://arxiv.org/abs/2305.19358

    Examples
    --------
    >>> from isogeom.isotropy import isoscore_star
    >>> round(isoscore_star(spectrum=[4.0, 1.0, 1.0]), 6), round(isoscore_star(spectrum=[400.0, 100.0, 100.0]), 6)
    (0.636364, 0.636364)
    >>> round(isoscore_star(spectrum=[4.0, 1.0, 1.0], target="identity"), 6)
    0.575221
    """
    zeta = check_real(shrinkage, "shrinkage", low=0, high=1)
    named = isinstance(target, str)
    if named:
        check_choice(target, "target", ("scaled-identity", "identity"))
    elif spectrum is not None:
        raise ValueError(
            "target is an array, which cannot be added to a spectrum without eigenvectors: pass covariance=, or one of "
            "target='scaled-identity', 'identity'."
        )
    found = resolve(X, spectrum, covariance, moments, owner="isoscore_star", full=not named, min_features=2)
    if not named:
        return _rescale(_ratio_to_matrix(found, target, zeta), found.n_features)
    scaled = target == "scaled-identity" or zeta == 0
    return _rescale(_ratio_to_identity(found, zeta, scaled), found.n_features)


def effective_rank(
    X: Array | Moments | None = None,
    *,
    spectrum: Array | None = None,
    covariance: Array | None = None,
    moments: Moments | None = None,
    on: str = "singular-values",
    center: bool = False,
    n_components: int | None = None,
) -> float:
    r"""Return the effective rank: the exponential of the entropy of the normalised spectrum.

    Exactly one of `X`, `spectrum`, `covariance` and `moments` must be given.

    Parameters
    ----------
    X : array-like of shape (n_samples, n_features) or Moments, default=None
        Rows. numpy arrays and tensors of any array-API library are computed where they live, in float64 where the
        device has it.
    spectrum : array-like of shape (k,), default=None
        Eigenvalues, that is squared singular values, in any order and unit.
    covariance : array-like of shape (n_features, n_features), default=None
        Symmetric positive semidefinite matrix: a covariance, or an uncentred ``X.T @ X``. It is taken as it is.
    moments : Moments, default=None
        Streamed moments of the rows. If they were fed float32 rows their products carry float32 rounding, which
        "singular-values" shows as a tail of small values: feed float64 rows where the tail matters, or pass `X`.
    on : {"singular-values", "eigenvalues"}, default="singular-values"
        What is normalised to shares: the singular values (square roots of the eigenvalues), or the eigenvalues, which
        are shares of variance.
    center : bool, default=False
        Whether to subtract the mean of `X` or `moments`. It has no effect on `spectrum` and `covariance`.
    n_components : int, default=None
        Keep only that many of the largest values before normalising; None, or more than there are, keeps all.

    Returns
    -------
    float
        Between 1 and the number of values kept.

    Raises
    ------
    ValueError
        If not exactly one input is given, if the input is zero (or constant, with `center`), if `on` is unknown, or if
        the input has a NaN, an infinity, a wrong shape, an asymmetry or a negative eigenvalue.
    TypeError
        If `X` is sparse, or `moments` or `n_components` is of another type.

    Warns
    -----
    UserWarning
        With 2 rows and `center`: the rank is then 1 whatever the data.

    See Also
    --------
    participation_ratio : The count by second moments, without eigenvalues.

    Notes
    -----
    With values σ,

    .. math:: \exp\Big(-\sum_i p_i \log p_i\Big), \qquad p_i = σ_i / \sum_j σ_j .

    Four versions are in use under one name: singular values or eigenvalues, of the raw or of the centred matrix. The
    defaults are the original definition [1]_, singular values of the matrix as it is; "eigenvalues" with
    ``center=True`` is the entropy of the principal components' variance shares.

    Eigenvalues are those of the smaller of ``X.T @ X`` and ``X @ X.T``, summed in float64. Values that rounding cannot
    tell from zero, below about 1e-7 of the largest singular value, count as zero.

    References
    ----------
    .. [1] Roy, Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007,
       pp. 606-610. https://infoscience.epfl.ch/record/110188

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.isotropy import effective_rank
    >>> round(effective_rank(np.eye(5)), 6)
    5.0
    >>> X = np.array([[1, 2, 0], [2, 1, 1], [3, 3, 0], [0, 1, 2], [4, 2, 1]])
    >>> round(effective_rank(X), 4), round(effective_rank(X, on="eigenvalues", center=True), 4)
    (2.4437, 1.911)
    """
    check_choice(on, "on", ("singular-values", "eigenvalues"))
    check_choice(center, "center", (False, True))
    if n_components is not None:
        n_components = check_integer(n_components, "n_components", low=1)
    found = resolve(X, spectrum, covariance, moments, owner="effective_rank", center=center, exact=True)
    values = found.eigenvalues()[:n_components]
    xp = _xp.array_namespace(values)
    if on == "singular-values":
        values = xp.sqrt(values)
    shares = values / xp.sum(values)
    # 0 log 0 counts as 0.
    logs = xp.log(xp.where(shares > 0, shares, xp.ones_like(shares)))
    return _clip(float(xp.exp(-xp.sum(shares * logs))), 1.0, float(values.shape[0]))


def _ratio(found: Spectrum) -> float:
    trace = found.trace()
    return _clip(trace * trace / found.square(), 1.0, float(found.n_features))


def _ratio_to_identity(found: Spectrum, zeta: float, scaled: bool) -> float:
    """Return the participation ratio of ``(1 - zeta) C + zeta c I`` in closed form."""
    d, trace, square = found.n_features, found.trace(), found.square()
    if scaled:
        data, identity = 1 - zeta, zeta * trace / d
    else:
        # In units of the larger of the two matrices, so that neither factor can overflow.
        largest = max(found.unit, 1.0)
        data, identity = (1 - zeta) * (found.unit / largest), zeta / largest
    total = data * trace + identity * d
    norm = data * data * square + 2 * data * identity * trace + identity * identity * d
    return _clip(total * total / norm, 1.0, float(d))


def _ratio_to_matrix(found: Spectrum, target: Array, zeta: float) -> float:
    target = check_symmetric(target, "target", "isoscore_star")
    if target.shape[0] != found.n_features:
        raise ValueError(
            f"target must have shape ({found.n_features}, {found.n_features}) like the covariance, got "
            f"{tuple(target.shape)}."
        )
    # Raises TypeError if the two live in different libraries.
    xp = _xp.array_namespace(found.matrix, target)
    largest = max(found.unit, float(xp.max(xp.abs(target))))
    mixed = found.matrix * ((1 - zeta) * (found.unit / largest)) + target * (zeta / largest)
    ratio = _linalg.participation_ratio(mixed)
    if np.isnan(ratio):
        raise no_variance("isoscore_star")
    return _clip(ratio, 1.0, float(found.n_features))


def _rescale(ratio: float, n_features: int) -> float:
    return (ratio - 1) / (n_features - 1)


def _clip(value: float, low: float, high: float) -> float:
    """Bring a value that rounding pushed out of [low, high] back; anything further out is not rounding."""
    if not low * (1 - 1e-5) <= value <= high * (1 + 1e-5):
        raise ValueError(f"Got {value:.6g} outside [{low:g}, {high:g}]: the input is not positive semidefinite.")
    return min(max(value, low), high)
