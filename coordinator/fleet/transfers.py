"""Transfers of a coordinator: updates are collected and checked, blobs are distributed.

An update is accepted when its bytes are on disk under their hash, its tensors are exactly those that the method
declares, all of them finite, and the journal says so. Only then does the agent get its receipt. A rejected update costs
itself and nothing else.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high, median_low
from typing import ClassVar

from edge_agent.core.errors import ChunkError, TensorsError, UpdateRejected, cause
from edge_agent.core.storage import mapped, sync_folder
from edge_agent.core.task import Tensors
from edge_agent.methods import Update
from edge_agent.wire.blobs import chunks
from edge_agent.wire.blobs.flow import AHEAD_BYTES, STALL_S, UPLOAD_REPORT_BYTES, WINDOW_BYTES, Pace, Receiving, Sending
from edge_agent.wire.messages.down import Ack, Grant, Listen, Queued, Receipt
from edge_agent.wire.messages.fields import (
    EXCHANGES,
    MAX_CREDITS,
    OUTSIDE_ROUNDS,
    PRIVACY_REFUSED,
    SHARES_WRONG,
    Command,
    Purpose,
    Ranges,
)
from edge_agent.wire.messages.up import Progress, UpdateManifest, Want
from edge_agent.wire.tensors import MAX_HEADER_BYTES, Spec, check_specs, decode, first_non_finite, inspect
from edge_agent.wire.topics import Topics

from ..journal.entries import RoundClosed, RoundOpened, UpdateAccepted, UpdateRefused
from ..journal.sqlite import Journal
from ..journal.store import facts_of
from ..state.store import BlobStore
from ..views.runs import Accepted, replay
from .carousel import Carousel, bits_of
from .registry import Rejections

log = logging.getLogger(__name__)

_UPLOAD_FILE = re.compile(r"[0-9a-f]{64}\.(part|chunks)")
"""Names of the files of updates that are arriving: no other file below their folders is ours to remove."""

GRANT_APART_S = 1.0
"""A manifest repeated within this time is a duplicate: a second grant would have all chunks sent twice."""

MIN_CHUNK_BYTES, MAX_SMALL_CHUNKS = 1024, 1024
"""Smaller chunks than this are accepted up to this number: else a peer could cause lists of millions."""

BUDGET_BYTES = 16 << 20
"""What all updates under way may have under way together; a broker keeps it in memory while the coordinator is busy."""

MOST_OPEN_UPLOADS = 64
"""Uploads whose files are open at once; those of others are opened again when a chunk comes."""

LEAST_BUDGET_BYTES = 128 << 10
LATE_S = 0.05
"""Where messages wait for so long, more uploads at once would only make each one slower, in more and smaller parts."""

COUNT_AGAIN_S = 0.1
"""How long the parts that uploads have of the budget count as computed before."""

QUEUED_AGAIN_S = 30.0
LEAST_UPLOAD_S = 0.01
SILENT_S = 5.0
"""An agent that was granted its upload and sends nothing for so long takes no part of the budget."""

Send = Callable[[str, Command], None]
Judge = Callable[[Path, Callable[[str | None], bool]], None]
"""Calls back with the objection to the update in a file, empty when there is none, None when that is not known.

The answer is whether it was still waited for.
"""


@dataclass
class Collection:
    """What one round has collected so far.

    The quorum is a share of the agents that can still deliver: an agent that is offline for too long, was rejected, or
    is on trial after failures in earlier rounds is not counted unless its update has arrived.
    """

    run: str
    round: int
    cohort: tuple[str, ...]
    expected: Mapping[str, Spec]
    accepted: dict[str, Accepted] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    objection: Callable[[Tensors], str] = lambda _: ""
    """Why tensors of the right form are still not plausible; empty when they are."""

    judge: Judge | None = None
    """Asked beside ``objection``, where the method has its own function for that, in another process."""

    joining: tuple[str, ...] = ()
    """Agents of the cohort that do not train the encoder; they send ``extras`` alone."""

    extras: Mapping[str, Spec] = field(default_factory=dict)
    on_trial: frozenset[str] = frozenset()
    """Agents that failed in earlier rounds: asked, and not counted in the quorum."""

    given_up: dict[str, str] = field(default_factory=dict)
    """Agents that went offline or did not start the job, and which start of each; their updates still count."""

    failed_boots: dict[str, str] = field(default_factory=dict)
    """The start of each agent in ``rejected``, when it failed."""

    left_out: Mapping[str, str] = field(default_factory=dict)
    """Agent -> reason, of those that were online and are not in this round."""

    purpose: Purpose = "train"
    """What its agents are asked to do, except that those in ``joining`` contribute."""

    late: list[tuple[str, int]] = field(default_factory=list)
    """Updates of rounds that are over: (agent, round that it was for)."""

    session: str = ""
    """Attempt at a secure sum that the updates are masked for; empty: none."""

    has_grace_period: ClassVar[bool] = True
    """Whether members that have not delivered get more time once the quorum has."""

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Cohort members that have neither been accepted nor rejected."""
        return tuple(a for a in self.cohort if a not in self.accepted and a not in self.rejected)

    @property
    def training(self) -> tuple[str, ...]:
        """Cohort members that train; all of them where none does."""
        return tuple(agent for agent in self.cohort if agent not in self.joining) or self.cohort

    @property
    def delivered(self) -> int:
        """How many of those that train have delivered: devices that only contribute deliver at once."""
        return sum(agent in self.accepted for agent in self.training)

    def needed(self, share: float, least: int) -> int:
        """How many updates of those that train are a quorum.

        That is ``share`` of them, or, if too few of them can still deliver, ``share`` of these, but then not fewer than
        ``least``. One update is the least in any case.
        """
        uncounted = {*self.given_up, *self.on_trial, *self.rejected}
        counted = [agent for agent in self.training if agent in self.accepted or agent not in uncounted]
        of_all, of_counted = (math.ceil(share * len(agents) - 1e-9) for agents in (self.training, counted))
        return max(1, min(of_all, max(least, of_counted)))

    def has_quorum(self, share: float, least: int) -> bool:
        """Whether as many as are `needed` have delivered."""
        return self.delivered >= self.needed(share, least)

    @property
    def is_hopeless(self) -> bool:
        """Whether every member has failed: with the same seed it would fail the next time, too."""
        return not self.accepted and not self.outstanding

    def expects(self, agent: str) -> Mapping[str, Spec]:
        """The tensors that an update of this agent holds, no more and no less."""
        return self.extras if agent in self.joining else self.expected

    def purpose_of(self, agent: str) -> Purpose:
        """What this agent is asked to do."""
        return "contribute" if agent in self.joining else self.purpose

    def asked_in_round(self, agent: str) -> int:  # noqa: ARG002 - in rounds of another kind agents differ
        """Return the round whose job this agent works on."""
        return self.round

    def takes(self, agent: str, message: UpdateManifest) -> bool:
        """Whether the update was made for this round and purpose."""
        made_for = (message.run, message.round, message.purpose, message.session)
        return made_for == (self.run, self.round, self.purpose_of(agent), self.session)

    def awaits(self, agent: str, message: UpdateManifest) -> bool:
        """Whether the update was made for this round and purpose by an agent that was asked."""
        return agent in self.cohort and self.takes(agent, message)

    def __str__(self) -> str:
        about = f"round {self.round}"
        if self.purpose == "train":
            return about
        return f"{self.purpose.replace('_', ' ')} {'of' if self.purpose in EXCHANGES else 'after'} {about}"


@dataclass
class _Upload:
    manifest: UpdateManifest
    receiving: Receiving
    granted_at: float = float("-inf")
    heard_at: float = float("-inf")
    """When it was granted, or a chunk came."""

    begun_at: float = 0.0
    received_bytes: int = 0
    counted_bytes: int = 0
    """Its part of the budget when that was last computed."""

    def budget_bytes(self, now: float, before: float) -> int:
        """Its part of the budget; ``before``: the rate of the agent's last upload, 0 without one."""
        if now - self.heard_at > SILENT_S:
            return 0
        return budget_bytes(self.manifest, self.receiving.meter.rate, before, self.received_bytes)


def budget_bytes(update: UpdateManifest, rate: float, before: float, received: int) -> int:
    """How much of an update may be under way: what its link takes in two seconds, at most a window.

    While the rate is unknown: as at the last upload, or three times what has arrived, as senders begin slowly.
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
    ) -> None:
        """``is_stalled``: whether the run under way cannot open its round for now.

        ``unread_s``: how long the oldest message that has arrived has waited to be handled (`Transport.unread_s`).
        """
        self._blobs = blobs
        self._journal = journal
        self._send = send
        self._clock = clock
        self._is_stalled = is_stalled
        self._unread_s = unread_s
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
        for agent in [a for a, upload in self._uploads.items() if not collection.awaits(a, upload.manifest)]:
            self._uploads.pop(agent).receiving.incoming.discard()
        self._counted_at = float("-inf")
        self._judged = {a: upload for a, upload in self._judged.items() if collection.awaits(a, upload.manifest)}
        self._queue = {a: message for a, message in self._queue.items() if collection.awaits(a, message)}

    def close(self) -> None:
        """Accept no more updates for the open round; incomplete ones are removed, also those of before a pause."""
        for upload in self._uploads.values():
            upload.receiving.incoming.discard()
        self.pause()
        for path in (self._blobs.folder / "partial").glob("*/*"):
            if _UPLOAD_FILE.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def pause(self) -> None:
        """The coordinator stops, or the run is stalled: incomplete updates stay on disk, to be resumed."""
        for upload in self._uploads.values():
            upload.receiving.incoming.close()
        self._uploads.clear()
        self._counted_at = float("-inf")
        self._judged.clear()
        self._queue.clear()
        self.open_round = None

    def manifest(self, agent: str, message: UpdateManifest) -> None:
        """An agent offers an update; it is granted, receipted (again), or rejected with the reason.

        While the run is stalled, or prepares to resume in a round that takes the update, or the update is judged, there
        is no answer: the agent keeps its update and offers it again.
        """
        if self.open_round is None and (self._is_stalled() or self._will_be_awaited(agent, message)):
            return
        if agent in self._judged:
            return
        try:
            already = self._already_accepted(agent, message)
            if not already:
                self._check_manifest(agent, message)
        except UpdateRejected as rejection:
            self._reject(agent, message, str(rejection))
            return
        if already:
            self._send(agent, Receipt(run=message.run, digest=message.blob.digest, accepted=True))
        else:
            self._admit(agent, message)

    def chunk(self, agent: str, frame: chunks.Frame) -> None:
        """One chunk from an agent; acknowledged from time to time; after the last one the update is checked.

        Raises:
            ChunkError: the agent has no upload under way that this belongs to.
        """
        upload = self._uploads.get(agent)
        if upload is None and agent in self._judged:
            return
        if upload is None:
            raise ChunkError("no upload was granted")
        self.bytes_from[agent] = self.bytes_from.get(agent, 0) + len(frame.data)
        upload.heard_at = self._clock()
        upload.received_bytes += len(frame.data)
        self._keep_open(agent, upload.receiving)
        if upload.receiving.add(frame, upload.heard_at):
            del self._uploads[agent]
            self._open_files.pop(agent, None)
            self._counted_bytes -= upload.counted_bytes
            self._rates[agent] = upload.received_bytes / max(upload.heard_at - upload.begun_at, LEAST_UPLOAD_S)
            self._finish(agent, upload)
            self._admit_next()
        elif upload.receiving.report_due(self._clock()):
            if self._unread_s() > LATE_S:
                self._unacknowledged.add(agent)
            else:
                self._acknowledge(agent, upload)

    def is_uploading(self, agent: str) -> bool:
        """Whether an update of this agent is being uploaded or judged, or waits for its turn."""
        return agent in self._uploads or agent in self._judged or agent in self._queue

    def greet(self, agent: str) -> None:
        """An agent is online (again): it may have lost its grant, and the chunks under way are lost."""
        if upload := self._uploads.get(agent):
            upload.granted_at = float("-inf")

    def failed(self, agent: str, reason: str, boot: str) -> None:
        """An agent, in that start of it, could not make an update for the open round: it is not waited for."""
        collection = self.open_round
        if collection is not None and agent in collection.outstanding:
            if not is_by_policy(reason):
                self.rejected.note(f"{agent}: {reason}")
            self._note_rejection(collection, agent, reason, boot)

    def tick(self) -> None:
        """Acknowledge what has not been acknowledged for a while, and begin uploads for which there is room now."""
        now = self._clock()
        unacknowledged = self._unacknowledged
        self._unacknowledged = set()
        for agent, upload in self._uploads.items():
            if upload.receiving.report_due(now) or agent in unacknowledged:
                self._acknowledge(agent, upload)
        self._admit_next()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _will_be_awaited(self, agent: str, message: UpdateManifest) -> bool:
        """Whether the round in which the run resumes takes the update."""
        if message.purpose not in {"train", "contribute"}:
            return False
        record = replay(self._journal, message.run)
        if record.open_round is not None:
            return record.open_round.asked_in(agent) == message.round
        closed = () if record.is_over else self._journal.entries(record.run, ("round_closed",), round=record.round)
        return any(fact.busy.get(agent) == message.round for fact in facts_of(closed, RoundClosed))

    def _already_accepted(self, agent: str, message: UpdateManifest) -> bool:
        collection = self.open_round
        if collection is not None and collection.takes(agent, message):
            known = collection.accepted.get(agent)
            if known is not None and known.digest != message.blob.digest:
                raise UpdateRejected(f"an update of {agent} for round {message.round} is already accepted; one counts")
            return known is not None
        kinds = ("update_accepted",)
        entries = self._journal.entries(message.run, kinds, round=message.round, agent=agent)
        same = [entry for entry in entries if entry.digest == message.blob.digest]
        return any(fact.purpose == _noted(message) for fact in facts_of(same, UpdateAccepted))

    def _check_manifest(self, agent: str, message: UpdateManifest) -> None:
        collection = self.open_round
        if collection is None or not collection.takes(agent, message):
            now = f"round {collection.round} of {collection.run}" if collection else "no round"
            raise UpdateRejected(f"late: the update is for round {message.round} of {message.run}, open is {now}")
        if agent not in collection.cohort:
            raise UpdateRejected(f"{agent} was not asked for an update in round {message.round}")
        if agent in collection.rejected:
            raise UpdateRejected(f"already rejected in round {message.round}: {collection.rejected[agent]}")
        if message.samples < 1:
            raise UpdateRejected("trained on 0 samples; an update needs at least 1")
        if message.blob.chunk_bytes < MIN_CHUNK_BYTES and chunks.chunk_count(message.blob) > MAX_SMALL_CHUNKS:
            raise UpdateRejected(
                f"{chunks.chunk_count(message.blob)} chunks of {message.blob.chunk_bytes} bytes; "
                f"expected chunks of {MIN_CHUNK_BYTES} bytes or more"
            )
        content = sum(spec.nbytes for spec in collection.expects(agent).values())
        if not content <= message.blob.size_bytes <= content + 8 + MAX_HEADER_BYTES:
            raise UpdateRejected(f"{message.blob.size_bytes} bytes announced, the method's tensors take {content}")

    def _admit(self, agent: str, message: UpdateManifest) -> None:
        """Grant an upload, or queue it: what is under way together is bounded."""
        if agent not in self._uploads and (agent in self._queue or not self._has_room(agent, message)):
            is_new = agent not in self._queue
            self._queue[agent] = message
            position = len(self._queue) - 1 if is_new else list(self._queue).index(agent)
            before = position + len(self._uploads)
            digest = message.blob.digest
            self._send(agent, Queued(run=message.run, digest=digest, before=before, again_s=QUEUED_AGAIN_S))
        else:
            self._grant(agent, message)

    def _admit_next(self) -> None:
        """Grant uploads to those who have waited longest, as long as there is room."""
        while self._queue and self._has_room(*next(iter(self._queue.items()))):
            agent = next(iter(self._queue))
            self._grant(agent, self._queue.pop(agent))

    def _has_room(self, agent: str, message: UpdateManifest) -> bool:
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
        """About how much of all updates may be under way."""
        now = self._clock()
        rates = self._rates
        return sum(upload.budget_bytes(now, rates.get(agent, 0.0)) for agent, upload in self._uploads.items())

    def _grant(self, agent: str, message: UpdateManifest) -> None:
        upload = self._uploads.get(agent)
        if upload is None or upload.manifest.blob != message.blob:
            if upload is not None:
                upload.receiving.incoming.discard()
            incoming = chunks.Incoming(message.blob, self._folder(agent))
            upload = self._uploads[agent] = _Upload(message, Receiving(incoming, self._clock(), UPLOAD_REPORT_BYTES))
            upload.begun_at = self._clock()
            self._keep_open(agent, upload.receiving)
            upload.counted_bytes = budget_bytes(message, 0.0, self._rates.get(agent, 0.0), 0)
            self._counted_bytes += upload.counted_bytes
        if self._clock() - upload.granted_at < GRANT_APART_S:
            return
        upload.granted_at = upload.heard_at = self._clock()
        upload.receiving.restart(upload.granted_at)
        if upload.receiving.incoming.chunks.complete:  # everything was here before a restart
            del self._uploads[agent]
            self._counted_at = float("-inf")
            self._finish(agent, upload)
            return
        credit = min(MAX_CREDITS, max(1, WINDOW_BYTES // message.blob.chunk_bytes))
        missing = upload.receiving.missing
        self._send(agent, Grant(run=message.run, digest=message.blob.digest, credits=credit, missing=missing))

    def _keep_open(self, agent: str, receiving: Receiving) -> None:
        """Leave the file of this upload open, and close the one that was not written for the longest time."""
        self._open_files[agent] = receiving
        self._open_files.move_to_end(agent)
        if len(self._open_files) > MOST_OPEN_UPLOADS:
            _, longest_idle = self._open_files.popitem(last=False)
            longest_idle.incoming.release_file()

    def _acknowledge(self, agent: str, upload: _Upload) -> None:
        run = upload.manifest.run
        digest = upload.manifest.blob.digest
        receiving = upload.receiving
        self._send(agent, Ack(run=run, digest=digest, missing=receiving.missing))

    def _finish(self, agent: str, upload: _Upload) -> None:
        message = upload.manifest
        collection = self.open_round
        digest = message.blob.digest
        arrived = self._folder(agent) / f"{digest}.whole"
        try:
            upload.receiving.incoming.finish(arrived, durable=True)
        except ChunkError as error:
            log.warning("update_damaged agent=%s reason=%s", agent, error)
            self._grant(agent, message)
            return
        if collection is None:
            return
        try:
            data = mapped(arrived)
            specs, _ = inspect(data)
            check_specs(specs, collection.expects(agent))
            tensors = decode(data)
            if (bad := first_non_finite(tensors)) is not None:
                raise UpdateRejected(f"tensor '{bad}' holds NaN or infinity; local training has diverged")
            for name, array in tensors.items():
                if name.endswith(".running_var") and (array < 0).any():
                    raise UpdateRejected(f"tensor '{name}' holds a variance below 0")
            if objection := collection.objection(tensors):
                raise UpdateRejected(objection)
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
        digest = message.blob.digest
        arrived.replace(self._blobs.path(digest))  # only now is it a blob of the store
        sync_folder(self._blobs.folder)
        metrics = {name: value for name, value in message.metrics.items() if value is not None}
        fact = UpdateAccepted(samples=message.samples, metrics=metrics)
        if purpose := _noted(message):
            fact = fact.changed(purpose=purpose)
        if message.purpose not in EXCHANGES:  # after a restart a secure sum begins again
            self._journal.append(fact, run=message.run, round=message.round, agent=agent, digest=digest)
        collection.accepted[agent] = Accepted(digest, float(message.samples), metrics)
        self._send(agent, Receipt(run=message.run, digest=digest, accepted=True))

    def _folder(self, agent: str) -> Path:
        return self._blobs.folder / "partial" / agent

    def _reject(self, agent: str, message: UpdateManifest, reason: str) -> None:
        times = self.rejected.note(f"{agent}: {reason}")
        level = logging.DEBUG if times is None else logging.WARNING
        log.log(level, "update_refused agent=%s run=%s round=%d reason=%s", agent, message.run, message.round, reason)
        collection = self.open_round
        if collection is None or not collection.takes(agent, message):
            self._note_late(agent, message, reason)
        elif agent in collection.outstanding:
            self._note_rejection(collection, agent, reason, message.boot)
        digest = message.blob.digest
        self._send(agent, Receipt(run=message.run, digest=digest, accepted=False, reason=reason[:1000]))

    def _note_late(self, agent: str, message: UpdateManifest, reason: str) -> None:
        """Count an update of a round that is over: once, and only of those who were asked in it."""
        journal = self._journal
        run = message.run
        number = message.round
        if message.session and self.open_round is not None and number == self.open_round.round:
            return  # of an earlier attempt at a secure sum: its agent takes part in this one
        opened = journal.entries(run, ("round_opened",), round=number)
        was_asked = any(agent in fact.cohort for fact in facts_of(opened, RoundOpened))
        if (
            not was_asked
            or message.purpose in EXCHANGES
            or _noted(message)
            or journal.entries(run, ("update_refused",), round=number, agent=agent)
        ):
            return
        journal.append(UpdateRefused(reason=reason[:1000]), run=run, round=number, agent=agent)
        if self.open_round is not None:
            self.open_round.late.append((agent, number))

    def _note_rejection(self, collection: Collection, agent: str, reason: str, boot: str) -> None:
        if collection.purpose not in EXCHANGES:
            fact = UpdateRefused(reason=reason[:1000], boot=boot)
            self._journal.append(fact, run=collection.run, round=collection.round, agent=agent)
        collection.rejected[agent] = reason
        collection.failed_boots[agent] = boot


def _noted(message: UpdateManifest) -> str | None:
    """The purpose of an update outside the rounds, which the journal notes; None for one of a round."""
    return message.purpose if message.purpose in OUTSIDE_ROUNDS else None


def is_by_policy(reason: str) -> bool:
    """Whether an agent has no update because its own ``[privacy]`` does not allow the job: no failure of it."""
    return reason.startswith(f"{PRIVACY_REFUSED}: ")


def accused(reason: str) -> frozenset[str]:
    """Whose shares of a secure sum an agent could not open, where that is why it has no update."""
    if not reason.startswith(f"{SHARES_WRONG}: "):
        return frozenset()
    return frozenset(reason.removeprefix(f"{SHARES_WRONG}: ").partition(":")[0].split(", "))


def reason_of(error: BaseException) -> str:
    """An error as one line for a journal entry or a table."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{cause(error)}"
    return " ".join(f"{type(error).__name__}: {error}".split())


def updates_of(blobs: BlobStore, collection: Collection) -> Iterator[Update]:
    """The accepted updates in the order of agent ids, each mapped from disk only when its turn comes."""
    for agent in sorted(collection.accepted):
        accepted = collection.accepted[agent]
        yield Update(agent, accepted.samples, decode(mapped(blobs.path(accepted.digest))))


GATHER_S = 0.05
"""A blob that several agents need waits for the next one so long, unless all agents with the offer have answered."""

LONGEST_GATHER_S = 2.0
OVERSHOOT = 0.1
"""Share of a blob that an agent may receive by broadcast though it has it."""

SLOW_SHARE, SLOW_SAMPLES = 1 / 8, 4
"""A link below this share of the median rate, measured so often, is too slow for a broadcast with the others."""

FEW_LISTENERS = 8
"""Of so few agents most may have bad links by chance."""


def _is_general(silent: int, listeners: int) -> bool:
    """Return whether so many of the listeners to a broadcast are silent that it is not for their links.

    Broker or machine are slow then. Sent to each of them alone, the blob would be published once for every agent.
    """
    return silent > FEW_LISTENERS and 2 * silent > listeners


LONGEST_JOIN_S = 10.0
"""How long agents may take to listen where most of them take long; the broadcast waits for them."""

FAR_TIMES = 4
"""A round trip of so many times the median, that is long for a broadcast besides, keeps an agent out of it."""

SWEEP_S = 0.5

Publish = Callable[[str, bytes], None]


@dataclass
class _Offer:
    """One blob and the agents that it is offered to."""

    blob: chunks.Outgoing
    carousel: Carousel
    unanswered: set[str] = field(default_factory=set)
    waiting: dict[str, Want] = field(default_factory=dict)
    start_at: float = 0.0
    last_start_at: float = 0.0
    answered_at: float = 0.0
    direct: dict[str, Sending] = field(default_factory=dict)
    held: dict[str, Sending] = field(default_factory=dict)
    """What is under way to agents that wait."""

    apart: set[str] = field(default_factory=set)
    """Agents that were asked not to listen to the broadcast."""

    invited: set[str] = field(default_factory=set)
    """Agents that were asked to listen to it; one that requests the blob for itself again cannot."""

    joining: dict[str, float] = field(default_factory=dict)
    """Those of them that have yet to answer, and when they were asked: they may listen already, over slow links."""

    median_rate: float = 0.0
    """Bytes per second of the links of all who get it, as of the last sweep or start; 0: unknown."""

    median_trip_s: float = 0.0
    """The round trip of those links, likewise; 0: unknown."""

    def sending_to(self, agent: str) -> Sending | None:
        """What is sent to an agent now."""
        return self.direct.get(agent) or self.carousel.listeners.get(agent) or self.held.get(agent)

    def is_open_for(self, agent: str) -> bool:
        """Return whether the agent was offered the blob and has not said that it has it."""
        is_asking = agent in self.unanswered or agent in self.waiting or agent in self.joining
        return is_asking or self.sending_to(agent) is not None

    @property
    def sendings(self) -> tuple[Sending, ...]:
        """What is sent to all agents."""
        return (*self.direct.values(), *self.carousel.listeners.values(), *self.held.values())

    @property
    def is_busy(self) -> bool:
        """Whether anything is to be sent, or waits for others."""
        return bool(self.waiting or self.joining or self.direct or self.carousel.listeners)


class Distributor:
    """All blobs on offer. `pump` does the sending; call it after each event and when it says."""

    def __init__(
        self,
        topics: Topics,
        publish: Publish,
        send: Send,
        clock: Callable[[], float],
        unread_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``unread_s``: how long the oldest message that has arrived has waited to be handled."""
        self._topics = topics
        self._publish = publish
        self._say = send
        self._clock = clock
        self._unread_s = unread_s
        self._offers: dict[str, _Offer] = {}
        self._busy: dict[str, _Offer] = {}
        self._touched: dict[str, _Offer] = {}
        self._sweep_at = 0.0
        self._paces: dict[str, Pace] = {}
        self._listening: set[str] = set()
        """Agents whose last request was one to listen to a broadcast: the next one will be, too."""

        self.bytes_to: dict[str, int] = {}
        self.published_bytes = 0
        """What was published of blobs; a broadcast counts once, however many agents receive it."""

    def offer(self, blob: chunks.Outgoing, agents: Iterable[str]) -> None:
        """These agents may ask for the blob from now on, and are expected to answer."""
        offer = self._offers.setdefault(blob.ref.digest, _Offer(blob, Carousel(blob)))
        offer.unanswered.update(agents)

    def withdraw(self, digests: Iterable[str]) -> None:
        """These blobs are not needed any more."""
        for digest in digests:
            if offer := self._offers.pop(digest, None):
                for sending in offer.sendings:
                    sending.cut()
            self._busy.pop(digest, None)
            self._touched.pop(digest, None)

    def have(self, agent: str, digest: str) -> None:
        """An agent has the blob, from its cache or because it has just received it."""
        if offer := self._offers.get(digest):
            if sending := offer.sending_to(agent):
                sending.arrived(self._clock())
            self._answered(offer, agent)
            self._leave(offer, agent)
            self._touch(offer)

    def want(self, agent: str, message: Want) -> bool:
        """An agent lacks chunks; False when no such blob is on offer.

        Raises:
            ChunkError: ranges outside the blob.
        """
        offer = self._offers.get(message.digest)
        if offer is None:
            return False
        if message.direct and agent in offer.joining:
            return True  # sent before it was asked to listen
        sending = offer.sending_to(agent)
        if sending is not None and agent not in offer.held and (agent in offer.direct) == message.direct:
            self._lacks(offer, sending, message.ranges)
        else:
            chunks.flags_of(message.ranges, offer.blob.count)  # only checks them, before anything is changed
            if sending is not None:  # what is under way to it arrives also when it listens otherwise from now on
                offer.direct.pop(agent, None)
                offer.carousel.leave(agent)
                offer.held[agent] = sending
            offer.waiting[agent] = message
        if message.direct:
            self._listening.discard(agent)
        else:
            self._listening.add(agent)
        offer.joining.pop(agent, None)
        self._answered(offer, agent)
        if not self._pace(agent).is_ready(offer.blob.ref.chunk_bytes):
            self._leave_abandoned(offer, agent)
        self._touch(offer)
        return True

    def waiting_for_blobs(self, agents: Iterable[str]) -> int:
        """Return how many of these agents have yet to say that they have all that they were offered."""
        offers = self._offers.values()
        return sum(any(offer.is_open_for(agent) for offer in offers) for agent in agents)

    def take(self, agent: str, digest: str) -> chunks.Outgoing | None:
        """The blob, for an agent in this process, counted as if it had been sent; None: not on offer."""
        offer = self._offers.get(digest)
        if offer is None:
            return None
        self.have(agent, digest)
        self.bytes_to[agent] = self.bytes_to.get(agent, 0) + offer.blob.wire_bytes
        return offer.blob

    def progress(self, agent: str, message: Progress) -> None:
        """An agent reports what has arrived since it asked.

        Raises:
            ChunkError: ranges outside the blob.
        """
        offer = self._offers.get(message.digest)
        sending = None if offer is None else offer.sending_to(agent)
        if offer is None or sending is None:
            return
        self._lacks(offer, sending, message.missing)
        if agent in offer.carousel.listeners and self._is_slow(agent, offer):
            self._separate(offer, agent)
        self._touch(offer)

    def forget(self, agent: str) -> None:
        """An agent is offline, or has a new connection: nothing waits for it, and its link may be another one."""
        for offer in self._offers.values():
            self._answered(offer, agent)
            self._leave(offer, agent)
            offer.apart.discard(agent)
            offer.invited.discard(agent)
        self._paces.pop(agent, None)
        self._listening.discard(agent)

    def disconnected(self) -> None:
        """The coordinator's own connection is lost, and what was under way with it."""
        for offer in self._busy.values():
            for sending in offer.sendings:
                sending.cut()
            offer.carousel.changed()

    def pump(self) -> float | None:
        """Publish what flow control allows; seconds until it wants to be called again, None when only events matter."""
        now = self._clock()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            self._touched.update(self._busy)
            for offer in self._busy.values():
                self._measure(offer)
        touched = self._touched
        self._touched = {}
        for digest, offer in touched.items():
            if offer.waiting and (not offer.unanswered or now >= self._gathered_at(offer, now)):
                self._start(offer)
            self._send(offer, now)
            if not offer.is_busy:
                self._busy.pop(digest, None)
            elif offer.waiting:
                self._touched[digest] = offer
        due = [offer.start_at for offer in self._touched.values()]
        return max(0.0, min([self._sweep_at, *due]) - now) if self._busy else None

    # --- inside ----------------------------------------------------------------------------------------------------

    def _touch(self, offer: _Offer) -> None:
        digest = offer.blob.ref.digest
        self._touched[digest] = offer
        if offer.is_busy:
            self._busy[digest] = offer

    def _answered(self, offer: _Offer, agent: str) -> None:
        """While answers keep coming, the first of those who wait goes on waiting, up to a limit."""
        now = self._clock()
        offer.unanswered.discard(agent)
        if len(offer.waiting) == 1 and agent in offer.waiting:
            offer.last_start_at = now + LONGEST_GATHER_S
        offer.answered_at, offer.start_at = now, min(now + GATHER_S, offer.last_start_at)

    def _gathered_at(self, offer: _Offer, now: float) -> float:
        """Return when to stop waiting for more requests: as long as the longest of them may take to come."""
        if offer.start_at <= now < offer.last_start_at:
            longest = max((self._request_takes_s(agent) for agent in offer.unanswered), default=0.0)
            offer.start_at = min(max(offer.answered_at + longest, offer.start_at), offer.last_start_at)
        return offer.start_at

    def _request_takes_s(self, agent: str) -> float:
        """Return how long this agent takes to request a blob; 0 where its round trip is not known.

        One that listens to broadcasts subscribes before it asks, which is one round trip more. Without the time for
        that, the blob would be broadcast while it is about to ask: it would arrive, and be sent again as requested.
        """
        pace = self._paces.get(agent)
        if pace is None or not pace.samples:
            return 0.0
        trips = 2 if agent in self._listening else 1
        return trips * pace.round_trip_s

    def _leave(self, offer: _Offer, agent: str) -> None:
        offer.waiting.pop(agent, None)
        offer.joining.pop(agent, None)
        for sending in (offer.direct.pop(agent, None), offer.held.pop(agent, None), offer.carousel.leave(agent)):
            if sending is not None:
                sending.cut()

    def _leave_abandoned(self, wanted: _Offer, agent: str) -> None:
        """Another blob that the agent needs no longer takes no part of its link; if it does, it asks for it again."""
        for offer in self._busy.values():
            sending = offer.sending_to(agent)
            if offer is not wanted and sending is not None and sending.is_abandoned(self._clock()):
                self._leave(offer, agent)

    def _lacks(self, offer: _Offer, sending: Sending, ranges: Ranges) -> None:
        before = sending.need
        sending.lacks(ranges, self._clock())
        if sending.need != before:
            offer.carousel.changed()

    def _start(self, offer: _Offer) -> None:
        """Send to all who wait: by broadcast to those who need the same."""
        self._measure(offer)
        waiting = offer.waiting
        offer.waiting = {}
        others = len(waiting) + len(offer.carousel.listeners) + len(offer.unanswered) - 1
        needs = {agent: bits_of(chunks.flags_of(want.ranges, offer.blob.count)) for agent, want in waiting.items()}
        wanted = offer.carousel.wanted
        for need in needs.values():
            wanted |= need
        for agent, want in waiting.items():
            overshoot = (wanted & ~needs[agent]).bit_count()
            has_most = overshoot > OVERSHOOT * offer.blob.count
            is_unlike = self._is_slow(agent, offer) or self._is_far(agent, offer)
            is_apart = agent in offer.apart or has_most or is_unlike
            if want.direct and (is_apart or not others or agent in offer.invited):
                offer.direct[agent] = self._begin(offer, agent, want)
            elif want.direct:
                self._say(agent, Listen(digest=want.digest, broadcast=True))
                offer.invited.add(agent)
                offer.joining[agent] = self._clock()
                offer.unanswered.add(agent)
            elif is_apart and others:
                offer.apart.discard(agent)  # it asks as a listener: the message to it was lost, so it is sent again
                self._separate(offer, agent)
            else:
                offer.carousel.join(agent, self._begin(offer, agent, want), self._clock())

    def _begin(self, offer: _Offer, agent: str, want: Want) -> Sending:
        sending = offer.held.pop(agent, None) or Sending(offer.blob, self._pace(agent))
        sending.lacks(want.ranges, self._clock())
        return sending

    def _pace(self, agent: str) -> Pace:
        return self._paces.setdefault(agent, Pace(AHEAD_BYTES))

    def _measure(self, offer: _Offer) -> None:
        """Compute the median rate of the offer: not for each message, because all its agents count."""
        agents = {*offer.waiting, *offer.carousel.listeners, *offer.direct}
        paces = [pace for pace in map(self._paces.get, agents) if pace is not None]
        rates = [pace.rate for pace in paces if pace.rate]
        trips_s = [pace.round_trip_s for pace in paces if pace.samples]
        offer.median_rate = median_high(rates) if rates else 0.0
        offer.median_trip_s = median_low(trips_s) if trips_s else 0.0

    def _is_slow(self, agent: str, offer: _Offer) -> bool:
        """Whether the others would have to wait for this agent's link."""
        mine = self._pace(agent)
        return mine.samples >= SLOW_SAMPLES and mine.rate < SLOW_SHARE * offer.median_rate

    def _is_far(self, agent: str, offer: _Offer) -> bool:
        """Return whether the others would get the blob while this agent is still about to listen.

        To be asked, to subscribe, to hear that it has, and to say so takes two round trips. What is broadcast meanwhile
        reaches it, too, and nobody knows: it would get the blob twice.
        """
        mine = self._pace(agent)
        takes_s = 2 * mine.round_trip_s
        return mine.samples > 0 and takes_s >= STALL_S and mine.round_trip_s > FAR_TIMES * offer.median_trip_s

    def _late_to_join(self, offer: _Offer, heard_until: float) -> list[str]:
        """Return the agents that were asked to listen long ago and have not said that they do.

        Where most of those asked are late, it is not their links, and they have more time.
        """
        patience_s = max(STALL_S, 3 * offer.median_trip_s)
        late = [agent for agent, at in offer.joining.items() if heard_until - at >= patience_s]
        if not _is_general(len(late), len(offer.joining) + len(offer.carousel.listeners)):
            return late
        return [agent for agent in late if heard_until - offer.joining[agent] >= LONGEST_JOIN_S]

    def _separate(self, offer: _Offer, agent: str) -> None:
        """Have an agent request the blob for itself."""
        if agent not in offer.apart:
            offer.apart.add(agent)
            self._say(agent, Listen(digest=offer.blob.ref.digest, broadcast=False))

    def _send(self, offer: _Offer, now: float) -> None:
        for agent, sending in offer.direct.items():
            for frame in sending.due(now):
                self._publish(self._topics.down_chunks(agent), frame)
                self.published_bytes += len(frame)
                self.bytes_to[agent] = self.bytes_to.get(agent, 0) + len(frame)
        # What has waited here unread may be the answer of those that seem silent.
        heard_until = now - self._unread_s()
        for agent in self._late_to_join(offer, heard_until):
            del offer.joining[agent]
            self._separate(offer, agent)
        if offer.joining:
            return
        listeners = offer.carousel.listeners
        silent = [agent for agent, sending in listeners.items() if not sending.is_moving(heard_until)]
        if not _is_general(len(silent), len(listeners)):
            for agent in silent:
                self._separate(offer, agent)
        digest = offer.blob.ref.digest
        topic = self._topics.down_chunks(*listeners) if len(listeners) == 1 else self._topics.broadcast(digest)
        for frame in offer.carousel.due(now):
            self._publish(topic, frame)
            self.published_bytes += len(frame)
            for agent in listeners:
                self.bytes_to[agent] = self.bytes_to.get(agent, 0) + len(frame)
