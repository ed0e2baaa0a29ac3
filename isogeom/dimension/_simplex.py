"""Expected simplex skewness: the statistic of a patch, its reference values, and their inverse."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from isogeom import _kernels, _xp
from isogeom._xp import Array
from isogeom.dimension._patches import offset_patches

# Longest table of reference values; a skewness beyond it is that of the last dimension.
_LONGEST = 2**20
# Elements of the patches, or of their inner products, that compiled code works on at a time: they stay in the cache.
_ELEMENTS = 2**18
# float32 products leave an error of up to 4e-4 in the sine of nearly parallel rows. In patches of fewer rows than this,
# or of less skewness, it would show in the sixth digit; there products are taken in float64.
_FEWEST, _NEARLY_FLAT = 20, 0.1


def reference(version: str, n: int) -> np.ndarray:
    """Return the expected skewness in dimensions 1..n: increasing for version 'a', decreasing for 'b'.

    'a' is ``Gamma(m/2)^2 / (Gamma((m+1)/2) Gamma((m-1)/2))``, 'b' is ``Gamma(m/2) / (sqrt(pi) Gamma((m+1)/2))``; the
    quotients of values two dimensions apart are rational.
    """
    n = max(n, 3)
    m = np.arange(1, n + 1, dtype=np.float64)
    values = np.empty(n)
    if version == "a":
        values[0] = 0.0
        first, second, factors = 2 / math.pi, math.pi / 4, m**2 / (m**2 - 1 + (m == 1))
        evens, odds = slice(1, None, 2), slice(2, None, 2)
    else:
        first, second, factors = 2 / math.pi, 1.0, m / (m + 1)
        evens, odds = slice(1, None, 2), slice(0, None, 2)
    for start, part in ((first, evens), (second, odds)):
        chain = factors[part]
        values[part] = start * np.concatenate([[1.0], np.cumprod(chain[:-1])])
    return values


def invert(skewness: np.ndarray, version: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the dimension of each skewness, linear between integers, and its derivative.

    A skewness beyond that of dimension 1 gives 1.
    """
    known = skewness[np.isfinite(skewness)]
    if version == "a":
        gap = 1 - min(float(known.max(initial=0.0)), 1.0)
        length = 0.5 / gap if gap > 0 else math.inf
    else:
        least = float(known.min(initial=1.0))
        length = 2 / (math.pi * least**2) if least > 0 else math.inf
    sign = 1.0 if version == "a" else -1.0
    values = sign * reference(version, int(min(length + 8, _LONGEST)))
    seen = sign * skewness
    below = np.clip(np.searchsorted(values, seen, side="right"), 1, len(values) - 1)
    step = values[below] - values[below - 1]
    dimension = below + np.clip((seen - values[below - 1]) / step, 0, 1)
    return np.where(np.isfinite(skewness), dimension, np.nan), sign / step


def patch_skewness(X: Array, queries: Array | np.ndarray, distances: Array, indices: Array, version: str) -> Array:
    """Return the skewness of the simplices that pairs of neighbours form with the mean of their patch.

    Version 'a' is the mean sine of the angle at the mean, weighted by the product of the two lengths; 'b' the mean
    absolute cosine.

    Returns
    -------
    array of shape (m,)
        0 to 1; NaN where all neighbours coincide.
    """
    xp = _xp.array_namespace(X)
    k, p = int(indices.shape[1]), int(X.shape[1])
    multiplications = float(indices.shape[0]) * k * k * p
    measure = _kernels.available("simplex_skewness", xp, X.dtype, multiplications)
    gather = None if measure is None else _kernels.available("centred_patches", xp, X.dtype, math.inf)
    if measure is not None and gather is not None:

        def compiled(distances: np.ndarray, indices: np.ndarray, dtype: np.dtype) -> np.ndarray:
            return _compiled(gather, measure, X, distances, indices, version == "a", dtype)

        double = np.dtype(np.float64)
        found = compiled(distances, indices, X.dtype if k >= _FEWEST else double)
        if version == "a" and X.dtype != double and k >= _FEWEST:
            flat = np.flatnonzero(found < _NEARLY_FLAT)
            found[flat] = compiled(distances[flat], indices[flat], double)
        return found
    parts = [skewness(offsets, version) for offsets, _ in offset_patches(X, queries, distances, indices)]
    return xp.concat(parts, axis=0)


def _compiled(
    gather: Callable[..., None],
    measure: Callable[..., None],
    X: np.ndarray,
    distances: np.ndarray,
    indices: np.ndarray,
    sines: bool,
    dtype: np.dtype,
) -> np.ndarray:
    """Return the skewness of patches of numpy rows, from products in `dtype`."""
    (m, k), p = indices.shape, X.shape[1]
    size = max(1, min(m, _ELEMENTS // (k * max(k, p))))
    patches, squares, products = (np.empty((size, *shape), dtype=dtype) for shape in ((k, p), (k,), (k, k)))
    result = np.empty(m)
    for start in range(0, m, size):
        part = slice(start, min(start + size, m))
        inside = slice(0, part.stop - start)
        # A kernel is compiled for one memory layout.
        radii, near = (np.ascontiguousarray(a) for a in (distances[part, -1], indices[part]))
        gather(X, near, radii, patches[inside], squares[inside])
        np.matmul(patches[inside], patches[inside].transpose(0, 2, 1), out=products[inside])
        measure(products[inside], squares[inside], sines, result[part])
    return result


def skewness(offsets: Array, version: str) -> Array:
    """Return the skewness of patches of shape (b, k, p)."""
    xp = _xp.array_namespace(offsets)
    k = int(offsets.shape[1])
    centred = offsets - xp.mean(offsets, axis=1, keepdims=True)
    squares = xp.sum(centred * centred, axis=2)
    lengths = xp.sqrt(squares)
    products = xp.matmul(centred, xp.matrix_transpose(centred))
    if version == "a":
        areas = xp.expand_dims(squares, axis=2) * xp.expand_dims(squares, axis=1) - products * products
        sizes = xp.sqrt(xp.where(areas > 0, areas, xp.zeros_like(areas)))
    else:
        sizes = xp.abs(products)
    # The angle of a vector with itself does not count.
    sizes = sizes * (1 - xp.eye(k, dtype=sizes.dtype, device=_xp.device(sizes)))
    total = xp.sum(lengths, axis=1) ** 2 - xp.sum(squares, axis=1)
    good = total > 0
    values = xp.sum(sizes, axis=(1, 2)) / xp.where(good, total, xp.ones_like(total))
    return xp.where(good, values, xp.full_like(values, xp.nan))
