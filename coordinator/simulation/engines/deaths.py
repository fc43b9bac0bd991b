"""How often workers have died, and at whose job: one death costs nothing, several are a reason to give up."""

from __future__ import annotations

from collections import Counter

from edge_agent.errors import RunFailed

from ...processes.supervisor import MAX_CRASHES
from ..duties import no_memory
from .base import Done, Work


class Deaths:
    """A count for each job, and one of those that never began to work."""

    def __init__(self) -> None:
        self.at_work = Counter[tuple[str, int, str]]()
        self._before_work = 0

    def began(self) -> None:
        """A worker is ready: so workers can be."""
        self._before_work = 0

    def before_work(self, why: str) -> None:
        """A worker has died before it was ready.

        Raises:
            RunFailed: several of them, one after another.
        """
        self._before_work += 1
        if self._before_work >= MAX_CRASHES:
            raise RunFailed(f"workers cannot start: the last one ended with {why}; try --engine serial")

    def given_up(self, work: Work, why: str) -> Done | None:
        """One more death at this work. What the client says, when it is time to give up; else None: do it again."""
        key = (work.client, work.job.round, work.job.purpose)
        self.at_work[key] += 1
        if self.at_work[key] < MAX_CRASHES:
            return None
        said = no_memory(work.client, work.job, f"{MAX_CRASHES} workers ended at it, with {why}")
        return Done(work, said, None, 0.0)
