"""A method and an agent's duties that train nothing: what is left is the framework's own work.

Every agent adds a number of its own to all that it receives, so that each round carries other bytes both ways and
nothing can come from a cache.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from edge_agent import methods
from edge_agent.agent.tasks import TaskRunner
from edge_agent.methods.base import Client, Exactness, MethodParams
from edge_agent.methods.base import Method as Base
from edge_agent.task import Task, Tensors
from edge_agent.wire.messages import Job, Report, UpdateManifest

if TYPE_CHECKING:
    from edge_agent.training.parts import Parts

NAME = "noop"
ARRAYS = 20
"""As many tensors as a small convolutional network has."""


class Params(MethodParams):
    """How much travels."""

    payload_bytes: int = Field(500_000, ge=4 * ARRAYS, le=1 << 30, description="size of the model, each way")
    upload_bytes: int = Field(0, ge=0, le=1 << 30, description="size of an update; 0 = that of the model")


class Method(Base):
    """The mean of what came back."""

    Params = Params
    heads = ()
    exactness: ClassVar[Exactness] = {}

    @property
    def shared(self) -> tuple[str, ...]:
        """All of it travels."""
        return ("encoder",)

    def build(self, task: Task) -> Parts:  # noqa: ARG002 - the same for every task
        """So many arrays of equal size."""
        import torch

        from edge_agent.training.parts import Parts

        size = self.params.payload_bytes // (4 * ARRAYS)
        arrays = {f"array{number:02d}": torch.nn.Parameter(torch.rand(size)) for number in range(ARRAYS)}
        return Parts(encoder=torch.nn.ParameterDict(arrays))

    def local_update(self, client: Client, received: Tensors) -> Tensors:
        """The received tensors plus the client's number."""
        return plus(received, number_of(client.id))


class NoDuties(TaskRunner):
    """Duties of an agent that adds a number instead of training."""

    def do(self, job: Job, received: Tensors) -> UpdateManifest | Report:
        """The received tensors plus a number (or an upload of another size), or an empty report."""
        if job.purpose == "finish":
            return Report(run=job.run, samples=1)
        step = number_of(self.config.id)
        upload_bytes = int(job.params.get("upload_bytes", 0))
        update = {"array": upload(upload_bytes, step + job.round)} if upload_bytes else plus(received, step)
        return self.outbox.put(update, run=job.run, round_number=job.round, samples=1, metrics={})


def number_of(client: str) -> int:
    """1 to 97, by the client's id."""
    return 1 + zlib.crc32(client.encode()) % 97


def plus(received: Tensors, step: int) -> Tensors:
    """All arrays plus ``step``."""
    return {name: array + step for name, array in received.items()}


def upload(size_bytes: int, value: float) -> np.ndarray:
    """A float32 array of that size."""
    return np.full(size_bytes // 4, value, np.float32)


def register() -> None:
    """Make the method known to this process."""
    methods.registry.add(NAME, Method)
