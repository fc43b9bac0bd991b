"""One agent as it described itself: its start, what it runs, how it is, and when it was last heard.

`Member` is what the coordinator holds of an agent; `Figures` is the part of it that the agent says of the models that
it runs. Whether the agent counts as online is decided by `roster`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edge_agent.core.config import NAME_PATTERN
from edge_agent.wire.messages import fields, up

from ..journal.entries import RunningFigures
from ..state.fault_log import Fault
from ..views.candidate import Candidate
from ..views.values import as_number
from .link_breaks import LinkBreaks

LATEST_TIME = 1e11
"""Seconds since 1970, beyond which a time that an agent says is none: it has no date."""

MOST_RSS_MB = 1e9
"""No device has a petabyte of memory: a hello that says so is damaged, or hostile."""


@dataclass(frozen=True)
class Figures:
    """What an agent last said of the models that it runs, and of its memory; None and empty: nothing yet."""

    acc: Mapping[str, float] = field(default_factory=dict)
    """Scope (local, global, personal) -> accuracy, 0..1."""

    head: str = ""
    better_alone: bool = False
    rss_mb: float | None = None
    support: int | None = None
    """Held-out samples behind the accuracies."""

    def with_update(self, metrics: Mapping[str, float | None]) -> Figures:
        """Return the figures with the accuracies that came with an update."""
        acc: dict[str, float] = {}
        for scope in ("local", "global", "personal"):
            value = metrics.get(f"acc.{scope}")
            if value is not None and 0 <= value <= 1:
                acc[scope] = value
        if not acc:
            return self
        return replace(self, acc={**self.acc, **acc})

    def with_report(self, message: up.Report) -> Figures:
        """Return the figures with what a report says of the bundle that the agent runs."""
        rss_mb = message.rss_mb or self.rss_mb
        if Candidate.from_report(message) is not None:
            # All figures are of a bundle that it went back from, but for that of its own pair beside it.
            before = message.metrics.get("acc.before")
            if before is None or not 0 <= before <= 1:
                return replace(self, rss_mb=rss_mb)
            return replace(self, acc={**self.acc, "personal": before}, rss_mb=rss_mb)
        acc = dict(self.acc)
        # Accuracies on no samples are none.
        if message.samples:
            scopes = {"local": message.acc_local, "global": message.acc_global, "personal": message.acc_personal}
            acc |= {scope: value for scope, value in scopes.items() if value is not None}
        return Figures(
            acc,
            head=message.head or self.head,
            better_alone=message.better_alone,
            rss_mb=rss_mb,
            support=message.support or self.support,
        )

    def to_fact(self) -> RunningFigures:
        """Return the figures for an entry of the journal."""
        return RunningFigures(
            acc=dict(self.acc),
            head=self.head,
            better_alone=self.better_alone,
            rss_mb=self.rss_mb,
            support=self.support,
        )

    def with_facts(self, facts: Mapping[str, object]) -> Figures:
        """Return the figures with the memory that a hello says; a value that is no size is passed over."""
        rss_mb = facts.get("rss_mb")
        if not isinstance(rss_mb, float | int) or isinstance(rss_mb, bool):
            return self
        if not 0 < rss_mb < MOST_RSS_MB:
            return self
        return replace(self, rss_mb=float(rss_mb))


def as_time(value: object) -> float | None:
    """Return a time that an agent has said, in seconds since 1970; None for what is none."""
    number = as_number(value)
    return number if number is not None and 0 <= number < LATEST_TIME else None


def as_relay(value: object) -> str:
    """Return the relay that a hello names; empty where what it names can be none."""
    is_name = isinstance(value, str) and re.fullmatch(NAME_PATTERN, value) is not None
    return str(value) if is_name else ""


@dataclass
class Member:
    """One agent as it described itself, and when it was last heard."""

    id: str
    tier: str
    boot: str
    software: str
    samples: int
    bundle_id: str
    heard_at: float = 0.0
    offline_at: float | None = None
    notes: dict[str, str] = field(default_factory=dict)
    """Notes for the status, by subject."""

    fault: Fault | None = None
    """Its last fault, if that still stands."""

    figures: Figures = field(default_factory=Figures)
    candidate: Candidate | None = None
    """A bundle that it has tried last and does not run."""

    condition: fields.ConditionName = "ok"
    stalled_at: float = 0.0

    heartbeat_s: float = 0.0
    """The least time between its heartbeats without a job, as last sent to it."""

    asked_at: float | None = None
    """When it was asked to do a task, until a heartbeat says that it has none; then its heartbeats are its own."""

    inputs_since: float | None = None
    """When the inputs of its server changed, in seconds since 1970; 0: they are as fitted; None: it does not say."""

    relay: str = ""
    """The relay through which it speaks; empty: through none."""

    connection: int = 0
    """Number of its connection to the broker; the last will of an earlier one says nothing of it."""

    breaks: LinkBreaks = field(default_factory=LinkBreaks)
    """How often its connection to the broker has broken."""

    @property
    def is_present(self) -> bool:
        """Whether it counts as online."""
        return self.offline_at is None

    @property
    def is_well(self) -> bool:
        """Whether it is online and there is nothing to say about it."""
        has_nothing_to_say = self.fault is None and self.candidate is None and not self.notes
        return self.is_present and self.condition == "ok" and has_nothing_to_say and not self.inputs_since
