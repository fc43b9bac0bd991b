"""Agents that are left out of rounds because they failed in earlier ones: with growing pauses, until they deliver."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..state.journal import Journal, OpenRound, RunRecord, step
from ..text import counted

MISSES_TOLERATED = 1
"""Rounds in a row that an agent may miss: it was restarted, or its connection was gone for a while."""

LONGEST_PAUSE_ROUNDS = 16
"""Pauses are 1, 2, 4, … rounds, up to this: a device that was repaired is asked again some day."""

Boots = Callable[[str], str]
"""The start of an agent (`Member.boot`) that is there now; empty where none is known."""


@dataclass
class _Failures:
    """What one agent has done wrong since its last accepted update."""

    failures: int = 0
    misses: int = 0
    until: int = 0
    reason: str = ""
    boot: str = ""


@dataclass
class Exclusions:
    """Which agents a run leaves out, and why. Everything follows from the journal, so a restart changes nothing.

    A rejected update, a fault, or no update by the deadline is a failure; so is the second round in a row that closes
    without an agent. After its n-th failure an agent is left out of 2^(n-1) rounds (at most `LONGEST_PAUSE_ROUNDS`),
    and then asked again, on trial. An accepted update settles everything. An agent that has been restarted since it
    failed is asked again at once: somebody may have repaired it. One that was away is not: it may be crashing.
    """

    delivered: set[str] = field(default_factory=set)
    """Agents of which the run has accepted an update."""

    _failures: dict[str, _Failures] = field(default_factory=dict)
    _rounds: dict[str, tuple[set[int], str]] = field(default_factory=dict)

    @classmethod
    def replay(cls, journal: Journal, run: str) -> Exclusions:
        """As they stand after the last entry of ``run``."""
        found, record = cls(), RunRecord(run, {})
        for entry in journal.entries(run):
            if entry.kind == "round_closed" and record.open_round is not None:
                found.closed(record.open_round, entry.body.get("unanswered", {}), entry.body.get("boots", {}))
            record = step(record, entry)
            if entry.kind == "round_opened" and entry.round is not None:
                found.opened(entry.round, entry.body.get("left_out", {}))
        return found

    def opened(self, number: int, left_out: Mapping[str, str]) -> None:
        """Round ``number``, or another attempt at it, does without these agents and nobody else."""
        for agent in self._rounds.keys() - left_out.keys():
            rounds, reason = self._rounds[agent]
            self._rounds[agent] = (rounds - {number}, reason)
        for agent, reason in left_out.items():
            rounds, _ = self._rounds.get(agent, (set(), ""))
            self._rounds[agent] = ({*rounds, number}, reason)

    def closed(self, done: OpenRound, unanswered: Mapping[str, str], boots: Mapping[str, str]) -> dict[str, str]:
        """A round is over. ``unanswered``: those who were there all the time without delivering, and why.

        ``boots``: the starts of those who are there and have not delivered; ``done`` has those of rejected agents.
        Returns those who are left out from now on, and for how long and why, in words.
        """
        told = {}
        for agent in done.cohort:
            if agent in done.updates:
                self.delivered.add(agent)
                self._failures.pop(agent, None)
                continue
            known = self._failures.setdefault(agent, _Failures())
            known.misses = 0 if agent in done.refused else known.misses + 1
            if agent in done.refused:
                known.reason, known.boot = done.refused[agent], done.failed_boots.get(agent, "")
            elif agent in unanswered:
                known.reason, known.boot = unanswered[agent], boots.get(agent, "")
            elif known.failures or known.misses > MISSES_TOLERATED:
                known.reason = f"no update in {counted(known.misses, 'round')} in a row"
                known.boot = known.boot if known.boot == boots.get(agent) else ""
            else:
                continue
            known.failures += 1
            pause = min(2 ** (known.failures - 1), LONGEST_PAUSE_ROUNDS)
            known.until = done.round + 1 + pause
            told[agent] = f"for {counted(pause, 'round')}: {known.reason}"
        return told

    def left_out(self, number: int, boots: Boots = lambda _: "") -> dict[str, str]:
        """Agent -> reason, of those that round ``number`` is to do without."""
        found = {}
        for agent, known in sorted(self._failures.items()):
            is_restarted = known.boot and boots(agent) not in {"", known.boot}
            if known.until > number and not is_restarted:
                found[agent] = known.reason
        return found

    def asked_again_in(self, agent: str) -> int:
        """The first round that an agent is asked in again; 0 for one that is not left out."""
        known = self._failures.get(agent)
        return known.until if known is not None else 0

    @property
    def on_trial(self) -> frozenset[str]:
        """Agents that have failed and have not delivered since."""
        return frozenset(self.failing)

    @property
    def failing(self) -> dict[str, str]:
        """Agent -> reason, of those that have failed and have not delivered since."""
        return {agent: known.reason for agent, known in sorted(self._failures.items()) if known.failures}

    def body(self) -> dict[str, Any]:
        """Agent -> the rounds that did without it and the reason for the last of them, as JSON."""
        return {
            agent: {"rounds": sorted(rounds), "reason": reason}
            for agent, (rounds, reason) in sorted(self._rounds.items())
            if rounds
        }


def without(agents: Collection[str], left_out: Collection[str]) -> list[str]:
    """Those of ``agents`` that are not left out, in their order."""
    return [agent for agent in agents if agent not in left_out]
