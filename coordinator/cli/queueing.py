"""Who does a run and when: is a coordinator at work, what is ahead of a run, how is it ended or gone on with."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from edge_agent.errors import StateError
from edge_agent.storage import folder_lock

from ..state.journal import Journal, RunRecord
from ..text import counted, listed


def is_serving(state: Path) -> bool:
    """Whether a coordinator holds the state folder now."""
    try:
        with folder_lock(state, "headwater run"):
            return False
    except StateError:
        return True


@dataclass(frozen=True)
class Place:
    """The options by which a command found its state folder."""

    config: Path | None
    state: Path | None

    def command(self, words: str) -> str:
        """A command as people would type it here, in quotation marks."""
        given = (("--config", self.config), ("--state", self.state))
        options = "".join(f" {option} {shlex.quote(str(path))}" for option, path in given if path is not None)
        return f"'headwater {words}{options}'"


def ahead_of(journal: Journal, run: str) -> list[str]:
    """Unfinished runs that were asked for before ``run``: they are done first."""
    unfinished = journal.unfinished()
    return unfinished[: unfinished.index(run)] if run in unfinished else []


def standing(record: RunRecord) -> str:
    """How far a run has come, in words."""
    rounds = int(record.request.get("rounds", 0))
    if record.status == "requested":
        return f"has not begun with its {counted(rounds, 'round')}"
    return f"stands at round {record.round} of {rounds}"


def behind(journal: Journal, run: str, place: Place) -> str:
    """What ``run`` has to wait for and how to get that out of the way; empty when it is next."""
    ahead = ahead_of(journal, run)
    if not ahead:
        return ""
    first = ahead[0]
    others = f" and {listed(ahead[1:])}" if len(ahead) > 1 else ""
    what = f"{first}, which {standing(journal.replay(first))}{others}"
    return f"{run} is queued behind {what}; {place.command(f'cancel {first}')} takes it out of the queue"
