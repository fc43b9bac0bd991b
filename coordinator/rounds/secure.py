"""Rounds of which the coordinator sees the sum alone: updates arrive under masks that cancel out in it.

An attempt at such a round has phases, each of which is collected like a small round: members send public keys, then
encrypted shares of their secrets, then their updates under masks, and at last the shares by which the masks are taken
off the sum (`secure_sum` has the coordinator's part of the protocol). Where too few take part in a phase, the attempt
is over and nothing of it is used: the round begins again with fresh keys and without the agents in dispute over
shares, up to ``round.max_attempts`` times.

Before shares are revealed, the journal notes whose sum it is. The same training gives the same updates again, so the
difference to a sum over other agents would expose single updates: from then on, only these agents take part.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from edge_agent.core.errors import CodecError, RunFailed, SumMissed, TrainingFailed
from edge_agent.core.storage import sha256_of
from edge_agent.core.task import Tensors
from edge_agent.privacy.secure_sum import tensors as layout
from edge_agent.wire.messages.fields import Purpose, new_id
from edge_agent.wire.tensors import first_negative_variance, pieces

from ..fleet.collection import Collection, updates_of
from ..journal.entries import RoundOpened, SumRevealed
from ..journal.store import facts_of
from ..state.store import BlobStore
from ..text import listed
from ..views.runs import OpenRound, Rejection
from .active_run import ActiveRun
from .aggregation import StoredUpdates
from .assignment import JobSpec
from .context import MOST_LISTED, Steps, Waiting, computed
from .figures import Stats
from .round import Collecting, Rounds, with_updates
from .secure_sum import SecureSum, check_forms, disputed, keys_objection
from .selection import drop_left_out
from .server_step import Collected, ServerStep
from .synchronous import plan_cohort

log = logging.getLogger(__name__)


@dataclass
class AbsentMembers:
    """The agents that were asked in an attempt at a secure sum and have not done their part."""

    failed: dict[str, Rejection] = field(default_factory=dict)
    """Agent -> why it could not do its part."""

    unanswered: dict[str, str] = field(default_factory=dict)
    """Agent -> why, of those that were present and did not answer in time."""

    def note(self, collection: Collection, unanswered: dict[str, str]) -> None:
        """Add the agents that have not done their part in one phase."""
        self.failed.update(collection.rejected)
        self.unanswered.update(unanswered)

    def __str__(self) -> str:
        """Return the agents with their reasons, on one line."""
        reasons = {agent: rejection.reason for agent, rejection in self.failed.items()}
        reasons.update(self.unanswered)
        if not reasons:
            return "nobody failed"
        first_ones = sorted(reasons.items())[:MOST_LISTED]
        return "; ".join(f"{agent}: {reason}" for agent, reason in first_ones)


class SecureSumRounds(Rounds):
    """Rounds of which nobody sees single updates."""

    def __init__(self, active: ActiveRun, server: ServerStep) -> None:
        super().__init__(active, server)
        self._sums = SecureSum("", 0, "", {}, 0)
        """The protocol of the attempt that is under way."""

        self._absent = AbsentMembers()
        """Who has not done its part in this attempt."""

        self._barred: set[str] = set()
        """Agents in dispute over shares in earlier attempts at this round, which are not asked again."""

    def hold(self, number: int, resumed: OpenRound | None) -> Steps:
        """Hold round ``number`` in up to ``round.max_attempts`` attempts.

        Raises:
            RunFailed: No attempt gave a sum, or updates of this method cannot be added up.
        """
        objection = check_forms(self.active.forms.update)
        tiers = self.active.selection.tiers
        if not objection and tiers.contributes and not tiers.are_alike:
            objection = "devices without torch send a part of an update only, which adds up with no other"
        if objection:
            raise RunFailed(f"{objection}; set privacy.secure_sum = false, or choose another method")
        stats = Stats.begin(self.active.run.context)
        stopwatch = self.active.run.context.stopwatch
        most = self.active.run.context.config.round.max_attempts
        opened = resumed or OpenRound(number, 0, (), RoundOpened())
        missed = SumMissed("")
        self._barred = set()
        for attempt in range(1, most + 1):
            self._absent = AbsentMembers()
            # 1. Members whose sum has begun to be revealed before take part again, and nobody else; otherwise a cohort
            #    is chosen as in any round.
            waits_since = stopwatch()
            bound_to = self._bound_to()
            if bound_to and resumed is not None:
                self.active.run.privacy_budget.check_terms(number, resumed.fact)
            planned = yield from self.plan(number)
            self.active.release_frozen()
            yield from self.freeze_for(planned.joining)
            stats.waiting_s += stopwatch() - waits_since
            # 2. Each attempt has a session and keys of its own, and all members begin again.
            least = len(bound_to) or self.active.run.context.config.cohort.min_agents
            self._sums = SecureSum(self.active.run.id, number, new_id(), self.active.forms.update, least)
            cohort = self.active.selection.draw(planned.cohort, layout.MOST_CLIENTS, number)
            joining = self.active.selection.contributors(cohort)
            fact = planned.fact.changed(session=self._sums.session, again=tuple(cohort), joining=joining)
            opened = opened.next_attempt(cohort, fact)
            # 3. The phases of the protocol, each of which may end the attempt.
            try:
                collecting = yield from self.open(opened, is_new=True)
                collected = yield from self.collect(collecting, stats)
            except SumMissed as error:
                missed = error
                self._bar_disputed()
                about = (self.active.run.id, number, attempt, missed, listed(sorted(self._barred)))
                log.warning("sum_missed run=%s round=%d attempt=%d reason=%s left_out=%s", *about)
                continue
            yield from self.server.close(collected, stats)
            return
        raise RunFailed(
            f"round {number}: no secure sum in {most} attempts (round.max_attempts), and no update was revealed: "
            f"{missed}; {self._absent}; repair those agents, raise round.deadline_s, or lower cohort.min_agents"
        )

    def plan(self, number: int) -> Generator[Waiting, None, OpenRound]:
        """Return a round with the cohort of those who are present, or with those whom the sum is bound to.

        Raises:
            RunFailed: Those whom the sum is bound to are not all here within the deadline of a round.
        """
        bound_to = self._bound_to()
        if not bound_to:
            return (yield from plan_cohort(self.active, number))
        yield from self._await_all(bound_to, number)
        joining = self.active.selection.contributors(bound_to)
        fact = self.active.run.privacy_budget.opens(RoundOpened(joining=joining, wanted=len(bound_to), work={}))
        return OpenRound(number, 1, bound_to, fact)

    def _await_all(self, bound_to: tuple[str, ...], number: int) -> Steps:
        """Wait until all agents are here whom the sum is bound to.

        Raises:
            RunFailed: They are not all here within the deadline of a round.
        """
        context = self.active.run.context
        until = context.roster.heard_s() + context.config.round.deadline_s
        text = f"round {number} begins again with the {len(bound_to)} agents whose sum has begun to be revealed"
        while True:
            missing = tuple(drop_left_out(bound_to, context.roster.ready))
            if not missing:
                return
            if context.roster.heard_s() >= until:
                raise RunFailed(
                    f"round {number}: the sum of {listed(bound_to)} has begun to be revealed, and cannot be that of "
                    f"others, because the difference would bare single updates; {listed(missing)} did not come back; "
                    "start another run with another seed (headwater run --seed)"
                )
            yield Waiting(text, missing, until + context.roster.deaf_s, f"round {number}")

    def open(self, opened: OpenRound, *, is_new: bool) -> Generator[Waiting, None, Collecting]:  # noqa: ARG002 - each attempt is
        """Collect keys and shares, then journal the attempt, and ask the members for their updates under masks.

        Raises:
            SumMissed: Too few have sent keys or shares.
        """
        sums = self._sums
        # 1. Public keys. Those whom the sum is bound to are all asked, also if they are in dispute: nobody else may be.
        barred = () if self._bound_to() else self._barred
        agents = tuple(drop_left_out(opened.cohort, barred))
        keyed, unanswered = yield from self._exchange("secure_keys", opened, agents, {}, keys_objection)
        self._absent.note(keyed, unanswered)
        sums.take_keys(updates_of(self._blobs, keyed))
        if len(sums.keys) < sums.least:
            raise SumMissed(f"{len(sums.keys)} of {len(agents)} agents have sent keys, it takes {sums.least}")
        # 2. Encrypted shares of the secrets, so that masks of members that fail later can still be taken off.
        shared, unanswered = yield from self._exchange("secure_shares", opened, sums.members, sums.for_shares())
        self._absent.note(shared, unanswered)
        sums.take_shares(updates_of(self._blobs, shared))
        if len(sums.sealed) < sums.needed:
            raise SumMissed(f"{len(sums.sealed)} of {len(sums.keys)} agents have sent shares, it takes {sums.needed}")
        # 3. Only now the members train: the attempt is in the journal, and they are asked for their updates.
        opened = self.record_opening(opened)
        collection = self._accept_masked_updates(opened)
        self.active.selection.note_opened(collection)
        work = opened.fact.work
        spec = JobSpec(opened.round, joining=opened.joining, work=work, session=sums.session, own=sums.for_training)
        deadline = yield from self.active.ask(collection.outstanding, spec)
        self.active.selection.note_asked(collection.outstanding)
        return Collecting(opened, collection, deadline)

    def collect(self, collecting: Collecting, stats: Stats) -> Generator[Waiting, None, Collected]:  # noqa: ARG002 - nobody is waited for
        """Wait for the updates under masks, and take the masks off their sum.

        Raises:
            SumMissed: Too few have delivered, or the sum is not one of plausible updates.
        """
        sums = self._sums
        active = self.active
        collection = collecting.collection
        work = collecting.opened.fact.work
        # 1. The updates under masks, of enough members.
        late_s = yield from active.selection.collect(collection, collecting.deadline, work=work)
        self._absent.note(collection, active.selection.unanswered(collection, late_s))
        closed = with_updates(collecting.opened, collection)
        active.call_off(collection)
        delivered = tuple(sorted(collection.accepted))
        if len(delivered) < sums.needed:
            raise SumMissed(f"{len(delivered)} of {len(sums.keys)} agents have delivered, it takes {sums.needed}")
        # 2. Before anybody is asked to reveal shares, the journal has whose sum it is: from here on it is no other's.
        revealed = SumRevealed(agents=delivered, origin=self._origin())
        active.journal.append(revealed, run=active.run.id, round=closed.round)
        mean = yield from self._take_masks_off(closed, collection, delivered)
        digest = self._blobs.put(*pieces(mean))
        # 3. The mean is checked as single updates are in other rounds, which cannot be seen here.
        negative = first_negative_variance(mean)
        if negative is not None:
            raise SumMissed(f"the sum of tensor '{negative}' holds a variance below 0")
        objection = active.run.method.objection(mean)
        if not objection and "objection" in active.own.names:
            path = self._blobs.path(digest)
            objection = yield from active.compute("objection", lambda: active.own.objection(path))
        if objection:
            raise SumMissed(objection)
        updates = StoredUpdates({"sum": (digest, 1.0)}, closed.round)
        return Collected(closed, collection, self._absent.unanswered, updates)

    # --- inside ----------------------------------------------------------------------------------------------------

    @property
    def _blobs(self) -> BlobStore:
        return self.active.run.context.state.blobs

    def _bound_to(self) -> tuple[str, ...]:
        """Return the agents whose sum of this training has begun to be revealed; empty where none has."""
        origin = self._origin()
        for fact in facts_of(self.active.journal.entries(None, ("sum_revealed",)), SumRevealed):
            if fact.origin == origin:
                return fact.agents
        return ()

    def _origin(self) -> str:
        """Return the digest of what updates follow from, but for what is random, as `edge_agent.agent` computes it."""
        run = self.active.run
        task = run.request.task.model_dump(mode="json")
        params = run.method.all_params()
        return sha256_of(json.dumps([task, run.method.name, params, run.checkpoint], sort_keys=True).encode())

    def _exchange(
        self,
        purpose: Purpose,
        opened: OpenRound,
        agents: tuple[str, ...],
        given: Tensors,
        objection: Callable[[Tensors], str] = lambda _: "",
    ) -> Generator[Waiting, None, tuple[Collection, dict[str, str]]]:
        """Have these agents send what they make of the tensors that they are given, in one phase.

        Returns:
            What they have sent; and agent -> reason, of those that were present and did not answer in time.
        """
        collection = Collection(
            self.active.run.id,
            opened.round,
            agents,
            self._sums.expects(purpose),
            objection=objection,
            purpose=purpose,
            session=self._sums.session,
        )
        spec = JobSpec(opened.round, purpose, given=given, session=self._sums.session)
        unanswered = yield from self.active.exchange(collection, spec)
        return collection, unanswered

    def _accept_masked_updates(self, opened: OpenRound) -> Collection:
        """Accept updates under masks from those who have sent shares; those that failed before count as failed."""
        active = self.active
        failed = self._absent.failed
        collection = Collection(
            active.run.id,
            opened.round,
            tuple(sorted({*self._sums.sealed, *failed})),
            self._sums.expects("train"),
            dict(opened.updates),
            dict(opened.rejected),
            joining=opened.joining,
            extras=self._sums.expects("train"),
            on_trial=active.selection.on_trial,
            left_out=dict(opened.fact.left_out),
            session=self._sums.session,
        )
        active.start_collecting(collection)
        for agent, rejection in failed.items():
            active.run.context.collector.failed(agent, rejection)
        self.log_opening(opened)
        return collection

    def _take_masks_off(
        self, closed: OpenRound, collection: Collection, delivered: tuple[str, ...]
    ) -> Generator[Waiting, None, Tensors]:
        """Return the weighted mean of the updates, after the members have revealed what their masks are made of.

        Raises:
            SumMissed: A share was wrong, or too few have revealed theirs.
        """
        # An agent that does not answer here has delivered, and is not noted as absent.
        who_delivered = self._sums.for_unmasking(delivered)
        revealed, _ = yield from self._exchange("secure_unmask", closed, delivered, who_delivered)
        waiting = Waiting(f"round {closed.round}: masks are taken off the sum of {len(delivered)} updates")
        masked_updates = updates_of(self._blobs, collection)
        answers = updates_of(self._blobs, revealed)
        worker = self.active.run.context.worker
        try:
            return (yield from computed(worker, "sum", lambda: self._sums.mean(masked_updates, answers), waiting))
        except (CodecError, TrainingFailed) as error:
            raise SumMissed(str(error)) from error

    def _bar_disputed(self) -> None:
        """Leave those in dispute over shares with most others out of the next attempts."""
        accusations = {agent: rejection.accused for agent, rejection in self._absent.failed.items()}
        self._barred |= disputed(accusations, self._sums.members)
