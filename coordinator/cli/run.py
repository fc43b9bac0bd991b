"""``headwater run``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from edge_agent import methods
from edge_agent.errors import StateError

from ..config import CoordinatorConfig
from ..request import Request
from ..serving import coordinator, load_config
from ..store import StateFolder
from .follow import follow
from .options import Config, Json, State, Verbose, console, parameters, print_json, set_up_logging, show, table

Method = Annotated[str | None, typer.Option("--method", "-m", help="Method; default: run.method of the file.")]
Rounds = Annotated[int | None, typer.Option("--rounds", "-r", min=1, help="Rounds; default: run.rounds.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of weights, cohorts and agents.")]
Param = Annotated[list[str] | None, typer.Option("--param", "-p", help="name=value of the method; may be repeated.")]
INTERRUPTED = 130
WAITS = "stands where it is, and 'headwater serve' goes on with it"
NoWait = Annotated[bool, typer.Option("--no-wait", help="Only ask for the run; do not follow it.")]


def run(
    config: Config = None,
    state: State = None,
    method: Method = None,
    rounds: Rounds = None,
    seed: Seed = None,
    param: Param = None,
    no_wait: NoWait = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Start a run and follow it to its end.

    With 'headwater serve' at work on the same state folder it is asked to do the run; else this command serves the
    federation itself until the run is over. Ctrl-C stops following, never the run of a serving coordinator.

    Example: headwater run -c coordinator.toml --method repper --rounds 5
    """
    settings = load_config(config, state)
    request = request_for(settings, method, rounds, seed, parameters(param or []))
    folder = StateFolder(settings.state)
    serving = is_serving(settings.state)
    set_up_logging(verbose=verbose, quiet=True)
    with contextlib.ExitStack() as stack:
        step = None
        if serving:
            stack.enter_context(folder.look())
        else:
            service = stack.enter_context(coordinator(settings))
            folder, step = service.state, lambda: service.step(service.idle_s())
        run_id = folder.journal.request_run(request.body())
        if no_wait and serving:
            print_json({"run_id": run_id}) if as_json else show(f"asked for {run_id}")
            return
        try:
            follow(folder, run_id, step)
        except KeyboardInterrupt:
            console.print(
                f"{run_id} {'goes on without you' if serving else WAITS}; 'headwater status' tells how it stands",
                soft_wrap=True,
            )
            raise typer.Exit(INTERRUPTED) from None
        tell(folder.run(run_id).summary() or {}, as_json=as_json)


def request_for(
    settings: CoordinatorConfig, method: str | None, rounds: int | None, seed: int | None, params: dict[str, Any]
) -> Request:
    """What is asked for: the file's defaults, with the command line's wishes on top; checked before anybody works.

    Raises:
        UnknownName: no such method.
        ConfigError: parameters that the method does not have, or that are out of bounds.
    """
    defaults = settings.run
    name = method or defaults.method
    base = defaults.params if name == defaults.method else {}
    made = methods.create(name, {**base, **params})
    return Request(
        method=name,
        params=made.params.model_dump(mode="json"),
        rounds=rounds if rounds is not None else defaults.rounds,
        seed=seed if seed is not None else defaults.seed,
        task=settings.task,
    )


def tell(summary: dict[str, Any], *, as_json: bool) -> None:
    """A run's result: one JSON object, or a table for people."""
    if as_json:
        print_json(summary)
        return
    bundle = summary.get("bundle")
    place = bundle["path"] if bundle else f"none ({summary.get('bundle_why_not', 'not exported')})"
    took = f"{summary['seconds']:.1f} s, encoder {summary['encoder_sha256'][:16]}, bundle: {place}"
    show(agents_table(summary), *footnotes(summary), took)


def agents_table(summary: dict[str, Any]) -> Table:
    """What each device got; narrow enough for 80 columns."""
    scopes = ("local", "global", "personal")
    columns = (
        "agent",
        "tier",
        "head",
        "samples",
        *(f"acc.\n{scope}" for scope in scopes),
        "RSS\nMB",
        "up\nMB",
        "down\nMB",
    )
    rows = [
        (
            *(a[key] for key in ("id", "tier", "head", "samples")),
            *(a["acc"][scope] for scope in scopes),
            f"{a['rss_mb']:.0f}",
            *(f"{a[key] / 1e6:.1f}" for key in ("bytes_up", "bytes_down")),
        )
        for a in summary.get("agents", [])
    ]
    title = f"{summary.get('run_id')}: {summary.get('method')}, {summary.get('rounds')} rounds"
    return table(title, columns, rows, left=3)


def footnotes(summary: dict[str, Any]) -> Iterator[str]:
    """What went wrong on devices, one line each."""
    yield from (f"{agent} failed: {reason}" for agent, reason in summary.get("faults", {}).items())


def is_serving(state: Path) -> bool:
    """Whether a coordinator holds the state folder now."""
    from edge_agent.store import folder_lock

    try:
        with folder_lock(state, "headwater run"):
            return False
    except StateError:
        return True
