"""The commands that one coordinator sends to agents: stamped with its federation and start, and with a proof."""

from __future__ import annotations

import logging
from collections.abc import Callable

from edge_agent import __version__
from edge_agent.core.errors import MessageError
from edge_agent.wire.messages import codec, down, fields, up
from edge_agent.wire.topics import Topics

from ..state.command_keys import CommandKeys
from .run_ids import RunIds

log = logging.getLogger(__name__)


class CommandSender:
    """Sends the messages of one coordinator, from `serve_as` on.

    With ``keys`` they carry a proof of their sender, which agents that have a key ask for.
    """

    def __init__(
        self,
        topics: Topics,
        publish: Callable[[str, bytes], None],
        run_ids: RunIds,
        boot: str,
        keys: CommandKeys | None = None,
    ) -> None:
        self._topics = topics
        self._publish = publish
        self._run_ids = run_ids
        self._boot = boot
        self._keys = keys
        self.federation = ""
        self.epoch = 0
        self._seq = 0
        self._epochs: dict[str, int] = {}
        self._protocols: dict[str, int] = {}

    def serve_as(self, federation: str, epoch: int) -> None:
        """Messages are of this federation and this start of its coordinator from now on."""
        self.federation = federation
        self.epoch = epoch

    def speaks(self, agent: str, protocol: int) -> None:
        """Messages to this agent are of that version of the protocol from now on; to others, of the oldest."""
        self._protocols[agent] = protocol

    def send(self, agent: str, message: fields.Command) -> None:
        """One control message to one agent; a run in it is named as the journal names it."""
        run = getattr(message, "run", "")
        self._send(agent, message, **({"run": self._run_ids.of(run)} if run else {}))

    def announce(self) -> None:
        """Announce this coordinator to all agents."""
        payload = self._stamped(down.Announce(software=__version__), self.epoch)
        self._publish(self._topics.announce, payload if self._keys is None else self._keys.signed(payload))

    def announce_to(self, agent: str) -> None:
        """Announce it to one agent that follows another federation, which may find its own coordinator offline."""
        self._send(agent, down.Announce(software=__version__))

    def to_coordinators(self, message: down.Present) -> None:
        """Send to other coordinators of this federation."""
        self._publish(self._topics.coordinators, self._stamped(message, self.epoch))

    def may_give(self, agent: str, epoch: int, is_alone: Callable[[], bool]) -> bool:
        """Return whether an agent that knows that epoch may be sent commands; where it is higher, they carry it, too.

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

    def with_run_name(self, agent: str, message: fields.Control) -> fields.Control:
        """Return an agent's message with its run as the journal names it; an update of an unknown run gets its receipt.

        Raises:
            MessageError: the run was never requested in this state folder.
        """
        run_id = getattr(message, "run", "")
        if not run_id:
            return message
        name = self._run_ids.name(run_id)
        if name is not None:
            return message.model_copy(update={"run": name})
        self._run_ids.note_elsewhere(agent, run_id)
        if isinstance(message, up.Heartbeat | up.Fault):  # its condition counts; the job is of another coordinator
            return message.model_copy(update={"run": "", "round": 0})
        if isinstance(message, up.UpdateManifest):
            reason = f"unknown run {fields.run_name(run_id)}: it is of another coordinator or state folder"
            self._send(agent, down.Receipt(run=run_id, digest=message.blob.digest, accepted=False, reason=reason))
        raise MessageError(f"{type(message).__name__} about a run that was never asked for here")

    def _send(self, agent: str, message: fields.Command, **changes: str) -> None:
        epoch = max(self.epoch, self._epochs.get(agent, 0))
        payload = self._stamped(message, epoch, self._protocols.get(agent, fields.OLDEST_PROTOCOL), **changes)
        self._publish(self._topics.down(agent), payload if self._keys is None else self._keys.proven(agent, payload))

    def _stamped(
        self, message: fields.Command, epoch: int, protocol: int = fields.OLDEST_PROTOCOL, **changes: str
    ) -> bytes:
        self._seq += 1
        stamp = {"boot": self._boot, "seq": self._seq, "federation": self.federation, "epoch": epoch}
        return codec.encode(message.model_copy(update={**changes, **stamp}), protocol)
