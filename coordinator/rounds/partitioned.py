"""The contracts of aggregators and of relays that sum, as rounds see them: who takes updates, and who reads them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from edge_agent.core.errors import MessageError

from ..fleet.collection import Collection
from ..state.status_file import PartitionStatus, SiteStatus
from .compute_requests import MethodValues, OfMethod
from .passes import Answer, Pass


@dataclass(frozen=True)
class UpdatesOfRound:
    """The updates of a round, as another process finds them in the blob store."""

    about: OfMethod
    """What makes the method."""

    values: MethodValues
    state: str
    """Digest of the state that the round began with."""

    start: str | None
    """Digest of the state that the run began with; None where there is no such state any more."""

    accepted: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Agent -> digest of its update, and its sample count."""


class Sites:
    """Relays that sum the updates of the agents at their site; this class stands for having none."""

    def start(self, epoch: int) -> None:
        """Begin to serve, in this epoch of the federation."""

    def heard(self, relay: str, payload: bytes) -> None:  # noqa: ARG002 - for overriding methods
        """Handle a message of a relay.

        Raises:
            MessageError: It is not a message of a relay whose sums this coordinator takes.
        """
        raise MessageError(f"relay '{relay}' offers sums, and this coordinator takes none: set [aggregators] sites")

    def chunk(self, relay: str, payload: bytes) -> None:
        """Handle chunks of a relay's sum.

        Raises:
            MessageError: They are of no sum that is awaited.
        """
        self.heard(relay, payload)

    def tick(self) -> None:
        """Do what is due by time alone."""

    def announce_collection(self, collection: Collection, values: MethodValues) -> None:
        """Tell the relays what is collected now."""

    def hurry(self) -> None:
        """Have the relays send what they have now: the round has its quorum, and will not wait for long."""

    def holds(self, agent: str) -> bool:  # noqa: ARG002 - for overriding methods
        """Return whether the update of an agent is at its site."""
        return False

    def status(self) -> list[SiteStatus]:
        """Return the relays whose sums are taken."""
        return []


class UnusedSites(Sites):
    """Relays that the configuration names, and whose sums would not be enough."""

    def __init__(self, names: Sequence[str], reason: str) -> None:
        """Take the ids of the relays, and why their sums are not taken, for the status."""
        self._names = tuple(names)
        self._reason = reason

    def status(self) -> list[SiteStatus]:
        """Return the relays, with the reason why their sums are not taken."""
        return [SiteStatus(name, "", 0, 0, 0, self._reason) for name in self._names]


class Aggregators:
    """Processes that take updates and read them in place of the coordinator; this class stands for having none."""

    def start(self, federation: str, epoch: int) -> None:
        """Begin to serve, in this epoch of the federation with that id."""

    def heard(self, payload: bytes) -> None:  # noqa: ARG002 - for overriding methods
        """Handle a message of an aggregator.

        Raises:
            MessageError: It is not a message of an aggregator of this coordinator.
        """
        raise MessageError("a message of an aggregator, and this coordinator has none: set [aggregators] partitions")

    def tick(self) -> None:
        """Replace aggregators that are silent."""

    def status(self) -> list[PartitionStatus]:
        """Return who serves each partition."""
        return []

    def partition_of(self, agent: str) -> str:  # noqa: ARG002 - for overriding methods
        """Return the name of the partition whose aggregator takes an agent's update; empty: the coordinator does."""
        return ""

    def announce_collection(self, collection: Collection, about: OfMethod, values: MethodValues) -> None:
        """Tell the aggregators what is collected now."""

    def would_read(self, updates: int) -> bool:  # noqa: ARG002 - for overriding methods
        """Return whether aggregators are online that would read a round of so many updates."""
        return False

    def make(
        self,
        one_pass: Pass[Answer],  # noqa: ARG002 - for overriding methods
        updates: UpdatesOfRound,  # noqa: ARG002 - for overriding methods
    ) -> Generator[str, None, Answer | None]:
        """Yield what is waited for, and return the answer of a pass that aggregators make, each over some updates.

        None is returned where there are no aggregators, and where the answer would depend on how the updates were
        divided. The coordinator then reads all of them.
        """
        yield from ()
        return None
