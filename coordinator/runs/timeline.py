"""What happened in a run, in order: the journal's entries and the coordinator's log lines as events for people.

It is read from files alone, so it shows runs that are over, and those of a coordinator that does not run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Literal, get_args

from edge_agent.wire.messages.fields import printable, run_name

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
    RunFailed,
    RunFinished,
    RunRequested,
    UpdateAccepted,
    UpdateRefused,
)
from ..journal.kinds import CHECKPOINTS, FINAL
from ..journal.store import Entry
from ..state.log_file import LogReader
from ..state.store import StateFolder
from ..text import SaidBefore, counted, listed

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class Event:
    """One line of the timeline. ``at``: UTC, ISO 8601; ``agents``: those that it is about; ``data``: for --json."""

    at: str
    level: Level
    kind: str
    text: str
    round: int | None = None
    agents: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)

    def is_about(self, agent: str) -> bool:
        """Whether it concerns this agent."""
        return agent in self.agents

    def body(self) -> dict[str, Any]:
        """The event as JSON."""
        fields = {"at": self.at, "level": self.level, "kind": self.kind, "round": self.round}
        return {**fields, "agents": list(self.agents), "text": self.text, "data": self.data}


class Timeline:
    """The events of one run; `new` returns those since the last call."""

    def __init__(self, state: StateFolder, run: str, *, least: Level = "info", agent: str | None = None) -> None:
        """``least``: the least level; ``agent``: only what is about that one."""
        self._state = state
        self._run = run
        self._least = LEVELS.index(least)
        self._agent = agent
        self._log = LogReader(state.path)
        self._after = 0
        self._begun = self._ended = ""
        self._said = SaidBefore()

    @property
    def is_over(self) -> bool:
        """Whether the end of the run was among the events."""
        return bool(self._ended)

    def new(self) -> list[Event]:
        """In the order of their times."""
        wants_updates = self._least == 0 or self._agent is not None
        kinds = tuple(kind for kind in _KINDS if wants_updates or kind != "update_accepted")
        entries = self._state.journal.entries(self._run, kinds, self._after)
        if entries:
            self._after = entries[-1].id
        self._begun = self._begun or next((_time(entry.at) for entry in entries if entry.kind in CHECKPOINTS), "")
        self._ended = next((_time(entry.at) for entry in entries if entry.kind in FINAL), self._ended)
        events = [*(_of_entry(entry, self._said) for entry in entries), *self._logged()]
        events = with_durations(sorted(events, key=lambda event: event.at))
        return [event for event in events if self._is_wanted(event)]

    def _logged(self) -> Iterator[Event]:
        for line in self._log.new():
            run = line.get("run")
            at = _time(line["time"])
            named = run_name(run) if isinstance(run, str) else None
            is_during = bool(self._begun) and self._begun <= at and (not self._ended or at < self._ended)
            if (named == self._run or (named is None and is_during)) and line.get("event") not in _KINDS:
                yield _of_line(line)

    def _is_wanted(self, event: Event) -> bool:
        about = self._agent is None or event.is_about(self._agent)
        return about and LEVELS.index(event.level) >= self._least


def with_durations(events: list[Event]) -> list[Event]:
    """The same events; waits say how long they took, where the next one is known."""
    result = list[Event]()
    next_at = ""
    for event in reversed(events):
        is_wait = event.kind == "waiting"
        result.append(_lasting(event, next_at) if is_wait and next_at else event)
        next_at = event.at if is_wait or event.kind in FINAL else next_at
    return result[::-1]


def _lasting(event: Event, until: str) -> Event:
    took_s = (datetime.fromisoformat(until) - datetime.fromisoformat(event.at)).total_seconds()
    return replace(event, text=f"{event.text} ({took_s:.1f} s)")


def _time(at: str) -> str:
    """A time of journal or log, so that text sorts as time does."""
    try:
        return datetime.fromisoformat(at).astimezone(timezone.utc).isoformat(timespec="milliseconds")
    except ValueError:
        return at


# --- the journal -----------------------------------------------------------------------------------------------------


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
    known = [f"acc.{scope} {value:.3f}" for scope, value in (fact.acc or {}).items() if value is not None]
    alone = "; better off alone" if fact.better_alone else ""
    back = f"; keeps another bundle: {fact.rolled_back}" if fact.rolled_back else ""
    return f"{fact.id}: {', '.join(known) or 'no accuracy'}{alone}{back}"


_WithReason = CancelRequested | UpdateRefused | ProxyFailed | RunFailed | RunCancelled


def _reason(fact: _WithReason) -> str:
    return fact.reason or "no reason was given"


def _bundle(fact: BundleExported | ReleaseMade) -> str:
    return f"bundle {fact.bundle_id[:12]}"


def _clients(fact: NormPooled | RangesCollected) -> str:
    return counted(len(fact.clients), "client")


def _say_finished(fact: RunFinished, _: Entry) -> str:
    return f"finished, encoder {(fact.encoder_sha256 or 'none')[:16]}"


_KINDS: dict[str, tuple[Level, Callable[[Any, Entry], str]]] = {
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
    "proxy_failed": ("warning", lambda fact, one: f"acc.proxy after round {one.round} not computed: {_reason(fact)}"),
    "run_finished": ("info", _say_finished),
    "run_failed": ("error", lambda fact, _: f"failed: {_reason(fact)}"),
    "run_cancelled": ("warning", lambda fact, _: f"cancelled: {_reason(fact)}"),
    "run_pruned": ("info", lambda *_: "checkpoints and bundles were removed"),
    "bundle_exported": ("info", lambda fact, _: f"{_bundle(fact)} exported"),
    "release_made": ("info", lambda fact, _: f"{_bundle(fact)} released"),
    "release_reported": ("info", _say_reported),
}
"""Kinds of entries that are shown, with their levels and texts; each text takes the fact of its kind."""


_DATA = {"reason", "cohort", "left_out", "metrics", "acc"}
"""Fields of facts that an event has as data, where they were given."""


def _of_entry(entry: Entry, said: SaidBefore) -> Event:
    """Return the event of an entry; a reason that was said before is not said in full again."""
    level, text_of = _KINDS[entry.kind]
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
    return Event(_time(entry.at), level, entry.kind, printable(text), entry.round, tuple(sorted(about)), data)


# --- the log ---------------------------------------------------------------------------------------------------------

_STANDARD = frozenset({"time", "level", "logger", "event", "text", "traceback"})


def _of_line(line: Mapping[str, Any]) -> Event:
    event = str(line.get("event", "log"))
    values = {name: value for name, value in line.items() if name not in _STANDARD}
    named = [str(values[name]) for name in ("agent", "whom", "agents", "by") if values.get(name)]
    agents = {part for text in named for part in re.split(r",\s*|\s+and\s+", text)} - {"-", ""}
    if event == "waiting":
        whom = str(values.get("whom", "-"))
        text = f"waits: {values.get('for')}" + ("" if whom == "-" else f", not yet from {whom}")
    else:
        shown = (f"{name} {value}" for name, value in values.items() if name not in {"run", "round"})
        text = str(line.get("text") or "") or f"{event.replace('_', ' ')}: {', '.join(shown)}"
    known = str(line.get("level"))
    level: Level = known if known in LEVELS else "error"
    number = values.get("round")
    return Event(
        _time(line["time"]),
        level,
        event,
        printable(text),
        number if isinstance(number, int) else None,
        tuple(sorted(agents)),
        values,
    )
