"""Figures on samples of the coordinator, as the journal has them."""

from __future__ import annotations

from typing import Any

from ..journal import Journal


def own_figures(journal: Journal, run: str) -> dict[str, Any]:
    """``warm_start`` of a run (None: it had none) and ``proxy``, one record for each round that was evaluated."""
    entries = journal.entries(run, ("warm_started", "proxy_evaluated"))
    warm = [entry.body for entry in entries if entry.kind == "warm_started"]
    proxy = {entry.round: {"round": entry.round, **entry.body} for entry in entries if entry.kind == "proxy_evaluated"}
    return {"warm_start": warm[-1] if warm else None, "proxy": [proxy[n] for n in sorted(proxy, key=lambda n: n or 0)]}
