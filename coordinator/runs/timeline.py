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

from ..state.journal import CHECKPOINTS, FINAL, Entry
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


def _requested(body: Mapping[str, Any]) -> str:
    rounds = counted(int(body.get("rounds") or 0), "round")
    return f"requested: {body.get('method')}, {rounds}, seed {body.get('seed')}"


def _opened(entry: Entry, said: SaidBefore) -> str:
    cohort = entry.body.get("cohort", ())
    without = entry.body.get("left_out", {})
    again = f", attempt {entry.body['attempt']}" if entry.body.get("attempt", 1) != 1 else ""
    left = "".join(f"; without {agent}: {said.reason(f'opened {agent}', why)}" for agent, why in without.items())
    return f"round {entry.round} begins{again} with {counted(len(cohort), 'agent')}: {listed(cohort)}{left}"


def _closed(entry: Entry) -> str:
    body = entry.body
    parts = [f"round {entry.round} is closed"]
    if body.get("seconds") is not None:
        parts.append(f"{body['seconds']:.1f} s, {body.get('waiting_s') or 0:.1f} s of waiting before it")
    if body.get("bytes_up") is not None:
        parts.append(f"{body['bytes_up'] / 1e6:.2f} MB up, {body.get('bytes_down', 0) / 1e6:.2f} MB down")
    if late := body.get("late"):
        parts.append(f"late: {listed([one['agent'] for one in late])}")
    if busy := body.get("busy"):
        parts.append(f"still at work: {listed(sorted(busy))}")
    return "; ".join(parts)


def _accepted(entry: Entry) -> str:
    metrics = entry.body.get("metrics", {})
    shown = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items() if name.startswith(("acc.", "loss")))
    return f"update of {entry.agent} for round {entry.round}{f': {shown}' if shown else ''}"


def _reported(body: Mapping[str, Any]) -> str:
    known = (f"acc.{scope} {value:.3f}" for scope, value in (body.get("acc") or {}).items() if value is not None)
    alone = "; better off alone" if body.get("better_alone") else ""
    back = f"; keeps another bundle: {body['rolled_back']}" if body.get("rolled_back") else ""
    return f"{body.get('id')}: {', '.join(known) or 'no accuracy'}{alone}{back}"


def _reason(entry: Entry) -> str:
    return str(entry.body.get("reason", "")) or "no reason was given"


def _bundle(entry: Entry) -> str:
    return f"bundle {str(entry.body.get('bundle_id', ''))[:12]}"


def _clients(entry: Entry) -> str:
    return counted(len(entry.body.get("clients", ())), "client")


_KINDS: dict[str, tuple[Level, Callable[[Entry], str]]] = {
    "run_requested": ("info", lambda one: _requested(one.body)),
    "cancel_requested": ("info", lambda one: f"a cancel was requested: {_reason(one)}"),
    "run_started": ("info", lambda _: "begins"),
    "warm_started": ("info", lambda _: "begins with a model that was trained on the coordinator's own data"),
    "round_opened": ("info", lambda one: _opened(one, SaidBefore())),
    "update_accepted": ("debug", _accepted),
    "update_refused": (
        "warning",
        lambda one: f"update of {one.agent} for round {one.round} rejected: {_reason(one)}",
    ),
    "round_closed": ("info", _closed),
    "norm_pooled": ("info", lambda one: f"batch norm statistics of {_clients(one)}"),
    "ranges_collected": ("info", lambda one: f"ranges of activations of {_clients(one)}"),
    "proxy_evaluated": ("info", lambda one: f"acc.proxy after round {one.round}: {one.body.get('acc')}"),
    "proxy_failed": ("warning", lambda one: f"acc.proxy after round {one.round} not computed: {_reason(one)}"),
    "run_finished": ("info", lambda one: f"finished, encoder {str(one.body.get('encoder_sha256') or 'none')[:16]}"),
    "run_failed": ("error", lambda one: f"failed: {_reason(one)}"),
    "run_cancelled": ("warning", lambda one: f"cancelled: {_reason(one)}"),
    "run_pruned": ("info", lambda _: "checkpoints and bundles were removed"),
    "bundle_exported": ("info", lambda one: f"{_bundle(one)} exported"),
    "release_made": ("info", lambda one: f"{_bundle(one)} released"),
    "release_reported": ("info", lambda one: _reported(one.body)),
}
"""Kinds of entries that are shown, with their levels and texts."""


_DATA = ("reason", "cohort", "left_out", "metrics", "acc")


def _of_entry(entry: Entry, said: SaidBefore) -> Event:
    """Return the event of an entry; a reason that was said before is not said in full again."""
    level, text_of = _KINDS[entry.kind]
    body = entry.body
    if entry.kind == "round_opened":
        text = _opened(entry, said)
    elif entry.kind == "update_refused":
        why = said.reason(f"refused {entry.agent}", _reason(entry))
        text = f"update of {entry.agent} for round {entry.round} rejected: {why}"
    else:
        text = text_of(entry)
    about = {*body.get("cohort", ()), *body.get("left_out", {}), *([entry.agent] if entry.agent else ())}
    data: dict[str, Any] = {name: body[name] for name in _DATA if name in body}
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
