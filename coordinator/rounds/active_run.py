"""The run that is executed now, as its rounds see it: its state, its agents, and what these work on.

Through it a round asks agents, collects what they send, and calls off the others. It holds what changes while the run
goes on. What only one kind of round needs lives in the class of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from edge_agent.core.errors import RunFailed
from edge_agent.core.task import Tensors
from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.down import Cancel
from edge_agent.wire.messages.fields import Purpose

from ..fleet.collection import Collection
from ..journal.store import Journal
from .assignment import Assignment, JobSpec, make_assignment
from .compute_requests import OfMethod
from .context import Run, Steps, Waiting, computed
from .forms import UpdateForms
from .selection import Selection
from .server_side import OwnFunctions, describe

Result = TypeVar("Result")

ROUND_IS_OVER = "the round has closed"
"""The reason that agents get whose job is called off at the end of a round."""


@dataclass
class ActiveRun:
    """A run while it is executed."""

    run: Run
    """The run with the state that its last closed round has left."""

    selection: Selection
    freeze: Callable[[Run], Generator[Waiting, None, Outgoing]]
    """Exports the encoder as it is now, for devices without torch that take part in a round."""

    forms: UpdateForms = field(default_factory=UpdateForms)
    own: OwnFunctions = field(default_factory=OwnFunctions)
    """What the method computes by functions of its own in another process."""

    assignment: Assignment | None = None
    """What agents are asked to do now; None between two rounds."""

    frozen: Outgoing | None = None
    """The encoder of this round for devices without torch, where some take part."""

    members: frozenset[str] = frozenset()
    """The members of the collection that was opened last."""

    failure: Exception | None = None
    """The error of a computation for single agents in the worker: the run fails with it, or is stalled."""

    @property
    def journal(self) -> Journal:
        """The journal of the state folder."""
        return self.run.context.state.journal

    @property
    def open_collection(self) -> Collection | None:
        """What is being collected now; None where nothing is."""
        return self.run.context.collector.open_round

    def release_frozen(self) -> None:
        """Forget the frozen encoder of the round before, unless no update of the method changes the encoder."""
        is_changed = any(name.startswith("encoder.") for name in self.forms.update)
        if is_changed:
            self.frozen = None

    # --- asking and collecting -------------------------------------------------------------------------------------

    def start_collecting(self, collection: Collection) -> None:
        """Accept updates for this collection from now on."""
        self.members = frozenset(collection.cohort)
        context = self.run.context
        context.collector.open(collection)
        request = self.run.request
        about = OfMethod(method=request.method_reference, params=request.params)
        values = describe(self.run.method)
        context.aggregators.announce_collection(collection, about, values)
        context.sites.announce_collection(collection, values)

    def ask(self, agents: tuple[str, ...], spec: JobSpec) -> Generator[Waiting, None, float]:
        """Offer the agents the blobs of their jobs, and send them the jobs.

        Returns:
            The deadline, by `Roster.heard_s`.
        """
        assignment = yield from self.assign(self.run, spec)
        self.assignment = assignment
        yield from assignment.ask(agents)
        return assignment.until

    def assign(self, run: Run, spec: JobSpec) -> Generator[Waiting, None, Assignment]:
        """Return an assignment whose agents start from the state of ``run``; nobody is asked yet."""
        return (yield from make_assignment(run, spec, self.own, self.frozen, self.fail, self.forms.update))

    def exchange(self, collection: Collection, spec: JobSpec) -> Generator[Waiting, None, dict[str, str]]:
        """Ask all agents of a collection for something beside updates, and wait for it.

        Returns:
            Agent -> reason, of those that were present and did not answer in time.
        """
        self.start_collecting(collection)
        self.selection.note_opened(collection)
        until = yield from self.ask(collection.cohort, spec)
        late_s = yield from self.selection.collect(collection, until)
        unanswered = self.selection.unanswered(collection, late_s)
        self.call_off(collection)
        return unanswered

    def ask_after_round(self, collection: Collection, given: Tensors | None = None) -> Steps:
        """Ask the agents of a collection about their data after a round, and wait for their answers.

        Args:
            collection: The collection, whose purpose says what the agents are asked for.
            given: The tensors that they are asked about; None: the state of the run.
        """
        yield from self.exchange(collection, JobSpec(collection.round, collection.purpose, given=given))

    # --- calling off -----------------------------------------------------------------------------------------------

    def call_off(self, collection: Collection) -> None:
        """End a collection: cancel the jobs of those that have not delivered, and withdraw their blobs."""
        for agent in collection.outstanding:
            self.cancel(agent, collection.asked_in_round(agent), collection.purpose_of(agent), collection.session)
        self.run.context.collector.close()
        self.withdraw()

    def cancel(self, agent: str, number: int, purpose: Purpose, session: str = "", reason: str = ROUND_IS_OVER) -> None:
        """Tell an agent that its job of round ``number`` is no longer wanted."""
        cancel = Cancel(run=self.run.id, round=number, purpose=purpose, session=session, reason=reason)
        self.run.context.send(agent, cancel)

    def withdraw(self) -> None:
        """End the assignment; agents get no message."""
        if self.assignment is not None:
            self.assignment.withdraw()
        self.assignment = None

    # --- the method's own functions --------------------------------------------------------------------------------

    def compute(self, what: str, job: Callable[[], Result]) -> Generator[Waiting, None, Result]:
        """Return what a function of the method's own computes in the worker; messages are handled meanwhile."""
        return (yield from computed(self.run.context.worker, what, job, Waiting(f"the method computes its {what}")))

    def judge(self, path: Path, judged: Callable[[str | None], bool]) -> None:
        """Have the worker compute the method's own objection to the update in a file.

        Args:
            path: The file of the update.
            judged: Called with the objection, see `coordinator.fleet.collection.Judge`.
        """

        def done(objection: str | None, error: BaseException | None) -> None:
            is_awaited = judged(objection)
            if is_awaited and error is not None:
                self.fail(error)

        self.run.context.worker.submit("objection", partial(self.own.objection, path), done)

    def fail(self, error: BaseException) -> None:
        """Note the error of a computation for single agents, with which the run then fails."""
        if isinstance(error, Exception):
            self.failure = error
        else:
            self.failure = RunFailed(f"a computation has exited: {error!r}")
