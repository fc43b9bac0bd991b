"""Everything in this process, one client after another."""

from __future__ import annotations

from typing import Any

from edge_agent.errors import RunFailed

from ..client_tasks import Shared, answer
from .base import Done, Work


class Serial:
    """The reference engine: the others must give the same bits."""

    name, workers = "serial", 1

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._given: Work | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """No process of its own."""
        return ()

    @property
    def figures(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    @property
    def room(self) -> int:
        """One job at a time."""
        return 0 if self.is_busy else 1

    @property
    def is_busy(self) -> bool:
        """Whether a job was given that has not been taken."""
        return self._given is not None

    def start(self) -> None:
        """Nothing to do."""

    def give(self, work: Work) -> None:
        """Queue the job; `take` runs it."""
        self._given = work

    def take(self) -> Done:
        """Run the job.

        Raises:
            RunFailed: nothing was given.
        """
        work, self._given = self._given, None
        if work is None:
            raise RunFailed("internal error: no job was queued; please report this")
        return Done.of(work, answer(self._shared, work.client, work.job, work.received()))

    def close(self) -> None:
        """Nothing to do: nothing runs between two calls."""
