"""The contract of where agents put large updates by HTTP: the coordinator's own endpoint, or a store of others.

`coordinator.blobs` implements it. All calls come from the coordinator's loop and return at once. What comes that way
reaches the collector as the same frames that come over MQTT, so that one place assembles, checks and counts updates.
Whatever goes wrong, an `ArrivedPart` says so, and the update goes in chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from edge_agent.wire.blobs.chunks import Frame
from edge_agent.wire.messages.fields import BlobRef


@dataclass(frozen=True)
class ExpectedUpload:
    """An update that one agent may send now.

    Attributes:
        agent: The agent.
        run: The id of its run.
        round: The number of its round.
        ref: The digest and the size of the update.
    """

    agent: str
    run: str
    round: int
    ref: BlobRef


@dataclass(frozen=True)
class UploadAddress:
    """Where an agent can put an update for a short time.

    Attributes:
        urls: The URLs, in the order to try them.
        whole: Whether the update has to come in one request.
    """

    urls: tuple[str, ...]
    whole: bool


@dataclass(frozen=True)
class ArrivedPart:
    """A part of an update that has come, or why nothing more will come.

    Attributes:
        upload: The update.
        frame: The part; None: nothing more comes.
        problem: Why not.
    """

    upload: ExpectedUpload
    frame: Frame | None
    problem: str = ""


class UploadUrls(Protocol):
    """Gives single agents URLs to which each may put one update for a short time."""

    above_bytes: int
    """Updates of more bytes have URLs."""

    def expect(self, upload: ExpectedUpload) -> UploadAddress | None:
        """Let an agent put this update, and none before it, from now on; None: it is to send chunks."""

    def collect(self, upload: ExpectedUpload) -> bool:
        """Get an update that its agent has put behind its URL; parts follow.

        Returns:
            False where updates are not put anywhere from where they would be got.
        """

    def release(self, agent: str) -> None:
        """Expect nothing of an agent any more: its update is here, or no longer needed."""

    def keep_only(self, agents: Collection[str]) -> None:
        """Expect nothing of other agents than these for now; what they have put may still be collected."""

    def take_arrived(self) -> Iterator[ArrivedPart]:
        """Yield what has arrived, and a bounded number of bytes of it."""

    def close(self) -> None:
        """Take nothing more; updates go in chunks from now on."""
