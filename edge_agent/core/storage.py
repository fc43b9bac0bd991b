"""What a side keeps on disk. A file is written beside its place, synced, and moved there: old or new, never torn."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import mmap
import os
import re
import secrets
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from .errors import ConfigError, StateError, UsageError, cause, remedy

if TYPE_CHECKING:
    from .task import Tensors


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


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
    from ..wire.tensors import pieces

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
    from ..wire.tensors import decode

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
