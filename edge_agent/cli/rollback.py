"""Go back to the bundle that this device used before: verified, tested on its golden inputs, then made current.

The agent must not be running; it fits its head for the bundle when it starts. The release that was rolled back from is
declined from then on, as are older ones, until the coordinator makes a newer release.

Example:
  edge-agent rollback --state /var/lib/headwater-agent
"""

from __future__ import annotations

import argparse
from pathlib import Path

from . import inputs, output
from .import_bundle import self_test, stays_away


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this command."""
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="the agent's state folder")


def run(arguments: argparse.Namespace) -> int:
    """Roll back and print what is current now."""
    from ..agent.local_state import ReleaseRecord
    from ..bundle import current, rollback
    from ..storage import folder_lock

    inputs.existing(arguments.state, "an agent's state folder")
    root = arguments.state / "bundles"
    with folder_lock(arguments.state, "edge-agent rollback"):
        ReleaseRecord(arguments.state).check()
        before = current(root)
        bundle = rollback(root, self_test)
        away = stays_away(arguments.state, bundle.id, "" if before is None else before.id)
    content = {"name": bundle.manifest.name, "method": bundle.manifest.method, "bundle_id": bundle.id, "declines": away}
    return output.result(arguments, content, lambda: output.pairs(content.items()))
