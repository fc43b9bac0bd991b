"""How long agents take, from their own past rounds: how long a round waits for them, and who gets less work.

All of it follows from the journal, so a restart of the coordinator changes nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from types import MappingProxyType

from ..journal.entries import RoundClosed
from ..journal.store import Journal, facts_of

HISTORY = 10
"""Rounds of an agent that its expected time is taken from."""

QUANTILE = 0.8
"""The quantile of these times that is expected, rounded up to one of them.

Of up to four times it is the longest, of ten the third longest: single bad rounds change nothing.
"""

LATE_FACTOR = 4.0
"""An agent without an update when its round closed is taken to need this many times as long as the round was.

A convention: how long it takes is not known. It is asked for a quarter of the work or less in the next round. With a
lower factor an agent that is much slower misses more rounds; with a higher one an agent that was nearly ready trains
too little, for one round: its true time counts as soon as it delivers.
"""

GRACE_FACTOR = 1.5
"""After the quorum an agent is waited for until this many times its expected time; see `GRACE_LEAST_S`.

Where the times of an agent are log-normal, a round closes without it in 0.7 % of rounds if their logarithm has a
standard deviation of 0.25, in 4.9 % if it has one of 0.5, and the others wait half as long as usual at most.
"""

GRACE_LEAST_S = 1.0
"""After the quorum an agent is waited for at least this many seconds beyond its expected time."""

DEADLINE_FACTOR = 3.0
"""Before the quorum, after half of the cohort delivered, an agent is waited for this many times its expected time.

Without the quorum a round has to be repeated, so the limit is one that agents hardly reach by chance: 0.1 % of rounds
for log-normal times with a standard deviation of 0.5 in the logarithm.
"""

SLOW_FACTOR = 2.0
"""A slow agent is expected to take more than this many times the median of the cohort; see `SLOW_LEAST_S`."""

SLOW_LEAST_S = 1.0
"""A slow agent is also expected to take at least this many seconds more than the median of the cohort."""

LATE_ANYWAY = 2
"""After so many rounds in a row that closed without an agent although it had less to do, none waits for it."""

LEAST_WORK = 1 / 64
"""The least share of local training that an agent is asked for, even if it will come late with that."""

Times = Mapping[str, Sequence[float]]
"""Agent -> (seconds from its task to its update, share of the work, 1 if the round closed without it, else 0)."""


@dataclass(frozen=True)
class _Time:
    """How long an agent took in one round."""

    seconds: float
    """From its task to its update, or to the end of the round that closed without it."""

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
        """Return the pace of the agents after the last closed round of ``run``."""
        pace = cls()
        for fact in facts_of(journal.entries(run, ("round_closed",)), RoundClosed):
            pace.note_closed(fact.times, fact.boots)
        return pace

    def note_closed(self, times: Times, boots: Mapping[str, str] = MappingProxyType({})) -> None:
        """Note the times of a closed round. That an agent was late is forgotten once it is known how long it takes.

        ``boots``: the start of each agent that was late.
        """
        for agent, (seconds, work, late) in times.items():
            times_of_agent = self._times.setdefault(agent, deque(maxlen=HISTORY))
            if late:
                boot = boots.get(agent, "")
                self.note_asked(agent, boot)  # a replay does not know when it was asked
                self._late_boots[agent] = boot
                times_of_agent.append(_Time(seconds, LATE_FACTOR * seconds / work, work, is_late=True))
            else:
                self._forget_late(agent)
                times_of_agent.append(_Time(seconds, seconds / work, work, is_late=False))
            self._expect(agent)

    def note_asked(self, agent: str, boot: str) -> None:
        """Note that an agent is asked. If it was restarted since it was late, that is forgotten: it may be repaired."""
        if boot and self._late_boots.get(agent, "") not in {"", boot}:
            self._forget_late(agent)
            self._expect(agent)

    def _forget_late(self, agent: str) -> None:
        """Remove the times of rounds that closed without the agent: they only say that it takes longer than that."""
        times = self._times[agent]
        delivered = [time for time in times if not time.is_late]
        times.clear()
        times.extend(delivered)
        self._late_boots.pop(agent, None)

    def _expect(self, agent: str) -> None:
        """Compute anew what is expected of an agent."""
        times = self._times[agent]
        if not times:
            self._expected.pop(agent, None)
            return
        whole_s = _quantile([time.whole_s for time in times])
        any_s = _quantile([time.seconds for time in times if not time.is_late])
        self._expected[agent] = (whole_s, any_s)

    def expected_s(self, agent: str, work: float = 1.0) -> float | None:
        """Return the seconds that ``work`` will take the agent, by `QUANTILE` of its past; None without a past."""
        expected = self._expected.get(agent)
        if expected is None:
            return None
        whole_s, _ = expected
        return work * whole_s

    def wait_s(self, agent: str, work: float) -> float | None:
        """Return how long to wait for ``work`` of the agent, in seconds; None for one without a past.

        That is `expected_s`, and no less than the agent took before: on a slow link less work hardly takes less time.
        """
        expected = self._expected.get(agent)
        if expected is None:
            return None
        whole_s, any_s = expected
        return max(work * whole_s, any_s)

    def work(self, cohort: Iterable[str]) -> dict[str, float]:
        """Return slow agent -> the share of local training that it can do in the median time of the cohort.

        Only of agents that rounds have closed without: one that was restarted and still delivered in time does all of
        its work, so that a run has the same bits as an undisturbed one.
        """
        # 1. What is expected of the agents that have a past.
        expected: dict[str, float] = {}
        for agent in cohort:
            seconds = self.expected_s(agent)
            if seconds is not None:
                expected[agent] = seconds
        if not expected:
            return {}
        # 2. Who is slow beside the median: twice as slow, and by more than a second, which others hardly wait for.
        usual_s = median_low(expected.values())
        slow_s = max(SLOW_FACTOR * usual_s, usual_s + SLOW_LEAST_S)
        shares: dict[str, float] = {}
        for agent, seconds in expected.items():
            if seconds > slow_s and self._was_ever_late(agent):
                # Three digits, as the share is journaled and sent.
                shares[agent] = max(LEAST_WORK, float(f"{usual_s / seconds:.3g}"))
        return shares

    def _was_ever_late(self, agent: str) -> bool:
        """Return whether a round closed without the agent, or asked it for less work because an earlier one had."""
        return any(time.is_late or time.whole_s > time.seconds for time in self._times[agent])

    def stretch(self, took: Mapping[str, float], work: Mapping[str, float]) -> float:
        """Return how many times as long as expected those who delivered took, in the median; at least 1."""
        ratios: list[float] = []
        for agent, seconds in took.items():
            expected_s = self.expected_s(agent, work.get(agent, 1.0))
            if expected_s:
                ratios.append(seconds / expected_s)
        if not ratios:
            return 1.0
        return max(1.0, median_low(ratios))

    def grace_until(self, asked: Mapping[str, float], work: Mapping[str, float], stretch: float, until: float) -> float:
        """Return until when to wait for these agents after the quorum.

        An agent without a past is waited for until the end. Not waited for at all is one that is not expected before
        that, or that came too late with less work in the last `LATE_ANYWAY` rounds: its link is the cause.

        Args:
            asked: Agent -> when it was asked.
            work: Agent -> its share of local training, of those that do not do all of it.
            stretch: `stretch` of the round.
            until: The end of the grace period, which is not exceeded.
        """
        latest = -math.inf
        for agent, asked_at in asked.items():
            share = work.get(agent, 1.0)
            expected_s = self.expected_s(agent, share)
            wait_s = self.wait_s(agent, share)
            if expected_s is None or wait_s is None:
                return until
            is_expected = asked_at + stretch * expected_s <= until
            if is_expected and not self._is_late_anyway(agent):
                grace_s = stretch * max(GRACE_FACTOR * wait_s, wait_s + GRACE_LEAST_S)
                latest = max(latest, asked_at + grace_s)
        return min(until, latest)

    def _is_late_anyway(self, agent: str) -> bool:
        """Return whether the last rounds closed without the agent although it had less to do."""
        last = list(self._times[agent])[-LATE_ANYWAY:]
        return len(last) == LATE_ANYWAY and all(time.is_late and time.work < 1 for time in last)

    def deadline(
        self, asked: Mapping[str, float], work: Mapping[str, float], stretch: float, least_s: float, until: float
    ) -> float:
        """Return the deadline of these agents: at least ``least_s`` after each was asked, at most ``until``.

        The other arguments are those of `grace_until`.
        """
        latest = -math.inf
        for agent, asked_at in asked.items():
            wait_s = self.wait_s(agent, work.get(agent, 1.0))
            if wait_s is None:
                return until
            latest = max(latest, asked_at + max(least_s, DEADLINE_FACTOR * stretch * wait_s))
        return min(until, latest)


def _quantile(times: list[float]) -> float:
    """Return `QUANTILE` of these times; 0 where there are none."""
    if not times:
        return 0.0
    return sorted(times)[math.ceil(QUANTILE * len(times)) - 1]


def find_slowed(times: Times) -> frozenset[str]:
    """Return the agents that were late in a round and will be asked for less work in the next one."""
    return frozenset(agent for agent, (_, work, late) in times.items() if late and work > LEAST_WORK)


def make_times(
    took: Mapping[str, float], late: Mapping[str, float], work: Mapping[str, float]
) -> dict[str, list[float]]:
    """Return the `Times` of a closed round.

    Args:
        took: Agent -> seconds from its task to its update.
        late: Agent -> seconds since its task, of those that the round closed without.
        work: Agent -> its share of local training, of those that did not do all of it.
    """
    times: dict[str, list[float]] = {}
    for agent, seconds in sorted(took.items()):
        times[agent] = [round(seconds, 3), work.get(agent, 1.0), 0]
    for agent, seconds in sorted(late.items()):
        times[agent] = [round(seconds, 3), work.get(agent, 1.0), 1]
    return times
