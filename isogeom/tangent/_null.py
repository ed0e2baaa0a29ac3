"""The energy share of a random subspace: closed-form moments and Monte-Carlo draws."""

from __future__ import annotations

from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._random import check_rng
from isogeom._validation import check_integer

# Doubles drawn at a time: 32 MiB, whatever the number of resamples.
_DRAW_SIZE = 2**22
# The variance needs squares of sums of eigenvalues.
_LARGEST = 1e140


def _check_spectrum(spectrum: Any, rank: Any) -> tuple[np.ndarray, int]:
    values = _xp.to_numpy(spectrum)
    if np.iscomplexobj(values):
        raise ValueError("spectrum is complex: pass the real eigenvalues of a symmetric matrix (eigvalsh).")
    values = values.astype(np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"spectrum must be a non-empty vector of eigenvalues, got shape {values.shape}.")
    if not np.all(np.isfinite(values)):
        raise ValueError("spectrum contains NaN or infinity.")
    if np.abs(values).max() > _LARGEST:
        raise ValueError(
            f"spectrum has values beyond {_LARGEST:g}, whose squares overflow: divide it by its sum first."
        )
    return values, check_integer(rank, "rank", low=1, high=values.size, hint="It is the rank of the random subspace.")


def haar_moments(spectrum: Any, rank: int) -> tuple[float, float]:
    r"""Mean and variance of the energy captured by a Haar-random subspace.

    Parameters
    ----------
    spectrum : array-like of shape (n_dimensions,)
        Eigenvalues of a symmetric matrix S: the second moments of the gradients in the space where the subspace is
        drawn. For energy shares, divide them by the total energy first.
    rank : int
        Dimension r of the random subspace, 1 to n_dimensions.

    Returns
    -------
    mean, variance : float
        Of ``trace(P S)`` for a Haar-random projection P of rank r.

    Raises
    ------
    ValueError
        If the spectrum is empty or not finite, or `rank` is out of range.

    Notes
    -----
    With D dimensions,

    .. math:: E = \frac{r}{D} \operatorname{tr} S, \qquad
              V = \frac{2 r (D - r)}{D^2 (D - 1)(D + 2)} \left(D \operatorname{tr} S^2 - (\operatorname{tr} S)^2\right).

    The share of one fixed vector (S of rank one) is Beta(r/2, (D - r)/2), which has these two moments.

    Examples
    --------
    >>> from isogeom.tangent import haar_moments
    >>> mean, variance = haar_moments([1.0, 0.0, 0.0, 0.0], rank=2)
    >>> round(mean, 4), round(variance, 4)  # Beta(1, 1) is uniform: 1/2 and 1/12
    (0.5, 0.0833)
    """
    values, r = _check_spectrum(spectrum, rank)
    dim = values.size
    mean = r / dim * float(values.sum())
    if dim == r:
        return mean, 0.0
    # D tr S² - (tr S)² is D² times the variance of the eigenvalues: this form cannot turn negative by rounding.
    spread = float(((values - values.mean()) ** 2).sum()) / dim
    # Equal eigenvalues come out of an eigensolver equal up to rounding: a z-score against that would be noise over
    # noise.
    if spread <= dim * (dim * np.finfo(np.float64).eps * np.abs(values).max()) ** 2:
        return mean, 0.0
    return mean, 2.0 * r * (dim - r) / ((dim - 1) * (dim + 2)) * spread


def haar_null(spectrum: Any, rank: int, *, n_resamples: int = 999, rng: Any = None) -> np.ndarray:
    """Draw the energy captured by Haar-random subspaces.

    Parameters
    ----------
    spectrum : array-like of shape (n_dimensions,)
        Eigenvalues of the second moments in the space where subspaces are drawn. The Haar measure is invariant under
        rotations, so nothing else about the matrix matters.
    rank : int
        Dimension of the random subspaces, 1 to n_dimensions.
    n_resamples : int, default=999
        Number of draws.
    rng : None, int or numpy.random.Generator, default=None
        Seed. Draws are made on the host, so every backend sees the same ones.

    Returns
    -------
    ndarray of shape (n_resamples,)
        Captured energies.

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.tangent import haar_null
    >>> draws = haar_null(np.arange(8.0), rank=3, n_resamples=2000, rng=0)
    >>> bool(abs(draws.mean() - 3 / 8 * 28) < 0.2)
    True
    """
    values, r = _check_spectrum(spectrum, rank)
    total = check_integer(n_resamples, "n_resamples", low=1)
    generator = check_rng(rng)
    step = max(1, _DRAW_SIZE // (values.size * r))
    out = np.empty(total)
    for start in range(0, total, step):
        stop = min(start + step, total)
        frames, _ = np.linalg.qr(generator.standard_normal((stop - start, values.size, r)))
        out[start:stop] = np.einsum("bir,bir,i->b", frames, frames, values, optimize=True)
    return out
