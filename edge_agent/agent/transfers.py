"""Transfers of an agent: its update, stored in the outbox until its receipt, and the blobs that it downloads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ChunkError, HeadwaterError, StateError
from ..storage import read_json, sha256_file, sha256_of, write_atomic, write_json
from ..task import Tensors
from ..wire.chunks import (
    CHUNK_BYTES,
    DOWNLOAD_REPORT_EVERY,
    IDLE_S,
    BlobCache,
    Frame,
    Outgoing,
    Receiving,
    Sending,
    transfer_id,
)
from ..wire.messages import (
    Ack,
    BlobRef,
    Control,
    Grant,
    Have,
    Progress,
    Purpose,
    Receipt,
    UpdateManifest,
    Want,
    metrics_of,
)

log = logging.getLogger(__name__)

OFFER_AGAIN_S = 5.0
"""Silence after which an update is announced again: the manifest, a grant or the receipt was lost."""


class Outbox:
    """At most one update on disk: the newest. Its file is named by its hash, and the note that names it comes last.

    The worker's thread puts while the loop's thread forgets, so both take a lock, and forgetting names what is meant.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.note = folder, folder / "update.json"
        self._lock = threading.Lock()

    def path_of(self, digest: str) -> Path:
        """Where the tensors of the update with that hash lie."""
        return self.folder / f"update-{digest}.safetensors"

    def put(
        self,
        tensors: Tensors,
        *,
        run: str,
        round_number: int,
        samples: int,
        metrics: dict[str, float],
        purpose: Purpose = "train",
    ) -> UpdateManifest:
        """Keep an update in place of any other; on disk, and safe from a power cut, when this returns.

        Tensors and note are synced once each, the note last: it never names tensors that a power cut took.
        """
        from ..wire.tensors import pieces  # brings numpy, which an idle agent does without

        data = pieces(tensors)
        digest, size = sha256_of(*data), sum(map(len, data))
        blob = BlobRef(digest=digest, size_bytes=size, chunk_bytes=CHUNK_BYTES)
        manifest = UpdateManifest(
            run=run, round=round_number, purpose=purpose, blob=blob, samples=samples, metrics=metrics_of(metrics)
        )
        with self._lock:
            write_atomic(self.path_of(digest), *data)
            write_json(self.note, manifest.model_dump(mode="json"))
            self._remove_all_but(self.path_of(digest))
        return manifest

    def get(self) -> UpdateManifest | None:
        """The update that waits, checked against its hash; a damaged one is dropped (it can be computed again)."""
        with self._lock:
            try:
                manifest = self._noted()
                if manifest is not None and sha256_file(self.path_of(manifest.blob.digest)) != manifest.blob.digest:
                    raise StateError(f"{self.folder}: the update's SHA-256 is not the one that was noted")
            except (HeadwaterError, ValueError, OSError) as error:
                log.warning("outbox_damaged reason=%s", error)
                self.note.unlink(missing_ok=True)
                self._remove_all_but(None)
                return None
            return manifest

    def forget(self, digest: str) -> None:
        """Remove the update with that hash; a newer one stays."""
        with self._lock:
            try:
                noted = self._noted()
            except (HeadwaterError, ValueError):
                noted = None
            if noted is not None and noted.blob.digest == digest:
                self.note.unlink(missing_ok=True)
            self.path_of(digest).unlink(missing_ok=True)

    def _noted(self) -> UpdateManifest | None:
        raw = read_json(self.note)
        return UpdateManifest.model_validate(raw) if raw is not None else None

    def _remove_all_but(self, kept: Path | None) -> None:
        for path in self.folder.glob("update*.safetensors"):
            if path != kept:
                path.unlink(missing_ok=True)


class Uploads:
    """The update in the outbox, if any, and how far it has come."""

    def __init__(
        self,
        outbox: Outbox,
        send: Callable[[Control], None],
        publish: Callable[[bytes], None],
        clock: Callable[[], float],
    ) -> None:
        self._outbox, self._send, self._publish, self._clock = outbox, send, publish, clock
        self._manifest = outbox.get()
        self._sending: Sending | None = None
        self._heard_at = clock()

    def holds(self, run: str, round_number: int, purpose: Purpose = "train") -> bool:
        """Whether the update of that job is waiting here."""
        waits = self._manifest
        return waits is not None and (waits.run, waits.round, waits.purpose) == (run, round_number, purpose)

    def offer(self, manifest: UpdateManifest) -> None:
        """Announce a new update, which lies in the outbox."""
        self._manifest, self._sending = manifest, None
        self.offer_again()

    def offer_again(self) -> None:
        """Announce what waits, if anything does."""
        if self._manifest is not None:
            self._heard_at = self._clock()
            self._send(self._manifest)

    def grant(self, message: Grant) -> None:
        """The coordinator wants these chunks.

        Raises:
            ChunkError: ranges outside the blob.
        """
        if not self._is_ours(message):
            return
        try:
            blob = Outgoing.open(self._outbox.path_of(message.digest), message.digest)
        except StateError as error:
            log.warning("outbox_damaged reason=%s", error)
            self._forget()
            return
        self._heard_at = now = self._clock()
        ahead = message.credits * blob.ref.chunk_bytes
        self._sending = Sending(blob, message.missing, ("coordinator",), ahead_bytes=ahead, now=now)
        self._pump()

    def ack(self, message: Ack) -> None:
        """The coordinator has seen so many frames, and lacks these.

        Raises:
            ChunkError: ranges outside the blob.
        """
        if self._sending is None or not self._is_ours(message):
            return
        self._heard_at = now = self._clock()
        self._sending.saw("coordinator", message.received, now)
        if message.missing:
            self._sending.again(message.missing)
        self._pump()

    def receipt(self, message: Receipt) -> UpdateManifest | None:
        """The coordinator has it, or will never take it: forget it. Returns what has been forgotten."""
        done = self._manifest
        if done is None or not self._is_ours(message):
            return None
        self._forget()
        return done

    def drop(self, run: str, round_number: int, purpose: Purpose = "train") -> None:
        """The round is over: the update would come too late."""
        if self.holds(run, round_number, purpose):
            self._forget()

    def drop_all(self) -> UpdateManifest | None:
        """Forget what waits, whatever it is for; returns it."""
        dropped = self._manifest
        self._forget()
        return dropped

    def tick(self) -> None:
        """Announce again after silence."""
        if self._manifest is not None and self._clock() - self._heard_at >= OFFER_AGAIN_S:
            self.offer_again()

    def _is_ours(self, message: Grant | Ack | Receipt) -> bool:
        """Whether it is about the update that waits: two runs may well have made the same tensors."""
        waits = self._manifest
        return waits is not None and (waits.run, waits.blob.digest) == (message.run, message.digest)

    def _forget(self) -> None:
        if self._manifest is not None:
            self._outbox.forget(self._manifest.blob.digest)
        self._manifest = self._sending = None

    def _pump(self) -> None:
        if self._sending is not None:
            for frame in self._sending.due(self._clock()):
                self._publish(frame)


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
