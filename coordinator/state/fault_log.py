"""The faults that agents have reported, of all runs: two files of bounded size, for people who look back.

`status.json` has only the fault that stands. An agent may send as many as it likes, so the registry decides which ones
are worth a line; what is older than the two files is dropped.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from edge_agent.core.storage import read_regular

from ..journal.store import utc_now

NEWER = "faults.jsonl"
OLDER = "faults.older.jsonl"
FILE_BYTES = 1 << 20
"""Of one file, some 3,000 faults; then it becomes the older one."""


class FaultLog:
    """The faults in a state folder, the oldest first."""

    def __init__(self, state: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._newer = state / NEWER
        self._older = state / OLDER
        self._now = now

    def note(self, agent: str, fault: Mapping[str, str]) -> None:
        """Add a fault. On a full disk it is lost; the status has it as long as it stands."""
        line = json.dumps({"at": self._now().isoformat(timespec="seconds"), "agent": agent, **fault}) + "\n"
        with contextlib.suppress(OSError):
            if self._newer.exists() and self._newer.stat().st_size + len(line) > FILE_BYTES:
                self._newer.replace(self._older)
            with self._newer.open("a", encoding="utf-8") as file:
                file.write(line)

    def version(self) -> tuple[int, ...]:
        """Return a value that is another one whenever there are other faults."""
        stamps = []
        for path in (self._older, self._newer):
            with contextlib.suppress(OSError):
                stamps += [path.stat().st_size, path.stat().st_mtime_ns]
        return tuple(stamps)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield all faults with ``at`` and ``agent``; lines that a power cut has torn are left out."""
        for path in (self._older, self._newer):
            try:
                lines = read_regular(path).splitlines()
            except OSError:
                continue
            for line in lines:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict) and isinstance(record.get("agent"), str):
                    yield record
