"""The fleet as rows: what the status, the journal and the list of revoked certificates say of each agent.

Agents have contributed to these files, so a value of another form counts as absent. Terminal and web view format the
same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..journal.entries import DeviceReported, ReleaseReported, RunningFigures
from ..journal.kinds import Kind
from ..journal.store import Entry, utc_now
from ..views.releases import Book
from .candidate import Candidate, accuracies_of
from .history import SCOPES
from .noise import Gain, classify_gain
from .values import as_number, as_text

PRESENT = ("online", "fault", "stalled")
REPORTS: tuple[Kind, ...] = ("release_reported", "device_reported")
"""Kinds of entries that `Reported` is made from."""


@dataclass(slots=True)
class AgentRow:
    """One agent: what the coordinator last wrote about it, and its newest accuracies."""

    id: str
    tier: str = ""
    transport: str = ""
    state: str = "unknown"
    """online, fault, stalled, offline, not heard (since the coordinator's start), refused (it is kept out), revoked, or
    unknown where no coordinator serves."""

    silent_s: float | None = None
    """Seconds from its last message to the status; None: not heard since the coordinator's start."""

    seen_at: float | None = None
    """When it was heard last, in seconds since 1970."""

    software: str = ""
    samples: int | None = None
    bundle_id: str = ""
    release: int | None = None
    """Number of the newest release of that bundle."""

    local: float | None = None
    shared: float | None = None
    """acc.global."""

    personal: float | None = None
    better_alone: bool = False
    candidate: Candidate | None = None
    """A bundle that it has tried and does not run; the accuracies above are of what it runs."""
    support: int | None = None
    """Held-out samples behind the accuracies."""

    rss_mb: float | None = None
    head: str = ""
    pinned: int | None = None
    """Number of the release that it is kept on."""

    fault: dict[str, str] | None = None
    notes: tuple[str, ...] = ()
    bytes_up: float = 0.0
    bytes_down: float = 0.0

    @property
    def gain(self) -> float | None:
        """acc.personal minus acc.local."""
        return None if self.personal is None or self.local is None else self.personal - self.local

    @property
    def gain_kind(self) -> Gain:
        """Whether the gain is more than noise."""
        return classify_gain(self.local, self.personal, self.support, better_alone=self.better_alone)


@dataclass(slots=True)
class Reported:
    """What an agent last reported at the end of a run, or for a release, of the bundle that it runs."""

    acc: dict[str, float | None] = field(default_factory=dict)
    better_alone: bool = False
    rss_mb: float | None = None
    tier: str = ""
    run: str = ""
    samples: int | None = None
    bundle_id: str = ""
    head: str = ""
    candidate: Candidate | None = None
    """A bundle that it has tried last and does not run."""
    support: int | None = None

    def add(self, entry: Entry, book: Book) -> None:
        """Take what a newer entry of `REPORTS` says. ``book``: has the releases before the entry."""
        fact = entry.fact
        if isinstance(fact, ReleaseReported):
            self._add_result_of_run(entry.run or "", fact)
        elif isinstance(fact, DeviceReported):
            self.tier = "head"
            if fact.running is not None:
                self._take_figures(fact.running)
                self.candidate = Candidate.from_fact(fact.candidate)
            else:
                self._add_older_result(fact, book)

    def _add_result_of_run(self, run: str, fact: ReleaseReported) -> None:
        """Take the record of a device at the end of a run: its figures are of the encoder of that run."""
        self.run = run
        self.tier = as_text(fact.tier)
        self.bundle_id = as_text(fact.runs)
        self.samples = fact.samples
        reason = as_text(fact.rolled_back or "")
        if not reason:
            self._take_figures(fact)
            self.candidate = None
            return
        self._note_own_pair(fact.before)
        acc = accuracies_of(fact.acc or {})
        self.candidate = Candidate(as_text(fact.about or ""), self.run, fact.release, reason, acc)

    def _take_figures(self, figures: ReleaseReported | RunningFigures) -> None:
        """Take figures of the bundle that the device runs."""
        acc = figures.acc or {}
        self.acc = {scope: as_number(acc.get(scope)) for scope in SCOPES}
        self.better_alone = figures.better_alone
        self.rss_mb = as_number(figures.rss_mb) or None
        self.head = as_text(figures.head)
        self.support = figures.support

    def _add_older_result(self, fact: DeviceReported, book: Book) -> None:
        """Take the result of a release as versions wrote it that did not say of which bundle it is."""
        result = fact.result
        personal = None if result is None else as_number(result.acc)
        release = book.get(fact.release)
        if result is None or release is None or release.bundle_id == fact.runs:
            if personal is not None:
                self.acc = {**self.acc, "personal": personal}
            if result is not None:
                self.support = (result.support or self.support) if personal is not None else self.support
                self.candidate = None
            return
        self._note_own_pair(result.before)
        acc = {} if personal is None else {"personal": personal}
        self.candidate = Candidate(release.bundle_id, release.run, fact.release, as_text(result.reason), acc)

    def _note_own_pair(self, before: object) -> None:
        """Note acc.personal of the pair that the device kept, as measured beside the candidate."""
        if (personal := as_number(before)) is not None:
            self.acc = {**self.acc, "personal": personal}


@dataclass(frozen=True)
class FleetFacts:
    """What is known of a fleet at a moment."""

    status: Mapping[str, Mapping[str, Any]]
    """Agent -> what ``status.json`` has of it."""

    reported: Mapping[str, Reported]
    book: Book
    refused: Mapping[str, dict[str, str]] = field(default_factory=dict)
    """Agent -> error, message, remedy and time, of those that were kept out in the last minutes."""

    revoked: frozenset[str] = frozenset()
    is_serving: bool = True
    status_at: float | None = None
    """When the status was written, in seconds since 1970."""

    run: str = ""
    """The newest run that has begun; ``by_round`` has acc.global and acc.personal of its newest rounds, by agent."""

    by_round: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    now: datetime = field(default_factory=utc_now)


def rows_of(facts: FleetFacts) -> list[AgentRow]:
    """All agents that are known: heard, kept out lately, or in the results of a run or a release; sorted by id."""
    book = facts.book
    numbers = {release.bundle_id: release.number for release in book.releases if release.bundle_id}
    pinned = {agent: pin.release for agent, pin in book.pins.items() if pin.holds(facts.now)}
    rows = [_row(agent, facts) for agent in sorted({*facts.status, *facts.reported, *book.devices, *facts.refused})]
    for row in rows:
        row.release, row.pinned = numbers.get(row.bundle_id), pinned.get(row.id)
    return rows


def reported_by(entries: Iterable[Entry], book: Book) -> dict[str, Reported]:
    """Agent -> what it last reported, of entries in order."""
    result = dict[str, Reported]()
    for entry in entries:
        if entry.agent is not None:
            result.setdefault(entry.agent, Reported()).add(entry, book)
    return result


def _row(agent: str, facts: FleetFacts) -> AgentRow:
    row = AgentRow(agent)
    status = facts.status.get(agent)
    reported = facts.reported.get(agent)
    row.state = "not heard" if facts.is_serving else "unknown"
    if status is not None:
        _fill(row, status, facts)
    if (device := facts.book.devices.get(agent)) is not None:
        row.tier = row.tier or "head"
        row.bundle_id = row.bundle_id or device.runs
        if device.kept:
            row.notes = (*row.notes, f"keeps its bundle: {as_text(device.kept)}")
    if reported is not None:
        _fill_reported(row, reported)
    if agent in facts.by_round and (reported is None or reported.run != facts.run):
        shared, personal = facts.by_round[agent]
        row.shared = row.shared if shared is None else shared
        row.personal = row.personal if personal is None else personal
    if status is not None:
        _fill_figures(row, status)
    _note_candidate(row)
    if (row.gain or 0.0) > 0:
        row.better_alone = False  # that was said of older figures
    if agent in facts.refused and row.state not in PRESENT:
        row.state = "refused"
        row.fault = facts.refused[agent]
    if agent in facts.revoked:
        row.state = "revoked"
    return row


def _note_candidate(row: AgentRow) -> None:
    """Say of a device that it went back from a bundle, also where no coordinator has heard it since its start."""
    if row.candidate is not None and row.candidate.note not in row.notes:
        row.notes = (row.candidate.note, *row.notes)


def _fill(row: AgentRow, status: Mapping[str, Any], facts: FleetFacts) -> None:
    """What the status says of an agent that was heard."""
    condition = as_text(status.get("condition") or "ok")
    silent_s = as_number(status.get("silent_s"))
    is_present = status.get("present") is True
    if facts.is_serving:
        row.state = "offline" if not is_present else condition if condition in {"fault", "stalled"} else "online"
    row.tier = as_text(status.get("tier") or "")
    row.transport = as_text(status.get("transport") or "")
    row.silent_s = silent_s
    row.seen_at = None if facts.status_at is None or silent_s is None else facts.status_at - silent_s
    row.software = as_text(status.get("software") or "")
    row.samples = _count(status.get("samples"))
    row.bundle_id = as_text(status.get("bundle_id") or "")
    row.candidate = Candidate.from_body(status.get("candidate"))
    fault = status.get("fault")
    row.fault = {as_text(k): as_text(v) for k, v in fault.items()} if isinstance(fault, dict) else None
    notes = status.get("notes")
    row.notes = tuple(map(as_text, notes)) if isinstance(notes, list) else ()
    row.bytes_up, row.bytes_down = (as_number(status.get(name)) or 0.0 for name in ("bytes_up", "bytes_down"))


def _fill_reported(row: AgentRow, reported: Reported) -> None:
    row.tier = row.tier or reported.tier
    row.local, row.shared, row.personal = (reported.acc.get(scope) for scope in SCOPES)
    row.better_alone = reported.better_alone
    row.rss_mb = reported.rss_mb
    row.head = reported.head
    row.candidate = reported.candidate
    row.support = reported.support
    row.samples = row.samples if row.samples is not None else reported.samples
    row.bundle_id = row.bundle_id or reported.bundle_id


def _fill_figures(row: AgentRow, status: Mapping[str, Any]) -> None:
    """The newest figures, which the status has of agents that were heard."""
    if acc := _mapping(status.get("acc")):
        known = {scope: as_number(acc.get(scope)) for scope in SCOPES}
        row.local, row.shared, row.personal = (
            old if known[scope] is None else known[scope]
            for scope, old in zip(SCOPES, (row.local, row.shared, row.personal), strict=True)
        )
        row.better_alone = status.get("better_alone") is True
    row.rss_mb = as_number(status.get("rss_mb")) or row.rss_mb
    row.head = as_text(status.get("head") or "") or row.head


def _count(value: object) -> int | None:
    number = as_number(value)
    return None if number is None else int(number)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
