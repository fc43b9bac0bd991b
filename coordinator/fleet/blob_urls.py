"""The contract of what gives large blobs their URLs: the coordinator's own endpoint, or a store of others.

`coordinator.blobs` implements it. All calls come from the coordinator's loop and return at once; what takes long is
done elsewhere. Whatever goes wrong there, `BlobUrls.urls` says that there are none, and the blob goes in chunks over
MQTT.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

from edge_agent.wire.blobs.chunks import Outgoing
from edge_agent.wire.messages.fields import BlobRef

from .upload_urls import UploadUrls


@dataclass(frozen=True)
class BlobSite:
    """Where large blobs go by HTTP and how that fares, for the status.

    Attributes:
        by: What it is: ``own endpoint`` or ``store``.
        where: Its URL, or the name of the store.
        takes_updates: Whether agents put updates there.
        problem: Why it could not be used last; empty: it could.
        refused_requests: The requests that the own endpoint has refused.
    """

    by: str
    where: str
    takes_updates: bool
    problem: str = ""
    refused_requests: int = 0

    def to_json(self) -> dict[str, str | int | bool]:
        """Return this as JSON."""
        return asdict(self)


class BlobUrls(Protocol):
    """Gives blobs on offer URLs, from which single agents may fetch them for a short time."""

    above_bytes: int
    """Blobs of more bytes have URLs."""

    @property
    def uploads(self) -> UploadUrls | None:
        """Where agents put updates; None: they go over MQTT."""

    def offered(self, blob: Outgoing) -> None:
        """Note that a blob is on offer from now on; its bytes stay readable until it is withdrawn."""

    def withdrawn(self, digest: str) -> None:
        """Note that a blob is on offer no longer; it may be one that has no URL."""

    def urls(self, agent: str, digest: str) -> tuple[str, ...] | None:
        """Return the URLs by which an agent can fetch a blob now.

        Empty: there are none, the blob goes in chunks. None: it is being put where agents fetch it; ask again.
        """

    def arrived(self, agent: str, ref: BlobRef) -> None:
        """Note that an agent has a blob that it was sent URLs of."""

    def take_fetched(self) -> dict[str, int]:
        """Return the bytes that each agent has fetched since the last call."""

    def describe(self) -> BlobSite:
        """Return what this is and how it fares, for the status."""

    def close(self) -> None:
        """Stop; blobs go in chunks from now on."""
