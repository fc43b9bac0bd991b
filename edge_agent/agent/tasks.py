"""The tasks of a device: train a round, personalize after the last one, install a bundle and refit its head.

`TaskRunner` runs them, in the worker beside the agent's loop; `TaskQueue` decides in the loop which one is next. Torch
is imported only when a training job opens, and numpy not before there is a job or a bundle.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from .. import __version__
from ..core.children import Done, Worker
from ..core.config import AgentConfig, Precision
from ..core.errors import (
    BundleError,
    DataError,
    HeadwaterError,
    MissingCapability,
    PrivacyRefused,
    StateError,
    SumRefused,
    TrainingCancelled,
    TransferTooSlow,
    UsageError,
)
from ..core.limits import resident_bytes
from ..core.own_folders import make_folder
from ..core.storage import read_json, write_json
from ..core.task import Task, Tensors
from ..privacy.policy import (
    Ledger,
    UpdateFacts,
    check_job,
    check_tensors,
    check_update,
    declared_least,
    public_report,
    sample_count,
    without_withheld,
)
from ..wire.messages import down, fields, up
from ..wire.messages.down import Install, Job, job_key
from ..wire.messages.fields import JobKey
from ..wire.messages.up import Report, UpdateManifest
from .data_check import check_beside
from .health import Condition, Kind, whole_message
from .local_state import (
    PRECISION_FILE,
    RUN_FOLDER,
    ClientStateFiles,
    TrainingCheckpointFile,
    make_room,
    note_receipt,
    remove_all_runs,
    remove_ended_runs,
)
from .own_method import method_for
from .release_record import (
    MOST_STARTS,
    START_GRACE_S,
    ReleaseRecord,
    Trial,
    WaitFile,
    Waiting,
    clean,
    machine_start,
    utc_text,
)
from .transfers import Downloads, Link, Outbox, Uploads

if TYPE_CHECKING:
    import numpy as np

    from ..client import Built, ClientState, Outcome, Session
    from ..data import Samples
    from ..methods.base import Method
    from .secure import SecureSums

log = logging.getLogger(__name__)

LAST_ROUND = 9_999_999


class Resources:
    """Samples, model, outbox and client state of a device, which its tasks use."""

    evaluate_after = False
    """Whether clients are evaluated once more after local training, whatever the method says."""

    counts_updates = True
    """Whether updates without noise are counted on disk, for a device that adds noise later."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.outbox = Outbox(config.state / "outbox", config.privacy)
        self._session: tuple[str, Session] | None = None
        self._data: tuple[Task, tuple[Samples, Samples]] | None = None

    def samples(self, task: Task) -> tuple[Samples, Samples]:
        """Samples to train on and held-out ones, read once for each task.

        Raises:
            DataError: they do not fit the task, or none is left to train on.
        """
        if self._data is None or self._data[0] != task:
            result = self.read(task)
            if not len(result[0]):
                source = self.config.data.source
                raise DataError(f"{source}: no training samples are left after the split; lower data.test_fraction")
            self._data = (task, result)
        return self._data[1]

    def read(self, task: Task) -> tuple[Samples, Samples]:
        """The samples that the configuration names."""
        from ..data.partition import own_samples

        return own_samples(self.config.data, self.config.id, task.input, task.class_names)

    def model(self, job: Job) -> Built | None:  # noqa: ARG002 - of use to those who share a process
        """The model that several clients use in turn; None: the session builds its own."""
        return None

    def state_files(self, run: str) -> ClientStateFiles:
        """The client state of a run."""
        return ClientStateFiles(self.config.state / "runs" / run)

    def session(self, job: Job, make: Callable[[], Session]) -> Session:
        """The session of the job's run, made once."""
        if self._session is None or self._session[0] != job.run:
            self._session = (job.run, make())
        return self._session[1]

    def forget_session(self) -> None:
        """The next job makes a new session."""
        self._session = None

    def precision(self, run: str, session: Session) -> Precision:
        """Precision of the steps of a run: timed before the first, and saved, so that a restart changes no bits."""
        path = self.state_files(run).folder / PRECISION_FILE
        known = None
        with contextlib.suppress(StateError):  # damaged: timed once more
            known = read_json(path)
        if known is not None and known.get("precision") in get_args(Precision):
            saved: Precision = known["precision"]
            return saved
        times = session.step_times()
        times.log()
        make_folder(path.parent, RUN_FOLDER)
        write_json(path, times.as_json())
        return times.chosen


class TaskRunner:
    """Runs the tasks of an agent under its configuration."""

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
        """``now``: as `time.time`, which the times of files in the watch folder are compared with.

        ``beside``: whether new bundles are prepared in a child process. ``entropy``: where the noise of differential
        privacy comes from, 256 bits for each update. ``machine``: which start of the machine this is.
        """
        self.config = config
        self.tier = tier
        self.now = now
        self._entropy = entropy
        self._machine = machine
        self._beside = beside
        self.resources = Resources(config) if resources is None else resources
        self.outbox = self.resources.outbox
        self.samples = 0
        self.rolled_back = ""
        self.releases = ReleaseRecord(config.state)
        self.bundle_id = self._running_bundle()
        self._cancelled: JobKey | None = None
        self._secure: SecureSums | None = None

    def facts(self) -> dict[str, str | int | float | bool | None]:
        """What the coordinator may know of this device."""
        return {"rss_mb": round(resident_mb(), 1), "torch_loaded": "torch" in sys.modules, "cores": os.cpu_count() or 1}

    def do(self, job: Job, received: Tensors) -> UpdateManifest | Report:
        """A training job: the update (in the outbox), or the report after the last round.

        Raises:
            MissingCapability: this device cannot train.
            PrivacyRefused: the job asks for more than ``[privacy]`` lets out.
            DataError: its data do not fit the task.
            TrainingFailed: training stopped.
            TrainingCancelled: it was stopped by `cancel`.
        """
        if self.tier != "train":
            raise MissingCapability(
                f"agent '{self.config.id}' is of tier '{self.tier}' and does not train encoders", is_public=True
            )
        self._remove_ended(job.run)
        given: Tensors = {}
        if job.session:
            from ..privacy.secure_sum.tensors import parted

            given, received = parted(received)
            if job.purpose in fields.EXCHANGES:
                return self._offer(job, self._exchange(job, given), 1, {})
            self._secure_sums().of(job)  # before the training, which would be in vain
        session = self.session(job)
        files = self.resources.state_files(job.run)
        check_job(self.config.privacy, job, session.method.least_class_count)
        from ..client import ClientState
        from ..core.limits import keep_freed_memory

        keep_freed_memory()
        kept = ClientState(*files.before(kept_before(job)))
        if job.purpose == "personalize":
            outcome = session.finish(received, kept, rounds=job.rounds)
            files.write(LAST_ROUND, outcome.kept.personal, outcome.kept.memory)
            return self.report(job, session.method.head_name, outcome.metrics.get("acc.global"), outcome.right)
        if job.purpose == "batch_norm_stats":
            train, _ = self._samples(job.task)
            return self._offer(job, session.norm_tensors(kept), len(train), {})
        if job.purpose == "activation_ranges":
            train, _ = self._samples(job.task)
            return self._offer(job, session.activation_ranges(received), len(train), {})
        self._check_announced(job, session)
        return self._train(job, session, received, kept, given)

    def _check_announced(self, job: Job, session: Session) -> None:
        """Refuse before the training what is known to be refused after it, by the names and shapes of the method."""
        check_tensors(self.config.privacy, session.shared)
        facts = self._update_facts(job, session, {})
        if not facts.is_shipped:
            check_update(self.config.privacy, session.announced_extras(), facts)

    def _update_facts(self, job: Job, session: Session, received: Tensors) -> UpdateFacts:
        """What the arrays of an update of this session are judged by."""
        import numpy as np

        from .. import methods

        train, _ = self._samples(job.task)
        return UpdateFacts(
            method=job.method,
            is_shipped=methods.registry.is_shipped(job.method),
            declared_least=session.method.least_class_count,
            shared=frozenset(session.shared),
            model_shapes=session.model_shapes,
            features=session.features,
            class_counts=np.bincount(train.labels, minlength=job.task.num_classes),
            buffers=session.shared_buffers,
            received=received,
        )

    def _secure_sums(self) -> SecureSums:
        if self._secure is None:
            from .secure import SecureSums

            self._secure = SecureSums(self.config.id, self.config.state)
        return self._secure

    def _exchange(self, job: Job, given: Tensors) -> Tensors:
        """What this device sends before and after its masked update; it refuses the job before it has sent a key."""
        if job.purpose == "secure_shares":
            return self._secure_sums().shares(job, given)
        if job.purpose == "secure_unmask":
            return self._secure_sums().unmask(job, given)
        session = self.session(job)
        check_job(self.config.privacy, job, session.method.least_class_count)
        self._check_announced(job, session)
        return self._secure_sums().begin(job)

    def _train(
        self, job: Job, session: Session, received: Tensors, kept: ClientState, given: Tensors
    ) -> UpdateManifest:
        """``given``: what a secure sum needs beside what is ``received``."""
        from ..methods.values import TrainingControl

        key = job_key(job)
        folder = self.resources.state_files(job.run).folder
        every_s = self.config.training.checkpoint_s
        training = ""
        if every_s > 0:
            device = (session.precision, str(session.device), __version__)
            received_now = (ref.digest for ref in job.blobs)
            training = json.dumps([*key, *received_now, job.work, *device, session.samples_digest, kept.digest()])
        noise = self._noise(job)
        checkpoint = TrainingCheckpointFile(folder, training, every_s, time.monotonic)
        control = TrainingControl(job.work, lambda: self._cancelled == key, checkpoint)
        facts = self._update_facts(job, session, received)
        outcome = session.train(
            received, kept, round_number=job.round, rounds=job.rounds, evaluate=job.evaluate, control=control
        )
        # Before noise and masks, which hide what an array holds.
        check_update(self.config.privacy, outcome.update, facts)
        if noise is not None:
            outcome = noise(session.method, received, outcome)
        if job.session:
            policy = self.config.privacy
            is_uniform = session.method.weighting == "uniform"
            weight = 1 if is_uniform else sample_count(policy, outcome.samples)
            from .secure import origin_of

            masked = self._secure_sums().masked(job, given, outcome.update, weight, origin_of(job, received))
            outcome = replace(outcome, update=masked, samples=1)  # the weight is in the sum
        manifest = self.deliver(job, outcome)
        checkpoint.remove()
        return manifest

    def _noise(self, job: Job) -> Callable[[Method, Tensors, Outcome], Outcome] | None:
        """What differential privacy makes of an outcome, within the device's budget; None where nobody asks for it.

        Raises:
            PrivacyRefused: another update would exceed the budget.
        """
        policy = self.config.privacy
        if not policy.wants_noise and job.privacy is None:
            return None
        import numpy as np

        from ..privacy.noise import Mechanism

        mechanism = Mechanism.of(policy, job.privacy)
        ledger = Ledger(self.config.state, policy)
        if mechanism is None:
            return None
        ledger.check(mechanism.noise)

        def noisy(method: Method, received: Tensors, outcome: Outcome) -> Outcome:
            rng = np.random.default_rng(self._entropy())
            update = mechanism.apply(method, outcome.update, received, rng)
            spent = ledger.spend(mechanism.noise)  # on disk before the update is: a kill in between counts it twice
            # A weight of 1 for everybody: sample counts would leave, and let one device move the mean by more.
            return replace(outcome, update=update, samples=1, metrics={**outcome.metrics, **spent})

        return noisy

    def cancel(self, key: JobKey | None) -> None:
        """Stop the training of this job at its next step, from another thread; its round is over. None: of no job."""
        self._cancelled = key

    def check(self, task: Task) -> None:
        """Return quietly when local data and head fit the task.

        Raises:
            DataError: the data are of another form, or have other classes.
            UsageError: source or head cannot be as they are configured.
        """
        check_beside(self.config, task)

    def release_memory(self) -> None:
        """Return freed memory to the system until the next job."""
        if "torch" in sys.modules:
            from ..core.limits import give_freed_memory_back

            give_freed_memory_back()

    def forget_runs(self) -> int:
        """Remove the client state of all runs, which are of another federation; returns the number of runs."""
        self.resources.forget_session()
        return remove_all_runs(self.config.state / "runs")

    def contribute(self, job: Job, received: Tensors, encoder: Path) -> UpdateManifest:
        """A round without training the encoder, which is in the bundle at ``encoder``: the update, in the outbox.

        Raises:
            MissingCapability: the method has nothing for a device that trains no encoder.
            PrivacyRefused: the job asks for more than ``[privacy]`` lets out.
            DataError: its data do not fit the task.
            TrainingFailed: its own training diverged.
        """
        from .head_tier import contribute_round

        # The method's file needs torch; its parameters are all in the job.
        check_job(self.config.privacy, job, declared_least(job.params))
        self._remove_ended(job.run)
        samples = self._samples(job.task)
        sent, metrics = contribute_round(self.config, job, received, encoder, samples, self.now)
        return self._offer(job, sent, len(samples[0]), metrics)

    def install(self, message: Install, path: Path) -> Report:
        """Verify a bundle, test it, refit the head, keep the better pair; returns what came out.

        The bundle is not tried, or not used, where its owner keeps another one meanwhile, nor where the agent has ended
        in `MOST_STARTS` preparations of it.

        Raises:
            BundleError: the bundle is damaged, or its encoder does not do what it did where it was made.
            DataError: local data do not fit its task.
        """
        from .candidate import prepare_beside
        from .head_tier import install_bundle, prepare_here, rejected

        if (declined := self.declined(message)) is not None:
            return declined
        prepare = prepare_beside if self._beside else prepare_here
        has_crashed = (ends := self.releases.prepares(message, self._machine()) - 1) >= MOST_STARTS
        try:
            if has_crashed:
                why = f"the agent ended {ends} times while it prepared bundle {message.bundle_id[:12]}"
                report = rejected(self.config, message, BundleError(why, is_public=True)).report
            else:
                report = install_bundle(
                    self.config,
                    message,
                    path,
                    self.now,
                    prepare=prepare,
                    switching=lambda: self.releases.switching(message, self.now()),
                )
        except BundleError as error:
            self.releases.refuse(message, str(error), self.now(), crashed=has_crashed)
            raise
        except Exception:
            self.releases.ended()
            raise
        self.bundle_id = report.bundle_id
        self.rolled_back = report.rolled_back
        self.samples = report.samples
        if report.bundle_id == message.bundle_id:
            self.releases.took(message, self._machine())
        elif report.kept:
            self.releases.ended()
        else:
            self.releases.refuse(message, report.rolled_back, self.now(), crashed=has_crashed)
        memory = {"rss_mb": resident_mb(), "torch_loaded": "torch" in sys.modules}
        return public_report(self.config.privacy, report.model_copy(update=memory))

    def started(self) -> None:
        """The agent starts: where it did not live with the bundle in use, it uses the one before again."""
        if self.tier != "head" or not (self.config.state / "bundles").is_dir():
            return
        clean(self.config)
        try:
            trial = self.releases.started(self._machine())
            if trial is not None and trial.starts > MOST_STARTS:
                self._fall_back(trial)
        except HeadwaterError as error:  # the pair in use stays
            log.warning("trial_unknown reason=%s", error)

    def stopped(self) -> None:
        """The agent stops on purpose, which says nothing against the bundle in use or one that is prepared."""
        try:
            self.releases.stopped()
        except StateError as error:
            log.warning("trial_unknown reason=%s", error)

    @property
    def on_trial(self) -> Trial | None:
        """The bundle in use, where it has yet to show that the agent lives with it: call `proved` then."""
        return self.releases.on_trial

    def proved(self, trial: Trial) -> None:
        """The agent lives with the bundle that is, or was, in use."""
        try:
            self.releases.proved(trial)
        except StateError as error:
            log.warning("trial_unknown reason=%s", error)

    def _fall_back(self, trial: Trial) -> None:
        """Use the bundle before again, with its head where that is still here; otherwise it is fitted again.

        Raises:
            StateError: there is no bundle before.
            BundleError: it is damaged.
        """
        from ..bundle import installed
        from ..heads import saved

        folder = self.config.state / "bundles"
        if installed.current_id(folder) == trial.bundle_id:
            bundle = installed.rollback(folder)
            with contextlib.suppress(HeadwaterError):
                saved.restore(self.config.state / "head", bundle.fingerprints)
        self.bundle_id = self._running_bundle()
        self.releases.fell_back(trial, installed.current_id(folder), self.now())
        self.rolled_back = self.releases.refused()[-1].reason
        log.error("fell_back bundle=%s reason=%s", trial.bundle_id[:12], self.rolled_back)

    def _remove_ended(self, run: str) -> None:
        """When a run begins here, remove the client state of the oldest ones."""
        folder = self.config.state / "runs"
        keep = self.config.keep_runs
        if not (folder / run).is_dir() and (removed := remove_ended_runs(folder, run, keep)):
            log.info("runs_removed runs=%s: the newest %d are kept", ",".join(removed), keep)

    def declined(self, message: Install) -> Report | None:
        """The report about a release that this device does not try: its owner, or the agent's end with it, says so."""
        why = self.releases.why_declined(message, self.now())
        if not why:
            return None
        self.rolled_back = why
        report = Report(
            run=message.run,
            about=message.bundle_id,
            release=message.release,
            bundle_id=self.bundle_id,
            rolled_back=why[:1000],
            kept=self.kept(),
            samples=self.samples,
            metrics={"rolled_back": 1.0},
        )
        return public_report(self.config.privacy, report)

    def kept(self) -> str:
        """Why this device keeps its bundle by its owner's choice; empty where it takes what is released."""
        try:
            return self.releases.kept(self.now())[:1000]
        except StateError:  # reported when a release comes
            return ""

    @property
    def lacks_head(self) -> bool:
        """Whether there is a bundle in use, and no head that was fitted on its features."""
        if self.bundle_id or self.tier != "head" or not (self.config.state / "bundles").is_dir():
            return False
        from ..bundle.installed import current_id

        try:
            return bool(current_id(self.config.state / "bundles"))
        except HeadwaterError:  # logged when it was looked at
            return False

    def refit(self) -> None:
        """Fit the head that the configuration names for the bundle in use, after its self-test.

        Raises:
            BundleError: the bundle is damaged, or does not do what it did where it was made.
            DataError: local data do not fit its task.
        """
        from .head_tier import refit_current

        self.bundle_id, self.samples = refit_current(self.config)

    def collect(self) -> bool:
        """Take in new samples, and refit where there are any, or no head; whether the head was refitted.

        Raises:
            HeadwaterError: as `refit`; the head in use stays.
        """
        from .head_tier import collect

        result = collect(self.config, self.now, lacks_head=self.lacks_head)
        if result is not None:
            self.bundle_id, self.samples = result
        return result is not None

    # --- inside ----------------------------------------------------------------------------------------------------

    def _running_bundle(self) -> str:
        """The id of the bundle in use; empty when there is none, or it and its head cannot be used together."""
        folder = self.config.state / "bundles"
        if not folder.is_dir():
            return ""
        from ..bundle import installed
        from ..heads import saved

        try:
            current = installed.current(folder)
            if current is None:
                return ""
            saved.load(self.config.state / "head", current.fingerprints)
        except HeadwaterError as error:
            log.warning("pair_unusable reason=%s", error)
            return ""
        return current.id

    def session(self, job: Job) -> Session:
        """The session in which the jobs of a run train."""
        return self.resources.session(job, lambda: self._new_session(job))

    def _new_session(self, job: Job) -> Session:
        import torch

        from .. import methods
        from ..client import Arrays, Session

        if self.config.training.threads:
            torch.set_num_threads(self.config.training.threads)
        train, test = self._samples(job.task)
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
        )
        if session.precision == "bfloat16":
            session.precision = self.resources.precision(job.run, session)
        return session

    def _samples(self, task: Task) -> tuple[Samples, Samples]:
        train, test = self.resources.samples(task)
        self.samples = len(train)
        return train, test

    def deliver(self, job: Job, outcome: Outcome) -> UpdateManifest:
        """Save the client state, then put the update into the outbox."""
        self.resources.state_files(job.run).write(job.round, outcome.kept.personal, outcome.kept.memory)
        return self._offer(job, outcome.update, outcome.samples, outcome.metrics)

    def _offer(self, job: Job, tensors: Tensors, samples: int, metrics: Mapping[str, float]) -> UpdateManifest:
        """Put an update into the outbox, with the count and the metrics that may leave."""
        policy = self.config.privacy
        has_noise = policy.noise > 0 or (job.privacy is not None and job.privacy.noise > 0)
        if self.resources.counts_updates and not has_noise and job.purpose not in fields.EXCHANGES:
            Ledger(self.config.state, policy).note_without_noise()
        kept = without_withheld(policy, metrics)
        return self.outbox.put(tensors, job_key(job), sample_count(policy, samples), kept, job.privacy)

    def report(self, job: Job, head: str, overall: float | None, right: np.ndarray | None) -> Report:
        """The report of acc.global, of the personal model's ``right`` (n,) answers, and of what the device does alone.

        ``right`` is None without held-out samples.
        """
        from ..personal.personalize import Scores, alone, log_if_better_alone, of_one_class

        train, test = self._samples(job.task)
        is_wanted = self.config.head.local and right is not None
        local = alone(train, test, job.task.num_classes) if is_wanted else None
        scores = Scores.of(right, overall, local)
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


def kept_before(job: Job) -> int:
    """The round before which the newest client state is what a job starts from."""
    if job.purpose == "personalize":
        return LAST_ROUND
    return job.round + 1 if job.purpose in fields.OUTSIDE_ROUNDS else job.round


def resident_mb() -> float:
    """Memory of this process in RAM, in MB (10^6 bytes); 0 where the system does not report it."""
    return (resident_bytes() or 0) / 1e6


JUDGED_APART_S = 0.5
"""Between two looks at whether a transfer can be over in time."""

REMEMBERED = 32
"""Jobs of which a repeated message is recognised; more than one round ever sends to one agent."""


Tried = Callable[[BaseException | None], None]
"""Called with the end of a fit: None, or why it failed."""


class TaskQueue:
    """The work of an agent. Every change of it continues by itself as far as it can."""

    def __init__(self, tasks: TaskRunner, downloads: Downloads, uploads: Uploads, worker: Worker, link: Link) -> None:
        self._tasks = tasks
        self._cache = downloads.cache
        self._downloads = downloads
        self._uploads = uploads
        self._worker = worker
        self._link = link
        self.condition = Condition()
        self.job: down.Job | None = None
        self._closes_at = float("inf")
        self._judged_at = float("-inf")
        self._install: down.Install | None = None
        self._working_on: JobKey | str | None = None
        self._heard: deque[tuple[str, int]] = deque(maxlen=REMEMBERED)
        self._installed: tuple[tuple[str, int], up.Report] | None = None
        """Blob and number of the release that was tried last, and what came out."""

        self.last_report: up.Report | None = None
        """The newest report that was sent since the start."""

        self.answered = Counter[str]()
        """Updates that the coordinator has ``accepted`` or ``rejected`` since the start."""

        self._switches_at = float("-inf")
        self._waits = WaitFile(tasks.config.state)
        self._waiting: Waiting | None = None
        """What was read from the disk at the start about the bundle that is to be tried."""

        self.room_bytes = 0
        """Bytes on the disk that the last requested job or bundle takes."""

    @property
    def is_working(self) -> bool:
        """Whether the worker is busy with a task."""
        return self._working_on is not None

    def on_job(self, job: down.Job) -> None:
        """The coordinator asks for a job. A repeated message changes nothing; a new message means doing it again."""
        key = job_key(job)
        stamp = (job.boot, job.seq)
        if job.boot and stamp in self._heard:
            return
        self._heard.append(stamp)
        self._closes_at = self._downloads.clock() + job.deadline_s
        if self._uploads.holds(key):
            if self._tasks.outbox.is_as_asked(job.privacy):
                self._uploads.offer_again()
                return
            self._uploads.drop(key)  # another noise is asked for now
        if (error := self._cannot_hold(job.refs)) is not None:
            self._report(error, key)
            return
        if self.job is None or job_key(self.job) != key:
            where = f"round={job.round}/{job.rounds} purpose={job.purpose} method={job.method}"
            log.info("job run=%s %s", fields.run_name(job.run), where)
        self.job = job
        if self._working_on != key:
            if isinstance(self._working_on, JobKey) and self._working_on.session:  # a secure sum that was restarted
                self._tasks.cancel(self._working_on)
            self._fetch()
        self.go_on()

    def on_install(self, message: down.Install) -> None:
        """The coordinator offers a bundle; of one that has just been tried, the report is sent again."""
        if self._install is not None and self._working_on == self._install.blob.digest == message.blob.digest:
            return
        about = JobKey(message.run, purpose=None)
        try:
            declined = self._tasks.declined(message)
        except StateError as damage:  # a release that was rolled back must not return because the record is damaged
            self._report(damage, about, "bundle", message.release)
            return
        if declined is not None:
            log.info("release_declined bundle=%s why=%s", message.bundle_id[:12], declined.rolled_back)
            self._link.send(declined)
            return
        if self._installed is not None and self._installed[0] == (message.blob.digest, message.release):
            self._link.send(self._installed[1].model_copy(update={"run": message.run}))
            return
        if (error := self._cannot_hold((message.blob,))) is not None:
            self._report(error, about, "bundle", message.release)
            return
        self._drop_install()
        self._install = message
        self._switches_at = self._downloads.clock() + message.activate_in_s
        if message.activate_in_s:
            self._waits.write(Waiting.of(message, self._tasks.now()))
        self._fetch()
        self.go_on()

    def on_cancel(self, message: down.Cancel) -> None:
        """The round is over for this agent."""
        log.info("cancelled run=%s round=%d reason=%s", fields.run_name(message.run), message.round, message.reason)
        install = self._install
        if install is not None and (install.run, 0) == (message.run, message.round):  # a bundle that is withdrawn
            self.forget_candidate()
            return
        self._drop(message)
        self._tasks.cancel(job_key(message))
        self._uploads.drop(job_key(message))
        self._fetch()

    def give_up_late(self) -> None:
        """Drop a job whose model or update cannot pass the link before the round closes, and say so at once."""
        job = self.job
        now = self._downloads.clock()
        if job is None or now < self._judged_at + JUDGED_APART_S or self._working_on == job_key(job):
            return
        self._judged_at = now
        left_s = self._closes_at - now
        if self._uploads.holds(job_key(job)):
            why = self._uploads.objection(left_s)
        else:
            why = self._downloads.objection(job.refs, left_s)
        if why:
            self._uploads.drop(job_key(job))
            self.job = None
            self._report(TransferTooSlow(why, is_public=True), job_key(job))
            self._fetch()

    def on_receipt(self, message: down.Receipt) -> None:
        """The coordinator has the update, or has rejected it: the job is done."""
        if not message.accepted:
            log.warning("update_refused reason=%s", message.reason)
        config = self._tasks.config

        def note(done: up.UpdateManifest) -> None:
            if done.purpose in fields.EXCHANGES:  # no journal has them
                return
            self.answered["accepted" if message.accepted else "rejected"] += 1
            note_receipt(config.state / "runs" / done.run, config.id, done, accepted=message.accepted)

        # A kill between the two costs a second line, which means the same.
        if (done := self._uploads.receipt(message, note)) is not None:
            self._drop(done)
            self._fetch_bundle()
            self.go_on()

    def go_on(self) -> None:
        """Begin the work whose blobs are all here."""
        job = self.job
        install = self._install
        if self.is_working:
            return
        if job is not None and not self._uploads.holds(job_key(job)) and self._downloads.has_all(job.refs):
            self._tasks.cancel(None)  # here, not in the worker: a Cancel that arrives before the first step counts
            self._begin("job", job_key(job), partial(self._do, job), partial(self._after_job, job))
        elif install is not None and self._may_switch() and self._downloads.has_all((install.blob,)):
            work = partial(self._tasks.install, install, self._cache.path(install.blob.digest))
            self._begin("install", install.blob.digest, work, partial(self._after_install, install))

    def forget_candidate(self) -> None:
        """Drop a bundle that is not tried yet: a coordinator offers it again after its welcome."""
        if self._install is not None and self._working_on != self._install.blob.digest:
            self._drop_install()
            self._fetch()

    def restore(self) -> None:
        """The agent starts: a bundle that is here and had to wait for its time is switched to then, coordinator or not.

        An agent that reaches its coordinator drops it, and is offered it again.
        """
        waiting = self._waits.read()
        if waiting is None:
            return
        message = waiting.install
        try:
            is_wanted = self._cache.has(message.blob.digest) and self._tasks.declined(message) is None
        except StateError:  # reported when the release is offered
            is_wanted = False
        if not is_wanted:
            self._drop_install()
            return
        self._install = message
        self._waiting = waiting
        self._switches_at = self._downloads.clock() + START_GRACE_S
        if why := waiting.why_not(self._tasks.now()):
            self._report(StateError(why, is_public=True), JobKey(message.run, purpose=None), "bundle")
        else:
            log.info("waits bundle=%s until=%s", message.bundle_id[:12], utc_text(waiting.opens))

    def _drop_install(self) -> None:
        """There is no bundle to be tried any more, here and on the disk."""
        self._install = self._waiting = None
        self._waits.remove()

    def switch_when_due(self) -> None:
        """Switch to a bundle that is here when its time comes; after that the coordinator offers it again."""
        if self._install is None:
            return
        if self._waiting is not None:
            self.go_on()
            return
        within_s = self._install.activate_within_s
        late_s = self._downloads.clock() - self._switches_at
        if within_s is not None and late_s > within_s and self._working_on != self._install.blob.digest:
            log.info("not_switched bundle=%s: its time is over", self._install.bundle_id[:12])
            self._drop_install()
            return
        self.go_on()

    def _may_switch(self) -> bool:
        is_open = self._waiting is None or self._waiting.is_open(self._tasks.now())
        return is_open and self._downloads.clock() >= self._switches_at

    def candidate(self) -> dict[str, Any] | None:
        """The bundle that is being downloaded, waits for its time, or is tried now, for the status."""
        install = self._install
        if install is None:
            return None
        if self._working_on == install.blob.digest:
            state = "is tried"
        elif not self._downloads.has_all((install.blob,)):
            state = "is downloaded"
        elif self._waiting is not None:
            why = self._waiting.why_not(self._tasks.now())
            state = why or f"switches at {utc_text(self._waiting.opens)}"
        else:
            state = f"switches in {max(0.0, self._switches_at - self._downloads.clock()):.0f} s"
        return {"bundle_id": install.bundle_id, "release": install.release, "state": state}

    def refit(self, done: Callable[[], None], tried: Tried) -> None:
        """Fit a head for the bundle in use, where one was put there by hand; then call ``done``."""
        if not self._tasks.lacks_head:
            return

        def after(_: object, error: BaseException | None) -> None:
            tried(error)
            if error is None:
                self.condition.clear("bundle")
                done()
            else:
                self._report(error, kind="bundle")

        self._begin("refit", "refit", self._tasks.refit, after)

    def collect(self, first: Callable[[], None], tried: Tried) -> None:
        """Learn from samples that were added on this device, in the worker; call ``first`` after the first head."""
        had_head = bool(self._tasks.bundle_id)

        def after(refitted: bool | None, error: BaseException | None) -> None:
            tried(error)
            if error is not None:
                self._report(error, kind="data")
            elif refitted:
                self.condition.clear("bundle", "data")
                if not had_head:
                    first()

        self._begin("collect", "collect", self._tasks.collect, after)

    def stall(self) -> None:
        """Nothing can be written to the disk: drop what has not begun; the coordinator asks for it again."""
        if self.job is not None and self._working_on != job_key(self.job):
            self.job = None
        if self._install is not None and self._working_on != self._install.blob.digest:
            self._drop_install()
        if not self.is_working:
            self._downloads.keep_only(())
            self._cache.make_room(self._cache.limit_bytes)  # what was downloaded before can be downloaded again

    def forget_all(self) -> str:
        """Drop all jobs and their results, because they are of another federation.

        Returns what was dropped, for the log; empty when there was nothing. What the worker still does is not sent.
        """
        had_job = self.job is not None
        self.job = self._installed = None
        self._drop_install()
        self._heard.clear()
        self._fetch()
        update = self._uploads.drop_all()
        runs = self._tasks.forget_runs()
        dropped = ["the job"] if had_job else []
        if update is not None:
            dropped.append(f"update {fields.run_name(update.run)} round {update.round}")
        if runs:
            dropped.append(f"client state of {runs} runs")
        return ", ".join(dropped)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _begin(self, name: str, key: JobKey | str, work: Callable[[], Any], done: Done) -> None:
        """Have the worker do it; then call ``done`` and continue."""

        def after(result: Any, error: BaseException | None) -> None:
            self._working_on = None
            done(result, error)
            self.go_on()

        self._working_on = key
        self._worker.submit(name, work, after)

    def _fetch(self) -> None:
        """Download what is needed now, and nothing else: job and bundle at once only where both fit."""
        job = self.job.refs if self.job else ()
        bundle = (self._install.blob,) if self._install else ()
        refs = (*job, *bundle)
        self.room_bytes = sum(ref.size_bytes for ref in refs) or self.room_bytes
        if job and self._cannot_hold(refs) is not None:
            refs = job
        self._downloads.keep_only(refs)
        wanted = {ref.digest: ref for ref in refs}
        if (missing := sum(map(self._cache.missing_bytes, wanted.values()))) > 0:
            make_room(self._tasks.config, self._cache, missing, wanted)
        self._downloads.fetch(refs)

    def _fetch_bundle(self) -> None:
        """Download a bundle that had to wait for the job's blobs."""
        if self.job is None and self._install is not None and not self._downloads.has_all((self._install.blob,)):
            self._fetch()

    def _cannot_hold(self, blobs: Sequence[fields.BlobRef]) -> UsageError | None:
        """Why the cache can never hold all of these blobs; None where it can."""
        size = sum({ref.digest: ref.size_bytes for ref in blobs}.values())
        limit = self._cache.limit_bytes
        if size <= limit:
            return None
        return UsageError(
            f"needs {len(blobs)} blobs of {size} bytes together, this agent keeps at most cache_bytes = {limit}; "
            f"raise cache_bytes in its configuration to {size} or more",
            is_public=True,
        )

    def _drop(self, about: down.Cancel | up.UpdateManifest) -> None:
        if self.job is not None and job_key(self.job) == job_key(about):
            self.job = None

    def _do(self, job: down.Job) -> up.UpdateManifest | up.Report:
        from ..wire.tensors import decode  # brings numpy, which an idle agent does without

        if isinstance(job.given, fields.BlobRef):
            job = job.with_task(bytes(self._cache.read(job.given.digest)))
        received: Tensors = {}
        for ref in job.blobs:
            received.update(decode(self._cache.read(ref.digest)))
        if job.purpose == "contribute" and job.bundle is not None:
            return self._tasks.contribute(job, received, self._cache.path(job.bundle.digest))
        try:
            return self._tasks.do(job, received)
        finally:
            self._tasks.release_memory()

    def _after_job(self, job: down.Job, result: Any, error: BaseException | None) -> None:
        # Asked for again with another noise, it is done again.
        wanted = self.job is not None and (job_key(self.job), self.job.privacy) == (job_key(job), job.privacy)
        if error is None:
            self.condition.clear("work", "data")
            if isinstance(result, up.Report):
                self.last_report = result
                self._link.send(result)
            elif wanted:
                self._uploads.offer(result)
        elif wanted and not self._downloads.has_all(job.refs):  # damaged on this disk, not wrong: download it again
            log.warning("blob_damaged run=%s round=%d reason=%s", fields.run_name(job.run), job.round, error)
            self._fetch()
            return
        elif isinstance(error, TrainingCancelled):
            log.info("training_cancelled run=%s round=%d", fields.run_name(job.run), job.round)
            return  # where the job was asked for again, it begins again
        elif isinstance(error, PrivacyRefused):
            self._refuse(error, job)
        else:
            self._report(error, job_key(job))
        if wanted and (error is not None or job.purpose == "personalize"):
            self.job = None
            self._fetch_bundle()

    def _after_install(self, install: down.Install, result: Any, error: BaseException | None) -> None:
        if self._install is not None and self._install.blob == install.blob:
            self._drop_install()  # a newer one that has arrived meanwhile is still to be done
        if error is None:
            self.condition.clear("bundle", "data")
            self.last_report = result
            if not result.kept:  # otherwise it is tried when its owner lets it
                self._installed = ((install.blob.digest, install.release), result)
            self._link.send(result)
        else:
            self._report(error, JobKey(install.run, purpose=None), "bundle", install.release)

    def _refuse(self, error: PrivacyRefused, job: down.Job) -> None:
        """Say that this device does not do the job, which is no fault of its own."""
        log.warning("job_refused run=%s round=%d reason=%s", fields.run_name(job.run), job.round, error)
        if isinstance(error, SumRefused):
            remedy = "the next attempt at the sum has fresh keys; where this repeats, look for who is named"
        else:
            remedy = "[privacy] in the device's configuration decides; change the run, or leave the device out of it"
        about = job_key(job)._asdict()
        self._link.send(up.Fault(error=type(error).__name__, message=str(error)[:2000], remedy=remedy, **about))

    def _report(self, error: BaseException, about: JobKey | None = None, kind: Kind = "work", release: int = 0) -> None:
        """Send a `Fault`, and continue: a job that cannot be done here must not end the agent."""
        problem = self.condition.note(kind, error)
        if isinstance(error, HeadwaterError | OSError):
            log.error("work_failed error=%s message=%s", problem.error, problem.message)
        else:
            log.error("work_broke", exc_info=error)
        # A full disk passes: the agent's condition says that its job has to wait.
        if problem.kind == "disk":
            about = None
            release = 0
        self._link.send(problem.to_coordinator(about, release))


def fault(error: BaseException, run: str, number: int) -> up.Fault:
    """An error of a job in full, for the same machine."""
    return up.Fault(error=type(error).__name__[:64], message=whole_message(error), run=run, round=number)
