"""The logs of one run, and those of a parent that several runs belong to.

A simulation opens its `RunLogs` before anything else, so that a log that cannot be used is refused at once; begins them
when the run is known, gives them each closed round, and ends them with the result. A program that makes many runs, such
as the seeds of a method, opens a parent first::

    parent = open_parent(("mlflow:http://127.0.0.1:5000",), RunDescription("f00d…", "fedper", folder, is_parent=True))
    for seed in range(6):
        simulate("fedper", data="digits", seed=seed, log=parent.child)
    parent.end(RunEnd("finished", figures={"acc.personal.mean": 0.93}))

`ParentLogs.child` is a value that another process can be given as well: it names the logs and the parent, and holds
nothing open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge_agent.core.errors import UsageError

from .base import Logger
from .choice import absolute_choice, check_loggers, make_loggers
from .delivery import ABORT_LIMIT_S, END_LIMIT_S, Delivery, LogOutcome
from .records import ParentRun, RoundResult, RunDescription, RunEnd

LOGS = "logs"
"""Folder in that of a run, with the logs that name no other place."""


@dataclass(frozen=True)
class ChildLogs:
    """Where a run is to be logged that belongs to a parent."""

    choices: tuple[str, ...]
    folder: Path | None
    """Where those log that name no place; None: in the run's own folder."""

    parent: ParentRun


LogChoice = str | Logger | ChildLogs
"""What a run can be asked to log to."""


def choices_of(log: LogChoice | Sequence[LogChoice] | None) -> tuple[LogChoice, ...]:
    """Return what was chosen as several choices: none, one, or as many as there are.

    Raises:
        UsageError: It is of another kind.
    """
    if log is None:
        return ()
    if isinstance(log, str | Logger | ChildLogs):
        return (log,)
    if not isinstance(log, Sequence):
        raise UsageError(f"log = {log!r}: expected a name such as 'csv:FOLDER', a Logger, or a list of these")
    return tuple(log)


class RunLogs:
    """The logs of one run. Call `begin`, `log_round` for each round, and `end` or `abort`."""

    def __init__(self, deliveries: Sequence[Delivery], parent: ParentRun | None = None) -> None:
        self._deliveries = tuple(deliveries)
        self._parent = parent

    @classmethod
    def open(cls, choices: LogChoice | Sequence[LogChoice] | None, folder: Path | None) -> RunLogs:
        """Return the logs that were chosen, after a check that all of them can be used.

        Args:
            choices: Names as behind ``--log``, objects, or what a parent gives its children; None: no logs.
            folder: The run's own folder; None: it is a temporary one.

        Raises:
            ConfigError: Some choices name no log, or no place.
            HeadwaterError: A log cannot be used: its package is missing, or its server away.
        """
        flat: list[str | Logger] = []
        parent: ParentRun | None = None
        base = None if folder is None else folder / LOGS
        for choice in choices_of(choices):
            if isinstance(choice, ChildLogs):
                flat += choice.choices
                parent = choice.parent
                base = choice.folder or base
            else:
                flat.append(choice)
        loggers = make_loggers(flat, base)
        check_loggers(loggers)
        return cls([Delivery(named.name, named.logger) for named in loggers], parent)

    @property
    def is_empty(self) -> bool:
        """Whether the run has no log at all."""
        return not self._deliveries

    def begin(self, run: RunDescription) -> None:
        """Begin to log a run; returns at once."""
        described = replace(run, parent=self._parent)
        for delivery in self._deliveries:
            delivery.begin(described)

    def log_round(self, row: RoundResult) -> None:
        """Log a closed round soon; returns at once."""
        for delivery in self._deliveries:
            delivery.log_round(row)

    def flush(self) -> None:
        """Wait until all that was given so far is logged, or could not be at the first try."""
        for delivery in self._deliveries:
            delivery.flush(END_LIMIT_S)

    def end(self, end: RunEnd) -> list[LogOutcome]:
        """Log how the run has ended, wait for all logs for a bounded time, and return what they have."""
        return self._end(end, END_LIMIT_S)

    def abort(self, end: RunEnd) -> list[LogOutcome]:
        """Do the same for a run that has failed or was stopped, and wait for less long."""
        return self._end(end, ABORT_LIMIT_S)

    def _end(self, end: RunEnd, limit_s: float) -> list[LogOutcome]:
        """Give the end to all logs, whose time for it passes together, and return what they have."""
        for delivery in self._deliveries:
            delivery.end(end, limit_s)
        return [delivery.wait() for delivery in self._deliveries]


class ParentLogs:
    """The logs of a run that has no rounds, and that other runs belong to."""

    def __init__(self, logs: RunLogs, child: ChildLogs) -> None:
        self._logs = logs
        self.child = child
        """What each of those runs gets as ``log=``."""

    def end(self, end: RunEnd) -> list[LogOutcome]:
        """Log what follows from all of them, and return what the logs have."""
        return self._logs.end(end)


def open_parent(choices: str | Sequence[str], run: RunDescription) -> ParentLogs:
    """Open the logs of a parent, and wait for a bounded time until they have it, so that its children find it there.

    Args:
        choices: Names as behind ``--log``; an object logs one run, and so cannot be shared with children.
        run: The parent: its ``uid``, the same whenever the program is resumed, its name, and a folder of its own.

    Raises:
        HeadwaterError: As by `RunLogs.open`.
    """
    texts = (choices,) if isinstance(choices, str) else choices
    names = tuple(absolute_choice(text) for text in texts)
    logs = RunLogs.open(names, run.folder)
    logs.begin(replace(run, is_parent=True))
    logs.flush()
    return ParentLogs(logs, ChildLogs(names, run.folder / LOGS, ParentRun(run.uid, run.name)))
