"""Registry of the compiled kernels: when one may replace the array code, and which.

A kernel is an accelerator, never the definition of a result: the array code computes the same numbers and the tests
compare the two. Numba is imported when the first kernel is used, not before.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from isogeom import _xp

# Kernel name -> (module, smallest problem for which loading it pays). The size is the number of multiplications, as
# each caller counts it: below about 1e8 (0.1 s) the array code is done before a cached kernel is loaded from disk.
_KERNELS: dict[str, tuple[str, float]] = {
    "centred_patches": ("isogeom._kernels._simplex_skewness", 1e8),
    "knn_scan": ("isogeom._kernels._scan", 1e8),
    "mutual_pairs": ("isogeom._kernels._overlaps", 1e8),
    "nnls_exchange": ("isogeom._kernels._nnls_exchange", 1e8),
    "nnls_pivots": ("isogeom._kernels._nnls_pivots", 1e8),
    "nnls_solve": ("isogeom._kernels._nnls", 1e8),
    "nnls_sweep": ("isogeom._kernels._nnls", 1e8),
    "overlap_counts": ("isogeom._kernels._overlaps", 1e7),
    "pair_squares": ("isogeom._kernels._scan", 1e8),
    "patch_paths": ("isogeom._kernels._shortest_paths", 1e7),
    "path_counts": ("isogeom._kernels._shortest_paths", 1e7),
    "path_rows": ("isogeom._kernels._shortest_paths", 1e7),
    "simplex_skewness": ("isogeom._kernels._simplex_skewness", 1e8),
    "tight_inverses": ("isogeom._kernels._tight_inverses", 1e8),
}


def available(name: str, xp: _xp.Namespace, dtype: Any, size: float) -> Callable[..., Any] | None:
    """Return the kernel `name`, or None where the array code should run.

    Parameters
    ----------
    name : str
        Name of a registered kernel.
    xp : namespace
        Array namespace of the inputs; kernels take numpy arrays only.
    dtype : dtype
        Dtype of the inputs; kernels take float32 and float64.
    size : float
        Number of multiplications the call is expected to cost.

    Returns
    -------
    callable or None
        None if the inputs are not numpy's, the problem is small (and the kernel not loaded yet), or numba is not
        installed.
    """
    module, minimum = _KERNELS[name]
    if not _xp.is_numpy(xp) or dtype not in (xp.float32, xp.float64):
        return None
    if size < minimum and not _is_loaded(module, name):
        return None
    if importlib.util.find_spec("numba") is None:
        return None
    return getattr(importlib.import_module(module), name)


def _is_loaded(module: str, name: str) -> bool:
    """Tell whether the kernel has been compiled, or read from the cache, in this process: then it costs nothing."""
    return module in sys.modules and bool(getattr(sys.modules[module], name).signatures)
