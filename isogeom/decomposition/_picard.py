"""Maximum of a signed contrast over rotations: FastICA steps to start, preconditioned L-BFGS to finish.

Everything that touches the rows is a sum over blocks of them, the same code on every array library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from isogeom import _xp
from isogeom._xp import Array, Namespace
from isogeom.decomposition._ica_contrasts import Contrast, gaussian_reference
from isogeom.decomposition._ica_memory import Memory, inner

# Entries per block of projections: the five arrays of a block stay within a cache of 1 MiB in float32.
_BLOCK_ENTRIES = 49_152
# Most rows per block: within one, sums run in the dtype of the rows. In float32, the gradient of 3000 rows of 5 sources
# is three times closer to that of float64 with this bound than without.
_BLOCK_ROWS = 1024
# Rows that a warm start looks at: at least this many, and this many per source. From fewer, 50 Laplace sources do not
# stand out of the sampling noise.
_WARM_ROWS, _WARM_ROWS_PER_SOURCE = 8192, 300
# Curvature below which a pair of sources counts as flat: two nearly Gaussian sources have next to none.
_FLAT = 0.01
# Iterations for which the curvatures of pairs are kept: they change slowly, and cost a third of an evaluation.
_REFRESH = 10
# Sources with a pair below this curvature form a flat block; if it holds at most this share of all sources, it is
# turned by itself. Sources that stand out settle in a few iterations and need no part in the many that follow.
_BLOCK_CURVATURE, _BLOCK_SHARE = 0.03, 0.75
# A block is entered again only if the gradient has come down to this share since the time before.
_BLOCK_GAIN = 0.5
# A block is left once its gradient is this share of the gradient outside.
_BLOCK_DEPTH = 0.03
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
    # E[G(s_i)], E[g'(s_i)], E[g(s_i) s_j], and E[g'(s_i) s_j^2] where it was asked for.
    values: Array
    slopes: Array
    psi: Array
    cross: Array | None

    def part(self, chosen: Array) -> Point:
        """Return the averages of some sources, given as columns of the identity, at the rotation that leaves them."""
        xp = _xp.array_namespace(chosen)
        transposed = xp.matrix_transpose(chosen)
        psi, cross = (
            None if a is None else xp.matmul(xp.matmul(transposed, a), chosen) for a in (self.psi, self.cross)
        )
        eye = xp.eye(chosen.shape[1], dtype=chosen.dtype, device=_xp.device(chosen))
        return Point(eye, xp.matmul(self.values, chosen), xp.matmul(self.slopes, chosen), psi, cross)

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

    def curvatures(self, signs: Array) -> Array:
        """Return the size of the second derivative in the plane of each pair, (k, k); `cross` must be there.

        Exact on the diagonal of the Hessian, where E[g'(s_i)] E[s_j^2] would assume independence: on an elliptical
        subspace, the curvature of which is 0, that guess costs three times the iterations.
        """
        xp = _xp.array_namespace(signs)
        terms = xp.expand_dims(signs, axis=1) * (self.cross - xp.expand_dims(xp.linalg.diagonal(self.psi), axis=1))
        return xp.abs(terms + xp.matrix_transpose(terms)) / 2

    def hessian(self, signs: Array) -> Array:
        """Return the curvatures, bounded away from 0."""
        pairs = self.curvatures(signs)
        xp = _xp.array_namespace(pairs)
        return xp.where(pairs < _FLAT, xp.full_like(pairs, _FLAT), pairs)


@dataclass(frozen=True)
class Solution:
    """End of a run: the point, the signs it was optimised under, and how it got there."""

    point: Point
    signs: Array
    n_iter: int
    gradient_norm: float
    path: tuple[float, ...]


def evaluate(Y: Array, W: Array, contrast: Contrast, *, values: bool = True, pairs: bool = True) -> Point:
    """Return the averages at the rotation `W`, in one pass over the whitened rows `Y`.

    Products run in the dtype of `Y`, sums over blocks in the dtype of `W`. The mean contrasts stay zero without
    `values`, and `cross` None without `pairs`. Columns of `Y` beyond those of `W` count for nothing.
    """
    xp = _xp.array_namespace(Y, W)
    (n, k), used = Y.shape, W.shape[0]
    # A multiple of eight: see the sum of logarithms in `_ica_contrasts`.
    size = min(max(_BLOCK_ENTRIES // k // 8 * 8, 64), _BLOCK_ROWS, n)
    ones = xp.ones_like(Y[:size, 0])
    full = W
    if used < k:
        full = xp.zeros((k, k), dtype=W.dtype, device=_xp.device(W))
        full[:used, :used] = W
    columns = xp.astype(xp.matrix_transpose(full), Y.dtype)
    product, cross, slopes, means = (xp.zeros_like(a) for a in (full, full, full[:, 0], full[:, 0]))
    # Operators rather than functions of the namespace: on blocks of this size, a wrapper's own time shows.
    for block in _xp.row_blocks(Y, size):
        u = block @ columns
        g, slope = contrast.derivatives(xp, u)
        product = product + g.T @ block
        # Column sums as products with ones: faster than a reduction over rows, and no less accurate.
        count = ones[: block.shape[0]]
        slopes = slopes + count @ slope
        if values:
            means = means + contrast.total(xp, u, g, count)
        if pairs:
            cross = cross + slope.T @ (u * u)
    psi = xp.matmul(product[:used, :used] / n, xp.matrix_transpose(W))
    return Point(W, means[:used] / n, slopes[:used] / n, psi, cross[:used, :used] / n if pairs else None)


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
        point = evaluate(sample, W, contrast, values=False, pairs=False)
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

    While the largest entry of the gradient lies between sources of a flat block, only these are turned.

    Parameters
    ----------
    Y : array of shape (n_samples, k)
        Whitened rows.
    W : array of shape (k, k)
        Orthogonal start, in the accumulator's dtype.
    contrast : Contrast
        Function of the sources.
    max_iter : int
        Largest number of iterations, those within blocks included; 0 only evaluates the start.
    tol : float
        Largest entry of the skew gradient at which to stop.
    step : callable
        Gets the objective and the gradient norm after every iteration, and tells whether to stop there. Within a block,
        entries of the gradient outside of it are those found before.

    Returns
    -------
    Solution
        The gradient of its point stays above `tol` if `max_iter` was reached, or if rounding allows no smaller one.
    """
    run = Descent(Y, W, contrast)
    path, done = [run.objective()], 0

    def follow(part: Descent, tol: float, rest: float, outside: float, *, leave: bool) -> bool:
        """Iterate on a part, until a flat block should be next if `leave`; return whether the whole run must end."""
        nonlocal done
        while part.norm > tol and part.idle < _PATIENCE and not (leave and part.flat_block() is not None):
            if done >= max_iter:
                return True
            done += 1
            moved = part.advance()
            if moved is None:
                break
            if moved:
                path.append(rest + part.objective())
                if step({"objective": path[-1], "gradient_norm": max(part.norm, outside)}):
                    return True
        return False

    blocks, entry = True, math.inf
    while not follow(run, tol, 0.0, 0.0, leave=blocks):
        block = run.flat_block() if blocks else None
        if block is None or run.norm <= tol or run.idle >= _PATIENCE:
            break
        # Where turning the others undoes what turning the block has gained, only turning all together gets on.
        if run.norm > _BLOCK_GAIN * entry:
            blocks = False
            continue
        entry = run.norm
        part, outside = run.part(block)
        rest, before = run.objective() - part.objective(), done
        ended = follow(part, max(tol / 2, _BLOCK_DEPTH * outside), rest, outside, leave=False)
        # A block that cannot be improved is not tried again.
        blocks = done > before and part.idle < _PATIENCE
        run.adopt(part, block)
        if ended:
            break
    return Solution(*run.best, done, run.norm, tuple(path))


class Descent:
    """A run of L-BFGS from one rotation of the rows `Y`, iteration by iteration."""

    def __init__(self, Y: Array, start: Array | Point, contrast: Contrast) -> None:
        xp = _xp.array_namespace(Y)
        self._Y, self._contrast = Y, contrast
        self._noise = 10 * float(xp.finfo(Y.dtype).eps)
        self._gaussian = gaussian_reference(contrast.name)[0]
        self._memory = Memory(_MEMORY)
        self._kept: tuple[list[int], Memory] | None = None
        point = start if isinstance(start, Point) else evaluate(Y, start, contrast)
        self._signs = point.signs()
        self._flips = xp.zeros_like(self._signs)
        self._restart(point)

    def _restart(self, point: Point) -> None:
        """Go on from `point`, which counts as progress, without a memory of the way there."""
        self._memory.clear()
        self._point, self._curved, self._age = point, point, 0
        self._gradient = point.gradient(self._signs)
        self._mark()

    def _mark(self) -> None:
        """Take the point as the best one."""
        self.best = (self._point, self._signs)
        self.norm, self._lowest, self.idle = _largest(self._gradient), self._point.loss(self._signs), 0

    def objective(self) -> float:
        """Return the objective relative to Gaussian sources."""
        return self._point.loss(self._signs, self._gaussian)

    def advance(self) -> bool | None:
        """Make one iteration; return whether the point has moved, and None if no step lowers the objective."""
        xp = _xp.array_namespace(self._Y)
        direction = self._memory.direction(self._gradient, self._curved.hessian(self._signs))
        due = self._age + 1 >= _REFRESH
        found = line_search(self._Y, self._point, self._signs, direction, self._contrast, self._noise, pairs=due)
        if found is None:
            if not self._memory and self._age == 0:
                return None
            self._memory.clear()
            if self._age:
                self._point = self._curved = evaluate(self._Y, self._point.W, self._contrast)
                self._age = 0
            return False
        self._point, move = found
        self._curved, self._age = (self._point, 0) if due else (self._curved, self._age + 1)
        gradient = self._point.gradient(self._signs)
        self._memory.add(move, gradient - self._gradient)
        self._gradient = gradient
        # A step that lowered the objective is progress, whatever the gradient; among the others, the gradient decides.
        noise = self._noise * float(xp.sum(xp.abs(self._point.values)))
        progress = self._lowest - self._point.loss(self._signs) > noise
        wanted = xp.where(self._flips < _MAX_FLIPS, self._point.signs(), self._signs)
        flipped = xp.astype(wanted != self._signs, self._flips.dtype)
        if bool(xp.any(flipped > 0)):
            self._signs, self._flips = wanted, self._flips + flipped
            self._gradient = self._point.gradient(wanted)
            self._memory.clear()
            self._kept = None
        if progress or _largest(self._gradient) < self.norm:
            self._mark()
        else:
            self.idle += 1
        return True

    def flat_block(self) -> list[int] | None:
        """Return the sources with little curvature, where the largest entry of the gradient is among them."""
        xp = _xp.array_namespace(self._Y)
        k = self._point.W.shape[0]
        curvatures, gradient = (_xp.to_numpy(a) for a in (self._curved.curvatures(self._signs), xp.abs(self._gradient)))
        np.fill_diagonal(curvatures, np.inf)
        flat = np.flatnonzero(curvatures.min(axis=1) < _BLOCK_CURVATURE)
        if not 2 <= len(flat) <= _BLOCK_SHARE * k:
            return None
        inside = gradient[np.ix_(flat, flat)].max()
        gradient[np.ix_(flat, flat)] = 0
        return [int(i) for i in flat] if inside > gradient.max() else None

    def part(self, block: list[int]) -> tuple[Descent, float]:
        """Return a run over the sources of the block alone, and the largest entry of the gradient outside of it."""
        xp = _xp.array_namespace(self._Y)
        rows = self._columns(block)
        inside = xp.matmul(rows, xp.matrix_transpose(rows))
        outside = _largest(self._gradient - xp.matmul(xp.matmul(inside, self._gradient), inside))
        # One column less than a multiple of four costs more than the multiple: products have a remainder of three.
        filled = rows if len(block) % 4 < 3 else xp.concat([rows, xp.zeros_like(rows[:, :1])], axis=1)
        chosen = xp.matmul(xp.matrix_transpose(self._point.W), filled)
        S = xp.matmul(self._Y, xp.astype(chosen, self._Y.dtype))
        # All that a pass over these rows would tell is known.
        part = Descent(S, self._point.part(rows), self._contrast)
        part._signs, part._flips = (xp.matmul(a, rows) for a in (self._signs, self._flips))
        part._restart(part._point)
        part._curved, part._age = self._curved.part(rows), self._age
        # Coming back to a block, its curvature is known already.
        if self._kept is not None and self._kept[0] == block:
            part._memory = self._kept[1]
        self._kept = (block, part._memory)
        return part, outside

    def adopt(self, part: Descent, block: list[int]) -> None:
        """Turn the sources of the block as `part` did."""
        xp = _xp.array_namespace(self._Y)
        rows = self._columns(block)
        point, signs = part.best
        turn = point.W - xp.eye(len(block), dtype=point.W.dtype, device=_xp.device(point.W))
        W = self._point.W + xp.matmul(xp.matmul(rows, turn), xp.matmul(xp.matrix_transpose(rows), self._point.W))
        self._signs = self._signs + xp.matmul(rows, signs - xp.matmul(self._signs, rows))
        self._flips = self._flips + xp.matmul(rows, part._flips - xp.matmul(self._flips, rows))
        self._restart(evaluate(self._Y, W, self._contrast))

    def _columns(self, block: list[int]) -> Array:
        """Return the columns of the identity that belong to a block, (k, len(block))."""
        W = self._point.W
        return _xp.asarray_like(np.eye(W.shape[0])[:, block], W)


def line_search(
    Y: Array, point: Point, signs: Array, direction: Array, contrast: Contrast, noise: float, *, pairs: bool = True
) -> tuple[Point, Array] | None:
    """Return the first point along the curve of rotations that lowers the objective, and the step to it.

    Near a solution the decrease is smaller than the rounding of the objective: a change within `noise` of it is then
    judged by the slope at the new point, which stays accurate (the approximate Wolfe condition of Hager and Zhang).
    Returns None after too many halvings.
    """
    xp = _xp.array_namespace(direction)
    start, descent = point.loss(signs), inner(point.gradient(signs), direction)
    if descent >= 0:
        return None
    slack = noise * float(xp.sum(xp.abs(point.values)))
    # No pair of sources turns by more than a radian at once.
    alpha = min(1.0, 1 / _largest(direction))
    for _ in range(_MAX_HALVINGS):
        step = alpha * direction
        new = evaluate(Y, xp.matmul(rotation(step), point.W), contrast, pairs=pairs)
        change = new.loss(signs) - start
        if change <= _DECREASE * alpha * descent:
            return new, step
        slope = inner(new.gradient(signs), direction)
        if change <= slack and abs(slope) <= 0.9 * abs(descent):
            return new, step
        alpha /= 2
    return None


def rotation(skew: Array) -> Array:
    """Return the Cayley transform of a skew matrix: orthogonal, and its exponential up to third order."""
    xp = _xp.array_namespace(skew)
    eye = xp.eye(skew.shape[0], dtype=skew.dtype, device=_xp.device(skew))
    return xp.linalg.solve(eye - skew / 2, eye + skew / 2)


def _largest(a: Array) -> float:
    xp = _xp.array_namespace(a)
    return float(xp.max(xp.abs(a)))
