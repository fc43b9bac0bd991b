"""Where the journal of a state folder is: in the folder, or in a database that ``journal.json`` names.

The file has the URL of the database, without a password, and the id of the journal. So every command that is given the
folder alone reads the right journal, and a database with another journal is refused.

A folder gets its database once, by `use_database`: a new folder an empty one, and one with a journal of SQLite too,
whose entries are carried over. Until the file is written the old journal counts. A kill between the two leaves both,
and the next call completes it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from edge_agent.core.errors import StateError
from edge_agent.core.locks import folder_lock, private_files
from edge_agent.core.storage import read_json, write_json

from ..journal.schemes import mistakes_in, shared_journal_at
from ..journal.sqlite import SqliteJournal
from ..journal.store import Journal, SharedJournal

NAME = "journal.json"
SQLITE = "journal.db"
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
    content = read_json(folder / NAME)
    if content is None:
        return None
    url = content.get("url")
    journal_id = content.get("id")
    if not isinstance(url, str) or not isinstance(journal_id, str) or mistakes_in(url):
        raise StateError(
            f"{folder / NAME}: damaged, expected the url and the id of a journal; put it back from a copy, or remove "
            "it and start the coordinator with 'journal' in its configuration"
        )
    return JournalLocation(url, journal_id)


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
        StateError: It has the journal of another state folder, or a coordinator works in the folder whose journal is to
            be carried over.
    """
    if url is None:
        return
    location = read_location(folder)
    if location is not None and location.url == url:
        return
    if location is not None:
        # The database has moved to another address: it must be the same one.
        with contextlib.closing(shared_journal_at(url, location.id).open(create=False)):
            _write(folder, url, location.id)
        return
    if (folder / SQLITE).exists():
        _carry_over(folder, url)
        return
    with contextlib.closing(_opened(url)) as journal:
        if journal.last_id():
            raise _is_of_another(journal, folder)
        _write(folder, url, journal.id)


def _opened(url: str) -> SharedJournal:
    journal = shared_journal_at(url)
    journal.open()
    return journal


def _write(folder: Path, url: str, journal_id: str) -> None:
    with private_files():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / NAME, {"url": url, "id": journal_id})


def _carry_over(folder: Path, url: str) -> None:
    """Carry the entries of a folder's journal over to a database.

    Raises:
        StateError: See `use_database`.
    """
    with (
        folder_lock(folder, "headwater, which moves the journal"),
        contextlib.closing(SqliteJournal(folder / SQLITE).open(create=False)) as before,
        contextlib.closing(_opened(url)) as journal,
    ):
        before.verify()
        # Entries that are there are those of a move that was killed, or of somebody else.
        if journal.last_id() == 0:
            journal.fill(before.rows())
        elif (journal.last_id(), journal.first_hash()) != (before.last_id(), before.first_hash()):
            raise _is_of_another(journal, folder)
        _write(folder, url, journal.id)
    (folder / SQLITE).replace(folder / MOVED)


def _is_of_another(journal: SharedJournal, folder: Path) -> StateError:
    return StateError(
        f"{journal.location}: this database has the journal of another state folder than {folder}, with "
        f"{journal.last_id()} entries; give the folder that belongs to it, which coordinators with one database share, "
        "or an empty database"
    )
