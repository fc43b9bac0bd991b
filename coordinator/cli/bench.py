"""``headwater bench``: what this machine does, beside yardsticks measured in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from edge_agent.errors import UsageError

from ..bench.figures import Row, caveat, machine
from .options import Json, console, print_json, table

app = typer.Typer(help="Measure this machine: transport, rounds, devices.", no_args_is_help=True)

Agents = Annotated[int, typer.Option("--agents", min=1, max=64, help="Agents, each a process of its own.")]
Payload = Annotated[str, typer.Option("--payload", help="Size of the model: 0.5MB, 45MB, 500000.")]
BrokerName = Annotated[str, typer.Option("--broker", help="all, mosquitto or amqtt.")]
Folder = Annotated[
    Path | None, typer.Option("--dir", help="Work on the disk of this folder; default: the system's temporary folder.")
]


@app.command("round")
def round_(
    agents: Agents = 4,
    payload: Payload = "0.5MB",
    rounds: Annotated[int, typer.Option("--rounds", "-r", min=2, max=10_000, help="Rounds to time.")] = 20,
    workload: Annotated[str, typer.Option("--workload", help="noop: no training; w1: a CNN on 600 images each.")] = "noop",
    broker: BrokerName = "all",
    folder: Folder = None,
    as_json: Json = False,  # noqa: FBT001 - a typer option
) -> None:
    """Seconds of whole rounds: broker, coordinator and agents as processes, everything synced to disk as in service.

    Example: headwater bench round --agents 4 --payload 45MB --rounds 5 --json
    """
    from ..bench import rounds as bench
    from ..bench.bare import bare_seconds
    from ..bench.processes import scratch

    plan = bench.Plan(agents, size_bytes(payload), rounds, cast("bench.Workload", chosen(workload, "noop", "w1")))
    here = machine()
    with scratch(folder) as place:
        bare = bare_seconds(agents, place) if workload == "w1" else None
        names = bench.brokers(chosen(broker, "all", "mosquitto", "amqtt"))
        found = [bench.measure(plan, name, place / name) for name in names]
    note = caveat(here, "All processes share these cores and talk over loopback: no network, no other machine's disk.")
    if as_json:
        shown = {"agents": agents, "payload_bytes": plan.payload_bytes, "workload": workload, "bare_s": bare}
        print_json({**shown, "results": [one.as_json() for one in found], "machine": here, "caveat": note})
        return
    for one in found:
        _show(f"{agents} agents, {workload}, {one.broker}", one.rows())
    console.print(note, soft_wrap=True)
