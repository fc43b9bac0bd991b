"""The page of a comparison: one file with its tables and charts, which loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...report.charts import clean, figure_html
from ...report.page import render_page
from .facts import facts
from .findings import findings
from .plots import Figure
from .records import Comparison
from .row_statistics import ComparisonStatistics
from .table_model import Cell, Column, Table
from .tables import all_tables

if TYPE_CHECKING:
    from markupsafe import Markup

_SECTIONS = {"differences": "differences", "clients": "methods", "curves": "methods", "tuning": "tuning"}
"""Name of a figure -> key of the table below which it stands."""


@dataclass(frozen=True)
class _Section:
    """A table as the page shows it, with the figures below it."""

    heading: str
    columns: tuple[tuple[str, str], ...]
    """(Title, CSS class) of each column; class ``n`` is for numbers."""

    rows: tuple[tuple[str | Markup, ...], ...]
    notes: tuple[str, ...]
    figures: tuple[str, ...]


def render(
    comparison: Comparison, statistics: ComparisonStatistics, figures: Sequence[Figure], files: Sequence[str]
) -> str:
    """Return the page as HTML.

    Args:
        comparison: What has been found so far.
        statistics: Its figures.
        figures: Its charts.
        files: Names of the files beside the page.
    """
    tables = all_tables(comparison, statistics)
    return render_page(
        "comparison.html",
        kind="Headwater comparison",
        title=clean(comparison.title, 200),
        findings=findings(comparison, statistics),
        facts=facts(comparison),
        tables=[_section(table, figures) for table in tables],
        command=comparison.command,
        files=files,
    )


def _section(table: Table, figures: Sequence[Figure]) -> _Section:
    """Return a table for the page, with the figures that belong to it."""
    heading = table.title
    if table.key == "methods":  # its title is that of the page
        heading = "Methods"
    drawings = [
        figure_html(figure.chart, figure.name, level=3) for figure in figures if _SECTIONS[figure.name] == table.key
    ]
    styles = {True: "n", False: ""}
    columns = tuple((column.title, styles[column.is_number]) for column in table.columns)
    rows = tuple(tuple(map(_html, row, table.columns)) for row in table.rows)
    return _Section(heading, columns, rows, tuple(note.marked_text for note in table.notes), tuple(drawings))


def _html(cell: Cell, column: Column) -> str | Markup:
    """Return a cell for the page: bold where it is the best of its column."""
    from markupsafe import Markup

    text = cell.marked_text(column)
    if not cell.is_best:
        return text
    return Markup("<strong>{}</strong>").format(text)
