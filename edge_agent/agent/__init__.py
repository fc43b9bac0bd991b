"""An agent's life: connect, say hello, (get work, do it, send the result) again and again, install bundles, go on.

One loop handles events and timers; long work runs beside it. What was computed is kept on disk until the coordinator
has said in its own words that it has it. Everything is said again after a reconnect, so no message has to arrive.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable

from .. import __version__
from ..config import AgentConfig
from ..errors import ChunkError, DuplicateId, HeadwaterError, MessageError, ProtocolMismatch
from ..store import write_atomic
from ..task import Task
from ..wire import messages as wire
from ..wire.cache import BlobCache
from ..wire.chunks import decode_frame
from ..wire.topics import Topics
from ..wire.transport import Connected, Disconnected, Message, Subscribed, Transport, Will
from ..work import InlineWorker, Worker
from .condition import Condition, disk_error
from .disk import Disk
from .downloads import Downloads
from .duties import Duties
from .jobs import Jobs
from .uploads import Uploads

__all__ = ["Agent", "will_of"]

log = logging.getLogger(__name__)

HELLO_AGAIN_S = 2.0
HELLO_APART_S = 0.5
MAX_TICK_S = 0.5
ALONE_S, ALONE_AGAIN_S = 10.0, 60.0
"""Time without an answer to hello after which the agent says so, and after which it says so again."""
_FINAL = {error.__name__: error for error in (ProtocolMismatch, DuplicateId)}
"""Refusals that no later try can change."""


def will_of(config: AgentConfig, boot: str) -> Will:
    """What the broker says of this agent when it vanishes."""
    return Will(Topics(config.federation).presence(config.id), f"offline {boot}".encode())


class Agent:
    """One device's agent. `start`, then `step` again and again (or `serve`), then `close`."""

    def __init__(
        self,
        config: AgentConfig,
        transport: Transport,
        duties: Duties,
        *,
        clock: Callable[[], float] = time.monotonic,
        worker: Worker | None = None,
        boot: str | None = None,
    ) -> None:
        self.config, self.transport, self.duties, self.clock = config, transport, duties, clock
        self.worker = worker or InlineWorker()
        self.boot = boot or secrets.token_hex(8)
        self.topics = Topics(config.federation)
        self._broadcasts = self.topics.broadcast("")
        self.cache = BlobCache(config.state / "cache", config.cache_bytes)
        self.downloads = Downloads(self.cache, self._send, self._listen, self._unlisten, clock)
        self.uploads = Uploads(duties.outbox, self._send, self._publish_chunk, clock)
        self.condition = Condition()
        self.jobs = Jobs(duties, self.cache, self.downloads, self.uploads, self.worker, self._send, self.condition)
        self.disk = Disk(config.state, self.condition, self.jobs, self._send, self._hello)
        self.epoch = -1
        self.welcomed = False
        self.refused: HeadwaterError | None = None
        self._seq = 0
        self._beat_at = self._hello_at = float("-inf")
        self._alone_since: float | None = None
        self._alone_said_at = 0.0
        self._away = ""
        self._told_condition = self.condition.name
        self._checked: Task | None = None

    # --- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen; hello follows once connected."""
        self.config.state.mkdir(parents=True, exist_ok=True)
        self.transport.subscribe(*self.topics.for_agent(self.config.id))
        self.transport.start()
        self.jobs.refit(self._hello)

    def serve(self, stop: threading.Event) -> None:
        """`step` until told to stop.

        Raises:
            ProtocolMismatch: the coordinator speaks another protocol and says so.
            DuplicateId: another agent with this id is alive.
        """
        while not stop.is_set():
            self.step(self.idle_s())
            self.raise_if_refused()

    def raise_if_refused(self) -> None:
        """Return quietly unless the coordinator will never take this agent.

        Raises:
            ProtocolMismatch: the coordinator speaks another protocol.
            DuplicateId: another agent with this id is alive.
        """
        if self.refused is not None:
            raise self.refused

    def close(self) -> None:
        """Say goodbye; downloads and the outbox stay on disk."""
        self._send(wire.Bye())
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
            self._hello_at = self.clock()  # said as soon as an answer can be heard
            self._begin_alone()
        elif isinstance(event, Subscribed):
            self._on_subscribed(event.filters)
        elif isinstance(event, Disconnected):
            self.welcomed, self._alone_since, self._away = False, None, event.reason
        self.worker.collect()
        self._tick()
        return event is not None

    def idle_s(self) -> float:
        """How long `step` may wait for an event before something else is due."""
        return max(0.0, min(MAX_TICK_S, self.downloads.due_in()))

    # --- timers ----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self.clock()
        self.disk.tick(now)
        self.disk.safely(self.downloads.tick)
        self.disk.safely(self.uploads.tick)
        if not self.welcomed:
            if now - self._hello_at >= HELLO_AGAIN_S:
                self._hello()
            self._say_alone(now)
        elif now - self._beat_at >= self.config.heartbeat_s or self.condition.name != self._told_condition:
            self._beat()

    def on_os_error(self, error: OSError, what: str) -> None:
        """Something could not be read or written: a full disk stalls the agent, which resumes by itself."""
        self.disk.failed(error, what)

    def _begin_alone(self) -> None:
        self.welcomed = False
        self._alone_since = self._alone_said_at = self.clock()

    def _say_alone(self, now: float) -> None:
        """Log that nobody answers: after a while, and then from time to time."""
        since = self._alone_since
        pause = ALONE_S if since == self._alone_said_at else ALONE_AGAIN_S
        if since is not None and now - self._alone_said_at >= pause:
            self._alone_said_at = now
            log.warning("unanswered seconds=%.0f %s", now - since, self._waits_for())

    def _waits_for(self) -> str | None:
        """For whom and until when, in words; None once welcomed."""
        if self.welcomed:
            return None
        config = self.config
        if self._alone_since is None:
            why = f" ({self._away})" if self._away else ""
            return f"waits for the broker {config.broker.url}{why}; tries until it is stopped"
        if config.broker.user not in {None, config.id}:
            return (
                f"no coordinator answers: this agent's id is '{config.id}', its MQTT user '{config.broker.user}', and "
                "a broker with users lets an agent speak and listen under its own id alone; change id or broker.user. "
                "'edge-agent doctor --config FILE' tries the broker's rules"
            )
        return (
            f"no coordinator of federation '{config.federation}' answers at {config.broker.url}; says hello every "
            f"{HELLO_AGAIN_S:.0f} s until one does or the agent is stopped. Does 'headwater serve' run, with the same "
            "federation and broker? 'edge-agent doctor --config FILE' tries login and topics"
        )

    def _hello(self, answers: str = "") -> None:
        if self.refused is not None:
            return
        self._hello_at = self.clock()
        presence = f"online {self.boot}".encode()
        self.transport.publish(self.topics.presence(self.config.id), presence)
        hello = wire.Hello(
            software=__version__,
            tier=self.duties.tier,
            samples=self.duties.samples,
            bundle_id=self.duties.bundle_id,
            condition=self.condition.name,
            answers=answers,
            facts=self.duties.facts(),
        )
        self._send(hello)

    def _beat(self) -> None:
        self._beat_at = self.clock()
        self._told_condition = self.condition.name
        busy = self.jobs.job
        run, number = (busy.run, busy.round) if busy else ("", 0)
        beat = wire.Heartbeat(run=run, round=number, condition=self._told_condition)
        self.transport.publish(self.topics.heartbeat(self.config.id), wire.encode(self._stamped(beat)), qos=0)

    # --- what arrives ----------------------------------------------------------------------------------------------

    def _on_subscribed(self, filters: tuple[str, ...]) -> None:
        if self.topics.down(self.config.id) in filters:
            self._hello()
        self.downloads.listening(filters)

    def _on_message(self, event: Message) -> None:
        if event.retained:  # a coordinator never asks a broker to keep anything, so somebody else did
            log.warning("retained_refused topic=%s; clear it at the broker", event.topic)
            return
        try:
            if event.topic in {self.topics.down(self.config.id), self.topics.announce}:
                self._on_words(event.payload)
            elif event.topic == self.topics.down_chunks(self.config.id) or event.topic.startswith(self._broadcasts):
                self._on_chunk(event.payload)
        except ProtocolMismatch as error:
            self._mismatch(error)
        except HeadwaterError as error:
            log.warning("message_refused topic=%s reason=%s", event.topic, error)
        except OSError as error:
            self.on_os_error(error, f"message_failed topic={event.topic}")
        except Exception:  # a mistake of ours: no single message may end the agent
            log.exception("message_broke topic=%s", event.topic)

    def _on_words(self, payload: bytes) -> None:
        try:
            message = wire.parse_from_coordinator(payload)
        except MessageError as error:
            named = wire.named_job(payload)
            if named is not None:  # of a newer coordinator, say: it need not wait for us
                self._send(self.condition.note("work", error).to_coordinator(*named))
            raise
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

    def _on_control(self, message: wire.Control) -> None:
        if isinstance(message, wire.Announce):
            self._on_announce(message)
        elif isinstance(message, wire.Welcome):
            self._on_welcome(message)
        elif isinstance(message, wire.Who):
            self._hello(message.question)
        elif isinstance(message, wire.Refused):
            self._on_refused(message)
        else:
            self._on_work(message)

    def _on_work(self, message: wire.Control) -> None:
        if self.condition.is_stalled and isinstance(message, wire.Job | wire.Install):
            log.debug("left type=%s run=%s: the disk cannot be written; it is asked again", message.type, message.run)
        elif isinstance(message, wire.TaskNotice):
            self._on_task(message.task)
        elif isinstance(message, wire.Job):
            self.jobs.on_job(message)
        elif isinstance(message, wire.Install):
            self.jobs.on_install(message)
        elif isinstance(message, wire.Cancel):
            self.jobs.on_cancel(message)
        elif isinstance(message, wire.Grant):
            self.uploads.grant(message)
            self.jobs.go_on()  # an update that is gone from the disk is made again
        elif isinstance(message, wire.Ack):
            self.uploads.ack(message)
        elif isinstance(message, wire.Receipt):
            self.jobs.on_receipt(message)
        else:
            log.warning("coordinator_fault message=%s", message)

    def _on_task(self, task: Task) -> None:
        """Look whether data and head of this device fit, unless that is known."""
        if task == self._checked and self.condition.name == "ok":
            return

        def done(_: object, error: BaseException | None) -> None:
            self._checked = task
            if error is None:
                self.condition.clear("data")
                return
            problem = self.condition.note("data", error)
            log.error("data_do_not_fit error=%s message=%s", problem.error, problem.message)
            self._send(problem.to_coordinator())

        self.worker.submit("check", lambda: self.duties.check(task), done)

    def _on_announce(self, message: wire.Announce) -> None:
        if message.epoch < self.epoch:
            log.warning("announcement_refused epoch=%d newer=%d", message.epoch, self.epoch)
        elif message.epoch > self.epoch >= 0:  # whatever has just been said was said to its predecessor
            self._begin_alone()
            self._hello()
        elif not self.welcomed and self.clock() - self._hello_at >= HELLO_APART_S:  # else it has just been said
            self._hello()

    def _on_welcome(self, message: wire.Welcome) -> None:
        if message.epoch < self.epoch:
            raise MessageError(f"welcome of epoch {message.epoch}, a coordinator of epoch {self.epoch} has been heard")
        is_news = not self.welcomed or message.epoch > self.epoch
        self.welcomed, self.epoch = True, message.epoch
        self._beat_at = self.clock()
        if is_news:
            log.info("welcomed coordinator=%s epoch=%d", message.software, message.epoch)
            self.uploads.offer_again()
        if (problem := self.condition.problem) is not None:  # it may be another coordinator than the one that heard
            self._send(problem.to_coordinator())

    def _on_refused(self, message: wire.Refused) -> None:
        if message.whom not in {"", self.boot}:
            log.warning("duplicate_id another agent with the id '%s' was refused; give it another id", self.config.id)
            return
        log.error("refused error=%s message=%s", message.error, message.message)
        if message.error in _FINAL:
            self.refused = _FINAL[message.error](message.message)

    def _mismatch(self, error: ProtocolMismatch) -> None:
        spoken = f"agent {__version__} speaks protocol {wire.OLDEST_PROTOCOL}..{wire.PROTOCOL}"
        self.refused = ProtocolMismatch(f"{spoken}: {error}")
        log.error("protocol_mismatch reason=%s", self.refused)

    # --- sending ---------------------------------------------------------------------------------------------------

    def _stamped(self, message: wire.Control) -> wire.Control:
        self._seq += 1
        return message.model_copy(update={"boot": self.boot, "seq": self._seq})

    def _send(self, message: wire.Control) -> None:
        self.transport.publish(self.topics.up(self.config.id), wire.encode(self._stamped(message)))

    def _publish_chunk(self, frame: bytes) -> None:
        self.transport.publish(self.topics.up_chunks(self.config.id), frame)

    def _listen(self, digest: str) -> None:
        self.transport.subscribe(self.topics.broadcast(digest))

    def _unlisten(self, digest: str) -> None:
        self.transport.unsubscribe(self.topics.broadcast(digest))

    def write_status(self) -> None:
        """Keep status.json fresh for ``edge-agent status`` (a cache: not synced)."""
        job, problem = self.jobs.job, self.condition.problem
        status = {
            "id": self.config.id,
            "tier": self.duties.tier,
            "welcomed": self.welcomed,
            "waits_for": self._waits_for(),
            "job": None if job is None else {"run": job.run, "round": job.round, "rounds": job.rounds},
            "working": self.jobs.is_working,
            "bundle_id": self.duties.bundle_id,
            "rolled_back": self.duties.rolled_back or None,
            "condition": self.condition.name,
            "fault": None if problem is None else problem.as_json(),
        }
        write_atomic(self.config.state / "status.json", json.dumps(status).encode(), durable=False)
