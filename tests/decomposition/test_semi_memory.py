"""Memory that a fit takes on top of its rows."""

import tracemalloc

import numpy as np
import pytest
from oracles.semi_nmf import matched_cosines

from isogeom.decomposition import SemiNMF


@pytest.fixture(scope="module")
def wide():
    """Rows of a width that is usual for activations, 20 000 x 768 in float32 (59 MiB), and their 25 atoms."""
    rng = np.random.default_rng(0)
    D = rng.standard_normal((25, 768), dtype=np.float32)
    D /= np.linalg.norm(D, axis=1, keepdims=True)
    codes = rng.exponential(size=(20_000, 25)) * (rng.random((20_000, 25)) < 0.2)
    X = codes.astype(np.float32) @ D
    X += 0.0125 * rng.standard_normal(X.shape, dtype=np.float32)
    # Kernels are loaded, and compiled, outside of the measurement.
    SemiNMF(25, max_iter=1, random_state=0).fit(X[:2500])
    return X, D


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("options", [{"alpha": 0}, {}, {"center": True}], ids=["plain", "sparse", "centred"])
def test_a_fit_takes_little_of_what_its_rows_take(wide, options):
    X, D = wide
    tracemalloc.start()
    model = SemiNMF(25, random_state=0, max_iter=10, **options).fit(X)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert model.reconstruction_err_ > 0
    if "center" not in options:
        assert np.mean(matched_cosines(model.components_, D) > 0.9) >= 0.9
    assert peak < 0.4 * X.nbytes
