"""The faults that agents have reported: `Fault`, and a log of those of all runs for people who look back.

`status.json` has only the fault that stands. An agent may send as many as it likes, so `coordinator.fleet.roster`
decides which ones are worth a line of the log. It is two files of bounded size; what is older than they is dropped.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from edge_agent.core.storage import read_regular

from ..journal.store import utc_now
from ..views.values import as_text

NEWER = "faults.jsonl"
OLDER = "faults.older.jsonl"
FILE_BYTES = 1 << 20
"""Of one file, some 3,000 faults; then it becomes the older one."""


@dataclass(frozen=True)
class Fault:
    """Why an agent's task has failed, or why an agent is kept out."""

    error: str
    """The name of the error's class."""

    message: str
    remedy: str
    """What a person can do about it."""

    at: str = ""
    """When it was reported (ISO 8601, UTC)."""

    code: str | None = None
    """The code of the fault, see `edge_agent.wire.faults`; None: earlier versions say none, and a refusal has none."""

    @classmethod
    def from_body(cls, body: object) -> Fault | None:
        """Return the fault in an object of a file; None where there is none, and texts that are missing are empty."""
        if not isinstance(body, Mapping) or not body:
            return None
        code = body.get("code")
        return cls(
            error=as_text(body.get("error", "")),
            message=as_text(body.get("message", "")),
            remedy=as_text(body.get("remedy", "")),
            at=as_text(body.get("at", "")),
            code=None if code is None else as_text(code),
        )

    def to_json(self) -> dict[str, str]:
        """Return the fault as files and ``--json`` have it."""
        code = {} if self.code is None else {"code": self.code}
        return {"error": self.error, **code, "message": self.message, "remedy": self.remedy, "at": self.at}


@dataclass(frozen=True)
class ReportedFault:
    """A line of the log: a fault and the agent that has reported it."""

    agent: str
    fault: Fault


class FaultLog:
    """The faults in a state folder, the oldest first."""

    def __init__(self, state: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._newer = state / NEWER
        self._older = state / OLDER
        self._now = now

    def note(self, agent: str, fault: Fault) -> None:
        """Add a fault, with the time of this call. On a full disk it is lost; the status has it while it stands."""
        body = fault.to_json()
        del body["at"]
        line = json.dumps({"at": self._now().isoformat(timespec="seconds"), "agent": agent, **body}) + "\n"
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

    def read(self) -> Iterator[ReportedFault]:
        """Yield all faults; lines that a power cut has torn are left out."""
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
                fault = Fault.from_body(record)
                if fault is not None and isinstance(record.get("agent"), str):
                    yield ReportedFault(record["agent"], fault)
