"""``headwater bench``: what this machine does, beside yardsticks measured in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from edge_agent.errors import UsageError

from ..bench.figures import Row, caveat, machine, rounded
from .options import Json, print_json, show, table

if TYPE_CHECKING:
    from ..bench.simulate import Size

app = typer.Typer(help="Measure this machine: transport, rounds, devices.", no_args_is_help=True)

Agents = Annotated[int, typer.Option("--agents", min=1, max=64, help="Agents, each a process of its own.")]
Payload = Annotated[str, typer.Option("--payload", help="Size of the model: 0.5MB, 45MB, 500000.")]
BrokerName = Annotated[str, typer.Option("--broker", help="all (those that are installed), mosquitto or amqtt.")]
Folder = Annotated[
    Path | None, typer.Option("--dir", help="Work on the disk of this folder; default: the system's temporary folder.")
]
Rounds = Annotated[int, typer.Option("--rounds", "-r", min=2, max=10_000, help="Rounds to time.")]
Workload = Annotated[str, typer.Option("--workload", help="noop: no training; w1: a CNN on 600 images for each agent.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, max=1000, help="Transfers, or starts, that count.")]

_UNITS = {"": 1, "B": 1, "KB": 1000, "MB": 1_000_000, "GB": 1_000_000_000}
LARGEST_BYTES = 1 << 30


@app.command("transport")
def transport(
    agents: Agents = 4,
    payload: Payload = "45MB",
    broker: BrokerName = "all",
    repeats: Repeats = 3,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """MB/s of a blob down to all agents and of one up from each, what it costs whom, and the ratio to plain TCP.

    Example: headwater bench transport --agents 4 --payload 45MB --broker mosquitto
    """
    from ..bench import rounds
    from ..bench import transport as bench
    from ..bench.processes import scratch

    size, here = size_bytes(payload), machine()
    names = list(rounds.brokers(chosen("--broker", broker, "all", "mosquitto", "amqtt")))
    with scratch(folder) as place:
        found = bench.measure(agents, size, names, place, repeats)
    note = caveat(here, "All processes share these cores and talk over loopback: no network, no loss, no TLS.")
    if as_json:
        print_json({**found, "machine": here, "caveat": note})
        return
    cells = [_leg(leg) for leg in found["legs"]]
    tcp = ", ".join(f"{name} {speed:.0f} MB/s" for name, speed in found["tcp_mb_per_s"].items())
    title = f"{agents} agents, {size / 1e6:g} MB (plain TCP: {tcp})"
    show(table(title, ("broker", "direction", "MB/s", "of TCP", "CPU s", "peak MB"), cells, left=2))
    show("CPU s of one transfer and peak MB: broker / coordinator / agents (their sum; the largest)")
    show(note)


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
    from ..bench import rounds as bench
    from ..bench.bare import bare_seconds
    from ..bench.processes import scratch

    kind = cast("Literal['noop', 'w1']", chosen("--workload", workload, "noop", "w1"))
    plan, here = bench.Plan(agents, size_bytes(payload), rounds, kind), machine()
    names = list(bench.brokers(chosen("--broker", broker, "all", "mosquitto", "amqtt")))
    with scratch(folder) as place:
        bare = bare_seconds(agents, place) if kind == "w1" else None
        found = [bench.measure(plan, name, place / name, bare_s=bare) for name in names]
    note = caveat(here, "All processes share these cores, this disk and its syncs, and talk over loopback: no network.")
    if as_json:
        shown = {"agents": agents, "payload_bytes": plan.payload_bytes, "workload": workload}
        print_json({**shown, "results": [one.as_json() for one in found], "machine": here, "caveat": note})
        return
    for one in found:
        _show(f"{agents} agents, {workload}, {one.broker}, {rounds} rounds", one.rows())
    show(note)


@app.command("device")
def device(repeats: Repeats = 5, folder: Folder = None, as_json: Json = False) -> None:
    """Memory and CPU of a device without torch: idle, with an encoder, and fitting heads. The first time takes longer.

    Example: headwater bench device --json
    """
    from ..bench import device as bench
    from ..bench.processes import scratch

    here = machine()
    with scratch(folder) as place:
        rows = list(bench.rows(place, bench.default_cache(), repeats))
    note = caveat(here, "One thread for each figure. A board is slower and has other kernels: measure there as well.")
    if as_json:
        print_json({"figures": [row.as_json() for row in rows], "machine": here, "caveat": note})
        return
    _show("a device without torch", rows)
    show(note)


@app.command("simulate")
def simulate(
    rounds: Annotated[int, typer.Option("--rounds", "-r", min=1, max=1000, help="Rounds that count.")] = 5,
    clients: Annotated[int, typer.Option("--clients", "-n", min=1, max=10_000, help="Clients.")] = 20,
    samples: Annotated[int, typer.Option("--samples", min=10, max=3000, help="Training samples of a client.")] = 600,
    workers: Annotated[int, typer.Option("--workers", min=0, max=1024, help="0 = as many as cores.")] = 0,
    many: Annotated[
        int, typer.Option("--memory-clients", min=0, max=10_000, help="Clients with ResNet18; 0 = do not measure.")
    ] = 100,
    method: Annotated[str, typer.Option("--method", "-m", help="all, fedavg or fedpac.")] = "all",
    engine: Annotated[
        str, typer.Option("--engine", help="pool, or stacked = all clients at once, against a loop on one device.")
    ] = "pool",
    device: Annotated[str, typer.Option("--device", help="stacked: auto, cpu, cuda, cuda:1.")] = "auto",
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Simulated rounds against a bare PyTorch loop over the same clients, in turns; and memory against clients.

    With --engine stacked: FedAvg on one device, for as many clients as are asked for and for five times as many. On a
    CPU that takes many minutes; --clients 4 --rounds 1 is quick.

    Example: headwater bench simulate --rounds 5 --json
    """
    from ..bench import simulate as bench
    from ..bench.processes import scratch

    if chosen("--engine", engine, "pool", "stacked") == "stacked":
        _stacked(bench.Size(clients, samples, rounds), device, folder, as_json=as_json)
        return
    known = tuple(bench.BUDGETS)
    wanted = known if chosen("--method", method, "all", *known) == "all" else (method,)
    size, here = bench.Size(clients, samples, rounds, workers, many, wanted), machine()
    with scratch(folder) as place:
        found = bench.report(size, place)
    rows = found.pop("rows")
    note = caveat(
        here,
        f"{found['workers']} workers of one thread each, rounds in turns, data {found['data']}. The bare loop sends, "
        "averages and keeps nothing. Whatever else this machine does falls on both.",
    )
    if as_json:
        print_json({**found, "figures": [row.as_json() for row in rows], "machine": here, "caveat": note})
        return
    _show(f"workload W1: {clients} clients x {samples} samples, {found['workers']} workers", rows)
    show(note)


@app.command("precision")
def precision(
    repeats: Repeats = 5,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    threads: Annotated[int, typer.Option("--threads", min=1, max=256, help="Torch threads.")] = 1,
    as_json: Json = False,
) -> None:
    """Training steps in bfloat16 (precision = "bfloat16") and in the other memory layout, over those by default.

    Example: headwater bench precision --device cpu
    """
    from ..bench import precision as bench

    here, found = machine(), bench.report(repeats, device, threads)
    rows = found.pop("rows")
    note = caveat(here, f"On {found['device']}, {threads} threads, random images, variants in turns.")
    if as_json:
        print_json({**found, "figures": [row.as_json() for row in rows], "machine": here, "caveat": note})
        return
    _show(f"training steps on {found['device']}", rows)
    show(note)


def _stacked(size: Size, device: str, folder: Path | None, *, as_json: bool) -> None:
    from ..bench import stacked as bench
    from ..bench.processes import scratch

    here = machine()
    with scratch(folder) as place:
        found = bench.report(size, place, device)
    rows = found.pop("rows")
    is_cpu = found["device"] == "cpu"
    note = caveat(
        here,
        f"On {'the CPU, one thread: no GPU was used' if is_cpu else found['device']}; rounds in turns, data "
        f"{found['data']}. The loop sends, averages on the device and keeps nothing.",
    )
    if as_json:
        print_json({**found, "figures": [row.as_json() for row in rows], "machine": here, "caveat": note})
        return
    _show(f"workload W1: {size.samples} samples a client, device {found['device']}", rows)
    for clients, engine in found["engine"].items():
        show(f"{clients} clients: {engine['jobs']} of {engine['of']} jobs in one pass ({engine['because']})")
    show(note)


def size_bytes(text: str) -> int:
    """Bytes of ``0.5MB``, ``45 MB`` or ``500000``.

    Raises:
        UsageError: not a size, or one that nobody can send.
    """
    number = text.strip().upper().rstrip("KMGB").strip()
    unit = text.strip().upper()[len(number) :].strip()
    try:
        found = round(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError) as error:
        raise UsageError(f"--payload '{text}': expected a size such as 0.5MB, 45MB or 500000") from error
    if not 1000 <= found <= LARGEST_BYTES:
        raise UsageError(f"--payload '{text}' is {found} bytes; expected 1000 to {LARGEST_BYTES}")
    return found


def chosen(option: str, given: str, *known: str) -> str:
    """``given``, which is one of ``known``.

    Raises:
        UsageError: it is not.
    """
    if given not in known:
        raise UsageError(f"{option} '{given}': expected one of {', '.join(known)}")
    return given


def _leg(leg: dict[str, Any]) -> list[object]:
    cpu, peak = leg["cpu_s"], leg["peak_mb"]
    roles = ("broker", "coordinator", "agents")
    head = [leg["broker"], leg["direction"], f"{leg['mb_per_s']:.0f}", f"{leg['of_tcp']:.2f}"]
    return [*head, " / ".join(f"{cpu[role]:.2f}" for role in roles), " / ".join(f"{peak[role]:.0f}" for role in roles)]


def _show(title: str, rows: Sequence[Row]) -> None:
    verdicts = {True: "yes", False: "NO", None: ""}
    cells = [
        (
            row.name,
            str(rounded(row.value)),
            row.unit,
            "" if row.budget is None else str(row.budget),
            verdicts[row.is_met],
        )
        for row in rows
    ]
    show(table(title, ("figure", "value", "unit", "budget", "met"), cells))
