"""Estimators for the geometry of neural representations and of learning.

Sub-packages are loaded on first use, so that ``import isogeom`` stays light:

- :mod:`isogeom.decomposition`: PCA, ICA, Semi-NMF;
- :mod:`isogeom.dimension`: intrinsic dimension from one table of neighbours;
- :mod:`isogeom.tangent`: tangent proxies and the alignment of gradients with them;
- :mod:`isogeom.isotropy`: isotropy scores and effective ranks;
- :mod:`isogeom.gradients`: activations and gradients of any torch model (needs the ``torch`` extra);
- :mod:`isogeom.plotting`: displays (need the ``plot`` extra);
- :mod:`isogeom.datasets`: synthetic data with known answers.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_SUBPACKAGES = ("datasets", "decomposition", "dimension", "gradients", "isotropy", "plotting", "tangent")
_LAZY = {"Moments": "isogeom._moments"}

__all__ = ["Moments", "__version__", *_SUBPACKAGES]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"isogeom.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'isogeom' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
