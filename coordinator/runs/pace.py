"""How long agents take, from their own past rounds: how long a round waits for them, and who gets less work.

All of it follows from the journal, so a restart of the coordinator changes nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from types import MappingProxyType

from ..journal.entries import RoundClosed
from ..journal.sqlite import Journal
from ..journal.store import facts_of

HISTORY = 10
"""Rounds of an agent that its expected time is taken from."""

QUANTILE = 0.8
"""Of these times, rounded up: of up to four it is the longest, of ten the third: single bad rounds change nothing."""

LATE_FACTOR = 4.0
"""An agent without an update when its round closed is taken to need this many times as long as the round was."""

GRACE_FACTOR, GRACE_LEAST_S = 1.5, 1.0
"""After the quorum an agent is waited for until this many times its expected time, or so many seconds beyond it."""

DEADLINE_FACTOR = 3.0
"""Before the quorum, where half of the cohort has delivered."""

SLOW_FACTOR, SLOW_LEAST_S = 2.0, 1.0
"""A slow agent is expected to take this many times the median of the cohort, and so many seconds more."""

LATE_ANYWAY = 2
"""Rounds in a row that closed without an agent although it had less to do: later rounds do not wait for it."""

LEAST_WORK = 1 / 64
"""Share of local training; what takes longer than the others' whole training even so comes late."""

Times = Mapping[str, Sequence[float]]
"""Agent -> seconds from its task to its update, share of the work, and 1 where the round closed without it, else 0."""


@dataclass(frozen=True)
class _Time:
    seconds: float
    whole_s: float
    """Seconds for all of the work."""

    work: float
    """The share of it that was asked for."""

    is_late: bool
    """The round closed before: the agent takes longer than this."""


@dataclass
class Pace:
    """The expected times of the agents of one run."""

    _times: dict[str, deque[_Time]] = field(default_factory=dict)
    _expected: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Agent -> expected seconds for all of the work, and for any work at all: looked up after each event of a round."""

    _late_boots: dict[str, str] = field(default_factory=dict)
    """The start of each agent in which it was late last."""

    @classmethod
    def replay(cls, journal: Journal, run: str) -> Pace:
        """After the last closed round of ``run``."""
        result = cls()
        for fact in facts_of(journal.entries(run, ("round_closed",)), RoundClosed):
            result.closed(fact.times, fact.boots)
        return result

    def closed(self, times: Times, boots: Mapping[str, str] = MappingProxyType({})) -> None:
        """A round has closed. That an agent was late is forgotten when it is known how long it takes.

        ``boots``: the start of each agent that was late.
        """
        for agent, (seconds, work, late) in times.items():
            known = self._times.setdefault(agent, deque(maxlen=HISTORY))
            if late:
                boot = boots.get(agent, "")
                self.asked(agent, boot)  # a replay does not know when it was asked
                self._late_boots[agent] = boot
                known.append(_Time(seconds, LATE_FACTOR * seconds / work, work, is_late=True))
            else:
                self._forget_late(agent)
                known.append(_Time(seconds, seconds / work, work, is_late=False))
            self._expect(agent)

    def asked(self, agent: str, boot: str) -> None:
        """An agent is asked; if it was restarted since it was late, that is forgotten: it may have been repaired."""
        if boot and self._late_boots.get(agent, "") not in {"", boot}:
            self._forget_late(agent)
            self._expect(agent)

    def _forget_late(self, agent: str) -> None:
        known = self._times[agent]
        kept = [time for time in known if not time.is_late]
        known.clear()
        known.extend(kept)
        self._late_boots.pop(agent, None)

    def _expect(self, agent: str) -> None:
        known = self._times[agent]
        if known:
            seconds_of_any = _quantile([time.seconds for time in known if not time.is_late])
            self._expected[agent] = _quantile([time.whole_s for time in known]), seconds_of_any
        else:
            self._expected.pop(agent, None)

    def expected_s(self, agent: str, work: float = 1.0) -> float | None:
        """Seconds that ``work`` will take the agent, `QUANTILE` of its past times; None for one without a past."""
        expected = self._expected.get(agent)
        return None if expected is None else work * expected[0]

    def wait_s(self, agent: str, work: float) -> float | None:
        """As `expected_s`, and no less than it took before: on a slow link less work hardly takes less time."""
        expected = self._expected.get(agent)
        return None if expected is None else max(work * expected[0], expected[1])

    def work(self, cohort: Iterable[str]) -> dict[str, float]:
        """Slow agent -> the share of local training that it can do in the median time of the cohort.

        Only of agents that rounds have closed without: one that was restarted and still delivered in time does all of
        its work, so that a run has the same bits as an undisturbed one.
        """
        expected = {agent: s for agent in cohort if (s := self.expected_s(agent)) is not None}
        if not expected:
            return {}
        usual = median_low(expected.values())
        return {
            agent: max(LEAST_WORK, float(f"{usual / seconds:.3g}"))
            for agent, seconds in expected.items()
            if seconds > SLOW_FACTOR * usual
            and seconds > usual + SLOW_LEAST_S
            and any(time.is_late or time.whole_s > time.seconds for time in self._times[agent])
        }

    def stretch(self, took: Mapping[str, float], work: Mapping[str, float]) -> float:
        """How many times as long as expected those who delivered took, in the median; at least 1."""
        expected = {agent: self.expected_s(agent, work.get(agent, 1.0)) for agent in took}
        ratios = [took[agent] / seconds for agent, seconds in expected.items() if seconds]
        return max(1.0, median_low(ratios)) if ratios else 1.0

    def grace_until(self, asked: Mapping[str, float], work: Mapping[str, float], stretch: float, until: float) -> float:
        """Until when to wait for these agents after the quorum; ``asked``: when each was. At most ``until``.

        An agent without a past is waited for until then. Not waited for at all is one that is not expected before that,
        or that came too late with less work in the last `LATE_ANYWAY` rounds: its link is the cause.
        """
        result = -math.inf
        for agent, at in asked.items():
            share = work.get(agent, 1.0)
            expected = self.expected_s(agent, share)
            wait_s = self.wait_s(agent, share)
            if expected is None or wait_s is None:
                return until
            if at + stretch * expected <= until and not self._is_late_anyway(agent):
                result = max(result, at + stretch * max(GRACE_FACTOR * wait_s, wait_s + GRACE_LEAST_S))
        return min(until, result)

    def _is_late_anyway(self, agent: str) -> bool:
        last = list(self._times[agent])[-LATE_ANYWAY:]
        return len(last) == LATE_ANYWAY and all(time.is_late and time.work < 1 for time in last)

    def deadline(
        self, asked: Mapping[str, float], work: Mapping[str, float], stretch: float, least_s: float, until: float
    ) -> float:
        """The deadline of these agents: at least ``least_s`` after each was asked, at most ``until``."""
        result = -math.inf
        for agent, at in asked.items():
            expected = self.wait_s(agent, work.get(agent, 1.0))
            if expected is None:
                return until
            result = max(result, at + max(least_s, DEADLINE_FACTOR * stretch * expected))
        return min(until, result)


def _quantile(times: list[float]) -> float:
    return sorted(times)[math.ceil(QUANTILE * len(times)) - 1] if times else 0.0


def slowed(times: Times) -> frozenset[str]:
    """Agents that were late in a round and will be asked for less work in the next one."""
    return frozenset(agent for agent, (_, work, late) in times.items() if late and work > LEAST_WORK)


def times_of(took: Mapping[str, float], late: Mapping[str, float], work: Mapping[str, float]) -> dict[str, list[float]]:
    """The `Times` of a closed round: seconds of those who delivered, and of the others since they were asked."""
    both: Collection[tuple[Mapping[str, float], int]] = ((took, 0), (late, 1))
    return {
        agent: [round(seconds, 3), work.get(agent, 1.0), is_late]
        for times, is_late in both
        for agent, seconds in sorted(times.items())
    }
