"""The rows of the fleet for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Literal

from rich.table import Table

from edge_agent.core.time_and_text import show_time

from ..identity.revoked import revoked_agents
from ..journal.store import utc_now
from ..state.fleet_rows import REPORTS, AgentRow, FleetFacts, reported_by
from ..state.fleet_rows import rows_of as fleet_rows
from ..state.history import SCOPES
from ..state.store import StateFolder, read_agents, read_status
from ..views.releases import book_of
from .follow import is_serving
from .output import table

Row = dict[str, Any]
FAULT = ("error", "message", "remedy", "at")

NO_AGENTS = (
    "no agents have been heard; 'edge-agent run' starts one, 'edge-agent doctor --config FILE' says what keeps it away"
)

SortKey = Literal[
    "name", "state", "tier", "last-seen", "version", "bundle", "acc.local", "acc.global", "acc.personal", "memory"
]


def rows_of(folder: StateFolder) -> list[Row]:
    """All agents that are known, as JSON: heard since the coordinator's start, kept out lately, or with results."""
    status = read_status(folder.path)
    now = utc_now()
    refused = [one for one in status.get("refused_agents", ()) if one["id"]]
    book = book_of(folder.journal)
    facts = FleetFacts(
        {one["id"]: one for one in read_agents(folder.path)},
        reported_by(folder.journal.newest_of(*REPORTS), book),
        book,
        refused={one["id"]: {name: str(one[name]) for name in FAULT} for one in refused},
        revoked=revoked_agents(folder.path),
        is_serving=is_serving(folder.path),
        now=now,
    )
    age_s = 0.0 if facts.is_serving else status_age_s(status, now)
    return [_row(one, age_s) for one in fleet_rows(facts)]


def status_age_s(status: dict[str, Any], now: datetime) -> float:
    """How long ago the coordinator wrote its status; 0 where it says no time."""
    return max(0.0, (now - datetime.fromisoformat(status["at"])).total_seconds()) if "at" in status else 0.0


def _row(agent: AgentRow, age_s: float) -> Row:
    return {
        "id": agent.id,
        "state": agent.state,
        "tier": agent.tier or None,
        "transport": agent.transport or None,
        "last_seen_s": None if agent.silent_s is None else agent.silent_s + age_s,
        "software": agent.software or None,
        "bundle_id": agent.bundle_id or None,
        "samples": agent.samples,
        "head": agent.head or None,
        "acc": dict(zip(SCOPES, (agent.local, agent.shared, agent.personal), strict=True)),
        "better_alone": agent.better_alone,
        "candidate": None if agent.candidate is None else agent.candidate.body(),
        "rss_mb": agent.rss_mb,
        "fault": agent.fault,
        "notes": list(agent.notes),
    }


def has_problem(row: Row) -> bool:
    """Whether somebody should look at it."""
    return row["fault"] is not None or bool(row["notes"])


def sort_key(by: SortKey | None) -> Callable[[Row], tuple[Any, ...]]:
    """A key for `sorted`: by default those with a problem first; accuracies from the worst, what is unknown last."""
    fields: dict[SortKey, Callable[[Row], Any]] = {
        "name": lambda row: row["id"],
        "state": lambda row: row["state"],
        "tier": lambda row: row["tier"],
        "last-seen": lambda row: row["last_seen_s"],
        "version": lambda row: row["software"],
        "bundle": lambda row: row["bundle_id"],
        "memory": lambda row: None if row["rss_mb"] is None else -row["rss_mb"],
        "acc.local": lambda row: row["acc"]["local"],
        "acc.global": lambda row: row["acc"]["global"],
        "acc.personal": lambda row: row["acc"]["personal"],
    }
    if by is None:
        return lambda row: (not has_problem(row), row["id"])
    field = fields[by]

    def key(row: Row) -> tuple[Any, ...]:
        value = field(row)
        return (value is None, "" if value is None else value, row["id"])

    return key


def table_of(rows: list[Row], title: str) -> Table:
    """One line for each agent."""
    columns = ("agent", "state", "tier", "seen", "version", "bundle", "last fault")
    numbers = (*(f"acc.\n{scope}" for scope in SCOPES), "MB")
    cells = [
        (
            f"{row['id']}{' *' if has_problem(row) else ''}",
            row["state"],
            row["tier"],
            ago(row["last_seen_s"]),
            row["software"],
            (row["bundle_id"] or "")[:8],
            row["fault"]["error"] if row["fault"] else None,
            *(row["acc"][scope] for scope in SCOPES),
            None if row["rss_mb"] is None else f"{row['rss_mb']:.0f}",
        )
        for row in rows
    ]
    return table(title, (*columns, *numbers), cells, left=len(columns))


def ago(seconds: float | None) -> str | None:
    """How long ago, short."""
    if seconds is None:
        return None
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def notes_of(agent: Row) -> Iterator[str]:
    """Why an agent failed and what to do about it, then its other notes."""
    if fault := agent.get("fault"):
        yield f"{fault['error']}: {fault['message']}; {fault['remedy']} (at {show_time(fault['at'])})"
    yield from agent.get("notes", ())
