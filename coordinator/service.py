"""The coordinator as a service: one loop over events, timers and the run that is under way.

Whatever arrives is checked, counted and answered; nothing that a peer sends can end the loop. Heavy work (export) runs
in a worker thread so that agents are heard meanwhile.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from edge_agent import __version__, methods
from edge_agent.errors import HeadwaterError, MessageError, ProtocolMismatch
from edge_agent.store import write_atomic
from edge_agent.wire import messages as wire
from edge_agent.wire.chunks import Outgoing, decode_frame
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Connected, Message, Transport
from edge_agent.work import InlineWorker, Worker

from .collect import Collector, reason_of
from .config import CoordinatorConfig
from .distribute import Distributor
from .finish import Finisher
from .fleet import Fleet, Steps, Waiting
from .journal import Entry, utc_now
from .request import Request
from .roster import Roster
from .rounds import RunLoop
from .store import StateFolder

log = logging.getLogger(__name__)

LOOK_FOR_REQUESTS_S = 0.2
TICK_S = 0.5
"""Longest time between two looks at leases and acknowledgements while a run is under way."""
STATUS_EVERY_S = 1.0
CHUNKS_AT_ONCE = 16
"""Chunks of updates that are taken in between two looks at everything else: some milliseconds."""


class Coordinator:
    """Serves one federation. `start`, then `step` again and again (or `serve`), then `close`."""

    def __init__(
        self,
        config: CoordinatorConfig,
        state: StateFolder,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.monotonic,
        worker: Worker | None = None,
        boot: str | None = None,
        broker_url: str = "",
    ) -> None:
        self.config, self.state, self.transport, self.clock = config, state, transport, clock
        self.worker = worker or InlineWorker()
        self.broker_url = broker_url
        self.topics = Topics(config.federation)
        self.roster = Roster(clock, config.round.lease_s)
        self.distributor = Distributor(self.topics, self._publish_chunk, clock)
        self.collector = Collector(state.blobs, state.journal, self.send, clock)
        self.loop: RunLoop | None = None
        self.waiting = Waiting("a run is requested ('headwater run')")
        self.refusals = 0
        self.ignored: dict[str, int] = {}
        self._boot, self._seq = boot or secrets.token_hex(8), 0
        self._steps: Steps | None = None
        self._epoch = self._chunks = self._finished_uploads = 0
        self._looked_at = self._status_at = float("-inf")
        self._said: Waiting | None = None

    # --- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Note the start, listen, and announce ourselves once connected."""
        self.state.journal.append("coordinator_started", body={"version": __version__, "boot": self._boot})
        self._epoch = len(self.state.journal.entries(kinds=("coordinator_started",)))
        self.transport.subscribe(*self.topics.for_coordinator())
        self.transport.start()

    def serve(self, stop: threading.Event) -> None:
        """`step` until told to stop."""
        while not stop.is_set():
            self.step(self.idle_s())

    def close(self) -> None:
        """Leave everything on disk so that the next start goes on from here."""
        self.collector.pause()
        self.worker.close()
        self.transport.close()

    def step(self, timeout_s: float) -> bool:
        """Handle at most one event and whatever is due; True when there was an event."""
        event = self.transport.receive(timeout_s)
        if isinstance(event, Message):
            self._on_message(event)
            if self._is_mid_upload(event):
                return True
        elif isinstance(event, Connected):
            self.roster.connected()
            self._announce()
        self.worker.collect()
        self._advance()
        return event is not None

    def _is_mid_upload(self, event: Message) -> bool:
        """Whether this was one more chunk and nothing else can be due: a 45 MB update has 733 of them."""
        if not event.topic.endswith("/ub") or self.collector.finished_uploads != self._finished_uploads:
            self._finished_uploads, self._chunks = self.collector.finished_uploads, 0
            return False
        self._chunks = (self._chunks + 1) % CHUNKS_AT_ONCE
        return self._chunks != 0

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
        if self._steps is None:
            self._look_for_request()
        if self._steps is not None:
            self._go_on()
        self._say()

    def _look_for_request(self) -> None:
        if self.clock() - self._looked_at < LOOK_FOR_REQUESTS_S:
            return
        self._looked_at = self.clock()
        for run in self.state.journal.unfinished()[:1]:
            self._begin(run)

    def _begin(self, run: str) -> None:
        record = self.state.journal.replay(run)
        try:
            request = Request.from_body(record.request)
            method = methods.create(request.method, request.params)
        except (HeadwaterError, KeyError, ValueError) as error:
            self._fail(run, error)
            return
        self.loop = RunLoop(run, request, method, self._fleet(), Finisher(self.worker))
        self._steps = self.loop.steps()

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
        )

    def _go_on(self) -> None:
        loop, steps = self.loop, self._steps
        if loop is None or steps is None:
            return
        try:
            self.waiting = next(steps)
        except StopIteration:
            self._end()
        except (HeadwaterError, OSError) as error:
            self._fail(loop.run, error)
        except Exception as error:  # a method of somebody else may raise anything; it costs its run
            log.exception("run_broke run=%s", loop.run)
            self._fail(loop.run, error)

    def _fail(self, run: str, error: BaseException) -> None:
        reason = reason_of(error)
        log.error("run_failed run=%s reason=%s", run, reason)
        if self.loop is not None:
            self.loop.abandon()
        self.state.journal.append("run_failed", run=run, body={"reason": reason})
        self._end()

    def _end(self) -> None:
        self.loop = self._steps = None
        self.waiting = Waiting("a run is requested ('headwater run')")
        self._looked_at = float("-inf")

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
        except HeadwaterError as error:
            self._ignore(agent, error)
        except Exception as error:  # a full disk, or a mistake of ours: no single message may end the service
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
        if not self.roster.heard(agent, message.boot):
            self.send(agent, wire.Who())
        if isinstance(message, wire.Have):
            self.distributor.have(agent, message.digest)
        elif isinstance(message, wire.Want):
            if not self.distributor.want(agent, message.digest, message.ranges):
                self._no_such_blob(agent, message.digest)
        elif isinstance(message, wire.Progress):
            self.distributor.progress(agent, message.digest, message.seen)
        elif isinstance(message, wire.UpdateManifest):
            self.collector.manifest(agent, message)
        elif isinstance(message, wire.Bye):
            self._lose(agent)
        else:
            self._on_run_message(agent, message)

    def _on_run_message(self, agent: str, message: wire.Control) -> None:
        loop = self.loop
        if isinstance(message, wire.Fault):
            log.warning("agent_fault agent=%s error=%s message=%s", agent, message.error, message.message)
            if loop is not None and loop.run == message.run:
                loop.on_fault(agent, message)
        elif isinstance(message, wire.Report):
            self._on_report(agent, message)
        elif isinstance(message, wire.Heartbeat) and loop is not None:
            loop.on_heartbeat(agent, message)

    def _on_report(self, agent: str, message: wire.Report) -> None:
        """What an agent of the roster got. Anybody else's word comes again after their hello if it was asked for."""
        member, loop = self.roster.get(agent), self.loop
        if member is None:
            return
        if loop is not None and loop.run == message.run:
            loop.answers.report(agent, message)
        if message.fingerprint:
            member.fingerprint = message.fingerprint

    def _on_hello(self, agent: str, message: wire.Hello) -> None:
        before = self.roster.get(agent)
        self.collector.greet(agent)
        self.roster.hello(agent, message)
        if before is None or before.boot != message.boot:
            self.distributor.forget(agent)
            log.info("agent_joined agent=%s tier=%s samples=%d", agent, message.tier, message.samples)
        now = utc_now().isoformat(timespec="seconds")
        welcome = wire.Welcome(epoch=self._epoch, software=__version__, lease_s=self.roster.lease_s, time=now)
        self.send(agent, welcome)
        if self.loop is not None:
            self.loop.invite(agent)
        if message.tier == "head":
            self._offer_release(agent, message.fingerprint)

    def _no_such_blob(self, agent: str, digest: str) -> None:
        """An agent asks for something that is not on offer (any more): after a restart, offer a release again."""
        release = self._current_release()
        if release is not None and release.digest == digest and digest in self.state.blobs:
            self.distributor.offer(Outgoing.open(self.state.blobs.path(digest), digest), (agent,))
            self.send(agent, wire.Who())

    def _offer_release(self, agent: str, running: str) -> None:
        """A head-tier device that runs another encoder than the released one gets the released one."""
        release = self._current_release()
        if release is None or release.digest is None or release.body.get("fingerprint") == running:
            return
        if release.digest in self.state.blobs:
            blob = Outgoing.open(self.state.blobs.path(release.digest), release.digest)
            self.distributor.offer(blob, (agent,))
            install = wire.Install(run=release.run or "", fingerprint=release.body["fingerprint"], blob=blob.ref)
            self.send(agent, install)

    def _current_release(self) -> Entry | None:
        releases = self.state.journal.entries(kinds=("release_made",))
        return releases[-1] if releases else None

    def _lose(self, agent: str) -> None:
        self.roster.gone(agent)
        self.distributor.forget(agent)

    # --- saying ----------------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        log.info("connected federation=%s epoch=%d", self.config.federation, self._epoch)
        message = wire.Announce(epoch=self._epoch, software=__version__, boot=self._boot)
        self.transport.publish(self.topics.announce, wire.encode(message))

    def _publish_chunk(self, topic: str, frame: bytes) -> None:
        self.transport.publish(topic, frame)

    def _ignore(self, who: str, error: Exception) -> None:
        """Count a message that was not believed; told once for each sender and kind of error."""
        key = f"{who}: {type(error).__name__}"
        self.refusals += 1
        self.ignored[key] = self.ignored.get(key, 0) + 1
        if self.ignored[key] == 1:
            log.warning("message_refused from=%s reason=%s", who, reason_of(error))
        if len(self.ignored) > 1000:
            self.ignored.clear()

    def _say(self) -> None:
        """Log what is waited for when it changes, and keep status.json fresh."""
        changed = self._said is None or (self.waiting.what, self.waiting.whom) != (self._said.what, self._said.whom)
        if changed:
            log.info("waiting for=%s whom=%s", self.waiting.what, ",".join(self.waiting.whom) or "-")
            self._said = self.waiting
        if changed or self.clock() - self._status_at >= STATUS_EVERY_S:
            self._status_at = self.clock()
            try:
                write_atomic(self.state.path / "status.json", json.dumps(self.status()).encode(), durable=False)
            except OSError as error:
                log.warning("status_not_written reason=%s", error)

    def status(self) -> dict[str, Any]:
        """What goes on, as JSON."""
        loop, until = self.loop, self.waiting.until
        return {
            "federation": self.config.federation,
            "broker": self.broker_url,
            "epoch": self._epoch,
            "at": utc_now().isoformat(timespec="milliseconds"),
            "run": None if loop is None else loop.status(),
            "waiting": {
                "for": self.waiting.what,
                "whom": list(self.waiting.whom),
                "seconds_left": None if until is None else round(max(0.0, until - self.clock()), 1),
            },
            "agents": [
                {
                    "id": m.id,
                    "tier": m.tier,
                    "present": m.is_present,
                    "samples": m.samples,
                    "fingerprint": m.fingerprint,
                    "software": m.software,
                    "silent_s": round(self.clock() - m.heard_at, 1),
                    "bytes_up": self.collector.bytes_from.get(m.id, 0),
                    "bytes_down": self.distributor.bytes_to.get(m.id, 0),
                }
                for m in self.roster.members()
            ],
            "refused_messages": self.refusals,
            "refused_updates": sum(self.collector.refusals.values()),
        }


def _for_peer(error: ProtocolMismatch) -> str:
    """The mismatch as the other side should read it: what this side speaks, and who upgrades."""
    return f"coordinator {__version__} speaks protocol {wire.OLDEST_PROTOCOL}..{wire.PROTOCOL}: {error}"
