"""``headwater analyze``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from edge_agent.errors import ConfigError, UsageError
from edge_agent.storage import check_writable

from .options import Config, Json, Verbose, state_path
from .output import console, print_json, set_up_logging, show, table, text

if TYPE_CHECKING:
    from ..research.analyze import Location, Settings

What = Annotated[
    str, typer.Argument(metavar="RUN|BUNDLE", help="Simulation or state folder, a run's name, or a bundle file.")
]
Data = Annotated[
    list[str] | None,
    typer.Option("--data", "-d", metavar="NAME=SOURCE", help="One client's samples, for runs and bundles; repeatable."),
]
State = Annotated[Path | None, typer.Option("--state", help="State folder of a run that is given by its name.")]
Target = Annotated[
    list[float] | None,
    typer.Option("--target", "-t", help="Accuracy 0..1: show rounds and bytes until it was reached; repeatable."),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for index.html, pictures and analysis.json.")]
Samples = Annotated[int, typer.Option("--samples", help="Test samples of each client whose features are measured.")]
Probe = Annotated[int, typer.Option("--probe", help="Samples of all clients on which two clients are compared.")]
Threshold = Annotated[
    float, typer.Option("--threshold", help="Threshold of the sparsity ratio; ours, the paper does not give one.")
]
Important = Annotated[float, typer.Option("--important", help="Share of the features that count as important.")]
Tsne = Annotated[int, typer.Option("--tsne", help="Number of clients whose features are plotted by t-SNE; 0 = none.")]
Perplexity = Annotated[float, typer.Option("--perplexity", help="Perplexity of t-SNE; at most a third of the samples.")]
HeadName = Annotated[str, typer.Option("--head", help="Device head to fit where there are no personal parts.")]
TestFraction = Annotated[
    float, typer.Option("--test-fraction", help="Share of the samples of --data that is held out.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of samples, t-SNE and fits.")]

SHOWN_CLIENTS = 40


def analyze(
    what: What,
    data: Data = None,
    config: Config = None,
    state: State = None,
    target: Target = None,
    out: Out = None,
    samples: Samples = 300,
    probe: Probe = 256,
    threshold: Threshold = 0.01,
    important: Important = 0.5,
    tsne: Tsne = 4,
    perplexity: Perplexity = 30.0,
    head: HeadName = "lr",
    test_fraction: TestFraction = 0.25,
    seed: Seed = 0,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure a run's features and models as the papers do: separation, CKA, sparsity, overlap, classes, bytes.

    A simulation has its clients' samples and personal parts. A coordinator's run has shared states only and a bundle
    has one encoder: give samples by --data, once for each client. What cannot be computed is listed with the reason.
    Run with --keep-every to analyze earlier rounds as well.

    Example: headwater analyze sim --target 0.8 --out sim/analysis
    """
    from ..research.analyze import Settings

    set_up_logging(verbose=verbose, quiet=True)
    settings = Settings.of(
        targets=tuple(target or ()),
        samples=samples,
        probe=probe,
        threshold=threshold,
        important=important,
        tsne=tsne,
        perplexity=perplexity,
        head=head,
        test_fraction=test_fraction,
        seed=seed,
    )
    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; name a folder")
    if out is not None:
        check_writable(out)
    result = _analyzed(_location(what, data or [], config, state), settings)
    page = None if out is None else _written(result, out)
    if as_json:
        print_json(result)
        return
    show(*tables(result), *reading(result))
    if page is not None:
        show(f"pictures and page: {page}")


def _location(what: str, data: Sequence[str], config: Path | None, state: Path | None) -> Location:
    """Where the target is. A configuration is read only for a name that no path has."""
    from ..research.analyze import Location

    folder = state.absolute() if state is not None else None
    if folder is None and not Path(what).expanduser().exists() and Path(what).name == what:
        try:
            folder = state_path(config, None)
        except ConfigError:
            if config is not None:
                raise
    return Location(what, folder, tuple(data))


def _analyzed(location: Location, settings: Settings) -> dict[str, Any]:
    from edge_agent import heads

    from ..research.analyze import analyze, find

    heads.get(settings.head)  # a slip in its name shows before anything is loaded
    if not console.is_terminal:
        return analyze(find(location, settings), settings)
    with console.status("opening") as status:
        return analyze(find(location, settings), settings, status.update)


def _written(result: dict[str, Any], out: Path) -> Path:
    from ..research.analyze.page import write

    if not out.is_dir():
        console.print(f"made the folder {out}", soft_wrap=True)
    return write(result, out)


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """What can be told in a few columns: by round, by client, by target."""
    title = f"{result['run_id']}: {result['method']}, {len(result['clients'])} clients, {result['kind']}"
    measured = [one for one in result["rounds"] if len(one) > 1]
    if measured:
        names = list(dict.fromkeys(name for one in measured for name in _flat(one)))
        rows = [(one["round"], *(_flat(one).get(name) for name in names)) for one in measured]
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
        yield _targets(result["communication"]["targets"])


def _flat(one: dict[str, Any]) -> dict[str, float | None]:
    """One state's means by name."""
    result: dict[str, float | None] = {}
    for measure in ("separation", "cka", "before_after", "sparsity", "fisher"):
        result |= {f"{measure} {kind}": spread["mean"] for kind, spread in one.get(measure, {}).items()}
    for measure in ("selection", "overlap"):
        if measure in one:
            result[measure] = one[measure]["mean"]
    if "mixing" in one:
        result |= {f"mixing {name}": one["mixing"][name] for name in ("same_group", "own") if name in one["mixing"]}
    return result


def _targets(targets: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for one in targets:
        if one["reached"]:
            sizes = [f"{one[name] / 1e6:.2f}" for name in ("bytes_up", "bytes_down", "bytes_per_agent")]
            rows.append((f"acc.{one['scope']}", f"{one['target']:g}", one["rounds_done"], one["acc"], *sizes))
        else:
            rows.append((f"acc.{one['scope']}", f"{one['target']:g}", "not reached", one["best"], "", "", ""))
    columns = ("scope", "target", "rounds\ndone", "accuracy", "up\nMB", "down\nMB", "MB for\nan agent")
    return table("rounds and bytes to an accuracy (mean over agents)", columns, rows)


def reading(result: dict[str, Any]) -> Iterator[str]:
    """How to read the tables, and what is not in them."""
    if result["clients"]:
        threshold = text(result["settings"]["threshold"])
        yield f"features of test samples, means over clients; sparsity: components below {threshold} of the length"
        yield "head classes: at least as many training samples as the client's mean class; tail: the others it has"
    sent = result["communication"]
    if sent is not None:
        up, down = (sent[name] / 1e6 for name in ("bytes_up", "bytes_down"))
        yield f"{sent['rounds']} rounds, {sent['agents']} agents: {up:.2f} MB up, {down:.2f} MB down"
    yield from (f"left out: {one['what']}: {one['why']}" for one in result["left_out"])
