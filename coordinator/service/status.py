"""The coordinator's status: a log line when a wait begins, and ``status.json`` for ``headwater status``."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from edge_agent.errors import cause
from edge_agent.storage import write_atomic

from ..fleet.registry import Member, Rejections
from ..runs.context import Waiting
from ..text import listed

log = logging.getLogger(__name__)

STATUS_EVERY_S = 1.0
PAGE_BYTES, SPARE_BYTES = 4096, 1024
"""A status file has some bytes to spare, so that the next one, which tells of a full disk, fits in its place."""
PAUSE_S = 0.2
"""Least time between two status files: a round of a thousand updates changes what is waited for a thousand times."""


class AgentStatus(TypedDict):
    """One agent in ``status.json``."""

    id: str
    tier: str | None
    transport: str
    present: bool
    samples: int | None
    bundle_id: str
    software: str
    notes: list[str]
    condition: str
    fault: dict[str, str] | None
    silent_s: float | None
    bytes_up: int
    bytes_down: int


class StatusReport(TypedDict):
    """The content of ``status.json``."""

    federation: str
    broker: str
    federation_id: str
    epoch: int
    other_coordinator: str | None
    at: str
    run: dict[str, Any] | None
    waiting: dict[str, Any]
    agents: list[AgentStatus]
    storage: str | None
    broker_away: bool
    rejected_messages: int
    rejected_updates: int
    rejected_most: dict[str, dict[str, int]]


class StatusWriter:
    """Logs each new wait at INFO, changes within it at DEBUG, and writes the status file."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        self._said: Waiting | None = None
        self._has_news, self._written_at, self._caught_up_at = False, float("-inf"), float("-inf")
        self._troubles = Rejections(clock)

    def update(self, waiting: Waiting, status: Callable[[], StatusReport]) -> None:
        """Log what is waited for when it changes, and keep the status file up to date."""
        before, self._said = self._said, waiting
        changed = before is None or (waiting.what, waiting.whom) != (before.what, before.whom)
        if changed:
            same_wait = before is not None and waiting.about and waiting.about == before.about
            level = logging.DEBUG if same_wait else logging.INFO
            log.log(level, "waiting for=%s whom=%s", waiting.what, listed(waiting.whom, "-"))
        self._has_news |= changed
        if self._clock() - self._written_at >= (PAUSE_S if self._has_news else STATUS_EVERY_S):
            self._write(status)

    def catch_up(self, status: Callable[[], StatusReport], pause_s: float = 0.0) -> None:
        """Write what is not in the status file yet, unless this was called less than ``pause_s`` ago.

        Call it before a long pause, or before the end.
        """
        if self._has_news and self._clock() - self._caught_up_at >= pause_s:
            self._caught_up_at = self._clock()
            self._write(status)

    def _write(self, status: Callable[[], StatusReport]) -> None:
        self._has_news, self._written_at = False, self._clock()
        content = json.dumps(status()).encode()
        try:
            write_atomic(
                self._path, content.ljust(-(-(len(content) + SPARE_BYTES) // PAGE_BYTES) * PAGE_BYTES), durable=False
            )
        except OSError as error:
            is_there = _overwritten(self._path, content)
            if self._troubles.note(cause(error)) is not None:
                how = "over the old one" if is_there else "not at all"
                log.warning("status_written %s path=%s reason=%s", how, self._path, cause(error))


def _overwritten(path: Path, content: bytes) -> bool:
    """Whether ``content`` could be written over the file, which takes no room on a disk that has none."""
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            if len(content) <= size:
                file.write(content.ljust(size))
            return len(content) <= size
    except OSError:
        return False


def agent_status(
    member: Member, *, transport: str, silent_s: float, bytes_up: int, bytes_down: int, notes: Sequence[str]
) -> AgentStatus:
    """One agent's entry; ``notes`` come after those of the member itself."""
    return {
        "id": member.id,
        "tier": member.tier,
        "transport": transport,
        "present": member.is_present,
        "samples": member.samples or None,
        "bundle_id": member.bundle_id,
        "software": member.software,
        "notes": [*member.notes.values(), *notes],
        "condition": member.condition,
        "fault": member.fault,
        "silent_s": round(silent_s, 1),
        "bytes_up": bytes_up,
        "bytes_down": bytes_down,
    }


def unknown_client_status(name: str, notes: Sequence[str]) -> AgentStatus:
    """The entry of a hosted client that has not connected yet."""
    return {
        "id": name,
        "tier": "train",
        "transport": "hosted",
        "present": False,
        "samples": None,
        "bundle_id": "",
        "software": "",
        "notes": list(notes),
        "condition": "ok",
        "fault": None,
        "silent_s": None,
        "bytes_up": 0,
        "bytes_down": 0,
    }
