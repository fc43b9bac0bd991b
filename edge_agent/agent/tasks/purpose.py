"""The contract between the common part of an agent and what it does for a job of one purpose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from ...core.config import AgentConfig
from ...core.errors import MissingCapability
from ...core.task import Task, Tensors
from ...wire.messages.down import Job
from ...wire.messages.up import Report, UpdateManifest
from .resources import Resources

if TYPE_CHECKING:
    import numpy as np

    from ...client import Outcome, Session
    from ...data import Samples
    from ..secure import SecureSums

Clock = Callable[[], float]
"""The wall clock, as `time.time`."""


@dataclass(frozen=True)
class Inputs:
    """What has arrived for a job."""

    tensors: Tensors
    """The named arrays of all blobs that the job starts from."""

    encoder: Path | None = None
    """The bundle with the round's encoder, for a device that does not train it; None where the job names none."""


class Device(Protocol):
    """What the common part of an agent (`TaskRunner`) offers to the task of any purpose."""

    config: AgentConfig
    """The device's configuration."""

    tier: str
    """``train`` or ``head``: whether this device can train encoders."""

    resources: Resources
    """Samples, model, outbox and client state."""

    @property
    def now(self) -> Clock:
        """The wall clock, which times of files in the watch folder are compared with."""

    @property
    def entropy(self) -> Callable[[], int]:
        """Where the noise of differential privacy comes from: 256 random bits for each update."""

    @property
    def secure_sums(self) -> SecureSums:
        """The device's part in secure sums, whose secrets are in memory alone."""

    def read_samples(self, task: Task) -> tuple[Samples, Samples]:
        """Return the device's training samples and held-out samples.

        Raises:
            DataError: they do not fit the task.
        """

    def session(self, job: Job) -> Session:
        """Return the session in which the jobs of this job's run train."""

    def is_cancelled(self, job: Job) -> bool:
        """Return whether the coordinator has ended this job meanwhile."""

    def remove_ended_runs(self, run: str) -> None:
        """Remove the client state of the oldest runs where ``run`` begins on this device."""

    def offer(self, job: Job, tensors: Tensors, samples: int, metrics: Mapping[str, float]) -> UpdateManifest:
        """Put an update into the outbox, with the sample count and those metrics that may leave the device."""

    def offer_exchange(self, job: Job, tensors: Tensors) -> UpdateManifest:
        """Put what belongs to a secure sum beside its updates into the outbox."""

    def deliver(self, job: Job, outcome: Outcome) -> UpdateManifest:
        """Save the client state of a round, then put its update into the outbox."""

    def report(self, job: Job, head: str, overall: float | None, right: np.ndarray | None) -> Report:
        """Return the report about the personal model after the last round; see `TaskRunner.report`."""


class PurposeTask(ABC):
    """What a device does for jobs of one purpose. It keeps nothing between two jobs: one object serves all of them."""

    is_recorded: ClassVar[bool] = True
    """Whether the coordinator's journal has what is sent, so that the device notes the receipt for an audit."""

    @abstractmethod
    def run(self, device: Device, job: Job, inputs: Inputs) -> UpdateManifest | Report:
        """Do the job.

        Args:
            device: What the common part of the agent offers.
            job: The job, whose task is here (`Job.with_task`).
            inputs: What has arrived for it.

        Returns:
            The update, which is in the outbox now, or a report, with which the job is over.

        Raises:
            MissingCapability: this device cannot do jobs of this purpose.
            PrivacyRefused: the job asks for more than ``[privacy]`` lets out.
            DataError: the device's data do not fit the task.
            TrainingFailed: training stopped.
            TrainingCancelled: the coordinator ended the job meanwhile.
        """

    def state_before(self, job: Job) -> int:
        """Return the round before which the newest client state is what the job starts from."""
        return job.round


def require_training_tier(device: Device) -> None:
    """Return quietly where this device trains encoders.

    Raises:
        MissingCapability: it is of another tier.
    """
    if device.tier != "train":
        raise MissingCapability(
            f"agent '{device.config.id}' is of tier '{device.tier}' and does not train encoders", is_public=True
        )
