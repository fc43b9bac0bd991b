"""The round loop: one for all methods, on devices and in simulation.

`RunLoop.steps` reads like the protocol. Wherever it has to wait it yields a `Waiting` that says for whom, why and until
when; the service goes on with it after each event. Everything that must survive is in the journal before it is acted
upon, so a loop made anew from the journal goes on in the same round with the updates that have their receipts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from edge_agent import heads
from edge_agent.errors import RunFailed, TrainingFailed
from edge_agent.methods import Method
from edge_agent.task import State, Tensors
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import Cancel, Fault, Heartbeat, Job, Purpose
from edge_agent.wire.tensors import Spec, decode, encode, pieces, specs_of

from ..fleet.exclusion import Exclusions, without
from ..fleet.uploads import Collection, updates_of
from ..state.journal import OpenRound
from ..state.retention import blobs_in_use, keep
from ..state.run_request import Request
from ..text import listed
from .batch_norm import pool
from .context import Aside, Fleet, Steps
from .dispatch import Assignment
from .early_stopping import why_stop
from .metrics import Account, Tally, line, restore
from .release import Encoders
from .reports import REPORT_DEADLINE_S, Answers
from .selection import Selection

log = logging.getLogger(__name__)


@dataclass
class RunLoop:
    """One run. Make it anew after a restart: it finds its place in the journal."""

    run: str
    request: Request
    method: Method
    fleet: Fleet
    encoders: Encoders | None = None
    finish: Callable[[RunLoop], Steps] | None = None
    aside: Aside = field(default_factory=Aside)
    state: State = field(default_factory=dict)
    pooled: Tensors = field(default_factory=dict)
    """Batch norm tensors of the encoder that are not in ``state``, once they have been asked for."""

    asked: Assignment | None = None
    answers: Answers = field(init=False)
    account: Account = field(init=False)
    selection: Selection = field(init=False)
    stopped: str = ""
    """Why the run ended before its last round; empty when it did not."""

    checkpoint: str = ""
    """Digest of ``state`` in the store."""

    norm: dict[str, Spec] = field(default_factory=dict)
    """Batch norm tensors of the encoder that stay on devices."""

    _expected: dict[str, Spec] = field(default_factory=dict)
    _extras: dict[str, Spec] = field(default_factory=dict)
    _frozen: Outgoing | None = None

    def __post_init__(self) -> None:
        self.answers = Answers(self.fleet)
        exclusions = Exclusions.replay(self.fleet.state.journal, self.run)
        self.selection = Selection(self.fleet, self.request.seed, exclusions)

    def steps(self) -> Steps:
        """The whole run, from wherever the journal says it is."""
        record = self.fleet.state.journal.replay(self.run)
        self.account = Account.begin(self.fleet, self.run)
        self._begin(record.checkpoint)
        yield from self.aside.prepare(self)
        last = record.round
        for number in range(record.round + 1, self.request.rounds + 1):
            if self._is_to_stop():
                break
            resumed = record.open_round if number == record.round + 1 else None
            yield from self._round(number, resumed)
            self.aside.closed(self, number)
            yield from self._after(number)
            last = number
        yield from self._ask_for_reports()
        yield from self.aside.rest(self)
        if self.fleet.config.export.after_run:
            self.pooled = yield from pool(self, last)
        if self.finish is not None:
            yield from self.finish(self)

    def invite(self, agent: str) -> None:
        """Tell one agent (again) what it is expected to do now, if anything."""
        if self.asked is not None and self._concerns(agent):
            self.asked.invite(agent)

    def on_fault(self, agent: str, message: Fault) -> None:
        """An agent could not do what it is asked now: nobody waits for it. Faults about other work change nothing."""
        reason, asked = f"{message.error}: {message.message}", self.asked
        if message.round != (asked.round if asked is not None else 0):  # 0: the bundle that is being released
            return
        if self.fleet.collector.open_round is not None:
            self.fleet.collector.failed(agent, reason, message.boot)
        elif self._concerns(agent) if asked is not None else self.answers.is_asked(agent):
            self.answers.fault(agent, reason)

    def on_heartbeat(self, agent: str, message: Heartbeat) -> None:
        """An agent that does not work on what it was asked to do has not heard of it: ask again."""
        if self.asked is None:
            self.answers.ask_again(agent)
            return
        is_at_work = (message.run, message.round) == (self.run, self.asked.round)
        if self._concerns(agent):
            self.selection.at_work(agent, is_at_work=is_at_work)
        if not is_at_work:
            self.invite(agent)

    def pause(self) -> None:
        """Another loop takes the place of this one; agents go on with what they were asked."""
        self._withdraw()

    def abandon(self) -> None:
        """The run has failed: take back what was asked."""
        collection = self.fleet.collector.open_round
        if collection is not None:
            self._call_off(collection)
        self._withdraw()

    def status(self) -> dict[str, Any]:
        """What goes on, as JSON."""
        collection = self.fleet.collector.open_round
        number = collection.round if collection else (self.asked.round if self.asked else 0)
        return {
            "id": self.run,
            "method": self.request.method,
            "round": number,
            "rounds": self.request.rounds,
            "cohort": list(collection.cohort) if collection else [],
            "accepted": sorted(collection.accepted) if collection else [],
            "refused": dict(collection.refused) if collection else {},
            "left_out": self.selection.status(number),
        }

    # --- start -----------------------------------------------------------------------------------------------------

    def _begin(self, checkpoint: str | None) -> None:
        """The state to go on from: a checkpoint, or a fresh model from the run's seed."""
        import torch

        from edge_agent.training.parts import norm_names, to_arrays

        journal, blobs = self.fleet.state.journal, self.fleet.state.blobs
        torch.manual_seed(self.request.seed)
        model = self.method.build(self.request.task)
        if checkpoint is None and self.request.weights is not None:
            self.request.weights.load_into(model)
        fresh = to_arrays(model, self.method.shared_names(model))
        self._extras = specs_of(self.method.sends(model, self.request.task))
        self._expected = {**specs_of(fresh), **self._extras}
        self.norm = specs_of(to_arrays(model, norm_names(model, fresh)) if "encoder" in self.method.shared else {})
        if checkpoint is None:
            self.state = self.method.start(fresh)
            checkpoint = blobs.put(*pieces(self.state))
            keep(journal, self.run, self.request, 0, checkpoint)
            journal.append("run_started", run=self.run, digest=checkpoint)
            log.info("run_started run=%s method=%s rounds=%d", self.run, self.method.name, self.request.rounds)
        else:
            self.state = decode(blobs.read(checkpoint))
            restore(self.fleet.state, self.run)
            log.info("run_resumed run=%s checkpoint=%s", self.run, checkpoint[:12])
        self.checkpoint = checkpoint

    # --- one round -------------------------------------------------------------------------------------------------

    def _round(self, number: int, resumed: OpenRound | None) -> Steps:
        tally, clock = Tally.begin(self.fleet), self.fleet.stopwatch
        waits_since = clock()
        cohort = () if resumed else (yield from self.selection.first(number))
        joining = tuple(resumed.body.get("joining", ())) if resumed else self._joining(number)
        if joining and self.encoders is not None:
            self._frozen = yield from self.encoders.freeze(self)
        tally.waiting_s += clock() - waits_since
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
            log.warning("round_missed run=%s round=%d got=%d", self.run, number, collection.delivered)
            waits_since = clock()
            added = yield from self.selection.more(collection)
            tally.waiting_s += clock() - waits_since
            if added.new or added.again or unanswered or self._is_late:  # also when it passed in that wait
                opened = opened.next_attempt(
                    collection.accepted,
                    collection.refused,
                    collection.failed_boots,
                    new=added.new,
                    again=added.again,
                    overdue=overdue,
                )
                collection = self._open(opened, is_new=True)
                self._ask(number, collection.outstanding, joining=joining)
        self._call_off(collection)
        self._close(number, collection, tally, unanswered)

    @property
    def _is_late(self) -> bool:
        """Whether the time of those who were asked is up."""
        return self.asked is None or self.fleet.heard_s() >= self.asked.until

    def _joining(self, number: int) -> tuple[str, ...]:
        """Head-tier devices that are there, where the method has something for them to do in a round."""
        if self.fleet.config.cohort.tier == "train" or heads.contribution(self.method.name) is None:
            return ()
        return tuple(without(self.fleet.roster.present("head"), self.selection.left_out(number)))

    def _open(self, opened: OpenRound, *, is_new: bool) -> Collection:
        """Take updates of a round, or of another attempt at it, beside those that are here."""
        number, attempt, joining = opened.round, opened.attempt, tuple(opened.body.get("joining", ()))
        left_out = opened.body.get("left_out", {})
        if is_new:
            left_out = self.selection.spared(number, opened.cohort)
            body = {**opened.body, "attempt": attempt, "cohort": list(opened.cohort), "left_out": left_out}
            self.fleet.state.journal.append("round_opened", run=self.run, round=number, body=body)
            self.selection.exclusions.opened(number, left_out)
        collection = Collection(
            self.run,
            number,
            opened.cohort,
            self._expected,
            dict(opened.updates),
            dict(opened.refused),
            self.method.objection,
            joining,
            self._extras,
            self.selection.on_trial,
            failed_boots=dict(opened.failed_boots),
            left_out=left_out,
        )
        self.fleet.collector.open(collection)
        log.info("round_opened run=%s round=%d attempt=%d cohort=%s", self.run, number, attempt, listed(opened.cohort))
        return collection

    def _ask(
        self, number: int, agents: tuple[str, ...], purpose: Purpose = "train", *, joining: tuple[str, ...] = ()
    ) -> None:
        """Say to everybody concerned what there is to do, and put the blobs on offer."""
        limit = self.fleet.config.round.deadline_s if purpose == "train" else REPORT_DEADLINE_S
        job, common = self._job(number, purpose, limit), self._common_blobs(purpose)

        def make(agent: str) -> tuple[Job, tuple[Outgoing, ...]]:
            if agent in joining:
                return self._join_job(job, agent)
            own = self.method.downlink(self.state, agent) if common else {}
            blobs = (*common, Outgoing.of(encode(own))) if own else common
            return job.model_copy(update={"blobs": tuple(blob.ref for blob in blobs)}), blobs

        self.asked = Assignment(self.fleet, self.fleet.heard_s() + limit, make, purpose, number)
        self.asked.ask(agents)

    def _join_job(self, job: Job, agent: str) -> tuple[Job, tuple[Outgoing, ...]]:
        """What a device without torch is asked: the round's encoder is frozen, of the tensors it gets its own."""
        shared = {n: array for n, array in self.method.broadcast(self.state).items() if n.startswith("extra.")}
        blobs = (Outgoing.of(encode({**shared, **self.method.downlink(self.state, agent)})),)
        if self._frozen is None:
            raise RunFailed(f"round {job.round}: there is no frozen encoder for {agent}; set cohort.tier to 'train'")
        update = {"purpose": "join", "blobs": (blobs[0].ref,), "bundle": self._frozen.ref}
        return job.model_copy(update=update), (*blobs, self._frozen)

    def _job(self, number: int, purpose: Purpose, limit_s: float) -> Job:
        """What all agents of a round are asked alike; blobs are added for each of them."""
        every = self.fleet.config.evaluate_every
        return Job(
            purpose=purpose,
            run=self.run,
            round=number,
            rounds=self.request.rounds,
            seed=self.request.seed,
            method=self.method.name,
            params=self.method.params.model_dump(mode="json"),
            task=self.request.task,
            blobs=(),
            deadline_s=limit_s,
            evaluate=bool(every) and (number % every == 0 or number == self.request.rounds),
        )

    def _common_blobs(self, purpose: Purpose) -> tuple[Outgoing, ...]:
        """What all agents of a round receive alike."""
        return () if purpose == "pool" else (self._blob(self.method.broadcast(self.state)),)

    def _call_off(self, collection: Collection) -> None:
        for agent in collection.outstanding:
            self.fleet.send(agent, Cancel(run=self.run, round=collection.round, reason="the round has closed"))
        self.fleet.collector.close()
        self._withdraw()

    def _close(self, number: int, collection: Collection, tally: Tally, unanswered: dict[str, str]) -> None:
        """Aggregate in the order of agent ids, keep the new state, and only then say that the round is over."""
        try:
            self.state = self.method.aggregate(self.state, updates_of(self.fleet.state.blobs, collection))
        except TrainingFailed as error:
            raise RunFailed(f"round {number}: {error}") from error
        blobs, journal = self.fleet.state.blobs, self.fleet.state.journal
        digest = blobs.put(*pieces(self.state))
        clients = len(collection.accepted)
        figures = tally.figures(self.fleet, collection)
        boots = {agent: self.selection.boot(agent) for agent in collection.outstanding}
        body = {"clients": clients, "unanswered": unanswered, "boots": boots, **figures}
        keep(journal, self.run, self.request, number, digest)
        journal.append("round_closed", run=self.run, round=number, digest=digest, body=body)
        self.checkpoint = digest
        self.forget_blobs()
        self.selection.closed(collection, unanswered, boots)
        missing, left_out = collection.outstanding, collection.left_out
        record = line(number, figures, collection.accepted, collection.refused, missing, left_out)
        self.fleet.state.run(self.run).append_metrics(record)
        took = (figures["seconds"], figures["waiting_s"])
        log.info(
            "round_closed run=%s round=%d seconds=%.3f waiting_s=%.3f clients=%d", self.run, number, *took, clients
        )

    def _after(self, number: int) -> Steps:
        """Each so many rounds: what head-tier devices get from the encoder as it stands."""
        every = self.fleet.config.export.every
        if self.encoders is None or not every or number % every or number == self.request.rounds:
            return
        self.pooled = yield from pool(self, number)
        yield from self.encoders.interim(self, number)
        self.pooled = {}

    def _is_to_stop(self) -> bool:
        """Whether head-tier devices have had nothing from the run for as long as the configuration bears."""
        patience = 0 if self.method.needs_last_round else self.fleet.config.export.patience
        self.stopped = why_stop(self.fleet.state.run(self.run).metrics(), patience) if patience else ""
        if self.stopped:
            log.info("run_stopped run=%s reason=%s", self.run, self.stopped)
        return bool(self.stopped)

    def collect_aside(self, collection: Collection, purpose: Purpose) -> Steps:
        """One question to the agents of ``collection`` outside the rounds."""
        self.fleet.collector.open(collection)
        self._ask(collection.round, collection.cohort, purpose)
        yield from self.selection.collect(collection, self.asked.until if self.asked else 0.0)
        self._call_off(collection)

    # --- the end ---------------------------------------------------------------------------------------------------

    def _ask_for_reports(self) -> Steps:
        """Train agents personalize to the final state and tell what they got."""
        opened = self.fleet.state.journal.entries(self.run, kinds=("round_opened",))
        # Those of the last round, too: after a restart they have yet to say that they are there.
        last = set(opened[-1].body["cohort"]) - set(opened[-1].body.get("joining", ())) if opened else set()
        agents = tuple(sorted({*last, *self.fleet.roster.present("train")}))
        self._ask(self.request.rounds, agents, "finish")
        reliable = tuple(without(agents, self.selection.on_trial))
        yield from self.answers.collect(reliable or agents, self.invite)
        self._withdraw()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _blob(self, tensors: Tensors) -> Outgoing:
        if tensors is self.state:  # lies in the store already, under a hash that is known
            return Outgoing.open(self.fleet.state.blobs.path(self.checkpoint), self.checkpoint)
        return Outgoing.of(encode(tensors))

    def _withdraw(self) -> None:
        if self.asked is not None:
            self.asked.withdraw()
        self.asked = None

    def _concerns(self, agent: str) -> bool:
        """Whether the job on offer is for this agent, and not done by it."""
        if self.asked is None or self.asked.purpose != "finish":
            collection = self.fleet.collector.open_round
            return collection is not None and agent in collection.outstanding
        member = self.fleet.roster.get(agent)
        return member is not None and member.tier == "train" and agent not in self.answers.reports

    def forget_blobs(self) -> None:
        """Remove blobs that nothing needs any more: updates of closed rounds, older checkpoints."""
        self.fleet.state.blobs.prune({self.checkpoint, *blobs_in_use(self.fleet.state.journal)})
