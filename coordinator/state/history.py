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


def line_of(entry: Entry, book: Book) -> tuple[str, dict[str, Any]] | None:
    """One of `LISTS`, and the line of an entry in it, see `history_of`; None: the entry says nothing to people.

    ``book``: has the releases that entries name by their numbers.
    """
    body, about = entry.body, {"at": entry.at, "run": entry.run, "round": entry.round}
    if entry.kind == "update_refused":
        return "rejected", {**about, "reason": body.get("reason")}
    if entry.kind in {"device_pinned", "device_unpinned"}:
        return "pins", {"at": entry.at, **{name: body.get(name) for name in ("release", "until", "reason", "by")}}
    if entry.kind == "device_reported":
        result = _mapping(body.get("result"))
        if not body.get("runs") and not result:
            return None  # a device that has no bundle yet
        named = {name: result.get(name) for name in ("outcome", "reason", "acc", "before")}
        # Outcome and accuracy are of the release's bundle, which the device may have gone back from.
        number = body.get("release")
        release = book.get(number) if result and isinstance(number, int) else None
        runs = body.get("runs")
        known = {
            "bundle_id": runs if release is None else release.bundle_id,
            "runs": runs,
            "release": number,
            "kept": body.get("kept") or None,
        }
        return "bundles", {"at": entry.at, **known, **named}
    metrics = _mapping(body.get("metrics"))
    acc = _mapping(body.get("acc")) or {scope: metrics.get(f"acc.{scope}") for scope in SCOPES}
    if entry.kind == "update_accepted" and all(value is None for value in acc.values()):
        return None
    notes = {
        "better_alone": body.get("better_alone") is True,
        "rolled_back": body.get("rolled_back") or None,
        "bundle_id": body.get("about") or None,
        "before": body.get("before"),
    }
    return "accuracy", {**about, "acc": {scope: acc.get(scope) for scope in SCOPES}, **notes}


def history_of(state: StateFolder, agent: str, most: int = MOST_ENTRIES) -> dict[str, list[dict[str, Any]]]:
    """``accuracy``, ``bundles``, ``pins``, ``faults``, ``rejected``, the oldest first, with ``at`` (ISO 8601, UTC).

    ``accuracy``: run, round (None: at the end of the run), accuracies by scope, the bundle that they are of, and why
    the device went back from it. ``bundles``: those that it ran or tried, with release, outcome, reason and accuracy,
    and in ``runs`` what it ran afterwards.
    ``pins``: release (None: unpinned), until, reason and by whom. ``faults``: error,
    message and remedy. ``rejected``: updates, with run, round, reason.
    """
    lists: dict[str, list[dict[str, Any]]] = {name: [] for name in LISTS}
    book = book_of(state.journal)
    for entry in state.journal.entries(kinds=("update_accepted", *KINDS), agent=agent):
        if (line := line_of(entry, book)) is not None:
            lists[line[0]].append(line[1])
    lists["faults"] = [
        {name: fault.get(name) for name in ("at", "error", "message", "remedy")}
        for fault in FaultLog(state.path).read()
        if fault["agent"] == agent
    ]
    return {name: entries[-most:] for name, entries in lists.items()}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
