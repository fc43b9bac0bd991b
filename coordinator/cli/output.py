"""What commands show: results on stdout, everything else on stderr; and where they write."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from edge_agent.core.errors import UsageError
from edge_agent.core.formats import value_text
from edge_agent.core.logs import TEXT, LogFormat, log_json
from edge_agent.core.storage import check_writable

console = Console(stderr=True, highlight=False, markup=False, emoji=False)
"""Progress and messages, on stderr. Results go to stdout by `show` or `print_json`."""

PIPE_WIDTH = 400
"""Columns of a table that goes to a pipe or a file: nothing is cut off."""


class _Stderr(logging.Handler):
    """Log lines to what stderr is now, so that a progress bar can keep out of their way."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        print(self.format(record), file=sys.stderr)


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Let the first SIGTERM interrupt as Ctrl-C does; later ones are ignored, so that clean-up can finish."""

    def interrupt(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def set_up_logging(*, verbose: bool = False, quiet: bool = False, log_format: LogFormat = "text") -> None:
    """Log lines to stderr: warnings always, the coordinator's own events unless ``quiet``."""
    handler: logging.Handler = _Stderr()
    if log_format == "json":
        log_json()
        handler = logging.getLogger().handlers[0]
    else:
        handler.setFormatter(logging.Formatter(TEXT))
        logging.basicConfig(handlers=[handler], level=logging.WARNING)
    if quiet and not verbose:
        handler.setLevel(logging.WARNING)  # and not the loggers: the state folder's own log has all
    for package in ("coordinator", "edge_agent", "export"):
        logging.getLogger(package).setLevel(logging.DEBUG if verbose else logging.INFO)


def ready_for(path: Path) -> None:
    """Make the folder of a file that is about to be written, and report it where it is new.

    Raises:
        UsageError: ``path`` is a folder or a device, or no file can be written there.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        # The new file would replace it: root could replace /dev/null for all programs.
        raise UsageError(f"{path} is a device, socket or pipe; name a file")
    check_writable(path.parent)
    if not path.parent.exists():
        path.parent.mkdir(parents=True)
        console.print(f"made the folder {path.parent}", soft_wrap=True)


def fit_command(bundle: Path, kind: str) -> str:
    """Return the command that fits a head on a bundle whose encoder takes inputs of this kind, image or window."""
    source = "images:FOLDER" if kind == "image" else "SOURCE"
    return f"edge-agent fit --bundle {shlex.quote(str(bundle))} --data {source} --out my-head"


def present(result: Mapping[str, Any], parts: Iterable[Table | str], *, as_json: bool) -> None:
    """Print the result of a command: one JSON object, or ``parts`` for people."""
    if as_json:
        print_json(result)
    else:
        show(*parts)


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(content, indent=1, allow_nan=False))


def print_line(content: Mapping[str, Any] | str) -> None:
    """Print one line on stdout at once: text, or an object as JSON."""
    line = content if isinstance(content, str) else json.dumps(content, allow_nan=False)
    print(line, flush=True)


def stdout_console(*, soft_wrap: bool = True) -> Console:
    """Return a console for results on what stdout is now; lines of what is drawn again are wrapped at words."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap, width=width)


def show(*parts: Table | str) -> None:
    """Print results for people on stdout: tables, and lines that are never wrapped or cut."""
    out = stdout_console()
    for part in parts:
        if isinstance(part, Table):
            out.print(fitted(part, out.width), soft_wrap=False)
        else:
            out.print(part)


def is_live(out: Console) -> bool:
    """Return whether what was written there can be drawn again, which a pipe and a terminal without a cursor cannot."""
    return out.is_terminal and not out.is_dumb_terminal


class _Cells(Table):
    """A table that knows its cells as text."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int, **options: Any) -> None:
        super().__init__(**options)
        self.heads = [" ".join(column.split()) for column in columns]
        self.cells = rows
        self.left = left
        self.least_width = 0
        """In which no number is cut or wrapped, and no word of `WORD_CHARS`."""

        for position, column in enumerate(columns):
            is_text = position < left
            cells = [column, *(row[position] for row in rows)]
            longest = max(len(line) for cell in cells for line in cell.split("\n"))
            self.least_width += GAP + (min(longest, WORD_CHARS) if is_text else longest)
            self.add_column(column, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
        for row in rows:
            self.add_row(*row)


GAP = 2
"""Columns between two columns."""

WORD_CHARS = 12
"""Columns of text become no narrower."""


def fitted(part: Table, width: int) -> Table | Text:
    """Return ``part`` where it fits; in less columns one line for each cell."""
    if not isinstance(part, _Cells) or part.least_width <= width:
        return part
    lines = [str(part.title or "")]
    for first, *others in part.cells:
        lines.append(first)
        named = zip(part.heads[1:], others, strict=True)
        lines += [f"  {head}: {cell}" for head, cell in named if cell not in {"", "–"}]
    return Text("\n".join(lines), overflow="fold")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> Table:
    """Return a table; the first ``left`` columns are text, the others numbers. It wraps where a terminal is narrow."""
    return _Cells(
        columns,
        [[text(value) for value in row] for row in rows],
        left,
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def text(value: object) -> str:
    """Return a table cell, as devices show it."""
    return value_text(value)
