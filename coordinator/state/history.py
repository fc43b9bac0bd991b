"""What an agent did before, from the journal and the log of faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..views.history import (
    KINDS,
    AccuracyLine,
    BundleLine,
    HistoryLine,
    PinLine,
    RejectedLine,
    describe_entry,
)
from ..views.releases import book_of
from .fault_log import Fault, FaultLog
from .store import StateFolder

MOST_ENTRIES = 50
"""The number of lines of each list, the newest ones."""

Line = TypeVar("Line", AccuracyLine, BundleLine, PinLine, RejectedLine)


@dataclass(frozen=True)
class AgentHistory:
    """What an agent did before: five lists, each with the oldest line first, cut to the newest lines."""

    accuracy: tuple[AccuracyLine, ...]
    bundles: tuple[BundleLine, ...]
    pins: tuple[PinLine, ...]
    rejected: tuple[RejectedLine, ...]
    faults: tuple[Fault, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the history as ``headwater agents NAME --json`` prints it."""
        return {
            "accuracy": [line.to_json() for line in self.accuracy],
            "bundles": [line.to_json() for line in self.bundles],
            "pins": [line.to_json() for line in self.pins],
            "rejected": [line.to_json() for line in self.rejected],
            "faults": [
                {"at": fault.at, "error": fault.error, "message": fault.message, "remedy": fault.remedy}
                for fault in self.faults
            ],
        }


def history_of(state: StateFolder, agent: str, most: int = MOST_ENTRIES) -> AgentHistory:
    """Return what an agent did before, with at most so many lines of each kind."""
    lines = list[HistoryLine]()
    book = book_of(state.journal)
    for entry in state.journal.entries(kinds=("update_accepted", *KINDS), agent=agent):
        line = describe_entry(entry, book)
        if line is not None:
            lines.append(line)
    faults = [reported.fault for reported in FaultLog(state.path).read() if reported.agent == agent]
    return AgentHistory(
        accuracy=_newest(lines, AccuracyLine, most),
        bundles=_newest(lines, BundleLine, most),
        pins=_newest(lines, PinLine, most),
        rejected=_newest(lines, RejectedLine, most),
        faults=tuple(faults[-most:]),
    )


def _newest(lines: Sequence[HistoryLine], kind: type[Line], most: int) -> tuple[Line, ...]:
    """Return the newest lines of one kind."""
    of_kind = [line for line in lines if isinstance(line, kind)]
    return tuple(of_kind[-most:])
