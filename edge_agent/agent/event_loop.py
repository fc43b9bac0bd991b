"""The event loop of an agent: connect, send hello, receive jobs and bundles, send results.

One loop handles events and timers; long work runs beside it. What was computed stays on disk until the coordinator has
confirmed it by its own message. Everything is sent again after a reconnect, so no single message has to arrive.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..core.children import InlineWorker, Worker, is_stopped
from ..core.config import AgentConfig
from ..core.disk import disk_error
from ..core.errors import (
    ChunkError,
    DuplicateId,
    EnrolmentRefused,
    HeadwaterError,
    MessageError,
    ProtocolMismatch,
    StateError,
)
from ..core.limits import resident_bytes
from ..core.storage import read_json, write_atomic
from ..core.task import Task
from ..identity.renewal import Renewal, Step, renew_beside
from ..privacy.policy import sample_count, without_withheld
from ..version import __version__
from ..wire.blobs.chunks import BlobCache, decode_frame
from ..wire.messages import codec, down, fields, up
from ..wire.messages.codec import SPOKEN
from ..wire.messages.fields import run_name
from ..wire.seal import Guard, read_key
from ..wire.topics import Topics
from ..wire.transport import Connected, Disconnected, Message, Subscribed, Transport, Will, WillOf
from .data_check import note_task
from .health import FINAL_S, HELLO_AGAIN_S, WAITS_FOR_RELEASE, Disk, Mismatch, OtherClock, Problem, Silence
from .local_state import Membership
from .new_samples import NewSamples
from .release_record import PROVEN_S, Trial
from .tasks.runner import TaskRunner
from .tasks.task_queue import TaskQueue
from .textfile import Figures
from .transfers import Downloads, Link, Uploads

log = logging.getLogger(__name__)

HELLO_APART_S = 0.5
MAX_TICK_S = 0.5

ASK_AFTER = 3
"""Failed connections in a row after which an enrolled agent asks whether its certificate counts."""

ASK_AGAIN_S = 300.0
"""Pause in seconds until it asks again."""


RefusedTopics = Callable[[Mapping[str, bytes]], "dict[str, str] | None"]
"""See `edge_agent.wire.mqtt.refused_topics`."""


def will_of(config: AgentConfig, boot: str) -> WillOf:
    """Return what the broker publishes when a connection of this agent breaks; it names the connection."""
    topic = Topics(config.federation).presence(config.id)
    return lambda connection: Will(topic, f"offline {boot} {connection}".encode())


class Agent:
    """One device's agent. `start`, then `step` again and again (or `serve`), then `close`."""

    def __init__(
        self,
        config: AgentConfig,
        transport: Transport,
        tasks: TaskRunner,
        *,
        clock: Callable[[], float] = time.monotonic,
        worker: Worker | None = None,
        boot: str | None = None,
        rng: random.Random | None = None,
        renewal: Renewal | None = None,
        refused_topics: RefusedTopics | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``rng`` spreads the hellos of a fleet whose coordinator speaks another protocol.

        ``renewal``: of this agent's certificate, where it has one. ``refused_topics``: asks the broker which of these
        messages it does not let this agent publish, for when no coordinator answers. ``now``: the device's wall clock,
        which is compared with the coordinator's.

        Raises:
            ConfigError: the file of the key of its commands cannot be used.
        """
        self.config = config
        self.transport = transport
        self.tasks = tasks
        self.clock = clock
        self.worker = worker or InlineWorker()
        self.boot = boot or secrets.token_hex(8)
        self.membership = Membership(config.state / "federation.json", clock)
        self.guard = Guard(read_key(config), self.boot)
        self.link = Link(config, transport, self.membership, self.boot)
        self.topics = self.link.topics
        self._broadcasts = self.topics.broadcast("")
        self.cache = BlobCache(config.state / "cache", config.cache_bytes)
        self.downloads = Downloads(self.cache, self.link, clock)
        self.uploads = Uploads(tasks.outbox, self.link, clock)
        self.jobs = TaskQueue(tasks, self.downloads, self.uploads, self.worker, self.link)
        self.condition = self.jobs.condition
        self.disk = Disk(
            config.state,
            self.jobs.condition,
            self.link.send,
            stall=self.jobs.stall,
            room_bytes=lambda: self.jobs.room_bytes,
            resume=self._hello,
        )
        self.renewal = renewal
        self._is_renewing = False
        self._refused_topics = refused_topics
        self._failed_connects = 0
        self._ask_at = float("-inf")
        self.welcomed = False
        self.rejected: HeadwaterError | None = None
        self._mismatch = Mismatch(clock, rng or random.Random())  # noqa: S311 - spreads hellos, guards nothing
        self._connection = 0
        self._trial: tuple[Trial, float] | None = None
        self._sent_kept = ""
        self._beat_at = self._hello_at = float("-inf")
        self._idle_heartbeat_s = 0.0
        self._was_busy = False
        self._silence = Silence(self._mismatch, clock)
        self._other_clock = OtherClock(now, clock)
        self._new_samples = NewSamples(config, clock)
        self._sent_condition = self.condition.name
        self._checked: Task | None = None
        self._operator_pin: down.Pinned | None = None
        self._introductions: dict[type[fields.Command], Callable[[Any], None]] = {
            down.Announce: self._on_announce,
            down.Welcome: self._on_welcome,
            down.Who: lambda message: self._hello(message.question),
        }
        self._work: dict[type[fields.Command], Callable[[Any], None]] = {
            down.TaskNotice: self._on_task,
            down.Job: self.jobs.on_job,
            down.Install: self.jobs.on_install,
            down.Cancel: self.jobs.on_cancel,
            down.Listen: self.downloads.listen,
            down.Grant: self._on_grant,
            down.Queued: self.uploads.queued,
            down.Ack: self.uploads.ack,
            down.Receipt: self.jobs.on_receipt,
            down.Renewed: self._on_renewed,
            down.Pinned: self._on_pinned,
        }

    # --- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to listen; hello follows once connected."""
        self.config.state.mkdir(parents=True, exist_ok=True)
        self.transport.subscribe(*self.topics.for_agent(self.config.id))
        self.transport.start()
        self.disk.safely(self.tasks.bundles.started)
        self.disk.safely(self.jobs.restore)
        self.jobs.refit(self._hello, self._new_samples.tried)

    def serve(self, stop: threading.Event) -> None:
        """Call `step` until ``stop`` is set.

        Raises:
            ProtocolMismatch: the coordinator has spoken another protocol for minutes.
            DuplicateId: another agent with this id is online.
        """
        while not stop.is_set():
            self.step(self.idle_s())
            self.raise_if_rejected()

    def raise_if_rejected(self) -> None:
        """Return quietly unless the coordinator will never accept this agent.

        Raises:
            ProtocolMismatch: the coordinator has spoken another protocol for minutes.
            DuplicateId: another agent with this id is online.
        """
        if self.rejected is not None:
            raise self.rejected

    def close(self) -> None:
        """Send goodbye and disconnect; downloads and the outbox stay on disk."""
        self.disk.safely(self.tasks.bundles.stopped)
        self.link.send(up.Bye())
        self.downloads.pause()
        self.worker.close()
        self.transport.close()

    def step(self, timeout_s: float) -> bool:
        """Handle at most one event and whatever is due; True when there was an event."""
        event = self.transport.receive(timeout_s)
        if isinstance(event, Message):
            self._on_message(event)
        elif isinstance(event, Connected):
            log.info("connected broker=%s", self.config.broker.url)
            self._connection = event.connection
            self._failed_connects = 0
            self.condition.clear("identity")
            self._hello_at = self.clock()  # sent as soon as an answer can be received
            self._begin_alone()
        elif isinstance(event, Subscribed):
            if self.topics.down(self.config.id) in event.filters:
                self._hello()
            self.disk.safely(partial(self.downloads.listening, event.filters))
            self.disk.safely(self.jobs.go_on)  # everything may be on disk from before a restart
        elif isinstance(event, Disconnected):
            self.welcomed = False
            self._failed_connects += 1
            self._silence.broker_away(event, self.config)
            self.membership.answered()
        self.worker.collect()
        self._tick()
        return event is not None

    def idle_s(self) -> float:
        """Return how long `step` may wait for an event before something else is due."""
        return max(0.0, min(MAX_TICK_S, self.downloads.due_in()))

    # --- timers ----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Do what is due by time alone: transfers, new samples, and what the coordinator is to hear."""
        # What needs the disk waits while that cannot be written.
        now = self.clock()
        self.disk.tick(now)
        self.disk.safely(self.downloads.tick)
        self.disk.safely(self.uploads.tick)
        self.disk.safely(self.jobs.give_up_late)
        self.disk.safely(self.jobs.switch_when_due)
        self.disk.safely(partial(self._note_trial, now))
        self.disk.safely(self._renew)
        # New samples are learned from while the worker has nothing else to do, and there is a bundle to fit a head for.
        is_ready = self.tasks.tier == "head" and not self.jobs.is_working
        if is_ready and (self.tasks.bundles.bundle_id or self.tasks.bundles.lacks_head) and self._new_samples.is_due():
            self.jobs.collect(self._hello, self._new_samples.tried)
        # A hello is repeated after one of another version, and where another federation is followed from now on.
        if self._mismatch.is_due():
            self._hello()
        federation_and_epoch = self.membership.to_follow()
        if federation_and_epoch is not None:
            self._follow(*federation_and_epoch)
            self._begin_alone()
            self._hello()
        # Without a welcome the agent says hello again, says in its log what it waits for, and asks the broker once.
        if not self.welcomed:
            if not self._mismatch.reason and now - self._hello_at >= HELLO_AGAIN_S:
                self._hello()
            self._silence.tell(self.config)
            if self._refused_topics is not None and self._silence.asks_rules():
                self._ask_rules(self._refused_topics)
        elif self._beat_is_due(now):
            self._beat()

    def _note_trial(self, now: float) -> None:
        """Note when this agent has lived with a new bundle for long enough; the time of another one begins again."""
        trial = self.tasks.bundles.on_trial
        if trial is None:
            self._trial = None
        elif self._trial is None or self._trial[0] != trial:
            self._trial = trial, now
        elif now - self._trial[1] >= PROVEN_S:
            self._trial = trial, now  # where this cannot be written, it is tried again later
            self.tasks.bundles.proved(trial)

    def _renew(self) -> None:
        """Ask for a new certificate, when half of the life of this one is over."""
        renewal = self.renewal
        if renewal is None or self._is_renewing:  # perhaps behind a long training
            return
        try:
            if self._failed_connects >= ASK_AFTER and self.clock() >= self._ask_at:
                self._ask_at = self.clock() + ASK_AGAIN_S
                self._renew_beside("standing")
                return
            if not renewal.is_due(self.clock()):
                return
            if self.welcomed:
                self._renew_beside("message")
            elif renewal.is_expired():
                self._renew_beside("by_port")
        except HeadwaterError as error:
            self._not_renewed(str(error))

    def _renew_beside(self, step: Step, certificate: str = "") -> None:
        """Have the worker do one step of a renewal, and send, note or log what came of it."""

        def done(result: Any, error: BaseException | None) -> None:
            self._is_renewing = False
            if isinstance(error, EnrolmentRefused):  # by the coordinator itself: the broker will not let this agent in
                self.condition.note("identity", error)
            if step == "standing":
                if isinstance(error, EnrolmentRefused):
                    log.error("certificate_refused agent=%s reason=%s", self.config.id, error)
            elif error is not None and is_stopped(error):  # as this agent is about to be
                log.info("certificate_renewal_stopped agent=%s: the next start asks again", self.config.id)
            elif error is not None:
                self._not_renewed(str(error))
            elif step == "message":
                self.link.send(up.Renew(**result))
            else:
                log.info("certificate_renewed agent=%s until=%s", self.config.id, result["until"])

        self._is_renewing = True
        self.worker.submit("renew", lambda: renew_beside(self.config.state, step, certificate), done)

    def _on_renewed(self, message: down.Renewed) -> None:
        if message.refused:
            self._not_renewed(message.refused)
        elif self.renewal is not None and message.certificate:
            self._renew_beside("received", message.certificate)

    def _not_renewed(self, reason: str) -> None:
        log.error("certificate_not_renewed agent=%s reason=%s", self.config.id, reason)

    def _ask_rules(self, refused_topics: RefusedTopics) -> None:
        """Find out whether the broker lets this agent speak: what it refuses to MQTT 3.1.1 it drops without a word."""
        beat = codec.encode(up.Heartbeat(boot=secrets.token_hex(8)))  # of no start that said hello: it changes nothing
        spoken = {topic(self.config.id): beat for topic in (self.topics.up, self.topics.heartbeat)}

        def done(refused: dict[str, str] | None, error: BaseException | None) -> None:
            if error is not None:
                log.warning("topics_not_asked reason=%s", error)
            elif not self.welcomed:
                self._silence.rules_refuse(refused or {}, self.config)

        self.worker.submit("topics", lambda: refused_topics(spoken), done)

    def _beat_is_due(self, now: float) -> bool:
        """Return whether to send a heartbeat.

        It is sent less often without a job, where the coordinator of a large fleet asks for that.
        """
        is_idle = self.jobs.job is None
        is_stretched = self._idle_heartbeat_s > self.config.heartbeat_s
        has_finished = is_idle and is_stretched and self._was_busy  # the coordinator expects the next one later
        self._was_busy = not is_idle
        pause_s = self._idle_heartbeat_s if is_idle and is_stretched else self.config.heartbeat_s
        return has_finished or now - self._beat_at >= pause_s or self.condition.name != self._sent_condition

    def _begin_alone(self) -> None:
        self.welcomed = False
        self.downloads.cut()
        self.uploads.cut()
        self._silence.begin()

    def _hello(self, answers: str = "") -> None:
        """Say who this agent is, what it runs and how it fares; ``answers``: the question that it answers, if any."""
        if self.rejected is not None:
            return
        self._hello_at = self.clock()
        presence = f"online {self.boot} {self._connection}".encode()
        self.transport.publish(self.topics.presence(self.config.id), presence)
        self._sent_kept = self.tasks.bundles.kept()
        hello = up.Hello(
            software=__version__,
            tier=self.tasks.tier,
            samples=sample_count(self.config.privacy, self.tasks.samples),
            bundle_id=self.tasks.bundles.bundle_id,
            condition=self.condition.name,
            answers=answers,
            connection=self._connection,
            epoch=self.membership.epoch,
            channel=self.config.channel,
            kept=self._sent_kept,
            facts=self.tasks.facts(),
        )
        self.link.send(hello)

    def _beat(self) -> None:
        self._beat_at = self.clock()
        self._sent_condition = self.condition.name
        busy = self.jobs.job
        beat = up.Heartbeat(condition=self._sent_condition)
        if busy is not None:
            beat = beat.model_copy(update={"run": busy.run, "round": busy.round, "purpose": busy.purpose})
        self.link.beat(beat)
        if self.tasks.tier == "head" and self.tasks.bundles.kept() != self._sent_kept:  # pinned or unpinned meanwhile
            self._hello()

    # --- what arrives ----------------------------------------------------------------------------------------------

    def _on_message(self, event: Message) -> None:
        """Handle what has arrived on a topic; whatever is wrong with it costs that message alone."""
        if event.retained:  # a coordinator never asks a broker to retain a message, so another client did
            log.warning("retained_refused topic=%s; clear it at the broker", fields.printable(event.topic))
            return
        try:
            if event.topic in {self.topics.down(self.config.id), self.topics.announce}:
                if self.guard.lets_in(event.payload, to_all=event.topic == self.topics.announce):
                    self._on_words(event.payload)
            elif event.topic == self.topics.down_chunks(self.config.id) or event.topic.startswith(self._broadcasts):
                self._on_chunk(event.payload)
        except ProtocolMismatch as error:
            self._on_mismatch(str(error))
        except HeadwaterError as error:
            log.warning(
                "message_refused topic=%s reason=%s", fields.printable(event.topic), fields.printable(str(error))
            )
        except OSError as error:
            self.disk.failed(error, f"message_failed topic={fields.printable(event.topic)}")
        except Exception:  # a bug: no single message may end the agent
            log.exception("message_broke topic=%s", fields.printable(event.topic))

    def _on_words(self, payload: bytes) -> None:
        try:
            message = codec.parse_from_coordinator(payload)
        except MessageError as error:
            named = codec.named_job(payload)
            if named is not None:  # of a newer coordinator, for example: it need not wait for this agent
                self.link.send(self.condition.note("work", error).to_coordinator(named))
            raise
        if self.guard.is_new(message):
            self._on_control(message)

    def _on_chunk(self, payload: bytes) -> None:
        try:
            finished = self.downloads.frame(decode_frame(payload))
        except ChunkError as error:
            log.warning("chunk_refused reason=%s", error)
            if disk_error(error) is not None:
                self.condition.note("disk", error)
        else:
            if finished:
                self.disk.safely(self.jobs.go_on)

    def _on_control(self, message: fields.Command) -> None:
        """Obey a command of the coordinator that has welcomed this agent last; others may introduce themselves.

        Raises:
            MessageError: the command names no federation.
        """
        kind = type(message)
        if isinstance(message, down.Refused):
            self._on_refused(message)
        elif not message.federation:
            raise MessageError(f"{kind.__name__} names no federation; expected the id of one")
        elif not self.membership.allows(message):
            self._not_obeyed(message)
        elif kind in self._introductions:
            self._introductions[kind](message)
        elif not self.membership.is_current(message):
            self._ask_who_is_online()
        elif self.condition.is_stalled and isinstance(message, down.Job | down.Install):
            log.debug("left type=%s run=%s: the disk cannot be written; it is asked again", message.type, message.run)
        else:
            self._work[kind](message)

    def _on_grant(self, message: down.Grant) -> None:
        self.uploads.grant(message)
        self.jobs.go_on()  # an update that was lost from the disk is computed again

    def _on_task(self, message: down.TaskNotice) -> None:
        """Check whether data and head of this device fit, unless that was checked."""
        task = message.task
        if task == self._checked and self.condition.name == "ok":
            return

        def done(_: object, error: BaseException | None) -> None:
            self._checked = task
            self.disk.safely(lambda: note_task(self.config.state, task))
            if error is None:
                self.condition.clear("data")
                return
            problem = self.condition.note("data", error)
            log.error("data_do_not_fit error=%s message=%s", problem.error, problem.message)
            self.link.send(problem.to_coordinator())

        self.worker.submit("check", lambda: self.tasks.check(task), done)

    def _on_announce(self, message: down.Announce) -> None:
        if message.epoch > self.membership.epoch > 0:  # what has just been sent was sent to its predecessor
            self._begin_alone()
            self._hello()
        elif not self.welcomed and self.clock() - self._hello_at >= HELLO_APART_S:  # else it has just been sent
            self._hello()

    def _on_welcome(self, message: down.Welcome) -> None:
        """Obey the coordinator that welcomes this agent, and announce the update that waits where it is another one."""
        is_news = not self.welcomed or not self.membership.is_current(message)
        self._follow(message.federation, message.epoch)
        self.welcomed = True
        self._idle_heartbeat_s = message.heartbeat_s
        self._other_clock.heard(message.time)
        self._operator_pin = None  # where there is one, it follows
        self.membership.answered()
        self._mismatch.clear()
        self._beat_at = self.clock()
        if is_news:
            federation = message.federation[:12]
            log.info("welcomed coordinator=%s federation=%s epoch=%d", message.software, federation, message.epoch)
            self.uploads.offer_again()
            self.disk.safely(self.jobs.forget_candidate)
            if self._lacks_release():
                log.info("idle agent=%s %s", self.config.id, WAITS_FOR_RELEASE)
        if (problem := self.condition.problem) is not None:  # this may be another coordinator than the one informed
            self.link.send(problem.to_coordinator())

    # --- whose commands count --------------------------------------------------------------------------------------

    def _not_obeyed(self, message: fields.Command) -> None:
        """Ignore a command; a hello informs its sender whom the agent follows, and shows who is online."""
        self.membership.ignored(message)
        self._ask_who_is_online()

    def _ask_who_is_online(self) -> None:
        if self.welcomed:
            self._begin_alone()
        if self.clock() - self._hello_at >= HELLO_APART_S:
            self._hello()

    def _follow(self, federation: str, epoch: int) -> None:
        """Obey that federation and epoch from now on; what belongs to another federation is dropped."""
        previous = self.membership.federation
        if federation != previous:
            dropped = self.jobs.forget_all()
            if previous or dropped:
                values = (previous[:12] or "unknown", federation[:12], dropped or "nothing")
                log.warning("federation_left federation=%s follows=%s dropped: %s", *values)
        self.membership.accept(federation, epoch)

    def _on_pinned(self, message: down.Pinned) -> None:
        """Note the operator's pin: it decides nothing here, where no other release arrives.

        It only explains that to the owner.
        """
        self._operator_pin = message if message.release else None
        if message.release:
            until = message.until or "without end"
            log.info("pinned_by_operator release=%d until=%s reason=%s", message.release, until, message.reason)
        else:
            log.info("unpinned_by_operator")

    def _on_refused(self, message: down.Refused) -> None:
        """End the agent where another one has its id; another refusal is logged, or answered by another hello."""
        if message.federation and not self.membership.allows(message):
            self._not_obeyed(message)
            return
        if message.whom not in {"", self.boot}:
            log.warning("duplicate_id another agent with the id '%s' was rejected; give it another id", self.config.id)
            return
        if message.error == ProtocolMismatch.__name__:
            self._on_mismatch(message.message)
            return
        log.error("refused error=%s message=%s", message.error, message.message)
        if message.error == DuplicateId.__name__:
            self.rejected = DuplicateId(message.message)

    def _on_mismatch(self, reason: str) -> None:
        """Note a message of another protocol: ask again, and end only when nothing else arrives for minutes."""
        spoken = f"agent {__version__} {SPOKEN}"
        if self._mismatch.note(reason):
            log.error(
                "protocol_mismatch reason=%s: %s; says hello again in %.0f s", spoken, reason, self._mismatch.next_s()
            )
        if self._mismatch.is_final():
            self.rejected = ProtocolMismatch(f"{spoken}: {reason}; for more than {FINAL_S / 60:.0f} minutes")
            log.error("protocol_mismatch_final reason=%s", self.rejected)

    @property
    def problem(self) -> Problem | None:
        """What keeps this agent from its work now, or from its coordinator."""
        if self.condition.problem is not None:
            return self.condition.problem
        return self._other_clock.problem() if self.welcomed else self._silence.problem()

    def _waits_for(self) -> str | None:
        """Return what this agent waits for; None while it works, or has all that it is to have."""
        if not self.welcomed:
            return self._silence.waits_for(self.config)
        if self.uploads.waits_for:
            return self.uploads.waits_for
        return WAITS_FOR_RELEASE if self._lacks_release() else None

    def _lacks_release(self) -> bool:
        """Return whether this agent trains nothing, and has no bundle and none on its way: it may wait for days."""
        has_bundle = bool(self.tasks.bundles.bundle_id) or self.tasks.bundles.lacks_head
        has_work = self.jobs.job is not None or self.jobs.is_working or self.jobs.candidate() is not None
        return self.tasks.tier == "head" and not has_bundle and not has_work

    def write_status(self) -> None:
        """Write status.json for ``edge-agent status`` (a cache: not synced)."""
        job = self.jobs.job
        membership = self.membership
        problem = self.problem
        pin = self._operator_pin
        status = {
            "id": self.config.id,
            "version": __version__,
            "tier": self.tasks.tier,
            "welcomed": self.welcomed,
            "waits_for": self._waits_for(),
            "federation_id": membership.federation or None,
            "epoch": membership.epoch,
            "other_coordinator": membership.note(),
            "commands": {
                "authenticated": self.guard.is_on,
                "refused": self.guard.refused,
                "replayed": self.guard.replayed,
            },
            "job": None if job is None else {"run": run_name(job.run), "round": job.round, "rounds": job.rounds},
            "working": self.jobs.is_working,
            "bundle_id": self.tasks.bundles.bundle_id,
            "candidate": self.jobs.candidate(),
            "operator_pin": pin and pin.model_dump(include={"release", "until", "reason"}),
            "rolled_back": self.tasks.bundles.rolled_back or None,
            "refit": self._new_samples.failure(),
            "condition": "fault" if problem is not None and not self.condition.is_stalled else self.condition.name,
            "fault": None if problem is None else problem.as_json(),
        }
        write_atomic(self.config.state / "status.json", json.dumps(status).encode(), durable=False)

    def figures(self) -> Figures:
        """Return what this agent says of itself to Prometheus.

        ``[privacy]`` withholds what it withholds from the coordinator.

        Before the first report since the start the accuracies are those that were saved with the head.

        Raises:
            OSError: the state folder is not there.
        """
        report = self.jobs.last_report
        saved = dict[str, Any]()
        if report is None:
            with contextlib.suppress(StateError):  # a damaged head is reported elsewhere
                saved = (read_json(self.config.state / "head" / "head.json") or {}).get("metrics") or {}
            saved = without_withheld(self.config.privacy, saved)
        return Figures(
            tier=self.tasks.tier,
            bundle_id=self.tasks.bundles.bundle_id,
            condition=self.condition.name,
            is_connected=self.welcomed,
            is_working=self.jobs.is_working,
            samples=sample_count(self.config.privacy, self.tasks.samples),
            resident_bytes=resident_bytes(),
            disk_free_bytes=shutil.disk_usage(self.config.state).free,
            accuracies={
                scope: saved.get(f"acc.{scope}") if report is None else getattr(report, f"acc_{scope}")
                for scope in ("personal", "global", "local")
            },
            updates=self.jobs.answered,
            faults=self.condition.noted,
            better_alone=bool(saved.get("better_alone")) if report is None else report.better_alone,
        )
