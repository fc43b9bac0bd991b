"""The columns of the fleet's table: declared once, shown by ``headwater agents``, its ``--json`` and the web view.

A new column is one more `Column` in `COLUMNS`. What no agent has yet begins in `service.status.AgentStatus`,
`fleet_rows.HeardAgent.from_body` and `fleet_rows.AgentRow`. How values look is known of the shapes that each of the
three already shows. The pages of a single agent, ``headwater agents NAME`` and ``agent.html``, and ``/metrics`` list
what they show by themselves.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from .fleet_rows import AgentRow

Value = Any
"""What a cell holds: text, a number, a truth value, or an object of its own class; None: not known."""


class Shape(enum.Enum):
    """How the values of a column look; terminal and page have a form for each."""

    AGENT = "agent"
    """The agent's id, with a mark where somebody should look at it."""

    PRESENCE = "presence"
    TEXT = "text"
    SEEN = "seen"
    """Seconds since the agent was heard."""

    BUNDLE = "bundle"
    SHARE = "share"
    """A share, 0..1."""

    GAIN = "gain"
    """A difference of shares, with its grade."""

    MEMORY = "memory"
    """Megabytes."""

    NUMBER = "number"
    FAULT = "fault"
    DETAIL = "detail"
    """JSON that no table shows."""


NUMERIC = frozenset({Shape.SHARE, Shape.GAIN, Shape.MEMORY, Shape.NUMBER})
"""Shapes of columns that are aligned to the right."""

LAST = 100


@dataclass(frozen=True)
class Column:
    """One fact of each agent, and where it is shown."""

    name: str
    """Its key in the address of the page's table, and in this list."""

    value: Callable[[AgentRow], Value]
    shape: Shape = Shape.TEXT
    json: tuple[str, ...] = ()
    """The keys to it in an agent of ``headwater agents --json``; empty: it is not there.

    What the terminal shows or sorts by is in the JSON as well, so a column with `terminal` or `option` needs them.
    """

    terminal: str = ""
    """Its title in ``headwater agents``, where columns of text come before those of numbers; empty: it is not there."""

    page: str = ""
    """Its title on the page of the fleet; empty: it is not there."""

    page_index: int = LAST
    """Its order on the page: columns with lower numbers come first."""

    option: str = ""
    """Its name in ``--sort`` of ``headwater agents``; empty: it is not there."""

    page_order: Callable[[AgentRow], Any] | None = None
    """What the page sorts by; None: the value."""

    to_json: Callable[[Any], JsonValue] | None = None
    """Makes JSON of a value that is known; None: the value is JSON itself."""

    def __post_init__(self) -> None:
        """Check that the JSON has the values that the terminal shows or sorts by.

        Raises:
            ValueError: It does not.
        """
        if (self.terminal or self.option) and not self.json:
            raise ValueError(f"column '{self.name}' is on the terminal, and --json has no keys for it: give json=")

    @property
    def is_numeric(self) -> bool:
        """Whether it is aligned to the right."""
        return self.shape in NUMERIC

    @property
    def sort_value(self) -> Callable[[AgentRow], Any]:
        """What the page sorts by, of a row."""
        return self.page_order or self.value


def _bundle_order(row: AgentRow) -> int | None:
    """Return the number of the release of a bundle, 0 for one that was not released; None: it runs no bundle."""
    if row.release is not None:
        return row.release
    return 0 if row.bundle_id else None


COLUMNS: tuple[Column, ...] = (
    Column(
        "id", lambda row: row.id, Shape.AGENT, json=("id",), terminal="agent", page="agent", page_index=0, option="name"
    ),
    Column(
        "state",
        lambda row: row.presence.value,
        Shape.PRESENCE,
        json=("state",),
        terminal="state",
        page="state",
        page_index=1,
        option="state",
        page_order=lambda row: row.presence.order,
    ),
    Column(
        "tier",
        lambda row: row.tier or None,
        Shape.TEXT,
        json=("tier",),
        terminal="tier",
        page="tier",
        page_index=6,
        option="tier",
        page_order=lambda row: row.tier,
    ),
    Column("transport", lambda row: row.transport or None, Shape.TEXT, json=("transport",)),
    Column(
        "seen",
        lambda row: row.silent_s,
        Shape.SEEN,
        json=("last_seen_s",),
        terminal="seen",
        page="last seen",
        page_index=7,
        option="last-seen",
        page_order=lambda row: row.seen_at,
    ),
    Column(
        "version",
        lambda row: row.software or None,
        Shape.TEXT,
        json=("software",),
        terminal="version",
        page="version",
        page_index=8,
        option="version",
        page_order=lambda row: row.software,
    ),
    Column(
        "bundle",
        lambda row: row.bundle_id or None,
        Shape.BUNDLE,
        json=("bundle_id",),
        terminal="bundle",
        page="bundle",
        page_index=9,
        option="bundle",
        page_order=_bundle_order,
    ),
    Column("samples", lambda row: row.samples, Shape.NUMBER, json=("samples",)),
    Column("head", lambda row: row.head or None, Shape.TEXT, json=("head",)),
    Column(
        "local",
        lambda row: row.local,
        Shape.SHARE,
        json=("acc", "local"),
        terminal="acc.\nlocal",
        page="alone",
        page_index=4,
        option="acc.local",
    ),
    Column(
        "global",
        lambda row: row.shared,
        Shape.SHARE,
        json=("acc", "global"),
        terminal="acc.\nglobal",
        page="shared",
        page_index=5,
        option="acc.global",
    ),
    Column(
        "personal",
        lambda row: row.personal,
        Shape.SHARE,
        json=("acc", "personal"),
        terminal="acc.\npersonal",
        page="personal",
        page_index=3,
        option="acc.personal",
    ),
    Column("gain", lambda row: row.gain, Shape.GAIN, page="gain", page_index=2),
    Column("better_alone", lambda row: row.better_alone, Shape.DETAIL, json=("better_alone",)),
    Column(
        "candidate",
        lambda row: row.candidate,
        Shape.DETAIL,
        json=("candidate",),
        to_json=lambda candidate: candidate.body(),
    ),
    Column(
        "memory",
        lambda row: row.rss_mb,
        Shape.MEMORY,
        json=("rss_mb",),
        terminal="MB",
        page="memory",
        page_index=10,
        option="memory",
    ),
    Column(
        "fault",
        lambda row: row.fault,
        Shape.FAULT,
        json=("fault",),
        terminal="last fault",
        to_json=lambda fault: fault.to_json(),
    ),
    Column("inputs", lambda row: row.inputs_since, Shape.DETAIL, json=("inputs_since",)),
    Column("relay", lambda row: row.relay, Shape.DETAIL, json=("relay",)),
    Column("notes", lambda row: list(row.notes), Shape.DETAIL, json=("notes",)),
)
"""All columns in the order of the keys in JSON."""


def page_columns() -> list[Column]:
    """Return the columns of the page of the fleet, in their order there."""
    return sorted((column for column in COLUMNS if column.page), key=lambda column: column.page_index)


def terminal_columns() -> list[Column]:
    """Return the columns of ``headwater agents``: those of text, then those of numbers."""
    shown = [column for column in COLUMNS if column.terminal]
    return sorted(shown, key=lambda column: column.is_numeric)


def to_json(row: AgentRow) -> dict[str, Any]:
    """Return an agent as ``headwater agents --json`` prints it; nothing else reads it."""
    result: dict[str, Any] = {}
    for column in COLUMNS:
        holder = result
        for key in column.json[:-1]:
            holder = holder.setdefault(key, {})
        if column.json:
            value = column.value(row)
            if value is not None and column.to_json is not None:
                value = column.to_json(value)
            holder[column.json[-1]] = value
    return result
