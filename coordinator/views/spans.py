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
            yield from run.add(entry)


@dataclass
class _Round:
    """A round that is open: when it was opened first, and what has come since."""

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
        self._attributes: dict[str, Attribute] = {"headwater.run": str(request.run)}
        """Attributes of all spans of the run."""

        fact = request.fact
        if isinstance(fact, RunRequested):
            self._id = self._id if fact.id is None else fact.id
            settings = fact.model_dump(include={"method", "rounds"}, exclude_unset=True)
            self._attributes |= {f"headwater.{name}": value for name, value in settings.items()}
        self._requested = moment(request)
        self._at = self._requested
        """When the part before the next span ended."""

        self._round: _Round | None = None

    def add(self, entry: Entry) -> Iterator[Span]:
        """Take the next entry, and yield the spans that end with it."""
        at = moment(entry)
        fact = entry.fact
        if isinstance(fact, RoundOpened):
            self._open_round(entry, at, fact)
        elif isinstance(fact, UpdateAccepted):
            self._add_update(at, is_rejected=False)
        elif isinstance(fact, UpdateRefused):
            self._add_update(at, is_rejected=True)
        elif isinstance(fact, RoundClosed):
            yield from self._close_round(at, fact)
        elif isinstance(fact, RunStarted):
            yield self._close_part("queue", entry, at)
        elif isinstance(fact, BundleExported):
            yield self._close_part("export", entry, at)
        elif isinstance(fact, RunFinished):
            yield self._end(at, FINAL[entry.kind], error="")
        elif isinstance(fact, RunFailed | RunCancelled):
            status = FINAL[entry.kind]
            yield self._end(at, status, error=fact.reason or status)

    def _close_part(self, name: str, entry: Entry, at: datetime) -> Span:
        """Return the span of a part of the run, which began where the part before it ended."""
        span = self._span(name, self._digits("run"), self._at, at, str(entry.round or ""))
        self._at = at
        return span

    def _end(self, at: datetime, status: str, error: str) -> Span:
        """Return the span of the whole run; ``error`` is why it failed, empty where it did not."""
        return self._span("run", "", self._requested, at, error=error, status=status)

    def _open_round(self, entry: Entry, at: datetime, fact: RoundOpened) -> None:
        """Note that a round has begun, or that it is tried again."""
        if self._round is None:
            self._round = _Round(entry.round or 0, at, len(fact.cohort))
        else:
            self._round.attempts += 1

    def _add_update(self, at: datetime, *, is_rejected: bool) -> None:
        """Note an update; one that comes while no round is open belongs to none."""
        if self._round is None:
            return
        self._round.last_update = at
        if is_rejected:
            self._round.rejected += 1

    def _close_round(self, at: datetime, fact: RoundClosed) -> Iterator[Span]:
        """Yield the spans of the open round, which ends here; none where no round is open."""
        if self._round is None:
            return
        yield from self._spans_of_round(self._round, at, fact)
        self._round = None
        self._at = at

    def _spans_of_round(self, closed: _Round, end: datetime, fact: RoundClosed) -> Iterator[Span]:
        """Yield the phases of a round, and then the round: waiting for members, their updates, the aggregation."""
        about = str(closed.number)
        own = self._digits("round", about)
        clients = fact.clients or 0
        begin = closed.opened - timedelta(seconds=float(fact.waiting_s or 0))
        collected = closed.last_update or closed.opened
        yield self._span("members", own, begin, closed.opened, about, round=closed.number)
        yield self._span("updates", own, closed.opened, collected, about, round=closed.number, cohort=closed.cohort)
        yield self._span("aggregate", own, collected, end, about, round=closed.number, clients=clients)
        yield self._span(
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

    def _span(
        self,
        name: str,
        parent: str,
        begin: datetime,
        end: datetime,
        about: str = "",
        error: str = "",
        **more: Attribute,
    ) -> Span:
        """Return a span of the run; ``about`` tells it from others of its name, ``more`` are its own attributes."""
        attributes = self._attributes | {f"headwater.{key}": value for key, value in more.items()}
        trace = self._digits("trace", count=32)
        own = self._digits(name, about)
        return Span(trace, own, parent, name, min(begin, end), end, attributes, error)

    def _digits(self, name: str, about: str = "", count: int = 16) -> str:
        """Return the id of a span or a trace, so many hexadecimal digits, which is the same at each look."""
        return hashlib.sha256(f"{self._id} {name} {about}".encode()).hexdigest()[:count]


def moment(entry: Entry) -> datetime:
    """Return when the entry was written, by the wall clock."""
    return datetime.fromisoformat(entry.at)
