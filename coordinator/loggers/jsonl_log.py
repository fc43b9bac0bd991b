"""``--log jsonl``: ``run.jsonl``, one JSON object in each line: the run, its rounds with all clients, and its end."""

from __future__ import annotations

import json
from typing import Any

from .log_files import FolderLogger, LineFile
from .records import RoundResult, RunDescription, RunEnd


class JsonlLogger(FolderLogger):
    """One file of JSON lines. ``kind`` says what a line is about: run, round or end."""

    def begin(self, run: RunDescription) -> None:
        """Make the file with the line of the run."""
        super().begin(run)
        first = _line("run", uid=run.uid, name=run.name, params=dict(run.params), tags=dict(run.tags), note=run.note)
        self._file = LineFile(self.run_folder / "run.jsonl", first)

    def log_round(self, row: RoundResult) -> None:
        """Add the line of a round."""
        self._file.append(_line("round", round=row.round, metrics=row.metrics(), clients=row.per_client))

    def end(self, end: RunEnd) -> None:
        """Add the line of the end."""
        super().end(end)
        # Last: what fails before it is tried again, and this line is to come once.
        figures = {"status": end.status, "reason": end.reason, "rounds_done": end.round, "metrics": end.figures}
        self._file.append(_line("end", **figures, clients=end.clients))


def _line(kind: str, **fields: Any) -> bytes:
    """Return one line of JSON."""
    text = json.dumps({"kind": kind, **fields}, separators=(",", ":"), allow_nan=False, default=dict)
    return f"{text}\n".encode()
