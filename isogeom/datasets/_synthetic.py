"""Generators of synthetic data whose subspaces, shares and atoms are known."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils import Bunch

from isogeom._random import check_rng
from isogeom._validation import check_integer, check_real


def make_tangent_data(
    n_samples: int = 1000,
    n_features: int = 64,
    *,
    n_tangent: int = 8,
    tangent_share: float = 0.8,
    noise: float = 0.1,
    rng: Any = None,
) -> Bunch:
    r"""Make activations around a tangent subspace, and gradients with a given share of energy in it.

    Parameters
    ----------
    n_samples : int, default=1000
        Number of rows of both `X` and `G`.
    n_features : int, default=64
        Number of features d, at least 2.
    n_tangent : int, default=8
        Dimension r of the tangent subspace, 1 to ``n_features - 1``.
    tangent_share : float, default=0.8
        Expected share of the squared norm of the gradients inside the subspace, 0 to 1. ``n_tangent / n_features`` is
        chance.
    noise : float, default=0.1
        Standard deviation of the isotropic noise of every feature of `X`; inside the subspace it is 1 along every axis,
        noise not counted.
    rng : None, int, numpy.random.Generator or numpy.random.RandomState, default=None
        Seed. The same integer gives the same arrays.

    Returns
    -------
    :class:`sklearn.utils.Bunch`
        X : ndarray of shape (n_samples, n_features)
            Activations, float64, of mean 0.
        G : ndarray of shape (n_samples, n_features)
            Gradients, float64, of mean 0 and expected squared norm 1 per row, independent of `X`.
        basis : ndarray of shape (n_tangent, n_features)
            Orthonormal rows spanning the subspace.

    Raises
    ------
    ValueError
        If a parameter is out of range.
    TypeError
        If a parameter is not a number.

    Notes
    -----
    `basis` Q is the Q factor, signs fixed, of a standard normal (d, r) matrix, so its span is uniform (Haar). With
    independent standard normal z, u (r,) and e, v (d,) for every row, and s the share,

    .. math:: x = z Q + \mathrm{noise}\; e, \qquad
              g = \sqrt{s / r}\; u Q + \sqrt{(1 - s) / (d - r)}\; v (I - Q^T Q).

    So the covariance of `X` is ``basis.T @ basis + noise**2 * I``, and the energy share of a large sample of `G` in the
    span of `basis` is `tangent_share`.

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.datasets import make_tangent_data
    >>> data = make_tangent_data(5000, 32, n_tangent=4, tangent_share=0.5, rng=0)
    >>> data.X.shape, data.G.shape, data.basis.shape
    ((5000, 32), (5000, 32), (4, 32))
    >>> share = np.sum((data.G @ data.basis.T) ** 2) / np.sum(data.G**2)
    >>> print(f"{share:.2f}")
    0.50
    """
    n_samples = check_integer(n_samples, "n_samples", low=1)
    n_features = check_integer(n_features, "n_features", low=2)
    n_tangent = check_integer(
        n_tangent, "n_tangent", low=1, high=n_features - 1, hint="Some feature must be left for the normal space."
    )
    tangent_share = check_real(tangent_share, "tangent_share", low=0, high=1)
    noise = check_real(noise, "noise", low=0)
    rng = check_rng(rng)
    basis = _random_basis(rng, n_tangent, n_features)
    X = rng.standard_normal((n_samples, n_tangent)) @ basis
    X += noise * rng.standard_normal((n_samples, n_features))
    inside = rng.standard_normal((n_samples, n_tangent)) @ basis
    outside = rng.standard_normal((n_samples, n_features))
    outside -= (outside @ basis.T) @ basis
    inside *= np.sqrt(tangent_share / n_tangent)
    outside *= np.sqrt((1 - tangent_share) / (n_features - n_tangent))
    return Bunch(X=X, G=inside + outside, basis=basis)


def make_sparse_codes(
    n_samples: int = 1000,
    n_features: int = 64,
    n_components: int = 16,
    *,
    density: float = 0.2,
    noise: float = 0.02,
    rng: Any = None,
) -> Bunch:
    r"""Make rows that are sparse nonnegative combinations of atoms of free sign (planted Semi-NMF).

    Parameters
    ----------
    n_samples : int, default=1000
        Number of rows.
    n_features : int, default=64
        Number of features.
    n_components : int, default=16
        Number of atoms; it may exceed `n_features`.
    density : float, default=0.2
        Probability that a code is not zero, 0 to 1.
    noise : float, default=0.02
        Standard deviation of the isotropic noise of every feature.
    rng : None, int, numpy.random.Generator or numpy.random.RandomState, default=None
        Seed. The same integer gives the same arrays.

    Returns
    -------
    :class:`sklearn.utils.Bunch`
        X : ndarray of shape (n_samples, n_features)
            Rows, float64. Their mean is not 0: it is about ``density * dictionary.sum(axis=0)``.
        codes : ndarray of shape (n_samples, n_components)
            Nonnegative codes; rows and columns may be all zero if `density` is small.
        dictionary : ndarray of shape (n_components, n_features)
            Atoms as rows, of norm 1.

    Raises
    ------
    ValueError
        If a parameter is out of range.
    TypeError
        If a parameter is not a number.

    Notes
    -----
    .. math:: X = Z D + \mathrm{noise}\; E

    The rows of D are standard normal vectors divided by their norms, so uniform on the sphere; the entries of Z are
    independent, with probability `density` standard exponential and else 0; E is standard normal.

    Examples
    --------
    >>> from isogeom.datasets import make_sparse_codes
    >>> data = make_sparse_codes(500, 32, 8, rng=0)
    >>> data.X.shape, data.codes.shape, data.dictionary.shape
    ((500, 32), (500, 8), (8, 32))
    >>> bool((data.codes >= 0).all())
    True
    """
    n_samples = check_integer(n_samples, "n_samples", low=1)
    n_features = check_integer(n_features, "n_features", low=1)
    n_components = check_integer(n_components, "n_components", low=1)
    density = check_real(density, "density", low=0, high=1)
    noise = check_real(noise, "noise", low=0)
    rng = check_rng(rng)
    dictionary = rng.standard_normal((n_components, n_features))
    dictionary /= np.linalg.norm(dictionary, axis=1, keepdims=True)
    active = rng.random((n_samples, n_components)) < density
    codes = rng.standard_exponential((n_samples, n_components)) * active
    X = codes @ dictionary + noise * rng.standard_normal((n_samples, n_features))
    return Bunch(X=X, codes=codes, dictionary=dictionary)


def _random_basis(rng: np.random.Generator, n_rows: int, n_features: int) -> np.ndarray:
    """Return orthonormal rows with a uniformly random span."""
    q, r = np.linalg.qr(rng.standard_normal((n_features, n_rows)))
    # LAPACK's signs depend on the build: with a positive diagonal of R the basis is the same everywhere.
    return (q * np.where(np.diag(r) < 0, -1.0, 1.0)).T
