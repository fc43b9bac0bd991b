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

from . import inputs, output

if TYPE_CHECKING:
    from ..bundle import Bundle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this command."""
    parser.add_argument("bundle", type=Path, metavar="FILE", help="bundle file (*.hwb)")
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="the agent's state folder")
    parser.add_argument("--no-self-test", action="store_true", help="install without running the encoder")


def run(arguments: argparse.Namespace) -> int:
    """Install and print what is current now."""
    from ..agent.local_state import ReleaseRecord
    from ..bundle import current_id, install
    from ..storage import check_writable, folder_lock

    inputs.existing(arguments.bundle, "a bundle file (*.hwb)")
    check_writable(arguments.state)
    with folder_lock(arguments.state, "edge-agent import"):
        notes: dict[str, str] = {}
        check = None if arguments.no_self_test else lambda unpacked: notes.update(self_test(unpacked))
        ReleaseRecord(arguments.state).check()
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
        "int8_note": notes.get("int8"),
        "declines": away,
    }
    return output.result(arguments, content, lambda: _lines(content))


def stays_away(state: Path, bundle_id: str, before: str) -> str | None:
    """Note that a bundle was put by hand in place of another; the id of the bundle that is declined from now on."""
    from ..agent.local_state import ReleaseRecord

    result = ReleaseRecord(state).put_by_hand(bundle_id, before)
    return None if result is None else result.source.bundle_id


def _lines(content: dict[str, Any]) -> list[str]:
    return output.pairs({**content, "precisions": ", ".join(content["precisions"])}.items())


def self_test(bundle: Bundle) -> dict[str, str]:
    """Run the self-test of every variant; returns why int8 cannot be used here, where it cannot: fp32 serves then.

    Raises:
        BundleDamaged: fp32 gives something else than the exporter got.
        MissingCapability: onnxruntime is not installed.
    """
    from ..encoder import Encoder
    from ..errors import BundleDamaged

    Encoder.open(bundle, "fp32")
    if "int8" not in bundle.manifest.variants:
        return {}
    try:
        Encoder.open(bundle, "int8")
    except BundleDamaged as error:
        return {"int8": f"not used on this device: {error}"}
    return {}
