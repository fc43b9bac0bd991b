"""The released encoder: which one it is, and how head-tier devices that come later get it."""

from __future__ import annotations

from collections.abc import Callable

from edge_agent.errors import StateError
from edge_agent.wire.chunks import Outgoing
from edge_agent.wire.messages import Command, Install, Who

from .distribute import Distributor
from .journal import Entry, Journal
from .store import StateFolder


def release_number(journal: Journal) -> int:
    """The number of the newest release, counted from 1; 0 before the first."""
    return len(journal.entries(kinds=("release_made",)))


class Releases:
    """Offers the release to agents that lack it."""

    def __init__(self, state: StateFolder, distributor: Distributor, send: Callable[[str, Command], None]) -> None:
        self._state, self._distributor, self._send = state, distributor, send
        self._checked = ""

    def current(self) -> Entry | None:
        """The journal's entry of the newest release; None before the first."""
        releases = self._state.journal.entries(kinds=("release_made",))
        return releases[-1] if releases else None

    def offer(self, agent: str, running: str) -> None:
        """A head-tier device that runs another encoder than the released one gets the released one.

        Raises:
            StateError: the file of the release is missing or damaged; devices keep what they have.
        """
        release = self.current()
        if release is None or release.digest is None or release.body.get("bundle_id") == running:
            return
        blob = self._put_on_offer(release.digest, agent)
        number = release_number(self._state.journal)
        bundle_id = release.body["bundle_id"]
        self._send(agent, Install(run=release.run or "", bundle_id=bundle_id, release=number, blob=blob.ref))

    def offer_again(self, agent: str, digest: str) -> None:
        """An agent asks for something that is not on offer (any more): after a restart, offer a release again."""
        release = self.current()
        if release is not None and release.digest == digest:
            self._put_on_offer(digest, agent)
            self._send(agent, Who())

    def _put_on_offer(self, digest: str, agent: str) -> Outgoing:
        if self._checked != digest:
            try:
                self._state.blobs.check(digest)
            except StateError as error:
                what = "this is the released bundle, and no device can get it"
                raise StateError(f"{error}, or make a new release with a run: {what}") from error
            self._checked = digest
        blob = Outgoing.open(self._state.blobs.path(digest), digest)
        self._distributor.offer(blob, (agent,))
        return blob
