"""Dimensions of many layers, on the same rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import clone

from isogeom import _xp
from isogeom._neighbors import NeighborTable
from isogeom._neighbors._rows import check_anchors, check_jobs, clip_neighbors
from isogeom._neighbors._table import limit_of, search_table
from isogeom._results import Result, _require
from isogeom._validation import check_integer, check_rows
from isogeom.dimension._abide import ABIDE, neighborhood_sizes, radius_gaps
from isogeom.dimension._base import DimensionEstimator
from isogeom.dimension._graph_distance import GraphDistanceDimension
from isogeom.dimension._local_pca import LocalPCADimension
from isogeom.dimension._mle import MLE
from isogeom.dimension._twonn import TwoNN

# Columns of the frame.
_COLUMNS = ("layer", "estimator", "dimension", "lo", "hi", "n", "k", "radius", "seconds")


@dataclass(frozen=True, eq=False)
class LayerDimensions(Result):
    """Intrinsic dimensions by layer and estimator; see :func:`layer_dimensions`.

    Attributes
    ----------
    layer, estimator : ndarray of str
        Which layer, and which estimator (its printed form), one entry per estimate.
    dimension, lo, hi : ndarray of float
        Estimate and ends of its confidence interval; NaN ends where an estimator gives none.
    n : ndarray of int
        Rows that entered.
    k : ndarray of float
        Rank of the farthest neighbour that the estimate looks at, the mean over rows for :class:`ABIDE`; NaN for
        estimators without neighbours.
    radius : ndarray of float
        Mean distance to that neighbour, in the unit of the layer: the scale of the estimate; NaN without neighbours.
    seconds : ndarray of float
        Time of the estimate; that of the shared search is in `search_seconds`.
    search_seconds : ndarray of float
        Time of the search of the layer, which its estimates share; not a column of the frame.
    """

    layer: np.ndarray
    estimator: np.ndarray
    dimension: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    n: np.ndarray
    k: np.ndarray
    radius: np.ndarray
    seconds: np.ndarray
    search_seconds: np.ndarray

    def to_frame(self) -> Any:
        """Return one row per layer and estimator as a :class:`pandas.DataFrame`.

        Returns
        -------
        pandas.DataFrame
            Columns 'layer', 'estimator', 'dimension', 'lo', 'hi', 'n', 'k', 'radius', 'seconds'.

        Raises
        ------
        ImportError
            If pandas is not installed.
        """
        return _require("pandas", "to_frame()", "plot").DataFrame({name: getattr(self, name) for name in _COLUMNS})

    def __str__(self) -> str:
        width = max([len(str(name)) for name in self.layer] + [5])
        lines = [f"{'layer':<{width}}  {'dimension':>9}  {'interval':^19}  estimator"]
        for i in range(len(self.layer)):
            ends = "none" if np.isnan(self.lo[i]) else f"{self.lo[i]:.4g} to {self.hi[i]:.4g}"
            lines.append(f"{self.layer[i]:<{width}}  {self.dimension[i]:>9.4g}  {ends:^19}  {self.estimator[i]}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{self}</pre>"


def layer_dimensions(
    layers: Mapping[str, Any],
    *,
    estimators: Sequence[DimensionEstimator] | None = None,
    n_neighbors: int | None = None,
    anchors: Any = None,
    metric: str = "euclidean",
    duplicates: str = "drop",
    n_jobs: int | None = None,
    random_state: Any = 0,
) -> LayerDimensions:
    """Estimate the dimension of several layers with several estimators, one search per layer.

    Parameters
    ----------
    layers : mapping of str to array-like of shape (n_samples, n_features)
        The rows of each layer, of any array library. If all have as many rows, the anchors are the same rows.
    estimators : sequence of dimension estimators, default=None
        They are cloned and fitted on the table of the layer. None for ``[TwoNN(method="mle"), MLE()]``.
    n_neighbors : int, default=None
        Size of the shared tables, at least what every estimator needs; None for the most that one asks for. Clipped,
        with a warning, to one less than the number of distinct rows of the layer.
    anchors : int or array-like of int, default=None
        Rows to use, among the neighbours of all rows: that many drawn at random, or these positions. `ABIDE`,
        `GraphDistanceDimension` and `KNNGraphDimension` need the neighbours of all rows and raise; `MSTDimension`,
        `PCADimension` and `FisherS`, which look for no neighbours, use all rows whatever the anchors are.
    metric : str, default='euclidean'
        'euclidean', or for numpy rows any metric of :func:`sklearn.metrics.pairwise_distances`.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row.
    n_jobs : int, default=None
        Number of threads; None for one, -1 for all cores.
    random_state : int, RandomState instance, Generator or None, default=0
        Draws the anchors.

    Returns
    -------
    LayerDimensions
        One estimate per layer and estimator, in the order given.

    Raises
    ------
    TypeError
        If `layers` is no mapping of names to rows, or an estimator is none of this package's.
    ValueError
        If `layers` or `estimators` is empty, `n_neighbors` is too small for an estimator, an estimator
        needs all rows and `anchors` is given, or a layer cannot be estimated; the message names it.

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import layer_dimensions
    >>> rng = np.random.default_rng(0)
    >>> Z = rng.random((1000, 3))
    >>> layers = {f"block {i}": np.tanh(i * Z @ rng.standard_normal((3, 20))) for i in (1, 2)}
    >>> table = layer_dimensions(layers, anchors=500)
    >>> [str(name) for name in table.layer]
    ['block 1', 'block 1', 'block 2', 'block 2']
    >>> table.k  # each estimator has its own scale, with its own radius
    array([ 2., 20.,  2., 20.])
    """
    if not isinstance(layers, Mapping):
        raise TypeError(f"layers must map names to rows, got {type(layers).__name__}: pass {{'layer 0': X}}.")
    if not layers:
        raise ValueError("layers is empty: pass at least one name and its rows.")
    models = _checked_models(estimators)
    check_jobs(n_jobs)
    wanted = _table_size(models, n_neighbors)
    rows: list[tuple[Any, ...]] = []
    chosen: dict[int, Any] = {}
    for name, X in layers.items():
        if isinstance(X, NeighborTable):
            raise TypeError(f"Layer {name!r} is a NeighborTable: pass its rows, or fit the estimators on the table.")
        try:
            X = check_rows(X, name="X", min_samples=3, owner="layer_dimensions")
            n = int(X.shape[0])
            if n not in chosen:
                chosen[n] = check_anchors(anchors, n, random_state)
            begun = time.perf_counter()
            table = search_table(
                X,
                wanted,
                metric=metric,
                duplicates=duplicates,
                anchors=chosen[n],
                n_jobs=n_jobs,
                random_state=random_state,
            )
            searched = time.perf_counter() - begun
            if n_neighbors is not None:
                limit = f"{limit_of(table)} of layer {name!r}"
                clip_neighbors(wanted, table.n_neighbors, "layer_dimensions.n_neighbors", limit)
            rows += _layer(str(name), table, models, searched)
        except ValueError as error:
            raise ValueError(f"Layer {name!r}: {error}") from error
    return LayerDimensions(*(np.array(column) for column in zip(*rows, strict=True)))


def _checked_models(estimators: Any) -> list[DimensionEstimator]:
    """Return the estimators as a list, with valid parameters."""
    if estimators is None:
        return [TwoNN(method="mle"), MLE()]
    if isinstance(estimators, DimensionEstimator):
        raise TypeError(f"estimators must be a sequence, got one {type(estimators).__name__}: pass [{estimators!r}].")
    models = list(estimators)
    if not models:
        raise ValueError("estimators is empty: pass at least one, or None for TwoNN and MLE.")
    for model in models:
        if not isinstance(model, DimensionEstimator):
            raise TypeError(f"estimators holds a {type(model).__name__}; pass estimators of isogeom.dimension.")
        model._check_parameters()
    return models


def _table_size(models: list[DimensionEstimator], n_neighbors: Any) -> int:
    """Return the number of neighbours to search."""
    if n_neighbors is None:
        return max(2, *(model._n_searched() for model in models))
    k = check_integer(n_neighbors, "n_neighbors", low=2)
    needy = max(models, key=lambda model: model._n_needed())
    needed = needy._n_needed()
    if needed > k:
        raise ValueError(
            f"n_neighbors={k} is too small for {type(needy).__name__}, which needs {needed} neighbours: pass at least "
            f"{needed}, or None for the most that an estimator asks for."
        )
    return k


def _layer(name: str, table: NeighborTable, models: list[Any], searched: float) -> list[tuple[Any, ...]]:
    rows = []
    for model in models:
        begun = time.perf_counter()
        fitted = clone(model).fit(table)
        spent = time.perf_counter() - begun
        lo, hi = fitted.dimension_interval_ or (np.nan, np.nan)
        label = " ".join(repr(model).split())
        found = (fitted.dimension_, lo, hi, fitted.n_samples_used_, *_scale(fitted, table))
        rows.append((name, label, *found, spent, searched))
    return rows


def _scale(fitted: Any, table: NeighborTable) -> tuple[float, float]:
    """Return the rank of the farthest neighbour that an estimate looks at, and the mean distance to it, or NaN."""
    if isinstance(fitted, ABIDE):
        sizes = _adaptive_sizes(fitted, table)
        radii = _xp.to_numpy(table.distances)[np.arange(len(sizes)), sizes - 1]
        return float(np.mean(sizes)), float(np.mean(radii, dtype=np.float64))
    if isinstance(fitted, GraphDistanceDimension):
        wanted = fitted.n_neighbors_ or 0
    else:
        wanted = fitted.n_neighbors_local if isinstance(fitted, LocalPCADimension) else fitted._n_needed()
    if not wanted:
        return np.nan, np.nan
    k = min(int(wanted), table.n_neighbors)
    return float(k), float(np.mean(_xp.to_numpy(table.distances[:, k - 1]), dtype=np.float64))


def _adaptive_sizes(fitted: ABIDE, table: NeighborTable) -> np.ndarray:
    """Return the numbers of neighbours from which an adaptive estimate was made on this table, one a row."""
    table = table.first(min(int(fitted.max_neighbors), table.n_neighbors))
    # The last neighbourhoods are those of the last but one dimension.
    return neighborhood_sizes(
        radius_gaps(table), fitted.dimension_path_[-2], float(fitted.significance), table.n_neighbors
    )
