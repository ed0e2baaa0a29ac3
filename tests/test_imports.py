"""What an import loads, and that dispatch works without scikit-learn's switch: each in a fresh interpreter."""

import os
import subprocess
import sys

import pytest

HEAVY = ["torch", "numba", "dask", "matplotlib", "pandas", "transformers", "tqdm"]


def run(code, **environment):
    """Run code in a new interpreter, without the variable that this test suite sets, and return what it prints."""
    env = {k: v for k, v in os.environ.items() if k not in ("SCIPY_ARRAY_API", "COV_CORE_SOURCE")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env | environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded_by(imports):
    return run(f"import sys\n{imports}\nprint(*[m for m in {HEAVY!r} if m in sys.modules])").split()


def test_importing_isogeom_is_light():
    assert loaded_by("import isogeom") == []
    assert run("import sys, isogeom; print('sklearn' in sys.modules, 'scipy' in sys.modules)") == "False False"


@pytest.mark.parametrize("name", ["decomposition", "dimension", "isotropy", "tangent", "datasets", "plotting"])
def test_subpackages_load_nothing_heavy_of_their_own(name):
    # scikit-learn itself loads pandas where it is installed: only what comes on top of it counts.
    base = loaded_by("import sklearn.base, sklearn.utils.validation")
    assert set(loaded_by(f"import isogeom.{name}")) - set(base) == set()


def test_an_import_compiles_nothing():
    assert run("import sys, isogeom.decomposition; print('llvmlite' in sys.modules)") == "False"


def test_subpackages_are_attributes_of_the_package():
    code = "import isogeom; print(isogeom.tangent.TangentProxy.__name__, isogeom.Moments.__name__)"
    assert run(code) == "TangentProxy Moments"
    assert "decomposition" in run("import isogeom; print(dir(isogeom))")
    message = run("import isogeom\ntry:\n    isogeom.nothing\nexcept AttributeError as e:\n    print(e)")
    assert message == "module 'isogeom' has no attribute 'nothing'"


def test_tensors_dispatch_without_any_switch():
    pytest.importorskip("torch", reason="torch is not installed")
    code = """
import torch
from sklearn import get_config
from isogeom.decomposition import PCA
from isogeom.tangent import TangentProxy, tangent_alignment_test
torch.manual_seed(0)
X = torch.randn(200, 8) * torch.arange(1., 9.)
proxy = TangentProxy(PCA(n_components=3)).fit(X)
assert not get_config()["array_api_dispatch"]
result = tangent_alignment_test(X, proxy, n_resamples=9, rng=0)
print(type(proxy.transform(X)).__name__, proxy.basis_.dtype, type(result.energy_ratio).__name__)
"""
    assert run(code) == "Tensor torch.float32 float"


def test_a_missing_torch_names_the_extra():
    code = """
import sys
sys.modules["torch"] = None
try:
    import isogeom.gradients
except ImportError as error:
    print(error)
"""
    assert "isogeom[torch]" in run(code)
