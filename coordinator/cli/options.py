"""Options and output that several commands have in common."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from edge_agent.errors import UsageError
from edge_agent.storage import check_writable

from ..service.app import load_config

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file; default: coordinator.toml in this folder.")
]
State = Annotated[Path | None, typer.Option("--state", help="State folder; default: the one that the file names.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; logs go to stderr.")]
Paper = Annotated[
    bool,
    typer.Option(
        "--paper", help="The paper's values of parameters whose defaults are ours; 'headwater methods NAME' shows both."
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more on stderr.")]

console = Console(stderr=True, highlight=False, markup=False, emoji=False)
"""Where people are told how it goes: stderr. Results go to stdout by `show` or `print_json`."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, and of a command that was told to end before it was done."""

PIPE_WIDTH = 400
"""Columns of a table that no terminal shows: nothing is cut off, whatever reads it."""


class _Stderr(logging.Handler):
    """Log lines to what stderr is now, so that a progress bar can keep out of their way."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        print(self.format(record), file=sys.stderr)


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Inside, SIGTERM interrupts as Ctrl-C does, once: what is put away then is not disturbed by another one."""

    def interrupt(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def state_path(config: Path | None, state: Path | None) -> Path:
    """The state folder: the one that was given, else that of the configuration.

    Raises:
        ConfigError: no folder was given, and the configuration cannot be read.
    """
    return state.absolute() if state is not None else load_config(config).state


def set_up_logging(*, verbose: bool = False, quiet: bool = False) -> None:
    """Log lines to stderr: warnings always, the coordinator's own events unless ``quiet``."""
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    level = logging.DEBUG if verbose else (logging.WARNING if quiet else logging.INFO)
    for package in ("coordinator", "edge_agent", "export"):
        logging.getLogger(package).setLevel(level)


def ready_for(path: Path) -> None:
    """Make a place for a file that is about to be written; a folder that was not there is made, and said.

    Raises:
        UsageError: ``path`` is a folder, or no file can be written there.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it")
    check_writable(path.parent)
    if not path.parent.exists():
        path.parent.mkdir(parents=True)
        console.print(f"made the folder {path.parent}", soft_wrap=True)


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
    """A table cell: numbers with three digits behind the point, nothing for what is not known."""
    if value is None or value == "":
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def parameters(pairs: Sequence[str]) -> dict[str, Any]:
    """``name=value`` pairs; values are read as JSON where they are JSON, else as text.

    Raises:
        UsageError: lists every pair without a name or an equals sign.
    """
    wrong = [pair for pair in pairs if not pair.partition("=")[1] or not pair.partition("=")[0]]
    if wrong:
        raise UsageError(f"--param {', '.join(wrong)}: expected name=value, for example --param local_epochs=5")
    return {name: _value(raw) for name, _, raw in (pair.partition("=") for pair in pairs)}


def _value(raw: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw
