"""Blobs on their way down: who lacks what, one broadcast for many, single repairs for few.

A job or an offer names a blob. Agents answer `Have` or `Want`. The first `Want` opens a short window in which the
others may answer too; then what anybody lacks goes out once. Whoever still misses something asks again and gets it
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from edge_agent.wire.chunks import AHEAD_BYTES, Outgoing, Sending, expand
from edge_agent.wire.messages import Topics

GATHER_S = 0.05
"""How long the first asker waits for others: once everybody offered has answered, no time is lost at all."""

Publish = Callable[[str, bytes], None]


@dataclass
class _Offer:
    """One blob and everybody concerned with it."""

    blob: Outgoing
    unanswered: set[str] = field(default_factory=set)
    waiting: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    start_at: float = 0.0
    sendings: list[Sending] = field(default_factory=list)


class Distributor:
    """All blobs on offer. `pump` does the sending; call it after each event and when it says."""

    def __init__(self, topics: Topics, publish: Publish, clock: Callable[[], float]) -> None:
        self._topics, self._publish, self._clock = topics, publish, clock
        self._offers: dict[str, _Offer] = {}
        self.bytes_to: dict[str, int] = {}

    def offer(self, blob: Outgoing, agents: Collection[str]) -> None:
        """These agents may ask for the blob from now on, and are expected to answer."""
        offer = self._offers.setdefault(blob.ref.digest, _Offer(blob))
        offer.unanswered.update(agents)

    def withdraw(self, digests: Collection[str]) -> None:
        """Nobody needs these blobs any more."""
        for digest in digests:
            self._offers.pop(digest, None)

    def have(self, agent: str, digest: str) -> None:
        """An agent has the whole blob, from its cache or because it has just got it."""
        if offer := self._offers.get(digest):
            offer.unanswered.discard(agent)
            self._leave(offer, agent)

    def want(self, agent: str, digest: str, ranges: Iterable[tuple[int, int]]) -> bool:
        """An agent lacks these chunks; False when no such blob is on offer.

        Raises:
            ChunkError: ranges outside the blob.
        """
        offer = self._offers.get(digest)
        if offer is None:
            return False
        wanted = list(ranges)
        for _ in expand(wanted, offer.blob.count):
            pass  # only checks them, before anything is changed
        offer.unanswered.discard(agent)
        self._leave(offer, agent)
        if not offer.waiting:
            offer.start_at = self._clock() + GATHER_S
        offer.waiting[agent] = wanted
        return True

    def take(self, agent: str, digest: str) -> Outgoing | None:
        """The whole blob, for an agent in this very process, counted as if it had travelled; None: not on offer."""
        offer = self._offers.get(digest)
        if offer is None:
            return None
        self.have(agent, digest)
        self.bytes_to[agent] = self.bytes_to.get(agent, 0) + offer.blob.wire_bytes
        return offer.blob

    def progress(self, agent: str, digest: str, seen: int) -> None:
        """An agent reports how many frames it has seen since it asked."""
        if offer := self._offers.get(digest):
            for sending in offer.sendings:
                sending.saw(agent, seen, self._clock())

    def forget(self, agent: str) -> None:
        """An agent is gone: nothing waits for it."""
        for offer in self._offers.values():
            offer.unanswered.discard(agent)
            self._leave(offer, agent)

    def pump(self) -> float | None:
        """Publish what flow control allows; seconds until it wants to be called again, None when only events matter."""
        now, due = self._clock(), list[float]()
        for offer in self._offers.values():
            self._start(offer, now)
            for sending in offer.sendings:
                self._send(offer, sending, now)
            offer.sendings = [sending for sending in offer.sendings if sending.receivers]
            if offer.waiting:
                due.append(offer.start_at - now)
            if any(not sending.done for sending in offer.sendings):
                due.append(0.5)
        return max(0.0, min(due)) if due else None

    def _start(self, offer: _Offer, now: float) -> None:
        if not offer.waiting or (offer.unanswered and now < offer.start_at):
            return
        ranges = _union(offer.waiting.values())
        offer.sendings.append(Sending(offer.blob, ranges, offer.waiting, ahead_bytes=AHEAD_BYTES, now=now))
        offer.waiting = {}

    def _send(self, offer: _Offer, sending: Sending, now: float) -> None:
        receivers = sending.receivers
        one = len(receivers) == 1
        topic = self._topics.down_chunks(receivers[0]) if one else self._topics.broadcast(offer.blob.ref.digest)
        for frame in sending.due(now):
            self._publish(topic, frame)
            for agent in receivers:
                self.bytes_to[agent] = self.bytes_to.get(agent, 0) + len(frame)

    def _leave(self, offer: _Offer, agent: str) -> None:
        offer.waiting.pop(agent, None)
        for sending in offer.sendings:
            sending.leave(agent)


def _union(wanted: Iterable[Iterable[tuple[int, int]]]) -> list[tuple[int, int]]:
    """The ranges that cover all of ``wanted``, merged."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(piece for ranges in wanted for piece in ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
