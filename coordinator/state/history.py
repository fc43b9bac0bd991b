"""What an agent did before, from the journal and the log of faults, as ``headwater agents NAME --json`` prints it."""

from __future__ import annotations

from typing import Any

from ..views.history import KINDS, LISTS, describe_entry
from ..views.releases import book_of
from .fault_log import FaultLog
from .store import StateFolder

MOST_ENTRIES = 50
"""The number of lines of each list, the newest ones."""

FAULT = ("at", "error", "message", "remedy")


def history_of(state: StateFolder, agent: str, most: int = MOST_ENTRIES) -> dict[str, list[dict[str, Any]]]:
    """Return what an agent did before as JSON: five lists with the oldest entry first.

    Returns:
        Lists of lines, each with ``at`` (ISO 8601, UTC), cut to the newest ``most``:

        - ``accuracy``: run, round (None: at the end of the run), accuracies by scope, the bundle that they are of, and
          why the device went back from it.
        - ``bundles``: bundles that the device ran or tried, with release, outcome, reason and accuracy, and in ``runs``
          what it ran afterwards.
        - ``pins``: release (None: unpinned), until, reason and by whom.
        - ``faults``: error, message and remedy.
        - ``rejected``: rejected updates, with run, round and reason.
    """
    lists: dict[str, list[dict[str, Any]]] = {name: [] for name in LISTS}
    book = book_of(state.journal)
    for entry in state.journal.entries(kinds=("update_accepted", *KINDS), agent=agent):
        line = describe_entry(entry, book)
        if line is not None:
            lists[line.list_name].append(line.to_json())
    faults = [fault for fault in FaultLog(state.path).read() if fault["agent"] == agent]
    lists["faults"] = [{name: fault.get(name) for name in FAULT} for fault in faults]
    return {name: lines[-most:] for name, lines in lists.items()}
