"""The loop that carries a run: it begins, holds its rounds, asks all agents for their results, and ends.

`RunLoop.steps` reads like the protocol. Wherever it has to wait it yields a `Waiting` with the reason, the agents and
the time limit; the service continues it after each event. Each change of state is in the journal before it takes
effect, so a new loop on the same journal resumes in the same round with the updates that were acknowledged
(`coordinator.rounds.round` has what a crash repeats).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from edge_agent.core.errors import RunFailed
from edge_agent.core.task import Tensors
from edge_agent.wire.messages.up import Fault, Heartbeat
from edge_agent.wire.tensors import decode

from ..config import CoordinatorConfig
from ..fleet.collection import Collection
from ..journal.entries import RoundClosed, RoundOpened, RunStarted, RunStopped
from ..journal.store import Journal, facts_of
from ..rounds.active_run import ActiveRun
from ..rounds.aggregation import refusal
from ..rounds.assignment import Assignment, JobSpec
from ..rounds.buffered import BufferedRounds
from ..rounds.compute_requests import BeginRequest, Begun
from ..rounds.context import MOST_LISTED, Run, RunHooks, Steps, Waiting
from ..rounds.figures import Stats
from ..rounds.forms import UpdateForms
from ..rounds.pace import Pace
from ..rounds.round import Rounds
from ..rounds.selection import Exclusions, LeftOutAgent, Selection, Tiers, drop_left_out
from ..rounds.server_side import method_of, specs_from_forms
from ..rounds.server_step import ServerStep
from ..rounds.synchronous import SynchronousRounds
from ..state.privacy_spent import PrivacySpent
from ..state.store import retain_checkpoint
from ..views.runs import Rejection, RunRecord, replay
from .release import (
    encoder_of,
    freeze,
    freeze_as_tensors,
    release_during_run,
    stop_reason,
    with_client_ranges,
    with_pooled_norm,
)
from .results import finish_run, restore

log = logging.getLogger(__name__)

BEGIN_LIMIT_S = 600.0
"""How long building the model may take."""

ASKED_AT_ONCE = 1000
"""Agents that are asked together to evaluate the final model: they share its broadcast, and then answer together."""

TURN_S = 5.0
"""How long the next ones wait at most for those of them whose links are slow."""


@dataclass(frozen=True)
class RunStatus:
    """The state of an active run for people; of a large cohort it has at most `MOST_LISTED` agents."""

    id: str
    method: str
    round: int
    """The round that is open, or whose job is on offer; 0: none is."""

    rounds: int
    cohort: list[str]
    cohort_size: int
    accepted: list[str]
    accepted_count: int
    rejected: Mapping[str, str]
    """Agent -> why it has no update."""

    left_out: Mapping[str, LeftOutAgent]
    """Agent -> why it is not asked, and until when."""

    bounded: Mapping[str, str]
    """Agent -> what was done to its update in the round that was closed last."""

    privacy: PrivacySpent | None
    """What the closed rounds have cost of the privacy budget; None: the run adds no noise."""

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON, for ``status.json``; its keys are the fields, in their order."""
        return {
            **vars(self),
            "left_out": {agent: left_out.to_json() for agent, left_out in self.left_out.items()},
            "privacy": None if self.privacy is None else self.privacy.to_json(),
        }


class RunLoop:
    """Executes one run. After a restart a new one resumes from the journal."""

    def __init__(self, run: Run, hooks: RunHooks | None = None) -> None:
        self.hooks = hooks if hooks is not None else RunHooks()
        journal = run.context.state.journal
        selection = Selection(
            run.context,
            run.request.seed,
            Exclusions.replay(journal, run.id),
            Pace.replay(journal, run.id),
            fewest=run.privacy_budget.least,
            last_round=run.request.rounds,
        )
        self._active = ActiveRun(run, selection, freeze_as_tensors if run.context.is_simulation else freeze)
        self._server = ServerStep(self._active)
        self._rounds: Rounds = SynchronousRounds(self._active, self._server)
        """The kind that the configuration asks for, once the run has begun."""

    @property
    def run(self) -> Run:
        """The run with the state that it has reached."""
        return self._active.run

    @property
    def selection(self) -> Selection:
        """The selection of the cohorts of this run."""
        return self._active.selection

    @property
    def assignment(self) -> Assignment | None:
        """What agents are asked to do now; None between two rounds."""
        return self._active.assignment

    @property
    def failure(self) -> Exception | None:
        """The error of a computation for single agents in the worker: the run fails with it, or is stalled."""
        return self._active.failure

    def steps(self) -> Steps:
        """Execute the run from where the journal says it stands.

        Raises:
            RunFailed: The run cannot go on.
        """
        # 1. Begin: the model of a new run, or the checkpoint of one that goes on.
        record = replay(self._journal, self.run.id)
        stats = Stats.begin(self.run.context, self.run.id)
        yield from self._begin(record.checkpoint)
        self._active.run = yield from self.hooks.before_run(self.run)
        self._resume(record)
        self._check_budget(record.round, is_open=record.open_round is not None)
        # 2. The rounds, of which an open one goes on; between them releases, where the configuration asks for some.
        last = record.round
        stopped = record.stopped
        for number in range(record.round + 1, self.run.request.rounds + 1):
            resumed = record.open_round if number == record.round + 1 else None
            stopped = stopped or self._reason_to_stop(last, is_open=resumed is not None)
            if stopped:
                log.info("run_stopped run=%s reason=%s", self.run.id, stopped)
                break
            yield from self._rounds.hold(number, resumed)
            self.hooks.after_round(self.run, number)
            yield from self._release_between_rounds(number)
            last = number
        # 3. The end: all agents personalize the final model and report; then export, release, summary and report.
        self.hooks.before_reports(self.run)
        yield from self._ask_for_reports()
        yield from self.hooks.after_run(self.run)
        if self._config.export.after_run:
            self._active.run = yield from self._with_pooled_norm(last)
            self._active.run = yield from self._with_client_ranges(self.run, last)
        yield from finish_run(self.run, stats, self.selection.exclusions, stopped)

    # --- messages of agents ----------------------------------------------------------------------------------------

    def invite(self, agent: str) -> None:
        """Send one agent (again) what it is expected to do now, if anything."""
        assignment = self._rounds.assignment_of(agent)
        if assignment is not None and self._concerns(agent):
            assignment.invite(agent)

    def on_fault(self, agent: str, message: Fault) -> None:
        """Expect no update of an agent that has failed at its task. Faults of other tasks change nothing."""
        assignment = self._rounds.assignment_of(agent)
        if not _is_about(message, agent, assignment):
            return
        rejection = Rejection.from_fault(message)
        if self._active.open_collection is not None:
            self.run.context.collector.failed(agent, rejection)
            return
        # Nothing is collected: agents evaluate the final model, or a bundle that is being released.
        is_awaited = self.run.reports.is_asked(agent) if assignment is None else self._concerns(agent)
        if is_awaited:
            self.run.reports.fault(agent, rejection.reason)

    def on_heartbeat(self, agent: str, message: Heartbeat) -> None:
        """Ask an agent again that does not work on its task: it did not receive it."""
        assignment = self._rounds.assignment_of(agent)
        if assignment is None:
            self.run.reports.ask_again(agent)
            return
        job = (self.run.id, assignment.spec.round, assignment.purpose_of(agent))
        is_at_work = (message.run, message.round, message.purpose) == job
        if self._concerns(agent):
            self.selection.at_work(agent, is_at_work=is_at_work)
        if not is_at_work:
            self.invite(agent)

    def withdraw(self) -> None:
        """End the assignments, because another loop replaces this one; agents get no message."""
        self._rounds.withdraw()

    def abandon(self) -> None:
        """Cancel the tasks of the agents, because the run has failed."""
        collection = self._active.open_collection
        if collection is not None:
            self._active.call_off(collection)
        self.run.context.collector.close()  # a stalled run has no open round, and incomplete updates
        self.withdraw()
        self._active.own.cancel()

    def status(self) -> RunStatus:
        """Return the state of the run, for the coordinator's status."""
        collection = self._active.open_collection
        number = 0
        if collection is not None:
            number = collection.round
        elif self.assignment is not None:
            number = self.assignment.spec.round
        return RunStatus(
            id=self.run.id,
            method=self.run.request.method,
            round=number,
            rounds=self.run.request.rounds,
            cohort=list(collection.cohort[:MOST_LISTED]) if collection else [],
            cohort_size=len(collection.cohort) if collection else 0,
            accepted=sorted(islice(collection.accepted, MOST_LISTED)) if collection else [],
            accepted_count=len(collection.accepted) if collection else 0,
            rejected=_reasons(collection) if collection else {},
            left_out=self.selection.describe_left_out(number),
            bounded=self._server.bounded,
            privacy=self._server.spent,
        )

    # --- start -----------------------------------------------------------------------------------------------------

    def _begin(self, checkpoint: str | None) -> Generator[Waiting, None, None]:
        """Build the model, and take the state to continue from: a checkpoint, or an initial one from the run's seed.

        Raises:
            RunFailed: Updates of the method cannot be combined as configured.
        """
        run = self.run
        context = run.context
        request = BeginRequest(**vars(run.for_compute()), is_new=checkpoint is None)
        answer = yield from context.ask("begin", request, "the model is being built", BEGIN_LIMIT_S)
        begun = Begun.from_json(answer)
        folder = context.state.run(run.id).folder
        method, self._active.own = method_of(begun.method, request, context.compute, folder)
        why_not = refusal(method, context.config)
        if why_not:
            raise RunFailed(why_not)
        extras = specs_from_forms(begun.extras)
        update = {**specs_from_forms(begun.returned), **extras}
        self._active.forms = UpdateForms(update, extras, specs_from_forms(begun.norm))
        self._active.selection.tiers = Tiers.of(context.config, method, self._active.forms)
        if checkpoint is None:
            checkpoint = str(begun.digest)
            state = decode(context.state.blobs.read(checkpoint))
            retain_checkpoint(self._journal, run.id, run.request.keep_every, 0, checkpoint)
            self._journal.append(RunStarted(), run=run.id, digest=checkpoint)
            log.info("run_started run=%s method=%s rounds=%d", run.id, method.name, run.request.rounds)
        else:
            state = decode(context.state.blobs.read(checkpoint))
            restore(context.state, run.id)
            log.info("run_resumed run=%s checkpoint=%s", run.id, checkpoint[:12])
        self._active.run = replace(run, method=method, state=state, checkpoint=checkpoint)

    def _resume(self, record: RunRecord) -> None:
        """Choose the kind of rounds, and take up what the closed ones have left."""
        closed = facts_of(self._journal.entries(self.run.id, ("round_closed",)), RoundClosed)
        self._server.resume(closed)
        self._rounds = _rounds_of(self._active, self._server, record, closed)
        if closed and record.open_round is None:
            self._rounds.resume(closed[-1])

    def _check_budget(self, closed: int, *, is_open: bool) -> None:
        """Return quietly where the privacy budget allows the run to begin, in which ``closed`` rounds are over.

        Raises:
            RunFailed: It allows no round, or not all of a method that needs its last one.
        """
        budget = self.run.privacy_budget
        needed = 0
        if self.run.method.needs_last_round:
            needed = self.run.request.rounds - closed
        elif closed == 0:
            needed = 1
        if needed and not is_open:
            objection = budget.objection(needed)
            if objection:
                raise RunFailed(f"{objection}; raise the budget or the noise, or ask for fewer rounds")
        self._server.spent = budget.figures()

    # --- between rounds --------------------------------------------------------------------------------------------

    def _reason_to_stop(self, closed: int, *, is_open: bool) -> str:
        """Return why the run ends before the next round; empty while it goes on.

        Args:
            closed: The round that was closed last; 0: none.
            is_open: Whether the round was opened before a restart: its updates are paid for, and it is finished.
        """
        if not is_open:
            requested = self.hooks.reason_to_stop(self.run)
            if requested:
                # Journaled, because agents evaluate the final model from now on: no restart may open another round.
                self._journal.append(RunStopped(reason=requested), run=self.run.id, round=closed)
                return requested
            objection = self.run.privacy_budget.objection()
            if objection:
                return objection
        patience = self._config.export.patience
        if not patience or self.run.method.needs_last_round:
            return ""
        return stop_reason(self.run.context.state.run(self.run.id).release_lines(), patience)

    def _release_between_rounds(self, number: int) -> Steps:
        """Release the encoder after round ``number``, where the configuration says so; the last one comes later."""
        every = self._config.export.every
        if not every or number % every != 0 or number == self.run.request.rounds:
            return
        pooled = yield from self._with_pooled_norm(number)
        ranged = yield from self._with_client_ranges(pooled, number)
        yield from release_during_run(ranged, number)

    def _with_pooled_norm(self, number: int) -> Generator[Waiting, None, Run]:
        """Return the run with batch norm of one common encoder."""
        kept_norm = self._active.forms.kept_norm
        collect = self._active.ask_after_round
        return with_pooled_norm(self.run, number, kept_norm, self._trainers(number), collect)

    def _with_client_ranges(self, pooled: Run, number: int) -> Generator[Waiting, None, Run]:
        """Return the run with the ranges of its clients' activations."""
        collect = functools.partial(self._ask_about, encoder_of(pooled))
        return with_client_ranges(pooled, number, self._trainers(number), collect)

    def _ask_about(self, given: Tensors, collection: Collection) -> Steps:
        return self._active.ask_after_round(collection, given)

    def _trainers(self, number: int) -> tuple[str, ...]:
        """Return the agents that can be asked about their data after round ``number``."""
        present = self.run.context.roster.present("train")
        return tuple(drop_left_out(present, self.selection.left_out(number + 1)))

    # --- the end ---------------------------------------------------------------------------------------------------

    def _ask_for_reports(self) -> Steps:
        """Have all agents that train personalize the final model and report their metrics."""
        opened = facts_of(self._journal.entries(self.run.id, kinds=("round_opened",)), RoundOpened)
        # Members of the last round are waited for, too: after a restart they may not have connected yet.
        members_of_last = set[str]()
        if opened:
            members_of_last = set(opened[-1].cohort) - set(opened[-1].joining)
        present = self.run.context.roster.present(self._personalizing_tier)
        refusing = self.selection.exclusions.refusing(self.selection.boot)
        agents = tuple(drop_left_out(sorted({*members_of_last, *present}), refusing))
        assignment = yield from self._active.assign(self.run, JobSpec(self.run.request.rounds, "personalize"))
        self._active.assignment = assignment
        yield from self._ask_in_turn(assignment, agents)
        # Agents on trial are asked, and waited for only where there are no others.
        reliable = tuple(drop_left_out(agents, self.selection.on_trial))
        yield from self.run.reports.collect(reliable or agents, self.invite)
        self.withdraw()

    def _ask_in_turn(self, assignment: Assignment, agents: tuple[str, ...]) -> Steps:
        """Ask `ASKED_AT_ONCE` agents, and the next ones when most of those have got what they work on.

        All at once would answer at once, and their messages wait for each other. Those whose links are slow delay the
        next ones by at most `TURN_S`. An agent whose heartbeat says that it has nothing to do is asked out of turn.
        """
        context = self.run.context
        for begin in range(0, len(agents), ASKED_AT_ONCE):
            some = agents[begin : begin + ASKED_AT_ONCE]
            yield from assignment.ask(some)
            is_last = begin + ASKED_AT_ONCE >= len(agents)
            until = context.clock() + TURN_S
            while not is_last and (context.is_behind() or context.clock() < until):
                if not context.is_behind() and context.distributor.waiting_for_blobs(some) <= len(some) // 10:
                    break
                yield Waiting("agents evaluate the final model", some, about="reports")

    # --- inside ----------------------------------------------------------------------------------------------------

    @property
    def _journal(self) -> Journal:
        return self._active.journal

    @property
    def _config(self) -> CoordinatorConfig:
        return self.run.context.config

    @property
    def _personalizing_tier(self) -> str | None:
        """The tier that evaluates the final model; None: all. Devices without torch evaluate the bundle instead."""
        return None if self.run.context.is_simulation else "train"

    def _concerns(self, agent: str) -> bool:
        """Return whether the job on offer is for this agent, and not done by it."""
        assignment = self.assignment
        if assignment is not None and assignment.spec.purpose == "personalize":
            member = self.run.context.roster.get(agent)
            is_asked = member is not None and self._personalizing_tier in {None, member.tier}
            return is_asked and agent not in self.run.reports.reports
        collection = self._active.open_collection
        if collection is None or agent not in self._active.members:
            return False
        return agent not in collection.accepted and agent not in collection.rejected


def _rounds_of(active: ActiveRun, server: ServerStep, record: RunRecord, closed: list[RoundClosed]) -> Rounds:
    """Return the kind of rounds that the configuration asks for.

    A run in which agents of buffered rounds work on keeps to those, whatever the configuration says since a restart.
    """
    config = active.run.context.config
    if config.privacy.secure_sum:
        from ..rounds.secure import SecureSumRounds  # its cryptography is loaded by runs that need it

        return SecureSumRounds(active, server)
    is_open_buffered = record.open_round is not None and record.open_round.fact.buffer is not None
    has_busy_agents = bool(closed and closed[-1].busy)
    if config.round.mode == "buffered" or is_open_buffered or has_busy_agents:
        return BufferedRounds(active, server)
    return SynchronousRounds(active, server)


def _reasons(collection: Collection) -> dict[str, str]:
    """Return agent -> why it has no update, of some of those that were rejected."""
    return {agent: rejection.reason for agent, rejection in islice(collection.rejected.items(), MOST_LISTED)}


def _is_about(message: Fault, agent: str, assignment: Assignment | None) -> bool:
    """Return whether a fault is about what the agent is asked to do now: a job, or a release during the run."""
    if assignment is None:
        return message.round == 0  # of the bundle that is being released
    spec = assignment.spec
    is_same_job = message.round == spec.round and message.purpose in {None, assignment.purpose_of(agent)}
    return is_same_job and message.session in {"", spec.session}
