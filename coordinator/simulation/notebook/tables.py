"""Small tables that show themselves: as text within 80 columns, and as an accessible HTML table.

Names may come from data or from other programs: `clean` bounds their length and replaces characters that change the
direction of text, and HTML escapes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from edge_agent.core.errors import MissingCapability

from ...report.charts import clean

if TYPE_CHECKING:
    import pandas as pd

WIDTH = 80
"""The most columns of text, as in a terminal."""

MOST_ROWS = 8
"""The most rows of a table; of more, some at equal distances are shown, the first and the last among them."""


@dataclass(frozen=True)
class ShownTable:
    """A table with a caption, and notes below it.

    Attributes:
        caption: What it is, in a few words.
        columns: Names of the columns; the first column names the rows.
        rows: The cells of each row, as text.
        notes: Lines below the table.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the table as lines of at most `WIDTH` characters."""
        table = [self.columns, *self.rows]
        widths = [max(len(row[position]) for row in table) for position in range(len(self.columns))]
        lines = [self.caption]
        for name, *cells in table:
            numbers = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *numbers]).rstrip())
        lines.extend(self.notes)
        return "\n".join(cut(line) for line in lines)

    def html(self) -> str:
        """Return the table as HTML, with a caption and headings of columns and rows, which screen readers read out."""
        heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.columns)
        lines = []
        for name, *cells in self.rows:
            numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            lines.append(f'<tr><th scope="row">{escape(name)}</th>{numbers}</tr>')
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        head = f"<caption>{escape(self.caption)}</caption><thead><tr>{heads}</tr></thead>"
        return f"<table>{head}<tbody>{''.join(lines)}</tbody></table>{notes}"


def cut(line: str) -> str:
    """Return a line of at most `WIDTH` characters; a longer one ends with an ellipsis."""
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def name_of(text: object, most: int = 24) -> str:
    """Return a name of at most ``most`` characters, without characters that change how a line reads."""
    return clean(text, most)


def share(value: float | None) -> str:
    """Return an accuracy (0..1) with four decimals; a dash where there is none."""
    return "–" if value is None else f"{value:.4f}"


def loss_of(value: float | None) -> str:
    """Return a loss with four digits; a dash where there is none."""
    return "–" if value is None else f"{value:.4g}"


def seconds_of(value: float | None) -> str:
    """Return seconds with one decimal; a dash where they were not recorded."""
    return "–" if value is None else f"{value:.1f}"


def megabytes(size: int | None) -> str:
    """Return a number of bytes as MB with one decimal; a dash where it was not recorded."""
    return "–" if size is None else f"{size / 1e6:.1f}"


def spread_out(count: int, most: int = MOST_ROWS) -> list[int]:
    """Return at most ``most`` positions of ``count`` at equal distances, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(step * (count - 1) / (most - 1)) for step in range(most)})


def data_frame(make: Callable[[Any], pd.DataFrame], what: str) -> pd.DataFrame:
    """Return the table that ``make`` makes with pandas; ``what`` names it in the error.

    Raises:
        MissingCapability: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingCapability(f"{what} needs pandas, which is not installed: pip install pandas") from error
    return make(pd)


def joined(names: Sequence[str], most: int = 3) -> str:
    """Return some names in one line, and how many more there are."""
    shown = ", ".join(name_of(name) for name in names[:most])
    more = len(names) - most
    return f"{shown} and {more} more" if more > 0 else shown
