"""``--log tensorboard``: event files, a folder for each run; ``tensorboard --logdir FOLDER`` shows them.

Scalars are those of `RoundResult.metrics` by round, and the final figures. Parameters, tags and the note are text; the
worst clients are a table. A run that is resumed gives all rows again: its new event file begins with the mark after
which readers drop what older files of the folder have.

TensorBoard's own writer writes in a thread, which ends with the first error of a full disk and cannot go on. So its
package frames the events here, and `LineFile` writes them: what fails is written again when there is room.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from .log_files import FolderLogger, LineFile
from .records import RoundResult, RunDescription, RunEnd, clients_table

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

SHOWN_CLIENTS = 100
"""Rows of the table of the worst clients."""

VERSION = "brain.Event:2"
"""The version of event files, which each of them begins with."""

_PREFIX = "events.out.tfevents."


class TensorboardLogger(FolderLogger):
    """Writes the figures of a run as event files, which TensorBoard shows."""

    package: ClassVar[str] = "tensorboard"
    extra: ClassVar[str] = "tensorboard"
    takes_clients: ClassVar[bool] = False

    def begin(self, run: RunDescription) -> None:
        """Make an event file, and describe the run in it."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        super().begin(run)
        start = SessionLog(status=SessionLog.START)
        events = [Event(wall_time=time.time(), file_version=VERSION), Event(wall_time=time.time(), session_log=start)]
        events.append(_text("parameters", _table(["parameter", "value"], run.params.items()), 0))
        if run.tags:
            events.append(_text("tags", _table(["tag", "value"], run.tags.items()), 0))
        if run.note:
            events.append(_text("note", run.note, 0))
        self._file = LineFile(_next_file(self.run_folder), _records(events))

    def log_round(self, row: RoundResult) -> None:
        """Add the figures of a round."""
        self._file.append(_records(_scalar(name, value, row.round) for name, value in row.metrics().items()))

    def end(self, end: RunEnd) -> None:
        """Add the final figures and the table of the worst clients."""
        super().end(end)
        events = [_scalar(name, value, end.round) for name, value in end.figures.items()]
        if end.clients:
            columns, rows = clients_table(end)
            events.append(_text("clients", _table(columns, rows[:SHOWN_CLIENTS]), end.round))
        self._file.append(_records(events))


def _next_file(folder: Path) -> Path:
    """Return the path of a new event file.

    Readers take the files of a folder in the order of their names, so the seconds in its name are later than those of
    all others, whatever the clock says.
    """
    seconds = int(time.time())
    for path in folder.glob(f"{_PREFIX}*"):
        number = path.name.removeprefix(_PREFIX).partition(".")[0]
        if number.isdecimal():
            seconds = max(seconds, int(number) + 1)
    return folder / f"{_PREFIX}{seconds:010d}.headwater"


def _records(events: Iterable[Event]) -> bytes:
    """Return events as the records of an event file, each with its length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    content = io.BytesIO()
    writer = RecordWriter(content)
    for event in events:
        writer.write(event.SerializeToString())
    return content.getvalue()


def _scalar(name: str, value: float, step: int) -> Event:
    """Return a figure as an event; TensorBoard groups figures by what stands before the last dot of their names."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    group, dot, figure = name.rpartition(".")
    tag = f"{group}/{figure}" if dot else name
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
    return Event(wall_time=time.time(), step=step, summary=summary)


def _text(tag: str, text: str, step: int) -> Event:
    """Return a text, which TensorBoard shows as Markdown, as an event."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.text.summary_v2 import text_pb

    return Event(wall_time=time.time(), step=step, summary=text_pb(tag, text))


def _table(columns: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as Markdown, which TensorBoard renders."""
    heads = [str(column) for column in columns]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in rows:
        cells = ["" if value is None else str(value).replace("|", "\\|").replace("\n", " ") for value in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
