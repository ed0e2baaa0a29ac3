"""Displays of results: ``from_...`` builds one, ``plot`` draws it (needs the ``plot`` extra)."""

from isogeom.plotting._alignment import TangentAlignmentDisplay

__all__ = ["TangentAlignmentDisplay"]
