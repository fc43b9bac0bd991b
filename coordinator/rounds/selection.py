"""The cohort of each round: agents that are asked, can still deliver, are added, or are left out.

Agents that failed in earlier rounds are left out with growing pauses until they deliver an update.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any

import numpy as np

from edge_agent.core.errors import RunFailed
from edge_agent.methods import Method

from ..config import CohortConfig, CoordinatorConfig
from ..fleet.collection import Collection, share_of
from ..fleet.roster import RETURN_S
from ..journal.entries import RoundClosed, RoundOpened
from ..journal.store import Journal, facts_of
from ..text import counted, listed
from ..views.runs import OpenRound, Rejection, RunRecord, step
from .context import RunContext, Waiting
from .forms import UpdateForms
from .pace import Pace, Times, find_slowed, make_times

log = logging.getLogger(__name__)

SUSPECTS_TOLERATED = 2
"""Suspect updates in a row that an agent may send: its data may be unlike those of the others for once."""

MISSES_TOLERATED = 1
"""Rounds in a row that an agent may miss: it was restarted, or it had no connection for a while."""

LONGEST_PAUSE_ROUNDS = 16
"""Pauses are 1, 2, 4, … rounds, up to this, so that a repaired device is asked again."""

REPAIR = "repair those agents, raise round.deadline_s, or lower round.quorum and cohort.min_agents"
"""Advice on a round without a quorum."""

SIMULATED = (
    "in a simulation every client is computed on this machine: mend what the reason names in the method or the data, "
    "or lower dropout"
)
"""Advice on a round without a quorum in a simulation, where no device is far away and nothing has a deadline."""

Boots = Callable[[str], str]
"""The current start of an agent (`Member.boot`); empty for one that is absent."""


@dataclass
class _Failures:
    """The failures of one agent since its last accepted update that was not suspect."""

    failures: int = 0
    """How often the agent was left out for some rounds."""

    misses: int = 0
    """Rounds in a row that closed without the agent."""

    suspects: int = 0
    """Updates in a row that were accepted and are suspect."""

    until: int = 0
    """The first round that the agent is asked in again."""

    reason: str = ""
    """Why it is left out."""

    boot: str = ""
    """The start in which it failed: another one may have been repaired. Empty where that makes no difference."""


@dataclass
class Exclusions:
    """The agents that a run leaves out, with reasons. They follow from the journal, so a restart changes nothing.

    A rejected update, a fault, or no update by the deadline is a failure; so is the second round in a row that closes
    without an agent. After its n-th failure an agent is left out of 2^(n-1) rounds (at most `LONGEST_PAUSE_ROUNDS`),
    and then asked again, on trial. An accepted update clears all failures. An agent that was restarted after it failed
    is asked again at once, because it may have been repaired. One that was offline is not, because it may be crashing.

    A suspect update (`aggregation.Decisions`) counts in its round. From the third in a row on each is a failure, until
    one is not suspect; a restart changes nothing then.

    An agent whose own privacy policy refuses the job has not failed: it is not asked again before it is restarted. One
    that could not open shares of others has not failed either.
    """

    delivered: set[str] = field(default_factory=set)
    """Agents of which the run has accepted an update."""

    _failures: dict[str, _Failures] = field(default_factory=dict)
    """Agent -> its failures, of those that have any."""

    _refusals: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Agent -> reason and start, of those whose policy does not allow the job."""

    _rounds: dict[str, tuple[set[int], str]] = field(default_factory=dict)
    """Agent -> the rounds that have left it out, and the reason for the last of them."""

    @classmethod
    def replay(cls, journal: Journal, run: str) -> Exclusions:
        """Return the exclusions after the last entry of ``run``."""
        exclusions = cls()
        record = RunRecord(run)
        for entry in journal.entries(run):
            # A round's end is noted before the record goes on: the record then still has the round's updates.
            done = record.open_round
            if done is not None:
                for fact in facts_of([entry], RoundClosed):
                    suspects = fact.aggregation.suspects
                    exclusions.note_closed(done, fact.unanswered, fact.boots, frozenset(fact.excused), suspects)
            record = step(record, entry)
            for opened in facts_of([entry], RoundOpened):
                if entry.round is not None:
                    exclusions.note_opened(entry.round, opened.left_out)
        return exclusions

    def note_opened(self, number: int, left_out: Mapping[str, str]) -> None:
        """Note that round ``number``, or another attempt at it, leaves out exactly these agents."""
        for agent in self._rounds.keys() - left_out.keys():
            rounds, reason = self._rounds[agent]
            self._rounds[agent] = (rounds - {number}, reason)
        for agent, reason in left_out.items():
            rounds, _ = self._rounds.get(agent, (set(), ""))
            self._rounds[agent] = ({*rounds, number}, reason)

    def note_closed(
        self,
        done: OpenRound,
        unanswered: Mapping[str, str],
        boots: Mapping[str, str],
        excused: Container[str] = (),
        suspects: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, str]:
        """Note what the members of a closed round have done.

        Args:
            done: The round with its updates and rejections, and the starts of the agents that were rejected.
            unanswered: Agent -> reason, of those that were present and did not deliver.
            boots: The starts of those that are present and have not delivered.
            excused: Agents for which it is no failure to have missed the round, because they get less work from now on,
                or because the round is buffered.
            suspects: Agent -> reason, of those whose updates are suspect.

        Returns:
            The agents that are left out from now on, each with duration and reason as text.
        """
        excluded = {}
        for agent in done.cohort:
            rejection = done.rejected.get(agent)
            if agent in done.updates:
                pause = self._note_update(agent, done, suspects)
            elif rejection is not None and rejection.is_by_policy:
                pause = self._note_refusal(agent, done.round, rejection)
            elif rejection is not None:
                pause = self._note_rejection(agent, done.round, rejection)
            elif agent in unanswered:
                pause = self._note_silence(agent, done.round, unanswered[agent], boots.get(agent, ""))
            elif agent in excused:
                pause = ""
            else:
                pause = self._note_absence(agent, done.round, boots.get(agent))
            if pause:
                excluded[agent] = pause
        return excluded

    def _note_update(self, agent: str, done: OpenRound, suspects: Mapping[str, str]) -> str:
        """Note an accepted update.

        Returns:
            For how long the agent is left out because the update is suspect; empty where it is not left out.
        """
        self.delivered.add(agent)
        self._refusals.pop(agent, None)
        if agent not in suspects:
            self._failures.pop(agent, None)
            return ""
        # A suspect update clears nothing, but it is a failure only if the agent goes on with them.
        failures = self._failures.setdefault(agent, _Failures())
        failures.suspects += 1
        if failures.suspects <= SUSPECTS_TOLERATED:
            return ""
        failures.reason = f"suspect update {counted(failures.suspects, 'time')} in a row: {suspects[agent]}"
        failures.boot = ""  # a restart does not help it
        failures.misses = 0
        return self._exclude(failures, done.round)

    def _note_refusal(self, agent: str, number: int, rejection: Rejection) -> str:
        """Note that the agent's own policy refuses the job; returns for how long it is left out."""
        self._refusals[agent] = (rejection.reason, rejection.boot)
        rounds, _ = self._rounds.get(agent, (set(), ""))
        self._rounds[agent] = ({*rounds, number}, rejection.reason)
        return f"until it is restarted: {rejection.reason}"

    def _note_rejection(self, agent: str, number: int, rejection: Rejection) -> str:
        """Note that the agent could not make an update, or sent one that does not count.

        Returns:
            For how long it is left out; empty where it is not, because it says that others have failed.
        """
        if rejection.accused:
            return ""
        failures = self._failures.setdefault(agent, _Failures())
        failures.misses = 0
        failures.reason = rejection.reason
        failures.boot = rejection.boot
        return self._exclude(failures, number)

    def _note_silence(self, agent: str, number: int, reason: str, boot: str) -> str:
        """Note that the agent was present and did not deliver; returns for how long it is left out."""
        failures = self._failures.setdefault(agent, _Failures())
        failures.misses += 1
        failures.reason = reason
        failures.boot = boot
        return self._exclude(failures, number)

    def _note_absence(self, agent: str, number: int, boot: str | None) -> str:
        """Note that a round closed without the agent, which was offline or was not waited for.

        Returns:
            For how long it is left out; empty where it is not, because it may miss a round.
        """
        failures = self._failures.setdefault(agent, _Failures())
        failures.misses += 1
        if not failures.failures and failures.misses <= MISSES_TOLERATED:
            return ""
        # It was offline for the second time, or has failed before. It may be crashing, so that a new start is no sign
        # of a repair; the start of its failure counts only while the agent still has it.
        failures.reason = f"no update in {counted(failures.misses, 'round')} in a row"
        if failures.boot != boot:
            failures.boot = ""
        return self._exclude(failures, number)

    @staticmethod
    def _exclude(failures: _Failures, number: int) -> str:
        """Count one more failure, of round ``number``; returns for how long the agent is left out, and why."""
        failures.failures += 1
        pause = min(2 ** (failures.failures - 1), LONGEST_PAUSE_ROUNDS)
        failures.until = number + 1 + pause
        return f"for {counted(pause, 'round')}: {failures.reason}"

    def left_out(self, number: int, boots: Boots = lambda _: "") -> dict[str, str]:
        """Return agent -> reason, of those that round ``number`` leaves out."""
        reasons = self.refusing(boots)
        for agent, failures in sorted(self._failures.items()):
            if failures.until > number and not _is_restarted(failures.boot, boots(agent)):
                reasons[agent] = failures.reason
        return reasons

    def refusing(self, boots: Boots = lambda _: "") -> dict[str, str]:
        """Return agent -> reason, of those whose policy does not allow the job, and that were not restarted since."""
        reasons: dict[str, str] = {}
        for agent, (reason, boot) in sorted(self._refusals.items()):
            if not _is_restarted(boot, boots(agent)):
                reasons[agent] = reason
        return reasons

    def asked_again_in(self, agent: str) -> int:
        """Return the first round that an agent is asked in again; 0 for one that is not left out."""
        failures = self._failures.get(agent)
        return 0 if failures is None else failures.until

    @property
    def on_trial(self) -> frozenset[str]:
        """Agents that have failed and have not delivered since."""
        return frozenset(self.failing)

    @property
    def failing(self) -> dict[str, str]:
        """Agent -> reason, of those that have failed and have not delivered since."""
        return {agent: failures.reason for agent, failures in sorted(self._failures.items()) if failures.failures}

    def body(self) -> dict[str, Any]:
        """Return agent -> the rounds that left it out and the reason for the last of them, as JSON."""
        body: dict[str, Any] = {}
        for agent, (rounds, reason) in sorted(self._rounds.items()):
            if rounds:
                body[agent] = {"rounds": sorted(rounds), "reason": reason}
        return body


def _is_restarted(before: str, now: str) -> bool:
    """Return whether an agent was restarted: its start now is another one than before, and both are known.

    Args:
        before: The start in which something happened; empty: it does not matter in which.
        now: The start that the agent has now; empty: it is absent.
    """
    return bool(before) and now not in {"", before}


def drop_left_out(agents: Iterable[str], left_out: Container[str]) -> list[str]:
    """Return the ``agents`` that are not left out, in their order."""
    return [agent for agent in agents if agent not in left_out]


IDLE_HEARTBEATS = 3
"""After so many heartbeats in a row without its task, although it was asked again each time, an agent is stuck."""


@dataclass(frozen=True)
class Addition:
    """The agents that an open round asks in addition."""

    new: tuple[str, ...] = ()
    """Agents that join the round."""

    again: tuple[str, ...] = ()
    """Members that have failed and are asked once more."""


@dataclass(frozen=True)
class LeftOutAgent:
    """An agent that a run does not ask."""

    until_round: int | None
    """The round that asks it again; None: its own policy does not allow the run's jobs, until it is restarted."""

    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return it as ``status.json`` has it."""
        return asdict(self)


@dataclass(frozen=True)
class Tiers:
    """The agents that a run asks in its rounds, by their tiers."""

    trains: bool = True
    """Whether devices that train encoders are asked."""

    contributes: bool = False
    """Whether devices without torch are asked."""

    are_alike: bool = False
    """Whether both send the same arrays, so that a round draws from all of them alike."""

    @classmethod
    def of(cls, config: CoordinatorConfig, method: Method, forms: UpdateForms) -> Tiers:
        """Return the tiers that take part in a run of this method, whose updates have these forms."""
        tier = config.cohort.tier
        # In buffered rounds devices go on from round to round, which those without torch have no part in.
        is_contributed = config.round.mode == "synchronous" and method.takes_contributions()
        return cls(
            trains=tier != "head",
            contributes=tier != "train" and is_contributed,
            are_alike=tier == "head" or forms.extras == forms.update,
        )

    @property
    def called(self) -> str:
        """What agents of these tiers are called in messages."""
        if self.trains and not self.contributes:
            return "train agent"
        return "agent" if self.trains else "agent of tier head"


@dataclass
class Selection:
    """Selects the agents of the rounds of one run."""

    context: RunContext
    seed: int
    exclusions: Exclusions = field(default_factory=Exclusions)
    pace: Pace = field(default_factory=Pace)
    fewest: int = 1
    """No round closes with fewer updates: the noise of differential privacy was divided among so many."""

    last_round: int = 0
    """The number of the run's last round, in which all take part where the configuration says so; 0: not known."""

    tiers: Tiers = field(default_factory=Tiers)
    """Who takes part, once the method is known."""

    _asked: dict[str, tuple[float, str, float]] = field(default_factory=dict)
    """Member of the open round -> when it was asked (`Roster.heard_s`), its start, and `Roster.deaf_s` then."""

    _took: dict[str, float] = field(default_factory=dict)
    """Member of the open round -> seconds from when it was asked to its update."""

    _stalled: set[str] = field(default_factory=set)
    """Members of the open round whose disk was full in it: how long they took says nothing of their pace."""

    _stretched: tuple[bool | None, float] = (None, 1.0)
    """`Pace.stretch` of the open round, and whether it had its quorum then."""

    _limited: tuple[tuple[float, ...], float] = ((), 0.0)
    """The state of the open round for which its limit was computed last, and that limit."""

    _seen: int = 0
    """Updates of the open round that have been looked at."""

    _idle: Counter[str] = field(default_factory=Counter)
    """Member of the open round -> how many heartbeats in a row it has sent without its task."""

    _stuck: set[str] = field(default_factory=set)
    """Members of the open round with at least `IDLE_HEARTBEATS` of these."""

    _unreplaced: tuple[object, ...] | None = None
    """The state of the collection for which `replacements` has found nobody."""

    def left_out(self, number: int) -> dict[str, str]:
        """Return agent -> reason, of those that round ``number`` leaves out."""
        if not self.context.excludes_failing:
            return {}
        return self.exclusions.left_out(number, self.boot)

    def willing(self) -> list[str]:
        """Return the agents of the run's tiers that are present and whose own policy has not refused the run's jobs."""
        roster = self.context.roster
        present = roster.present("train") if self.tiers.trains else []
        if self.tiers.contributes:
            present = sorted([*present, *roster.present("head")])
        return drop_left_out(present, self.exclusions.refusing(self.boot))

    def contributors(self, agents: Iterable[str]) -> tuple[str, ...]:
        """Return those of these agents that are devices without torch, in their order."""
        if not self.tiers.contributes:
            return ()
        heads = set(self.context.roster.present("head"))
        return tuple(agent for agent in agents if agent in heads)

    @property
    def on_trial(self) -> frozenset[str]:
        """Agents that have failed and have not delivered since: a round never waits for them alone."""
        if not self.context.excludes_failing:
            return frozenset()
        return self.exclusions.on_trial

    def least(self, collection: Collection) -> int:
        """Return how many updates a round needs in any case, however few of its cohort can still deliver."""
        # What is missing in the updates of devices without torch is the part of the others alone.
        whole = len(collection.training)
        if not self.context.excludes_failing:
            return whole
        return min(self.context.config.cohort.min_agents, whole)

    def has_quorum(self, collection: Collection) -> bool:
        """Return whether enough updates have arrived to close the round."""
        is_quorum = collection.has_quorum(self.context.config.round.quorum, self.least(collection))
        return is_quorum and collection.delivered >= self.fewest

    def await_cohort(self, number: int) -> Generator[Waiting, None, tuple[str, ...]]:
        """Wait until enough agents are present; returns the cohort (as the generator's value).

        Agents that are left out are asked nevertheless where the others are too few.
        """
        # 1. After a restart of the coordinator, agents that have delivered get time to reconnect: otherwise the first
        #    one to do so would be the whole cohort.
        returning = self._agents_that_may_return()
        while returning:
            yield Waiting(f"round {number}: agents of this run get {RETURN_S:g} s to come back", returning)
            returning = self._agents_that_may_return()
        # 2. The cohort is chosen as soon as there are enough.
        chosen = self.choose_cohort(number)
        while not chosen:
            lack = describe_lack(self.willing(), self.context.config, self.tiers)
            yield Waiting(f"round {number} needs {lack}")
            chosen = self.choose_cohort(number)
        return chosen

    def _agents_that_may_return(self) -> tuple[str, ...]:
        """Return the agents that have delivered before, are not back since a restart, and still have time for it."""
        roster = self.context.roster
        unknown = [agent for agent in sorted(self.exclusions.delivered) if roster.get(agent) is None]
        return tuple(agent for agent in unknown if (roster.patience(agent) or 0) > 0)

    def choose_cohort(self, number: int) -> tuple[str, ...]:
        """Return the cohort of those who are present now; empty while they are too few."""
        present = self.willing()
        # Agents that have failed are asked only where the others are too few: then a trial costs nothing.
        for available in (drop_left_out(present, self.left_out(number)), present):
            chosen = self._choose(available, number)
            if chosen:
                return chosen
        return ()

    def with_idle(self, number: int, busy: Container[str], at_work: int) -> tuple[str, ...]:
        """Return the idle agents that a buffered round asks beside those of earlier rounds; nobody is waited for.

        Args:
            number: The round.
            busy: The agents that work on a job of an earlier round.
            at_work: How many these are.
        """
        chosen = self.choose_cohort(number)
        idle = drop_left_out(chosen, busy)
        return self.draw(idle, len(chosen) - at_work, number)

    def awaited(self, collection: Collection) -> tuple[str, ...]:
        """Return the cohort members that may still deliver; the others are given up: the quorum does not count them.

        Members that are present and do not start the task are given up only where the others are enough. One that lost
        its connection and is back counts again, because it has continued; one that was restarted starts again.
        """
        roster = self.context.roster
        outstanding = collection.outstanding
        # Step 1: who is online, or was until a moment ago, and who of them does the work. This runs after each event of
        # rounds with thousands of agents, so tuples are made only where they differ.
        ready = roster.ready
        able = tuple(agent for agent in outstanding if agent in ready or (roster.patience(agent) or 0) > 0)
        working = able
        if self._stuck:
            working = tuple(agent for agent in able if agent not in self._stuck)
        # Step 2: where those at work are too few, the idle ones are waited for, too: nobody could take their place.
        are_enough = collection.delivered + len(working) >= self.context.config.cohort.min_agents
        awaited = working if are_enough else able
        self._take_back(collection, working)
        if len(awaited) < len(outstanding):
            self._give_up(collection, drop_left_out(outstanding, set(awaited)))
        return awaited

    def _take_back(self, collection: Collection, working: Sequence[str]) -> None:
        """Count members again that were given up and are back in the start in which they were asked."""
        given_up = collection.given_up
        if not given_up:
            return
        for agent in given_up.keys() & set(working):
            boot = self.boot(agent)
            # A start that was not known when the agent was given up is taken for the same one.
            if boot and given_up[agent] in {"", boot}:
                del given_up[agent]

    def _give_up(self, collection: Collection, agents: Iterable[str]) -> None:
        """Count no longer on these members, and note their starts."""
        for agent in agents:
            member = self.context.roster.get(agent)
            boot = "" if member is None else member.boot
            collection.given_up.setdefault(agent, boot)

    def unanswered(self, collection: Collection, late_s: float | None) -> dict[str, str]:
        """Return agent -> reason, of those that are present and have not delivered by the deadline, ``late_s`` seconds.

        An agent that was restarted during the round is not among them.
        """
        reasons: dict[str, str] = {}
        ready = self.context.roster.ready
        present = [agent for agent in collection.outstanding if agent in ready]
        for agent in present:
            if agent in self._stuck:
                reasons[agent] = f"did not take up the work of round {collection.round}"
            elif late_s is not None and agent not in collection.given_up:
                reasons[agent] = f"no update within {late_s:.3g} s"
        return reasons

    def replacements(self, collection: Collection, wanted: int) -> tuple[str, ...]:
        """Return agents to ask in place of members that failed, were rejected or are offline.

        Nobody is asked once the quorum has delivered, because the round would wait for a whole training, nor an agent
        that this round leaves out.

        Args:
            collection: What the round has collected.
            wanted: How many updates the round aims for.
        """
        has_failures = bool(collection.rejected or collection.given_up)
        if not self.context.excludes_failing or not has_failures:
            return ()
        # Step 1: this runs after each event. Where nothing has changed since nobody was found, nobody is found now.
        state = (
            len(collection.cohort),
            len(collection.rejected),
            len(self.context.roster.ready),
            len(self._stuck),
            *sorted(collection.given_up),
        )
        if state == self._unreplaced:
            return ()
        # Step 2: how many updates will be missing, if all that may still deliver do so.
        awaited = set(self.awaited(collection))
        may_deliver = [agent for agent in collection.training if agent in awaited]
        lacking = wanted - collection.delivered - len(may_deliver)
        quorum = max(self.fewest, quorum_of(self.context.config.round.quorum, wanted))
        if lacking > 0 and collection.delivered < quorum:
            others = drop_left_out(self.willing(), set(collection.cohort))
            chosen = self.draw(drop_left_out(others, self.left_out(collection.round)), lacking, collection.round)
            if chosen:
                return chosen
        self._unreplaced = state
        return ()

    def note_asked(self, agents: Iterable[str]) -> None:
        """Note that these members of the open round are asked now."""
        now = self.context.roster.heard_s()
        deaf_s = self.context.roster.deaf_s
        for agent in agents:
            self._asked[agent] = (now, self.boot(agent), deaf_s)

    def note_opened(self, collection: Collection) -> None:
        """Begin a round that is opened, or resumed: nobody has been asked yet."""
        self._asked.clear()
        self._took.clear()
        self._stretched = (None, 1.0)
        self._limited = ((), 0.0)
        self._seen = len(collection.accepted)

    def find_slowed(self, times: Times, *, can_shorten: bool) -> list[str]:
        """Return the agents that were late in a round with these times, and will be asked for less work.

        Those that have failed before are not among them: they may hang.
        """
        if not can_shorten or not self._is_adaptive:
            return []
        return sorted(find_slowed(times) - self.on_trial)

    def work(self, cohort: Sequence[str], *, can_shorten: bool) -> dict[str, float]:
        """Return slow agent -> its share of local training; ``can_shorten``: whether the method allows that."""
        for agent in cohort:
            self.pace.note_asked(agent, self.boot(agent))
        if not can_shorten or not self._is_adaptive:
            return {}
        return self.pace.work(cohort)

    def times(self, collection: Collection, work: Mapping[str, float]) -> dict[str, list[float]]:
        """Return how long the agents of a round took that closes now, for the journal (`pace.Times`)."""
        now = self.context.roster.heard_s()
        ready = self.context.roster.ready
        self._note_times(collection, now)
        # Who was offline, idle or had a full disk says nothing about its pace.
        absent = {*collection.given_up, *self._stuck, *self._stalled}
        late: dict[str, float] = {}
        for agent in collection.outstanding:
            is_working = agent in self._asked and agent in ready and agent not in absent
            if is_working:
                late[agent] = now - self._asked[agent][0]
        took = {agent: seconds for agent, seconds in self._took.items() if agent not in self._stalled}
        self._stalled.clear()
        return make_times(took, late, work)

    def collect(
        self, collection: Collection, deadline: float, wanted: int = 0, work: Mapping[str, float] | None = None
    ) -> Generator[Waiting, None, float | None]:
        """Wait until the updates of a round are complete, or until it is not waited for the missing ones any longer.

        The wait ends when all that still can have delivered, when the grace period after the quorum is over, at the
        deadline, or as soon as there are `replacements` for members that have failed.

        Args:
            collection: What the round collects.
            deadline: The deadline, by `Roster.heard_s`.
            wanted: How many updates the round aims for; 0: no member is replaced.
            work: Slow agent -> its share (0..1) of local training.

        Returns:
            The seconds after which those who have not answered are late; None where they are not late.
        """
        self._idle.clear()
        self._stuck.clear()
        self._unreplaced = None
        opened_at = self.context.roster.heard_s()
        quorum_at = None
        while True:
            # 1. Nobody is left to wait for, or somebody else has to be asked.
            awaited = self.awaited(collection)
            if not awaited:
                return None
            if self.replacements(collection, wanted):
                return None
            # 2. What has happened since the last step. Members that fail may take the quorum away again.
            now = self.context.roster.heard_s()
            self._note_times(collection, now)
            self._note_stalled(collection)
            if not self.has_quorum(collection):
                quorum_at = None
            elif quorum_at is None:
                quorum_at = now
                self.context.sites.hurry()
            # 3. The time is up: before the deadline it was the grace period, after which nobody is late.
            limit = self._limit(collection, awaited, deadline, quorum_at, work or {})
            if now >= limit:
                is_grace_over = quorum_at is not None and limit < deadline
                return None if is_grace_over else now - opened_at
            yield self._wait_for(collection, awaited, limit)

    def _note_stalled(self, collection: Collection) -> None:
        """Note the members whose disk is full now."""
        for agent in collection.cohort:
            member = self.context.roster.get(agent)
            if member is not None and member.condition == "stalled":
                self._stalled.add(agent)

    def _wait_for(self, collection: Collection, awaited: tuple[str, ...], limit: float) -> Waiting:
        """Return the wait for these members, which ends at ``limit`` (by `Roster.heard_s`)."""
        about = str(collection)
        text = f"{about}: {len(collection.accepted)} of {len(collection.cohort)} updates are here"
        offline = drop_left_out(collection.outstanding, set(awaited))
        if offline:
            text += f", without {listed(offline)}"
        return Waiting(text, awaited, limit + self.context.roster.deaf_s, about)

    def is_enough(self, collection: Collection, unanswered: dict[str, str], overdue: int) -> bool:
        """Return whether a round without a quorum ends nevertheless, because members did not deliver by the deadline.

        It does when half of the cohort has delivered. Otherwise there is another deadline, ``round.max_attempts`` in
        all, because the others may be slow.

        Args:
            collection: What the round has collected.
            unanswered: Agent -> reason, of those that were present and did not deliver in time.
            overdue: How many attempts at the round have ended at their deadline.

        Raises:
            RunFailed: It was the last attempt, and too few have delivered.
        """
        is_last = overdue >= self.context.config.round.max_attempts
        # 1. Half of the cohort is enough after any deadline; after the last one, what the round needs in any case.
        if unanswered:
            if self._has_half(collection):
                return True
            if is_last and self._has_least(collection):
                return True
        # 2. Another deadline helps only if somebody may be slow, or may take the place of those that have failed.
        can_go_on = bool(unanswered) or self.context.excludes_failing
        if can_go_on and not is_last:
            return False
        raise RunFailed(self._describe_missed_quorum(collection, overdue))

    def _describe_missed_quorum(self, collection: Collection, overdue: int) -> str:
        """Say how many updates a round has and needs, whose are missing, and what to do."""
        quorum = collection.needed(self.context.config.round.quorum, self.least(collection))
        needed = counted(max(self.fewest, quorum), "update")
        times = f" {counted(overdue, 'time')}" if overdue else ""
        remedy = SIMULATED if self.context.is_simulation else REPAIR
        return (
            f"round {collection.round} missed its quorum{times}: {collection.delivered} of {needed}; missing: "
            f"{listed(collection.outstanding)}; rejected: {failures(collection) or 'none'}; {remedy}"
        )

    def await_members(self, collection: Collection) -> Generator[Waiting, None, Addition]:
        """Wait until the round has enough members that can deliver; returns the new ones (as the generator's value).

        Raises:
            RunFailed: All that were asked have failed, and no other agent has delivered before.
        """
        while True:
            if self.has_quorum(collection):  # late updates have arrived
                return Addition()
            addition = self._find_addition(collection)
            if addition is not None:
                return addition
            others = self.exclusions.delivered - collection.rejected.keys()
            if collection.is_hopeless and not others:
                raise RunFailed(
                    f"round {collection.round}: every agent that was asked has failed: {failures(collection)}"
                )
            text = self._describe_missing_members(collection)
            yield Waiting(text, collection.outstanding, None, f"round {collection.round}")

    def _describe_missing_members(self, collection: Collection) -> str:
        """Say how many updates a round has and needs, who has failed, and who has to come."""
        needed = counted(max(1, self.context.config.cohort.min_agents), "update")
        got = f"round {collection.round}: {collection.delivered} of the {needed} that it needs"
        failed = f"; failed: {failures(collection)}" if collection.rejected else ""
        another = self.tiers.called
        article = "an" if another.startswith("agent") else "a"
        missing = f"{article} {another} has to come"
        if collection.outstanding:
            missing = f"{listed(collection.outstanding)} must come back, or another {another} has to come"
        return f"{got} (cohort.min_agents) are here{failed}; {missing}"

    def note_closed(self, done: OpenRound, fact: RoundClosed, run: str) -> None:
        """Record the failures and times of a round, and log which agents the next ones leave out.

        Args:
            done: The round with its updates and rejections.
            fact: What is journaled of its end.
            run: The id of the run.
        """
        self.pace.note_closed(fact.times, fact.boots)
        if not self.context.excludes_failing:
            return
        suspects = fact.aggregation.suspects
        left_out = self.exclusions.note_closed(done, fact.unanswered, fact.boots, fact.excused, suspects)
        for agent, reason in left_out.items():
            log.warning("left_out run=%s agent=%s %s", run, agent, reason)

    def spared(self, number: int, cohort: Sequence[str]) -> dict[str, str]:
        """Return agent -> reason, of those that are present and that round ``number`` leaves out."""
        present_others = self.context.roster.ready - set(cohort)
        return {agent: reason for agent, reason in self.left_out(number).items() if agent in present_others}

    def describe_left_out(self, number: int) -> dict[str, LeftOutAgent]:
        """Return the agents that round ``number`` leaves out, when they are asked again, and why."""
        refusing = self.exclusions.refusing(self.boot)
        described = dict[str, LeftOutAgent]()
        for agent, reason in self.left_out(number).items():
            until_round = None
            if agent not in refusing:
                until_round = self.exclusions.asked_again_in(agent)
            described[agent] = LeftOutAgent(until_round, reason)
        return described

    def at_work(self, agent: str, *, is_at_work: bool) -> None:
        """Take a heartbeat of a member of the open round; ``is_at_work``: whether it works on the task of the round."""
        has_delivered = self.context.collector.is_uploading(agent) or self.context.sites.holds(agent)
        if is_at_work or has_delivered:
            del self._idle[agent]
            self._stuck.discard(agent)
            return
        self._idle[agent] += 1
        if self._idle[agent] >= IDLE_HEARTBEATS:
            self._stuck.add(agent)

    def boot(self, agent: str) -> str:
        """Return the start of an agent that is present; empty for another one."""
        member = self.context.roster.get(agent)
        if member is None or not member.is_present:
            return ""
        return member.boot

    # --- inside ----------------------------------------------------------------------------------------------------

    def _choose(self, available: Sequence[str], number: int) -> tuple[str, ...]:
        """Return the cohort of a round, of those who are available; empty while they are too few."""
        config = self.context.config.cohort
        if config.full_last_round and number == self.last_round:
            config = config.model_copy(update={"fraction": 1.0, "fraction_max": None})
        contributors = self.contributors(available)
        if self.tiers.are_alike or not contributors:
            return choose(available, config, seed=self.seed, round_number=number)
        # Devices that send a part only join whoever is drawn to train; with too few of those all are needed.
        trainers = drop_left_out(available, set(contributors))
        chosen = choose(trainers, config, seed=self.seed, round_number=number)
        if not chosen and len(available) >= config.min_agents:
            chosen = tuple(trainers)
        elif not chosen:
            return ()
        return (*chosen, *contributors)

    @property
    def _is_adaptive(self) -> bool:
        """Whether limits and work follow from how long agents took before."""
        round_ = self.context.config.round
        return round_.adaptive and round_.mode == "synchronous" and self.context.excludes_failing

    def _has_least(self, collection: Collection) -> bool:
        """Return whether the round has the updates that it needs in any case."""
        return collection.delivered >= max(1, self.least(collection))

    def _has_half(self, collection: Collection) -> bool:
        """Return whether half of the cohort has delivered, and no fewer than the round needs in any case."""
        return 2 * collection.delivered >= len(collection.training) and self._has_least(collection)

    def _note_times(self, collection: Collection, now: float) -> None:
        """Note how long the agents took whose updates have arrived since the last look.

        An agent does not count whose update may have waited for a broker that was away: agents work on meanwhile.
        """
        new = len(collection.accepted) - self._seen
        for agent in islice(reversed(collection.accepted), new):
            asked_at, _, deaf_s = self._asked.get(agent, (0.0, "", None))
            was_heard_throughout = deaf_s == self.context.roster.deaf_s
            if was_heard_throughout:
                self._took[agent] = now - asked_at
        self._seen += new

    def _limit(
        self,
        collection: Collection,
        awaited: Sequence[str],
        deadline: float,
        quorum_at: float | None,
        work: Mapping[str, float],
    ) -> float:
        """Return until when the round waits for some agents, by `Roster.heard_s`.

        Args:
            collection: What the round has collected.
            awaited: The agents.
            deadline: The deadline of the round.
            quorum_at: When the round had its quorum; None: it has none.
            work: Slow agent -> its share (0..1) of local training.
        """
        has_quorum = quorum_at is not None
        # 1. What the configuration says: the deadline, or the end of the grace period after the quorum.
        until = deadline
        if quorum_at is not None:
            grace_s = self.context.config.round.grace_s if collection.has_grace_period else 0.0
            until = min(deadline, quorum_at + grace_s)
        # 2. It may be earlier by what is expected of these agents, once enough others show how fast this round is.
        is_telling = has_quorum or self._has_half(collection)
        if not self._is_adaptive or not is_telling:
            return until
        # This runs after each event, so it is computed only where something may have changed.
        state = (len(collection.accepted), len(awaited), until)
        last_state, limit = self._limited
        if state != last_state:
            limit = self._limit_by_pace(awaited, work, until, has_quorum=has_quorum)
            self._limited = (state, limit)
        return limit

    def _limit_by_pace(
        self, awaited: Sequence[str], work: Mapping[str, float], until: float, *, has_quorum: bool
    ) -> float:
        """Return until when these agents are waited for by what is expected of them; at most ``until``.

        That is ``until`` itself where it is not known of each when it was asked.
        """
        # 1. When each was asked. One that was restarted meanwhile was asked again then.
        asked = [agent for agent in awaited if agent in self._asked]
        for agent in asked:
            _, boot, _ = self._asked[agent]
            if self.boot(agent) not in {"", boot}:
                self.note_asked((agent,))
        if len(asked) < len(awaited):
            return until
        asked_at = {agent: self._asked[agent][0] for agent in asked}
        # 2. How slow this round is, by those who have delivered: at half of the cohort, and again at the quorum.
        had_quorum, stretch = self._stretched
        if had_quorum is not has_quorum:
            stretch = self.pace.stretch(self._took, work)
            self._stretched = (has_quorum, stretch)
        if has_quorum:
            return self.pace.grace_until(asked_at, work, stretch, until)
        return self.pace.deadline(asked_at, work, stretch, self.context.config.round.grace_s, until)

    def _find_addition(self, collection: Collection) -> Addition | None:
        """Return the agents to ask in addition, if any; None while the round would still have too few members."""
        again = self._find_restarted(collection)
        awaited = [agent for agent in self.awaited(collection) if agent in self.context.roster.ready]
        others = drop_left_out(self.willing(), set(collection.cohort))
        least = max(1, self.context.config.cohort.min_agents)
        coming = len(awaited) + len(again)
        # Agents that this round leaves out are asked only where the others are too few.
        for new in (drop_left_out(others, self.left_out(collection.round)), others):
            able = coming + len(new)
            if able and collection.delivered + able >= least:
                wanted = max(least, len(collection.training))
                lacking = wanted - collection.delivered - coming
                return Addition(self.draw(new, lacking, collection.round), again)
        return None

    def _find_restarted(self, collection: Collection) -> tuple[str, ...]:
        """Return the members that were restarted after they failed in this round: they may be repaired."""
        if not self.context.excludes_failing:
            return ()
        rejected = collection.rejected.items()
        return tuple(agent for agent, rejection in rejected if _is_restarted(rejection.boot, self.boot(agent)))

    def draw(self, agents: Sequence[str], size: int, number: int) -> tuple[str, ...]:
        """Return at most ``size`` of the agents, sorted; the same ones for the same seed, round and agents."""
        size = min(len(agents), max(0, size))
        if not size:
            return ()
        rng = np.random.default_rng([self.seed, number, len(agents)])
        drawn = rng.choice(agents, size=size, replace=False)
        return tuple(sorted(map(str, drawn)))


def quorum_of(share: float, agents: int) -> int:
    """Return how many updates are ``share`` of those of so many agents; at least one."""
    return max(1, share_of(share, agents))


def aim_of_cohort(cohort: int, over_selection: float) -> int:
    """Return how many updates a round aims for that asks ``cohort`` agents; the inverse of `choose`."""
    return max(1, math.floor(cohort / over_selection + 1e-9))


def failures(collection: Collection) -> str:
    """Return the agents that failed in a round with reasons, on one line; those with the same reason share one."""
    agents_of: dict[str, list[str]] = {}
    for agent, rejection in sorted(collection.rejected.items()):
        agents_of.setdefault(rejection.reason, []).append(agent)
    return "; ".join(f"{listed(agents)}: {reason}" for reason, agents in agents_of.items())


def choose(available: Sequence[str], config: CohortConfig, *, seed: int, round_number: int) -> tuple[str, ...]:
    """Draw the cohort of a round; the same agents, seed and round give the same one.

    It has the share ``fraction`` of the available agents, at least ``min_agents`` and at most ``max_agents`` of them,
    times ``over_selection``. With ``fraction_max`` the number is drawn uniformly between the two shares.

    Returns:
        The cohort, sorted; empty when too few agents are available.
    """
    count = len(available)
    if count < config.min_agents:
        return ()
    rng = np.random.default_rng([seed, round_number])
    # 1. How many updates the round aims for.
    aim = round(config.fraction * count)
    if config.fraction_max is not None:
        most = round(config.fraction_max * count)
        aim = int(rng.integers(aim, most, endpoint=True))
    aim = max(config.min_agents, aim)
    if config.max_agents:
        aim = min(aim, config.max_agents)
    # 2. More agents are asked than that, because some may fail.
    size = min(count, math.ceil(aim * config.over_selection))
    chosen = rng.choice(count, size=size, replace=False)
    ordered = sorted(available)
    return tuple(sorted(ordered[index] for index in chosen))


def describe_lack(present: Sequence[str], config: CoordinatorConfig, tiers: Tiers) -> str:
    """Say how many agents a round needs and lacks, which are present, and which hosted ones are offline."""
    least = config.cohort.min_agents
    needed = counted(least, tiers.called)
    if least > 1 and tiers.called.startswith("agent of"):
        needed = f"{least} agents of tier head"
    text = f"{needed}, {least - len(present)} more must come; here: {listed(present)}"
    offline = [client.id for client in config.hosted if client.id not in present]
    if offline:
        text += f"; hosted, but away: {listed(offline)}"
    return text
