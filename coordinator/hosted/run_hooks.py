"""Hooks that compute on the coordinator's own data: warm starts before a run, proxy accuracy after a round.

Both run in one child process, one request at a time. A run waits for its warm start; no round waits for the proxy.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_agent.core.children import Worker
from edge_agent.core.errors import HeadwaterError, RunFailed
from edge_agent.core.storage import read_tensors
from edge_agent.wire.tensors import pieces

from ..config import ProxyConfig, WarmStartConfig
from ..journal.entries import ProxyEvaluated, ProxyFailed, WarmStarted
from ..journal.store import facts_of
from ..processes.compute import Compute
from ..rounds.compute_requests import ProxyRequest, ProxyResult, WarmStartRequest, WarmStartResult
from ..rounds.context import Run, RunHooks, Steps, Waiting, computed
from ..runs.release import encoder_sha256
from ..state.store import prune_blobs, retain_checkpoint
from ..text import counted, reason_of

if TYPE_CHECKING:
    from ..state.store import StateFolder

log = logging.getLogger(__name__)

PROXY_LIMIT_S = 600.0
"""How long a finished run waits for the accuracy of its last rounds."""

MOST_REASONS = 10
"""Different failures of the proxy that the journal records of one run; the log has all."""

WHOM = ("the coordinator",)
_PROXY = "proxy-{}.safetensors"
_WARM = "warm.safetensors"


@dataclass(frozen=True, eq=False)
class _Evaluation:
    """A pending evaluation: the shared model after a round, whose state is the file ``path``."""

    run: Run
    number: int
    path: Path
    call: dict[str, Any]
    """The request as the JSON of the pipe; the same object cancels it."""


class OwnDataHooks(RunHooks):
    """`RunHooks` that compute in a child process.

    One proxy evaluation runs and one waits: where that takes longer than rounds do, the newest replaces the one that
    waits, so that the model after the last round is always evaluated.
    """

    def __init__(self, proxy: ProxyConfig | None, process: Compute, worker: Worker) -> None:
        """``worker`` is not shared with others: its thread waits for results."""
        self._proxy = proxy
        self._process = process
        self._worker = worker
        self._running: _Evaluation | None = None
        self._next: _Evaluation | None = None

    def start(self, state: StateFolder) -> None:
        """Remove states that were retained for evaluations of runs that have ended since."""
        unfinished = set(state.journal.unfinished())
        for name in (_PROXY.format("*"), _WARM):
            for path in (state.path / "runs").glob(f"*/{name}"):
                if path.parent.name not in unfinished:
                    _remove(path)

    def before_run(self, run: Run) -> Generator[Waiting, None, Run]:
        """Do the requested warm start, unless it is done; repeat evaluations that a kill has interrupted.

        Raises:
            RunFailed: the warm start has failed.
        """
        entries = run.context.state.journal.entries(run.id, ("warm_started", "round_closed"))
        newest_round = max((entry.round or 0 for entry in entries), default=0)
        if newest_round:
            self._repeat_evaluations(run)
            self.after_round(run, newest_round)
            return run
        if run.request.warm_start is not None and not entries:
            return (yield from self._warm(run, run.request.warm_start))
        return run

    def _repeat_evaluations(self, run: Run) -> None:
        """Evaluate the states that are still there because a kill has interrupted their evaluations."""
        # Evaluations of a run that was only stalled are still running or waiting: their files stay.
        queued = {evaluation.number for evaluation in self._unfinished_of(run.id)}
        for number, path in _pending_states(run.context.state.run(run.id).folder):
            if self._is_due(run, number):
                self._evaluate(run, number, path)
            elif number not in queued:
                _remove(path)

    def after_round(self, run: Run, number: int) -> None:
        """Evaluate the proxy where that is due and has not been done."""
        if not self._is_due(run, number):
            return
        path = run.context.state.run(run.id).folder / _PROXY.format(number)
        blob = run.context.state.blobs.path(run.checkpoint)
        try:  # under another name, because the store removes the blob after the next round
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            try:
                os.link(blob, path)
            except OSError:  # a file system without links
                shutil.copyfile(blob, path)
        except OSError as error:
            _note_failure(run, number, reason_of(error))
            _remove(path)
            return
        self._evaluate(run, number, path)

    def after_run(self, run: Run) -> Steps:
        """Wait until the evaluations of the last rounds are done, or have failed."""
        until = run.context.clock() + PROXY_LIMIT_S
        unfinished = self._unfinished_of(run.id)
        while unfinished and run.context.clock() < until:
            rounds = " and ".join(str(evaluation.number) for evaluation in unfinished)
            what = f"acc.proxy after round {rounds}, evaluated on the proxy samples"
            yield Waiting(what, WHOM, until, "proxy")
            unfinished = self._unfinished_of(run.id)
        for evaluation in unfinished:
            _note_failure(run, evaluation.number, f"no result {PROXY_LIMIT_S:g} s after the last round")
        self.on_end(run.id)

    def on_end(self, run: str) -> None:
        """Cancel what is pending or running for the run."""
        for evaluation in self._unfinished_of(run):
            if evaluation is self._running:
                self._process.cancel(evaluation.call)
                self._running = None
            else:
                self._next = None
            _remove(evaluation.path)

    def collect(self) -> None:
        """Record the results that have arrived."""
        self._worker.collect()
        self._process.end_if_idle()

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._worker.close()

    # --- warm start ------------------------------------------------------------------------------------------------

    def _warm(self, run: Run, settings: WarmStartConfig) -> Generator[Waiting, None, Run]:
        """Train the first state of a run on the coordinator's own samples, and return the run with that state.

        Raises:
            RunFailed: The training has failed.
        """
        path = run.context.state.run(run.id).folder / _WARM
        path.parent.mkdir(parents=True, exist_ok=True)
        request = WarmStartRequest(**vars(run.for_compute()), into=path, settings=settings)
        call = {"do": "coordinator.hosted.own_data:train_warm", **request.to_json()}
        begin = run.context.stopwatch()
        what = f"a warm start on {settings.data}, {counted(settings.epochs, 'epoch')}, before the first round"
        waiting = Waiting(what, WHOM, None, "warm start")
        answer = None
        try:
            answer = yield from computed(self._worker, "warm start", lambda: self._process.submit(call), waiting)
        except Exception as error:
            raise RunFailed(f"warm start: {reason_of(error)}") from error
        finally:
            if answer is None:  # perhaps the run was cancelled
                self._process.cancel(call)
        result = WarmStartResult.from_json(answer)
        # The blob is on disk before the journal names it, and the journal names it before it is used: a kill between
        # any two repeats the warm start.
        journal = run.context.state.journal
        blobs = run.context.state.blobs
        state = read_tensors(path)
        digest = blobs.put(*pieces(state))
        run = replace(run, state=state, checkpoint=digest)
        retain_checkpoint(journal, run.id, run.request.keep_every, 0, digest)
        seconds = round(run.context.stopwatch() - begin, 3)
        fact = WarmStarted(**vars(result), seconds=seconds, encoder_sha256=encoder_sha256(run))
        journal.append(fact, run=run.id, digest=digest)
        prune_blobs(run.context.state)
        path.unlink(missing_ok=True)
        accuracy = "unknown" if result.accuracy is None else result.accuracy
        log.info("warm_started run=%s samples=%d accuracy=%s", run.id, result.samples, accuracy)
        return run

    # --- proxy -----------------------------------------------------------------------------------------------------

    def _evaluate(self, run: Run, number: int, path: Path) -> None:
        """Evaluate the state in the file ``path``, unless a newer one replaces it before."""
        if self._proxy is None:  # no evaluation is due without [proxy]
            return
        request = ProxyRequest(
            **vars(run.for_compute()),
            state=path,
            data=self._proxy.data,
            folder=self._proxy.folder,
            device=self._proxy.device,
        )
        call = {"do": "coordinator.hosted.own_data:evaluate_on_proxy", **request.to_json()}
        if self._next is not None:
            log.info("proxy_skipped run=%s round=%d: rounds are faster", self._next.run.id, self._next.number)
            _remove(self._next.path)
        self._next = _Evaluation(run, number, path, call)
        if self._running is None:
            self._start_next()

    def _start_next(self) -> None:
        """Start the evaluation that waits, where one does."""
        started = self._next
        self._next = None
        self._running = started
        if started is not None:
            done = functools.partial(self._record, started)
            self._worker.submit("proxy", lambda: self._process.submit(started.call), done)

    def _record(self, evaluation: _Evaluation, answer: dict[str, Any] | None, error: BaseException | None) -> None:
        """Record a result, unless its run has ended."""
        if evaluation is not self._running:
            return
        run = evaluation.run
        number = evaluation.number
        _remove(evaluation.path)
        if answer is None:
            _note_failure(run, number, reason_of(error) if error is not None else "no answer")
        else:
            result = ProxyResult.from_json(answer)
            with _only_logged(run.id, number):
                run.context.state.journal.append(ProxyEvaluated(**vars(result)), run=run.id, round=number)
                run.context.state.run(run.id).append_metrics({"kind": "proxy", "round": number, **result.to_json()})
            log.info("proxy_evaluated run=%s round=%d acc=%s by=%s", run.id, number, result.acc, result.by)
        self._start_next()

    def _unfinished_of(self, run: str) -> list[_Evaluation]:
        """Return the evaluations of a run that are not done: the one that runs, and the one that waits."""
        both = (self._running, self._next)
        return [evaluation for evaluation in both if evaluation is not None and evaluation.run.id == run]

    def _is_due(self, run: Run, number: int) -> bool:
        """Return whether the state after a round is to be evaluated, and has not been."""
        if self._proxy is None or not run.has_encoder:
            return False
        is_last = number == run.request.rounds
        if not is_last and number % self._proxy.every != 0:
            return False
        if any(evaluation.number == number for evaluation in self._unfinished_of(run.id)):
            return False
        return not run.context.state.journal.entries(run.id, ("proxy_evaluated",), round=number)


def _note_failure(run: Run, number: int, why: str) -> None:
    """Log why an evaluation has failed; journal and metrics get each reason once."""
    log.warning("proxy_failed run=%s round=%d reason=%s", run.id, number, why)
    with _only_logged(run.id, number):
        state = run.context.state
        recorded = state.journal.entries(run.id, ("proxy_failed",))
        reasons = {_without_numbers(str(fact.reason)) for fact in facts_of(recorded, ProxyFailed)}
        if _without_numbers(why) in reasons or len(reasons) >= MOST_REASONS:
            return
        state.journal.append(ProxyFailed(reason=why), run=run.id, round=number)
        state.run(run.id).append_metrics({"kind": "proxy_failed", "round": number, "reason": why})


def _without_numbers(reason: str) -> str:
    """Return a reason for comparison: the numbers of rounds and processes differ each time."""
    return re.sub(r"\d+", "#", reason)


def _pending_states(folder: Path) -> list[tuple[int, Path]]:
    """Return round and path of the states that were retained for evaluations, the oldest first."""
    pending = []
    for path in folder.glob("proxy-*"):
        match = re.fullmatch(r"proxy-(\d+)\.safetensors", path.name)
        if match is not None:
            pending.append((int(match[1]), path))
    return sorted(pending)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("not_removed path=%s reason=%s", path, reason_of(error))


@contextlib.contextmanager
def _only_logged(run: str, number: int) -> Iterator[None]:
    """Log an accuracy that cannot be written; the run continues."""
    try:
        yield
    except (HeadwaterError, OSError) as error:
        log.warning("proxy_not_written run=%s round=%d reason=%s", run, number, reason_of(error))
