"""Folders that this program has made: each carries a mark, and nothing without one is ever removed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_agent.core.storage import write_json

from .errors import UsageError, cause

log = logging.getLogger(__name__)


# --- folders that are ours, and their removal ------------------------------------------------------------------------
#
# A folder that this program will remove again gets a mark when it is made. Only `remove_folder` removes a folder with
# its content. It opens the folder, reads the mark through the descriptor, and removes by that descriptor. So neither a
# link nor a folder that is put there meanwhile can lead it elsewhere. A folder without a mark stays, and a warning
# names it, unless it is recognised as one that an earlier version made.

MARK = ".headwater-folder.json"
"""File in each folder that may be removed: what the folder is, its name, and a SHA-256 of both."""


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder that is made to be removed later."""

    name: str
    """The kind as the mark has it, in words."""

    is_earlier: Callable[[Path], bool] | None = None
    """Tells whether an earlier version made a folder without a mark; None: earlier versions made no such folders."""


def holds_only(folder: Path, names: re.Pattern[str]) -> bool:
    """Return whether ``folder`` has entries, all of them have one of these names, and none is a link."""
    entries = list(os.scandir(folder))
    if not entries:
        return False
    return all(names.fullmatch(entry.name) and not entry.is_symlink() for entry in entries)


def make_folder(folder: Path, kind: FolderKind) -> None:
    """Make a folder that `remove_folder` may remove, or mark an empty one; a folder with content is left unmarked."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        if folder.is_symlink() or any(folder.iterdir()):
            return
    mark_folder(folder, kind, folder.name)


def mark_folder(folder: Path, kind: FolderKind, name: str) -> None:
    """Mark a folder that was just made as one of this ``kind``, which is, or will be, called ``name``."""
    write_json(folder / MARK, _mark(kind, name), durable=False)


def _mark(kind: FolderKind, name: str) -> dict[str, str]:
    """Return the content of the mark of a folder of that kind and name."""
    digest = hashlib.sha256(f"headwater folder\n{kind.name}\n{name}".encode()).hexdigest()
    return {"kind": kind.name, "folder": name, "sha256": digest}


def remove_folder(folder: Path, kind: FolderKind) -> bool:
    """Remove a folder of this kind that this program has made, with everything below it.

    No link is followed: neither in place of the folder or its parent, nor below it. Nothing is removed where another
    file system is mounted below it. A folder that this program has not made stays, and a warning in the log names it.

    Returns:
        Whether the folder is gone, also where it did not exist.
    """
    try:
        with _open_folder(folder.parent, None) as parent, _open_folder(folder, parent) as opened:
            if not _is_ours(folder, opened, kind):
                log.warning(
                    "folder_not_removed path=%s reason=it was not made by this program; move it elsewhere", folder
                )
                return False
            # A kill during the removal leaves a folder that is still recognised, also one of an earlier version.
            if _read_mark(folder, opened) is None:
                _mark_opened(folder, opened, kind)
            if _has_descriptors():
                _remove_below(opened)
                os.rmdir(folder.name, dir_fd=parent)
            else:  # pragma: no cover - Windows
                shutil.rmtree(folder)
    except FileNotFoundError:
        return True
    except OSError as error:
        log.warning("folder_not_removed path=%s reason=%s", folder, cause(error))
        return False
    return True


def is_own_folder(folder: Path, kind: FolderKind) -> bool:
    """Return whether ``folder`` is a folder of this kind that `remove_folder` would remove."""
    try:
        with _open_folder(folder.parent, None) as parent, _open_folder(folder, parent) as opened:
            return _is_ours(folder, opened, kind)
    except OSError:
        return False


def _has_descriptors() -> bool:
    """Return whether the system can remove files relative to an opened folder."""
    return os.open in os.supports_dir_fd and hasattr(os, "fwalk")


@contextlib.contextmanager
def _open_folder(folder: Path, parent: int | None) -> Iterator[int]:
    """Open a folder that is not a link and yield its descriptor; ``parent``: the descriptor of its parent, if open.

    Raises:
        OSError: The folder is a link, or cannot be opened.
    """
    if parent is None or not _has_descriptors():
        status = folder.lstat()
    else:
        status = os.stat(folder.name, dir_fd=parent, follow_symlinks=False)
    is_service_folder = parent is None and _is_service_folder(folder)
    if stat.S_ISLNK(status.st_mode) and not is_service_folder:
        raise OSError(errno.ELOOP, "it is a symbolic link, and links are not followed", str(folder))
    if not _has_descriptors():  # pragma: no cover - Windows
        yield -1
        return
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if is_service_folder else os.O_NOFOLLOW)
    name = str(folder) if parent is None else folder.name
    descriptor = os.open(name, flags, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_ours(folder: Path, opened: int, kind: FolderKind) -> bool:
    """Return whether this program has made the folder, by its mark or by what earlier versions left in it."""
    mark = _read_mark(folder, opened)
    if mark is not None:
        name = str(mark.get("folder"))
        temporary = re.fullmatch(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}\.tmp", folder.name)
        return (folder.name == name or temporary is not None) and mark == _mark(kind, name)
    if kind.is_earlier is None or not kind.is_earlier(folder):
        return False
    # What was looked at by its path has to be the opened folder: another one may be there now.
    return opened < 0 or os.path.samestat(folder.lstat(), os.fstat(opened))


def _mark_opened(folder: Path, opened: int, kind: FolderKind) -> None:
    """Mark an opened folder that an earlier version made; the mark goes where the descriptor leads, not the path.

    Raises:
        OSError: The mark cannot be written, or something else has its name.
    """
    if opened < 0:  # pragma: no cover - Windows
        mark_folder(folder, kind, folder.name)
        return
    descriptor = os.open(MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=opened)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(_mark(kind, folder.name), file)


def _read_mark(folder: Path, opened: int) -> dict[str, Any] | None:
    """Return the mark in an opened folder; None where there is none, or it cannot be read."""
    try:
        if opened < 0:  # pragma: no cover - Windows
            raw = (folder / MARK).read_bytes()
        else:
            descriptor = os.open(MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=opened)
            with os.fdopen(descriptor, "rb") as file:
                raw = file.read(4096)
        mark = json.loads(raw)
    except (OSError, ValueError, RecursionError):
        return None
    return mark if isinstance(mark, dict) else None


def _remove_below(opened: int) -> None:
    """Remove everything in an opened folder, its mark last.

    Raises:
        OSError: Something cannot be removed. Nothing was removed if another file system is mounted below.
    """
    mount = _mount_of(opened)
    # Look through all folders before anything is removed: a file system that is mounted below must stay whole.
    for _, _, _, descriptor in os.fwalk(".", dir_fd=opened, follow_symlinks=False):
        if _mount_of(descriptor) != mount:
            raise OSError(errno.EXDEV, "another file system is mounted below it; unmount that first")
    for path, folders, files, descriptor in os.fwalk(".", topdown=False, dir_fd=opened, follow_symlinks=False):
        for name in files:
            if path != "." or name != MARK:
                os.unlink(name, dir_fd=descriptor)
        for name in folders:
            # A link to a folder is listed among the folders.
            if stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=descriptor)
            else:
                os.rmdir(name, dir_fd=descriptor)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(MARK, dir_fd=opened)


def _mount_of(descriptor: int) -> tuple[int, int | None]:
    """Return the device of an opened folder and, on Linux, the id of its mount.

    A folder of the same disk that is mounted below by ``mount --bind`` has the same device, and another mount.
    """
    mount = None
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "mnt_id":
                mount = int(value)
    return os.fstat(descriptor).st_dev, mount


def _is_service_folder(folder: Path) -> bool:
    """Return whether ``folder`` is systemd's link for DynamicUser=: owned by root, to ``private/NAME`` beside it."""
    try:
        return folder.lstat().st_uid == 0 and os.readlink(folder) == f"private/{folder.name}"  # noqa: PTH115 - as text
    except OSError:
        return False


def check_own_folder(folder: Path) -> None:
    """Require that a folder may hold state that this program removes again; one that does not exist yet is accepted.

    Raises:
        UsageError: The path is a link or not a folder, or other users can write the folder.
    """
    try:
        status = folder.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if _is_service_folder(folder):
        return
    if stat.S_ISLNK(status.st_mode):
        raise UsageError(
            f"{folder}: a symbolic link, expected a folder of this program's own: files are removed in it; name the "
            f"folder itself ({folder.resolve()}), or mount the other disk there"
        )
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{folder}: not a folder, expected one of this program's own; name another path")
    if not _others_can_write(status) or not any(folder.iterdir()):
        return
    raise UsageError(
        f"{folder}: others can write it (mode {stat.S_IMODE(status.st_mode):o}), expected a folder of one user's own: "
        f"files that they put there would be read as state, and removed; 'chmod go-w {folder}', or name a new folder"
    )


def _check_links_in(folder: Path) -> None:
    """Require that no link in a state folder leads to another folder; a folder that cannot be listed is accepted.

    Files in the folders of a state folder are removed by their names, such as those of blobs. Another program's folder
    may hold files of the same names.

    Raises:
        UsageError: A link leads to a folder.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError:  # the folder is not there yet; if something else is wrong, taking its lock says what
        return
    for path in paths:
        if not path.is_symlink() or not path.is_dir():
            continue
        raise UsageError(
            f"{path}: a symbolic link, expected a folder of this program's own: files are removed in it; move the "
            "folder itself there, or mount the other disk there"
        )


def _others_can_write(status: os.stat_result) -> bool:
    """Return whether a folder can be written by others than its owner and the group of this process."""
    if os.name == "nt":  # pragma: no cover - folders have no such bits there
        return False
    of_everybody = bool(status.st_mode & stat.S_IWOTH)
    of_another_group = bool(status.st_mode & stat.S_IWGRP) and status.st_gid != os.getegid()
    return of_everybody or of_another_group
