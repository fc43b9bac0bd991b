"""What an agent works on next: the job or bundle whose blobs are all here, one at a time in the worker.

`TaskQueue` belongs to the agent's loop. It hears jobs, installs, cancels and receipts, has their blobs downloaded,
begins what can begin, and sends what came of it. A message that is lost is repeated by the coordinator, and a repeated
one changes nothing.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...core.children import Done, Worker
from ...core.errors import (
    HeadwaterError,
    PrivacyRefused,
    SharesWrong,
    StateError,
    SumRefused,
    TrainingCancelled,
    TransferTooSlow,
    UsageError,
)
from ...core.task import Tensors
from ...core.time_and_text import utc_text
from ...run_folder.receipts import note_receipt
from ...wire.messages import down, fields, up
from ...wire.messages.down import job_key
from ...wire.messages.fields import JobKey
from ..health import Condition, Kind
from ..local_state import make_room
from ..release_record import START_GRACE_S, WaitFile, Waiting
from ..transfers import Downloads, Link, Uploads
from .runner import TaskRunner
from .table import TASKS

log = logging.getLogger(__name__)

JUDGED_APART_S = 0.5
"""Between two looks at whether a transfer can be over in time."""

REMEMBERED = 32
"""Jobs of which a repeated message is recognised; more than one round ever sends to one agent."""


Tried = Callable[[BaseException | None], None]
"""Called with the end of a fit: None, or why it failed."""


class TaskQueue:
    """The work of an agent. Every change of it continues by itself as far as it can."""

    def __init__(self, tasks: TaskRunner, downloads: Downloads, uploads: Uploads, worker: Worker, link: Link) -> None:
        """Make a queue without any work.

        Args:
            tasks: Does the work.
            downloads: The blobs that a job needs, and their cache.
            uploads: The update that waits for its receipt.
            worker: The thread, or its stand-in, in which work is done.
            link: Sends messages to the coordinator.
        """
        self._tasks = tasks
        self._cache = downloads.cache
        self._downloads = downloads
        self._uploads = uploads
        self._worker = worker
        self._link = link
        self.condition = Condition()
        self.job: down.Job | None = None
        """The job that is to be done, or whose update waits for its receipt."""

        self._closes_at = float("inf")
        """The time at which the job's round closes, by the clock of the downloads."""

        self._judged_at = float("-inf")
        """The time of the last look at whether its transfers can be over in time."""

        self._install: down.Install | None = None
        """The bundle that is to be tried."""

        self._working_on: JobKey | str | None = None
        """What is in the worker: a job's key, the digest of a bundle, or the name of other work."""

        self._heard: deque[tuple[str, int]] = deque(maxlen=REMEMBERED)
        """The start of the coordinator and the sequence number of the last jobs."""

        self._installed: tuple[tuple[str, int], up.Report] | None = None
        """Blob and number of the release that was tried last, and what came out."""

        self.last_report: up.Report | None = None
        """The newest report that was sent since the start."""

        self.answered = Counter[str]()
        """Updates that the coordinator has ``accepted`` or ``rejected`` since the start."""

        self._switches_at = float("-inf")
        """The time from which on the bundle may be switched to, by the clock of the downloads."""

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
        """Take a job that the coordinator asks for.

        A repeated message changes nothing; a new one means doing it again.
        """
        key = job_key(job)
        stamp = (job.boot, job.seq)
        if job.boot and stamp in self._heard:
            return
        self._heard.append(stamp)
        self._closes_at = self._downloads.clock() + job.deadline_s
        if self._uploads.holds(key):
            if self._tasks.outbox.is_as_asked(job.privacy):
                self._uploads.offer_to(job.partition)
                return
            self._uploads.drop(key)  # another noise is asked for now
        error = self._cannot_hold(job.refs)
        if error is not None:
            self._report(error, key)
            return
        if self.job is None or job_key(self.job) != key:
            where = f"round={job.round}/{job.rounds} purpose={job.purpose} method={job.method}"
            log.info("job run=%s %s", fields.run_name(job.run), where)
        self.job = job
        if self._working_on != key:
            # A secure sum that was restarted: what is done for the earlier attempt is of no use to anybody.
            if isinstance(self._working_on, JobKey) and self._working_on.session:
                self._tasks.cancel(self._working_on)
            self._fetch()
        self.go_on()

    def on_install(self, message: down.Install) -> None:
        """Take a bundle that the coordinator offers; of one that has just been tried, the report is sent again."""
        # It is being tried right now.
        if self._install is not None and self._working_on == self._install.blob.digest == message.blob.digest:
            return
        about = JobKey(message.run, purpose=None)
        # 1. A bundle that this device does not try. A release that was rolled back must not return because the record
        # of releases is damaged, so such a record declines all of them.
        try:
            declined = self._declined(message)
        except StateError as damage:
            self._report(damage, about, "bundle", message.release)
            return
        if declined is not None:
            log.info("release_declined bundle=%s why=%s", message.bundle_id[:12], declined.rolled_back)
            self._link.send(declined)
            return
        # 2. One that was just tried: its report may have been lost.
        if self._installed is not None and self._installed[0] == (message.blob.digest, message.release):
            self._link.send(self._installed[1].model_copy(update={"run": message.run}))
            return
        # 3. One that this device has no room for.
        error = self._cannot_hold((message.blob,))
        if error is not None:
            self._report(error, about, "bundle", message.release)
            return
        # 4. A new one takes the place of any other that waits. Its time is noted on the disk, so that it is switched to
        # then, also by an agent that does not reach its coordinator.
        self._drop_install()
        self._install = message
        self._switches_at = self._downloads.clock() + message.activate_in_s
        if message.activate_in_s:
            self._waits.write(Waiting.of(message, self._tasks.now()))
        self._fetch()
        self.go_on()

    def on_cancel(self, message: down.Cancel) -> None:
        """Drop a job or a bundle, because its round is over for this agent or it is withdrawn."""
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
            objection = self._uploads.objection(left_s)
        else:
            objection = self._downloads.objection(job.refs, left_s)
        if objection:
            self._uploads.drop(job_key(job))
            self.job = None
            self._report(TransferTooSlow(objection, is_public=True), job_key(job))
            self._fetch()

    def on_receipt(self, message: down.Receipt) -> None:
        """Drop a job that is done: the coordinator has its update, or has rejected it."""
        if not message.accepted:
            log.warning("update_refused reason=%s", message.reason)
        # The receipt is noted before the update is forgotten. A kill between the two costs a second line, which means
        # the same.
        manifest = self._uploads.receipt(message, partial(self._note_receipt, accepted=message.accepted))
        if manifest is not None:
            self._drop(manifest)
            self._fetch_bundle()
            self.go_on()

    def _note_receipt(self, manifest: up.UpdateManifest, *, accepted: bool) -> None:
        """Count an update that the coordinator has answered, and write the answer into the folder of its run."""
        if not TASKS[manifest.purpose].is_recorded:
            return
        outcome = "accepted" if accepted else "rejected"
        self.answered[outcome] += 1
        config = self._tasks.config
        note_receipt(config.state / "runs" / manifest.run, config.id, manifest, accepted=accepted)

    def go_on(self) -> None:
        """Begin the work whose blobs are all here, jobs first: their rounds end, and a bundle can wait."""
        if self.is_working:
            return
        if self.job is not None and self._can_begin(self.job):
            self._begin_job(self.job)
        elif self._install is not None and self._can_switch_to(self._install):
            self._begin_install(self._install)

    def _can_begin(self, job: down.Job) -> bool:
        """Return whether a job's blobs are here, and its update is not."""
        return not self._uploads.holds(job_key(job)) and self._downloads.has_all(job.refs)

    def _begin_job(self, job: down.Job) -> None:
        """Have the worker do a job."""
        # An earlier Cancel is forgotten here, not in the worker: one that arrives before the first step counts.
        self._tasks.cancel(None)
        self._begin("job", job_key(job), partial(self._do, job), partial(self._after_job, job))

    def _can_switch_to(self, install: down.Install) -> bool:
        """Return whether a bundle is here, and its time has come."""
        return self._may_switch() and self._downloads.has_all((install.blob,))

    def _begin_install(self, install: down.Install) -> None:
        """Have the worker try a bundle."""
        work = partial(self._tasks.install, install, self._cache.path(install.blob.digest))
        self._begin("install", install.blob.digest, work, partial(self._after_install, install))

    def forget_candidate(self) -> None:
        """Drop a bundle that is not tried yet: a coordinator offers it again after its welcome."""
        if self._install is not None and self._working_on != self._install.blob.digest:
            self._drop_install()
            self._fetch()

    def restore(self) -> None:
        """Have a bundle that is here, and had to wait for its time, be switched to then, coordinator or not.

        An agent that reaches its coordinator drops it, and is offered it again.
        """
        waiting = self._waits.read()
        if waiting is None:
            return
        message = waiting.install
        try:
            is_wanted = self._cache.has(message.blob.digest) and self._declined(message) is None
        except StateError:  # reported when the release is offered
            is_wanted = False
        if not is_wanted:
            self._drop_install()
            return
        self._install = message
        self._waiting = waiting
        self._switches_at = self._downloads.clock() + START_GRACE_S
        objection = waiting.why_not(self._tasks.now())
        if objection:
            self._report(StateError(objection, is_public=True), JobKey(message.run, purpose=None), "bundle")
        else:
            log.info("waits bundle=%s until=%s", message.bundle_id[:12], utc_text(waiting.opens))

    def _declined(self, message: down.Install) -> up.Report | None:
        """Return the report about a release that this device does not try; None where it tries it.

        Raises:
            StateError: the record of releases is damaged.
        """
        return self._tasks.bundles.decline(message, self._tasks.samples)

    def _drop_install(self) -> None:
        """Forget the bundle that was to be tried, here and on the disk."""
        self._install = None
        self._waiting = None
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
        """Return whether the time to switch has come, by both clocks."""
        is_open = self._waiting is None or self._waiting.is_open(self._tasks.now())
        return is_open and self._downloads.clock() >= self._switches_at

    def candidate(self) -> dict[str, Any] | None:
        """Return the bundle that is being downloaded, waits for its time, or is tried now, for the status."""
        install = self._install
        if install is None:
            return None
        if self._working_on == install.blob.digest:
            state = "is tried"
        elif not self._downloads.has_all((install.blob,)):
            state = "is downloaded"
        elif self._waiting is not None:
            objection = self._waiting.why_not(self._tasks.now())
            state = objection or f"switches at {utc_text(self._waiting.opens)}"
        else:
            state = f"switches in {max(0.0, self._switches_at - self._downloads.clock()):.0f} s"
        return {"bundle_id": install.bundle_id, "release": install.release, "state": state}

    def refit(self, done: Callable[[], None], tried: Tried) -> None:
        """Fit a head for the bundle in use, where one was put there by hand; then call ``done``."""
        if not self._tasks.bundles.lacks_head:
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
        had_head = bool(self._tasks.bundles.bundle_id)

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
        """Drop what has not begun, because nothing can be written to the disk; the coordinator asks for it again."""
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
        self.job = None
        self._installed = None
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
        refs = self._needed_blobs()
        # What was downloaded before, and is not needed now, makes room for what is missing.
        self._downloads.keep_only(refs)
        refs_by_digest = {ref.digest: ref for ref in refs}
        missing_bytes = sum(self._cache.missing_bytes(ref) for ref in refs_by_digest.values())
        if missing_bytes > 0:
            make_room(self._tasks.config, self._cache, missing_bytes, refs_by_digest)
        self._downloads.fetch(refs)

    def _needed_blobs(self) -> tuple[fields.BlobRef, ...]:
        """Return the blobs to download now, and note how many bytes the job and the bundle take together."""
        of_job = () if self.job is None else self.job.refs
        of_bundle = () if self._install is None else (self._install.blob,)
        refs = (*of_job, *of_bundle)
        # The last size stays where nothing is needed: a disk that was full is tried with it.
        size_bytes = sum(ref.size_bytes for ref in refs)
        if size_bytes:
            self.room_bytes = size_bytes
        # The job goes first: its round ends, and the bundle can come afterwards.
        if of_job and self._cannot_hold(refs) is not None:
            return of_job
        return refs

    def _fetch_bundle(self) -> None:
        """Download a bundle that had to wait for the job's blobs."""
        if self.job is None and self._install is not None and not self._downloads.has_all((self._install.blob,)):
            self._fetch()

    def _cannot_hold(self, blobs: Sequence[fields.BlobRef]) -> UsageError | None:
        """Return why the cache can never hold all of these blobs; None where it can."""
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
        """Forget the job, if it is the one that a message is about."""
        if self.job is not None and job_key(self.job) == job_key(about):
            self.job = None

    def _do(self, job: down.Job) -> up.UpdateManifest | up.Report:
        """Do a job whose blobs are all here, in the worker; afterwards the memory that it took is free again.

        Raises:
            HeadwaterError: as `TaskRunner.do`, or a blob is damaged.
        """
        from ...wire.tensors import decode  # brings numpy, which an idle agent does without

        if isinstance(job.given, fields.BlobRef):
            job = job.with_task(bytes(self._cache.read(job.given.digest)))
        received: Tensors = {}
        for ref in job.blobs:
            received.update(decode(self._cache.read(ref.digest)))
        encoder = None if job.bundle is None else self._cache.path(job.bundle.digest)
        try:
            return self._tasks.do(job, received, encoder)
        finally:
            self._tasks.release_memory()

    def _after_job(self, job: down.Job, result: Any, error: BaseException | None) -> None:
        """Send what came of a job, and drop the job where it is over.

        Args:
            job: The job as the worker did it.
            result: The update or the report; None where there is an ``error``.
            error: Why it failed.
        """
        # A job that was asked for again with another noise is done again.
        is_wanted = self.job is not None and (job_key(self.job), self.job.privacy) == (job_key(job), job.privacy)
        if error is None:
            self._send_result(result, is_wanted=is_wanted)
            # An update is over with its receipt, a report at once.
            is_over = isinstance(result, up.Report)
        else:
            is_over = self._handle_failure(job, error, is_wanted=is_wanted)
        if is_wanted and is_over:
            self.job = None
            self._fetch_bundle()

    def _send_result(self, result: up.UpdateManifest | up.Report, *, is_wanted: bool) -> None:
        """Send a report at once; an update goes through the outbox until its receipt, if it is still asked for."""
        self.condition.clear("work", "data")
        if isinstance(result, up.Report):
            self.last_report = result
            self._link.send(result)
        elif is_wanted and self.job is not None:
            self._uploads.offer(result, self.job.partition)

    def _handle_failure(self, job: down.Job, error: BaseException, *, is_wanted: bool) -> bool:
        """Repair or report what ended a job early.

        Args:
            job: The job.
            error: Why it ended.
            is_wanted: Whether it is still asked for.

        Returns:
            Whether the job is over; one that begins again is not.
        """
        # A blob that is damaged on this disk, and not wrong, is downloaded again.
        if is_wanted and not self._downloads.has_all(job.refs):
            log.warning("blob_damaged run=%s round=%d reason=%s", fields.run_name(job.run), job.round, error)
            self._fetch()
            return False
        # A training that was cancelled begins again where the job was asked for again.
        if isinstance(error, TrainingCancelled):
            log.info("training_cancelled run=%s round=%d", fields.run_name(job.run), job.round)
            return False
        if isinstance(error, PrivacyRefused):
            self._refuse(error, job)
        else:
            self._report(error, job_key(job))
        return True

    def _after_install(self, install: down.Install, result: Any, error: BaseException | None) -> None:
        """Send what came of a bundle that was tried: its report, or why it failed."""
        # A newer bundle that has arrived meanwhile is still to be tried.
        if self._install is not None and self._install.blob == install.blob:
            self._drop_install()
        if error is not None:
            self._report(error, JobKey(install.run, purpose=None), "bundle", install.release)
            return
        self.condition.clear("bundle", "data")
        self.last_report = result
        # One that the owner keeps from being used is tried again when it is offered again.
        if not result.kept:
            self._installed = ((install.blob.digest, install.release), result)
        self._link.send(result)

    def _refuse(self, error: PrivacyRefused, job: down.Job) -> None:
        """Say that this device does not do the job, which is no fault of its own."""
        log.warning("job_refused run=%s round=%d reason=%s", fields.run_name(job.run), job.round, error)
        if isinstance(error, SumRefused):
            remedy = "the next attempt at the sum has fresh keys; where this repeats, look for who is named"
        else:
            remedy = "[privacy] in the device's configuration decides; change the run, or leave the device out of it"
        accused = error.clients if isinstance(error, SharesWrong) else ()
        about = job_key(job)._asdict()
        self._link.send(
            up.Fault(error=type(error).__name__, message=str(error)[:2000], remedy=remedy, accused=accused, **about)
        )

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
