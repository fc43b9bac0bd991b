"""A question over the broker: does a coordinator of this federation serve? It is asked before a backup is started on.

A coordinator that starts is answered, too (`peers`), but by then its start is in its journal. A backup that was not
started stays one: 'headwater backup' can bring it up to date again, and a standby can wait on it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from edge_agent.core.errors import HeadwaterError
from edge_agent.wire.messages import codec
from edge_agent.wire.messages.down import Present
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Connected, Disconnected, Event, Message, Subscribed, Transport

from .listening import Listening

log = logging.getLogger(__name__)

INQUIRY_S = 10.0
"""How long nobody may answer: a coordinator that is just restarting is silent for less."""

QUERY_S = 1.0
LOOK_S = 0.5


class Inquiry:
    """A question that ends with the first answer, or after `INQUIRY_S` without one."""

    def __init__(
        self,
        federation: str,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.monotonic,
        boot: str | None = None,
    ) -> None:
        """``federation``: its name."""
        self._transport = transport
        self._clock = clock
        self._boot = boot or secrets.token_hex(8)
        self._topics = Topics(federation)
        self._listening = Listening(self._topics.coordinators)
        self._seq = 0
        self._subscribed_at: float | None = None
        """Since when answers can arrive; None: the broker is not reached."""

        self._asked_at = float("-inf")
        self.answer: Present | None = None
        """What the coordinator says that serves; None: nobody has answered yet."""

    def ask(self, stop: threading.Event | None = None) -> Present | None:
        """Ask until somebody answers, for `INQUIRY_S`; a broker that is away is waited for, until ``stop`` is set.

        Raises:
            UsageError: the broker does not let this process hear coordinators, for longer than an election takes.
            BrokerAway: the broker does not answer, and is not to be waited for.
        """
        self._transport.subscribe(self._topics.coordinators)
        self._transport.start()
        while not self.step(LOOK_S):
            if stop is not None and stop.is_set():
                break
        return self.answer

    def step(self, timeout_s: float) -> bool:
        """Handle at most one event; return True once the question is answered, or nobody has answered it in time.

        Raises:
            UsageError: the broker does not let this process hear coordinators, for longer than an election takes.
        """
        event = self._transport.receive(timeout_s)
        now = self._clock()
        self._handle(event, now)
        self._listening.check(now)
        if self.answer is not None:
            return True
        if self._subscribed_at is None:
            return False
        if now - self._asked_at >= QUERY_S:
            self._asked_at = now
            self._query()
        return now - self._subscribed_at >= INQUIRY_S

    def _handle(self, event: Event | None, now: float) -> None:
        """Handle an event of the transport."""
        if isinstance(event, Connected):
            log.info("asks_who_serves start=%s", self._boot)
        elif isinstance(event, Subscribed):
            if self._listening.is_granted(event, now):
                self._subscribed_at = now
        elif isinstance(event, Disconnected):
            log.warning("broker_away reason=%s: until it is back, nothing is started", event.reason)
            self._subscribed_at = None
            self._listening.disconnected()
        elif isinstance(event, Message) and event.topic == self._topics.coordinators and not event.retained:
            self._take(event.payload)

    def _query(self) -> None:
        self._seq += 1
        query = Present(boot=self._boot, seq=self._seq, host=socket.gethostname()[:255], process=os.getpid())
        self._transport.publish(self._topics.coordinators, codec.encode(query))

    def _take(self, payload: bytes) -> None:
        """Note an answer to this question; other messages prove nothing, as in `peers`."""
        try:
            message = codec.parse_between_coordinators(payload)
        except HeadwaterError as error:
            log.warning("message_refused from=coordinators reason=%s", error)
            return
        if message.boot != self._boot and message.answers == self._boot and not message.standby:
            self.answer = message
