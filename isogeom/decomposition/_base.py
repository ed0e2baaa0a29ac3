"""What the decompositions share: the dictionary, and products over row blocks."""

from __future__ import annotations

from typing import Any

from isogeom import _xp
from isogeom._validation import Transformer, check_rows
from isogeom._xp import Array


class Decomposition(Transformer):
    """Base of the estimators that write rows as ``X ≈ Z @ dictionary_ (+ mean_)``."""

    @property
    def _n_features_out(self) -> int:
        """Number of output features, for ``get_feature_names_out`` and ``set_output``."""
        return int(self.components_.shape[0])

    def _check_codes(self, Z: Any) -> Array:
        """Validate codes passed to `inverse_transform`."""
        self._check_fitted_library(Z, "components_", "inverse_transform")
        owner = type(self).__name__
        Z = check_rows(Z, name="X", owner=owner)
        if Z.shape[1] != self._n_features_out:
            raise ValueError(
                f"X has {Z.shape[1]} columns, but this {owner} has {self._n_features_out} components: pass the codes "
                "that transform() returned."
            )
        return Z


def floating_dtype(X: Array) -> Any:
    """Return the dtype of results for these rows: float32 for half precision, floating for integers, else their own."""
    return _xp.as_real_floating(X[:1, ...], "X").dtype


def project(X: Array, rows: Array, mean: Array | None = None) -> Array:
    """Return ``(X - mean) @ rows.T`` in the floating dtype of `X`, block by block: no temporary of the size of `X`."""
    xp = _xp.array_namespace(X)
    dtype = floating_dtype(X)
    columns = xp.matrix_transpose(xp.astype(rows, dtype))
    # The mean is taken off before the product: afterwards, a large mean would have cost digits in float32.
    shift = None if mean is None else xp.astype(mean, dtype)
    parts = (_xp.as_real_floating(block, "X") for block in _xp.row_blocks(X))
    blocks = [xp.matmul(block if shift is None else block - shift, columns) for block in parts]
    return blocks[0] if len(blocks) == 1 else xp.concat(blocks, axis=0)


def expand(Z: Array, rows: Array, mean: Array | None = None) -> Array:
    """Return ``Z @ rows + mean`` in the dtype of `Z`."""
    xp = _xp.array_namespace(Z)
    out = xp.matmul(Z, xp.astype(rows, Z.dtype))
    return out if mean is None else out + xp.astype(mean, Z.dtype)
