"""Files on disk that survive crashes: each is written beside its place, synced and moved there, so none is torn."""

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
"""The name of the folder of keys and certificates in a state folder, on both sides."""

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
        """Note that the bytes of an open file have yet to reach the disk; the caller may close the file.

        At most `MOST_PENDING_FILES` stay open: beyond that the oldest one is synced here.
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
        """Note that the names of the files in a folder have yet to reach the disk."""
        with self._lock:
            self._folders.add(folder)

    def finish(self) -> None:
        """Wait until everything is on the disk: files first, then the names that were given to them.

        Raises:
            OSError: A file or folder cannot be synced; no sync is retried.
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
        """Forget all files and folders without syncing them, because they are no longer needed."""
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
"""The way in which files reach the disk here: at once (True), not waited for (False), or noted for later."""


@contextlib.contextmanager
def syncs_into(pending: PendingSyncs) -> Iterator[None]:
    """Note syncs in ``pending`` inside the block instead of waiting for the disk, unless `without_syncs` holds."""
    way = pending if is_synced() else False
    token = _syncs.set(way)
    try:
        yield
    finally:
        _syncs.reset(token)


@contextlib.contextmanager
def without_syncs(folder: Path | None = None) -> Iterator[None]:
    """Do not wait for the disk inside the block: files survive a kill of this process, but not a power cut.

    It is for work that is cheap to repeat, such as simulations; a device never uses it. At the end all files below
    ``folder`` are synced, whichever process wrote them.
    """
    token = _syncs.set(False)
    try:
        yield
    finally:
        _syncs.reset(token)
        if folder is not None and is_synced():
            _sync_below(folder)


def _sync_below(folder: Path) -> None:
    """Wait until a folder and all files and folders below it are on the disk; links are not followed to files."""
    for path in [folder, *folder.rglob("*")]:
        with contextlib.suppress(PermissionError, FileNotFoundError):
            is_own_file = path.is_file() and not path.is_symlink()
            if path.is_dir() or is_own_file:
                _sync_path(path)


def _sync_path(path: Path) -> None:
    """Wait until a file or folder is on the disk; one that this user may not open is left out."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_synced() -> bool:
    """Return whether files are synced in this context, at once or when `PendingSyncs` are finished."""
    return _syncs.get() is not False


def sync(descriptor: int) -> None:
    """Wait until an open file's bytes are on the disk, or note them for later, as this context demands."""
    mode = _syncs.get()
    if isinstance(mode, PendingSyncs):
        mode.add(descriptor)
    elif mode:
        os.fsync(descriptor)


class Access(NamedTuple):
    """Owner, group and mode bits of a file, which decide who may use it."""

    uid: int
    gid: int
    mode: int

    @classmethod
    def private(cls) -> Access:
        """Return access for no one but the user that runs this process."""
        if hasattr(os, "getuid"):
            return cls(os.getuid(), os.getgid(), 0o600)
        return cls(0, 0, 0o600)

    @classmethod
    def private_in(cls, folder: Path) -> Access:
        """Return access for the user that runs this process alone; if that is root, for the owner of ``folder``."""
        access = cls.private()
        if access.uid:
            return access
        return access_of(folder)._replace(mode=access.mode)


def access_of(path: Path) -> Access:
    """Return owner, group and mode bits of the file or folder at ``path``."""
    status = path.stat()
    return Access(status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode))


def write_atomic(path: Path, *data: bytes | memoryview, durable: bool = True, access: Access | None = None) -> None:
    """Write the pieces of ``data`` to ``path`` so that a crash at any moment leaves the old file or the new one.

    Args:
        path: The file; missing folders above it are made.
        data: Pieces that are written one after another.
        durable: Sync the file. Without, readers still never see a torn file, but a power cut may lose the new one:
            for caches whose contents are verified when read.
        access: Owner, group and mode that the file gets before it holds a byte.

    Raises:
        OSError: The file cannot be written, because the disk is full for example, or there is a FIFO, socket or device
            at the path; what was there stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _refuse_special(path)
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


def _refuse_special(path: Path) -> None:
    """Require that there is no FIFO, socket or device at a path.

    A new file would replace it: root could replace /dev/null for all programs.

    Raises:
        OSError: There is one.
    """
    try:
        mode = path.stat().st_mode
    except OSError:  # there is nothing yet, or the error appears again when the file is written
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is a FIFO, socket or device, expected a regular file", str(path))


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only one user may read, as by `write_atomic`, into a folder of that user alone.

    A file that root writes into the state folder of a program belongs to the user that the program runs as.
    """
    private_folder(path.parent)
    write_atomic(path, content, access=Access.private_in(path.parent))


def private_folder(folder: Path) -> None:
    """Make a folder for its owner alone unless it exists; one that root makes belongs to the owner of its parent."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        owner = Access.private_in(path.parent)
        if owner.uid != access_of(path).uid:
            os.chown(path, owner.uid, owner.gid, follow_symlinks=False)
    if access_of(folder).mode & 0o077:
        folder.chmod(0o700)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to errors of the system inside the block that name no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _opened_for(path: Path, access: Access) -> BinaryIO:
    """Return a new file, open for writing, that no one else may use until it has the access demanded."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if hasattr(os, "fchown"):
            status = os.fstat(descriptor)
            if (status.st_uid, status.st_gid) != access[:2]:
                os.fchown(descriptor, access.uid, access.gid)
            os.fchmod(descriptor, access.mode)
        return os.fdopen(descriptor, "wb")
    except BaseException:
        os.close(descriptor)
        raise


def check_writable(folder: Path) -> None:
    """Require that files can be made in ``folder``, which need not exist yet; nothing is left behind.

    It is for paths from the command line, before the work whose result is written there.

    Raises:
        UsageError: No file can be made in the folder.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
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
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


_TEMPORARY = re.compile(r"\.(.+\.)?([0-9a-f]{8}|[0-9]+)(\.onnx)?\.tmp")
"""The pattern of the names of temporary files of `write_atomic`, `check_writable` and the encoder's cache."""


def sweep(folder: Path) -> int:
    """Remove the temporary files that a power cut or a kill left below ``folder``, and return their number.

    Only the holder of the folder's lock may do so: no other process may be writing there.
    """
    temporary = [path for path in folder.rglob(".*.tmp") if _TEMPORARY.fullmatch(path.name)]
    leftovers = [path for path in temporary if path.is_file() and not path.is_symlink()]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)


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
    """Return the paths that still exist by the time of their last change, the oldest first.

    Paths may vanish at any moment: another thread or process may share the folder.
    """
    dated = []
    for path in paths:
        with contextlib.suppress(OSError):
            dated.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(dated)]


def size_of(path: Path) -> int:
    """Return the bytes that a file, or all files below a folder, take on the disk; 0 where there is none."""
    total = 0
    for entry in (path, *path.rglob("*")):
        with contextlib.suppress(OSError):
            status = entry.stat()
            if stat.S_ISDIR(status.st_mode):
                continue
            if hasattr(status, "st_blocks"):
                total += status.st_blocks * 512
            else:
                total += status.st_size
    return total


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut; a folder that cannot be opened is left as it is."""
    mode = _syncs.get()
    if isinstance(mode, PendingSyncs):
        mode.add_folder(folder)
    elif mode:
        _sync_path(folder)


def write_json(path: Path, content: Mapping[str, Any], *, durable: bool = True) -> None:
    """Write a JSON object to a file, as by `write_atomic`."""
    write_atomic(path, json.dumps(content, indent=1, sort_keys=True, allow_nan=False).encode(), durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object at ``path``; None where there is no file.

    Raises:
        StateError: The file exists and does not hold a JSON object.
    """
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(f"{path}: cannot be read: {cause(error)}; remove it to start afresh") from error
    if not isinstance(content, dict):
        raise StateError(f"{path}: holds {type(content).__name__}, expected a JSON object; remove it to start afresh")
    return content


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file.

    Raises:
        ConfigError: The file cannot be read, or is not TOML.
    """
    try:
        content: dict[str, Any] = tomllib.loads(read_regular(path).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"cannot be read: {cause(error)}"]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), [f"is not TOML: {error}"]) from error
    return content


def read_record(path: Path, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record at ``path`` if it was made under the same conditions; empty otherwise, or if it is damaged."""
    try:
        record = read_json(path) or {}
    except StateError:
        return {}
    if record.get("on") != conditions:
        return {}
    return record


def write_record(path: Path, conditions: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Write a record of measurements, which can be repeated; a folder that cannot be written gets no record."""
    with contextlib.suppress(OSError):
        write_json(path, {"on": conditions, **content}, durable=False)


def write_tensors(
    path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None, *, durable: bool = True
) -> str:
    """Write named arrays to a file, as by `write_atomic`, without a copy, and return the file's SHA-256 (hex)."""
    from ..wire.tensors import pieces

    data = pieces(tensors, metadata)
    write_atomic(path, *data, durable=durable)
    return sha256_of(*data)


def sha256_of(*data: bytes | memoryview) -> str:
    """Return the SHA-256 (hex) of pieces of data, one after another."""
    digest = hashlib.sha256()
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


def read_tensors(path: Path) -> Tensors:
    """Return the named arrays in a file, read-only.

    Raises:
        StateError: The file cannot be read.
        TensorsError: The file is not a valid tensor container.
    """
    from ..wire.tensors import decode

    try:
        return decode(read_regular(path))
    except OSError as error:
        raise StateError(f"{path}: cannot be read: {cause(error)}") from error


def mapped(path: Path) -> memoryview:
    """Return the bytes of a file as a memory map."""
    with open_regular(path) as file:
        if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def sha256_file(path: Path) -> str:
    """Return the SHA-256 (hex) of a file's content."""
    with open_regular(path) as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
