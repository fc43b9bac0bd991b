"""All clients of a simulation behind one connection: they hear their jobs, have them done by an engine, and answer.

They speak the protocol of devices over the transport in memory. What they receive is handed to them whole instead of in
chunks; what they send goes the whole way, so nothing but bytes passes.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

from edge_agent import __version__
from edge_agent.errors import RunFailed, StateError, TrainingFailed
from edge_agent.wire import messages as wire
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.flow import Sending
from edge_agent.wire.memory import MemoryBroker
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Message

from ..fleet.downloads import Distributor
from ..fleet.registry import Roster
from .dropouts import Dropouts, Fate
from .durations import Durations
from .duties import NOT_KEPT
from .engines import Done, Engine, Work

log = logging.getLogger(__name__)

BOOT = "simulated"

GO_ON = "; --resume tries that again"
"""How errors end after which the same run can be gone on with."""


class Crowd:
    """All clients of one federation. `hear` what has come, then `work`, and so on."""

    def __init__(
        self,
        broker: MemoryBroker,
        topics: Topics,
        distributor: Distributor,
        engine: Engine,
        samples: Mapping[str, int],
        *,
        newcomers: Collection[str] = (),
        dropouts: Dropouts | None = None,
        attempt: Callable[[int], int] = lambda _: 1,
        beside: Callable[[wire.Job], tuple[Outgoing, ...]] = lambda _: (),
    ) -> None:
        """``samples``: of each client. ``attempt`` says of a round how often it has been opened.

        ``beside``: what newcomers get beside the blobs of their job, as devices get it with a bundle.
        """
        self._topics, self._distributor, self._engine = topics, distributor, engine
        self._transport = broker.transport()
        self._samples, self._newcomers = samples, frozenset(newcomers)
        self._absent = tuple(self._newcomers)
        self._dropouts, self._attempt, self._beside = dropouts, attempt, beside
        self._jobs: list[tuple[float, int, str, wire.Job]] = []
        self._gone = deque[wire.Job]()
        self._durations = Durations(samples)
        self._roster: Roster | None = None
        self._held: dict[str, Outgoing] = {}
        self._sendings: dict[str, Sending] = {}
        self._seq = self._heard = 0

    def start(self, roster: Roster, *, is_late: bool = False) -> None:
        """Listen, and be there: all of them before the first round looks who is.

        Newcomers wait for the last round; ``is_late`` says that it has begun.
        """
        self._roster = roster
        self._transport.subscribe(self._topics.down("+"))
        self._transport.start()
        self._absent = () if is_late else tuple(self._newcomers)
        self._greet(client for client in self._samples if client not in self._absent)

    def hear(self) -> bool:
        """Take one message that has come; False when there is none."""
        event = self._transport.receive(0)
        if isinstance(event, Message):
            client = event.topic.split("/")[-2]
            self._on_control(client, wire.parse_from_coordinator(event.payload))
        return event is not None

    def work(self) -> wire.Job | None:
        """Have jobs done until one is, and say what came out of it; the job, or None where there is none.

        Raises:
            TrainingFailed: a client's training has failed, and will again.
            RunFailed: a client cannot do its job; nobody hears of that, so that it can be tried again.
            StateError: what a client keeps could not be written.
        """
        self._hand_out()
        if self._gone:
            return self._gone.popleft()
        if not self._engine.is_busy:
            return None
        done = self._engine.take()
        if isinstance(done.said, wire.Fault) and not _costs_only_itself(done.work, done.said):
            raise _trouble(done.work, done.said)
        self._durations.note(done.work.client, done.work.job.purpose, done.seconds)
        self._hand_out()  # before anything is said: while this update is looked at, nobody is idle
        self._say_done(done)
        return done.work.job

    # --- inside ----------------------------------------------------------------------------------------------------

    def _greet(self, clients: Iterable[str]) -> None:
        for client in clients:
            hello = wire.Hello(boot=BOOT, software=__version__, tier="train", samples=self._samples[client])
            if self._roster is not None:
                self._roster.hello(client, hello)

    def _on_control(self, client: str, message: wire.Control) -> None:
        if isinstance(message, wire.Job):
            self._on_job(client, message)
        elif isinstance(message, wire.Grant):
            self._grant(client, message)
        elif isinstance(message, wire.Ack):
            self._on_ack(client, message)
        elif isinstance(message, wire.Receipt):
            self._forget(client)
        elif isinstance(message, wire.Cancel):
            self._cancel(client, message)
        elif not isinstance(message, wire.Welcome):
            log.warning("not_expected client=%s message=%s", client, message)

    def _on_job(self, client: str, job: wire.Job) -> None:
        """In the order in which they are to begin: the longest first, so that no worker is left with it at the end."""
        if job.purpose == "train" and job.round == job.rounds and self._absent:
            self._greet(self._absent)  # the last cohort has been chosen, so nobody asks them to train
            self._absent = ()
        self._heard += 1
        expected = self._durations.expected(client, job.purpose)
        heapq.heappush(self._jobs, (-expected, self._heard, client, job))

    def _hand_out(self) -> None:
        while self._jobs and self._engine.room > 0:
            _, _, client, job = heapq.heappop(self._jobs)
            if self._fate(client, job) == "vanishes":
                self._gone.append(job)
            elif (blobs := self._received(client, job)) is not None:
                self._engine.give(Work(client, job, blobs + (self._beside(job) if client in self._newcomers else ())))

    def _fate(self, client: str, job: wire.Job) -> Fate:
        if job.purpose == "train" and client in self._newcomers:  # a last round that all others dropped out of
            return "vanishes"
        if self._dropouts is None or job.purpose != "train":
            return "delivers"
        return self._dropouts.fate(client, job.round, self._attempt(job.round))

    def _received(self, client: str, job: wire.Job) -> tuple[Outgoing, ...] | None:
        """All blobs of a job; None when it is not on offer any more."""
        blobs = [self._distributor.take(client, ref.digest) for ref in job.blobs]
        found = tuple(blob for blob in blobs if blob is not None)
        return found if len(found) == len(blobs) else None

    def _say_done(self, done: Done) -> None:
        client, job = done.work.client, done.work.job
        if self._fate(client, job) == "trains_in_vain":
            return
        if done.blob is not None:
            self._held[client] = done.blob
        self._say(client, done.said)

    def _grant(self, client: str, message: wire.Grant) -> None:
        blob = self._held.get(client)
        if blob is None or blob.ref.digest != message.digest:
            return
        ahead = message.credits * blob.ref.chunk_bytes
        self._sendings[client] = Sending(blob, message.missing, ("coordinator",), ahead_bytes=ahead, now=0.0)
        self._pump(client)

    def _on_ack(self, client: str, message: wire.Ack) -> None:
        if client in self._sendings:
            self._sendings[client].saw("coordinator", message.received, 0.0)
            self._pump(client)

    def _pump(self, client: str) -> None:
        for frame in self._sendings[client].due(0.0):
            self._transport.publish(self._topics.up_chunks(client), frame)

    def _forget(self, client: str) -> None:
        self._sendings.pop(client, None)
        self._held.pop(client, None)

    def _cancel(self, client: str, message: wire.Cancel) -> None:
        over = (message.run, message.round)
        self._jobs = [item for item in self._jobs if item[2] != client or (item[3].run, item[3].round) != over]
        heapq.heapify(self._jobs)
        self._forget(client)

    def _say(self, client: str, message: wire.Control) -> None:
        self._seq += 1
        stamped = message.model_copy(update={"boot": BOOT, "seq": self._seq})
        self._transport.publish(self._topics.up(client), wire.encode(stamped))


def _costs_only_itself(work: Work, said: wire.Fault) -> bool:
    """Whether the run ends without this answer as it would with devices: it is the last one, and will not change."""
    return work.job.purpose == "finish" and said.error == TrainingFailed.__name__


def _trouble(work: Work, said: wire.Fault) -> TrainingFailed | RunFailed | StateError:
    """A client's fault as an error: a round of a simulation that goes on without somebody is not what was asked for."""
    where = f"round {work.job.round}" if work.job.purpose == "train" else "the end of the run"
    if said.error == NOT_KEPT:
        return StateError(f"{where}, client {work.client}: {said.message}")
    words = f"{where} has failed at {work.client}: {said.error}: {said.message}"
    if said.error == TrainingFailed.__name__:
        return TrainingFailed(f"{words}; going on would end the same way: begin anew with other settings")
    return RunFailed(f"{words}{GO_ON}")
