"""Blobs on their way to this device: from the cache, or chunk by chunk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..errors import ChunkError
from ..wire.chunks import DOWNLOAD_REPORT_EVERY, IDLE_S, BlobCache, Frame, Receiving, transfer_id
from ..wire.messages import BlobRef, Control, Have, Progress, Want

log = logging.getLogger(__name__)


@dataclass
class _Download:
    ref: BlobRef
    receiving: Receiving
    is_listening: bool = False


class Downloads:
    """All downloads under way. A blob is asked for only when its broadcast can be heard."""

    def __init__(
        self,
        cache: BlobCache,
        send: Callable[[Control], None],
        listen: Callable[[str], None],
        unlisten: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._cache, self._send, self._listen, self._unlisten, self._clock = cache, send, listen, unlisten, clock
        self._under_way: dict[int, _Download] = {}

    def fetch(self, refs: Iterable[BlobRef]) -> None:
        """See that these blobs come. For those under way nothing changes: `tick` asks again when they are late."""
        for ref in refs:
            if self._cache.has(ref.digest):
                self._send(Have(digest=ref.digest))
            elif transfer_id(ref.digest) not in self._under_way:
                self._begin(ref)
                self._listen(ref.digest)

    def keep_only(self, refs: Iterable[BlobRef]) -> None:
        """Ask for no other blobs than these any more; what has arrived of the others stays on disk."""
        wanted = {transfer_id(ref.digest) for ref in refs}
        for number in [number for number in self._under_way if number not in wanted]:
            download = self._under_way.pop(number)
            download.receiving.incoming.close()
            self._unlisten(download.ref.digest)

    def has_all(self, refs: Sequence[BlobRef]) -> bool:
        """Whether all of them are in the cache."""
        return all(self._cache.has(ref.digest) for ref in refs)

    def listening(self, filters: Iterable[str]) -> None:
        """The broker has confirmed these filters: ask for the blobs that they stand for."""
        ends = {f.rsplit("/", 1)[-1] for f in filters}
        for download in self._under_way.values():
            if download.ref.digest[:16] in ends:
                download.is_listening = True
                self._ask(download)

    def frame(self, frame: Frame) -> bool:
        """One chunk has come; True when it was the last one of its blob.

        Raises:
            ChunkError: not of a blob under way, or the finished blob has the wrong hash (it is asked for again).
        """
        download = self._under_way.get(frame.transfer)
        if download is None:
            return False  # of a blob that we have, or that others wanted: broadcasts may overshoot
        if download.receiving.add(frame, self._clock()):
            self._finish(download)
            return True
        if download.receiving.report_due(self._clock()):
            self._send(Progress(digest=download.ref.digest, seen=download.receiving.seen))
        return False

    def tick(self) -> None:
        """Report progress, and ask again for what does not come."""
        now = self._clock()
        for download in list(self._under_way.values()):
            if download.receiving.ask_due(now):
                self._ask(download) if download.is_listening else self._listen(download.ref.digest)
            elif download.receiving.report_due(now):
                self._send(Progress(digest=download.ref.digest, seen=download.receiving.seen))

    def due_in(self) -> float:
        """Seconds until `tick` may have something to do."""
        now = self._clock()
        return min((d.receiving.due_in(now) for d in self._under_way.values()), default=IDLE_S)

    def pause(self) -> None:
        """The agent stops: what has arrived stays on disk."""
        for download in self._under_way.values():
            download.receiving.incoming.close()
        self._under_way.clear()

    def _begin(self, ref: BlobRef) -> _Download:
        download = _Download(ref, Receiving(self._cache.receive(ref), self._clock(), DOWNLOAD_REPORT_EVERY))
        self._under_way[transfer_id(ref.digest)] = download
        return download

    def _ask(self, download: _Download) -> None:
        incoming = download.receiving.incoming
        if incoming.chunks.complete:  # everything was on disk from before a restart
            self._finish(download)
            return
        download.receiving.restart(self._clock())
        self._send(Want(digest=download.ref.digest, ranges=incoming.chunks.missing()))

    def _finish(self, download: _Download) -> None:
        ref = download.ref
        del self._under_way[transfer_id(ref.digest)]
        try:
            self._cache.finish(download.receiving.incoming)
        except ChunkError:
            again = self._begin(ref)
            again.is_listening = True
            self._ask(again)
            raise
        self._unlisten(ref.digest)
        self._send(Have(digest=ref.digest))
