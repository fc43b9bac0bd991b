"""The coordinator's status: a log line when a wait begins, and ``status.json`` for ``headwater status``."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_agent.core.errors import cause
from edge_agent.core.storage import write_atomic

from ..fleet.rejections import Rejections
from ..rounds.context import Waiting
from ..state.status_file import EVERYONE
from ..text import listed

log = logging.getLogger(__name__)

STATUS_EVERY_S = 1.0
EVERYONE_EVERY_S = 30.0
PAGE_BYTES = 4096
"""The size of a status file is a multiple of this one."""

SPARE_BYTES = 1024
"""A status file has spare bytes, so that the next one, which may report a full disk, fits in its place."""

PAUSE_S = 0.2
"""Least time between two status files: a round of a thousand updates changes what is waited for a thousand times."""

WRITING_SHARE = 0.02
"""The share of the time that writing status files may take; that of a thousand agents takes longer."""

LONGEST_PAUSE_S = 10.0
"""The longest pause between two status files, however long one takes."""


@dataclass(frozen=True)
class AgentStatus:
    """One agent in ``status.json``; the defaults are those of a hosted client that has not connected yet."""

    id: str
    tier: str | None
    transport: str
    present: bool = False
    samples: int | None = None
    bundle_id: str = ""
    software: str = ""
    notes: list[str] = field(default_factory=list)
    condition: str = "ok"
    fault: dict[str, str] | None = None
    acc: dict[str, float] = field(default_factory=dict)
    """Scope (local, global, personal) -> the newest accuracy, 0..1."""

    head: str = ""
    better_alone: bool = False
    candidate: dict[str, Any] | None = None
    """A bundle that it has tried and does not run, with its accuracies there: `coordinator.views.candidate`."""

    rss_mb: float | None = None
    inputs_since: float | None = None
    """When the inputs of its server changed, in seconds since 1970; 0: they are as fitted; None: it does not say."""

    relay: str = ""
    """The relay through which it speaks; empty: through none."""

    silent_s: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0


StatusReport = dict[str, Any]
"""The JSON of ``status.json``, see `Coordinator.status`; its readers get a `coordinator.state.status_file.Status`."""


class StatusWriter:
    """Logs each new wait at INFO, changes within it at DEBUG, and writes the status file."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._logged: Waiting | None = None
        self._has_news = False
        self._written_at = float("-inf")
        self._caught_up_at = float("-inf")
        self._took_s = 0.0
        self._everyone_at = float("-inf")
        self._rejections = Rejections(clock)

    def update(
        self,
        waiting: Waiting,
        status: Callable[[], StatusReport],
        everyone: Callable[[], list[AgentStatus]] | None = None,
    ) -> None:
        """Log what is waited for when it changes, and keep the status file up to date.

        Args:
            waiting: What is waited for now.
            status: Makes the content of the status file.
            everyone: Makes the list of all agents, where the status has only some of them; it is written less often.
        """
        before = self._logged
        self._logged = waiting
        if before is None or (waiting.what, waiting.whom) != (before.what, before.whom):
            self._has_news = True
            is_same_wait = before is not None and waiting.about != "" and waiting.about == before.about
            level = logging.DEBUG if is_same_wait else logging.INFO
            log.log(level, "waiting for=%s whom=%s", waiting.what, listed(waiting.whom, "-"))
        # News is written soon, the rest each second; a status that takes long to write is written less often.
        usual_pause_s = PAUSE_S if self._has_news else STATUS_EVERY_S
        pause_s = max(usual_pause_s, min(LONGEST_PAUSE_S, self._took_s / WRITING_SHARE))
        if self._clock() - self._written_at >= pause_s:
            self._write(status)
        if everyone is not None and self._clock() - self._everyone_at >= EVERYONE_EVERY_S:
            self._everyone_at = self._clock()
            with contextlib.suppress(OSError):  # the next status reports a full disk
                write_atomic(
                    self._path.with_name(EVERYONE),
                    json.dumps([vars(agent) for agent in everyone()]).encode(),
                    durable=False,
                )

    def catch_up(self, status: Callable[[], StatusReport], pause_s: float = 0.0) -> None:
        """Write what is not in the status file yet, unless this was called less than ``pause_s`` ago.

        Call it before a long pause, or before the end.
        """
        if self._has_news and self._clock() - self._caught_up_at >= pause_s:
            self._caught_up_at = self._clock()
            self._write(status)

    def _write(self, status: Callable[[], StatusReport]) -> None:
        """Write the status file in whole pages, over the old one where the disk is full, and note how long it took."""
        begin = self._clock()
        self._has_news = False
        content = json.dumps(status()).encode()
        pages = math.ceil((len(content) + SPARE_BYTES) / PAGE_BYTES)
        size = pages * PAGE_BYTES
        try:
            write_atomic(self._path, content.ljust(size), durable=False)
        except OSError as error:
            is_written = _overwrite(self._path, content)
            if self._rejections.note(cause(error)) is not None:
                how = "over the old one" if is_written else "not at all"
                log.warning("status_written %s path=%s reason=%s", how, self._path, cause(error))
        self._written_at = self._clock()
        self._took_s = self._written_at - begin


def _overwrite(path: Path, content: bytes) -> bool:
    """Write ``content`` over the file, which needs no space on a full disk; return whether it had room."""
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            if len(content) <= size:
                file.write(content.ljust(size))
            return len(content) <= size
    except OSError:
        return False
