"""One line of the journal, and the hash that ties it to the line before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from edge_agent.errors import StateError, UnknownName

Kind = Literal[
    "coordinator_started",
    "run_requested",
    "cancel_requested",
    "run_started",
    "warm_started",
    "round_opened",
    "update_accepted",
    "update_refused",
    "round_closed",
    "state_kept",
    "norm_pooled",
    "proxy_evaluated",
    "proxy_failed",
    "run_finished",
    "run_failed",
    "run_cancelled",
    "release_made",
    "release_reported",
]
KINDS: tuple[str, ...] = get_args(Kind)

WHAT_TO_DO = (
    "Free disk space if it is full; otherwise put back a copy of the state folder from a backup, "
    "or start with a new state folder. Nothing was changed."
)


@dataclass(frozen=True)
class Entry:
    """One line of the journal; ``at`` is ISO 8601 UTC and only for people: order is ``id``."""

    id: int
    at: str
    kind: str
    run: str | None
    round: int | None
    agent: str | None
    digest: str | None
    body: dict[str, Any]
    previous_hash: str
    hash: str


def draft(kind: str, *, body: dict[str, Any], **columns: Any) -> dict[str, Any]:
    """What an entry says, as the table keeps it, without place, time and hashes.

    Raises:
        UnknownName: no such kind.
        StateError: the body is not JSON.
    """
    if kind not in KINDS:
        raise UnknownName("journal entry kind", kind, KINDS)
    try:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StateError(f"journal entry '{kind}': its body is not JSON ({error}); nothing was written") from error
    return {"kind": kind, "run": None, "round": None, "agent": None, "digest": None, **columns, "body": text}


_HASHED = ("id", "at", "kind", "run", "round", "agent", "digest", "body", "previous_hash")


def hash_of(row: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over an entry's content, its place, its time and the hash before it."""
    content = json.dumps([row[name] for name in _HASHED], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()
