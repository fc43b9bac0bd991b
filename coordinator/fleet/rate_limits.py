"""How many messages of each kind one agent may send; what is beyond that is dropped before anything reads it.

Without limits one agent that sends 5,000 messages a second delays those of all others by seconds. The limits are far
above what a working agent sends, and whatever is dropped is sent again: no message of the protocol is sent only once.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from edge_agent.core.errors import MessageError
from edge_agent.wire.topics import Topics


class Rate(NamedTuple):
    """So many messages a second on average, and so many at once."""

    per_s: float
    at_once: float


RATES: dict[str, Rate] = {
    "h": Rate(2, 20),
    "s": Rate(2, 20),
    "ub": Rate(1500, 3000),  # 90 MB/s of one agent, and a model of 180 MB at once
    "hello": Rate(2, 10),
    "have": Rate(20, 100),
    "want": Rate(20, 100),
    "progress": Rate(200, 400),
    "update": Rate(2, 20),
    "report": Rate(2, 20),
    "fault": Rate(2, 20),
    "bye": Rate(1, 5),
}
"""Kind of topic or type of control message -> rate."""

OTHER = Rate(2, 20)
"""Of all messages together whose type is none of those."""

REFUSED_COST = 20.0
"""A message that turns out to be invalid counts as so many: chunks have the highest rate, and junk is short."""

_TYPE = re.compile(rb'"type" ?: ?"([a-z]{1,16})"')
_HEAD_BYTES = 256
"""The type of a message is within its first bytes; it is not read here, and a wrong one only changes the limit."""

LEAST_BUCKETS = 10_000


def type_of(payload: bytes) -> str:
    """Return the type that a control message names, without reading it whole; empty where it names none."""
    match = _TYPE.search(payload, 0, _HEAD_BYTES)
    return "" if match is None else match[1].decode()


class RateLimits:
    """Token buckets by agent and kind. `admits` may be called in another thread than the rest."""

    def __init__(self, topics: Topics, clock: Callable[[], float] = time.monotonic) -> None:
        self._topics = topics
        self._clock = clock
        self._buckets: dict[tuple[str, str], tuple[float, float]] = {}
        """(Agent, kind) -> tokens at a time."""

        self._most_buckets = LEAST_BUCKETS
        self._dropped: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def admits(self, topic: str, payload: bytes) -> bool:
        """Return whether the message may be read; topics that are not of agents always may."""
        try:
            agent, kind = self._topics.sender(topic)
        except MessageError:
            return True
        if kind == "up":
            kind = type_of(payload)
            kind = kind if kind in RATES else "other"
        if self._spend(agent, kind, 1.0):
            return True
        with self._lock:
            self._dropped[agent, kind] += 1
        return False

    def refused(self, topic: str) -> None:
        """Note that a message of that topic was admitted, and is invalid: an invalid chunk costs more."""
        try:
            agent, kind = self._topics.sender(topic)
        except MessageError:
            return
        if kind == "ub":
            self._spend(agent, kind, REFUSED_COST)

    def dropped(self) -> Counter[tuple[str, str]]:
        """Return how many messages were dropped since the last call, by agent and kind."""
        if not self._dropped:
            return Counter()
        with self._lock:
            dropped = self._dropped
            self._dropped = Counter()
        return dropped

    def _spend(self, agent: str, kind: str, cost: float) -> bool:
        """Take ``cost`` from what an agent may send of a kind; return False, and take nothing, where it is used up."""
        rate = RATES.get(kind, OTHER)
        now = self._clock()
        key = (agent, kind)
        tokens, at = self._buckets.get(key, (rate.at_once, now))
        tokens = min(rate.at_once, tokens + (now - at) * rate.per_s)
        is_admitted = tokens >= 1.0
        if is_admitted:
            tokens -= cost
        self._buckets[key] = (tokens, now)
        if len(self._buckets) > self._most_buckets:
            self._forget_idle(now)
        return is_admitted

    def _forget_idle(self, now: float) -> None:
        """Remove the buckets that are full again: without one an agent has a full one."""
        for key, (tokens, at) in list(self._buckets.items()):
            rate = RATES.get(key[1], OTHER)
            if tokens + (now - at) * rate.per_s >= rate.at_once:
                self._buckets.pop(key, None)
        self._most_buckets = max(LEAST_BUCKETS, 2 * len(self._buckets))
