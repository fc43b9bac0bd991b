"""Commands by which the owner of a device keeps its bundle: pin and unpin."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..errors import UsageError
from ..moments import moment_of
from . import output


def add_pin_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``edge-agent pin``."""
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="the agent's state folder")
    parser.add_argument("--reason", required=True, help="why; the coordinator is told")
    parser.add_argument("--until", default="", metavar="DATE", help="when the pin ends (default: at unpin)")


def pin(arguments: argparse.Namespace) -> int:
    """Keep the bundle that this device uses, whatever the coordinator releases or rolls back.

    The agent may be running; the coordinator is told with its next heartbeat, with the reason. The pin survives
    restarts, and ends by 'edge-agent unpin' or at its date.

    Example:
      edge-agent pin --state /var/lib/headwater-agent --reason "exhibition" --until 2030-01-31
    """
    from ..agent.local_state import Pin, ReleaseRecord
    from ..bundle import current_id

    if arguments.until and moment_of(arguments.until).timestamp() <= time.time():
        raise UsageError(f"--until {arguments.until} is over on this device's clock; give a date to come")
    if not (running := current_id(arguments.state / "bundles")):
        raise UsageError(f"{arguments.state}: no bundle is in use; import one, or wait for a release")
    made = Pin(bundle_id=running, reason=arguments.reason[:500], until=arguments.until)
    ReleaseRecord(arguments.state).pin(made)
    content = made.model_dump(mode="json")
    return output.result(arguments, content, lambda: output.pairs(content.items()))


def add_unpin_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``edge-agent unpin``."""
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="the agent's state folder")


def unpin(arguments: argparse.Namespace) -> int:
    """End the pin of this device: with the next heartbeat of a running agent it gets what is released.

    Example:
      edge-agent unpin --state /var/lib/headwater-agent
    """
    from ..agent.local_state import ReleaseRecord

    record = ReleaseRecord(arguments.state)
    if (pin := record.pinned()) is None:
        raise UsageError(f"{arguments.state}: no bundle is pinned")
    record.pin(None)
    content = {"unpinned": pin.bundle_id}
    return output.result(arguments, content, lambda: output.pairs(content.items()))
