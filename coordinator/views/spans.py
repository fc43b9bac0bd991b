"""A run as spans of a trace, worked out from its journal entries: the run, its rounds, and the phases of each.

Ids are hashes of the run's id, so a coordinator that is restarted continues its trace, and a second look agrees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from ..journal.entries import (
    BundleExported,
    RoundClosed,
    RoundOpened,
    RunCancelled,
    RunFailed,
    RunFinished,
    RunRequested,
    RunStarted,
    UpdateAccepted,
    UpdateRefused,
)
from ..journal.kinds import FINAL
from ..journal.store import Entry

Attribute = str | int | float


@dataclass(frozen=True)
class Span:
    """A span that has ended. ``trace``: 32 hexadecimal digits; ``id`` and ``parent``: 16; ``parent``: "" for none."""

    trace: str
    id: str
    parent: str
    name: str
    begin: datetime
    end: datetime
    attributes: dict[str, Attribute] = field(default_factory=dict)
    error: str = ""
    """Why it failed; empty: it did not."""


def spans_of(entries: Sequence[Entry]) -> Iterator[Span]:
    """Yield the spans that have ended, of the entries of one run in order; the run's own comes last."""
    if entries:
        run = _Run(entries[0])
        for entry in entries:
            yield from run.after(entry)


@dataclass
class _Round:
    number: int
    opened: datetime
    cohort: int
    attempts: int = 1
    rejected: int = 0
    last_update: datetime | None = None


class _Run:
    """A run as far as its entries were read."""

    def __init__(self, request: Entry) -> None:
        self._id = str(request.run)
        self._known: dict[str, Attribute] = {"headwater.run": str(request.run)}
        fact = request.fact
        if isinstance(fact, RunRequested):
            self._id = self._id if fact.id is None else fact.id
            given = fact.model_dump(include={"method", "rounds"}, exclude_unset=True)
            self._known |= {f"headwater.{name}": value for name, value in given.items()}
        self._requested = self._at = moment(request)
        self._round: _Round | None = None

    def after(self, entry: Entry) -> Iterator[Span]:
        """Yield the spans that end with this entry."""
        at = moment(entry)
        is_open = self._round
        fact = entry.fact
        if isinstance(fact, RoundOpened):
            if is_open is None:
                self._round = _Round(entry.round or 0, at, len(fact.cohort))
            else:
                is_open.attempts += 1
        elif is_open is not None and isinstance(fact, UpdateAccepted | UpdateRefused):
            is_open.last_update = at
            is_open.rejected += isinstance(fact, UpdateRefused)
        elif is_open is not None and isinstance(fact, RoundClosed):
            yield from self._closed(is_open, at, fact)
            self._round = None
            self._at = at
        elif isinstance(fact, RunStarted | BundleExported):
            name = "queue" if isinstance(fact, RunStarted) else "export"
            yield self._made(name, self._digits("run"), self._at, at, str(entry.round or ""))
            self._at = at
        elif isinstance(fact, RunFinished | RunFailed | RunCancelled):
            status = FINAL[entry.kind]
            error = "" if isinstance(fact, RunFinished) else fact.reason or status
            yield self._made("run", "", self._requested, at, error=error, status=status)

    def _closed(self, closed: _Round, end: datetime, fact: RoundClosed) -> Iterator[Span]:
        about = str(closed.number)
        own = self._digits("round", about)
        clients = fact.clients or 0
        begin = closed.opened - timedelta(seconds=float(fact.waiting_s or 0))
        collected = closed.last_update or closed.opened
        yield self._made("members", own, begin, closed.opened, about, round=closed.number)
        yield self._made("updates", own, closed.opened, collected, about, round=closed.number, cohort=closed.cohort)
        yield self._made("aggregate", own, collected, end, about, round=closed.number, clients=clients)
        yield self._made(
            "round",
            self._digits("run"),
            begin,
            end,
            about,
            round=closed.number,
            attempts=closed.attempts,
            cohort=closed.cohort,
            clients=clients,
            rejected=closed.rejected,
            late=len(fact.late or ()),
            received_bytes=fact.bytes_up or 0,
            sent_bytes=fact.bytes_down or 0,
        )

    def _made(
        self,
        name: str,
        parent: str,
        begin: datetime,
        end: datetime,
        about: str = "",
        error: str = "",
        **more: Attribute,
    ) -> Span:
        attributes = self._known | {f"headwater.{key}": value for key, value in more.items()}
        trace = self._digits("trace", count=32)
        own = self._digits(name, about)
        return Span(trace, own, parent, name, min(begin, end), end, attributes, error)

    def _digits(self, name: str, about: str = "", count: int = 16) -> str:
        return hashlib.sha256(f"{self._id} {name} {about}".encode()).hexdigest()[:count]


def moment(entry: Entry) -> datetime:
    """Return when the entry was written, by the wall clock."""
    return datetime.fromisoformat(entry.at)
