"""The ids by which agents know runs, and the names by which the journal knows them.

Names such as ``run-0001`` are counted in each state folder; an id is of no other folder, so an agent that has worked
for two coordinators mixes up none of their runs.
"""

from __future__ import annotations

import logging

from edge_agent.core.errors import RunFailed
from edge_agent.wire.messages.fields import run_name

from ..journal.entries import RunHeard, RunRequested
from ..journal.store import Journal, run_number

log = logging.getLogger(__name__)

MOST_SKIPPED_NAMES = 1000
"""How far the word of one agent may raise the number of the next run: a hostile agent could use up all numbers."""


class RunIds:
    """Names of runs in one journal, such as ``run-0001``, and the ids that no other journal has."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known: dict[str, str] = {}
        self._skips_names = False
        self._believed: set[str] = set()
        """Agents whose word has moved the number of the next run since the start."""

    def skip_names_that_agents_know(self) -> None:
        """Give no new run the name of one that an agent worked for and this journal, which began as a copy, lacks."""
        self._skips_names = True

    def note_elsewhere(self, agent: str, run_id: str) -> None:
        """Note that an agent has worked for a run that was requested after the backup that this journal began as.

        Agents know runs by their ids, so nothing is mixed up; people and figures know them by their names.
        """
        number = run_number(run_name(run_id))
        if not self._skips_names or agent in self._believed or number is None:
            return
        newest = self._journal.newest_run()
        if newest < number <= newest + MOST_SKIPPED_NAMES:
            self._believed.add(agent)
            self._journal.append(RunHeard(newest_run=number), agent=agent)
            log.info("run_names_skipped until=%s: agent %s has worked for it", run_name(run_id), agent)

    def check(self, name: str) -> None:
        """Return quietly when agents can work for the run of that name.

        Raises:
            RunFailed: it was requested with a version that gave runs no ids, so its updates cannot be recognised.
        """
        if not self._id(name):
            raise RunFailed(
                f"{name} was requested by an older version, which gave runs no id that agents know them by; "
                "ask for it again with 'headwater run'"
            )

    def of(self, name: str) -> str:
        """Return the id of a run, or its name where the journal has none: old releases are still offered."""
        return self._id(name) or name

    def name(self, run_id: str) -> str | None:
        """Return the name of the run with that id; None when it was not requested here."""
        name = run_name(run_id)
        return name if self._id(name) == run_id else None

    def _id(self, name: str) -> str:
        if name not in self._known:
            for entry in self._journal.entries(name, kinds=("run_requested",)):
                requested = entry.fact
                id_ = requested.id if isinstance(requested, RunRequested) else None
                self._known[name] = id_ or ""
        return self._known.get(name, "")


class RunNames(RunIds):
    """Names instead of ids: in a simulation there is no other coordinator, and clients have their own folder."""

    def _id(self, name: str) -> str:
        return name
