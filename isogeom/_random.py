"""Randomness: one rule for seeds, and draws made on the host so that every backend sees the same numbers."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from isogeom import _xp


def check_rng(seed: Any, name: str = "rng") -> np.random.Generator:
    """Turn `seed` into a :class:`numpy.random.Generator`.

    Parameters
    ----------
    seed : None, int, numpy.random.Generator, numpy.random.RandomState or numpy.random.SeedSequence
        None means fresh entropy from the operating system. A Generator is used as it is (its state advances); a
        RandomState is asked for one integer, so it advances too.
    name : str
        Name of the parameter, for the error message.

    Returns
    -------
    numpy.random.Generator
    """
    if isinstance(seed, np.random.Generator):
        return seed
    if isinstance(seed, np.random.RandomState):
        return np.random.default_rng(int(seed.randint(0, 2**31 - 1)))
    if seed is None or isinstance(seed, np.random.SeedSequence):
        return np.random.default_rng(seed)
    if isinstance(seed, numbers.Integral) and not isinstance(seed, bool):
        if seed < 0:
            raise ValueError(f"{name}={seed} must be a nonnegative integer.")
        return np.random.default_rng(int(seed))
    raise ValueError(f"{name}={seed!r} must be None, an int, a numpy Generator or a RandomState.")


def standard_normal(rng: np.random.Generator, shape: tuple[int, ...], ref: _xp.Array) -> _xp.Array:
    """Draw standard normal values on the host in float64 and move them to the library, device and dtype of `ref`."""
    return _xp.asarray_like(rng.standard_normal(shape), ref)
