"""Transfers of an agent: its update, stored in the outbox until its receipt, and the blobs that it downloads."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import AgentConfig
from ..errors import ChunkError, HeadwaterError, StateError
from ..storage import read_json, sha256_file, sha256_of, write_atomic, write_json
from ..task import Tensors
from ..wire import chunks
from ..wire import messages as wire
from ..wire.messages import JobKey, Topics, job_key
from ..wire.transport import Transport
from .local_state import Membership

log = logging.getLogger(__name__)

OFFER_AGAIN_S = 5.0
"""Silence after which an update is announced again: the manifest, a grant or the receipt was lost."""


class Link:
    """What an agent sends: messages stamped with its start and federation, and chunks; and what it listens to."""

    def __init__(self, config: AgentConfig, transport: Transport, membership: Membership, boot: str) -> None:
        self.topics, self.boot = Topics(config.federation), boot
        self._agent, self._transport, self._membership = config.id, transport, membership
        self._seq = 0

    def send(self, message: wire.Control) -> None:
        """Publish a control message."""
        self._publish(self.topics.up(self._agent), message)

    def beat(self, message: wire.Heartbeat) -> None:
        """Publish a heartbeat; it may be lost."""
        self._publish(self.topics.heartbeat(self._agent), message, qos=0)

    def send_chunk(self, frame: bytes) -> None:
        """Publish a chunk."""
        self._transport.publish(self.topics.up_chunks(self._agent), frame)

    def listen(self, digest: str) -> None:
        """Receive the broadcast of a blob."""
        self._transport.subscribe(self.topics.broadcast(digest))

    def unlisten(self, digest: str) -> None:
        """Receive it no longer."""
        self._transport.unsubscribe(self.topics.broadcast(digest))

    def _publish(self, topic: str, message: wire.Control, qos: int = 1) -> None:
        self._seq += 1
        stamp = {"boot": self.boot, "seq": self._seq, "federation": self._membership.federation}
        self._transport.publish(topic, wire.encode(message.model_copy(update=stamp)), qos=qos)


def manifest_of(
    data: Sequence[bytes | memoryview], about: JobKey, samples: int, metrics: Mapping[str, float]
) -> wire.UpdateManifest:
    """The message that announces an update, whose tensors are ``data``."""
    size = sum(memoryview(piece).nbytes for piece in data)
    blob = wire.BlobRef(digest=sha256_of(*data), size_bytes=size, chunk_bytes=chunks.CHUNK_BYTES)
    return wire.UpdateManifest(**about._asdict(), blob=blob, samples=samples, metrics=wire.metrics_of(metrics))


class Outbox:
    """At most one update on disk: the newest. Its file is named by its hash, and the note that names it comes last.

    The worker's thread puts while the loop's thread removes, so both take a lock, and the latter names the update.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.note = folder, folder / "update.json"
        self._lock = threading.Lock()

    def path_of(self, digest: str) -> Path:
        """The file of the tensors of the update with that hash."""
        return self.folder / f"update-{digest}.safetensors"

    def put(self, tensors: Tensors, about: JobKey, samples: int, metrics: Mapping[str, float]) -> wire.UpdateManifest:
        """Keep an update in place of any other; on disk, and safe from a power cut, when this returns.

        Tensors and note are synced once each, the note last: it never names tensors that a power cut took.
        """
        from ..wire.tensors import pieces  # brings numpy, which an idle agent does without

        data = pieces(tensors)
        manifest = manifest_of(data, about, samples, metrics)
        path = self.path_of(manifest.blob.digest)
        with self._lock:
            write_atomic(path, *data)
            write_json(self.note, manifest.model_dump(mode="json"))
            self._remove_all_but(path)
        return manifest

    def get(self) -> wire.UpdateManifest | None:
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
            with contextlib.suppress(HeadwaterError, ValueError):
                noted = self._noted()
                if noted is not None and noted.blob.digest == digest:
                    self.note.unlink(missing_ok=True)
            self.path_of(digest).unlink(missing_ok=True)

    def _noted(self) -> wire.UpdateManifest | None:
        raw = read_json(self.note)
        return wire.UpdateManifest.model_validate(raw) if raw is not None else None

    def _remove_all_but(self, kept: Path | None) -> None:
        for path in self.folder.glob("update*.safetensors"):
            if path != kept:
                path.unlink(missing_ok=True)


class Uploads:
    """The update in the outbox, if any, and how far it has come."""

    def __init__(self, outbox: Outbox, link: Link, clock: Callable[[], float]) -> None:
        self._outbox, self._link, self._clock = outbox, link, clock
        self._manifest = outbox.get()
        self._sending: chunks.Sending | None = None
        self._heard_at = clock()

    def holds(self, job: JobKey) -> bool:
        """Whether the update of that job waits here."""
        return self._manifest is not None and job_key(self._manifest) == job

    def offer(self, manifest: wire.UpdateManifest) -> None:
        """Announce a new update, which is in the outbox."""
        self._manifest, self._sending = manifest, None
        self.offer_again()

    def offer_again(self) -> None:
        """Announce what waits, if anything does."""
        if self._manifest is not None:
            self._heard_at = self._clock()
            self._link.send(self._manifest)

    def grant(self, message: wire.Grant) -> None:
        """Send the chunks that the coordinator requests.

        Raises:
            ChunkError: ranges outside the blob.
        """
        if not self._is_ours(message):
            return
        try:
            blob = chunks.Outgoing.open(self._outbox.path_of(message.digest), message.digest)
        except StateError as error:
            log.warning("outbox_damaged reason=%s", error)
            self._forget()
            return
        self._heard_at = now = self._clock()
        ahead = message.credits * blob.ref.chunk_bytes
        self._sending = chunks.Sending(blob, message.missing, ("coordinator",), ahead_bytes=ahead, now=now)
        self._pump()

    def ack(self, message: wire.Ack) -> None:
        """The coordinator has received so many frames, and some are missing.

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

    def receipt(self, message: wire.Receipt) -> wire.UpdateManifest | None:
        """The coordinator has the update, or has rejected it: remove it. Returns what was removed."""
        done = self._manifest
        if done is None or not self._is_ours(message):
            return None
        self._forget()
        return done

    def drop(self, job: JobKey) -> None:
        """The round is over: the update would come too late."""
        if self.holds(job):
            self._forget()

    def drop_all(self) -> wire.UpdateManifest | None:
        """Remove the update that waits, whatever it is for; returns it."""
        dropped = self._manifest
        self._forget()
        return dropped

    def tick(self) -> None:
        """Announce again after silence."""
        if self._manifest is not None and self._clock() - self._heard_at >= OFFER_AGAIN_S:
            self.offer_again()

    def _is_ours(self, message: wire.Grant | wire.Ack | wire.Receipt) -> bool:
        """Whether it is about the update that waits: two runs may have made the same tensors."""
        waits = self._manifest
        return waits is not None and (waits.run, waits.blob.digest) == (message.run, message.digest)

    def _forget(self) -> None:
        if self._manifest is not None:
            self._outbox.forget(self._manifest.blob.digest)
        self._manifest = self._sending = None

    def _pump(self) -> None:
        if self._sending is not None:
            for frame in self._sending.due(self._clock()):
                self._link.send_chunk(frame)


@dataclass
class _Download:
    ref: wire.BlobRef
    receiving: chunks.Receiving
    is_listening: bool = False


class Downloads:
    """All downloads under way into ``cache``. A blob is requested only when its broadcast is subscribed to."""

    def __init__(self, cache: chunks.BlobCache, link: Link, clock: Callable[[], float]) -> None:
        self.cache, self._link, self._clock = cache, link, clock
        self._under_way: dict[int, _Download] = {}

    def fetch(self, refs: Iterable[wire.BlobRef]) -> None:
        """Get these blobs. For those under way nothing changes: `tick` requests them again when they are late."""
        for ref in refs:
            if self.cache.has(ref.digest):
                self._link.send(wire.Have(digest=ref.digest))
            elif chunks.transfer_id(ref.digest) not in self._under_way:
                self._begin(ref)
                self._link.listen(ref.digest)

    def keep_only(self, refs: Iterable[wire.BlobRef]) -> None:
        """Request no other blobs than these any more; what has arrived of the others stays on disk."""
        wanted = {chunks.transfer_id(ref.digest) for ref in refs}
        for number in [number for number in self._under_way if number not in wanted]:
            download = self._under_way.pop(number)
            download.receiving.incoming.close()
            self._link.unlisten(download.ref.digest)

    def has_all(self, refs: Sequence[wire.BlobRef]) -> bool:
        """Whether all of them are in the cache."""
        return all(self.cache.has(ref.digest) for ref in refs)

    def listening(self, filters: Iterable[str]) -> None:
        """The broker has confirmed these filters: request their blobs."""
        ends = {f.rsplit("/", 1)[-1] for f in filters}
        for download in list(self._under_way.values()):
            if download.ref.digest[:16] in ends:
                download.is_listening = True
                self._ask(download)

    def frame(self, frame: chunks.Frame) -> bool:
        """Handle one chunk; True when it was the last one of its blob.

        Raises:
            ChunkError: not of a blob under way, or the finished blob has the wrong hash (it is requested again).
        """
        download = self._under_way.get(frame.transfer)
        if download is None:
            return False  # of a blob that is here, or for other agents: broadcasts may overshoot
        if download.receiving.add(frame, self._clock()):
            self._finish(download)
            return True
        if download.receiving.report_due(self._clock()):
            self._link.send(wire.Progress(digest=download.ref.digest, seen=download.receiving.seen))
        return False

    def tick(self) -> None:
        """Report progress, and request again what does not arrive."""
        now = self._clock()
        for download in list(self._under_way.values()):
            if download.receiving.ask_due(now):
                self._ask(download) if download.is_listening else self._link.listen(download.ref.digest)
            elif download.receiving.report_due(now):
                self._link.send(wire.Progress(digest=download.ref.digest, seen=download.receiving.seen))

    def due_in(self) -> float:
        """Seconds until `tick` may have something to do."""
        now = self._clock()
        return min((d.receiving.due_in(now) for d in self._under_way.values()), default=chunks.IDLE_S)

    def pause(self) -> None:
        """The agent stops: what has arrived stays on disk."""
        for download in self._under_way.values():
            download.receiving.incoming.close()
        self._under_way.clear()

    def _begin(self, ref: wire.BlobRef) -> _Download:
        download = _Download(
            ref, chunks.Receiving(self.cache.receive(ref), self._clock(), chunks.DOWNLOAD_REPORT_EVERY)
        )
        self._under_way[chunks.transfer_id(ref.digest)] = download
        return download

    def _ask(self, download: _Download) -> None:
        incoming = download.receiving.incoming
        if incoming.chunks.complete:  # everything was on disk from before a restart
            try:
                self._finish(download)
            except ChunkError as error:  # it is requested again
                log.warning("chunk_refused reason=%s", error)
            return
        download.receiving.restart(self._clock())
        self._link.send(wire.Want(digest=download.ref.digest, ranges=incoming.chunks.missing()))

    def _finish(self, download: _Download) -> None:
        ref = download.ref
        del self._under_way[chunks.transfer_id(ref.digest)]
        try:
            self.cache.finish(download.receiving.incoming)
        except ChunkError:
            again = self._begin(ref)
            again.is_listening = True
            self._ask(again)
            raise
        self._link.unlisten(ref.digest)
        self._link.send(wire.Have(digest=ref.digest))
