"""What an engine is: it is given work for clients, and gives back what came out, in any order.

An engine decides where and when clients compute, never what: each piece of work begins from what the client has kept
and from what it receives, so the same seed gives the same bits on every engine and with any number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edge_agent.task import Tensors
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import Fault, Job, Report, UpdateManifest
from edge_agent.wire.tensors import decode

ANSWERS: dict[str, type[UpdateManifest | Report | Fault]] = {
    "update": UpdateManifest,
    "report": Report,
    "fault": Fault,
}
"""What a client may say to a job, by the ``type`` under which another process passes it on."""


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
    """What came out of a piece of work: the client's answer, its update if it made one, and how long it took."""

    work: Work
    said: UpdateManifest | Report | Fault
    blob: Outgoing | None
    seconds: float


class Engine(Protocol):
    """Where clients compute."""

    name: str
    workers: int

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of its own that are at work."""

    @property
    def figures(self) -> dict[str, Any]:
        """What a result is to tell of it, beside its name and number of workers."""

    @property
    def room(self) -> int:
        """How many pieces of work can be given now."""

    @property
    def is_busy(self) -> bool:
        """Whether anything that was given has not come back yet."""

    def start(self) -> None:
        """Get ready; called once before any work."""

    def give(self, work: Work) -> None:
        """Begin with it as soon as somebody can; only where there is room."""

    def take(self) -> Done:
        """The next piece of work that is done; waits for it.

        Raises:
            RunFailed: the engine cannot go on.
        """

    def close(self) -> None:
        """Stop at once, whatever is under way."""


def received(blobs: Sequence[memoryview]) -> Tensors:
    """The tensors of several blobs together; a later blob wins."""
    tensors: Tensors = {}
    for data in blobs:
        tensors.update(decode(data))
    return tensors
