"""Devices that are kept out: refused by the broker or the enrolment port, revoked, or of another protocol version.

They are on no roster, so that nothing else shows them. What they call themselves is hostile text of unknown senders.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

from edge_agent.core.formats import printable

from ..journal.store import utc_now
from .rejections import Rejections

log = logging.getLogger(__name__)

MOST_LISTED = 50
FORGOTTEN_S = 300.0
"""An agent that is refused tries again after at most 60 s; one that is not heard for so long has given up."""

NAME_CHARS = 80
REASON_CHARS = 500

By = Literal["broker", "enrolment", "coordinator"]
"""Who refuses."""


@dataclass(frozen=True)
class Refused:
    """What was refused to a device; ``id`` is what it calls itself, empty where that is not known."""

    id: str
    by: By
    error: str
    message: str
    remedy: str


@dataclass(frozen=True)
class _Noted:
    """A refusal, and how often and when it happened."""

    refused: Refused
    times: int
    seen_at: float
    """When it happened last, by the monotonic clock."""

    at: str
    """When it happened last, for people (ISO 8601, UTC)."""


class Refusals:
    """The refusals of the last minutes, a bounded number. `note` may be called from any thread."""

    def __init__(self, clock: Callable[[], float], now: Callable[[], datetime] = utc_now) -> None:
        """``now``: the wall clock."""
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._noted: dict[tuple[str, str, str], _Noted] = {}
        """(agent, by, error) -> the newest refusal."""

        self._lines = Rejections(clock)

    def note(self, name: str, by: By, error: str, message: str, remedy: str) -> None:
        """Note a refusal; ``name``: what the device calls itself."""
        # Step 1: what unknown senders call themselves is hostile text: bounded, and without control characters.
        agent = printable(name[:NAME_CHARS])
        refused = Refused(agent, by, error, printable(message[:REASON_CHARS]), remedy)
        key = (agent, by, error)
        with self._lock:
            # Step 2: make room. Random names of a flood come once; a device that is set up wrongly comes again and
            # again, so the rarest goes, and of equal ones the oldest.
            self._forget()
            if key not in self._noted and len(self._noted) >= MOST_LISTED:
                rarest = min(self._noted, key=lambda other: (self._noted[other].times, self._noted[other].seen_at))
                del self._noted[rarest]
            # Step 3: count it; the log has it where it is none of many of the same.
            before = self._noted.get(key)
            times = 1 if before is None else before.times + 1
            at = self._now().isoformat(timespec="seconds")
            self._noted[key] = _Noted(refused, times, self._clock(), at)
            is_news = self._lines.note(f"{agent} {by} {error}") is not None
        if is_news:
            form = "agent_refused agent=%s by=%s times=%d error=%s reason=%s remedy=%s"
            log.warning(form, agent or "unknown", by, times, error, refused.message, remedy)

    def accepted(self, agent: str) -> None:
        """Forget the refusals of an agent that is let in now."""
        with self._lock:
            for key in list(self._noted):
                if key[0] == agent:
                    del self._noted[key]

    def body(self) -> list[dict[str, Any]]:
        """Return the rows of ``status.json``, sorted by id: `Refused`, and ``times`` and ``at`` of the last time."""
        with self._lock:
            self._forget()
            newest = [self._noted[key] for key in sorted(self._noted)]
        return [{**asdict(noted.refused), "times": noted.times, "at": noted.at} for noted in newest]

    def _forget(self) -> None:
        """Remove refusals that were not repeated for `FORGOTTEN_S` seconds."""
        before = self._clock() - FORGOTTEN_S
        for key, noted in list(self._noted.items()):
            if noted.seen_at < before:
                del self._noted[key]
