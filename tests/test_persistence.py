"""Fitted estimators survive pickling and cloning, whatever library they were fitted with."""

import pickle

import numpy as np
import pytest
from sklearn.base import clone

from isogeom import Moments, _xp
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


def test_moments_pickle(X):
    moments = Moments().update(X)
    again = pickle.loads(pickle.dumps(moments))
    np.testing.assert_array_equal(again.scatter, moments.scatter)
    assert again.merge(moments).count == 400
