"""Published dimensions of benchmark manifolds, 2000 rows each, to the printed digits."""

import numpy as np
import pytest

from isogeom.datasets import make_manifold
from isogeom.dimension import MLE, MOM, Gride, NeighborTable, TwoNN

MODELS = (
    TwoNN(),
    TwoNN("mle"),
    Gride(4, max_neighbors=2),
    MLE(20, unbiased=False),
    MOM(unbiased=False, average="mean"),
)
# In the order of the models.
PUBLISHED = {
    "M1": (9.47, 9.34, 9.06, 9.00, 8.50),
    "M2": (2.98, 2.95, 2.91, 2.84, 2.76),
    "M3": (3.88, 3.95, 3.73, 3.76, 3.74),
    "M5a": (1.02, 1.04, 0.99, 1.01, 1.35),
    "M5b": (2.06, 2.02, 2.72, 2.61, 2.85),
    "M6": (6.02, 5.97, 6.25, 6.45, 7.18),
    "M7": (1.93, 1.92, 1.95, 1.94, 2.06),
    "M9": (15.19, 15.46, 14.67, 14.28, 13.32),
    "M10a": (9.16, 8.96, 8.65, 8.59, 8.24),
    "M10b": (13.90, 14.02, 13.32, 13.06, 12.24),
    "M10c": (18.66, 18.80, 17.52, 17.00, 15.64),
    "M10d": (39.25, 39.33, 36.55, 35.60, 30.85),
    "M11": (1.93, 1.92, 1.93, 1.97, 2.30),
    "M12": (16.68, 16.79, 15.76, 15.34, 13.66),
    "Mbeta": (6.58, 6.50, 6.03, 5.70, 5.67),
    "Mp1": (3.08, 3.09, 2.90, 2.83, 2.69),
    "Mp2": (5.48, 5.55, 4.84, 4.62, 3.97),
    "Mp3": (7.22, 7.39, 6.13, 5.65, 4.35),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_values(name):
    table = NeighborTable.from_rows(make_manifold(name).X, 100)
    found = [model.fit(table).dimension_ for model in MODELS]
    # Half a unit of the last printed digit, and the rounding of the 0.005 itself.
    np.testing.assert_allclose(found, PUBLISHED[name], atol=0.0051)
