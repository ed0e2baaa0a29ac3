"""Base of the dimension estimators: what they fit on, local dimensions, and the attributes they share; no formulas."""

from __future__ import annotations

import inspect
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.utils.validation import check_is_fitted

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._neighbors._anchors import part_of
from isogeom._neighbors._own import leave_out, same_row
from isogeom._neighbors._precomputed import query_graph, query_matrix, without_diagonal
from isogeom._neighbors._rows import (
    OTHER_ROWS,
    check_anchors,
    check_jobs,
    clip_neighbors,
    nearest,
    report_duplicates,
    rows_at,
)
from isogeom._neighbors._table import limit_of, read_table, search_table
from isogeom._validation import Transformer, check_integer, check_real, check_same_library
from isogeom._xp import Array
from isogeom.dimension._doubts import report_doubts

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


class DimensionEstimator(Transformer, ABC):
    """Base of estimators of intrinsic dimension.

    A subclass defines `_estimate`, which turns a table into an :class:`Estimate`, and `_local`, which turns the
    neighbourhoods of some rows into local dimensions; `_n_needed` says how many neighbours `_estimate` needs.
    """

    # Whether `_estimate` and `_local` need coordinates, which a table made from distances lacks.
    _needs_rows = False
    # Whether `_estimate` needs the distances between all rows of a precomputed matrix, not only the nearest.
    _needs_all_distances = False
    # Rows that can be neighbours, where `anchors` chose a part of a table of distances.
    _distinct: np.ndarray | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.pairwise = self.metric == "precomputed"
        return tags

    def fit(self, X: Any, y: Any = None) -> Any:  # noqa: ARG002
        """Estimate the dimension.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features) or NeighborTable
            Rows; or a table of their neighbours, which spares the search: its metric and its policy for duplicates
            take the place of those of the estimator, `n_jobs` has nothing to do, and `anchors` chooses among the rows
            that it lists. With ``metric="precomputed"``, the distances between all rows, symmetric, or a sparse graph
            of neighbours.
        y : None
            Ignored.

        Returns
        -------
        estimator
            The fitted estimator.

        Raises
        ------
        ValueError
            If there are fewer than 3 distinct rows, a parameter is out of range, a table has fewer neighbours than
            are needed, or rows repeat and `duplicates` is 'raise'.
        """
        self._check_parameters()
        self._distinct = None
        table = self._read(X)
        self._check_length(table, given=isinstance(X, NeighborTable))
        self._search_metric = table.metric if isinstance(X, NeighborTable) and table.X is not None else self.metric
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
        report_doubts(type(self).__name__, estimate, table)
        return self

    def transform(self, X: Any) -> Array:
        """Return the local dimension at each row, from its nearest reference rows.

        Parameters
        ----------
        X : array-like of shape (n_queries, n_features) or NeighborTable
            Rows, in the library and on the device of those of `fit`: a row that coincides with one of those is
            treated as that row; rows of another precision are compared in the lower one. A table gives the rows that
            it lists: without the rows that repeat an earlier one, if those were dropped, and those that are no anchors;
            one with fewer neighbours than `n_neighbors_local` gives local dimensions from those, with a warning.

        Returns
        -------
        array of shape (n_queries, 1)
            From `n_neighbors_local` neighbours, or, with a warning unless that is the default, as many as there are.
            Finite; where the neighbourhood gives no value (all its distances are tied), `dimension_`. A row far from
            all others has nearly equal distances to them, so its value is huge, about its distance over the width of
            the cloud: clip such values, or take their logarithm, before a model that is sensitive to scale.

        Raises
        ------
        ValueError
            If the number of features differs from that of `fit`, or a table has no neighbours.
        """
        check_is_fitted(self, "dimension_")
        k = check_integer(self.n_neighbors_local, "n_neighbors_local", low=2)
        if isinstance(X, NeighborTable):
            self._check_same_rows(X)
            k = self._clipped_local(k, X.n_neighbors, X.n_reference - 1, limit_of(X))
            found, like = X.first(k), X.distances
            queries = None if X.X is None else rows_at(X.X, X.queries)
            return self._finite(self._local(found.distances, found.indices, queries), like)
        queries, like = self._check_queries(X)
        parts = []
        for block in _blocks(queries):
            distances, indices = self._neighborhoods(block, k)
            parts.append(self._local(distances, indices, None if self._search_metric == "precomputed" else block))
        pool = self._pool()
        most = (self.table_.n_samples if pool is None else len(pool)) - 1
        available = int(distances.shape[1]) if sp.issparse(queries) else most
        self._clipped_local(k, available, most, "the number of neighbours in the graph")
        return self._finite(_xp.array_namespace(parts[0]).concat(parts, axis=0), like)

    def _clipped_local(self, k: int, available: int, most: int, limit: str) -> int:
        """Return the number of neighbours of `transform`; the warning is for those that a longer table would have."""
        if available == 0:
            raise ValueError("X is a table without neighbours: pass the rows, or NeighborTable.from_rows(X).")
        if available < min(k, most):
            return clip_neighbors(k, available, f"{type(self).__name__}.n_neighbors_local", limit)
        every = most >= self.table_.n_reference - 1
        self._warn_clipped("n_neighbors_local", most, OTHER_ROWS if every else "the number of other rows with a value")
        return min(k, most)

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
            check_level(self.confidence_level)
        if hasattr(self, "n_jobs"):
            check_jobs(self.n_jobs)

    @abstractmethod
    def _n_needed(self) -> int:
        """Number of neighbours that `_estimate` needs; 0 if it needs none."""

    def _n_searched(self) -> int:
        """Number of neighbours that `fit` searches: those needed, and some for the standard error."""
        return self._n_needed()

    @abstractmethod
    def _estimate(self, table: NeighborTable) -> Estimate:
        """Return what the estimator makes of a table."""

    @abstractmethod
    def _local(self, distances: Array, indices: Array, queries: Array | None) -> Array:
        """Return local dimensions, shape (m,); NaN where the neighbourhood gives none."""

    def _read(self, X: Any) -> NeighborTable:
        """Return the table of `X`."""
        if isinstance(X, NeighborTable):
            self._forget_features()
            if X.X is not None:
                self.n_features_in_ = int(X.X.shape[1])
            report_duplicates(X.n_duplicates, X.n_samples, getattr(self, "duplicates", "drop"))
            return self._of_anchors(X)
        if self.metric == "precomputed":
            k = None
            if sp.issparse(X):
                self._forget_features()
                self.n_features_in_ = int(X.shape[1])
            else:
                X = self._check_X(X, reset=True, min_samples=3)
                k = None if self._needs_all_distances else max(self._n_searched(), 1)
            return self._of_anchors(read_table(X, k, duplicates=self.duplicates))
        return self._search(self._check_X(X, reset=True, min_samples=3))

    def _search(self, X: Array) -> NeighborTable:
        """Return the table of rows: of as many neighbours as there are, up to those searched."""
        return search_table(
            X,
            max(self._n_searched(), 1),
            metric=self.metric,
            duplicates=self.duplicates,
            anchors=getattr(self, "anchors", None),
            n_jobs=getattr(self, "n_jobs", None),
            random_state=getattr(self, "random_state", 0),
        )

    def _forget_features(self) -> None:
        """Drop what an earlier `fit` knew of the features: a table and a graph have no names."""
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(self, name):
                delattr(self, name)

    def _of_anchors(self, table: NeighborTable) -> NeighborTable:
        """Return the part of a table that `anchors` chooses, of the rows that it lists."""
        chosen = check_anchors(getattr(self, "anchors", None), table.n_samples, getattr(self, "random_state", 0))
        if chosen is None:
            return table
        # Distances alone do not tell later which rows can be neighbours.
        self._distinct = table.queries if table.n_queries == table.n_reference else None
        return part_of(table, chosen)

    def _check_length(self, table: NeighborTable, given: bool) -> None:
        """Warn if there are fewer neighbours than needed; raise if a longer table could be made (`given`)."""
        needed, available = self._n_needed(), table.n_neighbors
        # A table without columns is that of an estimator that searches by itself.
        if available >= needed or (available == 0 and not given):
            return
        owner = type(self).__name__
        names = ("n_neighbors", "n_neighbors_max")
        name = next((name for name in names if isinstance(getattr(self, name, None), numbers.Integral)), None)
        if given and available < table.n_reference - 1:
            raise ValueError(
                f"{owner if name is None else f'{name}={getattr(self, name)} of {owner}'} needs a table of {needed} "
                f"neighbours, but this one has {available}: make it with n_neighbors={needed} or more"
                f"{'.' if name is None else f', or lower {name}.'}"
            )
        if available < 2 <= needed:
            raise ValueError(f"Every row has {available} neighbour, {limit_of(table)}: {owner} needs 2 at least.")
        # Some estimators need a neighbour more than the parameter says.
        extra = 0 if name is None else needed - int(getattr(self, name))
        less = f"{extra} less than " if extra else ""
        clip_neighbors(needed - extra, available - extra, f"{owner}.{name or 'n_neighbors'}", less + limit_of(table))

    def _warn_clipped(self, name: str, available: int, limit: str) -> None:
        """Warn if a number of neighbours that was chosen is above those there are; a default says at most this many."""
        value = getattr(self, name)
        if value != inspect.signature(type(self)).parameters[name].default:
            clip_neighbors(int(value), available, f"{type(self).__name__}.{name}", limit)

    def _check_queries(self, X: Any) -> tuple[Any, Array]:
        """Return the validated rows of `transform`, and an array with their number, library and dtype."""
        table = self.table_
        if self._search_metric == "precomputed":
            if not sp.issparse(X):
                X = self._check_X(X, reset=False)
                self._check_library(X, table.distances)
            if X.shape[1] != table.n_samples:
                raise ValueError(
                    f"X has {X.shape[1]} columns, but distances to the {table.n_samples} rows of fit are expected."
                )
            if sp.issparse(X):
                X = sp.csr_array(X, dtype=np.float64)
                return X, np.zeros(X.shape[0])
            return without_diagonal(X), X
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
        if self._distinct is not None:
            return self._distinct
        # Anchors: the table does not list the rows that were searched.
        from isogeom._neighbors._duplicates import first_occurrences

        return first_occurrences(table.X)

    def _neighborhoods(self, block: Any, k: int) -> tuple[Array, Array]:
        """Return distances to and positions of the neighbours of new rows, a row that coincides with one left out."""
        pool = self._pool()
        n = self.table_.n_samples if pool is None else len(pool)
        k = min(k, n - 1)
        if self._search_metric == "precomputed":
            query = query_graph if sp.issparse(block) else query_matrix
            distances, indices = query(block, k + 1, pool)
        else:
            distances, indices = nearest(
                self.table_.X,
                block,
                k + 1,
                within=pool,
                metric=self._search_metric,
                n_jobs=getattr(self, "n_jobs", None),
            )
        fitted: Any = self.table_.X
        metric = self._search_metric
        if metric == "precomputed" or (metric == "euclidean" and block.dtype == fitted.dtype):
            # The row itself is at distance 0: the first one.
            first = _xp.array_namespace(distances).astype(distances[:, :1] == 0, indices.dtype)
            own = (1 - first) * int(distances.shape[1])
        else:
            # In another precision, or a metric with rounding errors, a row is near itself, and others may be nearer.
            own = same_row(fitted, block, indices)
        return leave_out(distances, indices, own, k)

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


def check_level(value: Any) -> float:
    """Return a confidence level, or raise ValueError unless it lies between 0 and 1."""
    level = check_real(value, "confidence_level", low=0, high=1)
    if level in (0.0, 1.0):
        raise ValueError(f"confidence_level={value!r} must lie between 0 and 1, both excluded.")
    return level


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
