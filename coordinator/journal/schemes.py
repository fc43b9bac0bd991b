"""The stores that a URL names: which class of store is behind which scheme.

Another store that coordinators on several machines reach is one more line of `STORES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from .store import SharedJournal  # the configuration asks for the schemes alone


def _open_postgres(url: str, expected_id: str) -> SharedJournal:
    from .postgres import PostgresJournal

    return PostgresJournal(url, expected_id=expected_id)


STORES: Mapping[str, Callable[[str, str], SharedJournal]] = {
    "postgresql": _open_postgres,
    "postgres": _open_postgres,
}
"""Scheme -> the function that returns a store, not opened, for a URL and the id that it must have (empty: any)."""


def shared_journal_at(url: str, expected_id: str = "") -> SharedJournal:
    """Return the store at a URL, which is not opened yet.

    Args:
        url: A URL in which `mistakes_in` finds none.
        expected_id: The id that the journal has, or gets where there is none yet; empty: any.
    """
    return STORES[urlsplit(url).scheme](url, expected_id)


def mistakes_in(url: str) -> list[str]:
    """Return what is wrong with the URL of a journal, as clauses; none of them repeats a password."""
    from .postgres_connection import has_password

    try:
        parts = urlsplit(url)
    except ValueError as error:
        return [f"is no URL ({error}); expected one like postgresql://coordinator@db.example/headwater"]
    if parts.scheme not in STORES:
        schemes = ", ".join(f"{scheme}://" for scheme in STORES)
        return [f"has the scheme '{parts.scheme[:40]}', expected one of {schemes}; leave 'journal' out for SQLite"]
    mistakes = []
    if has_password(url):
        mistakes.append(
            "holds a password, which logs and pages would show; write it to a file for this user alone (0600, "
            "host:port:database:user:password) and name that with ?passfile=/path, or set PGPASSWORD"
        )
    if not parts.path.strip("/"):
        mistakes.append("names no database; expected one like postgresql://coordinator@db.example/headwater")
    return mistakes
