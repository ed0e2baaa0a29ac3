"""A file imports only from lower layers, and heavy libraries only where they belong."""

import ast
from pathlib import Path

import pytest

import isogeom

PACKAGE = Path(isogeom.__file__).parent
# The longest matching prefix decides.
LAYERS = {
    "_xp": 0,
    "_random": 0,
    "_results": 0,
    "_linalg": 1,
    "_moments": 1,
    "_products": 1,
    "_weights": 1,
    "_kernels": 1,
    "_callbacks": 2,
    "_validation": 2,
    "_neighbors": 2,
    "_dask": 2,
    "datasets": 2,
    "decomposition": 3.0,
    "dimension": 3.0,
    "isotropy": 3.0,
    "tangent": 3.5,
    "gradients": 4,
    "plotting": 4,
}
# Library -> the parts of the package that may import it, anywhere in the file.
HOMES = {
    "torch": {"gradients"},
    "transformers": set(),
    "numba": {"_kernels"},
    "dask": {"_dask"},
    "matplotlib": {"plotting"},
    "pandas": set(),
    "tqdm": {"gradients"},
    "pynndescent": {"_neighbors"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path):
    """First name below the package: a module or a sub-package."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(path):
    """Full dotted names of everything a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} uses a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(name):
    """Layer of a dotted name inside the package."""
    return LAYERS[name.split(".")[1]]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_from_lower_layers(path):
    part = part_of(path)
    if part == "__init__":
        assert not [n for n in imports_of(path) if n.startswith("isogeom.")]
        return
    for name in imports_of(path):
        if not name.startswith("isogeom.") or name.split(".")[1] == part or name == "isogeom.__version__":
            continue
        # Within the three lower layers, siblings may build on each other.
        inside = LAYERS[part] <= 2 and layer_of(name) == LAYERS[part]
        assert layer_of(name) < LAYERS[part] or inside, f"{path.name} imports {name} from a layer that is not lower"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_libraries_stay_in_their_rooms(path):
    for name in imports_of(path):
        library = name.split(".")[0]
        assert part_of(path) in HOMES.get(library, {part_of(path)}), f"{path.name} must not import {library}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_scikit_learn_internals_are_used_in_one_file(path):
    if part_of(path) == "_validation":
        return
    private = [n for n in imports_of(path) if n.startswith("sklearn") and any(p.startswith("_") for p in n.split("."))]
    assert private == []


def test_every_file_has_a_layer():
    known = {part_of(p) for p in FILES} - {"__init__"}
    assert known <= set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_stays_one_room(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 420
