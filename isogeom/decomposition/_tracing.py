"""Codes that carry a gradient: the derivative of `transform` for tensors in an autograd graph."""

from __future__ import annotations

from typing import Any

from isogeom import _xp
from isogeom._xp import Array

# Entries of the systems, one of shape (k, k) per row, that are solved together.
_SYSTEM_ENTRIES = 2**22


def is_traced(x: Any) -> bool:
    """Tell whether `x` is a tensor in an autograd graph."""
    return bool(getattr(x, "requires_grad", False))


def traced_codes(x: Any, codes: Array, D: Array, *, nonnegative: bool, ridge: float = 0.0) -> Array:
    """Return `codes` as a function of the rows: same values, and the derivative that they have at `x`.

    Codes minimise ``|x - z @ D|² + ridge |z|²``, up to a linear term. Where a small change of x leaves the set F of
    nonzero codes alone, that is ``dz_F = (D_F @ D_F.T + ridge)⁻¹ @ D_F @ dx``; the other codes stay zero.

    Parameters
    ----------
    x : array of shape (n_samples, n_features)
        Rows in an autograd graph.
    codes : array of shape (n_samples, k)
        Their codes, outside the graph.
    D : array of shape (k, n_features)
        Atoms.
    nonnegative : bool
        Whether only positive codes move with the rows; otherwise all of them do.
    ridge : float, default=0.0
        Weight of half the squared codes.
    """
    xp = _xp.array_namespace(codes, D)
    dev = _xp.device(codes)
    acc, k = _xp.accumulator_dtype(xp, dev), int(D.shape[0])
    D, eye = xp.astype(D, acc), xp.eye(k, dtype=acc, device=dev)
    gram = xp.matmul(D, xp.matrix_transpose(D)) + ridge * eye
    # Zero in value: what is added to the codes below is their derivative alone.
    change = xp.matmul(xp.astype(x - x.detach(), acc), xp.matrix_transpose(D))
    if not nonnegative:
        return codes + xp.astype(xp.matmul(change, xp.linalg.inv(gram)), codes.dtype)
    size = max(1, _SYSTEM_ENTRIES // k**2)
    parts = []
    for start in range(0, int(codes.shape[0]), size):
        active = xp.astype(codes[start : start + size, :] > 0, acc)
        row, column = xp.expand_dims(active, axis=1), xp.expand_dims(active, axis=2)
        # Rows and columns outside F are those of the identity: systems of one shape, whatever the support.
        systems = gram * row * column + eye * (1 - row)
        right = xp.expand_dims(active * change[start : start + size, :], axis=2)
        parts.append(xp.linalg.solve(systems, right)[:, :, 0])
    return codes + xp.astype(xp.concat(parts, axis=0), codes.dtype)
