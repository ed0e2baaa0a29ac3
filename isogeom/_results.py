"""Results are frozen dataclasses that print as text, show as HTML and turn into a table."""

from __future__ import annotations

import dataclasses
import html
from typing import Any

import numpy as np

from isogeom import _xp


class Result:
    """Mixin for frozen result dataclasses: a one-row table of their scalar fields."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the scalar fields, in order (arrays are left out)."""
        items = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))  # type: ignore[arg-type]
        return {name: value for name, value in items if not (isinstance(value, np.ndarray) or _xp.is_foreign(value))}

    def to_frame(self) -> Any:
        """Return the scalar fields as a one-row :class:`pandas.DataFrame`.

        Raises
        ------
        ImportError
            If pandas is not installed.
        """
        pandas = _require("pandas", "to_frame()", "plot")
        return pandas.DataFrame([self.to_dict()])

    def __str__(self) -> str:
        width = max((len(name) for name in self.to_dict()), default=0)
        lines = [f"  {name:<{width}}  {format_value(value)}" for name, value in self.to_dict().items()]
        return "\n".join([type(self).__name__, *lines])

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td>{html.escape(format_value(value))}</td></tr>"
            for name, value in self.to_dict().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{cells}</table>"


def format_value(value: Any) -> str:
    """Format a scalar for a table: four significant digits for floats, a dash for what is undefined."""
    if value is None:
        return "-"
    if isinstance(value, (float, np.floating)):
        return f"{value:.4g}"
    return str(value)


def _require(module: str, what: str, extra: str) -> Any:
    """Import an optional module, or say which extra brings it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{what} needs {module}: pip install 'isogeom[{extra}]' (or pip install {module})."
        ) from error
