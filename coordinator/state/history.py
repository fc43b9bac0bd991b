"""What an agent did before: its accuracies, bundles, pins and faults, from the journal and the log of faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fault_log import FaultLog
from .journal import Entry
from .releases import Book, book_of
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
    body = entry.body
    if entry.kind == "update_refused":
        line = {"at": entry.at, "run": entry.run, "round": entry.round, "reason": body.get("reason")}
        return "rejected", line
    if entry.kind in {"device_pinned", "device_unpinned"}:
        pin = {name: body.get(name) for name in ("release", "until", "reason", "by")}
        return "pins", {"at": entry.at, **pin}
    if entry.kind == "device_reported":
        report = _describe_bundle(entry, book)
        return None if report is None else ("bundles", report)
    accuracy = _describe_accuracy(entry)
    return None if accuracy is None else ("accuracy", accuracy)


def _describe_bundle(entry: Entry, book: Book) -> dict[str, Any] | None:
    """Return what a device reported of a release; None for a device that has no bundle yet."""
    body = entry.body
    runs = body.get("runs")
    result = _mapping(body.get("result"))
    if not runs and not result:
        return None
    # Outcome and accuracy are of the release's bundle, which the device may have gone back from.
    number = body.get("release")
    release = None
    if result and isinstance(number, int):
        release = book.get(number)
    return {
        "at": entry.at,
        "bundle_id": runs if release is None else release.bundle_id,
        "runs": runs,
        "release": number,
        "kept": body.get("kept") or None,
        "outcome": result.get("outcome"),
        "reason": result.get("reason"),
        "acc": result.get("acc"),
        "before": result.get("before"),
    }


def _describe_accuracy(entry: Entry) -> dict[str, Any] | None:
    """Return the accuracies of an update or of the end of a run; None for an update without any."""
    body = entry.body
    metrics = _mapping(body.get("metrics"))
    # The end of a run has accuracies by scope, an update has them among its metrics.
    acc = _mapping(body.get("acc")) or {scope: metrics.get(f"acc.{scope}") for scope in SCOPES}
    if entry.kind == "update_accepted" and all(value is None for value in acc.values()):
        return None
    return {
        "at": entry.at,
        "run": entry.run,
        "round": entry.round,
        "acc": {scope: acc.get(scope) for scope in SCOPES},
        "better_alone": body.get("better_alone") is True,
        "rolled_back": body.get("rolled_back") or None,
        "bundle_id": body.get("about") or None,
        "before": body.get("before"),
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


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
