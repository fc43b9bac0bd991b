"""``headwater analyze``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from edge_agent.core.config import parse
from edge_agent.core.errors import ConfigError, UsageError
from edge_agent.core.storage import check_writable

from ..research import analyze as analysis
from ..research.analyze import Settings
from ..text import counted
from .options import Config, Given, Json, Verbose, from_model, state_path
from .output import console, is_live, present, set_up_logging, table, text

What = Annotated[
    str, typer.Argument(metavar="RUN|BUNDLE", help="Simulation or state folder, a run's name, or a bundle file.")
]
Data = Annotated[
    list[str] | None,
    typer.Option("--data", "-d", metavar="NAME=SOURCE", help="One client's samples, for runs and bundles; repeatable."),
]
State = Annotated[Path | None, typer.Option("--state", help="State folder of a run that is given by its name.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for index.html, pictures and analysis.json.")]
SHOWN_CLIENTS = 40


@from_model(Settings)
def analyze(
    given: Given,
    what: What,
    data: Data = None,
    config: Config = None,
    state: State = None,
    out: Out = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure a run's features and models as the papers do: separation, CKA, sparsity, overlap, classes, bytes.

    A simulation has its clients' samples and personal parts. A coordinator's run has shared states only and a bundle
    has one encoder: give samples by --data, once for each client. What cannot be computed is listed with the reason.
    Run with --keep-every to analyze earlier rounds as well. The web view links an analysis in 'runs/RUN/analysis' of
    the state folder.

    Example: headwater analyze sim --target 0.8 --out sim/analysis
    """
    from edge_agent import heads

    from ..research.analyze.page import write

    set_up_logging(verbose=verbose, quiet=True)
    settings = parse(Settings, given, where="the options")
    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; name a folder")
    if out is not None:
        check_writable(out)
    heads.get(settings.head)  # an unknown name is reported before anything is loaded
    location = _location(what, data or [], config, state)
    busy = console.status("opening") if is_live(console) else contextlib.nullcontext()
    with busy as status:
        target = analysis.find(location, settings)
        result = analysis.analyze(target, settings, *([] if status is None else [status.update]))
    parts: list[Table | str] = [*tables(result), *reading(result)]
    if out is not None:
        if not out.is_dir():
            console.print(f"made the folder {out}", soft_wrap=True)
        parts.append(f"pictures and page: {write(result, out)}")
    present(result, parts, as_json=as_json)


def _location(what: str, data: Sequence[str], config: Path | None, state: Path | None) -> analysis.Location:
    """Return where the target is. A configuration is read only for a name that no path has."""
    folder = state.absolute() if state is not None else None
    if folder is None and not Path(what).expanduser().exists() and Path(what).name == what:
        try:
            folder = state_path(config, None)
        except ConfigError:
            if config is not None:
                raise
    return analysis.Location(what, folder, tuple(data))


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield tables by round, by client and by target."""
    title = f"{result['run_id']}: {result['method']}, {len(result['clients'])} clients, {result['kind']}"
    measured = [state for state in result["rounds"] if len(state) > 1]
    if measured:
        yield _table_of_rounds(title, measured)
    for scope, answer in result["accuracy"].items():
        yield _table_of_clients(scope, answer)
    probe = result["probe"]
    if probe is not None:
        rows = [(f"{share:.0%}", mean) for share, mean in zip(probe["ratios"], probe["mean"], strict=True)]
        yield table("nearest neighbours on features of highest Fisher score", ("features", "accuracy"), rows)
    communication = result["communication"]
    if communication is not None and communication["targets"]:
        yield _table_of_targets(communication["targets"])


def _table_of_rounds(title: str, states: list[dict[str, Any]]) -> Table:
    """Return a row for each measured state; a state that lacks a measure leaves its cell empty."""
    means = [_means(state) for state in states]
    names = list(dict.fromkeys(name for means_of_state in means for name in means_of_state))
    rows = [
        (state["round"], *(means_of_state.get(name) for name in names))
        for state, means_of_state in zip(states, means, strict=True)
    ]
    return table(title, ("rounds\ndone", *(name.replace(" ", "\n") for name in names)), rows)


def _table_of_clients(scope: str, answer: dict[str, Any]) -> Table:
    """Return a row for each of the first clients, and one with the means of all."""
    parts = ("all", "head", "tail")
    rows = [(name, *(client[part] for part in parts)) for name, client in answer["clients"].items()]
    title = f"accuracy, {scope}"
    if len(rows) > SHOWN_CLIENTS:
        title += f" (the first {SHOWN_CLIENTS} of {len(rows)})"
    mean = ("mean", *(answer[part] for part in parts))
    return table(title, ("client", "all", "head\nclasses", "tail\nclasses"), [*rows[:SHOWN_CLIENTS], mean])


def _table_of_targets(targets: list[dict[str, Any]]) -> Table:
    """Return a row for each accuracy: how many rounds and bytes it took, or the best that was reached instead."""
    rows: list[tuple[object, ...]] = []
    for target in targets:
        wanted = (f"acc.{target['scope']}", f"{target['target']:g}")
        if not target["reached"]:
            rows.append((*wanted, "not reached", target.get("best"), "", "", ""))
            continue
        sizes = [f"{target[name] / 1e6:.2f}" for name in ("bytes_up", "bytes_down", "bytes_per_agent")]
        rows.append((*wanted, target["rounds_done"], target["acc"], *sizes))
    columns = ("scope", "target", "rounds\ndone", "accuracy", "up\nMB", "down\nMB", "MB for\nan agent")
    return table("rounds and bytes to an accuracy (mean over agents)", columns, rows)


def _means(state: dict[str, Any]) -> dict[str, float | None]:
    """Name of a measure -> its mean over the clients, of the measures that one state has."""
    means: dict[str, float | None] = {}
    for measure in ("separation", "cka", "before_after", "sparsity", "fisher"):
        for kind, spread in state.get(measure, {}).items():
            means[f"{measure} {kind}"] = spread["mean"]
    for measure in ("selection", "overlap"):
        if measure in state:
            means[measure] = state[measure]["mean"]
    mixing = state.get("mixing", {})
    for name in ("same_group", "own"):
        if name in mixing:
            means[f"mixing {name}"] = mixing[name]
    return means


def reading(result: dict[str, Any]) -> Iterator[str]:
    """Yield lines about how to read the tables, and what is not in them."""
    if result["clients"]:
        threshold = text(result["settings"]["threshold"])
        yield f"features of test samples, means over clients; sparsity: components below {threshold} of the length"
        yield "head classes: at least as many training samples as the client's mean class; tail: the others it has"
    sent = result["communication"]
    if sent is not None:
        up, down = (sent[name] / 1e6 for name in ("bytes_up", "bytes_down"))
        who = f"{counted(sent['rounds'], 'round')}, {counted(sent['agents'], 'agent')}"
        yield f"{who}: {up:.2f} MB up, {down:.2f} MB down"
    yield from (f"left out: {one['what']}: {one['why']}" for one in result["left_out"])
