"""The values of a run, its context, the reports of its agents, and hooks around its rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from edge_agent.core.children import Worker
from edge_agent.core.task import State, Tensors
from edge_agent.methods import Method
from edge_agent.wire.messages.fields import Command
from edge_agent.wire.messages.up import Report
from edge_agent.wire.tensors import pieces

from ..config import CoordinatorConfig
from ..fleet.downloads import Distributor
from ..fleet.rollout import Rollout
from ..fleet.roster import Roster
from ..fleet.uploads import Collector
from ..processes.compute import Compute, InlineCompute
from ..state.store import StateFolder
from .compute_requests import OfModel, OfRun, Travelling
from .partitioned import Aggregators, Sites
from .privacy import PrivacyBudget
from .request import Request

REPORT_DEADLINE_S = 120.0
"""How long the end of a run waits for the agents' metrics."""

MOST_LISTED = 100
"""The most agents that one message, one line of the log, or one list in the status of a run names."""

FEW_AGENTS = 256
"""The most agents without an answer that are all looked at in each step."""

LOOK_AGAIN_S = 0.5
"""Seconds between two looks at more than `FEW_AGENTS`; an agent that goes offline is noticed that much later."""


@dataclass(frozen=True)
class Waiting:
    """A wait of a run: for what, for which agents, and until when."""

    what: str
    """What the run waits for, as text."""

    whom: tuple[str, ...] = ()
    """The agents that it waits for."""

    until: float | None = None
    """Monotonic seconds when the wait ends; None: it has no time limit."""

    about: str = ""
    """The subject of the wait. Waits of one subject get one line in the log; empty: each new text is a new wait."""
    is_idle: bool = False
    """Whether nothing is to be done until a person starts something."""


Steps = Iterator[Waiting]
Result = TypeVar("Result")


def computed(
    worker: Worker, name: str, job: Callable[[], Result], waiting: Waiting
) -> Generator[Waiting, None, Result]:
    """Compute ``job`` in the worker, and yield ``waiting`` until it is done.

    Returns:
        The result of the job.

    Raises:
        BaseException: Whatever the job raises.
        RuntimeError: The job has exited, which must not end the coordinator.
    """
    outcome: list[tuple[Result, BaseException | None]] = []
    worker.submit(name, job, lambda result, error: outcome.append((result, error)))
    while not outcome:
        yield waiting
    result, error = outcome[0]
    if error is None:
        return result
    if isinstance(error, Exception):
        raise error
    raise RuntimeError(f"{name} has exited: {error!r}") from error


@dataclass
class RunContext:
    """The coordinator's services that a run uses: configuration, state folder, agents, transfers and clocks."""

    config: CoordinatorConfig
    state: StateFolder
    roster: Roster
    distributor: Distributor
    releases: Rollout
    collector: Collector
    send: Callable[[str, Command], None]
    worker: Worker
    clock: Callable[[], float] = time.monotonic
    stopwatch: Callable[[], float] = time.monotonic
    """Measures reported times; in a simulation the clock of leases and deadlines stands still meanwhile."""

    excludes_failing: bool = True
    """Whether rounds continue without agents that fail; a simulation ends instead."""

    is_simulation: bool = False
    """Whether all agents are clients of this machine, which nobody can repair or wait for.

    Those without torch get the encoder as tensors, and evaluate the final model as the others do.
    """

    compute: Compute = field(default_factory=InlineCompute)
    """Calls the functions that need torch."""

    aggregators: Aggregators = field(default_factory=Aggregators)
    """Takes and reads updates beside the coordinator, where it has aggregators."""

    sites: Sites = field(default_factory=Sites)
    """Takes sums of updates from relays."""

    is_behind: Callable[[], bool] = lambda: False
    """Whether messages arrive faster than they are handled: then no further agents are asked for anything."""

    def ask(
        self, function: str, request: Travelling, what: str, limit_s: float
    ) -> Generator[Waiting, None, dict[str, Any]]:
        """Return the answer of a function of `computations` as the JSON of the pipe; messages are handled meanwhile.

        Args:
            function: The function's name.
            request: Its arguments.
            what: What is waited for, for the status.
            limit_s: How long it may take.

        Raises:
            HeadwaterError, OSError: See `Compute.submit`.
        """
        call = {**request.to_json(), "do": f"coordinator.runs.computations:{function}"}
        result = None
        waiting = Waiting(what, (), self.clock() + limit_s)
        try:
            result = yield from computed(self.worker, function, lambda: self.compute.submit(call, limit_s), waiting)
        finally:
            if result is None:  # perhaps the run was cancelled
                self.compute.cancel(call)
        return result


class Reports:
    """Reports and faults of one run, and which agents have yet to report."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self.reports: dict[str, Report] = {}
        self.faults: dict[str, str] = {}
        self._ask: Callable[[str], object] | None = None
        self._asked: frozenset[str] = frozenset()
        self._unanswered: dict[str, None] = {}
        """The agents that were asked and have neither reported nor failed, in the order in which they were asked."""

        self._bundle_id = ""
        """The released bundle whose metrics are accepted; empty: those of any."""

    def add(self, agent: str, message: Report) -> None:
        """Take an agent's report, which replaces an earlier one; a report about an earlier release is ignored."""
        if message.about and message.about != self._bundle_id:
            return
        self.reports[agent] = message
        self.faults.pop(agent, None)
        self._unanswered.pop(agent, None)

    def fault(self, agent: str, reason: str) -> None:
        """Note that an agent failed: its report is not waited for."""
        self.faults[agent] = reason
        self._unanswered.pop(agent, None)

    def is_asked(self, agent: str) -> bool:
        """Return whether this agent is among those whose reports are being collected."""
        return agent in self._asked

    def expect(self, bundle_id: str) -> None:
        """Accept metrics of this released bundle only, from now on."""
        self._bundle_id = bundle_id

    def collect(
        self, agents: tuple[str, ...], ask: Callable[[str], object], limit_s: float = REPORT_DEADLINE_S
    ) -> Steps:
        """Wait until each of the agents that is still present has answered, or the time is up.

        Args:
            agents: The agents that were asked.
            ask: Asks one of them again, see `ask_again`.
            limit_s: How long to wait.
        """
        self._expect_from(agents, ask)
        roster = self._context.roster
        until = roster.heard_s() + limit_s
        pending: tuple[str, ...] = ()
        looked_at = float("-inf")
        while roster.heard_s() < until:
            # Whether agents are online changes slowly, and ten thousand may be pending: few of them are looked at in
            # each step, many only every LOOK_AGAIN_S seconds.
            now = self._context.clock()
            if len(self._unanswered) <= FEW_AGENTS or now - looked_at >= LOOK_AGAIN_S:
                looked_at = now
                pending = tuple(agent for agent in self._unanswered if self._is_pending(agent))
                if not pending:
                    break
            yield Waiting("agents evaluate the final model", pending, until + roster.deaf_s, about="reports")
        self._asked = frozenset()
        self._ask = None
        self._unanswered.clear()

    def _expect_from(self, agents: Iterable[str], ask: Callable[[str], object]) -> None:
        """Accept faults of these agents from now on, and have them asked again by ``ask`` (`ask_again`)."""
        self._ask = ask
        self._asked = frozenset(agents)
        answered = self.reports.keys() | self.faults.keys()
        self._unanswered = {agent: None for agent in agents if agent not in answered}

    def pop(self, agents: Iterable[str]) -> dict[str, Report]:
        """Remove and return the reports of these agents, and remove their faults, before they are asked again."""
        removed = set(agents)
        self._unanswered.update(dict.fromkeys(sorted(removed & self._asked)))
        for agent in removed:
            self.faults.pop(agent, None)
        return {agent: self.reports.pop(agent) for agent in sorted(removed & self.reports.keys())}

    def ask_again(self, agent: str) -> None:
        """Ask an idle agent again whose answer is pending: the message or the answer was lost."""
        if self._ask is not None and agent in self._asked and self._is_pending(agent):
            self._ask(agent)

    def _is_pending(self, agent: str) -> bool:
        """Return whether an agent may still answer: it is here or may return, and has neither reported nor failed."""
        roster = self._context.roster
        is_awaited = agent in roster.ready or (roster.patience(agent) or 0) > 0
        return is_awaited and agent not in self.reports and agent not in self.faults


@dataclass(frozen=True)
class Run:
    """One run and the state that it has reached; a later state is another value (`dataclasses.replace`)."""

    id: str
    request: Request
    context: RunContext
    reports: Reports
    method: Method = field(default_factory=Method)
    """The contract alone until the run has begun."""

    state: State = field(default_factory=dict)
    checkpoint: str = ""
    """Digest of ``state`` in the blob store."""

    pooled: Tensors = field(default_factory=dict)
    """Batch norm tensors of the encoder that are not in ``state``, once they have been collected."""

    client_ranges: Tensors = field(default_factory=dict)
    """Client -> ranges (steps, 2) of the activations of this encoder, once they have been collected."""

    @property
    def privacy_budget(self) -> PrivacyBudget:
        """What rounds cost under the configuration, and what those in the journal have cost."""
        return PrivacyBudget(self.context.config, self.context.state.journal, self.method.server_step_is_mean())

    def for_compute(self) -> OfRun:
        """Return what a function in the compute process needs to make the method and its model."""
        return OfRun(
            method=self.request.method_reference,
            params=self.request.params,
            blobs=self.context.state.blobs.folder,
            run=self.id,
            task=self.request.task,
            seed=self.request.seed,
            weights=self.request.weights,
        )

    def model_for_compute(self) -> OfModel:
        """Return `for_compute` with the digests of the tensors that the run has reached; empty where it has none."""
        return OfModel(
            **vars(self.for_compute()),
            state=self.checkpoint,
            pooled=self._put(self.pooled),
            client_ranges=self._put(self.client_ranges),
        )

    def _put(self, tensors: Tensors) -> str:
        """Put tensors into the blob store and return their digest; empty where there are none."""
        if not tensors:
            return ""
        return self.context.state.blobs.put(*pieces(tensors))

    @property
    def has_encoder(self) -> bool:
        """Whether the shared state contains an encoder."""
        return any(name.startswith("encoder.") for name in self.state)


class RunHooks:
    """Hooks that are called around the rounds of runs; here they do nothing. No hook delays an open round."""

    def start(self, state: StateFolder) -> None:
        """Do what is needed when the coordinator starts on this state folder."""

    def before_run(self, run: Run) -> Generator[Waiting, None, Run]:
        """Prepare a run that starts or resumes; its rounds wait for this and start from the returned value."""
        yield from ()
        return run

    def after_round(self, run: Run, number: int) -> None:
        """Do what follows each round; the next one does not wait for it."""

    def reason_to_stop(self, run: Run) -> str:  # noqa: ARG002 - for overriding methods
        """Return why no further round is to follow the last one; empty: the run goes on. It is asked before each."""
        return ""

    def before_reports(self, run: Run) -> None:
        """Do what is needed before all agents are asked for their results."""

    def after_run(self, run: Run) -> Steps:  # noqa: ARG002 - for overriding methods
        """Do what follows the last round; the end of the run waits for this."""
        yield from ()

    def on_end(self, run: str) -> None:
        """Cancel computations for a run that has ended, for whatever reason."""

    def collect(self) -> None:
        """Take up results of computations; called regularly in the coordinator's own thread."""

    def close(self) -> None:
        """Release what the hooks hold, because the coordinator stops."""
