"""Displays of results: ``from_...`` builds one, ``plot`` draws it (needs the ``plot`` extra)."""

from isogeom.plotting._alignment import TangentAlignmentDisplay
from isogeom.plotting._profile import IDProfileDisplay

__all__ = ["IDProfileDisplay", "TangentAlignmentDisplay"]
