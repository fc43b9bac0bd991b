"""Costs of coordinator and broker for ``headwater plan``: fleets of several sizes are measured, coefficients fitted.

All fleets but two are fitted, by least squares of the relative errors with coefficients that cannot be negative. One
of the others is predicted and compared with what it used: that says how far a plan may be off on this machine. The last
one has aggregators, and shows what an update costs there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from scipy.optimize import nnls

from edge_agent.core.exact_sum import ExactSum

from ...capacity.costs import Check, Costs, Origin, PhaseUse, Point, of_size, of_work
from ...capacity.demand import divide_round
from ...capacity.work import MB, Size, Work
from ...config import RoundConfig
from ...fleet.roster import stretched_heartbeat_s
from .fleet import IDLE, JOINING, ROUNDS, STATUS_S, FleetFigures, measure
from .fleet_agents import HEARTBEAT_S
from .measuring import CostPlan, FleetPlan

Costed = TypeVar("Costed", Work, Size)

FITTED = (
    Point(agents=100, cohort=20, model_mb=0.05, rounds=10),
    Point(agents=100, cohort=100, model_mb=0.5, rounds=3),
    Point(agents=100, cohort=50, model_mb=5.0, rounds=2),
    Point(agents=1000, cohort=100, model_mb=0.5, rounds=3),
    Point(agents=1000, cohort=1000, model_mb=0.1, rounds=2),
    Point(agents=10_000, cohort=100, model_mb=0.05, rounds=3),
)
"""Small and large fleets, cohorts and models, so that no two counts grow together in all of them."""

HELD_OUT = Point(agents=3000, cohort=300, model_mb=0.1, rounds=2)
"""A fleet that is predicted."""

DIVIDED = Point(agents=200, cohort=200, model_mb=0.5, rounds=10, aggregators=2)
"""A fleet that shows what of the work of an update the coordinator keeps beside aggregators, and what they need."""

AGGREGATORS = "aggregators_cpu_s"
"""CPU seconds of all aggregators in the rounds."""

WORK_OF = {
    "coordinator_cpu_s": (
        "joins",
        "seconds",
        "agent_seconds",
        "heartbeats",
        "open_seconds",
        "open_member_seconds",
        "rounds",
        "updates",
        "update_mb",
        "final_reports",
        "final_mb",
    ),
    "broker_cpu_s": (
        "joins",
        "seconds",
        "heartbeats",
        "open_seconds",
        "open_member_seconds",
        "updates",
        "update_mb",
        "final_reports",
        "final_mb",
    ),
    "coordinator_in_bytes": ("joins", "heartbeats", "updates", "update_mb", "final_reports", "final_mb"),
    "coordinator_out_bytes": ("rounds", "updates", "update_mb", "final_reports", "final_mb"),
    "agents_in_bytes": ("updates", "update_mb", "final_reports", "final_mb"),
    "journal_bytes": ("starts", "rounds", "updates", "final_reports"),
    "journal_rows": ("starts", "rounds", "updates", "final_reports"),
}
"""Resource -> the counts that it can depend on. What the coordinator publishes of models is a count of its own."""

LEAST = {"coordinator_cpu_s": 0.5, "broker_cpu_s": 0.2}
"""Amounts below which errors count as absolute ones: the kernel counts CPU in steps of 10 ms."""

SUMMED_MB = 4.0
"""Size of the arrays by which sums are timed, larger than a processor's nearest caches."""


def heartbeats_in(agents: int, seconds: float) -> float:
    """Return the heartbeats of so many waiting agents in some seconds."""
    lease_s: float = RoundConfig.model_fields["lease_s"].default
    return agents * seconds / max(HEARTBEAT_S, stretched_heartbeat_s(agents, lease_s))


def uses_of(point: Point, figures: FleetFigures) -> Iterator[PhaseUse]:
    """Yield what was counted and used in each phase of a measurement, and in the whole of it."""
    total = Work(starts=1)
    for phase, name in ((JOINING, "joining"), (IDLE, "idle"), (ROUNDS, "rounds")):
        spent = figures.phases[phase]
        seconds = spent.seconds
        used = {
            "coordinator_cpu_s": spent.cpu_s,
            "broker_cpu_s": spent.broker_cpu_s,
            "coordinator_in_bytes": float(spent.received_bytes),
        }
        if phase == JOINING:
            # They come one after the other: on average they have been there for half of the time.
            work = Work(joins=point.agents, seconds=seconds, agent_seconds=point.agents * seconds / 2)
        elif phase == IDLE:
            work = Work(seconds=seconds, agent_seconds=point.agents * seconds, heartbeats=spent.messages)
        else:
            open_s = max(0.0, seconds - STATUS_S)
            work = Work(
                seconds=seconds,
                agent_seconds=point.agents * seconds,
                heartbeats=heartbeats_in(point.agents, seconds),
                open_seconds=open_s,
                open_member_seconds=open_s * point.cohort,
                rounds=point.rounds,
                updates=figures.updates,
                update_mb=figures.updates * point.model_mb,
                final_reports=point.agents,
                final_mb=point.agents * point.model_mb,
            )
            used["coordinator_out_bytes"] = float(figures.moved.published - figures.moved.models)
            used["agents_in_bytes"] = float(figures.moved.received)
            if figures.aggregators:
                used[AGGREGATORS] = sum(process.cpu_s for process in figures.aggregators)
        total = total.plus(work)
        yield PhaseUse(point=point, phase=name, work=work, used=used)
    whole = {"journal_bytes": float(figures.journal.size_bytes), "journal_rows": float(figures.journal.rows)}
    if figures.usage is not None and figures.broker_usage is not None:
        whole["coordinator_mb"] = figures.usage.peak_mb
        whole["broker_mb"] = figures.broker_usage.peak_mb
    yield PhaseUse(point=point, phase="whole", work=total, used=whole)


def fit_coefficients(counts: np.ndarray, amounts: np.ndarray, least: float = 0.0) -> np.ndarray:
    """Return the coefficients that minimize the sum of squared relative errors, none of them negative.

    Args:
        counts: (n, d) float64, what was counted in each measurement.
        amounts: (n,) float64, what was used.
        least: Amounts below this count as this large.

    Returns:
        (d,) float64.
    """
    weights = 1.0 / np.maximum(amounts, max(least, 1e-12))
    weighted = counts * weights[:, None]
    # Columns of equal length: a count of thousands and one of three are fitted equally well.
    lengths = np.linalg.norm(weighted, axis=0)
    lengths[lengths == 0] = 1.0
    coefficients, _ = nnls(weighted / lengths, amounts * weights)
    return np.asarray(coefficients / lengths)


def fit_resource(
    kind: type[Costed], names: Sequence[str], rows: Sequence[tuple[Costed, float]], least: float = 0.0
) -> Costed:
    """Return the cost of one unit of each count in ``names``; the others cost nothing.

    Args:
        kind: The class of the counts.
        names: The counts that the resource can depend on.
        rows: (Counts, amount that was used) of each measurement.
        least: Amounts below this count as this large.
    """
    counts = np.array([[getattr(row, name) for name in names] for row, _ in rows], dtype=np.float64)
    amounts = np.array([amount for _, amount in rows], dtype=np.float64)
    coefficients = fit_coefficients(counts, amounts, least)
    fitted = {name: float(f"{value:.4g}") for name, value in zip(names, coefficients, strict=True)}
    return kind(**fitted)


def fit(measured: Sequence[PhaseUse], held_out: int, origin: Origin, sums: tuple[float, float]) -> Costs:
    """Fit the costs to all measurements but those of fleets of one size, which they then predict.

    Args:
        measured: What all fleets have used.
        held_out: The number of agents of the fleets that are predicted.
        origin: The machine.
        sums: CPU seconds of adding 1 MB to a sum, and of merging the sum of a model of 1 MB.
    """
    fitted = [use for use in measured if use.point.agents != held_out and use.point.aggregators == 0]
    resources: dict[str, Any] = {}
    for resource, names in WORK_OF.items():
        rows = [(use.work, use.used[resource]) for use in fitted if resource in use.used]
        resources[resource] = fit_resource(Work, names, rows, LEAST.get(resource, 0.0))
    for resource in ("coordinator_mb", "broker_mb"):
        sizes = [(use.point.size, use.used[resource]) for use in fitted if resource in use.used]
        resources[resource] = fit_resource(Size, tuple(Size.model_fields), sizes)
    predicted = [use for use in measured if use.point.agents == held_out and use.point.aggregators == 0]
    checks = [check for use in predicted for check in checks_of(use, resources)]
    sum_s, merge_s = sums
    return Costs(
        origin=origin,
        **resources,
        kept_update_s=_fit_kept_update(measured, resources["coordinator_cpu_s"]),
        aggregator_factor=_fit_aggregators(measured, resources["coordinator_cpu_s"]),
        sum_s_per_mb=sum_s,
        merge_s_per_mb=merge_s,
        checks=tuple(checks),
        measured=tuple(measured),
    )


def checks_of(use: PhaseUse, resources: Mapping[str, Any]) -> Iterator[Check]:
    """Yield what the coefficients say of a measurement beside what was used."""
    for resource, amount in use.used.items():
        costs = resources[resource]
        predicted = of_work(costs, use.work) if isinstance(costs, Work) else of_size(costs, use.point.size)
        if amount > 0:
            yield Check(point=use.point, phase=use.phase, resource=resource, predicted=predicted, measured=amount)


def _with_aggregators(measured: Sequence[PhaseUse]) -> list[PhaseUse]:
    """Return what fleets with aggregators have used."""
    return [use for use in measured if AGGREGATORS in use.used]


def _fit_kept_update(measured: Sequence[PhaseUse], costs: Work) -> float:
    """Return the CPU seconds of the coordinator for an update that an aggregator takes.

    Looks at the open round cannot be told apart from it, as all of these fleets are open for as long as they have
    updates. They are counted here, and once more where a fleet is planned: rather too much than too little.

    Args:
        measured: What all fleets have used; at least one had aggregators.
        costs: The CPU of a coordinator alone.
    """
    rest_s = 0.0
    updates = 0.0
    for use in _with_aggregators(measured):
        own = divide_round(use.work, use.point.aggregators).coordinator
        others = own.model_copy(update={"updates": 0.0, "open_seconds": 0.0, "open_member_seconds": 0.0})
        rest_s += use.used["coordinator_cpu_s"] - of_work(costs, others)
        updates += own.updates
    return float(f"{max(0.0, rest_s / updates):.4g}")


def _fit_aggregators(measured: Sequence[PhaseUse], costs: Work) -> float:
    """Return the CPU of aggregators as a multiple of what the same work costs a coordinator alone.

    Args:
        measured: What all fleets have used; at least one had aggregators.
        costs: The CPU of a coordinator alone.
    """
    used_s = 0.0
    alone_s = 0.0
    for use in _with_aggregators(measured):
        summing = divide_round(use.work, use.point.aggregators).aggregators
        used_s += use.used[AGGREGATORS]
        alone_s += of_work(costs, summing)
    return float(f"{used_s / alone_s:.4g}")


def time_sums(clock: Callable[[], float] = time.process_time, repeats: int = 20) -> tuple[float, float]:
    """Return the CPU seconds of adding 1 MB of float32 to an exact sum, and of merging the sum of a model of 1 MB.

    Args:
        clock: A clock of CPU seconds.
        repeats: How many additions are timed.
    """
    addend = np.random.default_rng(0).standard_normal(int(SUMMED_MB * MB / 4)).astype(np.float32)
    total = ExactSum(addend.shape)
    other = ExactSum(addend.shape)
    other.add(addend)
    total.add(addend)
    began = clock()
    for _ in range(repeats):
        total.add(addend, 3.0)
    added = clock()
    for _ in range(repeats):
        total.merge(other)
    merged = clock()
    per_mb = 1 / (repeats * SUMMED_MB)
    return (added - began) * per_mb, (merged - added) * per_mb


def origin_of(machine: Mapping[str, Any], plan: CostPlan, command: str) -> Origin:
    """Return where figures of this machine come from.

    Args:
        machine: The machine, as `measuring.machine` returns it.
        plan: Which broker is measured.
        command: The command that measures again.
    """
    return Origin(
        processor=machine["processor"],
        cores=machine["cores"],
        python=machine["python"],
        broker=plan.transport,
        date=datetime.now(timezone.utc).date().isoformat(),
        command=command,
    )


def measure_costs(plan: CostPlan, folder: Path, origin: Origin, note: Callable[[str], None]) -> Costs:
    """Measure fleets of several sizes, and fit the costs.

    Args:
        plan: Which fleets, and over which broker.
        folder: Where processes have their files.
        origin: The machine.
        note: Called with a line on each fleet before it is measured.

    Raises:
        MeasuringFailed: A process ended, nothing happened for a long time, or a run failed.
        MissingCapability: The broker is not installed.
    """
    sums = time_sums()
    measured: list[PhaseUse] = []
    points = [point for point in (*FITTED, HELD_OUT, DIVIDED) if point.agents <= plan.largest]
    for number, point in enumerate(points):
        note(f"{point.agents} agents, {point.cohort} in a round, {point.model_mb} MB, {point.rounds} rounds")
        for repeat in range(plan.repeats):
            here = folder / f"fleet-{number}-{repeat}"
            here.mkdir(parents=True)
            measured.extend(uses_of(point, measure(fleet_plan(point, plan), here)))
    return fit(measured, HELD_OUT.agents, origin, sums)


def fleet_plan(point: Point, plan: CostPlan) -> FleetPlan:
    """Return the settings by which a fleet is measured."""
    return FleetPlan(
        agents=point.agents,
        cohort=point.cohort,
        payload=f"{round(point.model_mb * MB)}",
        rounds=point.rounds,
        idle_s=plan.idle_s,
        transport=plan.transport,
        aggregators=point.aggregators,
    )
