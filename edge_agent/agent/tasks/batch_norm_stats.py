"""Jobs ``batch_norm_stats``: send the encoder's batch norm tensors, which stay on the device otherwise."""

from __future__ import annotations

from ...wire.messages.down import Job
from ...wire.messages.up import UpdateManifest
from .purpose import Device, Inputs, PurposeTask, require_training_tier
from .sessions import open_session


class BatchNormStatsTask(PurposeTask):
    """Read the batch norm tensors out of the client state after a round, for a release to devices that never train."""

    def state_before(self, job: Job) -> int:
        """Return the round after the job's own: the job is about the state that this round has left."""
        return job.round + 1

    def run(self, device: Device, job: Job, inputs: Inputs) -> UpdateManifest:  # noqa: ARG002 - nothing is received
        """Put the tensors into the outbox; see `PurposeTask.run`."""
        require_training_tier(device)
        device.remove_ended_runs(job.run)
        session, state = open_session(device, job, self.state_before(job))
        train, _ = device.read_samples(job.task)
        return device.offer(job, session.norm_tensors(state), len(train), {})
