"""Where the journal of a state folder is: in the folder, or in a database that ``journal.json`` names.

The file has the URL of the database, without a password, and the id of the journal. So every command that is given the
folder alone reads the right journal, and a database with another journal is refused.

A folder gets its database once, by `use_database`: a new folder an empty one, and one with a journal of SQLite too,
whose entries are carried over. Until the file is there the old journal counts; a kill before that is completed by the
next call.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from edge_agent.core.errors import StateError
from edge_agent.core.locks import folder_lock, private_files
from edge_agent.core.storage import read_json, sync_folder, write_json

from ..journal.schemes import mistakes_in, shared_journal_at
from ..journal.sqlite import SqliteJournal
from ..journal.store import Journal, SharedJournal, StoreReport

NAME = "journal.json"
SQLITE = "journal.db"
BEGUN = "journal.begun.json"
"""The same as `NAME`, before the database has the journal."""

MOVED = "journal.db.moved"
"""The journal of SQLite after its entries were carried over; nothing reads it."""


@dataclass(frozen=True)
class JournalLocation:
    """The database with the journal of a state folder."""

    url: str
    """Its URL, without a password."""

    id: str
    """The id of the journal in it."""


def read_location(folder: Path) -> JournalLocation | None:
    """Return the database of a state folder; None: its journal is in the folder.

    Raises:
        StateError: The file that names it is damaged.
    """
    return _read(folder / NAME)


def journal_of(folder: Path, url: str | None = None) -> Journal:
    """Return the journal of a state folder, not opened.

    Args:
        folder: The state folder.
        url: The address by which this process reaches its database; None: the one in the folder.

    Raises:
        StateError: The file that names its database is damaged.
    """
    shared = shared_journal_of(folder, url)
    return SqliteJournal(folder / SQLITE) if shared is None else shared


def shared_journal_of(folder: Path, url: str | None = None) -> SharedJournal | None:
    """Return the journal of a state folder that is in a database, not opened; None: it is in the folder.

    Args:
        folder: The state folder.
        url: The address by which this process reaches the database; None: the one in the folder.

    Raises:
        StateError: The file that names its database is damaged.
    """
    location = read_location(folder)
    if location is None:
        return None
    return shared_journal_at(location.url if url is None else url, location.id)


def examine_database(folder: Path, url: str) -> StoreReport:
    """Look whether `use_database` would accept the database of a configuration, without changing anything.

    Raises:
        JournalAway: It does not answer.
        StateError: It has the journal of another state folder, or cannot be used.
    """
    # A folder whose first start was interrupted knows the id that its journal is to have.
    location = read_location(folder) or _read(folder / BEGUN)
    journal = shared_journal_at(url, "" if location is None else location.id)
    report = journal.examine()
    if location is None and journal.id:
        raise StateError(
            f"{journal.location}: this database has the journal {journal.id[:12]} of another state folder, and "
            f"{folder} has no journal yet: name an empty database, or give the folder that belongs to it"
        )
    return report


def has_journal(folder: Path) -> bool:
    """Return whether a folder is a state folder with a journal, wherever that is."""
    return (folder / SQLITE).is_file() or (folder / NAME).is_file()


def use_database(folder: Path, url: str | None) -> None:
    """Have the journal of a state folder in the database of a configuration, from now on.

    Args:
        folder: The state folder, which may not exist yet.
        url: The URL of the database; None: the configuration names none, and the journal stays where it is.

    Raises:
        JournalAway: The database does not answer.
        StateError: It has the journal of another state folder, or a coordinator works in this one.
    """
    if url is None:
        return
    location = read_location(folder)
    if location is not None and location.url == url:
        return
    if location is not None:
        # The database has moved to another address: it must be the same one.
        with contextlib.closing(shared_journal_at(url, location.id).open(create=False)):
            _write(folder / NAME, JournalLocation(url, location.id))
        return
    with folder_lock(folder, "headwater, which gives the folder its database"):
        # Another coordinator may have been faster.
        if read_location(folder) is None:
            _begin(folder, url)


def _begin(folder: Path, url: str) -> None:
    """Give a locked folder a database without a journal, with the entries that the folder has.

    Raises:
        JournalAway: The database does not answer.
        StateError: It has the journal of another state folder.
    """
    # 1. The folder knows the id of the journal before the database does. So of two folders that are given one database
    # the second one is refused, also before the first entry, and a kill costs nothing but another attempt.
    location = _read(folder / BEGUN)
    journal_id = secrets.token_hex(16) if location is None else location.id
    _write(folder / BEGUN, JournalLocation(url, journal_id))
    # 2. The tables, and the entries of SQLite.
    has_sqlite = (folder / SQLITE).exists()
    with contextlib.closing(shared_journal_at(url, journal_id)) as journal:
        journal.open()
        if has_sqlite:
            _carry_over(folder, journal)
    # 3. From now on the journal is in the database: before its first new entry, also after a power cut, which would
    # else leave a folder whose old journal counts, and a database with other entries.
    (folder / BEGUN).replace(folder / NAME)
    sync_folder(folder)
    if has_sqlite:
        (folder / SQLITE).replace(folder / MOVED)


def _carry_over(folder: Path, journal: SharedJournal) -> None:
    """Carry the entries of a folder's journal over to a database, unless an attempt before has done so.

    Raises:
        StateError: The journal of the folder is damaged, or the database has other entries.
    """
    with contextlib.closing(SqliteJournal(folder / SQLITE).open(create=False)) as before:
        before.verify()
        if journal.last_id() == 0:
            journal.fill(before.rows())
        if (journal.last_id(), journal.first_hash()) != (before.last_id(), before.first_hash()):
            raise StateError(
                f"{journal.location}: this database has {journal.last_id()} entries, and {before.location} has "
                f"{before.last_id()} others; name an empty database"
            )


def _read(file: Path) -> JournalLocation | None:
    """Return the location that a file holds; None: there is no such file.

    Raises:
        StateError: It is damaged.
    """
    content = read_json(file)
    if content is None:
        return None
    url = content.get("url")
    journal_id = content.get("id")
    if not isinstance(url, str) or not isinstance(journal_id, str) or mistakes_in(url):
        raise StateError(
            f"{file}: damaged, expected the url and the id of a journal; put it back from a copy, or remove it and "
            "start the coordinator with 'journal' in its configuration"
        )
    return JournalLocation(url, journal_id)


def _write(file: Path, location: JournalLocation) -> None:
    with private_files():
        write_json(file, {"url": location.url, "id": location.id})
