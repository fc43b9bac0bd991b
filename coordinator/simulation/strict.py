"""A coordinator whose peers are ours: what breaks is told at once, and never held against the run.

Over a network a message that cannot be read or kept costs itself and comes again. In a simulation nobody says a thing
twice: whatever goes wrong with one is trouble on this machine, and the run goes on when that is over.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from edge_agent.errors import ChunkError, RunFailed, StateError
from edge_agent.wire.transport import Message

from ..fleet.uploads import reason_of
from ..runs.context import Fleet
from ..runs.run_queue import Runs
from ..service.coordinator import Coordinator
from .clients import GO_ON

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class StrictRuns(Runs):
    """Runs that end nothing: the same step is tried again by whoever goes on with the run."""

    def fail(self, run: str, error: BaseException) -> None:
        """Nothing is noted in the journal.

        Raises:
            RunFailed: the run cannot go on.
        """
        if isinstance(error, RunFailed):
            raise error
        raise RunFailed(f"{run} cannot go on: {reason_of(error)}") from error

    def stall(self, run: str, error: BaseException) -> None:  # noqa: ARG002 - one run is all there is
        """Files cannot be read or written: whoever runs the simulation is told."""
        raise error

    def trouble(self, error: StateError | OSError) -> None:
        """As `stall`."""
        raise error


class StrictCoordinator(Coordinator):
    """A coordinator that raises what others would count, log, or end a run for."""

    make_runs = StrictRuns

    def _on_message(self, event: Message) -> None:
        agent, kind = self.topics.sender(event.topic)
        self.inbox.take(agent, kind, event.payload)

    def _fleet(self) -> Fleet:
        return replace(super()._fleet(), leaves_out=False)


@contextlib.contextmanager
def files_kept(folder: Path) -> Iterator[None]:
    """Inside, files of the simulation in ``folder`` are read and written.

    Raises:
        StateError: one of them could not be; it says what to do.
    """
    try:
        yield
    except (OSError, ChunkError, StateError) as error:  # a chunk that the disk does not take is a ChunkError
        reason = reason_of(error) if isinstance(error, OSError) else str(error).rstrip(".")
        what = "make room" if getattr(error, "errno", None) in _NO_ROOM else "mend that (make room on a full disk)"
        raise StateError(f"{folder}: the simulation has stopped: {reason}; {what}{GO_ON}") from error
