"""The starts of coordinators on one journal: the federation's id, the epoch of each start, and takeovers.

Each start is an entry. Its epoch counts the starts, so that agents tell a coordinator from the one before it. A state
folder that begins as a backup is a copy: the original may still serve, so the epochs of a copy begin at the next
thousand. A start that was told to replace another coordinator, by a standby or by ``--take-over``, is a takeover; its
epoch is higher than any that was heard. Coordinators compare these facts in `coordinator.service.peers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_agent.wire.messages.fields import new_id

from .journal import Entry, Journal

EPOCHS_OF_A_COPY = 1000
"""The epoch at which a copy begins is a multiple of this one: its original counts on by ones."""


@dataclass(frozen=True)
class Takeover:
    """What is known of the coordinator that a start replaces."""

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
    body = {
        "version": version,
        "boot": boot,
        "federation": federation_of(starts) or make_id(),
        "epoch": epoch,
        "is_copy": is_copy,
        "take_over": takeover is not None,
    }
    if takeover is not None and takeover.newest_run:
        body["newest_run"] = takeover.newest_run
    entry = journal.append("coordinator_started", body=body)
    journal.serve_from(entry.id, is_held)
    return newest_start([*starts, entry])


def federation_of(starts: Sequence[Entry]) -> str:
    """Return the federation's id that these starts of one journal have; empty without any."""
    for start in starts:
        if "federation" in start.body:
            return str(start.body["federation"])
    return ""


def epoch_of(starts: Sequence[Entry]) -> int:
    """Return the highest epoch of these starts, 0 without any; the first versions wrote none, and counted them."""
    return max((int(start.body.get("epoch", number)) for number, start in enumerate(starts, 1)), default=0)


def newest_start(starts: Sequence[Entry]) -> Start:
    """Return what follows from the starts in one journal, in order."""
    takeover = 0
    is_copy = False
    for start in starts:
        epoch = int(start.body.get("epoch", 0))
        # Versions that did not write what a start was: the epoch of each copy said that it replaces the original.
        was_of_a_copy = epoch > 0 and epoch % EPOCHS_OF_A_COPY == 0
        if start.body.get("take_over", was_of_a_copy):
            takeover = epoch
            is_copy = False
        elif start.body.get("is_copy", False):
            is_copy = True
    return Start(federation_of(starts), epoch_of(starts), takeover, is_copy)
