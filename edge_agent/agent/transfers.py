"""Transfers of an agent: its update, stored in the outbox until its receipt, and the blobs that it downloads."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..core.config import AgentConfig, PrivacyConfig
from ..core.errors import ChunkError, HeadwaterError, StateError
from ..core.storage import read_json, sha256_file, sha256_of, write_atomic, write_json
from ..core.task import Tensors
from ..wire.blobs import chunks, flow
from ..wire.messages import codec, down, fields, up
from ..wire.messages.down import job_key
from ..wire.messages.fields import JobKey
from ..wire.topics import Topics
from ..wire.transport import Transport
from .local_state import Membership

if TYPE_CHECKING:
    from ..wire.blobs.by_http import BlobFetcher, Fetch
    from ..wire.blobs.put_by_http import BlobSender, Put

log = logging.getLogger(__name__)

OFFER_AGAIN_S = 5.0
"""Silence after which an update is announced again: the manifest, a grant or the receipt was lost."""


class Link:
    """What an agent sends: messages stamped with its start and federation, and chunks; and what it listens to."""

    def __init__(self, config: AgentConfig, transport: Transport, membership: Membership, boot: str) -> None:
        self.topics = Topics(config.federation)
        self.boot = boot
        self._agent = config.id
        self._transport = transport
        self._membership = membership
        self._seq = 0

    def send(self, message: fields.Control, partition: str = "") -> None:
        """Publish a control message, stamped with the start of this agent and the federation that it follows.

        Args:
            message: The message.
            partition: Whose aggregator gets it; empty: the coordinator does.
        """
        self._publish(self.topics.up(self._agent, partition), message)

    def beat(self, message: up.Heartbeat) -> None:
        """Publish a heartbeat; it may be lost."""
        self._publish(self.topics.heartbeat(self._agent), message, qos=0)

    def send_chunk(self, frame: bytes, partition: str) -> None:
        """Publish one frame of chunks of the update, for the aggregator of a partition or for the coordinator."""
        self._transport.publish(self.topics.up_chunks(self._agent, partition), frame)

    def listen(self, digest: str) -> None:
        """Begin to receive the broadcast of a blob."""
        self._transport.subscribe(self.topics.broadcast(digest))

    def unlisten(self, digest: str) -> None:
        """Stop receiving the broadcast of a blob."""
        self._transport.unsubscribe(self.topics.broadcast(digest))

    def _publish(self, topic: str, message: fields.Control, qos: int = 1) -> None:
        self._seq += 1
        stamp = {"boot": self.boot, "seq": self._seq, "federation": self._membership.federation}
        self._transport.publish(topic, codec.encode(message.model_copy(update=stamp)), qos=qos)


class DownloadLink(Protocol):
    """What `Downloads` say, and to which broadcasts they listen."""

    def send(self, message: fields.Control) -> None:
        """Publish a control message of an agent."""

    def listen(self, digest: str) -> None:
        """Begin to receive the broadcast of a blob."""

    def unlisten(self, digest: str) -> None:
        """Stop receiving the broadcast of a blob."""


def manifest_of(
    data: Sequence[bytes | memoryview], about: JobKey, samples: int, metrics: Mapping[str, float]
) -> up.UpdateManifest:
    """Return the message that announces an update, whose tensors are ``data``."""
    size = sum(memoryview(piece).nbytes for piece in data)
    blob = fields.BlobRef(digest=sha256_of(*data), size_bytes=size, chunk_bytes=chunks.CHUNK_BYTES)
    return up.UpdateManifest(**about._asdict(), blob=blob, samples=samples, metrics=fields.metrics_of(metrics))


_UPDATE_FILE = re.compile(r"update(-[0-9a-f]{64})?\.safetensors")
"""Names of updates in the outbox, also of earlier versions: no other file there is ours to remove."""


class Outbox:
    """At most one update on disk: the newest. Its file is named by its hash, and the note that names it comes last.

    It leaves under the ``policy`` that it was made under, or not at all. The worker's thread puts while the loop's
    thread removes, so both take a lock, and the latter names the update.
    """

    def __init__(self, folder: Path, policy: PrivacyConfig) -> None:
        self.folder = folder
        self.note = folder / "update.json"
        self._policy = policy.model_dump(mode="json")
        self._lock = threading.Lock()

    def path_of(self, digest: str) -> Path:
        """Return the file of the tensors of the update with that hash."""
        return self.folder / f"update-{digest}.safetensors"

    def put(
        self,
        tensors: Tensors,
        about: JobKey,
        samples: int,
        metrics: Mapping[str, float],
        asked: down.Noise | None = None,
    ) -> up.UpdateManifest:
        """Keep an update in place of any other; on disk, and safe from a power cut, when this returns.

        Tensors and note are synced once each, the note last: it never names tensors that a power cut took. ``asked``:
        the differential privacy that its job asked for.
        """
        from ..wire.tensors import pieces  # brings numpy, which an idle agent does without

        data = pieces(tensors)
        manifest = manifest_of(data, about, samples, metrics)
        path = self.path_of(manifest.blob.digest)
        with self._lock:
            write_atomic(path, *data)
            terms = {"policy": self._policy, "asked": _as_json(asked)}
            write_json(self.note, {"manifest": manifest.model_dump(mode="json"), **terms})
            self._remove_all_but(path)
        return manifest

    def get(self) -> up.UpdateManifest | None:
        """Return the update that waits.

        One that is damaged, or was made under another policy, is dropped, and made again.
        """
        with self._lock:
            try:
                note = read_json(self.note)
                manifest = self._manifest(note)
                if note is not None and note.get("policy") != self._policy:
                    raise StateError(f"{self.folder}: [privacy] has changed since the update was made")
                if manifest is not None and sha256_file(self.path_of(manifest.blob.digest)) != manifest.blob.digest:
                    raise StateError(f"{self.folder}: the update's SHA-256 is not the one that was noted")
            except (HeadwaterError, ValueError, OSError) as error:
                log.warning("outbox_dropped reason=%s", error)
                self.note.unlink(missing_ok=True)
                self._remove_all_but(None)
                return None
            return manifest

    def is_as_asked(self, asked: down.Noise | None) -> bool:
        """Return whether the job of the update that waits asked for this differential privacy."""
        with self._lock, contextlib.suppress(HeadwaterError, ValueError):
            note = read_json(self.note)
            return note is not None and note.get("asked") == _as_json(asked)
        return False

    def forget(self, digest: str) -> None:
        """Remove the update with that hash; a newer one stays."""
        with self._lock:
            with contextlib.suppress(HeadwaterError, ValueError):
                noted = self._manifest(read_json(self.note))
                if noted is not None and noted.blob.digest == digest:
                    self.note.unlink(missing_ok=True)
            self.path_of(digest).unlink(missing_ok=True)

    @staticmethod
    def _manifest(note: Mapping[str, Any] | None) -> up.UpdateManifest | None:
        return None if note is None else up.UpdateManifest.model_validate(note.get("manifest"))

    def _remove_all_but(self, kept_path: Path | None) -> None:
        for path in self.folder.glob("update*.safetensors"):
            if path != kept_path and _UPDATE_FILE.fullmatch(path.name):
                path.unlink(missing_ok=True)


def _as_json(asked: down.Noise | None) -> dict[str, float] | None:
    return None if asked is None else asked.model_dump(mode="json")


SETTLED_S = 10.0
"""A broadcast may begin at the rate of a slow link, which leaves it within seconds."""

RATE_VALID_S = 600.0
"""How long a measured rate is taken for that of the next transfer, too."""


ACCURACY = 1.1
"""By how much the rate of the rest of a transfer may exceed the measured one."""


class Budget:
    """The rate of one direction of the link, and whether a transfer can be over in time.

    A transfer of less than some seconds does not tell the rate; it is that of an earlier one then, if it is not old.
    """

    def __init__(self) -> None:
        self._rate = 0.0
        self._noted_at = float("-inf")

    def note(self, rate: float, now: float) -> None:
        """Note the rate of a transfer, in bytes per second; 0: it was too short."""
        if rate:
            self._rate = rate
            self._noted_at = now

    def forget(self) -> None:
        """Forget the rate: the link is a new one."""
        self._noted_at = float("-inf")

    def objection(self, problem: str, size_bytes: int, left_s: float, now: float) -> str:
        """Return why ``size_bytes`` cannot pass within ``left_s`` seconds.

        It is empty where they can, or the rate is unknown.
        """
        is_known = self._rate > 0 and now - self._noted_at <= RATE_VALID_S
        if not is_known or left_s <= 0 or size_bytes <= ACCURACY * self._rate * left_s:
            return ""
        return (
            f"{problem}: {size_bytes / 1e6:.3g} MB are still to come, which take {size_bytes / self._rate:.0f} s at "
            f"the measured {self._rate / 1e3:.3g} kB/s, and the round closes in {left_s:.0f} s; use a faster link "
            "or a smaller model, or raise round.deadline_s"
        )


@dataclass
class TransferWays:
    """What has been moved in one direction since the start, by way, for the status."""

    http_bytes: int = 0
    """Bytes that went by HTTP."""

    mqtt_bytes: int = 0
    """Bytes that went in chunks over MQTT."""

    http_problem: str = ""
    """Why HTTP was of no use last; empty: it was, or was not tried."""

    def to_json(self) -> dict[str, int | str] | None:
        """Return this as JSON; None before the first transfer."""
        if not self.http_bytes and not self.mqtt_bytes:
            return None
        return {"http_bytes": self.http_bytes, "mqtt_bytes": self.mqtt_bytes, "http_problem": self.http_problem}


AFTER_CUT_S = 1.0
"""The seconds between an upload by HTTP that was cut and the next announcement: what has arrived is counted first."""

MOST_VAIN = 1
"""The attempts by HTTP that may follow one which has brought nothing, such as a request to a store that was cut."""


@dataclass
class _Attempts:
    """What attempts to send one update by HTTP have brought."""

    way: Literal["", "chunks", "stored"] = ""
    """What the next announcement says, see `up.UpdateManifest.way`."""

    least_missing: int | None = None
    """The fewest chunks that were missing when an attempt began; None: none has begun."""

    vain: int = 0
    """How many attempts in a row have begun with no fewer missing chunks than one before."""

    def begins(self, missing: int) -> bool:
        """Note that an attempt is to begin, and return whether it may: `MOST_VAIN` in a row have brought nothing.

        Args:
            missing: The chunks that are missing now.
        """
        if self.least_missing is None or missing < self.least_missing:
            self.least_missing = missing
            self.vain = 0
            return True
        self.vain += 1
        return self.vain <= MOST_VAIN


class Uploads:
    """The update in the outbox, if any, and how far it has come.

    Where the coordinator answers its announcement with URLs, it goes there, with ``sender``. An attempt that breaks
    off is followed by another announcement, whose answer says what has arrived; one that has brought nothing more, or
    has reached nobody, by an announcement that asks for the way in chunks.
    """

    def __init__(
        self, outbox: Outbox, link: Link, clock: Callable[[], float], sender: BlobSender | None = None
    ) -> None:
        """Take what an earlier process has left in the outbox; it is offered after the next welcome."""
        self._outbox = outbox
        self._link = link
        self._clock = clock
        self._sender = sender
        self._put: Put | None = None
        """The upload by HTTP that is under way."""

        self._put_chunks = 0
        """How many chunks were missing when it began."""

        self._put_meter = flow.Meter()
        self._put_bytes = 0
        """The bytes of it that were counted."""

        self._attempts = _Attempts()
        self.ways = TransferWays()
        self._manifest = outbox.get()
        self._partition = ""
        """Whose aggregator takes the update, as its job says; empty: the coordinator does."""

        self._sending: flow.Sending | None = None
        self._pace = flow.Pace(flow.WINDOW_BYTES)
        self._budget = Budget()
        self._again_at = clock() + OFFER_AGAIN_S
        self.waits_for = ""
        """What the update waits for; empty where it is under way, or there is none."""

    def holds(self, job: JobKey) -> bool:
        """Return whether the update of that job waits here."""
        return self._manifest is not None and job_key(self._manifest) == job

    def offer(self, manifest: up.UpdateManifest, partition: str = "") -> None:
        """Announce a new update, which is in the outbox, to the aggregator of a partition or to the coordinator."""
        self._stop_sending()
        self._end_put()
        self._attempts = _Attempts()
        self._manifest = manifest
        self.offer_to(partition)

    def offer_to(self, partition: str) -> None:
        """Announce what waits, if anything does, to whom its job names now."""
        self._partition = partition
        self.offer_again()

    def offer_again(self) -> None:
        """Announce what waits, if anything does."""
        if self._manifest is not None:
            self._wait(OFFER_AGAIN_S, "the coordinator's answer to the announcement of its update")
            way = "" if self._partition else self._attempts.way
            self._link.send(self._manifest.model_copy(update={"way": way}), self._partition)

    def cut(self) -> None:
        """Begin with a new connection: what was under way is lost, and the link may be another one."""
        if self._sending is not None:
            self._sending.cut()
        self._pace.restart()
        self._budget.forget()
        # Another network may let HTTP pass. What goes to a store in one request is not begun again for that.
        if self._put is not None and not self._put.whole:
            self._end_put()
        if self._attempts.way == "chunks":
            self._attempts = _Attempts()

    def queued(self, message: down.Queued) -> None:
        """Wait, because the coordinator receives other updates first."""
        if self._is_ours(message):
            self._wait(
                message.again_s, f"the turn of its update: the coordinator receives {message.before} others first"
            )
            log.info("update_queued before=%d run=%s", message.before, fields.run_name(message.run))

    def grant(self, message: down.Grant) -> None:
        """Send the chunks that the coordinator requests, except those that are under way.

        Raises:
            ChunkError: ranges outside the blob.
        """
        if not self._is_ours(message):
            return
        self._end_put()
        # The coordinator did not get it from the store.
        if self._attempts.way == "stored":
            self._attempts = _Attempts(way="chunks")
        if self._sending is None:
            blob = self._open(message.digest)
            if blob is None:
                return
            self._sending = flow.Sending(blob, self._pace)
        self._pace.limit_bytes = min(flow.WINDOW_BYTES, message.credits * self._sending.blob.ref.chunk_bytes)
        self._continue(self._sending, message.missing)

    def upload_urls(self, message: down.UploadUrls) -> None:
        """Send what is missing by HTTP, unless that goes on already, or has turned out to be of no use.

        Raises:
            ChunkError: ranges outside the blob.
        """
        if self._sender is None or not self._is_ours(message):
            return
        # The answer to an earlier announcement may come when an attempt has begun, or when chunks were asked for.
        if self._put is not None or self._attempts.way == "chunks":
            return
        blob = self._open(message.digest)
        if blob is None:
            return
        missing = chunks.flags_of(message.missing, blob.count).count(1)
        if not self._attempts.begins(missing):
            self._ask_for_chunks()
            return
        self._stop_sending()
        self._put = self._sender.begin(blob, message.urls, message.missing, whole=message.whole)
        self._put_chunks = missing
        self._put_meter = flow.Meter()
        self._put_meter.begin(self._clock())
        self._put_bytes = 0
        self._wait(OFFER_AGAIN_S, "")

    def ack(self, message: down.Ack) -> None:
        """Send chunks that are missing; the coordinator has received the others.

        Raises:
            ChunkError: ranges outside the blob.
        """
        if self._sending is not None and self._is_ours(message):
            self._continue(self._sending, message.missing)

    def receipt(self, message: down.Receipt, note: Callable[[up.UpdateManifest], None]) -> up.UpdateManifest | None:
        """Note with ``note`` that the coordinator has the update, or has rejected it, and remove it.

        Return what was removed.
        """
        delivered = self._manifest
        if delivered is None or not self._is_ours(message):
            return None
        if self._sending is not None:
            self._sending.arrived(self._clock())
        if self._put is not None:  # the receipt was faster than the answer of its last request
            self._count_sent(self._put)
            self._note_sent(self._put)
        note(delivered)
        self._forget()
        return delivered

    def drop(self, job: JobKey) -> None:
        """Drop the update of a job whose round is over: it would come too late."""
        if self.holds(job):
            self._forget()

    def drop_all(self) -> up.UpdateManifest | None:
        """Remove the update that waits, whatever it is for; returns it."""
        dropped = self._manifest
        self._forget()
        return dropped

    def pause(self) -> None:
        """Send no more by HTTP, because the agent stops: the update stays in the outbox."""
        self._end_put()

    def objection(self, left_s: float) -> str:
        """Return why what waits cannot be at the coordinator within ``left_s`` seconds.

        It is empty where it can, or none does.
        """
        if self._manifest is None:
            return ""
        size = self._manifest.blob.size_bytes
        now = self._clock()
        if self._sending is not None:
            size = self._sending.remaining_bytes
            self._budget.note(self._sending.meter.rate, now)
        elif self._put is not None:
            size = max(0, self._put_chunks * self._chunk_bytes - self._put_bytes)
            self._budget.note(self._put_meter.rate, now)
        return self._budget.objection("the update cannot arrive in time", size, left_s, now)

    def tick(self) -> None:
        """Look after an upload by HTTP, and announce the update again where its coordinator is silent for long."""
        if self._put is not None:
            self._follow(self._put)
        if self._manifest is not None and self._clock() >= self._again_at:
            self.offer_again()

    @property
    def _chunk_bytes(self) -> int:
        return chunks.CHUNK_BYTES if self._manifest is None else self._manifest.blob.chunk_bytes

    def _is_ours(self, message: down.Grant | down.UploadUrls | down.Queued | down.Ack | down.Receipt) -> bool:
        """Return whether it is about the update that waits: two runs may have made the same tensors."""
        waits = self._manifest
        return waits is not None and (waits.run, waits.blob.digest) == (message.run, message.digest)

    def _wait(self, seconds: float, waits_for: str) -> None:
        self._again_at = self._clock() + seconds
        self.waits_for = waits_for

    def _forget(self) -> None:
        if self._manifest is not None:
            self._outbox.forget(self._manifest.blob.digest)
        self._stop_sending()
        self._end_put()
        self._attempts = _Attempts()
        self._manifest = None
        self.waits_for = ""

    def _open(self, digest: str) -> chunks.Outgoing | None:
        """Return the update in the outbox; None where it is damaged, and was dropped."""
        try:
            return chunks.Outgoing.open(self._outbox.path_of(digest), digest, self._chunk_bytes)
        except StateError as error:
            log.warning("outbox_damaged reason=%s", error)
            self._forget()
            return None

    def _follow(self, put: Put) -> None:
        """Count what an upload by HTTP has sent, and go on when it is over."""
        # In this order: bytes may be sent between the two looks, but none after the end.
        is_over = put.is_over
        self._count_sent(put)
        self._again_at = self._clock() + OFFER_AGAIN_S
        if not is_over:
            return
        self._end_put()
        if put.is_complete:
            self._note_sent(put)
            # The coordinator does not see what a store gets; from its own endpoint it has the update already.
            if put.whole:
                self._attempts.way = "stored"
                self.offer_again()
            else:
                self._wait(OFFER_AGAIN_S, "the receipt of its update")
            return
        self.ways.http_problem = "; ".join(put.problems)
        digest = put.ref.digest[:12]
        log.warning("upload_ended digest=%s sent_bytes=%d reason=%s", digest, put.sent_bytes, self.ways.http_problem)
        if put.sent_bytes:
            self._wait(AFTER_CUT_S, "another attempt: the upload of its update was cut")
        else:
            self._ask_for_chunks()

    def _count_sent(self, put: Put) -> None:
        """Count what was sent since the last look."""
        sent_bytes = put.sent_bytes
        new_bytes = sent_bytes - self._put_bytes
        self._put_meter.add(new_bytes, self._clock())
        self._put_bytes = sent_bytes
        self.ways.http_bytes += new_bytes

    def _note_sent(self, put: Put) -> None:
        """Note that all that was missing has been sent."""
        log.info("update_sent digest=%s bytes=%d by=http host=%s", put.ref.digest[:12], put.sent_bytes, put.host)
        self.ways.http_problem = ""

    def _ask_for_chunks(self) -> None:
        """Announce the update again, to be sent in chunks: HTTP is of no use on this connection."""
        self._attempts = _Attempts(way="chunks")
        self.offer_again()

    def _end_put(self) -> None:
        """Send no more by HTTP, if anything is under way there."""
        if self._put is not None:
            self._budget.note(self._put_meter.rate, self._clock())
            self._put.stop()
        self._put = None

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._budget.note(self._sending.meter.rate, self._clock())
            self._sending.cut()
        self._sending = None

    def _continue(self, sending: flow.Sending, missing: fields.Ranges) -> None:
        now = self._clock()
        self._wait(OFFER_AGAIN_S, "")
        sending.lacks(missing, now)
        for frame in sending.due(now):
            self.ways.mqtt_bytes += len(frame)
            self._link.send_chunk(frame, self._partition)


@dataclass
class _Download:
    ref: fields.BlobRef
    receiving: flow.Receiving
    is_direct: bool
    """Whether the chunks are requested for this agent alone."""

    is_listening: bool = False
    """Whether the broker has confirmed the subscription to the broadcast."""

    listening_at: float = float("-inf")

    fetch: Fetch | None = None
    """The fetch by HTTP that is under way; None: chunks come over MQTT."""

    fetched_bytes: int = 0
    """The bytes that this fetch has brought."""

    fetched_at: float = float("-inf")
    """When this fetch began, or brought bytes last."""

    by_chunks: bool = False
    """Whether URLs were of no use for this blob on this connection, so that chunks are requested."""


FETCH_STALL_S = 15.0
"""The seconds after which a fetch by HTTP that brings nothing is given up.

A server that trickles single bytes never ends by a timeout of the connection. Whole chunks count here: less than one of
5 kB in this time is slower than any link that a round could wait for.
"""


class Downloads:
    """All downloads under way into ``cache``.

    A blob is requested for this agent alone until the coordinator asks it to listen to the broadcast, which it does
    where others need the blob, too, and the link is not much slower than theirs. That holds for one connection.

    Where the coordinator answers with URLs instead, the missing bytes are fetched by HTTP, with ``fetcher``. An attempt
    that ends early but has brought bytes is followed by another request, for fresh URLs; one that has brought none, by
    a request for chunks.
    """

    def __init__(
        self,
        cache: chunks.BlobCache,
        link: DownloadLink,
        clock: Callable[[], float],
        fetcher: BlobFetcher | None = None,
    ) -> None:
        self.cache = cache
        self._link = link
        self.clock = clock
        self._fetcher = fetcher
        self.ways = TransferWays()
        self._listens = False
        self._budget = Budget()
        self._answer_s = 0.0
        """How long the last request of this connection took to be answered; 0: not known."""

        self._under_way: dict[int, _Download] = {}

    def fetch(self, refs: Iterable[fields.BlobRef]) -> None:
        """Get these blobs. For those under way nothing changes: `tick` requests them again when they are late."""
        for ref in refs:
            if self.cache.has(ref.digest):
                self._link.send(up.Have(digest=ref.digest))
            elif chunks.transfer_id(ref.digest) not in self._under_way:
                self._request(self._begin(ref, is_direct=not self._listens))

    def keep_only(self, refs: Iterable[fields.BlobRef]) -> None:
        """Request no other blobs than these any more; what has arrived of the others stays on disk."""
        kept_ids = {chunks.transfer_id(ref.digest) for ref in refs}
        for number in [number for number in self._under_way if number not in kept_ids]:
            download = self._under_way.pop(number)
            self._end_fetch(download)
            download.receiving.incoming.close()
            self._leave(download)

    def has_all(self, refs: Sequence[fields.BlobRef]) -> bool:
        """Return whether all of them are in the cache."""
        return all(self.cache.has(ref.digest) for ref in refs)

    def cut(self) -> None:
        """Begin with a new connection.

        The link may be another, so nothing is requested by broadcast until it is known.
        """
        self._listens = False
        self._answer_s = 0.0
        self._budget.forget()
        for download in self._under_way.values():
            self._leave(download)
            download.is_direct = True
            download.receiving.meter = flow.Meter()
            download.by_chunks = False  # another network may let HTTP pass; a fetch under way goes on by itself

    def listening(self, filters: Iterable[str]) -> None:
        """Request what comes on the topics of these filters, which the broker has confirmed."""
        last_levels = {topic_filter.rsplit("/", 1)[-1] for topic_filter in filters}
        for download in list(self._under_way.values()):
            # Chunks for this agent alone have one topic, those of a broadcast the topic of their blob.
            level = "db" if download.is_direct else download.ref.digest[:16]
            if level in last_levels and download.fetch is None:
                download.is_listening = not download.is_direct
                download.listening_at = self.clock()
                self._ask(download)

    def listen(self, message: down.Listen) -> None:
        """Listen to broadcasts, or stop that, because the coordinator asks for it."""
        self._listens = message.broadcast
        download = self._under_way.get(chunks.transfer_id(message.digest))
        if download is None or download.ref.digest != message.digest:
            return
        if download.is_direct and message.broadcast:
            download.is_direct = False
            download.receiving.meter = flow.Meter()
            self._link.listen(message.digest)
        elif not message.broadcast:
            self._separate(download)

    def located(self, message: down.Located) -> None:
        """Fetch what is missing of a blob from the URLs that the coordinator has answered with."""
        download = self._under_way.get(chunks.transfer_id(message.digest))
        if self._fetcher is None or download is None or download.ref.digest != message.digest:
            return
        # The answer to an earlier request may come when a fetch has begun, or has failed.
        if download.fetch is not None or download.by_chunks:
            return
        self._leave(download)
        download.is_direct = True
        download.fetched_bytes = 0
        download.fetched_at = self.clock()
        download.fetch = self._fetcher.begin(download.ref, message.urls, download.receiving.missing)

    def awaits(self, frame: chunks.Frame) -> bool:
        """Return whether a frame is of a blob that is under way."""
        return frame.transfer in self._under_way

    def frame(self, frame: chunks.Frame) -> bool:
        """Handle one frame; True when it was the last one of its blob.

        Raises:
            ChunkError: not of a blob under way, or the finished blob has the wrong hash (it is requested again).
        """
        download = self._under_way.get(frame.transfer)
        if download is None:
            return False  # of a blob that is here, or for other agents: broadcasts may overshoot
        self.ways.mqtt_bytes += len(frame.data)
        if download.receiving.add(frame, self.clock()):
            self._finish(download)
            return True
        if download.receiving.report_due(self.clock()):
            self._report(download)
        return False

    def objection(self, refs: Sequence[fields.BlobRef], left_s: float) -> str:
        """Return why these blobs cannot all be here within ``left_s`` seconds.

        It is empty where they can, or that is unknown.

        The rate of a broadcast is that of its slowest listener: where it is too low, the blob is requested for this
        agent alone, which shows the rate of its own link.
        """
        now = self.clock()
        missing_bytes = 0
        for download in self._under_way.values():
            if download.ref not in refs:
                continue
            if download.is_direct:
                missing_bytes += download.receiving.missing_bytes
                self._budget.note(download.receiving.meter.rate, now)
            elif self._is_too_slow(download, left_s, now):
                self._separate(download)
        if not missing_bytes:
            return ""
        return self._budget.objection("the model cannot arrive in time", missing_bytes, left_s, now)

    def _is_too_slow(self, download: _Download, left_s: float, now: float) -> bool:
        """Return whether a broadcast that has settled would take longer than ``left_s`` seconds at its rate."""
        has_settled = download.is_listening and now - download.listening_at >= SETTLED_S
        bytes_in_time = download.receiving.meter.rate * left_s
        return has_settled and download.receiving.missing_bytes > bytes_in_time > 0

    def tick(self) -> bool:
        """Report progress, store what was fetched, and request again what does not arrive.

        Returns:
            Whether a fetch by HTTP has brought the last bytes of a blob.
        """
        now = self.clock()
        has_finished = False
        for download in list(self._under_way.values()):
            if download.fetch is not None:
                has_finished |= self._take_fetched(download, download.fetch)
            elif download.receiving.ask_due(now):
                self._request(download)
            elif download.receiving.report_due(now):
                self._report(download)
        return has_finished

    def _take_fetched(self, download: _Download, fetch: Fetch) -> bool:
        """Store the pieces that a fetch has brought; return whether its blob is complete.

        A fetch that is over before the blob is complete, or stands still, is followed by another request.
        """
        for piece in fetch.take_pieces():
            now = self.clock()
            try:
                is_complete = download.receiving.add(piece.as_frame(download.ref), now)
            except ChunkError as error:  # the disk is full
                log.warning("chunk_refused reason=%s", error)
                fetch.problems.append(str(error))
                fetch.stop()
                break
            download.fetched_bytes += len(piece.data)
            download.fetched_at = now
            self.ways.http_bytes += len(piece.data)
            if is_complete:
                return self._finish_fetched(download, fetch)
        is_stalled = self.clock() - download.fetched_at >= FETCH_STALL_S
        if is_stalled:
            fetch.problems.append(f"{fetch.host}: nothing has come for {FETCH_STALL_S:.0f} s")
        if fetch.is_over or fetch.is_stopped or is_stalled:
            self._end_fetch(download)
            self._note_early_end(download, fetch)
            self._ask(download)
        return False

    def _finish_fetched(self, download: _Download, fetch: Fetch) -> bool:
        """Put a blob of which the last bytes came by HTTP into the cache; return False where its bytes were wrong."""
        self._end_fetch(download)
        try:
            self._finish(download)
        except ChunkError as error:  # it is requested again, in chunks
            log.warning("blob_refused host=%s reason=%s", fetch.host, error)
            self.ways.http_problem = f"{fetch.host}: {error}"
            return False
        log.info(
            "blob_fetched digest=%s bytes=%d by=http host=%s fetched_bytes=%d",
            download.ref.digest[:12],
            download.ref.size_bytes,
            fetch.host,
            download.fetched_bytes,
        )
        self.ways.http_problem = ""
        return True

    def _note_early_end(self, download: _Download, fetch: Fetch) -> None:
        """Note why a fetch ended early: after one that has brought nothing, chunks are requested."""
        problem = "; ".join(fetch.problems) or "the server has not sent all that was missing"
        download.by_chunks = not download.fetched_bytes
        log.warning(
            "fetch_ended digest=%s fetched_bytes=%d next=%s reason=%s",
            download.ref.digest[:12],
            download.fetched_bytes,
            "chunks" if download.by_chunks else "http",
            problem,
        )
        if download.by_chunks:
            self.ways.http_problem = problem

    def _end_fetch(self, download: _Download) -> None:
        """Take no more from the fetch of a download, if there is one."""
        if download.fetch is not None:
            download.fetch.stop()
        download.fetch = None

    def due_in(self) -> float:
        """Return seconds until `tick` may have something to do."""
        now = self.clock()
        return min((d.receiving.due_in(now) for d in self._under_way.values()), default=flow.IDLE_S)

    def pause(self) -> None:
        """Close all downloads, because the agent stops: what has arrived stays on disk."""
        for download in self._under_way.values():
            self._end_fetch(download)
            download.receiving.incoming.close()
        self._under_way.clear()

    def _begin(self, ref: fields.BlobRef, *, is_direct: bool) -> _Download:
        receiving = flow.Receiving(self.cache.receive(ref), self.clock(), flow.DOWNLOAD_REPORT_BYTES, self._answer_s)
        download = self._under_way[chunks.transfer_id(ref.digest)] = _Download(ref, receiving, is_direct)
        return download

    def _request(self, download: _Download) -> None:
        if download.is_direct or download.is_listening:
            self._ask(download)
        else:
            self._link.listen(download.ref.digest)

    def _separate(self, download: _Download) -> None:
        """Request a blob for this agent alone."""
        self._leave(download)
        download.is_direct = True
        download.receiving.meter = flow.Meter()
        self._ask(download)

    def _leave(self, download: _Download) -> None:
        if not download.is_direct:
            self._link.unlisten(download.ref.digest)
            download.is_listening = False

    def _report(self, download: _Download) -> None:
        digest = download.ref.digest
        receiving = download.receiving
        self._link.send(up.Progress(digest=digest, missing=receiving.missing))

    def _ask(self, download: _Download) -> None:
        """Request the chunks of a blob that are missing, or finish one of which none is."""
        if download.receiving.incoming.chunks.complete:  # everything was on disk from before a restart
            try:
                self._finish(download)
            except ChunkError as error:  # it is requested again
                log.warning("chunk_refused reason=%s", error)
            return
        download.receiving.restart(self.clock())
        digest = download.ref.digest
        missing = download.receiving.missing
        want = up.Want(digest=digest, ranges=missing, direct=download.is_direct, by_chunks=download.by_chunks)
        self._link.send(want)

    def _finish(self, download: _Download) -> None:
        """Put a blob that is complete into the cache and tell the coordinator.

        Raises:
            ChunkError: the blob has the wrong hash; it is requested again.
        """
        ref = download.ref
        del self._under_way[chunks.transfer_id(ref.digest)]
        try:
            self.cache.finish(download.receiving.incoming)
        except ChunkError:
            restarted = self._begin(ref, is_direct=download.is_direct)
            restarted.is_listening = download.is_listening
            restarted.by_chunks = download.by_chunks or download.fetched_bytes > 0
            self._ask(restarted)
            raise
        if download.is_direct:
            self._budget.note(download.receiving.meter.rate, self.clock())
        self._answer_s = download.receiving.answer_s
        self._leave(download)
        self._link.send(up.Have(digest=ref.digest))
