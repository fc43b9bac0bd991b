"""The assignment of a round, or of a question after it: the jobs of its agents, and the blobs that these refer to.

An assignment is made once for a round and lives until the round is over. An agent that was restarted, or that has lost
its message, is sent the same job again, with the time that is left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edge_agent.core.errors import RunFailed
from edge_agent.core.task import Tensors
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.down import Job
from edge_agent.wire.messages.fields import EXCHANGES, LARGE_TASK_BYTES, Purpose
from edge_agent.wire.tensors import encode

from .context import REPORT_DEADLINE_S, Run, RunContext, Steps, Waiting, computed
from .selection import drop_left_out
from .server_side import OwnFunctions

Fail = Callable[[BaseException], None]
"""Called with the error of a computation in the worker: the run fails, or is stalled."""


@dataclass(frozen=True)
class JobSpec:
    """The task of the agents of an assignment."""

    round: int
    purpose: Purpose = "train"
    joining: tuple[str, ...] = ()
    """Devices without torch, which contribute where others train."""

    given: Tensors | None = None
    """The tensors that all start from; None: they start from the state of the run."""

    own: Callable[[str], Tensors] = lambda _: {}
    """Returns the tensors that an agent gets alone, beside those of all."""

    work: Mapping[str, float] = field(default_factory=dict)
    """Slow agent -> its share (0..1) of local training."""

    session: str = ""
    """The attempt at a secure sum that the job is part of; empty: the job is part of none."""


@dataclass(frozen=True)
class JobMaker:
    """Makes the jobs of an assignment: what all of its agents get, and what each of them gets alone."""

    spec: JobSpec
    run: Run
    job: Job
    """The job without references to blobs."""

    shared: Tensors
    """The tensors of the state that the method broadcasts; empty where agents do not start from the state."""

    common: tuple[Outgoing, ...]
    """The blobs that all agents get."""

    task: tuple[Outgoing, ...]
    """The task of the run as a blob, where it is too large for a message."""

    adds_downlink: bool
    """Whether `Method.downlink` is called here, for each agent; if not, the compute process does it, or nobody."""

    frozen: Outgoing | None
    """The frozen encoder, for devices without torch."""

    def make(self, agent: str, downlink: Tensors) -> tuple[Job, tuple[Outgoing, ...]]:
        """Return an agent's job and the blobs that it refers to.

        Args:
            agent: The agent.
            downlink: What the method's own `Method.downlink` has computed for it in the compute process.

        Raises:
            RunFailed: The agent is a device without torch, and there is no frozen encoder for it.
        """
        alone = {**self.spec.own(agent), **downlink}
        if self.adds_downlink:
            alone |= self.run.method.downlink(self.run.state, agent)
        if agent in self.spec.joining:
            return self._make_for_contributor(agent, alone)
        blobs = self.common
        if alone:
            blobs = (*blobs, Outgoing.of(encode(alone)))
        refs = tuple(blob.ref for blob in blobs)
        return self.job.model_copy(update={"blobs": refs}), (*blobs, *self.task)

    def _make_for_contributor(self, agent: str, alone: Tensors) -> tuple[Job, tuple[Outgoing, ...]]:
        """Return the job of a device without torch.

        It gets the frozen encoder, and of the shared tensors only those that it contributes to.
        """
        if self.frozen is None:
            number = self.spec.round
            raise RunFailed(f"round {number}: there is no frozen encoder for {agent}; set cohort.tier to 'train'")
        extras = {name: array for name, array in self.shared.items() if name.startswith("extra.")}
        blob = Outgoing.of(encode({**extras, **alone}))
        update = {"purpose": "contribute", "blobs": (blob.ref,), "bundle": self.frozen.ref}
        return self.job.model_copy(update=update), (blob, self.frozen, *self.task)


@dataclass
class Assignment:
    """Jobs of some agents that are open at the same time."""

    context: RunContext
    until: float
    """When the jobs are overdue, by `Roster.heard_s`."""

    maker: JobMaker
    """Makes the job of each agent, once."""

    fail: Fail
    downlinks: Callable[[tuple[str, ...]], Mapping[str, Tensors]] | None = None
    """Computes in the worker what each of these agents gets alone; None: the method has no function of its own."""

    _awaited: set[str] = field(default_factory=set)
    """Agents for which that is being computed."""

    _jobs: dict[str, Job] = field(default_factory=dict)
    """Agent -> its job, of those whose job has been made."""

    _on_offer: set[str] = field(default_factory=set)
    """The digests of the blobs that are offered for the jobs."""

    @property
    def spec(self) -> JobSpec:
        """What the agents are asked to do."""
        return self.maker.spec

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
        is_update = self.spec.purpose == "train" and not self.spec.session
        update = {
            "deadline_s": max(1.0, self.until - self.context.roster.heard_s()),
            "work": self.spec.work.get(agent, 1.0),
            "partition": self.context.aggregators.partition_of(agent) if is_update else "",
        }
        self.context.roster.note_asked(agent)
        self.context.send(agent, self._jobs[agent].model_copy(update=update))

    def extend(
        self,
        until: float,
        work: Mapping[str, float],
        agents: Sequence[str],
        *,
        joining: tuple[str, ...],
        frozen: Outgoing | None,
    ) -> Steps:
        """Ask more agents, with another deadline for all.

        Args:
            until: The deadline, by `Roster.heard_s`.
            work: Slow agent -> its share (0..1) of local training.
            agents: Those that are asked now.
            joining: All devices without torch, old and new ones.
            frozen: The encoder for them, where there are some.
        """
        self.until = until
        self.maker = replace(self.maker, spec=replace(self.spec, work=work, joining=joining), frozen=frozen)
        yield from self.ask(agents)

    def withdraw(self) -> None:
        """End the assignment: its blobs are no longer offered."""
        self.context.distributor.withdraw(self._on_offer)
        self._awaited.clear()
        self._jobs.clear()
        self._on_offer.clear()

    def purpose_of(self, agent: str) -> Purpose:
        """Return what this agent is asked to do; a device without torch contributes where others train."""
        if agent not in self._jobs:
            return self.spec.purpose
        return self._jobs[agent].purpose

    def _prepare(self, agents: Sequence[str]) -> None:
        """Make the jobs of those of these agents that have none, and invite them."""
        new = tuple(drop_left_out(agents, {*self._jobs, *self._awaited}))
        self._awaited.update(new)
        if self.downlinks is None or not new:
            self._offer(new, {})
            return
        job = functools.partial(self.downlinks, new)
        done = functools.partial(self._on_computed, new)
        self.context.worker.submit("downlink", job, done)

    def _on_computed(
        self, agents: Sequence[str], downlinks: Mapping[str, Tensors], error: BaseException | None
    ) -> None:
        """Offer what was computed for these agents, or have the run fail with the error."""
        if not self._awaited:  # the assignment was withdrawn meanwhile
            return
        try:
            if error is None:
                self._offer(agents, downlinks)
        except Exception as problem:  # noqa: BLE001 - whatever goes wrong here ends the run, not the coordinator
            error = problem
        if error is not None:
            self.fail(error)

    def _offer(self, agents: Sequence[str], downlinks: Mapping[str, Tensors]) -> None:
        """Make the jobs of these agents, offer their blobs, and invite them.

        Args:
            agents: The agents.
            downlinks: Agent -> what it gets alone, where that was computed in the worker.

        Raises:
            RunFailed: A job cannot be made, see `JobMaker.make`.
        """
        # All blobs are on offer before the first job is sent: agents that ask for the same one then share a broadcast.
        for agent in agents:
            self._jobs[agent], blobs = self.maker.make(agent, downlinks.get(agent, {}))
            for blob in blobs:
                self.context.distributor.offer(blob, (agent,))
                self._on_offer.add(blob.ref.digest)
        self._awaited.difference_update(agents)
        for agent in agents:
            self.invite(agent)


def make_assignment(
    run: Run,
    spec: JobSpec,
    own: OwnFunctions,
    frozen: Outgoing | None,
    fail: Fail,
    returned: Collection[str] = (),
) -> Generator[Waiting, None, Assignment]:
    """Return the jobs of agents that start from the state of ``run``, or from the tensors that ``spec`` gives them.

    Args:
        run: The run with the state that it has reached.
        spec: What the agents are asked to do.
        own: The functions of the method's own, which may compute in another process what is broadcast, or what each
            agent gets alone.
        frozen: The encoder for devices without torch, where some take part.
        fail: Called when such a computation fails later.
        returned: The names of the tensors that updates carry.
    """
    # 1. The job without its blobs. A task that is too large for a message is a blob of its own.
    method = run.method
    limit_s = _limit_s(run, spec.purpose)
    text = run.request.task.model_dump_json().encode()
    large_task = Outgoing.of(text) if len(text) > LARGE_TASK_BYTES else None
    job = Job(
        purpose=spec.purpose,
        run=run.id,
        round=spec.round,
        rounds=run.request.rounds,
        seed=run.request.seed,
        method=method.name,
        method_sha256=run.request.method_sha256,
        params=method.all_params(),
        given=run.request.task if large_task is None else large_task.ref,
        blobs=(),
        deadline_s=limit_s,
        evaluate=_is_evaluated(run, spec.round),
        privacy=run.privacy_budget.asked(),
        session=spec.session,
    )
    # 2. The tensors that all agents get: those of the state of the run, unless they are given others, or are asked
    #    about their own batch norm alone.
    shared: Tensors = {}
    common: tuple[Outgoing, ...] = ()
    starts_from_state = spec.given is None and spec.purpose != "batch_norm_stats"
    if starts_from_state:
        shared = yield from _broadcast_tensors(run, own)
        common = _common_blobs(run, shared, returned)
    elif spec.given:
        common = (Outgoing.of(encode(spec.given)),)
    # 3. What each agent gets alone is computed by the worker, where the method does that by a function of its own.
    is_computed_elsewhere = starts_from_state and "downlink" in own.names
    maker = JobMaker(
        spec,
        run,
        job,
        shared,
        common,
        task=() if large_task is None else (large_task,),
        adds_downlink=starts_from_state and not is_computed_elsewhere,
        frozen=frozen,
    )
    downlinks = None
    if is_computed_elsewhere:
        downlinks = functools.partial(own.downlinks, run.checkpoint)
    until = run.context.roster.heard_s() + limit_s
    return Assignment(run.context, until, maker, fail, downlinks)


def _is_evaluated(run: Run, number: int) -> bool:
    """Return whether agents evaluate the model that they receive in a round: every so many rounds, and in the last."""
    every = run.context.config.evaluate_every
    if not every:
        return False
    return number % every == 0 or number == run.request.rounds


def _limit_s(run: Run, purpose: Purpose) -> float:
    """Return how long agents have for a job of this purpose, in seconds."""
    deadline_s = run.context.config.round.deadline_s
    if purpose == "train":
        return deadline_s
    if purpose in EXCHANGES:
        return min(REPORT_DEADLINE_S, deadline_s)
    return REPORT_DEADLINE_S


def _broadcast_tensors(run: Run, own: OwnFunctions) -> Generator[Waiting, None, Tensors]:
    """Return what the method sends to all agents, which is the state itself for most methods."""
    if "broadcast" not in own.names:
        return run.method.broadcast(run.state)
    broadcast = functools.partial(own.broadcast, run.checkpoint)
    waiting = Waiting("the method computes its broadcast")
    return (yield from computed(run.context.worker, "broadcast", broadcast, waiting))


def _common_blobs(run: Run, shared: Tensors, returned: Collection[str]) -> tuple[Outgoing, ...]:
    """Return the blobs of the shared tensors.

    Where devices train a part of the encoder, the rest is a blob of its own: it is the same in each round, so that an
    agent that has it in its cache does not get it again.
    """
    if run.request.task.peft is None:
        return (_blob_of(run, shared),)
    frozen = {name: array for name, array in shared.items() if name.startswith("encoder.") and name not in returned}
    others = {name: array for name, array in shared.items() if name not in frozen}
    return (Outgoing.of(encode(frozen)), Outgoing.of(encode(others)))


def _blob_of(run: Run, shared: Tensors) -> Outgoing:
    """Return the shared tensors as a blob; the state itself is in the store already, as the checkpoint."""
    if shared is run.state:
        return Outgoing.open(run.context.state.blobs.path(run.checkpoint), run.checkpoint)
    return Outgoing.of(encode(shared))
