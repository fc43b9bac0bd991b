"""The coordinator as a service: one loop over events, timers and the run that is under way.

Whatever arrives is checked, counted and answered; nothing that a peer sends can end the loop. Heavy work (export) runs
in a worker thread so that agents are heard meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from edge_agent import __version__
from edge_agent.errors import HeadwaterError, MessageError, ProtocolMismatch, StateError
from edge_agent.methods import Method
from edge_agent.task import Task
from edge_agent.wire import messages as wire
from edge_agent.wire.chunks import decode_frame
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Connected, Disconnected, Message, Transport
from edge_agent.work import InlineWorker, Worker

from .aside import Aside
from .collect import Collector, reason_of
from .config import CoordinatorConfig
from .distribute import Distributor
from .doubles import Doubles
from .encoders import Encoders
from .finish import Finisher
from .fleet import Fleet, Waiting
from .journal import utc_now
from .refusals import Refusals
from .releases import Releases
from .request import Request
from .roster import Roster
from .rounds import RunLoop
from .running import LOOK_FOR_REQUESTS_S, Runs
from .saying import Voice, status_of
from .stall import Storage, of_storage
from .store import StateFolder

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
    ) -> None:
        self.config, self.state, self.transport, self.clock = config, state, transport, clock
        self.stopwatch = stopwatch or clock
        self.worker, self.aside = worker or InlineWorker(), aside or Aside()
        self.broker_url = broker_url
        self.topics = Topics(config.federation)
        self.roster = Roster(clock, config.round.lease_s)
        self.doubles = Doubles(self.roster, self.send, clock)
        self.distributor = Distributor(self.topics, self._publish_chunk, clock)
        self.storage = Storage(clock)
        is_stalled = lambda: self.storage.stall is not None  # noqa: E731 - one line says it
        self.collector = Collector(state.blobs, state.journal, self.send, clock, is_stalled)
        self.runs = self.make_runs(state, self.storage, clock, self._loop_of)
        self.refused = Refusals(clock)
        self.releases = Releases(state, self.distributor, self.send)
        self.epoch = 0
        self._voice = Voice(state.path / "status.json", self.stopwatch)
        self._boot, self._seq = boot or secrets.token_hex(8), 0
        self._chunks = self._finished_uploads = 0
        self._away: Waiting | None = None

    # --- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Note the start, listen, and announce ourselves once connected."""
        self.state.journal.append("coordinator_started", body={"version": __version__, "boot": self._boot})
        self.epoch = len(self.state.journal.entries(kinds=("coordinator_started",)))
        self.aside.start(self.state)
        self.roster.disconnected()
        self.transport.subscribe(*self.topics.for_coordinator())
        self.transport.start()

    def serve(self, stop: threading.Event) -> None:
        """`step` until told to stop."""
        while not stop.is_set():
            self.step(self.idle_s())

    def close(self) -> None:
        """Leave everything on disk so that the next start goes on from here."""
        self.catch_up()
        self.collector.pause()
        self.worker.close()
        self.aside.close()
        self.transport.close()

    def catch_up(self, pause_s: float = 0.0) -> None:
        """Let the status file tell how things stand before nothing is said for a while; not more often than that."""
        self._voice.catch_up(self.status, pause_s)

    def step(self, timeout_s: float) -> bool:
        """Handle at most one event and whatever is due; True when there was an event."""
        event = self.transport.receive(timeout_s)
        if isinstance(event, Message):
            self._on_message(event)
            if self._is_mid_upload(event):
                return True
        elif isinstance(event, Connected):
            self._away = None
            self.roster.connected()
            self._announce()
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
    def is_without_broker(self) -> bool:
        """Whether the broker was not to be reached when it was last tried."""
        return self._away is not None

    @property
    def waits(self) -> Waiting:
        """What is waited for now: the broker where it is away, else what the run needs, else a run."""
        return self._away or self.waiting

    def _without_broker(self, reason: str) -> Waiting:
        what = f"the broker at {self.broker_url} cannot be reached ({reason}); trying again until it can"
        return Waiting(what, about="broker")

    def idle_s(self) -> float:
        """How long `step` may wait for an event before something else is due."""
        due = [LOOK_FOR_REQUESTS_S if self.loop is None else TICK_S]
        pump = self.distributor.pump()
        if pump is not None:
            due.append(pump)
        if self.waiting.until is not None and self.loop is not None:
            due.append(self.waiting.until - self.clock())
        return max(0.0, min(due))

    def send(self, agent: str, message: wire.Control) -> None:
        """One control message to one agent."""
        self._seq += 1
        stamped = message.model_copy(update={"boot": self._boot, "seq": self._seq})
        self.transport.publish(self.topics.down(agent), wire.encode(stamped))

    # --- runs ------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Timers, then the run under way as far as it can go."""
        for agent in self.roster.expire():
            log.warning("agent_lost agent=%s silent_s=%.0f", agent, self.roster.lease_s)
            self.distributor.forget(agent)
        self.collector.tick()
        self.distributor.pump()
        self.runs.advance()
        self._voice.say(self.waits, self.status)

    def _loop_of(self, run: str, request: Request, method: Method) -> RunLoop:
        encoders = Encoders(self.worker)
        loop = RunLoop(
            run, request, method, self._fleet(), encoders=encoders, finish=Finisher(encoders), aside=self.aside
        )
        for agent in self.roster.present("head"):
            self._tell_task(agent, request.task)
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
            self._on_words(agent, kind, event.payload)
        except ProtocolMismatch as error:
            self._ignore(agent, error)
            self.send(agent, wire.Refused(error=type(error).__name__, message=_for_peer(error)))
        except Exception as error:  # a full disk, or a mistake of ours: no single message may end the service
            if (trouble := of_storage(error)) is not None:
                self.storage.note(trouble, f"a message of {agent}")
            elif not isinstance(error, HeadwaterError):
                log.exception("message_broke from=%s", agent)
            self._ignore(agent, error)

    def _on_words(self, agent: str, kind: str, payload: bytes) -> None:
        if kind == "ub":
            self.collector.chunk(agent, decode_frame(payload))
        elif kind == "s":
            self._on_presence(agent, payload)
        else:
            self._on_control(agent, wire.parse_from_agent(payload))

    def _on_presence(self, agent: str, payload: bytes) -> None:
        member = self.roster.get(agent)
        state, _, boot = payload.decode("ascii", "replace").partition(" ")
        if state == "offline" and member is not None and boot == member.boot:
            log.info("agent_offline agent=%s", agent)
            self._lose(agent)

    def _on_control(self, agent: str, message: wire.Control) -> None:
        if isinstance(message, wire.Hello):
            self._on_hello(agent, message)
            return
        if self.doubles.is_claiming(agent, message.boot):
            return
        is_known = self.roster.heard(agent, message.boot)
        if not is_known and not isinstance(message, wire.Bye):
            self.send(agent, wire.Who())
        if isinstance(message, wire.Bye):
            if is_known:  # else it is of another start of that id
                self._lose(agent)
        elif isinstance(message, wire.UpdateManifest):
            self.collector.manifest(agent, message)
        elif isinstance(message, wire.Have | wire.Want | wire.Progress):
            self._on_download(agent, message)
        else:
            self._on_run_message(agent, message)

    def _on_download(self, agent: str, message: wire.Have | wire.Want | wire.Progress) -> None:
        if isinstance(message, wire.Have):
            self.distributor.have(agent, message.digest)
        elif isinstance(message, wire.Progress):
            self.distributor.progress(agent, message.digest, message.seen)
        elif not self.distributor.want(agent, message.digest, message.ranges):
            self.releases.offer_again(agent, message.digest)

    def _on_run_message(self, agent: str, message: wire.Control) -> None:
        loop = self.loop
        if isinstance(message, wire.Fault):
            self.roster.failed(agent, message)
            if loop is not None and loop.run == message.run:
                loop.on_fault(agent, message)
        elif isinstance(message, wire.Report):
            self._on_report(agent, message)
        elif isinstance(message, wire.Heartbeat):
            if not self.roster.is_as(agent, message.condition):
                self.send(agent, wire.Who())  # what it has to say was said to another start of ours
            if loop is not None:
                loop.on_heartbeat(agent, message)

    def _on_report(self, agent: str, message: wire.Report) -> None:
        """What an agent of the roster got. Anybody else's word comes again after their hello if it was asked for."""
        if self.roster.reported(agent, message) and self.loop is not None and self.loop.run == message.run:
            self.loop.answers.report(agent, message)

    def _on_hello(self, agent: str, message: wire.Hello) -> None:
        if not self.doubles.admits(agent, message):
            return
        before = self.roster.get(agent)
        self.collector.greet(agent)
        self.roster.hello(agent, message)
        if before is None or before.boot != message.boot or not before.is_present:
            self.distributor.forget(agent)
            event = "agent_joined" if before is None else "agent_back"
            log.info("%s agent=%s tier=%s samples=%s", event, agent, message.tier, message.samples or "unknown")
        now = utc_now().isoformat(timespec="seconds")
        welcome = wire.Welcome(epoch=self.epoch, software=__version__, lease_s=self.roster.lease_s, time=now)
        self.send(agent, welcome)
        if self.loop is not None:
            self.loop.invite(agent)
        if message.tier == "head":
            self._tell_task(agent, self.config.task if self.loop is None else self.loop.request.task)
            self.releases.offer(agent, message.bundle_id)

    def _tell_task(self, agent: str, task: Task) -> None:
        """Let an agent that would see the task only with a bundle look at its data and head now."""
        with contextlib.suppress(MessageError):  # too long for a message, with thousands of classes
            self.send(agent, wire.TaskNotice(task=task))

    def _lose(self, agent: str) -> None:
        self.roster.gone(agent)
        self.distributor.forget(agent)

    # --- saying ----------------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        log.info("connected federation=%s epoch=%d", self.config.federation, self.epoch)
        message = wire.Announce(epoch=self.epoch, software=__version__, boot=self._boot)
        self.transport.publish(self.topics.announce, wire.encode(message))

    def _publish_chunk(self, topic: str, frame: bytes) -> None:
        self.transport.publish(topic, frame)

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
    return f"coordinator {__version__} speaks protocol {wire.OLDEST_PROTOCOL}..{wire.PROTOCOL}: {error}"
