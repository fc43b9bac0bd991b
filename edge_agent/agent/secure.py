"""A device's part in secure sums: keys, shares, its masked update, and shares of others, one attempt after the other.

The secrets of an attempt are in memory alone: an agent that is restarted has dropped out of it.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import numpy as np

from ..core.errors import SumRefused, UpdateRejected
from ..core.storage import read_json, sha256_of, write_json
from ..core.task import Tensors
from ..privacy.secure_sum import tensors as layout
from ..privacy.secure_sum.device import Participant
from ..privacy.secure_sum.keys import SHARE_BYTES, Entropy
from ..wire.messages.down import Job
from ..wire.messages.fields import run_name
from ..wire.tensors import pieces, specs_of

SUMS_FILE = "sums.json"
"""In the state folder: SHA-256 of what an update was trained from -> that of the names of the clients in its sum."""

MOST_SUMS = 5000
"""Sums that the file holds, the newest: some 700 kB."""


class SecureSums:
    """The sum that this device takes part in now; a new attempt replaces the one before."""

    def __init__(self, agent: str, folder: Path, entropy: Entropy = secrets.token_bytes) -> None:
        """``folder``: the state folder, which has the sums of all runs."""
        self._agent = agent
        self._path = folder / SUMS_FILE
        self._entropy = entropy
        self._attempt: tuple[bytes, Participant] | None = None
        self._origin = ""
        """Digest of what the masked update was trained from; empty: none was masked in this attempt."""

    def begin(self, job: Job) -> Tensors:
        """Return the public keys for the attempt of ``job``."""
        context = _context(job)
        if self._attempt is None or self._attempt[0] != context:
            self._attempt = (context, Participant(self._agent, context, self._entropy))
            self._origin = ""
        return {layout.KEYS: layout.keys_as_bytes(self._attempt[1].keys())}

    def shares(self, job: Job, received: Tensors) -> Tensors:
        """Return shares of its secrets, encrypted for each client whose keys were received.

        Raises:
            UpdateRejected: the agent was restarted since it sent its keys.
            SumRefused: as `Participant.shares`.
            CodecError: what was received is not of that form.
        """
        participant = self.of(job)
        members = layout.members_of(received)
        rows = layout.taken(received, layout.KEYS, np.uint8, (len(members), layout.KEY_BYTES))
        sealed = participant.shares({member: layout.keys_of(row) for member, row in zip(members, rows, strict=True)})
        return {layout.SHARES: layout.table(sealed, members, layout.SEALED_BYTES)}

    def masked(self, job: Job, received: Tensors, update: Tensors, weight: float, origin: str) -> Tensors:
        """Return the update under masks; only those can be removed whose clients' shares were received.

        ``origin``: digest of what the update was trained from, see `origin_of`.

        Raises:
            UpdateRejected: the agent was restarted since it sent its keys.
            TrainingFailed: a number is too large for the sum.
            SumRefused: as `Participant.receive` and `Participant.masked`; SharesWrong where others' shares do not open.
            CodecError: what was received is not of that form.
        """
        participant = self.of(job)
        count = len(participant.clients)
        sharers = layout.taken(received, layout.SHARERS, np.bool_, (count,))
        rows = layout.taken(received, layout.SHARES, np.uint8, (count, layout.SEALED_BYTES))
        of_others = {}
        for member, has_shared, row in zip(participant.clients, sharers, rows, strict=True):
            if has_shared and member != self._agent:
                of_others[member] = row.tobytes()
        participant.receive(of_others)
        integers = layout.as_integers(update, specs_of(update), weight, count)
        masked = participant.masked(integers).view(np.int64)
        self._origin = origin
        return {layout.MASKED: masked}

    def unmask(self, job: Job, received: Tensors) -> Tensors:
        """Return for each client a share of its own mask where its update was delivered, else of its key.

        Training that begins again, in this run or another, has the same updates: of two sums over different clients
        the difference would be single updates. So whose sum it is, is noted on disk before anything is revealed.

        Raises:
            UpdateRejected: the agent was restarted since it sent its keys.
            SumRefused: as `Participant.unmask`, nothing was masked, or the same training was in a sum of other
                clients before.
            StateError: the note is damaged.
            CodecError: what was received is not of that form.
        """
        participant = self.of(job)
        delivered = layout.taken(received, layout.DELIVERED, np.bool_, (len(participant.clients),))
        terms = [member for member, has_delivered in zip(participant.clients, delivered, strict=True) if has_delivered]
        if not self._origin:
            raise SumRefused("no update was masked here, so nobody knows of what the sum is", is_public=True)
        answer = participant.unmask(terms)
        _note_sum(self._path, self._origin, terms)
        return {layout.REVEALED: layout.table(answer, participant.clients, SHARE_BYTES)}

    def of(self, job: Job) -> Participant:
        """Return this device's secrets for the attempt of ``job``.

        Raises:
            UpdateRejected: the agent was restarted since it sent its keys.
        """
        if self._attempt is None or self._attempt[0] != _context(job):
            raise UpdateRejected(
                "the keys of this secure sum are gone, because the agent was restarted; it takes part in the next one",
                is_public=True,
            )
        return self._attempt[1]


def origin_of(job: Job, received: Tensors) -> str:
    """Return the digest of what decides an update, save for what is random: model, task, method and its parameters.

    Run, round and seed are no part of it: where all samples are one batch, they change nothing but the last bits.
    """
    about = [job.task.model_dump(mode="json"), job.method, job.params]
    if job.bundle is not None:  # a device without torch has the encoder in it
        about.append(job.bundle.digest)
    training = json.dumps(about, sort_keys=True)
    return sha256_of(training.encode(), *pieces(received))


def _note_sum(path: Path, origin: str, terms: list[str]) -> None:
    """Note of which clients the sum of updates of that origin is.

    Raises:
        SumRefused: it was of others before.
        StateError: the file is damaged.
    """
    sums = dict(read_json(path) or {})
    digest = sha256_of("\n".join(terms).encode())
    if sums.get(origin, digest) != digest:
        raise SumRefused(
            "the masks of this training were taken off a sum of other devices before, in this run or another; the "
            "difference of two sums would bare single updates; start a run with another seed",
            is_public=True,
        )
    if origin not in sums:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dict([*sums.items(), (origin, digest)][-MOST_SUMS:]))


def _context(job: Job) -> bytes:
    """Return what the secrets are for, and nothing else."""
    return layout.context_of(run_name(job.run), job.round, job.session)
