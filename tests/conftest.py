"""Shared fixtures. Environment variables must be set before scipy or a BLAS is imported anywhere in the process."""

import os

os.environ["SCIPY_ARRAY_API"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores: threads of one that wait for each other hold up the others.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from pathlib import Path

import numpy as np
import pytest

LIBRARIES = ["numpy", "numpy-readonly", "strict", "torch", "torch-cuda"]


def make_array(library, x, dtype=None):
    """Bring a numpy array to one of LIBRARIES, or skip with the reason."""
    x = np.asarray(x, dtype=dtype)
    if library == "numpy":
        return x.copy()
    if library == "numpy-readonly":
        x = x.copy()
        x.setflags(write=False)
        return x
    if library == "strict":
        strict = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
        return strict.asarray(x)
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if library == "torch-cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.asarray(x.copy(), device="cuda" if library == "torch-cuda" else "cpu")


@pytest.fixture(params=LIBRARIES)
def library(request):
    """Name of an array library; use with `as_array`."""
    return request.param


@pytest.fixture
def as_array(library):
    """Convert a numpy array to the library of the test."""

    def convert(x, dtype=None):
        return make_array(library, x, dtype)

    return convert


@pytest.fixture
def shared_file():
    """Find a file of the optional real data (folder named by ISOGEOM_DATA, or ../shared/data), or skip."""

    def find(name):
        root = Path(__file__).resolve().parents[1]
        for folder in (os.environ.get("ISOGEOM_DATA"), root.parent / "shared" / "data"):
            if folder and (Path(folder) / name).is_file():
                return Path(folder) / name
        pytest.skip(f"optional data file {name} is absent (set ISOGEOM_DATA to its folder)")

    return find


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory):
    """Folder of a tiny GPT-NeoX with the two revisions that the README names, and a text to run it on."""
    tiny_models = pytest.importorskip("tiny_models", reason="the hf extra is not installed")
    root = tmp_path_factory.mktemp("checkpoints")
    text = root / "corpus.txt"
    text.write_text(tiny_models.TEXT, encoding="utf-8")
    return tiny_models.save_checkpoints(root / "tiny-neox", "gpt_neox", ["step1000", "step143000"]), text
