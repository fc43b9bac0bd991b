"""Commands by which the owner of a device keeps its bundle: pin and unpin."""

from __future__ import annotations

import argparse
import time

from ..core import formats
from ..core.errors import UsageError
from ..core.formats import printable
from ..core.time_and_text import moment_of
from . import output
from .where import add_agent, check_exists, named, state_of


def add_pin_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``edge-agent pin``."""
    add_agent(parser)
    parser.add_argument("--reason", help="why; the coordinator shows it")
    parser.add_argument(
        "--until", default="", metavar="DATE", help="when the pin ends, UTC without a zone (default: at unpin)"
    )


def pin(arguments: argparse.Namespace) -> int:
    """Keep the bundle that this device uses, whatever the coordinator releases or rolls back.

    The agent may be running; the coordinator hears of it with its next heartbeat, with the reason. The pin survives
    restarts, and ends by 'edge-agent unpin' or at its date.

    Example:
      edge-agent pin --state /var/lib/headwater-agent --reason "exhibition" --until 2030-01-31
    """
    from ..agent.release_record import Pin, ReleaseRecord
    from ..bundle.installed import current_id

    state = state_of(arguments)
    check_exists(state, "an agent's state folder")
    until = ""
    reason = "pinned on the device"
    if arguments.reason is not None:
        reason = printable(arguments.reason).strip()[:500]
        if not reason:
            raise UsageError("--reason is empty; say why, or leave it out")
    if arguments.until:
        if moment_of(arguments.until).timestamp() <= time.time():
            raise UsageError(f"--until {arguments.until} is over on this device's clock; give a date to come")
        until = moment_of(arguments.until).isoformat(timespec="minutes")
    if not (running := current_id(state / "bundles")):
        raise UsageError(f"{state}: no bundle is in use; import one, or wait for a release")
    record = ReleaseRecord(state)
    before = record.pinned()
    made = Pin(bundle_id=running, reason=reason, until=until)
    record.pin(made)
    replaced = before if before is not None and before.holds(time.time()) else None
    content = {**made.model_dump(mode="json"), "replaces": None if replaced is None else replaced.model_dump()}
    rows = [("pinned", f"bundle {running[:12]}, {f'until {until}' if until else 'without end'}: {reason}")]
    if replaced is not None:
        ended = f"until {replaced.until}" if replaced.until else "without end"
        rows.append(("replaces", f"the pin of bundle {replaced.bundle_id[:12]}, {ended}: {replaced.reason}"))
    rows.append(("next", f"releases are declined; 'edge-agent unpin{named(arguments)}' ends that"))
    return output.result(arguments, content, lambda: formats.pairs(rows))


def add_unpin_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``edge-agent unpin``."""
    add_agent(parser)


def unpin(arguments: argparse.Namespace) -> int:
    """End the pin of this device: with the next heartbeat of a running agent it gets what is released.

    Example:
      edge-agent unpin --state /var/lib/headwater-agent
    """
    from ..agent.release_record import ReleaseRecord

    state = state_of(arguments)
    check_exists(state, "an agent's state folder")
    record = ReleaseRecord(state)
    if (pin := record.pinned()) is None:
        raise UsageError(f"{state}: no bundle is pinned")
    record.pin(None)
    rows = [
        ("unpinned", f"bundle {pin.bundle_id[:12]}"),
        ("next", "a running agent takes what is released from its next heartbeat on"),
    ]
    return output.result(arguments, {"unpinned": pin.bundle_id}, lambda: formats.pairs(rows))
