"""The round loop: one for all methods, on devices and in simulation.

`RunLoop.steps` reads like the protocol. Wherever it has to wait it yields a `Waiting` with the reason, the agents and
the time limit; the service continues it after each event. Each change of state is in the journal before it takes
effect, so a new loop on the same journal resumes in the same round with the updates that were acknowledged.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_agent import heads
from edge_agent.core.errors import CodecError, RunFailed, TrainingFailed
from edge_agent.core.storage import sha256_of
from edge_agent.core.task import State, Tensors
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.down import Cancel, Job
from edge_agent.wire.messages.fields import EXCHANGES, LARGE_TASK_BYTES, Purpose, new_id
from edge_agent.wire.messages.up import Fault, Heartbeat
from edge_agent.wire.tensors import Spec, decode, encode, pieces

from ..config import AggregationConfig
from ..fleet.transfers import Collection, updates_of
from ..journal.entries import (
    Aggregation,
    AggregationSettings,
    Restored,
    RoundClosed,
    RoundOpened,
    RunStarted,
    SumRevealed,
)
from ..journal.sqlite import Journal
from ..journal.store import facts_of
from ..state.store import prune_blobs, retain_checkpoint
from ..text import listed
from ..views.runs import OpenRound, replay
from . import aggregation
from .aggregation import StoredUpdates
from .buffered import BufferedCollection
from .context import REPORT_DEADLINE_S, Run, RunContext, RunHooks, Steps, Waiting, computed
from .good_state import GoodState, after, explosion, reason_of_restoration
from .pace import Pace
from .privacy import PrivacyBudget
from .release import encoder_of, freeze, release_during_run, stop_reason, with_client_ranges, with_pooled_norm
from .repeats import after_round
from .results import Stats, finish_run, restore, round_record
from .selection import Exclusions, Selection, aim, without
from .server_side import OwnFunctions, method_of, specs_from_json

if TYPE_CHECKING:
    from .secure_rounds import SecureRound

log = logging.getLogger(__name__)

BEGIN_LIMIT_S = 600.0
"""How long building the model may take."""

MOST_LISTED = 100
"""Agents in each list of `RunLoop.status`."""

ASKED_AT_ONCE = 1000
"""Agents that are asked together to evaluate the final model: they share its broadcast, and then answer together."""

TURN_S = 5.0
"""How long the next ones wait at most for those of them whose links are slow."""

Make = Callable[[str, Tensors], tuple[Job, tuple[Outgoing, ...]]]
"""An agent's job with what the agent gets by the method's own `Method.downlink`, and the blobs that it refers to."""


@dataclass(frozen=True)
class JobSpec:
    """What the agents of an assignment are asked to do."""

    round: int
    purpose: Purpose = "train"
    joining: tuple[str, ...] = ()
    """Devices without torch, which contribute where others train."""

    given: Tensors | None = None
    """What all start from; None: from the state of the run."""

    own: Callable[[str], Tensors] = lambda _: {}
    """What an agent gets beside that, alone."""

    work: Mapping[str, float] = field(default_factory=dict)
    """Slow agent -> its share of local training."""

    session: str = ""
    """Attempt at a secure sum that this is part of; empty: of none."""


@dataclass
class Assignment:
    """Work that is open until ``until`` (of `Roster.heard_s`). ``make`` is called once for each agent."""

    context: RunContext
    until: float
    make: Make
    spec: JobSpec
    downlinks: Callable[[tuple[str, ...]], Mapping[str, Tensors]] | None = None
    """What each of these agents gets alone, computed in the worker; None: no function of the method's own decides."""

    failed: Callable[[BaseException], None] = lambda _: None
    """Called when that cannot be computed."""

    _awaited: set[str] = field(default_factory=set)
    """Agents for which it is being computed."""

    _jobs: dict[str, Job] = field(default_factory=dict)
    _on_offer: set[str] = field(default_factory=set)

    def ask(self, agents: Sequence[str]) -> Steps:
        """Send these agents their jobs, after all blobs have been offered: common ones are then sent once."""
        self._prepare(agents)
        while self._awaited.intersection(agents):
            yield Waiting("the method computes what each agent gets", about="downlink")

    def invite(self, agent: str) -> None:
        """Send one agent its job (again), with the time that is left now."""
        if agent not in self._jobs:
            if agent not in self._awaited:
                self._prepare((agent,))
            return
        update = {
            "deadline_s": max(1.0, self.until - self.context.roster.heard_s()),
            "work": self.spec.work.get(agent, 1.0),
        }
        self.context.roster.asked(agent)
        self.context.send(agent, self._jobs[agent].model_copy(update=update))

    def extend(self, until: float, work: Mapping[str, float], agents: Sequence[str]) -> Steps:
        """Ask more agents, with another deadline for all."""
        self.until, self.spec = until, replace(self.spec, work=work)
        yield from self.ask(agents)

    def withdraw(self) -> None:
        """End the assignment: its blobs are no longer offered."""
        self.context.distributor.withdraw(self._on_offer)
        self._awaited.clear()
        self._jobs.clear()
        self._on_offer.clear()

    def purpose_of(self, agent: str) -> Purpose:
        """What this agent is asked to do; a device without torch contributes where others train."""
        return self._jobs[agent].purpose if agent in self._jobs else self.spec.purpose

    def _prepare(self, agents: Sequence[str]) -> None:
        """Make the jobs of those of these agents that have none, and invite them."""
        new = tuple(without(agents, {*self._jobs, *self._awaited}))
        self._awaited.update(new)
        if self.downlinks is None or not new:
            self._offer(new, {})
        else:
            job = functools.partial(self.downlinks, new)
            done = functools.partial(self._on_computed, new)
            self.context.worker.submit("downlink", job, done)

    def _on_computed(
        self, agents: Sequence[str], downlinks: Mapping[str, Tensors], error: BaseException | None
    ) -> None:
        if not self._awaited:  # it was withdrawn meanwhile
            return
        try:
            if error is None:
                self._offer(agents, downlinks)
        except Exception as problem:  # noqa: BLE001 - it is the run's
            error = problem
        if error is not None:
            self.failed(error)

    def _offer(self, agents: Sequence[str], downlinks: Mapping[str, Tensors]) -> None:
        for agent in agents:
            self._jobs[agent], blobs = self.make(agent, downlinks.get(agent, {}))
            for blob in blobs:
                self.context.distributor.offer(blob, (agent,))
                self._on_offer.add(blob.ref.digest)
        self._awaited.difference_update(agents)
        for agent in agents:
            self.invite(agent)


@dataclass
class _Absent:
    """Who was asked in an attempt at a secure sum, and did not do it."""

    failed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Agent -> why, and in which start of it."""

    unanswered: dict[str, str] = field(default_factory=dict)

    def note(self, collection: Collection, unanswered: Mapping[str, str]) -> None:
        """Those of one collection."""
        boots = collection.failed_boots
        self.failed |= {agent: (why, boots.get(agent, "")) for agent, why in collection.rejected.items()}
        self.unanswered |= unanswered

    def __str__(self) -> str:
        known = {**{agent: why for agent, (why, _) in self.failed.items()}, **self.unanswered}
        return "; ".join(f"{agent}: {why}" for agent, why in sorted(known.items())[:MOST_LISTED]) or "nobody failed"


@dataclass(frozen=True)
class _Summed:
    """A secure sum that is complete: the round as it closes, its collection, and the digest of its updates' mean."""

    closed: OpenRound
    collection: Collection
    mean: str


def _collected(opened: OpenRound, collection: Collection) -> OpenRound:
    """The round with what its agents have sent so far."""
    return replace(
        opened,
        updates=collection.accepted,
        rejected=collection.rejected,
        failed_boots=collection.failed_boots,
        fact=opened.fact.changed(left_out=collection.left_out),
    )


@dataclass
class RunLoop:
    """Executes one run. After a restart a new one resumes from the journal."""

    run: Run
    hooks: RunHooks = field(default_factory=RunHooks)
    asked: Assignment | None = None
    selection: Selection = field(init=False)
    failure: Exception | None = None
    """Of a computation for single agents in the worker: the run fails, or is stalled."""

    _own: OwnFunctions = field(default_factory=OwnFunctions)
    """What the method computes by functions of its own in another process."""

    _norm: dict[str, Spec] = field(default_factory=dict)
    """Batch norm tensors of the encoder that stay on devices."""

    _expected: dict[str, Spec] = field(default_factory=dict)
    _extras: dict[str, Spec] = field(default_factory=dict)
    _frozen: Outgoing | None = None
    _busy: dict[str, int] = field(default_factory=dict)
    """Agents that work on, and the round that they were asked in (buffered rounds)."""

    _bases: dict[int, str] = field(default_factory=dict)
    """Round -> digest of the state that its agents started from, as long as one of them works on."""

    _earlier: dict[int, Assignment] = field(default_factory=dict)
    """Round -> what its agents were asked to do, as long as one of them works on."""

    _bounded: dict[str, str] = field(default_factory=dict)
    """Agent -> what was done to its update in the round that was closed last."""

    _repeats: dict[str, int] = field(default_factory=dict)
    """Agent -> its count of rounds at a bound of size (`repeats`)."""

    _good: GoodState | None = None
    _was_restored: bool = False
    """Whether a state of this run was restored."""
    _spent: dict[str, Any] | None = None
    """What the closed rounds have cost of the privacy budget (`PrivacyBudget.figures`)."""

    _cohort: frozenset[str] = frozenset()
    """The members of the collection that was opened last."""

    def __post_init__(self) -> None:
        run = self.run
        journal = run.context.state.journal
        past = Exclusions.replay(journal, run.id), Pace.replay(journal, run.id)
        self.selection = Selection(run.context, run.request.seed, *past, fewest=self._budget.least)

    def steps(self) -> Steps:
        """The whole run, from where the journal says it stands."""
        record = replay(self._journal, self.run.id)
        stats = Stats.begin(self.run.context, self.run.id)
        yield from self._begin(record.checkpoint)
        self.run = yield from self.hooks.before_run(self.run)
        closed = facts_of(self._journal.entries(self.run.id, ("round_closed",)), RoundClosed)
        self._was_restored = any(fact.restored is not None for fact in closed)
        for last_closed in closed[-1:]:
            self._good = GoodState.from_fact(last_closed)
            self._repeats = dict(last_closed.repeats)
            if record.open_round is None:
                self._busy = dict(last_closed.busy)
                self._bases = dict(last_closed.bases)
        last = record.round
        stopped = ""
        export = self.run.context.config.export
        patience = 0 if self.run.method.needs_last_round else export.patience
        self._check_budget(record.round, is_open=record.open_round is not None)
        for number in range(record.round + 1, self.run.request.rounds + 1):
            resumed = record.open_round if number == record.round + 1 else None
            if resumed is None and (stopped := self._budget.objection()):
                log.info("run_stopped run=%s reason=%s", self.run.id, stopped)
                break
            if patience and (stopped := stop_reason(self.run.context.state.run(self.run.id).metrics(), patience)):
                log.info("run_stopped run=%s reason=%s", self.run.id, stopped)
                break
            is_sum = self.run.context.config.privacy.secure_sum
            yield from (self._secure_round if is_sum else self._round)(number, resumed)
            self.hooks.after_round(self.run, number)
            if export.every and not number % export.every and number != self.run.request.rounds:
                pooled = yield from self._with_pooled_norm(number)
                yield from release_during_run((yield from self._with_client_ranges(pooled, number)), number)
            last = number
        yield from self._ask_for_reports()
        yield from self.hooks.after_run(self.run)
        if export.after_run:
            self.run = yield from self._with_pooled_norm(last)
            self.run = yield from self._with_client_ranges(self.run, last)
        yield from finish_run(self.run, stats, self.selection.exclusions, stopped)

    def invite(self, agent: str) -> None:
        """Send one agent (again) what it is expected to do now, if anything."""
        asked = self._asked_of(agent)
        if asked is not None and self._concerns(agent):
            asked.invite(agent)

    def on_fault(self, agent: str, message: Fault) -> None:
        """An agent failed at its task: its update is no longer expected. Faults of other tasks change nothing."""
        reason = f"{message.error}: {message.message}"
        asked = self._asked_of(agent)
        if message.round != (asked.spec.round if asked is not None else 0):  # 0: the bundle that is being released
            return
        if asked is not None and message.purpose not in {None, asked.purpose_of(agent)}:
            return
        if asked is not None and message.session not in {"", asked.spec.session}:
            return
        if self.run.context.collector.open_round is not None:
            self.run.context.collector.failed(agent, reason, message.boot)
        elif self._concerns(agent) if asked is not None else self.run.reports.is_asked(agent):
            self.run.reports.fault(agent, reason)

    def on_heartbeat(self, agent: str, message: Heartbeat) -> None:
        """Ask an agent again that does not work on its task: it did not receive it."""
        asked = self._asked_of(agent)
        if asked is None:
            self.run.reports.ask_again(agent)
            return
        is_at_work = (message.run, message.round, message.purpose) == (
            self.run.id,
            asked.spec.round,
            asked.purpose_of(agent),
        )
        if self._concerns(agent):
            self.selection.at_work(agent, is_at_work=is_at_work)
        if not is_at_work:
            self.invite(agent)

    def withdraw(self) -> None:
        """End the assignment, because another loop replaces this one or the task is done; agents get no message."""
        for asked in (self.asked, *self._earlier.values()):
            if asked is not None:
                asked.withdraw()
        self.asked = None
        self._earlier.clear()

    def abandon(self) -> None:
        """The run has failed: cancel the tasks of its agents."""
        collection = self.run.context.collector.open_round
        if collection is not None:
            self._call_off(collection)
        self.run.context.collector.close()  # a stalled run has no open round, and incomplete updates
        self.withdraw()
        self._own.cancel()

    def status(self) -> dict[str, Any]:
        """The state of the run, as JSON."""
        collection = self.run.context.collector.open_round
        number = collection.round if collection else (self.asked.spec.round if self.asked else 0)
        return {
            "id": self.run.id,
            "method": self.run.request.method,
            "round": number,
            "rounds": self.run.request.rounds,
            "cohort": list(collection.cohort[:MOST_LISTED]) if collection else [],
            "cohort_size": len(collection.cohort) if collection else 0,
            "accepted": sorted(islice(collection.accepted, MOST_LISTED)) if collection else [],
            "accepted_count": len(collection.accepted) if collection else 0,
            "rejected": dict(islice(collection.rejected.items(), MOST_LISTED)) if collection else {},
            "left_out": self.selection.status(number),
            "bounded": self._bounded,
            "privacy": self._spent,
        }

    @property
    def _budget(self) -> PrivacyBudget:
        return PrivacyBudget(self.run.context.config, self._journal, self.run.method.server_step_is_mean())

    def _check_budget(self, closed: int, *, is_open: bool) -> None:
        """Return quietly where the privacy budget allows the run, in which ``closed`` rounds are over, to begin.

        Raises:
            RunFailed: it allows no round, or not all of a method that needs its last one.
        """
        rounds = self.run.request.rounds
        needed = rounds - closed if self.run.method.needs_last_round else int(closed == 0)
        if needed and not is_open and (why := self._budget.objection(needed)):
            raise RunFailed(f"{why}; raise the budget or the noise, or ask for fewer rounds")
        self._spent = self._budget.figures()

    @property
    def _journal(self) -> Journal:
        return self.run.context.state.journal

    # --- start -----------------------------------------------------------------------------------------------------

    def _begin(self, checkpoint: str | None) -> Generator[Waiting, None, None]:
        """Set the state to continue from: a checkpoint, or an initial model from the run's seed."""
        run = self.run
        journal = self._journal
        context = self.run.context
        request = self.run.request
        asked = {**run.for_compute(), "is_new": checkpoint is None}
        begun = yield from context.ask("begin", asked, "the model is being built", BEGIN_LIMIT_S)
        blobs = context.state.blobs
        config = context.config
        method, self._own = method_of(begun["method"], asked, context.compute, context.state.run(run.id).folder)
        if why := aggregation.refusal(method, config):
            raise RunFailed(why)
        self._extras = specs_from_json(begun["extras"])
        self._expected = {**specs_from_json(begun["shared"]), **self._extras}
        self._norm = specs_from_json(begun["norm"])
        if checkpoint is None:
            checkpoint = str(begun["digest"])
            state = decode(blobs.read(checkpoint))
            retain_checkpoint(journal, run.id, request.keep_every, 0, checkpoint)
            journal.append(RunStarted(), run=run.id, digest=checkpoint)
            log.info("run_started run=%s method=%s rounds=%d", run.id, method.name, request.rounds)
        else:
            state = decode(blobs.read(checkpoint))
            restore(context.state, run.id)
            log.info("run_resumed run=%s checkpoint=%s", run.id, checkpoint[:12])
        self.run = replace(run, method=method, state=state, checkpoint=checkpoint)

    # --- one round -------------------------------------------------------------------------------------------------

    def _secure_round(self, number: int, resumed: OpenRound | None) -> Steps:
        """A round of which the sum alone is seen. Where too few deliver, it begins again with fresh keys."""
        from edge_agent.privacy.secure_sum.tensors import MOST_CLIENTS

        from .secure_rounds import SecureRound, check_forms, disputed

        if why := check_forms(self._expected):
            raise RunFailed(f"{why}; set privacy.secure_sum = false, or choose another method")
        run = self.run
        config = self.run.context.config
        stats = Stats.begin(run.context)
        clock = run.context.stopwatch
        most = config.round.max_attempts
        opened = resumed or OpenRound(number, 0, (), RoundOpened())
        absent = _Absent()
        barred = set[str]()
        for attempt in range(1, most + 1):
            waits_since = clock()
            before = facts_of(self._journal.entries(None, ("sum_revealed",)), SumRevealed)
            only = next((fact.agents for fact in before if fact.origin == self._origin), ())
            if only and resumed is not None:
                self._budget.check_terms(number, resumed.fact)
            planned = yield from self._same_again(number, only) if only else self._planned(number)
            stats.waiting_s += clock() - waits_since
            least = len(only) or config.cohort.min_agents
            sums = SecureRound(run.id, number, new_id(), self._expected, least)
            cohort = self.selection.draw(planned.cohort, MOST_CLIENTS, number)
            opened = opened.next_attempt(cohort, planned.fact.changed(session=sums.session, again=tuple(cohort)))
            absent = _Absent()
            done = yield from self._secure_attempt(opened, sums, absent, () if only else barred)
            if isinstance(done, _Summed):
                yield from self._close(done.closed, done.collection, stats, absent.unanswered, done.mean)
                return
            barred |= disputed({agent: why for agent, (why, _) in absent.failed.items()}, sums.members)
            log.warning(
                "sum_missed run=%s round=%d attempt=%d reason=%s left_out=%s",
                *(run.id, number, attempt, done, listed(sorted(barred))),
            )
        raise RunFailed(
            f"round {number}: no secure sum in {most} attempts (round.max_attempts), and no update was revealed: "
            f"{done}; {absent}; repair those agents, raise round.deadline_s, or lower cohort.min_agents"
        )

    @property
    def _origin(self) -> str:
        """Digest of what decides updates, save for what is random: `edge_agent.agent.secure.origin_of`."""
        run = self.run
        task = run.request.task.model_dump(mode="json")
        params = run.method.all_params()
        return sha256_of(json.dumps([task, run.method.name, params, run.checkpoint], sort_keys=True).encode())

    def _same_again(self, number: int, agents: tuple[str, ...]) -> Generator[Waiting, None, OpenRound]:
        """Training from a model once more, with exactly the agents whose sum has begun to be revealed.

        They send the same updates again, also in another run, so that of two sums over different agents the difference
        would be single ones.

        Raises:
            RunFailed: they are not all here within the deadline of a round.
        """
        roster = self.run.context.roster
        until = roster.heard_s() + self.run.context.config.round.deadline_s
        while missing := tuple(without(agents, roster.ready)):
            if roster.heard_s() >= until:
                raise RunFailed(
                    f"round {number}: the sum of {listed(agents)} has begun to be revealed, and cannot be that of "
                    f"others, because the difference would bare single updates; {listed(missing)} did not come back; "
                    "start another run with another seed (headwater run --seed)"
                )
            what = f"round {number} begins again with the {len(agents)} agents whose sum has begun to be revealed"
            yield Waiting(what, missing, until + roster.deaf_s, f"round {number}")
        return OpenRound(number, 1, agents, self._budget.opens(RoundOpened(joining=(), wanted=len(agents), work={})))

    def _secure_attempt(
        self, opened: OpenRound, sums: SecureRound, absent: _Absent, barred: Container[str]
    ) -> Generator[Waiting, None, _Summed | str]:
        """The sum of one attempt without those ``barred``, or why there is none."""
        from .secure_rounds import keys_objection, negative_variance

        run = self.run
        blobs = self.run.context.state.blobs
        number = opened.round
        asked = tuple(without(opened.cohort, barred))
        keyed = yield from self._exchange("secure_keys", opened, asked, sums, {}, absent, keys_objection)
        sums.take_keys(updates_of(blobs, keyed))
        if len(sums.keys) < sums.least:
            return f"{len(sums.keys)} of {len(asked)} agents have sent keys, it takes {sums.least}"
        shared = yield from self._exchange("secure_shares", opened, sums.members, sums, sums.for_shares(), absent)
        sums.take_shares(updates_of(blobs, shared))
        if len(sums.sealed) < sums.needed:
            return f"{len(sums.sealed)} of {len(sums.keys)} agents have sent shares, it takes {sums.needed}"
        collection = self._open(opened, is_new=True, sums=sums, absent=absent)
        self.selection.opened(collection)
        work = opened.fact.work
        spec = JobSpec(number, work=work, session=sums.session, own=sums.for_training)
        until = yield from self._ask(collection.outstanding, spec)
        self.selection.asked(collection.outstanding)
        late_s = yield from self.selection.collect(collection, until, work=work)
        absent.note(collection, self.selection.unanswered(collection, late_s))
        closed = _collected(opened, collection)
        self._call_off(collection)
        delivered = tuple(sorted(collection.accepted))
        if len(delivered) < sums.needed:
            return f"{len(delivered)} of {len(sums.keys)} agents have delivered, it takes {sums.needed}"
        self._journal.append(SumRevealed(agents=delivered, origin=self._origin), run=run.id, round=number)
        given = sums.for_unmasking(delivered)
        revealed = yield from self._exchange("secure_unmask", opened, delivered, sums, given, _Absent())
        waiting = Waiting(f"round {number}: masks are taken off the sum of {len(delivered)} updates")
        try:
            mean = yield from computed(
                run.context.worker,
                "sum",
                lambda: sums.mean(updates_of(blobs, collection), updates_of(blobs, revealed)),
                waiting,
            )
        except (CodecError, TrainingFailed) as error:
            return str(error)
        digest = blobs.put(*pieces(mean))
        why = negative_variance(mean) or run.method.objection(mean)
        if not why and "objection" in self._own.names:
            why = yield from self._computed("objection", functools.partial(self._own.objection, blobs.path(digest)))
        return why or _Summed(closed, collection, digest)

    def _exchange(
        self,
        purpose: Purpose,
        opened: OpenRound,
        agents: tuple[str, ...],
        sums: SecureRound,
        given: Tensors,
        absent: _Absent,
        objection: Callable[[Tensors], str] = lambda _: "",
    ) -> Generator[Waiting, None, Collection]:
        """What these agents send before or after their masked updates, made of what is ``given``."""
        collection = Collection(
            self.run.id,
            opened.round,
            agents,
            sums.expects(purpose),
            objection=objection,
            purpose=purpose,
            session=sums.session,
        )
        self._collect(collection)
        self.selection.opened(collection)
        until = yield from self._ask(agents, JobSpec(opened.round, purpose, given=given, session=sums.session))
        late_s = yield from self.selection.collect(collection, until)
        absent.note(collection, self.selection.unanswered(collection, late_s))
        self._call_off(collection)
        return collection

    def _round(self, number: int, resumed: OpenRound | None) -> Steps:
        stats = Stats.begin(self.run.context)
        clock = self.run.context.stopwatch
        roster = self.run.context.roster
        waits_since = clock()
        if resumed is not None:
            self._budget.check_terms(number, resumed.fact)
        opened = resumed if resumed is not None else (yield from self._planned(number))
        if opened.joining:
            self._frozen = yield from freeze(self.run)
        stats.waiting_s += clock() - waits_since
        collection = self._open(opened, is_new=resumed is None)
        until = yield from self._ask_members(opened, collection)
        heard_s = roster.heard_s
        wanted = opened.fact.wanted
        while True:
            late_s = yield from self.selection.collect(collection, until, wanted, opened.fact.work)
            opened = _collected(opened, collection)
            if new := self.selection.replacements(collection, wanted):
                opened = self._enlarged(opened, new, again=())
                log.info("members_replaced run=%s round=%d by=%s", self.run.id, number, listed(new))
                collection = self._open(opened, is_new=True, late=collection.late)
                until = yield from self._ask_members(opened, collection, new)
                continue
            unanswered = self.selection.unanswered(collection, late_s)
            if self.selection.has_quorum(collection):
                break
            overdue = opened.fact.overdue + bool(unanswered)
            if self.selection.is_enough(collection, unanswered, overdue):
                break
            log.warning("round_missed run=%s round=%d got=%d", self.run.id, number, collection.delivered)
            waits_since = clock()
            added = yield from self.selection.more(collection)
            stats.waiting_s += clock() - waits_since
            if added.new or added.again or unanswered or heard_s() >= until:  # also when it passed in that wait
                opened = self._enlarged(opened, added.new, again=tuple(added.again), overdue=overdue)
                collection = self._open(opened, is_new=True, late=collection.late)
                until = yield from self._ask_members(opened, collection)
        self._dismiss(opened, collection, unanswered)
        yield from self._close(opened, collection, stats, unanswered)

    def _planned(self, number: int) -> Generator[Waiting, None, OpenRound]:
        """A new round, once enough agents are present."""
        config = self.run.context.config
        if self._busy:  # no wait: their updates may come at any time
            return self._buffered(number, ())
        cohort = yield from self.selection.first(number)
        if config.round.mode == "buffered":
            return self._buffered(number, cohort)
        joining = []  # head-tier devices, where the method has a task for them in a round
        if config.cohort.tier == "any" and heads.contribution(self.run.method.name) is not None:
            joining = without(self.run.context.roster.present("head"), self.selection.left_out(number))
        wanted = aim(len(cohort), config.cohort.over_selection)
        planned = RoundOpened(joining=tuple(joining), wanted=wanted, work=self._work(number, cohort))
        return OpenRound(number, 1, (*cohort, *joining), self._budget.opens(planned))

    def _buffered(self, number: int, cohort: tuple[str, ...]) -> OpenRound:
        """A round of the agents that work on and of idle ones, or of ``cohort`` where it is the first."""
        config = self.run.context.config.round
        asked = dict(sorted(self._busy.items()))
        self._bases = {version: self._bases[version] for version in set(asked.values())} | {number: self.run.checkpoint}
        planned = RoundOpened(joining=(), buffer=config.buffer, asked=asked, bases=self._bases)
        new = cohort or self.selection.with_idle(number, asked, len(asked))
        return OpenRound(number, 1, tuple(sorted({*asked, *new})), planned)

    def _dismiss(self, opened: OpenRound, collection: Collection, unanswered: Mapping[str, str]) -> None:
        """Call off the agents that have not delivered; in a buffered round those that failed, or are too late."""
        self._busy = {}
        if not opened.fact.buffer or opened.round == self.run.request.rounds:
            self._call_off(collection)
            return
        following = opened.round + 1
        most = self.run.context.config.round.max_staleness
        for agent in collection.outstanding:
            asked = opened.asked_in(agent)
            if agent in collection.given_up or agent in unanswered or following - asked > most:
                self._cancel(agent, asked, collection.purpose_of(agent), "the update would come too late")
            else:
                self._busy[agent] = asked
        if not self._busy:
            self.run.context.collector.close()
        if self.asked is not None:
            self._earlier[opened.round] = self.asked
            self.asked = None
        for version in self._earlier.keys() - self._busy.values():
            self._earlier.pop(version).withdraw()

    def _asked_of(self, agent: str) -> Assignment | None:
        """What the agent is asked to do now; in buffered rounds that may be of an earlier one."""
        collection = self.run.context.collector.open_round
        if isinstance(collection, BufferedCollection) and agent in collection.asked_in:
            return self._earlier.get(collection.asked_in[agent])
        return self.asked

    def _work(self, number: int, cohort: Sequence[str]) -> dict[str, float]:
        """Slow member -> its share of local training."""
        work = self.selection.work(cohort, can_shorten=self.run.method.one_pass())
        if work:
            shares = ", ".join(f"{agent} {share:g}" for agent, share in sorted(work.items())[:MOST_LISTED])
            log.info("less_work run=%s round=%d shares=%s: slow in earlier rounds", self.run.id, number, shares)
        return work

    def _enlarged(
        self, opened: OpenRound, new: Sequence[str], again: tuple[str, ...], overdue: int | None = None
    ) -> OpenRound:
        """Another attempt at the round with ``new`` members, which its record names, too.

        Args:
            opened: The round so far.
            new: Agents that join it.
            again: Members that are asked once more.
            overdue: Attempts in which present agents did not answer in time; None: as before.
        """
        cohort = (*opened.cohort, *new)
        added = tuple(sorted({*opened.fact.added, *new}))
        shares = {agent: share for agent, share in self._work(opened.round, cohort).items() if agent in new}
        work = {**opened.fact.work, **shares}
        enlarged = opened.fact.changed(added=added, work=work, again=again)
        if overdue is not None:
            enlarged = enlarged.changed(overdue=overdue)
        return opened.next_attempt(cohort, enlarged)

    def _ask_members(
        self, opened: OpenRound, collection: Collection, new: tuple[str, ...] = ()
    ) -> Generator[Waiting, None, float]:
        """Ask the members that have not delivered, or ``new`` ones beside them; returns the deadline of all."""
        work = opened.fact.work
        if self.asked is not None and new:
            until = self.run.context.roster.heard_s() + self.run.context.config.round.deadline_s
            yield from self.asked.extend(until, work, new)
        else:
            self.selection.opened(collection)
            yield from self._resume_earlier(opened)
            agents = tuple(without(collection.outstanding, opened.fact.asked))
            until = yield from self._ask(agents, JobSpec(opened.round, joining=opened.joining, work=work))
        self.selection.asked(new or collection.outstanding)
        return until

    def _open(
        self,
        opened: OpenRound,
        *,
        is_new: bool,
        late: Sequence[tuple[str, int]] = (),
        sums: SecureRound | None = None,
        absent: _Absent | None = None,
    ) -> Collection:
        """Accept updates of a round, or of another attempt at it, in addition to those that have arrived.

        ``late``: the late updates that came during the attempt before (`Collection.late`). ``sums``: the updates come
        masked, from those who have sent shares; those in ``absent`` have failed before.
        """
        number = opened.round
        attempt = opened.attempt
        buffer = opened.fact.buffer
        left_out = dict(opened.fact.left_out)
        if is_new:
            left_out = self.selection.spared(number, opened.cohort)
            fact = opened.fact.changed(attempt=attempt, cohort=opened.cohort, left_out=left_out)
            self._journal.append(fact, run=self.run.id, round=number)
            self.selection.exclusions.opened(number, left_out)
        make: Callable[..., Collection] = Collection
        failed = absent.failed if absent is not None else {}
        if buffer:
            make = functools.partial(BufferedCollection, buffer=buffer, asked_in=opened.fact.asked)
        collection = make(
            self.run.id,
            number,
            opened.cohort if sums is None else tuple(sorted({*sums.sealed, *failed})),
            self._expected if sums is None else sums.expects("train"),
            dict(opened.updates),
            dict(opened.rejected),
            self.run.method.objection if sums is None else lambda _: "",
            self._judge if sums is None and "objection" in self._own.names else None,
            opened.joining,
            self._extras,
            self.selection.on_trial,
            failed_boots=dict(opened.failed_boots),
            left_out=left_out,
            late=list(late),
            session="" if sums is None else sums.session,
        )
        self._collect(collection)
        for agent, (reason, boot) in failed.items():
            self.run.context.collector.failed(agent, reason, boot)
        log.info(
            "round_opened run=%s round=%d attempt=%d cohort=%s", self.run.id, number, attempt, listed(opened.cohort)
        )
        return collection

    def _resume_earlier(self, opened: OpenRound) -> Steps:
        """After a restart, be able to ask again those who work on a task of an earlier buffered round."""
        self._bases = dict(opened.fact.bases) or self._bases
        for version in sorted({*opened.fact.asked.values()} - self._earlier.keys()):
            then = replace(self.run, state=self._base(version), checkpoint=self._bases[version])
            self._earlier[version] = yield from self._assignment(then, JobSpec(version))

    def _ask(self, agents: tuple[str, ...], spec: JobSpec) -> Generator[Waiting, None, float]:
        """Offer the agents the blobs of their tasks, and send them the tasks; returns the deadline."""
        self.asked = asked = yield from self._assignment(self.run, spec)
        yield from asked.ask(agents)
        return asked.until

    def _assignment(self, run: Run, spec: JobSpec) -> Generator[Waiting, None, Assignment]:
        """The tasks of agents that start from the state of ``run``, or from what is given instead."""
        method = run.method
        config = run.context.config
        number = spec.round
        purpose = spec.purpose
        limit_s = config.round.deadline_s if purpose == "train" else REPORT_DEADLINE_S
        if purpose in EXCHANGES:
            limit_s = min(limit_s, config.round.deadline_s)
        every = config.evaluate_every
        text = run.request.task.model_dump_json().encode()
        large = Outgoing.of(text) if len(text) > LARGE_TASK_BYTES else None
        job = Job(
            purpose=purpose,
            run=run.id,
            round=number,
            rounds=run.request.rounds,
            seed=run.request.seed,
            method=method.name,
            method_sha256=run.request.method_sha256,
            params=method.all_params(),
            given=run.request.task if large is None else large.ref,
            blobs=(),
            deadline_s=limit_s,
            evaluate=bool(every) and (number % every == 0 or number == run.request.rounds),
            privacy=self._budget.asked(),
            session=spec.session,
        )
        shared: Tensors = {}
        common: tuple[Outgoing, ...] = ()
        if spec.given is not None:
            common = (Outgoing.of(encode(spec.given)),) if spec.given else ()
        elif purpose != "batch_norm_stats":
            if "broadcast" in self._own.names:
                broadcast = functools.partial(self._own.broadcast, run.checkpoint)
                shared = yield from self._computed("broadcast", broadcast)
            else:
                shared = method.broadcast(run.state)
            in_store = shared is run.state  # the checkpoint
            stored = run.context.state.blobs.path(run.checkpoint)
            common = (Outgoing.open(stored, run.checkpoint) if in_store else Outgoing.of(encode(shared)),)

        task = () if large is None else (large,)
        gets_state = bool(common) and spec.given is None
        is_own = gets_state and "downlink" in self._own.names

        def make(agent: str, downlink: Tensors) -> tuple[Job, tuple[Outgoing, ...]]:
            alone = {**spec.own(agent), **downlink}
            if gets_state and not is_own:
                alone |= method.downlink(run.state, agent)
            if agent not in spec.joining:
                blobs = (*common, Outgoing.of(encode(alone))) if alone else common
                refs = tuple(blob.ref for blob in blobs)
                return job.model_copy(update={"blobs": refs}), (*blobs, *task)
            if self._frozen is None:
                raise RunFailed(f"round {number}: there is no frozen encoder for {agent}; set cohort.tier to 'train'")
            # A device without torch gets the frozen encoder, and of the shared tensors only what it contributes to.
            extras = {name: array for name, array in shared.items() if name.startswith("extra.")}
            blob = Outgoing.of(encode({**extras, **alone}))
            update = {"purpose": "contribute", "blobs": (blob.ref,), "bundle": self._frozen.ref}
            return job.model_copy(update=update), (blob, self._frozen, *task)

        until = run.context.roster.heard_s() + limit_s
        downlinks = functools.partial(self._own.downlinks, run.checkpoint) if is_own else None
        return Assignment(run.context, until, make, spec, downlinks, self._fail)

    def _call_off(self, collection: Collection) -> None:
        asked_in = collection.asked_in if isinstance(collection, BufferedCollection) else {}
        for agent in collection.outstanding:
            number = asked_in.get(agent, collection.round)
            purpose = collection.purpose_of(agent)
            self._cancel(agent, number, purpose, session=collection.session)
        self.run.context.collector.close()
        self.withdraw()

    def _cancel(
        self, agent: str, number: int, purpose: Purpose, reason: str = "the round has closed", session: str = ""
    ) -> None:
        cancel = Cancel(run=self.run.id, round=number, purpose=purpose, session=session, reason=reason)
        self.run.context.send(agent, cancel)

    def _base(self, number: int) -> State:
        """The state that the agents asked in that round have started from."""
        return decode(self.run.context.state.blobs.read(self._bases[number]))

    def _close(
        self,
        closed: OpenRound,
        collection: Collection,
        stats: Stats,
        unanswered: dict[str, str],
        mean: str = "",
    ) -> Steps:
        """Aggregate in the order of agent ids, store the new state, and only then record that the round is over.

        ``mean``: digest of that of the updates, where nobody sees single ones.
        """
        run = self.run
        journal = self._journal
        blobs = self.run.context.state.blobs
        number = closed.round
        rule = self._rule
        losses = [one.metrics.get("loss") for one in collection.accepted.values()]
        boots = {agent: self.selection.boot(agent) for agent in (*collection.outstanding, *unanswered)}
        watched = rule.max_loss is not None and not isinstance(collection, BufferedCollection)
        exploded = explosion(losses, self._good, run.request.task.num_classes, rule.max_loss) if watched else None
        if exploded is not None and self._good is not None:
            state = decode(blobs.read(self._good.digest))
            decisions = aggregation.Decisions().body()
            self._was_restored = True
        else:
            try:
                updates = StoredUpdates({"sum": (mean, 1.0)}, number) if mean else self._updates(collection)
                state, decisions = yield from self._aggregated(updates, rule)
                self._repeats = after_round(self._repeats, decisions.get("repeats", {}), updates.accepted)
            except TrainingFailed as error:
                raise RunFailed(f"round {number}: {error}") from error
            self._good = after(self._good, losses, number - 1, run.checkpoint) if watched else None
        digest = blobs.put(*pieces(state))
        clients = len(collection.accepted)
        figures = stats.figures(run.context, collection)
        times = self.selection.times(collection, closed.fact.work)
        slow = self.selection.slowed(times, can_shorten=run.method.one_pass())
        fact = RoundClosed(
            clients=clients,
            unanswered=unanswered,
            boots=boots,
            times=times,
            excused=tuple(sorted({*slow, *self._busy})),
            busy=dict(self._busy),
            bases={version: self._bases[version] for version in {*self._busy.values()}},
            aggregation=Aggregation(settings=AggregationSettings(**rule.model_dump()), **decisions),
            **figures,
            **self._budget.of_round(clients),
        )
        if self._repeats:
            fact = fact.changed(repeats=self._repeats)
        if self._good is not None and number < run.request.rounds:  # no round follows that may restore it
            fact = fact.changed(good=self._good.to_fact())
        if exploded is not None and self._good is not None:
            restored = Restored(round=self._good.round, loss=exploded.loss, bound=exploded.bound)
            fact = fact.changed(restored=restored)
            log.error("state_restored run=%s round=%d %s", run.id, number, reason_of_restoration(restored.model_dump()))
        retain_checkpoint(journal, run.id, run.request.keep_every, number, digest)
        journal.append(fact, run=run.id, round=number, digest=digest)
        self.run = replace(run, state=state, checkpoint=digest)
        self._spent = self._budget.figures()
        prune_blobs(run.context.state)
        self.selection.closed(closed, fact, run.id)
        noted = dict(islice(aggregation.notes(fact.aggregation).items(), MOST_LISTED))
        self._bounded = {agent: f"round {number}: {note}" for agent, note in noted.items()}
        for agent, note in noted.items():
            log.warning("update_bounded run=%s round=%d agent=%s %s", run.id, number, agent, note)
        run.context.state.run(run.id).append_metrics(round_record(closed, fact))
        took = (figures["seconds"], figures["waiting_s"])
        log.info("round_closed run=%s round=%d seconds=%.3f waiting_s=%.3f clients=%d", run.id, number, *took, clients)

    def _judge(self, path: Path, judged: Callable[[str | None], bool]) -> None:
        """Ask for the method's own objection to the update in this file, in the worker (`Judge`)."""

        def done(objection: str | None, error: BaseException | None) -> None:
            if judged(objection) and error is not None:
                self._fail(error)

        self.run.context.worker.submit("objection", functools.partial(self._own.objection, path), done)

    def _computed(self, what: str, job: Callable[[], Any]) -> Generator[Waiting, None, Any]:
        """What a function of the method's own returns; messages are handled meanwhile."""
        return (yield from computed(self.run.context.worker, what, job, Waiting(f"the method computes its {what}")))

    def _fail(self, error: BaseException) -> None:
        self.failure = error if isinstance(error, Exception) else RunFailed(f"a computation has exited: {error!r}")

    def _aggregated(
        self, updates: StoredUpdates, rule: AggregationConfig
    ) -> Generator[Waiting, None, tuple[State, dict[str, Any]]]:
        """The next state, and the decisions about single updates as JSON."""
        run = self.run
        blobs = self.run.context.state.blobs
        if "aggregate" in self._own.names:
            run.context.collector.pause()  # in buffered rounds updates come meanwhile: they are offered again
            aggregate = functools.partial(self._own.aggregate, run.checkpoint, updates, rule)
            digest, body = yield from self._computed("aggregate", aggregate)
            return decode(blobs.read(digest)), body
        state, decisions = updates.aggregate(blobs, run.method, run.state, rule)
        return state, decisions.body()

    def _updates(self, collection: Collection) -> StoredUpdates:
        accepted = {agent: (one.digest, one.samples) for agent, one in collection.accepted.items()}
        start = replay(self._journal, self.run.id).start
        if not isinstance(collection, BufferedCollection):
            return StoredUpdates(accepted, collection.round, start=start, repeats=self._repeats)
        return StoredUpdates(accepted, collection.round, dict(collection.asked_in), self._bases, start, self._repeats)

    @property
    def _rule(self) -> AggregationConfig:
        """How rounds are aggregated now: more carefully once a state had to be restored."""
        config = self.run.context.config.aggregation
        privacy = self.run.context.config.privacy
        if privacy.clip is not None:  # noise is made for a sum that no other update bounds
            return config.without_bounds().model_copy(update={"max_loss": None})
        if privacy.secure_sum:  # a state can be restored, by the losses that agents send; single updates are not seen
            return config.without_bounds()
        return config.model_copy(update={"rule": "clipped"}) if self._was_restored and config.rule == "mean" else config

    def _with_pooled_norm(self, number: int) -> Generator[Waiting, None, Run]:
        return with_pooled_norm(self.run, number, self._norm, self._trainers(number), self._collect_outside)

    def _with_client_ranges(self, pooled: Run, number: int) -> Generator[Waiting, None, Run]:
        collect = functools.partial(self._collect_outside, given=encoder_of(pooled))
        return with_client_ranges(pooled, number, self._trainers(number), collect)

    def _trainers(self, number: int) -> tuple[str, ...]:
        """The agents that can be asked about their data after round ``number``."""
        return tuple(without(self.run.context.roster.present("train"), self.selection.left_out(number + 1)))

    def _collect_outside(self, collection: Collection, given: Tensors | None = None) -> Steps:
        """Ask the agents of ``collection`` after a round; ``given``: the tensors that they are asked about."""
        self._collect(collection)
        self.selection.opened(collection)
        until = yield from self._ask(collection.cohort, JobSpec(collection.round, collection.purpose, given=given))
        yield from self.selection.collect(collection, until)
        self._call_off(collection)

    # --- the end ---------------------------------------------------------------------------------------------------

    def _ask_for_reports(self) -> Steps:
        """Train agents personalize the final model and report their metrics."""
        opened = facts_of(self._journal.entries(self.run.id, kinds=("round_opened",)), RoundOpened)
        # Those of the last round, too: after a restart they may not have connected yet.
        last = set(opened[-1].cohort) - set(opened[-1].joining) if opened else set()
        refusing = self.selection.exclusions.refusing(self.selection.boot)
        agents = tuple(without(sorted({*last, *self.run.context.roster.present("train")}), refusing))
        self.asked = yield from self._assignment(self.run, JobSpec(self.run.request.rounds, "personalize"))
        yield from self._ask_in_turn(self.asked, agents)
        reliable = tuple(without(agents, self.selection.on_trial))
        yield from self.run.reports.collect(reliable or agents, self.invite)
        self.withdraw()

    def _ask_in_turn(self, asked: Assignment, agents: tuple[str, ...]) -> Steps:
        """Ask `ASKED_AT_ONCE` agents, and the next ones when most of those have got what they work on.

        All at once would answer at once, and their messages wait for each other. Those whose links are slow delay the
        next ones by at most `TURN_S`. An agent whose heartbeat says that it has nothing to do is asked out of turn.
        """
        context = self.run.context
        for begin in range(0, len(agents), ASKED_AT_ONCE):
            some = agents[begin : begin + ASKED_AT_ONCE]
            yield from asked.ask(some)
            is_last = begin + ASKED_AT_ONCE >= len(agents)
            until = context.clock() + TURN_S
            while not is_last and (context.is_behind() or context.clock() < until):
                if not context.is_behind() and context.distributor.waiting_for_blobs(some) <= len(some) // 10:
                    break
                yield Waiting("agents evaluate the final model", some, about="reports")

    # --- inside ----------------------------------------------------------------------------------------------------

    def _collect(self, collection: Collection) -> None:
        self._cohort = frozenset(collection.cohort)
        self.run.context.collector.open(collection)

    def _concerns(self, agent: str) -> bool:
        """Whether the job on offer is for this agent, and not done by it."""
        if self.asked is None or self.asked.spec.purpose != "personalize":
            collection = self.run.context.collector.open_round
            is_done = collection is None or agent in collection.accepted or agent in collection.rejected
            return agent in self._cohort and not is_done
        member = self.run.context.roster.get(agent)
        return member is not None and member.tier == "train" and agent not in self.run.reports.reports
