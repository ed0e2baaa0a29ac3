"""Norms of weight gradients from their factor rows, sample by sample, without a matrix of the weight's size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_COLUMNS = 256  # columns of the projected inputs taken at a time: bounds the memory by 256 times the width of G
_ROWS = 8192  # rows of a large group taken at a time


def weight_gradient_norms(X: Any, G: Any, basis: Any = None, *, groups: Any = None) -> NDArray[np.float64]:
    r"""Return the norm of the weight gradient of every sample, or of its projection, from factor rows.

    Parameters
    ----------
    X : array-like of shape (n_rows, d_in), or integers of shape (n_rows, 1) or (n_rows,)
        The ``activations`` of a ``":weight"`` site of :func:`harvest`: inputs :math:`x_t` of a linear layer; or, as
        integers, the token ids of an embedding, whose :math:`x_t` are one-hot.
    G : array-like of shape (n_rows, d_out)
        The ``gradients`` of that site, :math:`g_t`.
    basis : array-like of shape (r, d), default=None
        Rows :math:`Q`, orthonormal if the result is to be the norm of a projection. For a linear layer on its input
        side, d = d_in; for an embedding along its rows, d = d_out. None takes the whole gradient.
    groups : array-like of shape (n_rows,), default=None
        What a gradient is of, row by row: ``h.meta.sample_id`` for samples, ``h.meta.batch_id`` for batches. None
        takes all rows together.

    Returns
    -------
    ndarray of shape (n_groups,), float64
        :math:`\|\nabla W Q^\top\|_F` of every group, not negative, in the order of ``numpy.unique(groups)``.

    Raises
    ------
    TypeError, ValueError
        If shapes do not go together, a number is not finite, ids are negative, or there is no row.

    Notes
    -----
    With :math:`\nabla W = \sum_t g_t x_t^\top` (its transpose for transformers' ``Conv1D``), the squared norm of
    :math:`\nabla W Q^\top` is

    .. math:: \sum_{t, s} (g_t \cdot g_s)\, (Q x_t \cdot Q x_s),

    which takes two small Gram matrices where a sample has few rows; where it has many, :math:`G^\top (X Q^\top)` is
    added up, some columns at a time. For an embedding, :math:`\nabla W = \sum_t e_t g_t^\top` with one row per token,
    and the squared norm is that of the sums of :math:`Q g_t` over the rows with one token. A tied weight has further
    contributions where it is used elsewhere. [1]_ has the norm without :math:`Q`.

    References
    ----------
    .. [1] I. Goodfellow, "Efficient per-example gradient computations", 2015. :arxiv:`1510.01799`

    Examples
    --------
    >>> import torch
    >>> from isogeom.gradients import harvest, weight_gradient_norms
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 3))
    >>> ids = torch.tensor([[1, 2, 2], [4, 5, 6]])
    >>> h = harvest(model, [ids], ["0:weight", "1:weight"], loss=lambda m, x: m(x).square())
    >>> norms = weight_gradient_norms(h["0:weight"].activations, h["0:weight"].gradients, groups=h.meta.sample_id)
    >>> (gradient,) = torch.autograd.grad(model(ids[:1]).square().sum(), model[0].weight)
    >>> bool(abs(norms[0] - gradient.norm().item()) < 1e-4)
    True
    """
    table = _is_integer(X)
    n_rows = _check_rows(X, G, table)
    width = G.shape[1] if table else X.shape[1]
    Q = None if basis is None else _check_basis(basis, width, table)
    labels = np.zeros(n_rows, dtype=np.int64) if groups is None else np.asarray(groups)
    if labels.shape != (n_rows,):
        raise ValueError(f"groups must have one label per row, shape ({n_rows},), got {labels.shape}")
    if labels.dtype.kind == "f" and np.isnan(labels).any():
        raise ValueError("groups holds NaN: every row belongs to a group; drop those rows")
    _, inverse = np.unique(labels, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(inverse[order]) > 0))
    squared = _table_norm if table else _linear_norm
    parts = np.split(order, starts[1:])
    return np.sqrt(np.array([max(squared(X, G, Q, rows), 0.0) for rows in parts]))


def _is_integer(X: Any) -> bool:
    if not hasattr(X, "shape") or not hasattr(X, "dtype"):
        raise TypeError(f"X must be an array of inputs or of token ids, got {type(X).__name__}")
    dtype = str(X.dtype).removeprefix("torch.")
    if dtype == "bool" or not dtype.startswith(("float", "int", "uint")):
        raise TypeError(f"X must hold real numbers or token ids, got {dtype}")
    return "int" in dtype


def _check_rows(X: Any, G: Any, table: bool) -> int:
    if not hasattr(G, "shape") or len(G.shape) != 2:
        raise ValueError(f"G must have shape (n_rows, d_out), got {getattr(G, 'shape', type(G).__name__)}")
    n_rows = int(G.shape[0])
    fits = X.shape in ((n_rows,), (n_rows, 1)) if table else (len(X.shape) == 2 and X.shape[0] == n_rows)
    if not fits:
        wanted = f"({n_rows}, 1) or ({n_rows},), as token ids have," if table else f"({n_rows}, d_in)"
        raise ValueError(f"X must have shape {wanted} to go with G of shape {tuple(G.shape)}, got {tuple(X.shape)}")
    if n_rows == 0:
        raise ValueError("X and G have no rows")
    return n_rows


def _check_basis(basis: Any, width: int, table: bool) -> NDArray[np.float64]:
    try:
        Q = np.asarray(basis, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"basis must be an array of numbers of shape (r, {width}), got {type(basis).__name__}"
        ) from error
    if Q.ndim != 2 or Q.shape[1] != width:
        side = "along the rows of the embedding, as G" if table else "on the input side, as X"
        raise ValueError(f"basis must have shape (r, {width}), {side} has columns, got {Q.shape}")
    if not np.isfinite(Q).all():
        raise ValueError("basis holds values that are not finite")
    return Q


def _take(array: Any, rows: NDArray[np.intp], name: str) -> NDArray[np.float64]:
    part = np.asarray(array[rows], dtype=np.float64)
    if not np.isfinite(part).all():
        raise ValueError(f"{name} holds values that are not finite")
    return part


def _chunks(rows: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    for begin in range(0, len(rows), _ROWS):
        yield rows[begin : begin + _ROWS]


def _linear_norm(X: Any, G: Any, Q: NDArray[np.float64] | None, rows: NDArray[np.intp]) -> float:
    width = X.shape[1] if Q is None else len(Q)
    if len(rows) <= _ROWS and len(rows) ** 2 <= width * G.shape[1]:
        inputs, gradients = _take(X, rows, "X"), _take(G, rows, "G")
        Z = inputs if Q is None else inputs @ Q.T
        return float(((Z @ Z.T) * (gradients @ gradients.T)).sum())
    total = 0.0
    for begin in range(0, width, _COLUMNS):
        columns = slice(begin, begin + _COLUMNS)
        product = np.zeros((G.shape[1], min(_COLUMNS, width - begin)))
        for part in _chunks(rows):
            inputs = _take(X, part, "X")
            product += _take(G, part, "G").T @ (inputs[:, columns] if Q is None else inputs @ Q[columns].T)
        total += float((product**2).sum())
    return total


def _table_norm(X: Any, G: Any, Q: NDArray[np.float64] | None, rows: NDArray[np.intp]) -> float:
    ids = np.asarray(X[rows]).reshape(-1)
    if ids.min() < 0:
        raise ValueError(f"X must hold token ids, at least 0, got {ids.min()}")
    tokens, places = np.unique(ids, return_inverse=True)
    width, total = G.shape[1] if Q is None else len(Q), 0.0
    for begin in range(0, width, _COLUMNS):
        columns = slice(begin, begin + _COLUMNS)
        sums = np.zeros((len(tokens), min(_COLUMNS, width - begin)))
        for first in range(0, len(rows), _ROWS):
            gradients = _take(G, rows[first : first + _ROWS], "G")
            here = places[first : first + _ROWS]
            back = np.argsort(here, kind="stable")
            edges = np.flatnonzero(np.append(True, np.diff(here[back]) > 0))
            part = gradients[:, columns] if Q is None else gradients @ Q[columns].T
            sums[here[back][edges]] += np.add.reduceat(part[back], edges, axis=0)
        total += float((sums**2).sum())
    return total
