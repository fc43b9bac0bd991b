"""Clients that take as long as their devices would: updates arrive in the order of a simulated clock.

Each job starts when its round is opened, and its update arrives after the download, the training, and the upload, as
`device_speeds` say. All jobs that have been given are computed before any of their updates is delivered, for only then
is it known whose is the first; then they are delivered one by one, and the clock is at the arrival of the last one. The
coordinator's own clock stands still: no deadline passes. So what a round waits for, and what a buffered round closes
with, follows from settings and seed alone, on every engine and after every kill.

What the clock was at is in the folder of the run: when each round was opened and closed. It is written before an update
is delivered. After a kill between the two, the same update is the first to arrive again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, ValidationError

from edge_agent.core.errors import StateError
from edge_agent.core.storage import read_json, write_json
from edge_agent.core.task import Frozen
from edge_agent.wire.messages import down, up

from .client_pool import IN_ROUNDS, SimulatedClients, check_done
from .device_speeds import DeviceSpeed, Speeds
from .engines.base import Done

TIMES = "simulated-times.json"
"""File with the simulated times of a run, in its folder."""


class _SavedTimes(Frozen):
    """The simulated times of a run, in seconds from its start."""

    speeds: dict[str, DeviceSpeed] = Field(default_factory=dict, description="client -> its device, as it was drawn")
    opened: dict[int, float] = Field(default_factory=dict, description="round -> when its jobs were given")
    closed: dict[int, float] = Field(default_factory=dict, description="round -> when its last update arrived")
    now_s: float = Field(0.0, ge=0, description="when the last update of all arrived")


class SimulatedTimes:
    """The simulated clock of a run, kept in its folder."""

    def __init__(self, path: Path, draw: Callable[[], Speeds]) -> None:
        """Take up the times in a file, if there is one, with the devices that the run began with; else draw these.

        Raises:
            StateError: The file is damaged.
        """
        self._path = path
        try:
            saved = _SavedTimes.model_validate(read_json(path) or {"speeds": draw().of_client})
        except ValidationError as error:
            raise StateError(f"{path}: damaged; put it back from a backup, or begin again in another folder") from error
        self.speeds = Speeds(dict(saved.speeds))
        self.opened = dict(saved.opened)
        self.closed = dict(saved.closed)
        self.now_s = saved.now_s

    def open(self, number: int) -> float:
        """Note that a job of a round is given, now if it is the first; returns when the round was opened."""
        if number not in self.opened:
            self.opened[number] = self.now_s
            self._save()
        return self.opened[number]

    def arrive(self, at_s: float) -> None:
        """Note that an update arrives; it may be the last one of the round that is open."""
        self.now_s = max(self.now_s, at_s)
        if self.opened:
            self.closed[max(self.opened)] = self.now_s
        self._save()

    def _save(self) -> None:
        saved = _SavedTimes(speeds=self.speeds.of_client, opened=self.opened, closed=self.closed, now_s=self.now_s)
        write_json(self._path, saved.model_dump(mode="json"))


class _Arrival(NamedTuple):
    """Work that is done, and when its reply arrives; a heap of them has the first one first."""

    at_s: float
    client: str
    number: int
    done: Done


class TimedClients(SimulatedClients):
    """`SimulatedClients` whose replies arrive in the order of the simulated clock."""

    times: SimulatedTimes
    _arrivals: list[_Arrival]
    _computed: int

    def keep_time(self, times: SimulatedTimes) -> None:
        """Set the clock, which knows how fast devices are; called once, before `start`."""
        self.times = times
        self._arrivals = []
        self._computed = 0

    def work(self) -> down.Job | None:
        """Compute all jobs, deliver the reply that arrives first, and return its job; None where there is no job.

        Raises:
            TrainingFailed, RunFailed, StateError: See `SimulatedClients.work`.
        """
        # 1. Everything that has been asked.
        self._hand_out()
        while self._engine.is_busy:
            done = self._engine.take()
            check_done(done)
            self._durations.note(done.work.client, done.work.job.purpose, done.seconds)
            self._computed += 1
            arrival = _Arrival(self._arrives_at(done), done.work.client, self._computed, done)
            heapq.heappush(self._arrivals, arrival)
            self._hand_out()
        if not self._arrivals:
            return None
        # 2. The first reply. The clock is saved before the coordinator can act on it.
        first = heapq.heappop(self._arrivals)
        job = first.done.work.job
        if job.purpose in IN_ROUNDS:
            self.times.arrive(first.at_s)
        if first.done.blob is not None:
            self._held[first.client] = first.done.blob
        self._reply(first.client, first.done.reply)
        return job

    def _on_job(self, client: str, job: down.Job) -> None:
        if job.purpose in IN_ROUNDS:
            self.times.open(job.round)
        super()._on_job(client, job)

    def _cancel(self, client: str, cancel: down.Cancel) -> None:
        """Drop the jobs of a client that are over, those included whose update has not arrived yet."""
        super()._cancel(client, cancel)
        cancelled = (cancel.run, cancel.round, cancel.purpose)
        remaining = []
        for arrival in self._arrivals:
            job = arrival.done.work.job
            if arrival.client != client or (job.run, job.round, job.purpose) != cancelled:
                remaining.append(arrival)
        heapq.heapify(remaining)
        self._arrivals = remaining

    def _arrives_at(self, done: Done) -> float:
        """Return when a reply arrives; what is no part of a round takes no time."""
        job = done.work.job
        if job.purpose not in IN_ROUNDS:
            return self.times.now_s
        # Whole blobs count, whatever a device has in its cache: after a restart nobody knows of caches.
        refs = job.blobs if job.bundle is None else (job.bundle, *job.blobs)
        down_bytes = sum(ref.size_bytes for ref in refs)
        up_bytes = 0
        if isinstance(done.reply, up.UpdateManifest):
            up_bytes = done.reply.blob.size_bytes
        samples = self._samples[done.work.client] * float(job.params.get("local_epochs", 1))
        speed = self.times.speeds.of_client[done.work.client]
        return self.times.open(job.round) + speed.seconds(samples, down_bytes, up_bytes)
