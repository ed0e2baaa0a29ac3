"""Validation of inputs, and the only place that touches scikit-learn's internals."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_array, validate_data

from isogeom import _xp
from isogeom._xp import Array

__all__ = [
    "Transformer",
    "check_choice",
    "check_integer",
    "check_real",
    "check_rows",
    "check_same_library",
    "check_sample_rows",
]


class Transformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Base of isogeom's transformers: tags, output names and row validation; no numerics."""

    # Makes scikit-learn's HTML representation show parameter descriptions and fitted attributes.
    _doc_link_module = "isogeom"
    _doc_link_template = "https://github.com/isogeom/isogeom/blob/main/docs/api.md"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.array_api_support = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _check_X(self, X: Any, *, reset: bool, min_samples: int = 1, min_features: int = 1) -> Array:
        """Validate the rows passed to `fit` (reset=True) or to a method of the fitted estimator."""
        if not _xp.is_foreign(X):
            # ensure_min_features is reported after the count of features of `fit` is recorded, as scikit-learn does.
            return validate_data(
                self,
                _lift_half(X),
                reset=reset,
                dtype=[np.float64, np.float32],
                order=None,
                ensure_min_samples=min_samples,
                ensure_min_features=min_features,
            )
        X = check_rows(X, name="X", min_samples=min_samples, min_features=min_features, owner=type(self).__name__)
        return validate_data(self, X, reset=reset, skip_check_array=True)

    def _check_fitted_library(self, X: Any, attribute: str, method: str) -> None:
        """Raise if `X` lives in another library or on another device than the fitted attribute."""
        check_same_library(X, getattr(self, attribute), owner=type(self).__name__, method=method)


def _lift_half(X: Any) -> Any:
    """Upcast numpy half precision to float32: products and sums of float16 overflow at 65504."""
    if isinstance(X, np.ndarray) and X.dtype == np.float16:
        return X.astype(np.float32)
    return X


def check_rows(X: Any, *, name: str, min_samples: int = 1, min_features: int = 1, owner: str | None = None) -> Array:
    """Validate a matrix of rows from any array library.

    Parameters
    ----------
    X : array-like or array of shape (n_samples, n_features)
        Anything scikit-learn accepts, or a torch / array-API array. Tensors are detached; float16 and bfloat16 become
        float32; integers and booleans become floating.
    name : str
        Name of the parameter, for error messages.
    min_samples, min_features : int
        Smallest accepted shape.
    owner : str, default=None
        Name of the estimator or function, for error messages.

    Returns
    -------
    array of shape (n_samples, n_features)
        float32 or float64, finite, same library and device as `X`.

    Raises
    ------
    ValueError
        If the shape is wrong or a value is NaN or infinite.
    TypeError
        If the dtype is not real, or `X` is sparse.
    """
    if not _xp.is_foreign(X):
        if sp.issparse(X):
            raise TypeError(f"{name} is sparse; isogeom works on dense rows: pass {name}.toarray().")
        return check_array(
            _lift_half(X),
            dtype=[np.float64, np.float32],
            ensure_min_samples=min_samples,
            ensure_min_features=min_features,
            input_name=name,
            estimator=owner,
        )
    who = "" if owner is None else f" by {owner}"
    if X.ndim != 2:
        raise ValueError(
            f"Expected 2D array {name} of shape (n_samples, n_features), got {X.ndim}D array of shape "
            f"{tuple(X.shape)} instead. Reshape your data: tokens as rows, x.reshape(-1, x.shape[-1])."
        )
    if X.shape[0] < min_samples:
        raise ValueError(
            f"Found array {name} with {X.shape[0]} sample(s) (shape={tuple(X.shape)}) while a minimum of {min_samples} "
            f"is required{who}."
        )
    if X.shape[1] < min_features:
        raise ValueError(
            f"Found array {name} with {X.shape[1]} feature(s) (shape={tuple(X.shape)}) while a minimum of "
            f"{min_features} is required{who}."
        )
    X = _xp.as_real_floating(X, name)
    xp = _xp.array_namespace(X)
    if not bool(xp.all(xp.isfinite(X))):
        raise ValueError(
            f"Input {name} contains NaN or infinity. Drop or repair those rows first: "
            "X[torch.isfinite(X).all(1)] keeps the finite ones."
        )
    return X


def check_sample_rows(X: Any, *, name: str, owner: str, n_features: int, like: Array | None = None) -> Array:
    """Validate rows that must have `n_features` columns and, if `like` is given, live beside that array."""
    if like is not None:
        check_same_library(X, like, owner=owner, method=name)
    X = check_rows(X, name=name, owner=owner)
    if X.shape[1] != n_features:
        raise ValueError(f"{name} has {X.shape[1]} features, but {owner} is expecting {n_features} features as input.")
    return X


def check_same_library(X: Any, attribute: Array, *, owner: str, method: str) -> None:
    """Raise ValueError unless `X` lives in the array library and on the device of `attribute`."""
    x_foreign, a_foreign = _xp.is_foreign(X), _xp.is_foreign(attribute)
    if not x_foreign and not a_foreign:
        return
    if x_foreign and a_foreign:
        same = _xp.array_namespace(X) is _xp.array_namespace(attribute)
        if same and _xp.device(X) == _xp.device(attribute):
            return
    raise ValueError(
        f"Inputs passed to {owner}.{method}() must use the same namespace and the same device as those passed to "
        f"fit(). "
        f"Fitted on {_where(attribute)}, called with {_where(X)}: move the input there, or refit."
    )


def _where(x: Any) -> str:
    if not _xp.is_foreign(x):
        return "numpy"
    return f"{type(x).__module__.split('.')[0]} on device {_xp.device(x)}"


def check_integer(value: Any, name: str, *, low: int | None = None, high: int | None = None, hint: str = "") -> int:
    """Return `value` as an int inside [low, high], or raise an error that names the parameter."""
    if not isinstance(value, numbers.Integral) or isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} must be an integer, got {type(value).__name__}.{hint and ' ' + hint}")
    _check_bounds(value, name, low, high, hint)
    return int(value)


def check_real(value: Any, name: str, *, low: float | None = None, high: float | None = None, hint: str = "") -> float:
    """Return `value` as a float inside [low, high], or raise an error that names the parameter."""
    if not isinstance(value, numbers.Real) or isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} must be a real number, got {type(value).__name__}.{hint and ' ' + hint}")
    if not np.isfinite(float(value)):
        raise ValueError(f"{name}={value!r} must be finite.{hint and ' ' + hint}")
    _check_bounds(value, name, low, high, hint)
    return float(value)


def _check_bounds(value: Any, name: str, low: float | None, high: float | None, hint: str) -> None:
    too_low = low is not None and value < low
    too_high = high is not None and value > high
    if too_low or too_high:
        wanted = " and ".join(
            part
            for part in (f"at least {low}" if low is not None else "", f"at most {high}" if high is not None else "")
            if part
        )
        raise ValueError(f"{name}={value!r} must be {wanted}.{hint and ' ' + hint}")


def check_choice(value: Any, name: str, choices: tuple[Any, ...]) -> Any:
    """Return `value` if it is one of `choices`, or raise ValueError listing them."""
    if isinstance(value, np.bool_):
        value = bool(value)
    if not any(value is c or (isinstance(value, str) and value == c) for c in choices):
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")
    return value
