"""Sums of the updates of a site: one upload in place of one for each agent.

Where the coordinator asks for it, the relay takes the updates of its agents, checks and stores them, and sends their
exact sum, which names its members. The result has the bits of single updates, because exact sums have the same bits in
whatever parts they are made (`core.exact_sum`).

An update counts once the coordinator has journaled the sum that it is in, and only then its agent gets a receipt. Until
then the agent keeps it. So nothing is lost with a relay: the agent offers its update again, here or elsewhere. What
comes after the sum, or cannot be part of it, passes to the coordinator as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from ..core.children import Worker
from ..core.errors import ChunkError, StateError, TensorsError, UpdateRejected, cause
from ..wire.blobs import flow
from ..wire.blobs.chunks import Frame, chunk_count
from ..wire.messages.down import Ack, Grant, job_key
from ..wire.messages.fields import MAX_CREDITS, BlobRef, JobKey, Ranges
from ..wire.messages.site_sums import (
    FromSite,
    OpenSite,
    SendSum,
    SiteRound,
    Speak,
    SummedUpdate,
    SumReady,
    SumReceipt,
)
from ..wire.messages.up import UpdateManifest
from ..wire.tensors import MAX_HEADER_BYTES, Spec
from .update_files import StoredSum, UpdateFiles

log = logging.getLogger(__name__)

LEAST_MEMBERS = 3
"""A sum of fewer updates is larger than they are."""

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

_LENGTH_BYTES = 8
"""The bytes before the header of a container of tensors."""


@dataclass
class _Upload:
    """An update on its way to the relay."""

    manifest: UpdateManifest
    receiving: flow.Receiving
    granted_at: float
    heard_at: float
    """When it was offered first, or its last chunk came."""


@dataclass
class _Announced:
    """A sum that the coordinator is to get."""

    sum: StoredSum
    sending: flow.Sending | None = None
    said_at: float = float("-inf")

    def has(self, agent: str, message: UpdateManifest) -> bool:
        """Return whether an update is a part of the sum, or another one of the same agent for the same round."""
        return agent in self.sum.members and job_key(message) == JobKey(self.sum.run, self.sum.round)


@dataclass
class _Round:
    """The open round, and what has come of it here."""

    terms: SiteRound
    opened_at: float
    moved_at: float
    """When an update was stored last; first, when the round was opened."""

    uploads: dict[str, _Upload] = field(default_factory=dict)
    stored: dict[str, UpdateManifest] = field(default_factory=dict)
    """Agent -> its update, which is on disk."""

    passed_on: set[str] = field(default_factory=set)
    """Agents whose updates the coordinator gets one by one."""

    is_summing: bool = False

    @cached_property
    def specs(self) -> Mapping[str, Spec]:
        """Name of a tensor of an update -> its form."""
        forms = self.terms.update.items()
        return {name: Spec(np.dtype(dtype), tuple(shape)) for name, (dtype, shape) in forms}

    def is_same_as(self, run: str, number: int) -> bool:
        """Return whether it is this round of this run."""
        return (self.terms.run, self.terms.round) == (run, number)

    def takes(self, agent: str, message: UpdateManifest) -> bool:
        """Return whether an update may become a part of the sum.

        Whatever else is wrong with an update, the coordinator says: it refuses it, with the reason.
        """
        is_of_round = job_key(message) == JobKey(self.terms.run, self.terms.round)
        is_awaited = agent in self.terms.agents and agent not in self.passed_on
        return is_of_round and is_awaited and message.samples >= 1 and self._fits(message.blob)

    def _fits(self, blob: BlobRef) -> bool:
        """Return whether an update of this round may have this size and these chunks."""
        content_bytes = sum(spec.nbytes for spec in self.specs.values())
        has_size = content_bytes <= blob.size_bytes <= content_bytes + _LENGTH_BYTES + MAX_HEADER_BYTES
        has_chunks = blob.chunk_bytes >= LEAST_CHUNK_BYTES or chunk_count(blob) == 1
        return has_size and has_chunks

    def is_moving(self, now: float) -> bool:
        """Return whether an update is on its way, or was stored not long ago.

        An agent that offers its update and then falls silent holds up nobody.
        """
        last_moves = [self.moved_at, *(upload.heard_at for upload in self.uploads.values())]
        return now - max(last_moves) < GATHER_S


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
        self._files = UpdateFiles(folder)
        self._say = say
        self._send_frame = send_frame
        self._is_online = is_online
        self._worker = worker
        self._clock = clock
        self._round: _Round | None = None
        self._pace = flow.Pace(flow.WINDOW_BYTES)
        self._heard_at = clock()
        left = self._files.find_sum()
        self._announced = None if left is None else _Announced(left)
        self.is_told = False
        """Whether the coordinator has said what is to be summed, and has not fallen silent since."""

        self.sums = 0
        """Sums that the coordinator has taken since the start."""

        self.summed = 0
        """Updates in them."""

    @property
    def holds(self) -> tuple[str, ...]:
        """The agents whose updates are here, or on their way here, and not at the coordinator."""
        agents = set[str]()
        if self._announced is not None:
            agents.update(self._announced.sum.members)
        if self._round is not None:
            agents |= self._round.stored.keys() | self._round.uploads.keys()
        return tuple(sorted(agents))

    @property
    def holds_any(self) -> bool:
        """Whether there is anything here for which the coordinator has to answer."""
        return self._announced is not None or self._round is not None

    # --- of the coordinator ----------------------------------------------------------------------------------------

    def heard(self) -> None:
        """Note that the coordinator has spoken about sums: it takes them."""
        self._heard_at = self._clock()

    def opened(self, message: OpenSite) -> None:
        """Take updates of another round from now on, or of none."""
        self.is_told = True
        terms = message.round
        if terms is None:
            self._end_round()
            self._remove_unneeded()
            return
        before = self._round
        if before is not None and before.is_same_as(terms.run, terms.round):
            before.terms = terms
            return
        if before is not None:
            self._end_round()
        now = self._clock()
        self._round = _Round(terms, now, now)
        # A sum of an earlier round is of no use any more.
        if self._announced is not None and not self._is_of_open_round(self._announced.sum):
            self._forget_sum()
        log.info("round_taken run=%s round=%d agents=%d", terms.run, terms.round, len(terms.agents))

    def send(self, message: SendSum) -> None:
        """Send the chunks of the sum that the coordinator lacks.

        Raises:
            ChunkError: Ranges outside the sum.
        """
        announced = self._announced
        if announced is None or announced.sum.ref.digest != message.digest:
            return
        now = self._clock()
        announced.said_at = now
        if announced.sending is None:
            try:
                blob = self._files.open_sum(announced.sum.ref)
            except StateError as error:
                # Its updates are here still and are added up again, or come again from their agents.
                log.warning("sum_lost run=%s round=%d reason=%s", announced.sum.run, announced.sum.round, error)
                self._forget_sum()
                return
            announced.sending = flow.Sending(blob, self._pace)
        announced.sending.lacks(message.missing, now)
        for frame in announced.sending.due(now):
            self._send_frame(frame)

    def receipt(self, message: SumReceipt) -> None:
        """Forget a sum that the coordinator has; one that it does not take is made again without some members."""
        announced = self._announced
        if announced is None or announced.sum.ref.digest != message.digest:
            return
        self._forget_sum()
        total = announced.sum
        wrong = set(message.without) & set(total.members)
        if message.is_accepted:
            self.sums += 1
            self.summed += len(total.members)
            log.info("sum_taken run=%s round=%d updates=%d", total.run, total.round, len(total.members))
        else:
            names = ", ".join(sorted(wrong)) or "all"
            log.warning(
                "sum_refused run=%s round=%d without=%s reason=%s", total.run, total.round, names, message.reason
            )
        # What is in the sum, or may not be, is not summed here again: the others may be.
        is_made_again = bool(wrong) and not message.is_accepted
        if self._round is not None and self._is_of_open_round(total):
            self._round.passed_on |= wrong if is_made_again else set(total.members)
            for agent in self._round.passed_on:
                self._round.stored.pop(agent, None)
        self._remove_unneeded()

    def cut(self) -> None:
        """Note that the connection to the coordinator is another one."""
        self.heard()
        self._pace.restart()
        if self._announced is not None:
            self._announced.sending = None
            self._announced.said_at = float("-inf")

    # --- of the agents ---------------------------------------------------------------------------------------------

    def manifest(self, agent: str, message: UpdateManifest) -> bool:
        """Take an update that an agent offers; False: it is for the coordinator."""
        # 1. An agent of the announced sum gets its receipt when the coordinator has the sum.
        if self._announced is not None and self._announced.has(agent, message):
            return True
        open_round = self._round
        if open_round is None or not open_round.takes(agent, message):
            return False
        # 2. Of an agent whose update is here, another one passes; so does one that came too late for the sum.
        stored = open_round.stored.get(agent)
        if stored is None and not open_round.is_summing:
            return self._try_to_admit(open_round, agent, message)
        if stored is not None and stored.blob == message.blob:
            return True
        self._pass_on(open_round, agent)
        return False

    def chunk(self, agent: str, frame: Frame) -> bool:
        """Store chunks of an update; False: they are for the coordinator.

        Raises:
            ChunkError: They are of no update that this relay takes.
        """
        open_round = self._round
        if open_round is None or agent not in open_round.uploads:
            return False
        upload = open_round.uploads[agent]
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
        if self._round is not None:
            self._move_round(self._round, now)
        announced = self._announced
        if announced is not None and now - announced.said_at >= AGAIN_S:
            announced.said_at = now
            self._say(SumReady(run=announced.sum.run, round=announced.sum.round, blob=announced.sum.ref))

    def pause(self) -> None:
        """End all transfers, because the relay stops; what has arrived stays on disk."""
        if self._round is not None:
            for upload in self._round.uploads.values():
                upload.receiving.incoming.close()

    # --- updates ---------------------------------------------------------------------------------------------------

    def _try_to_admit(self, open_round: _Round, agent: str, message: UpdateManifest) -> bool:
        """Have an agent send its update here; False where the disk takes no more."""
        try:
            self._admit(open_round, agent, message)
        except OSError as error:
            log.warning("update_not_kept agent=%s reason=%s", agent, cause(error))
            self._pass_on(open_round, agent)
            return False
        return True

    def _admit(self, open_round: _Round, agent: str, message: UpdateManifest) -> None:
        """Have an agent send what is missing of its update.

        Raises:
            OSError: The disk takes no more.
        """
        # 1. It may be here from before a restart.
        if self._files.has(message.blob.digest, open_round.specs):
            self._note_stored(open_round, agent, message)
            return
        # 2. Begin, also where the agent has offered another update before.
        now = self._clock()
        upload = open_round.uploads.get(agent)
        if upload is not None and upload.manifest.blob != message.blob:
            self._files.discard(agent, upload.receiving.incoming)
            upload = None
        if upload is None:
            incoming = self._files.receive(agent, message.blob)
            receiving = flow.Receiving(incoming, now, flow.UPLOAD_REPORT_BYTES)
            upload = open_round.uploads[agent] = _Upload(message, receiving, float("-inf"), now)
        # 3. Grant what is missing.
        if now - upload.granted_at < GRANT_APART_S:
            return
        upload.granted_at = now
        upload.receiving.restart(now)
        if upload.receiving.incoming.chunks.complete:
            self._finish(open_round, agent, upload)
        else:
            self._grant(agent, message, upload.receiving.missing)

    def _pass_on(self, open_round: _Round, agent: str) -> None:
        """Leave the updates of an agent in this round to the coordinator."""
        open_round.passed_on.add(agent)
        stored = open_round.stored.pop(agent, None)
        if stored is not None:
            self._remove_update(open_round, stored.blob.digest)
        upload = open_round.uploads.pop(agent, None)
        if upload is not None:
            self._files.discard(agent, upload.receiving.incoming)

    def _grant(self, agent: str, message: UpdateManifest, missing: Ranges) -> None:
        """Have the coordinator say to an agent that it may send these chunks."""
        chunks = flow.WINDOW_BYTES // message.blob.chunk_bytes
        credit = min(MAX_CREDITS, max(1, chunks))
        grant = Grant(run=message.run, digest=message.blob.digest, credits=credit, missing=missing)
        self._say(Speak(agent=agent, command=grant))

    def _acknowledge(self, agent: str, upload: _Upload) -> None:
        """Have the coordinator say to an agent which chunks are missing still."""
        message = upload.manifest
        ack = Ack(run=message.run, digest=message.blob.digest, missing=upload.receiving.missing)
        self._say(Speak(agent=agent, command=ack))

    def _finish(self, open_round: _Round, agent: str, upload: _Upload) -> None:
        """Store an update that is complete, if it can be a part of the sum; else the coordinator gets it."""
        del open_round.uploads[agent]
        try:
            self._files.store(agent, upload.receiving.incoming, open_round.specs)
        except (ChunkError, TensorsError, UpdateRejected, OSError) as error:
            log.warning("update_passed_on agent=%s reason=%s", agent, error)
            self._pass_on(open_round, agent)
            self._remove_update(open_round, upload.manifest.blob.digest)
            return
        self._note_stored(open_round, agent, upload.manifest)

    def _note_stored(self, open_round: _Round, agent: str, manifest: UpdateManifest) -> None:
        """Note that an agent's update is here."""
        open_round.uploads.pop(agent, None)
        open_round.stored[agent] = manifest
        open_round.moved_at = self._clock()
        log.debug("update_stored agent=%s digest=%s", agent, manifest.blob.digest[:12])

    # --- sums ------------------------------------------------------------------------------------------------------

    def _move_round(self, open_round: _Round, now: float) -> None:
        """Acknowledge chunks of the open round, and make its sum where that is due."""
        for agent, upload in open_round.uploads.items():
            if upload.receiving.report_due(now):
                self._acknowledge(agent, upload)
        if self._is_due(open_round, now):
            self._make_sum(open_round)

    def _is_due(self, open_round: _Round, now: float) -> bool:
        """Return whether the updates that are here are to be added up now."""
        if open_round.is_summing or self._announced is not None or not open_round.stored:
            return False
        missing = set(open_round.terms.agents) - open_round.stored.keys() - open_round.passed_on
        if not any(self._is_online(agent) for agent in missing):
            return True
        is_late = now - open_round.opened_at >= open_round.terms.within_s
        return is_late or not open_round.is_moving(now)

    def _make_sum(self, open_round: _Round) -> None:
        """Have the worker add the updates up; of too few, each passes by itself."""
        terms = open_round.terms
        members = tuple(_member(agent, open_round.stored[agent]) for agent in sorted(open_round.stored))
        if len(members) < LEAST_MEMBERS:
            self._pass_all_on(open_round, members)
            return
        open_round.is_summing = True
        log.info("sum_begun run=%s round=%d updates=%d", terms.run, terms.round, len(members))

        def done(total: StoredSum | None, error: BaseException | None) -> None:
            open_round.is_summing = False
            if self._round is not open_round:
                return
            if total is not None:
                self._announced = _Announced(total)
                return
            reason = "its bits would depend on the order" if error is None else error
            log.warning("sum_not_made run=%s round=%d reason=%s", terms.run, terms.round, reason)
            self._pass_all_on(open_round, members)

        self._worker.submit("sum", lambda: self._files.add_up(terms, members), done)

    def _pass_all_on(self, open_round: _Round, members: tuple[SummedUpdate, ...]) -> None:
        """Leave these updates to the coordinator, one by one."""
        for member in members:
            self._pass_on(open_round, member.agent)

    # --- ends ------------------------------------------------------------------------------------------------------

    def _is_of_open_round(self, total: StoredSum) -> bool:
        return self._round is not None and self._round.is_same_as(total.run, total.round)

    def _end_round(self) -> None:
        """Take no more updates; those that are on their way, and not in a sum, are not needed any more."""
        if self._round is None:
            return
        for agent, upload in self._round.uploads.items():
            self._files.discard(agent, upload.receiving.incoming)
        self._round = None
        self._remove_unneeded()

    def _give_up(self) -> None:
        """Leave all updates to the coordinator, which has fallen silent about sums: perhaps it takes none any more.

        What is stored stays on disk, in case it asks for the same round again.
        """
        log.warning(
            "sums_given_up updates=%d: the coordinator has not spoken about sums for %.0f s", len(self.holds), UNHEARD_S
        )
        self.pause()
        self._round = None
        self._forget_sum()
        self.is_told = False

    def _forget_sum(self) -> None:
        """Announce and send the sum no more; what of it is under way leaves its room to the next sum."""
        if self._announced is not None and self._announced.sending is not None:
            self._announced.sending.cut()
        self._announced = None

    def _remove_update(self, open_round: _Round, digest: str) -> None:
        """Remove a stored update that is no agent's any more, and that is not being added up."""
        is_of_another = any(manifest.blob.digest == digest for manifest in open_round.stored.values())
        if not is_of_another and not open_round.is_summing:
            self._files.remove(digest)

    def _remove_unneeded(self) -> None:
        """Remove the files of updates and sums that are not needed any more."""
        total = None if self._announced is None else self._announced.sum
        if self._round is None:
            self._files.keep_only((), total, ())
            return
        digests = (manifest.blob.digest for manifest in self._round.stored.values())
        self._files.keep_only(digests, total, self._round.uploads.keys())


def _member(agent: str, manifest: UpdateManifest) -> SummedUpdate:
    """Return an update as the sum names it."""
    metrics = {name: value for name, value in manifest.metrics.items() if value is not None}
    return SummedUpdate(agent=agent, digest=manifest.blob.digest, samples=manifest.samples, metrics=metrics)
