"""Agents that speak the whole protocol and train nothing, thousands of them in one process.

An agent here is its state in the protocol: no thread, no files, no model. Downloads are assembled once for all agents
(everyone still receives and counts each of its chunks), and an update is what was received plus the agent's number.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edge_agent import __version__
from edge_agent.core.errors import MeasuringFailed
from edge_agent.wire.blobs import chunks
from edge_agent.wire.blobs.chunks import Chunks, Outgoing
from edge_agent.wire.blobs.flow import WINDOW_BYTES, Pace, Sending
from edge_agent.wire.messages import codec, down, fields, up
from edge_agent.wire.tensors import decode, encode
from edge_agent.wire.topics import Topics

from .workloads import add, number_of

HEARTBEAT_S = 15.0
"""Seconds between heartbeats of an agent with a job; without one the coordinator may ask for longer intervals."""

AGAIN_S = 5.0
"""Seconds after which hellos, requests and manifests without an answer are repeated."""

KEPT_UPDATES = 64
"""The most encoded updates in memory; others are computed again."""

Publish = Callable[[str, bytes, str], None]
"""Publishes a payload on a topic; the last argument is its kind, for the figures."""


@dataclass(frozen=True)
class AgentLink:
    """The functions by which an agent reaches the broker.

    Attributes:
        publish: Publishes a payload.
        subscribe: Subscribes the agent to a topic; `FleetAgent.subscribed` is called when that is confirmed.
        unsubscribe: Ends the subscription.
    """

    publish: Publish
    subscribe: Callable[[FleetAgent, str], None]
    unsubscribe: Callable[[FleetAgent, str], None]


class Models:
    """The blobs that the agents of one process have received, and the updates made of them, which they share."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[bytearray, Chunks]] = {}
        """Digest -> the bytes of a blob that is not complete, and the chunks that are there."""

        self._whole: OrderedDict[str, bytes] = OrderedDict()
        """Digest -> a complete blob, the newest last."""

        self._updates: OrderedDict[tuple[str, int], Outgoing] = OrderedDict()
        """(Digest of the model, number of the agent) -> its update, the one used last at the end."""

    def add(self, ref: fields.BlobRef, frame: chunks.Frame) -> None:
        """Take a frame that some agent has received.

        Raises:
            MeasuringFailed: The blob is complete and has another hash.
        """
        if ref.digest in self._whole:
            return
        # 1. The chunks of the frame, unless another agent has brought them.
        count = chunks.chunk_count(ref)
        data, present = self._parts.setdefault(ref.digest, (bytearray(ref.size_bytes), Chunks(count)))
        stop = stop_of(ref, frame)
        if not present.missing(frame.index, stop):
            return
        present.add(frame.index, stop)
        data[frame.offset : frame.offset + len(frame.data)] = frame.data
        if not present.complete:
            return
        # 2. The whole blob; those of the last round and of this one are kept.
        if hashlib.sha256(data).hexdigest() != ref.digest:
            raise MeasuringFailed(f"blob {ref.digest[:16]} arrived with another hash")
        self._whole[ref.digest] = bytes(data)
        del self._parts[ref.digest]
        while len(self._whole) > 2:
            self._whole.popitem(last=False)

    def has(self, digest: str) -> bool:
        """Return whether the blob is complete."""
        return digest in self._whole

    def update(self, digest: str, number: int) -> Outgoing:
        """Return the update of the agent with that number on this model."""
        key = (digest, number)
        if key not in self._updates:
            self._updates[key] = Outgoing.of(encode(add(decode(self._whole[digest]), number)))
            while len(self._updates) > KEPT_UPDATES:
                self._updates.popitem(last=False)
        self._updates.move_to_end(key)
        return self._updates[key]


def stop_of(ref: fields.BlobRef, frame: chunks.Frame) -> int:
    """Return the number after that of the last chunk in a frame."""
    return frame.index - (-len(frame.data) // ref.chunk_bytes)


class FleetAgent:
    """One agent. Call `subscribed` after each connect, `received` for each message, and `tick` when `due_at` says."""

    def __init__(
        self,
        name: str,
        topics: Topics,
        models: Models,
        link: AgentLink,
        clock: Callable[[], float],
    ) -> None:
        self.id = name
        self._topics = topics
        self._models = models
        self._clock = clock
        self._publish = link.publish
        self._subscribe = link.subscribe
        self._unsubscribe = link.unsubscribe
        self._boot = hashlib.sha256(name.encode()).hexdigest()[:16]
        self._number = number_of(name)
        self._seq = 0
        self._federation = ""
        self.epoch = 0
        self._job: down.Job | None = None
        self._last_run = ""
        self._ref: fields.BlobRef | None = None
        self._chunks: Chunks | None = None
        self._manifest: up.UpdateManifest | None = None
        self._sending: Sending | None = None
        self._pace = Pace(WINDOW_BYTES)
        self._is_direct = False
        self._again_s = AGAIN_S
        now = clock()
        self._heard_at = now
        self._beat_at = now
        self._heartbeat_s = HEARTBEAT_S
        self.due_at = float("-inf")
        self.welcomed = False
        self.receipts = 0
        self.rejected = 0
        self.received_bytes = 0

    def subscribed(self, digest: str = "") -> None:
        """Go on after the broker has confirmed the agent's own topics, or those of a blob."""
        if not digest:
            self.hello()
        elif self._ref is not None and self._ref.digest.startswith(digest):
            self._want()

    def received(self, topic: str, payload: bytes) -> None:
        """Handle a message to this agent."""
        self.received_bytes += len(payload)
        if topic.endswith("/db") or "/b/" in topic:
            self._on_chunk(chunks.decode_frame(payload))
            return
        message = codec.parse_from_coordinator(payload)
        handler = _HANDLERS.get(type(message))
        if handler is not None:
            handler(self, message)

    def tick(self) -> None:
        """Repeat what has no answer, or send a heartbeat."""
        now = self._clock()
        silent_s = now - self._heard_at
        heartbeat_s = self._heartbeat_s
        if self._job is not None:
            heartbeat_s = HEARTBEAT_S
        # One message at a time: each of them shows the coordinator that the agent is there.
        if not self.welcomed:
            self.hello()
        elif self._manifest is not None and silent_s >= self._again_s:
            self._offer("manifest again")
        elif self._ref is not None and silent_s >= AGAIN_S:
            self._want("want again")
        elif now - self._beat_at >= heartbeat_s:
            self.heartbeat()
        self.due_at = max(now, self._beat_at + heartbeat_s)
        if self._is_busy:
            self.due_at = now + AGAIN_S

    def heartbeat(self) -> None:
        """Send a heartbeat, with the job under way where there is one."""
        self._beat_at = self._clock()
        beat = up.Heartbeat()
        if self._job is not None:
            beat = up.Heartbeat(run=self._job.run, round=self._job.round, purpose=self._job.purpose)
        self._send(beat, "heartbeat", self._topics.heartbeat(self.id))

    def hello(self) -> None:
        """Say hello; `welcomed` when it is answered."""
        self.welcomed = False
        self._publish(self._topics.presence(self.id), f"online {self._boot} 1".encode(), "presence")
        hello = up.Hello(software=__version__, tier="train", samples=1, connection=1, epoch=self.epoch)
        self._send(hello, "hello")
        self.due_at = self._clock() + AGAIN_S

    def flood_message(self, kind: str) -> bytes:
        """Return a message that an agent could flood the coordinator with: junk, a hello, or an update (of round 1)."""
        if kind == "hello":
            return self._encoded(up.Hello(software=__version__, tier="train", samples=1))
        if kind == "update" and self._last_run:
            ref = fields.BlobRef(digest="0" * 64, size_bytes=1000, chunk_bytes=1000)
            return self._encoded(up.UpdateManifest(run=self._last_run, round=1, blob=ref, samples=1))
        return b"junk" * 50

    # --- inside ----------------------------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return self._ref is not None or self._manifest is not None

    def _send(self, message: fields.Control, kind: str, topic: str = "") -> None:
        self._publish(topic or self._topics.up(self.id), self._encoded(message), kind)

    def _encoded(self, message: fields.Control) -> bytes:
        self._seq += 1
        stamp: dict[str, Any] = {"boot": self._boot, "seq": self._seq, "federation": self._federation}
        return codec.encode(message.model_copy(update=stamp))

    def _on_welcome(self, message: down.Welcome) -> None:
        """Take the federation and the heartbeat interval of the coordinator that has the agent on its roster now."""
        is_news = not self.welcomed
        self.welcomed = True
        self._federation = message.federation
        self.epoch = message.epoch
        self._heartbeat_s = max(HEARTBEAT_S, message.heartbeat_s)
        if is_news:  # heartbeats of a fleet are spread evenly, as those of agents that started at different times are
            now = self._clock()
            self.due_at = now + self._heartbeat_s * (int(self._boot[:4], 16) + 1) / 65536
            self._beat_at = self.due_at - self._heartbeat_s

    def _on_announce(self, _: down.Announce) -> None:
        if not self.welcomed:
            self.hello()

    def _on_who(self, message: down.Who) -> None:
        self.welcomed = False
        hello = up.Hello(software=__version__, tier="train", samples=1, connection=1, answers=message.question)
        self._send(hello, "hello")

    def _on_job(self, job: down.Job) -> None:
        """Begin a job: fetch its model, unless the agent has received it before. A repeated job changes nothing."""
        is_same = self._job is not None and down.job_key(self._job) == down.job_key(job)
        if is_same and self._is_busy:
            return
        self._job = job
        self._ref = job.blobs[0]
        self._manifest = None
        self._last_run = job.run
        self._heard_at = self._clock()
        self.due_at = min(self.due_at, self._heard_at + AGAIN_S)
        if self._models.has(self._ref.digest) and self._chunks is not None and self._chunks.complete:
            self._finish()
        else:
            self._chunks = Chunks(chunks.chunk_count(self._ref))
            self._is_direct = False
            self._subscribe(self, self._topics.broadcast(self._ref.digest))

    def _want(self, kind: str = "want") -> None:
        """Request the chunks of the model that are missing; ``kind`` is that of the message, for the figures."""
        if self._ref is not None and self._chunks is not None:
            self._heard_at = self._clock()
            ranges = self._chunks.missing()
            self._send(up.Want(digest=self._ref.digest, ranges=ranges, direct=self._is_direct), kind)

    def _on_listen(self, message: down.Listen) -> None:
        """Receive the blob on its broadcast topic from now on, or no longer."""
        is_fetching_it = self._ref is not None and self._ref.digest == message.digest
        is_change = self._is_direct == message.broadcast
        if not is_fetching_it or not is_change:
            return
        self._is_direct = not message.broadcast
        if message.broadcast:
            self._subscribe(self, self._topics.broadcast(message.digest))
        else:
            self._unsubscribe(self, self._topics.broadcast(message.digest))
            self._want()

    def _on_chunk(self, frame: chunks.Frame) -> None:
        """Take a frame of the blob that the agent fetches; one of another blob, or after its end, is ignored."""
        ref = self._ref
        present = self._chunks
        if ref is None or present is None or present.complete:
            return
        if frame.transfer != chunks.transfer_id(ref.digest):
            return
        self._models.add(ref, frame)
        present.add(frame.index, stop_of(ref, frame))
        self._heard_at = self._clock()
        if present.present == present.count:
            if not self._is_direct:
                self._unsubscribe(self, self._topics.broadcast(ref.digest))
            self._finish()
        elif frame.report:
            self._send(up.Progress(digest=ref.digest, missing=present.missing()), "progress")

    def _finish(self) -> None:
        """Answer that the model has been received, then compute and offer the update, or send the report."""
        job = self._job
        ref = self._ref
        if job is None or ref is None:
            return
        self._send(up.Have(digest=ref.digest), "have")
        self._ref = None
        if job.purpose == "personalize":
            self._send(up.Report(run=job.run, samples=1), "report")
            self._job = None
            self._has_finished()
            return
        blob = self._models.update(ref.digest, self._number)
        self._manifest = up.UpdateManifest(run=job.run, round=job.round, blob=blob.ref, samples=1)
        self._again_s = AGAIN_S
        self._stop_sending()
        self._offer("manifest")

    def _offer(self, kind: str) -> None:
        """Announce the update to whom the job names; ``kind`` is that of the message, for the figures."""
        if self._manifest is not None:
            self._send(self._manifest, kind, self._topics.up(self.id, self._partition))

    @property
    def _partition(self) -> str:
        """The partition whose aggregator takes the update; empty: the coordinator takes it."""
        return "" if self._job is None else self._job.partition

    def _on_grant(self, message: down.Grant) -> None:
        """Send the chunks of the update that the coordinator is ready for."""
        if not self._offers(message.digest):
            return
        self._again_s = AGAIN_S
        if self._sending is None and self._job is not None:
            self._sending = Sending(self._models.update(self._job.blobs[0].digest, self._number), self._pace)
        self._upload(message.missing)

    def _on_queued(self, message: down.Queued) -> None:
        if self._offers(message.digest):
            self._heard_at = self._clock()
            self._again_s = message.again_s

    def _on_ack(self, message: down.Ack) -> None:
        if self._offers(message.digest):
            self._upload(message.missing)

    def _offers(self, digest: str) -> bool:
        """Return whether a message names the update that the agent offers now, and not one of an earlier round."""
        return self._manifest is not None and self._manifest.blob.digest == digest

    def _upload(self, missing: fields.Ranges) -> None:
        """Send what the coordinator lacks of the update, as far as the pace allows."""
        now = self._clock()
        self._heard_at = now
        if self._sending is None:
            return
        self._sending.lacks(missing, now)
        for frame in self._sending.due(now):
            kind = "last chunk" if self._sending.is_over else "chunk"
            self._publish(self._topics.up_chunks(self.id, self._partition), frame, kind)

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.arrived(self._clock())
            self._sending = None

    def _on_receipt(self, message: down.Receipt) -> None:
        """Count the answer to the update, and end the job."""
        if not self._offers(message.digest):
            return
        if message.accepted:
            self.receipts += 1
        else:
            self.rejected += 1
        self._manifest = None
        self._job = None
        self._stop_sending()
        self._has_finished()

    def _has_finished(self) -> None:
        if self._heartbeat_s > HEARTBEAT_S:  # as agents do whose heartbeats take longer without a job
            self.heartbeat()

    def _on_cancel(self, message: down.Cancel) -> None:
        if self._job is not None and down.job_key(self._job) == down.job_key(message):
            self._job = None
            self._manifest = None
            self._ref = None
            self._stop_sending()


_HANDLERS: dict[type[fields.Command], Callable[[FleetAgent, Any], None]] = {
    down.Welcome: FleetAgent._on_welcome,  # noqa: SLF001 - its own table
    down.Announce: FleetAgent._on_announce,  # noqa: SLF001 - its own table
    down.Who: FleetAgent._on_who,  # noqa: SLF001 - its own table
    down.Job: FleetAgent._on_job,  # noqa: SLF001 - its own table
    down.Listen: FleetAgent._on_listen,  # noqa: SLF001 - its own table
    down.Grant: FleetAgent._on_grant,  # noqa: SLF001 - its own table
    down.Queued: FleetAgent._on_queued,  # noqa: SLF001 - its own table
    down.Ack: FleetAgent._on_ack,  # noqa: SLF001 - its own table
    down.Receipt: FleetAgent._on_receipt,  # noqa: SLF001 - its own table
    down.Cancel: FleetAgent._on_cancel,  # noqa: SLF001 - its own table
}


class Timers:
    """A queue of agents by when they are due. An entry may be early: the agent's own `FleetAgent.due_at` counts."""

    def __init__(self, agents: list[FleetAgent]) -> None:
        self._heap = [(agent.due_at, number) for number, agent in enumerate(agents)]
        self._agents = agents
        heapq.heapify(self._heap)

    def add(self, agent: FleetAgent) -> None:
        """Call this agent, too, when it is due."""
        heapq.heappush(self._heap, (agent.due_at, len(self._agents)))
        self._agents.append(agent)

    def run(self, now: float) -> int:
        """Call `FleetAgent.tick` of all agents that are due, and return how many there were."""
        count = 0
        while self._heap and self._heap[0][0] <= now:
            _, number = heapq.heappop(self._heap)
            agent = self._agents[number]
            if agent.due_at <= now:
                agent.tick()
                count += 1
            heapq.heappush(self._heap, (min(agent.due_at, now + AGAIN_S), number))
        return count

    def due_in(self, now: float) -> float:
        """Return the seconds until the next agent may be due."""
        if not self._heap:
            return AGAIN_S
        due_at, _ = self._heap[0]
        return max(0.0, due_at - now)
