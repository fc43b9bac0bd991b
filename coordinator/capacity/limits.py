"""The limits of a federation: what is exhausted first, and at how many agents.

A limit is one resource of one kind of process (`RoleResource`). What can be exhausted is in two tables, `ROLES` and
`RESOURCES`; each pair is a limit, and broker nodes have one more, the connections that they may have open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .costs import Costs
from .demand import Demand, Load, demand_of
from .settings import MOST_AGENTS, PlanSettings

MBIT_PER_MB = 8
MB_PER_GB = 1000


@dataclass(frozen=True)
class Role:
    """A kind of process of a federation, such as its broker nodes.

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
        of_machine: How much of it one machine has, before the share that may be used.
        remedy: What gives a process more of it.
    """

    name: str
    unit: str
    demanded: Callable[[Load], float]
    available: Callable[[PlanSettings], float]
    of_machine: Callable[[PlanSettings], float]
    remedy: str


COORDINATOR = Role(
    "coordinator",
    processes=lambda _: 1,
    load=lambda demand: demand.coordinator,
    remedy="fewer agents in a round (--cohort), or aggregators (--partitions)",
)
AGGREGATORS = Role(
    "aggregators",
    processes=lambda settings: settings.partitions,
    load=lambda demand: demand.aggregators,
    remedy="more partitions (--partitions)",
)
BROKERS = Role(
    "broker nodes",
    processes=lambda settings: settings.brokers,
    load=lambda demand: demand.brokers,
    remedy="more broker nodes (--brokers)",
)

ROLES = (COORDINATOR, AGGREGATORS, BROKERS)
"""All kinds of processes, in the order in which they are shown."""


def _memory_mb(settings: PlanSettings) -> float:
    return MB_PER_GB * settings.memory_gb


def _disk_mb(settings: PlanSettings) -> float:
    return MB_PER_GB * settings.disk_gb


def _network_mb_s(settings: PlanSettings) -> float:
    return settings.network_mbit / MBIT_PER_MB


RESOURCES = (
    Resource(
        "its one thread",
        unit="cores",
        demanded=lambda load: load.cores,
        available=lambda _: 1.0,
        of_machine=lambda settings: settings.cores,
        remedy="give rounds more time (--round-s, --rounds-per-day)",
    ),
    Resource(
        "memory",
        unit="MB",
        demanded=lambda load: load.memory_mb,
        available=_memory_mb,
        of_machine=_memory_mb,
        remedy="more memory (--memory-gb)",
    ),
    Resource(
        "network, received",
        unit="MB/s",
        demanded=lambda load: load.in_mb_s,
        available=_network_mb_s,
        of_machine=_network_mb_s,
        remedy="a faster network (--network-mbit)",
    ),
    Resource(
        "network, sent",
        unit="MB/s",
        demanded=lambda load: load.out_mb_s,
        available=_network_mb_s,
        of_machine=_network_mb_s,
        remedy="a faster network (--network-mbit)",
    ),
    Resource(
        "disk",
        unit="MB",
        demanded=lambda load: load.disk_mb,
        available=_disk_mb,
        of_machine=_disk_mb,
        remedy="a larger disk (--disk-gb), fewer kept days (--kept-days)",
    ),
)


@dataclass(frozen=True)
class RoleResource:
    """One resource of one kind of process.

    Attributes:
        role: The kind of process.
        resource: What it can exhaust.
    """

    role: Role
    resource: Resource

    def needed(self, demand: Demand) -> float:
        """Return how much of the resource all processes of this kind demand together."""
        return self.resource.demanded(self.role.load(demand))

    def usable(self, settings: PlanSettings) -> float:
        """Return how much of the resource all processes of this kind may use together."""
        return settings.busy * self.resource.available(settings) * self.role.processes(settings)


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

    def as_json(self) -> dict[str, Any]:
        """Return the limit as a JSON object."""
        return {
            "name": self.name,
            "unit": self.unit,
            "needed": self.needed,
            "available": self.available,
            "agents": self.agents,
            "is_reached": self.is_reached,
            "remedy": self.remedy,
        }


def limits_of(settings: PlanSettings, costs: Costs) -> list[Limit]:
    """Return all limits, the one that is reached by the smallest fleet first."""
    demand = demand_of(settings, costs, settings.agents)
    # Nothing is no limit: brokers keep nothing on disk.
    limits = [_limit_of(pair, settings, costs, demand) for pair in _pairs(settings) if pair.needed(demand) > 0]
    return sorted([*limits, _connection_limit(settings)], key=_smallest_fleet_first)


def fits(settings: PlanSettings, demand: Demand, role: Role) -> bool:
    """Return whether the processes of a kind have enough of everything; true where there are none of them."""
    return all(pair.needed(demand) <= pair.usable(settings) for pair in _pairs(settings) if pair.role is role)


def _pairs(settings: PlanSettings) -> Iterator[RoleResource]:
    """Yield each kind of process that there is, with each of its resources."""
    for role in ROLES:
        if role.processes(settings) > 0:
            for resource in RESOURCES:
                yield RoleResource(role, resource)


def _limit_of(pair: RoleResource, settings: PlanSettings, costs: Costs, demand: Demand) -> Limit:
    """Return the limit of one resource of one kind of process, for the planned fleet, whose demand is stated."""
    return Limit(
        name=f"{pair.role.name}: {pair.resource.name}",
        unit=pair.resource.unit,
        needed=pair.needed(demand),
        available=pair.usable(settings),
        agents=_largest_fleet(pair, settings, costs),
        remedy=f"{pair.resource.remedy}, or {pair.role.remedy}",
    )


def _connection_limit(settings: PlanSettings) -> Limit:
    """Return the limit of the connections that all broker nodes may have open: an agent has one."""
    connections = settings.brokers * settings.connections
    return Limit(
        name="broker nodes: connections",
        unit="",
        needed=settings.agents,
        available=connections,
        agents=connections if connections < MOST_AGENTS else None,
        remedy="more broker nodes (--brokers), or allow each more open files and set --connections",
    )


def _smallest_fleet_first(limit: Limit) -> int:
    """Return the key that sorts limits: the largest fleet for which one is enough; what no fleet reaches comes last."""
    return MOST_AGENTS + 1 if limit.agents is None else limit.agents


def _largest_fleet(pair: RoleResource, settings: PlanSettings, costs: Costs) -> int | None:
    """Return the largest number of agents for which a resource is enough; None: it is enough for `MOST_AGENTS`.

    More agents never need less, so that halving finds it.
    """
    usable = pair.usable(settings)
    if pair.needed(demand_of(settings, costs, MOST_AGENTS)) <= usable:
        return None
    enough = 0
    too_many = MOST_AGENTS
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        if pair.needed(demand_of(settings, costs, middle)) <= usable:
            enough = middle
        else:
            too_many = middle
    return enough
