"""Jobs ``contribute``: take part in a round without torch, by what can be computed on features of a frozen encoder."""

from __future__ import annotations

from ...privacy.policy import check_job, declared_least
from ...wire.messages.down import Job
from ...wire.messages.up import UpdateManifest
from .purpose import Device, Inputs, PurposeTask
from .train import TrainTask
from .update_steps import SumMask, mask_for


class ContributeTask(PurposeTask):
    """Train what the method has for a device of tier ``head``, on features of the encoder in the round's bundle."""

    def run(self, device: Device, job: Job, inputs: Inputs) -> UpdateManifest:
        """Compute the contribution and put it into the outbox; see `PurposeTask.run`."""
        # Without the frozen encoder there is nothing to compute features with: the device trains it, or says that it
        # cannot.
        if inputs.encoder is None:
            return TrainTask().run(device, job, inputs)
        from ..head_tier import contribute_round, weighting_of

        # The method's file needs torch; its parameters are all in the job.
        check_job(device.config.privacy, job, declared_least(job.params))
        device.remove_ended_runs(job.run)
        # Keys that are gone are refused before anything is computed.
        mask, received = mask_for(device, job, inputs)
        parts = device.read_samples(job.task)
        update, metrics = contribute_round(device.config, job, received, inputs.encoder, parts, device.now)
        samples = len(parts[0])
        if isinstance(mask, SumMask):
            update = mask.of_update(weighting_of(device.config, job), received, update, samples)
            samples = 1  # the weight is in the sum
        return device.offer(job, update, samples, metrics)
