"""An agent whose disk cannot be written: it waits until it can, tells the coordinator, and resumes by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ..wire.messages import Control
from .condition import Condition, disk_error, try_disk, whole_message
from .jobs import Jobs

log = logging.getLogger(__name__)

AGAIN_S, SELDOM_S = 2.0, 60.0
"""Pauses between tries: they double from the first to the longest."""


class Disk:
    """The state folder's disk. Call `tick` from the agent's loop, and `failed` with every error of the system."""

    def __init__(
        self,
        folder: Path,
        condition: Condition,
        jobs: Jobs,
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
