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
    measured = [one for one in result["rounds"] if len(one) > 1]
    if measured:
        names = list(dict.fromkeys(name for one in measured for name in _means(one)))
        rows = [(one["round"], *(_means(one).get(name) for name in names)) for one in measured]
        yield table(title, ("rounds\ndone", *(name.replace(" ", "\n") for name in names)), rows)
    for scope, answer in result["accuracy"].items():
        rows = [(name, *(one[part] for part in ("all", "head", "tail"))) for name, one in answer["clients"].items()]
        mean = ("mean", *(answer[part] for part in ("all", "head", "tail")))
        first = f" (the first {SHOWN_CLIENTS} of {len(rows)})" if len(rows) > SHOWN_CLIENTS else ""
        yield table(
            f"accuracy, {scope}{first}",
            ("client", "all", "head\nclasses", "tail\nclasses"),
            [*rows[:SHOWN_CLIENTS], mean],
        )
    if result["probe"] is not None:
        rows = [(f"{r:.0%}", mean) for r, mean in zip(result["probe"]["ratios"], result["probe"]["mean"], strict=True)]
        yield table("nearest neighbours on features of highest Fisher score", ("features", "accuracy"), rows)
    if result["communication"] is not None and result["communication"]["targets"]:
        rows = []
        for one in result["communication"]["targets"]:
            sizes = ["", "", ""]
            done = "not reached"
            acc = one.get("best")
            if one["reached"]:
                sizes = [f"{one[name] / 1e6:.2f}" for name in ("bytes_up", "bytes_down", "bytes_per_agent")]
                done = one["rounds_done"]
                acc = one["acc"]
            rows.append((f"acc.{one['scope']}", f"{one['target']:g}", done, acc, *sizes))
        columns = ("scope", "target", "rounds\ndone", "accuracy", "up\nMB", "down\nMB", "MB for\nan agent")
        yield table("rounds and bytes to an accuracy (mean over agents)", columns, rows)


def _means(state: dict[str, Any]) -> dict[str, float | None]:
    """Return the means of one state by name."""
    result: dict[str, float | None] = {}
    for measure in ("separation", "cka", "before_after", "sparsity", "fisher"):
        result |= {f"{measure} {kind}": spread["mean"] for kind, spread in state.get(measure, {}).items()}
    result |= {measure: state[measure]["mean"] for measure in ("selection", "overlap") if measure in state}
    mixing = state.get("mixing", {})
    return result | {f"mixing {name}": mixing[name] for name in ("same_group", "own") if name in mixing}


def reading(result: dict[str, Any]) -> Iterator[str]:
    """Yield lines about how to read the tables, and what is not in them."""
    if result["clients"]:
        threshold = text(result["settings"]["threshold"])
        yield f"features of test samples, means over clients; sparsity: components below {threshold} of the length"
        yield "head classes: at least as many training samples as the client's mean class; tail: the others it has"
    sent = result["communication"]
    if sent is not None:
        up, down = (sent[name] / 1e6 for name in ("bytes_up", "bytes_down"))
        yield f"{sent['rounds']} rounds, {sent['agents']} agents: {up:.2f} MB up, {down:.2f} MB down"
    yield from (f"left out: {one['what']}: {one['why']}" for one in result["left_out"])
