"""What an agent has been asked to do: at most one job and one bundle at a time; fetched, done, answered."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import HeadwaterError, StateError, UsageError
from ..task import Tensors
from ..wire import messages as wire
from ..wire.chunks import BlobCache
from ..wire.messages import Control
from ..worker import Worker
from .health import Condition, Kind, disk_error, try_disk, whole_message
from .tasks import TaskRunner
from .transfers import Downloads, Uploads

log = logging.getLogger(__name__)

REMEMBERED = 32
"""Jobs of which a repeated message is recognised; more than one round ever sends to one agent."""


class TaskQueue:
    """The work in hand. Every change of it goes on by itself as far as it can."""

    def __init__(
        self,
        tasks: TaskRunner,
        cache: BlobCache,
        downloads: Downloads,
        uploads: Uploads,
        worker: Worker,
        send: Callable[[wire.Control], None],
        condition: Condition,
    ) -> None:
        self._tasks, self._cache, self._downloads, self._uploads = tasks, cache, downloads, uploads
        self._worker, self._send, self._condition = worker, send, condition
        self.job: wire.Job | None = None
        self._install: wire.Install | None = None
        self._working_on: tuple[str, int, str] | str | None = None
        self._heard: deque[tuple[str, int]] = deque(maxlen=REMEMBERED)
        self._installed: tuple[str, wire.Report] | None = None
        self.room_bytes = 0
        """What the last job or bundle that was asked for takes on the disk."""

    @property
    def is_working(self) -> bool:
        """Whether the worker is busy with something of ours."""
        return self._working_on is not None

    def on_job(self, job: wire.Job) -> None:
        """The coordinator asks for a job. A repeated message changes nothing; asking anew means doing it anew."""
        if self._is_repeated(job):
            return
        if self._uploads.holds(*_key(job)):
            self._uploads.offer_again()
            return
        if (error := self._cannot_hold(job.refs)) is not None:
            self._tell(error, *_key(job))
            return
        if self.job is None or _key(self.job) != _key(job):
            where = f"round={job.round}/{job.rounds} purpose={job.purpose} method={job.method}"
            log.info("job run=%s %s", wire.run_name(job.run), where)
        self.job = job
        if self._working_on != _key(job):
            self._fetch()
        self.go_on()

    def on_install(self, message: wire.Install) -> None:
        """The coordinator offers a bundle; of one that has just been tried, the result is told again."""
        if self._install is not None and self._install.blob == message.blob:
            return
        try:
            declined = self._tasks.declined(message)
        except StateError as damage:  # what somebody rolled back must not come back because its record is damaged
            self._tell(damage, message.run, kind="bundle")
            return
        if declined is not None:
            log.info("release_declined bundle=%s why=%s", message.bundle_id[:12], declined.rolled_back)
            self._send(declined)
            return
        if self._installed is not None and self._installed[0] == message.blob.digest:
            self._send(self._installed[1].model_copy(update={"run": message.run}))
            return
        if (error := self._cannot_hold((message.blob,))) is not None:
            self._tell(error, message.run, kind="bundle")
            return
        self._install = message
        self._fetch()
        self.go_on()

    def on_cancel(self, message: wire.Cancel) -> None:
        """The round is over for us."""
        log.info("cancelled run=%s round=%d reason=%s", wire.run_name(message.run), message.round, message.reason)
        self._drop(message)
        self._uploads.drop(message.run, message.round, message.purpose)
        self._fetch()

    def on_receipt(self, message: wire.Receipt) -> None:
        """The coordinator has the update, or will never take it: the job is done."""
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
        if job is not None and self._is_to_do(job) and self._downloads.has_all(job.refs):
            self._working_on = _key(job)
            self._worker.submit("job", lambda: self._do(job), self._after_job(job))
        elif install is not None and self._downloads.has_all((install.blob,)):
            self._working_on = install.blob.digest
            path = self._cache.path(install.blob.digest)
            self._worker.submit("install", lambda: self._tasks.install(install, path), self._after_install(install))

    def refit(self, done: Callable[[], None]) -> None:
        """Fit a head for the bundle in use, where somebody put it there by hand; then call ``done``."""
        if not self._tasks.lacks_head:
            return

        def after(_: object, error: BaseException | None) -> None:
            self._working_on = None
            if error is None:
                self._condition.clear("bundle")
                done()
            else:
                self._tell(error, kind="bundle")
            self.go_on()

        self._working_on = "refit"
        self._worker.submit("refit", self._tasks.refit, after)

    def stall(self) -> None:
        """Nothing can be kept on the disk: drop what has not been begun; the coordinator asks again when it can."""
        if self.job is not None and self._working_on != _key(self.job):
            self.job = None
        if self._install is not None and self._working_on != self._install.blob.digest:
            self._install = None
        if not self.is_working:
            self._downloads.keep_only(())
            self._cache.make_room(self._cache.limit_bytes)  # what was downloaded before can be downloaded again

    def forget_all(self) -> str:
        """Drop all that was asked so far and all that came of it, for it was for another federation.

        Returns what was dropped, for people; empty when there was nothing. What the worker still does is not sent.
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

    def _is_repeated(self, job: wire.Job) -> bool:
        stamp = (job.boot, job.seq)
        if job.boot and stamp in self._heard:
            return True
        self._heard.append(stamp)
        return False

    def _is_to_do(self, job: wire.Job) -> bool:
        return not self._uploads.holds(*_key(job))

    def _fetch(self) -> None:
        """See that what is needed now comes, and nothing else: job and bundle at once only where both fit."""
        job, bundle = self.job.refs if self.job else (), (self._install.blob,) if self._install else ()
        refs = (*job, *bundle)
        self.room_bytes = sum(ref.size_bytes for ref in refs) or self.room_bytes
        if job and self._cannot_hold(refs) is not None:
            refs = job
        self._downloads.keep_only(refs)
        self._downloads.fetch(refs)

    def _fetch_bundle(self) -> None:
        """A bundle that had to wait for the job's blobs may come now."""
        if self.job is None and self._install is not None and not self._downloads.has_all((self._install.blob,)):
            self._fetch()

    def _cannot_hold(self, blobs: Sequence[wire.BlobRef]) -> UsageError | None:
        """Why these blobs can never be here together; None where they can."""
        size, limit = sum({ref.digest: ref.size_bytes for ref in blobs}.values()), self._cache.limit_bytes
        if size <= limit:
            return None
        return UsageError(
            f"needs {len(blobs)} blobs of {size} bytes together, this agent keeps at most cache_bytes = {limit}; "
            f"raise cache_bytes in its configuration to {size} or more"
        )

    def _drop(self, about: wire.Cancel | wire.UpdateManifest) -> None:
        if self.job is not None and _key(self.job) == _key(about):
            self.job = None

    def _do(self, job: wire.Job) -> wire.UpdateManifest | wire.Report:
        if job.purpose == "contribute" and job.bundle is not None:
            return self._tasks.contribute(job, self._received(job), self._cache.path(job.bundle.digest))
        try:
            return self._tasks.do(job, self._received(job))
        finally:
            self._tasks.release_memory()

    def _received(self, job: wire.Job) -> Tensors:
        """The tensors of all blobs of a job, each checked against its hash."""
        from ..wire.tensors import decode  # brings numpy, which an idle agent does without

        received: Tensors = {}
        for ref in job.blobs:
            received.update(decode(self._cache.read(ref.digest)))
        return received

    def _after_job(self, job: wire.Job) -> Callable[[Any, BaseException | None], None]:
        def done(result: Any, error: BaseException | None) -> None:
            self._working_on = None
            wanted = self.job is not None and _key(self.job) == _key(job)
            if error is None:
                self._condition.clear("work", "data")
                self._deliver(result, wanted=wanted)
            elif wanted and not self._downloads.has_all(job.refs):  # damaged on our disk, not wrong: get it again
                log.warning("blob_damaged run=%s round=%d reason=%s", wire.run_name(job.run), job.round, error)
                self._fetch()
                return
            else:
                self._tell(error, *_key(job))
            if wanted and (error is not None or job.purpose == "personalize"):
                self.job = None
                self._fetch_bundle()
            self.go_on()

        return done

    def _deliver(self, result: wire.UpdateManifest | wire.Report, *, wanted: bool) -> None:
        if isinstance(result, wire.Report):
            self._send(result)
        elif wanted:
            self._uploads.offer(result)

    def _after_install(self, install: wire.Install) -> Callable[[Any, BaseException | None], None]:
        def done(result: Any, error: BaseException | None) -> None:
            self._working_on = None
            if self._install is not None and self._install.blob == install.blob:
                self._install = None  # a newer one that came meanwhile is still to be done
            if error is None:
                self._condition.clear("bundle", "data")
                self._installed = (install.blob.digest, result)
                self._send(result)
            else:
                self._tell(error, install.run, kind="bundle")
            self.go_on()

        return done

    def _tell(
        self,
        error: BaseException,
        run: str = "",
        number: int = 0,
        purpose: wire.Purpose | None = None,
        *,
        kind: Kind = "work",
    ) -> None:
        """Tell the coordinator, and go on: a job that cannot be done here must not end the agent."""
        problem = self._condition.note(kind, error)
        if isinstance(error, HeadwaterError | OSError):
            log.error("work_failed error=%s message=%s", problem.error, problem.message)
        else:
            log.error("work_broke", exc_info=error)
        if problem.kind == "disk":  # which passes: whoever waits is told by the agent's condition
            self._send(problem.to_coordinator())
        else:
            self._send(problem.to_coordinator(run, number, purpose))


def fault(error: BaseException, run: str = "", number: int = 0, purpose: wire.Purpose | None = None) -> wire.Fault:
    """An error in full, for who is on the same machine."""
    message = whole_message(error)
    return wire.Fault(error=type(error).__name__[:64], message=message, run=run, round=number, purpose=purpose)


def _key(job: wire.Job | wire.Cancel | wire.UpdateManifest) -> tuple[str, int, wire.Purpose]:
    return (job.run, job.round, job.purpose)


AGAIN_S, SELDOM_S = 2.0, 60.0
"""Pauses between tries: they double from the first to the longest."""


class Disk:
    """The state folder's disk. Call `tick` from the agent's loop, and `failed` with every error of the system."""

    def __init__(
        self,
        folder: Path,
        condition: Condition,
        jobs: TaskQueue,
        send: Callable[[Control], None],
        resume: Callable[[], None],
    ) -> None:
        """``resume`` is called when the disk can be written again: the coordinator asks for what is still to do."""
        self._folder, self._condition, self._jobs, self._send, self._resume = folder, condition, jobs, send, resume
        self._again_at: float | None = None
        self._pause_s = AGAIN_S

    def failed(self, error: OSError, what: str) -> None:
        """Something could not be read or written; ``what`` begins the line in the log."""
        if disk_error(error) is None:
            log.warning("%s reason=%s", what, whole_message(error))
        else:
            self._condition.note("disk", error)

    def safely(self, act: Callable[[], None]) -> None:
        """Do something that may fail by the disk."""
        try:
            act()
        except OSError as error:
            self.failed(error, "transfer_failed")

    def tick(self, now: float) -> None:
        """While the disk cannot be written: give back what needs it, then try from time to time."""
        if not self._condition.is_stalled:
            return
        if self._again_at is None:
            self._begin(now)
        elif now >= self._again_at:
            self._try(now)

    def _begin(self, now: float) -> None:
        self._pause_s, self._again_at = AGAIN_S, now + AGAIN_S
        if (problem := self._condition.problem) is not None:
            log.error("stalled reason=%s; %s", problem.message, problem.remedy)
            self._send(problem.to_coordinator())
        self.safely(self._jobs.stall)

    def _try(self, now: float) -> None:
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
