"""Jobs ``activation_ranges``: send the smallest and largest value of each step of the encoder, for its int8 variant."""

from __future__ import annotations

from ...wire.messages.down import Job
from ...wire.messages.up import UpdateManifest
from .purpose import Device, Inputs, PurposeTask, require_training_tier
from .sessions import open_session


class ActivationRangesTask(PurposeTask):
    """Run the received encoder on the device's own training samples and note the range of each of its steps."""

    def state_before(self, job: Job) -> int:
        """Return the round after the job's own: the job is about the encoder that this round has left."""
        return job.round + 1

    def run(self, device: Device, job: Job, inputs: Inputs) -> UpdateManifest:
        """Put the ranges into the outbox; see `PurposeTask.run`."""
        require_training_tier(device)
        device.remove_ended_runs(job.run)
        session, _ = open_session(device, job, self.state_before(job))
        train, _ = device.read_samples(job.task)
        return device.offer(job, session.activation_ranges(inputs.tensors), len(train), {})
