"""Maximum of a signed contrast over rotations: FastICA steps to start, preconditioned L-BFGS to finish.

Everything that touches the rows is a sum over blocks of them, the same code on every array library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from isogeom import _xp
from isogeom._xp import Array, Namespace
from isogeom.decomposition._ica_contrasts import Contrast, gaussian_reference
from isogeom.decomposition._ica_descent import PATIENCE, Descent
from isogeom.decomposition._ica_points import Point, evaluate

# Rows that a warm start looks at: at least this many, and this many per source. From fewer, 50 Laplace sources do not
# stand out of the sampling noise.
_WARM_ROWS, _WARM_ROWS_PER_SOURCE = 8192, 300
# A block is entered again only if the gradient has come down to this share since the time before.
_BLOCK_GAIN = 0.5
# A block is left once its gradient is this share of the gradient outside.
_BLOCK_DEPTH = 0.03


@dataclass(frozen=True)
class Solution:
    """End of a run: the point, the signs it was optimised under, and the objective where it was known on the way."""

    point: Point
    signs: Array
    n_iter: int
    gradient_norm: float
    path: tuple[float, ...]


def polar(T: Array) -> Array:
    """Return the orthogonal matrix nearest to `T`: symmetric decorrelation."""
    xp = _xp.array_namespace(T)
    u, _, vt = xp.linalg.svd(T, full_matrices=False)
    return xp.matmul(u, vt)


def warm_start(
    Y: Array,
    W: Array,
    contrast: Contrast,
    *,
    max_steps: int,
    tol: float,
    step: Callable[[dict[str, float]], bool] = lambda _: False,
) -> tuple[Array, int]:
    """Make at most `max_steps` symmetric FastICA steps on evenly spaced rows; return the rotation and the steps made.

    Far from a solution, a sample of the rows points the way as well as all of them do. Stops once no row of W turns by
    more than `tol` (1 - |cos|), or where `step` says so, which gets that turn after every step.
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
        if step({"change": change}):
            break
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
        Gets the last objective known and the gradient norm after every iteration, and tells whether to stop there.
        Within a block, entries of the gradient outside of it are those found before.

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
        while part.norm > tol and part.idle < PATIENCE and not (leave and part.flat_block() is not None):
            if done >= max_iter:
                return True
            done += 1
            moved = part.advance()
            if moved is None:
                break
            if moved:
                if part.full:
                    path.append(rest + part.objective())
                if step({"objective": path[-1], "gradient_norm": max(part.norm, outside)}):
                    return True
        return False

    blocks, entry = True, math.inf
    while not follow(run, tol, 0.0, 0.0, leave=blocks):
        block = run.flat_block() if blocks else None
        if block is None or run.norm <= tol or run.idle >= PATIENCE:
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
        blocks = done > before and part.idle < PATIENCE
        run.adopt(part, block)
        if not part.full:
            path.append(run.objective())
        if ended:
            break
    point, signs = run.best
    if not point.full:
        point = evaluate(Y, point.W, contrast)
        path.append(point.loss(signs, gaussian_reference(contrast.name)[0]))
    return Solution(point, signs, done, run.norm, tuple(path))
