"""What an agent did before: its accuracies, bundles, pins and faults, from the journal and the log of faults."""

from __future__ import annotations

from typing import Any

from ..journal.entries import (
    DevicePinned,
    DeviceReported,
    DeviceUnpinned,
    ReleaseReported,
    UpdateAccepted,
    UpdateRefused,
)
from ..journal.store import Entry
from ..views.releases import Book, book_of
from .fault_log import FaultLog
from .store import StateFolder

MOST_ENTRIES = 50
"""The newest of each list."""

SCOPES = ("local", "global", "personal")
LISTS = ("accuracy", "bundles", "pins", "rejected")
KINDS = ("release_reported", "device_reported", "device_pinned", "device_unpinned", "update_refused")
"""Entries of an agent that have a line, beside ``update_accepted``, of which there is one in each round."""


def describe_entry(entry: Entry, book: Book) -> tuple[str, dict[str, Any]] | None:
    """Return the line of a journal entry in the history of its agent.

    Args:
        entry: An entry of one of `KINDS`, or ``update_accepted``.
        book: The releases, which entries name by their numbers.

    Returns:
        The list of `LISTS` that the line belongs to, and its fields (`history_of`); None where the entry says nothing
        to people.
    """
    fact = entry.fact
    if isinstance(fact, UpdateRefused):
        line = {"at": entry.at, "run": entry.run, "round": entry.round, "reason": fact.reason}
        return "rejected", line
    if isinstance(fact, DevicePinned | DeviceUnpinned):
        return "pins", _describe_pin(entry, fact)
    if isinstance(fact, DeviceReported):
        report = _describe_bundle(entry, fact, book)
        return None if report is None else ("bundles", report)
    if isinstance(fact, UpdateAccepted):
        accuracy = _describe_update(entry, fact)
        return None if accuracy is None else ("accuracy", accuracy)
    if isinstance(fact, ReleaseReported):
        return "accuracy", _describe_end_of_run(entry, fact)
    return None


def _describe_pin(entry: Entry, fact: DevicePinned | DeviceUnpinned) -> dict[str, Any]:
    """Return the pin of a device; one that was ended has no release."""
    if isinstance(fact, DeviceUnpinned):
        return {"at": entry.at, "release": None, "until": None, "reason": None, "by": fact.by}
    return {"at": entry.at, "release": fact.release, "until": fact.until, "reason": fact.reason, "by": fact.by}


def _describe_bundle(entry: Entry, fact: DeviceReported, book: Book) -> dict[str, Any] | None:
    """Return what a device reported of a release; None for a device that has no bundle yet."""
    result = fact.result
    if result is None and not fact.runs:
        return None
    line: dict[str, Any] = {
        "at": entry.at,
        "bundle_id": fact.runs,
        "runs": fact.runs,
        "release": fact.release or None,
        "kept": fact.kept or None,
        "outcome": None,
        "reason": None,
        "acc": None,
        "before": None,
    }
    if result is None:
        return line
    # Outcome and accuracy are of the release's bundle, which the device may have gone back from.
    release = book.get(fact.release)
    if release is not None:
        line["bundle_id"] = release.bundle_id
    line.update(outcome=result.outcome, reason=result.reason, acc=result.acc, before=result.before)
    return line


def _describe_update(entry: Entry, fact: UpdateAccepted) -> dict[str, Any] | None:
    """Return the accuracies that came with an update; None for one without any."""
    acc = {scope: fact.metrics.get(f"acc.{scope}") for scope in SCOPES}
    if all(value is None for value in acc.values()):
        return None
    return {
        "at": entry.at,
        "run": entry.run,
        "round": entry.round,
        "acc": acc,
        "better_alone": False,
        "rolled_back": None,
        "bundle_id": None,
        "before": None,
    }


def _describe_end_of_run(entry: Entry, fact: ReleaseReported) -> dict[str, Any]:
    """Return the accuracies that an agent reports at the end of a run."""
    acc = fact.acc or {}
    return {
        "at": entry.at,
        "run": entry.run,
        "round": entry.round,
        "acc": {scope: acc.get(scope) for scope in SCOPES},
        "better_alone": fact.better_alone,
        "rolled_back": fact.rolled_back or None,
        "bundle_id": fact.about or None,
        "before": fact.before,
    }


def history_of(state: StateFolder, agent: str, most: int = MOST_ENTRIES) -> dict[str, list[dict[str, Any]]]:
    """Return what an agent did before, in five lists with the oldest entry first.

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
        described = describe_entry(entry, book)
        if described is not None:
            name, line = described
            lists[name].append(line)
    lists["faults"] = [
        {name: fault.get(name) for name in ("at", "error", "message", "remedy")}
        for fault in FaultLog(state.path).read()
        if fault["agent"] == agent
    ]
    return {name: entries[-most:] for name, entries in lists.items()}
