"""Moments instead of rows: what PCA, isotropy scores and alignment tests need, in d x d memory (numpy only)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isogeom._moments import Moments
from isogeom.gradients._result import Ties
from isogeom.gradients._rowstore import RowStore, check_widths
from isogeom.gradients._sampling import Rows, Selection

# Rows that wait for a product: enough for a fast one, few enough to be nothing beside a batch's graph.
_PENDING_ROWS = 4096


@dataclass(frozen=True, eq=False, repr=False)
class SiteMoments:
    """Moments of the rows of one site, each wherever an estimator or a test takes :class:`isogeom.Moments`.

    Attributes
    ----------
    name : str
        The site.
    activations : Moments or None
        Count, mean and scatter of the activation rows; None when they were not collected.
    gradients : Moments or None
        Likewise of the gradient rows.
    cross : ndarray of shape (d, d_gradients), float64, or None
        Sum over rows of the outer product of activation and gradient, not centred: for a ``":weight"`` site the
        transposed gradient of the weight of a :class:`torch.nn.Linear`. None unless both kinds were collected.
    tied : tuple of str
        For a ``":weight"`` site, the other modules that have the same weight, as in :class:`SiteRows`.
    """

    name: str
    activations: Moments | None
    gradients: Moments | None
    cross: NDArray[np.float64] | None
    tied: tuple[str, ...] = ()

    def __repr__(self) -> str:
        kinds = {"activations": self.activations, "gradients": self.gradients}
        shown = [f"{kind} {moments!r}" for kind, moments in kinds.items() if moments is not None]
        shown += [] if self.cross is None else [f"cross {self.cross.shape}"]
        shown += [f"tied with {', '.join(map(repr, self.tied))}"] if self.tied else []
        return f"SiteMoments({self.name!r}, {', '.join(shown)})"


@dataclass(frozen=True, eq=False, repr=False)
class HarvestMoments(Mapping[str, SiteMoments]):
    """What ``harvest(..., reduce="moments")`` returns: a read-only mapping from site name to :class:`SiteMoments`.

    Attributes
    ----------
    n_rows : int
        Number of rows, the same at every site.
    losses : ndarray of shape (n_batches,), float64
        Mean loss of every batch, as in :class:`Harvest`.

    Examples
    --------
    >>> import torch
    >>> from isogeom.gradients import harvest
    >>> from isogeom.isotropy import isoscore
    >>> _ = torch.manual_seed(0)
    >>> model, batches = torch.nn.Linear(3, 2), [torch.randn(40, 3), torch.randn(20, 3)]
    >>> h = harvest(model, batches, [":out"], loss=lambda m, x: m(x).square().sum(), reduce="moments")
    >>> h
    HarvestMoments(60 rows, 1 site, 2 batches)
    >>> 0 < isoscore(h[":out"].activations) < 1
    True
    """

    _sites: Mapping[str, SiteMoments]
    n_rows: int
    losses: NDArray[np.float64]

    def __getitem__(self, name: str) -> SiteMoments:
        other = name.removesuffix(":out") if str(name).endswith(":out") else f"{name}:out"
        for key in (name, other):
            if key in self._sites:
                return self._sites[key]
        raise KeyError(f"no site {name!r} in this harvest; it has {', '.join(map(repr, self._sites))}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def __repr__(self) -> str:
        sites, batches = len(self._sites), len(self.losses)
        return (
            f"HarvestMoments({self.n_rows} row{'s' * (self.n_rows != 1)}, {sites} site{'s' * (sites != 1)}, "
            f"{batches} batch{'es' * (batches != 1)})"
        )

    def merge(self, other: HarvestMoments) -> HarvestMoments:
        """Return the moments of the rows of both, as after a harvest on several processes; neither is changed.

        Parameters
        ----------
        other : HarvestMoments
            Of other batches at the same sites.

        Returns
        -------
        HarvestMoments
            A new object; the losses of `other` follow.

        Raises
        ------
        TypeError, ValueError
            If `other` is no HarvestMoments, or has other sites or kinds.
        """
        if not isinstance(other, HarvestMoments):
            raise TypeError(f"other must be HarvestMoments, got {type(other).__name__}")
        if list(self) != list(other):
            raise ValueError(f"other has sites {list(other)}, not {list(self)}")
        sites = {name: _join(self[name], other[name]) for name in self}
        return HarvestMoments(sites, self.n_rows + other.n_rows, np.concatenate([self.losses, other.losses]))


def _join(a: SiteMoments, b: SiteMoments) -> SiteMoments:
    for kind in ("activations", "gradients"):
        if (getattr(a, kind) is None) != (getattr(b, kind) is None):
            raise ValueError(f"only one of the harvests has {kind} of site {a.name!r}: collect the same kinds")
    acts = None if a.activations is None or b.activations is None else a.activations.merge(b.activations)
    grads = None if a.gradients is None or b.gradients is None else a.gradients.merge(b.gradients)
    cross = None if a.cross is None or b.cross is None else a.cross + b.cross
    return SiteMoments(a.name, acts, grads, cross, a.tied)


class MomentStore:
    """Add up the rows of all batches; rows wait until there are enough for a fast product."""

    threshold = None

    def __init__(self) -> None:
        self.n_rows = 0
        self.moments: dict[tuple[str, str], Moments] = {}
        self.cross: dict[str, NDArray[np.float64]] = {}
        self.widths: dict[tuple[str, str], int] = {}
        self._pending: list[Rows] = []
        self._n_pending = 0

    def known(self, _batch_id: int, _batch: Any) -> float | None:
        """Return the loss of a batch that needs no harvest: none is known here."""
        return None

    def add(self, _selection: Selection, arrays: Rows, _batch_id: int, _n_samples: int, _loss: float) -> None:
        """Add the rows of one batch."""
        self.add_rows(arrays)

    def add_rows(self, arrays: Rows) -> None:
        """Add aligned rows of all sites and kinds."""
        check_widths(self.widths, arrays)
        n_rows = max((len(rows) for rows in arrays.values()), default=0)
        if n_rows:
            self._pending.append(arrays)
            self.n_rows += n_rows
            self._n_pending += n_rows
        if self._n_pending >= _PENDING_ROWS:
            self.flush()

    def flush(self) -> None:
        """Take in the rows that wait."""
        if not self._pending:
            return
        rows = {}
        for key in self.widths:
            pieces = [batch.pop(key) for batch in self._pending]
            rows[key] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            self.moments.setdefault(key, Moments()).update(rows[key])
        self._pending, self._n_pending = [], 0
        for site, kind in rows:
            if kind == "activations" and (site, "gradients") in rows:
                self._add_cross(site, rows[site, kind], rows[site, "gradients"])

    def _add_cross(self, site: str, X: NDArray[Any], G: NDArray[Any]) -> None:
        total = self.cross.setdefault(site, np.zeros((X.shape[1], G.shape[1])))
        for begin in range(0, len(X), _PENDING_ROWS):
            part = slice(begin, begin + _PENDING_ROWS)
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                product = X[part].T @ G[part]
            largest = float(np.abs(product).max(initial=0))
            if not 1e-28 < largest < np.inf:
                # Out of float32's range, or all zero.
                product = X[part].T.astype(np.float64) @ G[part].astype(np.float64)
            total += product

    def finish(self, names: list[str], losses: list[float], *, ties: Ties | None = None, **_own: Any) -> HarvestMoments:
        """Return the moments of all rows; `ties` are the modules with the weight of a site."""
        self.flush()
        sites = {
            name: SiteMoments(
                name,
                self.moments.get((name, "activations")),
                self.moments.get((name, "gradients")),
                self.cross.get(name),
                tuple((ties or {}).get(name, ())),
            )
            for name in names
        }
        return HarvestMoments(sites, self.n_rows, np.asarray(losses, dtype=np.float64))


class SampleMomentStore(RowStore):
    """Hold the rows of a sample, whose members are known only at the end, and return their moments."""

    def finish(  # type: ignore[override]
        self, names: list[str], losses: list[float], *, ties: Ties | None = None, **_own: Any
    ) -> HarvestMoments:
        """Return the moments of the sample."""
        store = MomentStore()
        _, meta, rows = self.drain()
        for begin in range(0, len(meta), _PENDING_ROWS):
            store.add_rows({key: part[begin : begin + _PENDING_ROWS] for key, part in rows.items()})
        return store.finish(names, losses, ties=ties)


def moment_store(budget: int | None) -> MomentStore | SampleMomentStore:
    """Return what takes the rows of a harvest with ``reduce="moments"``."""
    return MomentStore() if budget is None else SampleMomentStore(budget)
