"""What a run needs of the world, and how it says that it waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_agent.wire.messages import Command
from edge_agent.wire.transport import Transport

from ..config import CoordinatorConfig
from ..fleet.downloads import Distributor
from ..fleet.registry import Roster
from ..fleet.uploads import Collector
from ..state.store import StateFolder

if TYPE_CHECKING:
    from ..state.store import StateFolder
    from .round_loop import RunLoop


@dataclass(frozen=True)
class Waiting:
    """What a run waits for. ``until`` is monotonic seconds, None = as long as it takes."""

    what: str
    whom: tuple[str, ...] = ()
    until: float | None = None
    about: str = ""
    """Waits that are about the same thing get one line in the log; empty: whatever has other words is another wait."""


Steps = Iterator[Waiting]


@dataclass
class Fleet:
    """Who is there, how to speak to them, where things are kept, what time it is."""

    config: CoordinatorConfig
    state: StateFolder
    roster: Roster
    distributor: Distributor
    collector: Collector
    send: Callable[[str, Command], None]
    transport: Transport
    clock: Callable[[], float] = time.monotonic
    stopwatch: Callable[[], float] = time.monotonic
    """Times what is told of a run; in a simulation the clock of leases and deadlines stands still meanwhile."""

    leaves_out: bool = True
    """Whether rounds go on without agents that fail; a simulation is to end instead."""

    def heard_s(self) -> float:
        """The clock of agents' deadlines, in seconds: `clock`, less the time in which no agent could be heard."""
        return self.clock() - self.roster.deaf_s


class Aside:
    """Nothing. Others override what they do; nothing here keeps a round waiting that has been opened."""

    def start(self, state: StateFolder) -> None:
        """The coordinator begins to work in this folder."""

    def prepare(self, loop: RunLoop) -> Steps:  # noqa: ARG002 - for those who do something
        """Called when a run begins, or is gone on with; its rounds wait for this."""
        yield from ()

    def closed(self, loop: RunLoop, number: int) -> None:
        """Called after each round."""

    def rest(self, loop: RunLoop) -> Steps:  # noqa: ARG002 - for those who do something
        """Called after the last round; the run's end waits for this."""
        yield from ()

    def ended(self, run: str) -> None:
        """A run is over, however it ended: nothing that is still asked for it is of use to anybody."""

    def collect(self) -> None:
        """Called now and then, in the coordinator's own thread."""

    def close(self) -> None:
        """The coordinator stops."""
