"""The receipts of updates whose round is over, for agents that offer such an update again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from edge_agent.wire.messages import down, fields, up

MOST_RECEIPTS = 4096
"""Of updates of rounds that are over, for agents that offer them again."""


class ReceiptMemory:
    """Answers a repeated manifest of an old round, which is in the journal and in no other memory."""

    def __init__(self, send: Callable[[str, fields.Command], None]) -> None:
        self._send = send
        self._given: OrderedDict[tuple[str, fields.JobKey, str], down.Receipt] = OrderedDict()
        self._about: tuple[str, fields.JobKey, str] | None = None

    def answer(self, agent: str, message: up.UpdateManifest, look: Callable[[str, up.UpdateManifest], None]) -> None:
        """Send the receipt that was given before, or let ``look`` find it, which sends it by `send`.

        Only for manifests that the open round does not take: their answer never changes.
        """
        key = (agent, down.job_key(message), message.blob.digest)
        receipt = self._given.get(key)
        if receipt is not None:
            self._given.move_to_end(key)
            self._send(agent, receipt)
            return
        self._about = key
        try:
            look(agent, message)
        finally:
            self._about = None

    def send(self, agent: str, message: fields.Command) -> None:
        """Send a message of the collector; a receipt that `answer` has asked for is remembered."""
        if self._about is not None and isinstance(message, down.Receipt):
            self._given[self._about] = message
            if len(self._given) > MOST_RECEIPTS:
                self._given.popitem(last=False)
        self._send(agent, message)
