"""``headwater bench``: measure this machine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from edge_agent.bundle.starter import bundle_path
from edge_agent.core.config import parse
from edge_agent.core.errors import UsageError

from ..research.bench.measuring import (
    CostPlan,
    FleetPlan,
    RoundPlan,
    Row,
    ServePlan,
    SimulationSize,
    caveat,
    machine,
    rounded,
    scratch,
)
from .options import Given, Json, from_model
from .output import console, present, ready_for, table

app = typer.Typer(help="Measure this machine: rounds, fleets, simulations, devices, answers.", no_args_is_help=True)

Folder = Annotated[
    Path | None, typer.Option("--dir", help="Work on the disk of this folder; default: the system's temporary folder.")
]
Repeats = Annotated[int, typer.Option("--repeats", min=1, max=1000, help="Measured starts of an agent.")]


Out = Annotated[Path, typer.Option("--out", help="File of costs to write.")]


@app.command("round")
@from_model(RoundPlan, bounds=True)
def round_(given: Given, folder: Folder = None, as_json: Json = False) -> None:
    """Time whole rounds.

    Broker, coordinator and agents are processes, and everything is synced to disk as in service.

    Example: headwater bench round --agents 4 --payload 45MB --rounds 5 --json
    """
    from ..research.bench import rounds as bench

    plan = parse(RoundPlan, given, where="the options")
    here = machine()
    payload_bytes = plan.payload_bytes
    with scratch(folder) as temporary:
        measured = [bench.measure(plan, name, temporary / name) for name in bench.brokers(plan.broker)]
    note = caveat(here, "All processes share these cores, this disk and its syncs, and talk over loopback: no network.")
    result = {
        "agents": plan.agents,
        "payload_bytes": payload_bytes,
        "workload": plan.workload,
        "results": [one.as_json() for one in measured],
        "machine": here,
        "caveat": note,
    }
    titles = [f"{plan.agents} agents, {plan.workload}, {one.broker}, {plan.rounds} rounds" for one in measured]
    tables = [_table(title, one.rows()) for title, one in zip(titles, measured, strict=True)]
    present(result, [*tables, note], as_json=as_json)


@app.command("fleet")
@from_model(FleetPlan, bounds=True)
def fleet(given: Given, folder: Folder = None, as_json: Json = False) -> None:
    """Measure a coordinator of many agents.

    CPU for each message, memory and bytes published, with all agents in one process.

    Example: headwater bench fleet --agents 1000 --payload 0.5MB --json
    """
    from ..research.bench import fleet as bench

    plan = parse(FleetPlan, given, where="the options")
    here = machine()
    with scratch(folder) as temporary:
        figures = bench.measure(plan, temporary)
    note = caveat(here, "Agents train nothing. In memory, idle time is skipped and both sides share one process.")
    title = f"{plan.agents} agents, {plan.cohort_size} in a round, {plan.payload}, {plan.transport}"
    _report(title, figures.rows(), {"machine": here, "caveat": note}, as_json=as_json)


@app.command("costs")
@from_model(CostPlan, bounds=True)
def costs(given: Given, out: Out = Path("costs.json"), folder: Folder = None, as_json: Json = False) -> None:
    """Measure what 'headwater plan' computes with.

    Fleets of 100 to 10,000 agents over a broker, and coefficients fitted to them; some fifteen minutes.

    Example: headwater bench costs --out costs.json && headwater plan --agents 50000 --costs costs.json
    """
    from edge_agent.core.storage import write_atomic

    from ..research.bench import costs as bench

    plan = parse(CostPlan, given, where="the options")
    ready_for(out)
    command = shlex.join(["headwater", "bench", "costs", "--out", out.name])
    origin = bench.origin_of(machine(), plan, command)
    with scratch(folder) as temporary:
        fitted = bench.measure_costs(plan, temporary, origin, lambda text: console.print(text, soft_wrap=True))
    write_atomic(out, fitted.model_dump_json(indent=1).encode())
    rows = [
        (check.resource, check.phase, check.predicted, check.measured, f"{check.error:+.1%}") for check in fitted.checks
    ]
    columns = ("resource", "phase", "predicted", "measured", "error")
    note = caveat(machine(), "The fleet of this table was not fitted. Agents train nothing, and share these cores.")
    checks = [{**check.model_dump(), "error": check.error} for check in fitted.checks]
    result = {"out": str(out), "checks": checks, "caveat": note}
    present(result, [table(f"costs written to {out}", columns, rows, left=2), note], as_json=as_json)


@app.command("device")
def device(repeats: Repeats = 5, folder: Folder = None, as_json: Json = False) -> None:
    """Measure a device without torch.

    Memory and CPU: idle, with an encoder, and fitting heads. The first time takes longer.

    Example: headwater bench device --json
    """
    from ..research.bench import device as bench

    here = machine()
    with scratch(folder) as temporary:
        rows = list(bench.rows(temporary, bench.default_cache(), repeats))
    note = caveat(here, "One thread for each figure. A board is slower and has other kernels: measure there as well.")
    _report("a device without torch", rows, {"machine": here, "caveat": note}, as_json=as_json)


@app.command("serve")
@from_model(ServePlan, bounds=True)
def serve(given: Given, folder: Folder = None, as_json: Json = False) -> None:
    """Measure answers over HTTP.

    Times of an answer, what of them is the server's own, and memory, beside the encoder in a bare loop.

    Example: headwater bench serve --head my-head --input cat.jpg --json
    """
    from ..research.bench import serving as bench

    plan = parse(ServePlan, given, where="the options")
    plan = plan.model_copy(update={"bundle": bundle_path(plan.bundle)})
    paths = {"--bundle": plan.bundle, "--head": plan.head, "--input": plan.input}
    missing = [f"{option} {path}" for option, path in paths.items() if path is not None and not path.exists()]
    if missing:
        raise UsageError(f"{', '.join(missing)}: no such file or folder; check the path")
    here = machine()
    with scratch(folder) as temporary:
        rows = list(bench.rows(plan, temporary))
    note = caveat(here, "Client and server share this machine and talk over loopback; overhead holds that of both.")
    title = f"answers to {plan.input.name} by 'edge-agent serve'"
    _report(title, rows, {"machine": here, "caveat": note}, as_json=as_json)


@app.command("simulate")
@from_model(SimulationSize, bounds=True)
def simulate(given: Given, folder: Folder = None, as_json: Json = False) -> None:
    """Measure simulated rounds.

    Seconds, CPU and memory of rounds of a small CNN, without and with evaluation in turns.

    With --engine stacked a CPU takes many minutes; --clients 4 --rounds 1 is quick.

    Example: headwater bench simulate --rounds 5 --json
    """
    from ..research.bench import simulate as bench

    size = parse(SimulationSize, given, where="the options")
    here = machine()
    with scratch(folder) as temporary:
        result = bench.report(size, temporary)
    rows = result.pop("rows")
    where = f"{result['workers']} workers of one thread each"
    if size.is_stacked:
        where = f"engine stacked on {result['device']}"
    note = caveat(here, f"{where}, data {result['data']}. Whatever else this machine does slows both kinds of rounds.")
    title = f"workload W1: {size.clients} clients x {size.samples} samples, {where}"
    _report(title, rows, {**result, "machine": here, "caveat": note}, as_json=as_json)


def _report(title: str, rows: Sequence[Row], result: Mapping[str, Any], *, as_json: bool) -> None:
    figures = [row.as_json() for row in rows]
    present({"figures": figures, **result}, [_table(title, rows), result["caveat"]], as_json=as_json)


def _table(title: str, rows: Sequence[Row]) -> Table:
    cells = [(row.name, str(rounded(row.value)), row.unit) for row in rows]
    return table(title, ("figure", "value", "unit"), cells)
