"""What PCA, ICA and Semi-NMF have in common: dtypes, names, containers, displays."""

import re
import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from isogeom import _xp
from isogeom.decomposition import ICA, PCA, SemiNMF

ESTIMATORS = [PCA(3), ICA(3, random_state=0), SemiNMF(3, random_state=0)]


@pytest.fixture(scope="module")
def X():
    rng = np.random.default_rng(0)
    return rng.laplace(size=(200, 3)) @ rng.standard_normal((3, 6)) + 0.1 * rng.standard_normal((200, 6)) + 1


@pytest.fixture(params=ESTIMATORS, ids=lambda e: type(e).__name__)
def estimator(request):
    return clone(request.param)


def fit(estimator, X):
    """Fit; how far the iterations got is the business of other tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(X)


@pytest.mark.parametrize(("fitted_in", "asked_in"), [("float32", "float64"), ("float64", "float32")])
def test_rows_of_the_other_precision_are_transformed_in_their_own(estimator, X, as_array, fitted_in, asked_in):
    model = fit(estimator, as_array(X, dtype=fitted_in))
    rows = as_array(X, dtype=asked_in)
    Z = model.transform(rows)
    assert Z.dtype == rows.dtype
    own = model.transform(as_array(X, dtype=fitted_in))
    np.testing.assert_allclose(_xp.to_numpy(Z), _xp.to_numpy(own), atol=1e-5 * np.abs(_xp.to_numpy(own)).max())
    back = model.inverse_transform(Z)
    assert back.dtype == rows.dtype
    np.testing.assert_allclose(_xp.to_numpy(back), _xp.to_numpy(model.inverse_transform(own)), atol=1e-4)


def test_results_have_the_precision_of_the_fit(estimator, X, as_array):
    rows = as_array(X, dtype=np.float32)
    model = fit(estimator, rows)
    assert model.components_.dtype == model.dictionary_.dtype == rows.dtype
    assert tuple(model.dictionary_.shape) == (3, 6)


def test_names_of_the_columns(estimator, X):
    prefix = type(estimator).__name__.lower()
    assert list(fit(estimator, X).get_feature_names_out()) == [f"{prefix}{i}" for i in range(3)]


def test_data_frames_in_and_out(estimator, X):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame(X, columns=list("abcdef"), index=np.arange(200) + 7)
    model = fit(estimator.set_output(transform="pandas"), frame)
    out = model.transform(frame)
    assert list(out.columns) == list(model.get_feature_names_out())
    assert list(out.index) == list(frame.index)
    assert list(model.feature_names_in_) == list("abcdef")
    expected = fit(clone(estimator).set_output(transform="default"), X).transform(X)
    np.testing.assert_array_equal(out.to_numpy(), expected)


def test_clone_keeps_parameters_and_forgets_the_fit(estimator, X):
    fresh = clone(fit(estimator, X))
    assert fresh.get_params() == estimator.get_params()
    assert not [name for name in vars(fresh) if name.endswith("_")]


@pytest.mark.parametrize("library", ["numpy", "torch", "strict"], indirect=True)
def test_html_shows_the_fitted_attributes(estimator, X, as_array):
    model = fit(estimator, as_array(X))
    name = type(estimator).__name__
    for page in (model._repr_html_(), model._repr_mimebundle_()["text/html"]):
        assert name in page
        for attribute in ("components_", "n_iter_" if name == "SemiNMF" else "mean_"):
            assert attribute in page, attribute
        # A tuple from numpy, torch.Size([3, 6]) from torch.
        assert re.search(r"[(\[]3, 6[)\]]", page)


def test_html_of_an_unfitted_estimator(estimator):
    assert type(estimator).__name__ in estimator._repr_html_()


def test_codes_and_dictionary_rebuild_what_inverse_transform_rebuilds(estimator, X):
    model = fit(estimator, X)
    Z = model.transform(X)
    offset = getattr(model, "mean_", None)
    rebuilt = Z @ model.dictionary_ + (0 if offset is None else offset)
    np.testing.assert_allclose(model.inverse_transform(Z), rebuilt, atol=1e-10)
