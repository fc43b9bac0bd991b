"""The starts of coordinators on one journal: the federation's id, the epoch of each start, and takeovers.

Each start is an entry. Its epoch counts the starts, so that agents tell a coordinator from the one before it. A state
folder that begins as a backup is a copy: the original may still serve, so the epochs of a copy begin at the next
thousand. A start that was told to replace another coordinator, by a standby or by ``--take-over``, is a takeover; its
epoch is higher than any that was heard. Coordinators compare these facts in `coordinator.service.peers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_agent.core.errors import UsageError
from edge_agent.wire.messages.fields import new_id

from ..journal.entries import CoordinatorStarted
from ..journal.store import Entry, Journal

EPOCHS_OF_A_COPY = 1000
"""The epoch at which a copy begins is a multiple of this one: its original counts on by ones."""


@dataclass(frozen=True)
class Takeover:
    """The coordinator that a start replaces, as far as it is known."""

    epoch: int = 0
    """Its epoch; 0: it was not heard."""

    newest_run: int = 0
    """Number of its newest run, whose name is not used again; 0: not known."""


@dataclass(frozen=True)
class Start:
    """A start of a coordinator, as the journal has it."""

    federation: str
    """Id of the federation."""

    epoch: int
    takeover: int
    """Epoch of the newest takeover in this journal, this start included; 0: there was none."""

    is_copy: bool
    """Whether the state folder began as a backup, and no start since was a takeover."""


def record_start(
    journal: Journal,
    *,
    version: str,
    boot: str,
    name: str = "",
    is_copy: bool = False,
    takeover: Takeover | None = None,
    is_held: Callable[[], bool] = lambda: True,
    make_id: Callable[[], str] = new_id,
) -> Start:
    """Write the start of a coordinator into the journal. From now on no earlier start writes entries.

    The first start of a state folder draws the federation's id; all later ones keep it.

    Args:
        journal: The journal of the state folder, opened to write.
        version: Version of this program.
        boot: Id of this start of the program.
        name: Name of the federation, as `check_name` accepts it.
        is_copy: Whether the state folder is a backup on which nobody has started yet.
        takeover: What is known of the coordinator that this start replaces; None: it replaces none.
        is_held: Whether the lock of the state folder is that of this process.
        make_id: Draws the id of a new federation.
    """
    starts = journal.entries(kinds=("coordinator_started",))
    epoch = epoch_of(starts)
    if takeover is not None:
        epoch = max(epoch, takeover.epoch)
    epoch += 1
    if is_copy:
        epoch += -epoch % EPOCHS_OF_A_COPY
    fact = CoordinatorStarted(
        version=version,
        boot=boot,
        federation=federation_of(starts) or make_id(),
        federation_name=name,
        epoch=epoch,
        is_copy=is_copy,
        take_over=takeover is not None,
    )
    if takeover is not None and takeover.newest_run:
        fact = fact.changed(newest_run=takeover.newest_run)
    entry = journal.append(fact)
    journal.serve_from(entry.id, is_held)
    return newest_start([*starts, entry])


def _facts(starts: Sequence[Entry]) -> list[CoordinatorStarted]:
    return [entry.fact for entry in starts if isinstance(entry.fact, CoordinatorStarted)]


def federation_of(starts: Sequence[Entry]) -> str:
    """Return the federation's id that these starts of one journal have; empty without any."""
    for start in _facts(starts):
        if start.federation is not None:
            return start.federation
    return ""


def check_name(journal: Journal, name: str) -> None:
    """Require that a configuration names the federation whose journal this is, as far as its starts say.

    Otherwise a coordinator would serve a federation without agents, and nobody that of the agents. As long as there are
    only starts, the name may be corrected.

    Args:
        journal: The journal of the state folder, opened.
        name: The federation of the configuration.

    Raises:
        UsageError: It is another one.
    """
    names = [start.federation_name for start in _facts(journal.entries(kinds=("coordinator_started",)))]
    is_other = bool(names) and names[-1] not in {"", name}
    if is_other and journal.progress().entries:
        raise UsageError(
            f"{journal.location}: this is the journal of federation '{names[-1]}', and the configuration names "
            f"'{name}': correct 'federation', or give another state folder, and another database where 'journal' is set"
        )


def epoch_of(starts: Sequence[Entry]) -> int:
    """Return the highest epoch of these starts, 0 without any; the first versions wrote none, and counted them."""
    highest = 0
    for number, start in enumerate(_facts(starts), 1):
        epoch = number if start.epoch is None else start.epoch
        highest = max(highest, epoch)
    return highest


def newest_start(starts: Sequence[Entry]) -> Start:
    """Return what follows from the starts in one journal, in order."""
    takeover = 0
    is_copy = False
    for start in _facts(starts):
        epoch = start.epoch or 0
        # Versions that did not write what a start was: the epoch of each copy said that it replaces the original.
        was_of_a_copy = epoch > 0 and epoch % EPOCHS_OF_A_COPY == 0
        takes_over = was_of_a_copy if start.take_over is None else start.take_over
        if takes_over:
            takeover = epoch
            is_copy = False
        elif start.is_copy:
            is_copy = True
    return Start(federation_of(starts), epoch_of(starts), takeover, is_copy)
