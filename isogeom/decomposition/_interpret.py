"""Reading a fitted decomposition: what its concepts do to an output, and which finer concepts one of them holds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.utils.validation import check_is_fitted

from isogeom import _xp
from isogeom._results import Result
from isogeom._validation import check_choice, check_integer, check_real, check_rows, take_rows
from isogeom._xp import Array


def concept_importance(
    codes: Any, gradients: Any, dictionary: Any, *, aggregate: str | None = None, normalize: bool = False
) -> Array:
    r"""Attribute a model's output to concepts: gradient times code, from arrays alone.

    Parameters
    ----------
    codes : array-like of shape (n_samples, n_components)
        Codes of the rows, as ``transform`` returns them.
    gradients : array-like of shape (n_samples, n_features)
        Gradient of the output with respect to each row, at that row; same library and device as `codes`.
    dictionary : array-like of shape (n_components, n_features)
        Atoms as rows: the estimator's ``dictionary_``.
    aggregate : {None, "mean", "absolute"}, default=None
        None keeps one row per sample; "mean" averages the signed importances over the samples, so that opposite effects
        cancel; "absolute" averages their absolute values.
    normalize : bool, default=False
        Divide so that absolute importances sum to 1 over the concepts (per sample without `aggregate`). Rows without
        any importance stay 0.

    Returns
    -------
    array of shape (n_samples, n_components) or (n_components,)
        Importances in units of the output, or shares with `normalize`. Library, device and dtype of `codes`.

    Raises
    ------
    ValueError
        If the shapes do not fit together, or a value is not finite.
    TypeError
        If `dictionary` is an estimator, or arrays are of several libraries.

    See Also
    --------
    code_statistics : How dense, redundant and energetic the concepts are, without an output.

    Notes
    -----
    With rows written as ``x = z @ D + m``, the output f has the derivative ``g @ D.T`` by the codes, so the importances
    are

    .. math:: Z \odot (G D^T),

    one matrix product and no call of the model. If f is linear they sum over the concepts to ``f(z D + m) - f(m)``;
    this is then also what occlusion and integrated gradients from zero codes give. Otherwise they are first-order.

    References
    ----------
    Fel et al., "A holistic approach to unifying automatic concept extraction and concept importance estimation",
    NeurIPS 2023. https://arxiv.org/abs/2306.07304

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.decomposition import concept_importance
    >>> codes = np.array([[1.0, 2.0], [2.0, 1.0]])
    >>> dictionary = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    >>> gradients = np.array([[1.0, 5.0, -1.0], [1.0, 5.0, -1.0]])
    >>> concept_importance(codes, gradients, dictionary)
    array([[ 1., -2.],
           [ 2., -1.]])
    >>> concept_importance(codes, gradients, dictionary, aggregate="absolute", normalize=True)
    array([0.5, 0.5])
    """
    check_choice(aggregate, "aggregate", (None, "mean", "absolute"))
    check_choice(normalize, "normalize", (True, False))
    Z, D = check_codes(codes, dictionary, "concept_importance")
    G = check_rows(gradients, name="gradients", owner="concept_importance")
    xp = _xp.array_namespace(Z, G, D)
    if tuple(G.shape) != (Z.shape[0], D.shape[1]):
        raise ValueError(
            f"gradients has shape {tuple(G.shape)}, expected ({Z.shape[0]}, {D.shape[1]}): one gradient per row of "
            "codes, by the features of the dictionary."
        )
    out = Z * xp.matmul(xp.astype(G, Z.dtype), xp.matrix_transpose(xp.astype(D, Z.dtype)))
    if aggregate is not None:
        out = xp.mean(xp.abs(out) if aggregate == "absolute" else out, axis=0)
    if not normalize:
        return out
    total = xp.sum(xp.abs(out), axis=-1, keepdims=True)
    return out / xp.where(total > 0, total, xp.ones_like(total))


def check_codes(codes: Any, dictionary: Any, owner: str) -> tuple[Array, Array]:
    """Validate codes and the atoms that they weigh."""
    if hasattr(dictionary, "dictionary_"):
        raise TypeError(f"dictionary is a fitted {type(dictionary).__name__}: pass its dictionary_.")
    Z = check_rows(codes, name="codes", owner=owner)
    D = check_rows(dictionary, name="dictionary", owner=owner)
    if Z.shape[1] != D.shape[0]:
        raise ValueError(
            f"codes has {Z.shape[1]} columns but dictionary has {D.shape[0]} rows: pass one atom per code, the "
            "estimator's dictionary_."
        )
    return Z, D


def dictionary_of(estimator: Any) -> Array:
    """Return the atoms of a fitted decomposition as rows, such that rows are ``codes @ atoms + offset``.

    An estimator without ``dictionary_`` (scikit-learn's) is asked for the rows of unit and of zero codes.
    """
    if hasattr(estimator, "dictionary_"):
        return estimator.dictionary_
    if not hasattr(estimator, "inverse_transform") or not hasattr(estimator, "components_"):
        raise TypeError(
            f"{type(estimator).__name__} has neither dictionary_ nor components_ with inverse_transform(): pass a "
            "fitted decomposition."
        )
    k = estimator.components_.shape[0]
    dtype = estimator.components_.dtype
    offset = estimator.inverse_transform(np.zeros((1, k), dtype=dtype))
    return estimator.inverse_transform(np.eye(k, dtype=dtype)) - offset


@dataclasses.dataclass(frozen=True)
class RefinementResult(Result):
    """Outcome of :func:`refine`.

    Attributes
    ----------
    estimator : estimator
        New decomposition, fitted on the active rows alone.
    component : int
        Component that was refined.
    cut : float
        Smallest absolute code among the active rows.
    n_rows : int
        Number of active rows.
    share : float
        Their share of all rows, 0 to 1.
    rows : ndarray of shape (n_rows,)
        Their indices in rising order, on the host.
    """

    estimator: Any
    component: int
    cut: float
    n_rows: int
    share: float
    rows: np.ndarray = dataclasses.field(repr=False)


def refine(
    estimator: Any,
    X: Any,
    component: int,
    *,
    X_earlier: Any = None,
    threshold: float = 0.5,
    side: str = "positive",
    n_components: int | None = None,
) -> RefinementResult:
    """Split a concept into finer ones: factorise again the rows in which it is active.

    Parameters
    ----------
    estimator : estimator
        Fitted decomposition with ``transform``; it is not changed.
    X : array-like of shape (n_samples, n_features)
        Rows to code with `estimator`; the new one has the column names of a data frame.
    component : int
        Index of the concept; negative ones count from the end.
    X_earlier : array-like of shape (n_samples, n_features_earlier), default=None
        Activations of the same samples, row by row, in an earlier layer, which the new model factorises. None for `X`.
    threshold : float, default=0.5
        Share of the rows with a positive code that is left out, weakest codes first, 0 (all of them stay) to below 1.
    side : {"positive", "negative"}, default="positive"
        Which codes count as active: the other pole of a PCA or ICA component is a concept of its own.
    n_components : int or None, default=None
        Number of finer concepts. None for the estimator's own parameter.

    Returns
    -------
    RefinementResult
        The new fitted estimator (with the output container that ``set_output`` gave to `estimator`), and which rows it
        saw.

    Raises
    ------
    ValueError
        If fewer than two rows are active, or `X_earlier` has another number of rows than `X`.

    See Also
    --------
    SemiNMF.refine : The same as a method.

    Notes
    -----
    This is the recursion of CRAFT: a concept that mixes several meanings late in a network often splits in an earlier
    layer.

    References
    ----------
    Fel et al., "CRAFT: Concept recursive activation factorization for explainability", CVPR 2023.
    https://arxiv.org/abs/2211.10154

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.decomposition import SemiNMF, refine
    >>> late = np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
    >>> early = np.array([[1.0, 0, 0], [0, 2.0, 0], [0, 0, 1.0], [0, 3.0, 0], [0, 0, 2.0], [1.0, 0, 0]])
    >>> model = SemiNMF(n_components=2, random_state=0).fit(late)
    >>> finer = refine(model, late, 0, X_earlier=early, threshold=0, n_components=2)
    >>> finer.rows
    array([0, 1, 3, 5])
    >>> np.round(np.abs(finer.estimator.components_), 2)
    array([[0., 1., 0.],
           [1., 0., 0.]])
    """
    check_is_fitted(estimator)
    threshold = check_real(threshold, "threshold", low=0)
    if threshold >= 1:
        raise ValueError(f"threshold={threshold!r} must be below 1: it is the share of active rows to leave out.")
    check_choice(side, "side", ("positive", "negative"))
    source = X if X_earlier is None else X_earlier
    checked = check_rows(source, name="X" if X_earlier is None else "X_earlier", owner="refine")
    # A data frame stays one, so that the new model knows the names of its columns.
    source = source if hasattr(source, "columns") else checked
    codes = estimator.transform(X)
    if not _xp.is_foreign(codes):
        codes = np.asarray(codes)  # set_output may have made a table of them
    n, k = codes.shape
    component = check_integer(component, "component", low=-k, high=k - 1) % k
    if source.shape[0] != n:
        raise ValueError(
            f"X_earlier has {source.shape[0]} rows but X has {n}: pass the earlier layer's activations of the same "
            "samples, in the same order."
        )
    # One column of codes, to pick rows with: the rows themselves stay where they are.
    column = _xp.to_numpy(codes[:, component]).astype(np.float64)
    rows, cut = _active_rows(column if side == "positive" else -column, threshold)
    if rows.size < 2:
        raise ValueError(
            f"component={component} is active in {rows.size} of {n} rows above threshold={threshold:.3g}, and a "
            f"decomposition needs at least 2: lower threshold, or refine a component with {side} codes."
        )
    model = clone(estimator)
    if n_components is not None:
        model.set_params(n_components=check_integer(n_components, "n_components", low=1))
    model.fit(take_rows(source, rows))
    return RefinementResult(model, component, cut, int(rows.size), rows.size / n, rows)


def _active_rows(codes: np.ndarray, threshold: float) -> tuple[np.ndarray, float]:
    """Return the indices of the strongest positive codes, and the weakest of these codes."""
    positive = codes[codes > 0]
    if positive.size == 0:
        return np.empty(0, dtype=np.int64), math.inf
    cut = float(np.quantile(positive, threshold, method="higher"))
    return np.flatnonzero(codes >= cut), cut
