"""Be this device's agent: join a federation, train or personalize when asked, install encoders, until told to stop.

Data and configuration are looked at first: a mistake in them ends the agent with exit code 2 before it needs a broker.
While the broker is away the agent keeps trying until it is stopped, after random pauses of at most 30 s; --no-wait, or
wait = false under [broker], makes it give up with exit code 75 when the first try fails. While no coordinator of its
federation answers it keeps asking, and says so after 10 s. Log lines go to stderr.

Example:
  edge-agent run --config agent.toml
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from ..config import AgentConfig, load
from ..limits import limit_threads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``edge-agent run``."""
    parser.add_argument("--config", type=Path, default=Path("agent.toml"), help="TOML file (default: agent.toml)")
    parser.add_argument("--no-wait", action="store_true", help="exit with 75 when the broker does not answer")


def run(arguments: argparse.Namespace) -> int:
    """Run the agent; 0 after SIGTERM (Ctrl-C ends with 130)."""
    logging.getLogger("edge_agent").setLevel(logging.DEBUG if arguments.verbose else logging.INFO)
    overrides = {"broker": {"wait": False}} if arguments.no_wait else {}
    config = load(AgentConfig, arguments.config, overrides)
    limit_threads(config.training.threads)
    from ..agent import app

    app.run(config)
    return 0
