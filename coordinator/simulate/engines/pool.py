"""As many worker processes as cores: one thread each, one model each, the pools once for all of them.

Threads of several workers would fight each other for caches and cores; measured, two one-thread workers beat one worker
of two threads by a quarter. What is common to many clients of a round is put into shared memory once. A worker that
dies takes nothing with it: its job is done again, from the same kept state, with the same bits.
"""

from __future__ import annotations

import logging
import selectors
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_agent.agent.jobs import fault
from edge_agent.errors import HeadwaterError, RunFailed
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import Fault, Report, UpdateManifest

from ..duties import no_memory
from .areas import Area
from .base import Done, Work
from .process import WorkerProcess

log = logging.getLogger(__name__)

MOST_DEATHS = 3
"""How often workers may die at one client's job before the client is given up: memory that is short stays short."""


ANSWERS: dict[str, type[UpdateManifest | Report | Fault]] = {
    "update": UpdateManifest,
    "report": Report,
    "fault": Fault,
}


@dataclass(frozen=True)
class Beginning:
    """What a worker is told first, and the pools in shared memory."""

    words: Mapping[str, Any]
    pools: Area
    logs: Path
    environment: Mapping[str, str]


class Pool:
    """An engine of worker processes."""

    name = "pool"

    def __init__(self, beginning: Beginning, workers: int) -> None:
        self.workers = workers
        self._beginning = beginning
        self._shelf = _Shelf()
        self._selector = selectors.DefaultSelector()
        self._crew: list[WorkerProcess] = []
        self._getting_ready: set[WorkerProcess] = set()
        self._busy: dict[WorkerProcess, Work] = {}
        self._waiting: list[Work] = []
        self._deaths = Counter[tuple[str, int, str]]()
        self._failed_starts = 0
        self._done: list[Done] = []

    @property
    def pids(self) -> tuple[int, ...]:
        """Those of the workers."""
        return tuple(worker.pid for worker in self._crew)

    @property
    def room(self) -> int:
        """Workers without work, those that are still starting included."""
        return self.workers - len(self._busy) - len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether any work has not come back."""
        return bool(self._busy or self._waiting or self._done)

    def start(self) -> None:
        """Start all workers; none is waited for."""
        self._beginning.logs.mkdir(parents=True, exist_ok=True)
        for number in range(self.workers):
            self._hire(number)

    def give(self, work: Work) -> None:
        """To an idle worker, or to the first that gets ready."""
        self._shelf.expect(work)
        self._waiting.append(work)
        self._hand_out()

    def take(self) -> Done:
        """The next work that comes back.

        Raises:
            RunFailed: workers end before they can begin.
        """
        while not self._done:
            self._listen_once()
        return self._done.pop(0)

    def close(self) -> None:
        """End all workers at once."""
        for worker in self._crew:
            self._selector.unregister(worker.line)
            worker.end()
        self._crew.clear()
        self._selector.close()
        self._shelf.close()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _hire(self, number: int) -> None:
        worker = WorkerProcess(number, self._beginning.logs, self._beginning.environment)
        worker.tell(self._beginning.words, [self._beginning.pools])
        self._crew.append(worker)
        self._getting_ready.add(worker)
        self._selector.register(worker.line, selectors.EVENT_READ, worker)

    def _hand_out(self) -> None:
        idle = [worker for worker in self._crew if worker not in self._busy and worker not in self._getting_ready]
        for worker in idle[: len(self._waiting)]:
            work = self._busy[worker] = self._waiting.pop(0)
            words = {"client": work.client, "job": work.job.model_dump_json()}
            worker.tell(words, self._shelf.areas(work))

    def _listen_once(self) -> None:
        for key, _ in self._selector.select():
            self._listen(key.data)

    def _listen(self, worker: WorkerProcess) -> None:
        try:
            words, areas = worker.line.receive()
        except (EOFError, OSError):
            self._bury(worker)
            return
        if worker in self._getting_ready:
            self._getting_ready.remove(worker)
            self._failed_starts = 0
        else:
            self._came_back(self._busy.pop(worker), words, areas)
        self._hand_out()

    def _came_back(self, work: Work, words: Mapping[str, Any], areas: list[Area]) -> None:
        said = ANSWERS[words["type"]].model_validate_json(words["said"])
        blob = None
        if isinstance(said, UpdateManifest):
            blob = Outgoing(said.blob, areas[0].map())
        for area in areas:
            area.close()
        self._finish(Done(work, said, blob, float(words["seconds"])))

    def _finish(self, done: Done) -> None:
        self._shelf.forget(done.work)
        self._done.append(done)

    def _bury(self, worker: WorkerProcess) -> None:
        """A worker is gone: another one takes its place, and its work."""
        self._selector.unregister(worker.line)
        self._crew.remove(worker)
        why = worker.died_of()
        worker.end()
        log.warning("worker_died number=%d of=%s", worker.number, why)
        work = self._busy.pop(worker, None)
        if work is None:
            self._getting_ready.discard(worker)
            self._failed_starts += 1
            if self._failed_starts >= MOST_DEATHS:
                raise RunFailed(f"workers cannot start: the last one ended with {why}; try --engine serial")
        else:
            self._again(work, why)
        self._hire(worker.number)

    def _again(self, work: Work, why: str) -> None:
        key = (work.client, work.job.round, work.job.purpose)
        self._deaths[key] += 1
        if self._deaths[key] < MOST_DEATHS:
            self._waiting.insert(0, work)
            return
        error: HeadwaterError = no_memory(work.client, work.job, f"{MOST_DEATHS} workers ended at it, with {why}")
        self._finish(Done(work, fault(error, work.job.run, work.job.round), None, 0.0))


class _Shelf:
    """Blobs in shared memory: what many clients begin with lies there once, whoever of them comes when."""

    def __init__(self) -> None:
        self._areas: dict[str, Area] = {}
        self._needed = Counter[str]()

    def expect(self, work: Work) -> None:
        """This work is going to need its blobs."""
        self._needed.update(blob.ref.digest for blob in work.blobs)

    def areas(self, work: Work) -> list[Area]:
        """The areas of the work's blobs. Those that nobody needs any more make room for those that are new."""
        new = [blob for blob in work.blobs if blob.ref.digest not in self._areas]
        if new:
            self._areas = {digest: area for digest, area in self._areas.items() if self._needed[digest]}
        self._areas.update({blob.ref.digest: Area.of(blob.data) for blob in new})
        return [self._areas[blob.ref.digest] for blob in work.blobs]

    def forget(self, work: Work) -> None:
        """This work is done."""
        self._needed.subtract(blob.ref.digest for blob in work.blobs)
        self._needed = +self._needed

    def close(self) -> None:
        """Let go of everything."""
        self._areas.clear()
