"""Base of the dimension estimators: what they fit on, local dimensions, and the attributes they share; no formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.utils.validation import check_is_fitted

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._neighbors._rows import nearest
from isogeom._validation import Transformer, check_integer, check_real, check_same_library
from isogeom._xp import Array

# Rows whose local dimensions are computed at a time.
_BLOCK = 1024


@dataclass(frozen=True)
class Estimate:
    """What an estimator makes of a table or of rows.

    Attributes
    ----------
    dimension : float
        The estimate.
    std : float or None
        Standard error, corrected for dependence; None where the theory has none.
    interval : tuple of float or None
        Confidence interval, lower and upper end.
    n_used, n_dropped : int
        Rows that entered, and rows left out because a distance of theirs is 0 or tied.
    attributes : dict
        Further fitted attributes, by name.
    """

    dimension: float
    std: float | None
    interval: tuple[float, float] | None
    n_used: int
    n_dropped: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)


class DimensionEstimator(Transformer):
    """Base of estimators of intrinsic dimension.

    A subclass defines `_estimate`, which turns a table into an :class:`Estimate`, and `_local`, which turns the
    neighbourhoods of some rows into local dimensions; `_n_needed` says how many neighbours `_estimate` needs.
    """

    # Whether `_estimate` and `_local` need coordinates, which a table made from distances lacks.
    _needs_rows = False
    # Whether `_estimate` needs the distances between all rows of a precomputed matrix, not only the nearest.
    _needs_all_distances = False

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.pairwise = self.metric == "precomputed"
        return tags

    def fit(self, X: Any, y: Any = None) -> Any:  # noqa: ARG002
        """Estimate the dimension.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features) or NeighborTable
            Rows; or a table of their neighbours, which spares the search. With ``metric="precomputed"``, the distances
            between all rows, or a sparse graph of neighbours.
        y : None
            Ignored.

        Returns
        -------
        estimator
            The fitted estimator.

        Raises
        ------
        ValueError
            If there are fewer than 3 distinct rows or a parameter is out of range.
        """
        self._check_parameters()
        table = self._read(X)
        if self._needs_rows and table.X is None:
            raise ValueError(
                f"{type(self).__name__} needs the rows, not only their distances: pass X, or a table made with "
                "NeighborTable.from_rows(X)."
            )
        estimate = self._estimate(table)
        self.table_ = table
        self.dimension_ = float(estimate.dimension)
        self.dimension_std_ = estimate.std
        self.dimension_interval_ = estimate.interval
        self.n_samples_used_, self.n_samples_dropped_ = estimate.n_used, estimate.n_dropped
        self.n_duplicates_ = table.n_duplicates
        for name, value in estimate.attributes.items():
            setattr(self, name, value)
        return self

    def transform(self, X: Any) -> Array:
        """Return the local dimension at each row, from its nearest reference rows.

        Parameters
        ----------
        X : array-like of shape (n_queries, n_features) or NeighborTable
            Rows, in the library and on the device of those of `fit`: a row that coincides with one of those is
            treated as that row. A table gives the rows it was made for.

        Returns
        -------
        array of shape (n_queries, 1)
            Finite; where the neighbourhood gives no value (all its distances are tied), `dimension_`.

        Raises
        ------
        ValueError
            If the number of features differs from that of `fit`.
        """
        check_is_fitted(self, "dimension_")
        k = check_integer(self.n_neighbors_local, "n_neighbors_local", low=2)
        if isinstance(X, NeighborTable):
            self._check_same_rows(X)
            k = min(k, X.n_neighbors)
            found, like = X.first(k), X.distances
            queries = None if X.X is None else _rows_at(X.X, X.queries)
            return self._finite(self._local(found.distances, found.indices, queries), like)
        queries, like = self._check_queries(X)
        parts = []
        for block in _blocks(queries):
            distances, indices = self._neighborhoods(block, k)
            parts.append(self._local(distances, indices, None if self.metric == "precomputed" else block))
        return self._finite(_xp.array_namespace(parts[0]).concat(parts, axis=0), like)

    def _check_same_rows(self, table: NeighborTable) -> None:
        """Raise unless the neighbours in a table are those of `fit`: their positions would mean other rows."""
        own = self.table_
        if table.n_samples != own.n_samples or len({_shape(table), _shape(own)} - {None}) > 1:
            raise ValueError(
                f"X is a table of {table.n_samples} other rows than the {own.n_samples} of fit: pass the rows instead."
            )

    def _check_parameters(self) -> None:
        """Validate the parameters of all estimators; subclasses add theirs."""
        check_integer(self.n_neighbors_local, "n_neighbors_local", low=2)
        if hasattr(self, "confidence_level"):
            level = check_real(self.confidence_level, "confidence_level", low=0, high=1)
            if level in (0.0, 1.0):
                raise ValueError(f"confidence_level={level!r} must lie between 0 and 1, both excluded.")

    def _n_needed(self) -> int:
        """Number of neighbours that `_estimate` needs; 0 if it needs none."""
        raise NotImplementedError

    def _n_searched(self) -> int:
        """Number of neighbours that `fit` searches: those needed, and some for the standard error."""
        return self._n_needed()

    def _estimate(self, table: NeighborTable) -> Estimate:
        raise NotImplementedError

    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:
        """Return local dimensions, shape (m,); NaN where the neighbourhood gives none."""
        raise NotImplementedError

    def _read(self, X: Any) -> NeighborTable:
        """Return the table of `X`."""
        if isinstance(X, NeighborTable):
            if X.X is not None:
                self.n_features_in_ = int(X.X.shape[1])
            elif hasattr(self, "n_features_in_"):
                del self.n_features_in_
            X.first(min(self._n_needed(), X.n_reference - 1))
            return X
        if self.metric == "precomputed":
            k = None
            if not sp.issparse(X):
                X = self._check_X(X, reset=True, min_samples=3)
                k = None if self._needs_all_distances else self._clipped(X, self._n_searched())
            self.n_features_in_ = int(X.shape[1])
            return NeighborTable.from_precomputed(X, k, duplicates=self.duplicates)
        X = self._check_X(X, reset=True, min_samples=3)
        return NeighborTable.from_rows(
            X,
            self._clipped(X, self._n_searched()),
            metric=self.metric,
            duplicates=self.duplicates,
            anchors=getattr(self, "anchors", None),
            n_jobs=getattr(self, "n_jobs", None),
            random_state=getattr(self, "random_state", 0),
        )

    def _clipped(self, X: Array, searched: int) -> int:
        """Return the number of neighbours to search: the warning is for those needed, not for those that help."""
        return max(min(searched, int(X.shape[0]) - 1), self._n_needed(), 1)

    def _check_queries(self, X: Any) -> tuple[Any, Array]:
        """Return the validated rows of `transform`, and an array with their number, library and dtype."""
        table = self.table_
        if self.metric == "precomputed":
            if sp.issparse(X):
                X = sp.csr_array(X, dtype=np.float64)
                return X, np.zeros(X.shape[0])
            X = self._check_X(X, reset=False)
            self._check_library(X, table.distances)
            return X, X
        if table.X is None:
            raise ValueError(
                f"This {type(self).__name__} was fitted on a table without rows: pass a NeighborTable to transform, or "
                "fit on rows."
            )
        X = self._check_X(X, reset=False)
        self._check_library(X, table.X)
        return X, X

    def _check_library(self, X: Array, fitted: Array) -> None:
        check_same_library(X, fitted, owner=type(self).__name__, method="transform")

    def _pool(self) -> np.ndarray | None:
        """Return the positions of the reference rows that neighbourhoods consist of; None for all."""
        table = self.table_
        return None if table.n_reference == table.n_samples else self._reference

    @property
    def _reference(self) -> np.ndarray:
        table = self.table_
        if table.n_queries == table.n_reference:
            return table.queries
        # Anchors: the table does not list the rows that were searched.
        from isogeom._neighbors._duplicates import first_occurrences

        return first_occurrences(table.X)

    def _neighborhoods(self, block: Any, k: int) -> tuple[Array, Array]:
        """Return distances to and positions of the neighbours of new rows, a row that coincides with one left out."""
        pool = self._pool()
        n = self.table_.n_samples if pool is None else len(pool)
        k = min(k, n - 1)
        if self.metric == "precomputed":
            from isogeom._neighbors._precomputed import query_graph, query_matrix

            query = query_graph if sp.issparse(block) else query_matrix
            distances, indices = query(block, k + 1, pool)
        else:
            distances, indices = nearest(
                self.table_.X, block, k + 1, within=pool, metric=self.metric, n_jobs=getattr(self, "n_jobs", None)
            )
        xp = _xp.array_namespace(distances)
        width = int(distances.shape[1]) - 1
        # The first column is the row itself where it is at distance 0; else the last one is not needed.
        own = distances[:, :1] == 0
        return (
            xp.where(own, distances[:, 1:], distances[:, :width]),
            xp.where(own, indices[:, 1:], indices[:, :width]),
        )

    def _query_values(self, X: Any, k: int, value: Callable[[Array], Array]) -> np.ndarray:
        """Return a statistic of the distances of new rows to their `k` nearest reference rows, where it is finite."""
        check_is_fitted(self, "dimension_")
        queries, _ = self._check_queries(X)
        found = [self._neighborhoods(block, k)[0] for block in _blocks(queries)]
        values = np.concatenate([_xp.to_numpy(value(distances[:, :k])) for distances in found])
        good = np.isfinite(values) & (values > 0)
        if not good.any():
            raise ValueError("X has no row with neighbours at different positive distances.")
        return values[good].astype(np.float64)

    def _finite(self, values: Array, like: Array) -> Array:
        """Return the column of local dimensions in the dtype of the rows."""
        xp = _xp.array_namespace(values)
        filled = xp.where(xp.isfinite(values), values, xp.full_like(values, self.dimension_))
        return xp.astype(xp.expand_dims(filled, axis=1), like.dtype)

    @property
    def _n_features_out(self) -> int:
        return 1


def _blocks(queries: Any) -> Iterator[Any]:
    """Yield blocks of rows; a sparse graph, which cannot be cut into views, stays whole."""
    if sp.issparse(queries):
        yield queries
    else:
        yield from _xp.row_blocks(queries, _BLOCK)


def _shape(table: NeighborTable) -> tuple[int, ...] | None:
    return None if table.X is None else tuple(table.X.shape)


def _rows_at(X: Array, positions: np.ndarray) -> Array:
    xp = _xp.array_namespace(X)
    return xp.take(X, _xp.asarray_like(positions, X, dtype=xp.int64), axis=0)


def log_ratios(distances: Array, near: int, far: int) -> tuple[Array, np.ndarray]:
    """Return ``ln(r_far / r_near)`` of the rows where it is positive and finite, and which rows these are.

    Rows left out have a neighbour at distance 0 (a duplicate that was kept) or two equal distances.
    """
    xp = _xp.array_namespace(distances)
    low, high = distances[:, near - 1], distances[:, far - 1]
    good = (low > 0) & (high > low)
    used = np.flatnonzero(_xp.to_numpy(good))
    places = _xp.asarray_like(used, distances, dtype=xp.int64)
    return xp.log(xp.take(high, places, axis=0) / xp.take(low, places, axis=0)), used
