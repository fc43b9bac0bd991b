"""Means to disturb a federation: somebody who says what they like, lost messages, deaths at a chosen line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from federation_duties import step_of
from federation_harness import Federation, Killed, vanish

from edge_agent.core.errors import HeadwaterError
from edge_agent.core.task import Tensors
from edge_agent.wire.blobs.chunks import CHUNK_BYTES, Outgoing
from edge_agent.wire.memory import MemoryTransport
from edge_agent.wire.messages import codec, down, fields, up
from edge_agent.wire.tensors import encode


class Stranger:
    """Somebody with a bare connection who says what they like and hears what an agent of that name would hear."""

    def __init__(self, federation: Federation, name: str, tier: str = "train", samples: int = 10) -> None:
        self.federation = federation
        self.name = name
        self.tier = tier
        self.samples = samples
        self.topics = federation.topics
        self.transport = federation.broker.transport()
        self.transport.subscribe(*self.topics.for_agent(name), f"{self.topics.root}/b/+")
        self.transport.start()
        self.seq = 0

    def hello(self) -> None:
        self.say(up.Hello(software="x", tier=self.tier, samples=self.samples))

    def say(self, message: fields.Control) -> None:
        self.seq += 1
        stamped = message.model_copy(update={"boot": f"boot-{self.name}", "seq": self.seq})
        self.raw(codec.encode(stamped))

    def raw(self, payload: bytes, topic: str | None = None) -> None:
        self.transport.publish(topic or self.topics.up(self.name), payload)

    def chunk(self, frame: bytes) -> None:
        self.raw(frame, self.topics.up_chunks(self.name))

    def offer(
        self,
        tensors: Tensors | bytes,
        *,
        round: int = 1,  # noqa: A002 - the word of the vocabulary
        run: str | None = None,
        samples: int = 10,
        metrics: dict[str, float] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Outgoing:
        """Announce an update; returns the blob, of which nothing is sent."""
        data = tensors if isinstance(tensors, bytes) else encode(tensors)
        blob = Outgoing.of(data, chunk_bytes)
        run = run if run is not None else self.federation.run_id
        self.say(up.UpdateManifest(run=run, round=round, blob=blob.ref, samples=samples, metrics=metrics or {}))
        return blob

    def send(self, blob: Outgoing) -> None:
        """All chunks, without waiting for a grant."""
        for index in range(blob.count):
            self.chunk(blob.frame(index))

    def deliver(self, tensors: Tensors | bytes, **options: Any) -> down.Receipt:
        """Announce and send an update as an honest agent would; returns the receipt."""
        self.heard()
        blob = self.offer(tensors, **options)
        self.federation.settle()
        answers = self.heard(down.Grant, down.Receipt)
        if isinstance(answers[-1], down.Grant):
            self.send(blob)
            self.federation.settle()
            answers = self.heard(down.Receipt)
        return answers[-1]

    def heard(self, *kinds: type[fields.Control]) -> list[Any]:
        """Control messages that have come since the last call."""
        found = []
        while (event := self.transport.receive(0)) is not None:
            if getattr(event, "topic", None) == self.topics.down(self.name):
                found.append(codec.parse_from_coordinator(event.payload))
        return [message for message in found if not kinds or isinstance(message, kinds)]


def restart_broker(federation: Federation) -> None:
    """The broker dies and comes back: all connections break, what was under way is lost, no will is published."""
    parties = [*federation.agents.values(), *([federation.coordinator] if federation.coordinator else [])]
    transports = [party.transport for party in parties]
    for transport in transports:
        vanish(transport)
    for transport in transports:
        transport.start()


def lose(transport: MemoryTransport, is_lost: Callable[[fields.Control], bool], times: int = 1) -> list[fields.Control]:
    """The first ``times`` control messages for which ``is_lost`` go nowhere; returns the list that they are put in."""
    real = transport.publish
    lost = list[fields.Control]()

    def publish(topic: str, payload: bytes, **options: Any) -> None:
        message = None
        for parse in (codec.parse_from_agent, codec.parse_from_coordinator, codec.parse_between_coordinators):
            with contextlib.suppress(HeadwaterError):
                message = message or parse(payload)
        if message is not None and len(lost) < times and is_lost(message):
            lost.append(message)
        else:
            real(topic, payload, **options)

    transport.publish = publish
    return lost


@contextlib.contextmanager
def killed_at_append(federation: Federation, number: int, *, before: bool) -> Iterator[None]:
    """The next coordinator dies just before, or just after, its ``number``-th entry into the journal (0: the first)."""
    journal = federation.state.journal
    real = journal.append
    count = [0]

    def append(*args: Any, **columns: Any) -> Any:
        count[0] += 1
        if count[0] == number + 1 and before:
            raise Killed
        entry = real(*args, **columns)
        if count[0] == number + 1:
            raise Killed
        return entry

    journal.append = append
    try:
        yield
    finally:
        journal.append = real


QUORUM = {"quorum": 0.6, "grace_s": 3, "deadline_s": 60}


@contextlib.contextmanager
def besieged(folder: Path) -> Iterator[Federation]:
    """Two honest agents that train for 5 s, and ``mallory`` who has been asked as well, in the only round."""
    with Federation(folder, agents=(), round=QUORUM, cohort={"min_agents": 3}, capture=True) as federation:
        for name in ("a0", "a1"):
            federation.add(name, seconds=5)
        federation.mallory = Stranger(federation, "mallory")
        federation.mallory.hello()
        federation.request(rounds=1)
        federation.wait(1)
        assert federation.coordinator.collector.open_round.cohort == ("a0", "a1", "mallory")
        yield federation


def assert_honest_result(fed: Federation) -> None:
    """The run ends, its weights are those of the two honest agents alone (10 samples each), and nothing broke."""
    start = fed.final
    fed.finish()
    mean = (step_of("a0") + step_of("a1")) / 2
    for name, array in fed.final.items():
        np.testing.assert_allclose(array, start[name] + mean, rtol=1e-6)
    assert fed.metrics()[0]["agents"] == ["a0", "a1"]
    known = {"MessageError", "ChunkError", "ProtocolMismatch"}
    assert {key.rpartition(" ")[2] for key in fed.coordinator.rejected.counts} <= known


def refusals(fed: Federation, agent: str = "mallory") -> list[str]:
    return [entry.body["reason"] for entry in fed.entries("update_refused", round=1, agent=agent)]
