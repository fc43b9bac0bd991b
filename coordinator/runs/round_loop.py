"""The round loop: one for all methods, on devices and in simulation.

`RunLoop.steps` reads like the protocol. Wherever it has to wait it yields a `Waiting` that says for whom, why and until
when; the service continues it after each event. Everything that must survive is in the journal before it is acted
upon, so a loop made anew from the journal resumes in the same round with the updates that have their receipts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from edge_agent import heads
from edge_agent.errors import RunFailed, TrainingFailed
from edge_agent.task import Tensors
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import Cancel, Fault, Heartbeat, Job, Purpose
from edge_agent.wire.tensors import Spec, decode, encode, pieces, specs_of

from ..fleet.transfers import Collection, updates_of
from ..state.journal import Journal, OpenRound
from ..state.store import prune_blobs, retain_checkpoint
from ..text import listed
from .context import REPORT_DEADLINE_S, Run, RunContext, RunHooks, Steps, Waiting
from .release import EncoderReleaser, stop_reason, with_pooled_norm
from .results import RoundStats, RunStats, finish_run, restore, round_record
from .selection import Exclusions, Selection, without

log = logging.getLogger(__name__)

Make = Callable[[str], tuple[Job, tuple[Outgoing, ...]]]
"""An agent's job, and the blobs that it names."""


@dataclass
class Assignment:
    """Work that is open until ``until`` (of `Roster.heard_s`). ``make`` is called once for each agent."""

    context: RunContext
    until: float
    make: Make
    purpose: Purpose = "train"
    round: int = 0
    _jobs: dict[str, Job] = field(default_factory=dict)
    _on_offer: set[str] = field(default_factory=set)

    def ask(self, agents: Iterable[str]) -> None:
        """Tell these agents, after all that they need is on offer: what is the same for many then goes out once."""
        asked = tuple(agents)
        for agent in asked:
            self._prepare(agent)
        for agent in asked:
            self.invite(agent)

    def invite(self, agent: str) -> None:
        """Tell one agent (again), with the time that is left now."""
        left = max(1.0, self.until - self.context.roster.heard_s())
        self.context.send(agent, self._prepare(agent).model_copy(update={"deadline_s": left}))

    def withdraw(self) -> None:
        """Nothing is asked any more: its blobs are off the table."""
        self.context.distributor.withdraw(self._on_offer)
        self._jobs.clear()
        self._on_offer.clear()

    def purpose_of(self, agent: str) -> Purpose:
        """What this agent is asked to do; a device without torch contributes where others train."""
        return self._jobs[agent].purpose if agent in self._jobs else self.purpose

    def _prepare(self, agent: str) -> Job:
        if agent not in self._jobs:
            self._jobs[agent], blobs = self.make(agent)
            for blob in blobs:
                self.context.distributor.offer(blob, (agent,))
                self._on_offer.add(blob.ref.digest)
        return self._jobs[agent]


@dataclass
class RunLoop:
    """Executes one run. Make it anew after a restart: it finds its place in the journal."""

    run: Run
    releaser: EncoderReleaser
    hooks: RunHooks = field(default_factory=RunHooks)
    asked: Assignment | None = None
    selection: Selection = field(init=False)
    _norm: dict[str, Spec] = field(default_factory=dict)
    """Batch norm tensors of the encoder that stay on devices."""

    _expected: dict[str, Spec] = field(default_factory=dict)
    _extras: dict[str, Spec] = field(default_factory=dict)
    _frozen: Outgoing | None = None

    def __post_init__(self) -> None:
        run = self.run
        exclusions = Exclusions.replay(run.context.state.journal, run.id)
        self.selection = Selection(run.context, run.request.seed, exclusions)

    def steps(self) -> Steps:
        """The whole run, from wherever the journal says it is."""
        record = self._journal.replay(self.run.id)
        stats = RunStats.begin(self.run.context, self.run.id)
        self._begin(record.checkpoint)
        self.run = yield from self.hooks.before_run(self.run)
        last, stopped = record.round, ""
        for number in range(record.round + 1, self.run.request.rounds + 1):
            if stopped := self._stop_reason():
                log.info("run_stopped run=%s reason=%s", self.run.id, stopped)
                break
            resumed = record.open_round if number == record.round + 1 else None
            yield from self._round(number, resumed)
            self.hooks.after_round(self.run, number)
            yield from self._after_round(number)
            last = number
        yield from self._ask_for_reports()
        yield from self.hooks.after_run(self.run)
        if self.run.context.config.export.after_run:
            self.run = yield from self._with_pooled_norm(last)
        yield from finish_run(self.run, self.releaser, stats, self.selection.exclusions, stopped)

    def invite(self, agent: str) -> None:
        """Tell one agent (again) what it is expected to do now, if anything."""
        if self.asked is not None and self._concerns(agent):
            self.asked.invite(agent)

    def on_fault(self, agent: str, message: Fault) -> None:
        """An agent failed at its task: its update is no longer expected. Faults of other tasks change nothing."""
        reason, asked = f"{message.error}: {message.message}", self.asked
        if message.round != (asked.round if asked is not None else 0):  # 0: the bundle that is being released
            return
        if asked is not None and message.purpose not in {None, asked.purpose_of(agent)}:
            return
        if self.run.context.collector.open_round is not None:
            self.run.context.collector.failed(agent, reason, message.boot)
        elif self._concerns(agent) if asked is not None else self.run.reports.is_asked(agent):
            self.run.reports.fault(agent, reason)

    def on_heartbeat(self, agent: str, message: Heartbeat) -> None:
        """An agent that does not work on what it was asked to do has not heard of it: ask again."""
        if self.asked is None:
            self.run.reports.ask_again(agent)
            return
        asked = (self.run.id, self.asked.round, self.asked.purpose_of(agent))
        is_at_work = (message.run, message.round, message.purpose) == asked
        if self._concerns(agent):
            self.selection.at_work(agent, is_at_work=is_at_work)
        if not is_at_work:
            self.invite(agent)

    def pause(self) -> None:
        """Another loop replaces this one; agents continue their tasks."""
        self._withdraw()

    def abandon(self) -> None:
        """The run has failed: take back what was asked."""
        collection = self.run.context.collector.open_round
        if collection is not None:
            self._call_off(collection)
        self._withdraw()

    def status(self) -> dict[str, Any]:
        """What goes on, as JSON."""
        collection = self.run.context.collector.open_round
        number = collection.round if collection else (self.asked.round if self.asked else 0)
        return {
            "id": self.run.id,
            "method": self.run.request.method,
            "round": number,
            "rounds": self.run.request.rounds,
            "cohort": list(collection.cohort) if collection else [],
            "accepted": sorted(collection.accepted) if collection else [],
            "rejected": dict(collection.rejected) if collection else {},
            "left_out": self.selection.status(number),
        }

    @property
    def _journal(self) -> Journal:
        return self.run.context.state.journal

    # --- start -----------------------------------------------------------------------------------------------------

    def _begin(self, checkpoint: str | None) -> None:
        """Set the state to continue from: a checkpoint, or an initial model from the run's seed."""
        import torch

        from edge_agent.training.parts import norm_names, to_arrays

        run, journal, blobs = self.run, self._journal, self.run.context.state.blobs
        method, request = run.method, run.request
        torch.manual_seed(request.seed)
        model = method.build(request.task)
        if checkpoint is None and request.weights is not None:
            request.weights.load_into(model)
        fresh = to_arrays(model, method.shared_names(model))
        self._extras = specs_of(method.sends(model, request.task))
        self._expected = {**specs_of(fresh), **self._extras}
        self._norm = specs_of(to_arrays(model, norm_names(model, fresh)) if "encoder" in method.shared else {})
        if checkpoint is None:
            state = method.start(fresh)
            checkpoint = blobs.put(*pieces(state))
            retain_checkpoint(journal, run.id, request.keep_every, 0, checkpoint)
            journal.append("run_started", run=run.id, digest=checkpoint)
            log.info("run_started run=%s method=%s rounds=%d", run.id, method.name, request.rounds)
        else:
            state = decode(blobs.read(checkpoint))
            restore(run.context.state, run.id)
            log.info("run_resumed run=%s checkpoint=%s", run.id, checkpoint[:12])
        self.run = replace(run, state=state, checkpoint=checkpoint)

    # --- one round -------------------------------------------------------------------------------------------------

    def _round(self, number: int, resumed: OpenRound | None) -> Steps:
        stats, clock = RoundStats.begin(self.run.context), self.run.context.stopwatch
        waits_since = clock()
        cohort = () if resumed else (yield from self.selection.first(number))
        joining = tuple(resumed.body.get("joining", ())) if resumed else self._joining(number)
        if joining:
            self._frozen = yield from self.releaser.freeze(self.run)
        stats.waiting_s += clock() - waits_since
        opened = resumed or OpenRound(number, 1, (*cohort, *joining), {"joining": list(joining)})
        collection = self._open(opened, is_new=resumed is None)
        self._ask(number, collection.outstanding, joining=joining)
        while True:
            yield from self.selection.collect(collection, self.asked.until if self.asked else 0.0)
            unanswered = self.selection.unanswered(collection, is_late=self._is_late)
            if self.selection.has_quorum(collection):
                break
            overdue = int(opened.body.get("overdue", 0)) + bool(unanswered)
            if self.selection.is_enough(collection, unanswered, overdue):
                break
            log.warning("round_missed run=%s round=%d got=%d", self.run.id, number, collection.delivered)
            waits_since = clock()
            added = yield from self.selection.more(collection)
            stats.waiting_s += clock() - waits_since
            if added.new or added.again or unanswered or self._is_late:  # also when it passed in that wait
                opened = opened.next_attempt(
                    collection.accepted,
                    collection.rejected,
                    collection.failed_boots,
                    new=added.new,
                    again=added.again,
                    overdue=overdue,
                )
                collection = self._open(opened, is_new=True)
                self._ask(number, collection.outstanding, joining=joining)
        self._call_off(collection)
        self._close(number, collection, stats, unanswered)

    @property
    def _is_late(self) -> bool:
        """Whether the time of those who were asked is up."""
        return self.asked is None or self.run.context.roster.heard_s() >= self.asked.until

    def _joining(self, number: int) -> tuple[str, ...]:
        """Head-tier devices that are there, where the method has something for them to do in a round."""
        if self.run.context.config.cohort.tier == "train" or heads.contribution(self.run.method.name) is None:
            return ()
        return tuple(without(self.run.context.roster.present("head"), self.selection.left_out(number)))

    def _open(self, opened: OpenRound, *, is_new: bool) -> Collection:
        """Take updates of a round, or of another attempt at it, beside those that are here."""
        number, attempt, joining = opened.round, opened.attempt, tuple(opened.body.get("joining", ()))
        left_out = opened.body.get("left_out", {})
        if is_new:
            left_out = self.selection.spared(number, opened.cohort)
            body = {**opened.body, "attempt": attempt, "cohort": list(opened.cohort), "left_out": left_out}
            self._journal.append("round_opened", run=self.run.id, round=number, body=body)
            self.selection.exclusions.opened(number, left_out)
        collection = Collection(
            self.run.id,
            number,
            opened.cohort,
            self._expected,
            dict(opened.updates),
            dict(opened.rejected),
            self.run.method.objection,
            joining,
            self._extras,
            self.selection.on_trial,
            failed_boots=dict(opened.failed_boots),
            left_out=left_out,
        )
        self.run.context.collector.open(collection)
        log.info(
            "round_opened run=%s round=%d attempt=%d cohort=%s", self.run.id, number, attempt, listed(opened.cohort)
        )
        return collection

    def _ask(
        self, number: int, agents: tuple[str, ...], purpose: Purpose = "train", *, joining: tuple[str, ...] = ()
    ) -> None:
        """Say to everybody concerned what there is to do, and put the blobs on offer."""
        limit = self.run.context.config.round.deadline_s if purpose == "train" else REPORT_DEADLINE_S
        job, common = self._job(number, purpose, limit), self._common_blobs(purpose)

        def make(agent: str) -> tuple[Job, tuple[Outgoing, ...]]:
            if agent in joining:
                return self._join_job(job, agent)
            own = self.run.method.downlink(self.run.state, agent) if common else {}
            blobs = (*common, Outgoing.of(encode(own))) if own else common
            return job.model_copy(update={"blobs": tuple(blob.ref for blob in blobs)}), blobs

        self.asked = Assignment(self.run.context, self.run.context.roster.heard_s() + limit, make, purpose, number)
        self.asked.ask(agents)

    def _join_job(self, job: Job, agent: str) -> tuple[Job, tuple[Outgoing, ...]]:
        """What a device without torch is asked: the round's encoder is frozen, of the tensors it gets its own."""
        shared = {n: array for n, array in self.run.method.broadcast(self.run.state).items() if n.startswith("extra.")}
        blobs = (Outgoing.of(encode({**shared, **self.run.method.downlink(self.run.state, agent)})),)
        if self._frozen is None:
            raise RunFailed(f"round {job.round}: there is no frozen encoder for {agent}; set cohort.tier to 'train'")
        update = {"purpose": "contribute", "blobs": (blobs[0].ref,), "bundle": self._frozen.ref}
        return job.model_copy(update=update), (*blobs, self._frozen)

    def _job(self, number: int, purpose: Purpose, limit_s: float) -> Job:
        """What all agents of a round are asked alike; blobs are added for each of them."""
        every = self.run.context.config.evaluate_every
        return Job(
            purpose=purpose,
            run=self.run.id,
            round=number,
            rounds=self.run.request.rounds,
            seed=self.run.request.seed,
            method=self.run.method.name,
            params=self.run.method.params.model_dump(mode="json"),
            task=self.run.request.task,
            blobs=(),
            deadline_s=limit_s,
            evaluate=bool(every) and (number % every == 0 or number == self.run.request.rounds),
        )

    def _common_blobs(self, purpose: Purpose) -> tuple[Outgoing, ...]:
        """What all agents of a round receive alike."""
        return () if purpose == "batch_norm_stats" else (self._blob(self.run.method.broadcast(self.run.state)),)

    def _call_off(self, collection: Collection) -> None:
        for agent in collection.outstanding:
            purpose = collection.purpose_of(agent)
            cancel = Cancel(run=self.run.id, round=collection.round, purpose=purpose, reason="the round has closed")
            self.run.context.send(agent, cancel)
        self.run.context.collector.close()
        self._withdraw()

    def _close(self, number: int, collection: Collection, stats: RoundStats, unanswered: dict[str, str]) -> None:
        """Aggregate in the order of agent ids, store the new state, and only then record that the round is over."""
        run, journal, blobs = self.run, self._journal, self.run.context.state.blobs
        try:
            state = run.method.aggregate(run.state, updates_of(blobs, collection))
        except TrainingFailed as error:
            raise RunFailed(f"round {number}: {error}") from error
        digest = blobs.put(*pieces(state))
        clients = len(collection.accepted)
        figures = stats.figures(run.context, collection)
        boots = {agent: self.selection.boot(agent) for agent in collection.outstanding}
        body = {"clients": clients, "unanswered": unanswered, "boots": boots, **figures}
        retain_checkpoint(journal, run.id, run.request.keep_every, number, digest)
        journal.append("round_closed", run=run.id, round=number, digest=digest, body=body)
        self.run = replace(run, state=state, checkpoint=digest)
        prune_blobs(run.context.state, digest)
        self.selection.closed(collection, unanswered, boots)
        missing, left_out = collection.outstanding, collection.left_out
        record = round_record(number, figures, collection.accepted, collection.rejected, missing, left_out)
        run.context.state.run(run.id).append_metrics(record)
        took = (figures["seconds"], figures["waiting_s"])
        log.info("round_closed run=%s round=%d seconds=%.3f waiting_s=%.3f clients=%d", run.id, number, *took, clients)

    def _after_round(self, number: int) -> Steps:
        """Release the current encoder after each ``export.every`` rounds, to measure what head-tier devices get."""
        every = self.run.context.config.export.every
        if every and not number % every and number != self.run.request.rounds:
            yield from self.releaser.interim((yield from self._with_pooled_norm(number)), number)

    def _stop_reason(self) -> str:
        """Why the run should end now by ``export.patience``; empty while it should continue."""
        run = self.run
        patience = 0 if run.method.needs_last_round else run.context.config.export.patience
        return stop_reason(run.context.state.run(run.id).metrics(), patience) if patience else ""

    def _with_pooled_norm(self, number: int) -> Generator[Waiting, None, Run]:
        agents = without(self.run.context.roster.present("train"), self.selection.left_out(number + 1))
        return with_pooled_norm(self.run, number, self._norm, tuple(agents), self._collect_norm)

    def _collect_norm(self, collection: Collection) -> Steps:
        """Ask the agents of ``collection`` outside the rounds."""
        self.run.context.collector.open(collection)
        self._ask(collection.round, collection.cohort, collection.purpose)
        yield from self.selection.collect(collection, self.asked.until if self.asked else 0.0)
        self._call_off(collection)

    # --- the end ---------------------------------------------------------------------------------------------------

    def _ask_for_reports(self) -> Steps:
        """Train agents personalize to the final state and tell what they got."""
        opened = self._journal.entries(self.run.id, kinds=("round_opened",))
        # Those of the last round, too: after a restart they have yet to say that they are there.
        last = set(opened[-1].body["cohort"]) - set(opened[-1].body.get("joining", ())) if opened else set()
        agents = tuple(sorted({*last, *self.run.context.roster.present("train")}))
        self._ask(self.run.request.rounds, agents, "personalize")
        reliable = tuple(without(agents, self.selection.on_trial))
        yield from self.run.reports.collect(reliable or agents, self.invite)
        self._withdraw()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _blob(self, tensors: Tensors) -> Outgoing:
        if tensors is self.run.state:  # lies in the store already, under a hash that is known
            return Outgoing.open(self.run.context.state.blobs.path(self.run.checkpoint), self.run.checkpoint)
        return Outgoing.of(encode(tensors))

    def _withdraw(self) -> None:
        if self.asked is not None:
            self.asked.withdraw()
        self.asked = None

    def _concerns(self, agent: str) -> bool:
        """Whether the job on offer is for this agent, and not done by it."""
        if self.asked is None or self.asked.purpose != "personalize":
            collection = self.run.context.collector.open_round
            return collection is not None and agent in collection.outstanding
        member = self.run.context.roster.get(agent)
        return member is not None and member.tier == "train" and agent not in self.run.reports.reports
