"""Reproduction of published tables: a definition file for each, a simulation for each cell, and the difference."""

from __future__ import annotations

from .cells import Cell, Reproduction, with_advice
from .definition import Table, names, read_table
from .outcome import Outcome, outcomes, promises
from .pages import curves, markdown

__all__ = [
    "Cell",
    "Outcome",
    "Reproduction",
    "Table",
    "curves",
    "markdown",
    "names",
    "outcomes",
    "promises",
    "read_table",
    "with_advice",
]
