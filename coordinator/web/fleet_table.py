"""The table of agents: search, filter, sort, and pages by key, so that a page never skips or repeats an agent.

A page begins after the agent that the one before ended with, and not at a number: agents come and go meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any
from urllib.parse import urlencode

from edge_agent.core.errors import UsageError

from ..state.fleet_columns import COLUMNS
from ..state.fleet_rows import AgentRow, Presence, describe_inputs
from ..state.noise import Compared, Gain, classify_mean_gain

PAGE_ROWS = 50

SORTS: dict[str, Callable[[AgentRow], Any]] = {column.name: column.sort_value for column in COLUMNS if column.page}
"""Column -> what it is sorted by; None comes last in either direction."""

ABSENT = frozenset({Presence.OFFLINE, Presence.NOT_HEARD, Presence.UNKNOWN})
TROUBLED = frozenset({Presence.FAULT, Presence.STALLED})

SHOWN: dict[str, tuple[str, Callable[[AgentRow], bool]]] = {
    "all": ("all", lambda _: True),
    "online": ("online", lambda row: row.presence.is_there),
    "offline": ("offline", lambda row: row.presence in ABSENT),
    "fault": ("with a fault", lambda row: row.fault is not None or row.presence in TROUBLED),
    "notes": ("with a note", lambda row: bool(row.notes) or row.fault is not None),
    "alone": ("better off alone", lambda row: row.better_alone),
    "pinned": ("pinned", lambda row: row.pinned is not None),
    "refused": ("kept out", lambda row: row.presence is Presence.REFUSED),
    "revoked": ("revoked", lambda row: row.presence is Presence.REVOKED),
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
        """Return the query in an address.

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
        for name, value, choices in (("sort", query.sort, SORTS), ("only", query.only, SHOWN)):
            if value not in choices:
                raise UsageError(f"{name}={value[:40]} is unknown; expected one of {', '.join(choices)}")
        if query.tier not in {"", "train", "head"}:
            raise UsageError(f"tier={query.tier[:40]} is unknown; expected train or head")
        return query

    def takes(self, row: AgentRow) -> bool:
        """Return whether an agent is among those that are asked for, by its id, its tier and the filter."""
        passes = SHOWN[self.only][1]
        has_text = self.find.casefold() in row.id.casefold()
        has_tier = not self.tier or row.tier == self.tier
        return has_text and has_tier and passes(row)

    def address(self, **changes: Any) -> str:
        """Return the address of the page with these changes; what is as by default is left out."""
        query = replace(self, **changes)
        values = {
            "find": query.find,
            "only": "" if query.only == "all" else query.only,
            "tier": query.tier,
            "sort": "" if query.sort == "state" else query.sort,
            "order": "desc" if query.descending else "",
            "after": query.after,
            "back": "1" if query.back and query.after else "",
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
    """Return the page of a query.

    Raises:
        UsageError: ``after`` is no key of a row.
    """
    chosen = [row for row in agents if query.takes(row)]
    # Agents of whom the value is not known come last, in either direction; equals are in the order of their ids.
    value = SORTS[query.sort]
    chosen.sort(key=lambda row: row.id)
    ranked = [row for row in chosen if value(row) is not None]
    unranked = [row for row in chosen if value(row) is None]
    ranked.sort(key=value, reverse=query.descending)
    rows = [*ranked, *unranked]
    # The page begins after the agent that the one before ended with, or ends before the one that it began with.
    start = 0
    if query.after:
        start = _position(rows, len(ranked), query)
        if query.back:
            start = max(0, start - size)
    shown = rows[start : start + size]
    previous = ""
    following = ""
    if start and shown:
        previous = query.address(after=_key(shown[0], query), back=True)
    elif start:  # the agents of this page have gone
        previous = query.address(after="", back=False)
    if start + size < len(rows):
        following = query.address(after=_key(shown[-1], query), back=False)
    return Page(shown, start + 1 if shown else 0, len(rows), previous, following)


@dataclass(frozen=True)
class Mean:
    """The mean of a figure over the agents that have it; None: no agent does."""

    value: float | None
    agents: int

    @classmethod
    def from_values(cls, values: Iterable[float | None]) -> Mean:
        """Return the mean of the values that are known."""
        present = [value for value in values if value is not None]
        return cls(fmean(present) if present else None, len(present))


@dataclass(frozen=True)
class Totals:
    """Counts and means over all agents of a fleet."""

    agents: int
    present: int
    """Agents that can be reached."""

    faulty: int
    refused: int
    pinned: int
    better_alone: int
    local: Mean
    shared: Mean
    personal: Mean
    gain: Mean
    gain_kind: Gain
    """Whether the mean gain is more than noise."""

    inputs: str
    """On how many agents the inputs have changed; empty where none tells it."""

    @classmethod
    def from_rows(cls, rows: Sequence[AgentRow]) -> Totals:
        """Return the counts and means over these agents."""
        is_faulty = SHOWN["fault"][1]
        return cls(
            agents=len(rows),
            present=sum(row.presence.is_there for row in rows),
            faulty=sum(is_faulty(row) for row in rows),
            refused=sum(row.presence is Presence.REFUSED for row in rows),
            pinned=sum(row.pinned is not None for row in rows),
            better_alone=sum(row.better_alone for row in rows),
            local=Mean.from_values(row.local for row in rows),
            shared=Mean.from_values(row.shared for row in rows),
            personal=Mean.from_values(row.personal for row in rows),
            gain=Mean.from_values(row.gain for row in rows),
            gain_kind=classify_mean_gain(_compared(rows)),
            inputs=describe_inputs(row.inputs_since for row in rows),
        )


def _compared(rows: Iterable[AgentRow]) -> Iterator[Compared]:
    """Yield both accuracies of each agent that has both, where the number of its held-out samples is known."""
    for row in rows:
        if row.local is not None and row.personal is not None and row.support:
            yield Compared(row.local, row.personal, row.support)


def _key(row: AgentRow, query: Query) -> str:
    """Return the text by which an address names a row: what the table is sorted by, and its agent."""
    return json.dumps([SORTS[query.sort](row), row.id], separators=(",", ":"))


def _position(rows: Sequence[AgentRow], ranked: int, query: Query) -> int:
    """Return the index of the first row after the key; for the page before, that of the key's row or successor.

    Args:
        rows: The rows in their order: those that have a value first, then those that have none.
        ranked: How many rows have a value.
        query: The query, whose ``after`` is the key.
    """
    value = SORTS[query.sort]

    def is_before(row: AgentRow) -> bool:
        value_of_row = value(row)
        if value_of_row == value_of_key:
            return row.id < agent or (not query.back and row.id == agent)
        return bool(value_of_row > value_of_key if query.descending else value_of_row < value_of_key)

    try:
        value_of_key, agent = json.loads(query.after)
        agent = str(agent)
        if value_of_key is None:
            return ranked + sum(map(is_before, rows[ranked:]))
        return sum(map(is_before, rows[:ranked]))
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError("this address names no page of this table; begin at its first page") from error
