"""``headwater simulate``."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.config import parse, read_toml
from edge_agent.errors import UsageError
from edge_agent.storage import check_writable, write_atomic, write_json

from ..state.store import StateFolder
from ..text import counted
from .options import (
    INTERRUPTED,
    Json,
    Paper,
    Verbose,
    console,
    parameters,
    print_json,
    set_up_logging,
    show,
    sigterm_as_ctrl_c,
)
from .simulation_output import reading, rounds_table

if TYPE_CHECKING:
    from ..simulation.plan import Plan

Method = Annotated[str | None, typer.Option("--method", "-m", help="Method; default: fedavg.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", "--param", "--params", "-p", help="name=value of the method; repeatable.")
]
Data = Annotated[list[str] | None, typer.Option("--data", "-d", help="Source, as on devices; one for each domain.")]
Rule = Annotated[
    str | None,
    typer.Option(
        "--partition",
        help="iid, dirichlet, pathological, quantity, fedpac, domains, subjects, or a saved partition.json.",
    ),
]
Clients = Annotated[int | None, typer.Option("--clients", "-n", help="Clients; default: 20, or what the data name.")]
Alpha = Annotated[
    float | None, typer.Option("--alpha", help="dirichlet: small = few classes each; quantity: small = few have most.")
]
Size = Annotated[int | None, typer.Option("--size", help="iid, fedpac: samples of one client.")]
TestSize = Annotated[int | None, typer.Option("--test-size", help="fedpac: test samples of one client.")]
ClassesEach = Annotated[int | None, typer.Option("--classes-each", help="pathological: classes of one client.")]
MinSize = Annotated[int | None, typer.Option("--min-size", help="Least samples of a client; default: 10.")]
TestFraction = Annotated[float | None, typer.Option("--test-fraction", help="Held back where data have no test part.")]
Validation = Annotated[
    float | None,
    typer.Option("--validation", help="Score on this share of the training samples; to try settings with."),
]
Fraction = Annotated[
    str | None,
    typer.Option("--fraction", help="Share of the clients in a round, or 0.1:1.0 = drawn for each; default: 1."),
]
Dropout = Annotated[
    float | None, typer.Option("--dropout", help="Probability that a client vanishes, or trains and never delivers.")
]
NewClients = Annotated[
    int | None, typer.Option("--new-clients", help="The last so many only come at the end and fit a head: acc.new.")
]
Rounds = Annotated[int | None, typer.Option("--rounds", "-r", help="Rounds; default: 10.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of partition, weights, cohorts and clients.")]
Encoder = Annotated[str | None, typer.Option("--encoder", help="Encoder; default: one that suits the inputs.")]
EncoderParam = Annotated[
    list[str] | None,
    typer.Option("--encoder-param", "--encoder-params", help="name=value of the encoder; repeatable."),
]
Weights = Annotated[
    Path | None, typer.Option("--weights", help="Safetensors file that the encoder begins with, such as ImageNet's.")
]
Input = Annotated[
    list[str] | None, typer.Option("--input", help="name=value of the input spec: mean=0.13, height=32; repeatable.")
]
Standardise = Annotated[bool, typer.Option("--standardise", help="Mean and std of inputs from the training samples.")]
EvaluateEvery = Annotated[int | None, typer.Option("--evaluate-every", help="Rounds; 0 = only at the end. Default: 1.")]
After = Annotated[bool, typer.Option("--after", help="Evaluate after local training, too, whatever the method says.")]
KeepEvery = Annotated[
    int | None, typer.Option("--keep-every", help="Keep the states of every so many rounds for 'headwater analyze'.")
]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, mps; default: auto.")]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision", help="float32, or bfloat16: mixed, other numbers, and only where a timed step is faster."
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Torch threads of a worker; default: 1, which is repeatable.")
]
Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="serial, pool = worker processes, ray = workers on a cluster, stacked = many clients in one pass, for "
        "GPUs: equal up to rounding, not bit for bit; default: serial or pool, whichever suits.",
    ),
]
Workers = Annotated[
    int | None, typer.Option("--workers", help="Of pool and ray; default: as many as cores of machine or cluster.")
]
Address = Annotated[
    str | None, typer.Option("--address", help="ray: a running cluster, HOST:PORT or auto; default: one just for this.")
]
StackedAlways = Annotated[
    bool, typer.Option("--stacked-always", help="stacked: even where a trial finds one after another faster.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the run; default: named after the request.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out; it knows what was asked for.")]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file with these options; options win.")]


def simulate(
    method: Method = None,
    params: Set = None,
    paper: Paper = False,
    data: Data = None,
    partition: Rule = None,
    clients: Clients = None,
    alpha: Alpha = None,
    size: Size = None,
    test_size: TestSize = None,
    classes_each: ClassesEach = None,
    min_size: MinSize = None,
    test_fraction: TestFraction = None,
    validation: Validation = None,
    fraction: Fraction = None,
    dropout: Dropout = None,
    new_clients: NewClients = None,
    rounds: Rounds = None,
    seed: Seed = None,
    encoder: Encoder = None,
    encoder_params: EncoderParam = None,
    weights: Weights = None,
    input_fields: Input = None,
    standardise: Standardise = False,
    evaluate_every: EvaluateEvery = None,
    evaluate_after: After = False,
    keep_every: KeepEvery = None,
    device: Device = None,
    precision: Precision = None,
    threads: Threads = None,
    engine: Engine = None,
    workers: Workers = None,
    address: Address = None,
    stacked_always: StackedAlways = False,
    out: Out = None,
    resume: Resume = False,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run a method on many clients on this one machine: the coordinator's own rounds, the devices' own method files.

    On a CPU the same seed gives the same bits on every engine but stacked, with any number of workers. Sources are
    those of devices. Accuracies of a round are of what its clients received, before they trained.
    Ctrl-C, or SIGTERM, leaves a run that --resume goes on with (exit code 130).

    Example: headwater simulate -m fedper -d digits --partition domains --set local_epochs=1 --rounds 5 --out sim
    """
    wished = _wished(dict(locals()))
    set_up_logging(verbose=verbose, quiet=True)
    plan, folder = _resumed(wished, config, out) if resume else _planned(wished, config, out)
    result = _run(plan, folder, resume=resume)
    if as_json:
        print_json(result)
        return
    show(rounds_table(result), *reading(result))


def _wished(typed: dict[str, Any]) -> dict[str, Any]:
    """Fields of a plan that were given on the command line; what was not is left to the file or the plan itself."""
    from ..simulation.plan import Plan

    pairs = {"params": "params", "encoder_params": "encoder_params", "input": "input_fields"}
    given = {name: typed.get(name) for name in Plan.model_fields}
    given |= {name: parameters(typed[option] or []) for name, option in pairs.items()}
    given["data"] = tuple(typed["data"] or ())
    given["weights"] = None if typed["weights"] is None else typed["weights"].expanduser().absolute()
    if (typed["partition"] or "").endswith(".json"):
        given["partition"] = str(Path(typed["partition"]).expanduser().absolute())
    given |= shares(typed["fraction"])
    return {name: value for name, value in given.items() if not (value is None or value is False or value in ((), {}))}


def sources(given: Any) -> Any:
    """The data sources that were given, of which a file may hold a single one; what is no source stays, to be told.

    Raises:
        UsageError: none was.
    """
    if not given:
        raise UsageError("no data: give a source, for example --data digits, or --data idx:FOLDER")
    return (given,) if isinstance(given, str) else given


def shares(text: str | None) -> dict[str, float | None]:
    """Fields of a plan from ``0.1`` or ``0.1:1.0``.

    Raises:
        UsageError: it is neither.
    """
    if text is None:
        return {"fraction": None, "fraction_max": None}
    try:
        least, *most = (float(word) for word in text.split(":", 1))
    except ValueError as error:
        raise UsageError(f"--fraction '{text}': expected a share such as 0.1, or two of them: 0.1:1.0") from error
    return {"fraction": least, "fraction_max": most[0] if most else None}


def _planned(wished: dict[str, Any], config: Path | None, out: Path | None) -> tuple[Plan, Path]:
    from ..simulation.folder import planned
    from ..simulation.plan import Plan

    raw: dict[str, Any] = {"folder": str(Path.cwd() if config is None else config.absolute().parent)}
    if config is not None:
        raw |= _anchored(read_toml(config), config.absolute().parent)
    if "data" in wished and config is not None:
        raw["folder"] = str(Path.cwd())
    raw |= {name: _on_top(value, raw.get(name)) for name, value in wished.items()}
    raw["data"] = sources(raw.get("data"))
    plan = parse(Plan, raw, where=str(config or "the simulation"))
    folder = out or Path(f"simulation-{plan.method}-{Path(plan.partition).stem}-seed{plan.seed}")
    if planned(folder) is not None:
        raise UsageError(f"{folder} holds a simulation; go on with it by --resume, or choose another folder with --out")
    check_writable(folder)
    return plan, folder


def _on_top(value: Any, below: Any) -> Any:
    """What was typed over what the file has; where that should be a table and is none, it stays, to be told."""
    if not isinstance(value, dict) or below is None:
        return value
    return {**below, **value} if isinstance(below, dict) else below


def _anchored(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Files that a file names count from that file, also where its data are replaced by others."""
    files = {name: place for name in ("folder", "weights", "partition") if isinstance(place := raw.get(name), str)}
    files = {name: place for name, place in files.items() if name != "partition" or place.endswith(".json")}
    return raw | {name: str(folder / Path(place).expanduser()) for name, place in files.items() if place}


def _resumed(wished: dict[str, Any], config: Path | None, out: Path | None) -> tuple[Plan, Path]:
    from ..simulation.folder import planned
    from ..simulation.plan import HOW_NOT_WHAT, Plan

    if out is None or config is not None:
        raise UsageError("--resume goes on with what lies in a folder: name it with --out, and give nothing else")
    plan = planned(out)
    if plan is None:
        raise UsageError(f"{out} holds no simulation; start one without --resume")
    how = {name: wished.pop(name) for name in HOW_NOT_WHAT if name in wished}
    other = {name: value for name, value in wished.items() if not _is_same(name, getattr(plan, name), value)}
    if other:
        told = "; ".join(f"{name} is {getattr(plan, name)}, {value} was given" for name, value in other.items())
        raise UsageError(f"--resume keeps what the run in {out} was asked for: {told}; leave that out")
    return parse(Plan, {**plan.model_dump(exclude_unset=True), **how}, where="--resume"), out


def _is_same(name: str, asked: Any, given: Any) -> bool:
    """Whether two values of a field are equal, or two ways to write one place."""
    is_place = name in {"partition", "weights"} and asked is not None
    return bool(asked == given or (is_place and Path(asked).resolve() == Path(given).resolve()))


def _run(plan: Plan, folder: Path, *, resume: bool) -> dict[str, Any]:
    try:
        with sigterm_as_ctrl_c():
            return run_plan(plan, folder, resume=resume)
    except KeyboardInterrupt:
        console.print(_how_to_go_on(folder), soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None


def run_plan(plan: Plan, folder: Path, *, resume: bool) -> dict[str, Any]:
    """Simulate to the end, showing how far it is; all files of the result are in ``folder``.

    Raises:
        HeadwaterError: it cannot be done, or failed.
        KeyboardInterrupt: it was stopped, and can be gone on with.
    """
    from ..simulation.curves import curves
    from ..simulation.folder import PARTITION
    from ..simulation.prepared import Prepared
    from ..simulation.run import open_simulation
    from .progress import shown

    busy = console.status("reading the data") if console.is_terminal else contextlib.nullcontext()
    with busy:
        prepared = Prepared.of(plan, folder / PARTITION if resume else None).shared()
    with open_simulation(prepared, folder) as simulation, shown(simulation) as watch:
        result = simulation.finish(watch)
    picture, run = folder / "curves.svg", simulation.state.run(simulation.run)
    write_atomic(picture, curves(result).encode())
    result |= {"folder": str(folder), "report": str(run.report_path), "curves": str(picture)}
    write_json(folder / "result.json", result)
    return result


def _how_to_go_on(folder: Path) -> str:
    from ..simulation.folder import planned

    plan = planned(folder)
    if plan is None:
        return "stopped before the run began; the same command begins it"
    with StateFolder(folder).look(create=True) as state:
        runs = state.journal.runs()
        closed = state.journal.replay(runs[0]).round if runs else 0
    where = f"stopped with {closed} of {counted(plan.rounds, 'round')} closed"
    return f"{where}, nothing is lost; go on with: headwater simulate --resume --out {shlex.quote(str(folder))}"
