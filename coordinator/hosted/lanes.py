"""Threads for the jobs of many clients: one job of a client after the other, several clients beside each other.

Only one job at a time computes in this process, because its clients share a model. A job that waits for another machine
gives up its turn meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from edge_agent.core.children import Done


class Lanes:
    """Threads that all lanes share. ``wake`` is called when a job has finished, so that the loop calls `collect`."""

    def __init__(self, threads: int, wake: Callable[[], None]) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="work")
        self._turn = threading.Lock()
        self._wake = wake

    def lane(self) -> Lane:
        """Return a new lane, for the jobs of one client."""
        return Lane(self)

    def run(self, work: Callable[[], None]) -> None:
        """Do some work in one of the threads, when it is its turn."""

        def in_turn() -> None:
            with self._turn:
                work()
            self._wake()

        self._threads.submit(in_turn)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Let other jobs have their turn as long as the context lasts; called by a job that has it."""
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()


class Lane:
    """An `edge_agent.core.children.Worker` whose jobs run one after another in the threads of `Lanes`."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._lock = threading.Lock()
        self._waiting = deque[tuple[Callable[[], Any], Done]]()
        self._is_running = False
        self._finished = queue.SimpleQueue[Callable[[], None]]()

    def submit(self, name: str, job: Callable[[], Any], done: Done) -> None:  # noqa: ARG002 - as the contract
        """Queue a job behind the others of this lane."""
        with self._lock:
            self._waiting.append((job, done))
            if self._is_running:
                return
            self._is_running = True
        self._lanes.run(self._run_next)

    def collect(self) -> None:
        """Deliver the results of the jobs that have finished."""
        while True:
            try:
                deliver = self._finished.get_nowait()
            except queue.Empty:
                return
            deliver()

    def close(self) -> None:
        """Drop the jobs that wait; one that runs is left to end with the process."""
        with self._lock:
            self._waiting.clear()

    def _run_next(self) -> None:
        """Do the job that waits longest, and have the next one done after those of other lanes."""
        with self._lock:
            if not self._waiting:
                self._is_running = False
                return
            job, done = self._waiting.popleft()
        try:
            deliver = functools.partial(done, job(), None)
        except BaseException as error:  # noqa: BLE001 - delivered to its owner; a job that exits ends itself only
            deliver = functools.partial(done, None, error)
        self._finished.put(deliver)
        self._lanes.run(self._run_next)
