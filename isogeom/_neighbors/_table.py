"""The neighbour table: one search whose result every neighbour-based estimator accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from isogeom._neighbors._approximate import descend
from isogeom._neighbors._arrays import from_arrays
from isogeom._neighbors._precomputed import from_graph, from_matrix, to_graph
from isogeom._neighbors._rows import OTHER_ROWS, check_anchors, check_jobs, clip_neighbors, search_rows
from isogeom._neighbors._stream import NeighborStream
from isogeom._results import format_value
from isogeom._validation import check_choice, check_integer, check_rows
from isogeom._xp import Array

_POLICIES = ("drop", "raise", "keep")


@dataclass(frozen=True, eq=False)
class NeighborTable:
    """Distances to, and positions of, the nearest neighbours of rows; self excluded.

    Build it with :meth:`from_rows`, :meth:`from_batches`, :meth:`approximate`, :meth:`from_precomputed` or
    :meth:`from_arrays`, and pass it to the `fit` of any
    neighbour-based estimator in place of X.

    Parameters
    ----------
    distances : array of shape (n_queries, n_neighbors)
        Increasing along rows, in the unit of the rows and in float64 where the device has it.
    indices : array of shape (n_queries, n_neighbors)
        int64 positions of the neighbours among the rows that were passed.
    queries : ndarray of shape (n_queries,)
        Position of the row that each row of the table belongs to; on the host.
    n_samples : int
        Number of rows that were passed.
    n_reference : int
        Number of rows that can be neighbours: the distinct ones if duplicates were dropped.
    n_duplicates : int
        Number of rows that repeat an earlier row.
    metric : str
        Name of the metric.
    dtype : str
        Dtype of the rows.
    recall : float
        Share of true neighbours in the table, 0 to 1: 1 for exact searches, a measurement for approximate ones.
    X : array of shape (n_samples, n_features) or None
        The rows, by reference; None if only distances were passed.

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import NeighborTable
    >>> table = NeighborTable.from_rows([[0.0], [1.0], [3.0], [7.0]], n_neighbors=2)
    >>> table.distances
    array([[1., 3.],
           [1., 2.],
           [2., 3.],
           [4., 6.]])
    >>> table.indices[0]
    array([1, 2])
    """

    distances: Array
    indices: Array
    queries: np.ndarray
    n_samples: int
    n_reference: int
    n_duplicates: int = 0
    metric: str = "euclidean"
    dtype: str = "float64"
    recall: float = 1.0
    X: Array | None = field(default=None, repr=False)
    # What several estimators need of the same neighbours; see `shared`.
    _shared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def n_neighbors(self) -> int:
        """Number of neighbours of every row."""
        return int(self.distances.shape[1])

    @property
    def n_queries(self) -> int:
        """Number of rows that have neighbours in the table."""
        return int(self.distances.shape[0])

    def __repr__(self) -> str:
        facts = {
            "n_queries": self.n_queries,
            "n_neighbors": self.n_neighbors,
            "n_samples": self.n_samples,
            "n_duplicates": self.n_duplicates,
            "metric": self.metric,
            "recall": self.recall,
        }
        return f"NeighborTable({', '.join(f'{name}={format_value(value)}' for name, value in facts.items())})"

    def first(self, k: int) -> NeighborTable:
        """Return the table of the `k` nearest neighbours only.

        Parameters
        ----------
        k : int
            Number of neighbours, at most what the table has.

        Returns
        -------
        NeighborTable
            The same rows; arrays are views.

        Raises
        ------
        ValueError
            If the table has fewer than `k` neighbours.
        """
        k = check_integer(k, "k", low=1)
        if k > self.n_neighbors:
            raise ValueError(
                f"k={k} neighbours are needed, but the table has {self.n_neighbors}: make it with at least {k} "
                f"neighbours, as NeighborTable.from_rows(X, n_neighbors={k}) does."
            )
        table = replace(self, distances=self.distances[:, :k], indices=self.indices[:, :k])
        object.__setattr__(table, "_shared", self._shared)
        return table

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` gives, made once for this table and those of :meth:`first`.

        Parameters
        ----------
        key : hashable
            Name of the result; it must tell all that it depends on besides the rows and the neighbours shared.
        make : callable
            Computes it, without arguments.

        Returns
        -------
        object
            The result, not to be changed.
        """
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without what can be made again."""
        return {**self.__dict__, "_shared": {}}

    def positions(self) -> np.ndarray:
        """Return, for every row that was passed, its row in the table, or -1: shape (n_samples,), on the host."""
        result = np.full(self.n_samples, -1)
        result[self.queries] = np.arange(self.n_queries)
        return result

    def to_graph(self) -> sp.csr_array:
        """Return the table as scikit-learn's sparse graph of distances, of shape (n_samples, n_samples).

        Rows that repeat an earlier one and were dropped have no entries; :meth:`from_precomputed` knows them by that.
        The graph of a table with anchors cannot be read back, as other rows have no neighbours there: pass the table.
        """
        return to_graph(self.distances, self.indices, self.queries, self.n_samples)

    @classmethod
    def from_rows(
        cls,
        X: Any,
        n_neighbors: int = 100,
        *,
        metric: str = "euclidean",
        duplicates: str = "drop",
        anchors: Any = None,
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> NeighborTable:
        """Search the nearest neighbours of rows, exactly.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows of any array library; computed where they live.
        n_neighbors : int, default=100
            Number of neighbours; clipped to one less than the number of distinct rows, with a warning.
        metric : str, default='euclidean'
            'euclidean', or any metric of :func:`sklearn.metrics.pairwise_distances` for numpy rows.
        duplicates : {'drop', 'raise', 'keep'}, default='drop'
            What to do with rows that repeat an earlier row: search distinct rows only; raise; or let them be
            neighbours at distance 0.
        anchors : int or array-like of int, default=None
            Rows to find the neighbours of, among all rows: that many drawn at random, or these positions. None for all.
            The scale of the neighbourhoods stays that of all rows, at a cost of anchors times rows.
        n_jobs : int, default=None
            Number of threads; None for one, -1 for all cores. The numbers do not depend on it.
        random_state : int, RandomState instance, Generator or None, default=0
            Draws the anchors.

        Returns
        -------
        NeighborTable

        Raises
        ------
        ValueError
            If there are fewer than 3 distinct rows, if a parameter is out of range, or if rows repeat and
            `duplicates` is 'raise'.
        """
        X = check_rows(X, name="X", min_samples=3, owner="NeighborTable")
        k = check_integer(n_neighbors, "n_neighbors", low=1)
        table = search_table(
            X, k, metric=metric, duplicates=duplicates, anchors=anchors, n_jobs=n_jobs, random_state=random_state
        )
        clip_neighbors(k, table.n_neighbors)
        return table

    @classmethod
    def from_batches(
        cls,
        anchors: Any,
        batches: Iterable[Any],
        n_neighbors: int = 100,
        *,
        duplicates: str = "drop",
        n_jobs: int | None = None,
    ) -> NeighborTable:
        """Search the neighbours of some rows among rows that come in batches, exactly and in one pass.

        Parameters
        ----------
        anchors : array-like of shape (n_anchors, n_features)
            Distinct rows to find the neighbours of. The first row of the batches that equals an anchor is the anchor
            itself; an anchor that does not come by has a position after all rows.
        batches : iterable of array-like of shape (n_rows, n_features)
            Rows in the library, on the device and of the dtype of the anchors; none is kept.
        n_neighbors : int, default=100
            Number of neighbours; clipped to the number of other distinct rows, with a warning.
        duplicates : {'drop', 'raise', 'keep'}, default='drop'
            As for :meth:`from_rows`, over all batches.
        n_jobs : int, default=None
            Number of threads; None for one, -1 for all cores. The numbers do not depend on it.

        Returns
        -------
        NeighborTable
            That of :meth:`from_rows` on all rows together, without the rows. The memory is that of the table and of a
            batch; 8 bytes per row are added, to know the rows that repeat, unless `duplicates` is 'keep': then
            `n_duplicates` is 0.

        Raises
        ------
        ValueError
            If an anchor repeats, if batches differ in features or dtype, if there are fewer than 3 distinct rows, or if
            rows repeat and `duplicates` is 'raise'.
        """
        stream = NeighborStream(anchors, n_neighbors, duplicates=duplicates, n_jobs=n_jobs)
        for batch in batches:
            stream.update(batch)
        return cls(**stream.fields(), dtype=_dtype_name(stream.anchors))

    @classmethod
    def approximate(
        cls,
        X: Any,
        n_neighbors: int = 100,
        *,
        duplicates: str = "drop",
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> NeighborTable:
        """Search neighbours by nearest-neighbour descent, which misses some; how many is measured.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            numpy rows.
        n_neighbors : int, default=100
            Number of neighbours; clipped to one less than the number of distinct rows, with a warning.
        duplicates : {'drop', 'raise', 'keep'}, default='drop'
            As for :meth:`from_rows`.
        n_jobs : int, default=None
            Number of threads; None for one, -1 for all cores.
        random_state : int, RandomState instance, Generator or None, default=0
            Draws the start of the descent, and the rows whose neighbours are searched exactly.

        Returns
        -------
        NeighborTable
            Its distances are exact for the rows in it. `recall` is the share of true neighbours found, over an exact
            search of 1 % of the rows (at least 100).

        Raises
        ------
        ImportError
            If pynndescent is not installed.
        ValueError
            As :meth:`from_rows`.
        """
        X = check_rows(X, name="X", min_samples=3, owner="NeighborTable")
        found = descend(X, n_neighbors, duplicates=duplicates, n_jobs=n_jobs, random_state=random_state)
        return cls(**found, dtype=_dtype_name(X), X=X)

    @classmethod
    def from_precomputed(cls, D: Any, n_neighbors: int | None = None, *, duplicates: str = "drop") -> NeighborTable:
        """Read the table off a matrix of distances or a sparse graph of neighbours.

        Parameters
        ----------
        D : array-like or sparse matrix of shape (n_samples, n_samples)
            Distances between all rows; or a graph as :func:`sklearn.neighbors.kneighbors_graph` makes with
            ``mode="distance"``, whose stored entries are the neighbours; it need not be symmetric. Rows of the graph
            without any entry, in row and column, are taken as dropped repetitions, which :meth:`to_graph` leaves like
            that: they take no part and are counted in `n_duplicates`. The diagonal is ignored. It is not changed.
        n_neighbors : int, default=None
            Number of neighbours; None for all that every row has. Clipped to that, with a warning.
        duplicates : {'drop', 'raise', 'keep'}, default='drop'
            As for :meth:`from_rows`; rows at distance 0 are the same row.

        Returns
        -------
        NeighborTable

        Raises
        ------
        ValueError
            If the matrix is not square, not symmetric (a difference of more than 1e-6 of the larger entry, and more
            than rounding makes of it), not finite or has a negative entry; if a row of the graph is a neighbour but has
            none; or if there are fewer than 3 distinct rows.
        """
        k = None if n_neighbors is None else check_integer(n_neighbors, "n_neighbors", low=1)
        if not sp.issparse(D):
            D = check_rows(D, name="X", min_samples=3, owner="NeighborTable")
        table = read_table(D, k, duplicates=duplicates)
        if k is not None:
            clip_neighbors(k, table.n_neighbors, limit=limit_of(table))
        return table

    @classmethod
    def from_arrays(
        cls,
        distances: Any,
        indices: Any,
        *,
        n_samples: int | None = None,
        queries: Any = None,
        metric: str = "euclidean",
        recall: float = 1.0,
        X: Any = None,
    ) -> NeighborTable:
        """Wrap the result of another search: an index of approximate neighbours, a periodic tree.

        Parameters
        ----------
        distances : array-like of shape (n_queries, n_neighbors)
            Increasing along rows, self excluded.
        indices : array-like of shape (n_queries, n_neighbors)
            Positions of the neighbours.
        n_samples : int, default=None
            Number of rows that were searched; None for `n_queries`.
        queries : array-like of shape (n_queries,), default=None
            Position of each row of the table; None for the first ones in order.
        metric : str, default='euclidean'
            Name of the metric. Estimators search new rows by it, so where `X` is given it should be one of
            :meth:`from_rows`.
        recall : float, default=1.0
            Measured share of true neighbours, 0 to 1.
        X : array-like of shape (n_samples, n_features), default=None
            The rows, for estimators that need coordinates.

        Returns
        -------
        NeighborTable
            Rows at distance 0 are the same row, and stay: `n_duplicates` counts those that the lists show to repeat
            another. It is a lower bound, as lists without room for them, or of anchors only, do not show all.

        Raises
        ------
        ValueError
            If shapes differ, a distance is negative, not finite or smaller than the one before it, a position is no
            integer, out of range, repeated in its row or the row's own, a row is listed twice, or `recall` is not
            between 0 and 1.
        """
        found = from_arrays(distances, indices, n_samples, queries, recall, X)
        dtype = _dtype_name(found["distances"] if X is None else found["X"])
        return cls(**found, metric=metric, dtype=dtype)


def search_table(
    X: Array, k: int, *, metric: str, duplicates: str, anchors: Any, n_jobs: int | None, random_state: Any
) -> NeighborTable:
    """Return the table of `NeighborTable.from_rows`, of `k` neighbours or, without a warning, as many as there are."""
    check_choice(duplicates, "duplicates", _POLICIES)
    check_jobs(n_jobs)
    chosen = check_anchors(anchors, int(X.shape[0]), random_state)
    found = search_rows(X, k, metric=metric, duplicates=duplicates, anchors=chosen, n_jobs=n_jobs)
    return NeighborTable(**found, metric=metric, dtype=_dtype_name(X), X=X)


def read_table(D: Any, k: int | None, *, duplicates: str) -> NeighborTable:
    """Return the table of `NeighborTable.from_precomputed`, of `k` neighbours or, without a warning, fewer."""
    check_choice(duplicates, "duplicates", _POLICIES)
    found = (from_graph if sp.issparse(D) else from_matrix)(D, k, duplicates=duplicates)
    return NeighborTable(**found, metric="precomputed", dtype=str(D.dtype).rpartition(".")[2])


def limit_of(table: NeighborTable) -> str:
    """Return what limits the number of neighbours of a table, in words."""
    if table.n_neighbors >= table.n_reference - 1:
        return OTHER_ROWS
    return f"the number of neighbours in the {'graph' if table.metric == 'precomputed' else 'table'}"


def _dtype_name(x: Array) -> str:
    return str(x.dtype).rpartition(".")[2]
