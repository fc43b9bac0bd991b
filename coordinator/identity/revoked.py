"""Which agents are shut out, as a state folder says; light where none is."""

from __future__ import annotations

import contextlib
from pathlib import Path

from edge_agent.core.errors import StateError
from edge_agent.core.storage import IDENTITY


def revoked_agents(state: Path) -> frozenset[str]:
    """Return the ids of the agents that are shut out; none where the list is damaged."""
    folder = state / IDENTITY
    with contextlib.suppress(StateError, OSError):
        if (folder / "revoked.json").exists():
            from .ledger import Revoked, is_revoked  # brings pydantic, which takes as long as all the rest

            return frozenset(name for name in Revoked.read(folder).agents if is_revoked(folder, name))
    return frozenset()
