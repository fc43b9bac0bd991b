"""A consistent copy of a state folder, made while a coordinator works on it.

The journal's snapshot decides what belongs to the copy. Blobs are pinned by hard links as soon as it is taken, because
the end of a round removes those that it no longer needs; only then they are copied and compared with their names.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_agent.core.errors import StateError, UsageError
from edge_agent.core.locks import folder_lock
from edge_agent.core.own_folders import MARK, FolderKind, holds_only, make_folder, remove_folder
from edge_agent.core.storage import (
    IDENTITY,
    Access,
    access_of,
    mapped,
    read_json,
    read_regular,
    sha256_file,
    sha256_of,
    write_atomic,
    write_json,
)

from ..journal.kinds import FINAL
from ..journal.sqlite import SqliteJournal
from ..journal.store import utc_now
from .store import TEMPORARY, StateFolder, blobs_needed

TRIES = 8
"""Snapshots that are taken until one has all of its blobs; a round may end between the two."""

MARKER = "backup.json"
"""Names the journal that a backup is of, from before its first file on: what no backup made is never removed."""

_OWNER = "headwater backup"
_PINS = "backup"
_FOLDERS = ("blobs", "runs", "hosted", IDENTITY)
_APPENDED = ".jsonl"
"""Such files grow in place: a hard link to one would grow, too."""

_LEFT_OUT = ("lock", ".log", ".tmp")
"""Ends of the names of files that a restored folder does without."""

_CACHES = {"cache", "features"}
"""Folders of hosted clients that a restored folder does without."""

_PINNED = re.compile(rf"{'|'.join(_FOLDERS)}|journal\.db(-wal|-shm|-journal)?|\..+\.tmp")


def _is_earlier_pins(folder: Path) -> bool:
    """Return whether an earlier version, when it was killed, left the links of a backup there."""
    return re.fullmatch(r"[0-9a-f]{8}", folder.name) is not None and holds_only(folder, _PINNED)


PINS_FOLDER = FolderKind("pins of a backup", _is_earlier_pins)
"""Links to all files of one backup, while it is made."""


@dataclass(frozen=True)
class Backup:
    """The content of a backup; ``copied_bytes`` are those that an earlier backup in the same folder did not have."""

    entries: int
    runs: int
    blobs: int
    size_bytes: int
    copied_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class BackupFacts:
    """The facts that a folder has about itself as a backup on which nobody has started yet."""

    at: str
    """When it was made, ISO 8601 UTC; empty where that is not known."""

    entries: int
    """Entries of its journal."""

    source: Path | None
    """The state folder that it was made of, on the machine where it was made; None where that is not known."""


def backup_facts(folder: Path) -> BackupFacts | None:
    """Return what a state folder says of the backup that it is; None for one that is none, or was started since."""
    if not (folder / MARKER).exists():
        return None
    try:
        marker = read_json(folder / MARKER) or {}
    except StateError:  # damaged, and still a backup
        marker = {}
    source = marker.get("source")
    entries = marker.get("entries")
    return BackupFacts(
        at=str(marker.get("at") or ""),
        entries=entries if isinstance(entries, int) else 0,
        source=Path(source) if isinstance(source, str) else None,
    )


def back_up(state: StateFolder, target: Path) -> Backup:
    """Copy an opened state folder to ``target``, which is new, empty, or an earlier backup of the same folder.

    The copy is a state folder: a coordinator that starts on it resumes its runs. A kill leaves the earlier backup, or
    one whose marker says that it is incomplete, which the next call completes.

    Raises:
        UsageError: ``target`` holds something else, is inside the state folder, or has it inside.
        StateError: a blob is missing or damaged, or another backup is being made.
        OSError: ``target`` cannot be written.
    """
    target = target.resolve()  # the user's choice, perhaps by a link
    _check_target(state, target)
    pins = state.path / _PINS
    with folder_lock(pins, _OWNER):
        for leftover in pins.iterdir():  # of a backup that was killed
            if leftover.is_dir():
                remove_folder(leftover, PINS_FOLDER)
        pinned = StateFolder(pins / secrets.token_hex(4))
        try:
            _pin(state, pinned)
            with pinned.look():
                entries = pinned.journal.last_id()
                runs = len(pinned.journal.runs())
                first = pinned.journal.first_hash()
            with folder_lock(target, _OWNER):
                _check_target(state, target)  # again: a standby may have taken it over meanwhile
                return _copy(pinned.path, target, first, entries, runs, of=state.path.resolve())
        finally:
            remove_folder(pinned.path, PINS_FOLDER)


def _check_target(state: StateFolder, target: Path) -> None:
    """Require that a backup may be written over what is there.

    Raises:
        UsageError: It may not; the message says what is there.
    """
    source = state.path.resolve()
    folder = target.resolve()
    if folder.is_relative_to(source):
        raise UsageError(f"{target} is inside the state folder; {_ELSEWHERE}")
    if source.is_relative_to(folder):
        raise UsageError(f"{target} is above the state folder; {_ELSEWHERE}")
    if not target.exists() or (target.is_dir() and _is_unused(target)):
        return
    # Without a journal, only a first backup that was killed is completed; its marker names the journal.
    if not (target / "journal.db").is_file():
        if _read_marker(target) == state.journal.first_hash():
            return
        raise UsageError(f"{target} is neither empty nor a backup of this state folder; name a new folder")
    if not _continues(target, state):
        raise UsageError(
            f"{target} holds the journal of another state folder, or one that was continued since; name a new folder"
        )


_ELSEWHERE = "name a folder elsewhere, on another disk if there is one"


def _continues(target: Path, state: StateFolder) -> bool:
    """Return whether the newest entry of an earlier backup is in the journal of a state folder."""
    with SqliteJournal(target / "journal.db") as journal:
        newest = journal.entries(after=journal.last_id() - 1)
    if not newest:
        return True
    same_number = state.journal.entries(after=newest[-1].id - 1)[:1]
    return [entry.hash for entry in same_number] == [entry.hash for entry in newest]


def _is_unused(folder: Path) -> bool:
    """Return whether a folder holds nothing, or only the lock of a backup that was killed before its first file."""
    names = {path.name for path in folder.iterdir() if not TEMPORARY.fullmatch(path.name)}
    if not names:
        return True
    if names != {"lock"}:
        return False
    return (folder / "lock").is_file() and read_regular(folder / "lock")[: len(_OWNER)] in {b"", _OWNER.encode()}


def _read_marker(folder: Path) -> str | None:
    """Return what the marker of a backup says of its journal; None where there is no such marker."""
    try:
        journal = (read_json(folder / MARKER) or {}).get("journal")
    except StateError:  # a file of somebody else
        return None
    return journal if isinstance(journal, str) else None


def _pin(state: StateFolder, pinned: StateFolder) -> None:
    """Make a snapshot of the journal, with links to everything that belongs to it.

    The coordinator works on meanwhile: a blob may go between the snapshot and its link. Then it is tried again.

    Raises:
        StateError: A blob is missing in each of several tries, or rounds end faster than files are linked.
    """
    missing = list[str]()
    for _ in range(TRIES):
        remove_folder(pinned.path, PINS_FOLDER)
        make_folder(pinned.path, PINS_FOLDER)
        pinned.blobs.folder.mkdir(parents=True)
        # 1. Files of runs before the snapshot: figures of rounds that these files lack are restored from it.
        _link_below(state.path, pinned.path, "runs")
        # 2. The snapshot, and what it needs.
        state.journal.copy_to(Path(pinned.journal.location))
        with pinned.look():
            pinned.journal.verify()
            snapshot = pinned.journal.last_id()
            needed = blobs_needed(pinned, blobs=state.blobs)
            ended = [entry.run for entry in pinned.journal.entries(kinds=tuple(FINAL)) if entry.run is not None]
        # 3. The blobs, the files of hosted clients and certificates, and those of runs that have ended since step 1.
        missing = [sha for sha in sorted(needed) if not _link(state.blobs.path(sha), pinned.blobs.path(sha))]
        for folder in ("hosted", IDENTITY):
            _link_below(state.path, pinned.path, folder)
        for run in ended:
            _link_below(state.path, pinned.path, f"runs/{run}")
        # 4. Hosted clients keep their state of two rounds, so they may be one round ahead of the journal.
        rounds_since = len(state.journal.entries(kinds=("round_closed",), after=snapshot))
        has_hosted = (pinned.path / "hosted").is_dir()
        if not missing and not (has_hosted and rounds_since > 1):
            return
    if missing:
        raise StateError(
            f"{state.blobs.path(missing[0])}: missing, and the journal needs it ({len(missing)} blobs in all); put "
            "it back from an earlier backup, or remove the runs that need it with 'headwater prune'"
        )
    raise StateError(f"{state.path}: rounds end faster than hosted clients' files can be copied; try it between runs")


def _link_below(source: Path, target: Path, folder: str) -> None:
    """Link all files below a sub-folder, or copy those that grow in place; newer ones replace those of before."""
    for path in sorted((source / folder).rglob("*")):
        below = path.relative_to(source)
        if path.name.endswith(_LEFT_OUT) or not _CACHES.isdisjoint(below.parts):
            continue
        if path.is_file() and not path.is_symlink():
            other = target / below
            other.unlink(missing_ok=True)
            _link(path, other)


def _link(path: Path, other: Path) -> bool:
    """Make ``other`` a link to a file, or a copy where it grows or there are no links; return False if it is gone."""
    other.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.suffix != _APPENDED and _link_in_place(path, other):
            return True
        shutil.copyfile(path, other)
    except FileNotFoundError:
        return False
    return True


def _link_in_place(path: Path, other: Path) -> bool:
    """Link ``other`` to ``path``; return False where that is not possible: file systems have many codes for it."""
    try:
        os.link(path, other)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True


def _copy(source: Path, target: Path, first: str, entries: int, runs: int, *, of: Path) -> Backup:
    """Copy pinned files in an order in which a kill leaves a backup that is complete, or says that it is not.

    Args:
        source: The folder of pinned files.
        target: The folder of the backup.
        first: The hash of the journal's first entry, which names the journal.
        entries: The number of its entries.
        runs: The number of its runs.
        of: The state folder, where a restore looks for what was revoked after the backup.
    """
    named = {"journal": first, "source": str(of)}
    write_json(target / MARKER, {**named, "is_complete": False})
    pinned = (path for path in source.rglob("*") if path.is_file() and path != source / MARK)
    files = {path.relative_to(source): path for path in pinned}
    journal = files.pop(Path("journal.db"))
    blobs = {path for path in files if path.parts[0] == "blobs"}
    # 1. The blobs come first: the new journal needs them, and the one of an earlier backup does not mind them.
    copied_bytes = 0
    for path in sorted(blobs):
        copied_bytes += _copy_file(files[path], target / path, path.name)
    # 2. The journal. SQLite's files beside the one before would be damage to this one.
    for end in ("-wal", "-shm"):
        (target / f"journal.db{end}").unlink(missing_ok=True)
    copied_bytes += _copy_file(journal, target / "journal.db")
    # 3. Everything else, then what the state folder has no more.
    for path in sorted(files.keys() - blobs):
        copied_bytes += _copy_file(files[path], target / path)
    for folder in _FOLDERS:
        for path in list(_files_below(target / folder)):
            if path.relative_to(target) not in files:
                path.unlink()
    # 4. The marker says that the backup is complete.
    size_bytes = sum(path.stat().st_size for path in (journal, *files.values()))
    result = Backup(entries, runs, len(blobs), size_bytes, copied_bytes)
    figures = {"at": utc_now().isoformat(timespec="seconds"), **result.as_json()}
    write_json(target / MARKER, {**named, "is_complete": True, **figures})
    return result


def _files_below(folder: Path) -> Iterator[Path]:
    """Return the files of a backup below one of its folders; none below a link, which leads out of the backup."""
    if folder.is_symlink():
        return iter(())
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _copy_file(path: Path, other: Path, sha: str = "") -> int:
    """Copy a file, unless the same one is there already, and return the number of bytes that were copied.

    Args:
        path: The file.
        other: The copy.
        sha: The SHA-256 that the content must have; empty: any.

    Raises:
        StateError: The content has another SHA-256.
    """
    data = mapped(path)
    actual = sha256_of(data)
    if sha and actual != sha:
        raise StateError(
            f"blob {sha} is damaged, its SHA-256 is {actual}; put it back from an earlier backup, or remove the runs "
            "that need it with 'headwater prune'"
        )
    if other.is_file() and sha256_file(other) == actual:
        return 0
    write_atomic(other, data, access=Access.private()._replace(mode=access_of(path).mode))  # a key stays private
    return len(data)
