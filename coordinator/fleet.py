"""What a run needs of the world, and how it says that it waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edge_agent.wire.messages import Command
from edge_agent.wire.transport import Transport

from .collect import Collector
from .config import CoordinatorConfig
from .distribute import Distributor
from .roster import Roster
from .store import StateFolder


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
