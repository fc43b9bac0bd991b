"""The limits of a federation: what is exhausted first, and at how many agents.

A limit is one resource of one kind of process. What can be exhausted is in two tables, `ROLES` and `RESOURCES`; each
pair is a limit, and broker nodes have one more, the connections that they may have open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .costs import Costs
from .demand import Demand, Load, demand_of
from .settings import MOST_AGENTS, PlanSettings

MBIT_PER_MB = 8
MB_PER_GB = 1000


@dataclass(frozen=True)
class Role:
    """A kind of process.

    Attributes:
        name: What it is called.
        processes: How many of them there are.
        load: What they demand together.
        remedy: What spares one of them work.
    """

    name: str
    processes: Callable[[PlanSettings], int]
    load: Callable[[Demand], Load]
    remedy: str


@dataclass(frozen=True)
class Resource:
    """Something that a process can exhaust.

    Attributes:
        name: What it is called.
        unit: Its unit.
        demanded: How much of it a load is.
        available: How much of it one process has, before the share that may be used.
        remedy: What gives a process more of it.
    """

    name: str
    unit: str
    demanded: Callable[[Load], float]
    available: Callable[[PlanSettings], float]
    remedy: str


ROLES = (
    Role(
        "coordinator",
        lambda _: 1,
        lambda demand: demand.coordinator,
        "fewer agents in a round (--cohort), or aggregators (--partitions)",
    ),
    Role(
        "aggregators",
        lambda settings: settings.partitions,
        lambda demand: demand.aggregators,
        "more partitions (--partitions)",
    ),
    Role(
        "broker nodes",
        lambda settings: settings.brokers,
        lambda demand: demand.brokers,
        "more broker nodes (--brokers)",
    ),
)

RESOURCES = (
    Resource(
        "its one thread",
        "cores",
        lambda load: load.cores,
        lambda _: 1.0,
        "give rounds more time (--round-s, --rounds-per-day)",
    ),
    Resource(
        "memory",
        "MB",
        lambda load: load.memory_mb,
        lambda settings: MB_PER_GB * settings.memory_gb,
        "more memory (--memory-gb)",
    ),
    Resource(
        "network, received",
        "MB/s",
        lambda load: load.in_mb_s,
        lambda settings: settings.network_mbit / MBIT_PER_MB,
        "a faster network (--network-mbit)",
    ),
    Resource(
        "network, sent",
        "MB/s",
        lambda load: load.out_mb_s,
        lambda settings: settings.network_mbit / MBIT_PER_MB,
        "a faster network (--network-mbit)",
    ),
    Resource(
        "disk",
        "MB",
        lambda load: load.disk_mb,
        lambda settings: MB_PER_GB * settings.disk_gb,
        "a larger disk (--disk-gb), fewer kept days (--kept-days)",
    ),
)


@dataclass(frozen=True)
class Limit:
    """A resource of a kind of process, and how much of it is needed.

    Attributes:
        name: What is exhausted.
        unit: The unit of the next two.
        needed: What the planned fleet needs.
        available: What may be used.
        agents: The largest fleet for which it is enough; None: it is enough for `MOST_AGENTS`.
        remedy: What to do where it is exhausted.
    """

    name: str
    unit: str
    needed: float
    available: float
    agents: int | None
    remedy: str

    @property
    def is_reached(self) -> bool:
        """Whether the planned fleet needs more than may be used."""
        return self.needed > self.available


def limits_of(settings: PlanSettings, costs: Costs) -> list[Limit]:
    """Return all limits, the one that is reached by the smallest fleet first."""
    demand = demand_of(settings, costs, settings.agents)
    limits = []
    for role, resource in pairs(settings):
        # Brokers keep nothing on disk.
        if resource.demanded(role.load(demand)) == 0:
            continue
        available = settings.busy * resource.available(settings) * role.processes(settings)

        def needed(of: Demand, role: Role = role, resource: Resource = resource) -> float:
            return resource.demanded(role.load(of))

        agents = _largest_fleet(settings, costs, needed, available)
        name = f"{role.name}: {resource.name}"
        remedy = f"{resource.remedy}, or {role.remedy}"
        limits.append(Limit(name, resource.unit, needed(demand), available, agents, remedy))
    connections = settings.brokers * settings.connections
    limits.append(
        Limit(
            "broker nodes: connections",
            "",
            settings.agents,
            connections,
            connections if connections < MOST_AGENTS else None,
            "more broker nodes (--brokers), or allow each more open files and set --connections",
        )
    )
    return sorted(limits, key=lambda limit: MOST_AGENTS + 1 if limit.agents is None else limit.agents)


def pairs(settings: PlanSettings) -> Iterator[tuple[Role, Resource]]:
    """Yield each kind of process that there is, with each of its resources."""
    for role in ROLES:
        if role.processes(settings) > 0:
            for resource in RESOURCES:
                yield role, resource


def fits(settings: PlanSettings, demand: Demand, role_name: str) -> bool:
    """Return whether the processes of a kind have enough of everything."""
    for role, resource in pairs(settings):
        if role.name != role_name:
            continue
        available = settings.busy * resource.available(settings) * role.processes(settings)
        if resource.demanded(role.load(demand)) > available:
            return False
    return True


def _largest_fleet(
    settings: PlanSettings, costs: Costs, needed: Callable[[Demand], float], available: float
) -> int | None:
    """Return the largest number of agents that need no more than is available; None: `MOST_AGENTS` do not.

    More agents never need less, so that halving finds it.
    """
    if needed(demand_of(settings, costs, MOST_AGENTS)) <= available:
        return None
    enough = 0
    too_many = MOST_AGENTS
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        if needed(demand_of(settings, costs, middle)) <= available:
            enough = middle
        else:
            too_many = middle
    return enough
