"""Models on their way to the agents of a site: each is fetched once, and served to all that ask for it.

A blob is requested in the name of one of the agents that need it, as that agent would: from the coordinator's side, it
downloads somewhat more slowly, and the others have the blob already when they are asked. Where that agent leaves, the
transfer continues in the name of another one. What cannot be served from here passes between agent and coordinator.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ..agent.transfers import Downloads
from ..core.errors import ChunkError, StateError, cause
from ..wire.blobs import flow
from ..wire.blobs.chunks import BlobCache, Frame, Outgoing
from ..wire.messages import down, up
from ..wire.messages.fields import BlobRef, Control, Ranges

log = logging.getLogger(__name__)

MOST_REFS = 256
"""The most blobs whose size is remembered, of those that the coordinator has named to agents of the site."""

UNASKED_S = 300.0
"""Seconds after the last request of an agent for a blob, after which it is not fetched any more."""


class Uplink(Protocol):
    """How a relay speaks to the coordinator in the name of its agents."""

    def send_as(self, agent: str, message: Control) -> None:
        """Publish a control message in the name of an agent."""

    def listen(self, digest: str) -> None:
        """Begin to receive the broadcast of a blob."""

    def unlisten(self, digest: str) -> None:
        """Stop receiving the broadcast of a blob."""


class _LinkOfAgent:
    """The link of the downloads in the name of one agent."""

    def __init__(self, agent: str, uplink: Uplink, complete: Callable[[str], None]) -> None:
        """Make a link.

        Args:
            agent: In whose name it speaks.
            uplink: Where.
            complete: Called with the digest of a blob that has arrived.
        """
        self._agent = agent
        self._uplink = uplink
        self._complete = complete

    def send(self, message: Control) -> None:
        """Publish a message; in place of ``have``, which the agent itself will say, that no chunk is missing."""
        if not isinstance(message, up.Have):
            self._uplink.send_as(self._agent, message)
            return
        self._uplink.send_as(self._agent, up.Progress(digest=message.digest, missing=()))
        self._complete(message.digest)

    def listen(self, digest: str) -> None:
        self._uplink.listen(digest)

    def unlisten(self, digest: str) -> None:
        self._uplink.unlisten(digest)


@dataclass
class _Fetch:
    """A blob that is under way to the site."""

    ref: BlobRef
    agent: str
    """The agent in whose name it is requested."""

    waiting: dict[str, Ranges] = field(default_factory=dict)
    """Agent -> the chunks that it has asked for."""

    asked_at: float = 0.0
    """When an agent has asked for it last."""


class SiteBlobs:
    """All blobs that agents of the site ask for."""

    def __init__(
        self, cache: BlobCache, uplink: Uplink, send_frame: Callable[[str, bytes], None], clock: Callable[[], float]
    ) -> None:
        """Begin without requests.

        Args:
            cache: Where blobs are kept.
            uplink: How they are requested.
            send_frame: Sends a frame of chunks to an agent of the site.
            clock: Monotonic seconds.
        """
        self._cache = cache
        self._uplink = uplink
        self._send_frame = send_frame
        self._clock = clock
        self._refs: OrderedDict[str, BlobRef] = OrderedDict()
        self._fetches: dict[str, _Fetch] = {}
        self._downloads: dict[str, Downloads] = {}
        """Agent -> what is fetched in its name."""

        self._blobs: dict[str, Outgoing] = {}
        """Digest -> a blob that is being served, whose hash was checked."""

        self._sendings: dict[tuple[str, str], flow.Sending] = {}
        """Agent and digest -> what is sent to it."""

        self._paces: dict[str, flow.Pace] = {}
        self.served_bytes = 0
        """Bytes of chunks that were sent to agents since the start."""

        self._fetched_before = 0

    @property
    def fetched_bytes(self) -> int:
        """Bytes of chunks that have come from the coordinator since the start."""
        return self._fetched_before + sum(downloads.ways.mqtt_bytes for downloads in self._downloads.values())

    # --- of the agents ---------------------------------------------------------------------------------------------

    def named(self, refs: Iterable[BlobRef]) -> None:
        """Note blobs that the coordinator has named to an agent."""
        for ref in refs:
            self._refs[ref.digest] = ref
            self._refs.move_to_end(ref.digest)
        while len(self._refs) > MOST_REFS:
            self._refs.popitem(last=False)

    def want(self, agent: str, message: up.Want) -> bool:
        """Serve what an agent asks for, now or once it is here; False: the coordinator has to.

        Raises:
            ChunkError: Ranges outside the blob.
        """
        ref = self._refs.get(message.digest)
        if ref is None or ref.size_bytes > self._cache.limit_bytes:
            return False
        try:
            if self._open(ref):
                self._serve(agent, ref.digest, message.ranges)
            else:
                self._wait(agent, ref, message.ranges)
        except OSError as error:
            log.warning("blob_not_kept digest=%s reason=%s", ref.digest[:12], cause(error))
            self._drop(ref.digest)
            return False
        return True

    def progress(self, agent: str, message: up.Progress) -> bool:
        """Note what has arrived at an agent; False: it does not come from here.

        Raises:
            ChunkError: Ranges outside the blob.
        """
        if (agent, message.digest) in self._sendings:
            self._serve(agent, message.digest, message.missing)
            return True
        return message.digest in self._fetches

    def have(self, agent: str, digest: str) -> None:
        """Note that an agent has a blob."""
        sending = self._sendings.pop((agent, digest), None)
        if sending is not None:
            sending.arrived(self._clock())
        fetch = self._fetches.get(digest)
        if fetch is not None:
            fetch.waiting.pop(agent, None)
        if not any(of == digest for _, of in self._sendings):
            self._blobs.pop(digest, None)

    def left(self, agent: str) -> None:
        """Send nothing more to an agent that is offline, and fetch in the name of others what was in its own."""
        self._paces.pop(agent, None)
        for key in [key for key in self._sendings if key[0] == agent]:
            self._sendings.pop(key).cut()
        for fetch in self._fetches.values():
            fetch.waiting.pop(agent, None)
        downloads = self._downloads.pop(agent, None)
        if downloads is None:
            return
        downloads.keep_only(())
        self._fetched_before += downloads.ways.mqtt_bytes
        for digest, fetch in list(self._fetches.items()):
            if fetch.agent == agent:
                self._hand_over(digest, fetch)

    # --- of the coordinator ----------------------------------------------------------------------------------------

    def listen(self, agent: str, message: down.Listen) -> bool:
        """Fetch a blob by broadcast from now on, or alone; False: the agent itself has requested it."""
        fetch = self._fetches.get(message.digest)
        if fetch is None or fetch.agent != agent:
            return False
        self._downloads[agent].listen(message)
        return True

    def frame(self, agent: str, frame: Frame) -> bool:
        """Store chunks that were sent to one agent; False: they are not of a blob that is fetched in its name.

        Raises:
            ChunkError: They cannot be stored, or the blob has the wrong hash; it is requested again.
        """
        downloads = self._downloads.get(agent)
        if downloads is None or not downloads.awaits(frame):
            return False
        downloads.frame(frame)
        return True

    def broadcast_frame(self, frame: Frame) -> None:
        """Store chunks that were broadcast.

        Raises:
            ChunkError: They cannot be stored, or the blob has the wrong hash; it is requested again.
        """
        for downloads in list(self._downloads.values()):
            if downloads.awaits(frame):
                downloads.frame(frame)

    def cut(self) -> None:
        """Note that the relay has a new connection to the coordinator's broker."""
        for downloads in self._downloads.values():
            downloads.cut()

    def listening(self, filters: Iterable[str]) -> None:
        """Request what comes on the topics of these filters, which the coordinator's broker has confirmed."""
        names = tuple(filters)
        for downloads in self._downloads.values():
            downloads.listening(names)

    # --- timers ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Request again what does not arrive, and give up what nobody asks for any more."""
        now = self._clock()
        for downloads in list(self._downloads.values()):
            downloads.tick()
        for digest, fetch in list(self._fetches.items()):
            if not fetch.waiting or now - fetch.asked_at > UNASKED_S:
                self._drop(digest)

    def due_in(self) -> float:
        """Return seconds until `tick` may have something to do."""
        return min((downloads.due_in() for downloads in self._downloads.values()), default=flow.IDLE_S)

    def pause(self) -> None:
        """End all transfers, because the relay stops; what has arrived stays on disk."""
        for downloads in self._downloads.values():
            downloads.pause()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _open(self, ref: BlobRef) -> bool:
        """Return whether a blob is here, undamaged, and ready to be served."""
        if ref.digest in self._blobs:
            return True
        if not self._cache.has(ref.digest):
            return False
        try:
            self._blobs[ref.digest] = Outgoing(ref, self._cache.read(ref.digest))
        except StateError as error:  # it was damaged, and is removed
            log.warning("blob_damaged reason=%s", error)
            return False
        return True

    def _serve(self, agent: str, digest: str, missing: Ranges) -> None:
        """Send an agent chunks that it lacks, as many as its link takes.

        Raises:
            ChunkError: Ranges outside the blob.
        """
        now = self._clock()
        sending = self._sendings.get((agent, digest))
        if sending is None:
            pace = self._paces.setdefault(agent, flow.Pace(flow.AHEAD_BYTES))
            sending = self._sendings[agent, digest] = flow.Sending(self._blobs[digest], pace)
        sending.lacks(missing, now)
        for frame in sending.due(now):
            self.served_bytes += len(frame)
            self._send_frame(agent, frame)

    def _wait(self, agent: str, ref: BlobRef, missing: Ranges) -> None:
        """Have a blob fetched for an agent, in its name unless it is under way already.

        Raises:
            OSError: The disk takes no more.
        """
        fetch = self._fetches.get(ref.digest)
        if fetch is None:
            fetch = self._fetches[ref.digest] = _Fetch(ref, agent)
        fetch.waiting[agent] = missing
        fetch.asked_at = self._clock()
        self._begin(fetch)

    def _begin(self, fetch: _Fetch) -> None:
        """Request a blob in the name of an agent; nothing happens where it is under way."""
        downloads = self._downloads.get(fetch.agent)
        if downloads is None:
            link = _LinkOfAgent(fetch.agent, self._uplink, self._on_complete)
            downloads = self._downloads[fetch.agent] = Downloads(self._cache, link, self._clock)
        downloads.fetch([fetch.ref])

    def _hand_over(self, digest: str, fetch: _Fetch) -> None:
        """Continue a transfer in the name of another agent that waits for it; where none does, it ends."""
        if not fetch.waiting:
            del self._fetches[digest]
            return
        fetch.agent = next(iter(fetch.waiting))
        try:
            self._begin(fetch)
        except OSError as error:
            log.warning("blob_not_kept digest=%s reason=%s", digest[:12], cause(error))
            del self._fetches[digest]

    def _drop(self, digest: str) -> None:
        """Fetch a blob no more; what has arrived stays on disk."""
        fetch = self._fetches.pop(digest, None)
        if fetch is None or fetch.agent not in self._downloads:
            return
        self._downloads[fetch.agent].keep_only(list(self._refs_in_the_name_of(fetch.agent)))

    def _refs_in_the_name_of(self, agent: str) -> Iterator[BlobRef]:
        return (fetch.ref for fetch in self._fetches.values() if fetch.agent == agent)

    def _on_complete(self, digest: str) -> None:
        """Serve a blob that has arrived to all that wait for it."""
        fetch = self._fetches.pop(digest, None)
        if fetch is None:
            return
        log.info("blob_here digest=%s bytes=%d agents=%d", digest[:12], fetch.ref.size_bytes, len(fetch.waiting))
        if not self._open(fetch.ref):
            return
        for agent, missing in fetch.waiting.items():
            try:
                self._serve(agent, digest, missing)
            except ChunkError as error:  # ranges outside the blob, which nobody could check before
                log.warning("request_refused agent=%s reason=%s", agent, error)
