"""Fitted estimators survive pickling and cloning, whatever library they were fitted with."""

import dataclasses
import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from isogeom import Moments, _xp
from isogeom._validation import host_copy
from isogeom.decomposition import ICA, PCA, SemiNMF
from isogeom.tangent import TangentProxy

ESTIMATORS = [PCA(3), ICA(3, random_state=0), SemiNMF(3, random_state=0), TangentProxy(n_directions=3)]


@pytest.fixture(scope="module")
def X():
    rng = np.random.default_rng(0)
    return rng.laplace(size=(200, 3)) @ rng.standard_normal((3, 6)) + 0.1 * rng.standard_normal((200, 6))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
def test_pickle_keeps_the_codes(estimator, X, as_array):
    Xa = as_array(X)
    fitted = clone(estimator).fit(Xa)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(_xp.to_numpy(again.transform(Xa)), _xp.to_numpy(fitted.transform(Xa)))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
def test_clone_forgets_the_fit(estimator, X):
    fitted = clone(estimator).fit(X)
    assert not [name for name in vars(clone(fitted)) if name.endswith("_")]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
def test_skops_round_trip(estimator, X):
    skops_io = pytest.importorskip("skops.io", reason="skops is not installed")
    fitted = clone(estimator).fit(X)
    written = skops_io.dumps(fitted)
    untrusted = skops_io.get_untrusted_types(data=written)
    # Nothing but this library has to be trusted: the rest of the state is arrays, scalars and strings.
    assert untrusted
    assert all(name.startswith("isogeom.") for name in untrusted)
    again = skops_io.loads(written, trusted=untrusted)
    assert again.get_params().keys() == fitted.get_params().keys()
    np.testing.assert_array_equal(again.transform(X), fitted.transform(X))


def test_skops_keeps_a_stream(X):
    skops_io = pytest.importorskip("skops.io", reason="skops is not installed")
    written = skops_io.dumps(PCA(3).partial_fit(X[:90]))
    again = skops_io.loads(written, trusted=skops_io.get_untrusted_types(data=written)).partial_fit(X[90:])
    np.testing.assert_allclose(again.components_, PCA(3).fit(X).components_, atol=1e-10)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
def test_to_numpy_transforms_numpy_rows_alike(estimator, X, as_array):
    fitted = clone(estimator).fit(as_array(X))
    host = fitted.to_numpy()
    assert type(host) is type(fitted)
    expected = _xp.to_numpy(fitted.transform(as_array(X)))
    np.testing.assert_allclose(host.transform(X), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(
        host.inverse_transform(expected), _xp.to_numpy(fitted.inverse_transform(as_array(expected))), rtol=1e-10
    )
    # The original is as it was, and shares nothing with the copy.
    np.testing.assert_array_equal(_xp.to_numpy(fitted.transform(as_array(X))), expected)
    pickled = pickle.dumps(host)
    assert b"torch" not in pickled
    assert b"array_api_strict" not in pickled


def test_to_numpy_continues_a_stream_and_needs_a_fit(X, as_array):
    with pytest.raises(NotFittedError):
        PCA().to_numpy()
    host = PCA(3).partial_fit(as_array(X[:90])).to_numpy()
    np.testing.assert_allclose(host.partial_fit(X[90:]).components_, PCA(3).fit(X).components_, atol=1e-10)


def test_host_copies_enter_containers(as_array):
    @dataclasses.dataclass(frozen=True)
    class Result:
        values: object
        name: str

    array = as_array(np.arange(3.0))
    copied = host_copy({"a": [array, (Result(array, "r"), Moments, 2.5)]})
    result = copied["a"][1][0]
    for found in (copied["a"][0], result.values):
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, [0, 1, 2])
        assert not np.shares_memory(found, _xp.to_numpy(array))
    assert (result.name, *copied["a"][1][1:]) == ("r", Moments, 2.5)


def test_moments_move_as_scikit_learn_moves_state(X, as_array):
    moments = Moments().update(as_array(X))
    moved = moments.__sklearn_array_api_convert__(_xp.to_numpy)
    assert type(moved.scatter) is type(moved.mean) is np.ndarray
    np.testing.assert_array_equal(moved.scatter, _xp.to_numpy(moments.scatter))
    assert moved.count == moments.count
    assert Moments().__sklearn_array_api_convert__(_xp.to_numpy).n_features is None


def test_moments_pickle(X):
    moments = Moments().update(X)
    again = pickle.loads(pickle.dumps(moments))
    np.testing.assert_array_equal(again.scatter, moments.scatter)
    assert again.merge(moments).count == 400
