"""Who a coordinator is for agents: federation id, epoch, and the ids of its runs. All of it lies in the journal."""

from __future__ import annotations

from collections.abc import Callable

from edge_agent.errors import RunFailed
from edge_agent.wire.messages import new_id, run_name

from .journal import Journal


def begin(journal: Journal, *, version: str, boot: str, make_id: Callable[[], str] = new_id) -> tuple[str, int]:
    """Federation id and epoch of a coordinator that starts now; the start is in the journal when this returns.

    The first start of a state folder draws the federation id, all later ones keep it. The epoch counts the starts.
    """
    starts = journal.entries(kinds=("coordinator_started",))
    known = [str(entry.body["federation"]) for entry in starts if "federation" in entry.body]
    federation = known[0] if known else make_id()
    journal.append("coordinator_started", body={"version": version, "boot": boot, "federation": federation})
    return federation, len(starts) + 1


class RunIds:
    """Names of runs in one journal, such as ``run-0001``, and the ids that no other journal has."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known: dict[str, str] = {}

    def check(self, name: str) -> None:
        """Return quietly where agents can work for the run of that name.

        Raises:
            RunFailed: it was asked for by a version that gave runs no ids, so that no update of it can be told apart.
        """
        if not self._id(name):
            raise RunFailed(
                f"{name} was requested by an older version, which gave runs no id that agents know them by; "
                "ask for it again with 'headwater run'"
            )

    def of(self, name: str) -> str:
        """The id of a run; its name where the journal has none: a release of an older version is still offered."""
        return self._id(name) or name

    def name(self, run_id: str) -> str | None:
        """The name of the run with that id; None when it was not asked for here."""
        name = run_name(run_id)
        return name if name != run_id and self._id(name) == run_id else None

    def _id(self, name: str) -> str:
        if name not in self._known:
            for entry in self._journal.entries(name, kinds=("run_requested",)):
                self._known[name] = str(entry.body.get("id", ""))
        return self._known.get(name, "")


class RunNames(RunIds):
    """Names instead of ids: in a simulation nobody else is there, and what clients keep lies in its own folder."""

    def check(self, name: str) -> None:
        """Return quietly: every run has a name."""

    def of(self, name: str) -> str:
        """The name itself."""
        return name

    def name(self, run_id: str) -> str | None:
        """The name itself."""
        return run_id
