"""``--log tensorboard``: event files, a folder for each run; ``tensorboard --logdir FOLDER`` shows them.

Scalars are those of `RoundResult.metrics` by round, and the final figures. Parameters, tags and the note are text; the
worst clients are a table. A run that is resumed gives all rows again: its new event file begins with the mark after
which readers drop what older files of the folder have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from .log_files import FolderLogger
from .records import RoundResult, RunDescription, RunEnd, clients_table

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SHOWN_CLIENTS = 100
"""Rows of the table of the worst clients."""


class TensorboardLogger(FolderLogger):
    """Writes the figures of a run as event files, which TensorBoard shows."""

    package: ClassVar[str] = "tensorboard"
    extra: ClassVar[str] = "tensorboard"
    takes_clients: ClassVar[bool] = False

    def begin(self, run: RunDescription) -> None:
        """Open an event file, and describe the run in it."""
        super().begin(run)
        from torch.utils.tensorboard import SummaryWriter

        self._writer: SummaryWriter = SummaryWriter(str(self.run_folder), purge_step=0)
        self._writer.add_text("parameters", _table(["parameter", "value"], run.params.items()), 0)
        if run.tags:
            self._writer.add_text("tags", _table(["tag", "value"], run.tags.items()), 0)
        if run.note:
            self._writer.add_text("note", run.note, 0)
        self._writer.flush()

    def log_round(self, row: RoundResult) -> None:
        """Add the figures of a round."""
        for name, value in row.metrics().items():
            self._writer.add_scalar(_tag(name), value, row.round)
        self._writer.flush()

    def end(self, end: RunEnd) -> None:
        """Add the final figures and the table of the worst clients."""
        for name, value in end.figures.items():
            self._writer.add_scalar(_tag(name), value, end.round)
        if end.clients:
            columns, rows = clients_table(end)
            self._writer.add_text("clients", _table(columns, rows[:SHOWN_CLIENTS]), end.round)
        self._writer.close()
        super().end(end)


def _tag(name: str) -> str:
    """Return a name as a tag: what stands before the last dot is the group in which TensorBoard shows it."""
    group, dot, figure = name.rpartition(".")
    return f"{group}/{figure}" if dot else name


def _table(columns: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as Markdown, which TensorBoard renders."""
    heads = [str(column) for column in columns]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in rows:
        cells = ["" if value is None else str(value).replace("|", "\\|").replace("\n", " ") for value in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
