"""The table of agents: search, filter, sort, and pages by key, so that a page never skips or repeats an agent.

A page begins after the agent that the one before ended with, and not at a number: agents come and go meanwhile.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any
from urllib.parse import urlencode

from edge_agent.core.errors import UsageError

from ..state.fleet_rows import PRESENT, AgentRow
from ..state.noise import Compared, classify_mean_gain

PAGE_ROWS = 50

STATES: dict[str, int] = {
    name: order
    for order, name in enumerate(
        ("fault", "stalled", "refused", "revoked", "offline", "not heard", "unknown", "online")
    )
}
"""State -> its order: those first that somebody should look at."""

SORTS: dict[str, Callable[[AgentRow], Any]] = {
    "id": lambda row: row.id,
    "state": lambda row: STATES.get(row.state, len(STATES)),
    "tier": lambda row: row.tier,
    "seen": lambda row: row.seen_at,
    "version": lambda row: row.software,
    "bundle": lambda row: row.release if row.release is not None else (None if not row.bundle_id else 0),
    "local": lambda row: row.local,
    "global": lambda row: row.shared,
    "personal": lambda row: row.personal,
    "gain": lambda row: row.gain,
    "memory": lambda row: row.rss_mb,
}
"""Column -> what it is sorted by; None comes last in either direction."""

SHOWN: dict[str, tuple[str, Callable[[AgentRow], bool]]] = {
    "all": ("all", lambda _: True),
    "online": ("online", lambda row: row.state in PRESENT),
    "offline": ("offline", lambda row: row.state in {"offline", "not heard", "unknown"}),
    "fault": ("with a fault", lambda row: row.fault is not None or row.state in {"fault", "stalled"}),
    "notes": ("with a note", lambda row: bool(row.notes) or row.fault is not None),
    "alone": ("better off alone", lambda row: row.better_alone),
    "pinned": ("pinned", lambda row: row.pinned is not None),
    "refused": ("kept out", lambda row: row.state == "refused"),
    "revoked": ("revoked", lambda row: row.state == "revoked"),
}
"""Filter -> its name, and the agents that pass."""


@dataclass(frozen=True)
class Query:
    """What is asked for by the address of the page."""

    find: str = ""
    only: str = "all"
    tier: str = ""
    sort: str = "state"
    descending: bool = False
    after: str = ""
    """Key of the agent that the page comes after, or with ``back`` before; empty: the first page."""

    back: bool = False

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Query:
        """The query in an address.

        Raises:
            UsageError: a parameter is none of those that there are.
        """
        query = cls(
            find=parameters.get("find", "").strip()[:200],
            only=parameters.get("only", "all"),
            tier=parameters.get("tier", ""),
            sort=parameters.get("sort", "state"),
            descending=parameters.get("order") == "desc",
            after=parameters.get("after", ""),
            back="back" in parameters,
        )
        for what, value, known in (("sort", query.sort, SORTS), ("only", query.only, SHOWN)):
            if value not in known:
                raise UsageError(f"{what}={value[:40]} is unknown; expected one of {', '.join(known)}")
        if query.tier not in {"", "train", "head"}:
            raise UsageError(f"tier={query.tier[:40]} is unknown; expected train or head")
        return query

    def address(self, **changes: Any) -> str:
        """The address of the page with these changes."""
        one = replace(self, **changes)
        values = {
            "find": one.find,
            "only": one.only if one.only != "all" else "",
            "tier": one.tier,
            "sort": one.sort if one.sort != "state" else "",
            "order": "desc" if one.descending else "",
            "after": one.after,
            "back": "1" if one.back and one.after else "",
        }
        return "?" + urlencode({name: value for name, value in values.items() if value})


@dataclass(frozen=True)
class Page:
    """One page of a query."""

    rows: Sequence[AgentRow]
    first: int
    """Number of its first row, from 1; 0: there is none."""

    selected: int
    previous: str
    """Address of the page before; empty: there is none."""

    following: str


def page_of(agents: Iterable[AgentRow], query: Query, size: int = PAGE_ROWS) -> Page:
    """The page of a query.

    Raises:
        UsageError: ``after`` is no key of a row.
    """
    passes = SHOWN[query.only][1]
    find = query.find.casefold()
    chosen = [
        row
        for row in agents
        if passes(row) and (not find or find in row.id.casefold()) and (not query.tier or row.tier == query.tier)
    ]
    value = SORTS[query.sort]
    known = [row for row in chosen if value(row) is not None]
    unknown = [row for row in chosen if value(row) is None]
    known.sort(key=lambda row: row.id)
    known.sort(key=value, reverse=query.descending)
    rows = [*known, *sorted(unknown, key=lambda row: row.id)]
    start = 0
    if query.after:
        start = _position(rows, len(known), query)
        start = max(0, start - size) if query.back else start
    shown = rows[start : start + size]
    previous = query.address(after=_key(shown[0], query), back=True) if start and shown else ""
    if start and not shown:  # the agents of this page have gone
        previous = query.address(after="", back=False)
    following = query.address(after=_key(shown[-1], query), back=False) if start + size < len(rows) else ""
    return Page(shown, start + 1 if shown else 0, len(rows), previous, following)


def totals(agents: Sequence[AgentRow]) -> dict[str, Any]:
    """Counts and means over all agents."""
    states = Counter(row.state for row in agents)
    result: dict[str, Any] = {name: states.get(name, 0) for name in STATES}
    result["present"] = result["online"] + result["fault"] + result["stalled"]
    result["faulty"] = sum(SHOWN["fault"][1](row) for row in agents)
    result["agents"] = len(agents)
    result["pinned"] = sum(row.pinned is not None for row in agents)
    result["better_alone"] = sum(row.better_alone for row in agents)
    for scope, name in (("local", "local"), ("global", "shared"), ("personal", "personal"), ("gain", "gain")):
        values = [value for row in agents if (value := getattr(row, name)) is not None]
        result[f"mean_{scope}"] = fmean(values) if values else None
        result[f"with_{scope}"] = len(values)
    result["gain_kind"] = classify_mean_gain(
        Compared(row.local, row.personal, row.support)
        for row in agents
        if row.local is not None and row.personal is not None and row.support
    )
    return result


def _key(row: AgentRow, query: Query) -> str:
    return json.dumps([SORTS[query.sort](row), row.id], separators=(",", ":"))


def _position(rows: Sequence[AgentRow], known: int, query: Query) -> int:
    """The index of the first row after the key, or of the key's own row (or its successor) for the page before it."""
    value = SORTS[query.sort]

    def is_before(row: AgentRow) -> bool:
        mine = value(row)
        if mine == wanted:
            return row.id < agent or (not query.back and row.id == agent)
        return bool(mine > wanted if query.descending else mine < wanted)

    try:
        wanted, agent = json.loads(query.after)
        agent = str(agent)
        return sum(map(is_before, rows[:known])) if wanted is not None else known + sum(map(is_before, rows[known:]))
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError("this address names no page of this table; begin at its first page") from error
