"""``headwater serve``."""

from __future__ import annotations

import signal

import typer

from edge_agent.worker import in_child, stop_on_signals

from ..config import load_config
from ..service.app import coordinator
from ..service.preflight import check_defaults, without_lost_weights
from .follow import Invocation, standing
from .options import INTERRUPTED, Config, State, Verbose
from .output import console, set_up_logging


def serve(config: Config = None, state: State = None, verbose: Verbose = False) -> None:
    """Serve a federation until stopped: agents may come and go, runs are started with 'headwater run'.

    Clients whose data lie here ([[hosted]]) train beside the agents, in processes of this command; a [warm_start] and
    the figures of [proxy] are computed in another one. configs/coordinator-hosted.toml shows all three.

    A run that was under way when the coordinator stopped, or was killed, is resumed in the round it was in. Exit code 0
    after SIGTERM, 130 after Ctrl-C.

    Example: headwater serve --config configs/coordinator.toml
    """
    set_up_logging(verbose=verbose)
    settings = load_config(config, state)
    in_child(lambda: check_defaults(without_lost_weights(settings), config))  # models need torch, 190 MB
    with stop_on_signals() as stop, coordinator(settings, stop) as service:
        console.print(
            f"serving federation '{settings.federation}', state in {settings.state}; Ctrl-C stops", soft_wrap=True
        )
        for run in service.state.journal.unfinished():
            drops = Invocation(config, state).command(f"cancel {run}")
            progress = standing(service.state.journal.replay(run))
            console.print(f"{run} {progress} and is done first; {drops} drops it", soft_wrap=True)
        service.serve(stop)
    console.print("stopped; the next start resumes from here")
    if stop.signal == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)
