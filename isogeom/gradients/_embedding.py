"""How far the embedding of each token moved between two checkpoints."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from isogeom._results import Result, _require
from isogeom._validation import warn_user
from isogeom.gradients._matrices import StoredMatrices

_BLOCK = 4096  # rows read at a time
_PARALLEL = 0.01  # largest share of an update beside its row that still counts as decay alone


@dataclass(frozen=True, eq=False, repr=False)
class EmbeddingUpdateResult(Result):
    """Rows of an embedding update; see :func:`embedding_update`.

    Attributes
    ----------
    name : str
        Name of the matrix.
    n_tokens, n_features : int
        Rows compared, and their dimension.
    n_padding : int
        Rows behind `n_tokens` that were left out, in the longer of the two matrices.
    tied : bool or None
        Whether the matrix is the output head as well; None if nothing tells.
    decay : float
        Common factor of the rows that only decayed; 1 without weight decay.
    n_never_seen : int
        Number of rows in `never_seen`.
    update : ndarray of shape (n_tokens, n_features)
        Rows of W_b - W_a, float32.
    norms, initial_norms : ndarray of shape (n_tokens,)
        Norms of the rows of the update and of W_a, float64.
    token_ids : ndarray of shape (n_tokens,)
        Token of each row, int64.
    never_seen : ndarray of shape (n_tokens,)
        True for tokens without a training example; by `counts` if given, else rows that stood still or only decayed.
    """

    name: str
    n_tokens: int
    n_features: int
    n_padding: int
    tied: bool | None
    decay: float
    n_never_seen: int
    update: NDArray[np.float32]
    norms: NDArray[np.float64]
    initial_norms: NDArray[np.float64]
    token_ids: NDArray[np.int64]
    never_seen: NDArray[np.bool_]

    def __repr__(self) -> str:
        return str(self)

    def to_frame(self) -> Any:
        """Return one line per token as a :class:`pandas.DataFrame`.

        Raises
        ------
        ImportError
            If pandas is not installed.
        """
        pandas = _require("pandas", "to_frame()", "plot")
        columns = ("token_ids", "norms", "initial_norms", "never_seen")
        names = ("token_id", "norm", "initial_norm", "never_seen")
        return pandas.DataFrame({name: getattr(self, column) for name, column in zip(names, columns, strict=True)})


def embedding_update(
    state_a: Any,
    state_b: Any,
    name: str,
    *,
    n_tokens: int | None = None,
    counts: ArrayLike | None = None,
) -> EmbeddingUpdateResult:
    r"""Return how far each row of an embedding matrix moved from one checkpoint to another.

    Parameters
    ----------
    state_a, state_b : torch.nn.Module, mapping of str to Tensor, str or path-like
        The earlier and the later state: a module, its ``state_dict()``, a ``.safetensors`` file, or a folder with
        ``model.safetensors`` or its sharded form. Of files, only the matrix itself is read, by blocks of rows.
    name : str
        Name of the matrix in both states, of shape (tokens, width), for instance ``"model.embed_tokens.weight"``.
    n_tokens : int or None, default=None
        Length of the tokenizer. Many models pad their matrix to a round number of rows: those from `n_tokens` on are
        left out. Needed where the two states have different numbers of rows. None compares all rows.
    counts : array-like of shape (n_tokens,) or None, default=None
        How often each token was in the training text between the two states; 0 marks it as never seen.

    Returns
    -------
    EmbeddingUpdateResult
        Rows, norms, token ids, whether the matrix is tied, and the mask of tokens never seen.

    Raises
    ------
    TypeError, ValueError, FileNotFoundError
        If a state is not as described, has no such matrix, the widths or (without `n_tokens`) the vocabulary sizes
        differ, `counts` is not as described, or a value is not finite.
    ImportError
        If a file is given and safetensors is missing.

    Warns
    -----
    UserWarning
        If no row moved: the two states may be one.

    Notes
    -----
    Without `counts`, a row counts as never seen if it did not move, or moved by the common weight decay alone: a token
    without a training example has no gradient, so that AdamW multiplies its row by one factor that all such rows share,
    :math:`w_b = c\,w_a` with :math:`c < 1`. That is asked to 1 % of the update: what is left of it beside the row, and
    the factor's distance from the median over all such rows, of which two are needed at least. In bfloat16, where the
    stored numbers are that coarse, a row trained very little cannot be told from one that only decayed.

    The rule says nothing about a *tied* matrix, which the output softmax moves at every step, for every token: pass
    `counts` then. `tied` is True if another matrix of the same shape holds the same numbers in `state_b`, False if
    there is one and none is equal; with files, which store a tied matrix once, ``tie_word_embeddings`` of the
    ``config.json`` beside them decides, if no other matrix has that shape.

    Examples
    --------
    >>> import torch
    >>> from isogeom.gradients import embedding_update
    >>> early = {"tokens.weight": torch.ones(4, 3)}
    >>> late = {"tokens.weight": torch.ones(4, 3)}
    >>> late["tokens.weight"][1] += torch.tensor([3.0, 0.0, 4.0])
    >>> result = embedding_update(early, late, "tokens.weight")
    >>> result.norms
    array([0., 5., 0., 0.])
    >>> result.never_seen
    array([ True, False,  True,  True])
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    states = StoredMatrices(state_a, "state_a"), StoredMatrices(state_b, "state_b")
    shapes = [state.check(name) for state in states]
    n_rows = _n_rows(shapes, n_tokens, name)
    rounding = max(state.rounding(name) for state in states)
    known = None if counts is None else _check_counts(counts, n_rows)
    n_features = shapes[0][1]
    update = np.empty((n_rows, n_features), dtype=np.float32)
    norms, before, factors, residuals = (np.empty(n_rows) for _ in range(4))
    starts = range(0, n_rows, _BLOCK)
    for start, old, new in zip(starts, *(state.blocks(name, starts, n_rows) for state in states), strict=True):
        place = slice(start, start + len(old))
        delta = new - old
        if not bool(torch.isfinite(delta).all()):
            raise ValueError(f"{name!r} has values that are not finite in rows {place.start} to {place.stop - 1}")
        update[place] = delta.numpy()
        norms[place] = delta.norm(dim=1).numpy()
        before[place] = old.norm(dim=1).numpy()
        square = (old * old).sum(1)
        factor = (old * new).sum(1) / torch.where(square > 0, square, 1.0)
        factors[place] = factor.numpy()
        # What is left of the new row beside the old one, relative to it: 0 if they are parallel.
        residuals[place] = (new - factor[:, None] * old).norm(dim=1).numpy()
    decay, still = _decayed(norms, before, factors, residuals, rounding)
    if not norms.any():
        warn_user(f"no row of {name!r} moved from state_a to state_b: are they the same checkpoint?")
    never = still if known is None else known == 0
    return EmbeddingUpdateResult(
        name=name,
        n_tokens=n_rows,
        n_features=n_features,
        n_padding=max(shape[0] for shape in shapes) - n_rows,
        tied=states[1].is_tied(name, n_rows, _BLOCK),
        decay=decay,
        n_never_seen=int(never.sum()),
        update=update,
        norms=norms,
        initial_norms=before,
        token_ids=np.arange(n_rows, dtype=np.int64),
        never_seen=never,
    )


def _n_rows(shapes: list[tuple[int, int]], n_tokens: int | None, name: str) -> int:
    """Return how many rows to compare."""
    (rows_a, width_a), (rows_b, width_b) = shapes
    if width_a != width_b:
        raise ValueError(f"{name!r} has width {width_a} in state_a and {width_b} in state_b: they are two models")
    least = min(rows_a, rows_b)
    if n_tokens is None:
        if rows_a != rows_b:
            raise ValueError(
                f"{name!r} has {rows_a} rows in state_a and {rows_b} in state_b: one is padded, or the vocabulary "
                f"changed. If the first tokens are the same in both, pass n_tokens=len(tokenizer), at most {least}"
            )
        if not least:
            raise ValueError(f"{name!r} has no rows")
        return least
    try:
        n_tokens = operator.index(n_tokens)
    except TypeError:
        raise TypeError(f"n_tokens must be an integer or None, got {n_tokens!r}") from None
    if not 1 <= n_tokens <= least:
        raise ValueError(f"n_tokens={n_tokens} must be between 1 and {least}, the rows that both states have")
    return n_tokens


def _check_counts(counts: ArrayLike, n_rows: int) -> NDArray[Any]:
    array = np.asarray(counts)
    if array.shape != (n_rows,) or array.dtype.kind not in "iuf":
        raise ValueError(f"counts must be numbers of shape ({n_rows},), got shape {array.shape}, dtype {array.dtype}")
    if not (array >= 0).all():
        raise ValueError("counts must be nonnegative and not NaN")
    return array


def _decayed(
    norms: NDArray[np.float64],
    before: NDArray[np.float64],
    factors: NDArray[np.float64],
    residuals: NDArray[np.float64],
    rounding: float,
) -> tuple[float, NDArray[np.bool_]]:
    """Return the common factor of the rows that only shrank, and these rows with those that stood still."""
    still = norms == 0
    along = residuals <= np.maximum(_PARALLEL * norms, rounding * before)
    parallel = ~still & along & (before > 0) & (factors > 0) & (factors < 1)
    if parallel.sum() < 2:
        return 1.0, still
    decay = float(np.median(factors[parallel]))
    return decay, still | (parallel & (np.abs(factors - decay) <= max(_PARALLEL * (1 - decay), rounding)))
