"""``headwater bench``: measure this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from edge_agent.errors import UsageError

from .options import Json
from .output import print_json, show, table

if TYPE_CHECKING:
    from ..research.bench.figures import Row

app = typer.Typer(help="Measure this machine: rounds, simulations, devices.", no_args_is_help=True)

Agents = Annotated[int, typer.Option("--agents", min=1, max=64, help="Number of agents; each is a process.")]
Payload = Annotated[str, typer.Option("--payload", help="Size of the model: 0.5MB, 45MB, 500000.")]
BrokerName = Annotated[str, typer.Option("--broker", help="all (those that are installed), mosquitto or amqtt.")]
Folder = Annotated[
    Path | None, typer.Option("--dir", help="Work on the disk of this folder; default: the system's temporary folder.")
]
Rounds = Annotated[int, typer.Option("--rounds", "-r", min=2, max=10_000, help="Rounds to time.")]
Workload = Annotated[str, typer.Option("--workload", help="noop: no training; w1: a CNN on 600 images for each agent.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, max=1000, help="Measured starts of an agent.")]

_UNITS = {"": 1, "B": 1, "KB": 1000, "MB": 1_000_000, "GB": 1_000_000_000}
LARGEST_BYTES = 1 << 30


@app.command("round")
def round_(
    agents: Agents = 4,
    payload: Payload = "0.5MB",
    rounds: Rounds = 20,
    workload: Workload = "noop",
    broker: BrokerName = "all",
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Seconds of whole rounds: broker, coordinator and agents as processes, everything synced to disk as in service.

    Example: headwater bench round --agents 4 --payload 45MB --rounds 5 --json
    """
    from ..research.bench import rounds as bench
    from ..research.bench.figures import caveat, machine
    from ..research.bench.processes import scratch

    kind = cast("Literal['noop', 'w1']", chosen("--workload", workload, "noop", "w1"))
    plan, here = bench.Plan(agents, size_bytes(payload), rounds, kind), machine()
    names = list(bench.brokers(chosen("--broker", broker, "all", "mosquitto", "amqtt")))
    with scratch(folder) as place:
        result = [bench.measure(plan, name, place / name) for name in names]
    note = caveat(here, "All processes share these cores, this disk and its syncs, and talk over loopback: no network.")
    if as_json:
        shown = {"agents": agents, "payload_bytes": plan.payload_bytes, "workload": workload}
        print_json({**shown, "results": [one.as_json() for one in result], "machine": here, "caveat": note})
        return
    for one in result:
        _show(f"{agents} agents, {workload}, {one.broker}, {rounds} rounds", one.rows())
    show(note)


@app.command("device")
def device(repeats: Repeats = 5, folder: Folder = None, as_json: Json = False) -> None:
    """Memory and CPU of a device without torch: idle, with an encoder, and fitting heads. The first time takes longer.

    Example: headwater bench device --json
    """
    from ..research.bench import device as bench
    from ..research.bench.device_inputs import default_cache
    from ..research.bench.figures import caveat, machine
    from ..research.bench.processes import scratch

    here = machine()
    with scratch(folder) as place:
        rows = list(bench.rows(place, default_cache(), repeats))
    note = caveat(here, "One thread for each figure. A board is slower and has other kernels: measure there as well.")
    _report("a device without torch", rows, {"machine": here, "caveat": note}, as_json=as_json)


@app.command("simulate")
def simulate(
    rounds: Annotated[int, typer.Option("--rounds", "-r", min=1, max=1000, help="Measured rounds.")] = 5,
    clients: Annotated[int, typer.Option("--clients", "-n", min=1, max=10_000, help="Number of clients.")] = 20,
    samples: Annotated[int, typer.Option("--samples", min=10, max=3000, help="Training samples of a client.")] = 600,
    workers: Annotated[int, typer.Option("--workers", min=0, max=1024, help="0 = as many as cores.")] = 0,
    method: Annotated[str, typer.Option("--method", "-m", help="all, fedavg or fedpac.")] = "all",
    engine: Annotated[str, typer.Option("--engine", help="pool, or stacked: all clients at once on one device.")] = (
        "pool"
    ),
    device: Annotated[str, typer.Option("--device", help="stacked: auto, cpu, cuda, cuda:1.")] = "auto",
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Simulated rounds of a small CNN, without and with evaluation in turns: seconds, CPU and memory.

    With --engine stacked a CPU takes many minutes; --clients 4 --rounds 1 is quick.

    Example: headwater bench simulate --rounds 5 --json
    """
    from ..research.bench import simulate as bench
    from ..research.bench.figures import caveat, machine
    from ..research.bench.processes import scratch

    is_stacked = chosen("--engine", engine, "pool", "stacked") == "stacked"
    methods = bench.METHODS if chosen("--method", method, "all", *bench.METHODS) == "all" else (method,)
    size = bench.Size(clients, samples, rounds, workers, methods, device if is_stacked else "")
    here = machine()
    with scratch(folder) as place:
        result = bench.report(size, place)
    rows = result.pop("rows")
    where = f"engine stacked on {result['device']}" if is_stacked else f"{result['workers']} workers of one thread each"
    note = caveat(here, f"{where}, data {result['data']}. Whatever else this machine does slows both kinds of rounds.")
    title = f"workload W1: {clients} clients x {samples} samples, {where}"
    _report(title, rows, {**result, "machine": here, "caveat": note}, as_json=as_json)


def size_bytes(text: str) -> int:
    """Bytes of ``0.5MB``, ``45 MB`` or ``500000``.

    Raises:
        UsageError: not a size, or one that cannot be sent.
    """
    number = text.strip().upper().rstrip("KMGB").strip()
    unit = text.strip().upper()[len(number) :].strip()
    try:
        result = round(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError) as error:
        raise UsageError(f"--payload '{text}': expected a size such as 0.5MB, 45MB or 500000") from error
    if not 1000 <= result <= LARGEST_BYTES:
        raise UsageError(f"--payload '{text}' is {result} bytes; expected 1000 to {LARGEST_BYTES}")
    return result


def chosen(option: str, given: str, *known: str) -> str:
    """``given``, which is one of ``known``.

    Raises:
        UsageError: it is not.
    """
    if given not in known:
        raise UsageError(f"{option} '{given}': expected one of {', '.join(known)}")
    return given


def _report(title: str, rows: Sequence[Row], result: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json({"figures": [row.as_json() for row in rows], **result})
        return
    _show(title, rows)
    show(result["caveat"])


def _show(title: str, rows: Sequence[Row]) -> None:
    from ..research.bench.figures import rounded

    cells = [(row.name, str(rounded(row.value)), row.unit) for row in rows]
    show(table(title, ("figure", "value", "unit"), cells))
