"""The task runner of an agent: what all its tasks have in common, and the choice of the one that does a job."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.config import AgentConfig
from ...core.task import Task, Tensors
from ...privacy.policy import Ledger, public_report, sample_count, without_withheld
from ...run_folder.layout import remove_all_runs, remove_ended_runs
from ...wire.messages.down import Install, Job, job_key
from ...wire.messages.fields import JobKey
from ...wire.messages.up import Report, UpdateManifest
from ..data_check import check_beside
from ..own_method import method_for
from ..release_record import machine_start
from .bundles import BundleInUse
from .install import InstallTask
from .purpose import Inputs
from .refit import CollectTask, RefitTask
from .resources import Resources, resident_mb
from .table import TASKS

if TYPE_CHECKING:
    import numpy as np

    from ...client import Outcome, Session
    from ...data import Samples
    from ..secure import SecureSums

log = logging.getLogger(__name__)


class TaskRunner:
    """Runs the tasks of an agent under its configuration.

    It is what tasks know as their `purpose.Device`, and those with bundles and heads as their `install.HeadDevice`.
    """

    def __init__(
        self,
        config: AgentConfig,
        tier: str,
        *,
        resources: Resources | None = None,
        now: Callable[[], float] = time.time,
        entropy: Callable[[], int] = lambda: secrets.randbits(256),
        machine: Callable[[], str] = machine_start,
        beside: bool = False,
    ) -> None:
        """Prepare the tasks of a device; nothing is read but which bundle is in use.

        Args:
            config: The device's configuration.
            tier: ``train`` or ``head``.
            resources: Samples, model, outbox and client state; by default those that the configuration names.
            now: The wall clock, as `time.time`, which the times of files in the watch folder are compared with.
            entropy: Where the noise of differential privacy comes from, 256 bits for each update.
            machine: Which start of the machine this is.
            beside: Whether new bundles are prepared in a child process.
        """
        self.config = config
        self.tier = tier
        self.now = now
        self.entropy = entropy
        self.resources = Resources(config) if resources is None else resources
        self.outbox = self.resources.outbox
        self.samples = 0
        """How many training samples the device has; 0 before they are read."""

        self.bundles = BundleInUse(config, tier, now, machine)
        self._install = InstallTask(beside=beside)
        self._cancelled: JobKey | None = None
        self._secure_sums: SecureSums | None = None

    # --- what the agent's loop has done --------------------------------------------------------------------------

    def do(self, job: Job, received: Tensors, encoder: Path | None = None) -> UpdateManifest | Report:
        """Do a job: the class of its purpose does it, see `table`.

        Args:
            job: The job, whose task is here (`Job.with_task`).
            received: The named arrays of all blobs that the job starts from.
            encoder: The bundle that the job names, for a device that does not train the encoder.

        Returns:
            The update, which is in the outbox now, or the report after the last round.

        Raises:
            MissingCapability: this device cannot do it.
            PrivacyRefused: the job asks for more than ``[privacy]`` lets out.
            DataError: its data do not fit the task.
            TrainingFailed: training stopped.
            TrainingCancelled: it was stopped by `cancel`.
        """
        return TASKS[job.purpose].run(self, job, Inputs(received, encoder))

    def install(self, message: Install, path: Path) -> Report:
        """Install the bundle at ``path``; see `InstallTask.run`."""
        return self._install.run(self, message, path)

    def refit(self) -> None:
        """Fit a head for the bundle in use; see `RefitTask.run`."""
        RefitTask().run(self)

    def collect(self) -> bool:
        """Take in new samples and refit where there are any; see `CollectTask.run`."""
        return CollectTask().run(self)

    def check(self, task: Task) -> None:
        """Return quietly when local data and head fit the task.

        Raises:
            DataError: the data are of another form, or have other classes.
            UsageError: source or head cannot be as they are configured.
        """
        check_beside(self.config, task)

    def cancel(self, key: JobKey | None) -> None:
        """Stop the training of a job at its next step, because its round is over; from another thread.

        ``key`` says which job; None: no job is cancelled any more.
        """
        self._cancelled = key

    def release_memory(self) -> None:
        """Return freed memory to the system until the next job."""
        if "torch" in sys.modules:
            from ...core.limits import give_freed_memory_back

            give_freed_memory_back()

    def forget_runs(self) -> int:
        """Remove the client state of all runs, which are of another federation; return the number of runs."""
        self.resources.forget_session()
        return remove_all_runs(self.config.state / "runs")

    def facts(self) -> dict[str, str | int | float | bool | None]:
        """Return what the coordinator may know of this device's process and machine."""
        return {"rss_mb": round(resident_mb(), 1), "torch_loaded": "torch" in sys.modules, "cores": os.cpu_count() or 1}

    # --- what the tasks use ----------------------------------------------------------------------------------------

    @property
    def secure_sums(self) -> SecureSums:
        """The device's part in secure sums, made when the first one begins: it brings numpy and cryptography."""
        if self._secure_sums is None:
            from ..secure import SecureSums

            self._secure_sums = SecureSums(self.config.id, self.config.state)
        return self._secure_sums

    def is_cancelled(self, job: Job) -> bool:
        """Return whether `cancel` was called for this job."""
        return self._cancelled == job_key(job)

    def read_samples(self, task: Task) -> tuple[Samples, Samples]:
        """Return training samples and held-out samples, and note how many there are to train on.

        Raises:
            DataError: they do not fit the task, or none is left to train on.
        """
        train, test = self.resources.samples(task)
        self.samples = len(train)
        return train, test

    def remove_ended_runs(self, run: str) -> None:
        """Remove the client state of the oldest runs when a run begins here."""
        folder = self.config.state / "runs"
        keep = self.config.keep_runs
        if (folder / run).is_dir():
            return
        removed = remove_ended_runs(folder, run, keep)
        if removed:
            log.info("runs_removed runs=%s: the newest %d are kept", ",".join(removed), keep)

    def session(self, job: Job) -> Session:
        """Return the session in which the jobs of a run train."""
        return self.resources.session(job, lambda: self._new_session(job))

    def _new_session(self, job: Job) -> Session:
        """Return a session for a job's run, with the method's own file where it is one of the operator's.

        Raises:
            MissingCapability: this device has no copy of that file.
            DataError: its data do not fit the task.
        """
        import torch

        from ... import methods
        from ...client import Arrays, Session

        if self.config.training.threads:
            torch.set_num_threads(self.config.training.threads)
        train, test = self.read_samples(job.task)
        session = Session(
            methods.create(method_for(self.config.training, job), job.params),
            job.task,
            self.config.id,
            Arrays(train.inputs, train.labels),
            Arrays(test.inputs, test.labels),
            seed=job.seed,
            device=self.config.training.device,
            model=self.resources.model(job),
            evaluate_after=self.resources.evaluate_after,
            precision=self.config.training.precision,
            augmentation=self.resources.augmentation,
        )
        if session.precision == "bfloat16":
            session.precision = self.resources.precision(job.run, session)
        return session

    def deliver(self, job: Job, outcome: Outcome) -> UpdateManifest:
        """Save the client state, then put the update into the outbox."""
        self.resources.state_files(job.run).write(job.round, outcome.kept.personal, outcome.kept.memory)
        return self.offer(job, outcome.update, outcome.samples, outcome.metrics)

    def offer(self, job: Job, tensors: Tensors, samples: int, metrics: Mapping[str, float]) -> UpdateManifest:
        """Put an update into the outbox, with the count and the metrics that may leave."""
        policy = self.config.privacy
        has_noise = policy.noise > 0 or (job.privacy is not None and job.privacy.noise > 0)
        if self.resources.counts_updates and not has_noise:
            Ledger(self.config.state, policy).note_without_noise()
        return self._put(job, tensors, samples, metrics)

    def offer_exchange(self, job: Job, tensors: Tensors) -> UpdateManifest:
        """Put what belongs to a secure sum beside its updates into the outbox: no sample can be seen in it."""
        return self._put(job, tensors, 1, {})

    def _put(self, job: Job, tensors: Tensors, samples: int, metrics: Mapping[str, float]) -> UpdateManifest:
        policy = self.config.privacy
        shown_metrics = without_withheld(policy, metrics)
        return self.outbox.put(tensors, job_key(job), sample_count(policy, samples), shown_metrics, job.privacy)

    def report(self, job: Job, head: str, overall: float | None, right: np.ndarray | None) -> Report:
        """Return the report about the personal model, beside the shared one and what the device could do alone.

        Args:
            job: The job that the report answers.
            head: Name of the head of the personal model.
            overall: Accuracy (0..1) of the shared model on held-out samples (``acc.global``); None: there is none.
            right: (n,) bool, which held-out samples the personal model answers right; None without such samples.
        """
        from ...personal.personalize import Scores, alone, log_if_better_alone, of_one_class

        train, test = self.read_samples(job.task)
        is_wanted = self.config.head.local and right is not None
        local = alone(train, test, job.task.num_classes) if is_wanted else None
        scores = Scores.of(right, overall, local)
        if self.resources.logs_better_alone:
            log_if_better_alone(scores)
        report = Report(
            run=job.run,
            samples=len(train),
            support=len(test),
            one_class=of_one_class(train, test),
            head=head,
            rss_mb=resident_mb(),
            torch_loaded="torch" in sys.modules,
            **scores.reported(),
        )
        return public_report(self.config.privacy, report)
