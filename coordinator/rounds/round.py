"""The contract of rounds: planned, opened, collected, closed.

A round of any kind goes through the same four steps, and each of them leaves a trace that a restart finds:

| step | what it does | what it leaves |
|---|---|---|
| plan | chooses the cohort once enough agents are present | nothing |
| open | journals the round, then asks its members | `round_opened`, with cohort, work and attempt |
| collect | waits until the round may end, and asks others where members fail | `update_accepted`, `update_refused` |
| close | aggregates, stores the new state, journals the end | the checkpoint, then `round_closed` |

The order is journal before effect, everywhere. An update is on disk, then in the journal, and only then has its agent a
receipt. A round is in the journal before its first job is sent. A new state is in the blob store before the journal
names it, and the figures of the round are written after that.

A coordinator that is killed between any two of these repeats the step that was not finished:

- after *plan*: a cohort is chosen again, from whoever is present then;
- after *open*: the same round continues with the same members; jobs that were sent are sent again, and are the same;
- while *collecting*: updates in the journal count; an agent without a receipt offers its update again;
- between an update's entry and its receipt: the agent offers it again, and gets the receipt without an upload;
- between aggregation and checkpoint, or checkpoint and `round_closed`: the same updates are aggregated in the same
  order, to the same bits; a checkpoint that the journal does not name is removed as any other blob that nobody needs;
- after `round_closed`: the next round begins from its checkpoint; a missing line of figures is restored from the
  journal.

A round whose updates are masked for each other (`secure`) is the exception: an attempt that was interrupted is of no
use, and the round begins again with fresh keys.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, replace

from ..fleet.collection import Collection
from ..journal.entries import RoundClosed
from ..text import listed
from ..views.runs import OpenRound
from .active_run import ActiveRun
from .assignment import Assignment
from .context import Steps, Waiting
from .figures import Stats
from .server_step import Collected, ServerStep

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collecting:
    """A round whose updates are being collected."""

    opened: OpenRound
    """The round as it was journaled, with the updates that it had when they were last looked at."""

    collection: Collection
    deadline: float
    """When its jobs are overdue, by `Roster.heard_s`."""

    def with_updates(self) -> Collecting:
        """Return the round with what its agents have sent so far."""
        return replace(self, opened=with_updates(self.opened, self.collection))


def with_updates(opened: OpenRound, collection: Collection) -> OpenRound:
    """Return a round with the updates and rejections of its collection."""
    return replace(
        opened,
        updates=collection.accepted,
        rejected=collection.rejected,
        fact=opened.fact.changed(left_out=collection.left_out),
    )


class Rounds(ABC):
    """How the rounds of one run are held; there is one object for all rounds of the run."""

    def __init__(self, active: ActiveRun, server: ServerStep) -> None:
        self.active = active
        self.server = server

    def hold(self, number: int, resumed: OpenRound | None) -> Steps:
        """Hold round ``number``, from its plan to its checkpoint.

        Args:
            number: The round.
            resumed: The round as the journal has it, where it was opened before a restart.

        Raises:
            RunFailed: Too few agents can deliver, or the round was opened under other terms of privacy.
        """
        stats = Stats.begin(self.active.run.context)
        begin = stats.started_at
        # A round that was opened before a restart goes on as it was planned then, under the same terms.
        if resumed is None:
            opened = yield from self.plan(number)
        else:
            self.active.run.privacy_budget.check_terms(number, resumed.fact)
            opened = resumed
        self.active.release_frozen()
        yield from self.freeze_for(opened.joining)
        stats.waiting_s += self.active.run.context.stopwatch() - begin
        # From here on its jobs are out, and the time of the round counts.
        collecting = yield from self.open(opened, is_new=resumed is None)
        collected = yield from self.collect(collecting, stats)
        yield from self.server.close(collected, stats)

    def freeze_for(self, joining: tuple[str, ...]) -> Steps:
        """Export the encoder for devices without torch, where some take part and it is not there yet."""
        if joining and self.active.frozen is None:
            self.active.frozen = yield from self.active.freeze(self.active.run)

    @abstractmethod
    def plan(self, number: int) -> Generator[Waiting, None, OpenRound]:
        """Return a new round with its cohort, once enough agents are present; nobody is asked yet."""

    @abstractmethod
    def open(self, opened: OpenRound, *, is_new: bool) -> Generator[Waiting, None, Collecting]:
        """Journal the round where it ``is_new``, accept its updates, and ask the members that have not delivered."""

    @abstractmethod
    def collect(self, collecting: Collecting, stats: Stats) -> Generator[Waiting, None, Collected]:
        """Wait until the round may end, call off whoever has not delivered, and return what was collected.

        Raises:
            RunFailed: Too few agents can deliver.
        """

    def resume(self, last_closed: RoundClosed) -> None:  # noqa: B027 - most kinds have nothing to take up
        """Take up what outlives a round, from the entry of the last closed one; none is open. Here, nothing does."""

    def assignment_of(self, agent: str) -> Assignment | None:  # noqa: ARG002 - for overriding methods
        """Return what the agent is asked to do now; None: nothing."""
        return self.active.assignment

    def withdraw(self) -> None:
        """End all assignments, because another loop replaces this one or the task is done; agents get no message."""
        self.active.withdraw()

    def record_opening(self, opened: OpenRound) -> OpenRound:
        """Journal that a round, or another attempt at it, is opened, and return it with those whom it leaves out."""
        selection = self.active.selection
        left_out = selection.spared(opened.round, opened.cohort)
        fact = opened.fact.changed(attempt=opened.attempt, cohort=opened.cohort, left_out=left_out)
        self.active.journal.append(fact, run=self.active.run.id, round=opened.round)
        selection.exclusions.note_opened(opened.round, left_out)
        return replace(opened, fact=opened.fact.changed(left_out=left_out))

    def log_opening(self, opened: OpenRound) -> None:
        """Log that updates of a round are accepted from now on."""
        about = (self.active.run.id, opened.round, opened.attempt, listed(opened.cohort))
        log.info("round_opened run=%s round=%d attempt=%d cohort=%s", *about)
