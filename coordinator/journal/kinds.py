"""The names of the facts that a journal holds, and the groups of them that many readers need."""

from __future__ import annotations

from typing import Literal, get_args

Kind = Literal[
    "coordinator_started",
    "run_heard",
    "run_requested",
    "cancel_requested",
    "run_started",
    "warm_started",
    "round_opened",
    "update_accepted",
    "update_refused",
    "sum_revealed",
    "round_closed",
    "state_kept",
    "norm_pooled",
    "ranges_collected",
    "proxy_evaluated",
    "proxy_failed",
    "run_stopped",
    "run_finished",
    "run_failed",
    "run_cancelled",
    "run_extended",
    "prune_requested",
    "run_pruned",
    "bundle_exported",
    "release_made",
    "release_signed",
    "release_canary",
    "release_stage",
    "release_held",
    "release_resumed",
    "release_reported",
    "device_reported",
    "device_pinned",
    "device_unpinned",
    "device_retired",
]
KINDS: tuple[str, ...] = get_args(Kind)

RunStatus = Literal["requested", "running", "finished", "failed", "cancelled"]

CHECKPOINTS = ("run_started", "warm_started", "round_closed")
"""Kinds of entries whose digest is that of a run's state from then on."""

FINAL: dict[str, RunStatus] = {"run_finished": "finished", "run_failed": "failed", "run_cancelled": "cancelled"}
"""Kinds of entries that end a run, and the status that it has afterwards."""
