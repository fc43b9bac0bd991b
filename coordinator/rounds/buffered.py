"""Buffered rounds: a round closes with its first K updates, and agents that are still training go on.

Their updates count in a later round, as changes to the model that they started from; the older that model is, the less
they count (`staleness`). An agent that has delivered is asked again when the round closes. `BufferedCollection.needed`
says how many updates close a round; the wait for them is that of all rounds, `SynchronousRounds.collect`.

Source: Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, "Federated Learning with Buffered Asynchronous
Aggregation", AISTATS 2022 (FedBuff), with the weight 1 / sqrt(1 + staleness).
Differs from the paper: each agent counts at most once in a round; changes are weighted by sample counts where the
method does so; the server's step is the method's own; running statistics of batch norm move towards the update's.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from edge_agent.wire.messages.up import UpdateManifest
from edge_agent.wire.tensors import decode

from ..fleet.collection import Collection
from ..journal.entries import RoundClosed, RoundOpened
from ..views.runs import OpenRound
from .active_run import ActiveRun
from .assignment import Assignment, JobSpec
from .context import Steps, Waiting
from .round import Collecting
from .server_step import Collected, ServerStep
from .synchronous import SynchronousRounds

TOO_LATE = "the update would come too late"
"""The reason that agents get whose update would be older than ``round.max_staleness`` rounds."""


@dataclass
class BufferedCollection(Collection):
    """The collection of a buffered round; its quorum is the buffer, or all that can still deliver."""

    buffer: int = 1
    """How many updates close the round."""

    asked_in: Mapping[str, int] = field(default_factory=dict)
    """Agent -> the earlier round that its update is of."""

    has_grace_period: ClassVar[bool] = False

    def needed(self, share: float, least: int) -> int:  # noqa: ARG002 - there is no quorum
        """Return how many updates close the round."""
        uncounted = {*self.given_up, *self.on_trial, *self.rejected}
        able = [agent for agent in self.cohort if agent in self.accepted or agent not in uncounted]
        return max(1, min(self.buffer, len(able)))

    def takes(self, agent: str, message: UpdateManifest) -> bool:
        """Return whether the update was made for the round in which the agent was asked."""
        expected = (self.run, self.asked_in_round(agent), self.purpose)
        return (message.run, message.round, message.purpose) == expected

    def asked_in_round(self, agent: str) -> int:
        """Return the round that an update of this agent is of."""
        return self.asked_in.get(agent, self.round)


class BufferedRounds(SynchronousRounds):
    """Rounds that close with their first updates; whoever still trains then delivers to a later one."""

    def __init__(self, active: ActiveRun, server: ServerStep) -> None:
        super().__init__(active, server)
        self._busy: dict[str, int] = {}
        """Agents that work on, and the round that they were asked in."""

        self._bases: dict[int, str] = {}
        """Round -> digest of the state that its agents started from, as long as one of them works on."""

        self._earlier: dict[int, Assignment] = {}
        """Round -> what its agents were asked to do, as long as one of them works on."""

    def resume(self, last_closed: RoundClosed) -> None:
        """Take up who works on, and from which states, after the last closed round."""
        self._busy = dict(last_closed.busy)
        self._bases = dict(last_closed.bases)

    def plan(self, number: int) -> Generator[Waiting, None, OpenRound]:
        """Return a round of the agents that work on and of idle ones; the first waits for a cohort."""
        config = self.active.run.context.config.round
        if not self._busy and config.mode == "synchronous":  # the configuration was changed, and nobody works on
            return (yield from super().plan(number))
        # 1. Where agents work on, there is no wait: their updates may come at any time.
        cohort: tuple[str, ...] = ()
        if not self._busy:
            cohort = yield from self.active.selection.await_cohort(number)
        # 2. Each agent's update is a change to the state that it started from, so these states are kept.
        busy = dict(sorted(self._busy.items()))
        bases = {earlier: self._bases[earlier] for earlier in set(busy.values())}
        bases[number] = self.active.run.checkpoint
        self._bases = bases
        # 3. Beside the agents that work on, idle ones are asked.
        new = cohort or self.active.selection.with_idle(number, busy, len(busy))
        fact = RoundOpened(joining=(), buffer=config.buffer, asked=busy, bases=bases)
        return OpenRound(number, 1, tuple(sorted({*busy, *new})), fact)

    def make_collection(self, opened: OpenRound, late: Sequence[tuple[str, int]]) -> Collection:
        """Return a collection that takes updates of earlier rounds as well; without any of this attempt yet."""
        plain = super().make_collection(opened, late)
        if opened.fact.buffer is None:  # it was opened as a synchronous round, before the configuration was changed
            return plain
        return BufferedCollection(**vars(plain), buffer=opened.fact.buffer, asked_in=opened.fact.asked)

    def prepare_earlier_jobs(self, opened: OpenRound) -> Steps:
        """After a restart, be able to ask again those who work on a job of an earlier round."""
        self._bases = dict(opened.fact.bases) or self._bases
        run = self.active.run
        for number in sorted({*opened.fact.asked.values()} - self._earlier.keys()):
            base = self._bases[number]
            then = replace(run, state=decode(run.context.state.blobs.read(base)), checkpoint=base)
            self._earlier[number] = yield from self.active.assign(then, JobSpec(number))

    def dismiss(self, collecting: Collecting, unanswered: Mapping[str, str]) -> None:
        """Call off the agents that failed or are too late, and all of them in the last round; the others work on."""
        opened = collecting.opened
        collection = collecting.collection
        self._busy = {}
        # 1. No round follows that would use updates of this one.
        is_last = opened.round == self.active.run.request.rounds
        if is_last or opened.fact.buffer is None:
            self.active.call_off(collection)
            self.withdraw()
            return
        # 2. Otherwise those work on whose updates will not be too old in the next round.
        following = opened.round + 1
        most = self.active.run.context.config.round.max_staleness
        for agent in collection.outstanding:
            asked_in = opened.asked_in(agent)
            is_too_late = following - asked_in > most
            if agent in collection.given_up or agent in unanswered or is_too_late:
                self.active.cancel(agent, asked_in, collection.purpose_of(agent), reason=TOO_LATE)
            else:
                self._busy[agent] = asked_in
        if not self._busy:
            self.active.run.context.collector.close()
        self._keep_assignments_of_busy(opened.round)

    def collected(self, collecting: Collecting, unanswered: Mapping[str, str]) -> Collected:
        """Return what the round has collected, and who works on from which states."""
        collected = super().collected(collecting, unanswered)
        if collecting.opened.fact.buffer is None:
            return collected
        asked_in = dict(collecting.opened.fact.asked)
        updates = replace(collected.updates, asked=asked_in, bases=self._bases)
        kept_bases = {number: self._bases[number] for number in {*self._busy.values()}}
        # Agents report the loss of a model of several rounds ago, which says nothing about this round's.
        return replace(
            collected, updates=updates, busy=dict(self._busy), bases=kept_bases, has_losses_of_this_round=False
        )

    def assignment_of(self, agent: str) -> Assignment | None:
        """Return what the agent is asked to do now, which may be of an earlier round."""
        collection = self.active.open_collection
        if isinstance(collection, BufferedCollection) and agent in collection.asked_in:
            return self._earlier.get(collection.asked_in[agent])
        return self.active.assignment

    def withdraw(self) -> None:
        """End all assignments, those of earlier rounds included."""
        super().withdraw()
        for assignment in self._earlier.values():
            assignment.withdraw()
        self._earlier.clear()

    def _keep_assignments_of_busy(self, number: int) -> None:
        """Keep the assignment of a round that closes, and earlier ones, as long as somebody works on them."""
        if self.active.assignment is not None:
            self._earlier[number] = self.active.assignment
            self.active.assignment = None
        for earlier in self._earlier.keys() - self._busy.values():
            self._earlier.pop(earlier).withdraw()
