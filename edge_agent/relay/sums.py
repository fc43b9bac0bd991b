"""Sums of the updates of a site: one upload in place of one for each agent.

Where the coordinator asks for it, the relay takes the updates of its agents, checks and stores them, and sends their
exact sum, which names its members. The result has the bits of single updates, because exact sums have the same bits in
whatever parts they are made (`core.exact_sum`).

An update counts once the coordinator has journaled the sum that it is in, and only then its agent gets a receipt. Until
then the agent keeps it. So nothing is lost with a relay: the agent offers its update again, here or elsewhere. What
comes after the sum, or cannot be part of it, passes to the coordinator as it is.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from ..core.children import Worker
from ..core.errors import ChunkError, HeadwaterError, MessageError, TensorsError, cause
from ..core.storage import mapped, sha256_file, sha256_of, write_atomic
from ..core.weighted_sum import WeightedSum
from ..wire.blobs import flow
from ..wire.blobs.chunks import CHUNK_BYTES, Frame, Incoming, Outgoing, chunk_count
from ..wire.messages.down import Ack, Grant
from ..wire.messages.fields import MAX_CREDITS, BlobRef, Ranges
from ..wire.messages.site_sums import (
    MEMBERS,
    FromSite,
    OpenSite,
    SendSum,
    SiteRound,
    Speak,
    SummedUpdate,
    SumReady,
    SumReceipt,
    members_of,
    members_text,
)
from ..wire.messages.up import UpdateManifest
from ..wire.packed import pack, unpack
from ..wire.tensors import MAX_HEADER_BYTES, Spec, check_specs, decode, first_non_finite, inspect, pieces

log = logging.getLogger(__name__)

LEAST_MEMBERS = 3
"""A sum of fewer updates is larger than they are: it has four times the bytes of an update."""

GATHER_S = 20.0
"""Seconds without another update after which the sum is sent, although agents of the round are missing."""

AGAIN_S = 5.0
"""Seconds without an answer after which a sum is announced again."""

GRANT_APART_S = 1.0
"""A manifest repeated within this time is a duplicate: a second grant would have all chunks sent twice."""

LEAST_CHUNK_BYTES = 1024
"""Chunks below this size are not taken: a peer could cause lists of millions."""

UNHEARD_S = 60.0
"""Seconds without a word of the coordinator about sums after which updates pass one by one: it may take none now."""

LARGEST_SUM_BYTES = 1 << 36
"""The most bytes of an own sum that is read again after a restart."""

_FILE = re.compile(r"[0-9a-f]{64}(\.sum|\.part|\.chunks|\.whole)?")
"""The names of files of updates and sums: no other file of the folder is ours to remove."""


@dataclass
class _Upload:
    """An update on its way to the relay."""

    manifest: UpdateManifest
    receiving: flow.Receiving
    granted_at: float
    heard_at: float
    """When it was offered first, or its last chunk came."""


@dataclass
class _Sum:
    """A sum that the coordinator is to get."""

    ref: BlobRef
    run: str
    round: int
    members: tuple[str, ...]
    sending: flow.Sending | None = None
    said_at: float = float("-inf")


@dataclass
class _Round:
    """The open round, and what has come of it here."""

    asked: SiteRound
    opened_at: float
    specs: Mapping[str, Spec]
    uploads: dict[str, _Upload] = field(default_factory=dict)
    stored: dict[str, UpdateManifest] = field(default_factory=dict)
    """Agent -> its update, which is on disk."""

    passed_on: set[str] = field(default_factory=set)
    """Agents whose updates the coordinator gets one by one."""

    moved_at: float = 0.0
    """When an update was stored last."""

    is_summing: bool = False


class SiteSums:
    """Takes the updates of a site, and sends their sums."""

    def __init__(
        self,
        folder: Path,
        say: Callable[[FromSite], None],
        send_frame: Callable[[bytes], None],
        is_online: Callable[[str], bool],
        worker: Worker,
        clock: Callable[[], float],
    ) -> None:
        """Begin with the sum that an earlier process has left, if there is one.

        Args:
            folder: Where updates and sums are kept; nobody else uses it.
            say: Sends a message to the coordinator.
            send_frame: Sends a frame of chunks of a sum to it.
            is_online: Returns whether an agent of the site is online.
            worker: Adds the updates up.
            clock: Monotonic seconds.
        """
        self._folder = folder
        self._say = say
        self._send_frame = send_frame
        self._is_online = is_online
        self._worker = worker
        self._clock = clock
        self._round: _Round | None = None
        self._pace = flow.Pace(flow.WINDOW_BYTES)
        self._heard_at = clock()
        self._sum = self._restored()
        self.is_told = False
        """Whether the coordinator has said what is to be summed, and has not fallen silent since."""

        self.sums = 0
        """Sums that the coordinator has taken since the start."""

        self.summed = 0
        """Updates in them."""

    @property
    def holds(self) -> tuple[str, ...]:
        """The agents whose updates are here, or on their way here, and not at the coordinator."""
        agents = set(self._sum.members) if self._sum is not None else set[str]()
        if self._round is not None:
            agents |= self._round.stored.keys() | self._round.uploads.keys()
        return tuple(sorted(agents))

    @property
    def holds_any(self) -> bool:
        """Whether there is anything here for which the coordinator has to answer."""
        return self._sum is not None or self._round is not None

    # --- of the coordinator ----------------------------------------------------------------------------------------

    def heard(self) -> None:
        """Note that the coordinator has spoken about sums: it takes them."""
        self._heard_at = self._clock()

    def opened(self, message: OpenSite) -> None:
        """Take updates of another round from now on, or of none."""
        self.is_told = True
        asked = message.round
        before = self._round
        if asked is None:
            self._end_round()
            self._remove_unused()
            return
        is_same = before is not None and (before.asked.run, before.asked.round) == (asked.run, asked.round)
        if before is not None and is_same:
            before.asked = asked
            return
        if before is not None:
            self._end_round()
        now = self._clock()
        specs = {name: Spec(np.dtype(dtype), tuple(shape)) for name, (dtype, shape) in asked.update.items()}
        self._round = _Round(asked, now, specs, moved_at=now)
        # A sum of an earlier round is of no use any more.
        if self._sum is not None and (self._sum.run, self._sum.round) != (asked.run, asked.round):
            self._sum = None
        log.info("round_taken run=%s round=%d agents=%d", asked.run, asked.round, len(asked.agents))

    def send(self, message: SendSum) -> None:
        """Send the chunks of the sum that the coordinator lacks.

        Raises:
            ChunkError: Ranges outside the sum.
        """
        ready = self._sum
        if ready is None or ready.ref.digest != message.digest:
            return
        now = self._clock()
        ready.said_at = now
        if ready.sending is None:
            blob = Outgoing.open(self._sum_path(ready.ref.digest), ready.ref.digest, ready.ref.chunk_bytes)
            ready.sending = flow.Sending(blob, self._pace)
        ready.sending.lacks(message.missing, now)
        for frame in ready.sending.due(now):
            self._send_frame(frame)

    def receipt(self, message: SumReceipt) -> None:
        """Forget a sum that the coordinator has; one that it does not take is made again without some members."""
        ready = self._sum
        if ready is None or ready.ref.digest != message.digest:
            return
        if ready.sending is not None:
            ready.sending.cut()
        self._sum = None
        open_round = self._round
        is_of_open_round = open_round is not None and (open_round.asked.run, open_round.asked.round) == (
            ready.run,
            ready.round,
        )
        if message.is_accepted:
            self.sums += 1
            self.summed += len(ready.members)
            log.info("sum_taken run=%s round=%d updates=%d", ready.run, ready.round, len(ready.members))
        else:
            log.warning(
                "sum_refused run=%s round=%d without=%s reason=%s",
                *(ready.run, ready.round, ", ".join(message.without) or "all", message.reason),
            )
        if open_round is not None and is_of_open_round:
            # What is in the sum, or may not be, is not summed here again: the others may be.
            wrong = set(message.without) & set(ready.members)
            done = wrong if wrong and not message.is_accepted else set(ready.members)
            for agent in done:
                open_round.stored.pop(agent, None)
            open_round.passed_on |= done
        self._remove_unused()

    def cut(self) -> None:
        """Note that the connection to the coordinator is another one."""
        self.heard()
        self._pace.restart()
        if self._sum is not None:
            self._sum.sending = None
            self._sum.said_at = float("-inf")

    # --- of the agents ---------------------------------------------------------------------------------------------

    def manifest(self, agent: str, message: UpdateManifest) -> bool:
        """Take an update that an agent offers; False: it is for the coordinator."""
        if self._sum is not None and agent in self._sum.members and self._is_of(self._sum, message):
            return True  # it gets its receipt when the coordinator has the sum
        open_round = self._round
        if open_round is None or not self._takes(open_round, agent, message):
            return False
        before = open_round.stored.get(agent)
        if before is not None and before.blob == message.blob:
            return True
        if before is not None or open_round.is_summing:
            # Another update than the one that is here, or one that came too late for the sum.
            return self._pass_on(open_round, agent)
        try:
            return self._admit(open_round, agent, message)
        except OSError as error:
            log.warning("update_not_kept agent=%s reason=%s", agent, cause(error))
            return self._pass_on(open_round, agent)

    def chunk(self, agent: str, frame: Frame) -> bool:
        """Store chunks of an update; False: they are for the coordinator.

        Raises:
            ChunkError: They are of no update that this relay takes.
        """
        open_round = self._round
        upload = None if open_round is None else open_round.uploads.get(agent)
        if open_round is None or upload is None:
            return False
        now = self._clock()
        upload.heard_at = now
        if upload.receiving.add(frame, now):
            self._finish(open_round, agent, upload)
        elif upload.receiving.report_due(now):
            self._acknowledge(agent, upload)
        return True

    # --- timers ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Acknowledge chunks, and make or announce the sum that is due."""
        self._worker.collect()
        now = self._clock()
        if self.holds_any and now - self._heard_at >= UNHEARD_S:
            self._give_up()
        open_round = self._round
        if open_round is not None:
            for agent, upload in open_round.uploads.items():
                if upload.receiving.report_due(now):
                    self._acknowledge(agent, upload)
            if self._is_due(open_round, now):
                self._make_sum(open_round)
        if self._sum is not None and now - self._sum.said_at >= AGAIN_S:
            self._sum.said_at = now
            self._say(SumReady(run=self._sum.run, round=self._sum.round, blob=self._sum.ref))

    def pause(self) -> None:
        """End all transfers, because the relay stops; what has arrived stays on disk."""
        if self._round is not None:
            for upload in self._round.uploads.values():
                upload.receiving.incoming.close()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _takes(self, open_round: _Round, agent: str, message: UpdateManifest) -> bool:
        """Return whether an update may become a part of the sum of the open round."""
        asked = open_round.asked
        is_of_round = (message.run, message.round, message.purpose) == (asked.run, asked.round, "train")
        if not is_of_round or message.session or agent not in asked.agents or agent in open_round.passed_on:
            return False
        # Whatever else is wrong with an update, the coordinator says: it refuses it, with the reason.
        content_bytes = sum(spec.nbytes for spec in open_round.specs.values())
        has_size = content_bytes <= message.blob.size_bytes <= content_bytes + 8 + MAX_HEADER_BYTES
        has_chunks = message.blob.chunk_bytes >= LEAST_CHUNK_BYTES or chunk_count(message.blob) == 1
        return has_size and has_chunks and message.samples >= 1

    def _is_of(self, ready: _Sum, message: UpdateManifest) -> bool:
        return (ready.run, ready.round, "train") == (message.run, message.round, message.purpose)

    def _pass_on(self, open_round: _Round, agent: str) -> bool:
        """Leave the updates of an agent in this round to the coordinator; returns False."""
        open_round.passed_on.add(agent)
        stored = open_round.stored.pop(agent, None)
        if stored is not None:
            self._remove_update(open_round, stored.blob.digest)
        upload = open_round.uploads.pop(agent, None)
        if upload is not None:
            upload.receiving.incoming.discard()
            self._leave(agent)
        return False

    def _admit(self, open_round: _Round, agent: str, message: UpdateManifest) -> bool:
        """Have an agent send its update here.

        Raises:
            OSError: The disk takes no more.
        """
        digest = message.blob.digest
        # It may be here from before a restart.
        if self._has_stored(open_round, digest):
            self._note_stored(open_round, agent, message)
            return True
        upload = open_round.uploads.get(agent)
        now = self._clock()
        if upload is not None and upload.manifest.blob != message.blob:
            upload.receiving.incoming.discard()
            upload = None
        if upload is None:
            incoming = Incoming(message.blob, self._folder / agent)
            receiving = flow.Receiving(incoming, now, flow.UPLOAD_REPORT_BYTES)
            upload = open_round.uploads[agent] = _Upload(message, receiving, float("-inf"), now)
        if now - upload.granted_at >= GRANT_APART_S:
            upload.granted_at = now
            upload.receiving.restart(now)
            if upload.receiving.incoming.chunks.complete:
                self._finish(open_round, agent, upload)
            else:
                self._grant(agent, message, upload.receiving.missing)
        return True

    def _grant(self, agent: str, message: UpdateManifest, missing: Ranges) -> None:
        credit = min(MAX_CREDITS, max(1, flow.WINDOW_BYTES // message.blob.chunk_bytes))
        grant = Grant(run=message.run, digest=message.blob.digest, credits=credit, missing=missing)
        self._say(Speak(agent=agent, command=grant))

    def _acknowledge(self, agent: str, upload: _Upload) -> None:
        message = upload.manifest
        ack = Ack(run=message.run, digest=message.blob.digest, missing=upload.receiving.missing)
        self._say(Speak(agent=agent, command=ack))

    def _finish(self, open_round: _Round, agent: str, upload: _Upload) -> None:
        """Store an update that is complete, if it can be a part of the sum; else the coordinator gets it."""
        del open_round.uploads[agent]
        path = self._update_path(upload.manifest.blob.digest)
        try:
            upload.receiving.incoming.finish(path, durable=True)
            self._leave(agent)
            _check(path, open_round.specs)
        except (ChunkError, TensorsError, MessageError, OSError) as error:
            log.warning("update_passed_on agent=%s reason=%s", agent, error)
            upload.receiving.incoming.discard()
            self._pass_on(open_round, agent)
            self._remove_update(open_round, upload.manifest.blob.digest)
            return
        self._note_stored(open_round, agent, upload.manifest)

    def _note_stored(self, open_round: _Round, agent: str, manifest: UpdateManifest) -> None:
        open_round.uploads.pop(agent, None)
        open_round.stored[agent] = manifest
        open_round.moved_at = self._clock()
        log.debug("update_stored agent=%s digest=%s", agent, manifest.blob.digest[:12])

    def _has_stored(self, open_round: _Round, digest: str) -> bool:
        """Return whether an update is on disk, whole, and can be a part of the sum."""
        path = self._update_path(digest)
        try:
            if not path.is_file() or sha256_file(path) != digest:
                return False
            _check(path, open_round.specs)
        except (TensorsError, MessageError, OSError):
            return False
        return True

    def _is_due(self, open_round: _Round, now: float) -> bool:
        """Return whether the updates that are here are to be added up now."""
        if open_round.is_summing or self._sum is not None or not open_round.stored:
            return False
        missing = set(open_round.asked.agents) - open_round.stored.keys() - open_round.passed_on
        if not any(self._is_online(agent) for agent in missing):
            return True
        is_late = now - open_round.opened_at >= open_round.asked.within_s
        # An agent that offers its update, and then falls silent, holds up nobody.
        is_moving = any(now - upload.heard_at < GATHER_S for upload in open_round.uploads.values())
        return is_late or (now - open_round.moved_at >= GATHER_S and not is_moving)

    def _make_sum(self, open_round: _Round) -> None:
        """Have the worker add the updates up; of too few, each passes by itself."""
        members = dict(sorted(open_round.stored.items()))
        if len(members) < LEAST_MEMBERS:
            for agent in members:
                self._pass_on(open_round, agent)
            return
        open_round.is_summing = True
        log.info("sum_begun run=%s round=%d updates=%d", open_round.asked.run, open_round.asked.round, len(members))
        asked = open_round.asked

        def done(ref: BlobRef | None, error: BaseException | None) -> None:
            open_round.is_summing = False
            if self._round is not open_round:
                return
            if ref is None:
                log.warning("sum_not_made run=%s round=%d reason=%s", asked.run, asked.round, error)
                for agent in members:
                    self._pass_on(open_round, agent)
                return
            self._sum = _Sum(ref, asked.run, asked.round, tuple(members))

        self._worker.submit("sum", lambda: self._added_up(asked, members), done)

    def _added_up(self, asked: SiteRound, members: Mapping[str, UpdateManifest]) -> BlobRef | None:
        """Write the sum of these updates, and return what names it; None where its bits would depend on the order.

        Raises:
            OSError: An update cannot be read, or the sum not be written.
            TensorsError: The list of members is too long.
        """
        total = WeightedSum()
        for manifest in members.values():
            weight = float(manifest.samples) if asked.weighting == "samples" else 1.0
            total.add(weight, decode(mapped(self._update_path(manifest.blob.digest))))
        if not total.is_exact:
            return None
        about = {
            "run": asked.run,
            "round": str(asked.round),
            MEMBERS: members_text(tuple(_member(agent, manifest) for agent, manifest in members.items())),
        }
        data = pack(pieces(total.to_tensors(), about))
        digest = sha256_of(data)
        write_atomic(self._sum_path(digest), data)
        return BlobRef(digest=digest, size_bytes=len(data), chunk_bytes=CHUNK_BYTES)

    def _restored(self) -> _Sum | None:
        """Return the sum that an earlier process has left; None where there is none that is whole."""
        for path in sorted(self._folder.glob("*.sum")):
            digest = path.name.removesuffix(".sum")
            if not _FILE.fullmatch(path.name):
                continue
            try:
                if sha256_file(path) != digest:
                    continue
                data = mapped(path)
                _, about = inspect(unpack(data, LARGEST_SUM_BYTES))
                members = tuple(member.agent for member in members_of(about.get(MEMBERS, "")))
                ref = BlobRef(digest=digest, size_bytes=len(data), chunk_bytes=CHUNK_BYTES)
                return _Sum(ref, about["run"], int(about["round"]), members)
            except (HeadwaterError, OSError, KeyError, ValueError, ValidationError) as error:
                log.warning("sum_unreadable path=%s reason=%s", path, error)
        return None

    def _end_round(self) -> None:
        """Take no more updates; those that are on their way, and not in a sum, are not needed any more."""
        if self._round is None:
            return
        for agent, upload in self._round.uploads.items():
            upload.receiving.incoming.discard()
            self._leave(agent)
        self._round = None
        self._remove_unused()

    def _give_up(self) -> None:
        """Leave all updates to the coordinator, which has fallen silent about sums: perhaps it takes none any more.

        What is stored stays on disk, in case it asks for the same round again.
        """
        log.warning(
            "sums_given_up updates=%d: the coordinator has not spoken about sums for %.0f s", len(self.holds), UNHEARD_S
        )
        if self._round is not None:
            for upload in self._round.uploads.values():
                upload.receiving.incoming.close()
        self._round = None
        self._sum = None
        self.is_told = False

    def _remove_update(self, open_round: _Round, digest: str) -> None:
        """Remove a stored update that is no agent's any more, and that is not being added up."""
        is_other = any(manifest.blob.digest == digest for manifest in open_round.stored.values())
        if not is_other and not open_round.is_summing:
            self._update_path(digest).unlink(missing_ok=True)

    def _remove_unused(self) -> None:
        """Remove the files of updates and sums that are not needed any more."""
        kept = set[str]()
        if self._sum is not None:
            kept.add(f"{self._sum.ref.digest}.sum")
        if self._round is not None:
            kept |= {manifest.blob.digest for manifest in self._round.stored.values()}
        for path in self._folder.glob("*"):
            if path.is_file() and _FILE.fullmatch(path.name) and path.name not in kept:
                path.unlink(missing_ok=True)
        # Updates of which only a part has arrived, of agents that have not come back.
        under_way = set[str]() if self._round is None else self._round.uploads.keys()
        for path in self._folder.glob("*/*"):
            agent = path.parent.name
            if agent not in under_way and _FILE.fullmatch(path.name):
                path.unlink(missing_ok=True)
                self._leave(agent)

    def _leave(self, agent: str) -> None:
        """Remove the folder of an agent's upload, where it is empty."""
        with contextlib.suppress(OSError):
            (self._folder / agent).rmdir()

    def _update_path(self, digest: str) -> Path:
        return self._folder / digest

    def _sum_path(self, digest: str) -> Path:
        return self._folder / f"{digest}.sum"


def _member(agent: str, manifest: UpdateManifest) -> SummedUpdate:
    """Return an update as the sum names it."""
    metrics = {name: value for name, value in manifest.metrics.items() if value is not None}
    return SummedUpdate(agent=agent, digest=manifest.blob.digest, samples=manifest.samples, metrics=metrics)


def _check(path: Path, expected: Mapping[str, Spec]) -> None:
    """Return quietly where a file holds an update with these tensors, all of them finite, and no variance below 0.

    Raises:
        TensorsError: It is no container of tensors, or has others.
        MessageError: Some are not finite, or a variance is below 0.
        OSError: It cannot be read.
    """
    data = mapped(path)
    specs, _ = inspect(data)
    check_specs(specs, expected)
    tensors = decode(data)
    not_finite = first_non_finite(tensors)
    if not_finite is not None:
        raise MessageError(f"tensor '{not_finite}' holds NaN or infinity")
    for name, array in tensors.items():
        if name.endswith(".running_var") and (array < 0).any():
            raise MessageError(f"tensor '{name}' holds a variance below 0")
