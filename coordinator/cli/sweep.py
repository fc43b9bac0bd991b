"""``headwater sweep``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..simulation.plan import Plan
from .compare import (
    HELP,
    WITHOUT,
    Again,
    Parallel,
    Spaces,
    Validation,
    running_from,
    spaces_from,
    stoppable,
)
from .options import Given, Json, Verbose, from_model
from .output import present, set_up_logging, table
from .simulate import sources

if TYPE_CHECKING:
    from rich.table import Table

    from ..research.compare.interface import SweepResult

Method = Annotated[str, typer.Argument(metavar="METHOD", help="A name (see 'headwater methods') or PATH.py:CLASS.")]
Trials = Annotated[
    int | None, typer.Option("--trials", min=1, max=10_000, help="Trials, the defaults included; default: 12.")
]
Search = Annotated[str, typer.Option("--search", help="How parameters are searched: random, halving, grid or optuna.")]
Points = Annotated[
    int | None, typer.Option("--points", min=2, max=1000, help="grid: values of each range; default: 3.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the trials and of the search.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Folder; the same command continues there. Default: sweep.")
]


@from_model(Plan, without=WITHOUT, help=HELP)
def sweep(
    given: Given,
    method: Method,
    trials: Trials = None,
    search: Search = "random",
    points: Points = None,
    space: Spaces = None,
    validation: Validation = 0.25,
    seed: Seed = 0,
    parallel: Parallel = 1,
    out: Out = None,
    again: Again = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Search the parameters of one method on validation samples.

    Test samples stay unused. Without --space it searches the values in the method's file, which 'headwater methods
    NAME' shows. After Ctrl-C (exit code 130) the same command continues. Exit code 1 means that all trials failed.

    Example: headwater sweep fedprox -d digits --partition domains --rounds 20 --space mu=0,0.01,0.1 --search grid
    """
    from edge_agent.core.errors import UsageError

    from ..research.compare.interface import sweep as run

    set_up_logging(verbose=verbose, quiet=True)
    if search == "grid" and trials is not None:
        raise UsageError(f"--trials {trials} has no effect on --search grid, which tries all combinations")
    if search != "grid" and points is not None:
        raise UsageError(f"--points {points} has no effect on --search {search} (only on grid)")
    params = given.pop("params", {})
    data = sources(given.pop("data", None))
    with running_from(given, parallel, again=again) as running, stoppable():
        result = run(
            method,
            spaces_from(space or ()),
            data=data,
            trials=trials or 12,
            search=search,
            points=points or 3,
            params=params,
            validation=validation,
            seed=seed,
            out=out or Path("sweep"),
            running=running,
            **given,
        )
    content = {
        "method": result.method,
        "trials": [trial.model_dump(mode="json") for trial in result.trials],
        "best": None if result.best is None else result.best.model_dump(mode="json"),
        "folder": str(result.folder),
    }
    present(content, _shown(result), as_json=as_json)
    if result.best is None:
        raise typer.Exit(1)


def _shown(result: SweepResult) -> Iterator[Table | str]:
    """Yield the table of all trials, the best first, and the options that set the best parameters."""
    columns = ("trial", "parameters", "failed", "score", "rounds", "CPU s")
    ranked = sorted(result.trials, key=lambda trial: (trial.score is None, -trial.rounds, -(trial.score or 0.0)))
    rows: list[tuple[Any, ...]] = []
    for trial in ranked:
        params = ", ".join(f"{name}={value}" for name, value in trial.params.items()) or "defaults"
        rows.append((str(trial.number), params, trial.failure, trial.score, trial.rounds, f"{trial.cpu_s:.1f}"))
    yield table(f"{result.method}: trials on validation samples", columns, rows, left=3)
    yield "score: mean accuracy over clients on their validation samples; test samples stay unused"
    if result.best is None:
        yield "all trials failed"
        return
    options = " ".join(f"--set {name}={value}" for name, value in result.best.params.items())
    yield f"the best: trial {result.best.number}, {options or 'the defaults'}"
