"""Hosted clients as the coordinator sees them: a transport, behind which processes work and are started again."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_agent import capabilities
from edge_agent.config import AgentConfig
from edge_agent.errors import cause
from edge_agent.wire import messages as wire
from edge_agent.wire.memory import DEFAULT_MAX_PAYLOAD_BYTES
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Event, Message, Traffic

from ..config import CoordinatorConfig
from ..processes.launch import command, wait_before_restart
from ..text import listed
from .ending import cause_of_death, exit_code
from .line import AT_WORK, Line

log = logging.getLogger(__name__)

COMMAND = command("coordinator.hosted.process")
MOST_DEATHS = 3
"""How often a process may die at one client's job before the client is given up: memory that is short stays short."""

MOST_WAITING_BYTES = 64 << 20
"""What a process that does not listen is told at most; the rest is dropped, as a broker drops it."""

LONG_LIFE_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 0.05, 30.0

Work = tuple[str, str, int, str]
"""Client, run, round and purpose of its job."""


class Hosts:
    """The side of a `Joined` transport where hosted clients are. ``wake`` is called when there is something new."""

    def __init__(self, configs: Sequence[AgentConfig], processes: int, folder: Path, wake: Callable[[], None]) -> None:
        """``folder``: for the words of the processes, which are dealt the clients in turn."""
        self.max_payload_bytes, self.traffic = DEFAULT_MAX_PAYLOAD_BYTES, Traffic()
        self._topics, self._wake = Topics(configs[0].federation), wake
        self._events, self._is_called = queue.SimpleQueue[Message](), False
        self.processes = [
            HostedProcess(number, configs[number::processes], folder, self._deliver)
            for number in range(min(processes, len(configs)))
        ]
        self._process_of = {
            topic: process
            for process in self.processes
            for config in process.configs
            for topic in (self._topics.down(config.id), self._topics.down_chunks(config.id))
        }

    @classmethod
    def of(cls, config: CoordinatorConfig, wake: Callable[[], None]) -> Hosts:
        """Those that a configuration names."""
        agents = [client.agent(config.federation, config.state, config.round.lease_s) for client in config.hosted]
        return cls(agents, config.hosted_processes or _suitable(agents), config.state / "hosted", wake)

    def start(self) -> None:
        """Start the processes; none is waited for."""
        for process in self.processes:
            process.start()

    def close(self) -> None:
        """End them at once; what their clients have kept is on disk."""
        for process in self.processes:
            process.end()

    def subscribe(self, *filters: str) -> None:
        """Nothing to do: a process says everything to its owner."""

    def unsubscribe(self, *filters: str) -> None:
        """Nothing to do."""

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:  # noqa: ARG002 - one quality here
        """To the process whose client it concerns, or to all."""
        one = self._process_of.get(topic)
        for process in self.processes if one is None else (one,):
            if not process.tell(topic, payload):
                self.traffic.dropped += 1

    def receive(self, timeout_s: float) -> Event | None:  # noqa: ARG002 - whoever waits is woken
        """What has been said, if anything has; never waits."""
        self._is_called = False  # before looking: whoever puts something in afterwards calls again
        try:
            return self._events.get_nowait()
        except queue.Empty:
            return None

    def wake(self) -> None:
        """Nobody waits here."""

    def away(self) -> dict[str, str]:
        """Client -> why it has not been heard, for those whose process has yet to come, or to come back."""
        return {client: why for process in self.processes for client, why in process.away().items()}

    def _deliver(self, message: Message) -> None:
        self._events.put(message)
        if not self._is_called:  # one call is enough for all that wait to be heard
            self._is_called = True
            self._wake()


class HostedProcess:
    """One process, its clients, and a thread that listens to it and starts it again when it dies."""

    def __init__(
        self, number: int, configs: Sequence[AgentConfig], folder: Path, deliver: Callable[[Message], None]
    ) -> None:
        self.number, self.configs = number, configs
        self._deliver, self._topics = deliver, Topics(configs[0].federation)
        self._log = folder / f"process-{number}.log"
        self._presence = {self._topics.presence(config.id) for config in configs}
        self._boots: dict[str, str] = {}
        self._at_work: Work | None = None
        self._deaths = Counter[Work]()
        self._trouble = "its process is starting"
        self._code = 0
        self._outgoing = _Outgoing()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping, self._starting = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"hosted-{number}", daemon=True)

    @property
    def pid(self) -> int | None:
        """Of the process that is there now."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it."""
        self._thread.start()

    def away(self) -> dict[str, str]:
        """Client -> what keeps it away, for those that have not said that they are there."""
        here = self._boots.copy()
        absent = (config.id for config in self.configs if self._topics.presence(config.id) not in here)
        return dict.fromkeys(absent, f"{self._trouble}; its words: {self._log}")

    def tell(self, topic: str, payload: bytes) -> bool:
        """Say something, without waiting for it to be heard; False when it does not listen."""
        return self._outgoing.put(topic, payload)

    def end(self) -> None:
        """Make it vanish, whatever it does."""
        with self._starting:
            self._stopping.set()
            if self._process is not None:
                self._process.kill()
        if self._thread.is_alive():
            self._thread.join()

    # --- its thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        short_lives = 0
        while not self._stopping.is_set():
            began, self._code = time.monotonic(), 0
            why = self._lived()
            if self._stopping.is_set():
                return
            short_lives = 0 if time.monotonic() - began > LONG_LIFE_S else short_lives + 1
            pause_s = _pause_s(short_lives)
            self._trouble = f"its process ended, {why}; it is started again{_in(pause_s)}"
            log.warning("hosted_process_died number=%d of=%s again_in_s=%.1f", self.number, why, pause_s)
            try:
                self._bury(why)
            except Exception:
                log.exception("hosted_process_not_buried number=%d", self.number)
            wait_before_restart(self._stopping, self._code, pause_s)

    def _lived(self) -> str:
        """What one process died of, or why it could not be started; this thread outlives whatever happens."""
        outgoing = _Outgoing()
        try:
            process = self._begin(outgoing)
            return "" if process is None else self._listen_to(process, outgoing)
        except Exception as error:  # no memory, no more files, a full disk: all of that may pass
            if not isinstance(error, OSError):
                log.exception("hosted_process_lost number=%d", self.number)
            return f"{type(error).__name__}: {cause(error)}"

    def _begin(self, outgoing: _Outgoing) -> subprocess.Popen[bytes] | None:
        """A new process that is told who is in it; None when we are to stop."""
        outgoing.put("begin", json.dumps([config.model_dump(mode="json") for config in self.configs]).encode())
        self._outgoing = outgoing  # only now: it takes the first thing that it is told for its configuration
        pipe = subprocess.PIPE
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._starting, self._log.open("wb") as words:
            if self._stopping.is_set():
                return None
            self._process = process = subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, stderr=words)
        clients = listed(tuple(config.id for config in self.configs))
        log.info("hosted_process_started number=%d pid=%d clients=%s", self.number, process.pid, clients)
        return process

    def _listen_to(self, process: subprocess.Popen[bytes], outgoing: _Outgoing) -> str:
        """All that it says, to its end; what it died of."""
        if process.stdin is None or process.stdout is None:
            return "no pipes"
        line = Line(process.stdout, process.stdin)
        writer = threading.Thread(target=outgoing.write_to, args=(line,), daemon=True)
        why = ""
        try:
            writer.start()
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._heard(*line.receive())
        except Exception as error:  # words that are none, or a thread too many: it is not to be lived with
            log.exception("hosted_process_lost number=%d", self.number)
            why = f"{type(error).__name__}: {cause(error)}; "
            process.kill()
        code = self._code = exit_code(process)
        outgoing.close()
        if writer.ident is not None:
            writer.join()
        line.close()
        return why + cause_of_death(code, self._log)

    def _heard(self, topic: str, payload: bytes) -> None:
        if topic == AT_WORK:
            self._note_work(payload)
            return
        if topic in self._presence:
            self._boots[topic] = payload.decode().partition(" ")[2]
        self._deliver(Message(topic, payload))

    def _note_work(self, payload: bytes) -> None:
        client, job = json.loads(payload)
        if job is not None:
            self._at_work = (client, *job)
        elif self._at_work is not None:
            self._deaths.pop(self._at_work, None)
            self._at_work = None

    def _bury(self, why: str) -> None:
        """Say what the clients cannot say any more: that they are gone, and that one cannot do its job."""
        for topic, boot in self._boots.items():
            self._deliver(Message(topic, f"offline {boot}".encode()))
        self._boots.clear()
        work, self._at_work = self._at_work, None
        if work is None:
            return
        self._deaths[work] += 1
        if self._deaths[work] >= MOST_DEATHS:
            del self._deaths[work]
            client, run, number, _ = work
            fault = wire.Fault(error="TrainingFailed", message=_given_up(client, number, why), run=run, round=number)
            self._deliver(Message(self._topics.up(client), wire.encode(fault)))


class _Outgoing:
    """What is still to be said to a process; bounded, and written by a thread of its own."""

    def __init__(self) -> None:
        self._waiting = queue.SimpleQueue[tuple[str, bytes] | None]()
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, topic: str, payload: bytes) -> bool:
        with self._lock:
            if self._bytes + len(payload) > MOST_WAITING_BYTES:
                return False
            self._bytes += len(payload)
        self._waiting.put((topic, bytes(payload)))
        return True

    def close(self) -> None:
        self._waiting.put(None)

    def write_to(self, line: Line) -> None:
        with contextlib.suppress(OSError, ValueError):  # it is gone, which its reader notices, too
            while (item := self._waiting.get()) is not None:
                line.send(*item)
                with self._lock:
                    self._bytes -= len(item[1])


def _suitable(agents: Sequence[AgentConfig]) -> int:
    """One process for each core; a GPU is one, and each process would need a context of its own there."""
    able = capabilities.find()
    uses_gpu = able.accelerators and any(agent.training.device != "cpu" for agent in agents)
    return 1 if uses_gpu else able.cores


def _pause_s(short_lives: int) -> float:
    """How long to wait before another try; the first one is made at once."""
    return 0.0 if short_lives < 2 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(short_lives, 20))


def _in(pause_s: float) -> str:
    return f" {pause_s:.0f} s later" if pause_s >= 1 else ""


def _given_up(client: str, number: int, why: str) -> str:
    return (
        f"the process of hosted client '{client}' died {MOST_DEATHS} times in round {number}, at last of {why}"[:1800]
        + "; give it more memory, or a smaller batch_size"
    )
