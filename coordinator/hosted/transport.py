"""The coordinator's transport to its agents: hosted clients in child processes, all others at the broker."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from edge_agent.core.config import AgentConfig
from edge_agent.core.errors import DuplicateId, HeadwaterError, MessageError
from edge_agent.wire.inbox import Inbox
from edge_agent.wire.messages import codec, down, up
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import DEFAULT_MAX_PAYLOAD_BYTES, Event, Message, Traffic, Transport

from ..config import CoordinatorConfig
from ..processes.pipe import Frame, Pipe
from ..processes.supervisor import MAX_CRASHES, ChildProcess, Supervisor
from ..text import listed
from .placement import clients_of_processes, command_of_processes

log = logging.getLogger(__name__)

TASK_TOPIC = "task"
"""Topic of frames for the owner of a process alone: which client runs which task; null when it is done."""

WAITING_TOPIC = "waiting"
"""Topic of frames for the owner of a process alone: what all clients of the process wait for; empty: nothing."""

MAX_QUEUED_BYTES = 64 << 20
"""Most bytes queued for a process that does not receive; the rest is dropped, as a broker drops it."""

ClientTask = tuple[str, str, int, str]
"""Client, run, round and purpose."""


class CombinedTransport:
    """A `wire.transport.Transport`: hosted clients behind one transport, all other agents behind the other.

    The coordinator does not see the difference. The id of a hosted client is reserved: messages under it from the
    broker are ignored, and an agent that introduces itself with it is rejected.
    """

    def __init__(
        self,
        main: Transport,
        side: HostedTransport,
        topics: Topics,
        hosted: Collection[str],
        away: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """``side`` calls ``main.wake`` when it has a message. ``away``: hosted client -> why it is offline."""
        self._main = main
        self._side = side
        self._topics = topics
        self._hosted = frozenset(hosted)
        self.max_payload_bytes = min(main.max_payload_bytes, side.max_payload_bytes)
        self.traffic = main.traffic
        """That of the broker; messages of hosted clients do not use a network."""

        self._to_side = {topic for agent in hosted for topic in (topics.down(agent), topics.down_chunks(agent))}
        self._broadcasts = topics.broadcast("")
        self._is_sides_turn = False
        self._away = away
        self._duplicates = dict[str, str]()
        self._boot = secrets.token_hex(8)
        self._seq = 0

    def start(self) -> None:
        """Start both.

        Raises:
            BrokerAway: as the main transport's.
        """
        self._side.start()
        self._main.start()

    def close(self) -> None:
        """Close both."""
        self._side.close()
        self._main.close()

    def subscribe(self, *filters: str) -> None:
        """Subscribe at the broker; all messages of hosted clients arrive."""
        self._main.subscribe(*filters)

    def unsubscribe(self, *filters: str) -> None:
        """Unsubscribe at the broker."""
        self._main.unsubscribe(*filters)

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        """Publish to one hosted client, to the broker, or to both, by the topic.

        Raises:
            MessageError: the payload is larger than ``max_payload_bytes``.
        """
        if topic in self._to_side:
            self._side.publish(topic, payload)
            return
        if topic == self._topics.announce or topic.startswith(self._broadcasts):
            self._side.publish(topic, payload)
        self._main.publish(topic, payload, qos=qos, retain=retain)

    def receive(self, timeout_s: float) -> Event | None:
        """Return the next event of either side; they take turns, so that neither delays the other."""
        self._is_sides_turn = not self._is_sides_turn
        sources = (self._from_side, self._from_main) if self._is_sides_turn else (self._from_main, self._from_side)
        for source in sources:
            event = source(0)
            if event is not None:
                return event
        # Nothing has arrived. A message of the hosted clients wakes the wait at the broker's side.
        if timeout_s > 0:
            return self._from_main(timeout_s)
        return None

    @property
    def unread_s(self) -> float:
        """Seconds that the oldest event has waited, at the broker's side or that of the hosted clients."""
        return max(self._main.unread_s, self._side.unread_s)

    def wake(self) -> None:
        """Make a waiting `receive` return at once."""
        self._main.wake()

    def notes(self) -> dict[str, tuple[str, ...]]:
        """Return the notes of hosted clients for the status: why one is offline, and who else uses its id."""
        away = self._away()
        notes = {}
        for name in self._hosted:
            lines = [line for line in (away.get(name), self._duplicates.get(name)) if line]
            if lines:
                notes[name] = tuple(lines)
        return notes

    def _from_side(self, timeout_s: float) -> Event | None:
        """Return the next message of a hosted client; connections to its own process are no events here."""
        while True:
            event = self._side.receive(timeout_s)
            if event is None or isinstance(event, Message):
                return event

    def _from_main(self, timeout_s: float) -> Event | None:
        """Return the next event at the broker; None for a message of an agent that uses the id of a hosted client."""
        event = self._main.receive(timeout_s)
        if isinstance(event, Message) and self._is_duplicate(event):
            return None
        return event

    def _is_duplicate(self, message: Message) -> bool:
        """Return whether an agent at the broker uses the id of a hosted client; reject it if it says hello."""
        try:
            agent, kind = self._topics.sender(message.topic)
        except MessageError:
            return False  # rejected by the coordinator, with a reason
        if agent not in self._hosted:
            return False
        if agent not in self._duplicates:
            log.warning("duplicate_id agent=%s is hosted here and was heard at the broker; give it another id", agent)
            at = datetime.now(timezone.utc).isoformat(timespec="seconds")
            self._duplicates[agent] = (
                f"an agent at the broker has the id '{agent}', too, was first heard at {at}, and is rejected: this "
                "client is hosted here; give one of them another id"
            )
        if kind == "up" and not message.retained:
            self._reject_hello(agent, message.payload)
        return True

    def _reject_hello(self, agent: str, payload: bytes) -> None:
        """Tell an agent that says hello that its id is in use; other messages get no answer."""
        try:
            hello = codec.parse_from_agent(payload)
        except HeadwaterError:
            return
        if not isinstance(hello, up.Hello):
            return
        self._seq += 1
        why = (
            f"the id '{agent}' is in use: the coordinator itself hosts a client of that name, so this agent (start "
            f"{hello.boot}) cannot use it; give one of them another id in its configuration"
        )
        rejection = down.Refused(
            boot=self._boot, seq=self._seq, error=DuplicateId.__name__, message=why, whom=hello.boot
        )
        self._main.publish(self._topics.down(agent), codec.encode(rejection))


class HostedTransport:
    """Messages to and from clients in child processes, which are restarted when they exit."""

    def __init__(
        self, groups: Sequence[Sequence[AgentConfig]], command: Sequence[str], folder: Path, wake: Callable[[], None]
    ) -> None:
        """Prepare the processes; `start` starts them.

        Args:
            groups: The configurations of the clients of each process.
            command: The command of each process.
            folder: The folder for their logs.
            wake: Called when there is a message to receive.
        """
        self.max_payload_bytes = DEFAULT_MAX_PAYLOAD_BYTES
        self.traffic = Traffic()
        self._topics = Topics(groups[0][0].federation)
        self._wake = wake
        self._inbox = Inbox()
        self._is_called = False
        self.processes = [
            HostedProcess(number, configs, command, folder, self._deliver) for number, configs in enumerate(groups)
        ]
        self._process_of = dict[str, HostedProcess]()
        for process in self.processes:
            for config in process.configs:
                self._process_of[self._topics.down(config.id)] = process
                self._process_of[self._topics.down_chunks(config.id)] = process

    @classmethod
    def of(cls, config: CoordinatorConfig, wake: Callable[[], None]) -> HostedTransport:
        """Return the transport to the hosted clients of a configuration; see `placement` for who is where."""
        return cls(clients_of_processes(config), command_of_processes(config), config.state / "hosted", wake)

    def start(self) -> None:
        """Start the processes; none is waited for."""
        for process in self.processes:
            process.supervisor.start()

    def close(self) -> None:
        """Kill the processes; the state of their clients is on disk."""
        for process in self.processes:
            process.supervisor.stop()

    def publish(self, topic: str, payload: bytes) -> None:
        """Publish to the process of the client whose topic it is, or to all."""
        receiver = self._process_of.get(topic)
        receivers = self.processes if receiver is None else [receiver]
        for process in receivers:
            if not process.send(topic, payload):
                self.traffic.dropped += 1

    def receive(self, timeout_s: float) -> Event | None:  # noqa: ARG002 - `wake` is called
        """Return the next message, if there is one; never wait."""
        self._is_called = False  # before the queue is read: a message that is added afterwards calls again
        try:
            return self._inbox.get(0)
        except queue.Empty:
            return None

    @property
    def unread_s(self) -> float:
        """Seconds that the oldest message has waited for `receive`; 0 where none waits."""
        return self._inbox.oldest_s

    def away(self) -> dict[str, str]:
        """Return why clients are offline or wait, for those whose process starts, restarts or waits."""
        reasons = dict[str, str]()
        for process in self.processes:
            reasons.update(process.away())
        return reasons

    def _deliver(self, message: Message) -> None:
        """Queue a message of a client, and wake the coordinator; called in the threads of the processes."""
        if not self._inbox.put_message(message):
            self.traffic.dropped += 1
        if not self._is_called:  # one call is enough for all messages that wait
            self._is_called = True
            self._wake()


class HostedProcess:
    """One supervised process and its clients."""

    def __init__(
        self,
        number: int,
        configs: Sequence[AgentConfig],
        command: Sequence[str],
        folder: Path,
        deliver: Callable[[Message], None],
    ) -> None:
        self.number = number
        self.configs = configs
        self._command = command
        self._deliver = deliver
        self._topics = Topics(configs[0].federation)
        self._log = folder / f"process-{number}.log"
        self._presence = {self._topics.presence(config.id) for config in configs}
        self._boots: dict[str, str] = {}
        self._running: ClientTask | None = None
        self._crashes = Counter[ClientTask]()
        self._problem = "its process is starting"
        self._waits_for = ""
        self._outgoing = _SendQueue()
        self.supervisor = Supervisor(f"hosted-{number}", self._spawn, self._serve, self._on_exit)

    @property
    def pid(self) -> int | None:
        """The id of the process that runs now; None while there is none."""
        child = self.supervisor.child
        return None if child is None else child.pid

    def away(self) -> dict[str, str]:
        """Return why clients are offline, for those that have not reported their presence, or what they wait for."""
        online = self._boots.copy()
        waits_for = self._waits_for
        reasons = dict[str, str]()
        for config in self.configs:
            if self._topics.presence(config.id) not in online:
                reasons[config.id] = f"{waits_for or self._problem}; log: {self._log}"
            elif waits_for:
                reasons[config.id] = f"{waits_for}; log: {self._log}"
        return reasons

    def send(self, topic: str, payload: bytes) -> bool:
        """Queue a message; return False when the process does not receive and the queue is full."""
        return self._outgoing.put(topic, payload)

    # --- in the supervisor's thread --------------------------------------------------------------------------------

    def _spawn(self) -> ChildProcess:
        """Start the process of these clients."""
        # The first message must be the configuration: others are queued only once that is.
        outgoing = _SendQueue()
        outgoing.put("configure", json.dumps([config.model_dump(mode="json") for config in self.configs]).encode())
        self._outgoing = outgoing
        child = ChildProcess(self._command, self._log)
        clients = listed(tuple(config.id for config in self.configs))
        log.info("hosted_process_started number=%d pid=%d clients=%s", self.number, child.pid, clients)
        return child

    def _serve(self, child: ChildProcess) -> None:
        """Receive what the process sends until it ends, while a thread sends what is queued for it."""
        outgoing = self._outgoing
        writer = threading.Thread(target=outgoing.write_to, args=(child.pipe,), daemon=True)
        writer.start()
        try:
            while True:
                self._on_frame(child.pipe.receive())
        except (EOFError, OSError):
            return
        except Exception:
            child.kill()
            raise
        finally:
            child.wait()
            outgoing.close()
            writer.join()

    def _on_frame(self, frame: Frame) -> None:
        """Deliver a message of a client, or note which task runs, so that a crash has somebody to blame."""
        if frame.topic == TASK_TOPIC:
            client, task = json.loads(frame.payload)
            if task is not None:
                self._running = (client, *task)
            elif self._running is not None:  # it is done, however often it crashed before
                self._crashes.pop(self._running, None)
                self._running = None
            return
        if frame.topic == WAITING_TOPIC:
            self._waits_for = frame.payload.decode(errors="replace")
            return
        if frame.topic in self._presence:
            self._boots[frame.topic] = frame.payload.decode().partition(" ")[2]
        self._deliver(Message(frame.topic, frame.payload))

    def _on_exit(self, reason: str, pause_s: float) -> None:
        """Report for the clients that they are offline, and that a task has failed."""
        later = f" in {pause_s:.0f} s" if pause_s >= 1 else ""
        self._problem = f"its process exited ({reason}) and is restarted{later}"
        self._waits_for = ""
        log.warning("hosted_process_exited number=%d reason=%s restart_in_s=%.1f", self.number, reason, pause_s)
        for topic, boot in self._boots.items():
            self._deliver(Message(topic, f"offline {boot}".encode()))
        self._boots.clear()
        task = self._running
        self._running = None
        if task is None:
            return
        self._crashes[task] += 1
        if self._crashes[task] < MAX_CRASHES:
            return
        del self._crashes[task]
        client, run, number, _ = task
        message = (
            f"the process of hosted client '{client}' crashed {MAX_CRASHES} times in round {number}, the last time "
            f"with {reason}"[:1800]
            + "; give it more memory, or a smaller batch_size"
        )
        fault = up.Fault(error="TrainingFailed", message=message, run=run, round=number)
        self._deliver(Message(self._topics.up(client), codec.encode(fault)))


class _SendQueue:
    """Messages to a process; bounded, and written by its own thread."""

    def __init__(self) -> None:
        self._waiting = queue.SimpleQueue[tuple[str, bytes] | None]()
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, topic: str, payload: bytes) -> bool:
        with self._lock:
            if self._bytes + len(payload) > MAX_QUEUED_BYTES:
                return False
            self._bytes += len(payload)
        self._waiting.put((topic, bytes(payload)))
        return True

    def close(self) -> None:
        self._waiting.put(None)

    def write_to(self, pipe: Pipe) -> None:
        with contextlib.suppress(OSError):  # the process has exited, which its reader notices, too
            while True:
                item = self._waiting.get()
                if item is None:
                    return
                topic, payload = item
                pipe.send(topic, payload)
                with self._lock:
                    self._bytes -= len(payload)
