"""The round loop: one for all methods, on devices and in simulation.

`RunLoop.steps` reads like the protocol. Wherever it has to wait it yields a `Waiting` that says for whom, why and until
when; the service goes on with it after each event. Everything that must survive is in the journal before it is acted
upon, so a loop made anew from the journal goes on in the same round with the updates that have their receipts.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from edge_agent.errors import HeadwaterError, TrainingFailed
from edge_agent.methods import Method, Update
from edge_agent.task import State, Task, Tensors
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import BlobRef, Cancel, Control, Fault, Heartbeat, Job, Report
from edge_agent.wire.tensors import Spec, decode, encode, specs_of
from edge_agent.wire.transport import Transport

from . import cohort as cohorts
from .collect import Collection, Collector
from .config import CoordinatorConfig
from .distribute import Distributor
from .journal import Accepted, OpenRound
from .roster import Roster
from .store import StateFolder

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""How long a vanished agent is waited for when everybody else is done: it may only have lost its connection."""

REPORT_DEADLINE_S = 120.0
"""How long the end of a run waits for the devices' own figures."""


class RunFailed(HeadwaterError):
    """A run cannot go on; the message says why."""


@dataclass(frozen=True)
class Waiting:
    """What the loop waits for. ``until`` is monotonic seconds, None = as long as it takes."""

    what: str
    whom: tuple[str, ...] = ()
    until: float | None = None


Steps = Iterator[Waiting]


@dataclass
class Fleet:
    """What a run needs of the world: who is there, how to speak to them, where things are kept, what time it is."""

    config: CoordinatorConfig
    state: StateFolder
    roster: Roster
    distributor: Distributor
    collector: Collector
    send: Callable[[str, Control], None]
    transport: Transport
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Request:
    """What was asked for; the body of the journal's ``run_requested``."""

    method: str
    params: dict[str, Any]
    rounds: int
    seed: int
    task: Task

    def body(self) -> dict[str, Any]:
        """As JSON."""
        return {**vars(self), "task": self.task.model_dump(mode="json")}

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Request:
        """From JSON."""
        fields = {key: body[key] for key in ("method", "params", "rounds", "seed")}
        return cls(**fields, task=Task.model_validate(body["task"]))


@dataclass
class _Tally:
    """Bytes at the start of a round, to tell what the round took."""

    started_at: float
    up: dict[str, int]
    down: dict[str, int]


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
    reports: dict[str, Report] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    started_at: float = 0.0
    _expected: dict[str, Spec] = field(default_factory=dict)
    _checkpoint: str = ""
    _until: float = 0.0
    _personal: dict[str, Outgoing] = field(default_factory=dict)

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
        job, collection = self.job, self.fleet.collector.open_round
        if job is None or (job.purpose == "train" and (collection is None or agent not in collection.outstanding)):
            return
        refs = (*job.blobs, *self._personal_blob(agent))
        left = max(1.0, self._until - self.fleet.clock())
        self.fleet.send(agent, job.model_copy(update={"blobs": refs, "deadline_s": left}))

    def on_report(self, agent: str, message: Report) -> None:
        """An agent tells what it got out of the run."""
        self.reports[agent] = message
        self.faults.pop(agent, None)

    def on_fault(self, agent: str, message: Fault) -> None:
        """An agent could not do what it was asked: nobody waits for it any more."""
        reason = f"{message.error}: {message.message}"
        collection = self.fleet.collector.open_round
        if collection is not None and collection.round == message.round:
            self.fleet.collector.failed(agent, reason)
        else:
            self.faults[agent] = reason

    def on_heartbeat(self, agent: str, message: Heartbeat) -> None:
        """An agent that does not work on what it was asked to do has not heard of it: ask again."""
        if self.job is not None and (message.run, message.round) != (self.run, self.job.round):
            self.invite(agent)

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
            checkpoint = blobs.put(encode(self.state))
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
            tally = self._tally()
            cohort = resumed.cohort if resumed else (yield from self._gather(number))
            collection = self._open(number, attempt, cohort, resumed)
            self._offer(number, cohort)
            yield from self._collect(collection)
            self._call_off(collection)
            if self._has_quorum(collection):
                break
            log.warning("round_missed run=%s round=%d attempt=%d got=%d", self.run, number, attempt, len(collection.accepted))
            attempt, resumed = attempt + 1, None
            if attempt > config.max_attempts:
                raise RunFailed(self._why_failed(number, collection))
        self._close(number, collection, tally)

    def _gather(self, number: int) -> Iterator[Waiting]:
        """Wait until enough agents are there; returns the cohort (as the generator's value)."""
        config = self.fleet.config.cohort
        tier = None if config.tier == "any" else "train"
        while True:
            present = self.fleet.roster.present(tier)
            chosen = cohorts.choose(present, config, seed=self.request.seed, round_number=number)
            if chosen:
                return chosen
            lacking = config.min_agents - len(present)
            yield Waiting(f"round {number} needs {config.min_agents} train agents, {lacking} more must come", tuple(present))

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
        gone = [self.fleet.roster.gone_for(agent) for agent in collection.outstanding]
        return max(PATIENCE_S - s for s in gone if s is not None) if None not in gone else float("inf")

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
        return (
            f"round {number} missed its quorum {self.fleet.config.round.max_attempts} times: {len(collection.accepted)} of "
            f"{len(collection.cohort)} updates; missing: {missing}; refused: {refused}; mend those agents or lower round.quorum"
        )

    def _close(self, number: int, collection: Collection, tally: _Tally) -> None:
        """Aggregate in the order of agent ids, keep the new state, and only then say that the round is over."""
        try:
            self.state = self.method.aggregate(self.state, self._updates(collection))
        except TrainingFailed as error:
            raise RunFailed(f"round {number}: {error}") from error
        blobs, journal = self.fleet.state.blobs, self.fleet.state.journal
        digest = blobs.put(encode(self.state))
        journal.append("round_closed", run=self.run, round=number, digest=digest, body={"clients": len(collection.accepted)})
        self._checkpoint = digest
        blobs.prune({digest, *self._kept_blobs()})
        self._note_metrics(number, collection, tally)

    def _updates(self, collection: Collection) -> Iterator[Update]:
        for agent in sorted(collection.accepted):
            accepted = collection.accepted[agent]
            yield Update(agent, accepted.samples, decode(_mapped(self.fleet.state.blobs.path(accepted.digest))))

    # --- the end ---------------------------------------------------------------------------------------------------

    def _ask_for_reports(self) -> Steps:
        """Train agents personalize to the final state and tell what they got."""
        fleet = self.fleet
        agents = tuple(fleet.roster.present("train"))
        self._offer(self.request.rounds, agents, purpose="finish")
        yield from self.await_reports(agents)
        self._withdraw()

    def await_reports(self, agents: tuple[str, ...], limit_s: float = REPORT_DEADLINE_S) -> Steps:
        """Until each of ``agents`` that is still there has reported, or the time is up."""
        until = self.fleet.clock() + limit_s
        while self.fleet.clock() < until:
            due = tuple(a for a in agents if self._owes_report(a))
            if not due:
                return
            yield Waiting("devices evaluate what they got", due, until)

    def _owes_report(self, agent: str) -> bool:
        done = agent in self.reports or agent in self.faults
        return not done and (self.fleet.roster.gone_for(agent) or 0.0) < PATIENCE_S

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

    def _kept_blobs(self) -> set[str]:
        """Blobs that other entries of the journal still need: releases, and checkpoints of other runs."""
        journal = self.fleet.state.journal
        releases = {e.digest for e in journal.entries(kinds=("release_made",)) if e.digest}
        others = {journal.replay(run).checkpoint for run in journal.runs() if run != self.run}
        return releases | {digest for digest in others if digest}

    def _tally(self) -> _Tally:
        fleet = self.fleet
        return _Tally(fleet.clock(), dict(fleet.collector.bytes_from), dict(fleet.distributor.bytes_to))

    def _note_metrics(self, number: int, collection: Collection, tally: _Tally) -> None:
        fleet, accepted = self.fleet, collection.accepted
        seconds = fleet.clock() - tally.started_at
        record = {
            "kind": "round",
            "round": number,
            "seconds": round(seconds, 4),
            "agents": sorted(accepted),
            "missing": list(collection.outstanding),
            "refused": [{"agent": agent, "reason": why} for agent, why in sorted(collection.refused.items())],
            "bytes_up": sum(fleet.collector.bytes_from.values()) - sum(tally.up.values()),
            "bytes_down": sum(fleet.distributor.bytes_to.values()) - sum(tally.down.values()),
            "acc": {scope: _metric(accepted, f"acc.{scope}") for scope in ("global", "personal")},
            "loss": _metric(accepted, "loss"),
        }
        fleet.state.run(self.run).append_metrics(record)
        log.info("round_closed run=%s round=%d seconds=%.3f clients=%d", self.run, number, seconds, len(accepted))


def _metric(accepted: dict[str, Accepted], name: str) -> dict[str, float]:
    return {agent: update.metrics[name] for agent, update in sorted(accepted.items()) if name in update.metrics}


def _mapped(path: Any) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
