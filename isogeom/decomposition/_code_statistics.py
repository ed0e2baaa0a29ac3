"""Statistics of codes and atoms: density, sparsity, energy, dead and duplicate components, coherence."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from isogeom import _xp
from isogeom._linalg import row_norms
from isogeom._results import Result, _require
from isogeom._validation import check_real
from isogeom._xp import Array
from isogeom.decomposition._certificates import unique_energies
from isogeom.decomposition._interpret import check_codes


@dataclasses.dataclass(frozen=True)
class CodeStatisticsResult(Result):
    """Outcome of :func:`code_statistics`; ``to_frame`` gives one row per component.

    Attributes
    ----------
    n_samples, n_components : int
        Shape of the codes.
    mean_density : float
        Share of codes that are not zero, 0 to 1.
    mean_l0 : float
        Mean number of non-zero codes per row.
    hoyer : float or None
        Mean Hoyer sparsity of the rows that are not all zero, 0 (all codes equal) to 1 (a single one); None with one
        component, or if all rows are zero.
    max_coherence : float
        Largest absolute cosine between two atoms, 0 to 1; 0 with one component.
    n_dead, n_duplicates : int
        Number of dead components, and of pairs of duplicates (three equal atoms are three pairs;
        ``n_duplicate_atoms_`` of :class:`SemiNMF` counts atoms instead, two here).
    density : ndarray of shape (n_components,)
        Share of rows in which each component is not zero.
    energy_share : ndarray of shape (n_components,)
        Sum of squared codes times the squared norm of the atom, as a share of the sum over components.
    unique_energy : ndarray of shape (n_components,)
        Rise of the squared reconstruction error if the component is dropped and the other atoms are refitted by least
        squares to the same codes, for a dictionary that itself is a least-squares fit; in squared units of the rows.
    coherence : ndarray of shape (n_components,)
        Largest absolute cosine between each atom and another one.
    nearest : ndarray of shape (n_components,)
        Index of that other atom, -1 with one component.
    dead : ndarray of shape (n_components,)
        Whether the component is zero in every row, or its atom is zero.
    duplicates : ndarray of shape (n_duplicates, 2)
        Pairs of indices of atoms that point the same way.
    """

    n_samples: int
    n_components: int
    mean_density: float
    mean_l0: float
    hoyer: float | None
    max_coherence: float
    n_dead: int
    n_duplicates: int
    density: np.ndarray = dataclasses.field(repr=False)
    energy_share: np.ndarray = dataclasses.field(repr=False)
    unique_energy: np.ndarray = dataclasses.field(repr=False)
    coherence: np.ndarray = dataclasses.field(repr=False)
    nearest: np.ndarray = dataclasses.field(repr=False)
    dead: np.ndarray = dataclasses.field(repr=False)
    duplicates: np.ndarray = dataclasses.field(repr=False)

    def to_frame(self) -> Any:
        """Return a :class:`pandas.DataFrame` with one row per component.

        Raises
        ------
        ImportError
            If pandas is not installed.
        """
        pandas = _require("pandas", "to_frame()", "plot")
        names = ("density", "energy_share", "unique_energy", "coherence", "nearest", "dead")
        return pandas.DataFrame({name: getattr(self, name) for name in names}).rename_axis("component")


def code_statistics(codes: Any, dictionary: Any, *, zero: float = 0.0, duplicate: float = 0.99) -> CodeStatisticsResult:
    r"""Describe codes and atoms: density, sparsity, energy, dead and duplicate components, coherence.

    Parameters
    ----------
    codes : array-like of shape (n_samples, n_components)
        Codes of the rows, as ``transform`` returns them.
    dictionary : array-like of shape (n_components, n_features)
        Atoms as rows: the estimator's ``dictionary_``; same library and device.
    zero : float, default=0.0
        Codes of at most this absolute value count as zero, nonnegative. Exact codes (of SemiNMF) need no tolerance.
    duplicate : float, default=0.99
        Cosine from which two atoms are duplicates, 0 to 1. Where all codes are nonnegative opposite atoms are different
        concepts; otherwise the absolute cosine counts.

    Returns
    -------
    CodeStatisticsResult
        Plain Python and NumPy values.

    Raises
    ------
    ValueError
        If the shapes do not fit together, a value is not finite, a parameter is out of range, or the energies are no
        numbers of float64 (codes times atoms beyond 1e154, or all below 1e-154).
    TypeError
        If `dictionary` is an estimator, or arrays are of several libraries.

    See Also
    --------
    dictionary_stability : Whether the same atoms are found again.

    Notes
    -----
    Hoyer sparsity of a row z with k entries is :math:`(\sqrt k - \|z\|_1 / \|z\|_2) / (\sqrt k - 1)`. The unique
    energy of component j is :math:`\|d_j\|^2 / [(Z^T Z)^{-1}]_{jj}`, about 0 where its codes are a linear
    combination of the others'.

    References
    ----------
    Hurley, Rickard, "Comparing measures of sparsity", IEEE Transactions on Information Theory 55(10), 2009.
    https://arxiv.org/abs/0811.4706

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.decomposition import code_statistics
    >>> codes = np.array([[1.0, 0.0, 0.0], [2.0, 2.0, 0.0]])
    >>> dictionary = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> print(code_statistics(codes, dictionary))
    CodeStatisticsResult
      n_samples      2
      n_components   3
      mean_density   0.5
      mean_l0        1.5
      hoyer          0.7171
      max_coherence  1
      n_dead         1
      n_duplicates   1
    """
    zero = check_real(zero, "zero", low=0)
    duplicate = check_real(duplicate, "duplicate", low=0, high=1)
    Z, D = check_codes(codes, dictionary, "code_statistics")
    n, k = Z.shape
    xp = _xp.array_namespace(Z, D)
    D = xp.astype(D, _xp.accumulator_dtype(xp, _xp.device(D)))
    # Exact powers of two bring every component near 1: sums of squares then neither overflow nor underflow.
    code_powers, code_scales = _powers(_largest(Z, axis=0), D)
    atom_powers, atom_scales = _powers(_largest(D, axis=1), D)
    counts, gram, hoyers, nonnegative = _code_sums(Z, zero, code_scales)
    D = D * xp.expand_dims(atom_scales, axis=1)
    norms = row_norms(D)
    unit = D / xp.expand_dims(xp.where(norms > 0, norms, xp.ones_like(norms)), axis=1)
    cosines = _xp.to_numpy(xp.matmul(unit, xp.matrix_transpose(unit))).copy()
    squares = _xp.to_numpy(norms).astype(np.float64) ** 2
    np.fill_diagonal(cosines, 0.0)

    dead = (counts == 0) | (squares == 0)
    energy, powers = np.diag(gram) * squares, 2 * (code_powers + atom_powers)
    unique = _in_units(energy, unique_energies(gram, np.sqrt(squares)[:, None]), powers)
    energy = np.ldexp(energy, powers - np.max(np.where(energy > 0, powers, -(10**6))))
    coherence = np.minimum(np.max(np.abs(cosines), axis=1), 1.0)
    same = np.triu((cosines if nonnegative else np.abs(cosines)) >= duplicate, 1)
    # Atoms that are zero have no direction, so a threshold of 0 must not pair them.
    same &= (squares > 0)[:, None] & (squares > 0)
    pairs = np.argwhere(same)
    return CodeStatisticsResult(
        n_samples=int(n),
        n_components=int(k),
        mean_density=float(np.mean(counts) / n),
        mean_l0=float(np.sum(counts) / n),
        hoyer=hoyers,
        max_coherence=float(np.max(coherence)),
        n_dead=int(np.sum(dead)),
        n_duplicates=len(pairs),
        density=counts / n,
        energy_share=energy / max(float(np.sum(energy)), np.finfo(np.float64).tiny),
        unique_energy=unique,
        coherence=coherence,
        nearest=np.argmax(np.abs(cosines), axis=1) if k > 1 else np.full(1, -1),
        dead=dead,
        duplicates=pairs,
    )


def _largest(x: Array, axis: int) -> Array:
    """Return the largest absolute value along an axis, over row blocks."""
    xp = _xp.array_namespace(x)
    parts = [xp.max(xp.abs(block), axis=axis) for block in _xp.row_blocks(x)]
    return xp.concat(parts) if axis == 1 else xp.max(xp.stack(parts), axis=0)


def _powers(largest: Array, like: Array) -> tuple[np.ndarray, Array]:
    """Return the exponents of powers of two near the values, and their inverses as an array like `like`."""
    widest = 1000 if "64" in str(like.dtype) else 100
    exponents = np.frexp(_xp.to_numpy(largest).astype(np.float64))[1].astype(np.int64)
    exponents = np.clip(exponents, -widest, widest)
    return exponents, _xp.asarray_like(np.ldexp(1.0, -exponents), like)


def _in_units(energy: np.ndarray, unique: np.ndarray, powers: np.ndarray) -> np.ndarray:
    """Return the unique energies in squared units of the rows, from those of the scaled components."""
    highest = np.max(np.log2(energy, where=energy > 0, out=np.full(energy.shape, -np.inf)) + powers)
    if np.isfinite(highest) and not -1022 <= highest < 1023:
        raise ValueError(
            f"codes times dictionary reach about 1e{highest * math.log10(2) / 2:+.0f}, whose squares are no numbers of "
            f"float64, but energies are squares: multiply codes by 2.0**{round(-highest / 2)}, which changes nothing "
            "else."
        )
    return np.ldexp(unique, powers)


def _code_sums(Z: Array, zero: float, scales: Array) -> tuple[np.ndarray, np.ndarray, float | None, bool]:
    """Return what the rows add up to.

    That is non-zero counts per column, ``Z.T @ Z`` for columns times `scales`, the mean Hoyer sparsity and whether no
    code is negative.
    """
    xp = _xp.array_namespace(Z)
    k = int(Z.shape[1])
    counts = gram = 0
    sparsity, n_rows = 0.0, 0
    for block in _xp.row_blocks(Z):
        block = xp.astype(block, scales.dtype)
        size = xp.abs(block)
        counts = counts + xp.sum(xp.astype(size > zero, xp.int64), axis=0)
        scaled = block * scales
        gram = gram + xp.matmul(xp.matrix_transpose(scaled), scaled)
        largest = xp.max(size, axis=1, keepdims=True)
        used = xp.squeeze(largest, axis=1) > 0
        n_rows += int(xp.count_nonzero(used))
        if k > 1:
            size = size / xp.where(largest > 0, largest, xp.ones_like(largest))
            length = row_norms(size)
            ratio = xp.sum(size, axis=1) / xp.where(used, length, xp.ones_like(length))
            sparsity += float(xp.sum(xp.where(used, math.sqrt(k) - ratio, xp.zeros_like(ratio))))
    hoyer = None if k == 1 or n_rows == 0 else sparsity / n_rows / (math.sqrt(k) - 1)
    return _xp.to_numpy(counts), _xp.to_numpy(gram).astype(np.float64), hoyer, bool(xp.min(Z) >= 0)
