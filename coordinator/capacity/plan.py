"""A plan: what a fleet demands of given machines, how many processes and machines it needs, and the first limit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .costs import Check, Costs, of_work
from .demand import Demand, Load, demand_of, divide_round
from .limits import AGGREGATORS, BROKERS, COORDINATOR, RESOURCES, ROLES, Limit, fits, limits_of
from .settings import PlanSettings
from .work import Size, Work

MOST_PROCESSES = 1024
"""The most aggregators or broker nodes that are tried; as many as the settings allow."""


@dataclass(frozen=True)
class Term:
    """A part of a figure: so many of a count, each at a cost.

    Attributes:
        figure: What it is a part of.
        count: What is counted.
        amount: How many there are.
        each: The cost of one.
        source: Where the cost comes from.
    """

    figure: str
    count: str
    amount: float
    each: float
    source: str

    @property
    def product(self) -> float:
        """The amount times the cost of one, which is this part of the figure."""
        return self.amount * self.each

    def as_json(self) -> dict[str, Any]:
        """Return the part of the figure as a JSON object."""
        return {
            "figure": self.figure,
            "count": self.count,
            "amount": self.amount,
            "each": self.each,
            "product": self.product,
            "source": self.source,
        }


@dataclass(frozen=True)
class RoleLoad:
    """The demand of one kind of process.

    Attributes:
        role: The name of the kind.
        processes: How many of them there are.
        load: What they demand together.
    """

    role: str
    processes: int
    load: Load

    def as_json(self) -> dict[str, Any]:
        """Return the load and whose it is as a JSON object."""
        return {"role": self.role, "processes": self.processes, **asdict(self.load)}


@dataclass(frozen=True)
class Plan:
    """The processes and machines that a fleet needs, and the limits that it reaches.

    Attributes:
        settings: The fleet and the machines.
        costs: What the figures are computed from.
        demand: What the fleet demands of the processes of the settings.
        limits: All limits, the first one first.
        partitions_needed: The fewest aggregators with which coordinator and these suffice; 0: the coordinator
            alone does; None: no number of them does.
        brokers_needed: The fewest broker nodes that suffice; None: no number of them does.
        machines_needed: Machines that hold all of these processes; None where one of the numbers above is.
    """

    settings: PlanSettings
    costs: Costs
    demand: Demand
    limits: list[Limit]
    partitions_needed: int | None
    brokers_needed: int | None
    machines_needed: int | None

    @property
    def first_limit(self) -> Limit:
        """The limit that the smallest fleet reaches."""
        return self.limits[0]

    def loads(self) -> list[RoleLoad]:
        """Return the load of each kind of process that there is."""
        loads = []
        for role in ROLES:
            processes = role.processes(self.settings)
            if processes > 0:
                loads.append(RoleLoad(role.name, processes, role.load(self.demand)))
        return loads

    def terms(self) -> Iterator[Term]:
        """Yield the parts of which the figures are sums, each with the source of its cost."""
        # 1. What happens in some time.
        stages = {
            "an interval without a round": self.demand.idle,
            "a round": self.demand.round,
            "end of a run": self.demand.finish,
        }
        for resource in WORK_RESOURCES:
            for stage, work in stages.items():
                yield from self._terms_of(resource, work, stage)
        # 2. What is there at a time.
        size = Size(processes=1, agents=self.demand.agents, cohort=self.demand.cohort, model_mb=self.settings.model_mb)
        for resource in SIZE_RESOURCES:
            yield from self._terms_of(resource, size)
        # 3. Who adds the updates up.
        sums_mb = self.demand.cohort * self.settings.model_mb
        yield self._term("CPU seconds of the sum alone, a round", "update_mb", sums_mb, self.costs.sum_s_per_mb)
        if self.settings.partitions > 0:
            yield from self._terms_with_aggregators()

    def _terms_of(self, resource: str, counts: Work | Size, stage: str = "") -> Iterator[Term]:
        """Yield the parts of what some counts cost of a resource of `Costs`, without those that are 0.

        Args:
            resource: The name of the field of `Costs`.
            counts: What happens, or is there.
            stage: When it happens; empty: what is there at any time.
        """
        costs = getattr(self.costs, resource)
        figure = Costs.model_fields[resource].description or resource
        if stage:
            figure = f"{figure}, {stage}"
        for count in type(counts).model_fields:
            amount = getattr(counts, count)
            each = getattr(costs, count)
            if amount > 0 and each > 0:
                yield self._term(figure, count, amount, each)

    def _terms_with_aggregators(self) -> Iterator[Term]:
        """Yield the parts of a round's CPU seconds where aggregators take and sum the updates."""
        summing = divide_round(self.demand.round, self.settings.partitions).aggregators
        yield self._term(
            "CPU seconds beside aggregators, a round", "updates", self.demand.cohort, self.costs.kept_update_s
        )
        merged_mb = self.settings.partitions * self.settings.model_mb
        yield self._term("CPU seconds of merging, a round", "partial sums, MB", merged_mb, self.costs.merge_s_per_mb)
        alone_s = of_work(self.costs.coordinator_cpu_s, summing)
        yield self._term(
            "CPU seconds of all aggregators, a round",
            "those of the coordinator alone",
            alone_s,
            self.costs.aggregator_factor,
        )

    def _term(self, figure: str, count: str, amount: float, each: float) -> Term:
        """Return a part of a figure with the machine on which its cost was measured."""
        origin = self.costs.origin
        return Term(figure, count, amount, each, source=f"measured on {origin.processor}, {origin.date}")

    def sums_per_s(self) -> float:
        """Return how many updates of this model one aggregator takes in a second with all of its work on them."""
        single_update = Work(updates=1, update_mb=self.settings.model_mb)
        return 1 / (self.costs.aggregator_factor * of_work(self.costs.coordinator_cpu_s, single_update))

    def as_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        return {
            "settings": self.settings.model_dump(),
            "cohort": self.demand.cohort,
            "interval_s": self.settings.interval_s,
            "loads": [load.as_json() for load in self.loads()],
            "round_cpu_s": self.demand.round_cpu_s,
            "updates_per_s_of_one_aggregator": self.sums_per_s(),
            "journal_rows_per_day": self.demand.journal_rows_per_day,
            "partitions_needed": self.partitions_needed,
            "brokers_needed": self.brokers_needed,
            "machines_needed": self.machines_needed,
            "limits": [limit.as_json() for limit in self.limits],
            "origin": self.costs.origin.model_dump(),
            "checks": [check.as_json() for check in self.costs.checks],
        }


WORK_RESOURCES = tuple(name for name, field in Costs.model_fields.items() if field.annotation is Work)
"""The fields of `Costs` whose amount follows from what happens, in their order."""

SIZE_RESOURCES = tuple(name for name, field in Costs.model_fields.items() if field.annotation is Size)
"""The fields of `Costs` whose amount follows from what is there, in their order."""


def make_plan(settings: PlanSettings, costs: Costs) -> Plan:
    """Return what a fleet needs of the machines of the settings, by costs that were measured."""
    partitions = _fewest_partitions(settings, costs)
    brokers = _fewest_brokers(settings, costs)
    machines = None
    if partitions is not None and brokers is not None:
        machines = _machines(settings.model_copy(update={"partitions": partitions, "brokers": brokers}), costs)
    return Plan(
        settings=settings,
        costs=costs,
        demand=demand_of(settings, costs, settings.agents),
        limits=limits_of(settings, costs),
        partitions_needed=partitions,
        brokers_needed=brokers,
        machines_needed=machines,
    )


def worst_check(costs: Costs, resource: str) -> Check | None:
    """Return the prediction of a resource that was furthest off; None where none was checked."""
    checks = [check for check in costs.checks if check.resource == resource]
    return max(checks, key=lambda check: abs(check.error), default=None)


def _fewest_partitions(settings: PlanSettings, costs: Costs) -> int | None:
    """Return the fewest aggregators with which these and the coordinator have enough of everything."""
    for partitions in range(MOST_PROCESSES + 1):
        divided = settings.model_copy(update={"partitions": partitions})
        demand = demand_of(divided, costs, settings.agents)
        if fits(divided, demand, COORDINATOR) and fits(divided, demand, AGGREGATORS):
            return partitions
    return None


def _fewest_brokers(settings: PlanSettings, costs: Costs) -> int | None:
    """Return the fewest broker nodes that have enough of everything, connections included."""
    for brokers in range(math.ceil(settings.agents / settings.connections), MOST_PROCESSES + 1):
        divided = settings.model_copy(update={"brokers": brokers})
        if fits(divided, demand_of(divided, costs, settings.agents), BROKERS):
            return brokers
    return None


def _machines(settings: PlanSettings, costs: Costs) -> int:
    """Return the machines that hold all processes, each of which may lie on any of them.

    What processes send each other counts as if they were on different machines.
    """
    demand = demand_of(settings, costs, settings.agents)
    machines = 1
    for resource in RESOURCES:
        demanded = sum(resource.demanded(role.load(demand)) for role in ROLES)
        usable = settings.busy * resource.of_machine(settings)
        machines = max(machines, math.ceil(demanded / usable))
    return machines
