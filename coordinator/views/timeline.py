"""What happened in a run, in order: its journal entries as events for people.

`coordinator.state.timeline` puts the lines of the coordinator's log between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Literal, get_args

from edge_agent.core.formats import printable

from ..journal.entries import (
    BundleExported,
    CancelRequested,
    NormPooled,
    ProxyFailed,
    RangesCollected,
    ReleaseMade,
    ReleaseReported,
    RoundClosed,
    RoundOpened,
    RunCancelled,
    RunExtended,
    RunFailed,
    RunFinished,
    RunRequested,
    RunStopped,
    UpdateAccepted,
    UpdateRefused,
)
from ..journal.kinds import CHECKPOINTS, FINAL
from ..journal.store import Entry
from ..text import SaidBefore, counted, listed

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class Event:
    """One line of the timeline of a run."""

    at: str
    """When it happened (ISO 8601, UTC, milliseconds), so that text sorts as time does."""

    level: Level
    kind: str
    text: str
    round: int | None = None
    agents: tuple[str, ...] = ()
    """The agents that the event is about."""

    data: dict[str, Any] = field(default_factory=dict)
    """JSON for ``--json``: the fields of the entry or the log line that programs may want."""

    def is_about(self, agent: str) -> bool:
        """Return whether it concerns this agent."""
        return agent in self.agents

    def body(self) -> dict[str, Any]:
        """Return the event as JSON."""
        fields = {"at": self.at, "level": self.level, "kind": self.kind, "round": self.round}
        return {**fields, "agents": list(self.agents), "text": self.text, "data": self.data}


class TimelineView:
    """The events of one run, of its entries alone."""

    def __init__(self, *, with_updates: bool) -> None:
        """Make the view of a run before its first entry; ``with_updates``: accepted updates are events, too."""
        self.kinds: Sequence[str] = tuple(kind for kind in KINDS if with_updates or kind != UpdateAccepted.kind)
        self.begun_at = ""
        """When the run left its first state; empty: it has not."""

        self.ended_at = ""
        self._events: list[Event] = []
        self._said = SaidBefore()

    def add(self, entry: Entry) -> None:
        """Take the next entry of the run."""
        at = utc_text(entry.at)
        if entry.kind in CHECKPOINTS:
            self.begun_at = self.begun_at or at
        if entry.kind in FINAL:
            self.ended_at = self.ended_at or at
        elif entry.kind == RunExtended.kind:
            self.ended_at = ""
        self._events.append(_event_of(entry, at, self._said))

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events = self._events
        self._events = []
        return events

    def is_under_way(self, at: str) -> bool:
        """Return whether the run had begun at a time of `utc_text`, and had not ended."""
        has_begun = bool(self.begun_at) and self.begun_at <= at
        return has_begun and (not self.ended_at or at < self.ended_at)


def with_durations(events: Sequence[Event]) -> list[Event]:
    """Return the same events; the texts of waits say how long they took, where the next event after one is known."""
    result = list[Event]()
    next_at = ""
    # From the end: a wait lasts until the next wait, or the end of the run.
    for event in reversed(events):
        is_wait = event.kind == "waiting"
        if is_wait and next_at:
            result.append(_with_duration(event, next_at))
        else:
            result.append(event)
        if is_wait or event.kind in FINAL:
            next_at = event.at
    return result[::-1]


def _with_duration(event: Event, until: str) -> Event:
    took_s = (datetime.fromisoformat(until) - datetime.fromisoformat(event.at)).total_seconds()
    return replace(event, text=f"{event.text} ({took_s:.1f} s)")


def utc_text(at: str) -> str:
    """Return a time of journal or log (ISO 8601) in UTC, so that text sorts as time does; other text is unchanged."""
    try:
        return datetime.fromisoformat(at).astimezone(timezone.utc).isoformat(timespec="milliseconds")
    except ValueError:
        return at


def _say_requested(fact: RunRequested, _: Entry) -> str:
    return f"requested: {fact.method}, {counted(fact.rounds, 'round')}, seed {fact.seed}"


def _say_opened(fact: RoundOpened, entry: Entry, said: SaidBefore) -> str:
    again = f", attempt {fact.attempt}" if fact.attempt != 1 else ""
    left = "".join(f"; without {agent}: {said.reason(f'opened {agent}', why)}" for agent, why in fact.left_out.items())
    agents = counted(len(fact.cohort), "agent")
    return f"round {entry.round} begins{again} with {agents}: {listed(fact.cohort)}{left}"


def _say_closed(fact: RoundClosed, entry: Entry) -> str:
    parts = [f"round {entry.round} is closed"]
    if fact.seconds is not None:
        parts.append(f"{fact.seconds:.1f} s, {fact.waiting_s or 0:.1f} s of waiting before it")
    if fact.bytes_up is not None:
        parts.append(f"{fact.bytes_up / 1e6:.2f} MB up, {(fact.bytes_down or 0) / 1e6:.2f} MB down")
    if fact.late:
        parts.append(f"late: {listed([update.agent for update in fact.late])}")
    if fact.busy:
        parts.append(f"still at work: {listed(sorted(fact.busy))}")
    return "; ".join(parts)


def _say_accepted(fact: UpdateAccepted, entry: Entry) -> str:
    figures = [f"{name} {value:.3f}" for name, value in fact.metrics.items() if name.startswith(("acc.", "loss"))]
    shown = f": {', '.join(figures)}" if figures else ""
    return f"update of {entry.agent} for round {entry.round}{shown}"


def _say_refused(fact: UpdateRefused, entry: Entry, said: SaidBefore) -> str:
    why = said.reason(f"refused {entry.agent}", _reason(fact))
    return f"update of {entry.agent} for round {entry.round} rejected: {why}"


def _say_reported(fact: ReleaseReported, _: Entry) -> str:
    figures = [f"acc.{scope} {value:.3f}" for scope, value in (fact.acc or {}).items() if value is not None]
    alone = "; better off alone" if fact.better_alone else ""
    back = f"; keeps another bundle: {fact.rolled_back}" if fact.rolled_back else ""
    return f"{fact.id}: {', '.join(figures) or 'no accuracy'}{alone}{back}"


_WithReason = CancelRequested | UpdateRefused | ProxyFailed | RunStopped | RunFailed | RunCancelled


def _reason(fact: _WithReason) -> str:
    return fact.reason or "no reason was given"


def _say_proxy_failed(fact: ProxyFailed, entry: Entry) -> str:
    return f"acc.proxy after round {entry.round} not computed: {_reason(fact)}"


def _bundle(fact: BundleExported | ReleaseMade) -> str:
    return f"bundle {fact.bundle_id[:12]}"


def _clients(fact: NormPooled | RangesCollected) -> str:
    return counted(len(fact.clients), "client")


def _say_finished(fact: RunFinished, _: Entry) -> str:
    return f"finished, encoder {(fact.encoder_sha256 or 'none')[:16]}"


KINDS: dict[str, tuple[Level, Callable[[Any, Entry], str]]] = {
    "run_requested": ("info", _say_requested),
    "cancel_requested": ("info", lambda fact, _: f"a cancel was requested: {_reason(fact)}"),
    "run_started": ("info", lambda *_: "begins"),
    "warm_started": ("info", lambda *_: "begins with a model that was trained on the coordinator's own data"),
    "round_opened": ("info", lambda fact, entry: _say_opened(fact, entry, SaidBefore())),
    "update_accepted": ("debug", _say_accepted),
    "update_refused": ("warning", lambda fact, entry: _say_refused(fact, entry, SaidBefore())),
    "round_closed": ("info", _say_closed),
    "norm_pooled": ("info", lambda fact, _: f"batch norm statistics of {_clients(fact)}"),
    "ranges_collected": ("info", lambda fact, _: f"ranges of activations of {_clients(fact)}"),
    "proxy_evaluated": ("info", lambda fact, entry: f"acc.proxy after round {entry.round}: {fact.acc}"),
    "proxy_failed": ("warning", _say_proxy_failed),
    "run_stopped": ("info", lambda fact, entry: f"no round follows round {entry.round}: {_reason(fact)}"),
    "run_finished": ("info", _say_finished),
    "run_failed": ("error", lambda fact, _: f"failed: {_reason(fact)}"),
    "run_cancelled": ("warning", lambda fact, _: f"cancelled: {_reason(fact)}"),
    "run_extended": ("info", lambda fact, _: f"has more rounds from now on: {fact.rounds}"),
    "run_pruned": ("info", lambda *_: "checkpoints and bundles were removed"),
    "bundle_exported": ("info", lambda fact, _: f"{_bundle(fact)} exported"),
    "release_made": ("info", lambda fact, _: f"{_bundle(fact)} released"),
    "release_reported": ("info", _say_reported),
}
"""Kinds of entries that are shown, with their levels and texts; each text takes the fact of its kind."""


_DATA = {"reason", "cohort", "left_out", "metrics", "acc"}
"""Fields of facts that an event has as data, where they were given."""


def _event_of(entry: Entry, at: str, said: SaidBefore) -> Event:
    """Return the event of an entry; a reason that was said before is not said in full again."""
    level, text_of = KINDS[entry.kind]
    fact = entry.fact
    about = set() if entry.agent is None else {entry.agent}
    if isinstance(fact, RoundOpened):
        text = _say_opened(fact, entry, said)
        about |= {*fact.cohort, *fact.left_out}
    elif isinstance(fact, UpdateRefused):
        text = _say_refused(fact, entry, said)
    else:
        text = text_of(fact, entry)
    data: dict[str, Any] = fact.model_dump(include=_DATA, exclude_unset=True)
    return Event(at, level, entry.kind, printable(text), entry.round, tuple(sorted(about)), data)
