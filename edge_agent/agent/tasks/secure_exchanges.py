"""Jobs around a secure sum: ``secure_keys`` and ``secure_shares`` before the masked updates, ``secure_unmask`` after.

A device sends its public keys, then shares of its secrets encrypted for the others. The masked updates themselves are
jobs ``train`` with a session. Then it reveals one share for each other device, by which the coordinator takes the masks
off the sum. Each exchange is repeated by the coordinator where a message is lost; a device that was restarted has lost
its secrets and refuses (`edge_agent.agent.secure`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from ...core.task import Tensors
from ...privacy.policy import check_job, declared_least
from ...wire.messages.down import Job
from ...wire.messages.up import UpdateManifest
from .purpose import Device, Inputs, PurposeTask
from .sessions import check_announced


class _ExchangeTask(PurposeTask):
    """One exchange of a secure sum: what was received decides what is sent, and nothing is trained."""

    is_recorded: ClassVar[bool] = False

    def run(self, device: Device, job: Job, inputs: Inputs) -> UpdateManifest:
        """Put what this exchange sends into the outbox; see `PurposeTask.run`."""
        from ...privacy.secure_sum.tensors import parted

        device.remove_ended_runs(job.run)
        received, _ = parted(inputs.tensors)
        return device.offer_exchange(job, self.answer(device, job, received))

    @abstractmethod
    def answer(self, device: Device, job: Job, received: Tensors) -> Tensors:
        """Return what this device sends.

        Args:
            device: What the common part of the agent offers.
            job: The job of the exchange.
            received: The arrays of the exchange, from the other devices by way of the coordinator.
        """


class SecureKeysTask(_ExchangeTask):
    """Begin an attempt at a sum and send this device's public keys."""

    def answer(self, device: Device, job: Job, received: Tensors) -> Tensors:  # noqa: ARG002 - the first exchange
        """Return the keys, unless the update that would follow is known to be refused on this device."""
        if device.tier != "train":
            # Without torch there is no session; its parameters say all that the policy asks for.
            check_job(device.config.privacy, job, declared_least(job.params))
            return device.secure_sums.begin(job)
        session = device.session(job)
        check_job(device.config.privacy, job, session.method.least_class_count)
        check_announced(device, job, session)
        return device.secure_sums.begin(job)


class SecureSharesTask(_ExchangeTask):
    """Send shares of this device's secrets, encrypted for each of the others."""

    def answer(self, device: Device, job: Job, received: Tensors) -> Tensors:
        """Return the shares of this device's secrets, each encrypted for another device."""
        return device.secure_sums.shares(job, received)


class SecureUnmaskTask(_ExchangeTask):
    """Reveal, for each other device, the one share by which its masks leave the sum."""

    def answer(self, device: Device, job: Job, received: Tensors) -> Tensors:
        """Return the shares that are revealed."""
        return device.secure_sums.unmask(job, received)
