"""The fleet as rows: what the status, the journal and the list of revoked certificates say of each agent.

Terminal, web view and monitoring show the same rows; `fleet_columns` says what the columns of their tables are. Agents
have contributed to these files, so a value of another form counts as absent.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from edge_agent.identity.certificates import show_utc

from ..journal.store import utc_now
from ..text import counted
from ..views.candidate import SCOPES, Candidate, accuracies_of
from ..views.fleet import Reported
from ..views.releases import Book
from ..views.values import as_number, as_text
from .fault_log import Fault
from .noise import Gain, classify_gain


class Presence(str, enum.Enum):
    """Whether an agent is there, and what is wrong with it; the values are the words of terminal, pages and JSON.

    The order is that of attention: those first that somebody should look at.
    """

    FAULT = "fault"
    """It is there, and its last task has failed."""

    STALLED = "stalled"
    """It is there, and does not get on with its task."""

    REFUSED = "refused"
    """It is kept out, and was not heard otherwise."""

    REVOKED = "revoked"
    OFFLINE = "offline"
    NOT_HEARD = "not heard"
    """It was not heard since the coordinator's start."""

    UNKNOWN = "unknown"
    """No coordinator serves, so nobody knows."""

    ONLINE = "online"

    def __str__(self) -> str:
        return self.value

    @property
    def is_there(self) -> bool:
        """Whether the agent can be reached, with or without a fault."""
        return self in {Presence.ONLINE, Presence.FAULT, Presence.STALLED}

    @property
    def order(self) -> int:
        """Its place in the order of attention."""
        return list(Presence).index(self)


@dataclass(frozen=True)
class HeardAgent:
    """An agent that the coordinator has heard, as ``status.json`` has it."""

    id: str
    is_present: bool = False
    condition: str = "ok"
    tier: str = ""
    transport: str = ""
    silent_s: float | None = None
    """Seconds from its last message to the status."""

    software: str = ""
    samples: int | None = None
    bundle_id: str = ""
    candidate: Candidate | None = None
    fault: Fault | None = None
    """Why its last task has failed, while that stands."""

    notes: tuple[str, ...] = ()
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    acc: Mapping[str, float] | None = None
    """Scope -> accuracy, 0..1, without those that are not known; None: it has reported none."""

    better_alone: bool = False
    rss_mb: float | None = None
    head: str = ""
    inputs_since: float | None = None
    """When the inputs of its server changed, in seconds since 1970; 0: they are as fitted; None: it does not say."""

    relay: str = ""
    """The relay through which it speaks; empty: through none."""

    @classmethod
    def from_body(cls, body: Mapping[str, object]) -> HeardAgent:
        """Return the agent that an object of the status describes."""

        def text(key: str, default: str = "") -> str:
            return as_text(body.get(key) or default)

        samples = as_number(body.get("samples"))
        notes = body.get("notes")
        return cls(
            id=text("id"),
            is_present=body.get("present") is True,
            condition=text("condition", "ok"),
            tier=text("tier"),
            transport=text("transport"),
            silent_s=as_number(body.get("silent_s")),
            software=text("software"),
            samples=None if samples is None else int(samples),
            bundle_id=text("bundle_id"),
            candidate=Candidate.from_body(body.get("candidate")),
            fault=Fault.from_body(body.get("fault")),
            notes=tuple(map(as_text, notes)) if isinstance(notes, list) else (),
            bytes_up=as_number(body.get("bytes_up")) or 0.0,
            bytes_down=as_number(body.get("bytes_down")) or 0.0,
            acc=_read_accuracies(body.get("acc")),
            better_alone=body.get("better_alone") is True,
            rss_mb=as_number(body.get("rss_mb")) or None,
            head=text("head"),
            inputs_since=as_number(body.get("inputs_since")),
            relay=text("relay"),
        )

    @property
    def presence(self) -> Presence:
        """Whether it was there when the status was written."""
        return presence_of(is_present=self.is_present, condition=self.condition)


def _read_accuracies(value: object) -> Mapping[str, float] | None:
    """Return the accuracies of the status, by scope; None where the agent has reported none."""
    if not isinstance(value, dict) or not value:
        return None
    return accuracies_of(value)


def presence_of(*, is_present: bool, condition: object) -> Presence:
    """Return the presence of an agent that was heard, from its lease and the condition that it reported last."""
    if not is_present:
        return Presence.OFFLINE
    if condition == Presence.FAULT:
        return Presence.FAULT
    if condition == Presence.STALLED:
        return Presence.STALLED
    return Presence.ONLINE


@dataclass(slots=True)
class AgentRow:
    """One agent: what the coordinator last wrote about it, and its newest accuracies."""

    id: str
    tier: str = ""
    transport: str = ""
    presence: Presence = Presence.UNKNOWN
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
    """acc.local, 0..1."""

    shared: float | None = None
    """acc.global, 0..1."""

    personal: float | None = None
    """acc.personal, 0..1."""

    better_alone: bool = False
    candidate: Candidate | None = None
    """A bundle that it has tried and does not run; the accuracies above are of what it runs."""

    support: int | None = None
    """Held-out samples behind the accuracies."""

    rss_mb: float | None = None
    head: str = ""
    inputs_since: float | None = None
    """When the inputs of its server changed, in seconds since 1970; 0: they are as fitted; None: it does not say."""

    relay: str = ""
    """The relay through which it speaks; empty: through none."""

    pinned: int | None = None
    """Number of the release that it is kept on."""

    fault: Fault | None = None
    """Why its last task has failed, or why it is kept out."""

    notes: tuple[str, ...] = ()
    bytes_up: float = 0.0
    bytes_down: float = 0.0

    @property
    def gain(self) -> float | None:
        """acc.personal minus acc.local; None where one of them is not known."""
        return None if self.personal is None or self.local is None else self.personal - self.local

    @property
    def gain_kind(self) -> Gain:
        """Whether the gain is more than noise."""
        return classify_gain(self.local, self.personal, self.support, better_alone=self.better_alone)

    @property
    def has_problem(self) -> bool:
        """Whether it has a fault or a note, so that somebody should look at it."""
        return self.fault is not None or bool(self.notes)


@dataclass(frozen=True)
class FleetFacts:
    """What is known of a fleet at a moment."""

    heard: Mapping[str, HeardAgent]
    """Agent -> what ``status.json`` has of it."""

    reported: Mapping[str, Reported]
    book: Book
    refused: Mapping[str, Fault] = field(default_factory=dict)
    """Agent -> why, of those that were kept out in the last minutes."""

    revoked: frozenset[str] = frozenset()
    is_serving: bool = True
    status_at: float | None = None
    """When the status was written, in seconds since 1970."""

    run: str = ""
    """The newest run that has begun; ``by_round`` has acc.global and acc.personal of its newest rounds, by agent."""

    by_round: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    now: datetime = field(default_factory=utc_now)


def describe_inputs(since: Iterable[float | None]) -> str:
    """Return on how many devices the inputs have changed, for people; empty where no device says how its inputs are.

    ``since`` has the time of each agent, as in `AgentRow`.
    """
    known = [time for time in since if time is not None]
    changed = [time for time in known if time]
    if not known:
        return ""
    if not changed:
        return f"as fitted on all {counted(len(known), 'device')} that tell it"
    first = show_utc(min(changed))
    return f"changed on {len(changed)} of {counted(len(known), 'device')} that tell it, first {first}"


def rows_of(facts: FleetFacts) -> list[AgentRow]:
    """Return all agents that are known, sorted by id: heard, kept out lately, or in results of a run or a release."""
    book = facts.book
    numbers = {release.bundle_id: release.number for release in book.releases if release.bundle_id}
    pinned = {agent: pin.release for agent, pin in book.pins.items() if pin.holds(facts.now)}
    rows = [_row_of(agent, facts) for agent in sorted({*facts.heard, *facts.reported, *book.devices, *facts.refused})]
    for row in rows:
        row.release = numbers.get(row.bundle_id)
        row.pinned = pinned.get(row.id)
    return rows


def _row_of(agent: str, facts: FleetFacts) -> AgentRow:
    """Return one agent, from its sources in the order of their age: what comes later is newer, or more certain."""
    presence = Presence.NOT_HEARD if facts.is_serving else Presence.UNKNOWN
    row = AgentRow(agent, presence=presence)
    heard = facts.heard.get(agent)
    reported = facts.reported.get(agent)
    # 1. What the status says of the agent itself, and where it says nothing, what the book of releases knows.
    if heard is not None:
        _take_status(row, heard, facts)
    _take_device(row, facts)
    # 2. Accuracies: its last report, then the rounds of a run that is newer than that, then the status.
    if reported is not None:
        _take_report(row, reported)
    if reported is None or reported.run != facts.run:
        _take_newest_round(row, facts)
    if heard is not None:
        _take_figures(row, heard)
    if (row.gain or 0.0) > 0:
        row.better_alone = False  # that was said of older figures
    # 3. A device that went back from a bundle says so, also where no coordinator has heard it since its start.
    if row.candidate is not None and row.candidate.note not in row.notes:
        row.notes = (row.candidate.note, *row.notes)
    # 4. Whether it is let in at all.
    _take_refusal(row, facts)
    return row


def _take_status(row: AgentRow, heard: HeardAgent, facts: FleetFacts) -> None:
    """Take what the status says of an agent that was heard, but for its figures."""
    if facts.is_serving:
        row.presence = heard.presence
    row.tier = heard.tier
    row.transport = heard.transport
    row.silent_s = heard.silent_s
    if facts.status_at is not None and heard.silent_s is not None:
        row.seen_at = facts.status_at - heard.silent_s
    row.software = heard.software
    row.samples = heard.samples
    row.bundle_id = heard.bundle_id
    row.candidate = heard.candidate
    row.fault = heard.fault
    row.notes = heard.notes
    row.inputs_since = heard.inputs_since
    row.relay = heard.relay
    row.bytes_up = heard.bytes_up
    row.bytes_down = heard.bytes_down


def _take_device(row: AgentRow, facts: FleetFacts) -> None:
    """Take what the book of releases knows of a device of tier ``head``."""
    device = facts.book.devices.get(row.id)
    if device is None:
        return
    row.tier = row.tier or "head"
    row.bundle_id = row.bundle_id or device.runs
    if device.kept:
        row.notes = (*row.notes, f"keeps its bundle: {as_text(device.kept)}")


def _take_report(row: AgentRow, reported: Reported) -> None:
    """Take what the agent has reported at the end of a run or for a release."""
    row.tier = row.tier or reported.tier
    row.local, row.shared, row.personal = (reported.acc.get(scope) for scope in SCOPES)
    row.better_alone = reported.better_alone
    row.rss_mb = reported.rss_mb
    row.head = reported.head
    row.candidate = reported.candidate
    row.support = reported.support
    row.samples = row.samples if row.samples is not None else reported.samples
    row.bundle_id = row.bundle_id or reported.bundle_id


def _take_newest_round(row: AgentRow, facts: FleetFacts) -> None:
    """Take the accuracies of the newest round of the newest run, where the agent has any."""
    shared, personal = facts.by_round.get(row.id, (None, None))
    if shared is not None:
        row.shared = shared
    if personal is not None:
        row.personal = personal


def _take_figures(row: AgentRow, heard: HeardAgent) -> None:
    """Take the newest figures, which the status has of agents that were heard."""
    if heard.acc is not None:
        row.local = heard.acc.get("local", row.local)
        row.shared = heard.acc.get("global", row.shared)
        row.personal = heard.acc.get("personal", row.personal)
        row.better_alone = heard.better_alone
    row.rss_mb = heard.rss_mb or row.rss_mb
    row.head = heard.head or row.head


def _take_refusal(row: AgentRow, facts: FleetFacts) -> None:
    """Take that the agent is kept out: as one that is not there, or for good, whether it is there or not."""
    if row.id in facts.refused and not row.presence.is_there:
        row.presence = Presence.REFUSED
        row.fault = facts.refused[row.id]
    if row.id in facts.revoked:
        row.presence = Presence.REVOKED
