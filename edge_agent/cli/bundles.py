"""The commands ``edge-agent import``, ``verify`` and ``rollback``: bundles by hand, without a broker."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bundle import figure_rows
from ..bundle.starter import bundle_path
from ..core import formats
from ..core.errors import BundleDamaged, BundleUntrusted, UsageError, cause
from ..core.locks import folder_lock
from ..core.own_folders import check_own_folder
from ..core.storage import IDENTITY, check_writable
from . import output
from .where import add_agent, check_exists, check_may_be_state, named, state_of

if TYPE_CHECKING:
    from ..agent.release_record import ReleaseRecord, RolledBack
    from ..bundle.trust import Envelope
    from ..bundle.unpacked import Bundle


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``edge-agent import``."""
    parser.add_argument(
        "bundle",
        type=bundle_path,
        metavar="FILE",
        help="bundle file (*.hwb), or starter: the encoder of pictures that comes with this package",
    )
    add_agent(parser)
    parser.add_argument("--no-self-test", action="store_true", help="install without running the encoder")
    parser.add_argument(
        "--root",
        type=Path,
        metavar="FILE",
        help="from now on, trust the keys of this root.json alone; after several changes of keys: roots.json, or a "
        "folder of root files",
    )


def import_bundle(arguments: argparse.Namespace) -> int:
    """Install a bundle file into an agent's state folder: verified, tested on its golden inputs, then made current.

    Where the device trusts keys, the bundle has to be signed by them, not expired and not older than the newest one.

    For devices that get their bundles on a stick. The agent must not be running; it fits its head for the bundle when
    it starts. Without an agent 'edge-agent add' or 'fit' does. The bundle before stays for 'edge-agent rollback'. What
    the coordinator released before is declined from then on: the imported bundle stays until there is a release that is
    newer than the one it took the place of.

    Example:
      edge-agent import b.hwb --state /var/lib/headwater
    """
    from ..agent.release_record import ReleaseRecord
    from ..bundle.archive import open_bundle
    from ..bundle.installed import current_id, install
    from ..bundle.manifest import variant_figures
    from ..bundle.trust import Member, TrustStore, parse

    check_exists(arguments.bundle, "a bundle file (*.hwb)")
    state = state_of(arguments)
    check_own_folder(state)  # a link is named as such, wherever it leads
    check_may_be_state(state)
    check_writable(state)
    check_own_folder(state / "bundles")
    with folder_lock(state, "edge-agent import"):
        notes: dict[str, str] = {}
        check = None if arguments.no_self_test else lambda unpacked: notes.update(_self_test(unpacked))
        record = ReleaseRecord(state)
        root = state / "bundles"
        record.check()
        _check_unpinned(record)
        before = current_id(root)
        trust = TrustStore(root)
        if arguments.root is not None:
            (*others, newest) = _roots(arguments.root)
            raw = open_bundle(arguments.bundle).release
            carried = () if raw is None else parse(Member, raw, str(arguments.bundle)).roots
            trust.anchor(newest, (*carried, *others))
        try:
            bundle = install(arguments.bundle, root, check=check)
        except BundleUntrusted as error:
            raise BundleUntrusted(f"{arguments.bundle}: {error}") from error
        declined = record.put_by_hand(bundle.id, before)
    figures = variant_figures(bundle.manifest)
    content = {
        "name": bundle.manifest.name,
        "method": bundle.manifest.method,
        "bundle_id": bundle.id,
        "precisions": sorted(bundle.manifest.variants),
        "classes": bundle.manifest.task.num_classes,
        "folder": str(bundle.folder),
        "self_test": not arguments.no_self_test,
        "signed": trust.known() is not None,
        "int8_note": notes.get("int8"),
        "declines": None if declined is None else declined.source.bundle_id,
    }
    rows: list[tuple[str, object]] = [
        ("name", bundle.manifest.name),
        ("method", bundle.manifest.method),
        ("bundle", bundle.id[:12]),
        ("precisions", ", ".join(sorted(bundle.manifest.variants))),
        ("classes", bundle.manifest.task.num_classes),
        ("folder", bundle.folder),
        ("self-test", "not run" if arguments.no_self_test else "passed"),
        ("signed", output.yes_or_no(trust.known() is not None)),
    ]
    if "int8" in notes:
        rows.append(("int8", notes["int8"]))
    rows += _by_hand(declined, _next_step(arguments, state))
    rows += figure_rows.variant_rows(figures)
    return output.result(arguments, {**content, "figures": figures}, lambda: formats.pairs(rows))


def _roots(path: Path) -> tuple[Envelope, ...]:
    from ..bundle.trust import roots_in

    try:
        return roots_in(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {cause(error)}; expected the root.json of a federation") from error


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``edge-agent verify``."""
    parser.add_argument("bundle", type=Path, metavar="FILE", help="bundle file (*.hwb)")
    parser.add_argument(
        "--root", type=Path, required=True, metavar="FILE", help="root.json or roots.json of the federation"
    )


def verify(arguments: argparse.Namespace) -> int:
    """Show who has signed a bundle file: only the file and a root of the federation are needed, and no network.

    Keys that were changed since that root are followed by the roots in the bundle. The exit code is 4 where the bundle
    is damaged or not signed by enough of those keys. A release that has expired is still genuine, and is not installed.

    Example:
      edge-agent verify b.hwb --root root.json
    """
    from ..bundle.archive import open_bundle
    from ..bundle.archive import verify as verified
    from ..bundle.manifest import origin
    from ..bundle.trust import Member, parse, seconds

    check_exists(arguments.bundle, "a bundle file (*.hwb)")
    release, root = verified(arguments.bundle, _roots(arguments.root)[-1])
    opened = open_bundle(arguments.bundle)
    member = parse(Member, opened.release or b"", str(arguments.bundle))
    signers = sorted(member.release.signers(root.roles["targets"], root.keys))
    content: dict[str, Any] = {
        "bundle_id": release.bundle_id,
        "federation": release.federation,
        "version": release.version,
        "expires": release.expires,
        "expired": time.time() >= seconds(release.expires),
        "min_agent": release.min_agent,
        "root": root.version,
        "threshold": root.roles["targets"].threshold,
        "signers": [{"id": keyid, "name": root.names.get(keyid)} for keyid in signers],
        "lineage": origin(opened.manifest, release),
    }
    rows: list[tuple[str, object]] = [
        ("bundle", release.bundle_id),
        ("federation", release.federation),
        ("version", release.version),
        ("expires", release.expires),
        ("expired", output.yes_or_no(content["expired"])),
        ("for agents of", f"version {release.min_agent} or newer"),
        ("root", root.version),
        ("keys needed", content["threshold"]),
        ("signed by", ", ".join(map(root.named, signers))),
    ]
    return output.result(
        arguments, content, lambda: formats.pairs([*rows, *figure_rows.lineage_rows(content["lineage"])])
    )


def add_rollback_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``edge-agent rollback``."""
    add_agent(parser)
    parser.add_argument("--head", action="store_true", help="the head alone: return to the one before the last fit")


def rollback(arguments: argparse.Namespace) -> int:
    """Return to the bundle that this device used before: verified, tested on its golden inputs, then made current.

    With --head the bundle stays, and its head before the last fit is used again, until samples or classes change; once
    more returns to the later one. Removed samples do not come back.

    The agent must not be running; it fits its head for the bundle when it starts. The release that was rolled back from
    is declined from then on, as are older ones, until the coordinator makes a newer release.

    Example:
      edge-agent rollback --state /var/lib/headwater-agent
    """
    from ..agent.release_record import ReleaseRecord
    from ..bundle import installed

    state = state_of(arguments)
    check_exists(state, "an agent's state folder")
    if arguments.head:
        return _restore_head(arguments, state)
    with folder_lock(state, "edge-agent rollback"):
        record = ReleaseRecord(state)
        root = state / "bundles"
        record.check()
        _check_unpinned(record)
        before = installed.current(root)
        bundle = installed.rollback(root, _self_test)
        declined = record.put_by_hand(bundle.id, "" if before is None else before.id)
    content = {
        "name": bundle.manifest.name,
        "method": bundle.manifest.method,
        "bundle_id": bundle.id,
        "declines": None if declined is None else declined.source.bundle_id,
    }
    rows: list[tuple[str, object]] = [
        ("name", bundle.manifest.name),
        ("method", bundle.manifest.method),
        ("bundle", bundle.id[:12]),
        *_by_hand(declined, _next_step(arguments, state)),
    ]
    return output.result(arguments, content, lambda: formats.pairs(rows))


def _by_hand(declined: RolledBack | None, next_step: str) -> list[tuple[str, object]]:
    """Return rows about what follows from a bundle that was installed by hand."""
    rows: list[tuple[str, object]] = [("next", next_step)]
    if declined is not None:
        what = f"bundle {declined.source.bundle_id[:12]} and older releases, until there is a newer one"
        rows.insert(0, ("declines", what))
    return rows


def _next_step(arguments: argparse.Namespace, state: Path) -> str:
    """Return what fits a head for the bundle: the agent of this device, or commands where none has ever been here."""
    has_agent = arguments.state is None or (state / "status.json").exists() or (state / IDENTITY).is_dir()
    if has_agent:
        return "'edge-agent run' fits its head for this bundle when it starts"
    add = f"edge-agent add{named(arguments)} --label NAME FILE ..."
    fit = f"edge-agent fit --bundle {state} --data SOURCE --out DIR"
    return f"'{add}' or '{fit}' fits a head; an agent ('edge-agent run') does so when it starts"


def _check_unpinned(record: ReleaseRecord) -> None:
    pin = record.pinned()
    if pin is not None and pin.holds(time.time()):
        raise UsageError(f"this device {pin}; 'edge-agent unpin' ends that")


def _restore_head(arguments: argparse.Namespace, state: Path) -> int:
    from ..bundle import installed
    from ..heads import saved

    with folder_lock(state, "edge-agent rollback"):
        bundle = installed.current(state / "bundles")
        if bundle is None:
            raise UsageError(f"{state}: no bundle is in use, so there is no head; expected an agent's folder")
        head = saved.restore(state / "head", bundle.fingerprints)
    content = {"head": head.head.name, "classes": list(head.class_names), "metrics": dict(head.metrics)}
    rows = {"head": head.head.name, "classes": ", ".join(head.class_names), "fitted on": head.metrics.get("n_train")}
    return output.result(arguments, content, lambda: formats.pairs(rows.items()))


def _self_test(bundle: Bundle) -> dict[str, str]:
    """Test every variant; returns why int8 cannot be used here, where it cannot: fp32 serves then.

    Raises:
        BundleDamaged: fp32 computes something else than the exporter did.
        MissingCapability: onnxruntime is not installed.
    """
    from ..personal.encoder import Encoder

    Encoder.open(bundle, "fp32")
    if "int8" in bundle.manifest.variants:
        try:
            Encoder.open(bundle, "int8")
        except BundleDamaged as error:
            return {"int8": f"not used on this device: {error}"}
    return {}
