"""``headwater aggregate``."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from edge_agent.core.children import stop_on_signals

from ..config import load_config
from .options import INTERRUPTED, Config, Logs, State, Verbose
from .output import console, set_up_logging

PartitionText = Annotated[
    str, typer.Option("--partition", metavar="K/N", help="The partition to serve, such as 2/4: the second of four.")
]


def aggregate(
    partition: PartitionText,
    config: Config = None,
    state: State = None,
    verbose: Verbose = False,
    log_format: Logs = "text",
) -> None:
    """Take, check, store and sum the updates of a part of the agents, beside the coordinator, until stopped.

    Set [aggregators] partitions = N in the coordinator's configuration and start one of these for each partition, here
    or on other machines that see the coordinator's state folder. The result has the same bits for every N, and with
    none. A second one for the same partition stands by. Where one ends, another takes its partition over within
    seconds; where all end, the coordinator does.

    'headwater status' names who serves which partition. Exit code 0 after SIGTERM, 130 after Ctrl-C.

    Example: headwater aggregate --partition 2/4 --config coordinator.toml
    """
    from ..aggregators.aggregator import TICK_S
    from ..aggregators.app import aggregator
    from ..fleet.partitions import Partition

    set_up_logging(verbose=verbose, log_format=log_format)
    settings = load_config(config, state)
    chosen = Partition.parse(partition)
    with stop_on_signals() as stop, aggregator(settings, chosen) as service:
        console.print(
            f"aggregator for partition {chosen} of federation '{settings.federation}'; Ctrl-C stops", soft_wrap=True
        )
        shown = ""
        while not stop.is_set():
            service.step(TICK_S)
            line = f"waiting for {service.waits_for}" if service.waits_for else "serving"
            if line != shown:
                shown = line
                console.print(line, soft_wrap=True)
    raise typer.Exit(INTERRUPTED if stop.signal == signal.SIGINT else 0)
