"""``headwater compare``."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_agent.core.errors import UsageError

from ..simulation.plan import Plan
from ..text import about_time
from .options import INTERRUPTED, Given, Json, Verbose, from_model
from .output import console, is_live, present, set_up_logging, sigterm_as_ctrl_c
from .reading import drawn_reading, printed_reading
from .simulate import sources

if TYPE_CHECKING:
    from ..research.compare.interface import ComparisonResult, Progress, Running

Methods = Annotated[
    list[str] | None,
    typer.Argument(metavar="METHODS", help="Names (see 'headwater methods') or PATH.py:CLASS, also with commas."),
]
Seeds = Annotated[str, typer.Option("--seeds", help="Seeds of the runs: 0:6 (six of them, 0 to 5), or 0,1,2.")]
Tune = Annotated[
    int, typer.Option("--tune", min=0, max=10_000, help="Trials of each method, defaults included; 0: none.")
]
Search = Annotated[str, typer.Option("--search", help="How parameters are searched: random, halving or optuna.")]
Spaces = Annotated[
    list[str] | None,
    typer.Option("--space", help="[METHOD.]NAME=LOW:HIGH[:log] or NAME=A,B,C: values to search; repeatable."),
]
Validation = Annotated[
    float, typer.Option("--validation", help="Share of the training samples that trials are scored on.")
]
TuneSeed = Annotated[
    int | None, typer.Option("--tune-seed", min=0, help="Seed of the trials; default: the first of --seeds.")
]
Untuned = Annotated[bool, typer.Option("--untuned", help="Also run the defaults, to show what tuning was worth.")]
Parallel = Annotated[int, typer.Option("--parallel", "-j", min=1, max=1024, help="Simulations at a time.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Folder; the same command continues there. Default: comparison."),
]
Logs = Annotated[
    list[str] | None,
    typer.Option("--log", help="Also log the comparison and its runs, as 'headwater simulate --log' does; repeatable."),
]
Again = Annotated[
    bool, typer.Option("--again", help="Run failed simulations again, and those of your own methods that have changed.")
]

WITHOUT = (
    *("method", "folder", "starts", "seed", "validation", "fraction_max", "local", "keep_every"),
    *("new_clients", "head_clients", "head", "evaluate_after", "stacked_always"),
    *("name", "tags", "note", "log"),
)
"""Fields of a simulation that a comparison sets itself, or cannot compare."""

HELP = {
    "params": "[METHOD.]NAME=VALUE, repeatable: a parameter that is set and not searched.",
    "engine": "serial, stacked or pool: how a simulation trains its clients; ray: simulations on a cluster; "
    "default: serial.",
    "address": "ray: a running cluster, HOST:PORT or auto; default: a new one on this machine.",
}


@from_model(Plan, without=WITHOUT, help=HELP)
def compare(
    given: Given,
    methods: Methods = None,
    seeds: Seeds = "0:5",
    tune: Tune = 12,
    search: Search = "random",
    space: Spaces = None,
    validation: Validation = 0.25,
    tune_seed: TuneSeed = None,
    untuned: Untuned = False,
    parallel: Parallel = 1,
    out: Out = None,
    again: Again = False,
    log: Logs = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compare methods: equal tuning for each, then paired seeds.

    Each method gets the same number of trials on validation samples, then runs on test samples with its best
    parameters. With the same seed all methods have the same partition. local, fedavg, fedavg_ft and linear_probe are
    always compared, too. After Ctrl-C (exit code 130) the same command continues, also with more methods or seeds. Exit
    code 1 means that a run failed; --again repeats failed runs.

    Example: headwater compare fedprox ditto -d digits --partition domains --rounds 20 --seeds 0:6 --tune 12
    """
    from ..research.compare.interface import compare as run
    from ..research.compare.settings import parse_seeds

    set_up_logging(verbose=verbose, quiet=True)
    names = [name for word in methods or () for name in word.split(",") if name]
    if not names:
        raise UsageError("no methods: name some, for example 'headwater compare fedprox ditto --data digits'")
    params = given.pop("params", {})
    data = sources(given.pop("data", None))
    folder = out or Path("comparison")
    seed_numbers = parse_seeds(seeds)
    if len(seed_numbers) == 1:  # perhaps meant as the number of seeds, which would come out after hours
        _say(f"--seeds {seeds} is one seed, which cannot tell a difference from chance; six seeds are --seeds 0:6")
    with running_from(given, parallel, again=again) as running, stoppable():
        result = run(
            names,
            data=data,
            seeds=seed_numbers,
            tune=tune,
            search=search,
            space=spaces_from(space or ()),
            params=params,
            validation=validation,
            tune_seed=tune_seed,
            untuned=untuned,
            out=folder,
            running=running,
            log=log or (),
            **given,
        )
    present(result.comparison.model_dump(mode="json"), _shown(result, len(log or ())), as_json=as_json)
    if result.failures:
        raise typer.Exit(1)


def spaces_from(pairs: Sequence[str]) -> dict[str, str]:
    """Return parameter -> values as they were typed.

    Raises:
        UsageError: A pair lacks its name or its values, or a parameter is there twice.
    """
    spaces: dict[str, str] = {}
    for pair in pairs:
        name, _, values = pair.partition("=")
        if not name or not values:
            raise UsageError(f"--space {pair}: expected NAME=VALUES, for example --space lr=0.001:0.1:log")
        if name in spaces:
            raise UsageError(f"--space {name}: is given twice; give all its values at once")
        spaces[name] = values
    return spaces


@contextlib.contextmanager
def running_from(given: Given, parallel: int, *, again: bool) -> Iterator[Running]:
    """Yield where simulations run, and show their progress meanwhile."""
    from ..research.compare.interface import Running

    engine = given.pop("engine", None) or "serial"
    address = given.pop("address", None)
    with shown_progress() as watch:
        yield Running(parallel, engine, address, again=again, watch=watch, say=_say)


def _say(message: str) -> None:
    """Print a message for the user."""
    console.print(message, soft_wrap=True)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM stop what is inside, and say how it is continued."""
    try:
        with sigterm_as_ctrl_c():
            yield
    except KeyboardInterrupt:
        command = shlex.join(("headwater", *sys.argv[1:]))
        _say(f"stopped; nothing is lost, the same command continues: {command}")
        raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[Progress], object]]:
    """Yield a function that shows the progress of a comparison: as a bar, or as a line for each simulation."""
    began_s = time.monotonic()
    first: list[int] = []

    def left(progress: Progress) -> str:
        done = progress.done_rounds - first[0]
        if done <= 0:
            return "time left not known yet"
        seconds = (time.monotonic() - began_s) / done * (progress.total_rounds - progress.done_rounds)
        return f"about {about_time(seconds)} left"

    def print_line(progress: Progress) -> None:
        if not first:
            first.append(progress.done_rounds)
        if progress.is_over:
            _say(f"{progress.event}; {progress.done_rounds} of {progress.total_rounds} rounds, {left(progress)}")

    if not is_live(console):
        with printed_reading():
            yield print_line
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading the data", total=None)

        def update(progress: Progress) -> None:
            if not first:
                first.append(progress.done_rounds)
            counts = f"{progress.done_rounds} of {progress.total_rounds} rounds, {left(progress)}"
            text = f"{counts}; {progress.event}"
            bar.update(task, completed=progress.done_rounds, total=progress.total_rounds, description=text)

        with drawn_reading(lambda text: bar.update(task, description=text)):
            yield update


def _shown(result: ComparisonResult, logs: int) -> Iterator[str]:
    """Yield the tables, and what a reader has to know beside them; ``logs``: the number of logs that were asked for."""
    from ..research.compare.logged import describe_logs
    from ..research.compare.outputs import summary_lines

    comparison = result.comparison
    yield from summary_lines(comparison)
    yield from (f"{method.name}: {method.note}" for method in comparison.methods if method.note)
    yield from describe_logs(result.logs, logs)
    yield f"page: {result.folder}/index.html; beside it table.md, table.tex, table.csv, pictures, and comparison.json"
