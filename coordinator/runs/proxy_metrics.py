"""Metrics that the coordinator computed on its own samples, from the journal, and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..state.journal import Journal
from ..text import counted


def coordinator_metrics(journal: Journal, run: str) -> dict[str, Any]:
    """``weights`` that a run began with and its ``warm_start`` (None: it had none), and two lists.

    ``proxy``: one record for each round that was evaluated. ``proxy_failed``: for each reason why one was not, the
    round when it was first met.
    """
    entries = journal.entries(run, ("run_requested", "warm_started", "proxy_evaluated", "proxy_failed"))
    asked = next((entry.body for entry in entries if entry.kind == "run_requested"), {})
    warm = [entry.body for entry in entries if entry.kind == "warm_started"]
    proxy = {entry.round: {"round": entry.round, **entry.body} for entry in entries if entry.kind == "proxy_evaluated"}
    return {
        "weights": asked.get("weights"),
        "warm_start": warm[-1] if warm else None,
        "proxy": [proxy[n] for n in sorted(proxy, key=lambda n: n or 0)],
        "proxy_failed": [{"round": entry.round, **entry.body} for entry in entries if entry.kind == "proxy_failed"],
    }


def metric_lines(metrics: Mapping[str, Any]) -> Iterator[str]:
    """`coordinator_metrics` as text, one line each; only the newest proxy metric."""
    if weights := metrics.get("weights"):
        yield f"the encoder began with {weights['path']} (SHA-256 {weights['sha256'][:16]})"
    if warm := metrics.get("warm_start"):
        known = warm.get("accuracy")
        scored = "not evaluated (no held-out samples)" if known is None else f"acc.warm_start {known:.4f}"
        yield f"warm start: {warm['samples']} samples of {warm['data']}, {counted(warm['epochs'], 'epoch')}, {scored}"
    if proxy := metrics.get("proxy"):
        last = proxy[-1]
        known = last.get("acc")
        acc = "unknown" if known is None else f"{known:.4f}"
        yield f"acc.proxy after round {last['round']}: {acc} on {last['samples']} samples, by {last['by']}"
    for failed in metrics.get("proxy_failed") or ():
        yield f"acc.proxy could not be computed, first after round {failed['round']}: {failed['reason']}"
