"""Queries far beyond the rows, and rows far beyond the others: nothing overflows or vanishes in silence."""

import warnings
from fractions import Fraction

import numpy as np
import pytest
from conftest import make_array

from isogeom import _xp, dimension
from isogeom._neighbors._rows import nearest
from isogeom.dimension import MLE, NeighborTable, TwoNN

LIBRARIES = ["numpy", "strict", "torch", "torch-cuda"]
RNG = np.random.default_rng(0)
ESTIMATORS = [item for item in map(vars(dimension).get, dimension.__all__) if hasattr(item, "transform")]
SCALES = [1e3, 1e12, 1e13, 1e19, 1e20, 1e30, 1e160, 1e200, 1e300]


def exact_distances(X, query):
    """Distances by whole numbers, rounded once: the square root of a fraction, in units that cannot overflow."""
    found = []
    for row in X:
        square = sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(row.tolist(), query.tolist()))
        shift = max(0, square.numerator.bit_length() - square.denominator.bit_length()) // 2
        found.append(np.ldexp(float(square / Fraction(4) ** shift) ** 0.5, shift))
    return np.array(found)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("d", [3, 30])
@pytest.mark.parametrize("scale", SCALES)
def test_neighbours_of_far_rows(library, d, scale):
    X, far = RNG.standard_normal((60, d)), RNG.standard_normal((2, d)) * scale
    near = RNG.standard_normal((3, d))
    # All in one call: the near ones must not suffer from the far ones.
    queries = np.concatenate((near[:1], far[:1], near[1:], far[1:]))
    found = nearest(make_array(library, X), make_array(library, queries), 10)
    distances, indices = (_xp.to_numpy(array) for array in found)
    for i, query in enumerate(queries):
        expected = exact_distances(X, query)
        assert len(set(indices[i])) == 10
        np.testing.assert_allclose(distances[i], np.sort(expected)[:10], rtol=1e-14)
        # Each is as near as it is said to be.
        np.testing.assert_allclose(expected[indices[i]], distances[i], rtol=1e-14)


def test_far_rows_of_several_magnitudes_with_compiled_loops():
    X = RNG.standard_normal((5000, 40)).astype(np.float32)
    queries = RNG.standard_normal((600, 40)).astype(np.float32)
    plain = nearest(X, queries, 5)
    far = {7: 1e15, 100: 1e25, 599: 1e37}
    for at, scale in far.items():
        queries[at] *= np.float32(scale)
    distances, indices = nearest(X, queries, 5)
    others = np.setdiff1d(np.arange(600), list(far))
    np.testing.assert_array_equal(indices[others], plain[1][others])
    np.testing.assert_array_equal(distances[others], plain[0][others])
    for at in far:
        norm = np.linalg.norm(queries[at].astype(float))
        np.testing.assert_allclose(distances[at], norm, rtol=1e-13)
        assert len(set(indices[at])) == 5


@pytest.mark.parametrize("within", [None, np.arange(0, 60, 2)])
def test_far_rows_among_some(within):
    X = RNG.standard_normal((60, 12))
    _, indices = nearest(X, X[:2] * 1e100, 10, within=within)
    assert within is None or np.isin(indices, within).all()


def test_distances_beyond_float64_are_refused():
    X = RNG.standard_normal((60, 30))
    with pytest.raises(ValueError, match="so far from those of fit that their distance overflows"):
        nearest(X, np.full((2, 30), 1.7e308), 5)


@pytest.mark.parametrize("cls", ESTIMATORS, ids=lambda cls: cls.__name__)
def test_local_dimensions_of_far_rows_are_finite(cls):
    X = np.random.default_rng(0).standard_normal((150, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = cls().fit(X)
    queries = np.concatenate((X[:5], X[5:7] * 1e30, X[7:9] * 1e160, X[9:11] * 1e200))
    local = model.transform(queries)
    assert np.isfinite(local).all()
    np.testing.assert_allclose(local[:5], model.transform(X[:5]), rtol=1e-12)


@pytest.mark.parametrize("library", ["numpy", "strict", "torch"])
def test_far_rows_beyond_the_precision_of_fit(library):
    X = np.random.default_rng(0).standard_normal((150, 12))
    model = MLE().fit(make_array(library, X.astype(np.float32)))
    queries = np.concatenate((X[:3], X[3:5] * 1e200))
    local = _xp.to_numpy(model.transform(make_array(library, queries)))
    assert np.isfinite(local).all()
    np.testing.assert_allclose(local[:3], MLE().fit(X).transform(X[:3]), rtol=1e-4)


@pytest.mark.parametrize("d", [3, 12])
@pytest.mark.parametrize("scale", [1e100, 1e150, 1e170, 1e300])
def test_an_outlier_hides_no_distances_in_silence(d, scale):
    X = np.random.default_rng(0).standard_normal((200, d))
    expected = TwoNN().fit(X).dimension_
    X[7] = scale
    if scale < 1e151:
        assert TwoNN().fit(X).dimension_ == pytest.approx(expected, rel=0.05)
    else:
        with pytest.raises(ValueError, match="distance vanishes beside its largest entry"):
            TwoNN().fit(X)


def test_duplicates_do_not_count_as_vanished():
    X = np.random.default_rng(0).standard_normal((200, 12)) * 1e200
    X[9] = X[4]
    table = NeighborTable.from_rows(X, 5, duplicates="keep")
    assert np.count_nonzero(table.distances == 0) == 2
    assert MLE(5, duplicates="keep").fit(X).n_samples_dropped_ == 2
