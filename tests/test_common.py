"""scikit-learn's common checks on every estimator, array-API checks included; none is expected to fail."""

import importlib

import pytest
from sklearn.base import BaseEstimator
from sklearn.utils.estimator_checks import parametrize_with_checks

from isogeom.decomposition import ICA, PCA, SemiNMF
from isogeom.dimension import (
    ABIDE,
    ESS,
    MADA,
    MLE,
    MOM,
    TLE,
    BinomialDimension,
    CorrelationDimension,
    DANCo,
    FisherS,
    GraphDistanceDimension,
    Gride,
    KNNGraphDimension,
    LocalPCADimension,
    MiND,
    MSTDimension,
    PCADimension,
    TwoNN,
)
from isogeom.tangent import TangentProxy

ESTIMATORS = [
    PCA(),
    PCA(n_components=2, whiten=True),
    PCA(n_components=0.9),
    PCA(svd_solver="full"),
    PCA(n_components=1, svd_solver="randomized", random_state=0),
    ICA(),
    ICA(n_components=1, fun="exp"),
    ICA(n_components=2, fun="cube"),
    ICA(n_components=2, n_init=2),
    SemiNMF(),
    SemiNMF(n_components=2, alpha=0.05),
    SemiNMF(n_components=2, init="svd"),
    SemiNMF(n_components=3, init="random"),
    TangentProxy(),
    TangentProxy(ICA(n_components=2, random_state=0)),
    TangentProxy(SemiNMF(n_components=2, random_state=0)),
    TangentProxy(n_directions=0.5),
    SemiNMF(n_components=2, alpha=0),
    SemiNMF(n_components=3, ridge=0.1, center=True, chunk_size=7),
    ABIDE(),
    BinomialDimension(n_neighbors=6),
    CorrelationDimension(),
    DANCo(),
    DANCo(5, rounded=False, angle_formula="published"),
    ESS(),
    ESS(5, "b", average="mean"),
    FisherS(),
    GraphDistanceDimension(),
    Gride(),
    Gride(n1=2, n_neighbors_local=5),
    KNNGraphDimension(),
    LocalPCADimension(),
    MADA(),
    MADA(5, average="mean"),
    MLE(),
    MLE(n_neighbors=5),
    MOM(),
    MOM(5, unbiased=False, average="mean"),
    MSTDimension(),
    MiND(),
    MiND(5, "mli"),
    PCADimension(),
    TLE(),
    TLE(5, average="mean"),
    TwoNN(),
    TwoNN("mle", n_neighbors_local=5),
]


@parametrize_with_checks(ESTIMATORS)
@pytest.mark.filterwarnings("ignore:.* did not converge:sklearn.exceptions.ConvergenceWarning")
def test_scikit_learn_checks(estimator, check):
    check(estimator)


def test_every_public_estimator_is_checked():
    public = set()
    for name in ("decomposition", "dimension", "tangent", "isotropy"):
        module = importlib.import_module(f"isogeom.{name}")
        public |= {
            item
            for item in (getattr(module, attribute) for attribute in module.__all__)
            if isinstance(item, type) and issubclass(item, BaseEstimator)
        }
    assert public == {type(estimator) for estimator in ESTIMATORS}


@pytest.mark.parametrize("estimator", [PCA(), ICA(), SemiNMF()], ids=lambda estimator: type(estimator).__name__)
def test_array_api_checks_really_run(estimator):
    from sklearn.utils.estimator_checks import estimator_checks_generator

    pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    names = [str(check) for _, check in estimator_checks_generator(estimator)]
    strict = [name for name in names if "check_array_api" in name and "array_api_strict" in name]
    assert len(strict) >= 3
