"""A connection to PostgreSQL that answers within a limit, and says in its errors which database they are about.

The URL is one that libpq reads, with every parameter that it knows: several hosts, ``sslmode``, ``passfile``. It holds
no password: that is read from the file that ``passfile`` or PGPASSFILE names, or from PGPASSWORD, by libpq itself.

A network that drops packets ends a connection by the limits of TCP (`_TCP`), and a peer that takes bytes and never
answers by `ANSWER_S`, which psycopg has no parameter for.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from edge_agent.core.errors import JournalAway, MissingCapability, StateError

if TYPE_CHECKING:
    import psycopg

ANSWER_S = 10.0
"""Seconds after which a statement without an answer ends its connection; they take milliseconds."""

CONNECT_S = 3
"""Seconds in which a host answers, of each of several; libpq takes whole ones, and at least 2."""

LOCK_MS = 5_000
"""Milliseconds that a statement waits for another writer before it is tried again; less than `ANSWER_S`."""

IDLE_MS = 5_000
"""Milliseconds after which the server ends a transaction of a process that was suspended within it."""

_TCP = {"keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": 3, "tcp_user_timeout": 5_000}
"""Seconds, and milliseconds, after which the kernel ends a connection whose packets are not acknowledged."""


class Database:
    """The place of a database: where it is, and how to connect to it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __str__(self) -> str:
        """Return the URL without its parameters and without a password, for messages."""
        parts = urlsplit(self.url)
        return parts._replace(netloc=_without_password(parts.netloc), query="", fragment="").geturl()

    def connect(self, name: str, *, answer_s: float = ANSWER_S) -> psycopg.Connection[dict[str, Any]]:
        """Return a connection that is named ``name`` in the server's list of sessions, with rows as dictionaries.

        Args:
            name: The name of the session, at most 63 characters.
            answer_s: Seconds that a statement may take.

        Raises:
            JournalAway: The server does not answer, or does not let this process in.
            MissingCapability: psycopg is not installed.
        """
        try:
            import psycopg
            from psycopg.rows import dict_row
        except ImportError as error:
            raise MissingCapability.package("psycopg", "postgres", "a journal in PostgreSQL") from error

        class Limited(psycopg.Connection[dict[str, Any]]):
            """A connection whose statements end after `answer_s`."""

            def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
                return super().wait(_limited(gen, answer_s), *args, **options)

        try:
            connection = Limited.connect(
                self.url,
                autocommit=True,
                row_factory=dict_row,
                application_name=name,
                connect_timeout=CONNECT_S,
                **self._defaults(),
            )
        except psycopg.ProgrammingError as error:
            raise self.failure(error) from error
        except psycopg.Error as error:
            raise self.away(error) from error
        try:
            connection.execute(f"SET client_encoding = 'UTF8'; SET lock_timeout = {LOCK_MS}")
            connection.execute(f"SET idle_in_transaction_session_timeout = {IDLE_MS}")
            # A server may be told to show a transaction what there was when it began. Writers wait for each other, and
            # look after that at what the one before has left.
            connection.execute("SET default_transaction_isolation = 'read committed'")
            # A server may be told to lose what it has committed, for speed.
            connection.execute(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
        except psycopg.Error as error:
            connection.close()
            raise self.away(error) from error
        return connection

    def _defaults(self) -> dict[str, Any]:
        """Return the parameters of libpq that the URL does not name itself."""
        parameters = dict[str, Any](_TCP)
        # Of several hosts, the one that takes entries: after a failover it is another one than before.
        parameters["target_session_attrs"] = "read-write"
        named_in_url = parse_qs(urlsplit(self.url).query)
        return {key: value for key, value in parameters.items() if key not in named_in_url}

    def away(self, error: object) -> JournalAway:
        """Return the error of a database that cannot be reached, with the words of the database."""
        return JournalAway(
            f"{self}: the database of the journal cannot be reached ({first_line(error)}); start it, or correct "
            "'journal' and the password in the file that 'passfile' or PGPASSFILE names"
        )

    def failure(self, error: object) -> StateError:
        """Return the error of a database that answers, and refuses, with the words of the database."""
        return StateError(
            f"{self}: the journal cannot be read or written ({first_line(error)}). Give the role of the URL the rights "
            "to create and write tables in the database, and the database room; nothing was changed"
        )


def database_errors() -> tuple[type[Exception], ...]:
    """Return the errors of psycopg; none where it is not installed, because nothing is connected then."""
    try:
        import psycopg
    except ImportError:
        return ()
    return (psycopg.Error,)


def first_line(error: object) -> str:
    """Return the first line of an error of the database, below which a statement and its values may be."""
    return (str(error).strip().splitlines() or ["no reason was given"])[0]


def has_password(url: str) -> bool:
    """Return whether a URL holds a password, before its host or as a parameter."""
    parts = urlsplit(url)
    return _without_password(parts.netloc) != parts.netloc or "password" in parse_qs(parts.query)


def _without_password(address: str) -> str:
    user, at, hosts = address.rpartition("@")
    return f"{user.partition(':')[0]}{at}{hosts}"


def _limited(steps: Generator[Any, Any, Any], limit_s: float) -> Generator[Any, Any, Any]:
    """Yield what the steps of a statement wait for, until they end, or for ``limit_s`` seconds.

    psycopg sends 0 for an interval in which nothing has arrived.

    Raises:
        psycopg.OperationalError: The limit has passed.
    """
    import psycopg

    until = time.monotonic() + limit_s
    try:
        awaited = next(steps)
        while True:
            ready = yield awaited
            if not ready and time.monotonic() > until:
                raise psycopg.OperationalError(f"no answer within {limit_s:g} s")
            awaited = steps.send(ready)
    except StopIteration as end:
        return end.value
