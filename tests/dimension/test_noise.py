"""Maximum likelihood for distances with noise: the published values, by the oracle, and the limit without noise."""

import pytest
from oracles import dimension as oracle
from oracles.dimension_noise import noisy_dimension

from isogeom.dimension import MLE, NeighborTable


@pytest.mark.parametrize(
    ("X", "published", "exact"),
    [(oracle.fixture_a(), 4.04021528501, 4.039742097), (oracle.fixture_b(), 3.53568996516, 3.535375798)],
)
def test_published_values_with_noise(X, published, exact):
    """The definition by exact integrals; the published digits differ by 1 in 10 000.

    Integrals that begin 4.08 deviations below the distance, where this is positive, give them within 0.00001 on both
    clouds, so that they look like those of a truncated integral; its rule is not published.
    """
    found = noisy_dimension(NeighborTable.from_rows(X, 20).distances, 20, 0.1)
    assert found == pytest.approx(exact, abs=2e-9)
    assert found == pytest.approx(published, rel=1.3e-4)
    # Noise makes distances look more spread, so the estimate without it is larger.
    assert MLE(unbiased=False).fit(X).dimension_ > 1.05 * found


def test_without_noise_it_is_the_estimator():
    X = oracle.fixture_a()
    found = noisy_dimension(NeighborTable.from_rows(X, 20).distances, 20, 1e-4)
    assert MLE(unbiased=False).fit(X).dimension_ == pytest.approx(found, rel=1e-5)
