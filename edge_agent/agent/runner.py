"""The work of an agent: at most one job and one bundle at a time; downloaded, done, reported; and a full disk."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import HeadwaterError, StateError, UsageError
from ..task import Tensors
from ..wire import messages as wire
from ..wire.messages import JobKey, job_key
from ..worker import Done, Worker
from .health import Condition, Kind, disk_error, try_disk, whole_message
from .tasks import TaskRunner
from .transfers import Downloads, Link, Uploads

log = logging.getLogger(__name__)

REMEMBERED = 32
"""Jobs of which a repeated message is recognised; more than one round ever sends to one agent."""


class TaskQueue:
    """The work of an agent. Every change of it continues by itself as far as it can."""

    def __init__(self, tasks: TaskRunner, downloads: Downloads, uploads: Uploads, worker: Worker, link: Link) -> None:
        self._tasks, self._cache, self._downloads, self._uploads = tasks, downloads.cache, downloads, uploads
        self._worker, self._link, self.condition = worker, link, Condition()
        self.job: wire.Job | None = None
        self._install: wire.Install | None = None
        self._working_on: JobKey | str | None = None
        self._heard: deque[tuple[str, int]] = deque(maxlen=REMEMBERED)
        self._installed: tuple[str, wire.Report] | None = None
        self.room_bytes = 0
        """Bytes on the disk that the last requested job or bundle takes."""

    @property
    def is_working(self) -> bool:
        """Whether the worker is busy with a task."""
        return self._working_on is not None

    def on_job(self, job: wire.Job) -> None:
        """The coordinator asks for a job. A repeated message changes nothing; a new message means doing it again."""
        key, stamp = job_key(job), (job.boot, job.seq)
        if job.boot and stamp in self._heard:
            return
        self._heard.append(stamp)
        if self._uploads.holds(key):
            self._uploads.offer_again()
            return
        if (error := self._cannot_hold(job.refs)) is not None:
            self._report(error, key)
            return
        if self.job is None or job_key(self.job) != key:
            where = f"round={job.round}/{job.rounds} purpose={job.purpose} method={job.method}"
            log.info("job run=%s %s", wire.run_name(job.run), where)
        self.job = job
        if self._working_on != key:
            self._fetch()
        self.go_on()

    def on_install(self, message: wire.Install) -> None:
        """The coordinator offers a bundle; of one that has just been tried, the report is sent again."""
        if self._install is not None and self._install.blob == message.blob:
            return
        about = JobKey(message.run, purpose=None)
        try:
            declined = self._tasks.declined(message)
        except StateError as damage:  # a release that was rolled back must not return because the record is damaged
            self._report(damage, about, "bundle")
            return
        if declined is not None:
            log.info("release_declined bundle=%s why=%s", message.bundle_id[:12], declined.rolled_back)
            self._link.send(declined)
            return
        if self._installed is not None and self._installed[0] == message.blob.digest:
            self._link.send(self._installed[1].model_copy(update={"run": message.run}))
            return
        if (error := self._cannot_hold((message.blob,))) is not None:
            self._report(error, about, "bundle")
            return
        self._install = message
        self._fetch()
        self.go_on()

    def on_cancel(self, message: wire.Cancel) -> None:
        """The round is over for this agent."""
        log.info("cancelled run=%s round=%d reason=%s", wire.run_name(message.run), message.round, message.reason)
        self._drop(message)
        self._uploads.drop(job_key(message))
        self._fetch()

    def on_receipt(self, message: wire.Receipt) -> None:
        """The coordinator has the update, or has rejected it: the job is done."""
        if not message.accepted:
            log.warning("update_refused reason=%s", message.reason)
        done = self._uploads.receipt(message)
        if done is not None:
            self._drop(done)
            self._fetch_bundle()
            self.go_on()

    def go_on(self) -> None:
        """Begin the work whose blobs are all here."""
        job, install = self.job, self._install
        if self.is_working:
            return
        if job is not None and not self._uploads.holds(job_key(job)) and self._downloads.has_all(job.refs):
            self._begin("job", job_key(job), partial(self._do, job), partial(self._after_job, job))
        elif install is not None and self._downloads.has_all((install.blob,)):
            work = partial(self._tasks.install, install, self._cache.path(install.blob.digest))
            self._begin("install", install.blob.digest, work, partial(self._after_install, install))

    def refit(self, done: Callable[[], None]) -> None:
        """Fit a head for the bundle in use, where one was put there by hand; then call ``done``."""
        if not self._tasks.lacks_head:
            return

        def after(_: object, error: BaseException | None) -> None:
            if error is None:
                self.condition.clear("bundle")
                done()
            else:
                self._report(error, kind="bundle")

        self._begin("refit", "refit", self._tasks.refit, after)

    def stall(self) -> None:
        """Nothing can be written to the disk: drop what has not begun; the coordinator asks for it again."""
        if self.job is not None and self._working_on != job_key(self.job):
            self.job = None
        if self._install is not None and self._working_on != self._install.blob.digest:
            self._install = None
        if not self.is_working:
            self._downloads.keep_only(())
            self._cache.make_room(self._cache.limit_bytes)  # what was downloaded before can be downloaded again

    def forget_all(self) -> str:
        """Drop all jobs and their results, because they are of another federation.

        Returns what was dropped, for the log; empty when there was nothing. What the worker still does is not sent.
        """
        had_job = self.job is not None
        self.job = self._install = self._installed = None
        self._heard.clear()
        self._fetch()
        update, runs = self._uploads.drop_all(), self._tasks.forget_runs()
        dropped = ["the job"] if had_job else []
        if update is not None:
            dropped.append(f"update {wire.run_name(update.run)} round {update.round}")
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
        job, bundle = self.job.refs if self.job else (), (self._install.blob,) if self._install else ()
        refs = (*job, *bundle)
        self.room_bytes = sum(ref.size_bytes for ref in refs) or self.room_bytes
        if job and self._cannot_hold(refs) is not None:
            refs = job
        self._downloads.keep_only(refs)
        self._downloads.fetch(refs)

    def _fetch_bundle(self) -> None:
        """Download a bundle that had to wait for the job's blobs."""
        if self.job is None and self._install is not None and not self._downloads.has_all((self._install.blob,)):
            self._fetch()

    def _cannot_hold(self, blobs: Sequence[wire.BlobRef]) -> UsageError | None:
        """Why the cache can never hold all of these blobs; None where it can."""
        size, limit = sum({ref.digest: ref.size_bytes for ref in blobs}.values()), self._cache.limit_bytes
        if size <= limit:
            return None
        return UsageError(
            f"needs {len(blobs)} blobs of {size} bytes together, this agent keeps at most cache_bytes = {limit}; "
            f"raise cache_bytes in its configuration to {size} or more"
        )

    def _drop(self, about: wire.Cancel | wire.UpdateManifest) -> None:
        if self.job is not None and job_key(self.job) == job_key(about):
            self.job = None

    def _do(self, job: wire.Job) -> wire.UpdateManifest | wire.Report:
        from ..wire.tensors import decode  # brings numpy, which an idle agent does without

        received: Tensors = {}
        for ref in job.blobs:
            received.update(decode(self._cache.read(ref.digest)))
        if job.purpose == "contribute" and job.bundle is not None:
            return self._tasks.contribute(job, received, self._cache.path(job.bundle.digest))
        try:
            return self._tasks.do(job, received)
        finally:
            self._tasks.release_memory()

    def _after_job(self, job: wire.Job, result: Any, error: BaseException | None) -> None:
        wanted = self.job is not None and job_key(self.job) == job_key(job)
        if error is None:
            self.condition.clear("work", "data")
            if isinstance(result, wire.Report):
                self._link.send(result)
            elif wanted:
                self._uploads.offer(result)
        elif wanted and not self._downloads.has_all(job.refs):  # damaged on this disk, not wrong: download it again
            log.warning("blob_damaged run=%s round=%d reason=%s", wire.run_name(job.run), job.round, error)
            self._fetch()
            return
        else:
            self._report(error, job_key(job))
        if wanted and (error is not None or job.purpose == "personalize"):
            self.job = None
            self._fetch_bundle()

    def _after_install(self, install: wire.Install, result: Any, error: BaseException | None) -> None:
        if self._install is not None and self._install.blob == install.blob:
            self._install = None  # a newer one that has arrived meanwhile is still to be done
        if error is None:
            self.condition.clear("bundle", "data")
            self._installed = (install.blob.digest, result)
            self._link.send(result)
        else:
            self._report(error, JobKey(install.run, purpose=None), "bundle")

    def _report(self, error: BaseException, about: JobKey | None = None, kind: Kind = "work") -> None:
        """Send a `Fault`, and continue: a job that cannot be done here must not end the agent."""
        problem = self.condition.note(kind, error)
        if isinstance(error, HeadwaterError | OSError):
            log.error("work_failed error=%s message=%s", problem.error, problem.message)
        else:
            log.error("work_broke", exc_info=error)
        # A full disk passes: the agent's condition says that its job has to wait.
        self._link.send(problem.to_coordinator(None if problem.kind == "disk" else about))


def fault(error: BaseException, run: str, number: int) -> wire.Fault:
    """An error of a job in full, for the same machine."""
    return wire.Fault(error=type(error).__name__[:64], message=whole_message(error), run=run, round=number)


AGAIN_S, SELDOM_S = 2.0, 60.0
"""Pauses between tries: they double from the first to the longest."""


class Disk:
    """The state folder's disk. Call `tick` from the agent's loop, and `failed` with every error of the system."""

    def __init__(self, folder: Path, jobs: TaskQueue, link: Link, resume: Callable[[], None]) -> None:
        """``resume`` is called when the disk can be written again: the coordinator asks for what is still to do."""
        self._folder, self._condition, self._jobs, self._link, self._resume = folder, jobs.condition, jobs, link, resume
        self._again_at: float | None = None
        self._pause_s = AGAIN_S

    def failed(self, error: OSError, what: str) -> None:
        """Something could not be read or written; ``what`` begins the line in the log."""
        if disk_error(error) is None:
            log.warning("%s reason=%s", what, whole_message(error))
        else:
            self._condition.note("disk", error)

    def safely(self, act: Callable[[], None]) -> None:
        """Do something that may fail because of the disk."""
        try:
            act()
        except OSError as error:
            self.failed(error, "transfer_failed")

    def tick(self, now: float) -> None:
        """While the disk cannot be written: release what needs it, then try from time to time."""
        if not self._condition.is_stalled:
            return
        if self._again_at is None:
            self._pause_s, self._again_at = AGAIN_S, now + AGAIN_S
            if (problem := self._condition.problem) is not None:
                log.error("stalled reason=%s; %s", problem.message, problem.remedy)
                self._link.send(problem.to_coordinator())
            self.safely(self._jobs.stall)
        elif now >= self._again_at:
            try:
                try_disk(self._folder, self._jobs.room_bytes)
            except OSError as error:
                self._condition.note("disk", error)
                self._pause_s = min(2 * self._pause_s, SELDOM_S)
                self._again_at = now + self._pause_s
            else:
                self._condition.clear("disk")
                self._again_at = None
                log.info("resumed: the disk of %s can be written again", self._folder)
                self._resume()
