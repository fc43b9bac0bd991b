"""The coordinator as a service: one loop over events, timers and the run that is under way.

Whatever arrives is checked, counted and answered; nothing that a peer sends can end the loop. Heavy work (export) runs
in a worker thread so that agents are heard meanwhile.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from edge_agent import __version__
from edge_agent.errors import DuplicateCoordinator, HeadwaterError, MessageError, ProtocolMismatch, StateError
from edge_agent.methods import Method
from edge_agent.wire import messages as wire
from edge_agent.wire.envelope import SPOKEN
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Connected, Disconnected, Message, Subscribed, Transport
from edge_agent.worker import InlineWorker, Worker

from ..config import CoordinatorConfig
from ..fleet.commands import Orders
from ..fleet.downloads import Distributor
from ..fleet.duplicate_ids import Doubles
from ..fleet.registry import Roster
from ..fleet.rejections import Refusals
from ..fleet.uploads import Collector, reason_of
from ..runs.context import Aside, Fleet, Waiting
from ..runs.finish import Finisher
from ..runs.release import Encoders, Releases
from ..runs.round_loop import RunLoop
from ..runs.run_queue import LOOK_FOR_REQUESTS_S, Runs, Storage, of_storage
from ..state.identity import RunIds, begin
from ..state.run_request import Request
from ..state.store import StateFolder
from .inbox import Inbox
from .peers import PROBE_S, Peers
from .status import Voice, status_of

log = logging.getLogger(__name__)

TICK_S = 0.5
"""Longest time between two looks at leases and acknowledgements while a run is under way."""
CHUNKS_AT_ONCE = 16
"""Chunks of updates that are taken in between two looks at everything else: some milliseconds."""


class Coordinator:
    """Serves one federation. `start`, then `step` again and again (or `serve`), then `close`."""

    make_runs: type[Runs] = Runs

    def __init__(
        self,
        config: CoordinatorConfig,
        state: StateFolder,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.monotonic,
        stopwatch: Callable[[], float] | None = None,
        worker: Worker | None = None,
        aside: Aside | None = None,
        boot: str | None = None,
        broker_url: str = "",
        probe_s: float = PROBE_S,
        run_ids: RunIds | None = None,
    ) -> None:
        """``probe_s``: how long another coordinator of the federation may take to answer before this one serves.

        ``run_ids``: what runs are called in messages; by default by ids that no other state folder has.
        """
        self.config, self.state, self.transport, self.clock = config, state, transport, clock
        self.stopwatch = stopwatch or clock
        self.worker, self.aside = worker or InlineWorker(), aside or Aside()
        self.broker_url = broker_url
        self.topics = Topics(config.federation)
        self._boot = boot or secrets.token_hex(8)
        self._run_ids = run_ids or RunIds(state.journal)
        self.orders = Orders(self.topics, self._publish, self._run_ids, self._boot)
        self.peers = Peers(config.federation, self._boot, self.orders.to_coordinators, clock, probe_s)
        self.roster = Roster(clock, config.round.lease_s)
        self.doubles = Doubles(self.roster, self.send, clock)
        self.distributor = Distributor(self.topics, self._publish, clock)
        self.storage = Storage(clock)
        is_stalled = lambda: self.storage.stall is not None  # noqa: E731 - one line says it
        self.collector = Collector(state.blobs, state.journal, self.send, clock, is_stalled)
        self.runs = self.make_runs(state, self.storage, clock, self._loop_of)
        self.refused = Refusals(clock)
        self.releases = Releases(state, self.distributor, self.send)
        self.inbox = Inbox(
            self.roster,
            self.doubles,
            self.orders,
            self.distributor,
            self.collector,
            self.releases,
            task=config.task,
            loop=lambda: self.loop,
            is_alone=self.peers.is_alone,
        )
        self._voice = Voice(state.path / "status.json", self.stopwatch)
        self._chunks = self._finished_uploads = 0
        self._away: Waiting | None = None

    # --- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Note the start and listen; serving begins when no other coordinator is there."""
        self.orders.federation, self.orders.epoch = begin(self.state.journal, version=__version__, boot=self._boot)
        self.peers.start(self.federation_id, self.epoch)
        self.aside.start(self.state)
        self.roster.disconnected()
        self.transport.subscribe(*self.topics.for_coordinator())
        self.transport.start()

    def serve(self, stop: threading.Event) -> None:
        """`step` until told to stop.

        Raises:
            DuplicateCoordinator: another coordinator serves the federation.
            StateError: the state folder was removed or replaced.
        """
        while not stop.is_set():
            self.step(self.idle_s())

    def close(self) -> None:
        """Leave everything on disk so that the next start goes on from here; nothing where the folder is gone."""
        if self.state.journal.is_in_place:
            self.catch_up()
        self.collector.pause()
        self.worker.close()
        self.aside.close()
        self.transport.close()

    def catch_up(self, pause_s: float = 0.0) -> None:
        """Let the status file tell how things stand before nothing is said for a while; not more often than that."""
        self._voice.catch_up(self.status, pause_s)

    def step(self, timeout_s: float) -> bool:
        """Handle at most one event and whatever is due; True when there was an event.

        Raises:
            DuplicateCoordinator: another coordinator serves the federation, and this one may not.
            StateError: the state folder was removed or replaced.
        """
        event = self.transport.receive(timeout_s)
        self.state.journal.check_in_place()
        if isinstance(event, Message) and event.topic == self.topics.coordinators:
            self._on_coordinator(event)
        elif isinstance(event, Message):
            if self.is_serving:  # agents say it again
                self._on_message(event)
            if self._is_mid_upload(event):
                return True
        elif isinstance(event, Connected):
            self._away = None
            self.roster.connected()
            log.info("connected federation=%s id=%s epoch=%d", self.config.federation, self.federation_id, self.epoch)
            if self.is_serving:
                self.orders.announce()
        elif isinstance(event, Subscribed):
            self.peers.listening(self.topics.coordinators in event.filters)
        elif isinstance(event, Disconnected):
            self._away = self._without_broker(event.reason)
            self.roster.disconnected()
        try:
            self.worker.collect()
            self.aside.collect()
        except (StateError, OSError) as error:
            self.storage.note(error, "what was computed")
        self._advance()
        return event is not None

    def _is_mid_upload(self, event: Message) -> bool:
        """Whether this was one more chunk and nothing else can be due: a 45 MB update has 733 of them."""
        if not event.topic.endswith("/ub") or self.collector.finished_uploads != self._finished_uploads:
            self._finished_uploads, self._chunks = self.collector.finished_uploads, 0
            return False
        self._chunks = (self._chunks + 1) % CHUNKS_AT_ONCE
        return self._chunks != 0

    @property
    def loop(self) -> RunLoop | None:
        """The run under way."""
        return self.runs.loop

    @property
    def waiting(self) -> Waiting:
        """What the run under way needs, or that a run is waited for."""
        return self.runs.waiting

    @property
    def federation_id(self) -> str:
        """Of the state folder; empty before the start."""
        return self.orders.federation

    @property
    def epoch(self) -> int:
        """How often a coordinator has started on the state folder; 0 before the start."""
        return self.orders.epoch

    @property
    def is_serving(self) -> bool:
        """Whether it is known that no other coordinator serves; before that, nothing is said to agents."""
        return self.peers.is_serving

    @property
    def is_without_broker(self) -> bool:
        """Whether the broker was not to be reached when it was last tried."""
        return self._away is not None

    @property
    def waits(self) -> Waiting:
        """What is waited for now: the broker, another coordinator's answer, what the run needs, or a run."""
        return self._away or (self.waiting if self.is_serving else self.peers.waiting())

    def _without_broker(self, reason: str) -> Waiting:
        what = f"the broker at {self.broker_url} cannot be reached ({reason}); trying again until it can"
        return Waiting(what, about="broker")

    def idle_s(self) -> float:
        """How long `step` may wait for an event before something else is due."""
        due = [LOOK_FOR_REQUESTS_S if self.loop is None else TICK_S]
        if not self.is_serving and (until := self.peers.waiting().until) is not None:
            due.append(until - self.clock())
        pump = self.distributor.pump()
        if pump is not None:
            due.append(pump)
        if self.waiting.until is not None and self.loop is not None:
            due.append(self.waiting.until - self.clock())
        return max(0.0, min(due))

    def send(self, agent: str, message: wire.Command) -> None:
        """One control message to one agent; a run in it is named as the journal names it."""
        self.orders.send(agent, message)

    # --- runs ------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Timers, then the run under way as far as it can go."""
        if self.peers.tick():
            self.orders.announce()
        if not self.is_serving:
            self._voice.say(self.waits, self.status)
            return
        for agent in self.roster.expire():
            log.warning("agent_lost agent=%s silent_s=%.0f", agent, self.roster.lease_s)
            self.distributor.forget(agent)
        self.collector.tick()
        self.distributor.pump()
        self.runs.advance()
        self._voice.say(self.waits, self.status)

    def _loop_of(self, run: str, request: Request, method: Method) -> RunLoop:
        self._run_ids.check(run)
        encoders = Encoders(self.worker)
        loop = RunLoop(
            run, request, method, self._fleet(), encoders=encoders, finish=Finisher(encoders), aside=self.aside
        )
        for agent in self.roster.present("head"):
            self.inbox.tell_task(agent, request.task)
        return loop

    def _fleet(self) -> Fleet:
        return Fleet(
            config=self.config,
            state=self.state,
            roster=self.roster,
            distributor=self.distributor,
            collector=self.collector,
            send=self.send,
            transport=self.transport,
            clock=self.clock,
            stopwatch=self.stopwatch,
        )

    # --- what arrives ----------------------------------------------------------------------------------------------

    def _on_message(self, event: Message) -> None:
        try:
            agent, kind = self.topics.sender(event.topic)
            if event.retained:  # agents never ask a broker to keep anything, so somebody else did
                raise MessageError(f"retained message on {event.topic}; clear it at the broker")
        except MessageError as error:
            self._ignore("topic", error)
            return
        try:
            self.inbox.take(agent, kind, event.payload)
        except ProtocolMismatch as error:
            self._ignore(agent, error)
            self.send(agent, wire.Refused(error=type(error).__name__, message=_for_peer(error)))
        except Exception as error:  # a full disk, or a mistake of ours: no single message may end the service
            if (trouble := of_storage(error)) is not None:
                self.storage.note(trouble, f"a message of {agent}")
            elif not isinstance(error, HeadwaterError):
                log.exception("message_broke from=%s", agent)
            self._ignore(agent, error)

    def _on_coordinator(self, event: Message) -> None:
        """Another coordinator of this federation, or our own message."""
        try:
            if event.retained:
                raise MessageError(f"retained message on {event.topic}; clear it at the broker")
            self.peers.heard(wire.parse_between_coordinators(event.payload))
        except DuplicateCoordinator:
            raise
        except HeadwaterError as error:
            self._ignore("coordinators", error)

    # --- saying ----------------------------------------------------------------------------------------------------

    def _publish(self, topic: str, payload: bytes) -> None:
        self.transport.publish(topic, payload)

    def _ignore(self, who: str, error: Exception) -> None:
        """Count a message that was not believed, and say so now and then."""
        times = self.refused.note(f"{who}: {type(error).__name__}")
        level = logging.DEBUG if times is None else logging.WARNING
        log.log(level, "message_refused from=%s times=%d reason=%s", who, times or 0, reason_of(error))

    def status(self) -> dict[str, Any]:
        """What goes on, as JSON."""
        return status_of(self)


def _for_peer(error: ProtocolMismatch) -> str:
    """The mismatch as the other side should read it: what this side speaks, and who upgrades."""
    return f"coordinator {__version__} {SPOKEN}: {error}"
