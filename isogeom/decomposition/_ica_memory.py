"""Memory of L-BFGS over rotations: steps and gradient differences in their tangent space."""

from __future__ import annotations

from collections import deque

from isogeom import _xp
from isogeom._xp import Array


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
        curvature = inner(step, change)
        if curvature > 1e-10 * inner(step, step):
            self._pairs.append((step, change, curvature))

    def direction(self, gradient: Array, hessian: Array) -> Array:
        """Return minus the inverse of the model times the gradient: the two-loop recursion around the diagonal."""
        xp = _xp.array_namespace(gradient)
        q, weights = gradient, []
        # Not by `inner`: to find out the library of two arrays takes longer than to multiply them.
        for step, change, curvature in reversed(self._pairs):
            weights.append(float(xp.sum(step * q)) / curvature)
            q = q - weights[-1] * change
        q = q / hessian
        for step, change, curvature in self._pairs:
            q = q + (weights.pop() - float(xp.sum(change * q)) / curvature) * step
        # Rounding would otherwise let W drift off the rotations.
        return (xp.matrix_transpose(q) - q) / 2


def inner(a: Array, b: Array) -> float:
    """Return the sum of the products of the entries."""
    return float(_xp.array_namespace(a, b).sum(a * b))
