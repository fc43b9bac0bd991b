"""The coordinator as a service: one loop over events, timers and the active run.

Each message is checked, counted and answered; nothing that a peer sends can end the loop. Export runs in a worker
thread, so that messages of agents are handled meanwhile.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from edge_agent import __version__
from edge_agent.core.errors import (
    DuplicateCoordinator,
    DuplicateId,
    EnrolmentRefused,
    HeadwaterError,
    MessageError,
    ProtocolMismatch,
    StateError,
    UsageError,
)
from edge_agent.core.limits import resident_bytes
from edge_agent.core.task import Task
from edge_agent.identity.certificates import show_utc
from edge_agent.wire.blobs.chunks import decode_frame
from edge_agent.wire.messages import codec, down, fields, up
from edge_agent.wire.messages.codec import SPOKEN
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import BrokerConnection, Connected, Disconnected, Message, Subscribed, Transport, Woken

from ..config import CoordinatorConfig
from ..fleet.command_sender import CommandSender
from ..fleet.downloads import Distributor
from ..fleet.duplicate_ids import DuplicateIds
from ..fleet.members import Figures, Member
from ..fleet.receipt_memory import ReceiptMemory
from ..fleet.refusals import Refusals
from ..fleet.rejections import Rejections
from ..fleet.rollout import Rollout
from ..fleet.roster import Roster
from ..fleet.run_ids import RunIds
from ..fleet.uploads import Collector
from ..hosted.transport import CombinedTransport
from ..journal.store import follow, utc_now
from ..rounds.aggregation import objection_to_sums
from ..rounds.context import Reports, Run, RunContext, Waiting
from ..rounds.partitioned import Aggregators, Sites, UnusedSites
from ..rounds.request import Request
from ..runs.run_loop import RunLoop, RunStatus
from ..runs.run_queue import LOOK_FOR_REQUESTS_S, Runs, Storage, of_storage
from ..state.backup import MARKER
from ..state.command_keys import CommandKeys
from ..state.fault_log import FaultLog
from ..state.starts import EPOCHS_OF_A_COPY, record_start
from ..state.status_file import MOST_LISTED, FleetCounts
from ..state.store import AGGREGATORS, SITES, StateFolder
from ..text import reason_of
from ..views.candidate import accuracies_of
from ..views.fleet import REPORTS, reported_by
from ..views.releases import book_of
from ..views.traffic import AgentTraffic
from .peers import Peers
from .status import AgentStatus, StatusReport, StatusWriter
from .surroundings import Access, Runtime, StartOptions

if TYPE_CHECKING:
    from edge_agent.wire.messages.site_sums import SummedUpdate

    from ..aggregators.messages import Stored  # most coordinators have no aggregators, and their memory counts

log = logging.getLogger(__name__)

TICK_S = 0.5
"""Longest time between two checks of leases and acknowledgements during a run."""
MAX_PRESENCE_BYTES = 100
BEHIND_S = 1.0
"""A message that has waited for so long to be handled means that more must not be asked for now."""

ADVANCE_S = 0.1
"""Seconds within which timers and the run are looked at after a message; until then only messages are handled."""

ADVANCE_SHARE = 0.05
"""The share of the time that these looks may take: after a look there is none for its duration over this share.

That pause is `ADVANCE_S` at most. With a few agents it is so short that each message has a look of its own; a look of
20 ms takes a sixth of the time.
"""


class Coordinator:
    """The coordinator of one federation: call `start`, then `step` again and again (or `serve`), then `close`."""

    make_runs: type[Runs] = Runs

    def __init__(
        self,
        config: CoordinatorConfig,
        state: StateFolder,
        transport: Transport,
        *,
        runtime: Runtime | None = None,
        access: Access | None = None,
        start: StartOptions | None = None,
    ) -> None:
        """Put a coordinator together; it does nothing before `start`.

        Args:
            config: Its configuration.
            state: Its state folder, opened and locked by this process.
            transport: Its connection to the agents.
            runtime: Its clocks, and who does its long work.
            access: Who may reach it, and how agents know its commands.
            start: What this start decides.
        """
        runtime = runtime or Runtime()
        access = access or Access()
        start = start or StartOptions()
        clock = runtime.clock
        self.config = config
        self.state = state
        self.transport = transport
        self.clock = clock
        self.stopwatch = runtime.stopwatch or clock
        self.worker = runtime.worker
        self.hooks = runtime.hooks
        self.compute = runtime.compute
        self.broker_url = access.broker_url
        self.limits = access.limits
        self.identity = access.identity
        self.refusals = access.refusals or Refusals(clock, runtime.now)
        self._boot = start.boot
        self._takeover = start.takeover
        self._run_ids = start.run_ids or RunIds(state.journal)
        self.topics = Topics(config.federation)
        self.commands = CommandSender(self.topics, self._publish, self._run_ids, self._boot, access.keys)
        self.send = self.commands.send
        self.peers = Peers(config.federation, self._boot, self.commands.to_coordinators, clock, start.probe_s)
        self.roster = Roster(clock, config.round.lease_s)
        self.duplicate_ids = DuplicateIds(self.roster, self.send, clock)
        self.distributor = Distributor(
            self.topics,
            self._publish,
            self.send,
            clock,
            unread_s=lambda: self.transport.unread_s,
            urls=access.blob_urls,
        )
        self.storage = Storage(clock)
        self._settings = config.digests()
        self.receipts = ReceiptMemory(self._send_durable)
        self.collector = Collector(
            state.blobs,
            state.journal,
            self.receipts.send,
            clock,
            self.storage.is_stalled,
            unread_s=lambda: self.transport.unread_s,
            site=None if access.blob_urls is None else access.blob_urls.uploads,
        )
        self.aggregators, self.sites = self._make_helpers(access.keys)
        self.runs = self.make_runs(state, self.storage, clock, self._loop_of, config.retention.runs)
        self.rejected = Rejections(clock)
        self.releases = Rollout(
            state,
            self.roster,
            self.distributor,
            self.send,
            clock,
            runtime.now,
            timedelta(days=config.retention.devices_days),
        )
        self._handlers: dict[type[fields.Control], Callable[[str, Any], None]] = {
            up.UpdateManifest: self._on_manifest,
            up.Have: lambda agent, message: self.distributor.have(agent, message.digest),
            up.Want: self._on_want,
            up.Progress: self.distributor.progress,
            up.Fault: self._on_fault,
            up.Heartbeat: self._on_heartbeat,
            up.Report: self._on_report,
            up.Renew: self._on_renew,
        }
        self._marker = state.path / MARKER
        self._status_writer = StatusWriter(state.path / "status.json", self.stopwatch)
        self._faults = FaultLog(state.path)
        self._unsent: list[tuple[str, fields.Command]] = []
        """Receipts of updates that are not on disk yet, with their agents."""

        self._hosted = frozenset(client.id for client in config.hosted)
        self._is_behind = False
        self._due_at = float("-inf")
        self._advance_at = float("-inf")
        self._advance_took_s = 0.0
        self._broker_wait: Waiting | None = None
        """What the coordinator waits for while the broker is unreachable."""

        self._broker: BrokerConnection | None = None
        """The broker that is connected, for the status; None while there is none."""

    def _make_helpers(self, keys: CommandKeys | None) -> tuple[Aggregators, Sites]:
        """Return the two sides of those that take updates in place of the coordinator."""
        return self._make_aggregators(keys), self._make_sites(keys)

    def _make_aggregators(self, keys: CommandKeys | None) -> Aggregators:
        """Return the side of the aggregators, or that of none where the configuration has none."""
        of = self.config.aggregators.partitions
        # Buffered rounds take updates of several rounds, and of a secure sum nobody reads one alone. A broker of
        # [identity] lets the coordinator's certificate have one session.
        has_such_rounds = self.config.round.mode == "synchronous" and not self.config.privacy.secure_sum
        if of == 0 or not has_such_rounds or keys is None or self.identity is not None:
            return Aggregators()
        from ..aggregators.messages import Sealed
        from ..aggregators.remote import AggregatorLink, CoordinatorSteps, RemoteAggregators

        transport = self.transport
        link = AggregatorLink(
            self.topics,
            self._publish,
            transport.subscribe,
            transport.unsubscribe,
            sealed=Sealed(keys.for_aggregators()),
            start=self._boot,
            folder=self.state.path / AGGREGATORS,
            unread_s=lambda: transport.unread_s,
        )
        steps = CoordinatorSteps(take=self._take_stored, ask_again=self._ask_again, refuse=self._refuse_aggregator)
        return RemoteAggregators(of, link, self.collector, self._run_ids, steps, self.clock)

    def _make_sites(self, keys: CommandKeys | None) -> Sites:
        """Return the side of the relays that sum, or that of none where their sums would not be enough."""
        config = self.config
        names = config.aggregators.sites
        if not names or keys is None:
            return Sites()
        reason = objection_to_sums(config)
        if reason:
            log.warning("sums_not_taken relays=%s reason=%s", ", ".join(names), reason)
            return UnusedSites(names, reason)
        from edge_agent.wire.messages.site_sums import SiteSeal

        from ..aggregators.sites import SHARE_OF_DEADLINE, RemoteSites, SiteLink

        link = SiteLink(
            self.topics,
            self._publish,
            self.transport.subscribe,
            self.receipts.send,
            lambda relay: SiteSeal(keys.of_agent(relay)),
            self._relay_of,
            self._note_double_relay,
            self._boot,
        )
        return RemoteSites(
            names,
            link,
            self.collector,
            self.state.path / SITES,
            self._run_ids,
            self._objection_to_sum,
            config.round.deadline_s * SHARE_OF_DEADLINE,
            self.clock,
        )

    def _relay_of(self, agent: str) -> str:
        """Return the relay through which an agent speaks; empty: through none."""
        member = self.roster.get(agent)
        return "" if member is None else member.relay

    # --- start and stop ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Record the start and subscribe; serving begins when no other coordinator answers.

        Raises:
            DuplicateCoordinator: another process has taken over the state folder.
        """
        # A standby may have taken the folder over during a long start.
        if not self.state.is_held():
            raise DuplicateCoordinator(f"{self.state.path}: another process has taken over this state folder")
        # The entry of this start comes first: its epoch is in everything that this coordinator sends.
        start = record_start(
            self.state.journal,
            version=__version__,
            boot=self._boot,
            name=self.config.federation,
            is_copy=self._marker.exists(),
            takeover=self._takeover,
            is_held=self.state.is_held,
        )
        self.commands.serve_as(start.federation, start.epoch)
        self.peers.start(start, self.state.journal.progress)
        # Runs may have been requested after the backup from which this folder began.
        if start.epoch >= EPOCHS_OF_A_COPY:
            self._run_ids.skip_names_that_agents_know()
        self._remember_reports()
        self._remember_traffic()
        self.hooks.start(self.state)
        # Nobody is present before the broker has connected this coordinator.
        self.roster.disconnected()
        self.transport.subscribe(*self.topics.for_coordinator())
        self.transport.start()

    def _remember_reports(self) -> None:
        """Tell the roster what agents reported before this start, as the journal has it."""
        reports = reported_by(self.state.journal.newest_of(*REPORTS), book_of(self.state.journal))
        figures = {}
        candidates = {}
        for agent, report in reports.items():
            accuracies = accuracies_of(report.acc)
            figures[agent] = Figures(accuracies, report.head, report.better_alone, report.rss_mb)
            if report.candidate is not None:
                candidates[agent] = report.candidate
        self.roster.remember(figures, candidates)

    def _remember_traffic(self) -> None:
        """Continue the counts of each agent's bytes with what the journal has of the time before this start."""
        traffic = AgentTraffic()
        for entry in follow(self.state.journal, kinds=AgentTraffic.KINDS):
            traffic.add(entry)
        self.collector.bytes_from.update(traffic.bytes_from())
        self.distributor.bytes_to.update(traffic.bytes_to())

    def serve(self, stop: threading.Event) -> None:
        """`step` until ``stop`` is set.

        Raises:
            DuplicateCoordinator: another coordinator serves the federation.
            StateError: the state folder was removed or replaced.
        """
        while not stop.is_set():
            self.step(self.idle_s())

    def close(self) -> None:
        """Write the status, unless the state folder is no longer ours, and close everything; the next start resumes."""
        if self.state.journal.is_ours:
            self._flush()
            self.catch_up()
        self.collector.pause()
        self.worker.close()
        self.hooks.close()
        self.compute.close()
        self.transport.close()

    def catch_up(self, pause_s: float = 0.0) -> None:
        """Update the status file before a long pause, unless that was done less than ``pause_s`` ago."""
        self._status_writer.catch_up(self.status, pause_s)

    def step(self, timeout_s: float) -> bool:
        """Handle at most one event and the timers that are due; True when there was an event.

        Raises:
            DuplicateCoordinator: another coordinator serves the federation, and this one may not.
            StateError: the state folder was removed or replaced.
        """
        event = self.transport.receive(timeout_s)
        has_uploaded = self.is_serving and self._take_uploads()
        if isinstance(event, Message):
            self._dispatch(event)
        elif isinstance(event, Connected):
            self._on_connected(event)
        elif isinstance(event, Subscribed):
            self.peers.listening(self.topics.coordinators in event.filters)
        elif isinstance(event, Disconnected):
            self._on_disconnected(event)
        # Messages and uploads that wait are served first; the look at timers and the run has a time of its own.
        has_more = isinstance(event, Message) or (has_uploaded and isinstance(event, Woken))
        if has_more:
            self._is_behind = True
        if has_more and self.clock() < min(self._advance_at, self._due_at):
            return True
        self._advance()
        return event is not None

    def _dispatch(self, event: Message) -> None:
        """Handle a message of another coordinator, of an aggregator, of a relay or of an agent."""
        if event.topic == self.topics.coordinators:
            self._on_coordinator(event)
        elif not self.is_serving:  # a message is dropped: agents and aggregators repeat it
            pass
        elif event.topic == self.topics.aggregators_up:
            self._on_aggregator(event)
        elif (sender := self.topics.site_sender(event.topic)) is not None:
            self._on_relay(*sender, event)
        else:
            self._on_message(event)

    def _take_uploads(self) -> bool:
        """Take what has come of updates by HTTP, as messages are taken; return whether anything has."""
        try:
            with self.state.journal.deferring():
                return self.collector.take_arrived()
        except Exception as error:  # as for messages: a full disk, or a bug of this program
            trouble = of_storage(error)
            if trouble is not None:
                self.storage.note(trouble, "updates")
            else:
                log.exception("upload_broke")
            return True

    def _on_connected(self, event: Connected) -> None:
        """Count the time of leases again, and announce this coordinator if it serves already."""
        self._broker_wait = None
        self.peers.connected()
        self._broker = event.connection_since(utc_now().isoformat(timespec="seconds"))
        self.roster.connected()
        log.info(
            "connected federation=%s id=%s epoch=%d broker=%s",
            self.config.federation,
            self.federation_id,
            self.commands.epoch,
            event.broker or self.broker_url,
        )
        if self.is_serving:
            self.commands.announce()

    def _on_disconnected(self, event: Disconnected) -> None:
        """Wait for the broker; meanwhile no agent can be heard, and none counts as lost."""
        awaited = f"the broker at {self.broker_url} cannot be reached ({event.reason}); trying again until it can"
        self._broker_wait = Waiting(awaited, about="broker")
        self._broker = None
        self.roster.disconnected()
        self.distributor.disconnected()

    @property
    def loop(self) -> RunLoop | None:
        """The loop of the active run; None while there is none."""
        return self.runs.loop

    @property
    def federation_id(self) -> str:
        """The federation's id, read from the state folder; empty before `start`."""
        return self.commands.federation

    @property
    def is_serving(self) -> bool:
        """Whether this coordinator serves; agents get no message before it is known that no other one does."""
        return self.peers.is_serving

    @property
    def waiting(self) -> Waiting:
        """What is waited for now: the broker, another coordinator's answer, what the run needs, or a run."""
        if self._broker_wait is not None:
            return self._broker_wait
        if not self.is_serving:
            return self.peers.waiting()
        return self.runs.waiting

    def idle_s(self) -> float:
        """Return for how many seconds `step` may wait for an event before something else is due."""
        due_at = self._due_at
        if self._is_behind:
            due_at = min(due_at, self._advance_at)
        return max(0.0, due_at - self.clock())

    # --- runs --------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Look after everything that no message causes: results, timers, and the run as far as it can go."""
        begin = self.clock()
        # 1. Nothing is written into a folder that another process has taken over. Updates that have arrived reach the
        # disk before anything builds on them.
        self.state.journal.check_ours()
        self._flush()
        # 2. What has been computed meanwhile; a full disk stops it, and the next look tries it again.
        try:
            self.worker.collect()
            self.hooks.collect()
            self.compute.end_if_idle()
        except (StateError, OSError) as error:
            self.storage.note(error, "results of computations")
        # 3. No other coordinator has answered: this one serves. A copy is a state folder from now on, which no backup
        # may overwrite.
        if self.peers.tick():
            self._marker.unlink(missing_ok=True)
            self.commands.announce()
            self.aggregators.start(self.federation_id, self.commands.epoch)
            self.sites.start(self.commands.epoch)
        # 4. Who sends too much, and whose certificate was revoked or has ended.
        self._note_dropped_messages()
        if self.identity is not None:
            for agent in self.identity.tick(self.clock(), utc_now()):
                self._lose(agent)
                self.collector.give_up(agent)  # what it sends by HTTP passes no broker that would refuse it
        # 5. Leases, uploads, releases and the run, for whoever serves.
        if self.is_serving:
            self._serve_fleet()
        # 6. Chunks to agents, the status for people, and when the next look is due.
        pump_s = self.distributor.pump()
        everyone = self.everyone if len(self.roster) > MOST_LISTED else None
        self._status_writer.update(self.waiting, self.status, everyone)
        self._plan(begin, pump_s)

    def _note_dropped_messages(self) -> None:
        """Count the messages that the limits of the transport have dropped as rejected ones of their agents."""
        if self.limits is None:
            return
        for (agent, kind), times in self.limits.dropped().items():
            self._ignore(agent, MessageError(f"too many messages of kind '{kind}'; they are dropped"), times)

    def _serve_fleet(self) -> None:
        """Mark silent agents as lost, then advance uploads, releases and the run."""
        for agent in self.roster.expire(self.transport.unread_s):
            log.warning("agent_lost agent=%s silent_s=%.0f", agent, self.roster.lease_s)
            self.distributor.forget(agent)
        self.collector.tick()
        self.aggregators.tick()
        self.sites.tick()
        try:
            self.releases.tick()
        except (StateError, OSError) as error:
            self.storage.note(error, "releases")
        self.runs.advance()

    def _flush(self) -> None:
        """Bring the updates that have arrived to disk, all at once, and only then send their receipts."""
        unsent = self._unsent
        self._unsent = []
        has_updates = self.state.journal.has_deferred
        try:
            self.state.journal.flush()
        except (StateError, OSError) as error:
            # The collector counts what the journal does not have: it starts anew. The agents get no receipt and offer
            # their updates again; the run resumes from the journal.
            self.collector.pause()
            loop = self.loop
            if loop is None:
                self.storage.note(error, "updates")
            else:
                self.runs.stall(loop.run.id, error)
            return
        if has_updates:
            self.storage.wrote()
        for agent, receipt in unsent:
            self.send(agent, receipt)

    def _send_durable(self, agent: str, message: fields.Command) -> None:
        """Send a message, but the receipt of an update only after the update is on disk (`_flush`)."""
        if isinstance(message, down.Receipt) and self.state.journal.has_deferred:
            self._unsent.append((agent, message))
        else:
            self.send(agent, message)

    def _plan(self, begin: float, pump_s: float | None) -> None:
        """Set when the next look at timers and the run is due, with and without messages before it."""
        now = self.clock()
        due = [LOOK_FOR_REQUESTS_S if self.loop is None else TICK_S]
        if not self.is_serving:
            probe_ends_at = self.peers.waiting().until
            if probe_ends_at is not None:
                due.append(probe_ends_at - now)
        if pump_s is not None:
            due.append(pump_s)
        if self.loop is not None:
            run_waits_until = self.runs.waiting.until
            if run_waits_until is not None:
                due.append(run_waits_until - now)
        self._due_at = now + min(due)
        self._is_behind = False
        # One long look, such as an aggregation, does not count in full, or the messages after it would wait for it.
        self._advance_took_s = min(now - begin, 2 * self._advance_took_s + 1e-5)
        self._advance_at = now + min(ADVANCE_S, self._advance_took_s / ADVANCE_SHARE)

    def _loop_of(self, run: str, request: Request) -> RunLoop:
        """Return the loop of a run that begins or resumes, and send its task to agents that will personalize."""
        self._run_ids.check(run)
        context = self.run_context()
        loop = RunLoop(Run(run, request, context, Reports(context)), self.hooks)
        for agent in self.roster.present("head"):
            self._send_task(agent, request.task)
        return loop

    def run_context(self) -> RunContext:
        """Return the services that a run uses."""
        return RunContext(
            config=self.config,
            state=self.state,
            roster=self.roster,
            distributor=self.distributor,
            releases=self.releases,
            collector=self.collector,
            send=self.send,
            worker=self.worker,
            clock=self.clock,
            stopwatch=self.stopwatch,
            compute=self.compute,
            aggregators=self.aggregators,
            sites=self.sites,
            is_behind=self._is_inbox_late,
        )

    def _is_inbox_late(self) -> bool:
        """Return whether messages arrive faster than they are handled."""
        return self.transport.unread_s > BEHIND_S

    # --- received messages -------------------------------------------------------------------------------------------

    def _on_message(self, event: Message) -> None:
        """Handle one message of an agent; whatever is wrong with it, the coordinator serves on."""
        try:
            agent, kind = self._check_sender(event)
        except MessageError as error:
            self._ignore("topic", error)
            return
        try:
            self.handle(agent, kind, event.payload)
        except ProtocolMismatch as error:
            self._ignore(agent, error)
            self._refuse_protocol(agent, event.payload, error)
        except Exception as error:  # a full disk, or a bug of this program: no single message may end the service
            trouble = of_storage(error)
            if trouble is not None:
                self.storage.note(trouble, f"a message of {agent}")
            elif not isinstance(error, HeadwaterError):
                log.exception("message_broke from=%s", agent)
            self._ignore(agent, error)
            if self.limits is not None:
                self.limits.refused(event.topic)

    def _check_sender(self, event: Message) -> tuple[str, str]:
        """Return the agent that sent a message and the message's kind, as its topic has them.

        Raises:
            MessageError: The topic is of no agent, the message is a retained one, or the agent is revoked.
        """
        agent, kind = self.topics.sender(event.topic)
        if event.retained:  # agents publish no retained messages
            raise MessageError(f"retained message on {event.topic}; clear it at the broker")
        if self.identity is not None and not self.identity.admits(agent):
            remedy = f"'headwater enroll {agent}' lets it in again"
            self.refusals.note(agent, "coordinator", EnrolmentRefused.__name__, "it is revoked", remedy)
            raise MessageError(f"agent '{agent}' is revoked; {remedy}")
        return agent, kind

    def _refuse_protocol(self, agent: str, payload: bytes, error: ProtocolMismatch) -> None:
        """Tell an agent of another protocol version, and the operator, which side is to be upgraded."""
        side = "the device" if error.is_peer_older else "this coordinator"
        self.refusals.note(agent, "coordinator", type(error).__name__, str(error), f"upgrade {side}")
        # The agent shows what this side speaks. One with a key obeys a refusal before its first welcome only if the
        # refusal names the agent's start.
        message = f"coordinator {__version__} {SPOKEN}: {error}"
        whom = codec.start_of(payload)
        self.send(agent, down.Refused(error=type(error).__name__, message=message, whom=whom))

    def handle(self, agent: str, kind: str, payload: bytes) -> None:
        """Handle one message of an agent; ``kind`` is that of its topic (`Topics.sender`).

        Raises:
            HeadwaterError: the message is invalid; it is dropped without other effects.
        """
        if kind == "ub":
            with self.state.journal.deferring():
                self.collector.chunk(agent, decode_frame(payload))
        elif kind == "s":
            self._on_presence(agent, payload)
        else:
            self._on_control(agent, self._within_enrolment(agent, codec.parse_from_agent(payload)))

    def _within_enrolment(self, agent: str, message: fields.Control) -> fields.Control:
        """Return the message with no more samples than the agent was enrolled with."""
        if self.identity is None or not isinstance(message, up.Hello | up.UpdateManifest | up.Report):
            return message
        most = self.identity.most_samples(agent)
        if most is None or message.samples <= most:
            return message
        log.warning("samples_limited agent=%s declared=%d counted=%d: see its enrolment", agent, message.samples, most)
        return message.model_copy(update={"samples": most})

    def _on_presence(self, agent: str, payload: bytes) -> None:
        """Handle the last will of an agent's connection: ``offline BOOT CONNECTION``.

        It counts only for the newest connection, which the agent's hello has named: the broker may send an older one's
        will when the agent has been back for a while.
        """
        if len(payload) > MAX_PRESENCE_BYTES:
            raise MessageError(f"presence of {len(payload)} bytes, at most {MAX_PRESENCE_BYTES} are read")
        state, *origin = payload.decode("ascii", "replace").split(" ")
        member = self.roster.get(agent)
        if state != "offline" or member is None:
            return
        boot = origin[:1]
        if boot != [member.boot]:
            return
        connection = origin[1:]
        if connection != [str(member.connection)]:
            log.info("will_ignored agent=%s of=%s: not of its connection %d", agent, connection[:1], member.connection)
            return
        log.info("agent_offline agent=%s", agent)
        self._lose(agent)

    def _on_control(self, agent: str, message: fields.Control) -> None:
        """Note that an agent was heard, ask an unknown one for its hello, and handle its message if it counts."""
        if isinstance(message, up.Hello):
            self._on_hello(agent, message)
            return
        if self.duplicate_ids.is_claiming(agent, message.boot):
            return
        is_known = self.roster.heard(agent, message.boot)
        if isinstance(message, up.Bye):
            if is_known:  # otherwise it is of another start of that id
                self._lose(agent)
            return
        if not is_known:
            self.send(agent, down.Who())
            if not self._counts_before_hello(agent, message):
                return
        self._handlers[type(message)](agent, self.commands.with_run_name(agent, message))

    def _counts_before_hello(self, agent: str, message: fields.Control) -> bool:
        """Return whether a message counts whose start of the agent has sent no hello, or whose lease ran out.

        'edge-agent doctor' sends heartbeats under the id of an agent that works meanwhile: they do not count, nor does
        a fault of another start. Others do: an update is known by its content, and an agent whose lease ran out is
        still itself.
        """
        if isinstance(message, up.Heartbeat):
            return False
        if isinstance(message, up.Fault):
            member = self.roster.get(agent)
            return member is None or member.boot == message.boot
        return True

    def _on_manifest(self, agent: str, message: up.UpdateManifest) -> None:
        self.roster.trained(agent, message.metrics)
        collection = self.collector.open_round
        if collection is not None and collection.takes(agent, message):
            self.collector.manifest(agent, message)
        else:
            self.receipts.answer(agent, message, self.collector.manifest)

    def _on_want(self, agent: str, message: up.Want) -> None:
        if not self.distributor.want(agent, message):
            self.releases.offer_again(agent, message.digest)

    def _on_fault(self, agent: str, message: up.Fault) -> None:
        """Note a fault, but not one by which an agent refuses a job, and tell the run and the releases of it."""
        if message.error in fields.REFUSALS:
            log.info("job_refused agent=%s reason=%s", agent, message.message)
        else:
            fault = self.roster.failed(agent, message)
            if fault is not None:
                self._faults.note(agent, fault)
        loop = self.loop
        if loop is not None and loop.run.id == message.run:
            loop.on_fault(agent, message)
        self.releases.fault(agent, message)

    def _on_heartbeat(self, agent: str, message: up.Heartbeat) -> None:
        """Note that an agent lives and what it works on; ask again for what it has missed."""
        if not self.roster.note_condition(agent, message.condition):
            self.send(agent, down.Who())  # its fault was sent to an earlier start of this coordinator
        if not message.run:
            self.roster.note_idle(agent)
            self.releases.heartbeat(agent)
        heartbeat_s = self.roster.new_heartbeat_s(agent)
        if heartbeat_s is not None:
            self._welcome(agent, heartbeat_s)
        if self.loop is not None:
            self.loop.on_heartbeat(agent, message)

    def _on_report(self, agent: str, message: up.Report) -> None:
        """Add the report of an agent on the roster; another agent sends its report again after its hello."""
        loop = self.loop
        if not self.roster.reported(agent, message):
            return
        if loop is not None and loop.run.id == message.run:
            loop.run.reports.add(agent, message)
        self.releases.reported(agent, message)

    def _on_renew(self, agent: str, message: up.Renew) -> None:
        if self.identity is None:
            raise MessageError("a certificate is to be renewed, and this coordinator issues none; it lacks [identity]")
        self.send(agent, self.identity.renewed(agent, message))

    def _on_hello(self, agent: str, message: up.Hello) -> None:
        """Admit an agent that says who it is: to the roster, to the run, and to the releases."""
        if not self._may_join(agent, message):
            return
        self._enter_roster(agent, message)
        # The welcome comes first: the agent obeys no other command before it.
        heartbeat_s = self.roster.heartbeat_s()
        self.roster.note_heartbeat_s(agent, heartbeat_s)
        self._welcome(agent, heartbeat_s)
        loop = self.loop
        if loop is None:
            self._send_task(agent, self.config.task)
        else:
            loop.invite(agent)
            # An agent that trains gets the task with its first job.
            if message.tier == "head":
                self._send_task(agent, loop.run.request.task)
        if message.tier == "head":
            self.releases.hello(agent, message)

    def _may_join(self, agent: str, message: up.Hello) -> bool:
        """Return whether a hello is of the only agent with its id, and of one that belongs to this coordinator."""
        if not self.duplicate_ids.accept(agent, message):
            return False
        if not message.federation:  # it has met no coordinator yet
            return True
        if message.federation != self.federation_id:
            self.commands.announce_to(agent)  # the agent decides whether its own coordinator is offline
            return False
        return self.commands.may_give(agent, message.epoch, self.peers.is_alone)

    def _enter_roster(self, agent: str, message: up.Hello) -> None:
        """Note an agent as present, and forget what was sent over a connection that it no longer has."""
        before = self.roster.get(agent)
        is_back = before is None or before.boot != message.boot or not before.is_present
        has_new_connection = before is None or is_back or before.connection != message.connection
        self.commands.speaks(agent, message.v)
        self.collector.greet(agent)
        self.roster.hello(agent, message)
        self.distributor.note_way(agent, by_http=message.facts.get(fields.HTTP_BLOBS) is True)
        self.collector.note_way(agent, by_http=message.facts.get(fields.HTTP_UPLOADS) is True)
        self.refusals.accepted(agent)
        if has_new_connection:
            self.distributor.forget(agent)
        if is_back:
            event = "agent_joined" if before is None else "agent_back"
            log.info("%s agent=%s tier=%s samples=%s", event, agent, message.tier, message.samples or "unknown")

    def _welcome(self, agent: str, heartbeat_s: float) -> None:
        """Tell an agent, whose start is named, how often this coordinator has to hear from it."""
        member = self.roster.get(agent)
        welcome = down.Welcome(
            software=__version__,
            lease_s=self.roster.lease_s,
            heartbeat_s=heartbeat_s,
            time=utc_now().isoformat(timespec="seconds"),
            answers="" if member is None else member.boot,
        )
        self.send(agent, welcome)

    def _send_task(self, agent: str, task: Task) -> None:
        """Send the task to an agent that otherwise gets it with a bundle or a job, so that it checks its data now."""
        with contextlib.suppress(MessageError):  # too long for a message, with thousands of classes
            self.send(agent, down.TaskNotice(task=task))

    def _lose(self, agent: str) -> None:
        self.roster.mark_offline(agent)
        self.distributor.forget(agent)

    def _on_coordinator(self, event: Message) -> None:
        """Handle a message of another coordinator of this federation, or the echo of our own."""
        try:
            if event.retained:
                raise MessageError(f"retained message on {event.topic}; clear it at the broker")
            self.peers.heard(codec.parse_between_coordinators(event.payload))
        except DuplicateCoordinator:
            raise
        except HeadwaterError as error:
            self._ignore("coordinators", error)

    def _on_aggregator(self, event: Message) -> None:
        """Handle a message of an aggregator; whatever is wrong with it, the coordinator serves on."""
        try:
            with self.state.journal.deferring():
                self.aggregators.heard(event.payload)
        except (HeadwaterError, OSError) as error:
            trouble = of_storage(error)
            if trouble is not None:
                self.storage.note(trouble, "what an aggregator has stored")
            self._ignore("aggregator", error)

    def _on_relay(self, relay: str, kind: str, event: Message) -> None:
        """Handle a message of a relay about sums; whatever is wrong with it, the coordinator serves on."""
        try:
            if event.retained:
                raise MessageError(f"retained message on {event.topic}; clear it at the broker")
            if self.identity is not None and not self.identity.admits(relay):
                raise MessageError(f"relay '{relay}' is revoked; 'headwater enroll {relay}' lets it in again")
            if kind == "ub":
                self.sites.chunk(relay, event.payload)
            else:
                self.sites.heard(relay, event.payload)
        except (HeadwaterError, OSError) as error:
            trouble = of_storage(error)
            if trouble is not None:
                self.storage.note(trouble, f"a sum of relay {relay}")
            self._ignore(f"relay {relay}", error)

    def _objection_to_sum(self, agent: str, update: SummedUpdate) -> str:
        """Return why an agent's update cannot be a part of a sum; empty: it can, and its figures are noted."""
        if self.identity is not None:
            if not self.identity.admits(agent):
                return f"{agent} is revoked"
            most = self.identity.most_samples(agent)
            if most is not None and update.samples > most:
                return f"{agent} declares {update.samples} samples, and its enrolment allows {most}"
        self.roster.trained(agent, dict(update.metrics))
        return ""

    def _refuse_aggregator(self, name: str, reason: str) -> None:
        """Note for the status that an aggregator cannot serve."""
        self.refusals.note(name, "coordinator", UsageError.__name__, reason, "start it as the message says")

    def _note_double_relay(self, relay: str, reason: str) -> None:
        """Note for the status that two relays have one id."""
        self.refusals.note(relay, "coordinator", DuplicateId.__name__, reason, "give each relay an id of its own")

    def _ask_again(self, agent: str) -> None:
        """Send an agent of the open round its job again."""
        if self.loop is not None:
            self.loop.invite(agent)

    def _take_stored(self, stored: Stored) -> bool:
        """Take what an aggregator says of an agent's update; return False where the update is not in the store."""
        agent = stored.agent
        try:
            message = self.commands.with_run_name(agent, stored.manifest)
        except MessageError as error:  # of a run that was never requested here: the agent has been told
            self._ignore(agent, error)
            return True
        if self.identity is not None and not self.identity.admits(agent):
            return True
        within = self._within_enrolment(agent, message)
        if not isinstance(within, up.UpdateManifest):
            return True
        self.roster.heard(agent, within.boot)
        collection = self.collector.open_round
        is_of_open_round = collection is not None and collection.takes(agent, within)
        if not is_of_open_round:
            self.receipts.answer(agent, within, self.collector.manifest)
            return True
        self.roster.trained(agent, within.metrics)
        if stored.refused:
            self.collector.refused(agent, within, stored.refused)
            return True
        return not stored.is_stored or self.collector.stored(agent, within)

    # --- rejections and status ---------------------------------------------------------------------------------------

    def _publish(self, topic: str, payload: bytes) -> None:
        self.transport.publish(topic, payload)

    def _ignore(self, who: str, error: Exception, times: int = 1) -> None:
        """Count rejected messages, and log them now and then."""
        counted = self.rejected.note(f"{who}: {type(error).__name__}", times)
        level = logging.DEBUG if counted is None else logging.WARNING
        log.log(level, "message_refused from=%s times=%d reason=%s", who, counted or 0, reason_of(error))

    def status(self) -> StatusReport:
        """Return the coordinator's state now, as the JSON of ``status.json``."""
        waiting = self.waiting
        run = None if self.loop is None else self.loop.status()
        blobs = self.distributor.describe_urls()
        return {
            "version": __version__,
            "federation": self.config.federation,
            "settings": self._settings,
            "broker": self.broker_url if self._broker is None else self._broker.url,
            "broker_connection": None if self._broker is None else self._broker.to_json(),
            "federation_id": self.federation_id,
            "epoch": self.commands.epoch,
            "other_coordinator": self.peers.note or None,
            "standby": self.peers.standbys,
            "at": utc_now().isoformat(timespec="milliseconds"),
            "run": self._describe_run(run),
            "waiting": {
                "for": waiting.what,
                "idle": waiting.is_idle,
                "whom": list(waiting.whom[:MOST_LISTED]),
                "count": len(waiting.whom),
                "seconds_left": None if waiting.until is None else round(max(0.0, waiting.until - self.clock()), 1),
            },
            "fleet": asdict(self._counts()),
            "acc": {scope: asdict(accuracy) for scope, accuracy in self.roster.accuracies().items()},
            "agents": [vars(agent) for agent in (*self._described(self._listed(), run), *self._away())],
            "aggregators": [asdict(row) for row in self.aggregators.status()],
            "sites": [asdict(row) for row in self.sites.status()],
            "refused_agents": self.refusals.body(),
            "traffic": {
                "messages_received": self.transport.traffic.messages_down,
                "bytes_received": self.transport.traffic.bytes_down,
                "bytes_published": self.transport.traffic.bytes_up,
                "blob_bytes_published": self.distributor.published_bytes,
                "blob_bytes_fetched": self.distributor.fetched_bytes,
                "update_bytes_by_http": self.collector.http_bytes,
                "dropped": self.transport.traffic.dropped,
            },
            "blobs": None if blobs is None else blobs.to_json(),
            "process": {"resident_bytes": resident_bytes()},
            "storage": self.storage.trouble or None,
            "broker_away": self._broker_wait is not None,
            "rejected_messages": self.rejected.total,
            "rejected_updates": self.collector.rejected.total,
            "rejected_most": {"messages": self.rejected.top(), "updates": self.collector.rejected.top()},
        }

    def everyone(self) -> list[AgentStatus]:
        """Return all known agents as in `status`, sorted by id, and hosted clients that have not connected yet."""
        run = None if self.loop is None else self.loop.status()
        return [*self._described(self.roster.members(), run), *self._away()]

    def _describe_run(self, run: RunStatus | None) -> dict[str, Any] | None:
        """Return the JSON of the active run, also of one that a full disk has stalled; None where there is none."""
        body = None if run is None else run.to_json()
        stall = self.storage.stall
        if stall is None:
            return body
        if body is None:
            body = {"id": stall.run, "left_out": {}}
        return {**body, "stalled": stall.body()}

    def _counts(self) -> FleetCounts:
        """Return how many agents are known, and how many of them are online, have a fault, or are stalled."""
        members = self.roster.members()
        ready = len(self.roster.ready)
        conditions = Counter(member.condition for member in members if member.is_present)
        return FleetCounts(
            agents=len(members),
            online=ready + conditions["stalled"],
            fault=conditions["fault"],
            stalled=conditions["stalled"],
        )

    def _listed(self) -> list[Member]:
        """Return at most `MOST_LISTED` agents by id: of more, first those with a fault, a note, or offline."""
        members = self.roster.members()
        if len(members) > MOST_LISTED:
            now = self.clock()

            def needs_no_attention(member: Member) -> bool:
                return member.is_well and not member.breaks.note(now)

            members = heapq.nsmallest(MOST_LISTED, members, key=lambda member: (needs_no_attention(member), member.id))
        return sorted(members, key=lambda member: member.id)

    def _described(self, members: Iterable[Member], run: RunStatus | None) -> Iterator[AgentStatus]:
        """Yield these agents as the status has them, with what people should know of each (`_notes_on`)."""
        hosted_notes = self._hosted_notes()
        for member in members:
            candidate = member.candidate
            yield AgentStatus(
                id=member.id,
                tier=member.tier,
                transport="hosted" if member.id in self._hosted else "mqtt",
                present=member.is_present,
                samples=member.samples or None,
                bundle_id=member.bundle_id,
                software=member.software,
                notes=[*self._notes_on(member, run), *hosted_notes.get(member.id, ())],
                condition=member.condition,
                fault=None if member.fault is None else member.fault.to_json(),
                acc=dict(member.figures.acc),
                head=member.figures.head,
                better_alone=member.figures.better_alone,
                candidate=None if candidate is None else candidate.body(),
                rss_mb=member.figures.rss_mb,
                inputs_since=member.inputs_since,
                relay=member.relay,
                silent_s=round(self.clock() - member.heard_at, 1),
                bytes_up=self.collector.bytes_from.get(member.id, 0),
                bytes_down=self.distributor.bytes_to.get(member.id, 0),
            )

    def _notes_on(self, member: Member, run: RunStatus | None) -> list[str]:
        """Return what people should know of an agent, in this order.

        The bundle that it does not run, its own notes, that its inputs have changed, why it is left out of ``run``,
        what was done to its last update, and how often its connection breaks.
        """
        notes = []
        if member.candidate is not None:
            notes.append(member.candidate.note)
        notes.extend(member.notes.values())
        if member.inputs_since:
            when = show_utc(member.inputs_since)
            notes.append(f"its inputs have changed since {when}: they are unlike what its head learned from")
        if run is not None:
            exclusion = run.left_out.get(member.id)
            if exclusion is not None:
                limit = f"until round {exclusion.until_round}"
                if exclusion.until_round is None:
                    limit = "until it is restarted"
                notes.append(f"left out of {run.id} {limit}: {exclusion.reason}")
            if member.id in run.bounded:
                notes.append(run.bounded[member.id])
        link_note = member.breaks.note(self.clock())
        if link_note:
            notes.append(link_note)
        return notes

    def _away(self) -> list[AgentStatus]:
        """Return hosted clients that have not connected yet."""
        notes = self._hosted_notes()
        return [
            AgentStatus(id=name, tier="train", transport="hosted", notes=list(notes.get(name, ())))
            for name in sorted(self._hosted)
            if self.roster.get(name) is None
        ]

    def _hosted_notes(self) -> dict[str, tuple[str, ...]]:
        return self.transport.notes() if isinstance(self.transport, CombinedTransport) else {}
