"""Intrinsic dimension: estimators, neighbour tables and scale profiles."""

from __future__ import annotations

from isogeom._neighbors import NeighborTable
from isogeom._neighbors._stream import NeighborStream
from isogeom.dimension._abide import ABIDE
from isogeom.dimension._binomial import BinomialDimension
from isogeom.dimension._correlation import CorrelationDimension
from isogeom.dimension._danco import DANCo
from isogeom.dimension._ess import ESS
from isogeom.dimension._fishers import FisherS
from isogeom.dimension._graph_distance import GraphDistanceDimension
from isogeom.dimension._gride import Gride
from isogeom.dimension._knn_graph import KNNGraphDimension
from isogeom.dimension._layers import LayerDimensions, layer_dimensions
from isogeom.dimension._local_pca import LocalPCADimension
from isogeom.dimension._mada import MADA
from isogeom.dimension._mind import MiND
from isogeom.dimension._mle import MLE
from isogeom.dimension._mom import MOM
from isogeom.dimension._mst import MSTDimension
from isogeom.dimension._pca_dimension import PCADimension
from isogeom.dimension._profile import IDProfile, id_profile
from isogeom.dimension._tle import TLE
from isogeom.dimension._twonn import TwoNN

__all__ = [
    "ABIDE",
    "ESS",
    "MADA",
    "MLE",
    "MOM",
    "TLE",
    "BinomialDimension",
    "CorrelationDimension",
    "DANCo",
    "FisherS",
    "GraphDistanceDimension",
    "Gride",
    "IDProfile",
    "KNNGraphDimension",
    "LayerDimensions",
    "LocalPCADimension",
    "MSTDimension",
    "MiND",
    "NeighborStream",
    "NeighborTable",
    "PCADimension",
    "TwoNN",
    "id_profile",
    "layer_dimensions",
]
