"""Install a bundle file into an agent's state folder: verified, tested on its golden inputs, then made current.

For devices that get their bundles on a stick. The agent must not be running; it fits its head for the bundle when it
starts. The bundle before stays for 'edge-agent rollback'. What the coordinator released before is declined from then
on: the imported bundle stays until there is a release that is newer than the one it took the place of.

Example:
  edge-agent import b.hwb --state /var/lib/headwater
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import opening, show

if TYPE_CHECKING:
    from ..bundle import Bundle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this command."""
    parser.add_argument("bundle", type=Path, metavar="FILE", help="bundle file (*.hwb)")
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="the agent's state folder")
    parser.add_argument("--no-self-test", action="store_true", help="install without running the encoder")


def run(arguments: argparse.Namespace) -> int:
    """Install and print what is current now."""
    from ..bundle import current_id, install
    from ..store import check_writable, folder_lock

    opening.existing(arguments.bundle, "a bundle file (*.hwb)")
    check_writable(arguments.state)
    with folder_lock(arguments.state, "edge-agent import"):
        check = None if arguments.no_self_test else self_test
        before = current_id(arguments.state / "bundles")
        bundle = install(arguments.bundle, arguments.state / "bundles", check=check)
        away = stays_away(arguments.state, bundle.id, before)
    manifest = bundle.manifest
    content = {
        "name": manifest.name,
        "method": manifest.method,
        "bundle_id": bundle.id,
        "precisions": sorted(manifest.variants),
        "classes": manifest.task.num_classes,
        "folder": str(bundle.folder),
        "self_test": not arguments.no_self_test,
        "declines": away,
    }
    return show.result(arguments, content, lambda: _lines(content))


def stays_away(state: Path, bundle_id: str, before: str) -> str | None:
    """Note that a bundle was put by hand in place of another; the id of the bundle that is declined from now on."""
    from ..agent.releases import ReleaseRecord

    found = ReleaseRecord(state).put_by_hand(bundle_id, before)
    return None if found is None else found.source.bundle_id


def _lines(content: dict[str, Any]) -> list[str]:
    return show.pairs({**content, "precisions": ", ".join(content["precisions"])}.items())


def self_test(bundle: Bundle) -> None:
    """Run every variant of the encoder on the golden inputs.

    Raises:
        BundleDamaged: a variant gives other features than the exporter got.
        MissingCapability: onnxruntime is not installed.
    """
    from ..encoder import Encoder

    golden = bundle.golden()
    for precision in sorted(bundle.manifest.variants):
        Encoder.open(bundle, precision).self_test(golden)
