"""Commands to agents and to other coordinators, and the identity they carry: federation id, epoch and run ids."""

from __future__ import annotations

import logging
from collections.abc import Callable

from edge_agent import __version__
from edge_agent.errors import MessageError, RunFailed
from edge_agent.wire import messages as wire
from edge_agent.wire.messages import Topics, new_id, run_name

from ..state.journal import Journal

log = logging.getLogger(__name__)


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
        """The id of a run; its name where the journal has none: a release of an older version is still offered."""
        return self._id(name) or name

    def name(self, run_id: str) -> str | None:
        """The name of the run with that id; None when it was not requested here."""
        name = run_name(run_id)
        return name if self._id(name) == run_id else None

    def _id(self, name: str) -> str:
        if name not in self._known:
            for entry in self._journal.entries(name, kinds=("run_requested",)):
                self._known[name] = str(entry.body.get("id", ""))
        return self._known.get(name, "")


class RunNames(RunIds):
    """Names instead of ids: in a simulation there is no other coordinator, and clients have their own folder."""

    def _id(self, name: str) -> str:
        return name


class CommandSender:
    """Sends the messages of one coordinator. ``federation`` and ``epoch`` are set when it starts."""

    def __init__(self, topics: Topics, publish: Callable[[str, bytes], None], run_ids: RunIds, boot: str) -> None:
        self._topics, self._publish, self._run_ids, self._boot = topics, publish, run_ids, boot
        self.federation, self.epoch = "", 0
        self._seq = 0
        self._epochs: dict[str, int] = {}

    def send(self, agent: str, message: wire.Command) -> None:
        """One control message to one agent; a run in it is named as the journal names it."""
        run = getattr(message, "run", "")
        self._send(agent, message, **({"run": self._run_ids.of(run)} if run else {}))

    def announce(self) -> None:
        """Announce this coordinator to all agents."""
        self._publish(self._topics.announce, self._stamped(wire.Announce(software=__version__), self.epoch))

    def announce_to(self, agent: str) -> None:
        """Announce it to one agent that follows another federation, which may find its own coordinator offline."""
        self._send(agent, wire.Announce(software=__version__))

    def to_coordinators(self, message: wire.Present) -> None:
        """Send to other coordinators of this federation."""
        self._publish(self._topics.coordinators, self._stamped(message, self.epoch))

    def may_give(self, agent: str, epoch: int, is_alone: Callable[[], bool]) -> bool:
        """Whether this agent, which knows that epoch, may be sent commands; where it is higher, they carry it, too.

        A state folder that was put back from a backup counts from an older start. But as long as a coordinator with the
        higher epoch may be online, that one counts, and the agent sends its hello again.
        """
        if epoch <= self.epoch:
            self._epochs.pop(agent, None)
            return True
        if not is_alone():
            return False
        if self._epochs.get(agent) != epoch:
            log.warning("epoch_behind agent=%s knows=%d own=%d: put back from a backup?", agent, epoch, self.epoch)
        self._epochs[agent] = epoch
        return True

    def with_run_name(self, agent: str, message: wire.Control) -> wire.Control:
        """An agent's message with its run as the journal names it; an update of an unknown run gets its receipt.

        Raises:
            MessageError: the run was never requested in this state folder.
        """
        run_id = getattr(message, "run", "")
        if not run_id:
            return message
        name = self._run_ids.name(run_id)
        if name is not None:
            return message.model_copy(update={"run": name})
        if isinstance(message, wire.Heartbeat | wire.Fault):  # its condition counts; the job is of another coordinator
            return message.model_copy(update={"run": "", "round": 0})
        if isinstance(message, wire.UpdateManifest):
            reason = f"unknown run {wire.run_name(run_id)}: it is of another coordinator or state folder"
            self._send(agent, wire.Receipt(run=run_id, digest=message.blob.digest, accepted=False, reason=reason))
        raise MessageError(f"{type(message).__name__} about a run that was never asked for here")

    def _send(self, agent: str, message: wire.Command, **changes: str) -> None:
        epoch = max(self.epoch, self._epochs.get(agent, 0))
        self._publish(self._topics.down(agent), self._stamped(message, epoch, **changes))

    def _stamped(self, message: wire.Command, epoch: int, **changes: str) -> bytes:
        self._seq += 1
        stamp = {"boot": self._boot, "seq": self._seq, "federation": self.federation, "epoch": epoch}
        return wire.encode(message.model_copy(update={**changes, **stamp}))
