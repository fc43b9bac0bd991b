"""What is counted in the journal for monitoring: starts, runs, rounds, updates and bytes since the first entry.

Counters are derived from the entries, so that they go on after a restart where they were.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from edge_agent.core import errors
from edge_agent.wire.messages.fields import DISK_ERROR

from ..journal.entries import RoundClosed, UpdateAccepted, UpdateRefused
from ..journal.kinds import FINAL, Kind
from ..journal.store import Entry

SECONDS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
"""Upper bounds of the buckets of durations."""

REASONS = frozenset({DISK_ERROR, *(name for name, value in vars(errors).items() if isinstance(value, type))})
"""Names of errors that a rejection can begin with; everything else, which peers could choose, counts as ``other``."""

ACCURACIES = ("acc.global", "acc.personal", "acc.local")


class RoundOfRun(NamedTuple):
    """A round by its run and its number."""

    run: str | None
    round: int | None


@dataclass
class Histogram:
    """Durations, counted in buckets."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    sum: float = 0.0

    def observe(self, value: float) -> None:
        """Count one more observation."""
        self.counts[bisect_left(SECONDS, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return each upper bound with the number of observations up to it, as Prometheus has them."""
        bounds = [*map(str, SECONDS), "+Inf"]
        total = 0
        result = list[tuple[str, float]]()
        for bound, count in zip(bounds, self.counts, strict=True):
            total += count
            result.append((bound, total))
        return result


@dataclass
class Counts:
    """What the journal says so far; `add` counts one more of its entries."""

    kinds: ClassVar[tuple[Kind, ...]] = (
        "coordinator_started",
        "run_requested",
        "run_started",
        "run_finished",
        "run_failed",
        "run_cancelled",
        "run_extended",
        "round_opened",
        "update_refused",
        "round_closed",
    )

    starts: int = 0
    runs: dict[str, str] = field(default_factory=dict)
    """Run -> status."""

    rounds: Histogram = field(default_factory=Histogram)
    """Seconds from the tasks of a round to the new model."""

    waits: Histogram = field(default_factory=Histogram)
    """Seconds that a round waited for agents before its tasks."""

    accepted: int = 0
    late: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Class of error -> rejected updates."""

    received_bytes: int = 0
    sent_bytes: int = 0
    open_round: RoundOfRun | None = None
    opened_at: str = ""
    """When the open round began (ISO 8601, UTC)."""

    closed_round: RoundOfRun | None = None
    """The round that was closed last."""

    def add(self, entry: Entry) -> None:
        """Count one more entry of `kinds`."""
        run = entry.run or ""
        fact = entry.fact
        if entry.kind == "coordinator_started":
            self.starts += 1
        elif entry.kind == "run_requested":
            self.runs[run] = "requested"
        elif entry.kind in {"run_started", "run_extended"}:
            self.runs[run] = "running"
        elif entry.kind in FINAL:
            self.runs[run] = FINAL[entry.kind]
            if self.open_round is not None and self.open_round.run == entry.run:
                self.open_round = None
        elif entry.kind == "round_opened":
            self._open_round(entry)
        elif isinstance(fact, UpdateRefused):
            if self.open_round == (entry.run, entry.round):
                self.rejected[reason_label(fact.reason)] += 1
        elif isinstance(fact, RoundClosed):
            self._close_round(entry, fact)

    def _open_round(self, entry: Entry) -> None:
        """Note that a round is open; another attempt at it does not begin it again."""
        opened = RoundOfRun(entry.run, entry.round)
        if self.open_round != opened:
            self.open_round = opened
            self.opened_at = entry.at
        self.runs[entry.run or ""] = "running"

    def _close_round(self, entry: Entry, fact: RoundClosed) -> None:
        """Count a closed round with its updates and bytes."""
        self.open_round = None
        self.closed_round = RoundOfRun(entry.run or "", entry.round or 0)
        self.rounds.observe(float(fact.seconds or 0.0))
        self.waits.observe(float(fact.waiting_s or 0.0))
        self.accepted += fact.clients or 0
        self.late += len(fact.late or ())
        self.received_bytes += fact.bytes_up or 0
        self.sent_bytes += fact.bytes_down or 0


def reason_label(reason: str) -> str:
    """Return the class of error that a rejection names, or ``other``."""
    name = reason.partition(":")[0]
    return name if name in REASONS else "other"


class RoundAccuracies:
    """The accuracies that agents reported with their updates of one round."""

    kinds: tuple[Kind, ...] = ("update_accepted",)

    def __init__(self) -> None:
        self.by_scope: dict[str, list[float]] = {}
        """Scope (global, personal, local) -> the accuracies, 0..1; no scope without any."""

    def add(self, entry: Entry) -> None:
        """Take the next update of the round."""
        metrics = entry.fact.metrics if isinstance(entry.fact, UpdateAccepted) else {}
        for name, value in metrics.items():
            if name in ACCURACIES:
                self.by_scope.setdefault(name.removeprefix("acc."), []).append(float(value))
