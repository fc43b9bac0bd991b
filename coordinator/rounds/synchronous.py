"""Synchronous rounds: all members start from the same state, and the round waits for a quorum of their updates.

Once the quorum is there, the others get a grace period. A member that fails is replaced where somebody else is
present. Where too few deliver by the deadline, the round is opened once more for whoever is there, up to
``round.max_attempts`` times.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence

from ..fleet.collection import Collection
from ..journal.entries import RoundOpened
from ..text import listed
from ..views.runs import OpenRound
from .active_run import ActiveRun
from .assignment import JobSpec
from .context import MOST_LISTED, Steps, Waiting
from .figures import Stats
from .round import Collecting, Rounds
from .selection import aim_of_cohort, drop_left_out
from .server_step import Collected

log = logging.getLogger(__name__)


class SynchronousRounds(Rounds):
    """Rounds whose members all start from the state that the round before has left."""

    def plan(self, number: int) -> Generator[Waiting, None, OpenRound]:
        """Return a round with the cohort of those who are present, once they are enough."""
        return (yield from plan_cohort(self.active, number))

    def open(self, opened: OpenRound, *, is_new: bool) -> Generator[Waiting, None, Collecting]:
        """Journal the round where it ``is_new``, accept its updates, and ask the members that have not delivered."""
        opened, collection = self._accept_updates(opened, is_new=is_new)
        return (yield from self._ask_members(opened, collection))

    def collect(self, collecting: Collecting, stats: Stats) -> Generator[Waiting, None, Collected]:
        """Wait for the quorum and its grace period, or for a deadline after which enough have delivered."""
        selection = self.active.selection
        while True:
            fact = collecting.opened.fact
            collection = collecting.collection
            late_s = yield from selection.collect(collection, collecting.deadline, fact.wanted, fact.work)
            collecting = collecting.with_updates()
            # 1. Members that have failed are replaced as long as their quorum has not delivered.
            replacements = selection.replacements(collection, fact.wanted)
            if replacements:
                about = (self.active.run.id, collection.round, listed(replacements))
                log.info("members_replaced run=%s round=%d by=%s", *about)
                collecting = yield from self._add_members(collecting, replacements)
                continue
            # 2. A quorum ends the round; so do fewer updates, when the others did not answer in time.
            unanswered = selection.unanswered(collection, late_s)
            if selection.has_quorum(collection):
                break
            overdue = fact.overdue
            if unanswered:
                overdue += 1
            if selection.is_enough(collection, unanswered, overdue):
                break
            # 3. Otherwise the round waits until more agents can deliver. They are asked, and those that have not
            #    answered once more; nobody is where all that is outstanding is still on its way.
            about_missed = (self.active.run.id, collection.round, collection.delivered)
            log.warning("round_missed run=%s round=%d got=%d", *about_missed)
            stopwatch = self.active.run.context.stopwatch
            waits_since = stopwatch()
            added = yield from selection.await_members(collection)
            stats.waiting_s += stopwatch() - waits_since
            # The deadline may also have passed in that wait.
            is_overdue = self.active.run.context.roster.heard_s() >= collecting.deadline
            if added.new or added.again or unanswered or is_overdue:
                collecting = yield from self._add_members(collecting, added.new, added.again, overdue)
        self.dismiss(collecting, unanswered)
        return self.collected(collecting, unanswered)

    # --- what other kinds of rounds do otherwise -------------------------------------------------------------------

    def make_collection(self, opened: OpenRound, late: Sequence[tuple[str, int]]) -> Collection:
        """Return an empty collection for the round, with the updates that have arrived before.

        Args:
            opened: The round.
            late: Updates that were late, of the attempt before (`Collection.late`).
        """
        active = self.active
        return Collection(
            active.run.id,
            opened.round,
            opened.cohort,
            active.forms.update,
            dict(opened.updates),
            dict(opened.rejected),
            objection=active.run.method.objection,
            judge=active.judge if "objection" in active.own.names else None,
            joining=opened.joining,
            extras=active.forms.extras,
            on_trial=active.selection.on_trial,
            left_out=dict(opened.fact.left_out),
            late=list(late),
        )

    def prepare_earlier_jobs(self, opened: OpenRound) -> Steps:  # noqa: ARG002 - for overriding methods
        """Make ready to ask again whoever works on a job of an earlier round; here nobody does."""
        yield from ()

    def dismiss(self, collecting: Collecting, unanswered: Mapping[str, str]) -> None:  # noqa: ARG002 - for others
        """Call off the agents that have not delivered."""
        self.active.call_off(collecting.collection)

    def collected(self, collecting: Collecting, unanswered: Mapping[str, str]) -> Collected:
        """Return what the round has collected, for the step of the server."""
        updates = self.server.stored_updates(collecting.collection)
        return Collected(collecting.opened, collecting.collection, dict(unanswered), updates)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _accept_updates(
        self, opened: OpenRound, *, is_new: bool, late: Sequence[tuple[str, int]] = ()
    ) -> tuple[OpenRound, Collection]:
        """Accept updates of a round, or of another attempt at it, beside those that have arrived."""
        if is_new:
            opened = self.record_opening(opened)
        collection = self.make_collection(opened, late)
        self.active.start_collecting(collection)
        self.log_opening(opened)
        return opened, collection

    def _add_members(
        self,
        collecting: Collecting,
        new: tuple[str, ...],
        again: tuple[str, ...] = (),
        overdue: int | None = None,
    ) -> Generator[Waiting, None, Collecting]:
        """Open another attempt at the round.

        Args:
            collecting: The round so far.
            new: Agents that join it.
            again: Members that have failed and are asked once more.
            overdue: Attempts in which present agents did not answer in time; None: as many as before.
        """
        before = collecting.opened
        cohort = (*before.cohort, *new)
        added = tuple(sorted({*before.fact.added, *new}))
        joining = (*before.joining, *self.active.selection.contributors(new))
        yield from self.freeze_for(joining)
        # Members that were asked before have begun with the share that they were given then.
        shares = shares_of_work(self.active, before.round, cohort)
        shares_of_new = {agent: share for agent, share in shares.items() if agent in new}
        work = {**before.fact.work, **shares_of_new}
        fact = before.fact.changed(added=added, joining=joining, work=work, again=again)
        if overdue is not None:
            fact = fact.changed(overdue=overdue)
        opened = before.next_attempt(cohort, fact)
        opened, collection = self._accept_updates(opened, is_new=True, late=collecting.collection.late)
        return (yield from self._ask_members(opened, collection, new))

    def _ask_members(
        self, opened: OpenRound, collection: Collection, new: tuple[str, ...] = ()
    ) -> Generator[Waiting, None, Collecting]:
        """Ask the members that have not delivered, or ``new`` ones beside them, with one deadline for all."""
        active = self.active
        work = opened.fact.work
        assignment = active.assignment
        if assignment is not None and new:
            deadline = active.run.context.roster.heard_s() + active.run.context.config.round.deadline_s
            yield from assignment.extend(deadline, work, new, joining=opened.joining, frozen=active.frozen)
        else:
            active.selection.note_opened(collection)
            yield from self.prepare_earlier_jobs(opened)
            agents = tuple(drop_left_out(collection.outstanding, opened.fact.asked))
            deadline = yield from active.ask(agents, JobSpec(opened.round, joining=opened.joining, work=work))
        active.selection.note_asked(new or collection.outstanding)
        return Collecting(opened, collection, deadline)


def plan_cohort(active: ActiveRun, number: int) -> Generator[Waiting, None, OpenRound]:
    """Return round ``number`` with a cohort of those who are present, once they are enough."""
    run = active.run
    config = run.context.config
    cohort = yield from active.selection.await_cohort(number)
    # Of devices without torch a method may get a part only: it does not count as an update that the round aims for.
    joining = active.selection.contributors(cohort)
    whole = cohort if active.selection.tiers.are_alike else drop_left_out(cohort, set(joining))
    wanted = aim_of_cohort(len(whole), config.cohort.over_selection)
    work = shares_of_work(active, number, cohort)
    fact = run.privacy_budget.opens(RoundOpened(joining=joining, wanted=wanted, work=work))
    return OpenRound(number, 1, cohort, fact)


def shares_of_work(active: ActiveRun, number: int, cohort: Sequence[str]) -> dict[str, float]:
    """Return slow member -> its share (0..1) of local training, and log it."""
    work = active.selection.work(cohort, can_shorten=active.run.method.one_pass())
    if work:
        shares = ", ".join(f"{agent} {share:g}" for agent, share in sorted(work.items())[:MOST_LISTED])
        log.info("less_work run=%s round=%d shares=%s: slow in earlier rounds", active.run.id, number, shares)
    return work
