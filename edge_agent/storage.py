"""What a side keeps on disk. A file is written beside its place, synced, and moved there: old or new, never torn."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import mmap
import os
import re
import secrets
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TextIO

from .errors import ConfigError, StateError, UsageError, cause, remedy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from .task import Tensors

log = logging.getLogger(__name__)

LOCK_PAUSES_S = (0.02, 0.05, 0.1)

IDENTITY = "identity"
"""Folder of keys and certificates in a state folder, on both sides."""


MOST_PENDING_FILES = 64
"""The number of files that `PendingSyncs` keeps open, far below the 1,024 that many systems allow a process."""


class PendingSyncs:
    """Files and folders that have yet to reach the disk, so that all of them are waited for together by `finish`."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self._folders: set[Path] = set()
        self._failure: OSError | None = None
        """Why a file that was waited for before `finish` could not be written."""

        self._lock = threading.Lock()

    def add(self, descriptor: int) -> None:
        """Note the bytes of an open file, which may be closed meanwhile.

        At most `MOST_PENDING_FILES` stay open: the oldest of more is waited for here.
        """
        with self._lock:
            self._files.append(os.dup(descriptor))
            if len(self._files) <= MOST_PENDING_FILES:
                return
            oldest = self._files.pop(0)
            try:
                os.fsync(oldest)
            except OSError as error:  # it is raised by `finish`, before anything that depends on the file is written
                self._failure = error
            finally:
                os.close(oldest)

    def add_folder(self, folder: Path) -> None:
        """The names of the files in a folder."""
        with self._lock:
            self._folders.add(folder)

    def finish(self) -> None:
        """Wait until everything is on the disk: files first, then the names that they have got.

        Raises:
            OSError: something cannot be written; nothing of it is tried again.
        """
        files, folders, failure = self._take_pending()
        try:
            if failure is not None:
                raise failure
            for descriptor in files:
                os.fsync(descriptor)
            for folder in folders:
                _sync_path(folder)
        finally:
            for descriptor in files:
                os.close(descriptor)

    def discard(self) -> None:
        """Wait for nothing: what was to be on the disk is not needed any more."""
        files, _, _ = self._take_pending()
        for descriptor in files:
            os.close(descriptor)

    def _take_pending(self) -> tuple[list[int], set[Path], OSError | None]:
        """Return all files and folders that wait to be synced, and the first error; the lists are empty afterwards."""
        with self._lock:
            files = self._files
            folders = self._folders
            failure = self._failure
            self._files = []
            self._folders = set()
            self._failure = None
        return files, folders, failure


_syncs: ContextVar[bool | PendingSyncs] = ContextVar("syncs", default=True)


@contextlib.contextmanager
def syncs_into(pending: PendingSyncs) -> Iterator[None]:
    """Inside, what would wait for the disk is left to ``pending``, unless nothing waits at all (`without_syncs`)."""
    token = _syncs.set(pending if is_synced() else False)
    try:
        yield
    finally:
        _syncs.reset(token)


@contextlib.contextmanager
def without_syncs(folder: Path | None = None) -> Iterator[None]:
    """Inside, nothing waits for the disk: what is written survives a kill of this process, but no power cut.

    For work that is cheap to do again, such as simulations; a device never works so. At the end all files below
    ``folder`` are synced, whichever process wrote them.
    """
    token = _syncs.set(False)
    try:
        yield
    finally:
        _syncs.reset(token)
        if folder is not None and is_synced():
            for path in [folder, *folder.rglob("*")]:
                with contextlib.suppress(PermissionError, FileNotFoundError):
                    if path.is_dir() or (path.is_file() and not path.is_symlink()):
                        _sync_path(path)


def _sync_path(path: Path) -> None:
    with contextlib.suppress(PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_synced() -> bool:
    """Whether files are to survive a power cut from the moment that they are written, or that `PendingSyncs` end."""
    return _syncs.get() is not False


def sync(descriptor: int) -> None:
    """Wait until an open file's bytes are on the disk, unless nothing waits for it now (`without_syncs`)."""
    mode = _syncs.get()
    if isinstance(mode, PendingSyncs):
        mode.add(descriptor)
    elif mode:
        os.fsync(descriptor)


class Access(NamedTuple):
    """Who may use a file: owner, group and mode bits."""

    uid: int
    gid: int
    mode: int

    @classmethod
    def private(cls) -> Access:
        """The user that runs this process alone."""
        return cls(os.getuid(), os.getgid(), 0o600) if hasattr(os, "getuid") else cls(0, 0, 0o600)

    @classmethod
    def private_in(cls, folder: Path) -> Access:
        """The user that runs this process alone; of root's files, the owner of ``folder``."""
        own = cls.private()
        return own if own.uid else access_of(folder)._replace(mode=own.mode)


def access_of(path: Path) -> Access:
    """Owner, group and mode bits of the file or folder at ``path``."""
    result = path.stat()
    return Access(result.st_uid, result.st_gid, stat.S_IMODE(result.st_mode))


def write_atomic(path: Path, *data: bytes | memoryview, durable: bool = True, access: Access | None = None) -> None:
    """Put the pieces of ``data`` at ``path`` so that a crash at any moment leaves the old file or the new one.

    ``durable=False`` skips the syncs: still never torn for readers, but a power cut may lose the new file. Meant for
    caches whose contents are verified when read. With ``access`` the file has that owner, group and mode before it
    holds a byte. Raises OSError when the disk is full; the old file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with naming(path), temporary.open("wb") if access is None else _opened_for(temporary, access) as file:
            file.writelines(data)
            if durable:
                file.flush()
                sync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_private(path: Path, content: bytes) -> None:
    """`write_atomic` of a file that one user alone reads, in a `private_folder`.

    What root writes into the state folder of a program belongs to the user that the program runs as.
    """
    private_folder(path.parent)
    write_atomic(path, content, access=Access.private_in(path.parent))


def private_folder(folder: Path) -> None:
    """Make a folder where there is none, for its owner alone; what root makes belongs to the owner of its parent."""
    for made in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        made.mkdir(exist_ok=True)
        owner = Access.private_in(made.parent)
        if owner.uid != access_of(made).uid:
            os.chown(made, owner.uid, owner.gid, follow_symlinks=False)
    if access_of(folder).mode & 0o077:
        folder.chmod(0o700)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, errors of the system that name no file name ``path``: of a full disk it does not say which file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _opened_for(path: Path, access: Access) -> BinaryIO:
    """A new file that its maker alone may use until it has the owner, group and mode of ``access``."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if hasattr(os, "fchown"):
            made = os.fstat(descriptor)
            if (made.st_uid, made.st_gid) != access[:2]:
                os.fchown(descriptor, access.uid, access.gid)
            os.fchmod(descriptor, access.mode)
        return os.fdopen(descriptor, "wb")
    except BaseException:
        os.close(descriptor)
        raise


def check_writable(folder: Path) -> None:
    """Return quietly when files can be made in ``folder``, which need not be there yet; nothing is left behind.

    Raises:
        UsageError: they cannot; meant for paths from the command line, before the work whose result is written there.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{secrets.token_hex(4)}.tmp"
        try:
            probe.write_bytes(b"1")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        advice = remedy(error) or "name another folder"
        raise UsageError(f"{folder}: no file can be written there: {cause(error)}; {advice}") from error
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


_TEMPORARY = re.compile(r"\.(.+\.)?([0-9a-f]{8}|[0-9]+)(\.onnx)?\.tmp")
"""Names of the temporary files of `write_atomic`, `check_writable` and the encoder's cache."""


def sweep(folder: Path) -> int:
    """Remove the temporary files that a power cut or a kill left below ``folder``; returns how many there were.

    Only for the holder of the folder's lock: no other process may be writing there.
    """
    left = [
        path
        for path in folder.rglob(".*.tmp")
        if _TEMPORARY.fullmatch(path.name) and path.is_file() and not path.is_symlink()
    ]
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)


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


def open_regular(path: Path) -> BinaryIO:
    """Open a file that a user names for reading, without waiting: opening a FIFO would wait for a writer.

    Raises:
        OSError: The path cannot be opened, or is not a regular file; links to one are followed.
    """
    if os.name == "nt":  # pragma: no cover - there are no such files
        return path.open("rb")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a FIFO, socket or device, expected a regular file", str(path))


def read_regular(path: Path, most_bytes: int | None = None) -> bytes:
    """Return the bytes of a file that a user names, at most ``most_bytes``; see `open_regular`.

    Raises:
        OSError: As `open_regular`.
    """
    with open_regular(path) as file:
        return file.read() if most_bytes is None else file.read(most_bytes)


def read_regular_text(path: Path, encoding: str = "utf-8") -> str:
    """Return the text of a file that a user names, with line feeds as line ends; see `open_regular`.

    Raises:
        OSError: As `open_regular`.
        UnicodeDecodeError: The file is not in this encoding.
    """
    with io.TextIOWrapper(open_regular(path), encoding=encoding) as file:
        return file.read()


def oldest_first(paths: Iterable[Path]) -> list[Path]:
    """The files and folders that are still there, the one last written to at the end.

    One may go at any moment: another thread or process may share the folder.
    """
    dated = []
    for path in paths:
        with contextlib.suppress(OSError):
            dated.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(dated)]


def size_of(path: Path) -> int:
    """Bytes that a file, or all files below a folder, take on the disk; 0 where there is none."""
    total = 0
    for one in (path, *path.rglob("*")):
        with contextlib.suppress(OSError):
            status = one.stat()
            if stat.S_ISDIR(status.st_mode):
                continue
            total += status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size
    return total


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut (nothing to do where folders cannot be opened)."""
    mode = _syncs.get()
    if isinstance(mode, PendingSyncs):
        mode.add_folder(folder)
    elif mode:
        _sync_path(folder)


def write_json(path: Path, content: Mapping[str, Any], *, durable: bool = True) -> None:
    """`write_atomic` of a JSON object."""
    write_atomic(path, json.dumps(content, indent=1, sort_keys=True, allow_nan=False).encode(), durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object at ``path``; None where there is no file.

    Raises:
        StateError: the file is there and is not a JSON object.
    """
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(f"{path}: cannot be read: {cause(error)}; remove it to start afresh") from error
    if not isinstance(content, dict):
        raise StateError(f"{path}: holds {type(content).__name__}, expected an object; remove it to start afresh")
    return content


def read_toml(path: Path) -> dict[str, Any]:
    """Contents of a TOML file.

    Raises:
        ConfigError: the file cannot be read or is not TOML.
    """
    try:
        content: dict[str, Any] = tomllib.loads(read_regular(path).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"cannot be read: {cause(error)}"]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), [f"is not TOML: {error}"]) from error
    return content


def read_record(path: Path, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """What was recorded at ``path`` under the same conditions; empty where there is nothing, or it is damaged."""
    try:
        record = read_json(path) or {}
    except StateError:
        return {}
    return record if record.get("on") == conditions else {}


def write_record(path: Path, conditions: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Record what can be measured again; in a folder that cannot be written nothing is recorded."""
    with contextlib.suppress(OSError):
        write_json(path, {"on": conditions, **content}, durable=False)


def write_tensors(
    path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None, *, durable: bool = True
) -> str:
    """`write_atomic` of named arrays, without a copy of them; returns the SHA-256 (hex) of the file."""
    from .wire.tensors import pieces

    data = pieces(tensors, metadata)
    write_atomic(path, *data, durable=durable)
    return sha256_of(*data)


def sha256_of(*data: bytes | memoryview) -> str:
    """SHA-256 (hex) of pieces, one after another."""
    digest = hashlib.sha256()
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


def read_tensors(path: Path) -> Tensors:
    """Named arrays from a file, read-only.

    Raises:
        StateError: no such file.
        TensorsError: the file is damaged.
    """
    from .wire.tensors import decode

    try:
        return decode(read_regular(path))
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {cause(error)}") from error


def mapped(path: Path) -> memoryview:
    """The bytes of a file, mapped instead of read."""
    with open_regular(path) as file:
        if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def sha256_file(path: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    with open_regular(path) as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class HeldLock:
    """The lock of a folder that this process holds."""

    path: Path
    _descriptor: int

    def is_held(self) -> bool:
        """Whether the lock is still that of the folder: another process may have removed it (`remove_lock`)."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except FileNotFoundError:
            return False
        except OSError:  # a file system that does not answer now
            return True


_umask_lock = threading.Lock()
_umasks: list[int] = []
"""The umask from before `private_files`, once for each that is entered."""


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Inside, files and folders that this process and its children make are for this user alone (0600, 0700)."""
    with _umask_lock:
        _umasks.append(os.umask(0o077) if not _umasks else _umasks[0])
    try:
        yield
    finally:
        with _umask_lock:
            before = _umasks.pop()
            if not _umasks:
                os.umask(before)


@contextlib.contextmanager
def folder_lock(folder: Path, owner: str) -> Iterator[HeldLock]:
    """Hold a state folder for one process; the lock goes with the process, also when it is killed.

    The folder is for this user alone, and so is everything that the process writes while it holds it.

    Raises:
        StateError: another live process holds it.
        UsageError: it is a link, has a link to a folder in it, or others can write it.
    """
    with private_files(), shared_folder_lock(folder, owner, private=True) as held:
        yield held


@contextlib.contextmanager
def shared_folder_lock(folder: Path, owner: str, *, private: bool = False) -> Iterator[HeldLock]:
    """`folder_lock` of a folder that others may read, too: who may is left as it is, unless it is to be ``private``.

    Raises:
        StateError: another process holds it, which the message names, or the folder cannot be written.
    """
    if private:
        check_own_folder(folder)
        _check_links_in(folder)
    for pause_s in (*LOCK_PAUSES_S, None):  # 'edge-agent status' holds the lock for an instant
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if private and stat.S_IMODE(folder.stat().st_mode) & 0o077:
                with contextlib.suppress(PermissionError):  # somebody else's: they decide
                    folder.chmod(0o700)
            file = _open_lock(folder / "lock")
        except OSError as error:
            raise StateError(f"{folder}: cannot be used as a state folder: {cause(error)}; make it writable") from error
        try:
            _lock(file.fileno())
        except OSError as error:
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            file.close()
            if pause_s is None:
                raise StateError(f"{folder} is in use by {holder}; stop it, or choose another state folder") from error
            time.sleep(pause_s)
            continue
        held = HeldLock(folder / "lock", file.fileno())
        if pause_s is None or held.is_held():  # otherwise it was removed between opening and locking
            break
        file.close()
    try:
        with contextlib.suppress(OSError):  # of a full disk: the lock holds without the holder's name
            file.truncate(0)
            os.write(file.fileno(), f"{owner} (process {os.getpid()})".encode())
        yield held
    finally:
        # Closing alone would leave the lock with any child that was just being started and holds a copy of the file.
        with contextlib.suppress(OSError):
            _unlock(file.fileno())
        file.close()


def _open_lock(path: Path) -> TextIO:
    """Open a lock file, and create it where there is none.

    Raises:
        OSError: The file cannot be opened, or the path is a link, a FIFO, or a file with a second name.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o666)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a lock file, or has a second name (hard link); remove it", str(path))
    return os.fdopen(descriptor, "a+", encoding="utf-8")


@dataclass(frozen=True)
class LockHolder:
    """Who holds a folder, as text, and which lock file it holds."""

    name: str
    file: tuple[int, int]
    """Its inode, and when the name was written, in nanoseconds since 1970."""

    def __str__(self) -> str:
        """The name."""
        return self.name


def lock_holder(folder: Path) -> LockHolder | None:
    """Who holds ``folder`` by `folder_lock`; None: nobody does, or the folder is not there.

    Raises:
        OSError: the file system does not answer.
    """
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            holder = LockHolder(file.read(200).strip() or "another process", (status.st_ino, status.st_mtime_ns))
            try:
                _lock(file.fileno())
            except BlockingIOError:
                return holder
            _unlock(file.fileno())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None


def remove_lock(folder: Path, holder: LockHolder) -> bool:
    """Let another process hold ``folder``, although ``holder``, which does not answer, holds it and does not notice.

    False where it is no longer the holder. Only where the holder is prevented from writing by other means, as by
    `coordinator.state.journal`.

    Raises:
        OSError: the file cannot be removed.
    """
    if lock_holder(folder) != holder:
        return False
    (folder / "lock").unlink()
    return True


@contextlib.contextmanager
def waited_lock(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for some milliseconds, waiting for other holders; for commands that change a file in it."""
    if os.name == "nt":  # pragma: no cover - folders cannot be opened there
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


if os.name == "nt":  # pragma: no cover - exercised on Windows only
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]

    def _unlock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined,unused-ignore]
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
