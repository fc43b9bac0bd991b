"""All clients of a simulation behind one connection: they receive jobs, have an engine run them, and reply.

They speak the protocol of devices over the transport in memory. What they receive is passed as whole blobs instead of
chunks; what they send takes the same way as from devices.
"""

from __future__ import annotations

import heapq
import logging
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from edge_agent import __version__
from edge_agent.core.errors import RunFailed, StateError, TrainingFailed
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.blobs.flow import Pace, Sending
from edge_agent.wire.memory import MemoryBroker
from edge_agent.wire.messages import codec, down, fields, up
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Message

from ..fleet.downloads import Distributor
from ..fleet.roster import Roster
from .client_tasks import NOT_KEPT
from .engines.base import Done, Engine, Work

log = logging.getLogger(__name__)

BOOT = "simulated"

IN_ROUNDS = ("train", "contribute")
"""The purposes of jobs whose updates a round collects."""

RESUMABLE = "; --resume tries that again"
"""The end of error messages after which the run can be resumed."""


@dataclass(frozen=True)
class CoordinatorServices:
    """What clients use of the coordinator in their process, where devices would send messages.

    Attributes:
        topics: Topics of the federation.
        distributor: Hands out the blobs of jobs as a whole.
        roster: Registers clients.
    """

    topics: Topics
    distributor: Distributor
    roster: Roster


@dataclass(frozen=True)
class Population:
    """The clients of a simulation.

    Attributes:
        samples: Client -> number of its training samples.
        new_clients: Those that never train.
        head_clients: Those without torch.
        dropouts: Who drops out of which round; None: nobody does.
    """

    samples: Mapping[str, int]
    new_clients: Collection[str]
    head_clients: Collection[str]
    dropouts: Dropouts | None


class _Queued(NamedTuple):
    """A job that waits for room in the engine; a heap of them has the longest job first, then the oldest."""

    order: float
    number: int
    client: str
    job: down.Job

    def is_of(self, client: str, cancel: down.Cancel) -> bool:
        """Return whether it is the client's job that a message cancels."""
        job = self.job
        cancelled = (cancel.run, cancel.round, cancel.purpose)
        return self.client == client and (job.run, job.round, job.purpose) == cancelled


class SimulatedClients:
    """All clients of one federation. Call `receive` until it returns False, then `work`, and so on."""

    def __init__(
        self,
        broker: MemoryBroker,
        services: CoordinatorServices,
        engine: Engine,
        population: Population,
        *,
        attempt: Callable[[int], int],
        beside: Callable[[down.Job], tuple[Outgoing, ...]],
    ) -> None:
        """Make the clients; `start` connects them.

        Args:
            broker: Carries their messages.
            services: What they use of the coordinator.
            engine: Computes.
            population: Who they are.
            attempt: Says of a round how often it has been opened.
            beside: What new clients get beside the blobs of their job, as devices get it with a bundle.
        """
        self._topics = services.topics
        self._distributor = services.distributor
        self._roster = services.roster
        self._engine = engine
        self._transport = broker.transport()
        self._samples = population.samples
        self._new_clients = frozenset(population.new_clients)
        self._head_clients = frozenset(population.head_clients)
        self._absent = tuple(self._new_clients)
        self._dropouts = population.dropouts
        self._attempt = attempt
        self._beside = beside
        self._jobs: list[_Queued] = []
        self._vanished = deque[down.Job]()
        self._durations = Durations(population.samples)
        self._cached: dict[str, tuple[str, ...]] = {}
        self._held: dict[str, Outgoing] = {}
        self._sendings: dict[str, Sending] = {}
        self._seq = 0
        self._received = 0

    def start(self, *, is_late: bool) -> None:
        """Subscribe, and register the clients before the first round selects a cohort.

        New clients wait for the last round; ``is_late`` says that it has begun.
        """
        self._transport.subscribe(self._topics.down("+"))
        self._transport.start()
        self._absent = () if is_late else tuple(self._new_clients)
        self._register(client for client in self._samples if client not in self._absent)

    def admit_new_clients(self) -> None:
        """Register the clients that never train, once no further cohort is selected; they are evaluated at the end."""
        self._register(self._absent)
        self._absent = ()

    def receive(self) -> bool:
        """Handle one message; False when there is none."""
        event = self._transport.receive(0)
        if isinstance(event, Message):
            client = event.topic.split("/")[-2]
            self._on_control(client, codec.parse_from_coordinator(event.payload))
        return event is not None

    def work(self) -> down.Job | None:
        """Run jobs until one is done, send its reply, and return the job; None where there is no job.

        Raises:
            TrainingFailed: a client's training has failed, and will again.
            RunFailed: a client cannot do its job; the run does not record that, so that it can be resumed.
            StateError: the state of a client could not be written.
        """
        self._hand_out()
        if self._vanished:
            return self._vanished.popleft()
        if not self._engine.is_busy:
            return None
        done = self._engine.take()
        check_done(done)
        client = done.work.client
        job = done.work.job
        self._durations.note(client, job.purpose, done.seconds)
        self._hand_out()  # before the reply is sent: no worker is idle while the coordinator handles it
        if self._fate(client, job) != "trains_in_vain":
            if done.blob is not None:
                self._held[client] = done.blob
            self._reply(client, done.reply)
        return job

    # --- inside ----------------------------------------------------------------------------------------------------

    def _register(self, clients: Iterable[str]) -> None:
        for client in clients:
            tier: Literal["train", "head"] = "head" if client in self._head_clients else "train"
            hello = up.Hello(boot=BOOT, software=__version__, tier=tier, samples=self._samples[client])
            self._roster.hello(client, hello)

    def _on_control(self, client: str, message: fields.Control) -> None:
        """Do what the coordinator tells a client; a message that no simulated client expects is logged."""
        if isinstance(message, down.Job):
            self._on_job(client, message)
        elif isinstance(message, down.Grant):
            self._on_grant(client, message)
        elif isinstance(message, down.Ack):
            if client in self._sendings:
                self._send_chunks(client, message.missing)
        elif isinstance(message, down.Receipt):
            self._forget_update(client)
        elif isinstance(message, down.Cancel):
            self._forget_update(client)
            self._cancel(client, message)
        elif not isinstance(message, down.Welcome | down.TaskNotice):
            log.warning("not_expected client=%s message=%s", client, message)

    def _on_job(self, client: str, job: down.Job) -> None:
        """Queue a job: the longest first, so that no worker runs it alone at the end."""
        if job.purpose in IN_ROUNDS and job.round == job.rounds:
            self.admit_new_clients()  # the last cohort has been selected, so they do not train
        self._received += 1
        expected_s = self._durations.expected(client, job.purpose)
        heapq.heappush(self._jobs, _Queued(-expected_s, self._received, client, job))

    def _on_grant(self, client: str, grant: down.Grant) -> None:
        """Begin to send an update that the coordinator has asked for."""
        blob = self._held.get(client)
        if blob is None or blob.ref.digest != grant.digest:
            return
        pace = Pace(grant.credits * blob.ref.chunk_bytes)
        self._sendings[client] = Sending(blob, pace)
        self._send_chunks(client, grant.missing)

    def _forget_update(self, client: str) -> None:
        """Drop a client's update: the coordinator has it, or does not want it any more."""
        self._sendings.pop(client, None)
        self._held.pop(client, None)

    def _cancel(self, client: str, cancel: down.Cancel) -> None:
        """Drop the jobs of a client that are over before an engine has taken them."""
        self._jobs = [queued for queued in self._jobs if not queued.is_of(client, cancel)]
        heapq.heapify(self._jobs)

    def _hand_out(self) -> None:
        """Give jobs to the engine while it has room; clients that vanish do not work at theirs."""
        while self._jobs and self._engine.room > 0:
            queued = heapq.heappop(self._jobs)
            if self._fate(queued.client, queued.job) == "vanishes":
                self._vanished.append(queued.job)
                continue
            blobs = self._take_blobs(queued.client, queued.job)
            if blobs is not None:
                self._engine.give(Work(queued.client, queued.job, blobs))

    def _take_blobs(self, client: str, job: down.Job) -> tuple[Outgoing, ...] | None:
        """Return what a job starts from; None where a blob of it is not on offer any more."""
        blobs = []
        # A device without torch has the encoder in a bundle; here it is one more blob of tensors.
        refs = job.blobs if job.bundle is None else (job.bundle, *job.blobs)
        cached = self._cached.get(client, ())
        for ref in refs:
            blob = self._distributor.take(client, ref.digest, is_cached=ref.digest in cached)
            if blob is not None:
                blobs.append(blob)
        if len(blobs) < len(refs):
            return None
        # A device has the blobs of its last job in its cache, such as the part of an encoder that is frozen.
        self._cached[client] = tuple(ref.digest for ref in refs)
        if client in self._new_clients:
            blobs += self._beside(job)
        return tuple(blobs)

    def _fate(self, client: str, job: down.Job) -> Fate:
        if job.purpose == "train" and client in self._new_clients:  # a last round that all others dropped out of
            return "vanishes"
        if self._dropouts is None or job.purpose not in IN_ROUNDS:
            return "delivers"
        return self._dropouts.fate(client, job.round, self._attempt(job.round))

    def _reply(self, client: str, message: fields.Control) -> None:
        self._seq += 1
        stamped = message.model_copy(update={"boot": BOOT, "seq": self._seq})
        self._transport.publish(self._topics.up(client), codec.encode(stamped))

    def _send_chunks(self, client: str, missing: fields.Ranges) -> None:
        self._sendings[client].lacks(missing, 0.0)
        for frame in self._sendings[client].due(0.0):
            self._transport.publish(self._topics.up_chunks(client), frame)


def check_done(done: Done) -> None:
    """Raise a client's fault as an error: a simulated round does not continue without one of its clients.

    After the last round the run ends without the reply of a client whose training failed, as with devices.
    """
    client = done.work.client
    job = done.work.job
    reply = done.reply
    is_training_failure = isinstance(reply, up.Fault) and reply.error == TrainingFailed.__name__
    if not isinstance(reply, up.Fault) or (is_training_failure and job.purpose == "personalize"):
        return
    where = f"round {job.round}" if job.purpose == "train" else "the end of the run"
    if reply.error == NOT_KEPT:
        raise StateError(f"{where}, client {client}: {reply.message}")
    message = f"{where} has failed at {client}: {reply.error}: {reply.message}{done.failure.where}"
    if is_training_failure:
        raise TrainingFailed(f"{message}; retrying will fail again; start a new run with different settings")
    if done.failure.is_in_users_file:
        message = f"{message}; once you have edited that file, start a new run in another folder"
    raise done.failure.attach_to(RunFailed(f"{message}{RESUMABLE}"))


class Durations:
    """Measured durations, by client and purpose of the job, which predict the next ones."""

    def __init__(self, samples: Mapping[str, int]) -> None:
        self._samples = samples
        self._measured: dict[tuple[str, str], float] = {}
        self._totals: dict[str, tuple[float, int]] = {}

    def note(self, client: str, purpose: str, seconds: float) -> None:
        """Record a duration in seconds; the last one of a client counts."""
        self._measured[client, purpose] = seconds
        total, samples = self._totals.get(purpose, (0.0, 0))
        self._totals[purpose] = (total + seconds, samples + self._samples[client])

    def expected(self, client: str, purpose: str) -> float:
        """Return the seconds that are expected; before the first measurement a number proportional to them."""
        measured = self._measured.get((client, purpose))
        if measured is not None:
            return measured
        total, samples = self._totals.get(purpose, (1.0, 1))
        return total / max(samples, 1) * self._samples[client]


Fate = Literal["delivers", "vanishes", "trains_in_vain"]

_SALT = 0x0D0


@dataclass(frozen=True)
class Dropouts:
    """Each client of a round drops out with probability ``share``, half of them before and half after training."""

    share: float
    seed: int

    def fate(self, client: str, number: int, attempt: int = 1) -> Fate:
        """Return what happens to a client in a round; another attempt at the round is another draw."""
        rng = np.random.default_rng([self.seed, _SALT, zlib.crc32(client.encode()), number, attempt])
        drawn = float(rng.random())
        if drawn >= self.share:
            return "delivers"
        if drawn < self.share / 2:
            return "vanishes"
        return "trains_in_vain"
