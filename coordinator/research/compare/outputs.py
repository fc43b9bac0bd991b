"""The files of a comparison that people read, made again from its records at any time, and its lines on a terminal."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from edge_agent.core.errors import MissingCapability
from edge_agent.core.storage import check_writable, write_atomic

from ...report.charts import clean
from ...report.pictures import COLUMN, Format, picture
from ...text import counted, sentence
from .client_files import clients_csv, clients_parquet
from .facts import facts, hours_in_all
from .findings import findings
from .page import render
from .plots import Figure, figures
from .records import Comparison
from .row_statistics import ComparisonStatistics, compute_statistics
from .table_formats import figures_csv, latex, markdown, markdown_text, rows_csv, text_lines
from .tables import all_tables, differences_table, methods_table, tuning_table

MOST_FAILURES = 5
"""The most lines of runs without a result on a terminal; all of them are in table.md."""

PAGE = "index.html"
"""File of the page in the folder of a comparison."""

PRINT_FORMATS: tuple[Format, ...] = ("svg", "pdf")


def write_outputs(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the page, the tables and the figures of a comparison, and return the files; the page is the first one.

    They are ``index.html``, ``table.md``, ``table.tex``, ``table.csv`` (all figures of each row), ``differences.csv``,
    ``clients.csv`` and, with pyarrow, ``clients.parquet`` (each client in each run), and each figure for print, one
    column wide, as SVG and PDF. Each file replaces an earlier one as a whole.

    Args:
        comparison: What has been found so far; it may lack runs, or all of them.
        folder: Where the files are written; it is made where there is none.

    Raises:
        UsageError: The folder cannot be written to.
    """
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # The page comes last, because it has links to the others.
    statistics = compute_statistics(comparison)
    drawn_figures = figures(comparison, statistics)
    paths = []
    for name, content in _files(comparison, statistics, drawn_figures):
        write_atomic(folder / name, content)
        paths.append(folder / name)
    page = render(comparison, statistics, drawn_figures, [path.name for path in paths])
    write_atomic(folder / PAGE, page.encode(errors="replace"))
    return [folder / PAGE, *paths]


def _files(
    comparison: Comparison, statistics: ComparisonStatistics, drawn_figures: Sequence[Figure]
) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each file but the page."""
    # 1. The tables.
    tables = all_tables(comparison, statistics)
    yield "table.md", _document(comparison, statistics).encode(errors="replace")
    yield "table.tex", latex(tables, _caption(comparison)).encode(errors="replace")
    yield "table.csv", figures_csv(tables)
    yield "differences.csv", rows_csv(differences_table(statistics))
    # 2. All clients. Without pyarrow clients.csv alone has them.
    yield "clients.csv", clients_csv(comparison)
    with contextlib.suppress(MissingCapability):
        yield "clients.parquet", clients_parquet(comparison)
    # 3. The figures.
    for figure in drawn_figures:
        for kind in PRINT_FORMATS:
            yield f"{figure.name}.{kind}", picture([figure.chart], kind, form=COLUMN)


def _document(comparison: Comparison, statistics: ComparisonStatistics) -> str:
    """Return all tables in Markdown below what all rows have in common."""
    task = "".join(f"- {name}: {markdown_text(value)}\n" for name, value in facts(comparison))
    sentences = markdown_text(" ".join(findings(comparison, statistics)))
    parts = [f"# {markdown_text(clean(comparison.title, 200))}\n", task, f"{sentences}\n"]
    if comparison.command:
        parts.append(f"Made by\n\n```\n{comparison.command}\n```\n")
    parts += map(markdown, all_tables(comparison, statistics))
    return "\n".join(parts)


def _caption(comparison: Comparison) -> str:
    """Return the caption of the table of methods: what a reader of a paper needs to know of the task."""
    title = clean(comparison.title, 200)
    # What the title says is not said again.
    common = " ".join(sentence(f"{name}: {value}") for name, value in facts(comparison) if value not in title)
    return f"{title}. {common}"


def summary_lines(comparison: Comparison, width: int = 140) -> list[str]:
    """Return the comparison as lines of plain text for a terminal: the task, the table of methods, what is missing.

    Args:
        comparison: What has been found so far.
        width: The most characters of a line.
    """
    statistics = compute_statistics(comparison)
    lines = text_lines(methods_table(comparison, statistics), width)
    lines += ["", *textwrap.wrap(" ".join(findings(comparison, statistics)), width)]
    if statistics.has_tuning:
        lines += ["", *text_lines(tuning_table(comparison, statistics), width)]
    lines.append(hours_in_all(statistics))
    failures = [failure for failure in statistics.failures if not failure.is_pending]
    if failures:
        count = sum(failure.count for failure in failures)
        lines.append(f"{counted(count, 'simulation')} without a result, all of them in table.md:")
        for failure in failures[:MOST_FAILURES]:
            lines.append(f"  {failure.row}, {failure.run}: {failure.reason}"[:width])
    return lines


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return all figures of a comparison as a JSON object, such as ``--json`` prints."""
    figures = TypeAdapter(ComparisonStatistics).dump_python(compute_statistics(comparison), mode="json")
    return {"title": comparison.title, "facts": dict(facts(comparison)), **figures}
