"""Whether a decomposition finds the same atoms again: matching two dictionaries, and stability over seeds."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
from sklearn.base import clone

from isogeom import _random, _xp
from isogeom._linalg import row_norms
from isogeom._results import Result, _require
from isogeom._validation import check_choice, check_integer, check_rows
from isogeom._xp import Array
from isogeom.decomposition._interpret import dictionary_of


@dataclasses.dataclass(frozen=True)
class DictionaryMatchResult(Result):
    """Outcome of :func:`match_dictionaries`.

    Attributes
    ----------
    n_matched : int
        Number of pairs: the smaller number of atoms.
    mean_cosine, min_cosine : float
        Over the pairs, -1 to 1 (0 to 1 if signs do not count).
    cosines : ndarray of shape (n_atoms_a,)
        Cosine of each atom of A with its partner; 0 for an atom without one.
    indices : ndarray of shape (n_atoms_a,)
        Row of B that each atom of A is matched to; -1 for an atom without one.
    """

    n_matched: int
    mean_cosine: float
    min_cosine: float
    cosines: np.ndarray = dataclasses.field(repr=False)
    indices: np.ndarray = dataclasses.field(repr=False)


def match_dictionaries(A: Any, B: Any, *, signed: bool = True) -> DictionaryMatchResult:
    """Pair the atoms of two dictionaries one to one so that the sum of cosines is largest.

    Parameters
    ----------
    A : array-like of shape (n_atoms_a, n_features)
        Atoms as rows.
    B : array-like of shape (n_atoms_b, n_features)
        Atoms as rows, of any number; same library and device.
    signed : bool, default=True
        Whether opposite atoms differ, as they do for nonnegative codes. False compares directions by the absolute
        cosine, which suits PCA and ICA, whose signs are a convention.

    Returns
    -------
    DictionaryMatchResult
        Partners and their cosines, on the host.

    Raises
    ------
    ValueError
        If the numbers of features differ or a value is not finite.

    See Also
    --------
    dictionary_stability : Matches between several fits of one estimator.

    Notes
    -----
    The cosines are one matrix product where the arrays live; the assignment problem (Hungarian algorithm, of
    :func:`scipy.optimize.linear_sum_assignment`) is solved exactly on the host. A zero atom has cosine 0 with all.

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.decomposition import match_dictionaries
    >>> match = match_dictionaries(np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]))
    >>> match.indices
    array([1, 0])
    >>> match.cosines
    array([1., 1.])
    """
    check_choice(signed, "signed", (True, False))
    A = check_rows(A, name="A", owner="match_dictionaries")
    B = check_rows(B, name="B", owner="match_dictionaries")
    if A.shape[1] != B.shape[1]:
        raise ValueError(
            f"A has {A.shape[1]} features but B has {B.shape[1]}: only atoms of the same space can be matched."
        )
    cosines = np.clip(_xp.to_numpy(_cosines(A, B)), -1.0, 1.0)
    gain = cosines if signed else np.abs(cosines)
    rows, columns = linear_sum_assignment(gain, maximize=True)
    indices, matched = np.full(A.shape[0], -1), np.zeros(A.shape[0])
    indices[rows], matched[rows] = columns, gain[rows, columns]
    return DictionaryMatchResult(
        n_matched=len(rows),
        mean_cosine=float(np.mean(matched[rows])),
        min_cosine=float(np.min(matched[rows])),
        cosines=matched,
        indices=indices,
    )


def _cosines(A: Array, B: Array) -> Array:
    """Return the cosines between the rows, in the accumulator's dtype."""
    xp = _xp.array_namespace(A, B)
    unit = []
    for rows in (A, B):
        rows = xp.astype(rows, _xp.accumulator_dtype(xp, _xp.device(rows)))
        # Divided by the largest entry first: squares of very small or large atoms leave the range of the dtype.
        largest = xp.max(xp.abs(rows), axis=1, keepdims=True)
        rows = rows / xp.where(largest > 0, largest, xp.ones_like(largest))
        norms = xp.expand_dims(row_norms(rows), axis=1)
        unit.append(rows / xp.where(norms > 0, norms, xp.ones_like(norms)))
    return xp.matmul(unit[0], xp.matrix_transpose(unit[1]))


@dataclasses.dataclass(frozen=True)
class DictionaryStabilityResult(Result):
    """Outcome of :func:`dictionary_stability`; ``to_frame`` gives one row per atom of the reference fit.

    Attributes
    ----------
    n_fits : int
        Number of fits compared.
    mean_stability, min_stability : float
        Mean and smallest entry of `stability`.
    reference : int
        Fit that agrees best with the others (the medoid), to which atoms are matched.
    estimator : estimator
        That fit.
    stability : ndarray of shape (n_atoms,)
        Mean cosine of each of its atoms with its partners in the other fits, 1 if it is always found again.
    cosines : ndarray of shape (n_fits, n_atoms)
        Cosine of each of its atoms with the partner in every fit; its own row is 1.
    pairwise : ndarray of shape (n_fits, n_fits)
        Mean cosine of the matched atoms of every two fits, symmetric with ones on the diagonal.
    """

    n_fits: int
    mean_stability: float
    min_stability: float
    reference: int
    estimator: Any = dataclasses.field(repr=False)
    stability: np.ndarray = dataclasses.field(repr=False)
    cosines: np.ndarray = dataclasses.field(repr=False)
    pairwise: np.ndarray = dataclasses.field(repr=False)

    def to_frame(self) -> Any:
        """Return a :class:`pandas.DataFrame` with one row per atom of the reference fit.

        Raises
        ------
        ImportError
            If pandas is not installed.
        """
        pandas = _require("pandas", "to_frame()", "plot")
        others = np.delete(self.cosines, self.reference, axis=0)
        columns = {"stability": self.stability, "lowest": others.min(axis=0), "highest": others.max(axis=0)}
        return pandas.DataFrame(columns).rename_axis("component")


def dictionary_stability(
    estimator: Any, X: Any, *, n_fits: int = 5, resample: bool = False, signed: bool = True, rng: Any = None
) -> DictionaryStabilityResult:
    """Fit a decomposition several times and report which atoms come back.

    Parameters
    ----------
    estimator : estimator
        Decomposition to clone; it is neither fitted nor changed.
    X : array-like of shape (n_samples, n_features)
        Rows.
    n_fits : int, default=5
        Number of fits, at least 2. Each has its own ``random_state``.
    resample : bool, default=False
        Also draw the rows of each fit anew, with replacement: stability under other data as well as other starts. Must
        be True for an estimator without ``random_state``, and should be for an exact one (PCA), where seeds change
        nothing.
    signed : bool, default=True
        Whether opposite atoms differ, see :func:`match_dictionaries`.
    rng : int, Generator, RandomState or None, default=None
        Seed of the seeds and of the resampling.

    Returns
    -------
    DictionaryStabilityResult
        Stability per atom, and the fit that represents the others.

    Raises
    ------
    ValueError
        If `n_fits` is below 2, or nothing would differ between the fits.

    Notes
    -----
    High stability does not prove that atoms are right, but atoms that other seeds do not find are a property of the
    seed. A fit with fewer atoms than the reference leaves some without a partner, which counts as cosine 0.

    References
    ----------
    Himberg, Hyvärinen, Esposito, "Validating the independent components of neuroimaging time series via clustering and
    visualization", NeuroImage 22(3), 2004. https://doi.org/10.1016/j.neuroimage.2004.03.027

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.decomposition import ICA, dictionary_stability
    >>> X = np.random.default_rng(0).laplace(size=(2000, 3)) @ np.diag([3.0, 2.0, 1.0])
    >>> result = dictionary_stability(ICA(n_components=3), X, n_fits=3, rng=0)
    >>> bool(result.min_stability > 0.999)
    True
    """
    n_fits = check_integer(n_fits, "n_fits", low=2, hint="One fit has nothing to be compared with.")
    check_choice(resample, "resample", (True, False))
    check_choice(signed, "signed", (True, False))
    rng = _random.check_rng(rng)
    seeded = "random_state" in estimator.get_params(deep=False)
    if not seeded and not resample:
        raise ValueError(
            f"{type(estimator).__name__} has no random_state, so every fit would be the same: pass resample=True to "
            "compare fits of resampled rows."
        )
    X = check_rows(X, name="X", owner="dictionary_stability")
    models = [_refit(estimator, X, rng, seeded, resample) for _ in range(n_fits)]
    atoms = [dictionary_of(model) for model in models]
    pairwise = np.eye(n_fits)
    for i in range(n_fits):
        for j in range(i):
            pairwise[i, j] = pairwise[j, i] = match_dictionaries(atoms[i], atoms[j], signed=signed).mean_cosine
    reference = int(np.argmax(np.sum(pairwise, axis=1)))
    cosines = np.stack([match_dictionaries(atoms[reference], other, signed=signed).cosines for other in atoms])
    stability = np.mean(np.delete(cosines, reference, axis=0), axis=0)
    return DictionaryStabilityResult(
        n_fits=n_fits,
        mean_stability=float(np.mean(stability)),
        min_stability=float(np.min(stability)),
        reference=reference,
        estimator=models[reference],
        stability=stability,
        cosines=cosines,
        pairwise=pairwise,
    )


def _refit(estimator: Any, X: Array, rng: np.random.Generator, seeded: bool, resample: bool) -> Any:
    """Return a clone fitted with a seed of its own, and on rows of its own if asked to."""
    model = clone(estimator)
    if seeded:
        model.set_params(random_state=int(rng.integers(2**31 - 1)))
    if resample:
        xp = _xp.array_namespace(X)
        index = rng.integers(X.shape[0], size=X.shape[0])
        X = xp.take(X, _xp.asarray_like(index, X, dtype=xp.int64), axis=0)
    return model.fit(X)
