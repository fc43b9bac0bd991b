"""What happened in a run, in order: the events of its journal entries, with the coordinator's log lines between them.

It is read from files alone, so it shows runs that are over, and those of a coordinator that does not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from edge_agent.core.formats import printable
from edge_agent.wire.messages.fields import run_name

from ..views.follower import Follower
from ..views.timeline import KINDS, LEVELS, Event, Level, TimelineView, utc_text, with_durations
from .log_file import LogLine, LogReader
from .store import StateFolder


class Timeline:
    """The events of one run; `read_new` returns those since the last call."""

    def __init__(self, state: StateFolder, run: str, *, least: Level = "info", agent: str | None = None) -> None:
        """Make the timeline of a run, of which nothing was read.

        Args:
            state: The folder with journal and log.
            run: The run.
            least: The least level of the events that are wanted.
            agent: The agent that events are to be about; None: whichever.
        """
        self._run = run
        self._least = LEVELS.index(least)
        self._agent = agent
        self._log = LogReader(state.path)
        # There is one update for each agent and round: they are read only where somebody wants them.
        self._view = TimelineView(with_updates=self._least == 0 or agent is not None)
        self._follower = Follower(state.journal, self._view, run=run)

    @property
    def is_over(self) -> bool:
        """Whether the end of the run was among the events."""
        return bool(self._view.ended_at)

    def read_new(self) -> list[Event]:
        """Return the wanted events since the last call, in the order of their times.

        Raises:
            StateError: The journal cannot be read.
        """
        # The journal first: whether a log line without a run is about this one follows from when the run began.
        self._follower.read()
        events = [*self._view.take(), *self._read_log()]
        events.sort(key=lambda event: event.at)
        return [event for event in with_durations(events) if self._is_wanted(event)]

    def _read_log(self) -> Iterator[Event]:
        """Yield the events of new log lines that are about this run, or were written while it was under way."""
        for line in self._log.new():
            if line.event in KINDS:
                continue  # the journal has it as well
            named = None if line.run is None else run_name(line.run)
            is_during = named is None and self._view.is_under_way(utc_text(line.time))
            if named == self._run or is_during:
                yield _event_of(line)

    def _is_wanted(self, event: Event) -> bool:
        """Return whether an event is about the agent that was asked for, and important enough."""
        is_about = self._agent is None or event.is_about(self._agent)
        return is_about and LEVELS.index(event.level) >= self._least


_NAMING = ("agent", "whom", "agents", "by")
"""Fields of a log line that name agents."""


def _event_of(line: LogLine) -> Event:
    """Return the event of a log line."""
    level: Level = line.level if line.level in LEVELS else "error"
    number = line.values.get("round")
    return Event(
        utc_text(line.time),
        level,
        line.event,
        printable(_text_of(line)),
        number if isinstance(number, int) else None,
        _agents_in(line),
        dict(line.values),
    )


def _text_of(line: LogLine) -> str:
    """Return the text of a log line: what a wait is for, the line's own text, or else its values by name."""
    values = line.values
    if line.event == "waiting":
        whom = str(values.get("whom", "-"))
        missing = "" if whom == "-" else f", not yet from {whom}"
        return f"waits: {values.get('for')}{missing}"
    if line.text:
        return line.text
    named = ", ".join(f"{name} {value}" for name, value in values.items() if name not in {"run", "round"})
    return f"{line.event.replace('_', ' ')}: {named}"


def _agents_in(line: LogLine) -> tuple[str, ...]:
    """Return the agents that a log line names, sorted; lists of them are text with commas, or ``and``."""
    agents = set[str]()
    for name in _NAMING:
        if line.values.get(name):
            agents.update(re.split(r",\s*|\s+and\s+", str(line.values[name])))
    return tuple(sorted(agents - {"-", ""}))
