"""``headwater serve``."""

from __future__ import annotations

from ..serving import coordinator, load_config, stop_on_signals
from .options import Config, State, Verbose, console, set_up_logging


def serve(config: Config = None, state: State = None, verbose: Verbose = False) -> None:
    """Serve a federation until told to stop: agents may come and go, runs are started with 'headwater run'.

    A run that was under way when the coordinator stopped, or was killed, goes on in the round it was in.

    Example: headwater serve --config configs/coordinator.toml
    """
    set_up_logging(verbose=verbose)
    settings = load_config(config, state)
    with stop_on_signals() as stop, coordinator(settings) as service:
        console.print(
            f"serving federation '{settings.federation}', state in {settings.state}; Ctrl-C stops", soft_wrap=True
        )
        service.serve(stop)
    console.print("stopped; the next start goes on from here")
