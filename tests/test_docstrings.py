"""Public docstrings follow numpydoc, name every parameter and carry an example."""

import dataclasses
import importlib
import inspect

import pytest

validate = pytest.importorskip("numpydoc.validate", reason="numpydoc is not installed").validate

# Section order, parameters that do not match the signature, missing types and descriptions mislead a reader.
CHECKS = {
    *("GL01", "GL02", "GL03", "GL05", "GL06", "GL07", "GL08", "GL09", "GL10", "SS01", "SS03"),
    *("PR01", "PR02", "PR03", "PR04", "PR07", "PR10", "RT03", "YD01"),
}


def public_objects():
    for name in ("", "datasets", "decomposition", "dimension", "gradients", "isotropy", "plotting", "tangent"):
        path = f"isogeom.{name}".rstrip(".")
        module = importlib.import_module(path)
        for attribute in module.__all__:
            item = getattr(module, attribute)
            if inspect.isclass(item) or inspect.isfunction(item):
                yield f"{path}.{attribute}", item


OBJECTS = dict(public_objects())


def public_methods():
    for path, item in OBJECTS.items():
        if inspect.isclass(item):
            for name, method in vars(item).items():
                if not name.startswith("_") and (inspect.isfunction(method) or isinstance(method, classmethod)):
                    yield f"{path}.{name}"


@pytest.mark.parametrize("path", [*OBJECTS, *public_methods()])
def test_docstring_is_complete(path):
    # Nobody builds a result by hand: its fields are documented as attributes.
    skipped = {"PR01"} if dataclasses.is_dataclass(OBJECTS.get(path)) else set()
    errors = [f"{code}: {text}" for code, text in validate(path)["errors"] if code in CHECKS - skipped]
    assert errors == []


@pytest.mark.parametrize("path", OBJECTS)
def test_public_objects_have_an_example(path):
    item = OBJECTS[path]
    if path.endswith(("Result", "_scorer", "SiteRows", "SiteMoments", "IDProfile", "LayerDimensions")):
        assert inspect.getdoc(item)
    else:
        assert ">>>" in inspect.getdoc(item)
