"""Tables as text, Markdown, LaTeX and CSV; each form shows the same cells and notes."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from .table_model import Cell, Column, Note, Table, Value

# --- text ------------------------------------------------------------------------------------------------------------


def text_lines(table: Table, width: int) -> list[str]:
    """Return a table as lines of plain text of at most ``width`` characters, with its notes."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Screen
    from rich.text import Text

    screen = Screen(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, title=Text(table.title), title_justify="left")
    for column in table.columns:
        side: Literal["left", "right"] = "right" if column.is_number else "left"
        screen.add_column(Text(column.title), justify=side, overflow="fold")
    for row in table.rows:
        cells = zip(row, table.columns, strict=True)
        screen.add_row(*(Text(cell.marked_text(column)) for cell, column in cells))
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, force_terminal=False)
    console.print(screen)
    for note in table.notes:
        console.print(Text(note.marked_text))
    return [line.rstrip() for line in file.getvalue().splitlines()]


# --- Markdown --------------------------------------------------------------------------------------------------------


def markdown(table: Table) -> str:
    """Return a table in Markdown with its notes; the best values are bold."""
    lines = [f"## {markdown_text(table.title)}", ""]
    lines.append(_markdown_row(markdown_text(column.title) for column in table.columns))
    lines.append(_markdown_row(map(_markdown_side, table.columns)))
    lines += [_markdown_row(map(_markdown_cell, row, table.columns)) for row in table.rows]
    if table.notes:
        lines.append("")
    lines += [f"- {markdown_text(note.marked_text)}" for note in table.notes]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Iterable[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"


def _markdown_side(column: Column) -> str:
    """Return the mark of the side at which the cells of a column stand."""
    if column.is_number:
        return "--:"
    return "---"


def _markdown_cell(cell: Cell, column: Column) -> str:
    """Return a cell in Markdown."""
    text = markdown_text(cell.text(column))
    if cell.is_best:
        text = f"**{text}**"
    return f"{text} {cell.symbols}".rstrip()


def markdown_text(text: str) -> str:
    """Return text whose characters mean nothing in Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text)


# --- LaTeX -----------------------------------------------------------------------------------------------------------


def latex(tables: Sequence[Table], caption: str) -> str:
    """Return tables in LaTeX, each a float of at most a page's width; the preamble needs booktabs and graphicx.

    Args:
        tables: The tables; the first one has the caption.
        caption: What is compared, as plain text.
    """
    parts = [
        "% Needs \\usepackage{booktabs,graphicx}. A table wider than a page of two columns is shrunk to its width.\n"
    ]
    captions = [caption, *(table.title for table in tables[1:])]
    parts += map(_latex_table, tables, captions)
    return "\n".join(parts)


def _latex_table(table: Table, caption: str) -> str:
    """Return one table in LaTeX."""
    places = "".join(_latex_place(table, index) for index in range(len(table.columns)))
    lines = [
        r"\begin{table*}[t]",
        r"\centering\footnotesize\setlength{\tabcolsep}{4pt}",
        rf"\caption{{{latex_text(caption)}}}",
        rf"\label{{tab:comparison-{table.key}}}",
        LATEX_FITTED,
        rf"\begin{{tabular}}{{@{{}}{places}@{{}}}}",
        r"\toprule",
    ]
    heads = [latex_text(column.head) for column in table.columns]
    units = [_latex_unit(column) for column in table.columns]
    lines.append(f"{' & '.join(heads)} \\\\")
    if any(units):
        lines.append(f"{' & '.join(units)} \\\\")
    lines.append(r"\midrule")
    for row in table.rows:
        cells = map(_latex_cell, row, table.columns)
        lines.append(f"{' & '.join(cells)} \\\\")
    lines += [r"\bottomrule", r"\end{tabular}}"]
    if table.notes:
        notes = " ".join(map(_latex_note, table.notes))
        lines.append(rf"\par\smallskip\parbox{{\linewidth}}{{\scriptsize {notes}}}")
    lines.append(r"\end{table*}")
    return "\n".join(lines) + "\n"


def _latex_place(table: Table, index: int) -> str:
    """Return how a column stands: numbers at the right, short text at the left, long text in lines of its own."""
    column = table.columns[index]
    if column.is_number:
        return "r"
    longest = max((len(row[index].text(column)) for row in table.rows), default=0)
    if longest > LATEX_LINE_CHARS:
        return r"p{0.4\linewidth}"
    return "l"


LATEX_FITTED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
"""Begins a box that is shrunk to the width of the page where it is wider; a closing brace ends it."""

LATEX_LINE_CHARS = 40
"""The most characters of a column of text in LaTeX that stand on one line."""


def _latex_unit(column: Column) -> str:
    """Return the unit of a column in brackets; empty where it has none."""
    if not column.unit:
        return ""
    return latex_text(f"({column.unit})")


def _latex_cell(cell: Cell, column: Column) -> str:
    """Return a cell in LaTeX: bold where it is the best, its marks raised."""
    text = latex_text(cell.text(column))
    if text.startswith(("[", "*")):
        text = f"{{}}{text}"  # behind the end of a row LaTeX would read them as an argument of that
    if cell.is_best:
        text = rf"\textbf{{{text}}}"
    marks = "".join(mark.latex for mark in cell.marks)
    if marks:
        text += f"$^{{{marks}}}$"
    return text


def _latex_note(note: Note) -> str:
    """Return a note in LaTeX."""
    text = latex_text(note.text)
    if note.mark is None:
        return text
    return f"$^{{{note.mark.latex}}}$ {text}"


_LATEX_SPECIAL: Mapping[str, str] = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "{''}",
    "±": r"$\pm$",
    "−": r"$-$",
    "≈": r"$\approx$",
    "†": r"$\dagger$",
    "‡": r"$\ddagger$",
    "§": r"\S{}",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "≠": r"$\neq$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "×": r"$\times$",
    "·": r"$\cdot$",
}
"""Character -> how LaTeX writes it."""


def latex_text(text: str) -> str:
    """Return text as LaTeX writes it; a character that its fonts lack is named by its number, as ``U+4E2D``."""
    return "".join(map(_latex_letter, text))


def _latex_letter(letter: str) -> str:
    """Return one character as LaTeX writes it."""
    if letter in _LATEX_SPECIAL:
        return _LATEX_SPECIAL[letter]
    if letter.isascii():
        return letter
    is_accented_letter = letter.isalpha() and "À" <= letter <= "ſ"
    if is_accented_letter:
        return letter
    return f"U+{ord(letter):04X}"


# --- CSV --------------------------------------------------------------------------------------------------------------


def figures_csv(tables: Iterable[Table]) -> bytes:
    """Return all figures of the tables that have a row for each method, side by side, as CSV in UTF-8.

    Values are as they are computed: accuracies are shares, not rounded. Behind the column of a figure stand those of
    its standard deviation (``_sd``) and of its interval (``_low``, ``_high``). What has no value is empty.
    """
    names = ["row"]
    lines: dict[str, list[Value]] = {}
    for table in tables:
        if not table.has_row_per_method:
            continue
        row_index = next(index for index, column in enumerate(table.columns) if column.key == "row")
        for index, column in enumerate(table.columns):
            if index == row_index:
                continue
            names += _csv_names(column)
            for row in table.rows:
                name = str(row[row_index].value)
                lines.setdefault(name, [name]).extend(_csv_values(column, row[index]))
    return csv_bytes(names, lines.values())


def rows_csv(table: Table) -> bytes:
    """Return one table as CSV in UTF-8, values as they are computed."""
    names = list[str]()
    for column in table.columns:
        names += _csv_names(column)
    lines = []
    for row in table.rows:
        line = list[Value]()
        for column, cell in zip(table.columns, row, strict=True):
            line += _csv_values(column, cell)
        lines.append(line)
    return csv_bytes(names, lines)


def _csv_names(column: Column) -> list[str]:
    """Return the names of a column of figures and of what stands beside them."""
    names = [column.key]
    if column.has_spread:
        names.append(f"{column.key}_sd")
    if column.has_interval:
        names += [f"{column.key}_low", f"{column.key}_high"]
    return names


def _csv_values(column: Column, cell: Cell) -> list[Value]:
    """Return a cell's value and what stands beside it, in the order of `_csv_names`."""
    values = [cell.value]
    if column.has_spread:
        values.append(cell.spread)
    if column.has_interval:
        values += [cell.low, cell.high]
    return values


def csv_bytes(names: Sequence[str], lines: Iterable[Sequence[Value]]) -> bytes:
    """Return a CSV file; numbers have as many digits as they need to be read back as they are."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(lines)
    return file.getvalue().encode(errors="replace")
