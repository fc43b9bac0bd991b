"""The round loop: one for all methods, on devices and in simulation.

`RunLoop.steps` reads like the protocol. Wherever it has to wait it yields a `Waiting` that says for whom, why and until
when; the service goes on with it after each event. Everything that must survive is in the journal before it is acted
upon, so a loop made anew from the journal goes on in the same round with the updates that have their receipts.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_agent.errors import RunFailed, TrainingFailed
from edge_agent.methods import Method, Update
from edge_agent.task import State, Tensors
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import BlobRef, Cancel, Fault, Heartbeat, Job
from edge_agent.wire.tensors import Spec, decode, encode, pieces, specs_of

from . import cohort as cohorts
from .answers import REPORT_DEADLINE_S, Answers
from .collect import Collection
from .fleet import Fleet, Steps, Waiting
from .journal import Accepted, OpenRound
from .request import Request
from .tally import Tally

log = logging.getLogger(__name__)


@dataclass
class RunLoop:
    """One run. Make it anew after a restart: it finds its place in the journal."""

    run: str
    request: Request
    method: Method
    fleet: Fleet
    finish: Callable[[RunLoop], Steps] | None = None
    state: State = field(default_factory=dict)
    job: Job | None = None
    answers: Answers = field(init=False)
    started_at: float = 0.0
    _expected: dict[str, Spec] = field(default_factory=dict)
    _checkpoint: str = ""
    _until: float = 0.0
    _personal: dict[str, Outgoing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.answers = Answers(self.fleet.roster, self.fleet.clock)

    def steps(self) -> Steps:
        """The whole run, from wherever the journal says it is."""
        record = self.fleet.state.journal.replay(self.run)
        self.started_at = self.fleet.clock()
        self._begin(record.checkpoint)
        for number in range(record.round + 1, self.request.rounds + 1):
            resumed = record.open_round if number == record.round + 1 else None
            yield from self._round(number, resumed)
        yield from self._ask_for_reports()
        if self.finish is not None:
            yield from self.finish(self)

    def invite(self, agent: str) -> None:
        """Tell one agent (again) what it is expected to do now, if anything."""
        if self.job is None or not self._concerns(agent):
            return
        refs = (*self.job.blobs, *self._personal_blob(agent))
        left = max(1.0, self._until - self.fleet.clock())
        self.fleet.send(agent, self.job.model_copy(update={"blobs": refs, "deadline_s": left}))

    def on_fault(self, agent: str, message: Fault) -> None:
        """An agent could not do what it was asked: nobody waits for it any more."""
        reason = f"{message.error}: {message.message}"
        collection = self.fleet.collector.open_round
        if collection is not None and collection.round == message.round:
            self.fleet.collector.failed(agent, reason)
        else:
            self.answers.fault(agent, reason)

    def on_heartbeat(self, agent: str, message: Heartbeat) -> None:
        """An agent that does not work on what it was asked to do has not heard of it: ask again."""
        if self.job is None:
            self.answers.ask_again(agent)
        elif (message.run, message.round) != (self.run, self.job.round):
            self.invite(agent)

    def abandon(self) -> None:
        """The run has failed: take back what was asked."""
        collection = self.fleet.collector.open_round
        if collection is not None:
            self._call_off(collection)
        self._withdraw()

    def status(self) -> dict[str, Any]:
        """What goes on, as JSON."""
        collection = self.fleet.collector.open_round
        return {
            "id": self.run,
            "method": self.request.method,
            "round": collection.round if collection else (self.job.round if self.job else 0),
            "rounds": self.request.rounds,
            "cohort": list(collection.cohort) if collection else [],
            "accepted": sorted(collection.accepted) if collection else [],
            "refused": dict(collection.refused) if collection else {},
        }

    # --- start -----------------------------------------------------------------------------------------------------

    def _begin(self, checkpoint: str | None) -> None:
        """The state to go on from: a checkpoint, or a fresh model from the run's seed."""
        import torch

        from edge_agent.training.parts import to_arrays

        journal, blobs = self.fleet.state.journal, self.fleet.state.blobs
        torch.manual_seed(self.request.seed)
        model = self.method.build(self.request.task)
        fresh = to_arrays(model, self.method.shared_names(model))
        self._expected = specs_of(fresh)
        if checkpoint is None:
            self.state = self.method.start(fresh)
            checkpoint = blobs.put(*pieces(self.state))
            journal.append("run_started", run=self.run, digest=checkpoint)
            log.info("run_started run=%s method=%s rounds=%d", self.run, self.method.name, self.request.rounds)
        else:
            self.state = decode(blobs.read(checkpoint))
            log.info("run_resumed run=%s checkpoint=%s", self.run, checkpoint[:12])
        self._checkpoint = checkpoint

    # --- one round -------------------------------------------------------------------------------------------------

    def _round(self, number: int, resumed: OpenRound | None) -> Steps:
        attempt, config = (resumed.attempt if resumed else 1), self.fleet.config.round
        while True:
            tally = Tally.begin(self.fleet)
            cohort = resumed.cohort if resumed else (yield from self._gather(number))
            collection = self._open(number, attempt, cohort, resumed)
            self._offer(number, cohort)
            yield from self._collect(collection)
            self._call_off(collection)
            if self._has_quorum(collection):
                break
            got = len(collection.accepted)
            log.warning("round_missed run=%s round=%d attempt=%d got=%d", self.run, number, attempt, got)
            attempt, resumed = attempt + 1, None
            if attempt > config.max_attempts:
                raise RunFailed(self._why_failed(number, collection))
        self._close(number, collection, tally)

    def _gather(self, number: int) -> Generator[Waiting, None, tuple[str, ...]]:
        """Wait until enough agents are there; returns the cohort (as the generator's value)."""
        config = self.fleet.config.cohort
        tier = None if config.tier == "any" else "train"
        while True:
            present = self.fleet.roster.present(tier)
            chosen = cohorts.choose(present, config, seed=self.request.seed, round_number=number)
            if chosen:
                return chosen
            lacking = config.min_agents - len(present)
            here = ", ".join(present) or "nobody"
            what = f"round {number} needs {config.min_agents} train agents, {lacking} more must come; here: {here}"
            yield Waiting(what)

    def _open(self, number: int, attempt: int, cohort: tuple[str, ...], resumed: OpenRound | None) -> Collection:
        accepted, refused = dict[str, Accepted](), dict[str, str]()
        if resumed is not None:
            accepted, refused = dict(resumed.updates), dict(resumed.refused)
        else:
            body = {"attempt": attempt, "cohort": list(cohort)}
            self.fleet.state.journal.append("round_opened", run=self.run, round=number, body=body)
        collection = Collection(self.run, number, cohort, self._expected, accepted, refused)
        self.fleet.collector.open(collection)
        log.info("round_opened run=%s round=%d attempt=%d cohort=%s", self.run, number, attempt, ",".join(cohort))
        return collection

    def _offer(self, number: int, cohort: tuple[str, ...], purpose: str = "train") -> None:
        """Say to everybody concerned what there is to do, and put the blobs on offer."""
        fleet, every = self.fleet, self.fleet.config.evaluate_every
        limit = fleet.config.round.deadline_s if purpose == "train" else REPORT_DEADLINE_S
        self._until = fleet.clock() + limit
        broadcast = self._blob(self.method.broadcast(self.state))
        self._personal = {agent: self._blob(extra) for agent in cohort if (extra := self._downlink(agent))}
        fleet.distributor.offer(broadcast, cohort)
        for agent, blob in self._personal.items():
            fleet.distributor.offer(blob, (agent,))
        self.job = Job(
            purpose=purpose,
            run=self.run,
            round=number,
            rounds=self.request.rounds,
            seed=self.request.seed,
            method=self.method.name,
            params=self.method.params.model_dump(mode="json"),
            task=self.request.task,
            blobs=(broadcast.ref,),
            deadline_s=limit,
            evaluate=bool(every) and (number % every == 0 or number == self.request.rounds),
        )
        for agent in cohort:
            self.invite(agent)

    def _collect(self, collection: Collection) -> Steps:
        """Until everybody has answered, or quorum and grace, or the deadline."""
        config, clock = self.fleet.config.round, self.fleet.clock
        quorum_at: float | None = None
        while collection.outstanding:
            now = clock()
            if self._has_quorum(collection):
                quorum_at = now if quorum_at is None else quorum_at
            patience = self._patience(collection)
            if now >= self._until or (quorum_at is not None and (now >= quorum_at + config.grace_s or patience <= 0)):
                return
            limit = self._until if quorum_at is None else min(self._until, quorum_at + config.grace_s, now + patience)
            got, size = len(collection.accepted), len(collection.cohort)
            yield Waiting(f"round {collection.round}: {got} of {size} updates are here", collection.outstanding, limit)

    def _patience(self, collection: Collection) -> float:
        """Seconds that the outstanding agents are still waited for, if all of them have vanished; else infinite."""
        left = [self.fleet.roster.patience(agent) for agent in collection.outstanding]
        return max(seconds if seconds is not None else float("inf") for seconds in left)

    def _call_off(self, collection: Collection) -> None:
        for agent in collection.outstanding:
            self.fleet.send(agent, Cancel(run=self.run, round=collection.round, reason="the round has closed"))
        self.fleet.collector.close()
        self._withdraw()

    def _has_quorum(self, collection: Collection) -> bool:
        return len(collection.accepted) >= max(1.0, self.fleet.config.round.quorum * len(collection.cohort) - 1e-9)

    def _why_failed(self, number: int, collection: Collection) -> str:
        missing = ", ".join(collection.outstanding) or "nobody"
        refused = "; ".join(f"{agent}: {why}" for agent, why in sorted(collection.refused.items())) or "none"
        got, size, times = len(collection.accepted), len(collection.cohort), self.fleet.config.round.max_attempts
        return (
            f"round {number} missed its quorum {times} times: {got} of {size} updates; missing: {missing}; "
            f"refused: {refused}; mend those agents or lower round.quorum"
        )

    def _close(self, number: int, collection: Collection, tally: Tally) -> None:
        """Aggregate in the order of agent ids, keep the new state, and only then say that the round is over."""
        try:
            self.state = self.method.aggregate(self.state, self._updates(collection))
        except TrainingFailed as error:
            raise RunFailed(f"round {number}: {error}") from error
        blobs, journal = self.fleet.state.blobs, self.fleet.state.journal
        digest = blobs.put(*pieces(self.state))
        clients = len(collection.accepted)
        journal.append("round_closed", run=self.run, round=number, digest=digest, body={"clients": clients})
        self._checkpoint = digest
        blobs.prune({digest, *self._kept_blobs()})
        record = tally.record(self.fleet, collection)
        self.fleet.state.run(self.run).append_metrics(record)
        log.info("round_closed run=%s round=%d seconds=%.3f clients=%d", self.run, number, record["seconds"], clients)

    def _updates(self, collection: Collection) -> Iterator[Update]:
        for agent in sorted(collection.accepted):
            accepted = collection.accepted[agent]
            yield Update(agent, accepted.samples, decode(_mapped(self.fleet.state.blobs.path(accepted.digest))))

    # --- the end ---------------------------------------------------------------------------------------------------

    def _ask_for_reports(self) -> Steps:
        """Train agents personalize to the final state and tell what they got."""
        opened = self.fleet.state.journal.entries(self.run, kinds=("round_opened",))
        last = opened[-1].body["cohort"] if opened else ()  # after a restart they have yet to say that they are there
        agents = tuple(sorted({*last, *self.fleet.roster.present("train")}))
        self._offer(self.request.rounds, agents, purpose="finish")
        yield from self.answers.collect(agents, self.invite)
        self._withdraw()

    def encoder_sha256(self) -> str:
        """Hash of the shared encoder's tensors, the same on every machine for the same bits."""
        encoder = {name: array for name, array in self.state.items() if name.startswith("encoder.")}
        return hashlib.sha256(encode(encoder)).hexdigest()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _blob(self, tensors: Tensors) -> Outgoing:
        if tensors is self.state:  # lies in the store already, under a hash that is known
            return Outgoing.open(self.fleet.state.blobs.path(self._checkpoint), self._checkpoint)
        return Outgoing.of(encode(tensors))

    def _downlink(self, agent: str) -> Tensors:
        return self.method.downlink(self.state, agent)

    def _personal_blob(self, agent: str) -> tuple[BlobRef, ...]:
        blob = self._personal.get(agent)
        return (blob.ref,) if blob is not None else ()

    def _withdraw(self) -> None:
        if self.job is not None:
            self.fleet.distributor.withdraw({ref.digest for ref in self.job.blobs})
            self.fleet.distributor.withdraw({blob.ref.digest for blob in self._personal.values()})
        self.job = None

    def _concerns(self, agent: str) -> bool:
        """Whether the job on offer is for this agent, and not done by it."""
        if self.job is None or self.job.purpose == "train":
            collection = self.fleet.collector.open_round
            return collection is not None and agent in collection.outstanding
        member = self.fleet.roster.get(agent)
        return member is not None and member.tier == "train" and agent not in self.answers.reports

    def _kept_blobs(self) -> set[str]:
        """Blobs that other entries of the journal still need: releases, and checkpoints of all runs."""
        journal = self.fleet.state.journal
        releases = {entry.digest for entry in journal.entries(kinds=("release_made",)) if entry.digest}
        return releases | set(journal.checkpoints().values())


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
