"""Jobs ``train``: train a round on local data and send the update."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from ...privacy.policy import check_update
from ...run_folder.checkpoint import TrainingCheckpointFile
from ...version import __version__
from ...wire.messages.down import Job, job_key
from ...wire.messages.up import UpdateManifest
from .purpose import Device, Inputs, PurposeTask, require_training_tier
from .sessions import check_announced, open_session, update_facts
from .update_steps import mask_for, noise_for

if TYPE_CHECKING:
    from ...client import ClientState, Session


class TrainTask(PurposeTask):
    """Train from what was received and from the client state; the update leaves through noise and masks."""

    def run(self, device: Device, job: Job, inputs: Inputs) -> UpdateManifest:
        """Train and put the update into the outbox; see `PurposeTask.run`."""
        require_training_tier(device)
        device.remove_ended_runs(job.run)

        # What is known to fail after the training is refused before it: keys that are gone, names that may not leave,
        # and a budget that is spent.
        mask, received = mask_for(device, job, inputs)
        session, state = open_session(device, job, self.state_before(job))
        check_announced(device, job, session)
        noise = noise_for(device, job)

        # Imported once the job is known to be done: the package of methods brings numpy.
        from ...methods.values import TrainingControl

        checkpoint = _checkpoint(device, job, session, state)
        control = TrainingControl(job.work, lambda: device.is_cancelled(job), checkpoint)
        facts = update_facts(device, job, session, received)
        outcome = session.train(
            received, state, round_number=job.round, rounds=job.rounds, evaluate=job.evaluate, control=control
        )

        # Before noise and masks, which hide what an array holds; and masks last, since integers take no noise.
        check_update(device.config.privacy, outcome.update, facts)
        outcome = noise.apply(session.method, received, outcome)
        outcome = mask.apply(session.method, received, outcome)

        # The checkpoint goes when the update is in the outbox: an agent that is killed before resumes from it.
        manifest = device.deliver(job, outcome)
        checkpoint.remove()
        return manifest


def _checkpoint(device: Device, job: Job, session: Session, state: ClientState) -> TrainingCheckpointFile:
    """Return the checkpoint inside this training, which names everything that its result depends on."""
    folder = device.resources.state_files(job.run).folder
    every_s = device.config.training.checkpoint_s
    training = ""
    if every_s > 0:
        steps = (session.precision, str(session.device), __version__)
        received = (ref.digest for ref in job.blobs)
        training = json.dumps([*job_key(job), *received, job.work, *steps, session.samples_digest, state.digest()])
    return TrainingCheckpointFile(folder, training, every_s, time.monotonic)
