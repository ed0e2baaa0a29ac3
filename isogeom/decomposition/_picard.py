"""Maximum of a signed contrast over rotations: FastICA steps to start, preconditioned L-BFGS to finish.

Everything that touches the rows is a sum over blocks of them, the same code on every array library.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from isogeom import _xp
from isogeom._xp import Array, Namespace
from isogeom.decomposition._ica_contrasts import Contrast, gaussian_reference

# Entries per block of projections: the five arrays of a block stay within a cache of 1 MiB in float32.
_BLOCK_ENTRIES = 49_152
# Rows that a warm start looks at: at least this many, and this many per source. From fewer, 50 Laplace sources do not
# stand out of the sampling noise.
_WARM_ROWS, _WARM_ROWS_PER_SOURCE = 8192, 300
# Curvature below which a pair of sources counts as flat: two nearly Gaussian sources have next to none.
_FLAT = 0.01
_MEMORY = 10
# A source that changed its sign this often keeps it, so that the objective stays one function.
_MAX_FLIPS = 3
_MAX_HALVINGS = 12
# Iterations without a smaller gradient, while the objective moves by rounding only, that show there is none to reach.
_PATIENCE = 20
# Armijo's constant of sufficient decrease.
_DECREASE = 1e-4


@dataclass(frozen=True)
class Point:
    """Averages over the rows at one rotation, with ``s = W y``."""

    W: Array
    # E[G(s_i)], E[g'(s_i)], E[g(s_i) s_j] and E[g'(s_i) s_j^2].
    values: Array
    slopes: Array
    psi: Array
    cross: Array

    def curvature(self) -> Array:
        """Return E[g'(s_i)] - E[g(s_i) s_i]: 0 for a Gaussian source, its sign tells super- from sub-Gaussian."""
        return self.slopes - _xp.array_namespace(self.psi).linalg.diagonal(self.psi)

    def signs(self) -> Array:
        """Return 1 for sources to minimise E[G], -1 for sources to maximise it."""
        curvature = self.curvature()
        one = _xp.array_namespace(curvature).ones_like(curvature)
        return _xp.array_namespace(curvature).where(curvature < 0, -one, one)

    def loss(self, signs: Array, reference: float = 0.0) -> float:
        """Return the objective: the sum of signed means, of their distance to the Gaussian value if that is given."""
        return float(_xp.array_namespace(signs).sum(signs * (self.values - reference)))

    def gradient(self, signs: Array) -> Array:
        """Return the skew gradient of the objective along rotations, (k, k)."""
        xp = _xp.array_namespace(signs)
        signed = xp.expand_dims(signs, axis=1) * self.psi
        return (signed - xp.matrix_transpose(signed)) / 2

    def hessian(self, signs: Array) -> Array:
        """Return the size of the second derivative in the plane of each pair, bounded away from 0, (k, k).

        Exact on the diagonal of the Hessian, where E[g'(s_i)] E[s_j^2] would assume independence: on an elliptical
        subspace, the curvature of which is 0, that guess costs three times the iterations.
        """
        xp = _xp.array_namespace(signs)
        terms = xp.expand_dims(signs, axis=1) * (self.cross - xp.expand_dims(xp.linalg.diagonal(self.psi), axis=1))
        pairs = xp.abs(terms + xp.matrix_transpose(terms)) / 2
        return xp.where(pairs < _FLAT, xp.full_like(pairs, _FLAT), pairs)


@dataclass(frozen=True)
class Solution:
    """End of a run: the point, the signs it was optimised under, and how it got there."""

    point: Point
    signs: Array
    n_iter: int
    gradient_norm: float
    path: tuple[float, ...]


def evaluate(Y: Array, W: Array, contrast: Contrast, *, full: bool = True) -> Point:
    """Return the averages at the rotation `W`, in one pass over the whitened rows `Y`.

    Products run in the dtype of `Y`, sums over blocks in the dtype of `W`. `values` and `cross`
    stay zero unless `full`.
    """
    xp = _xp.array_namespace(Y, W)
    n, k = Y.shape
    size = min(max(_BLOCK_ENTRIES // k, 64), n)
    columns = xp.astype(xp.matrix_transpose(W), Y.dtype)
    ones = xp.ones_like(Y[:size, 0])
    product, cross, slopes, values = (xp.zeros_like(a) for a in (W, W, W[:, 0], W[:, 0]))
    for block in _xp.row_blocks(Y, size):
        u = xp.matmul(block, columns)
        g, slope = contrast.derivatives(xp, u)
        product = product + xp.astype(xp.matmul(xp.matrix_transpose(g), block), W.dtype)
        # Column sums as products with ones: faster than a reduction over rows, and no less accurate.
        count = ones[: block.shape[0]]
        slopes = slopes + xp.astype(xp.matmul(count, slope), W.dtype)
        if full:
            cross = cross + xp.astype(xp.matmul(xp.matrix_transpose(slope), u * u), W.dtype)
            values = values + xp.astype(xp.matmul(count, contrast.value(xp, u)), W.dtype)
    return Point(W, values / n, slopes / n, xp.matmul(product / n, xp.matrix_transpose(W)), cross / n)


def polar(T: Array) -> Array:
    """Return the orthogonal matrix nearest to `T`: symmetric decorrelation."""
    xp = _xp.array_namespace(T)
    u, _, vt = xp.linalg.svd(T, full_matrices=False)
    return xp.matmul(u, vt)


def warm_start(Y: Array, W: Array, contrast: Contrast, *, max_steps: int, tol: float) -> tuple[Array, int]:
    """Make at most `max_steps` symmetric FastICA steps on evenly spaced rows; return the rotation and the steps made.

    Far from a solution, a sample of the rows points the way as well as all of them do. Stops once no row of W turns by
    more than `tol` (1 - |cos|).
    """
    xp = _xp.array_namespace(Y, W)
    n, k = Y.shape
    sample = Y[:: max(1, n // max(_WARM_ROWS, _WARM_ROWS_PER_SOURCE * k)), ...]
    steps, change = 0, math.inf
    while steps < max_steps and change > tol:
        steps += 1
        point = evaluate(sample, W, contrast, full=False)
        turn = polar(point.psi - _diagonal(xp, point.slopes))
        # 1 - |cos| of the old and new rows is 1 - |diagonal|; from the other entries, it does not cancel.
        off = xp.sum(turn * turn, axis=1) - xp.linalg.diagonal(turn) ** 2
        change = float(xp.max(off)) / 2
        W = xp.matmul(turn, W)
    return W, steps


def _diagonal(xp: Namespace, entries: Array) -> Array:
    """Return the diagonal matrix of `entries`."""
    return xp.expand_dims(entries, axis=1) * xp.eye(entries.shape[0], dtype=entries.dtype, device=_xp.device(entries))


def minimise(
    Y: Array,
    W: Array,
    contrast: Contrast,
    *,
    max_iter: int,
    tol: float,
    step: Callable[[dict[str, float]], bool] = lambda _: False,
) -> Solution:
    """Follow Picard-O from the rotation `W` until the largest entry of the gradient is at most `tol`.

    Parameters
    ----------
    Y : array of shape (n_samples, k)
        Whitened rows.
    W : array of shape (k, k)
        Orthogonal start, in the accumulator's dtype.
    contrast : Contrast
        Function of the sources.
    max_iter : int
        Largest number of iterations; 0 only evaluates the start.
    tol : float
        Largest entry of the skew gradient at which to stop.
    step : callable
        Gets the objective and the gradient norm after every iteration, and tells whether to stop there.

    Returns
    -------
    Solution
        The gradient of its point stays above `tol` if `max_iter` was reached, or if rounding allows no smaller one.
    """
    xp = _xp.array_namespace(Y, W)
    noise, gaussian = 10 * float(xp.finfo(Y.dtype).eps), gaussian_reference(contrast.name)[0]
    point = evaluate(Y, W, contrast)
    signs = point.signs()
    flips, memory = xp.zeros_like(signs), Memory(_MEMORY)
    gradient, n_iter, path = point.gradient(signs), 0, [point.loss(signs, gaussian)]
    best, best_iter = (_largest(gradient), point, signs), 0
    while best[0] > tol and n_iter < max_iter and n_iter - best_iter < _PATIENCE:
        n_iter += 1
        direction = memory.direction(gradient, point.hessian(signs))
        found = line_search(Y, point, signs, direction, contrast, noise)
        if found is None:
            if not memory:
                break
            memory.clear()
            continue
        new, move = found
        real = point.loss(signs) - new.loss(signs) > noise * float(xp.sum(xp.abs(point.values)))
        new_gradient = new.gradient(signs)
        memory.add(move, new_gradient - gradient)
        point, gradient = new, new_gradient
        wanted = xp.where(flips < _MAX_FLIPS, point.signs(), signs)
        flipped = xp.astype(wanted != signs, flips.dtype)
        if bool(xp.any(flipped > 0)):
            signs, flips, gradient = wanted, flips + flipped, point.gradient(wanted)
            memory.clear()
        path.append(point.loss(signs, gaussian))
        # A step that lowered the objective is progress, whatever the gradient; among the others, the gradient decides.
        if real or _largest(gradient) < best[0]:
            best, best_iter = (_largest(gradient), point, signs), n_iter
        if step({"objective": path[-1], "gradient_norm": best[0]}):
            break
    return Solution(best[1], best[2], n_iter, best[0], tuple(path))


class Memory:
    """Steps and gradient differences of L-BFGS, in the tangent space of the rotations."""

    def __init__(self, size: int) -> None:
        self._pairs: deque[tuple[Array, Array, float]] = deque(maxlen=size)

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def clear(self) -> None:
        """Forget everything: the objective has changed, or the model of it is wrong."""
        self._pairs.clear()

    def add(self, step: Array, change: Array) -> None:
        """Remember a step if the gradient grew along it; otherwise the model would not be convex."""
        curvature = _inner(step, change)
        if curvature > 1e-10 * _inner(step, step):
            self._pairs.append((step, change, curvature))

    def direction(self, gradient: Array, hessian: Array) -> Array:
        """Return minus the inverse of the model times the gradient: the two-loop recursion around the diagonal."""
        xp = _xp.array_namespace(gradient)
        q, weights = gradient, []
        for step, change, curvature in reversed(self._pairs):
            weights.append(_inner(step, q) / curvature)
            q = q - weights[-1] * change
        q = q / hessian
        for step, change, curvature in self._pairs:
            q = q + (weights.pop() - _inner(change, q) / curvature) * step
        # Rounding would otherwise let W drift off the rotations.
        return (xp.matrix_transpose(q) - q) / 2


def line_search(
    Y: Array, point: Point, signs: Array, direction: Array, contrast: Contrast, noise: float
) -> tuple[Point, Array] | None:
    """Return the first point along the curve of rotations that lowers the objective, and the step to it.

    Near a solution the decrease is smaller than the rounding of the objective: a change within `noise` of it is then
    judged by the slope at the new point, which stays accurate (the approximate Wolfe condition of Hager and Zhang).
    Returns None after too many halvings.
    """
    xp = _xp.array_namespace(direction)
    start, descent = point.loss(signs), _inner(point.gradient(signs), direction)
    if descent >= 0:
        return None
    slack = noise * float(xp.sum(xp.abs(point.values)))
    # No pair of sources turns by more than a radian at once.
    alpha = min(1.0, 1 / _largest(direction))
    for _ in range(_MAX_HALVINGS):
        step = alpha * direction
        new = evaluate(Y, xp.matmul(rotation(step), point.W), contrast)
        change = new.loss(signs) - start
        if change <= _DECREASE * alpha * descent:
            return new, step
        slope = _inner(new.gradient(signs), direction)
        if change <= slack and abs(slope) <= 0.9 * abs(descent):
            return new, step
        alpha /= 2
    return None


def rotation(skew: Array) -> Array:
    """Return the Cayley transform of a skew matrix: orthogonal, and its exponential up to third order."""
    xp = _xp.array_namespace(skew)
    eye = xp.eye(skew.shape[0], dtype=skew.dtype, device=_xp.device(skew))
    return xp.linalg.solve(eye - skew / 2, eye + skew / 2)


def _inner(a: Array, b: Array) -> float:
    return float(_xp.array_namespace(a, b).sum(a * b))


def _largest(a: Array) -> float:
    xp = _xp.array_namespace(a)
    return float(xp.max(xp.abs(a)))
