"""The fleet as rows: what the status, the journal and the list of revoked certificates say of each agent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from edge_agent.errors import StateError
from edge_agent.moments import shown
from edge_agent.storage import IDENTITY

from ..state.history import SCOPES
from ..state.store import StateFolder, read_agents, read_status
from .output import table

Row = dict[str, Any]

NO_AGENTS = (
    "no agents have been heard; 'edge-agent run' starts one, 'edge-agent doctor --config FILE' says what keeps it away"
)

SortKey = Literal[
    "name", "state", "tier", "last-seen", "version", "bundle", "acc.local", "acc.global", "acc.personal", "memory"
]


def revoked_among(state: Path, agents: Iterable[str]) -> set[str]:
    """Those of these agents that are shut out."""
    folder = state / IDENTITY
    if not (folder / "revoked.json").exists():
        return set()
    from ..identity.ledger import Revoked, is_revoked  # brings pydantic, which takes as long as all the rest

    with contextlib.suppress(StateError, OSError):  # a damaged list costs a word, not the status
        listed_there = set(Revoked.read(folder).agents)
        return {agent for agent in agents if agent in listed_there and is_revoked(folder, agent)}
    return set()


def rows_of(folder: StateFolder) -> list[Row]:
    """All agents that are known: heard since the coordinator's start, refused lately, or in the results of a run."""
    known = {one["id"]: one for one in read_agents(folder.path)}
    refused = {one["id"]: one for one in read_status(folder.path).get("refused_agents", ()) if one["id"]}
    before = folder.journal.newest_of("release_reported")
    names = sorted({*known, *refused, *before})
    revoked = revoked_among(folder.path, names)
    return [_row(name, known.get(name), refused.get(name), before.get(name), name in revoked) for name in names]


def _row(name: str, known: Row | None, refused: Row | None, before: Row | None, is_revoked: bool) -> Row:
    agent, record = known or {}, before or {}
    fault = agent.get("fault")
    if refused is not None and not agent.get("present"):
        fault = {name: refused[name] for name in ("error", "message", "remedy", "at")}
    return {
        "id": name,
        "state": "revoked" if is_revoked else _state(agent, refused),
        "tier": agent.get("tier") or record.get("tier"),
        "transport": agent.get("transport"),
        "last_seen_s": agent.get("silent_s"),
        "software": agent.get("software") or None,
        "bundle_id": agent.get("bundle_id") or record.get("runs") or None,
        "samples": agent.get("samples") or record.get("samples"),
        "head": agent.get("head") or record.get("head") or None,
        "acc": {scope: (agent.get("acc") or record.get("acc") or {}).get(scope) for scope in SCOPES},
        "better_alone": bool(agent.get("better_alone") if agent.get("acc") else record.get("better_alone")),
        "rss_mb": agent.get("rss_mb") or record.get("rss_mb") or None,
        "fault": fault,
        "notes": list(agent.get("notes", ())),
    }


def _state(agent: Row, refused: Row | None) -> str:
    if agent.get("present"):
        return {"fault": "fault", "stalled": "stalled"}.get(str(agent.get("condition")), "online")
    if refused is not None:
        return "refused"
    return "offline" if agent else "not heard"


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
        yield f"{fault['error']}: {fault['message']}; {fault['remedy']} (at {shown(fault['at'])})"
    yield from agent.get("notes", ())
