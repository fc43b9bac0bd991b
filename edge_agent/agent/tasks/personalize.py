"""Jobs ``personalize``: after the last round, make the personal model and report how good it is."""

from __future__ import annotations

from ...run_folder.client_state import LAST_ROUND
from ...wire.messages.down import Job
from ...wire.messages.up import Report
from .purpose import Device, Inputs, PurposeTask, require_training_tier
from .sessions import open_session


class PersonalizeTask(PurposeTask):
    """Finish the method on this device, save the personal model, and report its accuracy on held-out samples."""

    def state_before(self, job: Job) -> int:  # noqa: ARG002 - whatever the round is
        """Return the number of the state after the last round, so that a repeated job starts as the first did."""
        return LAST_ROUND

    def run(self, device: Device, job: Job, inputs: Inputs) -> Report:
        """Personalize and report; see `PurposeTask.run`."""
        require_training_tier(device)
        device.remove_ended_runs(job.run)
        session, state = open_session(device, job, self.state_before(job))
        outcome = session.finish(inputs.tensors, state, rounds=job.rounds)
        files = device.resources.state_files(job.run)
        files.write(LAST_ROUND, outcome.kept.personal, outcome.kept.memory)
        return device.report(job, session.method.head_name, outcome.metrics.get("acc.global"), outcome.right)
