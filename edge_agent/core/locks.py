"""Locks of folders, which say who holds them, and files that nobody else may read."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from edge_agent.core.own_folders import _check_links_in, check_own_folder

from .errors import StateError, cause

LOCK_PAUSES_S = (0.02, 0.05, 0.1)
"""Seconds to wait before each new attempt to lock a folder that is in use."""


@dataclass(frozen=True)
class HeldLock:
    """The lock of a folder that this process holds."""

    path: Path
    _descriptor: int

    def is_held(self) -> bool:
        """Return whether the lock is still that of the folder: another process may have removed it (`remove_lock`)."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except FileNotFoundError:
            return False
        except OSError:  # a file system that does not answer now
            return True


_umask_lock = threading.Lock()
"""The lock of `_umasks` and of the umask itself, which all threads of a process share."""

_umasks: list[int] = []
"""The umask from before the first `private_files`, once for each block that is open."""


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Make files and folders for this user alone (0600, 0700) inside the block, in this process and its children."""
    with _umask_lock:
        # Only the first block changes the umask; the last one that ends puts it back.
        before = _umasks[0] if _umasks else os.umask(0o077)
        _umasks.append(before)
    try:
        yield
    finally:
        with _umask_lock:
            before = _umasks.pop()
            if not _umasks:
                os.umask(before)


@contextlib.contextmanager
def folder_lock(folder: Path, owner: str) -> Iterator[HeldLock]:
    """Hold a state folder for this process; the lock ends with the process, also when it is killed.

    The folder is for this user alone, and so is everything that the process writes while it holds it.

    Raises:
        StateError: Another live process holds the folder.
        UsageError: The folder is a link, contains a link to a folder, or can be written by other users.
    """
    with private_files(), shared_folder_lock(folder, owner, private=True) as held:
        yield held


@contextlib.contextmanager
def taken_lock(folder: Path, owner: str) -> Iterator[HeldLock]:
    """Hold a state folder for this process as `folder_lock` does, in the place of whoever holds it.

    That one must be prevented from writing by other means, as in `remove_lock`.

    Raises:
        StateError: The folder cannot be used, or another process holds it again at once.
        UsageError: The folder is a link, contains a link to a folder, or can be written by other users.
    """
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(folder_lock(folder, owner))
        except StateError:
            try:
                holder = lock_holder(folder)
                if holder is not None:
                    remove_lock(folder, holder)
            except OSError as error:
                raise StateError(
                    f"{folder}: the lock of a process that serves no more cannot be removed: {cause(error)}; make the "
                    "folder writable"
                ) from error
            held = stack.enter_context(folder_lock(folder, owner))
        yield held


@contextlib.contextmanager
def shared_folder_lock(folder: Path, owner: str, *, private: bool = False) -> Iterator[HeldLock]:
    """Hold a folder that other users may read, too; only with ``private`` its mode is changed, as by `folder_lock`.

    Raises:
        StateError: Another process, named in the message and as the error's ``holder``, holds the folder, or the folder
            cannot be written.
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
            raise StateError(
                f"{folder}: cannot be used as a state folder: {cause(error)}; make it writable, or name another"
            ) from error
        try:
            _lock(file.fileno())
        except OSError as error:
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            file.close()
            if pause_s is None:
                message = f"{folder} is in use by {holder}; stop it, or choose another state folder"
                raise StateError(message, holder=holder) from error
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
    """The holder of a folder, as text for people, and the lock file that it holds."""

    name: str
    file: tuple[int, int]
    """The inode of the lock file, and when the name was written, in nanoseconds since 1970."""

    def __str__(self) -> str:
        """Return the name of the holder."""
        return self.name


def lock_holder(folder: Path) -> LockHolder | None:
    """Return who holds ``folder`` by `folder_lock`; None if nobody does, or the folder does not exist.

    Raises:
        OSError: The lock file cannot be opened.
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
    """Remove the lock of a holder that does not answer, so that another process can hold ``folder``.

    The holder does not notice. It must be prevented from writing by other means, as by `coordinator.journal`.

    Returns:
        False, with nothing removed, where ``holder`` is no longer the holder.

    Raises:
        OSError: The lock file cannot be removed.
    """
    if lock_holder(folder) != holder:
        return False
    (folder / "lock").unlink()
    return True


@contextlib.contextmanager
def waited_lock(folder: Path, limit_s: float = math.inf) -> Iterator[None]:
    """Hold ``folder`` for some milliseconds, after waiting for other holders: for commands that change a file in it.

    Args:
        folder: An existing folder.
        limit_s: Seconds to wait. Other holders may take long: a command that adds many files, or was suspended.

    Raises:
        TimeoutError: Another program has held the folder for longer.
    """
    if os.name == "nt":  # pragma: no cover - folders cannot be opened there
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if math.isinf(limit_s):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        else:
            _lock_within(descriptor, limit_s)
        yield
    finally:
        os.close(descriptor)


def _lock_within(descriptor: int, limit_s: float) -> None:
    """Lock a folder within so many seconds; there is no call of the system that waits for a lock that long.

    Raises:
        TimeoutError: Another program has held it for longer.
    """
    give_up_at = time.monotonic() + limit_s
    while True:
        try:
            _lock(descriptor)
        except BlockingIOError as error:
            if time.monotonic() >= give_up_at:
                raise TimeoutError(f"another program has held the folder for {limit_s:g} s") from error
            time.sleep(_LOOK_S)
        else:
            return


_LOOK_S = 0.02
"""Seconds between two attempts of `_lock_within`."""

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
