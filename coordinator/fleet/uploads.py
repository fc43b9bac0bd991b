"""Uploads: the updates that agents send are collected and checked.

An update is accepted when its bytes are on disk under their hash, its tensors are exactly those that the method
declares, all of them finite, and the journal says so. Only then does the agent get its receipt. A rejected update costs
itself and nothing else.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_agent.core.errors import ChunkError, TensorsError, UpdateRejected
from edge_agent.core.storage import sync_folder
from edge_agent.wire.blobs import chunks
from edge_agent.wire.blobs.flow import UPLOAD_REPORT_BYTES, WINDOW_BYTES, Receiving
from edge_agent.wire.messages.down import Ack, Grant, Queued, Receipt, UploadUrls
from edge_agent.wire.messages.fields import (
    EXCHANGES,
    MAX_CREDITS,
    OUTSIDE_ROUNDS,
    BlobRef,
    Command,
)
from edge_agent.wire.messages.up import UpdateManifest
from edge_agent.wire.tensors import MAX_HEADER_BYTES
from edge_agent.wire.update_file import read_update

from ..journal.entries import RoundClosed, RoundOpened, UpdateAccepted
from ..journal.store import Journal, facts_of
from ..state.store import BlobStore
from ..views.runs import MAX_REASON_CHARS, Accepted, Rejection, replay
from .collection import Collection
from .rejections import Rejections
from .upload_urls import ArrivedPart, ExpectedUpload, UploadAddress
from .upload_urls import UploadUrls as UploadSite

if TYPE_CHECKING:
    from edge_agent.wire.messages.site_sums import SummedUpdate  # most coordinators have no sites, and memory counts

log = logging.getLogger(__name__)

UPLOAD_FILE = re.compile(r"[0-9a-f]{64}\.(part|chunks)")
"""Names of the files of updates that are arriving: no other file below their folders is ours to remove."""

GRANT_APART_S = 1.0
"""A manifest repeated within this time is a duplicate: a second grant would have all chunks sent twice."""

MIN_CHUNK_BYTES = 1024
"""Chunks below this size are small."""

MAX_SMALL_CHUNKS = 1024
"""The most small chunks of one update: without a limit a peer could cause lists of millions."""

BUDGET_BYTES = 16 << 20
"""The bytes of all updates that may be under way together; a broker keeps them while the coordinator is busy."""

MOST_OPEN_UPLOADS = 64
"""Uploads whose files are open at once; those of others are opened again when a chunk comes."""

LEAST_BUDGET_BYTES = 128 << 10
"""The part of the budget that an upload begins with while the rate of its link is not known."""

LATE_S = 0.05
"""Where messages wait for so long, more uploads at once would only make each one slower, in more and smaller parts."""

LENGTH_BYTES = 8
"""The bytes before the header of a container of tensors, which hold its length."""

COUNT_AGAIN_S = 0.1
"""How long the parts that uploads have of the budget count as computed before."""

QUEUED_AGAIN_S = 30.0
"""After so long an agent in the queue offers its update again, in case the grant was lost."""

LEAST_UPLOAD_S = 0.01
"""Faster uploads count as if they took so long, so that no rate is infinite."""

SILENT_S = 5.0
"""An agent that was granted its upload and sends nothing for so long takes no part of the budget."""

Send = Callable[[str, Command], None]


@dataclass
class _Upload:
    """An update that is being uploaded. Times are of the collector's clock, in seconds."""

    manifest: UpdateManifest
    receiving: Receiving
    granted_at: float = float("-inf")
    heard_at: float = float("-inf")
    """When the upload was granted, or its last chunk came."""

    begun_at: float = 0.0
    received_bytes: int = 0
    counted_bytes: int = 0
    """The upload's part of the budget when that was last computed."""

    is_by_http: bool = False
    """Whether the agent was sent URLs last, and no grant of chunks."""

    def budget_bytes(self, now: float, before: float) -> int:
        """Return the upload's part of the budget.

        Args:
            now: The time.
            before: The rate of the agent's last upload in bytes per second; 0 where it had none.
        """
        if now - self.heard_at > SILENT_S:
            return 0
        return budget_bytes(self.manifest, self.receiving.meter.rate, before, self.received_bytes)


def budget_bytes(update: UpdateManifest, rate: float, before: float, received: int) -> int:
    """Return how many bytes of an update may be under way: what its link takes in two seconds, at most a window.

    While the rate is unknown, the last upload's counts, or three times what has arrived, because senders begin slowly.

    Args:
        update: The update.
        rate: Bytes per second as measured; 0 while that is unknown.
        before: Bytes per second of the agent's last upload; 0 where it had none.
        received: Bytes that have arrived.
    """
    expected = 2 * rate or max(2 * before, 3 * received, LEAST_BUDGET_BYTES)
    return min(WINDOW_BYTES, update.blob.size_bytes, int(expected))


class Collector:
    """All uploads of the open round. One coordinator has one."""

    def __init__(
        self,
        blobs: BlobStore,
        journal: Journal,
        send: Send,
        clock: Callable[[], float],
        is_stalled: Callable[[], bool] = lambda: False,
        unread_s: Callable[[], float] = lambda: 0.0,
        partial: Path | None = None,
        site: UploadSite | None = None,
    ) -> None:
        """Begin without uploads.

        Args:
            blobs: Where accepted updates are stored.
            journal: Where they are noted.
            send: Sends a command to an agent.
            clock: The time in seconds, which only goes forward.
            is_stalled: Returns whether the run under way cannot open its round for now.
            unread_s: Returns how long the oldest message that has arrived has waited to be handled, in seconds
                (`Transport.unread_s`).
            partial: Folder of updates that are arriving, which no other process may use, on the disk of the blobs;
                None: one in the folder of the blobs.
            site: Where agents put large updates by HTTP; None: all come in chunks.
        """
        self.blobs = blobs
        """Where accepted updates are stored."""

        self._partial = blobs.folder / "partial" if partial is None else partial
        self._journal = journal
        self._send = send
        self._clock = clock
        self._is_stalled = is_stalled
        self._unread_s = unread_s
        self._site = site
        self._by_http: set[str] = set()
        """Agents whose hello says that they can send updates by HTTP."""

        self._in_chunks: set[str] = set()
        """Agents whose update of the open round comes in chunks, because another way was of no use."""

        self.http_bytes = 0
        """What has come of updates by HTTP since the start."""

        self._uploads: dict[str, _Upload] = {}
        self._judged: dict[str, _Upload] = {}
        """Updates that are complete, and wait for their `Judge`."""

        self._queue: dict[str, UpdateManifest] = {}
        """Updates that wait for their turn, in the order in which they were announced."""

        self._open_files: OrderedDict[str, Receiving] = OrderedDict()
        """Agents whose uploads have an open file, and what they upload; the one that was heard last comes last."""

        self._unacknowledged: set[str] = set()
        """Agents whose chunks are acknowledged at the next `tick`, once for all that have come until then."""

        self._rates: dict[str, float] = {}
        """Bytes per second of each agent's last upload."""

        self._counted_at = float("-inf")
        """When the parts of all uploads were last computed."""

        self._counted_bytes = 0
        """What all uploads have of the budget: their ``counted_bytes``."""

        self.open_round: Collection | None = None
        self.bytes_from: dict[str, int] = {}
        self.rejected = Rejections(clock)
        """Refused updates since the start, by ``agent: reason``."""

    def open(self, collection: Collection) -> None:
        """Accept updates for this round from now on; uploads that are not of it are removed."""
        self.open_round = collection
        self._in_chunks.clear()
        for agent in [a for a, upload in self._uploads.items() if not collection.awaits(a, upload.manifest)]:
            self._uploads.pop(agent).receiving.incoming.discard()
        self._expect_open_uploads_only()
        self._counted_at = float("-inf")
        self._judged = {a: upload for a, upload in self._judged.items() if collection.awaits(a, upload.manifest)}
        self._queue = {a: message for a, message in self._queue.items() if collection.awaits(a, message)}

    def close(self) -> None:
        """Accept no more updates for the open round; incomplete ones are removed, also those of before a pause."""
        for upload in self._uploads.values():
            upload.receiving.incoming.discard()
        self.pause()
        remove_partial(self._partial)

    def pause(self) -> None:
        """End all uploads, because the coordinator stops or the run is stalled: they stay on disk, to be resumed."""
        for upload in self._uploads.values():
            upload.receiving.incoming.close()
        self._uploads.clear()
        self._expect_open_uploads_only()
        self._counted_at = float("-inf")
        self._judged.clear()
        self._queue.clear()
        self.open_round = None

    def manifest(self, agent: str, message: UpdateManifest) -> None:
        """Grant an update that an agent offers, send its receipt (again), or reject it with the reason.

        While the run is stalled, or prepares to resume in a round that takes the update, or the update is judged, there
        is no answer: the agent keeps its update and offers it again.
        """
        if self.open_round is None and (self._is_stalled() or self._will_be_awaited(agent, message)):
            return
        if agent in self._judged:
            return
        try:
            is_accepted = self._is_accepted(agent, message)
            if not is_accepted:
                self._check_manifest(agent, message)
        except UpdateRejected as rejection:
            self._reject(agent, message, str(rejection))
            return
        if is_accepted:  # the receipt was lost
            self._send(agent, Receipt(run=message.run, digest=message.blob.digest, accepted=True))
        else:
            self._admit(agent, message)

    def stored(self, agent: str, message: UpdateManifest) -> bool:
        """Take an update that an aggregator has checked and stored; return whether it is in the store.

        It counts, and gets its receipt, as one that has arrived here: once, and only in its round.
        """
        try:
            is_accepted = self._is_accepted(agent, message)
            if not is_accepted:
                self._check_manifest(agent, message)
        except UpdateRejected as rejection:
            self._reject(agent, message, str(rejection))
            return True
        if is_accepted:
            self._send(agent, Receipt(run=message.run, digest=message.blob.digest, accepted=True))
            return True
        collection = self.open_round
        if collection is None or message.blob.digest not in self.blobs:
            return False
        self.bytes_from[agent] = self.bytes_from.get(agent, 0) + message.blob.size_bytes
        self.give_up(agent)
        self._note_accepted(agent, message, collection)
        return True

    def summed(self, collection: Collection, members: Sequence[SummedUpdate], digest: str, size_bytes: int) -> None:
        """Take updates of which a sum is in the store: all of them count at once, and get their receipts.

        Args:
            collection: The open round, which awaits each of them.
            members: The updates.
            digest: Digest of the sum.
            size_bytes: Its bytes, of which each agent is charged with the same part.
        """
        share = size_bytes // len(members)
        with self._journal.deferring():
            for member in members:
                fact = UpdateAccepted(samples=member.samples, metrics=member.metrics, summed=member.digest)
                self._journal.append(
                    fact, run=collection.run, round=collection.round, agent=member.agent, digest=digest
                )
        for member in members:
            self.give_up(member.agent)
            self.bytes_from[member.agent] = self.bytes_from.get(member.agent, 0) + share
            accepted = Accepted(member.digest, float(member.samples), dict(member.metrics), digest)
            collection.accepted[member.agent] = accepted
            self._send(member.agent, Receipt(run=collection.run, digest=member.digest, accepted=True))

    def has_sum(self, run: str, number: int, digest: str) -> bool:
        """Return whether updates of a round were accepted as parts of the sum with this digest."""
        collection = self.open_round
        if collection is not None and (collection.run, collection.round) == (run, number):
            return any(update.sum == digest for update in collection.accepted.values())
        entries = self._journal.entries(run, ("update_accepted",), round=number)
        return any(entry.digest == digest for entry in entries)

    def may_open(self, run: str, number: int) -> bool:
        """Return whether no round is open, but this one may be soon: its run is stalled, or resumes in it."""
        if self.open_round is not None:
            return False
        if self._is_stalled():
            return True
        opened = replay(self._journal, run).open_round
        return opened is not None and opened.round == number

    def refused(self, agent: str, message: UpdateManifest, reason: str) -> None:
        """Reject an update that an aggregator has refused, with its reason."""
        self._reject(agent, message, reason)

    def give_up(self, agent: str) -> None:
        """Forget an upload of this agent that is under way here; what is on disk stays, for whoever resumes it."""
        upload = self._uploads.pop(agent, None)
        if upload is not None:
            upload.receiving.incoming.close()
            self._open_files.pop(agent, None)
            self._counted_at = float("-inf")
            self._release(agent)
        self._judged.pop(agent, None)
        self._queue.pop(agent, None)

    def chunk(self, agent: str, frame: chunks.Frame) -> None:
        """Take one chunk; chunks are acknowledged from time to time, and after the last one the update is checked.

        Raises:
            ChunkError: the agent has no upload under way that this belongs to.
        """
        upload = self._uploads.get(agent)
        if upload is None:
            if agent in self._judged:  # the update is complete, and this chunk came twice
                return
            raise ChunkError("no upload was granted")
        # A file that was closed meanwhile is opened again. Where it was removed, that would make another one, without
        # the chunks before, which have been hashed.
        path = upload.receiving.incoming.path
        if agent not in self._open_files and not path.exists():
            self.give_up(agent)
            raise ChunkError(f"{path} was removed while the update was arriving; it begins again with the next offer")
        self.bytes_from[agent] = self.bytes_from.get(agent, 0) + len(frame.data)
        upload.heard_at = self._clock()
        upload.received_bytes += len(frame.data)
        self._keep_open(agent, upload.receiving)
        is_complete = upload.receiving.add(frame, upload.heard_at)
        if is_complete:
            del self._uploads[agent]
            self._release(agent)
            self._open_files.pop(agent, None)
            self._counted_bytes -= upload.counted_bytes
            took_s = max(upload.heard_at - upload.begun_at, LEAST_UPLOAD_S)
            self._rates[agent] = upload.received_bytes / took_s
            self._finish(agent, upload)
            self._admit_next()
        elif upload.is_by_http:  # each request has an answer of its own
            pass
        elif upload.receiving.report_due(self._clock()):
            if self._unread_s() > LATE_S:
                self._unacknowledged.add(agent)
            else:
                self._acknowledge(agent, upload)

    def note_way(self, agent: str, *, by_http: bool) -> None:
        """Note whether an agent can send updates by HTTP, as its hello says."""
        if by_http:
            self._by_http.add(agent)
        else:
            self._by_http.discard(agent)

    def take_arrived(self) -> bool:
        """Take what has come by HTTP, as if it had come over MQTT; return whether anything has.

        It is a bounded number of bytes: where more waits, the next call takes it.
        """
        has_arrived = False
        for part in self._site.take_arrived() if self._site is not None else ():
            has_arrived = True
            self._take_part(part)
        return has_arrived

    def _take_part(self, part: ArrivedPart) -> None:
        """Take one part that has come by HTTP, or have its update sent in chunks where nothing more comes."""
        agent = part.upload.agent
        upload = self._uploads.get(agent)
        # What was under way when the update was complete, or when its round was closed, is of no use.
        if upload is None or self._expected(agent, upload.manifest) != part.upload:
            return
        if part.frame is None:
            log.warning("upload_ended agent=%s next=chunks reason=%s", agent, part.problem)
            self._in_chunks.add(agent)
            upload.granted_at = float("-inf")
            self._grant(agent, upload.manifest)
            return
        self.http_bytes += len(part.frame.data)
        try:
            self.chunk(agent, part.frame)
        except ChunkError as error:  # the disk is full: the agent hears from the next grant what is missing
            log.warning("chunk_refused agent=%s reason=%s", agent, error)

    def is_uploading(self, agent: str) -> bool:
        """Return whether an update of this agent is being uploaded or judged, or waits for its turn."""
        return agent in self._uploads or agent in self._judged or agent in self._queue

    def greet(self, agent: str) -> None:
        """Note that an agent is online (again): it may have lost its grant, and the chunks under way are lost."""
        upload = self._uploads.get(agent)
        if upload is not None:
            upload.granted_at = float("-inf")

    def failed(self, agent: str, rejection: Rejection) -> None:
        """Wait no longer for an agent that could not make an update for the open round."""
        collection = self.open_round
        if collection is None or agent not in collection.outstanding:
            return
        if not rejection.is_by_policy:
            self.rejected.note(f"{agent}: {rejection.reason}")
        self._note_rejection(collection, agent, rejection)

    def tick(self) -> None:
        """Acknowledge what has not been acknowledged for a while, and begin uploads for which there is room now."""
        now = self._clock()
        unacknowledged = self._unacknowledged
        self._unacknowledged = set()
        for agent, upload in self._uploads.items():
            if upload.is_by_http:
                continue
            if upload.receiving.report_due(now) or agent in unacknowledged:
                self._acknowledge(agent, upload)
        self._admit_next()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _will_be_awaited(self, agent: str, message: UpdateManifest) -> bool:
        """Return whether the round in which the run resumes takes the update."""
        if message.purpose not in {"train", "contribute"}:
            return False
        record = replay(self._journal, message.run)
        if record.open_round is not None:
            return record.open_round.asked_in(agent) == message.round
        if record.is_over:
            return False
        # Between two buffered rounds, those who work on are in the entry of the one that has closed.
        closed = self._journal.entries(record.run, ("round_closed",), round=record.round)
        return any(fact.busy.get(agent) == message.round for fact in facts_of(closed, RoundClosed))

    def _is_accepted(self, agent: str, message: UpdateManifest) -> bool:
        """Return whether this very update was accepted before, in the open round or in one that is over.

        Raises:
            UpdateRejected: Another update of the agent was accepted for the same round.
        """
        collection = self.open_round
        if collection is not None and collection.takes(agent, message):
            before = collection.accepted.get(agent)
            if before is not None and before.digest != message.blob.digest:
                raise UpdateRejected(f"an update of {agent} for round {message.round} is already accepted; one counts")
            return before is not None
        entries = self._journal.entries(message.run, ("update_accepted",), round=message.round, agent=agent)
        purpose = _purpose_outside_rounds(message)
        digest = message.blob.digest
        alone = [entry for entry in entries if entry.digest == digest]
        if any(fact.purpose == purpose for fact in facts_of(alone, UpdateAccepted)):
            return True
        return any(fact.summed == digest for fact in facts_of(entries, UpdateAccepted))

    def _check_manifest(self, agent: str, message: UpdateManifest) -> None:
        """Check that the open round takes an announced update: that it is not late, was asked for, and fits in size.

        Raises:
            UpdateRejected: The round does not, or the update cannot be one of the method.
        """
        collection = self.open_round
        if collection is None or not collection.takes(agent, message):
            now = (
                "no round is open now"
                if collection is None
                else f"round {collection.round} of {collection.run} is open"
            )
            raise UpdateRejected(f"late: the update is for round {message.round} of {message.run}; {now}")
        if agent not in collection.cohort:
            raise UpdateRejected(f"{agent} was not asked for an update in round {message.round}")
        if agent in collection.rejected:
            raise UpdateRejected(f"already rejected in round {message.round}: {collection.rejected[agent].reason}")
        if message.samples < 1:
            raise UpdateRejected("trained on 0 samples; an update needs at least 1")
        self._check_sizes(agent, message.blob, collection)

    def _check_sizes(self, agent: str, blob: BlobRef, collection: Collection) -> None:
        """Return quietly where an update has the size of the method's tensors, before anything is allocated for it.

        Raises:
            UpdateRejected: It has another size, or comes in too many small chunks.
        """
        count = chunks.chunk_count(blob)
        if blob.chunk_bytes < MIN_CHUNK_BYTES and count > MAX_SMALL_CHUNKS:
            raise UpdateRejected(
                f"{count} chunks of {blob.chunk_bytes} bytes; expected chunks of {MIN_CHUNK_BYTES} bytes or more"
            )
        content_bytes = sum(spec.nbytes for spec in collection.expects(agent).values())
        if not content_bytes <= blob.size_bytes <= content_bytes + LENGTH_BYTES + MAX_HEADER_BYTES:
            raise UpdateRejected(f"{blob.size_bytes} bytes announced, the method's tensors take {content_bytes}")

    def _admit(self, agent: str, message: UpdateManifest) -> None:
        """Grant an upload, or queue it: what is under way together is bounded."""
        if agent in self._uploads:
            self._grant(agent, message)
            return
        is_queued = agent in self._queue
        if not is_queued and self._has_room(agent, message):
            self._grant(agent, message)
            return
        self._queue[agent] = message
        position = list(self._queue).index(agent) if is_queued else len(self._queue) - 1
        before = position + len(self._uploads)
        digest = message.blob.digest
        self._send(agent, Queued(run=message.run, digest=digest, before=before, again_s=QUEUED_AGAIN_S))

    def _admit_next(self) -> None:
        """Grant uploads to those who have waited longest, as long as there is room."""
        while self._queue:
            agent, message = next(iter(self._queue.items()))
            if not self._has_room(agent, message):
                return
            del self._queue[agent]
            self._grant(agent, message)

    def _has_room(self, agent: str, message: UpdateManifest) -> bool:
        """Return whether this upload may begin beside those under way; a single one always may."""
        if self._uploads and self._unread_s() > LATE_S:
            return False
        more = budget_bytes(message, 0.0, self._rates.get(agent, 0.0), 0)
        if self._clock() - self._counted_at >= COUNT_AGAIN_S:
            self._count_all()
        return self._counted_bytes + more <= BUDGET_BYTES

    def _count_all(self) -> None:
        """Compute the parts of all uploads again: rates change, and some agents fall silent.

        Not for each update, whose cost would grow with the number of those under way.
        """
        now = self._clock()
        self._counted_at = now
        self._counted_bytes = 0
        for agent, upload in self._uploads.items():
            upload.counted_bytes = upload.budget_bytes(now, self._rates.get(agent, 0.0))
            self._counted_bytes += upload.counted_bytes

    def under_way_bytes(self) -> int:
        """Return about how much of all updates may be under way."""
        now = self._clock()
        rates = self._rates
        return sum(upload.budget_bytes(now, rates.get(agent, 0.0)) for agent, upload in self._uploads.items())

    def _grant(self, agent: str, message: UpdateManifest) -> None:
        """Let the agent send the chunks that are missing; a repeated grant is sent once in `GRANT_APART_S`."""
        upload = self._uploads.get(agent)
        if upload is not None and upload.manifest.blob != message.blob:  # it has another update now
            upload.receiving.incoming.discard()
            upload = None
        if upload is None:
            upload = self._begin(agent, message)
        now = self._clock()
        # An agent that has tried one way and asks for another one, is no duplicate.
        if message.way != upload.manifest.way:
            upload.manifest = message
            upload.granted_at = float("-inf")
        # One whose attempt by HTTP was cut announces its update at once, and starts nothing twice.
        is_duplicate = now - upload.granted_at < GRANT_APART_S and not upload.is_by_http
        if is_duplicate:
            return
        upload.granted_at = now
        upload.heard_at = now
        upload.receiving.restart(now)
        if upload.receiving.incoming.chunks.complete:  # everything was here before a restart
            del self._uploads[agent]
            self._counted_at = float("-inf")
            self._release(agent)
            self._finish(agent, upload)
            return
        if self._grant_by_http(agent, upload):
            return
        upload.is_by_http = False
        self._release(agent)
        credit = min(MAX_CREDITS, max(1, WINDOW_BYTES // message.blob.chunk_bytes))
        missing = upload.receiving.missing
        self._send(agent, Grant(run=message.run, digest=message.blob.digest, credits=credit, missing=missing))

    def _grant_by_http(self, agent: str, upload: _Upload) -> bool:
        """Let the agent send its update by HTTP, or get it from where it was put; return False where it cannot."""
        message = upload.manifest
        site = self._site
        if message.way == "chunks":
            self._in_chunks.add(agent)
        may_go = agent in self._by_http and agent not in self._in_chunks
        if site is None or not may_go or message.blob.size_bytes <= site.above_bytes:
            return False
        expected = self._expected(agent, message)
        if message.way == "stored" and site.collect(expected):
            upload.is_by_http = True
            return True
        address = site.expect(expected)
        if address is None:
            return False
        upload.is_by_http = True
        self._send_urls(agent, upload, address)
        return True

    def _send_urls(self, agent: str, upload: _Upload, address: UploadAddress) -> None:
        """Tell the agent where to put what is missing."""
        message = upload.manifest
        self._send(
            agent,
            UploadUrls(
                run=message.run,
                digest=message.blob.digest,
                urls=address.urls,
                whole=address.whole,
                missing=upload.receiving.missing,
            ),
        )

    @staticmethod
    def _expected(agent: str, message: UpdateManifest) -> ExpectedUpload:
        """Return what may come by HTTP of an update that was announced."""
        return ExpectedUpload(agent, message.run, message.round, message.blob)

    def _release(self, agent: str) -> None:
        """Take nothing more of an agent by HTTP."""
        if self._site is not None:
            self._site.release(agent)

    def _expect_open_uploads_only(self) -> None:
        """Take nothing by HTTP but the uploads that are open."""
        if self._site is not None:
            self._site.keep_only(self._uploads)

    def _begin(self, agent: str, message: UpdateManifest) -> _Upload:
        """Begin an upload, with the chunks that have arrived before a restart, and with its part of the budget."""
        now = self._clock()
        incoming = chunks.Incoming(message.blob, self._folder(agent))
        upload = _Upload(message, Receiving(incoming, now, UPLOAD_REPORT_BYTES), begun_at=now)
        self._uploads[agent] = upload
        self._keep_open(agent, upload.receiving)
        upload.counted_bytes = budget_bytes(message, 0.0, self._rates.get(agent, 0.0), 0)
        self._counted_bytes += upload.counted_bytes
        return upload

    def _keep_open(self, agent: str, receiving: Receiving) -> None:
        """Leave the file of this upload open, and close the one that was not written for the longest time."""
        self._open_files[agent] = receiving
        self._open_files.move_to_end(agent)
        if len(self._open_files) > MOST_OPEN_UPLOADS:
            _, longest_idle = self._open_files.popitem(last=False)
            longest_idle.incoming.release_file()

    def _acknowledge(self, agent: str, upload: _Upload) -> None:
        """Tell the agent which chunks are missing."""
        manifest = upload.manifest
        self._send(agent, Ack(run=manifest.run, digest=manifest.blob.digest, missing=upload.receiving.missing))

    def _finish(self, agent: str, upload: _Upload) -> None:
        """Check a complete upload, and accept or reject it, or have its method judge it first."""
        message = upload.manifest
        collection = self.open_round
        digest = message.blob.digest
        arrived = self._folder(agent) / f"{digest}.whole"
        try:
            upload.receiving.incoming.finish(arrived, durable=True)
        except ChunkError as error:
            log.warning("update_damaged agent=%s reason=%s", agent, error)
            self._in_chunks.add(agent)
            self._grant(agent, message)
            return
        if collection is None:
            return
        try:
            _check_tensors(arrived, collection, agent)
        except (UpdateRejected, TensorsError) as rejection:
            arrived.unlink(missing_ok=True)
            self._reject(agent, message, str(rejection))
            return
        if collection.judge is None:
            self._accept(agent, message, collection, arrived)
            return
        self._judged[agent] = upload
        self._acknowledge(agent, upload)  # so that it sends no chunk again meanwhile
        collection.judge(arrived, functools.partial(self._on_judged, agent, upload, arrived))

    def _on_judged(self, agent: str, upload: _Upload, arrived: Path, objection: str | None) -> bool:
        """Accept or reject the update, unless its round was closed, or its agent has failed, meanwhile."""
        collection = self.open_round
        if collection is None or self._judged.get(agent) is not upload:
            return False
        del self._judged[agent]
        if objection == "" and agent in collection.outstanding:
            self._accept(agent, upload.manifest, collection, arrived)
            return True
        arrived.unlink(missing_ok=True)
        if objection:
            self._reject(agent, upload.manifest, objection)
        return True

    def _accept(self, agent: str, message: UpdateManifest, collection: Collection, arrived: Path) -> None:
        """Store the update, then journal it, and only then send its receipt."""
        digest = message.blob.digest
        arrived.replace(self.blobs.path(digest))  # only now is it a blob of the store
        sync_folder(self.blobs.folder)
        self._note_accepted(agent, message, collection)

    def _note_accepted(self, agent: str, message: UpdateManifest, collection: Collection) -> None:
        """Journal an update that is in the store, and only then send its receipt."""
        digest = message.blob.digest
        metrics = {name: value for name, value in message.metrics.items() if value is not None}
        fact = UpdateAccepted(samples=message.samples, metrics=metrics)
        purpose = _purpose_outside_rounds(message)
        if purpose is not None:
            fact = fact.changed(purpose=purpose)
        if message.purpose not in EXCHANGES:  # after a restart a secure sum begins again
            self._journal.append(fact, run=message.run, round=message.round, agent=agent, digest=digest)
        collection.accepted[agent] = Accepted(digest, float(message.samples), metrics)
        self._send(agent, Receipt(run=message.run, digest=digest, accepted=True))

    def _folder(self, agent: str) -> Path:
        return self._partial / agent

    def _reject(self, agent: str, message: UpdateManifest, reason: str) -> None:
        """Tell the agent that its update does not count, and note it where that is of the open round, or was late."""
        times = self.rejected.note(f"{agent}: {reason}")
        level = logging.DEBUG if times is None else logging.WARNING
        log.log(level, "update_refused agent=%s run=%s round=%d reason=%s", agent, message.run, message.round, reason)
        collection = self.open_round
        if collection is None or not collection.takes(agent, message):
            self._note_late(agent, message, reason)
        elif agent in collection.outstanding:
            self._note_rejection(collection, agent, Rejection(reason, boot=message.boot))
        receipt = Receipt(run=message.run, digest=message.blob.digest, accepted=False, reason=reason[:MAX_REASON_CHARS])
        self._send(agent, receipt)

    def _note_late(self, agent: str, message: UpdateManifest, reason: str) -> None:
        """Count an update of a round that is over: once, and only of those who were asked in it."""
        journal = self._journal
        run = message.run
        number = message.round
        # What is no update of a round is not noted, nor that of an earlier attempt at a secure sum, whose agent takes
        # part in the next one.
        is_of_round = message.purpose not in EXCHANGES and _purpose_outside_rounds(message) is None
        is_earlier_attempt = bool(message.session) and self.open_round is not None and number == self.open_round.round
        if not is_of_round or is_earlier_attempt:
            return
        opened = journal.entries(run, ("round_opened",), round=number)
        was_asked = any(agent in fact.cohort for fact in facts_of(opened, RoundOpened))
        is_noted = bool(journal.entries(run, ("update_refused",), round=number, agent=agent))
        if not was_asked or is_noted:
            return
        journal.append(Rejection(reason).to_fact(), run=run, round=number, agent=agent)
        if self.open_round is not None:
            self.open_round.late.append((agent, number))

    def _note_rejection(self, collection: Collection, agent: str, rejection: Rejection) -> None:
        """Journal that an agent has no update in the open round; a secure sum begins again after a restart."""
        if collection.purpose not in EXCHANGES:
            self._journal.append(rejection.to_fact(), run=collection.run, round=collection.round, agent=agent)
        collection.rejected[agent] = rejection


def remove_partial(folder: Path) -> None:
    """Remove the files of updates that were arriving in a folder, by their names."""
    for path in folder.glob("*/*"):
        if UPLOAD_FILE.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _check_tensors(path: Path, collection: Collection, agent: str) -> None:
    """Return quietly where the file holds an update that the collection takes from this agent.

    Raises:
        TensorsError: The file is no container of tensors, or has others than the method declares.
        UpdateRejected: Some are not finite, a variance is below 0, or the method objects.
    """
    tensors = read_update(path, collection.expects(agent))
    objection = collection.objection(tensors)
    if objection:
        raise UpdateRejected(objection)


def _purpose_outside_rounds(message: UpdateManifest) -> str | None:
    """Return the purpose of an update outside the rounds, which the journal notes; None for one of a round."""
    return message.purpose if message.purpose in OUTSIDE_ROUNDS else None
