"""Everything in this process, one client after another."""

from __future__ import annotations

from typing import Any

from edge_agent.errors import RunFailed
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import UpdateManifest

from ..duties import Shared, answer
from .base import Done, Work


class Serial:
    """The plainest engine: what others must not differ from."""

    name, workers = "serial", 1

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._given: Work | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """None."""
        return ()

    @property
    def figures(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    @property
    def room(self) -> int:
        """One where nothing is under way."""
        return 0 if self.is_busy else 1

    @property
    def is_busy(self) -> bool:
        """Whether something was given that has not been taken."""
        return self._given is not None

    def start(self) -> None:
        """Nothing to do."""

    def give(self, work: Work) -> None:
        """Note it; it is done when somebody asks for it."""
        self._given = work

    def take(self) -> Done:
        """Do it.

        Raises:
            RunFailed: nothing was given.
        """
        work, self._given = self._given, None
        if work is None:
            raise RunFailed("the engine was asked for work that it was not given; this is a mistake of ours, report it")
        found = answer(self._shared, work.client, work.job, work.received())
        blob = None
        if isinstance(found.said, UpdateManifest):
            blob = Outgoing(found.said.blob, memoryview(b"".join(found.content)))
        return Done(work, found.said, blob, found.seconds)

    def close(self) -> None:
        """Nothing is under way between two calls."""
