"""All clients of a simulation behind one connection: they hear their jobs, work one after another, and answer.

They speak the protocol of devices over the transport in memory, and do a device's own duties. What they receive is
handed to them whole instead of in chunks; what they send goes the whole way, so nothing but bytes passes.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_agent import __version__, methods
from edge_agent.agent.duties import LAST_ROUND, Duties, resident_mb
from edge_agent.agent.jobs import fault
from edge_agent.agent.kept import KeptFiles
from edge_agent.config import AgentConfig, DataConfig, TrainingConfig
from edge_agent.data.partition import Division
from edge_agent.errors import HeadwaterError
from edge_agent.task import Tensors
from edge_agent.training.session import Arrays, Built, Outcome, Session
from edge_agent.wire import messages as wire
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.flow import Sending
from edge_agent.wire.memory import MemoryBroker
from edge_agent.wire.tensors import decode, encode
from edge_agent.wire.topics import Topics
from edge_agent.wire.transport import Message

from ..distribute import Distributor
from ..roster import Roster
from .pools import Pools

log = logging.getLogger(__name__)

BOOT = "simulated"


class HeldOutbox:
    """A client's outbox in memory: what a kill takes is computed again, bit for bit."""

    def __init__(self) -> None:
        self.blob: Outgoing | None = None

    def put(
        self, tensors: Tensors, *, run: str, round_number: int, samples: int, metrics: Mapping[str, float]
    ) -> wire.UpdateManifest:
        """Keep an update until it has been sent."""
        self.blob = Outgoing.of(encode(tensors))
        told = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        return wire.UpdateManifest(run=run, round=round_number, blob=self.blob.ref, samples=samples, metrics=told)


@dataclass(frozen=True)
class Shared:
    """What all clients of a run have in common: pools, partition, one model object, and where they keep things."""

    pools: Pools
    division: Division
    model: Built
    folder: Path
    device: str = "auto"
    evaluate_after: bool = False
    keep_every: int = 0

    def duties(self, client: str) -> SimulatedDuties:
        """The duties of one client."""
        return SimulatedDuties(self, client)


class SimulatedDuties(Duties):
    """A device's duties on rows of the common pool, with the common model, which belongs to it only while it works."""

    outbox: HeldOutbox  # type: ignore[assignment]

    def __init__(self, shared: Shared, client: str) -> None:
        config = AgentConfig(
            id=client,
            state=shared.folder / client,
            data=DataConfig(source="simulation:"),
            training=TrainingConfig(device=shared.device),
        )
        super().__init__(config, "train")
        self._shared, self.outbox = shared, HeldOutbox()
        self.samples = len(shared.division.clients[client].train)

    def kept_files(self, run: str) -> KeptFiles:
        """What this client keeps of a run: also of the rounds whose states the coordinator keeps."""
        return KeptFiles(self.config.state / "runs" / run, self._shared.keep_every)

    def _session_for(self, job: wire.Job) -> Session:
        """A session for this one job: its samples lie in memory only until the job is done."""
        train, test = self._arrays()
        method = methods.create(job.method, job.params)
        return Session(
            method,
            job.task,
            self.config.id,
            train,
            test,
            seed=job.seed,
            device=self.config.training.device,
            model=self._shared.model,
            evaluate_after=self._shared.evaluate_after,
        )

    def _arrays(self) -> tuple[Arrays, Arrays]:
        return self._shared.pools.arrays(self._shared.division.clients[self.config.id])

    def _report(self, job: wire.Job, session: Session, outcome: Outcome, files: KeptFiles) -> wire.Report:
        files.write(LAST_ROUND, outcome.kept.personal, outcome.kept.memory)
        return wire.Report(
            run=job.run,
            samples=self.samples,
            head=session.method.head_name,
            acc_global=outcome.metrics.get("acc.global"),
            acc_personal=outcome.metrics.get("acc.personal"),
            rss_mb=resident_mb(),
            torch_loaded=True,
        )


class Crowd:
    """All clients of one federation. `hear` what has come, then `work` at the next job, and so on."""

    def __init__(
        self, broker: MemoryBroker, topics: Topics, distributor: Distributor, duties: Mapping[str, SimulatedDuties]
    ) -> None:
        self._topics, self._distributor, self._duties = topics, distributor, duties
        self._transport = broker.transport()
        self._jobs = deque[tuple[str, wire.Job]]()
        self._sendings: dict[str, Sending] = {}
        self._seq = 0

    def start(self, roster: Roster) -> None:
        """Listen, and be there: all of them before the first round looks who is."""
        self._transport.subscribe(self._topics.down("+"))
        self._transport.start()
        for client, duties in self._duties.items():
            hello = wire.Hello(boot=BOOT, software=__version__, tier="train", samples=duties.samples)
            roster.hello(client, hello)

    def hear(self) -> bool:
        """Take one message that has come; False when there is none."""
        event = self._transport.receive(0)
        if isinstance(event, Message):
            client = event.topic.split("/")[-2]
            self._on_control(client, wire.parse_from_coordinator(event.payload))
        return event is not None

    def work(self) -> wire.Job | None:
        """Do the next job, if there is one, and say what came out."""
        if not self._jobs:
            return None
        client, job = self._jobs.popleft()
        received = self._received(client, job)
        if received is not None:
            try:
                self._say(client, self._duties[client].do(job, received))
            except Exception as error:
                if not isinstance(error, HeadwaterError):
                    log.exception("work_broke client=%s", client)
                self._say(client, fault(error, job.run, job.round))
        return job

    # --- inside ----------------------------------------------------------------------------------------------------

    def _on_control(self, client: str, message: wire.Control) -> None:
        if isinstance(message, wire.Job):
            self._jobs.append((client, message))
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

    def _received(self, client: str, job: wire.Job) -> Tensors | None:
        """The tensors of all blobs of a job; None when it is not on offer any more."""
        received: Tensors = {}
        for ref in job.blobs:
            blob = self._distributor.take(client, ref.digest)
            if blob is None:
                return None
            received.update(decode(blob.data))
        return received

    def _grant(self, client: str, message: wire.Grant) -> None:
        blob = self._duties[client].outbox.blob
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
        self._duties[client].outbox.blob = None

    def _cancel(self, client: str, message: wire.Cancel) -> None:
        over = (message.run, message.round)
        self._jobs = deque(item for item in self._jobs if item[0] != client or (item[1].run, item[1].round) != over)
        self._forget(client)

    def _say(self, client: str, message: wire.Control) -> None:
        self._seq += 1
        stamped = message.model_copy(update={"boot": BOOT, "seq": self._seq})
        self._transport.publish(self._topics.up(client), wire.encode(stamped))
