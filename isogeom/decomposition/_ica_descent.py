"""One run of preconditioned L-BFGS over rotations, on the slopes of a signed contrast."""

from __future__ import annotations

import numpy as np

from isogeom import _xp
from isogeom._xp import Array
from isogeom.decomposition._ica_contrasts import Contrast, gaussian_reference
from isogeom.decomposition._ica_memory import Memory, inner
from isogeom.decomposition._ica_points import Point, evaluate

# Every so many iterations the point is a full one: curvatures of pairs change slowly, and the objective is wanted to
# check the slopes only. The two cost as much as the gradient.
_REFRESH = 10
# Largest angle of a step that slopes alone may accept, and the largest slope uphill at its end, as a share of that
# downhill at its start. From random rotations of 6 to 25 sources, Laplace and elliptical ones, no step within both
# raised the objective, of more than 1000; of those beyond the angle, 2 in 5 did.
_SAFE_ANGLE, _SAFE_SLOPE = 0.5, 0.9
# Sources with a pair below this curvature form a flat block; if it holds at most this share of all sources, it is
# turned by itself. Sources that stand out settle in a few iterations and need no part in the many that follow.
_BLOCK_CURVATURE, _BLOCK_SHARE = 0.03, 0.75
_MEMORY = 10
# A source that changed its sign this often keeps it, so that the objective stays one function.
_MAX_FLIPS = 3
# Times that a step is shortened: by the zero of its slope, and by halving where the objective decides.
_MAX_SECANTS, _MAX_HALVINGS = 3, 12
# Iterations without a smaller gradient, while the objective moves by rounding only, that show there is none to reach.
PATIENCE = 20
# Armijo's constant of sufficient decrease.
_DECREASE = 1e-4


class Descent:
    """A run of L-BFGS from one rotation of the rows `Y`, iteration by iteration.

    Attributes
    ----------
    best : tuple
        Best point so far, and the signs it was found under.
    norm : float
        Largest entry of its gradient.
    idle : int
        Iterations since then.
    """

    def __init__(self, Y: Array, start: Array | Point, contrast: Contrast) -> None:
        xp = _xp.array_namespace(Y)
        self._Y, self._contrast = Y, contrast
        self._rounding = 10 * float(xp.finfo(Y.dtype).eps)
        self._gaussian = gaussian_reference(contrast.name)[0]
        self._memory = Memory(_MEMORY)
        self._kept: tuple[list[int], Memory] | None = None
        # Whether slopes alone may accept a step.
        self._trusting = True
        point = start if isinstance(start, Point) else evaluate(Y, start, contrast)
        self._signs = point.signs()
        self._flips = xp.zeros_like(self._signs)
        self._restart(point)

    def _restart(self, point: Point) -> None:
        """Go on from a full point, which counts as progress, without a memory of the way there."""
        self._memory.clear()
        self._move_to(point)
        self._mark()

    def _move_to(self, point: Point) -> None:
        """Take a full point as the current one."""
        self._point, self._known, self._age = point, point, 0
        self._gradient = point.gradient(self._signs)

    def _mark(self) -> None:
        """Take the point as the best one."""
        self.best = (self._point, self._signs)
        self.norm, self.idle, self._gained = _largest(self._gradient), 0, 0.0

    @property
    def full(self) -> bool:
        """Whether the current point is a full one."""
        return self._point.full

    def objective(self) -> float:
        """Return the objective at the last full point, relative to Gaussian sources."""
        return self._known.loss(self._signs, self._gaussian)

    def advance(self) -> bool | None:
        """Make one iteration; return whether the point has moved, and None if no step lowers the objective."""
        fresh = self._age == 0 and not self._memory
        direction = self._memory.direction(self._gradient, self._known.hessian(self._signs))
        found = self._step_by_slope(direction) if self._trusting else None
        if found is None:
            self._complete()
            found = line_search(self._Y, self._point, self._signs, direction, self._contrast, self._noise())
        if found is None:
            self._memory.clear()
            return None if fresh else False
        point, step = found
        gradient = point.gradient(self._signs)
        if point.full and point.loss(self._signs) - self._known.loss(self._signs) > self._noise():
            # Slopes have led uphill: back to where the objective was known, which decides from now on.
            self._trusting = False
            self._restart(self._known)
            return False
        self._memory.add(step, gradient - self._gradient)
        # The objective has changed by the mean of the slopes at both ends, up to third order.
        self._gained -= inner(self._gradient + gradient, step) / 2
        if point.full:
            self._move_to(point)
        else:
            self._point, self._gradient, self._age = point, gradient, self._age + 1
        # A step that lowered the objective is progress, whatever the gradient; among the others, the gradient decides.
        progress = self._gained > self._noise()
        if self._update_signs() or progress or _largest(self._gradient) < self.norm:
            self._mark()
        else:
            self.idle += 1
        return True

    def _noise(self) -> float:
        """Return the change of the objective that may be rounding."""
        xp = _xp.array_namespace(self._signs)
        return self._rounding * float(xp.sum(xp.abs(self._known.values)))

    def _complete(self) -> None:
        """Make the current point a full one."""
        if not self._point.full:
            self._move_to(evaluate(self._Y, self._point.W, self._contrast))

    def _update_signs(self) -> bool:
        """Let the signs follow the sources; return whether one has changed, which makes another objective."""
        xp = _xp.array_namespace(self._signs)
        wanted = xp.where(self._flips < _MAX_FLIPS, self._point.signs(), self._signs)
        flipped = xp.astype(wanted != self._signs, self._flips.dtype)
        if not bool(xp.any(flipped > 0)):
            return False
        self._signs, self._flips = wanted, self._flips + flipped
        self._complete()
        self._move_to(self._point)
        self._memory.clear()
        self._kept = None
        return True

    def _step_by_slope(self, direction: Array) -> tuple[Point, Array] | None:
        """Return a point along the curve of rotations that its slope shows to be lower, and the step to it.

        On a parabola, the condition on the slope is Armijo's with a constant of 0.05: the approximate Wolfe condition
        of Hager and Zhang. None where the step is too long to trust in that.
        """
        xp = _xp.array_namespace(direction)
        descent, full = inner(self._gradient, direction), self._age + 1 >= _REFRESH
        alpha = _longest(direction)
        if descent >= 0 or alpha * _largest(direction) > _SAFE_ANGLE:
            return None
        for _ in range(_MAX_SECANTS):
            step = alpha * direction
            new = evaluate(self._Y, xp.matmul(rotation(step), self._point.W), self._contrast, full=full)
            slope = inner(new.gradient(self._signs), direction)
            if slope <= -_SAFE_SLOPE * descent:
                return new, step
            alpha *= descent / (descent - slope)
        return None

    def flat_block(self) -> list[int] | None:
        """Return the sources with little curvature, where the largest entry of the gradient is among them.

        The current point is a full one afterwards if there are such sources.
        """
        block = self._flat_sources()
        if block is None or self._point.full:
            return block
        # By curvatures some iterations old, there is a block.
        self._complete()
        return self._flat_sources()

    def _flat_sources(self) -> list[int] | None:
        xp = _xp.array_namespace(self._Y)
        k = self._point.W.shape[0]
        curvatures, gradient = (_xp.to_numpy(a) for a in (self._known.curvatures(self._signs), xp.abs(self._gradient)))
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
        self._complete()
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
    Y: Array, point: Point, signs: Array, direction: Array, contrast: Contrast, noise: float
) -> tuple[Point, Array] | None:
    """Return the first full point along the curve of rotations that lowers the objective, and the step to it.

    Near a solution the decrease is smaller than the rounding of the objective: a change within `noise` of it is then
    judged by the slope at the new point, which stays accurate (the approximate Wolfe condition of Hager and Zhang).
    Returns None after too many halvings.
    """
    xp = _xp.array_namespace(direction)
    start, descent = point.loss(signs), inner(point.gradient(signs), direction)
    if descent >= 0:
        return None
    slack = noise * float(xp.sum(xp.abs(point.values)))
    alpha = _longest(direction)
    for _ in range(_MAX_HALVINGS):
        step = alpha * direction
        new = evaluate(Y, xp.matmul(rotation(step), point.W), contrast)
        change = new.loss(signs) - start
        if change <= _DECREASE * alpha * descent:
            return new, step
        slope = inner(new.gradient(signs), direction)
        if change <= slack and abs(slope) <= _SAFE_SLOPE * abs(descent):
            return new, step
        alpha /= 2
    return None


def rotation(skew: Array) -> Array:
    """Return the Cayley transform of a skew matrix: orthogonal, and its exponential up to third order."""
    xp = _xp.array_namespace(skew)
    eye = xp.eye(skew.shape[0], dtype=skew.dtype, device=_xp.device(skew))
    return xp.linalg.solve(eye - skew / 2, eye + skew / 2)


def _longest(direction: Array) -> float:
    """Return the length of the first step to try: no pair of sources turns by more than a radian at once."""
    return min(1.0, 1 / _largest(direction))


def _largest(a: Array) -> float:
    xp = _xp.array_namespace(a)
    return float(xp.max(xp.abs(a)))
