"""``headwater plan``: what a fleet would need, and what it would exhaust first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from edge_agent.core.config import parse

from ..capacity.settings import MOST_AGENTS, PlanSettings
from .options import Given, Json, from_model
from .output import present, table

if TYPE_CHECKING:
    from ..capacity.costs import Costs
    from ..capacity.limits import Limit
    from ..capacity.plan import Plan

CostFile = Annotated[
    Path | None,
    typer.Option("--costs", help="Costs that 'headwater bench costs' measured; default: those of the package."),
]
Explain = Annotated[bool, typer.Option("--explain", help="Show of which counts and costs each figure is made.")]


@from_model(PlanSettings)
def plan(given: Given, costs: CostFile = None, explain: Explain = False, as_json: Json = False) -> None:
    """Compute what a fleet would need, and which limit it would reach first.

    CPU, memory, network, disk, broker nodes, aggregators and machines, from costs that were measured with up to
    10,000 agents; larger fleets are extrapolated. 'headwater bench costs' measures those of this machine.

    Example: headwater plan --agents 200000 --model 5MB --rounds-per-day 10
    """
    from ..capacity.costs import own_costs, read_costs
    from ..capacity.plan import make_plan

    settings = parse(PlanSettings, given, where="the options")
    result = make_plan(settings, own_costs() if costs is None else read_costs(costs))
    content = result.as_json()
    if explain:
        content["terms"] = [term.as_json() for term in result.terms()]
    parts = [*_needs(result), *_limits(result)]
    if explain:
        parts += _explanation(result)
    parts += _origin(result.costs)
    present(content, parts, as_json=as_json)


def _needs(result: Plan) -> Iterator[Table | str]:
    """Yield what the processes need, and how many of them and of machines there have to be."""
    settings = result.settings
    noun = "agent" if settings.agents == 1 else "agents"
    title = (
        f"{settings.agents:,} {noun}, {result.demand.cohort:,} in a round, {settings.model}, a round in "
        f"{settings.interval_s:,.0f} s"
    )
    rows = []
    for of_role in result.loads():
        load = of_role.load
        rows.append(
            (
                of_role.role,
                f"{of_role.processes}",
                _figure(load.cores),
                _figure(load.memory_mb),
                _figure(load.in_mb_s),
                _figure(load.out_mb_s),
                _figure(load.disk_mb / 1000),
            )
        )
    yield table(title, ("process", "number", "cores", "memory MB", "in MB/s", "out MB/s", "disk GB"), rows)
    machine = (
        f"machines of {settings.cores} cores, {settings.memory_gb:g} GB of memory, {settings.network_mbit:g} Mbit/s, "
        f"{settings.disk_gb:g} GB of disk"
    )
    yield f"needed, {machine}: {_count(result.machines_needed)}"
    yield f"needed, broker nodes: {_count(result.brokers_needed)}"
    yield f"needed, aggregators (0: the coordinator sums): {_count(result.partitions_needed)}"
    yield (
        f"a round, open for {settings.open_s:g} s (--open-s), keeps one thread busy for "
        f"{_figure(result.demand.round_cpu_s)} s: [round] deadline_s has to be longer than either; "
        f"one aggregator takes {_figure(result.sums_per_s())} updates a second; the journal gets "
        f"{result.demand.journal_rows_per_day:,.0f} rows a day"
    )


def _limits(result: Plan) -> Iterator[Table | str]:
    """Yield the first limit as a sentence, and all limits."""
    first = result.first_limit
    yield f"first limit: {first.name}, enough for {_reach(first)}; beyond: {first.remedy}"
    rows = [
        (
            limit.name,
            "too small" if limit.is_reached else "enough",
            _reach(limit),
            _figure(limit.needed),
            _figure(limit.available),
            limit.unit,
        )
        for limit in result.limits
    ]
    yield table("limits", ("limit", "for this fleet", "enough for", "needed", "usable", "unit"), rows, left=3)


def _explanation(result: Plan) -> Iterator[Table | str]:
    """Yield the parts of the figures, and where the counts come from."""
    rows = [
        (term.figure, term.count, _figure(term.amount), _figure(term.each), _figure(term.product), term.source)
        for term in result.terms()
    ]
    yield table("parts of the figures", ("figure", "of", "how many", "cost of one", "product", "source"), rows, left=2)
    settings = result.settings
    yield (
        "counts: agents, model, cohort, rounds, joins and machines are options, or their defaults: "
        + ", ".join(f"{name} = {value}" for name, value in settings.model_dump().items())
    )
    yield (
        f"rules: heartbeats a second follow from the coordinator's own rule for fleets with a lease of "
        f"{settings.lease_s:g} s; a partial sum has two float64 for each float32; the coordinator publishes each model "
        f"once; usable is {settings.busy:g} of what there is"
    )


def _origin(costs: Costs) -> Iterator[Table | str]:
    """Yield where the costs come from, and how far off they were."""
    from ..capacity.plan import worst_check

    origin = costs.origin
    errors = []
    for resource in dict.fromkeys(check.resource for check in costs.checks):
        worst = worst_check(costs, resource)
        if worst is not None:
            errors.append(f"{resource} {worst.error:+.0%}")
    yield (
        f"costs: {origin.processor}, {origin.cores} cores, Python {origin.python}, {origin.broker}, {origin.date}; "
        f"measure again with '{origin.command}'"
    )
    if errors:
        yield f"predicted against measured, of a fleet that was not fitted, largest deviation: {', '.join(errors)}"


def _reach(limit: Limit) -> str:
    """Return the largest fleet for which a limit is not reached."""
    if limit.agents is None:
        return f"more than {MOST_AGENTS:,} agents"
    return f"{limit.agents:,} agents"


def _count(number: int | None) -> str:
    """Return a number of processes or machines; None: no number of them is enough."""
    return "no number is enough, see what is too small below" if number is None else f"{number:,}"


def _figure(value: float) -> str:
    """Return a value with three significant digits, and separators of thousands."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
