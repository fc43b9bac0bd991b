"""What an agent did before: its accuracies, bundles and faults, from the journal and the log of faults."""

from __future__ import annotations

from typing import Any

from .fault_log import FaultLog
from .store import StateFolder

MOST_ENTRIES = 50
"""The newest of each list."""

SCOPES = ("local", "global", "personal")


def history_of(state: StateFolder, agent: str, most: int = MOST_ENTRIES) -> dict[str, list[dict[str, Any]]]:
    """``accuracy``, ``bundles``, ``faults`` and ``rejected``, each with the oldest first and ``at`` (ISO 8601, UTC).

    ``accuracy``: run, round (None: at the end of the run), accuracies by scope. ``bundles``: those that it ran, with
    release, outcome and reason. ``faults``: error, message and remedy. ``rejected``: updates, with run, round, reason.
    """
    kinds = ("update_accepted", "update_refused", "release_reported", "device_reported")
    accuracy, bundles, rejected = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    for entry in state.journal.entries(kinds=kinds, agent=agent):
        body, about = entry.body, {"at": entry.at, "run": entry.run, "round": entry.round}
        if entry.kind == "update_refused":
            rejected.append({**about, "reason": body.get("reason")})
        elif entry.kind == "device_reported":
            result = body.get("result") or {}
            named = {name: result.get(name) for name in ("outcome", "reason", "acc", "before")}
            if not body.get("runs") and not result:
                continue  # a device that has no bundle yet
            bundles.append({"at": entry.at, "bundle_id": body.get("runs"), "release": body.get("release"), **named})
        else:
            metrics = body.get("metrics", {})
            acc = body.get("acc") or {scope: metrics.get(f"acc.{scope}") for scope in SCOPES}
            if any(value is not None for value in acc.values()):
                accuracy.append({**about, "acc": {scope: acc.get(scope) for scope in SCOPES}})
    faults = [
        {name: fault.get(name) for name in ("at", "error", "message", "remedy")}
        for fault in FaultLog(state.path).read()
        if fault["agent"] == agent
    ]
    lists = {"accuracy": accuracy, "bundles": bundles, "faults": faults, "rejected": rejected}
    return {name: entries[-most:] for name, entries in lists.items()}
