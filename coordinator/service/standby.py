"""A coordinator in reserve: it asks the one that serves every two seconds, and takes over when that one is silent.

Silence counts only while the broker returns this one's own messages, so that a lost broker is not taken for a lost
coordinator. Where both have one state folder, a free lock is a second sign of the end, and `QUIET_S` of silence are
enough. A lock that a silent process still holds, because it was suspended or cut off, is taken away: the journal takes
no entry of it any more (`coordinator.state.journal.Journal.serve_from`), so it can accept nothing and ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from edge_agent.errors import HeadwaterError, StateError, UsageError
from edge_agent.storage import lock_holder, take_lock_away
from edge_agent.wire import messages as wire
from edge_agent.wire.messages import Present, Topics
from edge_agent.wire.transport import Connected, Disconnected, Message, Subscribed, Transport

from ..state.backup import MARKER
from ..state.store import StateFolder

log = logging.getLogger(__name__)

TAKEOVER_S = 30.0
"""Silence after which a coordinator is replaced. One that is busy with an aggregation answers only after it."""

QUIET_S = 3.0
"""Silence that is enough where the state folder's lock is free."""

QUERY_S = 2.0
LOOK_S = 0.5
FREE_ANSWERS = 3
"""A coordinator that answers so often in a row while the state folder's lock is free works on another folder."""


class Standby:
    """Watches the coordinator of a federation until this process may take over its state folder, or a copy of it.

    ``takeover_s``: silence, in seconds, after which a coordinator counts as lost.

    Raises:
        StateError: the folder has no journal, so there is nothing to take over.
    """

    def __init__(
        self,
        federation: str,
        state: Path,
        transport: Transport,
        *,
        takeover_s: float = TAKEOVER_S,
        clock: Callable[[], float] = time.monotonic,
        boot: str | None = None,
    ) -> None:
        self._name, self._state, self._transport, self._clock = federation, state, transport, clock
        self._takeover_s, self._boot = takeover_s, boot or secrets.token_hex(8)
        self._topics = Topics(federation)
        self._host, self._process, self._seq = socket.gethostname()[:255], os.getpid(), 0
        self._asked_at = float("-inf")
        self._returned_at: float | None = None
        """When the broker last returned a query of this process; None: it is not connected."""

        self._heard_at = float("-inf")
        """The last sign of another coordinator, or the moment since when there could have been one."""

        self._free_answers = 0
        self._lock: tuple[str | None, float] = (None, float("-inf"))
        """Who holds the state folder, and since when that is known."""

        with StateFolder(state).look() as folder:
            starts = folder.journal.entries(kinds=("coordinator_started",))
        self._federation = next((str(start.body["federation"]) for start in starts if "federation" in start.body), "")
        self.serving = ""
        """The coordinator that serves, as text; empty until it was heard."""

    def wait(self, stop: threading.Event) -> bool:
        """True once this process is to take over; False when ``stop`` is set before.

        Raises:
            UsageError: the coordinator that serves works on another state, or the broker keeps its answers from us.
        """
        self._transport.subscribe(self._topics.coordinators)
        self._transport.start()
        while not stop.is_set():
            if self.step(LOOK_S):
                return True
        return False

    def step(self, timeout_s: float) -> bool:
        """Handle at most one event; True once this process is to take over, as `wait`."""
        event = self._transport.receive(timeout_s)
        now = self._clock()
        if isinstance(event, Connected):
            log.info("connected federation=%s standby=%s", self._name, self._boot)
        elif isinstance(event, Subscribed):
            if self._topics.coordinators not in event.filters:
                raise UsageError(
                    f"the broker does not let this process subscribe to {self._topics.coordinators}, so it cannot hear "
                    "whether a coordinator serves; give it the rights of the coordinator ('headwater enroll --acl')"
                )
            self._returned_at, self._asked_at = None, float("-inf")
        elif isinstance(event, Disconnected):
            log.warning("broker_away reason=%s: until it is back, nothing is taken over", event.reason)
            self._returned_at = None
        elif isinstance(event, Message) and event.topic == self._topics.coordinators and not event.retained:
            self._on_coordinator(event.payload)
        if now - self._asked_at >= QUERY_S:
            self._asked_at = now
            self._ask()
        return self._may_take_over(now)

    def _ask(self) -> None:
        self._seq += 1
        query = Present(boot=self._boot, seq=self._seq, host=self._host, process=self._process, standby=True)
        self._transport.publish(self._topics.coordinators, wire.encode(query))

    def _on_coordinator(self, payload: bytes) -> None:
        try:
            message = wire.parse_between_coordinators(payload)
        except HeadwaterError as error:
            log.warning("message_refused from=coordinators reason=%s", error)
            return
        now = self._clock()
        if message.boot == self._boot:
            if self._returned_at is None or now - self._returned_at > 3 * QUERY_S:
                self._heard_at = now  # what was said before has not reached this process
            self._returned_at = now
        elif not message.standby:
            self._heard_at = now
            self._on_serving(message)

    def _on_serving(self, message: Present) -> None:
        about = f"host '{message.host}', process {message.process}, epoch {message.epoch}"
        if message.federation != self._federation:
            raise UsageError(
                f"federation '{self._name}' is served by {about} with federation id {message.federation[:12]}, and "
                f"{self._state} is of {self._federation[:12]}; give its state folder, or a copy of that by "
                "'headwater backup'"
            )
        if about != self.serving:
            log.info("standing_by serving=%s takeover_s=%.0f", about, self._takeover_s)
        self.serving = about
        is_copy, holder = self._is_copy(), lock_holder(self._state)
        self._free_answers = 0 if is_copy or holder is not None else self._free_answers + 1
        if self._free_answers >= FREE_ANSWERS:
            raise UsageError(
                f"{about} serves federation '{self._name}' and does not work on {self._state}, which nobody holds; "
                "give its state folder, or a copy of that by 'headwater backup DIR --every 60'"
            )

    def _is_copy(self) -> bool:
        return (self._state / MARKER).exists()

    def _may_take_over(self, now: float) -> bool:
        holder = lock_holder(self._state)
        if holder != self._lock[0]:
            self._lock = (holder, now)
        if self._returned_at is None or now - self._returned_at > 3 * QUERY_S:
            return False
        silent_s, is_copy = now - self._heard_at, self._is_copy()
        if silent_s < (QUIET_S if holder is None and not is_copy else self._takeover_s):
            return False
        if holder is not None and (is_copy or now - self._lock[1] < self._takeover_s):
            return False  # a backup is writing to the copy, or another process has just begun to work here
        log.warning(
            "takes_over from=%s silent_s=%.0f lock=%s", self.serving or "nobody heard", silent_s, holder or "free"
        )
        if holder is not None:
            try:
                take_lock_away(self._state)
            except OSError as error:
                raise StateError(f"{self._state}: its lock, held by {holder}, cannot be removed: {error}") from error
        return True
