"""``headwater demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Verbose
from .output import print_json, set_up_logging, show
from .run import agents_table, footnotes

Folder = Annotated[
    Path, typer.Option("--dir", help="Folder for configurations, state and results; replaced each time.")
]
Method = Annotated[str, typer.Option("--method", "-m", help="Method to train with.")]
Rounds = Annotated[int, typer.Option("--rounds", "-r", min=1, help="Number of rounds.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of weights, cohorts and agents.")]


def demo(
    folder: Folder = Path("headwater-demo"),
    method: Method = "repper",
    rounds: Rounds = 25,
    seed: Seed = 0,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """The whole way on this machine in under a minute: no network, no GPU, no download.

    Starts a broker, a coordinator and six agents as processes of their own. Four agents train a shared encoder, each on
    digits of another style; the frozen encoder then goes to two agents without torch, whose styles and writers nobody
    trained on, and they fit personal heads.

    Example: headwater demo --method fedavg --rounds 10
    """
    from ..demo import run_demo

    set_up_logging(verbose=verbose, quiet=True)
    result = run_demo(folder, method=method, rounds=rounds, seed=seed)
    if as_json:
        print_json(result.as_json())
        return
    show(agents_table(result.summary), *footnotes(result.summary), *result.reading())
