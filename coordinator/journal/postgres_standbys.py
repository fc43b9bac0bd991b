"""The coordinators that wait for the lease, as rows of the journal's database: for people, nothing depends on them.

Each writes its row again every second while it waits. A row that is older than `SHOWN_S` by the clock of the
database is of a process that has ended, was suspended, or is cut off: it is not shown, and neither is the holder of the
lease, which has waited before. The table is not logged: after a crash of the database it is empty, and fills again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[dict[str, Any]]

SHOWN_S = 4
"""Seconds after its last note for which a coordinator counts as waiting, by the clock of the database."""

MIGRATION = (
    """CREATE UNLOGGED TABLE headwater_standbys (
        session text PRIMARY KEY,
        name text NOT NULL,
        seen_at timestamptz NOT NULL
    )""",
)
"""The statement that adds the table."""

_NOTE = """
INSERT INTO headwater_standbys (session, name, seen_at) VALUES (%s, %s, clock_timestamp())
ON CONFLICT (session) DO UPDATE SET seen_at = excluded.seen_at"""

_FORGET = f"DELETE FROM headwater_standbys WHERE seen_at < clock_timestamp() - interval '{SHOWN_S} seconds'"  # noqa: S608 - constants

_READ = f"""
SELECT name FROM headwater_standbys
WHERE seen_at >= clock_timestamp() - interval '{SHOWN_S} seconds'
    AND session NOT IN (SELECT session FROM headwater_leases WHERE ended_at IS NULL)
ORDER BY name"""  # noqa: S608 - constants


def note_standby(connection: Connection, session: str, name: str) -> None:
    """Write that a coordinator waits now, and remove the rows of those that do not any more.

    Args:
        connection: A connection outside of any transaction.
        session: The name of its process in the database's list of sessions.
        name: Host and process, as text for people.
    """
    connection.execute(_NOTE, [session, name])
    connection.execute(_FORGET.encode())


def read_standbys(connection: Connection) -> tuple[str, ...]:
    """Return the coordinators that wait now, by their names."""
    rows = connection.execute(_READ.encode()).fetchall()
    return tuple(row["name"] for row in rows)
