"""What the tasks of a device share: its samples, the session of the run, the outbox and the client state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, get_args

from ...core.config import AgentConfig, Precision
from ...core.errors import DataError, StateError
from ...core.limits import resident_bytes
from ...core.own_folders import make_folder
from ...core.storage import read_json, write_json
from ...core.task import Task
from ...run_folder.client_state import ClientStateFiles
from ...run_folder.layout import PRECISION_FILE, RUN_FOLDER
from ...wire.messages.down import Job
from ..transfers import Outbox

if TYPE_CHECKING:
    from ...client import Built, Session
    from ...data import Samples


class Resources:
    """Samples, model, outbox and client state of a device, which its tasks use."""

    evaluate_after = False
    augmentation = ""
    """Whether clients are evaluated once more after local training, whatever the method says."""

    counts_updates = True
    """Whether updates without noise are counted on disk, for a device that adds noise later."""

    logs_better_alone = True
    """Whether a device that is better off alone says so in its log."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.outbox = Outbox(config.state / "outbox", config.privacy)
        self._session: tuple[str, Session] | None = None
        self._data: tuple[Task, tuple[Samples, Samples]] | None = None

    def samples(self, task: Task) -> tuple[Samples, Samples]:
        """Return samples to train on and held-out ones, read once for each task.

        Raises:
            DataError: they do not fit the task, or none is left to train on.
        """
        if self._data is None or self._data[0] != task:
            parts = self.read(task)
            if not len(parts[0]):
                source = self.config.data.source
                raise DataError(f"{source}: no training samples are left after the split; lower data.test_fraction")
            self._data = (task, parts)
        return self._data[1]

    def read(self, task: Task) -> tuple[Samples, Samples]:
        """Read the samples that the configuration names: those to train on, and held-out ones."""
        from ...data.partition import own_samples

        return own_samples(self.config.data, self.config.id, task.input, task.class_names)

    def model(self, job: Job) -> Built | None:  # noqa: ARG002 - of use to those who share a process
        """Return the model that several clients use in turn; None: the session builds its own."""
        return None

    def state_files(self, run: str) -> ClientStateFiles:
        """Return the files of the client state of a run."""
        return ClientStateFiles(self.config.state / "runs" / run)

    def session(self, job: Job, make: Callable[[], Session]) -> Session:
        """Return the session of the job's run, made by ``make`` at its first job."""
        if self._session is None or self._session[0] != job.run:
            self._session = (job.run, make())
        return self._session[1]

    def forget_session(self) -> None:
        """Have the next job make a new session."""
        self._session = None

    def precision(self, run: str, session: Session) -> Precision:
        """Return the precision of the training steps of a run.

        It is timed before the first job and saved, so that a restart changes no bits.
        """
        path = self.state_files(run).folder / PRECISION_FILE
        record = None
        with contextlib.suppress(StateError):  # damaged: timed once more
            record = read_json(path)
        if record is not None and record.get("precision") in get_args(Precision):
            saved: Precision = record["precision"]
            return saved
        times = session.step_times()
        times.log()
        make_folder(path.parent, RUN_FOLDER)
        write_json(path, times.as_json())
        return times.chosen


def resident_mb() -> float:
    """Return the memory of this process in RAM, in MB (10^6 bytes); 0 where the system does not report it."""
    return (resident_bytes() or 0) / 1e6
