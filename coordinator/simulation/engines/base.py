"""The contract of engines: they are given clients' jobs, and give back the replies in any order.

An engine decides where and when clients compute, never what: each job starts from the client's state and from what it
receives, so the same seed gives the same bits on every engine and with any number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edge_agent.task import Tensors
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import Fault, Job, Report, UpdateManifest
from edge_agent.wire.tensors import decode

from ..client_tasks import Answer

ANSWERS: dict[str, type[UpdateManifest | Report | Fault]] = {
    "update": UpdateManifest,
    "report": Report,
    "fault": Fault,
}
"""Replies to a job, by the ``type`` under which other processes send them."""


@dataclass(frozen=True)
class Work:
    """One client's job, and the blobs that it starts from."""

    client: str
    job: Job
    blobs: tuple[Outgoing, ...]

    def received(self) -> Tensors:
        """The tensors of all blobs."""
        return received([blob.data for blob in self.blobs])


@dataclass(frozen=True)
class Done:
    """A job that is done: the client's reply, its update if it made one, and how long it took."""

    work: Work
    said: UpdateManifest | Report | Fault
    blob: Outgoing | None
    seconds: float

    @classmethod
    def of(cls, work: Work, answer: Answer) -> Done:
        """From what a client of this process has computed."""
        said = answer.said
        blob = Outgoing(said.blob, memoryview(b"".join(answer.content))) if isinstance(said, UpdateManifest) else None
        return cls(work, said, blob, answer.seconds)


class Engine(Protocol):
    """Where clients compute."""

    name: str
    workers: int

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of its workers."""

    @property
    def figures(self) -> dict[str, Any]:
        """What it adds to the result of the simulation."""

    @property
    def room(self) -> int:
        """How many jobs it accepts now."""

    @property
    def is_busy(self) -> bool:
        """Whether any job that was given has not been taken back."""

    def start(self) -> None:
        """Get ready; called once before the first job."""

    def give(self, work: Work) -> None:
        """Queue a job; only where there is `room`."""

    def take(self) -> Done:
        """The next job that is done; waits for it.

        Raises:
            RunFailed: the engine cannot continue.
        """

    def close(self) -> None:
        """Stop at once."""


def received(blobs: Sequence[memoryview]) -> Tensors:
    """The tensors of several blobs together; a later blob wins."""
    tensors: Tensors = {}
    for data in blobs:
        tensors.update(decode(data))
    return tensors
