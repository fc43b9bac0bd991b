"""``headwater serve``."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Annotated

import typer

from edge_agent.core.children import in_child, stop_on_signals
from edge_agent.core.errors import StartStopped, UsageError

from ..config import DEFAULT_CONFIG, load_config
from ..service.standby import TAKEOVER_S
from ..views.runs import replay
from .options import INTERRUPTED, Config, Logs, State, Verbose
from .output import console, set_up_logging
from .web import announcement

StandsBy = Annotated[
    bool, typer.Option("--standby", help="Only watch the coordinator that serves, and take over when it is silent.")
]
TakeoverAfter = Annotated[
    float, typer.Option("--takeover-s", min=5, max=86_400, help="Seconds without an answer after which it is replaced.")
]
TakesOver = Annotated[
    bool,
    typer.Option("--take-over", help="Replace a coordinator that serves, whose journal may be newer; for a backup."),
]
AcceptsIdentities = Annotated[
    bool,
    typer.Option("--accept-identities", help="At the first start from a backup: let in the agents that it names."),
]
RevocationPaths = Annotated[
    list[Path] | None,
    typer.Option(
        "--revocations",
        metavar="PATH",
        help="At the first start from a backup: former state folder or crl.pem, for what was revoked since.",
    ),
]

Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow a broker without TLS that other machines reach, or are on.")
]


def serve(
    config: Config = None,
    state: State = None,
    insecure: Insecure = False,
    standby: StandsBy = False,
    takeover_s: TakeoverAfter = TAKEOVER_S,
    take_over: TakesOver = False,
    accept_identities: AcceptsIdentities = False,
    revocations: RevocationPaths = None,
    verbose: Verbose = False,
    log_format: Logs = "text",
) -> None:
    """Serve a federation until stopped: agents may come and go, runs are started with 'headwater run'.

    Clients whose data are here ([[hosted]]) train beside the agents, in processes of this command; a [warm_start] and
    the figures of [proxy] are computed in another one. configs/coordinator-hosted.toml shows all three.

    A run that was under way when the coordinator stopped, or was killed, is resumed in the round it was in. Exit code 0
    after SIGTERM, 130 after Ctrl-C.

    With [web] in the configuration a web view of the state folder is served as well, by a process beside this one.

    With --standby a second coordinator waits on the same state folder, or on another machine on a copy that 'headwater
    backup DIR --every 60' keeps up to date, and resumes the runs when the first is offline. One that was only suspended
    ends with exit code 2 when it is back; nothing that it does then counts.

    With 'journal' in the configuration, the coordinators of several machines share a database and the state folder, all
    of them with --standby: one serves, by a lease in the database, and another takes over 3 s after its last renewal.

    A backup is not started beside a coordinator that answers (exit code 2), unless --take-over says so. Where agents
    have certificates, its first start names those that it would let in, and wants --accept-identities.

    Example: headwater serve --config configs/coordinator.toml

    Example: headwater serve --standby --takeover-s 60 --config configs/coordinator.toml
    """
    from ..runs.result_notes import describe_progress
    from ..service import app
    from ..service.first_start import Decisions
    from ..service.preflight import check_defaults, check_private, without_lost_weights
    from .follow import Invocation

    set_up_logging(verbose=verbose, log_format=log_format)
    if standby and take_over:
        raise UsageError("--standby waits until nobody serves, and --take-over does not; give one of them")
    settings = load_config(config, state)
    if not insecure:
        check_private(settings)
    in_child(lambda: check_defaults(without_lost_weights(settings), config))  # models need torch, 190 MB
    if settings.web is not None and not standby:  # before anything is opened; a stand-by may share the machine
        from ..web.server import listening

        listening(settings.web).close()
    with stop_on_signals() as stop, contextlib.ExitStack() as stack:
        if standby:
            console.print(f"standing by for federation '{settings.federation}'; Ctrl-C stops", soft_wrap=True)
            service = app.take_over(settings, stop, stack, takeover_s)
        else:
            decisions = Decisions(
                takes_over=take_over,
                accepts_identities=accept_identities,
                revocations=tuple(revocations or ()),
                # A copy is usually given by --state: then the configuration names the former folder.
                former_states=() if state is None else (load_config(config).state,),
            )
            try:
                service = stack.enter_context(app.coordinator(settings, stop, decisions=decisions))
            except StartStopped:
                console.print("stopped; nothing was started")
                raise typer.Exit(INTERRUPTED if stop.signal == signal.SIGINT else 0) from None
        if service is None:
            console.print("stopped; nothing was taken over")
            raise typer.Exit(INTERRUPTED if stop.signal == signal.SIGINT else 0)
        console.print(
            f"serving federation '{settings.federation}', state in {settings.state}; Ctrl-C stops", soft_wrap=True
        )
        if settings.web is not None:
            from ..web.server import Settings, WebProcess

            given = Settings.of(settings, settings.web, config or DEFAULT_CONFIG)
            view = WebProcess(given, announcement(settings.state))
            stack.callback(view.stop)
            view.start()
        for run in service.state.journal.unfinished():
            drops = Invocation(config, state).command(f"cancel {run}")
            progress = describe_progress(replay(service.state.journal, run))
            console.print(f"{run} {progress} and is done first; {drops} drops it", soft_wrap=True)
        service.serve(stop)
    console.print("stopped; the next start resumes from here")
    if stop.signal == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)
