"""What a round took and brought: one line of a run's figures, which the journal can give again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .collect import Collection
from .fleet import Fleet
from .journal import Accepted, Journal, OpenRound, RunRecord
from .journal.replay import step
from .store import StateFolder

FIGURES = ("seconds", "waiting_s", "bytes_up", "bytes_down", "late")
"""What only the process that did the round knows; it goes into the journal with the round's end."""


@dataclass
class Tally:
    """Time and bytes at the start of a round, and how much of the time went by in waiting for agents to come."""

    started_at: float
    bytes_up: int
    bytes_down: int
    waiting_s: float = 0.0

    @classmethod
    def begin(cls, fleet: Fleet) -> Tally:
        """As they stand now."""
        return cls(fleet.stopwatch(), *_bytes(fleet))

    def figures(self, fleet: Fleet, collection: Collection) -> dict[str, Any]:
        """The round's `FIGURES`: ``seconds`` from sending out the work to the end, ``waiting_s`` before that."""
        up, down = _bytes(fleet)
        return {
            "seconds": round(fleet.stopwatch() - self.started_at - self.waiting_s, 4),
            "waiting_s": round(self.waiting_s, 4),
            "bytes_up": up - self.bytes_up,
            "bytes_down": down - self.bytes_down,
            "late": [{"agent": agent, "round": number} for agent, number in collection.late],
        }


def line(
    number: int,
    figures: Mapping[str, Any],
    accepted: Mapping[str, Accepted],
    refused: Mapping[str, str],
    missing: tuple[str, ...],
) -> dict[str, Any]:
    """The round's line in ``metrics.jsonl``."""
    return {
        "kind": "round",
        "round": number,
        **{name: figures.get(name) for name in FIGURES},
        "agents": sorted(accepted),
        "missing": list(missing),
        "refused": [{"agent": agent, "reason": why} for agent, why in sorted(refused.items())],
        "acc": {scope: _metric(accepted, f"acc.{scope}") for scope in ("global", "personal")},
        "loss": _metric(accepted, "loss"),
    }


def restore(state: StateFolder, run: str) -> None:
    """Put the lines of closed rounds that ``metrics.jsonl`` lacks into it: a kill came between journal and figures.

    Raises:
        StateError: the figures that are there are damaged.
    """
    closed = {entry.round for entry in state.journal.entries(run, ("round_closed",)) if entry.round is not None}
    if not closed:
        return
    folder = state.run(run)
    there = {record.get("round") for record in folder.metrics() if record.get("kind") == "round"}
    for number in sorted(closed - there):
        folder.append_metrics(_from_journal(state.journal, run, number))


def _from_journal(journal: Journal, run: str, number: int) -> dict[str, Any]:
    record, figures = RunRecord(run, {}, round=number - 1), dict[str, Any]()
    for entry in journal.entries(run, round=number):
        if entry.kind == "round_closed":
            figures = entry.body
            break  # what comes after it was late
        record = step(record, entry)
    opened = record.open_round or OpenRound(number, 1, (), {})
    missing = tuple(a for a in opened.cohort if a not in opened.updates and a not in opened.refused)
    return line(number, figures, opened.updates, opened.refused, missing)


def _bytes(fleet: Fleet) -> tuple[int, int]:
    return sum(fleet.collector.bytes_from.values()), sum(fleet.distributor.bytes_to.values())


def _metric(accepted: Mapping[str, Accepted], name: str) -> dict[str, float]:
    return {agent: update.metrics[name] for agent, update in sorted(accepted.items()) if name in update.metrics}
