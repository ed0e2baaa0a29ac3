"""The dimension as a function of scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from isogeom import _random, _xp
from isogeom._neighbors import NeighborTable
from isogeom._neighbors._rows import clip_neighbors, nearest
from isogeom._neighbors._table import limit_of, search_table
from isogeom._results import Result, _require
from isogeom._validation import check_choice, check_integer, check_rows
from isogeom.dimension._base import check_level, log_ratios
from isogeom.dimension._binomial import binomial_estimate, binomial_inflation, settle_ratio
from isogeom.dimension._dependence import Inflation, normal_interval
from isogeom.dimension._gride import gride_scales, ratio_estimate

# Subsets with fewer rows than this say little, and their mean is biased.
_FEWEST_ROWS = 50
# Neighbours looked through for two in the same part, per part: one row in 10^4 of large parts has not both among them.
_WIDTH = 12
_METHODS = ("gride", "twonn", "binomial")


@dataclass(frozen=True, eq=False)
class IDProfile(Result):
    """Intrinsic dimension at a series of scales, by several estimators; see :func:`id_profile`.

    Attributes
    ----------
    estimator : ndarray of str
        'gride', 'twonn' (on subsets of rows) or 'binomial', one entry per estimate.
    rank : ndarray of int
        Rank, among all rows, of the farthest neighbour that the estimate looks at (for 'twonn': the mean such rank).
    radius : ndarray of float
        Mean distance to that neighbour, in the unit of the rows.
    dimension : ndarray of float
        The estimates.
    std : ndarray of float
        Their standard errors, corrected for dependence.
    lower, upper : ndarray of float
        Ends of the confidence intervals.
    n_samples_used : ndarray of int
        Rows that entered.
    n_samples : int
        Number of rows.
    n_duplicates : int
        Number of rows that repeat an earlier row.
    confidence_level : float
        Of the intervals.
    """

    estimator: np.ndarray
    rank: np.ndarray
    radius: np.ndarray
    dimension: np.ndarray
    std: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    n_samples_used: np.ndarray
    n_samples: int
    n_duplicates: int
    confidence_level: float

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns of the table, by name."""
        names = ("estimator", "rank", "radius", "dimension", "std", "lower", "upper", "n_samples_used")
        return {name: getattr(self, name) for name in names}

    def to_frame(self) -> Any:
        """Return one row per estimator and scale as a :class:`pandas.DataFrame`.

        Raises
        ------
        ImportError
            If pandas is not installed.
        """
        return _require("pandas", "to_frame()", "plot").DataFrame(self.columns())

    def select(self, estimator: str) -> dict[str, np.ndarray]:
        """Return the columns of one estimator.

        Parameters
        ----------
        estimator : {'gride', 'twonn', 'binomial'}
            One that the profile has.

        Returns
        -------
        dict of str to ndarray
            Columns of equal length, by scale.

        Raises
        ------
        ValueError
            If the profile has no such estimator.
        """
        check_choice(estimator, "estimator", tuple(dict.fromkeys(str(name) for name in self.estimator)))
        chosen = self.estimator == estimator
        return {name: column[chosen] for name, column in self.columns().items()}

    def __str__(self) -> str:
        lines = [f"IDProfile of {self.n_samples} rows ({self.n_duplicates} duplicates)"]
        lines.append(f"  {'estimator':<10}{'rank':>8}{'radius':>12}{'dimension':>11}{'std':>9}{'n':>9}")
        lines += [
            f"  {self.estimator[i]:<10}{self.rank[i]:>8.4g}{self.radius[i]:>12.4g}{self.dimension[i]:>11.4g}"
            f"{self.std[i]:>9.2g}{self.n_samples_used[i]:>9}"
            for i in range(len(self.rank))
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{self}</pre>"


def id_profile(
    X: Any,
    *,
    estimators: tuple[str, ...] = _METHODS,
    max_neighbors: int = 64,
    metric: str = "euclidean",
    duplicates: str = "drop",
    anchors: Any = None,
    confidence_level: float = 0.95,
    n_jobs: int | None = None,
    random_state: Any = 0,
) -> IDProfile:
    r"""Return the intrinsic dimension at every scale: one search, three estimators.

    Noise makes the dimension large at small scales, curvature and changing density distort it at large ones: a number
    is worth something where the curve is flat.

    Parameters
    ----------
    X : array-like of shape (n_samples, n_features) or NeighborTable
        Rows of any array library, or a table of their neighbours.
    estimators : tuple of {'gride', 'twonn', 'binomial'}, default=all
        'gride': ratios of the distances to neighbours n1 = 1, 2, 4, ... and 2 n1. 'twonn': the ratio of the first two
        neighbours within random parts of the rows, 1, 1/2, 1/4, ... of them; needs rows. 'binomial': the share of
        neighbours within a fraction of the distance to neighbour 4, 8, 16, ....
    max_neighbors : int, default=64
        Largest rank, at least 4; clipped, with a warning, to one less than the number of distinct rows, or to the
        number of neighbours in the table.
    metric : str, default='euclidean'
        'euclidean', or for numpy rows any metric of :func:`sklearn.metrics.pairwise_distances`.
    duplicates : {'drop', 'raise', 'keep'}, default='drop'
        What to do with rows that repeat an earlier row.
    anchors : int or array-like of int, default=None
        Rows to use, among the neighbours of all rows: that many drawn at random, or these positions.
    confidence_level : float, default=0.95
        Of the intervals.
    n_jobs : int, default=None
        Number of threads; None for one, -1 for all cores.
    random_state : int, RandomState instance, Generator or None, default=0
        Draws the anchors, and the parts of the rows.

    Returns
    -------
    IDProfile
        One estimate per estimator and scale: rank, radius, dimension, standard error, interval, rows used. Scales at
        which fewer than 3 rows have different distances are left out.

    Raises
    ------
    ValueError
        If there are fewer than 3 distinct rows, a parameter is out of range, or no scale has an estimate.

    See Also
    --------
    isogeom.plotting.IDProfileDisplay : Draws the curve.

    Notes
    -----
    The parts of 'twonn' are a partition: every row enters once at each scale, so the estimate of part size n / p is the
    mean over p parts, and its standard error comes from their spread (from the dependence correction at full size).

    References
    ----------
    E. Facco et al., Scientific Reports 7:12140, 2017 (decimation). :doi:`10.1038/s41598-017-11873-y`

    F. Denti et al., Scientific Reports 12:20005, 2022 (ratios of any ranks). :doi:`10.1038/s41598-022-20991-1`

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import id_profile
    >>> rng = np.random.default_rng(0)
    >>> X = rng.random((2000, 3)) @ rng.standard_normal((3, 20))
    >>> profile = id_profile(X)
    >>> [float(round(d, 1)) for d in profile.select("gride")["dimension"]]
    [2.9, 2.9, 2.9, 2.9, 2.8, 2.7]
    """
    if isinstance(estimators, str):
        raise TypeError(f"estimators={estimators!r} must be a tuple of names: pass ({estimators!r},).")
    chosen = tuple(check_choice(name, "estimators", _METHODS) for name in estimators)
    if not chosen:
        raise ValueError(f"estimators is empty: pass at least one of {', '.join(map(repr, _METHODS))}.")
    largest = check_integer(max_neighbors, "max_neighbors", low=4)
    level = check_level(confidence_level)
    if isinstance(X, NeighborTable):
        table = X
    else:
        X = check_rows(X, name="X", min_samples=3, owner="id_profile")
        table = search_table(
            X,
            largest,
            metric=metric,
            duplicates=duplicates,
            anchors=anchors,
            n_jobs=n_jobs,
            random_state=random_state,
        )
    largest = clip_neighbors(largest, table.n_neighbors, "id_profile.max_neighbors", limit_of(table))
    columns: list[dict[str, Any]] = []
    if "gride" in chosen:
        columns += _gride_rows(table, largest, level)
    if "twonn" in chosen and table.X is not None and table.metric != "precomputed":
        columns += _decimated_rows(table, level, _random.check_rng(random_state, "random_state"), n_jobs)
    if "binomial" in chosen:
        columns += _binomial_rows(table, largest, level)
    if not columns:
        raise ValueError(
            f"No scale of {', '.join(chosen)} has 3 rows with different positive distances to their neighbours: pass "
            "more rows or neighbours, or rows with fewer ties."
        )
    names = ("estimator", "rank", "radius", "dimension", "std", "lower", "upper", "n_samples_used")
    arrays = {name: np.array([row[name] for row in columns]) for name in names}
    return IDProfile(**arrays, n_samples=table.n_samples, n_duplicates=table.n_duplicates, confidence_level=level)


def _gride_rows(table: NeighborTable, largest: int, level: float) -> list[dict[str, Any]]:
    scales = gride_scales(table, largest, level)
    return [
        {
            "estimator": "gride",
            "rank": int(scales["n2"][i]),
            **{name: scales[name][i] for name in ("radius", "dimension", "std", "lower", "upper", "n_samples_used")},
        }
        for i in range(len(scales["n2"]))
    ]


def _binomial_rows(table: NeighborTable, largest: int, level: float) -> list[dict[str, Any]]:
    rows, k, distances = [], 4, _xp.to_numpy(table.distances)
    while k <= min(largest, table.n_neighbors):
        used = np.flatnonzero(distances[:, k - 1] > 0)
        if len(used) < 3:
            k *= 2
            continue
        trials = np.full(len(used), k - 1)
        inner = distances[used, : k - 1] / distances[used, k - 1 : k]
        ratio, counts = settle_ratio(inner, trials, None)
        d, nominal = binomial_estimate(counts, trials, ratio)
        found = binomial_inflation(inner, counts, trials, ratio, used, table)
        std = nominal * found.ratio**0.5
        lower, upper = normal_interval(d, std, found, level)
        rows.append(_row("binomial", k, float(np.mean(distances[used, k - 1])), d, std, lower, upper, len(used)))
        k *= 2
    return rows


def _row(
    estimator: str, rank: float, radius: float, d: float, std: float, lower: float, upper: float, n: int
) -> dict[str, Any]:
    return {
        "estimator": estimator,
        "rank": rank,
        "radius": radius,
        "dimension": d,
        "std": std,
        "lower": lower,
        "upper": upper,
        "n_samples_used": n,
    }


def _decimated_rows(
    table: NeighborTable, level: float, rng: np.random.Generator, n_jobs: int | None
) -> list[dict[str, Any]]:
    """Return the two-neighbour estimate on ever smaller parts of the rows."""
    if table.n_neighbors < 2:
        return []
    logs, used = log_ratios(table.distances, 1, 2)
    if len(used) < 3:
        return []
    value = ratio_estimate(logs, used, table, 1, 2, level)
    radius = float(np.mean(_xp.to_numpy(table.distances[:, 1])[used]))
    ends = value["lower"], value["upper"]
    rows = [_row("twonn", 2, radius, value["dimension"], value["std"], *ends, len(used))]
    places = rng.permutation(np.arange(table.n_queries))
    parts = 2
    while len(places) // parts >= _FEWEST_ROWS and 2 * parts <= max(table.n_neighbors, 2):
        found = _parts(table, [np.sort(part) for part in np.array_split(places, parts)], n_jobs)
        if min(count for _, _, count in found) < 3:
            # Ties everywhere: smaller parts will have no more ratios.
            break
        values = np.array([d for d, _, _ in found])
        n = sum(count for _, _, count in found)
        d = float(values.mean())
        # The parts share no row but the same cloud: their spread is the noise of one part.
        std = max(float(values.std(ddof=1)) / parts**0.5, d / n**0.5)
        lower, upper = normal_interval(d, std, Inflation(1.0, parts - 1), level)
        rows.append(_row("twonn", 2 * parts, float(np.mean([r for _, r, _ in found])), d, std, lower, upper, n))
        parts *= 2
    return rows


def _parts(table: NeighborTable, parts: list[np.ndarray], n_jobs: int | None) -> list[tuple[float, float, int]]:
    """Return estimate, mean distance and number of rows of each part, given as places among the queries."""
    label_of = np.full(table.n_samples, -1, dtype=np.int32)
    for label, part in enumerate(parts):
        label_of[table.queries[part]] = label
    # The neighbours within a part are among those in the table for all rows but a few, which are searched for.
    near = table.first(min(table.n_neighbors, _WIDTH * len(parts)))
    distances, found = _first_two(_xp.to_numpy(near.distances), label_of[_xp.to_numpy(near.indices)], label_of, table)
    results = []
    for part in parts:
        rest = part[~found[part]]
        if rest.size:
            X, within = table.X, table.queries[part]
            searched, _ = nearest(X, X, 2, own=table.queries[rest], within=within, metric=table.metric, n_jobs=n_jobs)
            distances[rest] = _xp.to_numpy(searched)
        logs, used = log_ratios(distances[part], 1, 2)
        results.append(((len(logs) - 1) / float(logs.sum() or 1.0), float(np.mean(distances[part, 1])), len(used)))
    return results


def _first_two(
    distances: np.ndarray, labels: np.ndarray, label_of: np.ndarray, table: NeighborTable
) -> tuple[np.ndarray, np.ndarray]:
    """Return the distances of each query to the first two neighbours with its label, and whether it has them."""
    rows = np.arange(len(distances))
    same = labels == label_of[table.queries][:, None]
    first = np.argmax(same, axis=1)
    found = same[rows, first]
    same[rows, first] = False
    second = np.argmax(same, axis=1)
    found &= same[rows, second]
    return np.stack((distances[rows, first], distances[rows, second]), axis=1), found
