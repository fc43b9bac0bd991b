"""``headwater web``."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_agent.core.children import stop_on_signals
from edge_agent.core.config import parse
from edge_agent.core.errors import UsageError

from ..config import CoordinatorConfig, WebConfig, load_config
from .options import INTERRUPTED, Config, State, Verbose, state_path
from .output import console, set_up_logging

if TYPE_CHECKING:
    from ..web.server import Settings

Listen = Annotated[
    str | None, typer.Option("--listen", help="Address and port, as 127.0.0.1:8470; port 0 = any free one.")
]
Port = Annotated[
    int | None, typer.Option("--port", min=0, max=65535, help="Port on this machine alone; short for --listen.")
]


def web(
    config: Config = None,
    state: State = None,
    listen: Listen = None,
    port: Port = None,
    verbose: Verbose = False,
) -> None:
    """Show fleet, runs, releases and bundles of a state folder in a browser, with or without a coordinator at work.

    Pages need no token. Actions (promote, hold, roll back, pin, cancel and others) do: the first start prints an
    address that signs in, later ones name the file with the token. [web] in the configuration has 'headwater serve'
    start this.

    Example: headwater web --state headwater-demo/coordinator
    """
    from ..web.server import listening, serve

    set_up_logging(verbose=verbose, quiet=True)
    if port is not None and listen is not None:
        raise UsageError(f"--listen {listen} names a port already; leave --port {port} out")
    settings = _settings(config, state, listen if port is None else f"127.0.0.1:{port}")
    if not settings.state.is_dir():
        raise UsageError(f"{settings.state}: no such folder; name the state folder of a coordinator with --state")
    with listening(settings.web) as at, stop_on_signals() as stop:
        serve(settings, at, announcement(settings.state), stop)
    console.print("stopped")
    if stop.signal == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)


def announcement(state: Path) -> Callable[[str], None]:
    """Return what prints the address when it is known, and how to sign in; a token is made where there is none.

    It is printed once, and to a terminal only: elsewhere a log would keep it.
    """
    from ..web.access import Access
    from ..web.server import login_text

    _, is_new = Access.of(state)

    def ready(url: str) -> None:
        console.print(f"web view of {state} at {url}", soft_wrap=True)
        console.print(login_text(state, url, is_new=is_new and console.is_terminal), soft_wrap=True)

    return ready


def _settings(config: Path | None, state: Path | None, listen: str | None) -> Settings:
    """Return what to serve: all of a configuration where one is given, of a folder alone what needs none."""
    from ..web.server import Settings

    known: CoordinatorConfig | None = None
    if config is not None or state is None:
        known = load_config(config, state)
    given = (known.web if known is not None and known.web is not None else WebConfig()).model_dump()
    chosen = parse(WebConfig, given | ({"listen": listen} if listen else {}), where="--listen")
    if known is None:
        if not chosen.is_local:
            raise UsageError(
                f"--listen {listen} is reached from other machines; that needs TLS, which [web] in the coordinator's "
                "configuration names: give it with --config"
            )
        return Settings(state_path(config, state), chosen)
    raw = {**known.model_dump(exclude_unset=True), "web": chosen.model_dump()}
    checked = parse(CoordinatorConfig, raw, where="options")
    return Settings.of(checked, chosen, config or Path("coordinator.toml"))
