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

from .. import __version__
from ..core.errors import BundleError, StateError
from ..core.own_folders import check_own_folder, remove_folder
from ..core.storage import (
    read_json,
    read_regular,
    sha256_of,
    write_atomic,
    write_json,
)
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


def install(
    path: Path,
    root: Path,
    keep: int = 2,
    check: Callable[[Bundle], object] | None = None,
    now: Callable[[], float] = time.time,
    first: Envelope | None = None,
    round_of: TrustStore | None = None,
) -> Bundle:
    """Verify the bundle file at ``path``, unpack it under ``root`` and make it the current one; ``keep`` are kept.

    ``round_of``: what counts instead of the trust of ``root``, where the bundle is the encoder of one round: it has to
    be signed as such, and its version says nothing of others. ``check`` sees the unpacked bundle before it becomes
    current, and may refuse it by raising. These are `admitted`, `staged` and `switch` in one process.

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
    ``round_of``: as in `install`.

    Raises:
        BundleUntrusted: The bundle is not signed by keys that ``root`` trusts, or has expired.
    """
    purpose: Purpose = "release" if round_of is None else "round"
    store = TrustStore(root) if round_of is None else round_of
    return store.admit(opened.release, files_of(opened.manifest), now, __version__, first, purpose)


def staged(opened: BundleFile, root: Path) -> Bundle:
    """The bundle, unpacked under ``root`` beside the current one; where it is there and whole, nothing is written.

    The folder is named after the bundle id: a bundle of the same content, whatever its name, takes no second one.

    Raises:
        BundleDamaged: See `open_bundle`.
        UsageError: ``root`` is a link, or other users can write it.
    """
    check_own_folder(root)
    name = opened.manifest.bundle_id[:24]
    raw = dump_manifest(opened.manifest)
    if opened.release is not None and (root / name / MANIFEST).exists():
        if read_regular(root / name / MANIFEST) != raw:  # exported again: the signatures are about its new time
            name = f"{name}-{sha256_of(raw)[:8]}"
        elif release_in(root / name) != opened.release:  # both that one and the one before are of this bundle
            write_atomic(root / name / RELEASE, opened.release)
    folder = root / name
    with contextlib.suppress(BundleError):
        if (bundle := open_folder(folder)).id == opened.manifest.bundle_id:
            return bundle
    if not remove_folder(folder, BUNDLE_FOLDER):
        # What is in the way is not ours to remove, so the bundle goes beside it.
        folder = root / f"{name}-{secrets.token_hex(4)}"
    unpack(opened.path, folder)
    return open_folder(folder)


def switch(
    bundle: Bundle, root: Path, member: Member | None = None, first: Envelope | None = None, keep: int = 2
) -> None:
    """Make a `staged` bundle the current one, and count its release; of those before, ``keep`` - 1 stay.

    ``first``: the root that it was `admitted` by where nothing was trusted; it is trusted from now on.
    """
    store = TrustStore(root)
    name = bundle.folder.name
    if first is not None:
        store.anchor(first)
    if member is not None:
        store.record(member)
    names = [name, *(other for other in _history(root) if other != name)][: max(keep, 1)]
    write_json(root / _POINTER, {"bundles": names})
    remove_unused(root)


def remove_unused(root: Path) -> None:
    """Remove what is unpacked under ``root`` and neither current nor kept: refused bundles, and what a crash left.

    Folders that this program has not made stay, and a warning names them.

    Raises:
        StateError: The record of the bundles to keep cannot be read.
        UsageError: ``root`` is a link, or other users can write it.
    """
    check_own_folder(root)
    if not root.is_dir():
        return
    names = _history(root)
    for other in root.iterdir():
        if other.is_dir() and not other.is_symlink() and other.name not in names:
            remove_folder(other, BUNDLE_FOLDER)


def current(root: Path) -> Bundle | None:
    """Return the bundle in use under ``root``, verified; None where none was installed.

    Raises:
        BundleDamaged: The current bundle is damaged; `rollback` or `install` replaces it.
    """
    names = _history(root)
    return open_folder(root / names[0]) if names else None


def current_manifest(root: Path) -> Manifest | None:
    """What the bundle in use under ``root`` says of itself, its files not looked at; None where none was installed.

    Raises:
        BundleError: The manifest of the current bundle cannot be read.
    """
    name = next(iter(_history(root)), None)
    return None if name is None else _manifest_in(root / name)


def current_origin(root: Path) -> dict[str, Any] | None:
    """`origin` of the bundle in use under ``root``, whose signatures were verified when it was installed.

    Raises:
        BundleError: The manifest or the signatures of the current bundle cannot be read.
    """
    if (name := next(iter(_history(root)), None)) is None:
        return None
    raw = release_in(root / name)
    release = None if raw is None else read(Release, parse(Member, raw, "release").release, "release")
    return origin(_manifest_in(root / name), release)


def manifests(root: Path) -> list[Manifest]:
    """Return what the bundles under ``root`` say of themselves, the one in use first; their files are not looked at.

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
    """Return the bundle that was in use before, made current again; ``check`` may refuse it first by raising.

    Raises:
        StateError: No earlier bundle is kept.
        BundleDamaged: The earlier bundle is damaged; the current one stays.
    """
    names = _history(root)
    if len(names) < 2:
        raise StateError(f"{root}: no earlier bundle to roll back to; {len(names)} installed")
    bundle = open_folder(root / names[1])
    if check is not None:
        check(bundle)
    write_json(root / _POINTER, {"bundles": names[1:]})
    return bundle


def _history(root: Path) -> list[str]:
    content = read_json(root / _POINTER)
    names = [] if content is None else content.get("bundles")
    if not isinstance(names, list) or not all(isinstance(n, str) and n.replace("-", "").isalnum() for n in names):
        raise StateError(
            f"{root / _POINTER}: expected a list of folder names under 'bundles'; remove it and install again"
        )
    return [name for name in names if (root / name).is_dir()]


def _manifest_in(folder: Path) -> Manifest:
    return parse_manifest(read_part(folder / MANIFEST, MAX_MANIFEST_BYTES + 1), str(folder))
