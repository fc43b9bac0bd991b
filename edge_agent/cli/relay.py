"""Command that serves as the relay of a site."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from ..core import formats
from ..core.children import stop_on_signals
from ..core.config import check_tls, load
from ..core.locks import lock_holder
from ..core.logs import LogFormat, log_json
from ..relay.settings import RelayConfig
from . import output


def add_relay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``edge-agent relay``."""
    parser.add_argument("--config", type=Path, default=Path("relay.toml"), help="TOML file (default: relay.toml)")
    parser.add_argument("--status", action="store_true", help="show what the relay of this machine does, and end")
    parser.add_argument("--no-wait", action="store_true", help="exit with 75 when a broker does not answer")
    parser.add_argument("--insecure", action="store_true", help="allow brokers without TLS on other machines")
    parser.add_argument(
        "--log-format", choices=get_args(LogFormat), default="text", help="json: one JSON object a line on stderr"
    )


def relay(arguments: argparse.Namespace) -> int:
    """Connect the agents of a site to their coordinator by one connection, until stopped.

    The agents of the site connect to a broker there, which [site] names, and need no other settings than its address.
    The relay passes their messages to the coordinator's broker, which [broker] names, and fetches each model once for
    all of them. It holds no keys of the federation: agents check commands and models themselves. While one of the
    brokers is away it keeps trying; --no-wait makes it give up with exit code 75 when the first try fails.

    --status shows how many agents are online, both connections, and how many bytes have come for how many that were
    served. Log lines go to stderr. Exit code 0 after SIGTERM, 130 after Ctrl-C.

    Example:
      edge-agent relay --config relay.toml
    """
    if arguments.log_format == "json":
        log_json()
    logging.getLogger("edge_agent").setLevel(logging.DEBUG if arguments.verbose else logging.INFO)
    waiting = {"wait": False}
    overrides = {"broker": waiting, "site": waiting} if arguments.no_wait else {}
    config = load(RelayConfig, arguments.config, overrides)
    if arguments.status:
        return _show_status(arguments, config)
    if not arguments.insecure:
        check_tls(config.broker)
        check_tls(config.site)
    return _serve(config)


def _serve(config: RelayConfig) -> int:
    """Pass messages until a signal comes, and say what is waited for; returns the exit code."""
    from ..relay import app
    from ..relay.relay import LONGEST_WAIT_S

    with (
        stop_on_signals() as stop,
        app.relay(config) as service,
        contextlib.closing(app.renewal(config)) as certificate,
    ):
        status_file = app.StatusFile(config.state / app.STATUS, time.monotonic)
        print(f"relay '{config.id}' of federation '{config.federation}'; Ctrl-C stops", file=sys.stderr)
        shown = ""
        while not stop.is_set():
            service.step(LONGEST_WAIT_S)
            certificate.tick()
            status_file.tick(service)
            line = f"waiting for {service.waits_for}" if service.waits_for else "serving"
            if line != shown:
                shown = line
                print(line, file=sys.stderr)
    return 130 if stop.signal == signal.SIGINT else 0


def _show_status(arguments: argparse.Namespace, config: RelayConfig) -> int:
    """Print the status of the relay of a configuration."""
    from ..relay.app import read_status

    holder = lock_holder(config.state)
    status = {"running": holder is not None, **read_status(config)}
    return output.result(arguments, status, lambda: _status_lines(status))


def _status_lines(status: dict[str, Any]) -> Iterable[str]:
    """Return the lines of a status for people."""
    rows: dict[str, object] = {"relay": status["id"], "federation": status["federation"]}
    if not status["running"]:
        rows["running"] = "no; what follows is how it was last"
    if status["waits_for"]:
        rows["waits for"] = status["waits_for"]
    rows["coordinator's broker"] = formats.broker(status["broker"]) if status["broker"] else "not connected"
    rows["broker of the site"] = formats.broker(status["site"]) if status["site"] else "not connected"
    rows["agents"] = f"{status['online']} online of {status['agents']}"
    rows["models"] = f"{formats.size(status['fetched_bytes'])} fetched, {formats.size(status['served_bytes'])} served"
    sent = formats.size(status["sent_bytes"])
    rows["connection"] = f"{sent} sent to the coordinator's broker, {formats.size(status['received_bytes'])} received"
    if not status.get("can_sum", True):
        rows["sums"] = "none: updates pass one by one, because sum_updates is false or there is no command key"
    elif status.get("sums"):
        rows["sums"] = f"{status['sums']} in place of {status['summed']} updates"
    if status["refused"]:
        rows["refused"] = f"{status['refused']} messages; the log names them"
    return formats.pairs(rows.items())
