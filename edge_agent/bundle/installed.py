"""The bundles of a state folder: installed, switched to, and rolled back.

On a device each bundle is unpacked into its own folder, with a mark inside (`own_folders.mark_folder`).
``root/current.json`` lists folder names, the one in use first, its predecessors after it. A crash during an install
leaves the old pointer and perhaps a folder that the next install removes. Folders under ``root`` that this program has
not made stay.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_agent.bundle.archive import BundleFile, open_bundle
from edge_agent.bundle.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    RELEASE,
    Manifest,
    dump_manifest,
    files_of,
    origin,
    parse_manifest,
)
from edge_agent.bundle.unpacked import BUNDLE_FOLDER, Bundle, open_folder, read_part, release_in, unpack

from ..core.errors import BundleError, StateError
from ..core.own_folders import check_own_folder, remove_folder
from ..core.storage import (
    read_json,
    read_regular,
    sha256_of,
    write_atomic,
    write_json,
)
from ..version import __version__
from .trust import (
    Envelope,
    Member,
    Purpose,
    Release,
    TrustStore,
    parse,
    read,
)

_POINTER = "current.json"
"""The file that lists the folders of installed bundles, the one in use first."""


def install(
    path: Path,
    root: Path,
    keep: int = 2,
    check: Callable[[Bundle], object] | None = None,
    now: Callable[[], float] = time.time,
    first: Envelope | None = None,
    round_of: TrustStore | None = None,
) -> Bundle:
    """Verify a bundle file, unpack it and make it the current one: `admitted`, `staged` and `switch` in one process.

    Args:
        path: The bundle file.
        root: The folder of bundles.
        keep: How many bundles stay installed, this one included.
        check: Receives the unpacked bundle before it becomes current, and may refuse it by raising.
        now: The time, in seconds since 1970.
        first: A root that the bundle has to be signed by where ``root`` trusts none yet; it is trusted from then on.
        round_of: The trust that counts instead of that of ``root`` where the bundle is the encoder of one round: it
            has to be signed as such, and its version is not compared with others.

    Raises:
        BundleDamaged: See `open_bundle`; the current bundle stays.
        BundleUntrusted: The bundle is not signed by keys that ``root`` trusts, or has expired.
    """
    opened = open_bundle(path)
    member = admitted(opened, root, now(), first, round_of)
    bundle = staged(opened, root)
    if check is not None:
        check(bundle)
    if round_of is None:
        switch(bundle, root, member, first, keep)
    else:
        if first is not None:
            round_of.anchor(first)
        switch(bundle, root, keep=keep)
    return bundle


def admitted(
    opened: BundleFile, root: Path, now: float, first: Envelope | None = None, round_of: TrustStore | None = None
) -> Member | None:
    """Return the signatures of a bundle that may be installed under ``root``; None where nothing is trusted there.

    Where ``root`` trusts keys, the bundle has to be signed by them, not expired at ``now``, and not older than the
    newest that was installed there. Where it trusts none, ``first`` is a root that the bundle has to be signed by.
    For ``round_of`` see `install`.

    Raises:
        BundleUntrusted: The bundle is not signed by keys that ``root`` trusts, or has expired.
    """
    purpose: Purpose = "release" if round_of is None else "round"
    store = TrustStore(root) if round_of is None else round_of
    return store.admit(opened.release, files_of(opened.manifest), now, __version__, first, purpose)


def staged(opened: BundleFile, root: Path) -> Bundle:
    """Unpack a bundle under ``root`` beside the current one, unless it is there undamaged, and return it.

    The folder is named after the bundle id, so that a bundle of the same content, whatever its name, uses the same one.

    Raises:
        BundleDamaged: See `open_bundle`.
        UsageError: ``root`` is a link, or other users can write it.
    """
    check_own_folder(root)
    name = opened.manifest.bundle_id[:24]
    raw = dump_manifest(opened.manifest)
    if opened.release is not None and (root / name / MANIFEST).exists():
        # The same encoder exported again has another time, and the signatures are of that manifest: a second folder.
        if read_regular(root / name / MANIFEST) != raw:
            name = f"{name}-{sha256_of(raw)[:8]}"
        # The same bundle signed again: both signatures are of this folder's content.
        elif release_in(root / name) != opened.release:
            write_atomic(root / name / RELEASE, opened.release)
    folder = root / name
    with contextlib.suppress(BundleError):
        bundle = open_folder(folder)
        if bundle.id == opened.manifest.bundle_id:
            return bundle
    if not remove_folder(folder, BUNDLE_FOLDER):
        # A folder in the way that this program has not made is not removed, so the bundle goes beside it.
        folder = root / f"{name}-{secrets.token_hex(4)}"
    unpack(opened.path, folder)
    return open_folder(folder)


def switch(
    bundle: Bundle, root: Path, member: Member | None = None, first: Envelope | None = None, keep: int = 2
) -> None:
    """Make a `staged` bundle the current one.

    Args:
        bundle: The bundle.
        root: The folder of bundles.
        member: Its signatures; older releases are refused from now on.
        first: The root by which it was `admitted` where nothing was trusted; it is trusted from now on.
        keep: How many bundles stay installed, this one included.
    """
    store = TrustStore(root)
    name = bundle.folder.name
    if first is not None:
        store.anchor(first)
    if member is not None:
        store.record(member)
    earlier = [earlier_name for earlier_name in _history(root) if earlier_name != name]
    names = [name, *earlier][: max(keep, 1)]
    write_json(root / _POINTER, {"bundles": names})
    remove_unused(root)


def remove_unused(root: Path) -> None:
    """Remove the bundles under ``root`` that are neither current nor kept: refused ones, and those of a crash.

    Folders that this program has not made stay, and a warning names them.

    Raises:
        StateError: The record of the bundles to keep cannot be read.
        UsageError: ``root`` is a link, or other users can write it.
    """
    check_own_folder(root)
    if not root.is_dir():
        return
    names = _history(root)
    for folder in root.iterdir():
        if folder.is_dir() and not folder.is_symlink() and folder.name not in names:
            remove_folder(folder, BUNDLE_FOLDER)


def pointer(root: Path) -> Path:
    """Return the file under ``root`` that is replaced whenever another bundle comes into use."""
    return root / _POINTER


def current(root: Path) -> Bundle | None:
    """Return the bundle in use under ``root``, verified; None where none was installed.

    Raises:
        BundleDamaged: The current bundle is damaged; `rollback` or `install` replaces it.
    """
    names = _history(root)
    return open_folder(root / names[0]) if names else None


def current_manifest(root: Path) -> Manifest | None:
    """Return the manifest of the bundle in use under ``root``, without reading its files; None where there is none.

    Raises:
        BundleError: The manifest of the current bundle cannot be read.
    """
    name = next(iter(_history(root)), None)
    return None if name is None else _manifest_in(root / name)


def current_origin(root: Path) -> dict[str, Any] | None:
    """Return the `origin` of the bundle in use under ``root``, whose signatures were verified at its installation.

    Raises:
        BundleError: The manifest or the signatures of the current bundle cannot be read.
    """
    name = next(iter(_history(root)), None)
    if name is None:
        return None
    raw = release_in(root / name)
    release = None if raw is None else read(Release, parse(Member, raw, "release").release, "release")
    return origin(_manifest_in(root / name), release)


def manifests(root: Path) -> list[Manifest]:
    """Return the manifests of the bundles under ``root``, the one in use first, without reading their files.

    Raises:
        BundleError: The manifest of an unpacked bundle cannot be read.
    """
    return [_manifest_in(root / name) for name in _history(root)]


def current_id(root: Path) -> str:
    """Return the id of the bundle in use under ``root``; empty where there is none, or its manifest cannot be read."""
    try:
        manifest = current_manifest(root)
    except BundleError:
        return ""
    return "" if manifest is None else manifest.bundle_id


def rollback(root: Path, check: Callable[[Bundle], object] | None = None) -> Bundle:
    """Make the bundle that was in use before the current one again, and return it.

    ``check`` receives it first, and may refuse it by raising.

    Raises:
        StateError: No earlier bundle is kept.
        BundleDamaged: The earlier bundle is damaged; the current one stays.
    """
    names = _history(root)
    if len(names) < 2:
        raise StateError(
            f"{root}: {len(names)} bundle(s) installed, no earlier bundle to roll back to; "
            "install one, or return to the earlier head alone (--head)"
        )
    bundle = open_folder(root / names[1])
    if check is not None:
        check(bundle)
    write_json(root / _POINTER, {"bundles": names[1:]})
    return bundle


def _history(root: Path) -> list[str]:
    """Return the names of the folders of installed bundles that exist, the one in use first.

    Raises:
        StateError: The list is damaged.
    """
    content = read_json(root / _POINTER)
    names = [] if content is None else content.get("bundles")
    if not isinstance(names, list) or not all(_is_folder_name(name) for name in names):
        raise StateError(
            f"{root / _POINTER}: expected a list of folder names under 'bundles'; remove it and install again"
        )
    return [name for name in names if (root / name).is_dir()]


def _is_folder_name(name: object) -> bool:
    """Return whether ``name`` may be that of a bundle's folder: a path could lead elsewhere."""
    return isinstance(name, str) and name.replace("-", "").isalnum()


def _manifest_in(folder: Path) -> Manifest:
    """Return the manifest in the folder of an unpacked bundle."""
    return parse_manifest(read_part(folder / MANIFEST, MAX_MANIFEST_BYTES + 1), str(folder))
