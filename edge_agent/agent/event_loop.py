"""The event loop of an agent: connect, send hello, receive jobs and bundles, send results.

One loop handles events and timers; long work runs beside it. What was computed stays on disk until the coordinator has
confirmed it by its own message. Everything is sent again after a reconnect, so no single message has to arrive.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import shutil
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ..core.config import AgentConfig
from ..core.disk import disk_error
from ..core.errors import (
    ChunkError,
    DuplicateId,
    HeadwaterError,
    MessageError,
    ProtocolMismatch,
    StateError,
)
from ..core.formats import printable
from ..core.limits import resident_bytes
from ..core.storage import read_json, write_atomic
from ..core.task import Task
from ..core.time_and_text import utc_text
from ..privacy.policy import sample_count, without_withheld
from ..version import __version__
from ..wire.blobs.chunks import BlobCache, decode_frame
from ..wire.messages import codec, down, fields, up
from ..wire.messages.codec import SPOKEN
from ..wire.messages.fields import run_name
from ..wire.seal import Guard, read_key
from ..wire.topics import Topics
from ..wire.transport import BrokerConnection, Connected, Disconnected, Message, Subscribed, Transport, Will, WillOf
from .certificate import CertificateRenewal
from .data_check import note_task
from .health import FINAL_S, HELLO_AGAIN_S, WAITS_FOR_RELEASE, Disk, Mismatch, OtherClock, Problem, Silence
from .heartbeat import HeartbeatTimer
from .local_state import Membership
from .new_samples import NewSamples
from .runtime import AgentRuntime, RefusedTopics
from .tasks.runner import TaskRunner
from .tasks.task_queue import TaskQueue
from .textfile import Figures
from .transfers import Downloads, Link, Uploads

log = logging.getLogger(__name__)

HELLO_APART_S = 0.5
MAX_TICK_S = 0.5


def will_of(config: AgentConfig, boot: str) -> WillOf:
    """Return what the broker publishes when a connection of this agent breaks; it names the connection."""
    topic = Topics(config.federation).presence(config.id)
    return lambda connection: Will(topic, f"offline {boot} {connection}".encode())


def inputs_to_tell(config: AgentConfig) -> float | None:
    """Return since when the inputs of this device's server have changed, see `serving.inputs_state.inputs_since`.

    None where the privacy policy keeps that here.
    """
    if not config.privacy.inputs_since:
        return None
    from ..serving.inputs_state import inputs_since

    return inputs_since(config.state)


class Agent:
    """One device's agent. `start`, then `step` again and again (or `serve`), then `close`."""

    def __init__(
        self, config: AgentConfig, transport: Transport, tasks: TaskRunner, runtime: AgentRuntime | None = None
    ) -> None:
        """Prepare an agent; nothing is sent before `start`.

        Args:
            config: The device's configuration.
            transport: The connection to the broker, with the last will of `will_of`.
            tasks: What does the work that a coordinator asks for.
            runtime: Clocks, worker and identity of this start; None: the defaults of `AgentRuntime`.

        Raises:
            ConfigError: The file of the key of its commands cannot be used.
        """
        runtime = AgentRuntime() if runtime is None else runtime
        self.config = config
        self.transport = transport
        self.tasks = tasks
        self.clock = runtime.clock
        self.worker = runtime.worker
        self._now = runtime.now
        self.boot = runtime.boot
        self.refused_topics = runtime.refused_topics
        self.leave_broker = runtime.leave_broker

        # Whom the agent follows, and how it speaks to it.
        self.membership = Membership(config.state / "federation.json", self.clock)
        self.guard = Guard(read_key(config), self.boot)
        self.link = Link(config, transport, self.membership, self.boot)
        self.topics = self.link.topics
        self._broadcasts = self.topics.broadcast("")

        # What is moved, and what is worked on.
        self.cache = BlobCache(config.state / "cache", config.cache_bytes)
        self._fetcher = runtime.fetcher if config.downloads.by_http else None
        self.downloads = Downloads(self.cache, self.link, self.clock, self._fetcher)
        self._sender = runtime.sender if config.uploads.by_http else None
        self.uploads = Uploads(tasks.outbox, self.link, self.clock, self._sender)
        self.jobs = TaskQueue(tasks, self.downloads, self.uploads, self.worker, self.link)
        self._new_samples = NewSamples(config, self.clock)
        self._checked: Task | None = None
        """The task that the local data were checked for last."""

        # What keeps it from its work.
        self.condition = self.jobs.condition
        self.disk = Disk(
            config.state,
            self.condition,
            self.link.send,
            stall=self.jobs.stall,
            room_bytes=lambda: self.jobs.room_bytes,
            resume=self._hello,
        )
        self.certificate = CertificateRenewal(config, runtime, self.link, self.condition)
        self._mismatch = Mismatch(self.clock, runtime.rng)
        self._silence = Silence(self._mismatch, self.clock)
        self._other_clock = OtherClock(runtime.now, self.clock)

        # How the coordinator answers.
        self.welcomed = False
        self.rejected: HeadwaterError | None = None
        """Why no coordinator will ever accept this agent; None: it may."""

        self._broker: BrokerConnection | None = None
        """The broker that is connected, for the status; None while there is none."""

        self._connection = 0
        """The number of the connection to the broker, which tells hellos of two connections apart."""

        self._hello_at = float("-inf")
        self._sent_inputs_since: float | None = None
        """The state of this device's inputs, as the last hello said it."""

        self._sent_kept = ""
        """Why this device keeps its bundle, as the last hello said."""

        self._heartbeat = HeartbeatTimer(config.heartbeat_s)
        self._operator_pin: down.Pinned | None = None

        self._introductions: dict[type[fields.Command], Callable[[Any], None]] = {
            down.Announce: self._on_announce,
            down.Welcome: self._on_welcome,
            down.Who: lambda message: self._hello(message.question),
        }
        """Commands that any coordinator of the federation may send."""

        self._work: dict[type[fields.Command], Callable[[Any], None]] = {
            down.TaskNotice: self._on_task,
            down.Job: self.jobs.on_job,
            down.Install: self.jobs.on_install,
            down.Cancel: self.jobs.on_cancel,
            down.Listen: self.downloads.listen,
            down.Located: self.downloads.located,
            down.Grant: self._on_grant,
            down.UploadUrls: self._on_upload_urls,
            down.Queued: self.uploads.queued,
            down.Ack: self.uploads.ack,
            down.Receipt: self.jobs.on_receipt,
            down.Renewed: self.certificate.receive,
            down.Pinned: self._on_pinned,
        }
        """Commands of the coordinator that has welcomed this agent last."""

    # --- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to listen; hello follows once connected."""
        self.config.state.mkdir(parents=True, exist_ok=True)
        self.transport.subscribe(*self.topics.for_agent(self.config.id))
        self.transport.start()
        self.disk.safely(self.tasks.bundles.note_start)
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
        self.disk.safely(self.tasks.bundles.note_stop)
        self.link.send(up.Bye())
        self.downloads.pause()
        self.uploads.pause()
        self.worker.close()
        self.transport.close()

    def step(self, timeout_s: float) -> bool:
        """Handle at most one event and whatever is due; True when there was an event."""
        event = self.transport.receive(timeout_s)
        if isinstance(event, Message):
            self._on_message(event)
        elif isinstance(event, Connected):
            self._on_connected(event)
        elif isinstance(event, Subscribed):
            self._on_subscribed(event)
        elif isinstance(event, Disconnected):
            self._on_disconnected(event)
        self.worker.collect()
        self._tick()
        return event is not None

    def idle_s(self) -> float:
        """Return how long `step` may wait for an event before something else is due."""
        return max(0.0, min(MAX_TICK_S, self.downloads.due_in()))

    # --- connection ------------------------------------------------------------------------------------------------

    def _on_connected(self, event: Connected) -> None:
        log.info("connected broker=%s", event.broker or self.config.broker.names)
        self._broker = event.connection_since(utc_text(self._now()))
        self._connection = event.connection
        self.certificate.connected()
        # Hello is sent as soon as an answer can be received, which is when the subscriptions are confirmed.
        self._hello_at = self.clock()
        self._begin_alone()

    def _on_subscribed(self, event: Subscribed) -> None:
        if self.topics.down(self.config.id) in event.filters:
            self._hello()
        self.disk.safely(partial(self.downloads.listening, event.filters))
        # Everything that a job needs may be on the disk from before a restart.
        self.disk.safely(self.jobs.go_on)

    def _on_disconnected(self, event: Disconnected) -> None:
        self.welcomed = False
        self._broker = None
        self.certificate.disconnected()
        self._silence.broker_away(event, self.config)
        self.membership.answered()

    # --- timers ----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Do what is due by time alone: transfers, new samples, and what the coordinator is to hear."""
        now = self.clock()
        # What needs the disk waits while that cannot be written.
        self.disk.tick(now)
        self.disk.safely(self._move_downloads)
        self.disk.safely(self.uploads.tick)
        self.disk.safely(self.jobs.give_up_late)
        self.disk.safely(self.jobs.switch_when_due)
        self.disk.safely(partial(self.tasks.bundles.note_life, now))
        self.disk.safely(partial(self.certificate.tick, is_welcomed=self.welcomed))
        self._learn_from_new_samples()
        # A hello is repeated after one of another version, and where another federation is followed from now on.
        if self._mismatch.is_due():
            self._hello()
        federation_and_epoch = self.membership.to_follow()
        if federation_and_epoch is not None:
            self._follow(*federation_and_epoch)
            self._begin_alone()
            self._hello()
        # A coordinator that has welcomed this agent hears from it regularly; before that, it is asked again.
        if not self.welcomed:
            self._repeat_hello(now)
        elif self._heartbeat.is_due(now, self.condition.name, is_busy=self.jobs.job is not None):
            self._beat(now)

    def _move_downloads(self) -> None:
        """Go on with downloads, and begin the work that has waited for a blob that came by HTTP."""
        if self.downloads.tick():
            self.jobs.go_on()

    def _learn_from_new_samples(self) -> None:
        """Have the worker fit the head on samples that were added, while it has nothing else to do."""
        if self.tasks.tier != "head" or self.jobs.is_working:
            return
        has_bundle = bool(self.tasks.bundles.bundle_id) or self.tasks.bundles.lacks_head
        if has_bundle and self._new_samples.is_due():
            self.jobs.collect(self._hello, self._new_samples.tried)

    def _repeat_hello(self, now: float) -> None:
        """Say hello again to a coordinator that does not answer, log what is waited for, and ask the broker once."""
        if not self._mismatch.reason and now - self._hello_at >= HELLO_AGAIN_S:
            self._hello()
        self._silence.tell(self.config)
        if self.refused_topics is not None and self._silence.asks_rules():
            self._ask_rules(self.refused_topics)
        if self.leave_broker is not None and self._silence.is_leave_due():
            self._silence.broker_left()
            self.leave_broker(f"no coordinator of federation '{self.config.federation}' answers here")

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

    def _begin_alone(self) -> None:
        """Note that no coordinator has welcomed this agent, and end the transfers with the last one."""
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
        facts = self.tasks.facts()
        self._sent_inputs_since = inputs_to_tell(self.config)
        if self._sent_inputs_since is not None:
            facts = {**facts, "inputs_since": self._sent_inputs_since}
        if self._fetcher is not None:
            facts = {**facts, fields.HTTP_BLOBS: True}
        if self._sender is not None:
            facts = {**facts, fields.HTTP_UPLOADS: True}
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
            facts=facts,
        )
        self.link.send(hello)

    def _beat(self, now: float) -> None:
        """Send a heartbeat, and say hello again where something has changed that only a hello says."""
        condition = self.condition.name
        self._heartbeat.note_sent(now, condition)
        beat = up.Heartbeat(condition=condition)
        job = self.jobs.job
        if job is not None:
            beat = beat.model_copy(update={"run": job.run, "round": job.round, "purpose": job.purpose})
        self.link.beat(beat)
        # Its owner has pinned or unpinned a bundle meanwhile, or its inputs have changed: only a hello says that.
        is_kept_otherwise = self.tasks.tier == "head" and self.tasks.bundles.kept() != self._sent_kept
        if is_kept_otherwise or inputs_to_tell(self.config) != self._sent_inputs_since:
            self._hello()

    # --- what arrives ----------------------------------------------------------------------------------------------

    def _on_message(self, event: Message) -> None:
        """Handle what has arrived on a topic; whatever is wrong with it costs that message alone."""
        # A coordinator never asks a broker to retain a message, so another client did.
        if event.retained:
            log.warning("retained_refused topic=%s; clear it at the broker", printable(event.topic))
            return
        try:
            self._dispatch(event.topic, event.payload)
        except ProtocolMismatch as error:
            self._on_mismatch(str(error))
        except HeadwaterError as error:
            log.warning("message_refused topic=%s reason=%s", printable(event.topic), printable(str(error)))
        except OSError as error:
            self.disk.failed(error, f"message_failed topic={printable(event.topic)}")
        except Exception:  # a bug: no single message may end the agent
            log.exception("message_broke topic=%s", printable(event.topic))

    def _dispatch(self, topic: str, payload: bytes) -> None:
        """Hand a payload to what reads it, by its topic; one on another topic is ignored.

        Raises:
            HeadwaterError: The payload is malformed.
            OSError: A chunk cannot be stored.
        """
        is_for_all = topic == self.topics.announce
        if is_for_all or topic == self.topics.down(self.config.id):
            if self.guard.lets_in(payload, to_all=is_for_all):
                self._on_words(payload)
        elif topic == self.topics.down_chunks(self.config.id) or topic.startswith(self._broadcasts):
            self._on_chunk(payload)

    def _on_words(self, payload: bytes) -> None:
        """Obey a command that is authentic, if it is well formed and new.

        Raises:
            HeadwaterError: It is malformed, or is not to be obeyed.
        """
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
        """Store a frame of a blob, and begin the work that has waited for the last one."""
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
        """Send the chunks of the update that the coordinator asks for."""
        self.uploads.grant(message)
        self.jobs.go_on()  # an update that was lost from the disk is computed again

    def _on_upload_urls(self, message: down.UploadUrls) -> None:
        """Send the update by HTTP, where the coordinator takes it so."""
        self.uploads.upload_urls(message)
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
        """Say hello to a coordinator that has started."""
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
        self._other_clock.heard(message.time)
        self._operator_pin = None  # where there is one, it follows
        self.membership.answered()
        self._silence.answered()
        self._mismatch.clear()
        self._heartbeat.welcomed(self.clock(), message.heartbeat_s)
        if is_news:
            federation = message.federation[:12]
            log.info("welcomed coordinator=%s federation=%s epoch=%d", message.software, federation, message.epoch)
            self.uploads.offer_again()
            self.disk.safely(self.jobs.forget_candidate)
            if self._lacks_release():
                log.info("idle agent=%s %s", self.config.id, WAITS_FOR_RELEASE)
        # This may be another coordinator than the one that was informed of a problem.
        problem = self.condition.problem
        if problem is not None:
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
            "broker": None if self._broker is None else self._broker.to_json(),
            "federation_id": membership.federation or None,
            "epoch": membership.epoch,
            "other_coordinator": membership.note(),
            "commands": {
                "authenticated": self.guard.is_on,
                "refused": self.guard.refused,
                "replayed": self.guard.replayed,
            },
            "job": None if job is None else {"run": run_name(job.run), "round": job.round, "rounds": job.rounds},
            "downloads": self.downloads.ways.to_json(),
            "uploads": self.uploads.ways.to_json(),
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
