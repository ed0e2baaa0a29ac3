"""Activations and gradients of any torch model, as aligned numpy arrays.

:func:`harvest` runs a model over batches and returns, for each named site, the activation rows and the gradient rows of
the loss, in one row order shared by all sites, with the sample, position and token of every row.

This sub-package needs PyTorch (``pip install 'isogeom[torch]'``); nothing else of isogeom loads it.
"""

try:
    import torch  # noqa: F401
except ImportError as exc:
    raise ImportError("isogeom.gradients needs PyTorch: pip install 'isogeom[torch]'") from exc

from isogeom.gradients._embedding import EmbeddingUpdateResult, embedding_update
from isogeom.gradients._harvest import harvest
from isogeom.gradients._invariance import BatchInvarianceResult, check_batch_invariance
from isogeom.gradients._probes import first_linear, probes, weight_sites
from isogeom.gradients._reading import open_harvest
from isogeom.gradients._reduce import HarvestMoments, SiteMoments
from isogeom.gradients._result import Harvest, SiteRows
from isogeom.gradients._sharded import ShardedRows
from isogeom.gradients._weights import weight_gradient_norms

__all__ = [
    "BatchInvarianceResult",
    "EmbeddingUpdateResult",
    "Harvest",
    "HarvestMoments",
    "ShardedRows",
    "SiteMoments",
    "SiteRows",
    "check_batch_invariance",
    "embedding_update",
    "first_linear",
    "harvest",
    "open_harvest",
    "probes",
    "weight_gradient_norms",
    "weight_sites",
]
