"""What the coordinator says of itself: log lines when a wait begins, and ``status.json`` for those who ask."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from edge_agent.errors import cause
from edge_agent.storage import write_atomic

from ..fleet.rejections import Refusals
from ..hosted import CombinedTransport
from ..runs.context import Waiting
from ..state.journal import utc_now
from ..text import listed

if TYPE_CHECKING:
    from pathlib import Path

    from ..fleet.registry import Member
    from .coordinator import Coordinator

log = logging.getLogger(__name__)

STATUS_EVERY_S = 1.0
PAGE_BYTES, SPARE_BYTES = 4096, 1024
"""A status file has some bytes to spare, so that the next one, which tells of a full disk, fits in its place."""
PAUSE_S = 0.2
"""Least time between two status files: a round of a thousand updates changes what is waited for a thousand times."""


class Voice:
    """Says what is waited for: a line at INFO for each wait, what changes within it at DEBUG."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        self._said: Waiting | None = None
        self._has_news, self._written_at, self._caught_up_at = False, float("-inf"), float("-inf")
        self._troubles = Refusals(clock)

    def say(self, waiting: Waiting, status: Callable[[], dict[str, Any]]) -> None:
        """Log what is waited for when it changes, and keep the status file fresh."""
        before, self._said = self._said, waiting
        changed = before is None or (waiting.what, waiting.whom) != (before.what, before.whom)
        if changed:
            same_wait = before is not None and waiting.about and waiting.about == before.about
            level = logging.DEBUG if same_wait else logging.INFO
            log.log(level, "waiting for=%s whom=%s", waiting.what, listed(waiting.whom, "-"))
        self._has_news |= changed
        if self._clock() - self._written_at >= (PAUSE_S if self._has_news else STATUS_EVERY_S):
            self._write(status)

    def catch_up(self, status: Callable[[], dict[str, Any]], pause_s: float = 0.0) -> None:
        """Write what is not in the status file yet, unless this was called less than ``pause_s`` ago.

        For the moments before silence: nobody may call `say` for a long time, or ever.
        """
        if self._has_news and self._clock() - self._caught_up_at >= pause_s:
            self._caught_up_at = self._clock()
            self._write(status)

    def _write(self, status: Callable[[], dict[str, Any]]) -> None:
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


def status_of(c: Coordinator) -> dict[str, Any]:
    """What goes on, as JSON."""
    loop, waits = c.loop, c.waits
    run, stall = None if loop is None else loop.status(), c.storage.stall
    if stall is not None:
        run = {**(run or {"id": stall.run, "left_out": {}}), "stalled": stall.body()}
    hosted = {client.id for client in c.config.hosted}
    notes = c.transport.notes() if isinstance(c.transport, CombinedTransport) else {}
    return {
        "federation": c.config.federation,
        "broker": c.broker_url,
        "federation_id": c.federation_id,
        "epoch": c.epoch,
        "other_coordinator": c.peers.note or None,
        "at": utc_now().isoformat(timespec="milliseconds"),
        "run": run,
        "waiting": {
            "for": waits.what,
            "whom": list(waits.whom),
            "seconds_left": None if waits.until is None else round(max(0.0, waits.until - c.clock()), 1),
        },
        "agents": [
            *(_agent(c, m, hosted, (*_left_out(run, m.id), *notes.get(m.id, ()))) for m in c.roster.members()),
            *(_unheard(name, notes.get(name, ())) for name in sorted(hosted) if c.roster.get(name) is None),
        ],
        "storage": c.storage.trouble or None,
        "broker_away": c.is_without_broker,
        "refused_messages": c.refused.total,
        "refused_updates": c.collector.refused.total,
        "refused_most": {"messages": c.refused.top(), "updates": c.collector.refused.top()},
    }


def _agent(c: Coordinator, m: Member, hosted: Collection[str], notes: tuple[str, ...]) -> dict[str, Any]:
    return {
        "id": m.id,
        "tier": m.tier,
        "transport": "hosted" if m.id in hosted else "mqtt",
        "present": m.is_present,
        "samples": m.samples or None,
        "bundle_id": m.bundle_id,
        "software": m.software,
        "notes": [*m.notes.values(), *notes],
        "condition": m.condition,
        "fault": m.fault,
        "silent_s": round(c.clock() - m.heard_at, 1),
        "bytes_up": c.collector.bytes_from.get(m.id, 0),
        "bytes_down": c.distributor.bytes_to.get(m.id, 0),
    }


def _left_out(run: dict[str, Any] | None, agent: str) -> Iterator[str]:
    """That the run does without an agent for a while, and why."""
    if run is not None and (told := run["left_out"].get(agent)) is not None:
        yield f"left out of {run['id']} until round {told['until_round']}: {told['reason']}"


def _unheard(hosted: str, notes: tuple[str, ...]) -> dict[str, Any]:
    """A hosted client that has yet to say that it is there."""
    return {
        "id": hosted,
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
