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

from edge_agent.wire.messages.fields import printable

from ..journal.store import utc_now
from .registry import Rejections

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


class Refusals:
    """Those of the last minutes, a bounded number. `note` may be called from any thread."""

    def __init__(self, clock: Callable[[], float], now: Callable[[], datetime] = utc_now) -> None:
        """``now``: the wall clock."""
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str, str], tuple[Refused, int, float, str]] = {}
        """(agent, by, error) -> the newest, how often, when by the clock, and when for people."""

        self._lines = Rejections(clock)

    def note(self, name: str, by: By, error: str, message: str, remedy: str) -> None:
        """Note a refusal; ``name``: what the device calls itself."""
        named = printable(name[:NAME_CHARS])
        one = Refused(named, by, error, printable(message[:REASON_CHARS]), remedy)
        key = (one.id, by, error)
        with self._lock:
            self._forget()
            if key not in self._known and len(self._known) >= MOST_LISTED:
                # Random names of a flood come once; a device that is set up wrongly comes again and again.
                del self._known[min(self._known, key=lambda known: self._known[known][1:3])]
            times = self._known.get(key, (one, 0, 0.0, ""))[1] + 1
            self._known[key] = one, times, self._clock(), self._now().isoformat(timespec="seconds")
            is_news = self._lines.note(f"{one.id} {by} {error}") is not None
        if is_news:
            form = "agent_refused agent=%s by=%s times=%d error=%s reason=%s remedy=%s"
            log.warning(form, one.id or "unknown", by, times, error, one.message, remedy)

    def accepted(self, agent: str) -> None:
        """This agent is let in now."""
        with self._lock:
            for key in [key for key in self._known if key[0] == agent]:
                del self._known[key]

    def body(self) -> list[dict[str, Any]]:
        """As in ``status.json``, sorted by id: `Refused`, and ``times`` and ``at`` of the last time (ISO 8601, UTC)."""
        with self._lock:
            self._forget()
            known = sorted(self._known.items())
        return [{**asdict(one), "times": times, "at": at} for _, (one, times, _, at) in known]

    def _forget(self) -> None:
        before = self._clock() - FORGOTTEN_S
        for key in [key for key, known in self._known.items() if known[2] < before]:
            del self._known[key]
