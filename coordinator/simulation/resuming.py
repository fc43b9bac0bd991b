"""Which settings a simulation in a folder may be resumed with: those that it has, how it computes, and more rounds."""

from __future__ import annotations

from pathlib import Path

from edge_agent.core.errors import UsageError

from ..text import counted
from .plan import HOW_NOT_WHAT, Plan


def continued(saved: Plan, now: Plan, folder: Path) -> Plan:
    """Return the plan to resume the simulation in ``folder`` with, which began with ``saved``.

    Raises:
        UsageError: Plan ``now`` differs in more than how it is computed, or has fewer rounds; the message says in what.
    """
    # The saved one was JSON in between, in which tuples are lists.
    as_saved = Plan.model_validate_json(now.model_dump_json(exclude_defaults=True))
    differences = saved.differences(as_saved, but=("rounds",))
    if differences:
        raise UsageError(
            f"{folder} holds a simulation with other settings ({'; '.join(differences[:5])}); give those that it began "
            "with, or choose another folder with out="
        )
    how = {name: getattr(now, name) for name in HOW_NOT_WHAT if name in now.model_fields_set}
    return saved.model_copy(update={**how, "rounds": rounds_to_resume(saved, now.rounds, folder)})


def rounds_to_resume(saved: Plan, rounds: int, folder: Path) -> int:
    """Return the rounds of a simulation that is resumed.

    Raises:
        UsageError: They are fewer than those of ``saved``.
    """
    if rounds < saved.rounds:
        raise UsageError(
            f"{folder}: {counted(rounds, 'round')} asked for, and the simulation there has {saved.rounds}; give as "
            "many, or more to continue it, or choose another folder"
        )
    return rounds
