"""What a fleet demands of the coordinator, of its aggregators, and the brokers.

The time that counts is the interval in which a round has to be done. In it fall the heartbeats and joins of that time,
and either a round or the end of a run, when all agents get the final model: whichever demands more.

With partitions, updates go to the aggregators: their bytes, checks and sums. The coordinator still asks each agent and
keeps the list of members, which has a cost of its own, and merges one partial sum for each partition.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_agent.core.config import AgentConfig

from ..fleet.roster import stretched_heartbeat_s
from .costs import Costs, of_size, of_work
from .settings import DAY_S, PlanSettings
from .work import MB, Size, Work

PARTIAL_SUM_BYTES = 16
"""Bytes of a partial sum for each float32 of the model: two float64, see `edge_agent.core.exact_sum`."""

FLOAT_BYTES = 4

KEPT_MODELS = 2
"""Models on disk beside the updates of the open round: the newest checkpoint, and the one before until it is done."""


@dataclass(frozen=True)
class Load:
    """The demand of all processes of one kind together.

    Attributes:
        cores: Cores that are busy on average in the interval.
        memory_mb: Memory in MB.
        in_mb_s: MB received in a second.
        out_mb_s: MB sent in a second.
        disk_mb: MB on disk.
    """

    cores: float = 0.0
    memory_mb: float = 0.0
    in_mb_s: float = 0.0
    out_mb_s: float = 0.0
    disk_mb: float = 0.0


@dataclass(frozen=True)
class DividedWork:
    """The work of rounds, by who does it.

    Attributes:
        coordinator: What the coordinator does.
        aggregators: What all aggregators do together; nothing without partitions.
    """

    coordinator: Work
    aggregators: Work


@dataclass(frozen=True)
class _DividedRound:
    """One round, by who does its work.

    Attributes:
        work: Who does what.
        coordinator_cpu_s: CPU seconds of the coordinator.
        aggregators_cpu_s: CPU seconds of all aggregators together; 0 without partitions.
    """

    work: DividedWork
    coordinator_cpu_s: float
    aggregators_cpu_s: float


@dataclass(frozen=True)
class _Stages:
    """The work of a fleet in one interval: `idle`, and beside it either a round or the end of a run.

    Attributes:
        idle: The work of an interval without a round.
        round: The work of a round.
        finish: The work at the end of a run.
    """

    idle: Work
    round: Work
    finish: Work

    def busiest(self, costs: Work) -> float:
        """Return what the interval costs that costs more: the one with a round, or with the end of a run."""
        return of_work(costs, self.idle) + max(of_work(costs, self.round), of_work(costs, self.finish))


@dataclass(frozen=True)
class Demand:
    """The work of a fleet in one interval, and what its processes need for it.

    Attributes:
        agents: How many agents it has.
        cohort: How many of them take part in a round.
        idle: The work of one interval without a round.
        round: The work of a round.
        finish: The work at the end of a run.
        coordinator: What the coordinator demands.
        aggregators: What these demand together; zeros without partitions.
        brokers: What all broker nodes demand together.
        round_cpu_s: CPU seconds of the coordinator, or of the busiest aggregator, in a round.
        journal_rows_per_day: Rows that the journal gets in a day.
    """

    agents: int
    cohort: int
    idle: Work
    round: Work
    finish: Work
    coordinator: Load
    aggregators: Load
    brokers: Load
    round_cpu_s: float
    journal_rows_per_day: float


def heartbeats_per_s(agents: int, lease_s: float) -> float:
    """Return the heartbeats in a second of so many agents without jobs."""
    configured_s: float = AgentConfig.model_fields["heartbeat_s"].default
    return agents / max(configured_s, stretched_heartbeat_s(agents, lease_s))


def divide_round(work: Work, partitions: int) -> DividedWork:
    """Return who does the work of rounds, where the updates are divided into partitions; 0: they are not."""
    if partitions == 0:
        return DividedWork(coordinator=work, aggregators=Work())
    # Each aggregator looks at what is open, too, with its part of the agents.
    summing = Work(
        open_seconds=partitions * work.open_seconds,
        open_member_seconds=work.open_member_seconds,
        updates=work.updates,
        update_mb=work.update_mb,
    )
    return DividedWork(coordinator=work.model_copy(update={"update_mb": 0.0}), aggregators=summing)


def demand_of(settings: PlanSettings, costs: Costs, agents: int) -> Demand:
    """Return what a fleet of so many agents demands.

    Args:
        settings: What is asked of the fleet, and how it is divided; the number of agents there is not used.
        costs: What one of each count costs.
        agents: How many agents there are.
    """
    # 1. What happens in an interval, and who does it.
    cohort = settings.cohort_of(agents)
    stages = _stages(settings, costs, agents, cohort)
    divided = _divide(settings, costs, stages.round)
    # 2. How long a round keeps the process busy that has most to do in it.
    round_cpu_s = divided.coordinator_cpu_s
    if settings.partitions > 0:
        round_cpu_s = max(round_cpu_s, divided.aggregators_cpu_s / settings.partitions)
    # 3. What each kind of process demands.
    day = _day_work(settings, agents, cohort)
    size = Size(processes=1, agents=agents, cohort=cohort, model_mb=settings.model_mb)
    return Demand(
        agents=agents,
        cohort=cohort,
        idle=stages.idle,
        round=stages.round,
        finish=stages.finish,
        coordinator=_coordinator_load(settings, costs, size, stages, divided, day),
        aggregators=_aggregators_load(settings, costs, size, divided),
        brokers=_broker_load(settings, costs, size, stages),
        round_cpu_s=round_cpu_s,
        journal_rows_per_day=of_work(costs.journal_rows, day),
    )


def _stages(settings: PlanSettings, costs: Costs, agents: int, cohort: int) -> _Stages:
    """Return what so many agents, of which ``cohort`` take part in a round, give to do in an interval."""
    waiting = _waiting_work(settings, costs, cohort)
    return _Stages(
        idle=_idle_work(settings, agents, settings.interval_s),
        round=waiting.plus(Work(rounds=1, updates=cohort, update_mb=cohort * settings.model_mb)),
        finish=waiting.plus(Work(final_reports=agents, final_mb=agents * settings.model_mb)),
    )


def _divide(settings: PlanSettings, costs: Costs, work: Work) -> _DividedRound:
    """Return who does the work of a round, and how much CPU that takes."""
    divided = divide_round(work, settings.partitions)
    own = divided.coordinator
    if settings.partitions == 0:
        return _DividedRound(divided, coordinator_cpu_s=of_work(costs.coordinator_cpu_s, own), aggregators_cpu_s=0.0)
    # Beside aggregators an update costs the coordinator its row and receipt, and it merges one sum for each partition.
    other_s = of_work(costs.coordinator_cpu_s, own.model_copy(update={"updates": 0.0}))
    kept_s = costs.kept_update_s * own.updates
    merge_s = settings.partitions * settings.model_mb * costs.merge_s_per_mb
    summing_s = costs.aggregator_factor * of_work(costs.coordinator_cpu_s, divided.aggregators)
    return _DividedRound(divided, coordinator_cpu_s=other_s + kept_s + merge_s, aggregators_cpu_s=summing_s)


def _partial_sums_mb(settings: PlanSettings) -> float:
    """Return the MB of the partial sums of all partitions."""
    return settings.partitions * settings.model_mb * PARTIAL_SUM_BYTES / FLOAT_BYTES


def _coordinator_load(
    settings: PlanSettings,
    costs: Costs,
    size: Size,
    stages: _Stages,
    divided: _DividedRound,
    day: Work,
) -> Load:
    """Return what the coordinator demands in the interval that has more to do: with a round, or with the end of a run.

    Args:
        settings: The fleet and its machines.
        costs: What one of each count costs.
        size: What is there at a time.
        stages: What happens in an interval.
        divided: Who does the work of a round.
        day: What happens in a day, for the journal.
    """
    # 1. CPU and network.
    finish_s = of_work(costs.coordinator_cpu_s, stages.finish)
    busiest_s = of_work(costs.coordinator_cpu_s, stages.idle) + max(divided.coordinator_cpu_s, finish_s)
    partial_mb = _partial_sums_mb(settings)
    in_of_round_mb = _mb(costs.coordinator_in_bytes, divided.work.coordinator) + partial_mb
    in_mb = max(in_of_round_mb, _mb(costs.coordinator_in_bytes, stages.finish))
    out_of_round_mb = _mb(costs.coordinator_out_bytes, stages.round)
    out_mb = settings.model_mb + max(out_of_round_mb, _mb(costs.coordinator_out_bytes, stages.finish))
    # 2. The disk: the journal, the models, and the updates of the open round, or what aggregators have made of them.
    journal_mb = settings.kept_days * of_work(costs.journal_bytes, day) / MB
    received_mb = partial_mb
    if settings.partitions == 0:
        received_mb = size.cohort * settings.model_mb
    return Load(
        cores=busiest_s / settings.interval_s,
        memory_mb=of_size(costs.coordinator_mb, size),
        in_mb_s=(_mb(costs.coordinator_in_bytes, stages.idle) + in_mb) / settings.interval_s,
        out_mb_s=out_mb / settings.interval_s,
        disk_mb=journal_mb + KEPT_MODELS * settings.model_mb + received_mb,
    )


def _aggregators_load(settings: PlanSettings, costs: Costs, size: Size, divided: _DividedRound) -> Load:
    """Return what all aggregators demand together; each is as large as a coordinator of its part of the agents."""
    if settings.partitions == 0:
        return Load()
    part = Size(
        processes=1,
        agents=size.agents / settings.partitions,
        cohort=size.cohort / settings.partitions,
        model_mb=settings.model_mb,
    )
    models_mb = settings.partitions * KEPT_MODELS * settings.model_mb
    return Load(
        cores=divided.aggregators_cpu_s / settings.interval_s,
        memory_mb=settings.partitions * of_size(costs.coordinator_mb, part),
        in_mb_s=_mb(costs.coordinator_in_bytes, divided.work.aggregators) / settings.interval_s,
        out_mb_s=_partial_sums_mb(settings) / settings.interval_s,
        disk_mb=size.cohort * settings.model_mb + models_mb,
    )


def _idle_work(settings: PlanSettings, agents: int, seconds: float) -> Work:
    """Return what happens in some seconds without rounds."""
    return Work(
        joins=settings.joins_per_day * agents * seconds / DAY_S,
        seconds=seconds,
        agent_seconds=agents * seconds,
        heartbeats=heartbeats_per_s(agents, settings.lease_s) * seconds,
    )


def _waiting_work(settings: PlanSettings, costs: Costs, cohort: int) -> Work:
    """Return what happens while a round is open, or the end of a run.

    The coordinator looks at what is open again and again; a look takes longer the more agents there are, and the pauses
    between looks have a limit. So looks take a share of the time that grows with the cohort, up to all of it.
    """
    open_s = min(settings.open_s, settings.interval_s)
    members = float(cohort)
    each_s = costs.coordinator_cpu_s.open_member_seconds
    if each_s > 0:
        most_share = max(0.0, 1 - costs.coordinator_cpu_s.open_seconds)
        members = min(members, most_share / each_s)
    return Work(open_seconds=open_s, open_member_seconds=open_s * members)


def _day_work(settings: PlanSettings, agents: int, cohort: int) -> Work:
    """Return what happens in a day."""
    rounds = settings.rounds_per_day
    runs = rounds / settings.run_rounds
    updates = rounds * cohort
    return _idle_work(settings, agents, DAY_S).plus(
        Work(
            rounds=rounds,
            updates=updates,
            update_mb=updates * settings.model_mb,
            final_reports=runs * agents,
            final_mb=runs * agents * settings.model_mb,
        )
    )


def _broker_load(settings: PlanSettings, costs: Costs, size: Size, stages: _Stages) -> Load:
    """Return what all broker nodes demand together. Each node keeps the messages of the model; agents are divided."""
    interval_s = settings.interval_s
    each = Size(
        processes=1,
        agents=size.agents / settings.brokers,
        cohort=size.cohort / settings.brokers,
        model_mb=settings.model_mb,
    )
    # What agents send goes on to the coordinator, and what they receive has come from it, a model once.
    in_bytes = costs.coordinator_in_bytes
    from_agents_mb = max(_mb(in_bytes, stages.round), _mb(in_bytes, stages.finish))
    to_agents_mb = max(_mb(costs.agents_in_bytes, stages.round), _mb(costs.agents_in_bytes, stages.finish))
    idle_mb = _mb(in_bytes, stages.idle)
    return Load(
        cores=stages.busiest(costs.broker_cpu_s) / interval_s,
        memory_mb=settings.brokers * of_size(costs.broker_mb, each),
        in_mb_s=(idle_mb + from_agents_mb + settings.model_mb) / interval_s,
        out_mb_s=(idle_mb + from_agents_mb + to_agents_mb) / interval_s,
    )


def _mb(costs: Work, work: Work) -> float:
    """Return the MB of work whose costs are stated in bytes."""
    return of_work(costs, work) / MB
