"""What happens to an update between the training and the outbox, as values: noise, and the masks of a secure sum.

Both are prepared before the training, which would be in vain where they are refused, and applied after it. Where a job
asks for neither, the value that does nothing takes their place, so that the training has no case for them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol

from ...core.task import Tensors
from ...privacy.policy import Ledger, sample_count
from ...wire.messages.down import Job
from .purpose import Device, Inputs

if TYPE_CHECKING:
    from ...client import Outcome
    from ...methods.base import Method
    from ...privacy.noise import Mechanism


class UpdateStep(Protocol):
    """Changes the outcome of a training before it leaves the device."""

    def apply(self, method: Method, received: Tensors, outcome: Outcome) -> Outcome:
        """Return the outcome as it goes on.

        Args:
            method: The method of the run.
            received: The tensors that the training started from.
            outcome: What came of the training, or of the step before.
        """


class Unchanged:
    """The step that does nothing."""

    def apply(self, method: Method, received: Tensors, outcome: Outcome) -> Outcome:  # noqa: ARG002 - as `UpdateStep`
        """Return the outcome as it is."""
        return outcome


class AddedNoise:
    """Differential privacy: the device clips its update, adds noise, and notes on disk what that has cost."""

    def __init__(self, device: Device, mechanism: Mechanism, ledger: Ledger) -> None:
        self._entropy = device.entropy
        self._mechanism = mechanism
        self._ledger = ledger

    def apply(self, method: Method, received: Tensors, outcome: Outcome) -> Outcome:
        """Return the outcome with noise, a weight of 1, and the budget that is spent among its metrics."""
        import numpy as np

        rng = np.random.default_rng(self._entropy())
        update = self._mechanism.apply(method, outcome.update, received, rng)
        spent = self._ledger.spend(self._mechanism.noise)  # on disk before the update: a kill in between counts twice
        # A weight of 1 for everybody: sample counts would leave, and let one device move the mean by more.
        return replace(outcome, update=update, samples=1, metrics={**outcome.metrics, **spent})


def noise_for(device: Device, job: Job) -> UpdateStep:
    """Return what differential privacy makes of an outcome, within the device's budget.

    Raises:
        PrivacyRefused: another update would exceed the budget.
    """
    policy = device.config.privacy
    if not policy.wants_noise and job.privacy is None:
        return Unchanged()
    from ...privacy.noise import Mechanism

    mechanism = Mechanism.of(policy, job.privacy)
    ledger = Ledger(device.config.state, policy)
    if mechanism is None:
        return Unchanged()
    ledger.check(mechanism.noise)
    return AddedNoise(device, mechanism, ledger)


class SumMask:
    """The masks of a secure sum: of the update nobody sees more than what it adds to the sum."""

    def __init__(self, device: Device, job: Job, exchanged: Tensors) -> None:
        """``exchanged``: what the sum needs of the other devices, as the job has brought it."""
        self._device = device
        self._job = job
        self._exchanged = exchanged

    def apply(self, method: Method, received: Tensors, outcome: Outcome) -> Outcome:
        """Return the outcome with its update as masked integers, which hold its weight, too."""
        masked = self.of_update(method.weighting, received, outcome.update, outcome.samples)
        return replace(outcome, update=masked, samples=1)  # the weight is in the sum

    def of_update(
        self, weighting: Literal["samples", "uniform"], received: Tensors, update: Tensors, samples: int
    ) -> Tensors:
        """Return an update as masked integers, which hold its weight, too."""
        from ..secure import origin_of

        job = self._job
        weight = 1 if weighting == "uniform" else sample_count(self._device.config.privacy, samples)
        origin = origin_of(job, received)
        return self._device.secure_sums.masked(job, self._exchanged, update, weight, origin)


def mask_for(device: Device, job: Job, inputs: Inputs) -> tuple[SumMask | Unchanged, Tensors]:
    """Return how a job's update is masked, and the tensors that its training starts from.

    Raises:
        UpdateRejected: the agent was restarted since it sent its keys for the sum that the job is part of.
    """
    if not job.session:
        return Unchanged(), inputs.tensors
    from ...privacy.secure_sum.tensors import parted

    exchanged, received = parted(inputs.tensors)
    device.secure_sums.of(job)  # before the training, which would be in vain
    return SumMask(device, job, exchanged), received
