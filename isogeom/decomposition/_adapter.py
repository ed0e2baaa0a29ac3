"""Decompositions under the method names that concept pipelines built on overcomplete expect."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import array_api_compat
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

from isogeom import _xp
from isogeom._validation import check_integer
from isogeom._xp import Array
from isogeom.decomposition._base import Decomposition
from isogeom.decomposition._interpret import dictionary_of
from isogeom.decomposition._seminmf import SemiNMF
from isogeom.decomposition._tracing import is_traced, traced_codes


class OvercompleteAdapter:
    """A decomposition with the methods of overcomplete's dictionary-learning models.

    Pipelines written for ``overcomplete.optimization`` models (Interpreto's and Xplique's concept explainers among
    them) call ``fit``, ``encode``, ``decode`` and ``get_dictionary``; they get them from any isogeom decomposition,
    with its exact, deterministic codes. Arrays stay in the library they come in: tensors in, tensors out.

    Parameters
    ----------
    estimator : estimator
        Decomposition, fitted or not; ``fit`` of the adapter fits this very object.
    device : device or None, default=None
        Where tensors are moved to before use, as overcomplete's models do. None for the device of the fitted atoms, or
        of whatever is passed to ``fit``.

    Attributes
    ----------
    estimator : estimator
        The wrapped decomposition.
    nb_concepts : int
        Number of atoms; before ``fit`` the parameter ``n_components``.
    fitted : bool
        Whether the estimator is fitted.
    device : device
        Setting it moves the fitted attributes, like ``to``.

    See Also
    --------
    SemiNMF : The decomposition that such pipelines mostly ask for.

    Notes
    -----
    ``decode`` is ``z @ get_dictionary()`` plus the estimator's mean in plain array operations, so it is differentiable
    in torch. So is ``encode`` of `PCA`, `ICA` and `SemiNMF` for a tensor that requires grad: codes have the values of
    ``transform``, and its exact derivative. For Semi-NMF that is the derivative of the optimum where a small change of
    the row leaves the set of nonzero codes alone; zero codes have gradient zero. It takes one linear system of the size
    of the number of atoms per row. Second derivatives are zero.

    A pipeline that builds its model from a class and a number of concepts gets a function instead::

        lambda nb_concepts, device=None, **options: OvercompleteAdapter(SemiNMF(nb_concepts, **options), device=device)

    The adapter is not a ``torch.nn.Module``: a pipeline that checks for that class needs its own subclass.

    References
    ----------
    Fel et al., Overcomplete: a vision-based SAE toolbox. https://github.com/KempnerInstitute/overcomplete

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.decomposition import OvercompleteAdapter, SemiNMF
    >>> X = np.random.default_rng(0).exponential(size=(50, 3)) @ np.eye(3, 6)
    >>> model = OvercompleteAdapter(SemiNMF(n_components=3, alpha=0.05, random_state=0))
    >>> Z, D = model.fit(X)
    >>> Z.shape, D.shape, model.nb_concepts, model.fitted
    ((50, 3), (3, 6), 3, True)
    >>> bool(np.allclose(model.encode(X), Z)), bool(np.allclose(model.decode(Z), Z @ D))
    (True, True)
    """

    def __init__(self, estimator: Any, device: Any = None) -> None:
        self.estimator = estimator
        self._device = device

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.estimator!r})"

    @property
    def fitted(self) -> bool:
        """Whether the estimator is fitted."""
        try:
            check_is_fitted(self.estimator)
        except NotFittedError:
            return False
        return True

    @property
    def nb_concepts(self) -> int:
        """Number of atoms; before ``fit`` the parameter ``n_components``."""
        if self.fitted:
            return int(dictionary_of(self.estimator).shape[0])
        return self.estimator.n_components

    @property
    def device(self) -> Any:
        """Device of the model; "cpu" while nothing says otherwise."""
        if self._device is not None:
            return self._device
        return _xp.device(dictionary_of(self.estimator)) if self.fitted else "cpu"

    @device.setter
    def device(self, device: Any) -> None:
        self.to(device)

    def fit(self, x: Any, max_iter: int | None = None) -> tuple[Array, Array]:
        """Fit the estimator.

        Parameters
        ----------
        x : array-like of shape (n_samples, n_features), or iterable of arrays of shape (any, n_features)
            Rows. Batches are concatenated, from a list, a tuple, a generator or a ``DataLoader``; of a batch that is
            itself a list or tuple (rows, labels, ...) the first entry counts.
        max_iter : int or None, default=None
            Largest number of iterations, where the estimator has that parameter. None for its own.

        Returns
        -------
        Z : array of shape (n_samples, nb_concepts)
            Codes.
        D : array of shape (nb_concepts, n_features)
            Atoms.

        Raises
        ------
        TypeError
            If `x` is neither an array nor an iterable of arrays.
        ValueError
            If there are no batches.
        """
        if max_iter is not None and "max_iter" in self.estimator.get_params(deep=False):
            self.estimator.set_params(max_iter=check_integer(max_iter, "max_iter", low=1))
        codes = self.estimator.fit_transform(self._place(_rows(x)))
        return codes, self.get_dictionary()

    def encode(self, x: Any) -> Array:
        """Return the codes of the rows.

        Parameters
        ----------
        x : array-like of shape (n_samples, n_features), or iterable of arrays of shape (any, n_features)
            Rows, or batches of them as for :meth:`fit`.

        Returns
        -------
        array of shape (n_samples, nb_concepts)
            Codes, from ``transform``; part of the autograd graph if `x` is (see Notes).
        """
        self._require_fitted()
        x = self._place(_rows(x))
        codes = self.estimator.transform(x)
        if not is_traced(x) or not isinstance(self.estimator, Decomposition):
            return codes
        nonnegative = isinstance(self.estimator, SemiNMF)
        ridge = self.estimator.ridge if nonnegative else 0.0
        return traced_codes(x, codes, self.get_dictionary(), nonnegative=nonnegative, ridge=ridge)

    def decode(self, z: Any) -> Array:
        """Return the rows that have the given codes.

        Parameters
        ----------
        z : array of shape (n_samples, nb_concepts)
            Codes; gradients flow through them.

        Returns
        -------
        array of shape (n_samples, n_features)
            ``z @ get_dictionary()``, plus the mean of an estimator that takes one off.
        """
        atoms = self.get_dictionary()
        z = self._place(z)
        if z.ndim != 2 or z.shape[1] != atoms.shape[0]:
            raise ValueError(
                f"z has shape {tuple(z.shape)}, expected (n_samples, {atoms.shape[0]}): pass codes from encode()."
            )
        # Not inverse_transform: it validates, and validation detaches tensors from their graph.
        xp = _xp.array_namespace(z, atoms)
        zero = xp.zeros((1, atoms.shape[0]), dtype=atoms.dtype, device=_xp.device(atoms))
        offset = self.estimator.inverse_transform(zero)
        return xp.matmul(z, xp.astype(atoms, z.dtype)) + xp.astype(offset, z.dtype)

    def get_dictionary(self) -> Array:
        """Return the atoms as rows, of shape (nb_concepts, n_features)."""
        self._require_fitted()
        return dictionary_of(self.estimator)

    def to(self, device: Any) -> OvercompleteAdapter:
        """Move the model: a fitted estimator is replaced by a copy whose arrays live on `device`.

        Parameters
        ----------
        device : device
            Where to, as the array library spells it ("cuda"). An estimator fitted on numpy arrays stays on the host.

        Returns
        -------
        OvercompleteAdapter
            This adapter.
        """
        if self.fitted:
            moved = copy.copy(self.estimator)
            for name, value in vars(self.estimator).items():
                if _xp.is_foreign(value):
                    setattr(moved, name, array_api_compat.to_device(value, device))
            self.estimator = moved
        self._device = device
        return self

    def eval(self) -> OvercompleteAdapter:
        """Return this adapter: there is no training mode."""
        return self

    def train(self, mode: bool = True) -> OvercompleteAdapter:  # noqa: ARG002
        """Return this adapter: there is no training mode.

        Parameters
        ----------
        mode : bool, default=True
            Ignored.
        """
        return self

    def _place(self, x: Any) -> Any:
        """Move an array of a library with devices to the model's, as the protocol asks; numpy arrays stay."""
        settled = self._device is not None or self.fitted
        return array_api_compat.to_device(x, self.device) if settled and _xp.is_foreign(x) else x

    def _require_fitted(self) -> None:
        # ValueError too (NotFittedError is one): what overcomplete raises.
        check_is_fitted(self.estimator)


def _rows(x: Any) -> Any:
    """Return one array from an array, or from batches."""
    if hasattr(x, "shape"):
        return x
    if isinstance(x, (str, Mapping)) or not isinstance(x, Iterable):
        raise TypeError(f"x must be an array, or an iterable of arrays, got {type(x).__name__}.")
    if isinstance(x, (list, tuple)) and x and not any(_is_matrix(_first(entry)) for entry in x):
        # Numbers in nested lists, or single rows.
        return x
    batches = []
    for place, entry in enumerate(x):
        batch = _first(entry)
        if not _is_matrix(batch):
            raise TypeError(
                f"Batch {place} of x is no array of shape (any, n_features), but a {type(entry).__name__}: pass an "
                "array, or an iterable of arrays (or of tuples that start with one)."
            )
        batches.append(batch)
    if not batches:
        raise ValueError("x yielded no batches: pass an array, or an iterable of arrays with at least one of them.")
    return _xp.array_namespace(*batches).concat(batches, axis=0)


def _first(entry: Any) -> Any:
    return entry[0] if isinstance(entry, (list, tuple)) and entry else entry


def _is_matrix(value: Any) -> bool:
    return getattr(value, "ndim", None) == 2
