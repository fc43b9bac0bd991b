"""What commands show: results on stdout, everything else on stderr; and where they write."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from edge_agent.cli.output import value_text
from edge_agent.errors import UsageError
from edge_agent.logs import TEXT, LogFormat, log_json
from edge_agent.storage import check_writable

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
    """Inside, the first SIGTERM interrupts as Ctrl-C does; later ones are ignored, so that clean-up can finish."""

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
    if log_format == "json":
        log_json()
    else:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter(TEXT))
        logging.basicConfig(handlers=[handler], level=logging.WARNING)
    level = logging.DEBUG if verbose else (logging.WARNING if quiet else logging.INFO)
    for package in ("coordinator", "edge_agent", "export"):
        logging.getLogger(package).setLevel(level)


def ready_for(path: Path) -> None:
    """Make the folder of a file that is about to be written, and report it where it is new.

    Raises:
        UsageError: ``path`` is a folder, or no file can be written there.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it")
    check_writable(path.parent)
    if not path.parent.exists():
        path.parent.mkdir(parents=True)
        console.print(f"made the folder {path.parent}", soft_wrap=True)


def present(result: Mapping[str, Any], parts: Iterable[Table | str], *, as_json: bool) -> None:
    """The result of a command: one JSON object, or ``parts`` for people."""
    if as_json:
        print_json(result)
    else:
        show(*parts)


def print_json(content: Mapping[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(content, indent=1, allow_nan=False))


def show(*parts: Table | str) -> None:
    """Results for people, on stdout: tables, and lines that are never wrapped or cut."""
    out = Console(
        highlight=False, markup=False, emoji=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_WIDTH
    )
    for part in parts:
        if isinstance(part, Table):
            out.print(part, soft_wrap=False)
        else:
            out.print(part)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> Table:
    """A table; the first ``left`` columns are text, the others numbers. It wraps where a terminal is narrow."""
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for position, column in enumerate(columns):
        made.add_column(column, justify="left" if position < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(text(value) for value in row))
    return made


def text(value: object) -> str:
    """A table cell, as devices show it."""
    return value_text(value)
