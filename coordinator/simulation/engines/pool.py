"""As many worker processes as cores: one thread each, one model each, the pools once for all of them.

Threads of several workers would fight each other for caches and cores; measured, two one-thread workers beat one worker
of two threads by a quarter. What is common to many clients of a round is put into shared memory once. A worker that
dies takes nothing with it: its job is done again, from the same kept state, with the same bits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import UpdateManifest

from ...processes.launch import worker_command
from ...processes.pipe import SharedBuffer
from ...processes.supervisor import ChildProcess, Limits
from .base import ANSWERS, Done, Work
from .deaths import Deaths
from .shelf import Shelf

log = logging.getLogger(__name__)

COMMAND = worker_command("coordinator.simulation.engines.worker:serve")


@dataclass(frozen=True)
class Beginning:
    """What a worker is told first, and the pools in shared memory."""

    words: Mapping[str, Any]
    pools: SharedBuffer
    logs: Path
    limits: Limits


class _Worker(ChildProcess):
    """One worker process."""

    def __init__(self, number: int, beginning: Beginning) -> None:
        self.number = number
        super().__init__(COMMAND, beginning.logs / f"worker-{number}.log", beginning.limits)

    def tell(self, words: Mapping[str, Any], areas: Sequence[SharedBuffer] = ()) -> None:
        """Send JSON; a worker that is gone does not receive it, and shows that when it is listened to."""
        with contextlib.suppress(OSError):
            self.pipe.send("", json.dumps(words).encode(), areas)


class Pool:
    """An engine of worker processes."""

    name = "pool"

    def __init__(self, beginning: Beginning, workers: int) -> None:
        self.workers = workers
        self._beginning = beginning
        self._shelf = Shelf(lambda blob: SharedBuffer.of(blob.data))
        self._selector = selectors.DefaultSelector()
        self._crew: list[_Worker] = []
        self._getting_ready: set[_Worker] = set()
        self._busy: dict[_Worker, Work] = {}
        self._waiting: list[Work] = []
        self._deaths = Deaths()
        self._done: list[Done] = []

    @property
    def pids(self) -> tuple[int, ...]:
        """Those of the workers."""
        return tuple(worker.pid for worker in self._crew)

    @property
    def figures(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    @property
    def room(self) -> int:
        """Workers without work, those that are still starting included, and a place to wait for the first that is done.

        So that it goes on at once, and not when everybody has heard of what it has done.
        """
        return self.workers + 1 - len(self._busy) - len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether any work has not come back."""
        return bool(self._busy or self._waiting or self._done)

    def start(self) -> None:
        """Start all workers; none is waited for."""
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
            self._selector.unregister(worker.pipe)
            worker.close()
        self._crew.clear()
        self._selector.close()
        self._shelf.close()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _hire(self, number: int) -> None:
        worker = _Worker(number, self._beginning)
        worker.tell(self._beginning.words, [self._beginning.pools])
        self._crew.append(worker)
        self._getting_ready.add(worker)
        self._selector.register(worker.pipe, selectors.EVENT_READ, worker)

    def _hand_out(self) -> None:
        idle = [worker for worker in self._crew if worker not in self._busy and worker not in self._getting_ready]
        for worker in idle[: len(self._waiting)]:
            work = self._busy[worker] = self._waiting.pop(0)
            words = {"client": work.client, "job": work.job.model_dump_json()}
            worker.tell(words, self._shelf.take(work))

    def _listen_once(self) -> None:
        for key, _ in self._selector.select():
            self._listen(key.data)

    def _listen(self, worker: _Worker) -> None:
        try:
            _, payload, areas = worker.pipe.receive()
        except (EOFError, OSError):
            self._bury(worker)
            return
        if worker in self._getting_ready:
            self._getting_ready.remove(worker)
            self._deaths.began()
            self._hand_out()
        else:
            work = self._busy.pop(worker)
            self._hand_out()  # before anything else: nobody is idle while this is looked at
            self._came_back(work, json.loads(payload), areas)

    def _came_back(self, work: Work, words: Mapping[str, Any], areas: Sequence[SharedBuffer]) -> None:
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

    def _bury(self, worker: _Worker) -> None:
        """A worker is gone: another one takes its place, and its work."""
        self._selector.unregister(worker.pipe)
        self._crew.remove(worker)
        why = worker.exit_reason()
        worker.close()
        log.warning("worker_died number=%d of=%s", worker.number, why)
        if worker in self._getting_ready:
            self._getting_ready.remove(worker)
            self._deaths.before_work(why)
        elif worker in self._busy:
            self._again(self._busy.pop(worker), why)
        self._hire(worker.number)

    def _again(self, work: Work, why: str) -> None:
        given_up = self._deaths.given_up(work, why)
        if given_up is None:
            self._waiting.insert(0, work)
        else:
            self._finish(given_up)
