"""The step of the server with which a round ends: aggregation, the new state, and the record of the round.

`ServerStep` outlives the rounds of a run: it knows the last good state, and which agents are at a bound of size again
and again. Both lie in the journal with each closed round, so that a restart changes nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from edge_agent.core.errors import RunFailed, TrainingFailed
from edge_agent.core.storage import mapped
from edge_agent.core.task import State, Tensors
from edge_agent.core.weighted_sum import WeightedSum
from edge_agent.wire.tensors import decode, pieces

from ..config import AggregationConfig
from ..fleet.collection import Collection
from ..journal.entries import Aggregation, AggregationSettings, Restored, RoundClosed
from ..state.privacy_spent import PrivacySpent
from ..state.store import prune_blobs, retain_checkpoint
from ..views.runs import OpenRound, replay
from .active_run import ActiveRun
from .aggregation import Combined, StoredUpdates, combine, notes
from .compute_requests import OfMethod
from .context import MOST_LISTED, Waiting
from .figures import Stats, round_line
from .good_state import Explosion, GoodState, after, explosion, reason_of_restoration
from .partitioned import UpdatesOfRound
from .passes import Answer, Origin, Pass, Reading
from .repeats import count_after_round
from .server_side import describe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collected:
    """What a round has collected: all that the step of the server needs to know of its kind."""

    round: OpenRound
    """The round as it closes, with its updates."""

    collection: Collection
    unanswered: Mapping[str, str]
    """Agent -> reason, of those that were present and have not delivered."""

    updates: StoredUpdates
    """What is aggregated."""

    busy: Mapping[str, int] = field(default_factory=dict)
    """Agents that work on, and the round that they were asked in."""

    bases: Mapping[int, str] = field(default_factory=dict)
    """Round -> digest of the state that those agents have started from."""

    has_losses_of_this_round: bool = True
    """Whether the losses that agents report are those of the state that the round began with."""


@dataclass
class ServerStep:
    """Ends the rounds of one run."""

    active: ActiveRun
    bounded: dict[str, str] = field(default_factory=dict)
    """Agent -> what was done to its update in the round that was closed last."""

    spent: PrivacySpent | None = None
    """What the closed rounds have cost of the privacy budget (`PrivacyBudget.figures`)."""

    _repeats: dict[str, int] = field(default_factory=dict)
    """Agent -> its count of rounds at a bound of size (`coordinator.rounds.repeats`)."""

    _good: GoodState | None = None
    _was_restored: bool = False
    """Whether a state of this run was restored."""

    def resume(self, closed: Sequence[RoundClosed]) -> None:
        """Take up what the closed rounds of the run have left."""
        self._was_restored = any(fact.restored is not None for fact in closed)
        if closed:
            self._good = GoodState.from_fact(closed[-1])
            self._repeats = dict(closed[-1].repeats)

    def stored_updates(self, collection: Collection) -> StoredUpdates:
        """Return the accepted updates of a collection, with what bounds on them depend on."""
        alone = {agent: update for agent, update in collection.accepted.items() if not update.sum}
        accepted = {agent: (update.digest, update.samples) for agent, update in alone.items()}
        sums = tuple(sorted({update.sum for update in collection.accepted.values()} - {""}))
        start = replay(self.active.journal, self.active.run.id).start
        return StoredUpdates(accepted, collection.round, start=start, repeats=self._repeats, sums=sums)

    def close(self, collected: Collected, stats: Stats) -> Generator[Waiting, None, None]:
        """Aggregate in the order of agent ids, store the new state, and only then record that the round is over.

        Raises:
            RunFailed: The updates cannot be aggregated.
        """
        closed = collected.round
        boots = self._boots_of_silent(collected)
        # 1. A loss that exploded restores the last good state; else the updates are aggregated to the next one.
        rule = self._rule()
        exploded = self._find_explosion(collected, rule)
        if exploded is not None and self._good is not None:
            state = decode(self.active.run.context.state.blobs.read(self._good.digest))
            aggregation = Aggregation(settings=AggregationSettings(**rule.model_dump()))
            self._was_restored = True
        else:
            state, aggregation = yield from self._aggregate(collected, rule)
        # 2. The checkpoint is in the store before the journal names it. A crash before the entry repeats this round,
        #    from the same updates to the same bits.
        digest = self.active.run.context.state.blobs.put(*pieces(state))
        fact = self._describe(collected, stats, aggregation, boots, exploded)
        self._commit(closed, fact, digest)
        # 3. From here on the next round may begin. Figures that a crash leaves out are restored from the journal.
        self.active.run = replace(self.active.run, state=state, checkpoint=digest)
        self.spent = self.active.run.privacy_budget.figures()
        prune_blobs(self.active.run.context.state)
        self.active.selection.note_closed(closed, fact, self.active.run.id)
        self._note_bounded(closed.round, fact.aggregation)
        self.active.run.context.state.run(self.active.run.id).append_metrics(round_line(closed, fact).to_json())
        log.info(
            "round_closed run=%s round=%d seconds=%.3f waiting_s=%.3f clients=%d",
            *(self.active.run.id, closed.round, fact.seconds, fact.waiting_s, fact.clients),
        )

    # --- inside ----------------------------------------------------------------------------------------------------

    def _rule(self) -> AggregationConfig:
        """Return how rounds are aggregated now: more carefully once a state had to be restored."""
        config = self.active.run.context.config.aggregation
        privacy = self.active.run.context.config.privacy
        # The noise of differential privacy is made for a sum that nothing else bounds.
        if privacy.clip is not None:
            return config.without_bounds().model_copy(update={"max_loss": None})
        # Of a secure sum nobody sees single updates; a state can be restored, by the losses that agents send.
        if privacy.secure_sum:
            return config.without_bounds()
        if self._was_restored and config.rule == "mean":
            return config.model_copy(update={"rule": "clipped"})
        return config

    def _boots_of_silent(self, collected: Collected) -> dict[str, str]:
        """Return the starts of the agents that have not delivered: one that is restarted later may be repaired."""
        boot = self.active.selection.boot
        return {agent: boot(agent) for agent in (*collected.collection.outstanding, *collected.unanswered)}

    def _find_explosion(self, collected: Collected, rule: AggregationConfig) -> Explosion | None:
        """Return the explosion of the agents' losses; None where there is none, or where losses are not watched."""
        if rule.max_loss is None or not collected.has_losses_of_this_round:
            return None
        num_classes = self.active.run.request.task.num_classes
        return explosion(_losses(collected), self._good, num_classes, rule.max_loss)

    def _aggregate(
        self, collected: Collected, rule: AggregationConfig
    ) -> Generator[Waiting, None, tuple[State, Aggregation]]:
        """Return the next state and the decisions about single updates, and count what later rounds depend on.

        Raises:
            RunFailed: The updates cannot be aggregated.
        """
        number = collected.round.round
        run = self.active.run
        updates = collected.updates
        blobs = run.context.state.blobs
        try:
            if updates.sums:
                state = yield from self._compute_next_state(updates.total(blobs, run.method, rule))
                decided = Aggregation()
            elif (summed := (yield from self._aggregate_by_aggregators(updates, rule))) is not None:
                state, decided = summed
            elif "aggregate" in self.active.own.names:
                # In buffered rounds updates come meanwhile: their agents offer them again.
                run.context.collector.pause()
                own_step = functools.partial(self.active.own.aggregate, run.checkpoint, updates, rule)
                aggregated = yield from self.active.compute("aggregate", own_step)
                decided = aggregated.decisions
                state = decode(blobs.read(aggregated.digest))
            else:
                state, decisions = updates.aggregate(blobs, run.method, run.state, rule)
                decided = decisions.to_fact()
        except TrainingFailed as error:
            raise RunFailed(f"round {number}: {error}") from error
        aggregation = decided.changed(settings=AggregationSettings(**rule.model_dump()))
        self._repeats = count_after_round(self._repeats, aggregation.repeats, updates.accepted)
        # Agents have trained on the state that this round began with: now it is known whether that one was good.
        is_watched = rule.max_loss is not None and collected.has_losses_of_this_round
        if is_watched:
            self._good = after(self._good, _losses(collected), number - 1, run.checkpoint)
        else:
            self._good = None
        return state, aggregation

    def _aggregate_by_aggregators(
        self, updates: StoredUpdates, rule: AggregationConfig
    ) -> Generator[Waiting, None, tuple[State, Aggregation] | None]:
        """Return the next state and the decisions, from passes that aggregators make; None where they cannot.

        The bits are those of one process: an answer that depends on how the updates were divided is not used.

        Raises:
            TrainingFailed: No update has a positive weight.
        """
        run = self.active.run
        # Of buffered rounds updates have different bases, which aggregators do not know.
        is_buffered = bool(updates.asked)
        if is_buffered or not run.context.aggregators.would_read(len(updates.accepted)):
            return None
        values = describe(run.method)
        if not values.server_step_is_sum:
            return None
        blobs = run.context.state.blobs
        about = OfMethod(method=run.request.method_reference, params=run.request.params)
        start = updates.start if updates.start is not None and updates.start in blobs else None
        of_round = UpdatesOfRound(about, values, run.checkpoint, start, updates.accepted)
        # 1. What all clients received, and where the run began.
        received = yield from self._compute_broadcast()
        origin = Origin(run.method, received, None if start is None else decode(mapped(blobs.path(start))))
        # 2. One pass after another, each by all aggregators at once.
        reading = combine(origin, run.state, lambda: updates.read(blobs), rule, updates.repeats)
        combined = yield from self._read_by_aggregators(reading, of_round)
        if combined is None:
            return None
        # 3. What the method makes of the sum.
        state = combined.state
        if state is None:
            state = yield from self._compute_next_state(combined.total)
        return state, combined.decisions.to_fact()

    def _compute_broadcast(self) -> Generator[Waiting, None, Tensors]:
        """Return what all clients received: the contract's own broadcast is computed here, a method's own elsewhere."""
        run = self.active.run
        if "broadcast" not in self.active.own.names:
            return run.method.broadcast(run.state)
        broadcast = functools.partial(self.active.own.broadcast, run.checkpoint)
        received: Tensors = yield from self.active.compute("broadcast", broadcast)
        return received

    def _compute_next_state(self, total: WeightedSum) -> Generator[Waiting, None, State]:
        """Return what the method makes of the sum of updates: the contract's own step here, a method's elsewhere."""
        run = self.active.run
        if "next_state" not in self.active.own.names:
            return run.method.next_state(run.state, total)
        step = functools.partial(self.active.own.next_state, run.checkpoint, total)
        digest = yield from self.active.compute("next state", step)
        return decode(run.context.state.blobs.read(digest))

    def _read_by_aggregators(
        self, reading: Reading[Combined], updates: UpdatesOfRound
    ) -> Generator[Waiting, None, Combined | None]:
        """Return the result of a computation whose passes aggregators make; None where they cannot make one."""
        answer: Any = None
        while True:
            try:
                one_pass, _ = reading.send(answer)
            except StopIteration as end:
                combined: Combined = end.value
                return combined
            answer = yield from self._make_by_aggregators(one_pass, updates)
            if answer is None:
                return None

    def _make_by_aggregators(
        self, one_pass: Pass[Answer], updates: UpdatesOfRound
    ) -> Generator[Waiting, None, Answer | None]:
        """Return the answer of a pass that aggregators make; None where they cannot."""
        making = self.active.run.context.aggregators.make(one_pass, updates)
        while True:
            try:
                waits_for = next(making)
            except StopIteration as end:
                answer: Answer | None = end.value
                return answer
            yield Waiting(waits_for, about="aggregators")

    def _describe(
        self,
        collected: Collected,
        stats: Stats,
        aggregation: Aggregation,
        boots: dict[str, str],
        exploded: Explosion | None,
    ) -> RoundClosed:
        """Return what is journaled of the end of the round."""
        run = self.active.run
        selection = self.active.selection
        clients = len(collected.collection.accepted)
        costs = stats.costs(run.context, collected.collection)
        times = selection.times(collected.collection, collected.round.fact.work)
        slow = selection.find_slowed(times, can_shorten=run.method.one_pass())
        fact = RoundClosed(
            clients=clients,
            unanswered=dict(collected.unanswered),
            boots=boots,
            times=times,
            excused=tuple(sorted({*slow, *collected.busy})),
            busy=dict(collected.busy),
            bases=dict(collected.bases),
            aggregation=aggregation,
            **vars(costs),
            **run.privacy_budget.of_round(clients),
        )
        if self._repeats:
            fact = fact.changed(repeats=self._repeats)
        is_last = collected.round.round == run.request.rounds  # no round follows that may restore a state
        if self._good is not None and not is_last:
            fact = fact.changed(good=self._good.to_fact())
        if exploded is not None and self._good is not None:
            restored = Restored(round=self._good.round, loss=exploded.loss, bound=exploded.bound)
            fact = fact.changed(restored=restored)
            reason = reason_of_restoration(restored)
            log.error("state_restored run=%s round=%d %s", run.id, collected.round.round, reason)
        return fact

    def _commit(self, closed: OpenRound, fact: RoundClosed, digest: str) -> None:
        """Journal the end of the round, after the state that it names is in the store and kept where it should be."""
        run = self.active.run
        retain_checkpoint(self.active.journal, run.id, run.request.keep_every, closed.round, digest)
        self.active.journal.append(fact, run=run.id, round=closed.round, digest=digest)

    def _note_bounded(self, number: int, aggregation: Aggregation) -> None:
        """Keep for the status, and log, what was done to the updates of single agents."""
        noted = dict(islice(notes(aggregation).items(), MOST_LISTED))
        self.bounded = {agent: f"round {number}: {note}" for agent, note in noted.items()}
        for agent, note in noted.items():
            log.warning("update_bounded run=%s round=%d agent=%s %s", self.active.run.id, number, agent, note)


def _losses(collected: Collected) -> list[float | None]:
    """Return the loss of each accepted update; None where its agent withholds it."""
    return [update.metrics.get("loss") for update in collected.collection.accepted.values()]
