"""The rows of the fleet for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from edge_agent.core.time_and_text import show_time

from ..identity.revoked import revoked_agents
from ..journal.store import utc_now
from ..state.fleet_columns import COLUMNS, Column, Shape, terminal_columns
from ..state.fleet_rows import AgentRow, FleetFacts, HeardAgent
from ..state.fleet_rows import rows_of as fleet_rows
from ..state.status_file import Status, read_agents, read_status
from ..state.store import StateFolder
from ..views.fleet import REPORTS, reported_by
from ..views.releases import book_of
from .follow import is_serving
from .output import table

NO_AGENTS = (
    "no agents have been heard; 'edge-agent run' starts one, 'edge-agent doctor --config FILE' says what keeps it away"
)

SORT_KEYS = tuple(column.option for column in COLUMNS if column.option)
"""What a table of agents can be sorted by: the columns with a name on the command line."""

if TYPE_CHECKING:
    SortKey = str
else:  # a type of these names, of which the help lists the values
    SortKey = Literal.__getitem__(SORT_KEYS)


def rows_of(folder: StateFolder) -> list[AgentRow]:
    """Return all known agents: heard since the coordinator's start, kept out lately, or with results."""
    status = read_status(folder.path)
    now = utc_now()
    book = book_of(folder.journal)
    facts = FleetFacts(
        {row.agent.id: row.agent for row in read_agents(folder.path)},
        reported_by(folder.journal.newest_of(*REPORTS), book),
        book,
        refused={refused.id: refused.why for refused in status.refused if refused.id},
        revoked=revoked_agents(folder.path),
        is_serving=is_serving(folder.path),
        now=now,
    )
    age_s = 0.0 if facts.is_serving else status_age_s(status, now)
    rows = fleet_rows(facts)
    for row in rows:
        row.silent_s = None if row.silent_s is None else row.silent_s + age_s
    return rows


def status_age_s(status: Status, now: datetime) -> float:
    """Return how many seconds ago the coordinator wrote its status; 0 where it says no time."""
    return max(0.0, status.age_s(now) or 0.0)


def sort_key(by: SortKey | None) -> Callable[[AgentRow], tuple[Any, ...]]:
    """Return a key for `sorted`: by default problems first; accuracies from the worst, unknown ones last."""
    if by is None:
        return lambda row: (not row.has_problem, row.id)
    column = next(column for column in COLUMNS if column.option == by)

    def key(row: AgentRow) -> tuple[Any, ...]:
        value = column.value(row)
        if column.shape is Shape.MEMORY and value is not None:
            value = -value  # the most first
        return (value is None, "" if value is None else value, row.id)

    return key


def table_of(rows: list[AgentRow], title: str) -> Table:
    """Return the table of these agents, one line for each."""
    columns = terminal_columns()
    cells = [[_cell(row, column) for column in columns] for row in rows]
    texts = sum(not column.is_numeric for column in columns)
    return table(title, [column.terminal for column in columns], cells, left=texts)


def _cell(row: AgentRow, column: Column) -> object:
    """Return what the table shows of an agent in a column."""
    value = column.value(row)
    if column.shape is Shape.AGENT:
        return f"{value} *" if row.has_problem else value
    if column.shape is Shape.SEEN:
        return ago(value)
    if column.shape is Shape.BUNDLE:
        return (value or "")[:8]
    if column.shape is Shape.MEMORY:
        return None if value is None else f"{value:.0f}"
    if column.shape is Shape.FAULT:
        return value.error if value else None
    return value


def ago(seconds: float | None) -> str | None:
    """Return how long ago something was, in few letters."""
    if seconds is None:
        return None
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def notes_of(agent: AgentRow | HeardAgent) -> Iterator[str]:
    """Yield why an agent failed and what to do about it, then its other notes."""
    fault = agent.fault
    if fault is not None:
        yield f"{fault.error}: {fault.message}; {fault.remedy} (at {show_time(fault.at)})"
    yield from agent.notes
