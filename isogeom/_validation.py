"""Validation of inputs, and the only place that touches scikit-learn's internals."""

from __future__ import annotations

import copy
import dataclasses
import math
import numbers
import sys
import warnings
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import _safe_indexing, assert_all_finite
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from isogeom import _xp
from isogeom._callbacks import IterativeMixin, Steps
from isogeom._moments import Moments
from isogeom._xp import Array

__all__ = [
    "IterativeMixin",
    "Steps",
    "Transformer",
    "check_beside",
    "check_choice",
    "check_integer",
    "check_real",
    "check_rows",
    "check_same_library",
    "check_sample_rows",
    "host_copy",
    "take_rows",
    "warn_user",
]

# Packages whose frames lie between the user's line and the place that warns.
_INNER_PACKAGES = {"isogeom", "sklearn", "joblib"}
# Entries of a block that is looked through for values that are not finite.
_FINITE_ELEMENTS = 2**22


class Transformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Base of isogeom's transformers: tags, output names and row validation; no numerics."""

    # Makes scikit-learn's HTML representation show parameter descriptions and fitted attributes.
    _doc_link_module = "isogeom"
    # The documentation is in the docstrings: there is no page to link to.
    _doc_link_template = ""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.array_api_support = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _check_X(
        self,
        X: Any,
        *,
        reset: bool,
        min_samples: int = 1,
        min_features: int = 1,
        finite: bool = True,
        convert: bool = True,
    ) -> Array:
        """Validate the rows passed to `fit` (reset=True) or to a method of the fitted estimator.

        `finite` False spares numpy rows the pass that looks for NaN and infinity, for callers that meet them anyway.
        `convert` False leaves half precision, integers and booleans as they are, for callers that convert every block
        of rows when they read it: an array of them is then not copied.
        """
        _refuse_moments(X, "X", type(self).__name__)
        if not convert and _is_convertible(X) and X.shape[0] >= min_samples and X.shape[1] >= max(min_features, 1):
            X = X.detach() if hasattr(X, "detach") else np.asarray(X) if isinstance(X, np.ndarray) else X
            if finite:
                _check_finite(X, "X", type(self).__name__)
            return validate_data(self, X, reset=reset, skip_check_array=True)
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
                ensure_all_finite=finite,
            )
        X = check_rows(X, name="X", min_samples=min_samples, min_features=min_features, owner=type(self).__name__)
        return validate_data(self, X, reset=reset, skip_check_array=True)

    def _check_fitted_library(self, X: Any, attribute: str, method: str) -> None:
        """Raise if `X` lives in another library or on another device than the fitted attribute."""
        check_same_library(X, getattr(self, attribute), owner=type(self).__name__, method=method)

    def to_numpy(self) -> Any:
        """Return a copy of this fitted estimator with every array on the host, as numpy.

        The copy transforms numpy rows as this estimator transforms rows of its own library and device, and it can be
        loaded on a machine without that library. Parameters that hold arrays or estimators are copied too.

        Returns
        -------
        estimator
            A new estimator; no array in it shares memory with this one.

        Raises
        ------
        sklearn.exceptions.NotFittedError
            If `fit` was not called before.
        """
        check_is_fitted(self)
        return host_copy(self)


def host_copy(value: Any) -> Any:
    """Copy a fitted object to the host: arrays of any library become numpy arrays.

    Estimators, moments, dataclasses, lists, tuples and dicts are entered; everything else is returned as it is.
    """
    if _xp.is_foreign(value) or isinstance(value, np.ndarray):
        return np.array(_xp.to_numpy(value), copy=True)
    if isinstance(value, type):
        return value
    if hasattr(value, "__sklearn_array_api_convert__"):
        return value.__sklearn_array_api_convert__(host_copy)
    if isinstance(value, BaseEstimator):
        result = copy.copy(value)
        vars(result).update({name: host_copy(item) for name, item in vars(value).items() if not _is_callback(name)})
        return result
    if dataclasses.is_dataclass(value):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            # Results are frozen; this is the way dataclasses themselves set the fields of such objects.
            object.__setattr__(result, field.name, host_copy(getattr(value, field.name)))
        return result
    if isinstance(value, dict):
        return {key: host_copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(host_copy(item) for item in value)
    return value


def _is_callback(name: str) -> bool:
    """Whether scikit-learn keeps callbacks in this attribute: they are shared, as `clone` shares them."""
    return name == "_skl_callbacks"


def _is_convertible(X: Any) -> bool:
    """Whether `X` is a matrix of numbers of another dtype than float32 and float64, of numpy or of another library."""
    if not (isinstance(X, np.ndarray) or _xp.is_foreign(X)) or X.ndim != 2:
        return False
    if isinstance(X, np.ndarray):
        return X.dtype == np.float16 or X.dtype.kind in "iub"
    xp = _xp.array_namespace(X)
    if X.dtype in (xp.float32, xp.float64):
        return False
    return _xp.is_real_floating(xp, X) or bool(xp.isdtype(X.dtype, ("integral", "bool")))


def _check_finite(X: Array, name: str, owner: str | None) -> None:
    """Raise ValueError if a value is NaN or infinite; looked for block by block, without an array as large as `X`."""
    xp = _xp.array_namespace(X)
    if not _xp.is_real_floating(xp, X):
        return
    for block in _xp.row_blocks(X, max(_xp.BLOCK_ROWS, _FINITE_ELEMENTS // max(int(X.shape[1]), 1))):
        # A finite sum has no NaN and no infinity in it; a sum that overflowed says nothing.
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(xp.sum(block))
        if math.isfinite(total) or bool(xp.all(xp.isfinite(block))):
            continue
        if not _xp.is_foreign(X):
            assert_all_finite(block, input_name=name, estimator_name=owner)
        raise ValueError(
            f"Input {name} contains NaN or infinity. Drop or repair those rows first: "
            "X[torch.isfinite(X).all(1)] keeps the finite ones."
        )


def take_rows(X: Any, index: np.ndarray) -> Any:
    """Return the rows of `X` with the indices `index`; a data frame stays one, with its column names."""
    if _xp.is_foreign(X):
        xp = _xp.array_namespace(X)
        return xp.take(X, _xp.asarray_like(index, X, dtype=xp.int64), axis=0)
    return _safe_indexing(X, index)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of user code that called the package, however deep inside it the reason was found.

    Frames of scikit-learn are passed over too: a call may come through ``fit_transform``, a wrapper or a pipeline.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER_PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _lift_half(X: Any) -> Any:
    """Upcast numpy half precision to float32: products and sums of float16 overflow at 65504."""
    if isinstance(X, np.ndarray) and X.dtype == np.float16:
        return X.astype(np.float32)
    return X


def _refuse_moments(X: Any, name: str, owner: str | None) -> None:
    """Raise TypeError if `X` is Moments: not every step can do without the rows."""
    if isinstance(X, Moments):
        raise TypeError(f"{name} is Moments, but {owner or 'this'} needs the rows themselves here: pass an array.")


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
    _refuse_moments(X, name, owner)
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
    _check_finite(X, name, owner)
    return X


def check_sample_rows(X: Any, *, name: str, owner: str, n_features: int, like: Array | None = None) -> Array:
    """Validate rows that must have `n_features` columns and, if `like` is given, live beside that array."""
    if like is not None:
        check_beside(X, like, name=name)
    X = check_rows(X, name=name, owner=owner)
    if X.shape[1] != n_features:
        raise ValueError(f"{name} has {X.shape[1]} features, but {owner} is expecting {n_features} features as input.")
    return X


def check_same_library(X: Any, attribute: Array, *, owner: str, method: str) -> None:
    """Raise ValueError unless `X` lives in the array library and on the device of `attribute`."""
    if not _share_library(X, attribute):
        raise ValueError(
            f"Inputs passed to {owner}.{method}() must use the same namespace and the same device as those passed to "
            f"fit(). Fitted on {_where(attribute)}, called with {_where(X)}: move the input there, or refit."
        )


def check_beside(X: Any, other: Array, *, name: str, other_name: str = "the fitted proxy") -> None:
    """Raise ValueError unless the parameter `name` lives in the array library and on the device of `other`."""
    if not _share_library(X, other):
        raise ValueError(
            f"{name} must use the same namespace and the same device as {other_name}: {name} is on {_where(X)}, "
            f"{other_name} on {_where(other)}. Move one of them."
        )


def _share_library(X: Any, other: Any) -> bool:
    if not _xp.is_foreign(X) or not _xp.is_foreign(other):
        return _xp.is_foreign(X) == _xp.is_foreign(other)
    return _xp.array_namespace(X) is _xp.array_namespace(other) and bool(_xp.device(X) == _xp.device(other))


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
