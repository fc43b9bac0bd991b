"""What a coordinator says to agents and to other coordinators: for which federation, and in which epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable

from edge_agent import __version__
from edge_agent.errors import MessageError
from edge_agent.wire import messages as wire
from edge_agent.wire.topics import Topics

from ..state.identity import RunIds

log = logging.getLogger(__name__)

Publish = Callable[[str, bytes], None]


class Orders:
    """The voice of one coordinator. ``federation`` and ``epoch`` are set when it starts."""

    def __init__(self, topics: Topics, publish: Publish, run_ids: RunIds, boot: str) -> None:
        self._topics, self._publish, self._run_ids, self._boot = topics, publish, run_ids, boot
        self.federation, self.epoch = "", 0
        self._seq = 0
        self._epochs: dict[str, int] = {}

    def send(self, agent: str, message: wire.Command) -> None:
        """One control message to one agent; a run in it is named as the journal names it."""
        run = getattr(message, "run", "")
        self._tell(agent, message, **({"run": self._run_ids.of(run)} if run else {}))

    def announce(self) -> None:
        """Tell all agents that a coordinator is here."""
        self._publish(self._topics.announce, self._stamped(wire.Announce(software=__version__), self.epoch))

    def announce_to(self, agent: str) -> None:
        """Tell one agent, which follows another federation: it decides whether its own coordinator is gone."""
        self._tell(agent, wire.Announce(software=__version__))

    def to_coordinators(self, message: wire.Present) -> None:
        """Tell other coordinators of this federation."""
        self._publish(self._topics.coordinators, self._stamped(message, self.epoch))

    def may_give(self, agent: str, epoch: int, is_alone: Callable[[], bool]) -> bool:
        """Whether this agent, which knows that epoch, may be given orders; where it is higher, they get it, too.

        A state folder that was put back from a backup counts from an older start. But as long as a coordinator with the
        higher epoch may be there, it is the one that counts: it is asked for, and the agent says hello again.
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
            MessageError: the run was never asked for in this state folder.
        """
        run_id = getattr(message, "run", "")
        if not run_id:
            return message
        name = self._run_ids.name(run_id)
        if name is not None:
            return message.model_copy(update={"run": name})
        if isinstance(message, wire.Heartbeat | wire.Fault):  # says how the agent is; what it was asked by is not ours
            return message.model_copy(update={"run": "", "round": 0})
        if isinstance(message, wire.UpdateManifest):
            reason = f"unknown run {wire.run_name(run_id)}: it is of another coordinator or state folder"
            self._tell(agent, wire.Receipt(run=run_id, digest=message.blob.digest, accepted=False, reason=reason))
        raise MessageError(f"{type(message).__name__} about a run that was never asked for here")

    def _tell(self, agent: str, message: wire.Command, **changes: str) -> None:
        epoch = max(self.epoch, self._epochs.get(agent, 0))
        self._publish(self._topics.down(agent), self._stamped(message, epoch, **changes))

    def _stamped(self, message: wire.Command, epoch: int, **changes: str) -> bytes:
        self._seq += 1
        stamp = {"boot": self._boot, "seq": self._seq, "federation": self.federation, "epoch": epoch}
        return wire.encode(message.model_copy(update={**changes, **stamp}))
